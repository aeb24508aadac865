"""A directory for tests that release logs."""

from __future__ import annotations

from pathlib import Path

import pytest
from agent.released_logs import punch_or_skip


@pytest.fixture
def punchable(tmp_path: Path) -> Path:
    """A directory whose file system can punch holes."""
    probe = tmp_path / "probe"
    probe.write_bytes(b"x" * 65_536)
    punch_or_skip(probe, 4096, 8192)
    return tmp_path

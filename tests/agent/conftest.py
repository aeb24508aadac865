"""A directory for tests that release logs, and the end of the disks that tests of the spool write to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from agent.released_logs import punch_or_skip
from agent.spool_samples import remove_disks


@pytest.fixture
def punchable(tmp_path: Path) -> Path:
    """A directory whose file system can punch holes."""
    probe = tmp_path / "probe"
    probe.write_bytes(b"x" * 65_536)
    punch_or_skip(probe, 4096, 8192)
    return tmp_path


@pytest.fixture(autouse=True)
def _disks_end_with_their_test() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    yield
    remove_disks()

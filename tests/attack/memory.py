"""How much memory something takes at its peak, as the kernel counts it."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_STATUS: Final = Path("/proc/self/status")


@contextmanager
def memory_below(megabytes: int) -> Generator[None]:
    """Fails if this process grows by so much inside. *Source:* proc(5): VmRSS, VmHWM, clear_refs."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    before = _kilobytes("VmRSS")
    yield
    assert (_kilobytes("VmHWM") - before) / 1024 < megabytes


def _kilobytes(what: str) -> int:
    found = re.search(rf"^{what}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])

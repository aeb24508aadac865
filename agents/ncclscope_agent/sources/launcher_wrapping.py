"""Takes off what launchers wrap around whole lines, where it says more than who printed them.

Container runtimes (CRI: containerd, CRI-O) put time, stream and `F` or `P` in front, and cut long lines into `P`
parts and a last `F` part: these are joined, since the runtime says that they belong together. Ray leaves out lines
that differ in numbers only and says `[repeated 7x across cluster]` behind one of them: that one is read, the
others are counted, for nothing else is known of them.

*Source:* Kubernetes CRI logging format (`kubelet/kuberuntime/logs`); Ray `python/ray/_private/ray_logging`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_CRI: Final = re.compile(
    rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:\d\d) (stdout|stderr) ([FP])(?::[\w:]{0,20})? "
)
_REPEATED: Final = re.compile(
    rb"(?:\x1b\[\d{1,3}m)? ?\[repeated (\d{1,9})x across cluster\](?:\x1b\[\d{1,3}m)?"
    rb"(?: \(Ray deduplicates logs by default\.[^\n]{0,300}\))?(?:\x1b\[\d{1,3}m)?\s*\Z"
)


@dataclass(frozen=True, slots=True)
class Unwrapped:
    """A line without its wrapping."""

    text: bytes
    left_out: int = 0
    """Lines like it that Ray did not print."""
    is_part: bool = False
    """More of the line is to come; `text` is empty."""


class Unwrapper:
    """Unwraps the lines of one log; keeps the parts of one line per stream, `max_line_bytes` of each."""

    def __init__(self, max_line_bytes: int) -> None:
        self._max_line_bytes = max_line_bytes
        self._parts: dict[bytes, bytes] = {}

    def unwrap(self, text: bytes) -> Unwrapped | None:
        """The line without its wrapping; None where it has none."""
        if text[:2].isdigit() and (found := _CRI.match(text)) is not None:
            return self._unwrap_cri(found, text[found.end() :])
        if b"x across cluster]" in text and (found := _REPEATED.search(text)) is not None:
            return Unwrapped(text[: found.start()], left_out=int(found[1]))
        return None

    def _unwrap_cri(self, found: re.Match[bytes], rest: bytes) -> Unwrapped:
        stream: bytes = found[1]
        line = (self._parts.pop(stream, b"") + rest)[: self._max_line_bytes + 1]
        if found[2] == b"F":
            return Unwrapped(line)
        self._parts[stream] = line
        return Unwrapped(b"", is_part=True)

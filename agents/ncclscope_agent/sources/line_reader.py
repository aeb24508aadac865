"""What readers of files that grow by lines have in common: where they stand."""

from __future__ import annotations

from ncclscope_agent.sources.line_cutter import LineCutter
from ncclscope_wire.records import Source


class LineReader:
    """The place of a reader in its file; what the lines say is its subclass's.

    `begin` and `line` say where in the file the first byte stands, for resuming: bytes and physical lines in front of
    it. A line longer than `max_line_bytes` is not kept (`line_cutter.py`).
    """

    def __init__(self, source: Source, *, begin: int, line: int, max_line_bytes: int) -> None:
        self.source = source
        self._position = begin
        self._line = line
        self._max_line_bytes = max_line_bytes
        self._cutter = LineCutter(max_line_bytes)

    @property
    def position(self) -> int:
        """Bytes of the file that were read to the end of their line."""
        return self._position

    @property
    def line(self) -> int:
        """Physical lines of the file that were read."""
        return self._line

    @property
    def unfinished_bytes(self) -> int:
        """Bytes behind `position` that were fed and wait for the end of their line."""
        return self._cutter.unfinished_bytes

    def tear(self) -> None:
        """Says, before anything is read, that `begin` lies in a hole: the first line is torn."""
        self._cutter.tear()

    def feed_zeros(self, count: int) -> None:
        """The same as reading so many zeros, in no time: a hole in the file."""
        self._cutter.feed_zeros(count)

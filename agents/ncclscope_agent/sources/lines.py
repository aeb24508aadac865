"""Physical lines of a file that grows: cut out of its bytes, and where their reader stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ncclscope_wire.records import Source

HOLE: Final = bytes(4096)
"""As many zeros in a row are no text: bytes that were released (`release.py`), or that never were written. The
blocks of file systems are no smaller."""


@dataclass(frozen=True, slots=True)
class CutLines:
    """Physical lines without their newlines, in order."""

    lines: list[bytes]
    first_line_excess: int
    """Bytes that the first line had in the file beyond those given here, if it was too long to be kept; less
    than 0 if it was torn by a hole and short."""


class LineCutter:
    """Keeps the begin of a line until its end comes.

    Of a line longer than `max_line_bytes` only the length is kept; in its place comes a line of blanks that is
    too long as well, so that whoever reads it sees that, however the bytes were cut. Where a `HOLE` stood in it,
    it is of zeros.
    """

    def __init__(self, max_line_bytes: int) -> None:
        self._max_line_bytes = max_line_bytes
        self._passes_zeros = False
        self._front_zeros = 0
        self._pending = bytearray()
        self._overlong_bytes = 0
        self._has_hole = False
        self._last_zeros = 0

    @property
    def unfinished_bytes(self) -> int:
        """Bytes that were fed and wait for the end of their line."""
        return self._front_zeros + self._line_bytes

    @property
    def _line_bytes(self) -> int:
        return len(self._pending) + self._overlong_bytes

    def ingest_bytes(self, data: bytes) -> CutLines:
        """The lines that these bytes finish."""
        lines = self._behind_front_zeros(data).split(b"\n")
        rest = lines.pop()
        if not lines:
            self._keep(rest)
            return CutLines([], 0)
        length = self._line_bytes + len(lines[0])
        if length > self._max_line_bytes or self._has_hole:
            self._look_for_hole(bytes(self._pending) + lines[0])
            lines[0] = self._stand_in()
        elif self._pending:
            lines[0] = bytes(self._pending) + lines[0]
        excess = self._front_zeros + length - len(lines[0])
        self._clear()
        self._keep(rest)
        return CutLines(lines, excess)

    def whole_lines(self, data: bytes) -> bytes:
        """The lines that these bytes finish in one piece, each with its newline; none if one is too long."""
        end = data.rfind(b"\n") + 1
        if not end or self._overlong_bytes or self._has_hole:
            return b""
        return bytes(self._pending) + data[:end] if self._pending else data[:end]

    def pass_over(self, data: bytes) -> None:
        """The same as `ingest_bytes`, if all is read of their `whole_lines`, and these are not too long."""
        self._clear()
        self._keep(data[data.rfind(b"\n") + 1 :])

    def ingest_zeros(self, count: int) -> None:
        """The same as `ingest_bytes` of `count` zeros, in constant time: a hole in the file."""
        if self._passes_zeros:
            self._front_zeros += count
            return
        if self._line_bytes + count <= self._max_line_bytes:
            self._keep(bytes(count))
            return
        self._look_for_hole(bytes(self._pending) + bytes(min(count, len(HOLE))))
        self._overlong_bytes = self._line_bytes + count
        self._pending.clear()

    def pass_front_zeros(self) -> None:
        """Says that zeros in front of the first line belong to none."""
        self._passes_zeros = True

    def tear(self) -> None:
        """Says that bytes in front of the first ones are a hole: what they end is no whole line."""
        self._has_hole = True

    def drain_unfinished(self) -> bytes | None:
        """The last line, if the file does not end it; None if nothing waits."""
        if not self._line_bytes:
            self._clear()
            return None
        line = self._stand_in() if self._overlong_bytes or self._has_hole else bytes(self._pending)
        self._clear()
        return line

    def _behind_front_zeros(self, data: bytes) -> bytes:
        if not self._passes_zeros:
            return data
        rest = data.lstrip(b"\0")
        self._front_zeros += len(data) - len(rest)
        self._passes_zeros = not rest
        return rest

    def _keep(self, data: bytes) -> None:
        if self._line_bytes + len(data) > self._max_line_bytes:
            self._look_for_hole(bytes(self._pending) + data)
            self._overlong_bytes = self._line_bytes + len(data)
            self._pending.clear()
        else:
            self._pending += data

    def _look_for_hole(self, data: bytes) -> None:
        """Looks through the next bytes of a line that is too long to be kept."""
        if self._has_hole:
            return
        self._has_hole = HOLE in bytes(self._last_zeros) + data
        rest = len(data.rstrip(b"\0"))
        self._last_zeros = min(len(HOLE), len(data) - rest + (0 if rest else self._last_zeros))

    def _stand_in(self) -> bytes:
        if self._has_hole:
            return bytes(max(self._max_line_bytes + 1, len(HOLE)))
        return b" " * (self._max_line_bytes + 1)

    def _clear(self) -> None:
        self._pending.clear()
        self._overlong_bytes = self._last_zeros = self._front_zeros = 0
        self._has_hole = False


class LineReader:
    """The place of a reader in its file; what the lines say is its subclass's.

    `begin` and `line` say where in the file the first byte stands, for resuming: bytes and physical lines in front of
    it. A line longer than `max_line_bytes` is not kept.
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

    def pass_front_zeros(self) -> None:
        """Says, before anything is read, that a line begins behind the zeros that come first."""
        self._cutter.pass_front_zeros()

    def tear(self) -> None:
        """Says, before anything is read, that `begin` lies in a hole: the first line is torn."""
        self._cutter.tear()

    def ingest_zeros(self, count: int) -> None:
        """The same as reading `count` zeros, in constant time: a hole in the file."""
        self._cutter.ingest_zeros(count)

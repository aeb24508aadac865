"""Cuts bytes that come in any pieces into physical lines, with bounded memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CutLines:
    """Physical lines without their newlines, in order."""

    lines: list[bytes]
    first_line_excess: int
    """Bytes that the first line had in the file beyond those given here, where it was too long to be kept."""


class LineCutter:
    """Keeps the begin of a line until its end comes.

    Of a line longer than `max_line_bytes` only the length is kept; in its place comes a line of zeros that is
    too long as well, so that whoever reads it sees that, however the bytes were cut.
    """

    def __init__(self, max_line_bytes: int) -> None:
        self._max_line_bytes = max_line_bytes
        self._pending = bytearray()
        self._overlong_bytes = 0

    @property
    def unfinished_bytes(self) -> int:
        """Bytes that were fed and wait for the end of their line."""
        return len(self._pending) + self._overlong_bytes

    def feed(self, data: bytes) -> CutLines:
        """The lines that these bytes finish."""
        end = data.rfind(b"\n")
        if end < 0:
            self._keep(data)
            return CutLines([], 0)
        lines = data[:end].split(b"\n")
        length = self.unfinished_bytes + len(lines[0])
        if length > self._max_line_bytes:
            lines[0] = self._stand_in()
        elif self._pending:
            lines[0] = bytes(self._pending) + lines[0]
        self._clear()
        self._keep(data[end + 1 :])
        return CutLines(lines, length - len(lines[0]))

    def take_unfinished(self) -> bytes | None:
        """The line that has no end, where the file has none; None where nothing waits."""
        if not self.unfinished_bytes:
            return None
        line = self._stand_in() if self._overlong_bytes else bytes(self._pending)
        self._clear()
        return line

    def _keep(self, data: bytes) -> None:
        if self.unfinished_bytes + len(data) > self._max_line_bytes:
            self._overlong_bytes = self.unfinished_bytes + len(data)
            self._pending.clear()
        else:
            self._pending += data

    def _stand_in(self) -> bytes:
        return bytes(self._max_line_bytes + 1)

    def _clear(self) -> None:
        self._pending.clear()
        self._overlong_bytes = 0

"""Operation lines that recur in the order of the iteration before them, read thousands at a time.

A step of a training issues the operations of the step before: then all bytes of its lines are known before they are
read, but for stamps and opCounts. So the lines of one iteration are kept as one text, and what comes is compared with
it as a whole; stamps and opCounts are taken from their places. What is not as expected, to the byte, is not read here:
its reader does so line by line, and here it is learned how the operations recur.

    LEARNING ──the latest lines came before──▶ EXPECTING ──other lines──▶ the iteration has them: EXPECTING
        ▲                                                                 it has not, or the second time: LEARNING
        └─────────── RESTING ◀──nothing recurs────────────────────────── the third time: RESTING

Memory: `MOST_BYTES` of text for each log that recurs, as much again for which of it is fixed, and about 5 bytes for
each of `MOST_LINES` lines.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_agent.sources.nccl_log.known_lines import KnownLines
from ncclscope_agent.sources.text_columns import HEX_BYTES, HEX_DIGITS

MOST_BYTES: Final = 1 << 20
"""Of the text of an iteration: about 4,500 lines with time stamps."""
MOST_LINES: Final = 8192
"""In which an iteration is looked for: more of them are more than `MOST_BYTES`."""
LEAST_LINES: Final = 64
"""Fewer lines at a time are read faster one by one."""
LEAST_LINE_BYTES: Final = 64
"""No operation line is shorter."""

_LEAST_BYTES: Final = LEAST_LINE_BYTES * LEAST_LINES
_FEW_TURNS_LINES: Final = 1024
"""Short iterations are repeated up to this many lines: each pass over the text costs a few steps."""
_MOST_CANDIDATES: Final = 64
"""Places at most at which an earlier occurrence of the lines is looked for."""
_COMPARED_AT_ONCE: Final = 4
"""Number of latest templates that select these places."""
_PATIENCE: Final = 2
"""So often in a row the lines may be others before the log is left alone for a while."""
_LONGEST_REST: Final = 64
"""Stretches of a log that does not recur, between two attempts."""
_MARK: Final = b": opCount "
_FIXED: Final = b"\xff"


@dataclass(frozen=True, slots=True)
class RecurringRows:
    """Templates, stamps and opCounts of a run of lines, in order."""

    templates: bytes
    """The template of each line, as uint32."""
    stamps: bytes
    """The stamps of all lines, one behind the other; nothing if they have none."""
    op_counts: bytes
    """The opCount of each line, as 16 hexadecimal digits."""

    @property
    def lines(self) -> int:
        """Number of lines."""
        return len(self.op_counts) // HEX_DIGITS


class Recurrence:
    """Expects the lines of one log to recur; `known` is what its reader knows by bytes."""

    def __init__(self, known: KnownLines) -> None:
        self._known = known
        self._history = array("I")
        """Templates of the latest lines, without a gap."""
        self._digits = bytearray()
        """Number of digits of the opCount of each of them."""
        self._iteration: _Iteration | None = None
        self._failures = 0
        self._rest = 0

    @property
    def is_expecting(self) -> bool:
        """Whether it is known what comes next."""
        return self._iteration is not None and not self._rest

    def rows(self, lines: bytes, stamp_length: int) -> RecurringRows | None:
        """The rows of these whole lines if they are the expected ones; else None, and nothing has changed.

        That is what is read of them line by line, too: none of them has a stamp or opCount with anything in it that
        would make it another line.
        """
        iteration = self._iteration
        if iteration is None or not self.is_expecting or len(lines) < _LEAST_BYTES:
            return None
        if iteration.stamp_length != stamp_length or iteration.era != self._known.era:
            self._iteration = None
            return None
        found = iteration.read(lines)
        self._failures = 0 if found is not None else self._failures + 1
        return found

    def learn(
        self, templates: array[int], op_counts: Sequence[bytes], stamp_length: int, *, has_others: bool = False
    ) -> None:
        """Takes note of the operations of a stretch that was read line by line. `has_others`: so were other lines."""
        if self._is_resting():
            return
        lengths = list(map(len, op_counts))
        digits = bytes(lengths) if max(lengths, default=0) <= HEX_DIGITS else b""
        if len(digits) < LEAST_LINES:
            self._forget_history()
        elif self._iteration is not None and self._failures < 2 and self._iteration.find(templates, digits):
            return
        elif has_others:
            self._forget_history()
        elif self._iteration is not None and self._failures > _PATIENCE:
            self._give_up()
        else:
            self._look_for_iteration(templates, digits, stamp_length)

    def _look_for_iteration(self, templates: array[int], digits: bytes, stamp_length: int) -> None:
        self._iteration = None
        self._history += templates
        self._digits += digits
        distance = distance_of_last(np.frombuffer(self._history, dtype=np.uint32), len(templates))
        if distance:
            self._iteration = self._made(distance, stamp_length)
        if self._iteration is not None:
            self._forget_history()
        elif distance or len(self._history) > MOST_LINES:
            self._give_up()

    def _forget_history(self) -> None:
        """Forgets the latest lines: the next ones do not follow them."""
        if self._history:
            self._history = array("I")
            self._digits.clear()

    def _is_resting(self) -> bool:
        if not self._rest:
            return False
        self._rest -= 1
        return True

    def _give_up(self) -> None:
        """Leaves the log alone for a while, the longer the more often nothing came of it."""
        self._forget_history()
        self._iteration = None
        self._failures += 1
        self._rest = min(4 << self._failures, _LONGEST_REST)

    def _made(self, distance: int, stamp_length: int) -> _Iteration | None:
        """The iteration of the last `distance` lines; None if one is not known by its bytes, or they are too long."""
        templates = self._history[-distance:]
        wanted = set(templates)
        texts = {
            template: (before, behind)
            for before, head in self._known.heads.items()
            for behind, template in head.templates.items()
            if template in wanted
        }
        if len(texts) < len(wanted):
            return None
        lines = [
            _Line(texts[template], digits) for template, digits in zip(templates, self._digits[-distance:], strict=True)
        ]
        size = sum(line.size for line in lines) + distance * stamp_length
        if size > MOST_BYTES:
            return None
        times = max(1, min(-(-_FEW_TURNS_LINES // distance), MOST_BYTES // size))
        return _Iteration(templates * times, lines * times, stamp_length, self._known.era)


class _Line:
    """One line of an iteration, without its stamp."""

    __slots__ = ("_behind", "_head", "digits", "size")

    def __init__(self, texts: tuple[bytes, bytes], digits: int) -> None:
        self._head = texts[0] + _MARK
        self._behind = b" " + texts[1] + b"\n"
        self.digits = digits
        self.size = len(self._head) + digits + len(self._behind)

    @property
    def op_count_end(self) -> int:
        """Offset of the opCount's end."""
        return len(self._head) + self.digits

    def text(self) -> bytes:
        """Its bytes, with zeros for the opCount."""
        return self._head + bytes(self.digits) + self._behind

    def fixed(self) -> bytes:
        """Mask of the bytes that `text` fixes: all bits set."""
        return _FIXED * len(self._head) + bytes(self.digits) + _FIXED * len(self._behind)


class _Iteration:
    """The lines of an iteration, and which of them comes next."""

    def __init__(self, templates: array[int], lines: Sequence[_Line], stamp_length: int, era: int) -> None:
        self.stamp_length = stamp_length
        self.era = era
        self._templates = np.array(templates, dtype=np.uint32)
        blank = bytes(stamp_length)
        self._text = np.frombuffer(b"".join([blank + line.text() for line in lines]), dtype=np.uint8)
        self._fixed = np.frombuffer(b"".join([blank + line.fixed() for line in lines]), dtype=np.uint8)
        self._starts = np.zeros(len(lines) + 1, dtype=np.int64)
        np.cumsum([stamp_length + line.size for line in lines], out=self._starts[1:])
        ends = np.array([stamp_length + line.op_count_end for line in lines], dtype=np.int64)
        self._op_count_ends: NDArray[np.int64] = self._starts[:-1] + ends
        self._digits = np.array([line.digits for line in lines], dtype=np.uint8)
        places = np.arange(HEX_DIGITS, 0, -1)
        self._is_leading = places > self._digits[:, np.newaxis]
        """Bytes among the 16 in front of `_op_count_ends` that are no digits of it."""
        self._next = 0

    def read(self, lines: bytes) -> RecurringRows | None:
        """The rows of these lines if they are the next ones."""
        buffer = np.frombuffer(lines, dtype=np.uint8)
        templates: list[bytes] = []
        stamps: list[bytes] = []
        op_counts: list[bytes] = []
        begin, at, last = 0, self._next, len(self._templates)
        while begin < len(lines):
            first = int(self._starts[at])
            size = min(len(lines) - begin, len(self._text) - first)
            end = int(self._starts.searchsorted(first + size))
            if self._starts[end] != first + size or not self._is_as_expected(buffer[begin : begin + size], first):
                return None
            # Lines begin in `lines` where they do here, plus this shift.
            shift = begin - first
            templates.append(self._templates[at:end].tobytes())
            op_counts.append(self._op_counts_of(lines, at, end, shift))
            if self.stamp_length:
                stamps.append(_pieces(lines, self.stamp_length, self._starts[at:end] + shift))
            begin, at = begin + size, end % last
        found = RecurringRows(b"".join(templates), b"".join(stamps), b"".join(op_counts))
        if found.op_counts.translate(None, HEX_BYTES) or b"\n" in found.stamps or b"opCount" in found.stamps:
            return None
        self._next = at
        return found

    def find(self, templates: array[int], digits: bytes) -> bool:
        """Goes on behind these lines, if it has such ones: `digits` says how long their opCounts are."""
        latest = np.array(templates[-LEAST_LINES:], dtype=np.uint32)
        last_digits = np.frombuffer(digits[-LEAST_LINES:], dtype=np.uint8)
        places = np.arange(-len(latest), 0)
        for end in np.flatnonzero(self._templates == latest[-1])[:_MOST_CANDIDATES] + 1:
            at = (end + places) % len(self._templates)
            if np.array_equal(self._templates[at], latest) and np.array_equal(self._digits[at], last_digits):
                self._next = int(end) % len(self._templates)
                return True
        return False

    def _is_as_expected(self, stretch: NDArray[np.uint8], first: int) -> bool:
        behind = first + len(stretch)
        return bool(((stretch & self._fixed[first:behind]) == self._text[first:behind]).all())

    def _op_counts_of(self, lines: bytes, at: int, end: int, shift: int) -> bytes:
        taken = _pieces(lines, HEX_DIGITS, self._op_count_ends[at:end] + (shift - HEX_DIGITS))
        digits = np.frombuffer(taken, dtype=np.uint8).reshape(-1, HEX_DIGITS)
        return np.where(self._is_leading[at:end], np.uint8(ord("0")), digits).tobytes()


def distance_of_last(templates: NDArray[np.uint32], count: int) -> int:
    """Distance, in lines, to the latest earlier occurrence of the last `count` templates; 0 if there is none."""
    last = len(templates) - 1
    latest = templates[-count:]
    are_alike = templates[count - 1 : last] == templates[last]
    for before in range(1, min(count, _COMPARED_AT_ONCE)):
        are_alike &= templates[count - 1 - before : last - before] == templates[last - before]
    for at in np.flatnonzero(are_alike)[::-1][:_MOST_CANDIDATES] + count - 1:
        if np.array_equal(templates[at + 1 - count : at + 1], latest):
            return last - int(at)
    return 0


def _pieces(text: bytes, length: int, begins: NDArray[np.int64]) -> bytes:
    """The pieces of this length that begin there, one behind the other."""
    piece = np.dtype((np.void, length))
    every: NDArray[np.void] = np.ndarray((len(text) - length + 1,), dtype=piece, buffer=text, strides=(1,))
    return every[begins].tobytes()

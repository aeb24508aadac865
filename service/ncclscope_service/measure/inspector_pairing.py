"""Pairs of NCCL Inspector's records and logged operations, of one rank and one kind of collective.

A record names the number that NCCL gave the collective: comm->seqNumber counts per communicator and kind what is
launched. The log's own count of the same is `kind_seq`. While no line is lost both agree; where lines are lost the
log's count falls behind, and where collectives are captured into CUDA graphs NCCL's does: the difference is a *shift*
that holds until the next loss. Holes in the records (the plug-in samples, drops, leaves small ones out) change nothing.

A pair must agree in size, and its line must not be younger than the dump. Where that fails, the next records decide:

- where the next ones agree again, this one record has no operation;
- else the same sizes in another order, the large first, are one group, which NCCL sorts before it numbers it;
- else the smallest change of the shift that makes the next records agree is believed; where lines are lost, the
  records of these have no operation;
- else this one record has none.

Where the log is known to lose lines, the second is tried before the first.

*Source:* NCCL `src/plugin/profiler.cc:ncclProfilerStartTaskEvents`, `src/enqueue.cc:ncclPrepareTasks` and
`src/include/comm.h:ncclTaskCollSorter` (order, by quarters of a power of two).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns.table import Ids
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS, OPERATION_CODES

_OF_LINE: Final = ("member", "template", "pair_seq", "kind_seq", "message_bytes", "logged_at_ns")
LOOK_AHEAD: Final = 8
"""Records that must agree before a shift is believed."""
MAX_SHIFT: Final = 64
"""Lines lost between two records that are found at most; a torn burst is shorter."""
MAX_GROUP: Final = 64
"""Collectives of one kind in a group whose order is looked for."""
MAX_WAITING: Final = 8192
"""Records that wait for their lines; beyond it the oldest are decided by what is known."""
_SORTED_WITHIN: Final = 1.26
"""NCCL sorts by quarters of a power of two; inside one the order is open."""
_MOST_SKIPPED: Final = 256
_RUN: Final = 4096
_CLOCK_SLACK_NS: Final = 1_000_000
"""Line and dump are stamped by one clock, and stamps of whole seconds are rounded down."""
_ANOTHER_ZONE_NS: Final = 600_000_000_000
"""A line that is so much younger than the dump was stamped in another zone, which tells nothing."""

Numbers = NDArray[np.int64]


@dataclass(slots=True)
class Waiting:
    """Records that are not decided, by sequence."""

    records: Ids = field(default_factory=lambda: np.empty(0, np.int64))
    sequences: Numbers = field(default_factory=lambda: np.empty(0, np.int64))
    message_bytes: Numbers = field(default_factory=lambda: np.empty(0, np.int64))
    dumped_at_ns: Numbers = field(default_factory=lambda: np.empty(0, np.int64))

    def __len__(self) -> int:
        return len(self.records)

    def add(self, records: Ids, sequences: Numbers, message_bytes: Numbers, dumped_at_ns: Numbers) -> None:
        """Adds records, in any order."""
        joined = (
            np.concatenate([self.records, records]),
            np.concatenate([self.sequences, sequences]),
            np.concatenate([self.message_bytes, message_bytes]),
            np.concatenate([self.dumped_at_ns, dumped_at_ns]),
        )
        order = np.argsort(joined[1], kind="stable")
        self.records, self.sequences, self.message_bytes, self.dumped_at_ns = (each[order] for each in joined)

    def drop(self, amount: int) -> None:
        """Forgets the first ones."""
        self.records, self.sequences = self.records[amount:], self.sequences[amount:]
        self.message_bytes, self.dumped_at_ns = self.message_bytes[amount:], self.dumped_at_ns[amount:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """The logged collectives of that kind that are known, in order; the first has number `base`."""

    base: int
    operations: Ids
    message_bytes: Numbers
    logged_at_ns: Numbers
    is_taken: NDArray[np.bool_]
    """Which of them have a record already; written to."""

    @property
    def horizon(self) -> int:
        """The number that the next line will have."""
        return self.base + len(self.operations)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Records whose operation is decided."""

    records: Ids
    operations: Ids
    """NO_NUMBER if a record has none."""
    is_sure: NDArray[np.bool_]
    """False if all sizes around are equal, so that a lost line would not show."""
    now_sure: Ids
    """Operations that were given out before as not sure, and are so by what came behind them."""


class Pairing:
    """Pairs the records of one rank and kind with its lines; fed in any portions."""

    def __init__(self) -> None:
        self.waiting = Waiting()
        self._shift = 0
        self.has_slipped = False
        """Whether the shift ever changed, or a record had no line left: lines are lost, or launches not counted."""
        self._next = 0
        """The number behind the last line that has a record."""
        self._failures = 0
        self._skip = 0
        """Records that do not agree and are given up at once: where nothing ever agrees, looking for why is dear."""
        self._last_sizes = np.empty(0, np.int64)
        """Of the last records that were decided, twice as many as are looked at."""
        self._last_operations: Ids = np.empty(0, np.int64)
        self._last_sure = np.empty(0, bool)

    def decide(self, lines: Lines, *, final: bool, is_lossy: bool = False) -> Pairs:
        """Decides the records that can be decided, in the order of their numbers.

        `is_lossy`: lines of this log are known to be lost.
        """
        waiting = self.waiting
        operations = np.full(len(waiting), NO_NUMBER, np.int64)
        done = 0
        while done < len(waiting):
            is_urgent = final or len(waiting) - done > MAX_WAITING
            agreed = self._agreeing(lines, operations, done)
            if agreed - done > LOOK_AHEAD:
                self._failures = self._skip = 0
            if agreed > done:
                done = agreed
                continue
            number = int(waiting.sequences[done]) + self._shift
            if number >= lines.horizon and not is_urgent:
                break
            if not lines.base <= number < lines.horizon and not is_urgent:
                done += 1
                continue
            if len(lines.operations) and number >= lines.horizon:
                self.has_slipped = True  # its line was written before the record: one before it was lost
            if done and waiting.sequences[done] == waiting.sequences[done - 1]:
                done += 1  # NCCL does not count every replay of a graph: one number, several records
                continue
            if self._skip:
                self._skip -= 1
                done += 1
                continue
            if not is_urgent and not self._sees_ahead(lines, done):
                break
            done = self._recover(lines, operations, done, is_lossy=is_lossy)
        is_sure, now_sure = self._told_apart(operations[:done], waiting.message_bytes[:done])
        pairs = Pairs(
            records=waiting.records[:done].copy(), operations=operations[:done], is_sure=is_sure, now_sure=now_sure
        )
        waiting.drop(done)
        return pairs

    def _agrees(self, lines: Lines, begin: int, end: int, shift: int) -> NDArray[np.bool_]:
        """Whether each of the records has a line under this shift that fits it."""
        waiting = self.waiting
        places = waiting.sequences[begin:end] + (shift - lines.base)
        is_there = (places >= 0) & (places < len(lines.operations))
        if not len(lines.operations):
            return is_there
        safe = np.where(is_there, places, 0)
        fits = lines.message_bytes[safe] == waiting.message_bytes[begin:end]
        is_later = _is_later(lines.logged_at_ns[safe], waiting.dumped_at_ns[begin:end])
        is_repeated = np.zeros(end - begin, bool)
        is_repeated[1:] = waiting.sequences[begin + 1 : end] == waiting.sequences[begin : end - 1]
        agrees: NDArray[np.bool_] = is_there & fits & ~is_later & ~lines.is_taken[safe] & ~is_repeated
        return agrees

    def _agreeing(self, lines: Lines, operations: Ids, begin: int) -> int:
        """Pairs records from `begin` on as long as they agree; gives the first that does not."""
        agrees = self._agrees(lines, begin, min(begin + _RUN, len(self.waiting)), self._shift)
        wrong = np.flatnonzero(~agrees)
        end = begin + (int(wrong[0]) if len(wrong) else len(agrees))
        places = self.waiting.sequences[begin:end] + (self._shift - lines.base)
        operations[begin:end] = lines.operations[places]
        self._take(lines, places)
        return end

    def _sees_ahead(self, lines: Lines, at: int) -> bool:
        """Whether enough records and lines are there to decide a record that does not agree."""
        last = at + MAX_SHIFT + LOOK_AHEAD
        if last >= len(self.waiting):
            return False
        return int(self.waiting.sequences[last]) + self._shift + MAX_SHIFT < lines.horizon

    def _recover(self, lines: Lines, operations: Ids, at: int, *, is_lossy: bool) -> int:
        """Finds why a record does not agree; gives the first record that is still open."""
        if self._is_too_young(lines, at):
            # Nothing but lost lines explains it: the record's own line is further up.
            open_at = self._follow_shift(lines, at, directions=(-1,))
            return at + 1 if open_at is None else open_at
        after = min(at + 1 + LOOK_AHEAD, len(self.waiting))
        if at + 1 < after and self._agrees(lines, at + 1, after, self._shift).all():
            return at + 1
        open_at = self._follow_shift(lines, at) if is_lossy else None
        if open_at is not None:
            return open_at
        group = self._group(lines, at)
        if group is not None:
            operations[at : at + len(group)] = lines.operations[group]
            self._take(lines, group)
            return at + len(group)
        open_at = None if is_lossy else self._follow_shift(lines, at)
        if open_at is not None:
            return open_at
        self._failures += 1
        self._skip = min(self._failures, _MOST_SKIPPED)
        return at + 1

    def _is_too_young(self, lines: Lines, at: int) -> bool:
        """Whether the line that a record has under this shift was written after the record."""
        place = int(self.waiting.sequences[at]) + self._shift - lines.base
        if not 0 <= place < len(lines.operations):
            return False
        return bool(_is_later(lines.logged_at_ns[place : place + 1], self.waiting.dumped_at_ns[at : at + 1])[0])

    def _take(self, lines: Lines, places: NDArray[np.intp]) -> None:
        lines.is_taken[places] = True
        self._next = max(self._next, lines.base + int(places.max(initial=-1)) + 1)

    def _group(self, lines: Lines, at: int) -> NDArray[np.intp] | None:
        """Places of the lines of records that are in another order than their lines; None if that is not so."""
        waiting = self.waiting
        first = int(waiting.sequences[at]) + self._shift - lines.base
        for length in range(2, MAX_GROUP + 1):
            if at + length > len(waiting) or first < 0 or first + length > len(lines.operations):
                return None
            if int(waiting.sequences[at + length - 1] - waiting.sequences[at]) != length - 1:
                return None
            told = waiting.message_bytes[at : at + length]
            if told[-1] > _SORTED_WITHIN * told[-2] or lines.is_taken[first : first + length].any():
                return None
            logged = lines.message_bytes[first : first + length]
            if _is_later(lines.logged_at_ns[first : first + length], waiting.dumped_at_ns[at : at + length]).any():
                return None
            if not np.array_equal(told, logged) and np.array_equal(np.sort(told), np.sort(logged)):
                places = np.empty(length, np.intp)
                places[np.argsort(told, kind="stable")] = first + np.argsort(logged, kind="stable")
                return places
        return None

    def _follow_shift(self, lines: Lines, at: int, *, directions: tuple[int, ...] = (-1, 1)) -> int | None:
        """Takes the nearest shift under which the next records agree; gives the first of them, None without a shift."""
        for distance in range(1, MAX_SHIFT + 1):
            # Lines are lost more often than NCCL leaves a launch uncounted.
            for shift in (self._shift + direction * distance for direction in directions):
                # Under a smaller shift the records of lost lines would have lines that others have already.
                begin = int(np.searchsorted(self.waiting.sequences, self._next - shift))
                begin = max(at, begin)
                end = min(begin + LOOK_AHEAD, len(self.waiting))
                if begin - at <= MAX_SHIFT and begin < end and self._agrees(lines, begin, end, shift).all():
                    self._shift = shift
                    self.has_slipped = True
                    return begin
        return None

    def _told_apart(self, operations: Ids, sizes: Numbers) -> tuple[NDArray[np.bool_], Ids]:
        """Whether sizes near each record that is decided now differ, so that a line too few would have shown.

        Gives too the operations that were decided before, and that this tells apart.
        """
        before = len(self._last_sizes)
        sizes, operations = np.append(self._last_sizes, sizes), np.append(self._last_operations, operations)
        changes = np.zeros(len(sizes) + 1, np.int64)
        changes[1 : len(sizes)] = sizes[1:] != sizes[:-1]
        total = np.cumsum(changes)
        low = np.maximum(np.arange(len(sizes)) - LOOK_AHEAD, 0)
        high = np.minimum(np.arange(len(sizes)) + LOOK_AHEAD, max(len(sizes) - 1, 0))
        told: NDArray[np.bool_] = total[high] > total[low]
        told[:before] |= self._last_sure
        now_sure = operations[:before][told[:before] & ~self._last_sure & (operations[:before] != NO_NUMBER)]
        kept = slice(-2 * LOOK_AHEAD, None)
        self._last_sizes, self._last_operations, self._last_sure = sizes[kept], operations[kept], told[kept]
        return told[before:], now_sure


def _is_later(stamps: Numbers, dumps: Numbers) -> NDArray[np.bool_]:
    """Which lines were written after the dump that tells of their end, as far as that can be known."""
    known = (stamps != NO_TIME_NS) & (dumps != NO_TIME_NS)
    ahead = np.where(known, stamps, 0) - np.where(known, dumps, 0)
    later: NDArray[np.bool_] = known & (ahead > _CLOCK_SLACK_NS) & (ahead < _ANOTHER_ZONE_NS)
    return later


Key = tuple[int, int, int]
"""Member, operation code, and peer: NO_NUMBER for collectives."""

_LOWERED = [OPERATION_CODES[name] for name in ("AlltoAll", "Gather", "Scatter")]
_PAIRED = [OPERATION_CODES["Send"], OPERATION_CODES["Recv"]]


@dataclass(slots=True)
class _Kept:
    """The lines of one key; arrays have room at the end."""

    base: int
    used: int = 0
    operations: Ids = field(default_factory=lambda: np.empty(64, np.int64))
    message_bytes: NDArray[np.int64] = field(default_factory=lambda: np.empty(64, np.int64))
    logged_at_ns: NDArray[np.int64] = field(default_factory=lambda: np.empty(64, np.int64))
    is_taken: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(64, bool))

    def add(self, operations: Ids, message_bytes: NDArray[np.int64], logged_at_ns: NDArray[np.int64]) -> None:
        end = self.used + len(operations)
        if end > len(self.operations):
            room = 2 * end
            self.operations = np.resize(self.operations, room)
            self.message_bytes = np.resize(self.message_bytes, room)
            self.logged_at_ns = np.resize(self.logged_at_ns, room)
            self.is_taken = np.concatenate([self.is_taken, np.zeros(room - len(self.is_taken), bool)])
        self.operations[self.used : end] = operations
        self.message_bytes[self.used : end] = message_bytes
        self.logged_at_ns[self.used : end] = logged_at_ns
        self.used = end

    def drop_before(self, operation: int) -> None:
        """Forgets lines that left the store."""
        gone = int(np.searchsorted(self.operations[: self.used], operation))
        if gone > self.used // 2:
            left = self.used - gone
            for array in (self.operations, self.message_bytes, self.logged_at_ns, self.is_taken):
                array[:left] = array[gone : self.used].copy()
            self.is_taken[left:] = False
            self.base += gone
            self.used = left

    def lines(self) -> Lines:
        return Lines(
            base=self.base,
            operations=self.operations[: self.used],
            message_bytes=self.message_bytes[: self.used],
            logged_at_ns=self.logged_at_ns[: self.used],
            is_taken=self.is_taken[: self.used],
        )


class LineBook:
    """Keeps the lines of every key; memory goes with the store's window."""

    def __init__(self, known: Store) -> None:
        self._store = known
        self._kept: dict[Key, _Kept] = {}
        self._lowering: set[int] = set()

    def feed(self, operations: Ids) -> None:
        """Takes note of new operations, in the order of their lines."""
        rows = self._store.operations.take(operations, *_OF_LINE)
        templates = self._store.templates_of(rows, "op", "root")
        self._lowering.update(np.unique(rows["member"][np.isin(templates["op"], _LOWERED)]).tolist())
        numbers = np.where(np.isin(templates["op"], _PAIRED), rows["pair_seq"], rows["kind_seq"])
        peers = np.where(rows["kind_seq"] >= 0, NO_NUMBER, templates["root"])
        numbered = np.flatnonzero(numbers >= 0)
        if not len(numbered):
            return
        keys = np.stack([rows["member"], templates["op"], peers], axis=1).astype(np.int64)[numbered]
        distinct, inverse = np.unique(keys, axis=0, return_inverse=True)
        order = np.argsort(inverse.reshape(-1), kind="stable")
        cuts = np.cumsum(np.bincount(inverse.reshape(-1), minlength=len(distinct)))[:-1]
        for (member, op, peer), part in zip(distinct.tolist(), np.split(numbered[order], cuts), strict=True):
            self._add((member, op, peer), operations[part], rows[part], int(numbers[part[0]]))

    def lines(self, key: Key) -> Lines:
        """The lines of a key that are in the store."""
        kept = self._kept.get(key)
        if kept is None:
            return _Kept(base=0).lines()
        kept.drop_before(self._store.operations.first)
        return kept.lines()

    def splits_collectives(self, member: int) -> bool:
        """Whether collectives of that member become sends and receives, which no line of theirs shows."""
        return member in self._lowering

    def _add(self, key: Key, operations: Ids, rows: Columns, first: int) -> None:
        kept = self._kept.setdefault(key, _Kept(base=first))
        kept.add(operations, rows["message_bytes"], rows["logged_at_ns"])

"""Calls of a communicator whose log lines were lost, aligned across its ranks: who called what, and how far each came.

Places are counted from where the losses were noticed. What lies between two places that all ranks agree on is put in
order by what was called, by opCount where it counts, and by the rhythm of the stamps (`number.healing`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns import row_ops
from ncclscope_service.columns.group_by import group_by
from ncclscope_service.number import across_ranks
from ncclscope_service.number.healing import heal
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

UNTOLD: Final = -2
"""A call of which the place is known, and not what was called."""
_FEW: Final = 0.015
"""Share of lines: with 1 % lost the names of calls tell how far ranks have come, with 2 % in bursts they do not."""
_REMEMBERED: Final = 64
"""Places that are looked at, the newest ones."""
_ALIGNED_AT_ONCE: Final = 512
"""Calls of a rank that wait to be aligned: fewer are aligned at once, which costs by the square."""
_HELD: Final = 65_536
"""Calls of a rank that wait for those of others: logs that are read one after the other are that far apart."""
_UNHARMED: Final = 4
"""Places before a wrong call of which a rank that is judged lost no line."""
_AT_END: Final = 4
"""A wrong call is among the last: ranks that called different operations usually make no further calls."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A place at which ranks called different operations."""

    coll_seq: int
    at_ns: int
    ranks_by_call: dict[int, set[int]]


@dataclass(frozen=True, slots=True)
class NumberedCalls:
    """The last collectives of a communicator, as they were numbered in the end."""

    begin: int
    """Number of the first of them."""
    calls: NDArray[np.int64]
    """K x R: codes of calls; NO_NUMBER if a rank called nothing or its line was lost, `UNTOLD` of one that only its
    kernel shows.
    """
    stamps_ns: NDArray[np.int64]
    """K: newest stamp of their lines; NO_TIME_NS."""
    enqueued: NDArray[np.int64]
    """By rank: collectives that it called, lost lines included."""
    is_told: bool
    """Whether kernels of every rank, or the steps before, show how many lines were lost even if all calls are equal."""


@dataclass(slots=True)
class LossyCalls:
    """Calls of one communicator of so many ranks, in order of each rank."""

    size: int
    begin: int
    """Number of the first place, as far as it is known."""
    _waiting: list[Columns] = field(init=False)
    """By rank: calls (mismatch.CALL) that have no place yet."""
    _is_cut: bool = False
    """Whether calls were left out, because a rank came too far ahead of another one."""
    _is_told: bool = False
    """Whether the last places hold even if all calls are equal."""
    _lost: int = 0
    """Lines that were found to be lost here."""
    _lines: int = 0
    """Lines that were given a place here."""
    _symbols: dict[int, int] = field(default_factory=dict[int, int])
    _offsets: Columns = field(init=False)
    _places: int = 0
    """That were given."""
    _last: NDArray[np.int64] = field(init=False)
    """By rank: place behind its last call; NO_NUMBER before its first."""
    _recent: NDArray[np.int64] = field(init=False)
    """Calls at the newest places, by rank; NO_NUMBER where its line was lost, `UNTOLD`."""
    _recent_ns: NDArray[np.int64] = field(init=False)
    newest_ns: int = NO_TIME_NS
    """When the newest call was logged."""

    def __post_init__(self) -> None:
        self._waiting = [np.empty(0, across_ranks.CALL)] * self.size
        self._offsets = across_ranks.unknown_offsets(self.size)
        self._last = np.full(self.size, NO_NUMBER)
        self._recent = np.empty((0, self.size), np.int64)
        self._recent_ns = np.empty(0, np.int64)

    def ingest(self, calls: Columns, codes: NDArray[np.int64]) -> None:
        """Takes calls (mismatch.CALL) of all ranks, of each in order; `codes`: what is called."""
        self.newest_ns, self._is_told = max(self.newest_ns, int(calls["logged_ns"].max())), False
        found, inverse = np.unique(codes, return_inverse=True)
        symbols = np.asarray([self._symbols.setdefault(code, len(self._symbols)) for code in found.tolist()], np.int32)
        for rank, mine in group_by(calls["rank"]) if not self._is_cut else ():
            if not 0 <= rank < self.size:
                continue
            added = np.zeros(len(mine), across_ranks.CALL)
            added["id"], added["symbol"], added["kind"] = codes[mine], symbols[inverse[mine]], calls["op"][mine]
            added["is_sized"] = added["is_counted"] = True
            added["start_ns"] = added["end_ns"] = NO_TIME_NS
            added["stamp_ns"], added["op_count"] = calls["stamp_ns"][mine], calls["op_count"][mine].astype(np.int64)
            self._waiting[rank] = row_ops.concat([self._waiting[rank], added])
        if max(map(len, self._waiting)) >= _HELD:
            self._waiting, self._is_cut = [each[:0] for each in self._waiting], True
        elif min(map(len, self._waiting)) >= _ALIGNED_AT_ONCE:
            self.place(is_end=False)

    def place(self, *, is_end: bool) -> None:
        """Gives calls their places; all of them at an end, behind which none came for long."""
        if self._is_cut or not any(map(len, self._waiting)):
            return
        hosts = np.zeros(self.size, np.int32)
        healed = heal(self._waiting, self._offsets, hosts, is_forced=is_end, is_end=is_end)
        self._offsets = healed.offsets
        places = healed.places
        self._lost += healed.lost.total()
        self._lines += int(np.count_nonzero(places >= 0))
        calls = np.full(places.shape, NO_NUMBER, np.int64)
        times = np.full(len(places), NO_TIME_NS, np.int64)
        for rank in range(self.size):
            at = np.flatnonzero(places[:, rank] >= 0)
            if len(at):
                own = self._waiting[rank][places[at, rank]]
                calls[at, rank] = own["id"]
                times[at] = np.maximum(times[at], own["stamp_ns"])
                self._last[rank] = self._places + int(at[-1]) + 1
                self._waiting[rank] = self._waiting[rank][int(places[at[-1], rank]) + 1 :]
        self._places += len(places)
        self._recent = np.concatenate([self._recent, calls])[-_REMEMBERED:]
        self._recent_ns = np.concatenate([self._recent_ns, times])[-_REMEMBERED:]

    def settle(self, found: NumberedCalls) -> None:
        """Takes the places that all calls were given by kernels and the steps before: what was placed here was less."""
        self._waiting, self._is_cut = [each[:0] for each in self._waiting], False
        self.begin, self._places = 0, found.begin + len(found.calls)
        self._last = np.where(found.enqueued > 0, found.enqueued, NO_NUMBER)
        self._recent, self._recent_ns = found.calls, found.stamps_ns
        self._is_told = found.is_told

    @property
    def is_placed(self) -> bool:
        """Whether all calls have a place, and not because all are equal, or so many lines were lost that names alone
        do not tell where.
        """
        are_few = len(self._symbols) > 1 and self._lost <= _FEW * self._lines
        return (are_few or self._is_told) and not any(map(len, self._waiting)) and not self._is_cut

    def enqueued(self) -> dict[int, int]:
        """How many collectives each rank has enqueued, by its newest call; ranks without one are left out."""
        return {rank: self.begin + last for rank, last in enumerate(self._last.tolist()) if last != NO_NUMBER}

    def difference(self) -> Difference | None:
        """The first of the last places at which ranks that lost nothing before it called different operations."""
        first = max(0, len(self._recent) - _AT_END)
        for nth in range(first, len(self._recent)):
            called = self._recent[nth]
            known = called[called >= 0]
            if len(known) < 2 or (known == known[0]).all():
                continue
            # What a rank called that lost a line just before may be the next call.
            is_harmed = (self._recent[max(0, nth - _UNHARMED) : nth] == NO_NUMBER).any(axis=0)
            ranks = np.flatnonzero((called >= 0) & ~is_harmed)
            if len(ranks) < 2 or (called[ranks] == called[ranks[0]]).all():
                return None
            by_call: dict[int, set[int]] = {}
            for rank in ranks.tolist():
                by_call.setdefault(int(called[rank]), set()).add(rank)
            number = self.begin + self._places - len(self._recent) + nth
            return Difference(number, int(self._recent_ns[nth]), by_call)
        return None

"""Who sends to whom in a communicator, and how its operations follow each other: what counts alone do not tell.

A pipeline sends both ways and has ends; context parallelism sends one way around a ring; experts send to everybody.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.distinct import distinct_together, groups
from ncclscope_service.rows import Communicator
from ncclscope_service.store import Store
from ncclscope_wire.terms import OPERATION_CODES

_SEND: Final = OPERATION_CODES["Send"]
_RECV: Final = OPERATION_CODES["Recv"]
_GATHER: Final = OPERATION_CODES["AllGather"]
_SCATTER: Final = OPERATION_CODES["ReduceScatter"]
_IS_PAIRWISE: Final = np.isin(np.arange(256), (_SEND, _RECV))
_LOOKED_AT: Final = 4096
"""Operations of one member that are looked at: the latest."""
_SCANNED_AT_ONCE: Final = 65_536
"""Operations that are looked through in one go, the latest first: they stay in the cache."""
_NOBODYS: Final = (np.empty(0, np.int32), np.empty(0, np.uint8))
_MEMBERS_LOOKED_AT: Final = 4
"""Members of one communicator that are looked at."""
_MANY: Final = 3
"""In groups of up to so many, each is everybody's neighbour: there only who sends to itself sends to everybody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """How a communicator's operations go."""

    sends_to_everybody: bool = False
    is_ring: bool = False
    """Every rank sends to one neighbour only and receives from the other only, the last to the first as well."""
    paired: float | None = None
    """Share of neighbouring Sends and Recvs, two by two, that are one of each: 1 where they always come together."""
    run: float | None = None
    """How many AllGathers, or ReduceScatters, follow each other before the other comes, on average."""


class Patterns:
    """Follows the peers of a store's members, and looks at their operations where asked."""

    def __init__(self, known: Store) -> None:
        self._store = known
        self._sends: defaultdict[int, set[int]] = defaultdict(set)
        self._receives: defaultdict[int, set[int]] = defaultdict(set)

    def count_logged(
        self, members: NDArray[np.integer], codes: NDArray[np.integer], peers: NDArray[np.integer]
    ) -> None:
        """Operations that were read from a log, as columns; those that have no peer are left out."""
        p2p = np.flatnonzero(_IS_PAIRWISE[codes])
        if not len(p2p):
            return
        found, _ = distinct_together(members[p2p], codes[p2p], peers[p2p])
        for member, code, peer in zip(*(column.tolist() for column in found), strict=True):
            (self._sends if code == _SEND else self._receives)[member].add(peer)

    def of(self, communicators: Sequence[Communicator]) -> dict[int, Pattern]:
        """The pattern of each of these communicators, by index."""
        looked_at = {each.index: _spread(list((each.members or {}).values())) for each in communicators}
        sequences = self._sequences({member for members in looked_at.values() for member in members})
        return {each.index: self._pattern(each, looked_at[each.index], sequences) for each in communicators}

    def _pattern(
        self, communicator: Communicator, looked_at: list[int], sequences: dict[int, NDArray[np.uint8]]
    ) -> Pattern:
        codes = [sequences[member] for member in looked_at if member in sequences]
        members = communicator.members or {}
        exchanging = {rank: member for rank, member in members.items() if self._sends[member] or self._receives[member]}
        return Pattern(
            sends_to_everybody=bool(exchanging) and self._sends_to_everybody(communicator.size, exchanging),
            is_ring=len(exchanging) > 1 and any(self._is_ring(communicator.size, exchanging, step) for step in (1, -1)),
            paired=_least([_paired(each) for each in codes]),
            run=_mean([_run(each) for each in codes]),
        )

    def _sends_to_everybody(self, size: int, members: dict[int, int]) -> bool:
        to_all = [
            len(self._sends[member] | {rank}) == size and (size > _MANY or rank in self._sends[member])
            for rank, member in members.items()
        ]
        return 2 * sum(to_all) > len(to_all)

    def _is_ring(self, size: int, members: dict[int, int], step: int) -> bool:
        return size > 2 and all(  # of two, each is the other's both neighbours
            self._sends[member] == {(rank + step) % size} and self._receives[member] == {(rank - step) % size}
            for rank, member in members.items()
        )

    def _sequences(self, members: set[int]) -> dict[int, NDArray[np.uint8]]:
        """The operation codes of each of these members, oldest first."""
        is_asked = np.zeros(len(self._store.members) + 1, np.bool_)
        is_asked[list(members)] = True
        amounts = np.zeros(len(is_asked), np.int64)
        rows, code_of = self._store.operations.rows, self._store.operation_templates.rows["op"].copy()
        found: list[tuple[NDArray[np.int32], NDArray[np.uint8]]] = []
        for end in range(len(rows), 0, -_SCANNED_AT_ONCE):
            part = rows[max(0, end - _SCANNED_AT_ONCE) : end]
            at = np.flatnonzero(is_asked[part["member"]])
            own = part["member"][at]
            found.append((own, code_of[part["template"][at]]))
            amounts += np.bincount(own, minlength=len(amounts))
            is_asked &= amounts < _LOOKED_AT
            if not is_asked.any():
                break
        owners, codes = (np.concatenate(parts) for parts in zip(*found[::-1], strict=True)) if found else _NOBODYS
        return {member: codes[mine[-_LOOKED_AT:]] for member, mine in groups(owners)}


def _spread(members: list[int]) -> list[int]:
    """Some of them, the first and the last among them."""
    if len(members) <= _MEMBERS_LOOKED_AT:
        return members
    places = np.linspace(0, len(members) - 1, _MEMBERS_LOOKED_AT).astype(np.intp)
    return [members[place] for place in places.tolist()]


def _paired(codes: NDArray[np.uint8]) -> float | None:
    p2p = codes[_IS_PAIRWISE[codes]]
    p2p = p2p[: len(p2p) // 2 * 2]
    return float(np.mean(p2p[::2] != p2p[1::2])) if len(p2p) else None


def _run(codes: NDArray[np.uint8]) -> float | None:
    chosen = codes[(codes == _GATHER) | (codes == _SCATTER)]
    return len(chosen) / (1 + int(np.count_nonzero(np.diff(chosen)))) if len(chosen) else None


def _least(values: list[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None

"""Launches that the trace is drawn from: their operations, who waited for whom, and which of them prove a finding.

A finding is proved by the collectives that it names itself, else by the worst of its groups in its time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns.table import AnyRows
from ncclscope_service.export.selection import Selection
from ncclscope_service.export.tables.columns import OperationView
from ncclscope_service.store.records import Finding, FindingKind
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS, OPERATION_CODES, OPERATIONS

WAIT_SHOWN_NS: Final = 10_000
"""A wait of 10 µs and more is drawn; shorter ones are in the arguments only."""

ARROW_WAIT_NS: Final = 100_000
"""A wait of 100 µs and more gets an arrow from the rank that was waited for."""

MAX_ARROWS: Final = 50_000
"""The longest waits keep their arrows."""


class Launches:
    """The selected operations by launch."""

    def __init__(self, selection: Selection) -> None:
        launch = selection.operations.column("launch")
        has_launch = np.nonzero(launch >= 0)[0]
        self._order = has_launch[np.argsort(launch[has_launch], kind="stable")]
        self._ids, self._begins, self._counts = np.unique(launch[self._order], return_index=True, return_counts=True)
        part = selection.operations
        self._positions = part.positions
        self._operations = part.rows

    def find(self, launches: NDArray[np.number]) -> NDArray[np.intp]:
        """The place of each launch in this index; -1 if none of its operations is selected."""
        places = np.searchsorted(self._ids, launches)
        is_found = (places < len(self._ids)) & (launches >= 0)
        is_found[is_found] = self._ids[places[is_found]] == launches[is_found]
        return np.where(is_found, places, -1)

    def first(self, places: NDArray[np.intp]) -> Columns:
        """The first logged operation of each of these launches."""
        return self._rows(self._order[self._begins[places]])

    def counts(self, places: NDArray[np.intp]) -> NDArray[np.intp]:
        """How many operations share each of these launches."""
        counts: NDArray[np.intp] = self._counts[places]
        return counts

    def members(self, places: NDArray[np.intp], at_most: int) -> tuple[Columns, NDArray[np.intp]]:
        """The first operations of these launches, in the order of the log, and how many each launch has in all."""
        counts = self._counts[places]
        kept = np.minimum(counts, at_most)
        steps = np.arange(int(kept.sum())) - np.repeat(np.cumsum(kept) - kept, kept)
        return self._rows(self._order[np.repeat(self._begins[places], kept) + steps]), counts

    def _rows(self, selected: NDArray[np.intp]) -> Columns:
        rows: Columns = self._operations[selected if self._positions is None else self._positions[selected]]
        return rows


@dataclass(frozen=True, slots=True)
class Arrows:
    """Who waited for whom: launch of the rank that came last, launch of the one that waited, and how long."""

    late: NDArray[np.int64]
    waiting: NDArray[np.int64]
    wait_ns: NDArray[np.int64]
    left_out: int
    """Waits above the threshold that have no arrow, because there were longer ones."""


def arrows(selection: Selection) -> Arrows:
    """The arrows to draw, to those who waited from whom they waited for; none while clocks contradict causality.

    In an N-to-N collective that is the last arriver, who has the shortest wait; receivers of a Broadcast or Scatter
    wait for its root, the root of a Reduce or Gather for the sender that started last.
    """
    rows = _waiting_rows(selection)
    clocks = selection.store.clocks
    if not all(clocks[job].are_trusted for job in selection.jobs if job in clocks):
        rows = rows[:0]
    communicator, coll_seq, wait = rows["communicator"], rows["coll_seq"], rows["wait_ns"]
    order = np.lexsort([rows["rather_late"], coll_seq, communicator])
    rows, wait = rows[order], wait[order]
    is_first = np.ones(len(rows), dtype=np.bool_)
    is_first[1:] = (rows["communicator"][1:] != rows["communicator"][:-1]) | (
        rows["coll_seq"][1:] != rows["coll_seq"][:-1]
    )
    waited_for = np.maximum.accumulate(np.where(is_first, np.arange(len(rows)), 0))
    is_told = ~rows["is_rooted"] | (rows["rather_late"][waited_for] < 0)
    waiting = np.nonzero((wait >= ARROW_WAIT_NS) & ~is_first & is_told)[0]
    kept = waiting[np.sort(np.argsort(-wait[waiting], kind="stable")[:MAX_ARROWS])]
    launch = rows["launch"]
    return Arrows(launch[waited_for[kept]], launch[kept], wait[kept], len(waiting) - len(kept))


def _waiting_rows(selection: Selection) -> Columns:
    """Rows whose wait is known, and those of rooted collectives that others may have waited for."""
    found: list[Columns] = []
    ranks = np.array([_none_as_unknown(member.rank) for member in selection.store.members] + [NO_NUMBER], np.int64)
    for rows in selection.operations.slices():
        communicators = OperationView(selection.store, rows).communicators()
        templates = selection.store.templates_of(rows, "op", "root")
        is_rooted, waits = _IS_ROOTED[templates["op"]], rows["wait_ns"] >= 0
        is_waited_for = is_rooted & ~waits & (rows["start_true_ns"] != NO_TIME_NS)
        is_root = ranks[rows["member"]] == templates["root"]
        is_waited_for &= is_root == _ROOT_SENDS[templates["op"]]
        chosen = (waits | is_waited_for) & (rows["coll_seq"] >= 0) & (rows["launch"] >= 0) & (communicators >= 0)
        waiting = np.zeros(int(chosen.sum()), dtype=_WAITING)
        for name in ("coll_seq", "wait_ns", "launch"):
            waiting[name] = rows[name][chosen]
        waiting["communicator"], waiting["is_rooted"] = communicators[chosen], is_rooted[chosen]
        waiting["rather_late"] = np.where(waits, rows["wait_ns"], -rows["start_true_ns"])[chosen]
        found.append(waiting)
    return np.concatenate(found) if found else np.zeros(0, dtype=_WAITING)


def _none_as_unknown(rank: int | None) -> int:
    return NO_NUMBER if rank is None else rank


_WAITING: Final = np.dtype(
    [
        ("communicator", "<i8"),
        ("coll_seq", "<i8"),
        ("wait_ns", "<i8"),
        ("launch", "<i8"),
        ("is_rooted", "?"),
        ("rather_late", "<i8"),  # the least of a collective is waited for: the shortest wait, or below 0 the last start
    ]
)
_IS_ROOTED: Final = np.array(
    [code < len(OPERATIONS) and OPERATIONS[code].is_collective and OPERATIONS[code].is_rooted for code in range(256)]
)
_ROOT_SENDS: Final = np.isin(np.arange(256), [OPERATION_CODES["Broadcast"], OPERATION_CODES["Scatter"]])


Collective: TypeAlias = tuple[int, int]
"""Index of the communicator, number of the collective on it."""

MAX_SHOWN: Final = 8
"""Collectives that one finding leads to."""

_NAMED_IN: Final = ("groups", "slow_groups", "stuck_groups")
_SLOW: Final = (
    FindingKind.SLOW_LINK, FindingKind.BANDWIDTH_DROP, FindingKind.SLOW_DRIFT, FindingKind.BELOW_LIMIT
)  # fmt: skip


def evidence_collectives(selection: Selection, finding: Finding) -> list[Collective]:
    """At most `MAX_SHOWN`, in order of time; none if the finding is not about operations or none was seen.

    Of a late rank those for which it was blamed most, of a slow link or group those with the least busbw.
    """
    by_id = {c.comm_id: c.index for c in selection.communicators if finding.job in (None, c.job)}
    named = [
        (by_id[comm_id], int(seq))
        for comm_id, colon, seq in (text.rpartition(":") for text in _texts(finding.evidence.get("collectives")))
        if colon and comm_id in by_id and seq.isdigit()
    ]
    seq = finding.evidence.get("coll_seq")
    if isinstance(seq, int) and finding.comm_id in by_id:
        named.append((by_id[finding.comm_id], seq))
    if named:
        return named[:MAX_SHOWN]
    groups = {finding.comm_id, *(text for name in _NAMED_IN for text in _texts(finding.evidence.get(name)))}
    return _worst(selection, finding, [by_id[comm_id] for comm_id in groups if comm_id in by_id])


def collective_text(selection: Selection, collective: Collective) -> str:
    """The collective's id, as in `collective_id` of the operations."""
    communicator, seq = collective
    return f"{selection.store.communicators[communicator].comm_id}:{seq}"


def launches_of(selection: Selection, wanted: set[Collective]) -> dict[Collective, list[tuple[int, int | None]]]:
    """Of each of these collectives, the launches of its ranks, each with its global rank."""
    found: dict[Collective, list[tuple[int, int | None]]] = {}
    if not wanted:
        return found
    keys = np.array([_key(communicator, seq) for communicator, seq in wanted], dtype=np.int64)
    members = selection.store.members
    for rows in selection.operations.slices():
        communicators = OperationView(selection.store, rows).communicators()
        is_wanted = (rows["launch"] >= 0) & (rows["coll_seq"] >= 0) & (communicators >= 0)
        is_wanted &= np.isin(communicators.astype(np.int64) << 40 | rows["coll_seq"], keys)
        columns = (communicators[is_wanted].tolist(), *(_listed(rows, is_wanted)))
        for communicator, seq, launch, member in zip(*columns, strict=True):
            found.setdefault((communicator, seq), []).append((launch, members[member].global_rank))
    return found


def _listed(rows: AnyRows, chosen: NDArray[np.bool_]) -> list[list[int]]:
    return [rows[name][chosen].tolist() for name in ("coll_seq", "launch", "member")]


def _key(communicator: int, seq: int) -> int:
    return communicator << 40 | seq


def _worst(selection: Selection, finding: Finding, communicators: list[int]) -> list[Collective]:
    """Of the joined collectives of these communicators in the finding's time."""
    if finding.kind is not FindingKind.LATE_RANK and finding.kind not in _SLOW:
        return []
    found: list[tuple[float, int, Collective]] = []
    until_ns = finding.until_ns if finding.until_ns is not None else np.iinfo(np.int64).max
    for rows in selection.collectives.slices():
        ends = rows["end_true_ns"]
        is_ours = np.isin(rows["communicator"], communicators) & (rows["coll_seq"] >= 0) & (ends != NO_TIME_NS)
        ours = rows[is_ours & (ends >= finding.since_ns) & (rows["first_start_true_ns"] <= until_ns)]
        if finding.kind is FindingKind.LATE_RANK:
            ours = ours[_is_last(selection, ours, finding.ranks)]
            badness = -ours["blame_ns"].astype(np.float64)
        else:
            ours = ours[np.isfinite(ours["busbw"])]
            badness = ours["busbw"]
        chosen = np.argsort(badness, kind="stable")[:MAX_SHOWN]
        names = ("end_true_ns", "communicator", "coll_seq")
        columns = (badness[chosen].tolist(), *(ours[name][chosen].tolist() for name in names))
        found += [(bad, end, (index, seq)) for bad, end, index, seq in zip(*columns, strict=True)]
    worst = sorted(found)[:MAX_SHOWN]
    return [collective for _, _, collective in sorted(worst, key=lambda one: one[1])]


def _is_last(selection: Selection, rows: Columns, ranks: tuple[int, ...]) -> NDArray[np.bool_]:
    """Whether one of these global ranks was the collective's last arriver."""
    culprits: set[Collective] = set()
    for member in selection.store.members:
        if member.global_rank in ranks and member.rank is not None:
            culprits.add((member.communicator, member.rank))
    pairs = zip(rows["communicator"].tolist(), rows["last_rank"].tolist(), strict=True)
    return np.array([pair in culprits for pair in pairs], dtype=np.bool_)


def _texts(value: object) -> list[str]:
    return [text for text in value if isinstance(text, str)] if isinstance(value, (list, tuple)) else []

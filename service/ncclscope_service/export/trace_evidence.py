"""Which collectives prove a finding: those that it names itself, else the worst of its groups in its time."""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.export.operation_view import OperationView
from ncclscope_service.export.selection import Selection
from ncclscope_service.rows import Finding, FindingKind
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_TIME_NS

Collective: TypeAlias = tuple[int, int]
"""Index of the communicator, number of the collective on it."""

MAX_SHOWN: Final = 8
"""Collectives that one finding leads to."""

_NAMED_IN: Final = ("groups", "slow_groups", "stuck_groups")
_SLOW: Final = (
    FindingKind.SLOW_LINK, FindingKind.BANDWIDTH_DROP, FindingKind.SLOW_DRIFT, FindingKind.BELOW_LIMIT
)  # fmt: skip


def evidence_collectives(selection: Selection, finding: Finding) -> list[Collective]:
    """At most `MAX_SHOWN`, in order of time; none where the finding is not about operations or none was seen.

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


def _listed(rows: Columns, chosen: NDArray[np.bool_]) -> list[list[int]]:
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

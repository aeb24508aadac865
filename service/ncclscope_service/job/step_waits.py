"""Why a rank waits in a step: for the schedule of its pipeline, for unequal stages, or for a rank that is late.

The *bubble* of a pipeline is what 1F1B, interleaved or not, makes a stage wait whose peers are all as fast as itself:
for passes, and without chunks for what is sent between them.
*Imbalance* is what a stage waits more since another takes longer: in its passes, backward ones twice as long as forward
ones, or behind them, where the first and the last stage alone reduce embeddings. Only for pipelines whose Sends have
the counts of 1F1B, every stage of which is recorded. *Late* is waiting that ends on a rank which a late_rank finding
accuses, in its time; what of it the schedule asks for is bubble.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_models.schedule import StagePasses, schedule
from ncclscope_service.columns import row_ops
from ncclscope_service.columns.group_by import distinct, distinct_together, first_positions, group_by
from ncclscope_service.columns.intervals import Integers
from ncclscope_service.columns.table import AnyRows
from ncclscope_service.job.step_parts import Part, in_order
from ncclscope_service.store.records import FindingKind
from ncclscope_service.store.rows import Match
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS, OPERATION_CODES

_IN_A_PASS: Final = ("TP", "CP", "EP")
"""Kinds of parallelism that communicate within a pass of a micro-batch."""
_BEHIND_PASSES: Final = ("EMBEDDING", "DP")
"""Those that communicate behind the last pass."""
_WAITS_OF_A_PIPELINE: Final = ("PP", "EMBEDDING", "MP", "WORLD")
"""Where a stage waits for the others of its pipeline; a bubble is taken from the first that has waiting."""
_MOST_CHUNKS: Final = 16


def is_late(store: Store, operations: AnyRows, taken: Columns) -> NDArray[np.bool_]:
    """Whether the waiting of each of these operations, one for each kernel, ends on a rank that a finding accuses.

    A collective waits for the rank that waits least; a Send or Recv for its peer, if the launch has one only.
    """
    found = np.zeros(len(taken), np.bool_)
    accused = [each for each in store.findings if each.kind is FindingKind.LATE_RANK and each.ranks]
    if not accused or not len(taken):
        return found
    awaited, jobs = _awaited(store, operations, taken), np.asarray(store.process_job, dtype=object)[taken["process"]]
    for finding in accused:
        until_ns = np.iinfo(np.int64).max if finding.until_ns is None else finding.until_ns
        in_its_time = (taken["end_true_ns"] >= finding.since_ns) & (taken["end_true_ns"] <= until_ns)
        found |= np.isin(awaited, finding.ranks) & in_its_time & (jobs == finding.job)
    return found


def _awaited(store: Store, operations: AnyRows, taken: Columns) -> Integers:
    """The global rank on which each wait ends; NO_NUMBER where that is not known."""
    communicator_of, rank_of = (
        np.asarray([NO_NUMBER if value is None else value for value in values], np.int64)
        for values in zip(*((each.communicator, each.global_rank) for each in store.members), strict=True)
    )
    awaited = np.full(len(taken), NO_NUMBER, np.int64)
    communicators, numbers = communicator_of[taken["member"]], taken["coll_seq"].astype(np.int64)
    joined = np.flatnonzero((numbers != NO_NUMBER) & (taken["wait_ns"] != NO_TIME_NS))
    joined = joined[np.argsort(taken["wait_ns"][joined], kind="stable")]
    _, place = distinct_together(communicators[joined], numbers[joined])
    last = joined[first_positions(place)][place]
    awaited[joined] = np.where(last == joined, NO_NUMBER, rank_of[taken["member"][last]])
    exchanges = np.flatnonzero((numbers == NO_NUMBER) & (taken["wait_ns"] != NO_TIME_NS))
    mine = row_ops.take_columns(
        operations, np.flatnonzero(np.isin(operations["kernel"], taken["kernel"][exchanges])), ("kernel", "template")
    )
    peers = store.templates_of(mine, "root")["root"].astype(np.int64)
    kernels, place = distinct(mine["kernel"].astype(np.int64))
    lowest, highest = np.full(len(kernels), np.iinfo(np.int64).max), np.full(len(kernels), NO_NUMBER)
    np.minimum.at(lowest, place, peers)
    np.maximum.at(highest, place, peers)
    peer = np.where(lowest == highest, lowest, NO_NUMBER)[np.searchsorted(kernels, taken["kernel"][exchanges])]
    (of, ranks), place = distinct_together(communicators[exchanges], peer)
    awaited[exchanges] = np.asarray(
        [_global_rank(store, index, rank) for index, rank in zip(of.tolist(), ranks.tolist(), strict=True)], np.int64
    )[place]
    return awaited


def _global_rank(store: Store, communicator: int, rank: int) -> int:
    member = (store.communicators[communicator].members or {}).get(rank)
    known = None if member is None else store.members[member].global_rank
    return NO_NUMBER if known is None else known


@dataclass(frozen=True, slots=True)
class _Exchanges:
    """Of one rank and step, medians over the steps."""

    sends: int
    launches: int
    """Kernels of Sends and Recvs."""


def with_pipeline_waits(store: Store, operations: AnyRows, rows: Columns, names: Sequence[str]) -> Columns:
    """The same rows, with what each pipeline's schedule asks for taken from the exposed waiting."""
    found = rows.copy()
    taken: list[Columns] = []
    in_a_pass, behind, waits = (
        [names.index(name) for name in kinds if name in names]
        for kinds in (_IN_A_PASS, _BEHIND_PASSES, _WAITS_OF_A_PIPELINE)
    )
    by_process = dict(group_by(rows["process"]))
    exchanges = _exchanges(store, operations)
    for communicator in store.communicators:
        members = [index for _, index in sorted((communicator.members or {}).items())]
        stages = [store.members[index].process for index in members]
        if communicator.parallelism != "PP" or len(stages) != communicator.size or len(stages) < 2:
            continue
        of_stages = [exchanges.get(index, _Exchanges(0, 0)) for index in members]
        shape = _micro_batches(of_stages)
        if shape is None or any(stage not in by_process for stage in stages):
            continue
        (m, chunks), work, later, sent = shape, list[int](), list[int](), list[int]()
        for stage in stages:
            own = rows[by_process[stage]]
            is_pass = np.isin(own["part"], (Part.COMPUTATION, Part.HIDDEN)) | np.isin(own["parallelism"], in_a_pass)
            is_transfer, kind = own["part"] == Part.EXPOSED_TRANSFER, own["parallelism"]
            work.append(_median_ns(own, is_pass))
            later.append(_median_ns(own, is_transfer & np.isin(kind, behind)))
            sent.append(_median_ns(own, is_transfer & (kind == names.index("PP"))))
        passes = [StagePasses(each // (m * chunks) // 3, each // (m * chunks) * 2 // 3) for each in work]
        asked = schedule(passes, m, chunks=chunks).bubble_ns
        all_sent = _exchanges_of_all(len(stages), m) * sum(sent) // sum(each.launches for each in of_stages)
        for stage, own_ns, later_ns, sent_ns, whole_ns in zip(stages, work, later, sent, asked, strict=True):
            mine, equal = by_process[stage], (len(stages) - 1) * own_ns // (m * chunks)
            bubble = max(0, equal + (all_sent - sent_ns if chunks == 1 else 0))
            steps = np.unique(found["iteration"][mine]).tolist()
            parts = (Part.EXPOSED_WAIT, Part.EXPOSED)
            taken += _take(found, mine, waits, (*parts, Part.LATE), dict.fromkeys(steps, bubble), Part.BUBBLE)
            more = max(0, whole_ns - equal) + max(later) - later_ns
            left = {number: max(0, more - late) for number, late in _late_ns(found, mine, waits, steps).items()}
            taken += _take(found, mine, waits, parts, left, Part.IMBALANCE)
    return in_order(row_ops.concat([found, *taken]))


def _exchanges(store: Store, operations: AnyRows) -> dict[int, _Exchanges]:
    """By member that sends or receives in its steps."""
    ops = store.operation_templates.rows["op"][operations["template"]]
    both = np.isin(ops, (OPERATION_CODES["Send"], OPERATION_CODES["Recv"]))
    both &= (operations["iteration"] != NO_NUMBER) & (operations["match"] == Match.MATCHED)
    at = np.flatnonzero(both)
    (of_member, _), place = distinct_together(
        *(operations[name][at].astype(np.int64) for name in ("member", "iteration"))
    )
    sends = np.bincount(place[ops[at] == OPERATION_CODES["Send"]], minlength=len(of_member))
    launches = np.bincount(place[first_positions(operations["kernel"][at])], minlength=len(of_member))
    return {
        int(of_member[mine[0]]): _Exchanges(int(np.median(sends[mine])), int(np.median(launches[mine])))
        for _, mine in group_by(of_member)
    }


def _micro_batches(stages: Sequence[_Exchanges]) -> tuple[int, int] | None:
    """Micro-batches and chunks of a pipeline of these stages; None unless exactly one 1F1B sends as they do.

    A stage sends each micro-batch on from each chunk, forward and backward; the first and the last have nobody behind
    one of theirs. Of two stages without chunks each has a launch more than it sends (warm-up, or cool-down).
    """
    sends, p = [each.sends for each in stages], len(stages)
    found: list[tuple[int, int]] = []
    for chunks in range(1, _MOST_CHUNKS + 1):
        m, rest = divmod(sends[0], 2 * chunks - 1)
        if m and not rest and sends == [sends[0], *[2 * m * chunks] * (p - 2), sends[0]]:
            if chunks == 1 and (p > 2 or stages[0].launches == m + 1):
                return m, 1
            found += [(m, chunks)] if chunks > 1 and m % p == 0 else []
    return found[0] if len(found) == 1 else None


def _exchanges_of_all(stages: int, m: int) -> int:
    """How many exchanges stand one behind the other in a step of 1F1B without chunks, whose stages wait for each.

    A stage in the middle has two for each micro-batch, and all keep its pace.
    """
    return m + 1 if stages == 2 else 2 * (m + stages) - 5


def _median_ns(rows: Columns, counts: NDArray[np.bool_]) -> int:
    """Median over the steps of what these rows last."""
    _, place = np.unique(rows["iteration"], return_inverse=True)
    return int(np.median(np.bincount(place[counts], weights=rows["ns"][counts], minlength=place.max() + 1)))


def _late_ns(found: Columns, mine: Integers, waits: list[int], steps: Iterable[int]) -> dict[int, int]:
    """By step, what is late of the waiting in a pipeline."""
    late = dict.fromkeys(steps, 0)
    at = mine[(found["part"][mine] == Part.LATE) & np.isin(found["parallelism"][mine], waits)]
    for number, ns in zip(found["iteration"][at].tolist(), found["ns"][at].tolist(), strict=True):
        late[number] += ns
    return late


def _take(
    found: Columns, mine: Integers, waits: list[int], parts: Sequence[Part], asked: Mapping[int, int], into: Part
) -> list[Columns]:
    """Takes so much from these parts of the waiting of each step, as far as it goes; the rows that it becomes."""
    left, taken = dict(asked), list[Columns]()
    for part in parts:
        for kind in waits:
            at = mine[(found["part"][mine] == part) & (found["parallelism"][mine] == kind)]
            numbers = found["iteration"][at].tolist()
            wanted = np.asarray([left[number] for number in numbers], np.int64)
            spent = np.minimum(wanted, found["ns"][at])
            rows = found[at]
            rows["part"], rows["ns"] = into, spent
            found["ns"][at] -= spent
            left |= zip(numbers, (wanted - spent).tolist(), strict=True)
            taken.append(rows)
    return taken

"""Lines that each rank logged in each iteration: they are held against a job's description.

The first and the last iteration of a rank are left out: the log may have a part of them. Operations whose communicator,
rank or iteration is not known are left out too, and so are those of which only a kernel is known, whose places are
given as gaps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_models.difference import Line, SeenGroup
from ncclscope_models.explanation import At
from ncclscope_service.columns.group_by import distinct_together
from ncclscope_service.columns.table import AnyRows
from ncclscope_service.job.ranks import global_ranks
from ncclscope_service.store.rows import IterationBy, Match, NumberState
from ncclscope_service.store.tables import Store
from ncclscope_wire.records import SourceKind
from ncclscope_wire.terms import DATA_TYPES, NO_NUMBER, OPERATIONS

_NAMES: Final = {"float16": "FP16", "float32": "FP32", "float64": "FP64", "bfloat16": "BF16"}
"""Types that the models call otherwise than NCCL; of the others NCCL's name in capitals."""


_NEWEST: Final = 8
"""Iterations of a rank that a look has, if they are in memory."""
_SAMPLED: Final = 24
"""Ranks that a look has, about."""
_READ: Final = ("process", "source", "member", "iteration", "iteration_by", "template", "match", "number_state")


@dataclass(slots=True)
class StepLines:
    """The lines of a job."""

    seen: dict[At, dict[SeenGroup, dict[Line, int]]] = field(default_factory=dict)
    """By (global rank, iteration), only whole iterations."""
    gaps: set[At] = field(default_factory=set[At])
    """Where lines are known to be missing."""
    comm_ids: dict[str, str] = field(default_factory=dict)
    """Of each group's name, the communicator's id in the files."""
    parallelism: dict[str, str | None] = field(default_factory=dict)


def newest_step_lines(known: Store, job: str, sample: Collection[int]) -> StepLines:
    """Lines of the last whole iterations of these ranks of a job, from its logs; the rest is looked at no more than to
    leave it out. An iteration whose operations were numbered in two ways is given as a gap.
    """
    wanted = np.zeros(len(known.processes) + 1, np.bool_)
    for member in known.members:
        is_own = known.process_job[member.process] == job
        wanted[member.process] |= is_own and member.global_rank in sample
    is_log = np.asarray([each.source.kind is SourceKind.NCCL_LOG for each in known.sources], np.bool_)
    table = known.operations.rows
    at = np.flatnonzero(wanted[table["process"]])
    found = table.take(at, *_READ)
    found = found[(found["iteration"] >= 0) & is_log[found["source"]]]
    newest = int(found["iteration"].max(initial=0))
    found = found[found["iteration"] > newest - _NEWEST - 2]
    lines = step_lines(known, job, found)
    is_marked = found["iteration_by"] == IterationBy.MARKS
    (processes, iterations), place = distinct_together(
        found["process"].astype(np.int64), found["iteration"].astype(np.int64)
    )
    marked = np.bincount(place, is_marked, len(processes))
    is_mixed = (marked > 0) & (marked < np.bincount(place, minlength=len(processes)))
    mixed = set(zip(processes[is_mixed].tolist(), iterations[is_mixed].tolist(), strict=True))
    ranks = {member.process: member.global_rank for member in known.members if member.global_rank is not None}
    lines.gaps |= {(ranks[process], iteration) for process, iteration in mixed if process in ranks} & lines.seen.keys()
    return lines


def sample_of_ranks(groups: Collection[Sequence[int]]) -> set[int]:
    """Ranks that together have one of each kind of group: the first and the last rank, and who is in groups with them.

    `groups`: global ranks. Of large groups a part.
    """
    known = sorted({rank for group in groups for rank in group if rank >= 0})
    found = set(known[:1] + known[-1:])
    for anchor in (known[:1], known[-1:]):
        for group in sorted((each for each in groups if anchor and anchor[0] in each), key=len):
            own = [rank for rank in group if rank >= 0]
            found.update(own[: max(0, _SAMPLED - len(found))])
    return found


def step_lines(known: Store, job: str, operations: AnyRows) -> StepLines:
    """Lines of these operations of a job, which may be of all jobs."""
    found = StepLines()
    communicator_of = np.asarray([member.communicator for member in known.members], np.int64)
    rank_of = np.asarray(
        [NO_NUMBER if member.global_rank is None else member.global_rank for member in known.members], np.int64
    )
    of_job = np.asarray([communicator.job == job for communicator in known.communicators], np.bool_)
    own = (operations["member"] >= 0) & (operations["iteration"] >= 0)
    if not len(communicator_of) or not own.any():
        return found
    members = operations["member"][own].astype(np.intp)
    ranks, communicators = rank_of[members], communicator_of[members]
    usable = (ranks >= 0) & of_job[communicators]
    ranks, communicators = ranks[usable], communicators[usable]
    iterations = operations["iteration"][own][usable].astype(np.int64)
    templates = operations["template"][own][usable].astype(np.int64)
    is_lost = (operations["match"][own][usable] == Match.LINE_LOST) | (templates < 0)
    is_gap = is_lost | (operations["number_state"][own][usable] == NumberState.UNCERTAIN)
    is_whole = _are_whole(ranks, iterations)
    gaps = np.unique(np.stack([ranks, iterations], 1)[is_gap & is_whole], axis=0)
    found.gaps = {(rank, iteration) for rank, iteration in gaps.tolist()}
    counted = is_whole & ~is_lost
    kinds, kind_of_template = _kinds(known)
    groups = _groups(known, job)
    (at_rank, at_iteration, at_group, at_kind), place = distinct_together(
        ranks[counted], iterations[counted], communicators[counted], kind_of_template[templates[counted]]
    )
    counts = np.bincount(place, minlength=len(at_rank))
    columns = (at_rank.tolist(), at_iteration.tolist(), at_group.tolist(), at_kind.tolist(), counts.tolist())
    for rank, iteration, communicator, kind, count in zip(*columns, strict=True):
        lines = found.seen.setdefault((rank, iteration), {}).setdefault(groups[communicator], {})
        lines[kinds[kind]] = count
        group = groups[communicator].name
        found.comm_ids[group] = known.communicators[communicator].comm_id
        found.parallelism[group] = known.communicators[communicator].parallelism
    return found


def _are_whole(ranks: NDArray[np.int64], iterations: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether each is neither of its rank's first nor of its last iteration."""
    most = int(ranks.max(initial=0)) + 1
    first, last = np.full(most, np.iinfo(np.int64).max), np.full(most, -1)
    np.minimum.at(first, ranks, iterations)
    np.maximum.at(last, ranks, iterations)
    inside: NDArray[np.bool_] = (iterations > first[ranks]) & (iterations < last[ranks])
    return inside


def _kinds(known: Store) -> tuple[list[Line], NDArray[np.int64]]:
    """Lines that differ, and which one each template is of: buffers and threads make no difference."""
    templates = known.operation_templates.rows
    (ops, types, counts), place = distinct_together(
        templates["op"].astype(np.int64), templates["data_type"].astype(np.int64), templates["count"].astype(np.int64)
    )
    kinds = [
        Line(_op_name(op), _type_name(dtype), count)
        for op, dtype, count in zip(ops.tolist(), types.tolist(), counts.tolist(), strict=True)
    ]
    return kinds, place.astype(np.int64)


def _op_name(op: int) -> str:
    return OPERATIONS[op].name if op < len(OPERATIONS) else "unknown"


def _type_name(dtype: int) -> str:
    if not 0 <= dtype < len(DATA_TYPES):
        return f"type {dtype}"
    name = DATA_TYPES[dtype].name
    return _NAMES.get(name, name.upper())


def _groups(known: Store, job: str) -> dict[int, SeenGroup]:
    """By communicator; two of one id get different names."""
    times: dict[str, int] = defaultdict(int)
    found: dict[int, SeenGroup] = {}
    for communicator in known.communicators:
        if communicator.job != job:
            continue
        times[communicator.comm_id] += 1
        nth = times[communicator.comm_id]
        name = communicator.comm_id if nth == 1 else f"{communicator.comm_id} ({nth})"
        ranks = frozenset(global_ranks(known, communicator).values())
        found[communicator.index] = SeenGroup(name, communicator.size, ranks)
    return found

"""Time that others lose to each rank of a job, step by step, over what is usual for ranks of such groups.

A rank that is the last to reach a collective holds the others up by the time from the last but one arrival to its own
(blame). In tensor-, context- and expert-parallel groups lateness arises; in all others a rank may be late because it
was held up itself, in those groups or by its pipeline: what it waited beyond the other ranks of the group is not its
own. Rooted operations and groups that span pipeline stages have a last arriver by design and are left out.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns.buckets import Bools, Floats, Int64s
from ncclscope_service.columns.group_by import accumulate, distinct
from ncclscope_service.detect.context import INNER, spans_stages
from ncclscope_service.detect.step_blame import ROOTED
from ncclscope_service.job.ranks import MAX_RANK, global_ranks
from ncclscope_service.store.records import Communicator
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

COLUMNS: Final = ("communicator", "op", "end_true_ns", "wait_ns", "last_rank", "blame_ns", "rank")
"""Of `rows.COLLECTIVE`, what lost time is made of."""

_MAX_STEPS: Final = 512
_LEAST_STEPS: Final = 32
_MOST_CELLS: Final = 1 << 20
"""Ranks times steps: keeps one look near a tenth of a second."""
_WHOLE: Final = 0.75
"""Share of its usual operations that a group must show of a step, else a capture saw it in part."""


@dataclass(slots=True)
class LateKind:
    """Groups of one parallelism and size: arrays of group by rank by step."""

    communicators: list[Communicator]
    ranks: Int64s
    """Group by rank: place among the job's ranks."""
    blame: Floats
    longest: Floats
    is_whole: Bools
    """Group by step."""
    is_inner: bool

    @property
    def over_usual(self) -> Floats:
        """Blame less what is usual for a rank of such groups: the lower median of all of them."""
        steps = np.maximum(self.is_whole.sum(axis=1), 1)[:, None]
        means = np.sort((self.blame.sum(axis=2) / steps).ravel())
        usual = means[(len(means) - 1) // 2]
        own = self.blame if self.is_inner else np.minimum(self.blame, self.longest)
        return np.where(self.is_whole[:, None, :], own - usual, 0.0)


@dataclass(frozen=True, slots=True)
class LostTimes:
    """Some steps of a job."""

    ranks: list[int]
    """Global, ascending."""
    at: Int64s
    """Numbers of the steps, ascending: their times over the length of a step."""
    lost: Floats
    """Rank by step, in ns: what others lost to the rank in all its groups."""
    is_known: Bools
    """Rank by step."""
    kinds: list[LateKind]
    late: list[Floats]
    """By kind; group by rank by step: how late over what is usual."""
    own: list[Floats]
    """The same without what the rank was held up itself."""


def most_steps(ranks: int) -> int:
    """Steps that are looked at together in a job of so many ranks."""
    return max(_LEAST_STEPS, min(_MAX_STEPS, _MOST_CELLS // max(1, ranks)))


def lost_times(store: Store, job: str, rows: Columns, step_ns: int, *, is_whole: bool = False) -> LostTimes | None:
    """Of collectives of all jobs (COLUMNS) those of one job, its newest steps; None where nothing is known.

    Without `is_whole` the newest step is left out: it may still grow.
    """
    ranks, kinds, waited, at = _kinds(store, job, rows, step_ns, is_whole=is_whole)
    if not kinds:
        return None
    late = [kind.over_usual for kind in kinds]
    lost = np.zeros((len(ranks), len(at)))
    is_known = np.zeros(lost.shape, np.bool_)
    for kind, over in zip(kinds, late, strict=True):
        for place in range(kind.ranks.shape[1]):  # no rank is twice in one group
            is_known[kind.ranks[:, place]] |= kind.is_whole
        if kind.is_inner:
            np.add.at(lost, kind.ranks, np.maximum(over, 0.0))
            held = kind.blame.sum(axis=1, keepdims=True) - kind.blame
            np.add.at(waited, kind.ranks, np.where(kind.is_whole[:, None, :], held, 0.0))
    own: list[Floats] = []
    for kind, over in zip(kinds, late, strict=True):
        passed_on = np.zeros_like(over) if kind.is_inner else waited[kind.ranks]
        passed_on -= passed_on.min(axis=1, keepdims=True)
        own.append(over - passed_on)
        if not kind.is_inner:
            np.maximum.at(lost, kind.ranks, np.maximum(own[-1], 0.0))
    return LostTimes(ranks=ranks, at=at, lost=lost, is_known=is_known, kinds=kinds, late=late, own=own)


def _kinds(
    store: Store, job: str, rows: Columns, step_ns: int, *, is_whole: bool
) -> tuple[list[int], list[LateKind], Floats, Int64s]:
    """The job's ranks, its groups by kind, how long each rank waited in its pipeline by step, and the steps."""
    own = [each for each in store.listed_communicators() if each.job == job]
    has_pipeline = any(each.parallelism == "PP" for each in own)
    judged = {
        each.index: each
        for each in own
        if each.size > 1 and not spans_stages(each.parallelism, has_pipeline=has_pipeline)
    }
    pipelines = {each.index: each for each in own if each.parallelism == "PP"}
    is_timed = rows["end_true_ns"] != NO_TIME_NS  # not so while the clock of a host is unknown
    rows = rows[is_timed & np.isin(rows["communicator"], [*judged, *pipelines])]
    steps = rows["end_true_ns"].astype(np.int64) // step_ns
    is_blame = (rows["last_rank"] >= 0) & (rows["blame_ns"] >= 0) & ~np.isin(rows["op"], ROOTED)
    is_blame &= np.isin(rows["communicator"], list(judged))
    at = distinct(steps[is_blame])[0].astype(np.int64)
    members = {index: global_ranks(store, each) for index, each in (judged | pipelines).items()}
    ranks = sorted({rank for of in members.values() for rank in of.values() if rank < MAX_RANK})
    at = at[: None if is_whole else -1][-most_steps(len(ranks)) :]
    if not len(at):
        return [], [], np.zeros((0, 0)), at
    place_of = {rank: place for place, rank in enumerate(ranks)}
    is_shown = (steps >= at[0]) & (steps <= at[-1])
    of_step = np.minimum(np.searchsorted(at, steps), len(at) - 1)
    is_shown &= at[of_step] == steps
    waited = np.zeros((len(ranks), len(at)))
    is_exchange = is_shown & (rows["rank"] >= 0) & np.isin(rows["communicator"], list(pipelines))
    seats = {index: {rank: place_of[of] for rank, of in members[index].items() if of < MAX_RANK} for index in members}
    whose = np.array(
        [
            seats[communicator].get(rank, NO_NUMBER)
            for communicator, rank in zip(
                rows["communicator"][is_exchange].tolist(), rows["rank"][is_exchange].tolist(), strict=True
            )
        ],
        np.int64,
    )
    known = whose >= 0
    np.add.at(waited, (whose[known], of_step[is_exchange][known]), rows["wait_ns"][is_exchange][known])
    by_kind: dict[tuple[str | None, int], list[Communicator]] = defaultdict(list)
    for each in judged.values():
        if len(seats[each.index]) == each.size:
            by_kind[each.parallelism, each.size].append(each)
    chosen = is_blame & is_shown
    kinds = [_kind(groups, seats, rows[chosen], of_step[chosen], len(at)) for groups in by_kind.values()]
    return ranks, [kind for kind in kinds if kind.is_whole.any()], waited, at


def _kind(
    groups: list[Communicator], seats: dict[int, dict[int, int]], rows: Columns, step: NDArray[np.intp], steps: int
) -> LateKind:
    size = groups[0].size
    place_of = np.full(max(*(each.index for each in groups), int(rows["communicator"].max(initial=0))) + 1, -1)
    place_of[[each.index for each in groups]] = np.arange(len(groups))
    group = place_of[rows["communicator"]]
    mine = (group >= 0) & (rows["last_rank"] < size)
    rows, group, step = rows[mine], group[mine], step[mine]
    shape = (len(groups), size, steps)
    cells = np.ravel_multi_index((group, rows["last_rank"], step), shape)
    blame, longest = np.zeros(shape), np.zeros(shape)
    accumulate(np.add, blame.reshape(-1), cells, rows["blame_ns"])
    accumulate(np.maximum, longest.reshape(-1), cells, rows["blame_ns"])
    counts = np.bincount(group * steps + step, minlength=len(groups) * steps).reshape(len(groups), steps)
    ordered = np.sort(counts, axis=1)
    seen = (counts > 0).sum(axis=1)
    usual = ordered[np.arange(len(groups)), np.minimum(steps - seen + seen // 2, steps - 1)]
    return LateKind(
        communicators=groups,
        ranks=np.array([[seats[each.index][rank] for rank in range(size)] for each in groups], np.int64),
        blame=blame,
        longest=longest,
        is_whole=(counts > 0) & (counts >= _WHOLE * usual[:, None]),
        is_inner=groups[0].parallelism in INNER,
    )

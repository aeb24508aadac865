"""Who holds up whom: the time that others lose to a rank, per step, over what is usual for ranks of such groups.

A rank that is the last to reach a collective holds the others up by the time from the last but one arrival to its own
(blame). In tensor-, context- and expert-parallel groups lateness arises; in all others a rank may be late because it
was held up itself, in those groups or by its pipeline: what it waited beyond the other ranks of the group is not its
own. Rooted operations and groups that span pipeline stages have a last arriver by design and are left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns.group_by import distinct
from ncclscope_service.detect.context import INNER
from ncclscope_service.detect.step_blame import ROOTED
from ncclscope_service.job.ranks import host_of_ranks
from ncclscope_service.rollup.window import MAX_COLLECTIVES, Bools, Floats, Int64s
from ncclscope_service.show.communicators import MAX_RANK
from ncclscope_service.show.details import JobQuery
from ncclscope_service.show.steps import step_time
from ncclscope_service.store.records import Communicator
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER

MAX_ROWS: Final = 64
"""Ranks on the map; of a larger job hosts, and of more hosts those to which most is lost."""
MAX_COLUMNS: Final = 120
MAX_HOLDUPS: Final = 16

_MAX_STEPS: Final = 512
_MOST_CELLS: Final = 1 << 20
"""Ranks times steps: keeps one answer near a tenth of a second."""
_WHOLE: Final = 0.75
"""Share of its usual operations that a group must show of a step, else a capture saw it in part."""
_NOW_NS: Final = 16_000_000_000
_LEAST_NOW: Final = 3
"""Steps that "now" is made of, at least."""
_LEAST_SHARE: Final = 0.0025
"""Of a step: less is not worth an arrow."""
_SECOND_NS: Final = 1_000_000_000
_SPANS_STAGES: Final = frozenset({"PP", "EMBEDDING"})
_MAY_SPAN_STAGES: Final = frozenset({"WORLD", None})


@dataclass(frozen=True, slots=True, kw_only=True)
class LostTimeRow:
    """Time that others lose to a rank, or to the rank of a host to which they lose most."""

    host: str | None
    ranks: tuple[int, ...]
    """The rank, or all known ranks of the host."""
    worst_rank: int
    """To which most is lost now."""
    now_ns: int
    """Per step, median over the last steps."""
    lost_us: tuple[int | None, ...]
    """Per step, by column: mean of its steps; None if none was recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdup:
    """A rank that holds up the others of a group, now."""

    rank: int
    host: str | None
    communicator: str
    parallelism: str | None
    ranks: tuple[int, ...]
    """Those that wait for it there."""
    lost_ns: int
    """Per step."""
    because_of: int | None
    """The rank that holds this one up elsewhere; None if it is late by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostTimeView:
    """The map of lost time of one job."""

    per: str
    """What the times are per: step, or second while the length of a step is not known."""
    step_ns: int
    by: str
    """What a row is: rank or host."""
    begin_ns: int | None
    """Reference clock; None if no collective of at least two ranks was measured lately."""
    column_ns: int
    rows: tuple[LostTimeRow, ...]
    """In order of rank."""
    rows_known: int
    holdups: tuple[Holdup, ...]
    """Those to which most is lost first, each followed by what it causes elsewhere."""


@dataclass(slots=True)
class _Kind:
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


def lost_time_view(query: JobQuery, only: Communicator | None = None) -> LostTimeView:
    """The map of a job, or of the ranks of one of its communicators: what is lost to them in it."""
    history = query.store.step_histories.get(query.job)
    steps = step_time(history, [])
    step_ns = _SECOND_NS if steps is None else max(steps.now_ns, 1)
    ranks, kinds, waited, at = _kinds(query, step_ns)
    if not kinds:
        return _nothing(step_ns)
    raw = [kind.over_usual for kind in kinds]
    lost = np.zeros((len(ranks), len(at)))
    is_known = np.zeros(lost.shape, np.bool_)
    for kind, over in zip(kinds, raw, strict=True):
        for place in range(kind.ranks.shape[1]):  # no rank is twice in one group
            is_known[kind.ranks[:, place]] |= kind.is_whole
        if kind.is_inner:
            np.add.at(lost, kind.ranks, np.maximum(over, 0.0))
            held = kind.blame.sum(axis=1, keepdims=True) - kind.blame
            np.add.at(waited, kind.ranks, np.where(kind.is_whole[:, None, :], held, 0.0))
    net = []
    for kind, over in zip(kinds, raw, strict=True):
        passed_on = np.zeros_like(over) if kind.is_inner else waited[kind.ranks]
        passed_on -= passed_on.min(axis=1, keepdims=True)
        net.append(over - passed_on)
        if not kind.is_inner:
            np.maximum.at(lost, kind.ranks, np.maximum(net[-1], 0.0))
    every, shown_groups = ranks, {each.index for kind in kinds for each in kind.communicators}
    if only is not None:
        shown_groups = {only.index}
        found = [(kind, late, place) for kind, late in zip(kinds, net, strict=True)
                 for place, each in enumerate(kind.communicators) if each.index == only.index]  # fmt: skip
        if not found:
            return _nothing(step_ns)
        ((kind, late, place),) = found
        ranks, lost = [ranks[each] for each in kind.ranks[place].tolist()], np.maximum(late[place], 0.0)
        is_known = np.repeat(kind.is_whole[place][None, :], len(ranks), axis=0)
    is_now = at > at[-1] - max(_LEAST_NOW, _NOW_NS // step_ns)
    is_now[-_LEAST_NOW:] = True
    now_ns = _middles(lost[:, is_now], is_known[:, is_now])
    hosts = host_of_ranks(query.store).get(query.job, {})
    per_column = -(-int(at[-1] - at[0] + 1) // MAX_COLUMNS)
    lost_us = _means(lost, is_known, (at - at[0]) // per_column)
    rows = _rows(ranks, [hosts.get(rank) for rank in ranks], lost_us, now_ns)
    shown = sorted(sorted(range(len(rows)), key=lambda place: -rows[place].now_ns)[:MAX_ROWS])
    groups = [
        _Lateness(kind.communicators[place].index, [every[rank] for rank in kind.ranks[place].tolist()], *of)
        for kind, over, own in zip(kinds, raw, net, strict=True)
        for place, *of in zip(range(len(over)), _now(over, kind, is_now), _now(own, kind, is_now), strict=True)
        if kind.communicators[place].index in shown_groups
    ]
    return LostTimeView(
        per="second" if steps is None else "step",
        step_ns=step_ns,
        by="rank" if len(ranks) <= MAX_ROWS else "host",
        begin_ns=int(at[0]) * step_ns,
        column_ns=per_column * step_ns,
        rows=tuple(rows[place] for place in shown),
        rows_known=len(rows),
        holdups=tuple(_holdups(query, groups, hosts, _LEAST_SHARE * step_ns))[:MAX_HOLDUPS],
    )


def _nothing(step_ns: int) -> LostTimeView:
    return LostTimeView(
        per="step", step_ns=step_ns, by="rank", begin_ns=None, column_ns=step_ns, rows=(), rows_known=0, holdups=()
    )


@dataclass(frozen=True, slots=True)
class _Lateness:
    """How late the ranks of one group are now, in ns per step, and how much of it is their own."""

    communicator: int
    ranks: list[int]
    all_ns: list[float]
    own_ns: list[float]


def _now(late: Floats, kind: _Kind, is_now: Bools) -> list[list[float]]:
    """Of each group and rank, the median over its whole steps of now."""
    is_whole = np.broadcast_to(kind.is_whole[:, None, is_now], late[:, :, is_now].shape)
    found: list[list[float]] = _middles(late[:, :, is_now], is_whole).tolist()
    return found


def _middles(values: Floats, is_known: Bools) -> Floats:
    """Medians of the known values of the last axis; 0 where there is none."""
    counts = is_known.sum(axis=-1)
    ordered = np.sort(np.where(is_known, values, np.inf), axis=-1)
    places = np.stack([np.maximum(counts - 1, 0) // 2, np.minimum(counts // 2, values.shape[-1] - 1)], axis=-1)
    middles = np.take_along_axis(ordered, places, axis=-1)
    return np.where(counts > 0, np.where(np.isfinite(middles), middles, 0.0).mean(axis=-1), 0.0)


def _means(lost: Floats, is_known: Bools, column: Int64s) -> list[list[int | None]]:
    """By rank, the mean of each column in us; None without a step."""
    count = int(column[-1]) + 1
    found: list[list[int | None]] = []
    for row, known in zip(lost, is_known, strict=True):
        steps = np.bincount(column[known], minlength=count)
        sums = np.bincount(column[known], weights=row[known], minlength=count)
        means = np.rint(sums / np.maximum(steps, 1) / 1e3).astype(np.int64).tolist()
        found.append([mean if step else None for mean, step in zip(means, steps.tolist(), strict=True)])
    return found


def _rows(
    ranks: list[int], hosts: list[str | None], lost_us: list[list[int | None]], now_ns: Floats
) -> list[LostTimeRow]:
    """A row for each rank; of more than MAX_ROWS ranks one for each host, with the largest of its ranks."""
    places: dict[object, list[int]] = defaultdict(list)
    for place, (rank, host) in enumerate(zip(ranks, hosts, strict=True)):
        places[rank if len(ranks) <= MAX_ROWS or host is None else host].append(place)
    rows: list[LostTimeRow] = []
    for of in places.values():
        worst = max(of, key=lambda place: now_ns[place])
        columns = zip(*(lost_us[place] for place in of), strict=True)
        rows.append(
            LostTimeRow(
                host=hosts[of[0]],
                ranks=tuple(ranks[place] for place in of),
                worst_rank=ranks[worst],
                now_ns=round(now_ns[worst]),
                lost_us=tuple(max((each for each in cell if each is not None), default=None) for cell in columns),
            )
        )
    return rows


def _holdups(query: JobQuery, groups: list[_Lateness], hosts: dict[int, str], least_ns: float) -> Iterator[Holdup]:
    """Ranks that are late by themselves, the latest first, each with the others that it holds up and that are then late
    elsewhere.
    """
    inner = [each for each in groups if query.store.communicators[each.communicator].parallelism in INNER]
    outer = [each for each in groups if each not in inner]
    own = sorted(
        ((late, rank, each) for each in groups for rank, late in zip(each.ranks, each.own_ns, strict=True)),
        key=lambda found: -found[0],
    )
    named: set[int] = set()
    for late, rank, group in own:
        if late < least_ns:
            return
        if rank in named:
            continue  # late in another group too
        named.add(rank)
        yield _holdup(query, group, rank, hosts, late, because_of=None)
        held = set(group.ranks) - {rank} if group in inner else set[int]()
        for other in outer:
            for late_rank, all_ns, own_ns in zip(other.ranks, other.all_ns, other.own_ns, strict=True):
                if late_rank in held and late_rank not in named and all_ns >= least_ns and own_ns < all_ns / 2:
                    yield _holdup(query, other, late_rank, hosts, all_ns, because_of=rank)


def _holdup(
    query: JobQuery, group: _Lateness, rank: int, hosts: dict[int, str], lost_ns: float, *, because_of: int | None
) -> Holdup:
    return Holdup(
        rank=rank,
        host=hosts.get(rank),
        communicator=query.aliases[group.communicator],
        parallelism=query.store.communicators[group.communicator].parallelism,
        ranks=tuple(each for each in group.ranks if each != rank),
        lost_ns=round(lost_ns),
        because_of=because_of,
    )


def _kinds(query: JobQuery, step_ns: int) -> tuple[list[int], list[_Kind], Floats, Int64s]:
    """The job's ranks, its groups by kind, how long each rank waited in its pipeline by step, and the steps' numbers.

    The newest step is left out: it may still grow.
    """
    own = [each for each in query.store.listed_communicators() if each.job == query.job]
    has_pipeline = any(each.parallelism == "PP" for each in own)
    judged = {each.index: each for each in own if each.size > 1 and _is_judged(each, has_pipeline=has_pipeline)}
    pipelines = {each.index: each for each in own if each.parallelism == "PP"}
    rows = _newest(query, [*judged, *pipelines])
    steps = rows["end_true_ns"].astype(np.int64) // step_ns
    is_blame = (rows["last_rank"] >= 0) & (rows["blame_ns"] >= 0) & ~np.isin(rows["op"], ROOTED)
    is_blame &= np.isin(rows["communicator"], list(judged))
    at = distinct(steps[is_blame])[0].astype(np.int64)
    members = {index: query.ranks_of(each) for index, each in (judged | pipelines).items()}
    ranks = sorted({rank for of in members.values() for rank in of.values() if rank < MAX_RANK})
    at = at[:-1][-max(32, min(_MAX_STEPS, _MOST_CELLS // max(1, len(ranks)))) :]
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


def _newest(query: JobQuery, communicators: Sequence[int]) -> Columns:
    table = query.store.collectives
    names = ("communicator", "op", "end_true_ns", "wait_ns", "last_rank", "blame_ns", "rank")
    rows = table.rows.take(np.arange(max(0, len(table) - MAX_COLLECTIVES), len(table)), *names)
    return rows[np.isin(rows["communicator"], communicators)]


def _is_judged(communicator: Communicator, *, has_pipeline: bool) -> bool:
    kind = communicator.parallelism
    return kind not in _SPANS_STAGES and not (has_pipeline and kind in _MAY_SPAN_STAGES)


def _kind(
    groups: list[Communicator], seats: dict[int, dict[int, int]], rows: Columns, step: NDArray[np.intp], steps: int
) -> _Kind:
    size = groups[0].size
    place_of = np.full(max(*(each.index for each in groups), int(rows["communicator"].max(initial=0))) + 1, -1)
    place_of[[each.index for each in groups]] = np.arange(len(groups))
    group = place_of[rows["communicator"]]
    mine = (group >= 0) & (rows["last_rank"] < size)
    rows, group, step = rows[mine], group[mine], step[mine]
    shape = (len(groups), size, steps)
    cells = np.ravel_multi_index((group, rows["last_rank"], step), shape)
    blame, longest = np.zeros(shape), np.zeros(shape)
    np.add.at(blame.reshape(-1), cells, rows["blame_ns"])
    np.maximum.at(longest.reshape(-1), cells, rows["blame_ns"])
    counts = np.bincount(group * steps + step, minlength=len(groups) * steps).reshape(len(groups), steps)
    ordered = np.sort(counts, axis=1)
    seen = (counts > 0).sum(axis=1)
    usual = ordered[np.arange(len(groups)), np.minimum(steps - seen + seen // 2, steps - 1)]
    return _Kind(
        communicators=groups,
        ranks=np.array([[seats[each.index][rank] for rank in range(size)] for each in groups], np.int64),
        blame=blame,
        longest=longest,
        is_whole=(counts > 0) & (counts >= _WHOLE * usual[:, None]),
        is_inner=groups[0].parallelism in INNER,
    )

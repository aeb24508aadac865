"""Who holds up whom: the time that others lose to a rank, per step, over what is usual for ranks of such groups.

`detect.lost_time` says what is lost; here it is put into rows and columns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from ncclscope_service.columns.buckets import Bools, Floats, Int64s
from ncclscope_service.detect.context import INNER
from ncclscope_service.detect.lost_time import COLUMNS, LateKind, LostTimes, lost_times
from ncclscope_service.job.ranks import host_of_ranks
from ncclscope_service.rollup.window import MAX_COLLECTIVES
from ncclscope_service.show.details import JobQuery
from ncclscope_service.show.steps import step_time
from ncclscope_service.store.job_history import LOST, STEPS, JobHistory
from ncclscope_service.store.records import Communicator
from ncclscope_wire.batch import Columns

MAX_ROWS: Final = 64
"""Ranks on the map; of a larger job hosts, and of more hosts those to which most is lost."""
MAX_COLUMNS: Final = 120
MAX_HOLDUPS: Final = 16

_NOW_NS: Final = 16_000_000_000
_LEAST_NOW: Final = 3
"""Steps that "now" is made of, at least."""
_LEAST_SHARE: Final = 0.0025
"""Of a step: less is not worth an arrow."""
_SECOND_NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LostTimeRow:
    """Time that others lose to a rank, or to the rank of a host to which they lose most."""

    host: str | None
    ranks: tuple[int, ...]
    """The rank, or all known ranks of the host."""
    worst_rank: int
    """To which most is lost now."""
    now_ns: int | None
    """Per step, median over the last steps; None if memory holds none."""
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
    """Reference clock; None if no collective of at least two ranks was measured."""
    column_ns: int
    rows: tuple[LostTimeRow, ...]
    """In order of rank."""
    rows_known: int
    holdups: tuple[Holdup, ...]
    """Those to which most is lost first, each followed by what it causes elsewhere."""


def lost_time_view(query: JobQuery, only: Communicator | None = None) -> LostTimeView:
    """The map of a job, or of the ranks of one of its communicators: what is lost to them in it.

    Over the whole time of a job where the query asks for that; of one communicator only as far as memory reaches.
    """
    steps = step_time(query.store.step_histories.get(query.job), [])
    step_ns = _SECOND_NS if steps is None else max(steps.now_ns, 1)
    live = lost_times(query.store, query.job, _newest(query), step_ns)
    part = None if live is None else _part(live, only)
    is_recent = only is not None or query.charted.job is None
    course = _recent_course(part, step_ns) if is_recent else _whole(query, part, step_ns)
    if course is None:
        return _nothing(step_ns)
    hosts = host_of_ranks(query.store).get(query.job, {})
    now_of = {} if part is None else dict(zip(part.ranks, _now_ns(part, step_ns), strict=True))
    rows = _rows(course.ranks, [hosts.get(rank) for rank in course.ranks], course.lost_us, now_of)
    shown = sorted(sorted(range(len(rows)), key=lambda place: -(rows[place].now_ns or 0))[:MAX_ROWS])
    return LostTimeView(
        per="second" if steps is None else "step",
        step_ns=step_ns,
        by="rank" if len(course.ranks) <= MAX_ROWS else "host",
        begin_ns=course.begin_ns,
        column_ns=course.column_ns,
        rows=tuple(rows[place] for place in shown),
        rows_known=len(rows),
        holdups=()
        if live is None
        else tuple(_holdups(query, _lateness(live, only, step_ns), hosts, _LEAST_SHARE * step_ns))[:MAX_HOLDUPS],
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """Ranks that are shown, with what is lost to each; shape (ranks, steps)."""

    ranks: list[int]
    at: Int64s
    lost: Floats
    is_known: Bools


def _part(live: LostTimes, only: Communicator | None) -> _Part | None:
    """All ranks of a job, or those of one communicator with what is lost to them there."""
    if only is None:
        return _Part(live.ranks, live.at, live.lost, live.is_known)
    for kind, own in zip(live.kinds, live.own, strict=True):
        for place, each in enumerate(kind.communicators):
            if each.index == only.index:
                ranks = [live.ranks[rank] for rank in kind.ranks[place].tolist()]
                is_known = np.repeat(kind.is_whole[place][None, :], len(ranks), axis=0)
                return _Part(ranks, live.at, np.maximum(own[place], 0.0), is_known)
    return None


def _is_now(at: Int64s, step_ns: int) -> Bools:
    is_now: Bools = at > at[-1] - max(_LEAST_NOW, _NOW_NS // step_ns)
    is_now[-_LEAST_NOW:] = True
    return is_now


def _now_ns(part: _Part, step_ns: int) -> list[int]:
    is_now = _is_now(part.at, step_ns)
    return [round(each) for each in _middles(part.lost[:, is_now], part.is_known[:, is_now]).tolist()]


@dataclass(frozen=True, slots=True)
class _Course:
    """Time lost to ranks, over time."""

    ranks: list[int]
    begin_ns: int
    column_ns: int
    lost_us: list[list[int | None]]
    """Per step, by rank and column; None without a step."""


def _recent_course(part: _Part | None, step_ns: int) -> _Course | None:
    """The steps in memory, some in each column."""
    if part is None:
        return None
    per_column = -(-int(part.at[-1] - part.at[0] + 1) // MAX_COLUMNS)
    sums = _by_column(part, (part.at - part.at[0]) // per_column, int(part.at[-1] - part.at[0]) // per_column + 1)
    return _Course(part.ranks, int(part.at[0]) * step_ns, per_column * step_ns, _means(*sums))


def _whole(query: JobQuery, part: _Part | None, step_ns: int) -> _Course | None:
    """The job since its start: its history, and the steps behind it that are in memory."""
    history = query.store.job_histories.get(query.job, JobHistory())
    window = history.window(query.job, query.charted.begin_ns, query.now_ns, most=MAX_COLUMNS)
    live_ranks = set[int]() if part is None else set(part.ranks)
    ranks = sorted(live_ranks.union(history.lost_time.groups.tolist()))
    if not ranks:
        return None
    chosen, into = np.array(ranks), np.arange(len(ranks))
    lost, known = (history.lost_time.by_bucket(of, window, chosen, into, len(ranks)) for of in (LOST, STEPS))
    if part is not None:
        times = part.at * step_ns
        behind = np.flatnonzero((times >= history.lost_until_ns) & window.holds(times))
        newer = _Part(part.ranks, part.at[behind], part.lost[:, behind], part.is_known[:, behind])
        of_part = np.searchsorted(chosen, part.ranks)
        lost_now, known_now = _by_column(newer, window.bucket_of(times[behind]), window.buckets)
        lost[of_part] += lost_now
        known[of_part] += known_now
    return _Course(ranks, window.begin_ns, window.bucket_ns, _means(lost, known))


def _by_column(part: _Part, column: Int64s, columns: int) -> tuple[Floats, Floats]:
    """By rank, what was lost in each column together, and in how many steps that was measured."""
    lost, steps = np.zeros((len(part.ranks), columns)), np.zeros((len(part.ranks), columns))
    for place, known in enumerate(part.is_known):
        lost[place] = np.bincount(column[known], weights=part.lost[place][known], minlength=columns)
        steps[place] = np.bincount(column[known], minlength=columns)
    return lost, steps


def _lateness(live: LostTimes, only: Communicator | None, step_ns: int) -> list[_Lateness]:
    """Of all groups, or one, how late their ranks are now."""
    is_now = _is_now(live.at, step_ns)
    return [
        _Lateness(kind.communicators[place].index, [live.ranks[rank] for rank in kind.ranks[place].tolist()], *of)
        for kind, late, own in zip(live.kinds, live.late, live.own, strict=True)
        for place, *of in zip(range(len(late)), _now(late, kind, is_now), _now(own, kind, is_now), strict=True)
        if only is None or kind.communicators[place].index == only.index
    ]


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


def _now(late: Floats, kind: LateKind, is_now: Bools) -> list[list[float]]:
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


def _means(lost: Floats, steps: Floats) -> list[list[int | None]]:
    """By rank, the mean of each column in us; None without a step."""
    means = np.rint(lost / np.maximum(steps, 1) / 1e3).astype(np.int64).tolist()
    return [
        [mean if step else None for mean, step in zip(*of, strict=True)]
        for of in zip(means, steps.tolist(), strict=True)
    ]


def _rows(
    ranks: list[int], hosts: list[str | None], lost_us: list[list[int | None]], now_of: dict[int, int]
) -> list[LostTimeRow]:
    """A row for each rank; of more than MAX_ROWS ranks one for each host, with the largest of its ranks."""
    places: dict[object, list[int]] = defaultdict(list)
    for place, (rank, host) in enumerate(zip(ranks, hosts, strict=True)):
        places[rank if len(ranks) <= MAX_ROWS or host is None else host].append(place)
    rows: list[LostTimeRow] = []
    for of in places.values():
        worst = max(of, key=lambda place: now_of.get(ranks[place], 0))
        columns = zip(*(lost_us[place] for place in of), strict=True)
        rows.append(
            LostTimeRow(
                host=hosts[of[0]],
                ranks=tuple(ranks[place] for place in of),
                worst_rank=ranks[worst],
                now_ns=now_of.get(ranks[worst]),
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


def _newest(query: JobQuery) -> Columns:
    table = query.store.collectives
    return table.rows.take(np.arange(max(0, len(table) - MAX_COLLECTIVES), len(table)), *COLUMNS)

"""The iteration in a sequence of calls that repeats itself: which calls come once in each, and in which order.

Training calls NCCL in the same order step after step, with shorter repetitions inside (microbatches, layers) and rare
events between (evaluation, checkpoints). Calls that recur at even distances are sorted by that distance. The iteration
is the longest distance at which tensors are reduced, if a scalar (a norm, a loss) recurs there as well; else the
distance of the most frequent scalar above it, since activations are reduced for each microbatch; else it stays
unconfirmed, and is none while other calls may yet recur at a longer one. All calls that recur at that
distance are its *marks*: a new iteration begins where their order starts again, so that any of them may be lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]

LEAST_ITERATIONS: Final = 3
"""Recurrences of a call below which nothing is called a period."""
_EVEN: Final = 0.25
"""Distances up to this share from their median are even: lost lines shorten them, evaluation lengthens some."""
_MOSTLY_EVEN: Final = 0.6
_COVERS: Final = 0.6
"""Share of the sequence that a call's recurrences must span."""
_SAME: Final = 0.2
"""Distances that differ by less are of one level."""
_MOST_MICROBATCHES: Final = 1024
_UNCONFIRMED: Final = 0.6
"""Sureness of a distance at which no scalar recurs."""
_MANY: Final = 8
"""Iterations seen from which on their number is evidence enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Calls of one rank, in order, as columns."""

    kind: Integers
    """Calls of one kind are equal numbers from 0 on."""
    is_tensor_reduction: NDArray[np.bool_]
    """AllReduce, Reduce or ReduceScatter of more than a few values."""
    is_scalar: NDArray[np.bool_]
    """A collective of a few values."""
    at_ns: Integers | None = None
    """When; None if any is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """One iteration."""

    kinds: tuple[int, ...]
    """Its marks: kinds of calls that come once in it, in their order."""
    operations: int
    """Calls in all, median."""
    iterations: int
    """How many were seen."""
    confidence: float
    reductions: int = 0
    """Where there is one mark only: reductions of tensors in it, median; by these a mark that was lost is missed."""
    first_kind: int = -1
    """... and what is called first after the mark."""


@dataclass(frozen=True, slots=True)
class _Recurring:
    """Kinds of calls that recur at even distances, as columns of equal length."""

    kind: Integers
    distance: NDArray[np.float64]
    evenness: NDArray[np.float64]
    amount: Integers
    is_tensor: NDArray[np.bool_]
    is_scalar: NDArray[np.bool_]


def find_cycle(calls: Calls) -> Cycle | None:
    """The iteration that these calls repeat; None if nothing recurs evenly."""
    if not len(calls.kind):
        return None
    recurring = _recurring(calls)
    chosen = _distance(recurring)
    if chosen is None:
        return None
    distance, sureness = chosen
    if sureness <= _UNCONFIRMED and _may_be_inside(calls):
        return None
    same = np.flatnonzero(_is_near(recurring.distance, distance))
    most = int(recurring.amount[same].max())
    same = same[recurring.amount[same] >= _COVERS * most]
    kinds = _in_order(calls, recurring.kind[same])
    seen = _iterations_of(calls.kind, kinds)
    if seen > most * (1 + _EVEN):  # their order is not the same each time: only one of them can be trusted
        kinds = kinds[-1:]
        seen = most
    reductions, first_kind = _between_marks(calls, int(kinds[0])) if len(kinds) == 1 else (0, -1)
    evenness = float(np.median(recurring.evenness[same]))
    sureness *= evenness * min(1.0, 0.5 + most / (2 * _MANY)) * (1.0 if len(kinds) > 1 else 0.8)
    return Cycle(
        kinds=tuple(kinds.tolist()),
        operations=round(distance),
        iterations=max(1, seen),
        confidence=sureness,
        reductions=reductions,
        first_kind=first_kind,
    )


def _may_be_inside(calls: Calls) -> bool:
    """Whether what recurs may be a part of an iteration, such as a microbatch, of which too few were seen yet.

    So it is while something has come twice and is not yet due a third time; and after a tensor was reduced, at last,
    that has not recurred often: if it is one of each iteration, it will have when four times as many calls were seen
    as came up to it.
    """
    _, first, amount = np.unique(calls.kind, return_index=True, return_counts=True)
    rare = first[(amount < LEAST_ITERATIONS) & calls.is_tensor_reduction[first]]
    if len(rare) and len(calls.kind) < (LEAST_ITERATIONS + 1) * (int(rare.max()) + 1):
        return True
    last = len(calls.kind) - 1 - np.unique(calls.kind[::-1], return_index=True)[1]
    is_due = last + (1 + _EVEN) * (last - first) < len(calls.kind)
    return bool((~is_due & (amount == LEAST_ITERATIONS - 1)).any())


def _between_marks(calls: Calls, mark: int) -> tuple[int, int]:
    """How many tensors are reduced from one mark to the next, and the kind of call that mostly follows a mark."""
    marks = np.flatnonzero(calls.kind == mark)
    reduced = np.cumsum(calls.is_tensor_reduction)[marks]
    followers = calls.kind[marks[marks + 1 < len(calls.kind)] + 1]
    if len(marks) < LEAST_ITERATIONS or not len(followers):
        return 0, -1
    return round(float(np.median(np.diff(reduced)))), int(np.bincount(followers).argmax())


def lost_marks(
    is_mark: NDArray[np.bool_], is_reduction: NDArray[np.bool_], is_first: NDArray[np.bool_], reductions: int
) -> Integers:
    """For each call how many marks before it were lost, if each iteration has one mark only.

    A stretch from mark to mark in which twice as many tensors are reduced as usual was two iterations: evaluation
    between them reduces none. The border is where a reduction is followed by what an iteration begins with, nearest to
    the share of the reductions. The calls after the last mark are left as they are.
    """
    steps = np.zeros(len(is_mark) + 1, np.int64)
    reduced = np.cumsum(is_reduction)
    borders = np.flatnonzero(is_first[1:] & is_reduction[:-1]) + 1
    before = 0
    for mark in np.flatnonzero(is_mark).tolist():
        here, passed = int(reduced[mark]) - before, borders[(borders <= mark) & (reduced[borders] > before)]
        times = round(here / reductions) if reductions else 1
        for part in range(1, times if len(passed) else 1):
            wanted = before + part * here / times
            steps[passed[np.abs(reduced[passed - 1] - wanted).argmin()]] += 1
        before = int(reduced[mark])
    return np.cumsum(steps)[:-1]


def phases_of(kind: Integers, cycle_kinds: tuple[int, ...], kinds: int) -> Integers:
    """For each call its place among the marks of the iteration, -1 for others; `kinds`: how many kinds there are."""
    place = np.full(kinds, -1, np.int64)
    place[list(cycle_kinds)] = np.arange(len(cycle_kinds))
    return place[kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where in its iterations a rank is."""

    iteration: int = 0
    """Iterations that have ended."""
    mark: int = -1
    """Phase of the last mark in this one; -1 before the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """The iterations of the calls of several ranks, and where the ranks are after them."""

    iterations: Integers
    """Of each call: the number of its iteration."""
    iteration: Integers
    """Of each rank: iterations that have ended."""
    mark: Integers
    """Of each rank: phase of the last mark in this one; -1 before the first."""
    is_late: NDArray[np.bool_]
    """Of each rank: whether the calls since the last mark before these were of the next iteration."""


def count_iterations(phases: Integers, cycle_kinds: int, place: Place) -> tuple[Integers, Place, bool]:
    """The iteration of each call, the place after them, and whether the calls since the last mark were of the next one.

    `phases` as from `phases_of`, with `cycle_kinds` marks; `place` is what the calls before came to.
    """
    one = np.asarray([cycle_kinds, place.iteration, place.mark], np.int64)[:, np.newaxis]
    counted = count_of_ranks(phases, np.asarray([0, len(phases)], np.int64), *one)
    reached = Place(iteration=int(counted.iteration[0]), mark=int(counted.mark[0]))
    return counted.iterations, reached, bool(counted.is_late[0])


def count_of_ranks(
    phases: Integers, begins: Integers, cycle_kinds: Integers, iteration: Integers, mark: Integers
) -> Counted:
    """The iteration of each call of several ranks, in one go.

    `phases`: of their calls, rank by rank; `begins`: where the calls of each rank begin, and at last where all end. Of
    each rank: how many marks it has, and its place after the calls before. An iteration ends with its last mark; where
    that was lost, with the mark after which their order starts again.
    """
    amount = len(cycle_kinds)
    rank = np.repeat(np.arange(amount), np.diff(begins))
    at = np.flatnonzero(phases >= 0)
    of, places = rank[at], phases[at]
    is_last = places == cycle_kinds[of] - 1
    is_first = np.diff(of, prepend=-1) != 0
    previous = np.where(is_first, mark[of], np.roll(np.where(is_last, -1, places), 1))
    again = places <= previous
    # Each rank has a slot for each call, and one more for what comes after them.
    slots = np.arange(len(phases)) + rank
    before = np.where(is_first, begins[of] - 1, np.roll(at, 1))
    ends_after = np.concatenate([(at + of)[is_last], (before + of)[again]])
    passed = np.cumsum(np.bincount(ends_after + 1, minlength=len(phases) + amount))
    first, last = begins[:-1] + np.arange(amount), begins[1:] + np.arange(amount)
    ended = np.concatenate([np.zeros(1, np.int64), passed])[first]
    newest, is_late = mark.copy(), np.zeros(amount, np.bool_)
    newest[of] = np.where(is_last, -1, places)  # of several that are written to one place, the last one stays
    is_late[of[is_first]] = again[is_first]
    return Counted(
        iterations=(iteration - ended)[rank] + passed[slots],
        iteration=iteration - ended + passed[last],
        mark=newest,
        is_late=is_late,
    )


def _recurring(calls: Calls) -> _Recurring:
    order = np.argsort(calls.kind, kind="stable")
    kinds, first, amount = np.unique(calls.kind[order], return_index=True, return_counts=True)
    follows = np.flatnonzero(np.diff(calls.kind[order]) == 0)
    of, steps = np.repeat(np.arange(len(kinds)), amount - 1), (order[1:] - order[:-1])[follows]
    distances = _medians(steps, of, len(kinds))
    is_even = np.abs(steps - distances[of]) <= _EVEN * distances[of] + 1
    even = np.bincount(of, is_even, len(kinds)) / np.maximum(amount - 1, 1)
    covers = (order[first + amount - 1] - order[first] + distances) >= _COVERS * len(calls.kind)
    kept = np.flatnonzero((amount >= LEAST_ITERATIONS) & (even >= _MOSTLY_EVEN) & covers)
    places = order[first[kept]]
    return _Recurring(
        kind=kinds[kept].astype(np.int64),
        distance=distances[kept],
        evenness=even[kept],
        amount=amount[kept].astype(np.int64),
        is_tensor=calls.is_tensor_reduction[places],
        is_scalar=calls.is_scalar[places],
    )


def _medians(values: Integers, of: Integers, amount: int) -> NDArray[np.float64]:
    """The median of the values of each group, `of` being the group of each value; 0 for groups without any."""
    ordered = values[np.lexsort((values, of))]
    counts = np.bincount(of, minlength=amount)
    ends = np.cumsum(counts)
    some = np.flatnonzero(counts)
    lower, upper = (ends - counts + (counts - 1) // 2)[some], (ends - counts + counts // 2)[some]
    medians = np.zeros(amount)
    medians[some] = (ordered[lower] + ordered[upper]) / 2
    return medians


def _distance(recurring: _Recurring) -> tuple[float, float] | None:
    """How many calls an iteration has, and how sure that is."""
    tensors, scalars = recurring.distance[recurring.is_tensor], recurring.distance[recurring.is_scalar]
    if not len(tensors):
        return (float(scalars.min()), 0.8) if len(scalars) else None
    longest = float(tensors.max())
    if _is_near(scalars, longest).any():
        return longest, 1.0
    above = scalars[(scalars > longest) & (scalars <= longest * _MOST_MICROBATCHES)]
    return (float(above.min()), 0.8) if len(above) else (longest, _UNCONFIRMED)


def _is_near(distances: NDArray[np.float64], distance: float) -> NDArray[np.bool_]:
    near: NDArray[np.bool_] = np.abs(distances - distance) <= _SAME * distance + 1
    return near


def _in_order(calls: Calls, kinds: Integers) -> Integers:
    """These kinds, which come once in each iteration, in order; the last is the one before the longest pause.

    Where there are scalars among them, the last is one of these, and of several in a row the last one: an iteration
    ends with the norm of its gradients.
    """
    place = np.full(int(calls.kind.max()) + 1, -1, np.int64)
    place[kinds] = np.arange(len(kinds))
    at = np.flatnonzero(place[calls.kind] >= 0)
    own = place[calls.kind[at]]
    times = at if calls.at_ns is None else calls.at_ns[at]
    follower = _most_frequent_after(own, len(kinds))
    pause = _medians(np.diff(times), own[:-1], len(kinds))
    calls_between = _medians(np.diff(at), own[:-1], len(kinds)) - 1
    is_scalar = np.zeros(len(kinds), np.bool_)
    is_scalar[own] = calls.is_scalar[at]
    if is_scalar.any():
        ends = is_scalar & ~(is_scalar[follower] & (calls_between <= 1))  # of several in a row only the last
        pause[~ends] = np.where(is_scalar[~ends], -1.0, -2.0)
    ordered = [int(follower[pause.argmax()])]
    while len(ordered) < len(kinds) and int(follower[ordered[-1]]) not in ordered:
        ordered.append(int(follower[ordered[-1]]))
    return kinds[ordered]


def _most_frequent_after(values: Integers, amount: int) -> Integers:
    """For each value below `amount` the one that mostly comes next; of several, the least."""
    pairs, counts = np.unique(values[:-1] * amount + values[1:], return_counts=True)
    value, after = np.divmod(pairs, amount)
    order = np.lexsort((after, -counts, value))
    found = np.zeros(amount, np.int64)
    found[value[order[::-1]]] = after[order[::-1]]  # the first of each value is written last
    return found


def _iterations_of(kind: Integers, cycle_kinds: Integers) -> int:
    phases = phases_of(kind, tuple(cycle_kinds.tolist()), int(kind.max()) + 1)
    _, place, _ = count_iterations(phases, len(cycle_kinds), Place())
    return place.iteration + (place.mark >= 0)

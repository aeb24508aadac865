"""The iteration in a sequence of calls that repeats itself: which calls come once in each, and in which order.

Training calls NCCL in the same order step after step, with shorter repetitions inside (microbatches, layers) and rare
events between (evaluation, checkpoints). Calls that recur at even distances are sorted by that distance. The iteration
is the longest distance at which tensors are reduced, if a scalar (a norm, a loss) recurs there as well; else the
distance of the most frequent scalar above it, since activations are reduced for each microbatch; else it stays
unconfirmed. All calls that recur at that distance are its *marks*: a new iteration begins where their order starts
again, so that any of them may be lost.
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
_MANY: Final = 8
"""Iterations seen from which on their number is evidence enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """What one rank called, in order, as columns."""

    kind: Integers
    """Calls of one kind are equal numbers from 0 on."""
    is_tensor_reduction: NDArray[np.bool_]
    """AllReduce, Reduce or ReduceScatter of more than a few values."""
    is_scalar: NDArray[np.bool_]
    """A collective of a few values."""
    at_ns: Integers | None = None
    """When; None where any is not known."""


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
    """The iteration that these calls repeat; None where nothing recurs evenly."""
    if not len(calls.kind):
        return None
    recurring = _recurring(calls)
    chosen = _distance(recurring)
    if chosen is None:
        return None
    distance, sureness = chosen
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
    """For each call how many marks before it were lost, where each iteration has one mark only.

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


def count_iterations(phases: Integers, cycle_kinds: int, place: Place) -> tuple[Integers, Place, bool]:
    """The iteration of each call, the place after them, and whether the calls since the last mark were of the next one.

    `phases` as from `phases_of`, with `cycle_kinds` marks; `place` is what the calls before came to. An iteration ends
    with its last mark; where that was lost, with the mark after which their order starts again.
    """
    marks = np.flatnonzero(phases >= 0)
    if not len(marks):
        return np.full(len(phases), place.iteration, np.int64), place, False
    places = phases[marks]
    is_last = places == cycle_kinds - 1
    previous = np.concatenate([[place.mark], np.where(is_last, -1, places)[:-1]])
    again = places <= previous
    ends_after = np.concatenate([marks[is_last], np.concatenate([[-1], marks[:-1]])[again]])
    steps = np.zeros(len(phases) + 1, np.int64)
    np.add.at(steps, ends_after + 1, 1)
    counted = place.iteration + np.cumsum(steps)
    reached = Place(iteration=int(counted[-1]), mark=-1 if is_last[-1] else int(places[-1]))
    return counted[:-1], reached, bool(again[0])


def _recurring(calls: Calls) -> _Recurring:
    order = np.argsort(calls.kind, kind="stable")
    kinds, first, amount = np.unique(calls.kind[order], return_index=True, return_counts=True)
    chosen = np.flatnonzero(amount >= LEAST_ITERATIONS)
    distances, evenness = np.zeros(len(chosen)), np.zeros(len(chosen))
    for row, kind in enumerate(chosen.tolist()):
        places = order[first[kind] : first[kind] + amount[kind]]
        steps = np.diff(places)
        distances[row] = np.median(steps)
        even = np.mean(np.abs(steps - distances[row]) <= _EVEN * distances[row] + 1)
        covers = (places[-1] - places[0] + distances[row]) >= _COVERS * len(calls.kind)
        evenness[row] = even if covers else 0.0
    places = order[first[chosen]]
    kept = np.flatnonzero(evenness >= _MOSTLY_EVEN)
    return _Recurring(
        kind=kinds[chosen][kept].astype(np.int64),
        distance=distances[kept],
        evenness=evenness[kept],
        amount=amount[chosen][kept].astype(np.int64),
        is_tensor=calls.is_tensor_reduction[places][kept],
        is_scalar=calls.is_scalar[places][kept],
    )


def _distance(recurring: _Recurring) -> tuple[float, float] | None:
    """How many calls an iteration has, and how sure that is."""
    tensors, scalars = recurring.distance[recurring.is_tensor], recurring.distance[recurring.is_scalar]
    if not len(tensors):
        return (float(scalars.min()), 0.8) if len(scalars) else None
    longest = float(tensors.max())
    if _is_near(scalars, longest).any():
        return longest, 1.0
    above = scalars[(scalars > longest) & (scalars <= longest * _MOST_MICROBATCHES)]
    return (float(above.min()), 0.8) if len(above) else (longest, 0.6)


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
    follower, pause, calls_between = np.zeros(len(kinds), np.int64), np.zeros(len(kinds)), np.zeros(len(kinds))
    times = at if calls.at_ns is None else calls.at_ns[at]
    for kind in range(len(kinds)):
        here = np.flatnonzero(own[:-1] == kind)
        next_ones = own[here + 1]
        follower[kind] = np.bincount(next_ones, minlength=len(kinds)).argmax()
        pause[kind] = np.median(times[here + 1] - times[here])
        calls_between[kind] = np.median(at[here + 1] - at[here]) - 1
    is_scalar = np.zeros(len(kinds), np.bool_)
    is_scalar[own] = calls.is_scalar[at]
    if is_scalar.any():
        ends = is_scalar & ~(is_scalar[follower] & (calls_between <= 1))  # of several in a row only the last
        pause[~ends] = np.where(is_scalar[~ends], -1.0, -2.0)
    ordered = [int(follower[pause.argmax()])]
    while len(ordered) < len(kinds) and int(follower[ordered[-1]]) not in ordered:
        ordered.append(int(follower[ordered[-1]]))
    return kinds[ordered]


def _iterations_of(kind: Integers, cycle_kinds: Integers) -> int:
    phases = phases_of(kind, tuple(cycle_kinds.tolist()), int(kind.max()) + 1)
    _, place, _ = count_iterations(phases, len(cycle_kinds), Place())
    return place.iteration + (place.mark >= 0)

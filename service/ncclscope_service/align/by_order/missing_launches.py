"""How many launches are missing before a kernel or a line.

*Before a kernel*, by the correlation ids that were used up since the kernel before. Every call of the CUDA API takes
one, so a program that repeats takes about as many for each launch of a kind: a gap as wide as two launches hides one.
What each kind takes, and how much that scatters, is learnt from pairs; if it scatters as much as gaps do by chance, the
gaps say little.

*Before a line*, by opCount if it counts (`op_count`), else by what usually follows what: what comes after a kind of
call is nearly always the same, and if something else comes, what is usually between was lost. If every line is lost
with chance q, and T[a, b] is how often b is called after a, then b is logged next after a with probability
O = (1 - q) (T + q T^2 + q^2 T^3 + ...). O is counted; T = O ((1 - q) + q O)^-1 follows, made likeliest by expectation
maximisation, and with it how many lines lie between: q T^2 (1 - q T)^-2 over T (1 - q T)^-1. If calls are independent
of each other this is the same for all and says nothing.

A kind is the text of a line, buffers included: allocators reuse buffers, so a training step logs the very same texts as
the one before, and a text shows its place in the step. A program whose texts never recur would make kinds without end:
then kinds are what decides about a launch.

*Source:* CUPTI, `CUpti_ActivityAPI.correlationId` (one number per API call of a process, in the order of the calls).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.align.by_order.pair_hmm import Floats
from ncclscope_service.columns.group_by import CombinationIndex
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER

TEXTS_LIMIT: Final = 4096
"""Kinds after which texts are left out of account."""

_KIND: Final = np.dtype([("signature", "<i4"), ("text", "<i4")])

_MOST: Final = 12
"""Amounts of missing launches that are distinguished."""

_ENOUGH: Final = 64.0
"""Pairs after which kinds of launches are known; before, kernels of one lane and class are taken for one kind."""

_QUANTILE: Final = 0.4
"""Of the gaps before such kernels: most hide nothing."""

_PRIOR: Final = 2.0
"""Launches that the mean of all kinds weighs in that of each."""

_ID_MEMORY: Final = 4000.0
"""Pairs after which older ones count less."""

_LEAST_SCATTER: Final = 0.05
_ASTRAY: Final = 1e-4
"""Density of gaps that no number of missing launches explains: something else was called there."""

_LEAST_BY_IDS, _GREATEST_BY_IDS = 0.003, 20.0
"""Expected missing launches, at least and at most."""

Indices = NDArray[np.intp]

KINDS_LIMIT: Final = 192
"""Kinds of calls of a communicator that are distinguished; the others share one."""

_ROUNDS: Final = 6
"""Of estimating what is called after what from what was logged and lost, and that again."""

_UNSEEN: Final = 1.0
"""Calls after each kind that are taken to be as frequent there as anywhere."""

_LEAST_GAIN: Final = 8.0
"""Least gain (logarithm of the likelihood) for which the order of a communicator's calls is used."""

_STANDING: Final = 0.1
"""Largest share of launches with an opCount that stands still for which its steps are used."""

_MEMORY: Final = 20_000.0
"""Calls of a communicator after which older ones count less."""

_LEAST, _GREATEST = 0.003, 64.0
"""Expected lines between two calls, at least and at most."""


@dataclass(slots=True)
class LaunchKinds:
    """Numbers kinds of launches in order of appearance."""

    _kinds: CombinationIndex = field(default_factory=lambda: CombinationIndex(("signature", "text")))

    def __len__(self) -> int:
        return len(self._kinds)

    def number(self, launches: Columns) -> NDArray[np.int32]:
        """The kind of each launch (LAUNCH)."""
        rows = np.empty(len(launches), _KIND)
        rows["signature"], rows["text"] = launches["signature"], launches["text"]
        if len(self._kinds) >= TEXTS_LIMIT:
            rows["text"] = NO_NUMBER
        return self._kinds.number(rows)


@dataclass(frozen=True, slots=True)
class MissingKernels:
    """Launches that are expected to have a line and no kernel, for several rates of lost kernels."""

    amount: Floats
    """(m + 1, B): before each kernel and behind the last."""
    log_likelihood: Floats
    """(B,): of the gaps."""


@dataclass(frozen=True, slots=True)
class _Taken:
    """Correlation ids that launches take, by earlier pairs."""

    sums: Floats
    """Weight, and sum of the ids taken, of each kind."""
    scatter: Floats
    """Sum of squared deviations, and of what was expected."""

    @property
    def means(self) -> Floats:
        """Ids that one launch of each kind takes."""
        weight, total = self.sums[:, 0], self.sums[:, 1]
        overall = total.sum() / max(float(weight.sum()), 1e-9)
        means: Floats = (total + _PRIOR * overall) / (weight + _PRIOR)
        return means

    @property
    def variance(self) -> float:
        """Of the ids a launch takes, over their mean."""
        return max(float(self.scatter[0] / max(self.scatter[1], 1e-9)), _LEAST_SCATTER)


@dataclass(slots=True)
class KernelGaps:
    """Missing launches by the correlation ids of one thread's kernels."""

    _kinds: LaunchKinds = field(default_factory=LaunchKinds)
    _sums: Floats = field(default_factory=lambda: np.zeros((0, 2)))
    _scatter: Floats = field(default_factory=lambda: np.zeros(2))
    _last_id: int | None = None
    """Of the kernel before the next window."""

    def missing(
        self, launches: Columns, kernels: Columns, pairs: Floats | None, kernels_lost: Floats, lines_lost: float
    ) -> MissingKernels:
        """Launches missing in a window.

        `pairs` (n, m): how likely each pair is so far; None: nothing is known. `kernels_lost` (B): the share of lost
        kernels, under several answers; `lines_lost` of lines.
        """
        widths = self._widths(kernels)
        taken, own = self._expected(launches, kernels, widths, pairs)
        chances = _chances(widths, own, taken, kernels_lost)
        likely = chances.sum(axis=1, keepdims=True)
        chances /= likely
        expected = np.tensordot(chances, np.arange(_MOST), axes=(1, 0)) * (1 - lines_lost)
        behind = kernels_lost / (1 - kernels_lost)
        expected[np.isnan(widths)] = behind
        amount = np.clip(np.concatenate([expected, behind[None]]), _LEAST_BY_IDS, _GREATEST_BY_IDS)
        return MissingKernels(amount, np.log(likely[~np.isnan(widths), 0]).sum(axis=0))

    def learn(self, launches: Columns, kernels: Columns, pairs: Floats, kernels_lost: float) -> None:
        """Learns from a decided window; no later one begins before its end."""
        if len(kernels) == 0:
            return
        widths = self._widths(kernels)
        taken = self._with(launches, kernels, widths, pairs, kernels_lost)
        fading = min(1.0, _ID_MEMORY / max(float(taken.sums[:, 0].sum()), 1.0))
        self._sums, self._scatter = taken.sums * fading, taken.scatter * fading
        self._last_id = int(kernels["correlation_id"][-1])

    def _widths(self, kernels: Columns) -> Floats:
        """Ids since the kernel before; NaN if that is not known."""
        ids = kernels["correlation_id"].astype(np.float64)
        return np.diff(ids, prepend=np.nan if self._last_id is None else float(self._last_id))

    def _expected(
        self, launches: Columns, kernels: Columns, widths: Floats, pairs: Floats | None
    ) -> tuple[_Taken, Floats]:
        """Ids that each kind takes, and each kernel's own launch."""
        rough = _rough(kernels, widths)
        if pairs is None and float(self._sums[:, 0].sum()) < _ENOUGH:
            return self._first(widths, rough), rough
        if pairs is None:
            return _Taken(self._sums, self._scatter), rough
        taken = self._with(launches, kernels, widths, pairs, 0.1)
        return taken, self._own(launches, pairs, taken, rough)

    def _own(self, launches: Columns, pairs: Floats, taken: _Taken, rough: Floats) -> Floats:
        """By which launches each kernel may be; what is left by its lane and class."""
        sure = np.minimum(pairs.sum(axis=0), 1.0)
        means = taken.means[self._kinds.number(launches)]
        own: Floats = pairs.T @ means + (1 - sure) * rough
        return own

    def _with(self, launches: Columns, kernels: Columns, widths: Floats, pairs: Floats, kernels_lost: float) -> _Taken:
        """The same with these pairs: the gaps before them count as far as they hide nothing."""
        kinds = self._kinds.number(launches)
        self._grow()
        rough = _rough(kernels, widths)
        known = _Taken(self._sums, self._scatter)
        if float(self._sums[:, 0].sum()) < _ENOUGH:
            known, own = self._first(widths, rough), rough
        else:
            own = self._own(launches, pairs, known, rough)
        chances = _chances(widths, own, known, np.array([kernels_lost]))[:, :, 0]
        alone = chances[:, 0] / chances.sum(axis=1)
        alone[np.isnan(widths)] = 0.0
        widths = np.nan_to_num(widths)
        weights = pairs * alone
        sums = self._sums.copy()
        np.add.at(sums, kinds, np.stack([weights.sum(axis=1), weights @ widths], axis=1))
        means = _Taken(sums, self._scatter).means[kinds]
        squares = weights @ widths**2 - 2 * means * (weights @ widths) + means**2 * weights.sum(axis=1)
        more = np.array([squares.sum(), (weights.sum(axis=1) * means).sum()])
        return _Taken(sums, self._scatter + more)

    def _first(self, widths: Floats, rough: Floats) -> _Taken:
        """Before anything is known: the scatter of those gaps that are no wider than the usual one and a half."""
        near = widths < 1.5 * rough
        away = np.where(near, widths - rough, 0.0)
        mean = float(rough[near].sum())
        count = float(np.count_nonzero(near))
        return _Taken(np.array([[count, mean]]), np.array([float((away**2).sum()), max(mean, 1e-9)]))

    def _grow(self) -> None:
        missing = len(self._kinds) - len(self._sums)
        if missing > 0:
            self._sums = np.concatenate([self._sums, np.zeros((missing, 2))])


def _rough(kernels: Columns, widths: Floats) -> Floats:
    """Ids that a kernel's launch takes, by the lane and class of kernels alone."""
    rough: Floats = np.full(len(kernels), np.nanquantile(widths, _QUANTILE) if np.isfinite(widths).any() else 1.0)
    keys = kernels["lane"].astype(np.int64) << 8 | kernels["kernel_class"]
    for key in np.unique(keys).tolist():
        mine = (keys == key) & np.isfinite(widths)
        if np.count_nonzero(mine) >= 4:
            rough[keys == key] = np.quantile(widths[mine], _QUANTILE)
    np.maximum(rough, 1.0, out=rough)
    return rough


def _chances(widths: Floats, own: Floats, taken: _Taken, kernels_lost: Floats) -> Floats:
    """(m, _MOST, B): likelihood of each gap with each number of missing launches.

    A launch takes a gamma-distributed number of ids, so that several take one of the same kind.
    """
    mean = float(taken.sums[:, 1].sum() / max(taken.sums[:, 0].sum(), 1e-9))
    variance = taken.variance
    amounts = np.arange(_MOST)
    shape = (own[:, None] + amounts * mean) / variance
    wide = np.maximum(np.nan_to_num(widths, nan=1.0), 0.5)[:, None]
    log_density = (shape - 1) * np.log(wide / variance) - wide / variance - np.log(variance) - _log_gamma(shape)
    density = np.exp(log_density) + _ASTRAY
    chances: Floats = density[:, :, None] * (1 - kernels_lost) * kernels_lost ** amounts[:, None]
    return chances


def _log_gamma(values: Floats) -> Floats:
    """Stirling's series, after one step up so that it holds for small values too."""
    above = values + 1
    series: Floats = (above - 0.5) * np.log(above) - above + 0.5 * np.log(2 * np.pi) + 1 / (12 * above)
    series -= np.log(values)
    return series


@dataclass(frozen=True, slots=True)
class MissingLines:
    """Lines that are expected to be missing, by where between the launches of a window they would stand."""

    amount: Floats
    """(n + 1,): before each launch and behind the last."""
    lanes: Floats
    """(n + 1, m): how much likelier each kernel's lane is for one of them than for any kernel."""


@dataclass(slots=True)
class _Calls:
    """Successions of calls on one communicator."""

    kinds: dict[int, int] = field(default_factory=dict[int, int])
    """Number of each kind in `counts`."""
    counts: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    last: int | None = None
    """Number of the last call's kind."""
    steps: float = 0.0
    """Launches before which opCount moved."""
    stands: float = 0.0

    def number(self, kinds: NDArray[np.int32]) -> Indices:
        values, inverse = np.unique(kinds, return_inverse=True)
        numbers = [self.kinds.setdefault(kind, min(len(self.kinds), KINDS_LIMIT)) for kind in values.tolist()]
        missing = max(self.kinds.values()) + 1 - len(self.counts)
        if missing > 0:
            self.counts = np.pad(self.counts, (0, missing))
        return np.array(numbers, dtype=np.intp)[inverse]

    def between(self, numbers: Indices, rate: float) -> Floats:
        """Lines expected between calls, these included; before the first if the one before it is known."""
        counts = self.counts.copy()
        if self.last is not None:
            numbers = np.concatenate([[self.last], numbers])
        np.add.at(counts, (numbers[:-1], numbers[1:]), 1.0)
        if _gain(counts) < _LEAST_GAIN:
            return np.full(len(numbers) - 1, rate / (1 - rate))
        table = _lines_between(counts, rate)
        found: Floats = table[numbers[:-1], numbers[1:]]
        return found

    def learn(self, numbers: Indices, lost: NDArray[np.int32]) -> None:
        known = np.concatenate([[self.last], numbers]).astype(np.intp) if self.last is not None else numbers
        np.add.at(self.counts, (known[:-1], known[1:]), 1.0)
        self.last = int(numbers[-1])
        self.stands += float(np.count_nonzero(lost == NO_NUMBER))
        self.steps += float(np.count_nonzero(lost != NO_NUMBER))
        fading = min(1.0, _MEMORY / max(float(self.counts.sum()), 1.0))
        self.counts *= fading

    def counts_every_launch(self, lost: NDArray[np.int32]) -> bool:
        stands = self.stands + np.count_nonzero(lost == NO_NUMBER)
        return bool(stands - 1 <= _STANDING * (self.steps + self.stands + len(lost)))


@dataclass(slots=True)
class LineGaps:
    """Missing lines of one thread, communicator by communicator."""

    _kinds: LaunchKinds = field(default_factory=LaunchKinds)
    _calls: dict[int, _Calls] = field(default_factory=dict[int, _Calls])

    def missing(
        self, launches: Columns, launch_lanes: NDArray[np.int32], kernel_lanes: NDArray[np.int32], rate: float
    ) -> MissingLines:
        """Lines missing in a window of launches (LAUNCH).

        `launch_lanes`: on which lane of the kernels each runs, negative if that is not known; `rate`: the share of
        lines that is lost.
        """
        lanes, amounts = np.unique(kernel_lanes, return_counts=True)
        share: Floats = amounts / len(kernel_lanes)
        expected = np.zeros((len(launches) + 1, len(lanes)))
        kinds = self._kinds.number(launches)
        prior = rate / (1 - rate)
        for member in np.unique(launches["member"]).tolist():
            at = np.flatnonzero(launches["member"] == member)
            own = self._of_member(member, launches[at], kinds[at], at, len(launches), prior)
            place = np.searchsorted(lanes, launch_lanes[at[0]])
            if place < len(lanes) and lanes[place] == launch_lanes[at[0]]:
                expected[:, place] += own
            else:
                expected += own[:, None] * share
        expected = np.maximum(expected, _LEAST * share)
        amount = expected.sum(axis=1)
        return MissingLines(amount, (expected / amount[:, None] / share)[:, np.searchsorted(lanes, kernel_lanes)])

    def learn(self, launches: Columns) -> None:
        """Learns from decided launches."""
        kinds = self._kinds.number(launches)
        for member in np.unique(launches["member"]).tolist():
            mine = launches["member"] == member
            calls = self._calls.setdefault(member, _Calls())
            calls.learn(calls.number(kinds[mine]), launches["lines_lost"][mine])

    def _of_member(
        self, member: int, rows: Columns, kinds: NDArray[np.int32], at: Indices, size: int, prior: float
    ) -> Floats:
        """(size + 1,): its missing lines before each launch of the window; `at`: where its own launches are."""
        calls = self._calls.setdefault(member, _Calls())
        begins = np.concatenate([[0], at[:-1] + 1])
        lost = rows["lines_lost"]
        between: Floats = np.full(len(rows), prior)
        known = calls.last is not None
        if calls.counts_every_launch(lost):
            between = np.where(lost == NO_NUMBER, prior, lost).astype(np.float64)
        else:
            between[0 if known else 1 :] = calls.between(calls.number(kinds), prior / (1 + prior))
        density = prior * len(rows) / size
        rate = np.clip(between, _LEAST, _GREATEST) / (at + 1 - begins)
        if not known:
            rate[0] = density
        own = np.full(size + 1, density)
        own[: at[-1] + 1] = np.repeat(rate, at + 1 - begins)
        return own


def _gain(counts: Floats) -> float:
    """How much likelier (logarithm) calls are by the call before them, each foretold by all the others."""
    often = counts.sum(axis=0) / max(float(counts.sum()), 1.0)
    pairs = counts > 0
    others = np.maximum(counts - 1, 0.0)
    before = np.maximum(counts.sum(axis=1, keepdims=True) - 1, 0.0)
    predicted = (others + _UNSEEN * often) / (before + _UNSEEN)
    ratio = np.where(pairs, predicted / np.where(often > 0, often, 1.0), 1.0)
    return float((counts * np.log(ratio)).sum())


def _lines_between(counts: Floats, rate: float) -> Floats:
    """How many lines are expected to be lost between two calls that are logged one after the other.

    What was seen once is not taken for usual: it may be the loss that is asked about.
    """
    size = len(counts)
    often = counts.sum(axis=0) / max(float(counts.sum()), 1.0)
    logged = np.maximum(counts - 1, 0.0) + _UNSEEN * often
    shares = logged / logged.sum(axis=1, keepdims=True)
    called = shares @ np.linalg.inv((1 - rate) * np.eye(size) + rate * shares)
    called = np.maximum(called, 1e-3 * often)
    for _ in range(_ROUNDS):
        called /= called.sum(axis=1, keepdims=True)
        further = np.linalg.inv(np.eye(size) - rate * called)
        next_logged = np.maximum(called @ further, 1e-12)
        called = called * (further.T @ (logged / next_logged) @ further.T)
    called /= called.sum(axis=1, keepdims=True)
    further = np.linalg.inv(np.eye(size) - rate * called)
    first = called @ further
    expected: Floats = rate * called @ first @ further / np.maximum(first, 1e-12)
    return np.clip(expected, _LEAST, _GREATEST)

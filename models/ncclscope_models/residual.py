"""Corrections of a prediction, learned from a hundred measured times and more: how many times longer they took.

Boosted trees on the logarithm of observed over predicted (scikit-learn and scipy, the extra `models`). Trees know
nothing beyond their data: on a model's width that no run had they were wrong by half. So a time is corrected only if
every kind is one of the measured ones, every number lies in its range, and a measured time is as near as measured ones
are to each other; what is not corrected is refused with the name of what is outside. And what does not foretell runs
that are left out better than the prediction itself, or one factor on it, is not used at all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_models.job import ModelError

LEAST_TIMES: Final = 100
"""With fewer one factor, or none, foretells others as well."""
_FOLDS: Final = 5
_NEAR: Final = 0.95
"""Share of the measured times that have another run as near as a time has to be that is corrected."""
_COVERED: Final = 0.8
_TREES: Final = 200
_LEAST_OF_A_LEAF: Final = 5
"""Of a hundred times scikit-learn's 20 of a leaf would leave two or three splits."""

Floats = NDArray[np.float64]


class NotLearnedError(ModelError):
    """No correction is learned from these times."""


class OutsideError(ModelError):
    """A time lies outside of those that were measured; the text names what and where."""


@dataclass(frozen=True, slots=True)
class Features:
    """A description of what a time was predicted or measured for."""

    kinds: Mapping[str, str | int]
    """Never foretold for a value that was not measured: how wide a model is, what GPU it runs on."""
    numbers: Mapping[str, float]
    """Positive; foretold between measured ones. Their distance is that of their logarithms."""
    products: Mapping[str, float] = field(default_factory=dict[str, float])
    """Follow from the numbers: foretold between measured ones too, and no distance of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTime:
    """A time that was predicted and measured, in seconds."""

    run: Hashable
    """Times of one run are left out together."""
    features: Features
    predicted: float
    observed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """How many times longer than predicted; four of five lie between `low` and `high`."""

    low: float
    typical: float
    high: float


class Residual:
    """Corrections of a prediction."""

    def __init__(self, inside: _Inside, trees: _Trees, errors: _Errors) -> None:
        self._inside, self._trees = inside, trees
        self.times = len(inside.rows)
        """That it was learned from."""
        self.error = errors.learned
        """Mean error of runs that were left out, as a logarithm; of those that were refused none."""
        self.plain_error = errors.plain
        """Of the same without it: as predicted or with one factor, whichever is better."""
        self._width = errors.width

    def correction(self, features: Features) -> Correction:
        """Of a time that is predicted.

        Raises:
            OutsideError: It lies outside of what was measured.
        """
        row = self._inside.row(features)
        self._inside.check(row)
        factor = float(np.exp(self._trees.foretell(row[None, :])[0]))
        width = float(np.exp(self._width))
        return Correction(low=factor / width, typical=factor, high=factor * width)


def learned(times: Sequence[MeasuredTime]) -> Residual:
    """From times that all have the same kinds and numbers.

    Raises:
        NotLearnedError: There are too few, or what is learned does not foretell runs that are left out better.
    """
    if len(times) < LEAST_TIMES:
        raise NotLearnedError(f"a correction is learned from {LEAST_TIMES} measured times on, not from {len(times)}")
    inside = _Inside(times)
    off = np.log([each.observed / each.predicted for each in times])
    errors = _left_out(times, inside, off)
    if errors.learned >= errors.plain:
        raise NotLearnedError(
            f"of runs that are left out a learned correction is off by {_percent(errors.learned)}, "
            f"one factor or none by {_percent(errors.plain)}: it is not used"
        )
    return Residual(inside, _Trees(inside.rows, off), errors)


@dataclass(frozen=True, slots=True)
class _Errors:
    """Of times that were left out and answered: mean errors and the 80th percentile, as logarithms."""

    learned: float
    plain: float
    width: float


def _left_out(times: Sequence[MeasuredTime], inside: _Inside, off: Floats) -> _Errors:
    """Each run is left out once, with every fifth other one."""
    runs = {run: number for number, run in enumerate(dict.fromkeys(each.run for each in times))}
    fold = np.array([runs[each.run] % _FOLDS for each in times])
    learned_errors: list[Floats] = []
    plain_errors: list[tuple[Floats, Floats]] = []
    for left_out in range(min(_FOLDS, len(runs))):
        kept, asked = np.flatnonzero(fold != left_out), np.flatnonzero(fold == left_out)
        if not len(kept):
            break
        known = _Inside([times[int(at)] for at in kept], inside)
        asked = np.array([at for at in asked if known.refusal(inside.rows[at]) is None], np.intp)
        if len(asked):
            foretold = _Trees(known.rows, off[kept]).foretell(inside.rows[asked])
            learned_errors.append(np.abs(off[asked] - foretold))
            plain_errors.append((np.abs(off[asked]), np.abs(off[asked] - np.median(off[kept]))))
    if not learned_errors:
        raise NotLearnedError("no run is like the others: each lies outside of what they show")
    found = np.concatenate(learned_errors)
    plain = min(float(np.concatenate(each).mean()) for each in zip(*plain_errors, strict=True))
    return _Errors(float(found.mean()), plain, float(np.quantile(found, _COVERED)))


class _Trees:
    """Boosted trees. So little data is slower on several threads, and a hundred times so on a busy machine."""

    def __init__(self, rows: Floats, off: Floats) -> None:
        from sklearn.ensemble import HistGradientBoostingRegressor  # noqa: PLC0415  # of the extra `models`
        from threadpoolctl import threadpool_limits  # noqa: PLC0415  # scikit-learn's own

        self._on_threads = threadpool_limits
        with self._on_threads(1):
            trees = HistGradientBoostingRegressor(max_iter=_TREES, min_samples_leaf=_LEAST_OF_A_LEAF, random_state=0)
            self._fitted = trees.fit(rows, off)

    def foretell(self, rows: Floats) -> Floats:
        """Logarithms of observed over predicted."""
        with self._on_threads(1):
            return np.asarray(self._fitted.predict(rows), np.float64)


class _Inside:
    """Bounds of the measured times. A row has the number of each kind's value, then logarithms."""

    def __init__(self, times: Sequence[MeasuredTime], whole: _Inside | None = None) -> None:
        """`whole` gives the numbers of kinds and the scale of distances, if `times` are a part of it."""
        first = times[0].features
        self.kinds, self.numbers, self.products = tuple(first.kinds), tuple(first.numbers), tuple(first.products)
        if whole is None:
            values = [sorted({each.features.kinds[name] for each in times}, key=str) for name in self.kinds]
            self.values = [{value: at for at, value in enumerate(known)} for known in values]
        else:
            self.values = whole.values
        self.rows = np.array([self.row(each.features) for each in times], np.float64)
        bounded = self.rows[:, len(self.kinds) :]
        self.lowest, self.highest = bounded.min(axis=0), bounded.max(axis=0)
        logs = bounded[:, : len(self.numbers)]
        if whole is None:
            spread = logs.std(axis=0)
            self.scale = np.where(spread > 0, spread, 1.0)
        else:
            self.scale = whole.scale
        runs = [each.run for each in times]
        alike: defaultdict[tuple[float, ...], list[int]] = defaultdict(list)
        for at, row in enumerate(self.rows):
            alike[tuple(row[: len(self.kinds)])].append(at)
        self._near = {key: _Neighbours(logs[at] / self.scale, [runs[each] for each in at]) for key, at in alike.items()}
        distances = np.concatenate([each.distances() for each in self._near.values()])
        known = distances[np.isfinite(distances)]
        self._furthest = float(np.quantile(known, _NEAR)) if len(known) else 0.0

    def row(self, features: Features) -> Floats:
        """Of any features.

        Raises:
            OutsideError: A kind was never measured.
        """
        kinds: list[int] = []
        for name, known in zip(self.kinds, self.values, strict=True):
            value = features.kinds[name]
            if value not in known:
                raise OutsideError(f"{name} {value} is not among those of the runs ({', '.join(map(str, known))})")
            kinds.append(known[value])
        numbers = [features.numbers[name] for name in self.numbers]
        products = [features.products[name] for name in self.products]
        return np.array([*kinds, *np.log([*numbers, *products])], np.float64)

    def check(self, row: Floats) -> None:
        """Raises OutsideError where this is not inside."""
        why = self.refusal(row)
        if why is not None:
            raise OutsideError(why)

    def refusal(self, row: Floats) -> str | None:
        """Why this row is not foretold; None if it is."""
        kinds, logs = row[: len(self.kinds)], row[len(self.kinds) :]
        names = (*self.numbers, *self.products)
        for name, number, low, high in zip(names, logs, self.lowest, self.highest, strict=True):
            if not low - 1e-9 <= number <= high + 1e-9:
                return f"{name} {np.exp(number):.6g} lies outside of the runs' {np.exp(low):.6g} to {np.exp(high):.6g}"
        near = self._near.get(tuple(kinds))
        if near is None:
            together = ", ".join(self._kinds_in_words(kinds))
            return f"no run has {together} together"
        distance = near.distance(logs[: len(self.numbers)] / self.scale)
        if distance > self._furthest:
            return f"no run is near: the nearest is {distance:.2g} away, runs from each other {self._furthest:.2g}"
        return None

    def _kinds_in_words(self, kinds: Floats) -> Iterator[str]:
        """Those of which there are several."""
        for name, known, at in zip(self.kinds, self.values, kinds, strict=True):
            if len(known) > 1:
                yield f"{name} {list(known)[int(at)]}"


class _Neighbours:
    """Distances to measured times of the same kinds."""

    def __init__(self, points: Floats, runs: Sequence[Hashable]) -> None:
        from scipy.spatial import KDTree  # noqa: PLC0415  # of the extra `models`

        self._points, self._runs, self._tree_of = points, runs, KDTree
        self._tree = KDTree(points)

    def distance(self, point: Floats) -> float:
        """To the nearest."""
        return float(self._tree.query(point)[0])

    def distances(self) -> Floats:
        """Of each to the nearest of another run; infinite where there is none."""
        number = {run: at for at, run in enumerate(dict.fromkeys(self._runs))}
        run = np.array([number[each] for each in self._runs])
        found = np.full(len(run), np.inf)
        if len(number) == 1:
            return found
        for each in range(len(number)):
            mine = run == each
            found[mine] = self._tree_of(self._points[~mine]).query(self._points[mine])[0]
        return found


def _percent(log_error: float) -> str:
    return f"{100 * np.expm1(log_error):.1f} %"

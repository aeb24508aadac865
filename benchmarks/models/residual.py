"""How well a correction that is learned from many runs foretells those that it has not seen. All of it is real.

Steps: vTrain's runs on one node of A100, and on many nodes. Collectives: nccl-tests of clusters that nobody here made,
and vTrain's tables of AllReduce inside a node. Beside it what the prediction says alone, and times one factor; of
collectives also what the product uses, which learns nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from benchmarks.models import corpora, vtrain
from benchmarks.models.collective_times import from_neighbours
from benchmarks.models.vtrain import MeasuredStep
from numpy.typing import NDArray

from ncclscope_models.learned_steps import step_features
from ncclscope_models.machine import Placement
from ncclscope_models.predicted_step import predict_step
from ncclscope_models.residual import Features, MeasuredTime, NotLearnedError, OutsideError, Residual, learned
from ncclscope_models.textbook import allreduce_wire
from ncclscope_models.transfer_curve import fit_line, transfer_curve
from ncclscope_service.nccl.nccl_tests import NcclTests
from ncclscope_wire.terms import OPERATIONS

_FOLDS = 5
_LEAST_SIZES = 7
_EVERY = 8
"""Of vTrain's thousand sizes, which hardly differ from each other, every eighth."""

Floats = NDArray[np.float64]


def main() -> None:
    """Prints the tables."""
    _steps()
    _nccl_tests()
    _ranks()


@dataclass(slots=True)
class _Errors:
    """Of times that were left out, as logarithms."""

    asked: int = 0
    predicted: list[float] = field(default_factory=list[float])
    """Of all that were asked, with `factor`."""
    factor: list[float] = field(default_factory=list[float])
    known: list[float] = field(default_factory=list[float])
    """By the product's own way, of all; empty if there is none beside the prediction."""
    learned: list[float] = field(default_factory=list[float])
    inside: list[bool] = field(default_factory=list[bool])
    """Of those that were answered."""
    refusals: Counter[str] = field(default_factory=Counter[str])

    def add(self, kept: Sequence[MeasuredTime], asked: Sequence[MeasuredTime], known: Sequence[float] = ()) -> None:
        """Learns from `kept` and asks for the others; `known`: seconds of those by the product's own way."""
        factor = float(np.median([np.log(each.observed / each.predicted) for each in kept]))
        residual, why = _learned(kept)
        for at, each in enumerate(asked):
            off = float(np.log(each.observed / each.predicted))
            self.asked += 1
            self.predicted.append(abs(off))
            self.factor.append(abs(off - factor))
            self.known += [abs(float(np.log(known[at] / each.observed)))] if known else []
            if residual is None:
                self.refusals[why] += 1
                continue
            try:
                found = residual.correction(each.features)
            except OutsideError as outside:
                self.refusals[_shape_of(str(outside))] += 1
                continue
            self.learned.append(abs(off - float(np.log(found.typical))))
            self.inside.append(found.low <= float(np.exp(off)) <= found.high)

    def row(self, name: str) -> str:
        """Of the table."""
        covers = f"{100 * float(np.mean(self.inside)):.0f} %" if self.inside else "-"
        why = "; ".join(f"{text} ({count})" for text, count in self.refusals.most_common(2)) or "-"
        cells = [*map(_cell, (self.predicted, self.factor, self.known, self.learned)), covers, why]
        return f"| {name} | {self.asked} | {len(self.learned)} | {' | '.join(cells)} |"


_HEAD = (
    "| left out | n | corrected | as predicted (%) | one factor (%) | {known} | learned (%) | 80 % covers | refused |\n"
    + "|---" * 9
    + "|"
)


def _learned(kept: Sequence[MeasuredTime]) -> tuple[Residual | None, str]:
    try:
        return learned(kept), ""
    except NotLearnedError as error:
        return None, str(error)


def _shape_of(refusal: str) -> str:
    """Without the numbers of the one that was asked, so that refusals can be counted."""
    return "no run is near" if refusal.startswith("no run is near") else refusal


def _cell(errors: Sequence[float]) -> str:
    if not errors:
        return "-"
    return f"{100 * np.expm1(np.median(errors)):.1f} / {100 * np.expm1(np.quantile(errors, 0.9)):.1f}"


def _steps() -> None:
    folder = corpora.folder("measured_runs")
    machine = vtrain.a100(folder)

    def times(runs: Sequence[MeasuredStep]) -> list[MeasuredTime]:
        found: list[MeasuredTime] = []
        for each in runs:
            features = step_features(each.job, 8)
            key = (tuple(features.kinds.items()), tuple(features.numbers.items()))
            predicted = predict_step(each.job, machine).seconds
            found.append(MeasuredTime(run=key, features=features, predicted=predicted, observed=each.seconds))
        return found

    single = times(vtrain.single_node(folder))
    print(f"\n{len(single)} steps on one node: errors of those that are left out, median / p90\n")
    print(_HEAD.format(known="-"))
    errors = _Errors()
    for fold in range(_FOLDS):
        errors.add([each for at, each in enumerate(single) if at % _FOLDS != fold], single[fold::_FOLDS])
    print(errors.row("every fifth run"))
    for name, of in (("GPUs", _gpus), ("layers", _layers)):
        for value in sorted(set(map(of, single))):
            print(_one_left_out(single, [of(each) == value for each in single], f"{value:g} {name}"))
    for hidden in sorted({each.features.kinds["hidden"] for each in single}, key=int):
        print(_one_left_out(single, [each.features.kinds["hidden"] == hidden for each in single], f"hidden {hidden}"))
    few = _Errors()
    few.add(single[:: len(single) // 50][:50], single[1::10])
    print(few.row("all but 50"))
    for name, runs in vtrain.multi_node(folder).items():
        group = times(runs)
        errors = _Errors()
        errors.add(single, group)
        print(errors.row(f"{name}, by those on one node"))
        errors = _Errors()
        for at, each in enumerate(group):
            errors.add([*group[:at], *group[at + 1 :]], [each])
        print(errors.row(f"{name}, by each other"))


def _gpus(time: MeasuredTime) -> float:
    return time.features.products["GPUs"]


def _layers(time: MeasuredTime) -> float:
    return time.features.numbers["layers"]


def _one_left_out(times: Sequence[MeasuredTime], is_held: Sequence[bool], name: str) -> str:
    errors = _Errors()
    errors.add(
        [each for each, held in zip(times, is_held, strict=True) if not held],
        [each for each, held in zip(times, is_held, strict=True) if held],
    )
    return errors.row(name)


@dataclass(frozen=True, slots=True)
class _Size:
    """A size of a curve of nccl-tests, foretold from the others of the curve."""

    cluster: str
    number: int
    """Of the sizes of its curve."""
    time: MeasuredTime
    curve: float
    """Seconds by the monotone curve."""


def _nccl_tests() -> None:
    """The prediction is one line through the other sizes of the curve; beside it the monotone curve through them."""
    sizes = list(_sizes(corpora.folder("nccl_tests")))
    clusters = sorted({each.cluster for each in sizes})
    print(f"\n{len(sizes)} sizes between others of nccl-tests on {len(clusters)} clusters, median / p90\n")
    print(_HEAD.format(known="monotone curve (%)"))
    errors = _Errors()
    for fold in range(_FOLDS):
        _add(errors, sizes, [each.number % _FOLDS == fold for each in sizes])
    print(errors.row("every fifth size"))
    errors = _Errors()
    for cluster in clusters:
        _add(errors, sizes, [each.cluster == cluster for each in sizes])
    print(errors.row("each cluster in its turn"))
    anywhere = [replace(each, time=_of_any_cluster(each.time)) for each in sizes]
    errors = _Errors()
    for cluster in clusters:
        _add(errors, anywhere, [each.cluster == cluster for each in sizes])
    print(errors.row("the same, if the cluster were no kind"))


def _sizes(folder: Path) -> Iterator[_Size]:
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        for table in NcclTests(path.name).benchmarks(path.read_text(errors="replace").splitlines()):
            seconds = {row.message_bytes: row.out_of_place.time_ns / 1e9 for row in table.rows if row.message_bytes > 0}
            sizes = sorted(size for size, taken in seconds.items() if taken > 0)
            if table.op is None or table.ranks is None or len(sizes) < _LEAST_SIZES:
                continue
            cluster = path.relative_to(folder).parts[0]
            kinds: dict[str, str | int] = {"cluster": cluster, "operation": OPERATIONS[table.op].name}
            for at in range(1, len(sizes) - 1):
                others = [*sizes[:at], *sizes[at + 1 :]]
                times, size = [seconds[other] for other in others], sizes[at]
                numbers = {"bytes": size, "ranks": table.ranks, "nodes": len(table.nodes)}
                time = MeasuredTime(
                    run=(str(path), table.op, size),
                    features=Features(kinds, numbers),
                    predicted=float(fit_line(others, times).seconds(size)),
                    observed=seconds[size],
                )
                yield _Size(cluster, at, time, float(transfer_curve(others, times).seconds(size)))


def _of_any_cluster(time: MeasuredTime) -> MeasuredTime:
    kinds = {name: value for name, value in time.features.kinds.items() if name != "cluster"}
    return replace(time, features=Features(kinds, time.features.numbers))


def _add(errors: _Errors, sizes: Sequence[_Size], is_held: Sequence[bool]) -> None:
    held = [each for each, is_left in zip(sizes, is_held, strict=True) if is_left]
    kept = [each.time for each, is_left in zip(sizes, is_held, strict=True) if not is_left]
    errors.add(kept, [each.time for each in held], [each.curve for each in held])


def _ranks() -> None:
    """The prediction is one latency and one bandwidth of a ring for all ranks; beside it the neighbours' curves."""
    print("\nAllReduce in one node, each number of ranks but the smallest and the largest left out, median / p90\n")
    print(_HEAD.format(known="one rank fewer and one more (%)"))
    for gpu in ("a100", "v100"):
        times = vtrain.allreduce_times(corpora.folder("measured_runs"), gpu)
        errors = _Errors()
        for ranks in list(times)[1:-1]:
            others = {other: known for other, known in times.items() if other != ranks}
            forecast, usable = from_neighbours(times, ranks)
            held = _of_ranks(others, ranks, times[ranks], np.flatnonzero(usable)[::_EVERY])
            kept = [
                time
                for other, known in others.items()
                for time in _of_ranks(others, other, known, np.arange(0, len(known[0]), _EVERY))
            ]
            errors.add(kept, held, forecast[usable][::_EVERY].tolist())
        print(errors.row(gpu.upper()))


def _of_ranks(
    known: dict[int, tuple[Floats, Floats]], ranks: int, times: tuple[Floats, Floats], at: NDArray[np.intp]
) -> list[MeasuredTime]:
    """Some sizes of so many ranks, predicted by the line of a ring through what is known."""
    steps = {each: Placement(each, each).latency_steps("AllReduce")[0] for each in (*known, ranks)}
    line = fit_line(
        np.concatenate([allreduce_wire(1, each) * sizes / steps[each] for each, (sizes, _) in known.items()]).tolist(),
        np.concatenate([seconds / steps[each] for each, (_, seconds) in known.items()]).tolist(),
    )
    return [
        MeasuredTime(
            run=ranks,
            features=Features({}, {"bytes": float(size), "ranks": ranks}),
            predicted=steps[ranks] * float(line.seconds(allreduce_wire(1, ranks) * size / steps[ranks])),
            observed=float(seconds),
        )
        for size, seconds in zip(times[0][at], times[1][at], strict=True)
    ]

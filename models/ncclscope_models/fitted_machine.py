"""The machine of a run: how fast its GPUs computed and its links sent, from the run's `calibration.json`.

Computation from where the mean step went, or from the whole step where that is not known; links by `alpha + bytes / B`
through all transfers inside a node and all between nodes. What the run has not shown must be given: nothing is assumed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from typing import Final

import numpy as np

from ncclscope_models.calibration import Calibration
from ncclscope_models.flops import MEMORY_BANDWIDTH, PEAK_FLOPS
from ncclscope_models.job import Job, ModelError
from ncclscope_models.machine import INSIDE_LATENCY, Machine, Placement
from ncclscope_models.predicted_step import StepPredictor, calibrated, calibrated_by_computation, predict_step
from ncclscope_models.textbook import wire_bytes
from ncclscope_models.transfer_curve import TransferCurve, fit_line
from ncclscope_models.transfer_estimate import GroupShape, TransferTimes

ASSUMED_GPU: Final = "A100"
"""Where none is known: how its peak and its memory compare is all that counts."""
LEAST_WIDTH: Final = 0.06
"""As a logarithm: what a size between others was off by on real runs (`transfer_estimate.WIDTHS`)."""
NOT_MEASURED: Final = 0.4
"""Half-width, as a logarithm, of a bandwidth that was given and not measured: a factor of 1.5 either way."""
_OPERATIONS: Final = ("AllReduce", "AllGather", "ReduceScatter", "Broadcast", "AlltoAll", "Send")
HALF_WORKS: Final = (2e5, 6e6)
"""Where `Machine.half_work` lies, by fits on measured runs; its typical value is `machine.HALF_WORK`."""
_OF_ALL_LAYOUTS: Final = 0.5
"""Of what the parts leave open in the run that calibrated, as a logarithm, so much is taken to be of any layout: it may
be none or all of it. Between 0 and 1 it is 0.5 at which the median error of 25 simulated scenarios is least."""
_LEAST_BYTES: Final = 1 << 20
"""Of a message that says something of bandwidth, and that makes up the time of a step."""
_SLOW: Final = 0.15
"""Share of Sends that leave a node from which the slowest tenth are such."""
_COMPUTED: Final = ("computation", "hidden")


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """A kind of link: inside nodes, or between them."""

    latency: float
    """Seconds of a step of a ring."""
    bandwidth: float
    """Bytes per second, as `Machine` has it."""
    width: float
    """Half of the 80 % interval of a transfer's time, as a logarithm."""
    measured: int
    """Transfers that it rests on; 0: it was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedMachine:
    """A machine, and how sure each part of it is."""

    machine: Machine
    factor: float
    """Observed over predicted step of the run that calibrated it, both without `idle`: what the parts leave open."""
    idle: float = 0.0
    """Seconds of a step in which a GPU does nothing: the data loader and the host, whatever the layout is."""
    inside: Links | None
    between: Links | None
    """None where neither the run nor the user says anything of such links."""
    is_from_parts: bool
    """Whether computation was measured apart; else the whole step says how fast GPUs are."""

    @property
    def factor_of_others(self) -> float:
        """By which the step of another layout is taken to be longer than predicted."""
        return exp(_OF_ALL_LAYOUTS * log(self.factor))

    def seconds(self, predicted: float) -> float:
        """The step of another layout than that which calibrated, from the predicted one, with what is idle."""
        return predicted * self.factor_of_others + self.idle


def machine_before_fitting(
    gpu: str | None, per_node: int, *, network_cards: int | None = None, writes_scores: bool = False
) -> Machine:
    """The machine from which fitting starts, with links that cost nothing until the run's replace them.

    `gpu`: None if it is not known; `network_cards`: of a node, None: one for each GPU. Those beyond its GPUs carry
    nothing: a GPU sends by one, and NCCL lists cards for storage and management too.
    """
    known = gpu or ASSUMED_GPU
    return Machine(
        gpus_per_node=per_node,
        network_cards=None if network_cards is None else min(network_cards, per_node),
        peak_flops=PEAK_FLOPS[known],
        best_share=0.75,
        inside_bandwidth=float("inf"),
        node_bandwidth=float("inf"),
        inside_latency=INSIDE_LATENCY,
        network_latency=15e-6,
        memory_bandwidth=MEMORY_BANDWIDTH[known],
        writes_scores=writes_scores,
    )


def fitted_machine(
    base: Machine,
    job: Job,
    calibration: Calibration,
    times: TransferTimes,
    *,
    inside_node: float | None = None,
    between_nodes: float | None = None,
) -> FittedMachine:
    """Of the job that `calibration` is of; `times` are the transfers of this and other runs of the machine.

    `base` gives GPUs per node, peak and memory bandwidth. For a run that shows no such links: `inside_node`, bytes per
    second of a GPU's, and `between_nodes`, of a node's network cards.

    Raises:
        ModelError: The run has no step time.
    """
    place = _Places(job, base)
    inside = _links(times, place, are_between=False, inside_latency=0.0)
    if inside is None and inside_node is not None:
        inside = Links(latency=base.inside_latency, bandwidth=inside_node, width=NOT_MEASURED, measured=0)
    local = base.inside_latency if inside is None else inside.latency
    between = _links(times, place, are_between=True, inside_latency=local)
    if between is None and between_nodes is not None:
        between = Links(latency=base.network_latency, bandwidth=between_nodes, width=NOT_MEASURED, measured=0)
    machine = base
    if inside is not None:
        machine = replace(machine, inside_bandwidth=inside.bandwidth, inside_latency=inside.latency)
    if between is not None:
        machine = replace(machine, node_bandwidth=between.bandwidth, network_latency=between.latency)
    machine = replace(machine, inside=_curves(times), corrections={})
    machine = replace(machine, corrections=_corrections(times, place, machine))
    seconds = _step_seconds(calibration)
    computed = calibration.step.part_ns(*_COMPUTED) / 1e9 if calibration.step is not None else 0.0
    fit, known = (calibrated_by_computation, computed) if computed > 0 else (calibrated, seconds)
    machine = fit(machine, job, known)
    idle = calibration.step.part_ns("idle") / 1e9 if calibration.step is not None else 0.0
    factor = (seconds - idle) / predict_step(job, machine).seconds
    return FittedMachine(
        machine=machine, factor=factor, idle=idle, inside=inside, between=between, is_from_parts=computed > 0
    )


def _step_seconds(calibration: Calibration) -> float:
    ns = calibration.step.mean_ns if calibration.step is not None else calibration.median_step_ns
    if not ns:
        raise ModelError(f"the calibration of job {calibration.job} has no step time: record one (see docs/tune.md)")
    return ns / 1e9


def _points(times: TransferTimes) -> Iterable[tuple[GroupShape, float, float, int]]:
    """Shape, message bytes, typical seconds and samples, of operations that move a tensor."""
    for shape, found in times.measured.items():
        if shape.op not in _OPERATIONS or shape.ranks == 1 or shape.ranks % shape.nodes:
            continue
        for each in found:
            if shape.op != "Send":
                yield shape, float(each.message_bytes), each.typical, each.samples
                continue
            # A Send is between two ranks. Of several stages to a node some leave it: the slow ones, if they are enough.
            between = (shape.nodes - 1) / (shape.ranks - 1)
            if between < 1:
                seconds = each.typical if not between else each.low
                yield replace(shape, ranks=2, nodes=1), float(each.message_bytes), seconds, each.samples
            if between > _SLOW:
                seconds = each.typical if between == 1 else each.high
                yield replace(shape, ranks=2, nodes=2), float(each.message_bytes), seconds, each.samples


@dataclass(frozen=True, slots=True)
class _Places:
    """Where measured groups lie."""

    job: Job
    machine: Machine

    def of(self, shape: GroupShape) -> Placement:
        """A group on its nodes; those of its kind cross the network together: of pipelines and embeddings, one of each
        rank of a stage, of others as many as fill a node.
        """
        per_node = shape.ranks // shape.nodes
        filled = self.machine.gpus_per_node
        if shape.parallelism in ("EMBEDDING", "PP"):
            filled = min(filled, self.job.layout.ranks // self.job.layout.pipeline)
        return Placement(shape.ranks, per_node, sharing=max(1, filled // per_node) if shape.nodes > 1 else 1)


def _links(times: TransferTimes, place: _Places, *, are_between: bool, inside_latency: float) -> Links | None:
    """Those inside nodes, or between them; each shape and size weighs alike."""
    sizes: list[float] = []
    seconds: list[float] = []
    weights: list[float] = []
    messages: list[float] = []
    samples = 0
    for shape, message_bytes, typical, count in _points(times):
        if (shape.nodes > 1) != are_between:
            continue
        placed = place.of(shape)
        inside, between = placed.latency_steps(shape.op)
        steps, local = (between, inside * inside_latency) if are_between else (inside, 0.0)
        # Of one latency: the bytes that share the links in that time.
        shared = placed.sharing / place.machine.cards_in_use(placed) if are_between else 1.0
        sizes.append(wire_bytes(shape.op, message_bytes, shape.ranks) * shared / steps)
        seconds.append(max(typical - local, typical / 10) / steps)
        weights.append(steps)
        messages.append(message_bytes)
        samples += count
    if max(messages, default=0.0) < _LEAST_BYTES:
        return None
    line = fit_line(sizes, seconds)
    # Large transfers make up the time: their sum is met, by the bandwidth.
    latency, taken = line.alpha * sum(weights), float(np.dot(weights, seconds))
    moved = line.seconds_per_byte * float(np.dot(weights, sizes))
    if moved > 0:
        line = replace(line, seconds_per_byte=line.seconds_per_byte * max(0.5, (taken - latency) / moved))
    is_large = np.asarray(messages) >= _LEAST_BYTES
    off = np.abs(np.log(line.seconds(sizes) / np.asarray(seconds)))[is_large]
    bandwidth = 1 / line.seconds_per_byte if line.seconds_per_byte > 0 else float("inf")
    return Links(
        latency=line.alpha, bandwidth=bandwidth, width=max(LEAST_WIDTH, float(np.quantile(off, 0.8))), measured=samples
    )


def _curves(times: TransferTimes) -> dict[tuple[str, int], TransferCurve]:
    """Inside a node, of shapes of enough sizes; of several kinds of parallelism the one of the most sizes."""
    found: dict[tuple[str, int], TransferCurve] = {}
    for shape in sorted(times.measured, key=lambda shape: len(times.measured[shape])):
        curve = times.curve(shape)
        if shape.nodes == 1 and curve is not None:
            found[shape.op, 2 if shape.op == "Send" else shape.ranks] = curve
    return found


def _corrections(times: TransferTimes, place: _Places, machine: Machine) -> dict[tuple[str, int, int], float]:
    """Measured over computed time of an operation, ranks and nodes; sizes weigh as long as they take.

    Only of large messages: how far latency is off, as flags and norms of a few bytes show it, says nothing of tensors.
    """
    sums: defaultdict[tuple[str, int, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
    formula = replace(machine, inside={}, corrections={})
    for shape, message_bytes, typical, _ in _points(times):
        if message_bytes < _LEAST_BYTES:
            continue
        computed = formula.collective_seconds(shape.op, message_bytes, place.of(shape))
        each = sums[shape.op, shape.ranks, shape.nodes]
        each[0] += typical
        each[1] += computed
    return {key: measured / computed for key, (measured, computed) in sums.items()}


def variants(fitted: FittedMachine, job: Job) -> dict[str, Sequence[tuple[Machine, float]]]:
    """By what is not sure: machines at both ends of its 80 % interval, and by what their predicted steps are longer.

    They are for other layouts than that of the job which calibrated: each gives the step that it took, but for
    `left open`, which says how much of `factor` is of any layout.
    """
    machine = fitted.machine
    predicted = predict_step(job, machine).seconds

    def anchored(changed: Machine) -> tuple[Machine, float]:
        return changed, fitted.factor_of_others * predicted / predict_step(job, changed).seconds

    computed = StepPredictor(machine).computation_of_a_rank(job)
    found: dict[str, Sequence[tuple[Machine, float]]] = {
        "computation": [
            anchored(calibrated_by_computation(replace(machine, half_work=half_work), job, computed))
            for half_work in HALF_WORKS
        ],
        "left open": [(machine, 1.0), (machine, fitted.factor)],
    }
    for name, links in (("inside", fitted.inside), ("between", fitted.between)):
        if links is not None:
            found[name] = [anchored(_slower(machine, name, exp(sign * links.width))) for sign in (-1, 1)]
    return found


def _slower(machine: Machine, links: str, factor: float) -> Machine:
    if links == "between":
        return replace(
            machine,
            node_bandwidth=machine.node_bandwidth / factor,
            network_latency=machine.network_latency * factor,
            corrections={key: known for key, known in machine.corrections.items() if key[2] == 1},
        )
    return replace(
        machine,
        inside_bandwidth=machine.inside_bandwidth / factor,
        inside_latency=machine.inside_latency * factor,
    )

"""The logs that ranks print: the lines of a step's operations with opCount as it was then, CALL lines and TUNING lines.

Keeps what NCCL counts per communicator, and how many lines each file has.

On their way into a file some lines get lost, some are torn into each other (faults `drop_lines`, `torn_lines`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ncclscope_simulator import log_lines
from ncclscope_simulator.cluster import Cluster
from ncclscope_simulator.config import SimulationConfig
from ncclscope_simulator.faults import Fault
from ncclscope_simulator.graphs import Stage
from ncclscope_simulator.operations import Operation
from ncclscope_simulator.runs import Run, Step
from ncclscope_simulator.startup import Said


@dataclass(slots=True)
class Line:
    """One line before damage."""

    at_ns: int
    """Reference time at which it is written."""
    text: str
    pid: int
    operation: int | None = None
    """Index of the operation of the step that the line shows; None for any other line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """The physical lines of a file, and where each operation's intact line is among them."""

    lines: list[tuple[int, str]]
    """(reference time, text without line end)."""
    places: dict[int, int]
    """Operation to its index in `lines`."""
    dropped: set[int] = field(default_factory=set[int])
    torn: set[int] = field(default_factory=set[int])


def damage(lines: list[Line], faults: list[Fault], random: np.random.Generator) -> Written:
    """Drops and tears operation lines at the ratios of the faults that are active.

    A torn line is cut by the next one of another process, whose text follows on the same physical line; the rest of
    the torn line stands on a line of its own. That is how several processes without %p in NCCL_DEBUG_FILE look:
    src/debug.cc opens the file without O_APPEND and writes unbuffered.
    """
    drop = max((fault.ratio for fault in faults if fault.kind == "drop_lines"), default=0.0)
    tear = max((fault.ratio for fault in faults if fault.kind == "torn_lines"), default=0.0)
    chances = random.random((len(lines), 3)) if drop or tear else None
    physical: list[tuple[int, str]] = []
    places: dict[int, int] = {}
    dropped, torn = set[int](), set[int]()
    held: Line | None = None
    rest = ""
    for nth, line in enumerate(lines):
        chance = (1.0, 1.0, 0.0) if chances is None else tuple(chances[nth].tolist())
        if line.operation is not None and chance[0] < drop:
            dropped.add(line.operation)
            continue
        if held is None and line.operation is not None and chance[1] < tear and _other_follows(lines, nth):
            held, cut = line, len(line.text) - 20 - int(chance[2] * min(60, len(line.text) - 60))
            rest, torn = line.text[cut:], torn | {line.operation}
            physical.append((line.at_ns, line.text[:cut]))
            continue
        if held is not None:
            physical.append((line.at_ns, physical.pop()[1] + line.text))
        else:
            physical.append((line.at_ns, line.text))
        if line.operation is not None:
            places[line.operation] = len(physical) - 1
        if held is not None:
            physical.append((line.at_ns, rest))
            held = None
    if held is not None:
        physical.append((held.at_ns, rest))
    return Written(lines=physical, places=places, dropped=dropped, torn=torn)


def _other_follows(lines: list[Line], nth: int) -> bool:
    return nth + 1 < len(lines) and lines[nth + 1].pid != lines[nth].pid


Lines = dict[str, list[tuple[int, str]]]
"""By file, relative to the job's folder: (reference time, text without line end), in order."""


@dataclass(kw_only=True, slots=True)
class Asked:
    """One operation that a rank asked for, and its log line."""

    run: Run
    operation: Operation
    nth: int
    """Which operation of its launch."""
    tid: int
    called_ns: int
    op_count: int
    seq: int
    """Its place among the operations of its communicator and rank, from 0."""
    coll_seq: int | None
    """The same among collectives; None of Send and Recv."""
    log: str
    """Name of the log file that has its line."""
    line: int | None = None
    """Number of its physical line, from 1; None if the line is lost or torn."""
    is_lost: bool = False
    is_torn: bool = False


@dataclass(frozen=True, slots=True)
class Printed:
    """The lines that a step adds to the logs, and its operations."""

    lines: Lines
    asked: list[Asked]
    """Of all ranks; of one rank in the order of its calls."""


class Logs:
    """The log files of a job."""

    def __init__(self, config: SimulationConfig, cluster: Cluster) -> None:
        self._config, self._cluster = config, cluster
        self._lengths: dict[str, int] = defaultdict(int)

    def outside_steps(self, said: list[list[Said]]) -> Lines:
        """The physical lines of what each rank says while no step runs."""
        lines: dict[str, list[Line]] = defaultdict(list)
        for worker, own in zip(self._cluster.workers, said, strict=True):
            for each in own:
                text = self._text(worker.rank, each.tid, each.at_ns, each.text)
                lines[worker.process.log_name].append(Line(each.at_ns, text, worker.process.pid))
        return {name: self._written(name, own, [], np.random.default_rng(0)).lines for name, own in lines.items()}

    def of_step(self, step: Step, faults: list[Fault], random: np.random.Generator) -> Printed:
        """The physical lines of a step, damaged as the faults say, and its operations."""
        asked: list[Asked] = []
        lines: dict[str, list[Line]] = defaultdict(list)
        for run in step.runs:
            if run.launch.outside:
                continue
            if run.stage is not Stage.REPLAYED:
                process = self._cluster.workers[run.rank].process
                operations = self._asked(run, process.log_name)
                texts = self._texts(run, operations, len(asked))
                lines[process.log_name].extend(Line(at, text, process.pid, nth) for at, text, nth in texts)
                asked.extend(operations)
            if run.launches and self._counts(run):
                run.launch.endpoint.op_count += run.kernel_count
        physical: Lines = {}
        for name, own in sorted(lines.items()):
            before = self._lengths[name]
            written = self._written(name, own, faults, random)
            physical[name] = written.lines
            _mark(asked, written, before)
        return Printed(physical, asked)

    def _asked(self, run: Run, log: str) -> list[Asked]:
        endpoint = run.launch.endpoint
        tid = self._cluster.workers[run.rank].calling_tid(autograd=run.launch.autograd)
        asked: list[Asked] = []
        for nth, operation in enumerate(run.launch.operations):
            each = Asked(
                run=run,
                operation=operation,
                nth=nth,
                tid=tid,
                called_ns=run.called_ns(nth),
                op_count=endpoint.op_count,
                seq=endpoint.seq,
                coll_seq=endpoint.coll_seq if operation.collective else None,
                log=log,
            )
            asked.append(each)
            endpoint.seq += 1
            endpoint.coll_seq += operation.collective
        return asked

    def _texts(self, run: Run, asked: list[Asked], first: int) -> Iterator[tuple[int, str, int | None]]:
        """(Time, text, which operation of the step, from `first` on) of each line of a launch."""
        rank, tid = run.rank, self._cluster.workers[run.rank].calling_tid(autograd=run.launch.autograd)
        for nth, each in enumerate(asked, first):
            text = f"{each.operation.before_count}{each.op_count:x}{each.operation.after_count}"
            yield each.called_ns, self._text(rank, tid, each.called_ns, text), nth
        if self._config.calls:
            for at, text in self._calls(run):
                yield at, self._call_text(rank, tid, at, text), None
        tunings = run.launch.tunings
        for nth, tuning in enumerate(tunings, -len(tunings)):
            at = run.api_start_ns - 1_000 + nth * 1_000 // len(tunings)
            yield at, self._text(rank, tid, at, tuning), None

    def _calls(self, run: Run) -> Iterator[tuple[int, str]]:
        """CALL lines of one launch. Source: NCCL src/misc/argcheck.cc, src/group.cc, src/collectives.cc."""
        nested = self._config.traits.nested_p2p_groups
        if run.launch.grouped:
            yield run.call_ns - 1_500, "ncclGroupStart()"
        for nth, operation in enumerate(run.launch.operations):
            at, inner = run.called_ns(nth), nested and not operation.collective
            if inner:
                yield at - 200, "ncclGroupStart()"
            yield at + 300, operation.call
            if inner:
                yield at + 600, "ncclGroupEnd()"
        if run.launch.grouped:
            yield run.group_end_ns + 500, "ncclGroupEnd()"

    def _counts(self, run: Run) -> bool:
        """Whether a launch, or a replay, moves opCount. Source: NCCL src/proxy.cc ncclProxyStart, by version."""
        traits = self._config.traits
        if self._config.stuck_op_count and not run.launch.network:
            return False
        if traits.op_count == "never" or run.launch.network:
            return traits.op_count != "never"
        if run.stage is Stage.REPLAYED:
            return traits.every_replay_counts
        # The Inspector plug-in asks for kernel events, for which every plan gets proxy work.
        if traits.op_count == "network":
            return self._config.inspector is not None
        return traits.counts_beside_graphs or self._config.stage(run.iteration) is Stage.EAGER

    def _text(self, rank: int, tid: int, at_ns: int, text: str) -> str:
        worker = self._cluster.workers[rank]
        place = f"{worker.process.host}:{worker.process.pid}:{tid} [{worker.local_rank}]"
        return f"{self._stamp(worker.node, at_ns)}{place} NCCL INFO {text}"

    def _call_text(self, rank: int, tid: int, at_ns: int, text: str) -> str:
        worker = self._cluster.workers[rank]
        place = f"{worker.process.host}:{worker.process.pid}:{tid}"
        return f"{self._stamp(worker.node, at_ns)}{place} NCCL CALL {text}"

    def _stamp(self, node: int, at_ns: int) -> str:
        return log_lines.stamp(self._cluster.nodes[node].clock.host_ns(at_ns)) if self._config.stamped else ""

    def _written(self, name: str, lines: list[Line], faults: list[Fault], random: np.random.Generator) -> Written:
        lines.sort(key=lambda line: line.at_ns)
        written = damage(lines, faults, random)
        self._lengths[name] += len(written.lines)
        return written


def _mark(asked: list[Asked], written: Written, before: int) -> None:
    """Sets each operation's line number in a file that had `before` lines, or that the line is lost or torn."""
    for nth, at in written.places.items():
        asked[nth].line = before + at + 1
    for nth in written.dropped:
        asked[nth].is_lost = True
    for nth in written.torn:
        asked[nth].is_torn = True

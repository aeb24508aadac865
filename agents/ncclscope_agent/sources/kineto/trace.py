"""What a trace of the PyTorch profiler says, as arrays: calls of process groups, kernels, launches, steps.

Scope: Chrome traces of Kineto (`.json`, `.json.gz`), one per rank, from CUDA and ROCm. Left out on purpose: Python
frames, memory events, shapes, copies. Traces before PyTorch 2.3 do not say of which group and size a call is: of these,
kernels and steps alone are read. Memory is bounded by `TraceLimits`.
*Source:* Kineto `libkineto/src/output_json.cpp`; PyTorch `torch/csrc/profiler/util.cpp`.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from ncclscope_agent.sources.kineto.collectives import Call, CallReader
from ncclscope_agent.sources.kineto.json_stream import Event, JsonStream, TraceError, number_of, text_of
from ncclscope_agent.sources.nsys.busy import INTERVAL, BusyUnion
from ncclscope_agent.sources.nsys.kernel_names import KernelKind, kernel_kind, kernel_label
from ncclscope_wire.terms import NO_NUMBER

_Value = TypeVar("_Value")
Matrix = NDArray[np.int64]
Step = tuple[int, int, int, str]
"""Start, end, thread and text of a ProfilerStep."""
Shape = tuple[int, ...]
"""Grid, block, registers and shared memory, as KERNEL_TEMPLATE has them."""

MEMBERS: Final = frozenset({"distributedInfo", "baseTimeNanoseconds", "deviceProperties", "host_name", "hostname"})
"""Of the trace's object, what is read beside the events."""
_NOTE: Final = "record_param_comms"
_LAUNCH: Final = re.compile(r"(?:cuda|cu|hip)\w{0,32}Launch\w{0,32}")
_STEP: Final = re.compile(r"ProfilerStep#(\d{1,9})")
_EPOCH_LARGEST: Final = 2**61
"""A time beyond this (the year 2043, in ns) is damage."""
_BUSY_AT_ONCE: Final = 10_000
_LONGEST_LABEL: Final = 1_024


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceLimits:
    """Limits of what one trace may hold; what is beyond them is counted."""

    calls: int = 2_000_000
    kernels: int = 2_000_000
    """NCCL's, and as many that communicate without it."""
    launches: int = 8_000_000
    """Of kernels of any kind: which of them are NCCL's shows when the kernel comes, behind them."""
    names: int = 4_096
    """Distinct names and shapes of NCCL's kernels, and distinct calls."""
    steps: int = 100_000
    busy_rows: int = 50_000
    batch_rows: int = 10_000


@dataclass(slots=True)
class Trace:
    """Times are in ns and count from `epoch_ns`."""

    calls: list[Call] = field(default_factory=list[Call])
    """Those that differ in what they say."""
    notes: Matrix = field(default_factory=lambda: np.empty((0, 5), np.int64))
    """Time, thread, External id, number in `calls` and sequence number (or NO_NUMBER) of each call, by time."""
    kernels: Matrix = field(default_factory=lambda: np.empty((0, 5), np.int64))
    """Number in `shapes`, correlation, start, end and External id of each of NCCL's kernels, by start."""
    outside: Matrix = field(default_factory=lambda: np.empty((0, 5), np.int64))
    """The same of kernels that communicate without NCCL."""
    shapes: list[tuple[int, int, str, Shape]] = field(default_factory=list[tuple[int, int, str, Shape]])
    """Device, stream, label (`kernel_label`) and shape of both."""
    launches: Matrix = field(default_factory=lambda: np.empty((0, 4), np.int64))
    """Correlation, start, end and thread of each launch, by correlation."""
    graph_launches: int = 0
    """Launches of CUDA graphs with kernels of NCCL, which are left out: of which node they are no trace says."""
    steps: list[Step] = field(default_factory=list[Step])
    busy: NDArray[np.void] = field(default_factory=lambda: np.empty(0, INTERVAL))
    """Computation: the union of other kernels by device, as `busy.INTERVAL`."""
    filled_gap_ns: int = 0
    spans: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Begin and end of what the profiler recorded, as it says itself."""
    members: Mapping[str, object] = field(default_factory=dict[str, object])
    """Those of `MEMBERS` that are there."""
    groups: CallReader = field(default_factory=CallReader)
    pid: int = 0
    epoch_ns: int = 0
    other_kernels: int = 0
    skipped: Counter[str] = field(default_factory=Counter[str])
    fault: str | None = None
    """Why it could not be read to its end; None if it could."""


def gather(blocks: Iterable[bytes], limits: TraceLimits) -> Trace:
    """Everything of a trace, read once; one that breaks off as far as it goes."""
    reading = _Gathering(limits)
    stream = JsonStream(blocks, MEMBERS)
    fault = None
    try:
        for event in stream.events():
            reading.ingest_event(event)
    except TraceError as error:
        fault = str(error)
    return reading.trace(stream.members, fault)


class _Gathering:
    def __init__(self, limits: TraceLimits) -> None:
        self._limits = limits
        self._trace = Trace()
        self._numbers: dict[Call, int] = {}
        self._shapes: dict[tuple[int, int, str, Shape], int] = {}
        self._notes, self._launches = array("q"), array("q")
        self._graph_launches = array("q")
        self._kernels = {kind: array("q") for kind in (KernelKind.NCCL, KernelKind.OUTSIDE)}
        self._kinds: dict[str, tuple[KernelKind, str]] = {}
        self._busy = BusyUnion(limits.busy_rows)
        self._other = array("q")

    def trace(self, members: Mapping[str, object], fault: str | None) -> Trace:
        """What was gathered, in order."""
        trace = self._trace
        self._unite_other()
        trace.calls, trace.shapes = list(self._numbers), list(self._shapes)
        trace.notes = _sorted(self._notes, 5, (1, 0))
        trace.kernels = self._without_replays(_sorted(self._kernels[KernelKind.NCCL], 5, (1, 2)))
        trace.outside = _sorted(self._kernels[KernelKind.OUTSIDE], 5, (1, 2))
        trace.launches = _sorted(self._launches, 4, (0,))
        trace.busy, trace.filled_gap_ns = self._busy.result(), self._busy.filled_gap_ns
        trace.members, trace.fault = members, fault
        trace.groups.learn(members.get("distributedInfo"))
        base = members.get("baseTimeNanoseconds")
        trace.epoch_ns = base if isinstance(base, int) and 0 <= base < _EPOCH_LARGEST else 0
        return trace

    def _without_replays(self, kernels: Matrix) -> Matrix:
        """These kernels but for those that CUDA graphs launched: no call is noted of them, and no line logged."""
        is_replay = np.isin(kernels[:, 1], np.asarray(self._graph_launches, np.int64))
        self._trace.graph_launches = len(np.unique(kernels[is_replay, 1]))
        return kernels[~is_replay]

    def ingest_event(self, event: Event) -> None:
        """Takes one event; those of other kinds are left out."""
        kind, name = event.cat, event.name
        if event.ph != "X" or not isinstance(kind, str) or kind not in _KINDS or not isinstance(name, str):
            return
        if kind == "cpu_op" and name != _NOTE:
            return
        start, length = _ns(event.ts), _ns(event.dur or 0)
        if start is None or length is None:
            self._trace.skipped["event_without_times"] += 1
            return
        if kind == "kernel":
            self._kernel(name, start, start + length, event.arguments())
        elif kind == "cpu_op":
            self._call(start, event)
        elif kind == "user_annotation":
            if _STEP.fullmatch(name) and len(self._trace.steps) < self._limits.steps:
                self._trace.steps.append((start, start + length, _process(event.tid), name))
        elif kind == "Trace":
            self._trace.spans.append((start, start + length))
        elif _LAUNCH.match(name):
            self._launch(name, start, start + length, event)

    def _call(self, start: int, event: Event) -> None:
        arguments = event.arguments()
        call = self._trace.groups.call(arguments)
        if call is None:
            return
        if isinstance(call, str):
            self._trace.skipped[f"call_{call}"] += 1
            return
        number = _number_of(call, self._numbers, self._limits.names)
        if number is None or len(self._notes) >= 5 * self._limits.calls:
            self._trace.skipped["call_limit"] += 1
            return
        self._seen(event)
        sequence = arguments.get("Seq")
        self._notes.extend(
            (
                *(start, _process(event.tid), _integer(arguments.get("External id"), NO_NUMBER), number),
                _integer(sequence, NO_NUMBER),
            )
        )

    def _launch(self, name: str, start: int, end: int, event: Event) -> None:
        if len(self._launches) >= 4 * self._limits.launches:
            self._trace.skipped["launch_limit"] += 1
            return
        self._seen(event)
        correlation = _integer(event.arguments().get("correlation"))
        if "GraphLaunch" in name:
            self._graph_launches.append(correlation)
        self._launches.extend((correlation, start, end, _process(event.tid)))

    def _seen(self, event: Event) -> None:
        """Events of the host name the process; those of a GPU the device."""
        self._trace.pid = self._trace.pid or _process(event.pid)

    def _kernel(self, name: str, start: int, end: int, arguments: Mapping[str, object]) -> None:
        known = self._kinds.get(name)
        if known is None:
            if len(self._kinds) > self._limits.names:
                self._kinds.clear()
            known = self._kinds[name] = kernel_kind(name), text_of(kernel_label(name), _LONGEST_LABEL)
        kind, short = known
        device = _integer(arguments.get("device"), most=2**31 - 1)
        if kind is KernelKind.COMPUTATION:
            self._trace.other_kernels += 1
            self._other.extend((0, device, start, end, 1))
            if len(self._other) >= 5 * _BUSY_AT_ONCE:
                self._unite_other()
        else:
            kernels = self._kernels[kind]
            shape = (device, _integer(arguments.get("stream"), most=2**62), short, _shape(arguments))
            number = _number_of(shape, self._shapes, self._limits.names)
            if number is None or len(kernels) >= 5 * self._limits.kernels:
                self._trace.skipped["kernel_limit"] += 1
                return
            identity = _integer(arguments.get("External id"), NO_NUMBER)
            kernels.extend((number, _integer(arguments.get("correlation")), start, end, identity))

    def _unite_other(self) -> None:
        rows = np.asarray(self._other, np.int64).reshape(-1, 5)
        intervals = np.empty(len(rows), INTERVAL)
        for at, name in enumerate(INTERVAL.names or ()):
            intervals[name] = rows[:, at]
        self._busy.ingest_intervals(intervals)
        self._other = array("q")


_KINDS: Final = frozenset({"kernel", "cpu_op", "user_annotation", "Trace", "cuda_runtime", "cuda_driver"})


def _number_of(value: _Value, numbers: dict[_Value, int], most: int) -> int | None:
    """The number of a value, a new one if there is room; None if there is none."""
    number = numbers.get(value)
    if number is None and len(numbers) < most:
        number = numbers[value] = len(numbers)
    return number


def _sorted(values: array[int], width: int, by: tuple[int, ...]) -> Matrix:
    """Rows of so many numbers, sorted by these columns, the last of them first."""
    rows = np.asarray(values, np.int64).reshape(-1, width)
    return rows[np.lexsort(tuple(rows[:, at] for at in by))]


def _shape(arguments: Mapping[str, object]) -> Shape:
    """Grid, block, static and dynamic shared memory and registers; NO_NUMBER for what is not told."""
    grid, block = (_three(arguments.get(name)) for name in ("grid", "block"))
    shared, registers = (_integer(arguments.get(name), NO_NUMBER) for name in ("shared memory", "registers per thread"))
    return (*grid, *block, NO_NUMBER, min(shared, 2**31 - 1), min(registers, 2**31 - 1))


def _three(value: object) -> tuple[int, int, int]:
    if not isinstance(value, list) or len(value) != 3:
        return NO_NUMBER, NO_NUMBER, NO_NUMBER
    first, second, third = (min(_integer(each, NO_NUMBER), 2**31 - 1) for each in value)
    return first, second, third


def _ns(microseconds: object) -> int | None:
    """Whole ns of a time in microseconds; None if it is none. Whole numbers stay exact."""
    if isinstance(microseconds, int):
        found = microseconds * 1000
    elif isinstance(microseconds, float) and abs(microseconds) < _EPOCH_LARGEST:
        found = round(microseconds * 1000)
    else:
        return None
    return found if 0 <= found < _EPOCH_LARGEST else None


def _process(value: object) -> int:
    """The number of a process or thread, as Linux has them; 0 if it is none."""
    return _integer(value, most=2**32 - 1)


def _integer(value: object, unknown: int = 0, *, most: int = 2**63 - 1) -> int:
    """A number from 0 to `most`, also as text; else `unknown`."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 19:
        value = int(value)
    number = number_of(value, most)
    return unknown if number is None else number

"""Plays a job: generates it step by step and writes logs, exports and truth as their time comes.

The shell that plays in real time calls `advance` with the wall clock; `write` calls it with the job's own time.
Both give the same files, whatever the steps of `advance` are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, Final

from ncclscope_simulator.actions import Action
from ncclscope_simulator.capture import Capture, Windows
from ncclscope_simulator.cluster import build_cluster
from ncclscope_simulator.config import SimulationConfig
from ncclscope_simulator.export import ExportWriter
from ncclscope_simulator.groups import Endpoint, Group, build_endpoints, build_groups
from ncclscope_simulator.observation import Observer
from ncclscope_simulator.program import build_evaluations, build_programs, wrong_programs
from ncclscope_simulator.runs import Step
from ncclscope_simulator.startup import shut_down, start_up
from ncclscope_simulator.timeline import Timeline
from ncclscope_simulator.truth import OUTSIDE_COLUMNS, PLAN_COLUMNS, REPLAY_COLUMNS, RowsFile, Tally, job, write_job

Programs = Callable[[SimulationConfig, tuple[Group, ...], list[dict[int, Endpoint]]], list[list[Action]]]
"""Makes the program of each rank for a step, as `program.build_programs` does."""

_EXPORT_NS: Final = 200_000_000
"""How long the export of a chunk takes."""
_AFTERGLOW_NS: Final = 20_000_000
"""From the last event to the first Destroy line, and from the last of these to the job's end."""
_NCCL_LOADED_NS: Final = 4_000_000
_FOREVER: Final = 2**62


@dataclass(slots=True)
class _Log:
    """One log file: lines that wait for their time."""

    path: Path
    waiting: deque[tuple[int, str]] = field(default_factory=deque[tuple[int, str]])
    file: BinaryIO | None = None

    def release(self, now_ns: int) -> None:
        texts: list[str] = []
        while self.waiting and self.waiting[0][0] <= now_ns:
            texts.append(self.waiting.popleft()[1])
        if texts:
            if self.file is None:
                self.file = self.path.open("wb", buffering=0)
            self.file.write(("\n".join(texts) + "\n").encode())

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


class Player:
    """One simulated job that is being written to a folder. Times are ns of the reference clock (UTC).

    Raises ModuleNotFoundError if pyarrow is missing and FileExistsError if the folder already holds a job.
    """

    def __init__(
        self,
        config: SimulationConfig,
        out: Path,
        start_ns: int | None = None,
        *,
        programs: Programs = build_programs,
        first: Programs | None = None,
    ) -> None:
        """`programs` says what each rank does in a step, `first` in the first one if that differs."""
        self._config = config if start_ns is None else replace(config, start_ns=start_ns)
        self._out = out
        config = self._config
        _make_folders(out, inspector=config.inspector is not None)
        self._cluster = build_cluster(config)
        self._groups = build_groups(config)
        self._endpoints = build_endpoints(config, self._cluster, self._groups)
        self._programs = programs(config, self._groups, self._endpoints)
        self._first = self._programs
        if first is not None:
            self._first = first(config, self._groups, self._endpoints)
        self._evaluating = self._programs
        if config.evaluate_every is not None:
            self._evaluating = build_evaluations(config, self._groups, self._endpoints)
        self._wrong = wrong_programs(config, self._groups, self._endpoints)
        self._timeline = Timeline(config, self._groups)
        self._tally = Tally()
        self._captures = [Capture() for _ in self._cluster.nodes]
        self._observer = Observer(config, self._cluster, self._groups, self._captures, self._tally)
        self._windows = Windows.of(config)
        self._logs: dict[str, _Log] = {}
        self._truth = RowsFile(out / "truth" / "operations.parquet")
        self._replays: RowsFile | None = None
        if config.cuda_graphs is not None:
            self._replays = RowsFile(out / "truth" / "replays.parquet", REPLAY_COLUMNS)
        self._plans: RowsFile | None = None
        if any(action.launch is not None and action.launch.plans for each in self._programs for action in each):
            self._plans = RowsFile(out / "truth" / "plans.parquet", PLAN_COLUMNS)
        self._outside: RowsFile | None = None
        if config.ep > 1 and config.ep_dispatch == "deepep":
            self._outside = RowsFile(out / "truth" / "outside.parquet", OUTSIDE_COLUMNS)
        self._iteration = 0
        self._last_event_ns = config.start_ns
        self._stalled = False
        self._end_ns: int | None = None
        self._next_chunk = 0
        self._finished = False
        self._start()

    @property
    def next_ns(self) -> int:
        """When the next step begins, or if there is none, when the last file is due."""
        if self._end_ns is None and not self._stalled:
            return self._timeline.next_ns
        return _FOREVER if self._end_ns is None else self._end_ns + _EXPORT_NS

    @property
    def over(self) -> bool:
        """Whether no further step comes: the job came to its end, or was stopped."""
        return self._end_ns is not None

    @property
    def end_ns(self) -> int | None:
        """When the job ends; None while that is open."""
        return self._end_ns

    def advance(self, now_ns: int, *, is_stopping: Callable[[], bool] = lambda: False) -> None:
        """Writes everything that is due up to a time; if that is far behind, no further step once it is stopping."""
        while not self._stalled and self._end_ns is None and self._timeline.next_ns <= now_ns and not is_stopping():
            self._step()
        self._release(now_ns)

    def stop(self, now_ns: int) -> None:
        """Says that no further step begins; the one that runs goes on to its end."""
        if self._end_ns is None:
            self._end(max(now_ns, self._last_event_ns) if self._stalled else self._last_event_ns)

    def finish(self) -> None:
        """Writes all that is left, whatever its time, and the truth. Stops the job if it still runs."""
        if self._finished:
            return
        self.stop(self._last_event_ns)
        self._release(_FOREVER)
        for log in self._logs.values():
            log.close()
        if self._observer.traces is not None:
            folder = self._out / "kineto"
            folder.mkdir(exist_ok=True)
            self._observer.traces.write(folder)
        self._truth.close()
        for truth in (self._replays, self._plans, self._outside):
            if truth is not None:
                truth.close()
        self._write_job()
        self._finished = True

    def _start(self) -> None:
        startup = start_up(self._config, self._cluster, self._groups, self._endpoints)
        self._queue(self._observer.log(startup.said))
        if self._observer.profiler is not None:
            self._observer.profiler.see_communicators("ncclCommInitRankConfig", self._endpoints, startup.begins_ns)
        for worker in self._cluster.workers:
            self._timeline.begin_at(worker.rank, startup.ends_ns + 1_000 * worker.rank)
        self._last_event_ns = startup.ends_ns + 1_000_000
        traits = self._config.traits
        if traits.version_line == "stdout":
            text = f"NCCL version {traits.text}+cuda{traits.cuda}"
            name = f"logs/stdout.{self._cluster.nodes[0].host}.log"
            self._queue({name: [(self._config.start_ns + _NCCL_LOADED_NS, text)]})
        self._write_job()

    def _step(self) -> None:
        self._step_clocks()
        step = self._timeline.run_step(self._iteration, self._programs_of(self._iteration))
        observed = self._observer.observe(step)
        self._queue(observed.lines)
        self._truth.append(observed.operations)
        if self._replays is not None:
            self._replays.append(observed.replays)
        if self._plans is not None:
            self._plans.append(observed.plans)
        if self._outside is not None:
            self._outside.append(observed.outside)
        self._last_event_ns = max(self._last_event_ns, _last_event(step))
        self._iteration += 1
        if step.stalled:
            self._stalled = True
            if self._config.iterations is not None:
                self._end(self._last_event_ns + int(self._config.hang_seconds * 1e9))
        elif self._iteration == self._config.iterations:
            self._end(self._last_event_ns)

    def _programs_of(self, iteration: int) -> list[list[Action]]:
        programs = self._first if iteration == 0 else self._programs
        every = self._config.evaluate_every
        if every is not None and (iteration + 1) % every == 0:
            programs = self._evaluating
        return [self._wrong.get((rank, iteration), own) for rank, own in enumerate(programs)]

    def _step_clocks(self) -> None:
        for fault in self._config.of_kind("clock_step"):
            if fault.first == self._iteration:
                clock = self._cluster.nodes[fault.node].clock
                clock.steps.append((self._timeline.next_ns, int(fault.ms * 1e6)))

    def _end(self, at_ns: int) -> None:
        """Ends the job: communicators are destroyed, unless it hangs and is killed."""
        if not self._stalled:
            said = shut_down(self._config, self._cluster, self._endpoints, at_ns + _AFTERGLOW_NS)
            self._queue(self._observer.log(said))
            if self._observer.profiler is not None:
                times = [at_ns + _AFTERGLOW_NS] * len(self._groups)
                self._observer.profiler.see_communicators("ncclCommDestroy", self._endpoints, times)
            at_ns = max([at_ns, *(each.at_ns for own in said for each in own)])
        self._end_ns = at_ns + _AFTERGLOW_NS

    def _queue(self, lines: dict[str, list[tuple[int, str]]]) -> None:
        for name, own in lines.items():
            if name not in self._logs:
                self._logs[name] = _Log(self._out / name)
            self._logs[name].waiting.extend(own)

    def _release(self, now_ns: int) -> None:
        for log in self._logs.values():
            log.release(now_ns)
        if self._config.duty > 0.0:
            while self._export(now_ns):
                self._next_chunk += 1

    def _export(self, now_ns: int) -> bool:
        """Writes the next export of every node if it is due."""
        begins, ends = self._windows.window(self._next_chunk)
        if self._end_ns is not None:
            ends = self._end_ns if ends is None else min(ends, self._end_ns)
        if ends is None or ends <= begins or now_ns < ends + _EXPORT_NS:
            return False
        for node, capture in zip(self._cluster.nodes, self._captures, strict=True):
            since = self._config.start_ns + _NCCL_LOADED_NS
            writer = ExportWriter(self._config, self._cluster, node, self._endpoints, since)
            folder = self._out / "nsys" / node.host
            folder.mkdir(parents=True, exist_ok=True)
            rows = writer.write(
                folder / f"capture_{self._next_chunk:04d}.sqlite", capture.take(begins, ends), begins, ends
            )
            self._tally.counts["kernel_rows"] += rows
            self._tally.counts["exports"] += 1
        return self._windows.period_ns is not None

    def _write_job(self) -> None:
        content = job(self._config, self._cluster, self._groups, self._endpoints, self._tally, self._end_ns)
        write_job(self._out / "truth" / "job.json", content)


def write(
    config: SimulationConfig, out: Path, *, programs: Programs = build_programs, first: Programs | None = None
) -> None:
    """Writes a whole job at once, with what its ranks do as `Player` takes it.

    Raises:
        ValueError: the job has no last iteration.
    """
    if config.iterations is None:
        raise ValueError("a job that is written at once needs a number of iterations")
    player = Player(config, out, programs=programs, first=first)
    while not player.over:
        player.advance(player.next_ns)
    player.finish()


def _make_folders(out: Path, *, inspector: bool) -> None:
    if (out / "truth" / "job.json").exists():
        raise FileExistsError(f"{out} already holds a simulated job; name an empty folder")
    for name in ("logs", "nsys", "truth", *(["inspector"] if inspector else [])):
        (out / name).mkdir(parents=True, exist_ok=True)


def _last_event(step: Step) -> int:
    ends = [run.end_ns or run.api_end_ns for run in step.runs]
    ends += [compute.end_ns for compute in step.computes]
    return max(ends + [end for end in step.ends_ns if end is not None])

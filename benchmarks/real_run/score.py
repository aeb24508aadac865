"""`python -m benchmarks.real_run.score DIR`: are log lines given the kernels that they launched?

The truth is read without the aligner. The lines of a process are its calls in order, and calls of one group of NCCL
have one `opCount` in one communicator and one kernel; the profiler's trace has the launches of the process in order and
is recorded to the end of the job. So the last launches belong to the last groups, one to one. That is checked: each
kernel's name must be that of its group's function. Kernels that a CUDA graph replays have no line; while graphs are
replayed, `opCount` stands still for a call or two, so different functions are never taken for one group: the workloads
group sends with receives, and other calls with their like. From 2.31 on each call of a group has an `opCount` of its
own: there the names that `direct` writes into its traces say how many calls are a group.
*Source:* NCCL `src/enqueue.cc` (`opCount` moves on with each launch, not with each call), and the runs themselves.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow.parquet as pq

from ncclscope.offline import run_offline
from ncclscope_service.export.directory import write_run
from ncclscope_service.store.settings import PipelineSettings

_GUESS: Final = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Lines whose kernel is known, those given a kernel, and those given the right one, but for guesses.

    A guess has a confidence of 0.5 or less: where a program repeats, several places of a capture are as likely.
    """

    known: int
    given: int
    right: int
    guessed: int = 0

    @property
    def f1(self) -> float | None:
        """Harmonic mean of precision and recall; None without a line."""
        return 2 * self.right / (self.known + self.given) if self.known + self.given else None


class Line(NamedTuple):
    """One line of a log: its function, its group of calls, and the kernel (correlation id) that it was given."""

    function: str
    group: tuple[str, int]
    given: int | None
    is_guessed: bool = False


class Launch(NamedTuple):
    """One launch of NCCL in a trace."""

    at: float
    correlation: int
    kernel: str


def score(run: Path) -> Score:
    """Of one run's folder, with `logs` and `traces`.

    Raises:
        ValueError: the launches of a trace are not those of the last lines of its process.
    """
    lines = dict(_lines(run))
    known = given = right = guessed = 0
    for path in sorted((run / "traces").iterdir()):
        pid, launches, calls = _launches(path)
        for line, kernel in truth(lines[pid], launches, calls):
            known += 1
            guessed += line.is_guessed
            given += line.given is not None and not line.is_guessed
            right += line.given == kernel and not line.is_guessed
    return Score(known=known, given=given, right=right, guessed=guessed)


def truth(lines: Sequence[Line], launches: Sequence[Launch], calls: Sequence[int] = ()) -> Iterator[tuple[Line, int]]:
    """Each of the last lines of a process with the kernel of its group; `calls`: how many each of the last groups has,
    if the trace says it.

    Raises:
        ValueError: a kernel is not one of its group's functions, or there are more launches than groups.
    """
    groups: list[list[Line]] = []
    if calls:
        starts = np.cumsum([len(lines) - sum(calls), *calls]).tolist()
        groups = [list(lines[start:end]) for start, end in pairwise(starts)]
    for line in lines if not calls else ():
        if groups and groups[-1][0].group == line.group and _kernel_of(groups[-1][0]) == _kernel_of(line):
            groups[-1].append(line)
        else:
            groups.append([line])
    if len(launches) > len(groups):
        raise ValueError(f"{len(launches)} launches in a trace, and {len(groups)} groups of calls in the log")
    last = groups[len(groups) - len(launches) :]
    for group, launch in zip(last, launches, strict=True):
        if _kernel_of(group[0]) not in launch.kernel:
            raise ValueError(f"{launch.kernel} was launched where the log has {[line.function for line in group]}")
        for line in group:
            yield line, launch.correlation


def _kernel_of(line: Line) -> str:
    """The function in the name of its kernel."""
    return "SendRecv" if line.function in ("Send", "Recv", "AlltoAll") else line.function


def _lines(run: Path) -> Iterator[tuple[int, list[Line]]]:
    """The lines of each process in the order of its log, without those of communicators of one rank."""
    done = run_offline([run / "logs", run / "traces"], job="job", settings=PipelineSettings())
    columns = [
        "pid",
        "comm_id",
        "comm_size",
        "op",
        "op_count",
        "log_line",
        "kernel_correlation_id",
        "match",
        "confidence",
    ]
    with tempfile.TemporaryDirectory(prefix="ncclscope-") as folder:
        write_run(done.pipeline.store, Path(folder))
        rows = pq.read_table(Path(folder) / "operations.parquet", columns=columns).to_pylist()
    of_process = defaultdict[int, list[dict[str, Any]]](list)
    for row in rows:
        if row["comm_size"] != 1 and row["match"] != "line_lost":
            of_process[row["pid"]].append(row)
    for pid, found in of_process.items():
        found.sort(key=lambda row: row["log_line"])
        yield pid, [_line(row) for row in found]


def _line(row: dict[str, Any]) -> Line:
    kernel = row["kernel_correlation_id"]
    is_guessed = kernel is not None and row["confidence"] <= _GUESS
    return Line(row["op"], (row["comm_id"], row["op_count"]), kernel, is_guessed)


def _launches(path: Path) -> tuple[int, list[Launch], list[int]]:
    """Process of a trace, its launches of NCCL in order, without replays of CUDA graphs, and the calls of each group of
    calls of several ranks, if they have names.
    """
    events = [event for event in json.loads(path.read_bytes())["traceEvents"] if event.get("ph") == "X"]
    called = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
        and "Launch" in event["name"]
        and "Graph" not in event["name"]
    }
    kernels = [event for event in events if event.get("cat") == "kernel" and event["name"].startswith("nccl")]
    found = [
        Launch(called[number]["ts"], number, event["name"])
        for event in kernels
        if (number := event["args"]["correlation"]) in called
    ]
    pids = {event["pid"] for event in called.values()}
    if len(pids) != 1:
        raise ValueError(f"{path}: launches of {len(pids)} processes")
    named = sorted((event["ts"], event["name"]) for event in events if event.get("cat") == "user_annotation")
    labels = [name.split(":") for _, name in named if name.startswith("direct:")]
    return pids.pop(), sorted(found), [int(count) for _, ranks, _, count in labels if "," in ranks]


def main() -> None:
    """Prints a row for each run that has both lines and traces."""
    print("| run | lines with a known kernel | given one | right | F1 | guessed |\n|---|---|---|---|---|---|")
    for run in sorted(Path(sys.argv[1]).iterdir()):
        if (run / "traces").is_dir() and (run / "logs").is_dir() and any((run / "traces").iterdir()):
            found = score(run)
            f1 = "no line" if found.f1 is None else f"{found.f1:.4f}"
            print(f"| {run.name} | {found.known} | {found.given} | {found.right} | {f1} | {found.guessed} |")


if __name__ == "__main__":
    main()

"""`python -m benchmarks.real_run.score DIR`: are log lines given the kernels that PyTorch's profiler saw them launch?

The truth is the trace: each call of a process group has the kernel that it launched. The lines of a rank and
communicator are its calls in order; the last of both are one, since a trace is recorded to the end of the job.
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from ncclscope.offline import run_offline
from ncclscope_service.export.directory import write_run
from ncclscope_service.store.settings import PipelineSettings

Key = tuple[int, str, int]
"""Process, the ranks of the communicator as text, and the call counted from the last: 0 is the last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Lines whose kernel is known, those given a kernel, and those given the right one."""

    known: int
    given: int
    right: int

    @property
    def f1(self) -> float | None:
        """Harmonic mean of precision and recall; None without a line."""
        return 2 * self.right / (self.known + self.given) if self.known + self.given else None


def score(run: Path) -> Score:
    """Of one run's folder, with `logs` and `traces`."""
    return compare(_kernels([run / "traces"]), _kernels([run / "logs", run / "traces"]))


def compare(truth: dict[Key, int | None], found: dict[Key, int | None]) -> Score:
    """Kernels by call as they are and as found; calls that only one of them has are outside the trace, and left out."""
    known = [key for key, kernel in truth.items() if kernel is not None and key in found]
    given = [key for key, kernel in found.items() if kernel is not None and key in truth]
    right = sum(found[key] == truth[key] for key in known)
    return Score(known=len(known), given=len(given), right=right)


def _kernels(paths: list[Path]) -> dict[Key, int | None]:
    """Correlation id of each call's kernel, as the pipeline says it from these inputs; None for a call without one."""
    done = run_offline(paths, job="job", settings=PipelineSettings())
    with tempfile.TemporaryDirectory(prefix="ncclscope-") as folder:
        write_run(done.pipeline.store, Path(folder))
        groups = pq.read_table(Path(folder) / "communicators.parquet", columns=["comm_id", "ranks"]).to_pylist()
        columns = ["pid", "comm_id", "kernel_correlation_id", "match"]
        rows = pq.read_table(Path(folder) / "operations.parquet", columns=columns).to_pylist()
    members = {group["comm_id"]: str(group["ranks"]) for group in groups}
    calls = defaultdict[tuple[int, str], list[int | None]](list)
    for row in rows:  # those of a process are in the order of its calls
        if row["match"] != "no_kernel":
            kernel = None if row["match"] == "line_lost" else row["kernel_correlation_id"]
            calls[row["pid"], members[row["comm_id"]]].append(kernel)
    return {
        (pid, ranks, place): kernel
        for (pid, ranks), kernels in calls.items()
        for place, kernel in enumerate(reversed(kernels))
    }


def main() -> None:
    """Prints a row for each run that has both lines and traces."""
    print("| run | lines with a known kernel | given one | right | F1 |\n|---|---|---|---|---|")
    for run in sorted(Path(sys.argv[1]).iterdir()):
        if (run / "traces").is_dir() and (run / "logs").is_dir():
            found = score(run)
            f1 = "no line" if found.f1 is None else f"{found.f1:.4f}"
            print(f"| {run.name} | {found.known} | {found.given} | {found.right} | {f1} |")


if __name__ == "__main__":
    main()

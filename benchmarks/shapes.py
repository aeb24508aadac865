"""Parallelism, iterations and counts that are found without a hint in simulated jobs of many shapes, against the truth.

    python benchmarks/shapes.py [--capture none|full] [--lost 0.1] [--only TEXT] [--counts]

For each shape: how many communicators of two ranks or more got the right parallelism, and the least confidence of the
answers; how many operations the right iteration; and whether the operations of each rank, iteration and kind of
communicator are counted as the program calls them. With `--counts` these counts are printed, of one rank and iteration.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow.parquet as pq

from ncclscope.offline import run_offline
from ncclscope.simulate import configuration_of
from ncclscope_service.export.selection import select
from ncclscope_service.export.tables.operations_file import write_operations
from ncclscope_service.export.totals import Calls, calls_per_iteration
from ncclscope_service.store.settings import PipelineSettings
from ncclscope_service.store.tables import Store
from ncclscope_simulator import write

_ONE_NODE: Final = "--nodes 1 --tp 1 --pp 1"
SHAPES: Final[Mapping[str, str]] = {
    "DP4": _ONE_NODE,
    "DP4 of many layers": f"{_ONE_NODE} --layers 24 --microbatches 1",
    "DP4 coalesced": f"{_ONE_NODE} --layers 8 --coalesce",
    "DP8 on two nodes": "--tp 1 --pp 1",
    "DP4 in the world's communicator": f"{_ONE_NODE} --shared-world",
    "ZeRO-1": f"{_ONE_NODE} --zero1",
    "ZeRO-2": f"{_ONE_NODE} --zero2",
    "FSDP4": f"{_ONE_NODE} --fsdp",
    "FSDP8, one microbatch": "--tp 1 --pp 1 --fsdp --microbatches 1 --layers 6",
    "FSDP4 in the world's communicator": f"{_ONE_NODE} --fsdp --shared-world",
    "HSDP 2 x 2": f"{_ONE_NODE} --fsdp --replicate 2",
    "HSDP 2 x 4 on two nodes": "--tp 1 --pp 1 --fsdp --replicate 2",
    "HSDP 4 x 2, one microbatch": "--tp 1 --pp 1 --fsdp --replicate 4 --microbatches 1 --layers 6",
    "DeepSpeed ZeRO-1": f"{_ONE_NODE} --deepspeed 1",
    "DeepSpeed ZeRO-2": f"{_ONE_NODE} --deepspeed 2",
    "DeepSpeed ZeRO-3": f"{_ONE_NODE} --deepspeed 3",
    "DeepSpeed ZeRO-1 on two nodes": "--tp 1 --pp 1 --deepspeed 1 --microbatches 1",
    "DeepSpeed ZeRO-2 on two nodes": "--tp 1 --pp 1 --deepspeed 2 --microbatches 1 --layers 6",
    "DeepSpeed ZeRO-3 on two nodes": "--tp 1 --pp 1 --deepspeed 3 --microbatches 1 --layers 6",
    "TP2, DeepSpeed ZeRO-1": "--nodes 1 --tp 2 --pp 1 --deepspeed 1",
    "PP4": "--nodes 1 --tp 1 --pp 4",
    "PP4 interleaved": "--nodes 1 --tp 1 --pp 4 --interleave 2",
    "PP3 interleaved": "--nodes 1 --gpus 3 --tp 1 --pp 3 --interleave 2 --microbatches 6",
    "PP2": "--nodes 1 --gpus 2 --tp 1 --pp 2",
    "PP2, one microbatch": "--nodes 1 --tp 2 --pp 2 --microbatches 1",
    "TP4": "--nodes 1 --tp 4 --pp 1 --no-sequence-parallel",
    "TP4, one microbatch": "--nodes 1 --tp 4 --pp 1 --no-sequence-parallel --microbatches 1",
    "TP4 with sequence parallelism": "--nodes 1 --tp 4 --pp 1",
    "TP4 in the world's communicator": "--nodes 1 --tp 4 --pp 1 --shared-world",
    "TP8 on two nodes": "--tp 8 --pp 1",
    "EP4": f"{_ONE_NODE} --ep 4",
    "EP4 by Send and Recv": f"{_ONE_NODE} --ep 4 --nccl 2.21",
    "EP4 by AllGather": f"{_ONE_NODE} --ep 4 --ep-dispatch allgather",
    "EP4 by AllGather, ZeRO-1": f"{_ONE_NODE} --ep 4 --ep-dispatch allgather --zero1",
    "CP4": f"{_ONE_NODE} --cp 4",
    "CP4 by AllGather": f"{_ONE_NODE} --cp 4 --cp-exchange allgather",
    "CP2 DP2": f"{_ONE_NODE} --cp 2",
    "CP2": "--nodes 1 --gpus 2 --tp 1 --pp 1 --cp 2",
    "CP2 FSDP2": f"{_ONE_NODE} --cp 2 --fsdp",
    "TP2 DP2": "--nodes 1 --tp 2 --pp 1",
    "PP2 DP2": "--nodes 1 --tp 1 --pp 2",
    "TP2 PP2 DP2": "--tp 2 --pp 2",
    "TP2 PP2 DP2 without sequence parallelism": "--tp 2 --pp 2 --no-sequence-parallel",
    "TP4 FSDP2": "--tp 4 --pp 1 --fsdp",
    "TP2 HSDP 2 x 2": "--tp 2 --pp 1 --fsdp --replicate 2",
    "TP2 PP2 FSDP2": "--tp 2 --pp 2 --fsdp",
}
"""Of 2 to 8 ranks."""

LARGE_SHAPES: Final[Mapping[str, str]] = {
    "TP4 PP4": "--nodes 4 --tp 4 --pp 4",
    "TP4 PP2 DP2": "--nodes 4 --tp 4 --pp 2",
    "TP2 PP2 DP4, pipelines of neighbours": "--nodes 4 --tp 2 --pp 2 --order tp-pp-dp",
    "TP2 DP8 EP4": "--nodes 4 --tp 2 --pp 1 --ep 4",
    "TP2 PP2 DP4 EP2": "--nodes 4 --tp 2 --pp 2 --ep 2",
    "TP2 PP2 DP4 EP4 by AllGather": "--nodes 4 --tp 2 --pp 2 --ep 4 --ep-dispatch allgather",
    "TP2 CP2 PP2 DP2": "--nodes 4 --tp 2 --pp 2 --cp 2",
    "TP2 CP2 PP2 DP2 by AllGather": "--nodes 4 --tp 2 --pp 2 --cp 2 --cp-exchange allgather",
    "TP2 CP2 FSDP4": "--nodes 4 --tp 2 --pp 1 --cp 2 --fsdp",
    "TP2 PP2 HSDP 2 x 2": "--nodes 4 --tp 2 --pp 2 --fsdp --replicate 2",
    "HSDP 4 x 8": "--nodes 4 --gpus 8 --tp 1 --pp 1 --fsdp --replicate 4",
    "TP4 DP4, DeepSpeed ZeRO-1": "--nodes 4 --tp 4 --pp 1 --deepspeed 1",
    "DeepSpeed ZeRO-2 on four nodes": "--nodes 4 --tp 1 --pp 1 --deepspeed 2",
    "DeepSpeed ZeRO-3 on four nodes": "--nodes 4 --tp 1 --pp 1 --deepspeed 3",
    "TP2 CP4 PP2 DP2, pipelines of neighbours": "--nodes 8 --tp 2 --pp 2 --cp 4 --order tp-pp-dp",
    "TP8 PP4 DP2": "--nodes 8 --gpus 8 --tp 8 --pp 4",
    "TP4 PP4 DP4, ZeRO-1": "--nodes 8 --gpus 8 --tp 4 --pp 4 --zero1",
    "TP2 PP8 DP4 interleaved": "--nodes 8 --gpus 8 --tp 2 --pp 8 --interleave 2 --microbatches 8",
    "TP4 PP2 DP8 EP8": "--nodes 8 --gpus 8 --tp 4 --pp 2 --ep 8",
}
"""Of 16 to 64 ranks."""

Kinds = dict[str, str | None]
Row = dict[str, Any]
Counts = Counter[tuple[int, int, str, str]]
"""Operations by rank, iteration, parallelism and operation."""


@dataclass(frozen=True, slots=True)
class Found:
    """Everything found of a job, and the truth."""

    store: Store
    operations: list[Row]
    """As in operations.parquet."""
    truth: dict[tuple[str, int], Row]
    """By log and line."""

    def kinds(self) -> tuple[Kinds, Kinds]:
        """Parallelism as found and as it is, of each communicator of two ranks or more."""
        true: Kinds = {row["comm_id"]: row["parallelism"] for row in self.truth.values() if row["comm_size"] > 1}
        found: Kinds = {each.comm_id: each.parallelism for each in self.store.listed_communicators() if each.size > 1}
        return found, true

    def least_confidence(self) -> float:
        """Of the answers."""
        return min(each.parallelism_confidence for each in self.store.listed_communicators() if each.size > 1)

    def iteration_agreement(self) -> float:
        """Share of the operations whose iteration is right."""
        same = [row["iteration"] == self.true_row(row)["iteration"] for row in self.operations]
        return float(np.mean(same))

    def counts(self) -> tuple[Counts, Counts]:
        """Operations that were counted, and those that the program called; communicators of one rank are of no kind."""
        found: Counts = Counter(_key(row) for row in self.operations)
        true: Counts = Counter(_key(row) for row in self.truth.values())
        return found, true

    def true_row(self, row: Row) -> Row:
        """The truth of an operation."""
        return self.truth[Path(row["log_file"]).name, row["log_line"]]

    def calls(self) -> Mapping[tuple[str, str | None], Calls]:
        """Calls of one rank in one iteration, as the report says them."""
        return calls_per_iteration(select(self.store))


def _key(row: Row) -> tuple[int, int, str, str]:
    kind = "alone" if row["comm_size"] == 1 else str(row["parallelism"])
    return row["rank"], row["iteration"], kind, row["op"]


def analysed(folder: Path, *arguments: str, iterations: int = 3) -> Found:
    """A simulated job of these options of `ncclscope simulate`, analyzed."""
    job = folder / "job"
    write(configuration_of(("--out", str(job), "--iterations", str(iterations), *arguments)), job)
    run = run_offline([job], job="default", settings=PipelineSettings())
    write_operations(select(run.pipeline.store), folder / "operations.parquet")
    truth: list[Row] = pq.read_table(job / "truth" / "operations.parquet").to_pylist()
    found: list[Row] = pq.read_table(folder / "operations.parquet").to_pylist()
    return Found(run.pipeline.store, found, {(Path(row["log_file"]).name, row["log_line"]): row for row in truth})


def _line(name: str, found: Found) -> str:
    kinds, true = found.kinds()
    right = sum(kinds.get(comm_id) == kind for comm_id, kind in true.items())
    counted, called = found.counts()
    ranks = len({row["rank"] for row in found.truth.values()})
    exactly = "lines lost" if counted.total() < called.total() else "yes" if counted == called else "no"
    return (
        f"| {name} | {ranks} | {right} of {len(true)} | {found.least_confidence():.2f} | "
        f"{found.iteration_agreement():.1%} | {exactly} |"
    )


def _print_counts(found: Found) -> None:
    """Of each kind and operation: what the report says of one rank in one iteration, and what the program calls."""
    _, called = found.counts()
    true: dict[tuple[str, str | None], list[int]] = {}
    for (_, _, name, op), amount in called.items():
        true.setdefault((op, None if name == "alone" else name), []).append(amount)
    told = found.calls()
    for op, kind in sorted(true, key=str):
        calls, amounts = told.get((op, kind)), true[op, kind]
        said = "-" if calls is None else f"{calls.median:g} ({calls.least} to {calls.most})"
        program = f"{np.median(amounts):g} ({min(amounts)} to {max(amounts)})"
        print(f"    {kind or 'one rank':10} {op:14} report {said:20} program {program}")


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capture", default="none", help="none: logs alone; full: with kernels and NVTX marks")
    parser.add_argument("--lost", type=float, default=0.0, help="share of the lines that are lost")
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--counts", action="store_true")
    given = parser.parse_args()
    more = ["--capture", given.capture] + (["--fault", f"drop_lines:ratio={given.lost}"] if given.lost else [])
    print("| shape | ranks | parallelism right | least confidence | iteration right | counts as the program's |")
    print("|---|---|---|---|---|---|")
    for name, shape in {**SHAPES, **LARGE_SHAPES}.items():
        if given.only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = analysed(Path(folder), *shape.split(), *more, iterations=given.iterations)
            print(_line(name, found), flush=True)
            if given.counts:
                _print_counts(found)


if __name__ == "__main__":
    main()

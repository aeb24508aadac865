"""python -m benchmarks.measures [--iterations 10] [--corpus FOLDER]: what is measured, against the truth.

1. Simulated jobs, by operation, straggler and clocks: busbw of the transfer against its truth, and the last arriver
   where it is late by 50 us or more: of Sends and Receives who waited for whom. "measured" is the share of what nsys
   captured that has a bandwidth, "named" of late arrivers that are named at all, "right" of those named. The simulated
   clocks are off by up to 80 ms and drift by up to 50 ppm. They are *estimated*; or *believed*, wrong by 1 ms, as
   heartbeats tell; or *unknown*; or the estimate is *spoilt* by 1 ms behind its back.
2. Communicators that no log line names, two to four groups, by layout and by times.
3. Traffic of simulated jobs by version of NCCL: of how many bytes the algorithm is not known, and of how many the ring.
4. With a corpus of real files: nccl-tests' busbw column, and the algbw and busbw that NCCL Inspector prints.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))  # what tests simulate and read

from benchmarks.jobs import read
from corpus import printed_tables
from service.unnamed_members import Job

from ncclscope_agent.files.recognise import FileKind, recognise
from ncclscope_agent.sources.inspector import InspectorReader
from ncclscope_service.clock.estimator import ClockEstimator
from ncclscope_service.clock.host_clocks import ClockPrior
from ncclscope_service.clock.host_graph import Solution
from ncclscope_service.clock.observations import Times
from ncclscope_service.export.selection import select
from ncclscope_service.export.tables.traffic_file import measure_traffic
from ncclscope_service.nccl import bandwidth
from ncclscope_service.pipeline import Pipeline
from ncclscope_service.store.tables import Store
from ncclscope_simulator import SimulationConfig, write
from ncclscope_simulator.faults import parse_faults
from ncclscope_wire.records import Source, SourceKind
from ncclscope_wire.terms import NO_TIME_NS, OPERATIONS

Row = dict[str, Any]

LATE_NS: Final = 50_000
WRONG_NS: Final = 1_000_000
JOBS: Final[dict[str, dict[str, Any]]] = {
    "dense": {"nodes": 4, "tp": 2, "pp": 2, "dp": 4, "sequence_parallel": True},
    "without sequence parallelism": {"nodes": 2, "tp": 4, "pp": 2, "dp": 1, "sequence_parallel": False},
    "tensor parallel over nodes": {"nodes": 4, "gpus": 2, "tp": 4, "pp": 2, "dp": 1, "sequence_parallel": False},
    "experts": {"nodes": 2, "tp": 1, "pp": 2, "dp": 4, "ep": 4, "interleave": 1},
}
STRAGGLERS: Final = {
    "none": "none",
    "2 ms a step": "late_rank:rank=3,ms=2",
    "0.3 ms a layer": "late_rank:rank=3,ms=0.3,every=layer",
}


class Unknowing(ClockEstimator):
    """Learns nothing."""

    def add(self, hosts: Sequence[int], starts_ns: Times, ends_ns: Times, transfer_ns: NDArray[np.int64]) -> None:
        """Forgets it at once."""

    def add_messages(self, sender: int, receiver: int, sent_ns: Times, received_ns: Times) -> None:
        """Forgets them at once."""


class Spoilt(ClockEstimator):
    """Is wrong by 1 ms about every other host, and does not know it."""

    def solve(self, index: dict[int, int], reference: int, origin: int) -> Solution:
        """The right clocks, spoilt."""
        solution = ClockEstimator.solve(self, index, reference, origin)
        for host, position in index.items():
            if host != reference and position % 2:
                solution.offset[position] += WRONG_NS
        return solution


def _believed(pipeline: Pipeline, hosts: Row) -> None:
    """Clocks as heartbeats tell them, wrong by 1 ms for every other host."""
    priors = {
        name: ClockPrior(heartbeat_offset_ns=clock["offset_ns"] + WRONG_NS * (place % 2), error_ns=None)
        for place, (name, clock) in enumerate(sorted(hosts.items()))
    }
    pipeline.set_clock_priors(priors)


def _nothing(pipeline: Pipeline, hosts: Row) -> None:
    """Nobody says anything."""
    del pipeline, hosts


CLOCKS: Final[dict[str, tuple[type[ClockEstimator], Callable[[Pipeline, Row], None]]]] = {
    "estimated": (ClockEstimator, _nothing),
    "believed, off by 1 ms": (Unknowing, _believed),
    "unknown": (Unknowing, _nothing),
    "spoilt by 1 ms": (Spoilt, _nothing),
}


@dataclass(slots=True)
class Tally:
    """One row of the table."""

    operations: int = 0
    errors: list[float] = field(default_factory=list[float])
    late: int = 0
    named: int = 0
    right: int = 0

    def add(self, other: Tally) -> None:
        """Takes those of another job."""
        self.operations += other.operations
        self.errors += other.errors
        self.late += other.late
        self.named += other.named
        self.right += other.right

    def cells(self) -> str:
        """As the table shows it."""
        off = np.array(self.errors)
        errors = "- | -" if not len(off) else f"{np.median(off):.3%} | {np.quantile(off, 0.95):.3%}"
        if not self.late:
            late = "0 | - | -"
        else:
            late = f"{self.late} | {self.named / self.late:.1%} | " + (
                f"{self.right / self.named:.2%}" if self.named else "-"
            )
        return f"{self.operations} | {len(off) / self.operations:.1%} | {errors} | {late}"


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--corpus", type=Path)
    given = parser.parse_args()
    print_jobs(given.iterations)
    print_groups()
    print_traffic()
    if given.corpus is not None:
        print_corpus(given.corpus)


def print_jobs(iterations: int) -> None:
    """Table 1."""
    print("| clocks | straggler | operation | launches | measured | busbw error: median | p95 | late | named | right |")
    print("|---|---|---|---:|---:|---:|---:|---:|---:|---:|")
    for straggler, fault in STRAGGLERS.items():
        tallies: dict[str, defaultdict[str, Tally]] = {clocks: defaultdict(Tally) for clocks in CLOCKS}
        for shape in JOBS.values():
            config = SimulationConfig(
                **shape, iterations=iterations, faults=parse_faults([fault]), clock_offset_ms=80.0, clock_drift_ppm=50.0
            )
            with tempfile.TemporaryDirectory() as folder:
                write(config, Path(folder))
                batches, truth = read(Path(folder)), Truth(Path(folder))
            for clocks, (estimator, believe) in CLOCKS.items():
                pipeline = Pipeline(make_estimator=estimator)
                for batch in batches:
                    pipeline.ingest_batch(batch, agent="a", session="s", job="j")
                believe(pipeline, truth.hosts)
                pipeline.finish(config.start_ns)
                for op, tally in compare(pipeline.store, truth).items():
                    tallies[clocks][op].add(tally)
        for clocks, by_op in tallies.items():
            for op, tally in sorted(by_op.items()):
                print(f"| {clocks} | {straggler} | {op} | {tally.cells()} |", flush=True)


class Truth:
    """The simulator's knowledge of a job."""

    def __init__(self, folder: Path) -> None:
        self.hosts: Row = json.loads((folder / "truth" / "job.json").read_text())["hosts"]
        rows = pq.read_table(folder / "truth" / "operations.parquet").to_pylist()
        self.rows: dict[tuple[str, int], Row] = {(Path(row["log_file"]).name, row["log_line"]): row for row in rows}
        self.collectives: defaultdict[tuple[str, int], list[Row]] = defaultdict(list)
        for row in rows:
            if row["coll_seq"] is not None and row["comm_size"] > 1 and row["start_true_ns"] is not None:
                self.collectives[row["comm_id"], row["coll_seq"]].append(row)


def compare(store: Store, truth: Truth) -> dict[str, Tally]:
    """By operation: one for each launch of a rank for bandwidth, one for each collective for the last arriver."""
    tallies: defaultdict[str, Tally] = defaultdict(Tally)
    rows = store.operations.rows
    seen: set[tuple[int, str]] = set()
    for row in rows:
        told = truth.rows.get((_log_of(store, row), int(row["line"])))
        if told is None or told["comm_size"] < 2 or not told["covered"] or not told["busbw_bytes_per_second"]:
            continue
        key = int(told["launch_id"]), told["op"]
        if key in seen:
            continue
        seen.add(key)
        tally = tallies[told["op"]]
        tally.operations += 1
        if np.isfinite(row["busbw"]):
            tally.errors.append(abs(float(row["busbw"]) / told["busbw_bytes_per_second"] - 1))
        if told["coll_seq"] is None:
            _judge_wait(tally, row, told)
    _judge_last(store, truth, tallies)
    return tallies


def _log_of(store: Store, row: np.void) -> str:
    return Path(store.sources[int(row["source"])].source.name).name


def _judge_wait(tally: Tally, row: np.void, told: Row) -> None:
    """A Send or Recv that waited for its peer: whether that is said, and its length right to 10 %."""
    if (told["wait_ns"] or 0) < LATE_NS:
        return
    tally.late += 1
    if row["wait_ns"] != NO_TIME_NS:
        tally.named += 1
        tally.right += bool(abs(int(row["wait_ns"]) / told["wait_ns"] - 1) <= 0.1)


def _judge_last(store: Store, truth: Truth, tallies: defaultdict[str, Tally]) -> None:
    table = store.collectives.rows
    found = {
        (store.communicators[row["communicator"]].comm_id, int(row["coll_seq"])): int(row["last_rank"]) for row in table
    }
    for key, ranks in truth.collectives.items():
        if len(ranks) < ranks[0]["comm_size"]:
            continue
        by_start = sorted(ranks, key=lambda row: -row["start_true_ns"])
        if by_start[0]["start_true_ns"] - by_start[1]["start_true_ns"] < LATE_NS:
            continue
        tally = tallies[by_start[0]["op"]]
        tally.late += 1
        last = found.get(key, -1)
        tally.named += last >= 0
        tally.right += last == by_start[0]["comm_rank"]


def print_groups() -> None:
    """Table 2."""
    print("\n| groups without commId | told by | found | confidence | wrong |\n|---|---|---:|---:|---:|")
    ways = {
        "layout alone": (False, False),
        "layout and times": (True, False),
        "times alone, no regular layout": (True, True),
        "neither": (False, True),
    }
    for amount in (2, 3, 4):
        for way, (timed, scattered) in ways.items():
            job = _groups(amount, timed=timed, scattered=scattered)
            found = job.infer()
            wrong = sum(group.members not in job.groups for group in found)
            sure = f"{min(group.confidence for group in found):.2f}" if found else "said to be unknown"
            print(f"| {amount} groups of 3 ranks | {way} | {len(found)} of {amount} | {sure} | {wrong} |")


def _groups(amount: int, *, timed: bool, scattered: bool) -> Job:
    """Groups with the same content, whose ranks are neighbours or lie about; hosts' clocks are off by tens of ms."""
    job, seats = Job(seed=amount), np.arange(3 * amount)
    if scattered:
        seats = np.random.default_rng(amount).permutation(seats)
    for group in range(amount):
        job.group(
            seats[3 * group : 3 * group + 3].tolist(),
            timed=timed, offsets_ns=[0, 50_000_000, -30_000_000], drift_ppm=20.0,
        )  # fmt: skip
    return job


def print_traffic() -> None:
    """Table 3."""
    print("\n| traffic | bytes on the links | algorithm assumed | rings or trees assumed |\n|---|---:|---:|---:|")
    for version in ("2.14", "2.18", "2.21", "2.24", "2.28.3"):
        config = SimulationConfig(nccl=version, iterations=3)
        pipeline = Pipeline()
        with tempfile.TemporaryDirectory() as folder:
            write(config, Path(folder))
            for batch in read(Path(folder)):
                pipeline.ingest_batch(batch, agent="a", session="s", job="j")
        pipeline.finish(config.start_ns)
        rows = measure_traffic(select(pipeline.store)).rows
        total = sum(row.bytes for row in rows)
        assumed, order = (sum(row.assumed_bytes for row in rows), sum(row.assumed_order_bytes for row in rows))
        print(f"| NCCL {version} | {total / 1e9:.1f} GB | {assumed / total:.1%} | {order / total:.1%} |", flush=True)


def print_corpus(corpus: Path) -> None:
    """Table 4."""
    skipped: Counter[str] = Counter()
    printed = [one for path in printed_tables.files(corpus) for one in printed_tables.measurements(path, skipped)]
    wrong = printed_tables.differing(printed)
    print("\n| printed by | rows | operations | not as we compute it | not compared |\n|---|---:|---|---:|---|")
    operations = ", ".join(sorted({one.op for one in printed}))
    left_out = ", ".join(f"{amount} {why}" for why, amount in skipped.items()) or "none"
    print(f"| nccl-tests: busbw | {len(printed)} | {operations} | {len(wrong)} | {left_out} |")
    rows, off, ops = 0, Counter[str](), set[str]()
    for path in sorted(path for path in (corpus / "inspector").rglob("*") if path.is_file()):
        if recognise(path.read_bytes(), path.name) is FileKind.INSPECTOR:
            for op, algbw, busbw in _inspected(path):
                rows += 1
                ops.add(op)
                off.update(algbw=not algbw, busbw=not busbw)
    both = f"{off['algbw']} algbw, {off['busbw']} busbw"
    print(f"| NCCL Inspector: algbw, busbw | {rows} | {', '.join(sorted(ops))} | {both} | none |")


def _inspected(path: Path) -> Iterator[tuple[str, bool, bool]]:
    """(operation, algbw is as printed, busbw is as printed) of each record; printed are six digits of GB/s."""
    reader = InspectorReader(Source(kind=SourceKind.INSPECTOR, name=path.name, key=str(path)))
    batches = [*reader.ingest_bytes(path.read_bytes()), *reader.finish()]
    rows = np.concatenate([batch.inspected for batch in batches])
    ranks = np.concatenate([batch.inspected_ranks for batch in batches])[rows["inspected_rank"]]
    sizes = bandwidth.scaled_bytes(rows["op"], rows["bytes"], ranks["nranks"])
    algbw = bandwidth.algbw(sizes, rows["duration_ns"]) / 1e9
    busbw = algbw * bandwidth.factor(rows["op"], ranks["nranks"])
    told = [json.loads(line)["coll_perf"] for line in path.read_text().splitlines()]
    for op, ours, ours_bus, record in zip(rows["op"].tolist(), algbw.tolist(), busbw.tolist(), told, strict=True):
        is_same = [
            abs(mine - record[name]) <= 0.5001e-6
            for mine, name in ((ours, "coll_algobw_gbs"), (ours_bus, "coll_busbw_gbs"))
        ]
        yield OPERATIONS[op].name, is_same[0], is_same[1]


if __name__ == "__main__":
    main()

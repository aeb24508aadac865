"""Jobs whose log lines were lost or torn: what is still numbered, measured and found as it truly was.

Lines are taken out of the written logs by `damage`, whatever wrote them. A job is then followed as it would have come
live, a second at a time, its exports at the end, and half a minute of silence after it; then everything is decided.
Three jobs make a row: a healthy one; one whose clock is set and whose rank 5 later calls something else, at which it
stands still; and one whose rank 5 hangs.

Of the healthy job: the share of the collectives, and of Sends with their Recvs, whose kernels were all recorded whole
that are measured on all their ranks; the share of those measured of which a transfer or wait is wrong by more than 5 %
and 5 us, or that hold ranks of two; the share of the lines left whose `coll_seq` (`pair_seq`) is true, of ranks of
communicators of two and more; and the findings that are false.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow.parquet as pq
from benchmarks.alignment.jobs import Place, Row, simulated

from ncclscope.offline import run_offline
from ncclscope_agent.sources.nccl_log.reader import NcclLogReader
from ncclscope_agent.sources.nsys.export import read_export
from ncclscope_service.pipeline import Pipeline
from ncclscope_service.store.records import Finding, FindingKind
from ncclscope_service.store.settings import PipelineSettings
from ncclscope_service.store.tables import Store
from ncclscope_simulator.config import SimulationConfig
from ncclscope_simulator.faults import Fault
from ncclscope_wire.batch import Batch
from ncclscope_wire.records import Source, SourceKind
from ncclscope_wire.terms import NO_NUMBER

_SECOND_NS: Final = 1_000_000_000
_SILENT_SECONDS: Final = 30
_WRONG_SHARE: Final = 0.05
_WRONG_NS: Final = 5_000
_JUDGED: Final = (FindingKind.MISMATCH, FindingKind.HANG, FindingKind.CLOCK_FAULT, FindingKind.STOPPED_LOGGING)
_CULPRIT: Final = 5
_SET_NODE: Final = 1


@dataclass(frozen=True, slots=True)
class Loss:
    """What happens to the operation lines of a job's logs."""

    name: str
    lost: float = 0.0
    """Share of them that is missing, one by one at random."""
    torn: float = 0.0
    """Share of them whose end and line break are overwritten by the next line."""
    bursts: float = 0.0
    """Share of them that is missing in bursts of 100."""
    silent_ns: int = 0
    """How long nothing of rank 2 was written, in the middle of the job."""


Lines: TypeAlias = dict[str, list[tuple[bytes, int]]]
"""By log: each line with its number before the damage."""


def damage(lines: Sequence[bytes], loss: Loss, seed: int, silent: range = range(0)) -> list[tuple[bytes, int]]:
    """What is left of a log, with the number (from 1) that each line had; of two torn ones that of the second.

    `silent`: numbers of the lines that were never written, in place of `loss.silent_ns`.
    """
    draw = np.random.default_rng(seed)
    operations = np.flatnonzero([b" opCount " in line for line in lines])
    gone = np.zeros(len(lines) + 1, np.bool_)
    gone[operations[draw.random(len(operations)) < loss.lost]] = True
    for begin in np.flatnonzero(draw.random(len(operations)) < loss.bursts / 100).tolist():
        gone[operations[begin : begin + 100]] = True
    gone[max(silent.start - 1, 0) : max(silent.stop - 1, 0)] = True
    torn = set(operations[draw.random(len(operations)) < loss.torn].tolist())
    left: list[tuple[bytes, int]] = []
    before = b""
    for nth, line in enumerate(lines):
        if gone[nth]:
            continue
        if nth in torn and not before and nth + 1 < len(lines) and not gone[nth + 1]:
            before = line[: int(draw.integers(len(line) // 3, len(line) - 8))]
            continue
        left.append((before + line, nth + 1))
        before = b""
    return left


@dataclass(slots=True)
class Tally:
    """What was counted of a healthy job."""

    possible: int = 0
    measured: int = 0
    """Of the possible ones."""
    judged: int = 0
    """Those measured, and those of which ranks of two were joined."""
    wrong: int = 0
    lines: int = 0
    numbered: int = 0
    """Lines with their true number."""
    paired: int = 0
    """Lines with a kernel."""
    mispaired: int = 0
    """Of these, those whose kernel is of another line."""
    findings: Counter[str] = field(default_factory=Counter[str])


@dataclass(slots=True)
class Followed:
    """A job as it was followed, and all judged findings that were ever open."""

    store: Store
    findings: dict[tuple[object, ...], Finding] = field(default_factory=dict[tuple[object, ...], Finding])
    lines: dict[Place, int] = field(default_factory=dict[Place, int])
    """By log and line after the damage: the line before."""


def follow(folder: Path, loss: Loss, rows: Sequence[Row]) -> Followed:
    """Follows a job with such losses; `rows`: its truth."""
    lines, times = _damaged(folder, loss, rows)
    pipeline = Pipeline()
    found = Followed(pipeline.store)
    readers = {name: NcclLogReader(Source(kind=SourceKind.NCCL_LOG, name=name, key=name)) for name in sorted(lines)}
    places = dict.fromkeys(readers, 0)
    now = min(int(each[0]) for each in times.values())
    end = max(int(each[-1]) for each in times.values()) + _SILENT_SECONDS * _SECOND_NS
    exports = list(_exports(folder))
    while now < end:
        now += _SECOND_NS
        for name, reader in readers.items():
            until = int(np.searchsorted(times[name], now, "right"))
            new = b"".join(line for line, _ in lines[name][places[name] : until])
            places[name] = until
            for batch in reader.ingest_bytes(new, now) if new else ():
                pipeline.ingest_batch(batch, agent=name, session="s", job="job")
        for host, ready_ns, batches in exports:
            for batch in batches if ready_ns <= now < ready_ns + _SECOND_NS else ():
                pipeline.ingest_batch(batch, agent=host, session="s", job="job")
        pipeline.process_backlog(now)
        _note(found, pipeline.store.findings)
    pipeline.finish(now)
    _note(found, pipeline.store.findings)
    for name, left in lines.items():
        found.lines |= {(name, nth): line for nth, (_, line) in enumerate(left, 1)}
    return found


def _exports(folder: Path) -> Iterator[tuple[str, int, list[Batch]]]:
    """Host, the second in which it is finished, and batches of each export."""
    for path in sorted((folder / "nsys").rglob("*.sqlite")):
        batches = list(read_export(path, source=Source(kind=SourceKind.NSYS, name=path.name, key=str(path))))
        yield path.parent.name, max(seen.end_ns for batch in batches for seen in batch.captures), batches


def _damaged(folder: Path, loss: Loss, rows: Sequence[Row]) -> tuple[Lines, dict[str, np.ndarray[Any, Any]]]:
    """The lines of each log, and when each was written."""
    called: dict[str, dict[int, int]] = defaultdict(dict)
    for row in rows:
        if row["log_line"] is not None:
            called[Path(row["log_file"]).name][row["log_line"]] = row["called_ns"]
    start = min(row["called_ns"] for row in rows)
    logs: Lines = {}
    times: dict[str, np.ndarray[Any, Any]] = {}
    for seed, log in enumerate(sorted((folder / "logs").iterdir())):
        lines = log.read_bytes().splitlines(keepends=True)
        own = called[log.name]
        when = np.zeros(len(lines) + 1, np.int64)
        when[list(own)] = list(own.values())
        when = np.maximum.accumulate(np.maximum(when, start))
        middle = int(when[0] + when[-1]) // 2
        silent = np.flatnonzero((when > middle) & (when < middle + loss.silent_ns)) if seed == 2 else np.empty(0)
        logs[log.name] = damage(
            lines, loss, seed, range(int(silent[0]), int(silent[-1]) + 1) if len(silent) else range(0)
        )
        times[log.name] = when[[line for _, line in logs[log.name]]]
    return logs, times


def _note(found: Followed, findings: Sequence[Finding]) -> None:
    for each in findings:
        if each.kind in _JUDGED:
            found.findings[each.kind, each.comm_id, each.since_ns] = each


def tally(found: Followed, rows: Sequence[Row]) -> Tally:
    """Counts a healthy job; `rows`: its truth."""
    keys = _true_keys(rows)
    counted = Tally(findings=Counter(each.kind.value for each in found.findings.values()))
    whole = Counter(key for key, row in zip(keys, rows, strict=True) if _is_whole(row))
    possible = {key for key, amount in whole.items() if amount == (key[1] or 2)}
    measured: Counter[_Key] = Counter()
    groups: dict[tuple[object, ...], list[tuple[_Key, bool]]] = defaultdict(list)
    for each in _found_rows(found, rows):
        if each.line is not None and rows[each.line]["comm_size"] > 1:
            counted.lines += 1
            counted.numbered += each.number == keys[each.line][-1]
            counted.paired += each.kernel is not None
            counted.mispaired += each.kernel is not None and each.kernel != each.line
        if each.kernel is not None and rows[each.kernel]["comm_size"] > 1 and each.transfer_ns >= 0:
            row, key = rows[each.kernel], keys[each.kernel]
            measured[key] += 1
            is_off = _is_off(each.transfer_ns, row["transfer_ns"]) or _is_off(each.wait_ns, row["wait_ns"])
            groups[each.joined].append((key, is_off))
    counted.possible = len(possible)
    counted.measured = sum(measured[key] == whole[key] for key in possible)
    counted.judged = len(groups)
    counted.wrong = sum(any(is_off for _, is_off in own) or len({key for key, _ in own}) > 1 for own in groups.values())
    return counted


_Key: TypeAlias = tuple[Any, ...]


def _true_keys(rows: Sequence[Row]) -> list[_Key]:
    """What each operation is one rank's part of: communicator, ranks (0: a pair), ordered pair, number."""
    pairs: Counter[_Key] = Counter()
    keys: list[_Key] = []
    for row in rows:
        if row["coll_seq"] is not None:
            keys.append((row["comm_id"], row["comm_size"], None, row["coll_seq"]))
            continue
        own, peer = row["comm_rank"], row["peer"]
        way = (own, peer) if row["op"] == "Send" else (peer, own)
        side = (row["comm_id"], row["op"], *way)
        keys.append((row["comm_id"], 0, way, pairs[side]))
        pairs[side] += 1
    return keys


def _is_whole(row: Row) -> bool:
    """Whether other ranks took part (a Send of an all-to-all may be to oneself) and its kernel was recorded whole."""
    is_shared = row["comm_size"] > 1 and row["peer"] != row["comm_rank"]
    return is_shared and row["kernel_correlation_id"] is not None and not row["kernel_cut"]


def _is_off(found_ns: int, true_ns: int | None) -> bool:
    return true_ns is not None and found_ns >= 0 and abs(found_ns - true_ns) > max(_WRONG_NS, _WRONG_SHARE * true_ns)


@dataclass(frozen=True, slots=True)
class _FoundRow:
    """One row of the store beside the truth."""

    line: int | None
    """Place in the truth of its line; None if that was lost."""
    kernel: int | None
    """Place in the truth of what its kernel ran, which is what is measured; None without one."""
    number: int
    joined: tuple[object, ...]
    """By what it was joined with others."""
    transfer_ns: int
    wait_ns: int


def _found_rows(found: Followed, rows: Sequence[Row]) -> Iterator[_FoundRow]:
    """Each row of the store that is in the truth."""
    by_line = {(Path(row["log_file"]).name, row["log_line"]): nth for nth, row in enumerate(rows)}
    by_kernel: dict[object, list[int]] = defaultdict(list)
    for nth, row in enumerate(rows):
        if row["kernel_correlation_id"] is not None:
            by_kernel[row["host"], row["pid"], row["kernel_correlation_id"]].append(nth)
    store = found.store
    table = store.operations
    ids = np.arange(table.first, table.next_id, dtype=np.int64)
    own = table.take(ids, "source", "line", "process", "member", "coll_seq", "pair_seq", "kernel", "template")
    times = table.take(ids, "transfer_ns", "wait_ns")
    roots = store.templates_of(own, "root")["root"].tolist()
    columns = (own[name].tolist() for name in ("source", "line", "process", "member", "coll_seq", "pair_seq", "kernel"))
    found_times = zip(times["transfer_ns"].tolist(), times["wait_ns"].tolist(), strict=True)
    for source, line, process, member, coll_seq, pair_seq, kernel, root, spans in zip(
        *columns, roots, found_times, strict=True
    ):
        name = store.sources[source].source.name
        place = by_line.get((name, found.lines.get((name, line), -1)))
        ran: int | None = None
        if kernel != NO_NUMBER:
            of = store.processes[process]
            correlation = int(store.kernels.take(np.array([kernel]), "correlation_id")["correlation_id"][0])
            free = by_kernel[of.host, of.pid, correlation]  # of a group: its own line, else any that is left
            ran = place if place in free else free[0] if free else None
            if ran is not None:
                free.remove(ran)
        either = ran if place is None else place
        if either is None:
            continue
        known = store.members[member]
        op = rows[either]["op"]
        ends = (known.rank, root) if op == "Send" else (root, known.rank)
        is_pair = coll_seq == NO_NUMBER
        number = pair_seq if is_pair else coll_seq
        yield _FoundRow(place, ran, number, (known.communicator, ends if is_pair else None, number), *spans)


@dataclass(frozen=True, slots=True)
class Case:
    """A job and what happens to its logs."""

    shape: str
    loss: str
    nccl: str = "2.28"
    stamps: bool = True
    capture: str = "full"

    def config(self, *faults: Fault) -> SimulationConfig:
        """The job with these faults."""
        wanted = SHAPES[self.shape]
        return SimulationConfig(
            **wanted, **_JOB, nccl=self.nccl, timestamps=self.stamps, capture=self.capture, faults=faults
        )


LOSSES: Final = {
    each.name: each
    for each in (
        Loss("none"),
        Loss("0.1 %", lost=0.001),
        Loss("1 %", lost=0.01),
        Loss("5 %", lost=0.05),
        Loss("20 %", lost=0.2),
        Loss("1 % torn pairs", torn=0.01),
        Loss("2 % in bursts", bursts=0.02),
        Loss("10 s of a rank", silent_ns=10 * _SECOND_NS),
    )
}
SHAPES: Final[dict[str, dict[str, Any]]] = {
    "TP4 DP2": {"tp": 4, "pp": 1, "dp": 2},
    "TP2 PP2 DP2": {"tp": 2, "pp": 2, "dp": 2},
    "TP2 PP2 DP2, 290 calls": {"tp": 2, "pp": 2, "dp": 2, "layers": 4, "microbatches": 8},
    "FSDP8": {"tp": 1, "pp": 1, "dp": 8, "fsdp": True, "layers": 4},
    "EP4 DP8": {"tp": 1, "pp": 1, "dp": 8, "ep": 4, "layers": 4},
    "demo": {"nodes": 4, "gpus": 2, "order": "tp-pp-dp"},
    "TP4 DP2 evaluated": {"tp": 4, "pp": 1, "dp": 2, "evaluate_every": 8},
    "TP2 PP2 DP2 evaluated": {"tp": 2, "pp": 2, "dp": 2, "evaluate_every": 8},
    "PP4 DP2": {"tp": 1, "pp": 4, "dp": 2, "microbatches": 8},
    "PP8": {"tp": 1, "pp": 8, "dp": 1, "microbatches": 16},
}
"""All of 8 ranks, on 2 nodes but for that of `ncclscope demo`."""
_JOB: Final[dict[str, Any]] = {"iterations": 30, "step_seconds": 1.0, "hang_seconds": 1.0}
_SET_AND_MISMATCH: Final = (
    Fault(kind="clock_step", node=_SET_NODE, ms=5.0, first=10),
    Fault(kind="mismatch", rank=_CULPRIT, first=24),
)
_HANG: Final = (Fault(kind="hang", rank=_CULPRIT, first=24),)


def _cases(*, short: bool) -> Iterator[Case]:
    """Each condition varied on its own, from the job with stamps and a full capture; the hardest without stamps too."""
    first = "TP4 DP2"
    if short:
        yield from (Case(first, "1 %"), Case(first, "1 %", stamps=False), Case(first, "1 %", capture="none"))
        return
    yield from (Case(first, loss) for loss in LOSSES)
    yield from (Case(first, loss, stamps=False) for loss in LOSSES if loss != "none")
    for stamps in (True, False):
        yield from (Case(first, loss, stamps=stamps, capture="duty:0.4") for loss in ("none", "1 %", "5 %"))
        logs = ("1 %", "5 %", "1 % torn pairs", "2 % in bursts", "10 s of a rank")
        yield from (Case(first, loss, stamps=stamps, capture="none") for loss in logs)
        for shape in list(SHAPES)[1:6]:
            yield from (Case(shape, loss, stamps=stamps) for loss in ("1 %", "5 %"))
            yield Case(shape, "1 %", stamps=stamps, capture="none")
    yield from (
        Case(shape, loss, stamps=stamps, capture="duty:0.4")
        for stamps in (True, False)
        for shape in ("TP2 PP2 DP2", "FSDP8", "EP4 DP8")
        for loss in ("none", "1 %", "5 %")
    )
    yield from (
        Case(f"{shape} evaluated", loss, capture=capture)
        for shape in (first, "TP2 PP2 DP2")
        for capture in ("full", "none")
        for loss in ("none", "1 %")
    )
    yield from (
        Case(shape, loss, stamps=stamps)
        for stamps in (True, False)
        for shape in ("PP4 DP2", "PP8")
        for loss in ("none", "1 %", "5 %")
    )
    for nccl in ("2.18", "2.21"):
        yield from (Case(first, loss, nccl, stamps=False) for loss in ("1 %", "5 %"))
        yield from (Case(shape, "1 %", nccl, stamps=False) for shape in ("TP2 PP2 DP2", "FSDP8", "EP4 DP8"))


def print_numbers(*, short: bool = False) -> None:
    """What lost lines cost."""
    print(
        "| job | NCCL | stamps | capture | lost | measured | wrong | other kernel | numbers true | false findings"
        " | mismatch | hang | clock set |"
    )
    print("|---|---|---|---|---|---:|---:|---:|---:|---|---|---|---|")
    jobs: dict[Case, list[Case]] = defaultdict(list)
    for case in _cases(short=short):
        jobs[replace(case, loss="none")].append(case)
    for plain, cases in jobs.items():
        with ExitStack() as stack:
            folders = [
                stack.enter_context(simulated(plain.config(*faults))) for faults in ((), _SET_AND_MISMATCH, _HANG)
            ]
            truths = [true_operations(folder) for folder in folders]
            for case in cases:
                followed = [
                    follow(folder, LOSSES[case.loss], rows) for folder, rows in zip(folders, truths, strict=True)
                ]
                print(_line(case, tally(followed[0], truths[0]), *followed[1:]), flush=True)


def true_operations(folder: Path) -> list[Row]:
    """The truth of a simulated job, one row for each operation."""
    rows: list[Row] = pq.read_table(folder / "truth" / "operations.parquet").to_pylist()
    return rows


def _line(case: Case, healthy: Tally, faulty: Followed, hung: Followed) -> str:
    false = ", ".join(f"{amount} {kind}" for kind, amount in sorted(healthy.findings.items())) or "none"
    differs = any(_CULPRIT in each.ranks for each in faulty.findings.values() if each.kind is FindingKind.MISMATCH)
    mismatch = "as hang" if not differs and _is_named_as_hanging(faulty) else _found(differs)
    set_hosts = {
        host
        for each in faulty.findings.values()
        if each.kind is FindingKind.CLOCK_FAULT and "host_time_ns" in each.evidence
        for host in each.hosts
    }
    is_set = "-" if case.capture == "none" else _found("node01" in set_hosts)
    return (
        f"| {case.shape} | {case.nccl} | {'yes' if case.stamps else 'no'} | {case.capture} | {case.loss}"
        f" | {_share(healthy.measured, healthy.possible)} | {_share(healthy.wrong, healthy.judged)}"
        f" | {_share(healthy.mispaired, healthy.paired)} | {_share(healthy.numbered, healthy.lines)} | {false}"
        f" | {mismatch} | {_hang(hung)} | {is_set} |"
    )


def _hang(job: Followed) -> str:
    is_told = any(each.kind is FindingKind.HANG for each in job.findings.values())
    return "found" if _is_named_as_hanging(job) else "of no rank" if is_told else "**missed**"


def _is_named_as_hanging(job: Followed) -> bool:
    return any(each.ranks == (_CULPRIT,) for each in job.findings.values() if each.kind is FindingKind.HANG)


def _found(is_found: bool) -> str:
    return "found" if is_found else "**missed**"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f} %" if whole else "-"


def print_torn(corpora: Sequence[Path]) -> None:
    """Recorded logs: communicators of which not all ranks that were seen end at the same number.

    `corpora`: folders with `nccl_logs/JOB`. A rank of a job that was killed may rightly be ahead.
    """
    print("| logs | torn lines | shared communicators | of which end at different numbers | most apart |")
    print("|---|---:|---:|---:|---:|")
    for folder in sorted(path for corpus in corpora for path in (corpus / "nccl_logs").iterdir()):
        store = run_offline([folder], job="torn", settings=PipelineSettings()).pipeline.store
        ends: dict[int, dict[int, int]] = defaultdict(dict)
        table = store.operations
        own = table.take(np.arange(table.first, table.next_id, dtype=np.int64), "member", "coll_seq")
        for member, number in zip(own["member"].tolist(), own["coll_seq"].tolist(), strict=True):
            of = ends[store.members[member].communicator]
            of[member] = max(number + 1, of.get(member, 0))
        shared = [list(of.values()) for of in ends.values() if len(of) > 1 and max(of.values())]
        apart = [max(of) - min(of) for of in shared if max(of) != min(of)]
        torn = store.torn_lines.total() + store.retired.torn_lines.total()
        if apart or torn:
            print(
                f"| {folder.name} | {torn:,} | {len(shared)} | {len(apart)} | {max(apart, default=0):,} |", flush=True
            )

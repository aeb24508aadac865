"""`summary.json`: what was read, what became of it, and the sums. What a level lacks is null.

It has sections on iterations, on the signatures of groups, and on NCCL Inspector: what Inspector reported, and how far
it agrees with kernels. The report and the terminal show the last one too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ncclscope_models.expected_step import ExpectedStep
from ncclscope_service.detect.context import duration_text
from ncclscope_service.export.benchmarks import amount_text, benchmarks_document
from ncclscope_service.export.json_files import clock_reference, clock_violation_ratio
from ncclscope_service.export.selection import Selection, seats
from ncclscope_service.export.tables.kernels_file import is_duplicate, outside_totals
from ncclscope_service.export.tables.operations_file import IS_ROOTED
from ncclscope_service.export.tables.traffic_file import Traffic, measure_traffic, traffic_by_node
from ncclscope_service.export.totals import Calls, Group, Total, Totals, op_name, totals
from ncclscope_service.job.iterations import summarise
from ncclscope_service.job.step_budget import MeanStep, mean_step
from ncclscope_service.job.utilization import Utilization, utilization_of
from ncclscope_service.nccl.bandwidth import SIZE_CLASSES
from ncclscope_service.rollup.series import operation_name
from ncclscope_service.rollup.usage import Signature
from ncclscope_service.store.records import SourceState, Verdict
from ncclscope_service.store.rows import IterationBy, Match
from ncclscope_service.store.tables import version_of
from ncclscope_wire.batch import Columns
from ncclscope_wire.records import CaptureSeen, SourceGap, SourceKind

_MEDIANS: Final = (
    "sizes",
    "median_bytes",
    "largest_bytes",
    "operations_per_iteration",
    "bytes_per_iteration",
    "burstiness",
    "period_ns",
    "active_ratio",
    "bursts_per_iteration",
    "burst_ns",
    "pause_ns",
)
"""Of a signature, what is given as the median over communicators."""


def iterations_document(selection: Selection, sums: Totals) -> dict[str, dict[str, object] | None]:
    """By job: how long iterations last, how much of that is communication, and what they were found by."""
    store, found = selection.store, sums.iterations
    job_of = np.asarray(store.process_job, dtype=object)
    jobs = job_of[found["process"]] if len(found) else np.empty(0, dtype=object)
    return {job: _iterations_of(found[jobs == job], store.iteration_confidence) for job in selection.jobs}


def _iterations_of(found: Columns, confidence: Mapping[int, float]) -> dict[str, object] | None:
    if not len(found):
        return None
    of, by = summarise(found), found["by"]
    sure = [confidence[process] for process in np.unique(found["process"]).tolist() if process in confidence]
    return {
        "iterations": of.iterations,
        "median_ns": of.median_ns,
        "p90_ns": of.p90_ns,
        "communication_ratio": of.communication_ratio,
        "exposed_ratio": of.exposed_ratio,
        "operations_by": {each.name.lower(): int(found["operations"][by == each].sum()) for each in IterationBy},
        "period_confidence": float(np.median(sure)) if sure else None,
    }


PART_WORDS: Final = {
    "computation": "computation alone",
    "hidden": "communication that computation hides",
    "exposed_transfer": "transfer",
    "exposed_wait": "other waiting",
    "bubble": "pipeline bubble",
    "imbalance": "imbalance of stages",
    "late": "waiting for a late rank",
    "exposed": "communication, waiting or transfer",
    "idle": "idle: no kernel",
}
"""Parts of a step for people; those of communication but the second are exposed."""
LEAST_SHARE: Final = 0.0005
"""Smaller parts of a step are left out of tables for people."""


def mean_steps(selection: Selection, sums: Totals) -> list[MeanStep]:
    """Where the mean step of a rank goes, by job; of jobs without a step whose kernels are known there is none."""
    jobs = np.asarray(selection.store.process_job, dtype=object)
    job_of = jobs[sums.budget.rows["process"]] if len(sums.budget.rows) else np.empty(0, dtype=object)
    found = [mean_step(sums.budget, job, job_of == job) for job in selection.jobs]
    return [step for step in found if step is not None]


def utilizations(selection: Selection, sums: Totals) -> list[Utilization]:
    """Share of their peak that GPUs compute, by job whose description and GPU are known."""
    jobs = np.asarray(selection.store.process_job, dtype=object)
    job_of = jobs[sums.iterations["process"]] if len(sums.iterations) else np.empty(0, dtype=object)
    found = [
        utilization_of(selection.store, job, summarise(sums.iterations[job_of == job]).median_ns)
        for job in selection.jobs
    ]
    return [each for each in found if each is not None]


def expected_step_text(of: ExpectedStep) -> str:
    """A sentence for people."""
    how = "the same job" if of.is_same else f"{of.run}, laid out differently,"
    low, typical, high = (duration_text(seconds * 1e9) for seconds in (of.low, of.typical, of.high))
    return f"a step should take {typical} ({low} to {high}), since {how} was recorded on this machine"


def utilization_text(of: Utilization) -> str:
    """A sentence for people."""
    again = "" if of.hfu == of.mfu else f"; {of.hfu:.1%} with what is computed again (HFU)"
    return (
        f"{of.mfu:.1%} of the GPUs' peak is used by the model (MFU): {of.step_flops:.3g} operations of a step on "
        f"{of.ranks:,} {of.gpu}, {of.peak_flops / 1e12:,.0f} TFLOP/s each{again}"
    )


def signatures_document(selection: Selection, sums: Totals) -> list[dict[str, object]]:
    """By job and parallelism: the medians of the communicators' signatures, most operations first."""
    together: dict[tuple[str, str | None], list[Signature]] = {}
    for each in selection.communicators:
        if each.index in sums.signatures and each.size > 1:
            together.setdefault((each.job, each.parallelism), []).append(sums.signatures[each.index])
    by_operations = sorted(
        together.items(), key=lambda item: -sum(row[1] for signature in item[1] for row in signature.mix)
    )
    return [
        {"job": job, "parallelism": kind, "communicators": len(found), **_signature(found)}
        for (job, kind), found in by_operations
    ]


def _signature(found: list[Signature]) -> dict[str, object]:
    mix: Counter[str | None] = Counter()
    moved: Counter[str | None] = Counter()
    for of in found:
        for code, operations, size in of.mix:
            mix[op_name(code)] += operations
            moved[op_name(code)] += size
    middle = {name: [value for of in found if (value := getattr(of, name)) is not None] for name in _MEDIANS}
    return {
        "operation_mix": [{"op": op, "operations": amount, "bytes": moved[op]} for op, amount in mix.most_common()],
        **{name: float(np.median(values)) if values else None for name, values in middle.items()},
    }


class WaitedFor(NamedTuple):
    """Of one rank in its communicators of one kind: collectives measured, how often last, the others' wait in those."""

    job: str
    rank: int
    parallelism: str | None
    collectives: int
    last: int
    wait_ns: int


def waited_for(selection: Selection) -> list[WaitedFor]:
    """By global rank and kind of communicator, longest wait first.

    Of collectives that no rank can leave before the last has come, and of which all ranks were seen: in Broadcast, Send
    and so on who comes last need not be who is waited for.
    """
    part, ranks = selection.collectives, seats(selection.store)
    rows = part.rows if part.positions is None else part.rows[part.positions]
    seat, is_measured = ranks.of_last(rows), ranks.are_seen(rows) & ~IS_ROOTED[rows["op"]]
    is_last = is_measured & (seat >= 0)
    measured = np.bincount(rows["communicator"][is_measured], minlength=len(ranks.first) - 1)
    last, waits_ns = (np.zeros(len(ranks.global_rank), dtype=np.int64) for _ in range(2))
    np.add.at(last, seat[is_last], 1)
    np.add.at(waits_ns, seat[is_last], rows["wait_ns"][is_last])
    sums: dict[tuple[str, int, str | None], NDArray[np.int64]] = {}
    for communicator in selection.communicators:
        for at in range(*ranks.first[communicator.index : communicator.index + 2].tolist()):
            key = communicator.job, int(ranks.global_rank[at]), communicator.parallelism
            sums[key] = sums.get(key, 0) + np.array([measured[communicator.index], last[at], waits_ns[at]])
    found = [WaitedFor(*key, *of.tolist()) for key, of in sums.items() if key[1] >= 0 and of[0]]
    return sorted(found, key=lambda one: (-one.wait_ns, one.job, one.rank, one.parallelism or ""))


def has_inspector(selection: Selection) -> bool:
    """Whether any dump of NCCL Inspector was read."""
    is_left = selection.store.retired.kinds[SourceKind.INSPECTOR] > 0
    return is_left or any(state.source.kind is SourceKind.INSPECTOR for state in selection.store.sources)


def inspector_document(selection: Selection) -> dict[str, object] | None:
    """The section of the summary; None if no dump was read."""
    if not has_inspector(selection):
        return None
    series = _series(selection)
    counts = selection.store.inspector_records
    outcomes = {
        what: sum(amount for (job, each), amount in counts.items() if each == what and job in selection.jobs)
        for what in ("with_operation", "without_operation", "not_gpu_timed")
    }
    compared, ratio = _compared(series)
    return {
        "records": int(series["inspected"].sum()),
        **outcomes,
        "compared": compared,
        "busbw_ratio": ratio,
        "series": inspector_rows(selection),
    }


def inspector_rows(selection: Selection) -> list[dict[str, object]]:
    """Inspector's figures by communicator, operation and size class, longest first; None if unknown."""
    rows: list[dict[str, object]] = []
    for each in _series(selection):
        communicator = selection.store.communicators[int(each["communicator"])]
        compared, ratio = _compared(each.reshape(1))
        size_class = int(each["size_class"])
        rows.append(
            {
                "communicator": communicator.comm_id,
                "parallelism": communicator.parallelism,
                "op": operation_name(int(each["op"])),
                "size_class": SIZE_CLASSES[size_class] if size_class < len(SIZE_CLASSES) else None,
                "records": int(each["inspected"]),
                "duration_ns": int(each["inspected_ns"]),
                "busbw": float(each["busbw"]) if np.isfinite(each["busbw"]) else None,
                "compared": compared,
                "busbw_ratio": ratio,
            }
        )
    return sorted(rows, key=lambda row: -int(str(row["duration_ns"])))


def _series(selection: Selection) -> Columns:
    series = selection.store.series.rows
    ours = np.isin(series["communicator"], [communicator.index for communicator in selection.communicators])
    found: Columns = series[ours & (series["inspected"] > 0)]
    return found


def _compared(series: Columns) -> tuple[int, float | None]:
    """Operations of which both are known, and Inspector's apparent busbw over the kernels'."""
    inspected_ns = int(series["compared_inspected_ns"].sum())
    ratio = int(series["compared_kernel_ns"].sum()) / inspected_ns if inspected_ns else None
    return int(series["compared"].sum()), ratio


NOT_RECORDED: Final = "not recorded"
"""Text for people if the inputs do not say; in files it is null."""

NO_OPERATIONS: Final = (
    "No operations in these logs: NCCL_DEBUG_SUBSYS did not name COLL (`ncclscope env` prints what to set), or the job "
    "ended before its first. What they tell all the same follows."
)
"""The first thing to say of the logs that most people have: NCCL_DEBUG=INFO, and nothing else set."""
_NO_CALLS: Final = (
    "Kernels and exposed communication only: neither a log nor these recordings say what NCCL was called for. Exports "
    "do with the payloads of NCCL's ranges (NCCL 2.25 and newer, `nsys export --include-blobs=true`)."
)


_NO_KERNELS: Final = (
    "Findings only: dumps of the Flight Recorder, RAS and counters say who is missing or behind, and no operation. "
    "NCCL's logs beside them do (`ncclscope env` prints what to set)."
)


def no_operations(selection: Selection) -> str:
    """Why no operation is known."""
    if selection.store.has_logs:
        return NO_OPERATIONS
    return _NO_CALLS if has_kernels(selection) else _NO_KERNELS


_SOURCES: Final = {
    SourceKind.NCCL_LOG: "logs",
    SourceKind.INSPECTOR: "Inspector",
    SourceKind.NSYS: "nsys",
    SourceKind.KINETO: "PyTorch traces",
}
"""Sources that give operations or kernels, in the order in which they are named."""
_WITHOUT_OPERATIONS: Final = {
    SourceKind.FLIGHT_RECORDER: "Flight Recorder dumps",
    SourceKind.RAS: "RAS",
    SourceKind.MACHINE: "counters",
}
"""Those that give findings and nothing else: named where there is nothing more."""


_OLDER: Final = "older ones: only their number is kept"

_KERNELS: Final = "CUPTI_ACTIVITY_KIND_KERNEL"
_RANGES: Final = "NVTX_EVENTS"
"""Tables of an export. *Source:* nsys's schema, `docs/nsys.md`."""

MAX_NODE_PAIRS: Final = 4096
"""Pairs of nodes that are listed, most bytes first; `traffic.parquet` has all."""


def summary_document(
    selection: Selection, sums: Totals | None = None, traffic: Traffic | None = None
) -> dict[str, object]:
    """The content of the file; `sums` and `traffic` if they are computed already."""
    sums = totals(selection) if sums is None else sums
    traffic = measure_traffic(selection) if traffic is None else traffic
    store = selection.store
    hosts = sorted({store.processes[index].host for index in selection.processes()})
    document: dict[str, object] = {
        "level": level(selection),
        "jobs": list(selection.jobs),
        "verdicts": {job: verdict_document(selection.verdicts.get(job)) for job in selection.jobs},
        "hosts": hosts,
        "processes": len(selection.processes()),
        "ranks": len(seen_ranks(selection)) or None,
        "ranks_inferred": inferred_ranks(selection),
        "versions": _versions(selection),
        "read": _read(selection),
        "sources": [_source(index, state, selection) for index, state in enumerate(store.sources)],
        "gaps": gaps(selection),
        "match": match_counts(sums),
        "matched_ratio": matched_ratio(sums),
        "captured": _captured(selection, sums),
        "totals": _total(sums.all(), has_kernels(selection)),
        "operations": _operations(selection, sums),
        "traffic": _traffic(traffic),
        "kernels": _kernels(selection),
        "outside_nccl": [asdict(each) for each in outside_totals(selection)],
        "iterations": iterations_document(selection, sums),
        "step_budget": [asdict(step) for step in mean_steps(selection, sums)],
        "expected_step": [
            {"job": job, **asdict(of)} for job in selection.jobs if (of := store.expected_step_of(job)) is not None
        ],
        "utilization": [asdict(each) for each in utilizations(selection, sums)],
        "latency_bound": [{"job": job, **asdict(each)} for job, each in sums.advice],
        "signatures": signatures_document(selection, sums),
        "inspector": inspector_document(selection),
        "communicators": len(selection.communicators),
        "clocks": {
            "reference": clock_reference(store, selection.jobs),
            "violation_ratio": clock_violation_ratio(store, selection.jobs),
        },
        "findings": dict(Counter(finding.kind.value for finding in selection.findings)),
    }
    if selection.benchmarks:
        document["benchmarks"] = benchmarks_document(selection)
    return document


def verdict_document(verdict: Verdict | None) -> dict[str, object] | None:
    """How a job ended; None of one that goes on."""
    if verdict is None:
        return None
    return {name: value for name, value in asdict(verdict).items() if name not in {"job", "last_words", "standing"}}


def verdict_text(verdict: Verdict) -> str:
    """A sentence for people."""
    sure = "The job is silent; as its logs stand, it is" if verdict.is_provisional else "How it ended:"
    return f"{sure} {verdict.ending.value}: {verdict.summary}"


def level(selection: Selection) -> str:
    """Which level of data this is, by the kinds of what was read."""
    kinds = {*(state.source.kind for state in selection.store.sources), *selection.store.retired.kinds}
    if not kinds and selection.benchmarks:
        return "output of nccl-tests only"
    named = [name for kind, name in _SOURCES.items() if kind in kinds]
    named = named or [name for kind, name in _WITHOUT_OPERATIONS.items() if kind in kinds]
    if len(named) < 2:
        return f"{named[0]} only" if named else "nothing"
    return f"{', '.join(named[:-1])} and {named[-1]}"


def has_kernels(selection: Selection) -> bool:
    """Whether any NCCL kernel was recorded: without one, no time but the stamps is known."""
    return len(selection.kernels) > 0


def seen_ranks(selection: Selection) -> list[int]:
    """Global ranks of the selected processes, sorted."""
    ours = set(selection.processes())
    ranks = {member.global_rank for member in selection.store.members if member.process in ours}
    return sorted(rank for rank in ranks if rank is not None)


def inferred_ranks(selection: Selection) -> int:
    """How many of these ranks no line prints."""
    ours = set(selection.processes())
    members = [member for member in selection.store.members if member.process in ours]
    printed = {member.global_rank for member in members if not member.global_rank_is_inferred}
    return len(set(seen_ranks(selection)) - printed)


def match_counts(sums: Totals) -> dict[str, int]:
    """Operations by what became of them."""
    return {match.name.lower(): sums.match[match] for match in Match}


def matched_ratio(sums: Totals) -> float | None:
    """Matched operations as a share of those that should have a kernel; None if no capture covers any."""
    expected = sums.match[Match.MATCHED] + sums.match[Match.UNMATCHED]
    return sums.match[Match.MATCHED] / expected if expected else None


def captured_ratio(selection: Selection, sums: Totals) -> float | None:
    """Operations that lie inside a capture as a share of those decided; None without any export."""
    outside = sums.match[Match.NOT_COVERED]
    decided = outside + sums.match[Match.MATCHED] + sums.match[Match.UNMATCHED]
    return 1 - outside / decided if decided and selection.store.captures.next_id else None


def captured_seconds(selection: Selection) -> dict[str, float]:
    """Time that captures cover, by host: their union on the host's own clock, in seconds."""
    by_host: dict[str, list[CaptureSeen]] = {}
    for _, capture in selection.store.captures:
        by_host.setdefault(capture.host, []).append(capture)
    return {host: _union_ns(captures) / 1e9 for host, captures in sorted(by_host.items())}


def graphs_note(selection: Selection) -> str | None:
    """Why operations in CUDA graphs have no kernels, and what to do; None if no graph was recorded as a whole."""
    launches = selection.store.captures.graph_launches
    if not launches:
        return None
    return f"{launches:,} graph launches were recorded as a whole: record with nsys and --cuda-graph-trace=node"


def capture_notes(selection: Selection) -> list[str]:
    """Tables that captures lack, and the option of nsys that records it; one sentence each."""
    captures = [capture for _, capture in selection.store.captures]
    without_cuda = sum(_KERNELS in capture.missing for capture in captures)
    silent = sum(_KERNELS not in capture.missing and not capture.nccl_kernels for capture in captures)
    without_nvtx = sum(_RANGES in capture.missing for capture in captures)
    graphs = graphs_note(selection)
    notes = [] if graphs is None else [graphs]
    if without_cuda:
        notes.append(f"{amount_text(without_cuda, 'export')} without CUDA kernels: record with --trace=cuda,nvtx")
    if silent and graphs is None:
        notes.append(
            f"{amount_text(silent, 'export')} without NCCL kernels: none ran, or nsys followed other processes"
        )
    if without_nvtx:
        notes.append(
            f"{amount_text(without_nvtx, 'export')} without NVTX ranges: "
            "--trace=cuda,nvtx tells iterations and exact calls"
        )
    return notes


def gaps(selection: Selection) -> list[dict[str, object]]:
    """Losses of each source in a person's words; those that are not kept one by one, by their number."""
    store = selection.store
    listed: list[dict[str, object]] = []
    for source, found in sorted(store.gaps.items()):
        older = [
            SourceGap(reason=reason, amount=number, unit="gaps", detail=_OLDER)
            for reason, number in sorted(found.forgotten().items())
        ]
        for gap in (*older, *found):
            words: dict[str, object] = asdict(gap)
            listed.append({"source": store.sources[source].source.name, **words})
    return listed


def _union_ns(captures: Iterable[CaptureSeen]) -> int:
    covered, reached = 0, None
    for capture in sorted(captures, key=lambda capture: capture.start_ns):
        start = capture.start_ns if reached is None else max(capture.start_ns, reached)
        covered += max(0, capture.end_ns - start)
        reached = max(capture.end_ns, start)
    return covered


def _versions(selection: Selection) -> dict[str, object]:
    store = selection.store
    return {
        "nccl": _counted(version_of(store, index) for index in selection.processes()),
        "nsys": _counted(capture.product_version for _, capture in store.captures),
        "nsys_schema": _counted(capture.schema_version for _, capture in store.captures),
    }


def _counted(names: Iterable[str | None]) -> dict[str, int] | None:
    """How often each name occurs, None left out; None if there is no name at all."""
    return dict(Counter(name for name in names if name)) or None


def _read(selection: Selection) -> dict[str, object]:
    understood, skipped = selection.store.understood, selection.store.skipped
    return {
        "sources": len(selection.store.sources) + selection.store.retired.kinds.total(),
        "read": understood.total() + skipped.total(),
        "understood": dict(understood.most_common()),
        "skipped": dict(skipped.most_common()),
        "torn": skipped["torn"],
        "numbers_healed": _numbers_healed(selection),
        "numbers_uncertain": selection.store.numbers_uncertain.total(),
        "alignment_checked": selection.store.alignment_checked.total(),
        "alignment_disagreements": selection.store.alignment_disagreements.total(),
    }


def _numbers_healed(selection: Selection) -> dict[str, int]:
    """Lost lines that were found, by what showed them."""
    found = Counter[str]()
    for (_, reason), amount in selection.store.numbers_healed.items():
        found[reason] += amount
    return dict(sorted(found.items()))


def _source(index: int, state: SourceState, selection: Selection) -> dict[str, object]:
    return {
        "name": state.source.name,
        "kind": state.source.kind.value,
        "complete": state.is_complete,
        # A log or dump is read to a byte; an export is read whole or not, in steps that mean nothing to a reader.
        "position": None if state.source.kind.is_recording else state.position,
        "zone": state.zone_name,
        "gaps": len(selection.store.gaps.get(index, ())),
    }


def _captured(selection: Selection, sums: Totals) -> dict[str, object]:
    captures = [capture for _, capture in selection.store.captures]
    return {
        "captures": selection.store.captures.next_id,
        "operations_ratio": captured_ratio(selection, sums),
        "seconds": captured_seconds(selection) or None,
        "graph_launches": selection.store.captures.graph_launches if captures else None,
        "graphs_note": graphs_note(selection),
        "notes": capture_notes(selection),
        "missing": sorted({name for capture in captures for name in capture.missing}),
        "warnings": sorted({text for capture in captures for text in capture.warnings}),
    }


def _operations(selection: Selection, sums: Totals) -> list[dict[str, object]]:
    kinds = [communicator.parallelism for communicator in selection.store.communicators]

    def key(group: Group) -> tuple[str, str | None]:
        return group.op, kinds[group.communicator] if group.communicator >= 0 else None

    return [
        {
            "op": op,
            "parallelism": kind,
            **_total(total, has_kernels(selection)),
            "per_rank_and_iteration": _calls(sums.calls.get((op, kind))),
        }
        for (op, kind), total in sums.by(key).items()
    ]


def _calls(calls: Calls | None) -> dict[str, object] | None:
    return None if calls is None else asdict(calls)


def _total(total: Total, has_kernels: bool) -> dict[str, object]:
    def recorded(amount: int, is_recorded: int) -> object:
        return amount if is_recorded else None

    return {
        "operations": total.operations,
        "bytes": recorded(total.bytes, total.sized),
        "operations_without_bytes": total.operations - total.sized,
        "matched": recorded(total.matched, has_kernels),
        "duration_ns": recorded(total.duration_ns, total.timed),
        "wait_ns": recorded(total.wait_ns, total.waits),
        "transfer_ns": recorded(total.transfer_ns, total.transfers),
        "wait_ratio": total.wait_ratio,
    }


def _traffic(traffic: Traffic) -> object:
    if not traffic.rows:
        return None
    by_node = traffic_by_node(traffic)
    return {
        "bytes": sum(row.bytes for row in traffic.rows),
        "assumed_bytes": sum(row.assumed_bytes for row in traffic.rows),
        "assumed_order_bytes": sum(row.assumed_order_bytes for row in traffic.rows),
        "unplaced_calls": traffic.unplaced_calls,
        "node_pairs": len(by_node),
        "by_node": by_node[:MAX_NODE_PAIRS],
    }


def _kernels(selection: Selection) -> object:
    if not has_kernels(selection):
        return None
    has_launch = selection.kernels.column("launch") >= 0
    return {
        "kernels": len(selection.kernels),
        "with_operation": int(np.count_nonzero(has_launch)),
        "without_operation": int(np.count_nonzero(~has_launch)),
        "replays": int(np.count_nonzero(selection.kernels.column("replay") > 0)),
        "censored": int(np.count_nonzero(selection.kernels.column("censored"))),
        "duplicates": int(np.count_nonzero(is_duplicate(selection.kernels))),
    }

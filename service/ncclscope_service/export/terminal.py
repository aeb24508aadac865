"""The text that `analyze` prints when it is done: what was read, what it became, and what was found."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import unescape
from statistics import median

from ncclscope_service.export.benchmarks import amount_text, benchmark_name, files_read
from ncclscope_service.export.report.data import communicator_rows
from ncclscope_service.export.report.tables import (
    bandwidth_text,
    bytes_text,
    count_text,
    measure_text,
    ranks_text,
    ratio_text,
    span_text,
    waited_for_rows,
)
from ncclscope_service.export.selection import Selection
from ncclscope_service.export.summary import (
    LEAST_SHARE,
    NOT_RECORDED,
    PART_WORDS,
    capture_notes,
    captured_ratio,
    expected_step_text,
    gaps,
    has_inspector,
    has_kernels,
    inferred_ranks,
    inspector_document,
    iterations_document,
    level,
    matched_ratio,
    mean_steps,
    no_operations,
    seen_ranks,
    utilization_text,
    utilizations,
    verdict_text,
)
from ncclscope_service.export.tables.kernels_file import kernel_totals, outside_totals
from ncclscope_service.export.totals import Totals, totals
from ncclscope_service.measure.latency_advice import advice_text
from ncclscope_service.nccl.nccl_tests import Measured
from ncclscope_service.store.records import Ending, Severity
from ncclscope_service.store.rows import Match

_MAX_COMMUNICATORS = 20
_MAX_LINES = 10
_MAX_SIZES = 40
_MAX_VERDICTS = 4
_MAX_STANDING = 12
_MAX_WORDS = 60
_MEASURES = (("bytes", bytes_text), ("busbw", bandwidth_text), ("limit", bandwidth_text), ("wait_ratio", ratio_text))
_TAG = re.compile("<[^>]*>")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def terminal_report(selection: Selection, sums: Totals | None = None) -> str:
    """Plain text of some 40 lines for a terminal; ends with a newline."""
    sums = totals(selection) if sums is None else sums
    return "\n".join(_lines(selection, sums)) + "\n"


def terminal_summary(selection: Selection, sums: Totals) -> str:
    """At most ten lines: how it ended, the gravest findings, what ran, its steps, and how fast it communicated."""
    first = [] if sums.all().operations or has_inspector(selection) else [no_operations(selection)]
    ended = list(_verdicts(selection))[:3]
    return "\n".join([*ended, *first, *_findings(selection, 3), *_summed_up(selection, sums)]) + "\n"


def _summed_up(selection: Selection, sums: Totals) -> Iterator[str]:
    found, everything = communicator_rows(selection, sums), sums.all()
    hosts = {selection.store.processes[index].host for index in selection.processes()}
    size = bytes_text(everything.bytes if everything.sized else None)
    yield (
        f"{amount_text(len(seen_ranks(selection)), 'rank')} on {amount_text(len(hosts), 'host')}, "
        f"{amount_text(len(found), 'communicator')}, {amount_text(everything.operations, 'operation')}, "
        f"{_plain(size)} ({level(selection)})"
    )
    for steps in iterations_document(selection, sums).values():
        if steps is not None:
            ratio = steps["exposed_ratio"]
            exposed = "" if ratio is None else f", exposed communication {ratio_text(ratio)}"
            took = "" if steps["median_ns"] is None else f" of {span_text(steps['median_ns'])}"
            yield f"{steps['iterations']:,} steps{took}{exposed}"
            break
    rates: dict[str, list[float]] = {}
    for row in found:
        if isinstance(rate := row["busbw"], float) and row["parallelism"] not in {None, "WORLD"}:
            rates.setdefault(str(row["parallelism"]), []).append(rate)
    shown = [f"{kind} {bandwidth_text(median(each))}" for kind, each in sorted(rates.items())]
    if shown:
        yield f"bus bandwidth: {', '.join(shown)}"


def _lines(selection: Selection, sums: Totals) -> Iterator[str]:
    yield from _verdicts(selection)
    yield from _read(selection)
    yield ""
    yield from _benchmarks(selection)
    yield from _operations(selection, sums)
    yield ""
    if has_kernels(selection) and not sums.match[Match.MATCHED]:
        yield from _kernels(selection)
        yield ""
    yield from _inspector(selection)
    yield from _outside(selection)
    yield from _communicators(selection, sums)
    for step in mean_steps(selection, sums):
        of_job = f" of {_printable(step.job)}" if len(selection.jobs) > 1 else ""
        yield f"Where a step goes{of_job}: {span_text(step.mean_ns)}, mean of {step.steps:,} steps of a rank"
        rows = [
            (PART_WORDS[part.part], part.parallelism or "-", span_text(part.mean_ns), f"{part.share:.1%}")
            for part in step.parts
            if part.share >= LEAST_SHARE
        ]
        yield from _table(("part", "kind", "time", "share"), rows)
    said = [(of.job, utilization_text(of)) for of in utilizations(selection, sums)]
    for job in selection.jobs:
        if (expected := selection.store.expected_step_of(job)) is not None:
            said.append((job, expected_step_text(expected)))
    said += [(job, f"bound by latency: {advice_text(each)}") for job, each in sums.advice]
    for job, sentence in said:
        yield _printable(f"{job}: {sentence}" if len(selection.jobs) > 1 else sentence)
    if waited := waited_for_rows(selection):
        yield "Who is waited for"
        head = ("rank", "kind", "collectives", "came last", "others waited")
        yield from map(_printable, _table(head, waited))
    yield from _standing(selection)
    yield ""
    yield from _findings(selection)


def _is_uneventful(selection: Selection, job: str) -> bool:
    verdict = selection.verdicts.get(job)
    return verdict is None or verdict.ending is Ending.ENDED_TOGETHER


def _verdicts(selection: Selection) -> Iterator[str]:
    """How each job ended, first those that did not end well."""
    for job in sorted(selection.jobs, key=lambda each: _is_uneventful(selection, each))[:_MAX_VERDICTS]:
        if (verdict := selection.verdicts.get(job)) is not None:
            yield _printable(f"{job}: {verdict_text(verdict)}" if len(selection.jobs) > 1 else verdict_text(verdict))


def _standing(selection: Selection) -> Iterator[str]:
    """Where the ranks stood whose groups stand apart, in jobs that did not end together."""
    found = [
        (job, each)
        for job, of in selection.verdicts.items()
        if of.ending is not Ending.ENDED_TOGETHER
        for each in of.standing
    ]
    if not found:
        return
    yield "Where ranks stood"
    rows = [
        (
            selection.names.get((job, each.comm_id), each.comm_id),
            str(each.rank),
            f"{each.enqueued:,}",
            f"{each.behind:,}",
            ranks_text(each.waits_for) or "-",
            ranks_text(each.blamed) or "-",
            (each.last_words or "-")[:_MAX_WORDS],
        )
        for job, each in found[:_MAX_STANDING]
    ]
    head = ("group", "rank", "enqueued", "behind", "waits for", "waits end at", "last words")
    yield from map(_printable, _table(head, rows, texts=1))
    if len(found) > _MAX_STANDING:
        yield "  and more, see last_operations.parquet"


def _read(selection: Selection) -> Iterator[str]:
    store = selection.store
    hosts = {store.processes[index].host for index in selection.processes()}
    ranks, inferred = len(seen_ranks(selection)), inferred_ranks(selection)
    flagged = f", {inferred:,} of them inferred" if inferred else ""
    yield (
        f"Read {amount_text(files_read(selection), 'file')} ({level(selection)}): {amount_text(len(hosts), 'host')}, "
        f"{amount_text(len(selection.processes()), 'process', 'processes')}, "
        f"{amount_text(ranks, 'rank') if ranks else f'{NOT_RECORDED} ranks'}{flagged}"
    )
    if len(selection.jobs) > 1:
        yield f"  jobs        {_printable(_jobs(selection))}"
    yield f"  understood  {_counts(store.understood.most_common())}"
    yield f"  skipped     {_counts(store.skipped.most_common())}"
    lost = gaps(selection)
    for gap in lost[:_MAX_LINES]:
        yield _printable(
            f"  lost        {gap['source']}: {gap['reason']}, {gap['amount']} {gap['unit']}. {gap['detail']}"
        )
    if len(lost) > _MAX_LINES:
        yield f"  lost        and {len(lost) - _MAX_LINES} more, see summary.json"


def _jobs(selection: Selection) -> str:
    store, words = selection.store, list[str]()
    for job in selection.jobs:
        processes = [index for index in selection.processes() if store.process_job[index] == job]
        hosts = {store.processes[index].host for index in processes}
        words.append(
            f"{job} ({amount_text(len(processes), 'process', 'processes')} on {amount_text(len(hosts), 'host')})"
        )
    return ", ".join(words)


def _operations(selection: Selection, sums: Totals) -> Iterator[str]:
    everything = sums.all()
    size = bytes_text(everything.bytes if everything.sized else None)
    if not everything.operations:
        document = inspector_document(selection)
        yield (
            no_operations(selection)
            if document is None
            else f"No operations of logs: {document['records']:,} records of NCCL Inspector tell of them"
        )
        yield from (f"  exports     {note}" for note in capture_notes(selection))
        return
    yield f"{_plain(count_text(everything.operations))} operations, {_plain(size)}"
    verdicts = ((match.name.lower().replace("_", " "), sums.match[match]) for match in Match)
    yield f"  became      {_counts([pair for pair in verdicts if pair[1]])}"
    yield f"  matched     {_share(matched_ratio(sums), 'of those inside a capture')}"
    yield f"  captured    {_share(captured_ratio(selection, sums), 'of the operations')}"
    for note in capture_notes(selection):
        yield f"  exports     {note}"
    yield f"  waiting     {_share(everything.wait_ratio, 'of the kernel time')}"
    for op, total in list(sums.by(lambda group: group.op).items())[:_MAX_LINES]:
        duration = span_text(total.duration_ns if total.timed else None)
        moved = bytes_text(total.bytes if total.sized else None)
        yield f"  {_printable(op):<14}{total.operations:>12,}  {_plain(moved):>14}  kernels {_plain(duration)}"


def _inspector(selection: Selection) -> Iterator[str]:
    """Lines on the records of NCCL Inspector; none if no dump was read."""
    document = inspector_document(selection)
    if document is None:
        return
    yield f"{document['records']:,} records of NCCL Inspector"
    yield f"  operations  {document['with_operation']:,} of them are of a logged operation"
    ratio = document["busbw_ratio"]
    if ratio is not None:
        yield f"  busbw       {ratio_text(ratio)} of the kernels', over {document['compared']:,} of both"
    yield ""


def _benchmarks(selection: Selection) -> Iterator[str]:
    """Runs of nccl-tests, and the table of the first; no line where none was read."""
    found = selection.benchmarks
    if not found:
        return
    yield f"{amount_text(len(found), 'benchmark')} of nccl-tests"
    for each in found[:_MAX_LINES]:
        torn = f" ({each.torn_rows:,} torn)" if each.torn_rows else ""
        yield _printable(f"  {benchmark_name(each)}: {len(each.rows):,} rows{torn}, {each.file}")
    if len(found) > _MAX_LINES:
        yield f"  and {len(found) - _MAX_LINES} more, see summary.json"
    shown = next((each for each in found if each.rows), found[0])
    rows = shown.rows
    table = [
        (f"{row.message_bytes:,}", *_result(row.out_of_place), *_result(row.in_place)) for row in rows[-_MAX_SIZES:]
    ]
    if table:
        yield _printable(f"  {benchmark_name(shown)} ({shown.file}):")
        head = ("bytes", "time", "algbw", "busbw")
        yield from _table((*head, *(f"{name} in place" for name in head[1:])), table, texts=0)
    if len(rows) > _MAX_SIZES:
        yield f"  and {len(rows) - _MAX_SIZES} smaller sizes, see summary.json"
    yield ""


def _result(of: Measured | None) -> tuple[str, ...]:
    return ("-",) * 3 if of is None else (span_text(of.time_ns), bandwidth_text(of.algbw), bandwidth_text(of.busbw))


def _kernels(selection: Selection) -> Iterator[str]:
    """The NCCL kernels by name: without a matched operation, all that is known of what ran."""
    found = kernel_totals(selection)
    yield f"{len(selection.kernels):,} NCCL kernels, none with an operation"
    rows = [
        (
            _printable(total.name),
            f"{total.kernels:,}",
            span_text(total.duration_ns),
            span_text(total.median_ns),
        )
        for total in found[:_MAX_COMMUNICATORS]
    ]
    yield from _table(("kernel", "count", "total", "median"), rows, texts=1)
    if len(found) > _MAX_COMMUNICATORS:
        yield f"  and {len(found) - _MAX_COMMUNICATORS} more, see kernels.parquet"


def _outside(selection: Selection) -> Iterator[str]:
    """Kernels that communicate without NCCL."""
    found = outside_totals(selection)
    if not found:
        return
    yield "Communication outside NCCL"
    rows = [
        (
            *(_printable(text) for text in (total.library, total.kernel)),
            *(f"{number:,}" for number in (total.ranks, total.kernels, total.matched)),
            *(span_text(span) for span in (total.duration_ns, total.wait_ns)),
        )
        for total in found[:_MAX_COMMUNICATORS]
    ]
    yield from _table(("library", "kernel", "ranks", "kernels", "matched", "total", "waiting"), rows, texts=2)
    if len(found) > _MAX_COMMUNICATORS:
        yield f"  and {len(found) - _MAX_COMMUNICATORS} more, see kernels.parquet"
    yield ""


def _communicators(selection: Selection, sums: Totals) -> Iterator[str]:
    found = communicator_rows(selection, sums)
    yield amount_text(len(found), "communicator")
    has_operations = any(row["operations"] for row in found)
    rows = [
        (
            _printable(" ".join(str(row[of]) for of in ("name", "communicator", "group_name") if row[of] is not None)),
            str(row["parallelism"] or "-"),
            str(row["size"]),
            str(row["hosts"]),
            *((str(row["operations"]), *(measure_text(row, *each) for each in _MEASURES)) if has_operations else ()),
        )
        for row in found[:_MAX_COMMUNICATORS]
    ]
    head = ("communicator", "kind", "ranks", "hosts", "operations", "bytes", "busbw", "limit", "waiting")
    if rows:
        yield from _table(head[: len(rows[0])], rows)
    if len(found) > _MAX_COMMUNICATORS:
        yield f"  and {len(found) - _MAX_COMMUNICATORS} more, see communicators.parquet"


def _findings(selection: Selection, most: int = _MAX_COMMUNICATORS) -> Iterator[str]:
    found = sorted(selection.findings, key=lambda each: (-list(Severity).index(each.severity), each.since_ns))
    yield amount_text(len(found), "finding") if found else "No findings"
    for finding in found[:most]:
        yield _printable(f"  {finding.severity.value:<9} {finding.kind.value:<15} {finding.summary}")
    if len(found) > most:
        yield f"  and {len(found) - most} more, see findings.json"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 2) -> Iterator[str]:
    """Lines of a table whose first `texts` columns are text."""
    lines = [[_plain(text) for text in row] for row in (head, *rows)]
    widths = [max(len(row[column]) for row in lines) for column in range(len(head))]
    for row in lines:
        cells = [
            text.ljust(width) if place < texts else text.rjust(width)
            for place, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield f"  {'  '.join(cells)}".rstrip()


def _share(ratio: float | None, of_what: str) -> str:
    return NOT_RECORDED if ratio is None else f"{ratio_text(ratio)} {of_what}"


def _counts(counts: Sequence[tuple[str, int]]) -> str:
    return _printable(", ".join(f"{count:,} {name}" for name, count in counts)) or "nothing"


def _plain(text: str) -> str:
    """HTML of `report_text` as plain text."""
    return unescape(_TAG.sub("", text)).replace("\u2009", ",")


def _printable(text: str) -> str:
    """Text from logs without characters that would move a terminal's cursor."""
    return _CONTROL.sub("?", text)

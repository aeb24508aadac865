"""The tables of `report.html`, as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Final

from ncclscope_service.export.clocks_file import clocks_document
from ncclscope_service.export.inspector_section import has_inspector, inspector_rows
from ncclscope_service.export.report_data import communicator_rows
from ncclscope_service.export.report_text import (
    bandwidth_text,
    bytes_text,
    cell,
    count_text,
    ratio_text,
    span_text,
)
from ncclscope_service.export.selection import Selection
from ncclscope_service.export.summary import NOT_RECORDED, gaps
from ncclscope_service.export.totals import Totals

MAX_TABLE_ROWS: Final = 50
"""Rows of a table that are shown; the files beside the report hold all."""


def table(caption: str, columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]]) -> str:
    """A table; columns are (heading, class of the cells); cells are HTML already."""
    head = "".join(f'<th class="{kind}">{name}</th>' for name, kind in columns)
    body = "".join(
        "<tr>"
        + "".join(f'<td class="{kind}">{text}</td>' for text, (_, kind) in zip(row, columns, strict=True))
        + "</tr>"
        for row in rows
    )
    body = body or f'<tr><td class="text" colspan="{len(columns)}">{cell(None)}</td></tr>'
    return (
        f'<div class="scroll"><table><caption>{caption}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def operations_table(selection: Selection, sums: Totals) -> str:
    """What each operation of each kind of communicator did."""
    kinds = [communicator.parallelism for communicator in selection.store.communicators]
    by_kind = sums.by(lambda group: (group.op, kinds[group.communicator] if group.communicator >= 0 else None))
    rows = (
        (
            escape(op),
            cell(kind, "not known"),
            count_text(total.operations),
            bytes_text(total.bytes if total.sized else None),
            span_text(total.duration_ns if total.timed else None),
            span_text(total.wait_ns if total.waits else None),
            span_text(total.transfer_ns if total.transfers else None),
        )
        for (op, kind), total in by_kind.items()
    )
    columns = (("Operation", "text"), ("Parallelism", "text"), ("Operations", ""), ("Message bytes", ""))
    times = (("Kernel time", ""), ("Waiting", ""), ("Transfer", ""))
    caption = "<b>Table 1.</b> Operations over all ranks. Times count every launch once and are summed over the ranks."
    return table(caption, (*columns, *times), rows)


def communicators_table(selection: Selection, sums: Totals) -> str:
    """The communicators that moved most."""
    found = communicator_rows(selection, sums)
    rows = (
        (
            f"<code>{escape(str(row['communicator']))}</code>",
            cell(row["parallelism"], "not known"),
            cell(row["size"]),
            cell(row["hosts"]),
            count_text(row["operations"]),
            bytes_text(row["bytes"]),
            bandwidth_text(row["busbw"]),
            bandwidth_text(row["limit"]),
            ratio_text(row["efficiency"]),
            ratio_text(row["wait_ratio"]),
        )
        for row in found[:MAX_TABLE_ROWS]
    )
    columns = (("Communicator", "text"), ("Parallelism", "text"), ("Ranks", ""), ("Hosts", ""), ("Operations", ""))
    measures = (
        ("Message bytes", ""),
        ("busbw, median", ""),
        ("Limit (topology)", ""),
        ("Efficiency", ""),
        ("Waiting", ""),
    )
    more = len(found) - MAX_TABLE_ROWS
    rest = f" {more} more are in communicators.parquet." if more > 0 else ""
    caption = (
        f"<b>Table 2.</b> Communicators, most bytes first. Efficiency is the median busbw against the limit.{rest}"
    )
    return table(caption, (*columns, *measures), rows)


def inspector_table(selection: Selection) -> Iterator[str]:
    """What NCCL Inspector told, beside the kernels; nothing where no dump was read."""
    if not has_inspector(selection):
        return
    found = inspector_rows(selection)
    rows = (
        (
            f"<code>{escape(str(row['communicator']))}</code>",
            cell(row["parallelism"], "not known"),
            escape(str(row["op"])),
            cell(row["size_class"]),
            count_text(row["records"]),
            span_text(row["duration_ns"]),
            bandwidth_text(row["busbw"]),
            count_text(row["compared"]),
            ratio_text(row["busbw_ratio"]),
        )
        for row in found[:MAX_TABLE_ROWS]
    )
    columns = (
        ("Communicator", "text"),
        ("Parallelism", "text"),
        ("Operation", "text"),
        ("Size up to", ""),
        ("Records", ""),
        ("Kernel time", ""),
        ("busbw, median", ""),
        ("Compared", ""),
        ("busbw against kernels", ""),
    )
    more = len(found) - MAX_TABLE_ROWS
    rest = f" {more} more are in summary.json." if more > 0 else ""
    caption = (
        "<b>Table 5.</b> NCCL Inspector. “busbw against kernels”: its bandwidth, waiting included, over that of the "
        f"kernels that nsys recorded, where both are known; 100% is agreement.{rest}"
    )
    yield table(caption, columns, rows)


def clocks_table(selection: Selection) -> str:
    """Each host's clock."""
    document = clocks_document(selection)
    hosts = document["hosts"]
    assert isinstance(hosts, dict)
    count = len({selection.store.processes[index].host for index in selection.processes()})
    violations = ratio_text(document["violation_ratio"])
    caption = (
        f"<b>Table 3.</b> Clocks against that of <code>{escape(str(document['reference'] or NOT_RECORDED))}</code>. "
        f"Causality violated after correction: {violations}."
    )
    rows = (
        (
            f"<code>{escape(host)}</code>",
            span_text(clock["offset_ns"]),
            f"{clock['drift_ppm']:.3f} ppm",
            span_text(clock["sigma_ns"]),
            f"{span_text(clock['interval_lo_ns'])} to {span_text(clock['interval_hi_ns'])}",
            count_text(clock["samples"]),
            count_text(len(clock["steps"])),
        )
        for host, clock in hosts.items()
        if document["method"] is not None or count == 1
    )
    columns = (
        ("Host", "text"),
        ("Offset", ""),
        ("Drift", ""),
        ("Sigma", ""),
        ("Feasible", ""),
        ("Samples", ""),
        ("Steps", ""),
    )
    return table(caption, columns, rows)


def read_table(selection: Selection) -> str:
    """What became of every line and record."""
    store = selection.store
    understood = [("understood", name, count) for name, count in store.understood.most_common()]
    skipped = [("skipped", name, count) for name, count in store.skipped.most_common()]
    lost = [(f"lost ({gap['unit']})", f"{gap['reason']}: {gap['detail']}", gap["amount"]) for gap in gaps(selection)]
    rows = (
        (escape(what), escape(name), count_text(count))
        for what, name, count in (*understood, *skipped, *lost[:MAX_TABLE_ROWS])
    )
    caption = f"<b>Table 4.</b> What was read from {count_text(len(store.sources))} files, in lines and records."
    return table(caption, (("Became", "text"), ("Family or reason", "text wrap"), ("Count", "")), rows)

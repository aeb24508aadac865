"""The tables of `report.html`, as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Final

from ncclscope_service.export.clocks_file import clocks_document
from ncclscope_service.export.iteration_calls import Calls
from ncclscope_service.export.iterations_section import iterations_document
from ncclscope_service.export.report_text import (
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


def operations_table(selection: Selection, sums: Totals, number: int) -> str:
    """What each operation of each kind of communicator did."""
    kinds = [communicator.parallelism for communicator in selection.store.communicators]
    by_kind = sums.by(lambda group: (group.op, kinds[group.communicator] if group.communicator >= 0 else None))
    rows = (
        (
            escape(op),
            cell(kind, "not known"),
            count_text(total.operations),
            _calls_text(sums.calls.get((op, kind))),
            bytes_text(total.bytes if total.sized else None),
            span_text(total.duration_ns if total.timed else None),
            span_text(total.wait_ns if total.waits else None),
            span_text(total.transfer_ns if total.transfers else None),
        )
        for (op, kind), total in by_kind.items()
    )
    columns = (("Operation", "text"), ("Parallelism", "text"), ("Operations", ""), ("Per rank and iteration", ""))
    times = (("Message bytes", ""), ("Kernel time", ""), ("Waiting", ""), ("Transfer", ""))
    caption = (
        f"<b>Table {number}.</b> Operations over all ranks. Per rank and iteration: median (and range where it "
        "differs) over the ranks that call it. Times count every launch once and are summed over the ranks."
    )
    return table(caption, (*columns, *times), rows)


def _calls_text(calls: Calls | None) -> str:
    if calls is None:
        return cell(None)
    median = f"{calls.median:g}"
    return median if calls.least == calls.most else f"{median} <small>({calls.least} to {calls.most})</small>"


def iterations_table(selection: Selection, sums: Totals, number: int) -> str:
    """How long the iterations of each job last, and how much of that is communication."""
    rows = [
        (
            escape(job),
            count_text(of["iterations"]),
            span_text(of["median_ns"]),
            span_text(of["p90_ns"]),
            ratio_text(of["communication_ratio"]),
            ratio_text(of["exposed_ratio"]),
            _told_by(of),
        )
        for job, of in iterations_document(selection, sums).items()
        if of is not None
    ]
    columns = (
        ("Job", "text"),
        ("Iterations", ""),
        ("Length, median", ""),
        ("90th percentile", ""),
        ("Communication", ""),
        ("Exposed", ""),
        ("Told by", "text"),
    )
    caption = (
        f"<b>Table {number}.</b> Iterations over all ranks. Communication: share of the time in which a rank ran NCCL "
        "kernels, waiting included. Exposed: what of the time no other kernel of that GPU hid."
    )
    return table(caption, columns, rows)


def _told_by(of: Mapping[str, object]) -> str:
    told, sure = of["operations_by"], of["period_confidence"]
    assert isinstance(told, dict)
    by = {"marks": "NVTX marks", "period": "the period of calls"}
    texts = [by[name] for name, amount in told.items() if amount]
    if told["period"] and isinstance(sure, float):
        texts[-1] += f" (confidence {sure:.0%})"
    return escape(" and ".join(texts))


def clocks_table(selection: Selection, number: int) -> str:
    """Each host's clock."""
    document = clocks_document(selection)
    hosts = document["hosts"]
    assert isinstance(hosts, dict)
    count = len({selection.store.processes[index].host for index in selection.processes()})
    reference = escape(str(document["reference"] or NOT_RECORDED))
    caption = (
        f"<b>Table {number}.</b> Clocks against that of <code>{reference}</code>. "
        f"Causality violated after correction: {ratio_text(document['violation_ratio'])}."
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


def read_table(selection: Selection, number: int) -> str:
    """What was skipped and lost of what was read; what was understood in a sentence."""
    store = selection.store
    understood = ", ".join(f"{count_text(count)} {escape(name)}" for name, count in store.understood.most_common())
    skipped = [("skipped", name, count) for name, count in store.skipped.most_common()]
    lost = [(f"lost ({gap['unit']})", f"{gap['reason']}: {gap['detail']}", gap["amount"]) for gap in gaps(selection)]
    rows = [(escape(what), escape(name), count_text(count)) for what, name, count in (*skipped, *lost[:MAX_TABLE_ROWS])]
    files = f"{count_text(len(store.sources))} files"
    text = f'<p class="lead read">Read from {files}, in lines and records: {understood or "nothing"}.</p>'
    if not rows:
        return f"{text}<p>Nothing was skipped, and nothing was lost.</p>"
    caption = f"<b>Table {number}.</b> What was skipped or lost, in lines and records."
    return text + table(caption, (("Became", "text"), ("Reason", "text wrap"), ("Count", "")), rows)

"""`report.html`: the run on one page, with nothing loaded from anywhere: figures, tables, findings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from importlib import resources
from pathlib import Path
from typing import Final

import orjson
from plotly.offline import get_plotlyjs

from ncclscope_service.export.clocks_file import clocks_document
from ncclscope_service.export.findings_file import findings_document
from ncclscope_service.export.inspector_section import has_inspector, inspector_rows
from ncclscope_service.export.report_data import communicator_rows, report_data
from ncclscope_service.export.report_text import (
    bandwidth_text,
    bytes_text,
    cell,
    count_text,
    ratio_text,
    span_text,
)
from ncclscope_service.export.selection import Selection
from ncclscope_service.export.summary import NOT_RECORDED, captured_ratio, gaps, level, matched_ratio, seen_ranks
from ncclscope_service.export.totals import Totals, totals
from ncclscope_service.version_of import version_of

MAX_TABLE_ROWS: Final = 50
"""Communicators and findings that are shown; the files beside the report hold all."""

_LEVELS: Final = {
    "logs only": "Read from NCCL logs alone: counts, volumes and order. Durations, waiting and bandwidth need "
    "exports of Nsight Systems and are not recorded.",
    "logs and nsys": "Read from NCCL logs and from exports of Nsight Systems: times are those of the GPU kernels.",
    "logs and Inspector": "Read from NCCL logs and dumps of NCCL Inspector: durations and waiting are Inspector's, "
    "in whole microseconds; when kernels ran, and the transfer of sends and rooted collectives, are not recorded.",
    "logs, Inspector and nsys": "Read from NCCL logs, dumps of NCCL Inspector and exports of Nsight Systems: times "
    "are those of the GPU kernels, and Inspector's where no capture ran.",
    "Inspector only": "Read from dumps of NCCL Inspector alone: durations and bandwidth by communicator. "
    "Operations and their order, and what Inspector left out, need NCCL logs and are not recorded.",
    "Inspector and nsys": "Read from dumps of NCCL Inspector and exports of Nsight Systems: without logs, no kernel "
    "can be given its size.",
    "nsys only": "Read from exports of Nsight Systems alone: without NCCL logs, no kernel can be given its size.",
    "nothing": "Nothing could be read.",
}


def write_report(selection: Selection, path: Path, sums: Totals | None = None) -> None:
    """Writes the page; about 5 MB, most of which is the plotting library."""
    sums = totals(selection) if sums is None else sums
    with path.open("w", encoding="utf-8") as file:
        for text in _page(selection, sums):
            file.write(text)


def _page(selection: Selection, sums: Totals) -> Iterator[str]:
    data = report_data(selection, sums)
    yield '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{escape(_title(selection))}</title><style>{_resource('report.css')}</style></head><body><main>"
    yield _header(selection, sums)
    yield from _sections(selection, sums, data)
    yield "<footer>Written by ncclscope. GB = 10<sup>9</sup> bytes. "
    yield f"“{NOT_RECORDED}” means that the inputs cannot tell.</footer>"
    yield f'</main><script type="application/json" id="data">{script_json(data)}</script>'
    yield f"<script>{get_plotlyjs()}</script><script>{_resource('report.js')}</script></body></html>\n"


def script_json(document: object) -> str:
    """JSON that cannot end the script element that holds it."""
    return orjson.dumps(document).decode().replace("</", "<\\/").replace("<!--", "<\\u0021--")


def _resource(name: str) -> str:
    return (resources.files(__package__ or "") / name).read_text(encoding="utf-8")


def _title(selection: Selection) -> str:
    jobs = selection.jobs
    return (
        f"NCCL communication of {', '.join(jobs[:3]) if len(jobs) <= 3 else f'{len(jobs)} jobs'}" if jobs else "No job"
    )


def _listed(names: Sequence[str]) -> str:
    """A few names as HTML, and how many more there are."""
    more = f" <small>and {len(names) - 3} more</small>" if len(names) > 3 else ""
    return escape(", ".join(names[:3])) + more


def _header(selection: Selection, sums: Totals) -> str:
    everything = sums.all()
    hosts = {selection.store.processes[index].host for index in selection.processes()}
    versions = sorted({version_of(selection.store, index) or "" for index in selection.processes()} - {""})
    facts = (
        ("Hosts", count_text(len(hosts))),
        ("Ranks", count_text(len(seen_ranks(selection)) or None)),
        ("NCCL", _listed(versions) if versions else cell(None)),
        ("Operations", count_text(everything.operations)),
        ("Message bytes", bytes_text(everything.bytes if everything.sized else None)),
        ("Matched to a kernel", ratio_text(matched_ratio(sums))),
        ("Inside a capture", ratio_text(captured_ratio(selection, sums))),
        ("Kernel time waiting", ratio_text(everything.wait_ratio)),
    )
    listed = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)
    name = level(selection)
    return (
        f'<h1>{escape(_title(selection))}</h1><p class="lead">{escape(name[0].upper() + name[1:])}. '
        f'{escape(_LEVELS[name])}</p><dl class="facts">{listed}</dl>'
    )


def _sections(selection: Selection, sums: Totals, data: dict[str, object]) -> Iterator[str]:
    yield _heading(1, "Findings") + _findings(selection)
    yield _heading(2, "What was communicated")
    yield '<div class="pair">'
    yield _figure(1, "mix-operations", data["mix"], "<b>Operations</b> over all ranks, by kind of communicator.")
    yield _figure(2, "mix-bytes", data["mix"], "<b>Message bytes</b> over all ranks, by kind of communicator.")
    yield "</div>"
    yield _operations_table(selection, sums)
    yield _figure(
        3, "sizes", data["sizes"], "<b>Message sizes</b>, one bin per power of two. The size is S of nccl-tests."
    )
    yield _figure(4, "volume", data["volume"], "<b>Volume of each rank</b>: message bytes of all operations it called.")
    yield _heading(3, "How fast")
    yield _communicators_table(selection, sums)
    caption = "<b>Bus bandwidth against message size</b>, one point per collective" + _sampling(data["bandwidth"])
    yield _figure(
        5,
        "bandwidth",
        data["bandwidth"],
        f"{caption}. Waiting is not part of it{_limit_note(data['bandwidth'])}.",
    )
    yield from _inspector_table(selection)
    yield _heading(4, "Who waited")
    yield _figure(
        6,
        "waits",
        data["waits"],
        "<b>Waiting</b> as a share of the time in NCCL kernels. A rank that never waits is the one others wait for.",
    )
    yield _heading(5, "How far this can be trusted")
    yield _figure(
        7,
        "alignment",
        data["alignment"],
        "<b>Operations by what became of them.</b> “Not covered”: no capture ran at that time; "
        "“no kernel”: NCCL launches none.",
    )
    yield _clocks_table(selection)
    yield _read_table(selection)


def _heading(number: int, text: str) -> str:
    return f'<h2><span class="number">{number}</span>{escape(text)}</h2>'


def _figure(number: int, name: str, data: object, caption: str) -> str:
    plot = f'<div class="plot" id="{name}"></div>' if data else f'<div class="missing">{NOT_RECORDED}</div>'
    return f"<figure>{plot}<figcaption>Figure {number}. {caption}</figcaption></figure>"


def _sampling(data: object) -> str:
    if not isinstance(data, dict) or data["drawn"] == data["of"]:
        return ""
    return f" ({count_text(data['drawn'])} of {count_text(data['of'])} are drawn, by lot)"


def _limit_note(data: object) -> str:
    return "; the dashed line is the topology's limit" if isinstance(data, dict) and data["limits"] else ""


def _table(caption: str, columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]]) -> str:
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


def _findings(selection: Selection) -> str:
    found = findings_document(selection)
    if not found:
        return '<p class="lead">Nothing was found.</p>'
    shown = "".join(_finding(finding) for finding in found[:MAX_TABLE_ROWS])
    more = len(found) - MAX_TABLE_ROWS
    return shown + (f"<p>{more} more are in findings.json.</p>" if more > 0 else "")


def _finding(finding: dict[str, object]) -> str:
    proof = orjson.dumps(
        finding["evidence"],
        default=str,
        option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY,
    )
    since = _moment(finding["since_ns"])
    until = "open" if finding["until_ns"] is None else f"until {_moment(finding['until_ns'])}"
    return (
        f'<div class="finding {escape(str(finding["severity"]))}">'
        f'<div class="kind">{escape(str(finding["kind"]).replace("_", " "))} · since {since}, {until}'
        f" · confidence {finding['confidence']:.0%}</div><p>{escape(str(finding['summary']))}</p>"
        f"<details><summary>Evidence</summary><pre>{escape(proof.decode())}</pre></details></div>"
    )


def _moment(at_ns: object) -> str:
    if not isinstance(at_ns, int) or not 0 <= at_ns < 2**63:
        return cell(None)
    return (
        datetime.fromtimestamp(at_ns // 10**9, UTC).strftime("%Y-%m-%d %H:%M:%S") + f".{at_ns // 10**6 % 1000:03d} UTC"
    )


def _operations_table(selection: Selection, sums: Totals) -> str:
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
    return _table(caption, (*columns, *times), rows)


def _communicators_table(selection: Selection, sums: Totals) -> str:
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
    return _table(caption, (*columns, *measures), rows)


def _inspector_table(selection: Selection) -> Iterator[str]:
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
    yield _table(caption, columns, rows)


def _clocks_table(selection: Selection) -> str:
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
    return _table(caption, columns, rows)


def _read_table(selection: Selection) -> str:
    store = selection.store
    understood = [("understood", name, count) for name, count in store.understood.most_common()]
    skipped = [("skipped", name, count) for name, count in store.skipped.most_common()]
    lost = [(f"lost ({gap['unit']})", f"{gap['reason']}: {gap['detail']}", gap["amount"]) for gap in gaps(selection)]
    rows = (
        (escape(what), escape(name), count_text(count))
        for what, name, count in (*understood, *skipped, *lost[:MAX_TABLE_ROWS])
    )
    caption = f"<b>Table 4.</b> What was read from {count_text(len(store.sources))} files, in lines and records."
    return _table(caption, (("Became", "text"), ("Family or reason", "text wrap"), ("Count", "")), rows)

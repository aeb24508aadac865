"""`report.html`: the run on one page, with nothing loaded from anywhere: figures, tables, findings.

If another run is given, a section shows it beside this one; its content is that of `compare.json`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import orjson

from ncclscope_service.export.benchmarks import benchmark_name
from ncclscope_service.export.json_files import findings_document
from ncclscope_service.export.report.data import report_data
from ncclscope_service.export.report.figures import Figures
from ncclscope_service.export.report.node_graph import topology_pictures
from ncclscope_service.export.report.plan import plan_maps, plan_patterns, plan_section
from ncclscope_service.export.report.tables import (
    MAX_TABLE_ROWS,
    bandwidth_text,
    budget_table,
    bytes_text,
    cell,
    clocks_table,
    count_text,
    families_table,
    inspector_table,
    iterations_table,
    operations_table,
    ratio_text,
    read_table,
    signatures_table,
    span_text,
    standing_table,
    table,
    waited_for_table,
)
from ncclscope_service.export.selection import Selection
from ncclscope_service.export.summary import (
    NOT_RECORDED,
    capture_notes,
    captured_ratio,
    has_inspector,
    inferred_ranks,
    inspector_document,
    iterations_document,
    level,
    matched_ratio,
    no_operations,
    seen_ranks,
    verdict_text,
)
from ncclscope_service.export.tables.operations_file import LastOperations, last_operations_of
from ncclscope_service.export.tables.traffic_file import Traffic, measure_traffic
from ncclscope_service.export.totals import Totals, totals
from ncclscope_service.measure.latency_advice import advice_text
from ncclscope_service.nccl.nccl_tests import Benchmark, Measured
from ncclscope_service.store.plan_records import PlanPattern
from ncclscope_service.store.records import Ending, Verdict
from ncclscope_service.store.tables import version_of

MAX_CHANGES: Final = 40
MAX_PAIRS: Final = 24
"""Pairs of bars in the figure, those with the largest share of kernel time."""

Document = Mapping[str, object]
"""The result of `compare_document`, or a part of it."""

_NAMES: Final = {
    "iteration_ns": "Iteration time, median",
    "operations_per_iteration": "Operations per iteration",
    "bytes_per_iteration": "Message bytes per iteration",
    "operations": "Operations",
    "bytes": "Message bytes",
    "busbw_bytes_per_second": "busbw, median",
    "wait_ratio": "Waiting",
}


def compare_data(document: Document) -> dict[str, object]:
    """Data of the figures: median busbw of both runs by key, with noise, and the length of each iteration."""
    rows = [row for row in _rows(document) if row["measure"] == "busbw_bytes_per_second"]
    rows = sorted(rows, key=lambda row: -_float(row["weight"]))[:MAX_PAIRS]
    sides = [_part(document, side) for side in ("this", "other")]
    lengths = [side["iteration_lengths_ns"] for side in sides]
    return {
        "names": [side["name"] for side in sides],
        "busbw": {
            "keys": [_key(row) for row in rows],
            "values": [[_scaled(row[side]) for row in rows] for side in ("this", "other")],
            "noise": [[_scaled(row[f"{side}_noise"]) for row in rows] for side in ("this", "other")],
        }
        if rows
        else None,
        "lengths": [[round(_float(value) / 1e6, 4) for value in side] for side in lengths if isinstance(side, list)]
        if any(lengths)
        else None,
    }


def compare_tables(document: Document) -> str:
    """Both runs, and what changed."""
    this, other = _part(document, "this"), _part(document, "other")
    totals = (
        ("Operations", count_text(this["operations"]), count_text(other["operations"])),
        ("Message bytes", bytes_text(this["bytes"]), bytes_text(other["bytes"])),
        ("Time in NCCL kernels", span_text(this["kernel_ns"]), span_text(other["kernel_ns"])),
        ("Iterations", count_text(this["iterations"]), count_text(other["iterations"])),
        ("Iteration time, median", span_text(this["iteration_ns"]), span_text(other["iteration_ns"])),
    )
    names = [escape(str(side["name"])) for side in (this, other)]
    both = table("<b>Both runs</b>", (("", "text"), (names[0], ""), (names[1], "")), totals)
    return both + _changes(document, names)


def _changes(document: Document, names: Sequence[str]) -> str:
    changed = [row for row in _rows(document) if row["is_change"]]
    shown = [
        (
            escape(_key(row)),
            _NAMES.get(str(row["measure"]), str(row["measure"])),
            _text(row, "this"),
            _text(row, "other"),
            _ratio(row),
            _noise(row),
            ratio_text(row["weight"]),
        )
        for row in changed[:MAX_CHANGES]
    ]
    compared = document["compared"]
    more = f" {len(changed) - MAX_CHANGES} more are in compare.json." if len(changed) > MAX_CHANGES else ""
    caption = (
        f"<b>What changed</b>: {len(changed)} of {count_text(compared)} measures, how long an iteration is before the "
        "rest, then the largest effect first, weighed by the share of kernel time. A change is more than three times "
        f"the noise of both runs together, which is the scatter within each; all else is in compare.json and is no "
        f"change.{more}"
    )
    columns = (("What", "text"), ("Measure", "text"), (names[0], ""), (names[1], ""), ("Change", ""))
    if not shown:
        return f'<p class="lead">No change beyond the noise in {count_text(compared)} measures.</p>'
    return table(caption, (*columns, ("Noise", ""), ("Kernel time", "")), shown)


def _rows(document: Document) -> list[Document]:
    rows = document["differences"]
    return list(rows) if isinstance(rows, list) else []


def _part(document: Document, name: str) -> Document:
    part = document[name]
    assert isinstance(part, dict)
    return part


def _key(row: Document) -> str:
    if row["op"] is None:
        return "whole run"
    size = "" if row["size_class"] == "not known" else f" up to {row['size_class']}"
    return f"{row['parallelism'] or ''} {row['op']}{size}".strip().replace("up to inf", "above 256MiB")


def _text(row: Document, side: str) -> str:
    measure, value = str(row["measure"]), row[side]
    if value is None:
        return cell(None, "none")
    if measure.endswith("_ns"):
        return span_text(value)
    if measure.startswith("busbw"):
        return bandwidth_text(value)
    if measure == "wait_ratio":
        return ratio_text(value)
    return bytes_text(value) if measure.startswith("bytes") else f"{_float(value):,.6g}"


def _ratio(row: Document) -> str:
    if row["measure"] == "wait_ratio" and row["this"] is not None and row["other"] is not None:
        return f"{(_float(row['this']) - _float(row['other'])) * 100:+.1f} points"
    return cell(None, "") if row["ratio"] is None else f"{_float(row['ratio']) - 1:+.1%}"


def _noise(row: Document) -> str:
    """Of both runs together, in the measure's own terms."""
    if row["this_noise"] is None or row["other_noise"] is None:
        return cell(None, "")
    noise = (_float(row["this_noise"]) ** 2 + _float(row["other_noise"]) ** 2) ** 0.5
    if row["measure"] == "wait_ratio":
        return f"{noise * 100:.1f} points"
    return "exact" if noise == 0 else ratio_text(noise / _float(row["other"])) if row["other"] else cell(None, "")


def _float(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _scaled(value: object) -> float | None:
    return float(f"{value / 1e9:.4g}") if isinstance(value, int | float) else None


_LEVELS: Final = {
    "logs only": "Read from NCCL logs alone: counts, volumes and order. Durations, waiting and bandwidth need "
    "exports of Nsight Systems and are not recorded.",
    "logs and nsys": "Read from NCCL logs and from exports of Nsight Systems: times are those of the GPU kernels.",
    "logs and Inspector": "Read from NCCL logs and dumps of NCCL Inspector: durations and waiting are Inspector's, "
    "in whole microseconds; when kernels ran, and the transfer of sends and rooted collectives, are not recorded.",
    "logs, Inspector and nsys": "Read from NCCL logs, dumps of NCCL Inspector and exports of Nsight Systems: times "
    "are those of the GPU kernels, and Inspector's where no capture ran.",
    "Inspector only": "Read from dumps of NCCL Inspector alone: durations and bandwidth by communicator. "
    "Order and types of operations, and what Inspector left out, need NCCL logs and are not recorded.",
    "Inspector and nsys": "Read from dumps of NCCL Inspector and exports of Nsight Systems: without logs, no kernel "
    "can be given its size.",
    "nsys only": "Read from exports of Nsight Systems alone: without NCCL logs, no kernel can be given its size.",
    "PyTorch traces only": "Read from traces of the PyTorch profiler alone: calls of process groups, and times of the "
    "GPU kernels. Algorithm, channels and errors need NCCL logs and are not recorded.",
    "output of nccl-tests only": "Read from output of nccl-tests alone: what it measured. Who called what, "
    "and how, needs NCCL logs and is not recorded.",
    "nothing": "Nothing could be read.",
}
_MIXED: Final = "Times are those of the GPU kernels; what the PyTorch profiler recorded stands beside the rest."


def write_report(
    selection: Selection,
    path: Path,
    sums: Totals | None = None,
    traffic: Traffic | None = None,
    comparison: dict[str, object] | None = None,
    last: LastOperations | None = None,
) -> None:
    """Writes the page; about 5 MB, most of which is the plotting library."""
    sums = totals(selection) if sums is None else sums
    traffic = measure_traffic(selection) if traffic is None else traffic
    last = last_operations_of(selection) if last is None else last
    data = report_data(selection, sums, traffic) | {"compare": None if comparison is None else compare_data(comparison)}
    if selection.benchmarks:
        data["benchmarks"] = benchmark_curves(selection)
    patterns = plan_patterns(selection)
    if patterns:
        data["plan_maps"] = plan_maps(patterns)
    figures = Figures(data, topology_pictures(selection, traffic))
    shown = _Shown(selection, sums, figures, comparison, last, patterns)
    with path.open("w", encoding="utf-8") as file:
        file.writelines(_page(shown))


@dataclass(frozen=True, slots=True)
class _Shown:
    """Everything that the page shows."""

    selection: Selection
    sums: Totals
    figures: Figures
    comparison: dict[str, object] | None
    last: LastOperations
    patterns: Mapping[str, PlanPattern]


def _page(shown: _Shown) -> Iterator[str]:
    selection, figures = shown.selection, shown.figures
    yield '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{escape(_title(selection))}</title><style>{_resource('report.css')}</style></head><body><main>"
    yield _header(selection, shown.sums)
    for number, (title, parts) in enumerate(_contents(shown), start=1):
        yield f'<h2><span class="number">{number}</span>{escape(title)}</h2>'
        yield from parts
    yield "<footer>Written by ncclscope. MiB = 2<sup>20</sup> bytes, GB/s = 10<sup>9</sup> bytes per second. "
    yield f"“{NOT_RECORDED}” means that the inputs cannot tell.</footer>"
    yield f'</main><script type="application/json" id="data">{script_json(figures.data)}</script>'
    yield f"<script>{plotly_script_path().read_text(encoding='utf-8')}</script>"
    yield f"<script>{_resource('report.js')}</script>"
    yield f"<script>{_resource('benchmarks.js')}</script>" if figures.data.get("benchmarks") else ""
    yield "</body></html>\n"


def script_json(document: object) -> str:
    """JSON that cannot end the script element that holds it."""
    return orjson.dumps(document).decode().replace("</", "<\\/").replace("<!--", "<\\u0021--")


def plotly_script_path() -> Path:
    """Path of the browser script of the installed plotly.

    Found without importing plotly: that takes 20 ms, and 100 MB once its figures are asked for.
    """
    spec = find_spec("plotly")
    assert spec is not None, "plotly belongs to the extra `service` and is not installed"
    assert spec.origin is not None
    return Path(spec.origin).parent / "package_data" / "plotly.min.js"


def _resource(name: str) -> str:
    return (resources.files(__package__ or "") / name).read_text(encoding="utf-8")


def _title(selection: Selection) -> str:
    jobs = selection.jobs
    return (
        f"NCCL communication of {', '.join(jobs[:3]) if len(jobs) <= 3 else f'{len(jobs)} jobs'}"
        if jobs
        else "Benchmarks of nccl-tests"
        if selection.benchmarks
        else "No job"
    )


def _listed(names: Sequence[str]) -> str:
    """A few names as HTML, and how many more there are."""
    more = f" <small>and {len(names) - 3} more</small>" if len(names) > 3 else ""
    return escape(", ".join(names[:3])) + more


def _header(selection: Selection, sums: Totals) -> str:
    everything = sums.all()
    hosts = {selection.store.processes[index].host for index in selection.processes()}
    versions = sorted({version_of(selection.store, index) or "" for index in selection.processes()} - {""})
    iteration = _only_iteration(selection, sums)
    inferred, records = inferred_ranks(selection), inspector_document(selection)
    ranks = count_text(len(seen_ranks(selection)) or None)
    flagged = f"({count_text(inferred)} inferred) " if inferred else ""
    facts = (
        ("Ranks", f"{ranks} <small>{flagged}on {_hosts_text(len(hosts))}</small>"),
        ("NCCL", _listed(versions) if versions else cell(None)),
        ("Operations", count_text(everything.operations or (0 if records is None else records["records"]))),
        ("Message bytes", bytes_text(everything.bytes if everything.sized else None)),
        ("Iteration, median", span_text(iteration.get("median_ns"))),
        ("Communication share", ratio_text(iteration.get("communication_ratio"))),
        ("Exposed share", ratio_text(iteration.get("exposed_ratio"))),
        ("Kernel time waiting", ratio_text(everything.wait_ratio)),
        ("Matched to a kernel", ratio_text(matched_ratio(sums))),
        ("Inside a capture", ratio_text(captured_ratio(selection, sums))),
    )
    listed = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)
    name = level(selection)
    lacks_operations = not everything.operations and inspector_document(selection) is None
    told = ([no_operations(selection)] if lacks_operations else []) + capture_notes(selection)
    notes = "".join(f"<p>{escape(note)}</p>" for note in told)
    verdicts = "".join(_verdict(verdict) for verdict in selection.verdicts.values())
    return (
        f'<h1>{escape(_title(selection))}</h1><p class="lead">{escape(name[0].upper() + name[1:])}. '
        f'{escape(_LEVELS.get(name, _MIXED))}</p>{verdicts}<dl class="facts">{listed}</dl>{notes}'
    )


_GRAVITY: Final = {Ending.HANG: "critical", Ending.CRASHED: "critical", Ending.KILLED: "warning"}


def _verdict(verdict: Verdict) -> str:
    """How one job ended, as a box like that of a finding."""
    first = verdict.first_failure
    where = "" if first is None else f" · first failure at <code>{escape(first.where)}</code>"
    kind = f'<div class="kind">{escape(verdict.job)}{where}</div>'
    gravity = _GRAVITY.get(verdict.ending, "info")
    return f'<div class="finding {gravity}">{kind}<p>{escape(verdict_text(verdict))}</p></div>'


def _only_iteration(selection: Selection, sums: Totals) -> dict[str, object]:
    """Document of the iterations if there is one job, else empty: the table shows those of several jobs."""
    found = iterations_document(selection, sums)
    return next((of for of in found.values() if of is not None), {}) if len(found) == 1 else {}


def _hosts_text(hosts: int) -> str:
    return f"{count_text(hosts)} host" if hosts == 1 else f"{count_text(hosts)} hosts"


def _contents(shown: _Shown) -> Iterator[tuple[str, Iterable[str]]]:
    """The sections in the order in which somebody who was called at night wants them."""
    selection, sums, figures = shown.selection, shown.sums, shown.figures
    yield "Findings", (_findings(selection),)
    if shown.comparison is not None:
        yield "What changed", _compared(shown.comparison, figures)
    if selection.benchmarks:
        yield "Benchmarks", benchmarks_section(selection, figures)
    yield "Iterations", _iterations(selection, sums, figures)
    yield "How fast", _speed(selection, sums, figures)
    yield "Who waited", (waited_for_table(selection, figures.next_table()), *figures.waits())
    yield "Where every rank stood", (_standing(shown.last, figures),)
    yield "When", figures.over_time()
    yield "What was communicated", _communicated(selection, sums, figures)
    if any(job in selection.store.plans for job in selection.jobs):
        yield "Plan", plan_section(selection, sums, figures, shown.patterns)
    yield "How each group communicates", _signatures(selection, sums, figures)
    yield "Who sent to whom", figures.traffic()
    if figures.pictures:
        yield "Topology", figures.topology()
    yield "How far this can be trusted", _trust(selection, figures)


def _compared(comparison: dict[str, object], figures: Figures) -> Iterator[str]:
    yield compare_tables(comparison)
    yield from figures.compared()


def _iterations(selection: Selection, sums: Totals, figures: Figures) -> Iterator[str]:
    yield iterations_table(selection, sums, figures.next_table())
    if len(sums.budget.rows):
        yield budget_table(selection, sums, figures.next_table())
    yield from figures.iterations()


def _standing(last: LastOperations, figures: Figures) -> str:
    if last.uneven:
        return standing_table(last.uneven, figures.next_table())
    if not len(last.table):
        return f"<p>{cell(None)}</p>"
    return '<p class="lead">In every group, all ranks enqueued the same number of operations.</p>'


def _speed(selection: Selection, sums: Totals, figures: Figures) -> Iterator[str]:
    yield families_table(selection, sums, figures.next_table())
    yield from figures.bandwidth()
    if has_inspector(selection):
        yield inspector_table(selection, figures.next_table())


def _communicated(selection: Selection, sums: Totals, figures: Figures) -> Iterator[str]:
    yield from figures.communicated()
    yield operations_table(selection, sums, figures.next_table())
    yield from figures.sizes()
    for job, each in sums.advice:
        yield f"<p>{escape(job)}, bound by latency: {escape(advice_text(each))}.</p>"
    yield from figures.per_rank()
    yield from figures.per_iteration()


def _signatures(selection: Selection, sums: Totals, figures: Figures) -> Iterator[str]:
    yield signatures_table(selection, sums, figures.next_table())
    yield from figures.signatures()


def _trust(selection: Selection, figures: Figures) -> Iterator[str]:
    yield from figures.trust()
    yield clocks_table(selection, figures.next_table())
    yield read_table(selection, figures.next_table())


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


MAX_CURVES: Final = 24
"""Tables that are drawn and shown; `summary.json` has all."""


def benchmark_curves(selection: Selection) -> list[dict[str, object]]:
    """Bus bandwidth in GB/s over message size of each table; what is printed as 0.00 is left out."""
    curves: list[dict[str, object]] = []
    for shown in selection.benchmarks[:MAX_CURVES]:
        for place in ("out of place", "in place"):
            results = [(row.message_bytes, row.out_of_place if place[0] == "o" else row.in_place) for row in shown.rows]
            points = [(size, of.busbw / 1e9) for size, of in results if of is not None and size and of.busbw]
            if points:
                curves.append(
                    {
                        "name": benchmark_name(shown),
                        "file": shown.file,
                        "place": place,
                        "x": [size for size, _ in points],
                        "y": [busbw for _, busbw in points],
                    }
                )
    return curves


def benchmarks_section(selection: Selection, figures: Figures) -> Iterator[str]:
    """The names of the tests, the curves, and the tables, the first of them open."""
    found = selection.benchmarks
    more = f" The first {MAX_CURVES} are shown; summary.json has all." if len(found) > MAX_CURVES else ""
    yield (
        f'<p class="lead">A benchmark: nccl-tests printed {len(found):,} table{"" if len(found) == 1 else "s"} in what '
        f"was read.{more}</p>"
    )
    yield figures.figure(
        "benchmarks",
        "benchmarks",
        "<b>Bus bandwidth against message size</b> as nccl-tests printed it, waiting included. Solid: out of place; "
        "dotted: in place. Sizes whose bandwidth was printed as 0.00 are left out.",
    )
    for number, shown in enumerate(found[:MAX_CURVES]):
        text = _table(shown, figures.next_table())
        name = f"{escape(benchmark_name(shown))} <small>{escape(shown.file)}</small>"
        yield text if number == 0 else f"<details><summary>{name}</summary>{text}</details>"


def _table(shown: Benchmark, number: int) -> str:
    rows = (
        (
            f"{row.message_bytes:,}".replace(",", "\u2009"),
            bytes_text(row.message_bytes),
            *_result(row.out_of_place),
            *_result(row.in_place),
        )
        for row in shown.rows[-MAX_TABLE_ROWS:]
    )
    columns = (("Bytes", ""), ("Message size", ""))
    result = (("Time", ""), ("algbw", ""), ("busbw", ""), ("Wrong", ""))
    torn = f" {shown.torn_rows:,} torn rows are left out." if shown.torn_rows else ""
    rest = f" The last {MAX_TABLE_ROWS}; summary.json has all." if len(shown.rows) > MAX_TABLE_ROWS else ""
    caption = (
        f"<b>Table {number}.</b> {escape(benchmark_name(shown))}, <code>{escape(shown.file)}</code>. The first four "
        f"results are out of place, the others in place.{torn}{rest}"
    )
    return table(caption, (*columns, *result, *result), rows)


def _result(of: Measured | None) -> tuple[str, ...]:
    if of is None:
        return (cell(None),) * 4
    return span_text(of.time_ns), bandwidth_text(of.algbw), bandwidth_text(of.busbw), cell(of.wrong)

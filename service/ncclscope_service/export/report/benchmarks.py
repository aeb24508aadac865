"""The section of `report.html` on runs of nccl-tests: the curve and the table of each, which `benchmarks.js` draws."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Final

from ncclscope_service.export.benchmarks import benchmark_name
from ncclscope_service.export.report.figures import Figures
from ncclscope_service.export.report.tables import MAX_TABLE_ROWS, bandwidth_text, bytes_text, cell, span_text, table
from ncclscope_service.export.selection import Selection
from ncclscope_service.nccl.nccl_tests import Benchmark, Measured

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
    """What was tested, the curves, and the tables, the first of them open."""
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

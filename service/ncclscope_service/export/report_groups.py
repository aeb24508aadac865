"""The tables of `report.html` on communicators, as HTML: what they are, how fast, and how they communicate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from statistics import median
from typing import Final

from ncclscope_service.export.inspector_section import inspector_rows
from ncclscope_service.export.iterations_section import signatures_document
from ncclscope_service.export.report_data import communicator_rows
from ncclscope_service.export.report_tables import MAX_TABLE_ROWS, table
from ncclscope_service.export.report_text import bandwidth_text, bytes_text, cell, count_text, ratio_text, span_text
from ncclscope_service.export.selection import Selection
from ncclscope_service.export.totals import Totals

_NAMED_SHARE: Final = 0.05


def families_table(selection: Selection, sums: Totals, number: int) -> str:
    """Communicators of one kind, size and spread over hosts in one row; below, folded away, each by itself."""
    found = communicator_rows(selection, sums)
    families: dict[tuple[object, ...], list[dict[str, object]]] = {}
    for row in found:
        families.setdefault((row["parallelism"], row["size"], row["hosts"]), []).append(row)
    rows = [_family(members) for members in list(families.values())[:MAX_TABLE_ROWS]]
    columns = (
        ("Parallelism", "text"),
        ("Communicators", ""),
        ("Ranks", ""),
        ("Hosts", ""),
        ("Operations", ""),
        ("Message bytes", ""),
        ("busbw, median", ""),
        ("Slowest", ""),
        ("Limit (topology)", ""),
        ("Efficiency", ""),
        ("Waiting", ""),
    )
    more = len(families) - MAX_TABLE_ROWS
    rest = f" {more} more kinds are in communicators.parquet." if more > 0 else ""
    caption = (
        f"<b>Table {number}.</b> Communicators by kind, most bytes first. busbw: the median over the communicators of "
        "each one's median, and that of the slowest of them; efficiency is the median against the topology's limit, "
        f"waiting a share of kernel time.{rest}"
    )
    each = communicators_table(found)
    return table(caption, columns, rows) + (
        f"<details><summary>Each communicator by itself</summary>{each}</details>" if len(found) > len(families) else ""
    )


def _family(members: list[dict[str, object]]) -> tuple[str, ...]:
    def known(name: str) -> list[float]:
        return [float(value) for row in members if isinstance(value := row[name], int | float)]

    def middle(name: str) -> float | None:
        return median(known(name)) if known(name) else None

    slowest = min(known("busbw"), default=None) if len(members) > 1 else None
    return (
        cell(members[0]["parallelism"], "not known"),
        count_text(len(members)),
        cell(members[0]["size"]),
        cell(members[0]["hosts"]),
        count_text(sum(int(value) for value in known("operations"))),
        bytes_text(sum(known("bytes")) if known("bytes") else None),
        bandwidth_text(middle("busbw")),
        bandwidth_text(slowest) if slowest is not None or not known("busbw") else "",
        bandwidth_text(middle("limit")),
        ratio_text(middle("efficiency")),
        ratio_text(middle("wait_ratio")),
    )


def communicators_table(found: Sequence[Mapping[str, object]]) -> str:
    """The communicators that moved most."""
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
    rest = f" The first {MAX_TABLE_ROWS}; {more} more are in communicators.parquet." if more > 0 else ""
    return table(f"<b>Communicators</b>, most bytes first.{rest}", (*columns, *measures), rows)


def signatures_table(selection: Selection, sums: Totals, number: int) -> str:
    """How each kind of communicator communicates."""
    found = signatures_document(selection, sums)
    several = len(selection.jobs) > 1
    rows = [
        (
            (f"{escape(str(row['job']))} " if several else "") + cell(row["parallelism"], "not known"),
            count_text(row["communicators"]),
            _mix_bar(row["operation_mix"]),
            bytes_text(row["median_bytes"]),
            bytes_text(row["largest_bytes"]),
            _number_text(row["operations_per_iteration"]),
            bytes_text(row["bytes_per_iteration"]),
            _number_text(row["burstiness"], signed=True),
            span_text(row["period_ns"]),
            ratio_text(row["active_ratio"]),
            _number_text(row["bursts_per_iteration"]),
            span_text(row["burst_ns"]),
            span_text(row["pause_ns"]),
        )
        for row in found[:MAX_TABLE_ROWS]
    ]
    columns = (
        ("Parallelism", "text"),
        ("Groups", ""),
        ("Operation mix", "text"),
        ("Message, median", ""),
        ("Largest", ""),
        ("Operations", ""),
        ("Bytes", ""),
        ("Burstiness", ""),
        ("Period", ""),
        ("Active", ""),
        ("Bursts", ""),
        ("Burst", ""),
        ("Pause", ""),
    )
    caption = (
        f"<b>Table {number}.</b> Communication signatures, the median over the communicators of a kind. Operations, "
        "bytes and bursts are of one rank in one iteration. Burstiness of the times between calls: -1 is a clock, 0 "
        "chance, towards 1 bursts. Active: share of the time in which a kernel ran. A pause is longer than a twentieth "
        "of the period."
    )
    return f'<div class="dense">{table(caption, columns, rows)}</div>'


def _number_text(value: object, *, signed: bool = False) -> str:
    if not isinstance(value, int | float):
        return cell(None)
    return f"{value:+.2f}" if signed else f"{value:.4g}"


def _mix_bar(mix: object) -> str:
    """Shares of the operations as a bar, and in words down to a twentieth."""
    if not isinstance(mix, list) or not mix:
        return cell(None)
    whole = sum(row["operations"] for row in mix)
    shares = [(str(row["op"] or "not known"), row["operations"] / whole) for row in mix]
    bar = "".join(f'<i data-op="{escape(op)}" style="flex-grow:{share:.4f}"></i>' for op, share in shares)
    words = ", ".join(f"{escape(op)} {share:.0%}" for op, share in shares if share >= _NAMED_SHARE)
    return f'<div class="mix">{bar}</div><small>{words}</small>'


def inspector_table(selection: Selection, number: int) -> str:
    """What NCCL Inspector told, beside the kernels."""
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
        f"<b>Table {number}.</b> NCCL Inspector. “busbw against kernels”: its bandwidth, waiting included, over that "
        f"of the kernels that nsys recorded, where both are known; 100% is agreement.{rest}"
    )
    return table(caption, columns, rows)

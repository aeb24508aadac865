"""The section of `report.html` that shows this run beside another; its content is that of `compare.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

from ncclscope_service.export.report_tables import table
from ncclscope_service.export.report_text import bandwidth_text, bytes_text, cell, count_text, ratio_text, span_text

MAX_CHANGES: Final = 40
MAX_PAIRS: Final = 24
"""Pairs of bars in the figure, those with the largest share of kernel time."""

Document = Mapping[str, object]
"""What `compare_document` gives, or a part of it."""

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
    """What the figures show: median busbw of both runs by key, with noise, and the length of each iteration."""
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

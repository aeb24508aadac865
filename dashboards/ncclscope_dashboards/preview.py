"""Draws a dashboard's panels from the answers of a real Prometheus, where there is no Grafana to do it.

Not a copy of Grafana: it shows that each query gives what its panel promises. Only `tools/screenshot` uses it.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

Json = dict[str, Any]

_COLOURS: Final = ("#7EB26D", "#EAB839", "#6ED0E0", "#EF843C", "#E24D42", "#1F78C1", "#BA43A9", "#705DA0", "#508642")
_CELL: Final = 46
"""Height of a row of the grid in pixels, its gap included: wider than Grafana's, for the legends' sake."""

_PREFIXES: Final = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))

_PAGE: Final = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>
<script src="{plotly}"></script><style>
body {{ margin: 0; padding: 14px; background: #f4f5f5; color: #24292e;
  font: 13px/1.4 Inter, system-ui, "Segoe UI", sans-serif; }}
h1 {{ font-size: 17px; margin: 0 0 10px; font-weight: 600; }}
h1 small {{ font-weight: 400; color: #6e7680; font-size: 12px; margin-left: 8px; }}
.grid {{ display: grid; grid-template-columns: repeat(24, 1fr); grid-auto-rows: {cell}px; column-gap: 8px; }}
.row {{ align-self: center; font-weight: 600; color: #464c54; }}
.panel {{ background: #fff; border: 1px solid #dfe1e5; border-radius: 3px; margin-bottom: 8px; overflow: hidden;
  display: flex; flex-direction: column; }}
.panel h2 {{ font-size: 12.5px; font-weight: 600; margin: 6px 10px 2px; }}
.body {{ flex: 1; min-height: 0; position: relative; overflow: hidden; }}
.stat b {{ display: block; text-align: center; font-size: 34px; font-weight: 500; margin-top: 14px; }}
.none {{ color: #8e949c; text-align: center; margin-top: 30px; }}
table {{ border-collapse: collapse; width: 100%; font-size: 12px; }}
th {{ text-align: left; color: #1f78c1; font-weight: 500; }}
td, th {{ padding: 3px 10px; border-bottom: 1px solid #edeef0; white-space: nowrap; }}
</style><h1>{title}<small>drawn from its queries on a Prometheus that scraped the demo</small></h1>
<div class="grid">{panels}</div>
<script>
for (const [id, figure] of Object.entries({figures}))
  Plotly.newPlot(id, figure.data, figure.layout, {{ displayModeBar: false }});
</script></html>"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One series of an answer."""

    labels: Mapping[str, str]
    times: Sequence[float]
    """Unix seconds."""
    values: Sequence[float]


Ask = Callable[[str, bool], Sequence[Series]]
"""An expression, and whether only its value now is asked."""


def preview(board: Json, ask: Ask, plotly: str) -> str:
    """The page of one dashboard; `plotly` is the address of plotly's script."""
    parts: list[str] = []
    figures: dict[str, Json] = {}
    for panel in board["panels"]:
        if panel["type"] == "row":
            parts.append(f'<div class="row" style="{_place(panel)}">{html.escape(panel["title"])}</div>')
            continue
        answers = [(target, ask(target["expr"], target["instant"])) for target in panel["targets"]]
        body, figure = _DRAWN[panel["type"]](panel, answers)
        if figure is not None:
            figures[f"panel-{panel['id']}"] = figure
        parts.append(
            f'<div class="panel {panel["type"]}" style="{_place(panel)}"><h2>{html.escape(panel["title"])}</h2>'
            f'<div class="body" id="panel-{panel["id"]}">{body}</div></div>'
        )
    return _PAGE.format(
        title=html.escape(board["title"]),
        plotly=plotly,
        cell=_CELL,
        panels="".join(parts),
        figures=json.dumps(figures).replace("</", "<\\/"),
    )


def shown(value: float, unit: str) -> str:
    """A value as a person reads it."""
    if math.isnan(value):
        return "not recorded"
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    if unit in ("short", "ppm"):
        return f"{value:.4g}" + (" ppm" if unit == "ppm" else "")
    name = {"Bps": "B/s", "bytes": "B", "s": "s", "ops": "/s"}[unit]
    size, prefix = next(((size, prefix) for size, prefix in _PREFIXES if abs(value) >= size), (1, ""))
    return f"{value / size:.3g} {prefix}{name}"


Answers = Sequence[tuple[Json, Sequence[Series]]]
Drawn = tuple[str, Json | None]
"""What stands in the panel, and the figure that is drawn into it."""

_NOTHING: Final[Drawn] = ('<p class="none">not recorded</p>', None)


def _place(panel: Json) -> str:
    at = panel["gridPos"]
    return f"grid-column: {at['x'] + 1} / span {at['w']}; grid-row: {at['y'] + 1} / span {at['h']}"


def _name(target: Json, series: Series) -> str:
    legend = target["legendFormat"]
    if legend == "__auto":
        return ", ".join(f"{name}={value}" for name, value in series.labels.items())
    return re.sub(r"\{\{(\w+)\}\}", lambda match: series.labels.get(match[1], ""), legend)


def _unit(panel: Json) -> str:
    unit: str = panel["fieldConfig"]["defaults"]["unit"]
    return unit


def _axis(panel: Json, values: Sequence[float]) -> Json:
    """A y axis in the panel's unit, between the panel's bounds."""
    unit, defaults = _unit(panel), panel["fieldConfig"]["defaults"]
    known = [value for value in values if not math.isnan(value)] or [0.0]
    low = defaults["min"] if defaults.get("min") is not None else min(known)
    high = max(*known, low + 1e-12) if defaults.get("max") is None else defaults["max"]
    pad = (high - low) * 0.06
    low = low if defaults.get("min") is not None else low - pad
    ticks = [low + (high + pad - low) * step / 4 for step in range(5)]
    return {
        "range": [low, high + pad],
        "tickvals": ticks,
        "ticktext": [shown(tick, unit) for tick in ticks],
        "gridcolor": "#edeef0",
        "zeroline": False,
    }


def _layout(**more: object) -> Json:
    return {
        "margin": {"l": 74, "r": 14, "t": 6, "b": 24},
        "font": {"size": 10.5, "color": "#52545c"},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "showlegend": True,
        "legend": {"orientation": "h", "y": -0.12, "font": {"size": 9.5}},
        "xaxis": {"type": "date", "gridcolor": "#f2f3f5", "tickformat": "%H:%M:%S", "nticks": 6},
        **more,
    }


def _dates(series: Series) -> list[float]:
    return [time * 1000 for time in series.times]


def _lines(panel: Json, answers: Answers) -> Drawn:
    data: list[Json] = []
    custom = panel["fieldConfig"]["defaults"]["custom"]
    is_stacked = custom.get("stacking") is not None
    dashed = {override["matcher"]["options"] for override in panel["fieldConfig"]["overrides"]}
    for target, found in answers:
        for series in found:
            colour = _COLOURS[len(data) % len(_COLOURS)]
            line = {"width": 1.4, "color": colour, "dash": "dash" if target["refId"] in dashed else "solid"}
            data.append(
                {"type": "scatter", "mode": "lines", "name": _name(target, series)[:60], "x": _dates(series),
                 "y": list(series.values), "line": line, **({"stackgroup": "one"} if is_stacked else {})}
            )  # fmt: skip
    if not data:
        return _NOTHING
    values = [value for each in data for value in each["y"]]
    if is_stacked:
        values = [sum(column) for column in zip(*(each["y"] for each in data), strict=False)] or values
    layout = _layout(yaxis=_axis(panel, values))
    if panel["options"]["legend"]["placement"] == "right":
        layout["legend"] = {"orientation": "v", "x": 1.01, "y": 1, "font": {"size": 9.5}}
    layout["legend"]["traceorder"] = "normal"
    return "", {"data": data[:40], "layout": layout}


def _number(panel: Json, answers: Answers) -> Drawn:
    found = [series for _, each in answers for series in each]
    if not found:
        return _NOTHING
    value = found[0].values[-1]
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    colour = [step["color"] for step in steps if step["value"] is None or value >= step["value"]][-1]
    return f'<b style="color: {_NAMED[colour]}">{html.escape(shown(value, _unit(panel)))}</b>', None


_NAMED: Final = {"green": "#3f9142", "orange": "#e07b00", "red": "#d1313d", "blue": "#1f60c4"}


def _map(panel: Json, answers: Answers) -> Drawn:
    rows = [(_name(target, series), series) for target, each in answers for series in each]
    if not rows:
        return _NOTHING
    rows.sort(key=lambda row: (len(row[0]), row[0]) if row[0].isdigit() else (0, row[0]), reverse=True)
    times = sorted({time for _, series in rows for time in series.times})
    lookup = [dict(zip(series.times, series.values, strict=True)) for _, series in rows]
    data: Json = {
        "type": "heatmap",
        "x": [time * 1000 for time in times],
        "y": [name for name, _ in rows],
        "z": [[of.get(time) for time in times] for of in lookup],
        "zmin": 0,
        "zmax": panel["fieldConfig"]["defaults"].get("max") or 1,
        "colorscale": [[0, "#eff3ff"], [0.35, "#9ecae1"], [0.7, "#4292c6"], [1, "#084594"]],
        "ygap": 1,
    }
    layout = _layout(yaxis={"type": "category", "tickfont": {"size": 9.5}})
    layout["margin"]["l"] = 110
    return "", {"data": [data], "layout": layout}


def _buckets(panel: Json, answers: Answers) -> Drawn:
    found = sorted((series for _, each in answers for series in each), key=lambda each: float(each.labels["le"]))
    if not found:
        return _NOTHING
    counts: list[list[float]] = []
    before = [0.0] * len(found[0].values)
    for series in found:
        counts.append([now - was for now, was in zip(series.values, before, strict=False)])
        before = list(series.values)
    names = [shown(float(series.labels["le"]), "s") if series.labels["le"] != "+Inf" else "more" for series in found]
    data: Json = {
        "type": "heatmap",
        "x": _dates(found[0]),
        "y": names,
        "z": counts,
        "colorscale": "Blues",
        "reversescale": True,
    }
    return "", {"data": [data], "layout": _layout(yaxis={"type": "category"})}


def _table(panel: Json, answers: Answers) -> Drawn:
    organize = next(each["options"] for each in panel["transformations"] if each["id"] == "organize")
    renamed: Mapping[str, str] = organize["renameByName"]
    units = {
        override["matcher"]["options"]: setting["value"]
        for override in panel["fieldConfig"]["overrides"]
        for setting in override["properties"]
        if setting["id"] == "unit"
    }
    keys = [name for name in renamed if not name.startswith("Value")]
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for target, found in answers:
        column = "Value" if len(answers) == 1 else f"Value #{target['refId']}"
        for series in found:
            shared = [name for name in keys if name in series.labels]
            key = _line_of(lines, keys, series)
            line = lines.setdefault(key, {})
            line |= {name: series.labels[name] for name in shared}
            line[column] = shown(series.values[-1], units.get(renamed.get(column, ""), "short"))
    if not lines:
        return _NOTHING
    head = "".join(f"<th>{html.escape(name)}</th>" for name in renamed.values())
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(line.get(name, ''))}</td>" for name in renamed) + "</tr>"
        for line in list(lines.values())[:14]
    )
    return f"<table><tr>{head}</tr>{body}</table>", None


def _line_of(
    lines: Mapping[tuple[str, ...], Mapping[str, str]], keys: Sequence[str], series: Series
) -> tuple[str, ...]:
    """The line of a series: the one that agrees in all labels that both have, else a new one."""
    for key, line in lines.items():
        if all(line.get(name, series.labels[name]) == series.labels[name] for name in keys if name in series.labels):
            return key
    return tuple(series.labels.get(name, "") for name in keys)


_DRAWN: Final[Mapping[str, Callable[[Json, Answers], Drawn]]] = {
    "timeseries": _lines,
    "stat": _number,
    "status-history": _map,
    "heatmap": _buckets,
    "table": _table,
}

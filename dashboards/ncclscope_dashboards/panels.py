"""The panels that the dashboards are made of: each a function from queries to a panel of the foundation SDK.

Position and id are the board's business. What is not known has no series, so every panel says "not recorded" there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Final

from grafana_foundation_sdk.models import (
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    statushistory,
    table,
    timeseries,
)

DATASOURCE: Final = common.DataSourceRef(type_val="prometheus", uid="${datasource}")
"""Chosen by the reader of a dashboard, never a fixed one."""

NO_VALUE: Final = "not recorded"

Step = tuple[float | None, str]
"""A threshold and the colour from it on; the first has no threshold."""

GOOD_IS_HIGH: Final[tuple[Step, ...]] = ((None, "red"), (0.6, "orange"), (0.8, "green"))
"""Of a share of the limit."""
WAIT: Final[tuple[Step, ...]] = ((None, "green"), (0.2, "orange"), (0.4, "red"))
"""Of a share of waiting."""
NONE_IS_GOOD: Final[tuple[Step, ...]] = ((None, "green"), (1, "red"))
PLAIN: Final[tuple[Step, ...]] = ((None, "blue"),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One query of a panel."""

    expr: str
    legend: str = ""
    is_instant: bool = False
    """Only its value now."""
    is_histogram: bool = False
    """Buckets by `le`, for a heat map."""
    is_dashed: bool = False
    """Drawn as a reference, not as a measurement."""

    def target(self, ref_id: str) -> prometheus.Dataquery:
        """The query as the SDK's type."""
        kind = prometheus.PromQueryFormat.TIME_SERIES
        if self.is_instant:
            kind = prometheus.PromQueryFormat.TABLE
        elif self.is_histogram:
            kind = prometheus.PromQueryFormat.HEATMAP
        return prometheus.Dataquery(
            expr=self.expr,
            legend_format=self.legend or "__auto",
            instant=self.is_instant,
            range_val=not self.is_instant,
            format_val=kind,
            editor_mode=prometheus.QueryEditorMode.CODE,
            datasource=DATASOURCE,
            ref_id=ref_id,
        )


def lines(
    title: str,
    description: str,
    unit: str,
    *queries: Query,
    width: int = 12,
    height: int = 8,
    is_stacked: bool = False,
    is_table: bool = False,
    lowest: float | None = 0,
    highest: float | None = None,
) -> dashboard.Panel:
    """Values over time; `is_table` puts a sorted legend with the last value, lowest and highest beside them."""
    legend = common.VizLegendOptions(
        display_mode=common.LegendDisplayMode.TABLE if is_table else common.LegendDisplayMode.LIST,
        placement=common.LegendPlacement.RIGHT if is_table else common.LegendPlacement.BOTTOM,
        show_legend=True,
        calcs=["lastNotNull", "min", "max"] if is_table else [],
    )
    custom = timeseries.FieldConfig(
        draw_style=common.GraphDrawStyle.LINE,
        line_width=1,
        fill_opacity=35 if is_stacked else 5,
        show_points=common.VisibilityMode.NEVER,
        span_nulls=False,
        stacking=common.StackingConfig(mode=common.StackingMode.NORMAL, group="A") if is_stacked else None,
    )
    panel = _panel("timeseries", title, description, unit, queries, width=width, height=height, custom=custom)
    defaults = _defaults(panel)
    defaults.min_val, defaults.max_val = lowest, highest
    tooltip = common.VizTooltipOptions(mode=common.TooltipDisplayMode.MULTI, sort=common.SortOrder.DESCENDING)
    panel.options = timeseries.Options(legend=legend, tooltip=tooltip)
    assert panel.field_config is not None
    panel.field_config.overrides = [
        _dashed(ref_id) for ref_id, query in zip(ascii_uppercase, queries, strict=False) if query.is_dashed
    ]
    return panel


def number(
    title: str,
    description: str,
    unit: str,
    expr: str,
    *,
    steps: Sequence[Step] = PLAIN,
    width: int = 4,
    height: int = 4,
    decimals: int | None = None,
) -> dashboard.Panel:
    """One number, with its course behind it."""
    panel = _panel("stat", title, description, unit, [Query(expr=expr)], width=width, height=height)
    _colour_by(panel, steps)
    _defaults(panel).decimals = decimals
    panel.options = stat.Options(
        graph_mode=common.BigValueGraphMode.AREA,
        color_mode=common.BigValueColorMode.VALUE,
        justify_mode=common.BigValueJustifyMode.AUTO,
        text_mode=common.BigValueTextMode.AUTO,
        reduce_options=common.ReduceDataOptions(calcs=["lastNotNull"]),
    )
    return panel


def history(
    title: str,
    description: str,
    unit: str,
    query: Query,
    *,
    steps: Sequence[Step],
    width: int = 24,
    height: int = 12,
    is_continuous: bool = True,
) -> dashboard.Panel:
    """A map: a row for each series, a cell for each moment; coloured by value, or by threshold."""
    custom = statushistory.FieldConfig(fill_opacity=90, line_width=0)
    panel = _panel("status-history", title, description, unit, [query], width=width, height=height, custom=custom)
    _colour_by(panel, steps)
    if is_continuous:
        defaults = _defaults(panel)
        defaults.color = dashboard.FieldColor(mode=dashboard.FieldColorModeId.CONTINUOUS_BLUES)
        defaults.min_val, defaults.max_val = 0, 1
    panel.max_data_points = 120
    panel.options = statushistory.Options(
        row_height=0.95,
        col_width=1,
        show_value=common.VisibilityMode.NEVER,
        per_page=64,
        legend=common.VizLegendOptions(show_legend=False),
    )
    return panel


def buckets(title: str, description: str, unit: str, expr: str, *, width: int = 12, height: int = 8) -> dashboard.Panel:
    """A histogram's buckets over time."""
    query = Query(expr=expr, legend="{{le}}", is_histogram=True)
    panel = _panel("heatmap", title, description, unit, [query], width=width, height=height)
    panel.options = heatmap.Options(
        calculate=False,
        color=heatmap.HeatmapColorOptions(
            mode=heatmap.HeatmapColorMode.SCHEME, scheme="Blues", exponent=0.5, steps=64, fill="dark-blue"
        ),
        cell_gap=1,
        y_axis=heatmap.YAxisConfig(unit=unit),
        tooltip=heatmap.HeatmapTooltip(mode=common.TooltipDisplayMode.SINGLE),
    )
    return panel


def rows(
    title: str,
    description: str,
    *queries: Query,
    renamed: Mapping[str, str],
    units: Mapping[str, str],
    hidden: Sequence[str] = (),
    links: Mapping[str, str] | None = None,
    width: int = 24,
    height: int = 8,
) -> dashboard.Panel:
    """A table of what the queries say now, a row for each set of labels.

    `renamed` is column to heading, `units` heading to unit, `links` heading to the address that its cells lead to.
    """
    panel = _panel("table", title, description, "short", queries, width=width, height=height)
    panel.options = table.Options(show_header=True)
    columns = [*hidden, "Time", "__name__", "instance"]
    panel.transformations = [
        dashboard.DataTransformerConfig(id_val="merge", options={}),
        dashboard.DataTransformerConfig(
            id_val="organize",
            options={
                "excludeByName": dict.fromkeys(columns, True),
                "indexByName": {name: place for place, name in enumerate(renamed)},
                "renameByName": dict(renamed),
            },
        ),
    ]
    assert panel.field_config is not None
    panel.field_config.overrides = [
        *(_by_name(name, "unit", unit) for name, unit in units.items()),
        *(_by_name(name, "links", [_cell_link(name, url)]) for name, url in (links or {}).items()),
    ]
    return panel


def _panel(
    kind: str,
    title: str,
    description: str,
    unit: str,
    queries: Sequence[Query],
    *,
    width: int,
    height: int,
    custom: object | None = None,
) -> dashboard.Panel:
    return dashboard.Panel(
        type_val=kind,
        title=title,
        description=description,
        datasource=DATASOURCE,
        grid_pos=dashboard.GridPos(h=height, w=width),
        targets=[query.target(ref_id) for ref_id, query in zip(ascii_uppercase, queries, strict=False)],
        field_config=dashboard.FieldConfigSource(
            defaults=dashboard.FieldConfig(unit=unit, custom=custom, no_value=NO_VALUE), overrides=[]
        ),
    )


def _defaults(panel: dashboard.Panel) -> dashboard.FieldConfig:
    assert panel.field_config is not None
    return panel.field_config.defaults


def _colour_by(panel: dashboard.Panel, steps: Sequence[Step]) -> None:
    defaults = _defaults(panel)
    defaults.color = dashboard.FieldColor(mode=dashboard.FieldColorModeId.THRESHOLDS)
    defaults.thresholds = dashboard.ThresholdsConfig(
        mode=dashboard.ThresholdsMode.ABSOLUTE,
        steps=[dashboard.Threshold(value=value, color=colour) for value, colour in steps],
    )


def _dashed(ref_id: str) -> dashboard.DashboardFieldConfigSourceOverrides:
    return dashboard.DashboardFieldConfigSourceOverrides(
        matcher=dashboard.MatcherConfig(id_val="byFrameRefID", options=ref_id),
        properties=[
            dashboard.DynamicConfigValue(id_val="custom.lineStyle", value={"fill": "dash", "dash": [6, 6]}),
            dashboard.DynamicConfigValue(id_val="custom.fillOpacity", value=0),
        ],
    )


def _by_name(name: str, what: str, value: object) -> dashboard.DashboardFieldConfigSourceOverrides:
    return dashboard.DashboardFieldConfigSourceOverrides(
        matcher=dashboard.MatcherConfig(id_val="byName", options=name),
        properties=[dashboard.DynamicConfigValue(id_val=what, value=value)],
    )


def _cell_link(name: str, url: str) -> dict[str, object]:
    return {"title": f"open this {name}", "url": url, "targetBlank": False}

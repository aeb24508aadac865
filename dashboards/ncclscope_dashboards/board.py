"""A dashboard: variables, annotations, links, and its panels in rows, each with a place and an id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from grafana_foundation_sdk.models import dashboard

from ncclscope_dashboards.panels import DATASOURCE
from ncclscope_dashboards.queries import JOB, KIND

WIDTH: Final = 24
TAG: Final = "ncclscope"
LIVE_PAGE: Final = "http://localhost:9798"
"""Where ncclscope's own page is unless somebody says otherwise; it serves the runbooks too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """A choice that the reader makes."""

    name: str
    label: str
    query: str
    """`label_values(metric{matchers}, label)`."""
    description: str
    is_multi: bool = True


JOB_VARIABLE: Final = Variable(
    name="job",
    label="Job",
    query="label_values(ncclscope_communicators, job)",
    description="Training jobs that the service knows",
)
PARALLELISM_VARIABLE: Final = Variable(
    name="parallelism",
    label="Parallelism",
    query=f"label_values(ncclscope_operations_total{{{JOB}}}, parallelism)",
    description="Kinds of communicators: TP, DP, PP, EP and so on",
)
COMMUNICATOR_VARIABLE: Final = Variable(
    name="communicator",
    label="Communicator",
    query=f"label_values(ncclscope_operations_total{{{KIND}}}, communicator)",
    description="Short names; the table at the end says what they stand for",
)
HOST_VARIABLE: Final = Variable(
    name="host",
    label="Host",
    query="label_values(ncclscope_agent_connected, host)",
    description="Hosts that an agent runs on",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """One dashboard to make."""

    uid: str
    title: str
    description: str
    variables: Sequence[Variable]
    rows: Sequence[tuple[str, Sequence[dashboard.Panel]]]
    """Heading and panels; a panel that does not fit beside its neighbour begins a new line."""

    def build(self) -> dashboard.Dashboard:
        """The dashboard as the SDK's type."""
        return dashboard.Dashboard(
            uid=self.uid,
            title=self.title,
            description=self.description,
            tags=[TAG],
            timezone="browser",
            editable=False,
            graph_tooltip=dashboard.DashboardCursorSync.CROSSHAIR,
            time=dashboard.DashboardDashboardTime(from_val="now-30m", to="now"),
            refresh="10s",
            schema_version=42,
            version=1,
            templating=dashboard.DashboardDashboardTemplating(
                list_val=[_datasource(), *(_query_variable(each) for each in self.variables), _live_page()]
            ),
            annotations=dashboard.AnnotationContainer(list_val=[_findings_annotation()]),
            links=_links(),
            panels=_placed(self.rows),
        )


def _placed(rows: Sequence[tuple[str, Sequence[dashboard.Panel]]]) -> list[dashboard.Panel | dashboard.RowPanel]:
    placed: list[dashboard.Panel | dashboard.RowPanel] = []
    top = 0
    for heading, panels in rows:
        position = dashboard.GridPos(x=0, y=top, w=WIDTH, h=1)
        placed.append(dashboard.RowPanel(title=heading, grid_pos=position, id_val=len(placed) + 1))
        top += 1
        left, tallest = 0, 0
        for panel in panels:
            assert panel.grid_pos is not None
            if left + panel.grid_pos.w > WIDTH:
                top, left, tallest = top + tallest, 0, 0
            panel.grid_pos.x, panel.grid_pos.y, panel.id_val = left, top, len(placed) + 1
            left, tallest = left + panel.grid_pos.w, max(tallest, panel.grid_pos.h)
            placed.append(panel)
        top += tallest
    return placed


def _datasource() -> dashboard.VariableModel:
    return dashboard.VariableModel(
        type_val=dashboard.VariableType.DATASOURCE,
        name="datasource",
        label="Data source",
        query="prometheus",
        description="The Prometheus that scrapes ncclscope",
        refresh=dashboard.VariableRefresh.ON_DASHBOARD_LOAD,
    )


def _query_variable(variable: Variable) -> dashboard.VariableModel:
    everything = dashboard.VariableOption(selected=True, text="All", value="$__all")
    return dashboard.VariableModel(
        type_val=dashboard.VariableType.QUERY,
        name=variable.name,
        label=variable.label,
        description=variable.description,
        datasource=DATASOURCE,
        definition=variable.query,
        query={"query": variable.query, "refId": f"variable-{variable.name}"},
        multi=variable.is_multi,
        include_all=True,
        all_value=".+",
        current=everything,
        refresh=dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED,
        sort=dashboard.VariableSort.NATURAL_ASC,
    )


def _live_page() -> dashboard.VariableModel:
    return dashboard.VariableModel(
        type_val=dashboard.VariableType.TEXTBOX,
        name="live_page",
        label="Live page",
        description="Where ncclscope's own page is, for the links; set it once and save the dashboard",
        query=LIVE_PAGE,
        current=dashboard.VariableOption(selected=True, text=LIVE_PAGE, value=LIVE_PAGE),
    )


def _findings_annotation() -> dashboard.AnnotationQuery:
    return dashboard.AnnotationQuery(
        name="Findings",
        datasource=DATASOURCE,
        enable=True,
        icon_color="red",
        expr=f'sum by (job, kind, severity) (ncclscope_findings{{{JOB}, severity!="info"}}) > 0',
        title_format="{{kind}}",
        text_format="{{severity}} in job {{job}}",
        tag_keys="kind,severity,job",
        step="10s",
    )


def _links() -> list[dashboard.DashboardLink]:
    return [
        dashboard.DashboardLink(
            title="ncclscope",
            type_val=dashboard.DashboardLinkType.DASHBOARDS,
            tags=[TAG],
            as_dropdown=True,
            include_vars=True,
            keep_time=True,
        ),
        _link("Live page and trace snapshot", "${live_page}/", "The only job, or the fleet; evidence, and a trace"),
        _link("Runbooks", "${live_page}/runbooks", "What each finding means and what to do"),
    ]


def _link(title: str, url: str, tooltip: str) -> dashboard.DashboardLink:
    kind = dashboard.DashboardLinkType.LINK
    return dashboard.DashboardLink(title=title, type_val=kind, url=url, tooltip=tooltip, target_blank=True)

"""Grafana-managed alert rules and a contact point.

Two steps each: A asks Prometheus for a number per job, group or agent, C says from which number on it is an alarm.
Annotations use `.Labels` and not `$labels`: Grafana takes a dollar sign in a provisioning file for a variable of its
environment. Source: Grafana documentation, "Provision Grafana" (using environment variables).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from grafana_foundation_sdk.models import alerting, common, expr, prometheus

from ncclscope_dashboards.board import LIVE_PAGE
from ncclscope_dashboards.queries import LARGE

FOLDER_UID: Final = "ncclscope"
FOLDER_TITLE: Final = "ncclscope"
GROUP: Final = "ncclscope"
DATASOURCE_UID: Final = "ncclscope-prometheus"
"""Alert rules need a fixed data source; `ncclscope grafana push --datasource` puts another in its place."""
CONTACT_POINT: Final = "ncclscope-webhook"
INTERVAL_SECONDS: Final = 10

Severity = Literal["critical", "warning", "info"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One rule: `query` above (or below) `limit` for `held`."""

    name: str
    query: str
    limit: float = 0
    is_below: bool = False
    held: str = "0s"
    severity: Severity = "warning"
    summary: str
    description: str
    runbook: str
    """Heading of the runbook."""
    dashboard: str
    """Uid of the dashboard that shows it."""
    is_alarm_without_data: bool = False


def _finding(kind: str) -> str:
    return f'sum by (job) (ncclscope_findings{{kind="{kind}"}})'


ALERTS: Final[tuple[Alert, ...]] = (
    Alert(
        name="NcclscopeHang",
        query=_finding("hang"),
        severity="critical",
        summary="The job stands still and somebody is missing",
        description="Job {{ .Labels.job }} has {{ .Values.A.Value }} communicators in which ranks wait for others.",
        runbook="hang",
        dashboard="ncclscope-job",
    ),
    Alert(
        name="NcclscopeMismatch",
        query=_finding("mismatch"),
        severity="critical",
        summary="Ranks of one communicator call different collectives",
        description="Job {{ .Labels.job }} has {{ .Values.A.Value }} communicators whose ranks disagree.",
        runbook="mismatch",
        dashboard="ncclscope-job",
    ),
    Alert(
        name="NcclscopeStraggler",
        query=_finding("late_rank"),
        summary="A rank keeps others waiting",
        description="Job {{ .Labels.job }} has a rank that comes last; the live page names it.",
        runbook="late_rank",
        dashboard="ncclscope-ranks",
    ),
    Alert(
        name="NcclscopeSlowLink",
        query=_finding("slow_link"),
        summary="The wires of a host are slow",
        description="Groups of job {{ .Labels.job }} that touch one host move less than their siblings.",
        runbook="slow_link",
        dashboard="ncclscope-job",
    ),
    Alert(
        name="NcclscopeBandwidthDrop",
        query=_finding("bandwidth_drop"),
        summary="Groups move less than they did",
        description="Bandwidth of groups of job {{ .Labels.job }} has fallen below their own past.",
        runbook="bandwidth_drop",
        dashboard="ncclscope-job",
    ),
    Alert(
        name="NcclscopeEfficiencyLow",
        query=f'min by (job, parallelism) (ncclscope_efficiency_ratio{{reference="topology", {LARGE}}})',
        limit=0.4,
        is_below=True,
        held="10m",
        summary="A group moves far less than the wires allow",
        description="The slowest {{ .Labels.parallelism }} group of job {{ .Labels.job }} reaches "
        "{{ humanizePercentage .Values.A.Value }} of the limit by topology.",
        runbook="below_limit",
        dashboard="ncclscope-job",
    ),
    Alert(
        name="NcclscopeBandwidthDrift",
        query=f"min by (job, parallelism) (ncclscope_bandwidth_drift_ratio{{{LARGE}}})",
        limit=-0.25,
        is_below=True,
        held="15m",
        severity="info",
        summary="A group has become slower than the best that it has shown",
        description="A {{ .Labels.parallelism }} group of job {{ .Labels.job }} is off its best by "
        "{{ humanizePercentage .Values.A.Value }}.",
        runbook="bandwidth_drop",
        dashboard="ncclscope-communicator",
    ),
    Alert(
        name="NcclscopeClockFault",
        query="max(ncclscope_clock_violation_ratio)",
        limit=0.01,
        held="1m",
        summary="Clocks, or matches, contradict causality",
        description="{{ humanizePercentage .Values.A.Value }} of the order checks fail: ranks cannot be compared.",
        runbook="clock_fault",
        dashboard="ncclscope-clocks",
    ),
    Alert(
        name="NcclscopeAgentDown",
        query="1 - ncclscope_agent_connected",
        held="2m",
        summary="An agent is gone",
        description="The agent {{ .Labels.agent }} on {{ .Labels.host }} has no session.",
        runbook="blind",
        dashboard="ncclscope-health",
    ),
    Alert(
        name="NcclscopeDataLost",
        query="sum by (reason) (increase(ncclscope_gaps_total[5m]))",
        summary="Input was lost",
        description="Stretches of logs or exports were lost: {{ .Labels.reason }}.",
        runbook="blind",
        dashboard="ncclscope-health",
    ),
    Alert(
        name="NcclscopeAlignmentPoor",
        query="min by (job) (ncclscope_alignment_matched_ratio)",
        limit=0.9,
        is_below=True,
        held="5m",
        summary="Log lines and kernels do not fit together",
        description="Of job {{ .Labels.job }} only {{ humanizePercentage .Values.A.Value }} of the captured operations "
        "found their kernel.",
        runbook="blind",
        dashboard="ncclscope-health",
    ),
    Alert(
        name="NcclscopeServiceDown",
        query="count(ncclscope_build_info)",
        limit=1,
        is_below=True,
        held="1m",
        severity="critical",
        summary="ncclscope is not scraped",
        description="No service of ncclscope answers Prometheus: nothing watches the jobs.",
        runbook="blind",
        dashboard="ncclscope-health",
        is_alarm_without_data=True,
    ),
)


def rule_group() -> alerting.RuleGroup:
    """All rules as one group, as Grafana's provisioning API takes it."""
    return alerting.RuleGroup(
        title=GROUP, folder_uid=FOLDER_UID, interval=INTERVAL_SECONDS, rules=[_rule(alert) for alert in ALERTS]
    )


def contact_point() -> alerting.ContactPoint:
    """A webhook whose address Grafana reads from its environment."""
    return alerting.ContactPoint(
        uid=CONTACT_POINT,
        name=CONTACT_POINT,
        type_val="webhook",
        settings={"url": "$NCCLSCOPE_WEBHOOK_URL", "httpMethod": "POST"},
        disable_resolve_message=False,
    )


def _rule(alert: Alert) -> alerting.Rule:
    return alerting.Rule(
        uid=f"ncclscope-{alert.name.removeprefix('Ncclscope').lower()}",
        title=alert.name,
        condition="C",
        data=[_prometheus_step(alert), _threshold_step(alert)],
        for_val=alert.held,
        no_data_state="Alerting" if alert.is_alarm_without_data else "OK",
        exec_err_state="Error",
        folder_uid=FOLDER_UID,
        rule_group=GROUP,
        org_id=1,
        is_paused=False,
        labels={"severity": alert.severity, "source": "ncclscope"},
        annotations={
            "summary": alert.summary,
            "description": alert.description,
            "runbook_url": f"{LIVE_PAGE}/runbooks#{alert.runbook}",
            # Grafana refuses the one without the other; 2 is the first panel, below the heading.
            "__dashboardUid__": alert.dashboard,
            "__panelId__": "2",
        },
    )


def _prometheus_step(alert: Alert) -> alerting.Query:
    return alerting.Query(
        ref_id="A",
        datasource_uid=DATASOURCE_UID,
        relative_time_range=alerting.RelativeTimeRange(from_val=600, to=0),
        model=prometheus.Dataquery(
            expr=alert.query,
            instant=True,
            range_val=False,
            ref_id="A",
            editor_mode=prometheus.QueryEditorMode.CODE,
            datasource=common.DataSourceRef(type_val="prometheus", uid=DATASOURCE_UID),
        ),
    )


def _threshold_step(alert: Alert) -> alerting.Query:
    evaluator = expr.ExprTypeThresholdConditionsEvaluator(
        type_val="lt" if alert.is_below else "gt", params=[alert.limit]
    )
    return alerting.Query(
        ref_id="C",
        datasource_uid="__expr__",
        relative_time_range=alerting.RelativeTimeRange(from_val=0, to=0),
        model=expr.TypeThreshold(
            expression="A",
            conditions=[expr.ExprTypeThresholdConditions(evaluator=evaluator)],
            ref_id="C",
            datasource=common.DataSourceRef(type_val="__expr__", uid="__expr__"),
        ),
    )

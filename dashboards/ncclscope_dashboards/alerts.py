"""Grafana-managed alert rules, made of Prometheus's in deploy/prometheus, and a contact point.

Three steps each: B asks Prometheus what its rule asks, A turns every series of the answer into a 1, C fires on it. What
a recording rule gives is asked in full, so that Grafana needs no rules in Prometheus.
Annotations use `.Labels` and not `$labels`: Grafana takes a dollar sign in a provisioning file for a variable of its
environment. Source: Grafana documentation, "Provision Grafana" (using environment variables).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml
from grafana_foundation_sdk.models import alerting, common, expr, prometheus

FOLDER_UID: Final = "ncclscope"
FOLDER_TITLE: Final = "ncclscope"
GROUP: Final = "ncclscope"
DATASOURCE_UID: Final = "ncclscope-prometheus"
"""Alert rules need a fixed data source; `ncclscope grafana push --datasource` puts another in its place."""
CONTACT_POINT: Final = "ncclscope-webhook"
INTERVAL_SECONDS: Final = 10

_PROMETHEUS: Final = Path(__file__).resolve().parents[2] / "deploy" / "prometheus"

_ASKED: Final = re.compile(r"\{\{ with printf [^}]*\| query \}\}.*?\{\{ end \}\}")
"""What a text asks Prometheus for: Grafana's templates cannot. Source: Grafana's "Alert template reference"."""

_DASHBOARD_OF_RUNBOOK: Final = {
    "late_rank": "ncclscope-ranks",
    "clock_fault": "ncclscope-clocks",
    "blind": "ncclscope-health",
    "service": "ncclscope-health",
}
"""Where an alert shows, by heading of its runbook; else the job's dashboard."""


def rule_group() -> alerting.RuleGroup:
    """All rules as one group, as Grafana's provisioning API takes it."""
    recorded = {rule["record"]: _one_line(rule["expr"]) for rule in _rules_of("ncclscope_recording.yml")}
    return alerting.RuleGroup(
        title=GROUP,
        folder_uid=FOLDER_UID,
        interval=INTERVAL_SECONDS,
        rules=[_rule(rule, recorded) for rule in _rules_of("ncclscope_alerts.yml")],
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


def _rules_of(file: str) -> Iterator[dict[str, Any]]:
    for group in yaml.safe_load((_PROMETHEUS / file).read_text())["groups"]:
        yield from group["rules"]


def _rule(rule: Mapping[str, Any], recorded: Mapping[str, str]) -> alerting.Rule:
    asked = in_full(_one_line(rule["expr"]), recorded)
    notes = {name: _without_dollars(text) for name, text in rule["annotations"].items()}
    heading = notes["runbook_url"].partition("#")[2]
    return alerting.Rule(
        uid=f"ncclscope-{rule['alert'].removeprefix('Ncclscope').lower()}",
        title=rule["alert"],
        condition="C",
        data=[_ask("B", asked), _ask("A", f"({asked}) ^ 0"), _threshold_step()],
        for_val=rule.get("for", "0s"),
        no_data_state="OK",
        exec_err_state="Error",
        folder_uid=FOLDER_UID,
        rule_group=GROUP,
        org_id=1,
        is_paused=False,
        labels={"source": "ncclscope", **rule.get("labels", {})},
        annotations={
            **notes,
            # Grafana refuses the one without the other; 2 is the first panel, below the heading.
            "__dashboardUid__": _DASHBOARD_OF_RUNBOOK.get(heading, "ncclscope-job"),
            "__panelId__": "2",
        },
    )


def in_full(expr: str, recorded: Mapping[str, str]) -> str:
    """The expression with what it takes from recording rules put in; a matcher goes to the series inside."""

    def put_in(match: re.Match[str]) -> str:
        inner = recorded[match[1]]
        if match[2]:
            inner = re.sub(r"(ncclscope_\w+)(?:\{([^}]*)\})?", lambda series: _with(series, match[2]), inner)
        return f"({inner})"

    names = "|".join(re.escape(name) for name in sorted(recorded, key=len, reverse=True))
    return re.sub(rf"({names})(?:\{{([^}}]*)\}})?", put_in, expr)


def _with(series: re.Match[str], matchers: str) -> str:
    return f"{series[1]}{{{', '.join(filter(None, (series[2], matchers)))}}}"


def _one_line(expr: str) -> str:
    return " ".join(expr.split())


def _without_dollars(text: str) -> str:
    return _ASKED.sub("", text).replace("$labels", ".Labels").replace("$value", ".Values.B.Value")


def _ask(ref_id: str, asked: str) -> alerting.Query:
    return alerting.Query(
        ref_id=ref_id,
        datasource_uid=DATASOURCE_UID,
        relative_time_range=alerting.RelativeTimeRange(from_val=600, to=0),
        model=prometheus.Dataquery(
            expr=asked,
            instant=True,
            range_val=False,
            ref_id=ref_id,
            editor_mode=prometheus.QueryEditorMode.CODE,
            datasource=common.DataSourceRef(type_val="prometheus", uid=DATASOURCE_UID),
        ),
    )


def _threshold_step() -> alerting.Query:
    evaluator = expr.ExprTypeThresholdConditionsEvaluator(type_val="gt", params=[0])
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

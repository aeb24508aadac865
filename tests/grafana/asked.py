"""What the dashboards and alert rules in the repository ask Prometheus, one entry for each query."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import promql_parser

DASHBOARDS: Final = Path(__file__).resolve().parents[2] / "dashboards"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One query."""

    where: str
    """File, and the title of the panel, variable, annotation or rule."""
    expr: str
    is_instant: bool = False

    def filled(self, *, interval: str = "1m") -> str:
        """The query with Grafana's variables replaced: every choice is "all"."""
        text = self.expr.replace("$__rate_interval", interval).replace("$__interval", interval)
        return re.sub(r"\$\{?\w+\}?", ".+", text)


def dashboards() -> dict[str, dict[str, Any]]:
    """The dashboards by uid."""
    found = (json.loads(path.read_text()) for path in sorted((DASHBOARDS / "grafana").glob("ncclscope-*.json")))
    return {each["uid"]: each for each in found}


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    """The panels of a dashboard, headings left out."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def rule_group() -> dict[str, Any]:
    """The alert rules, as the API takes them."""
    group: dict[str, Any] = json.loads((DASHBOARDS / "grafana" / "alert-rules.json").read_text())
    return group


def panel_queries() -> list[Asked]:
    """Every query of every panel."""
    return [
        Asked(where=f"{uid}: {panel['title']}", expr=target["expr"], is_instant=target["instant"])
        for uid, board in dashboards().items()
        for panel in panels(board)
        for target in panel["targets"]
    ]


def variable_queries() -> list[Asked]:
    """The series that variables take their choices from."""
    return [
        Asked(where=f"{uid}: variable {variable['name']}", expr=match[1])
        for uid, board in dashboards().items()
        for variable in board["templating"]["list"]
        if variable["type"] == "query" and (match := re.fullmatch(r"label_values\((.*), \w+\)", variable["definition"]))
    ]


def annotation_queries() -> list[Asked]:
    """What is drawn across the panels."""
    return [
        Asked(where=f"{uid}: annotation {annotation['name']}", expr=annotation["expr"])
        for uid, board in dashboards().items()
        for annotation in board["annotations"]["list"]
    ]


def alert_queries() -> list[Asked]:
    """The question of every alert rule."""
    return [
        Asked(where=f"alert {rule['title']}", expr=rule["data"][0]["model"]["expr"], is_instant=True)
        for rule in rule_group()["rules"]
    ]


def judged(expr: str) -> str:
    """What an alert compares with a number: without the comparison it has an answer while all is well, too."""
    parsed = promql_parser.parse(expr)
    if isinstance(parsed, promql_parser.BinaryExpr) and isinstance(parsed.rhs, promql_parser.NumberLiteral):
        return parsed.lhs.prettify()
    return expr


def all_queries() -> list[Asked]:
    """All of them."""
    return [*panel_queries(), *variable_queries(), *annotation_queries(), *alert_queries()]

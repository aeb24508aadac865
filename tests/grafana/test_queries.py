"""Every query of dashboards and alert rules: it parses, and names only metrics and labels that are exposed."""

from __future__ import annotations

import re
from collections.abc import Iterator

import promql_parser
import pytest
from grafana.asked import Asked, all_queries

from ncclscope_service.metrics.table import METRICS_BY_NAME, Kind, Metric

_TARGET_LABELS = {"instance"}
"""Labels that Prometheus adds when it scrapes."""
_OF_THE_PROCESS = {"process_cpu_seconds_total", "process_resident_memory_bytes"}
"""prometheus_client's own metrics, which `/metrics` carries too."""

each_query = pytest.mark.parametrize("asked", all_queries(), ids=lambda asked: asked.where)


@each_query
def test_a_query_parses(asked: Asked) -> None:
    promql_parser.parse(asked.filled())


def test_a_query_of_the_wrong_type_would_be_refused() -> None:
    with pytest.raises(ValueError, match="matrix"):
        promql_parser.parse("rate(ncclscope_operations_total)")


@each_query
def test_a_query_names_only_what_is_exposed(asked: Asked) -> None:
    parsed = promql_parser.parse(asked.filled())
    known = set(_TARGET_LABELS)
    for selector in selectors(parsed):
        assert selector.name is not None
        if selector.name in _OF_THE_PROCESS:
            continue
        labels = labels_of(selector.name)
        known |= labels
        for matcher in selector.matchers.matchers:
            assert matcher.name in labels, f"{selector.name} has no label {matcher.name}"
    for label in grouped_by(asked.expr):
        assert label in known, f"no metric in it has a label {label}"


def labels_of(name: str) -> set[str]:
    """The labels of a series by the table of metrics; fails on a name that is not exposed."""
    for metric in METRICS_BY_NAME.values():
        if name in exposed_names(metric):
            return set(metric.labels) | ({"le"} if name.endswith("_bucket") else set())
    pytest.fail(f"{name} is not exposed")


def exposed_names(metric: Metric) -> set[str]:
    if metric.kind is Kind.HISTOGRAM:
        return {f"{metric.name}_{part}" for part in ("bucket", "sum", "count")}
    return {metric.exposed_name}


def selectors(expr: promql_parser.Expr) -> Iterator[promql_parser.VectorSelector]:
    """All series that an expression selects."""
    if isinstance(expr, promql_parser.VectorSelector):
        yield expr
    elif isinstance(expr, promql_parser.MatrixSelector):
        yield expr.vector_selector
    elif isinstance(expr, promql_parser.BinaryExpr):
        yield from selectors(expr.lhs)
        yield from selectors(expr.rhs)
    elif isinstance(expr, promql_parser.Call):
        for argument in expr.args:
            yield from selectors(argument)
    elif isinstance(expr, promql_parser.AggregateExpr | promql_parser.ParenExpr | promql_parser.UnaryExpr):
        yield from selectors(expr.expr)


def grouped_by(text: str) -> set[str]:
    lists = re.findall(r"\b(?:by|on|ignoring|without) ?\(([^)]*)\)", text)
    return {label.strip() for each in lists for label in each.split(",") if label.strip()}

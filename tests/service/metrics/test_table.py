"""The table of metrics keeps Prometheus's conventions, and the documentation keeps up with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from service.detect.test_settings import check_documented

from ncclscope_service.metrics.table import METRICS, METRICS_BY_NAME, Kind, Metric

_ONLY_BOUNDED = {"source",
    "job", "communicator", "parallelism", "op", "size_class", "reference", "rank", "comm_id", "size", "identity",
    "hosts", "match", "reason", "family", "host", "agent", "kind", "severity", "version",
    "outcome", "part", "percentile", "bound", "ranks", "receiver", "where",
}  # fmt: skip
_BASE_UNITS = {"", "seconds", "bytes", "ratio", "bytes_per_second"}


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_a_metric_keeps_the_conventions(metric: Metric) -> None:
    assert re.fullmatch(r"ncclscope_[a-z]+(_[a-z]+)*", metric.name)
    assert metric.unit in _BASE_UNITS
    assert metric.name.endswith(metric.unit)
    assert not metric.name.endswith("_total"), "the exposition adds it"
    assert metric.exposed_name.endswith("_total") == (metric.kind is Kind.COUNTER)
    assert metric.help.endswith("."), "the help is a sentence"
    assert metric.bound
    assert set(metric.labels) <= _ONLY_BOUNDED
    assert len(set(metric.labels)) == len(metric.labels)


def test_names_are_unique() -> None:
    assert len(METRICS_BY_NAME) == len(METRICS)


def test_the_hash_of_a_communicator_is_a_label_of_its_info_only() -> None:
    assert [metric.name for metric in METRICS if "comm_id" in metric.labels] == ["ncclscope_communicator_info"]


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_histograms_have_at_most_twelve_buckets_and_are_never_per_communicator_or_rank(metric: Metric) -> None:
    assert (metric.kind is Kind.HISTOGRAM) == bool(metric.buckets)
    assert len(metric.buckets) + 1 <= 12
    assert list(metric.buckets) == sorted(set(metric.buckets))
    if metric.kind is Kind.HISTOGRAM:
        assert metric.labels == ("job", "parallelism", "op")


def test_every_metric_is_documented(repository: Path) -> None:
    rows = ["| metric | kind | labels | means | series are bounded by |", "|---|---|---|---|---|"]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels) or "none"
        rows.append(f"| `{metric.exposed_name}` | {metric.kind} | {labels} | {metric.help} | {metric.bound} |")
    check_documented(repository / "docs" / "metrics.md", "metrics", "".join(f"{row}\n" for row in rows))

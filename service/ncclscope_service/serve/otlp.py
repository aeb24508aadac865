"""Metrics and findings by OTLP over HTTP, for those without Prometheus (the extra `otlp`).

Metrics have the names and labels of `/metrics`, counters with their `_total`; findings are log records. Headers,
certificates and time limits come from the variables of OpenTelemetry, as does the pause between two exports.
*Source:* OpenTelemetry Protocol 1.5; "OTLP Exporter Configuration" and "Environment Variable Specification".
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Final

import anyio
import numpy as np
import structlog
from anyio import to_thread
from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk._logs.export import LogRecordExportResult
from opentelemetry.sdk.metrics import export as sdk
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from ncclscope_service.metrics.scrape import MetricsView
from ncclscope_service.metrics.table import METRICS, Kind, Metric
from ncclscope_service.serve.notify import Answer, Send, page_of, runbook_of
from ncclscope_service.show.finding_events import FindingEvent

_log = structlog.get_logger(__name__)

_SCOPE: Final = InstrumentationScope("ncclscope")
_RESOURCE: Final = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", "ncclscope")})
_SEVERITIES: Final = {
    "critical": SeverityNumber.ERROR,
    "warning": SeverityNumber.WARN,
    "info": SeverityNumber.INFO,
}
_UNITS: Final = {"seconds": "s", "bytes": "By", "bytes_per_second": "By/s", "ratio": "1", "": "1"}
"""As UCUM writes them."""

Push = Callable[[Callable[[], MetricsView]], Coroutine[object, object, None]]
"""Exports what the function gives, now and then, until it is cancelled."""


def otlp_sender(url: str) -> Send:
    """Sends findings to a collector at that address as log records named `ncclscope.finding`."""
    exporter = OTLPLogExporter(endpoint=f"{url.rstrip('/')}/v1/logs")

    def send(event: FindingEvent, page: str) -> tuple[Answer, str]:
        result = exporter.export([ReadableLogRecord(_record(event, page), _RESOURCE, _SCOPE)])
        is_taken = result is LogRecordExportResult.SUCCESS
        return (Answer.TAKEN, "taken") if is_taken else (Answer.LATER, "the collector did not take it")

    return send


def otlp_metrics(url: str) -> Push:
    """Exports all metrics every `OTEL_METRIC_EXPORT_INTERVAL` milliseconds, a minute by default."""
    exporter = OTLPMetricExporter(endpoint=f"{url.rstrip('/')}/v1/metrics")
    pause = float(os.environ.get("OTEL_METRIC_EXPORT_INTERVAL", "60000")) * 1e-3

    async def push(view: Callable[[], MetricsView]) -> None:
        started_ns, is_taken = time.time_ns(), True
        while True:
            export = partial(_export, exporter, view(), started_ns, time.time_ns())
            was_taken, is_taken = is_taken, await to_thread.run_sync(export, abandon_on_cancel=True)
            if was_taken and not is_taken:
                _log.warning("otlp_metrics_not_taken")
            await anyio.sleep(pause)

    return push


def _export(exporter: OTLPMetricExporter, view: MetricsView, started_ns: int, now_ns: int) -> bool:
    return exporter.export(metrics_data(view, started_ns, now_ns)) is sdk.MetricExportResult.SUCCESS


def metrics_data(view: MetricsView, started_ns: int, now_ns: int) -> sdk.MetricsData:
    """The view as OpenTelemetry has it; counters and histograms are cumulative since `started_ns`."""
    metrics = [each for metric in METRICS for each in _metric(metric, view, started_ns, now_ns)]
    return sdk.MetricsData([sdk.ResourceMetrics(_RESOURCE, [sdk.ScopeMetrics(_SCOPE, metrics, "")], "")])


def _metric(metric: Metric, view: MetricsView, started_ns: int, now_ns: int) -> Iterator[sdk.Metric]:
    cumulative = sdk.AggregationTemporality.CUMULATIVE
    data: sdk.Sum | sdk.Gauge | sdk.Histogram
    if metric.kind is Kind.HISTOGRAM:
        points = []
        for each in view.histograms.get(metric.name, ()):
            own = (each.labels.job, each.labels.parallelism, each.labels.op)
            counts = np.diff(each.cumulative, prepend=0).tolist()
            points.append(
                sdk.HistogramDataPoint(
                    attributes=dict(zip(metric.labels, own, strict=True)),
                    start_time_unix_nano=started_ns,
                    time_unix_nano=now_ns,
                    count=each.cumulative[-1],
                    sum=each.sum,
                    bucket_counts=counts,
                    explicit_bounds=metric.buckets,
                    min=float("nan"),
                    max=float("nan"),
                )
            )
        data, is_empty = sdk.Histogram(points, cumulative), not points
    else:
        numbers = list(_numbers(metric, view, started_ns, now_ns))
        data = sdk.Gauge(numbers) if metric.kind is Kind.GAUGE else sdk.Sum(numbers, cumulative, is_monotonic=True)
        is_empty = not numbers
    if not is_empty:
        yield sdk.Metric(metric.exposed_name, metric.help, _UNITS[metric.unit], data)


def _numbers(metric: Metric, view: MetricsView, started_ns: int, now_ns: int) -> Iterator[sdk.NumberDataPoint]:
    samples = view.samples.get(metric.name)
    if samples is None:
        return
    for labels, value in zip(samples.labels, samples.values.tolist(), strict=True):
        if not math.isnan(value):  # what is not known is absent
            yield sdk.NumberDataPoint(dict(zip(metric.labels, labels, strict=True)), started_ns, now_ns, value)


def _record(event: FindingEvent, page: str) -> LogRecord:
    finding = event.finding
    return LogRecord(
        timestamp=finding.since_ns if finding.until_ns is None else finding.until_ns,
        observed_timestamp=time.time_ns(),
        severity_text=finding.severity,
        severity_number=_SEVERITIES[finding.severity],
        body=finding.summary,
        event_name="ncclscope.finding",
        attributes={
            "event": str(event.event),
            "id": event.id,
            "kind": finding.kind,
            "job": finding.job,
            "ranks": finding.ranks,
            "hosts": finding.hosts,
            "confidence": finding.confidence,
            "page": page_of(event, page),
            "runbook": runbook_of(event, page),
        },
    )

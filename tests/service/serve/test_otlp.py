"""OTLP: a real receiver over HTTP gets what `/metrics` has, under the same names, and findings as log records."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import anyio
import pytest
from anyio import to_thread
from google.protobuf.json_format import MessageToDict  # type: ignore[import-untyped]  # it carries no types
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from prometheus_client.parser import text_string_to_metric_families
from service import fake_service as fake
from service.show.test_finding_events import LATE

from ncclscope_service.metrics.exposition import ColumnWriter
from ncclscope_service.serve.notify import Answer
from ncclscope_service.serve.otlp import otlp_metrics, otlp_sender
from ncclscope_service.show.finding_events import FindingChange, FindingEvent

OPENED = FindingEvent(event=FindingChange.OPENED, id="a", finding=LATE)

Sample = tuple[str, frozenset[tuple[str, str]]]


@dataclass
class Collector:
    """What a receiver got."""

    url: str = ""
    metrics: list[ExportMetricsServiceRequest] = field(default_factory=list[ExportMetricsServiceRequest])
    logs: list[ExportLogsServiceRequest] = field(default_factory=list[ExportLogsServiceRequest])
    headers: dict[str, str] = field(default_factory=dict[str, str])
    has_metrics: threading.Event = field(default_factory=threading.Event)


@contextmanager
def collecting(status: int = 200) -> Generator[Collector]:
    """A collector of OpenTelemetry as far as OTLP over HTTP goes, which answers with that status."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            collector.headers = dict(self.headers)
            if self.path == "/v1/metrics":
                collector.metrics.append(ExportMetricsServiceRequest.FromString(body))
                collector.has_metrics.set()
            elif self.path == "/v1/logs":
                collector.logs.append(ExportLogsServiceRequest.FromString(body))
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    collector.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def scraped(service: fake.FakeService) -> dict[Sample, float]:
    """What a scrape of the same moment gives; of histograms the counts and sums."""
    text = ColumnWriter().write(service.metrics(), openmetrics=False).decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("ncclscope_") and not sample.name.endswith("_bucket")
    }


def exported(request: ExportMetricsServiceRequest) -> dict[Sample, float]:
    found: dict[Sample, float] = {}
    for metric in request.resource_metrics[0].scope_metrics[0].metrics:
        numbers: Any = (*metric.sum.data_points, *metric.gauge.data_points)
        for point in numbers:
            found[metric.name, labels_of(point)] = point.as_double
        for point in metric.histogram.data_points:
            assert sum(point.bucket_counts) == point.count
            found[f"{metric.name}_count", labels_of(point)] = point.count
            found[f"{metric.name}_sum", labels_of(point)] = point.sum
    return found


def labels_of(point: Any) -> frozenset[tuple[str, str]]:
    return frozenset((each.key, each.value.string_value) for each in point.attributes)


@pytest.mark.asyncio
async def test_a_collector_gets_the_metrics_of_a_scrape_under_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20t")
    service = fake.small(fake.FakeService())
    view = service.metrics()
    with collecting() as collector, anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(otlp_metrics(collector.url), lambda: view)
            await to_thread.run_sync(collector.has_metrics.wait)
            tasks.cancel_scope.cancel()
    assert collector.headers["authorization"] == "Bearer t"
    assert exported(collector.metrics[0]) == pytest.approx(scraped(service))


def test_a_finding_is_a_log_record_that_leads_to_the_page() -> None:
    with collecting() as collector:
        assert otlp_sender(collector.url)(OPENED, "http://scope") == (Answer.TAKEN, "taken")
    (record,) = MessageToDict(collector.logs[0])["resourceLogs"][0]["scopeLogs"][0]["logRecords"]
    attributes = {each["key"]: each["value"] for each in record["attributes"]}
    assert (record["body"]["stringValue"], record["severityText"]) == (LATE.summary, LATE.severity)
    assert record["eventName"] == "ncclscope.finding"
    assert attributes["ranks"] == {"arrayValue": {"values": [{"intValue": "5"}]}}
    assert attributes["page"] == {"stringValue": "http://scope/#/job/j/finding/late_rank/5"}


def test_a_collector_that_refuses_is_asked_again_later() -> None:
    with collecting(status=400) as collector:
        answer, _ = otlp_sender(collector.url)(OPENED, "http://scope")
    assert answer is Answer.LATER

"""The bytes of `/metrics`: Prometheus text or OpenMetrics, as the scraper asks, gzip at level 1.

prometheus_client compresses at level 9, which costs nine times the CPU of level 1 for a fifth less bytes. What was
written of a view is kept until the next one: two scrapers of one tick cost as much as one.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics
from prometheus_client.exposition import choose_encoder

from ncclscope_service.column_writer import END, ColumnWriter
from ncclscope_service.metrics import MetricsView

_GZIP_LEVEL: Final = 1
_OPENMETRICS: Final = "application/openmetrics-text"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposition:
    """The body of an answer to a scrape."""

    body: bytes
    content_type: str
    is_gzipped: bool


class Scrapes:
    """Answers scrapes; one thread at a time. `with_process` adds prometheus_client's `process_*` metrics."""

    def __init__(self, *, with_process: bool = False) -> None:
        # Prometheus before created-timestamp ingestion would store each `_created` as a series of its own.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._writer = ColumnWriter()
        self._registry = CollectorRegistry(auto_describe=False)
        if with_process:
            ProcessCollector(registry=self._registry)
        self._view: MetricsView | None = None
        self._answers: dict[tuple[str, bool], Exposition] = {}

    def answer(self, view: MetricsView, *, accept: str, accept_encoding: str) -> Exposition:
        """The view in the form that the request's headers ask for; kept as long as the same view is asked for."""
        if view is not self._view:
            self._view, self._answers = view, {}
        encode, content_type = choose_encoder(accept)
        key = (content_type, _accepts_gzip(accept_encoding))
        known = self._answers.get(key)
        if known is None:
            is_openmetrics = content_type.startswith(_OPENMETRICS)
            process: bytes = encode(self._registry)
            body = self._writer.write(view, openmetrics=is_openmetrics) + process.removesuffix(END)
            known = self._answers[key] = _packed(body + END * is_openmetrics, content_type, is_gzipped=key[1])
        return known


def render(view: MetricsView, *, accept: str, accept_encoding: str) -> Exposition:
    """The view in the form that the request's headers ask for, once."""
    return Scrapes().answer(view, accept=accept, accept_encoding=accept_encoding)


def _packed(body: bytes, content_type: str, *, is_gzipped: bool) -> Exposition:
    return Exposition(
        body=gzip.compress(body, _GZIP_LEVEL, mtime=0) if is_gzipped else body,
        content_type=content_type,
        is_gzipped=is_gzipped,
    )


def _accepts_gzip(accept_encoding: str) -> bool:
    for offer in accept_encoding.split(","):
        name, _, parameters = offer.partition(";")
        if name.strip().lower() == "gzip":
            return parameters.replace(" ", "").lower() not in {"q=0", "q=0.0"}
    return False

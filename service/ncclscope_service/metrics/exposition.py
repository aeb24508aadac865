"""The bytes of `/metrics`: Prometheus text or OpenMetrics, as the scraper asks, gzip at level 1.

prometheus_client spends most of a scrape on the labels of each sample: it sorts, checks and escapes them every time.
Labels change only when somebody joins or leaves, so here `name{labels} ` of every sample is kept as bytes, and a scrape
is the values of a column, written by orjson in one go, between them: 20 times as fast. A property test holds that both
give the same.

prometheus_client compresses at level 9, which costs nine times the CPU of level 1 for a fifth less bytes. What was
written of a view is kept until the next one: two scrapers of one tick cost as much as one.
Source: Prometheus, "Exposition formats"; OpenMetrics 1.0, section 3 (text format).
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Final

import numpy as np
import orjson
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics
from prometheus_client.exposition import choose_encoder
from prometheus_client.samples import Exemplar

from ncclscope_service.metrics.scrape import HistogramSamples, MetricsView
from ncclscope_service.metrics.series import Labels, Samples
from ncclscope_service.metrics.table import METRICS, Kind, Metric, number_text

END: Final = b"# EOF\n"
"""End mark of OpenMetrics; the caller writes it, once, after everything."""


@dataclass(slots=True)
class _Prefixes:
    """Text before the values of a metric, valid as long as its labels are these."""

    labels: Sequence[Labels]
    texts: list[bytes]


class ColumnWriter:
    """Writes views; remembers what does not change from one to the next. Memory: about 150 bytes per series."""

    def __init__(self) -> None:
        self._prefixes: dict[str, _Prefixes] = {}

    def write(self, view: MetricsView, *, openmetrics: bool) -> bytes:
        """The view in Prometheus's text format or in OpenMetrics, without `END`; families in the table's order."""
        return b"".join(part for metric in METRICS for part in self._family(metric, view, openmetrics=openmetrics))

    def _family(self, metric: Metric, view: MetricsView, *, openmetrics: bool) -> Iterator[bytes]:
        if metric.kind is Kind.HISTOGRAM:
            histograms = view.histograms.get(metric.name, ())
            lines = [line for each in histograms for line in _histogram(metric, each, openmetrics=openmetrics)]
            body = "".join(lines).encode()
        else:
            samples = view.samples.get(metric.name)
            body = b"" if samples is None else self._column(metric, samples)
        if body:
            yield _head(metric, openmetrics=openmetrics).encode()
            yield body

    def _column(self, metric: Metric, samples: Samples) -> bytes:
        prefixes, values = self._prefixes_of(metric, samples.labels), samples.values
        is_known = ~np.isnan(values)
        if not is_known.all():
            prefixes, values = list(compress(prefixes, is_known.tolist())), values[is_known]
        if not len(values):
            return b""
        lines = [b"\n"] * (3 * len(values))
        lines[0::3] = prefixes
        lines[1::3] = _numbers(values)
        return b"".join(lines)

    def _prefixes_of(self, metric: Metric, labels: Sequence[Labels]) -> list[bytes]:
        known = self._prefixes.get(metric.name)
        if known is None or known.labels != labels:
            texts = [f"{metric.exposed_name}{_labels(metric.labels, each)} ".encode() for each in labels]
            known = self._prefixes[metric.name] = _Prefixes(labels, texts)
        return known.texts


def _numbers(values: NDArray[np.float64]) -> list[bytes]:
    """Each number as text that reads back as the same number; orjson writes null for what is not finite."""
    texts = orjson.dumps(np.ascontiguousarray(values), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1].split(b",")
    for position in np.flatnonzero(np.isinf(values)).tolist():
        texts[position] = b"+Inf" if values[position] > 0 else b"-Inf"
    return texts


def _head(metric: Metric, *, openmetrics: bool) -> str:
    name = metric.name if openmetrics else metric.exposed_name
    text = metric.help.replace("\\", "\\\\").replace("\n", "\\n")
    if openmetrics:
        text = text.replace('"', '\\"')
    unit = f"# UNIT {name} {metric.unit}\n" if openmetrics and metric.unit else ""
    return f"# HELP {name} {text}\n# TYPE {name} {metric.kind}\n{unit}"


def _labels(names: Sequence[str], values: Labels) -> str:
    """The labels in braces, in the order of their names, as prometheus_client has them; nothing without any."""
    pairs = [f'{name}="{_escaped(value)}"' for name, value in sorted(zip(names, values, strict=True))]
    return "{" + ",".join(pairs) + "}" if pairs else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _histogram(metric: Metric, samples: HistogramSamples, *, openmetrics: bool) -> Iterator[str]:
    own = (samples.labels.job, samples.labels.parallelism, samples.labels.op)
    for bound, count, exemplar in zip(metric.bucket_names, samples.cumulative, samples.exemplars, strict=True):
        labels = _labels((*metric.labels, "le"), (*own, bound))
        mark = _exemplar(exemplar) if openmetrics and exemplar is not None else ""
        yield f"{metric.name}_bucket{labels} {float(count)}{mark}\n"
    labels = _labels(metric.labels, own)
    yield f"{metric.name}_count{labels} {float(samples.cumulative[-1])}\n"
    yield f"{metric.name}_sum{labels} {number_text(samples.sum)}\n"


def _exemplar(exemplar: Exemplar) -> str:
    return f" # {_labels(tuple(exemplar.labels), tuple(exemplar.labels.values()))} {number_text(exemplar.value)}"


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
        is_gzipped = _accepts_gzip(accept_encoding)
        key = (content_type, is_gzipped)
        known = self._answers.get(key)
        if known is None:
            is_openmetrics = content_type.startswith(_OPENMETRICS)
            process: bytes = encode(self._registry)
            body = self._writer.write(view, openmetrics=is_openmetrics) + process.removesuffix(END)
            body += END * is_openmetrics
            body = gzip.compress(body, _GZIP_LEVEL, mtime=0) if is_gzipped else body
            known = self._answers[key] = Exposition(body=body, content_type=content_type, is_gzipped=is_gzipped)
        return known


def _accepts_gzip(accept_encoding: str) -> bool:
    for offer in accept_encoding.split(","):
        name, _, parameters = offer.partition(";")
        if name.strip().lower() == "gzip":
            return parameters.replace(" ", "").lower() not in {"q=0", "q=0.0"}
    return False

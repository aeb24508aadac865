"""What the fast writer says is what prometheus_client says, whatever the labels and numbers are."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Exemplar, Sample
from service import fake_service as fake

from ncclscope_service.metrics.exposition import END, ColumnWriter
from ncclscope_service.metrics.scrape import HistogramSamples, MetricsView, Samples
from ncclscope_service.metrics.table import METRICS, METRICS_BY_NAME, Kind, Metric
from ncclscope_service.rollup.series import HistogramLabels

Said = list[tuple[str, str, str, str, list[tuple[str, dict[str, str], str, object]]]]

PLAIN = [metric for metric in METRICS if metric.kind is not Kind.HISTOGRAM]
HISTOGRAMS = [metric for metric in METRICS if metric.kind is Kind.HISTOGRAM]
# All that text formats must escape, and what they must leave alone.
TEXT = st.text(st.sampled_from('ab"\\\n{}=,# éß中\t'), max_size=8)


# The library's parser does not read escapes in an exemplar.
EXEMPLARS = [None, *(Exemplar({"communicator": "tp-0", "coll_seq": "7"}, value) for value in (0.0, 2.5e-05, 4e10))]


def said(families: list[Family]) -> Said:
    """All that was parsed, numbers by their bits (NaN is never exposed, and -0.0 is not 0.0)."""

    def content(sample: Sample) -> tuple[str, dict[str, str], str, object]:
        return (sample.name, sample.labels, float(sample.value).hex(), sample.exemplar)

    return [(f.name, f.documentation, f.type, f.unit, [content(sample) for sample in f.samples]) for f in families]


def assert_both_say_the_same(view: MetricsView, writer: ColumnWriter) -> None:
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry(auto_describe=False)
    registry.register(LibraryCollector(view))
    text = writer.write(view, openmetrics=False).decode()
    theirs: bytes = generate_latest(registry)
    assert said(list(text_string_to_metric_families(text))) == said(
        list(text_string_to_metric_families(theirs.decode()))
    )
    modern = (writer.write(view, openmetrics=True) + END).decode()
    theirs = generate_openmetrics(registry)  # type: ignore[no-untyped-call]
    assert said(list(openmetrics_families(modern))) == said(list(openmetrics_families(theirs.decode())))  # type: ignore[no-untyped-call]


class LibraryCollector:
    """A view as prometheus_client's metric families: what the writer is held against."""

    def __init__(self, view: MetricsView) -> None:
        self._view = view

    def collect(self) -> Iterator[Family]:
        """Every family that has a sample."""
        for metric in METRICS:
            is_histogram = metric.kind is Kind.HISTOGRAM
            family = self._histogram(metric) if is_histogram else self._plain(metric.name, metric.kind)
            if family.samples:
                yield family

    def _plain(self, name: str, kind: Kind) -> Family:
        known = METRICS_BY_NAME[name]
        make = CounterMetricFamily if kind is Kind.COUNTER else GaugeMetricFamily
        family = make(name, known.help, labels=known.labels, unit=known.unit)
        samples = self._view.samples.get(name)
        if samples is not None:
            for labels, value in zip(samples.labels, samples.values.tolist(), strict=True):
                if value == value:  # noqa: PLR0124  (NaN is what is not known)
                    family.add_metric(labels, value)
        return family

    def _histogram(self, metric: Metric) -> Family:
        family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels, unit=metric.unit)
        for each in self._view.histograms.get(metric.name, ()):
            buckets: list[list[str | float | Exemplar | None]] = [
                [bound, count, exemplar]
                for bound, count, exemplar in zip(metric.bucket_names, each.cumulative, each.exemplars, strict=True)
            ]
            labels = (each.labels.job, each.labels.parallelism, each.labels.op)
            family.add_metric(labels, buckets, sum_value=each.sum)  # type: ignore[arg-type]
        return family


@st.composite
def samples_of(draw: st.DrawFn, metric: Metric) -> Samples:
    labels = draw(st.lists(st.tuples(*[TEXT] * len(metric.labels)), max_size=5, unique=True))
    low = 0.0 if metric.kind is Kind.COUNTER else None
    numbers = st.floats(min_value=low) if low is not None else st.floats()
    values = draw(st.lists(numbers, min_size=len(labels), max_size=len(labels)))
    return Samples(labels=labels, values=np.array(values, np.float64))


@st.composite
def histograms_of(draw: st.DrawFn, metric: Metric) -> tuple[HistogramSamples, ...]:
    whose = draw(st.lists(st.tuples(TEXT, TEXT, TEXT), max_size=2, unique=True))
    return tuple(draw(histogram_of(metric, HistogramLabels(job=job, parallelism=p, op=op))) for job, p, op in whose)


@st.composite
def histogram_of(draw: st.DrawFn, metric: Metric, labels: HistogramLabels) -> HistogramSamples:
    buckets = len(metric.buckets) + 1
    counts = draw(st.lists(st.integers(0, 2**40), min_size=buckets, max_size=buckets))
    return HistogramSamples(
        labels=labels,
        cumulative=tuple(np.cumsum(counts).tolist()),
        sum=draw(st.floats(min_value=0, max_value=1e300)),
        exemplars=tuple(draw(st.lists(st.sampled_from(EXEMPLARS), min_size=buckets, max_size=buckets))),
    )


@st.composite
def views(draw: st.DrawFn) -> MetricsView:
    chosen = draw(st.lists(st.sampled_from(PLAIN), max_size=4, unique=True))
    counted = draw(st.lists(st.sampled_from(HISTOGRAMS), max_size=1))
    return MetricsView(
        samples={metric.name: draw(samples_of(metric)) for metric in chosen},
        histograms={metric.name: draw(histograms_of(metric)) for metric in counted},
    )


@settings(max_examples=40)
@given(st.lists(views(), min_size=1, max_size=3))
def test_one_writer_says_what_the_library_says_of_view_after_view(some: list[MetricsView]) -> None:
    writer = ColumnWriter()
    for view in some:
        assert_both_say_the_same(view, writer)


@pytest.mark.parametrize("with_kernels", [True, False])
def test_both_say_the_same_of_a_job(with_kernels: bool) -> None:
    view = fake.small(fake.FakeService(with_kernels=with_kernels)).metrics()
    assert_both_say_the_same(view, ColumnWriter())


def test_labels_that_change_are_written_anew_and_values_of_the_same_labels_are_the_new_ones() -> None:
    writer = ColumnWriter()

    def scrape(labels: list[tuple[str, ...]], values: list[float]) -> list[str]:
        samples = {"ncclscope_gaps": Samples(labels=labels, values=np.array(values, np.float64))}
        text = writer.write(MetricsView(samples=samples, histograms={}), openmetrics=False).decode()
        return [line.removeprefix("ncclscope_gaps_total") for line in text.splitlines() if not line.startswith("#")]

    assert scrape([("torn",), ("lost",)], [1, 2]) == ['{reason="torn"} 1.0', '{reason="lost"} 2.0']
    assert scrape([("torn",), ("lost",)], [math.nan, 4]) == ['{reason="lost"} 4.0']
    assert scrape([("torn",)], [3]) == ['{reason="torn"} 3.0']
    assert scrape([], []) == []

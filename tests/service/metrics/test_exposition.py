"""Samples as text: labels that are kept from scrape to scrape, and numbers without an end."""

from __future__ import annotations

import math

import numpy as np

from ncclscope_service.metrics.exposition import ColumnWriter
from ncclscope_service.metrics.scrape import MetricsView, Samples


def test_labels_that_change_are_written_anew_and_values_of_the_same_labels_are_the_new_ones() -> None:
    writer = ColumnWriter()

    def scrape(labels: list[tuple[str, ...]], values: list[float]) -> list[str]:
        samples = {"ncclscope_gaps": Samples(labels=labels, values=np.array(values, np.float64))}
        text = writer.write(MetricsView(samples=samples, histograms={}), openmetrics=False).decode()
        return [line.removeprefix("ncclscope_gaps_total") for line in text.splitlines() if not line.startswith("#")]

    assert scrape([("torn",), ("lost",)], [1, 2]) == ['{reason="torn"} 1.0', '{reason="lost"} 2.0']
    assert scrape([("torn",), ("lost",)], [math.nan, 4]) == ['{reason="lost"} 4.0']
    assert scrape([("torn",)], [3]) == ['{reason="torn"} 3.0']
    assert scrape([("torn",), ("a\\b",)], [math.inf, -0.0]) == ['{reason="torn"} +Inf', '{reason="a\\\\b"} -0.0']
    assert scrape([], []) == []

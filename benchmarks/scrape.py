"""python -m benchmarks.scrape [--series 100000]: CPU time of a scrape, by prometheus_client and by our writer.

First a gauge of five labels with so many series: rendered by the library from a collector, and by the column writer
with and without labels that it has met before. Then the whole scrape of a simulated job of 4,096 ranks: gathering,
writing, packing, and how many series there are. Then a scrape, the page and what else is looked at in a tick with a
million operations in memory, a tenth of them with kernels: by sums that were kept as the operations came, and by the
same made anew from all of them.
"""

from __future__ import annotations

import argparse
import gzip
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
from benchmarks.large_job import NOW_NS, busy_window, large_job
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import generate_latest

from ncclscope_service.intake.aliases import Aliases
from ncclscope_service.metrics.exposition import ColumnWriter
from ncclscope_service.metrics.scrape import MetricsView, gather
from ncclscope_service.metrics.series import Samples, ScrapeCache, SeriesBudget
from ncclscope_service.metrics.table import SERIES_LABELS
from ncclscope_service.rollup.recent_sums import RecentSums
from ncclscope_service.rollup.series import Tally
from ncclscope_service.serve.routes import to_json
from ncclscope_service.show.finding_events import FindingTracker
from ncclscope_service.show.health import ServiceHealth
from ncclscope_service.show.overview import finding_views, make_overview

_T = TypeVar("_T")
_PASSES = 5
OPERATIONS = 1_000_000


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--series", type=int, default=100_000)
    compare_writers(parser.parse_args().series)
    time_large_job()
    print(f"\n{OPERATIONS:,} operations in memory, CPU ms\n")
    print("| ranks | what | sums kept | sums made anew | times |\n|---:|---|---:|---:|---:|")
    for ranks in (512, 4_096):
        time_full_window(ranks)


def compare_writers(amount: int) -> None:
    """The library against the column writer."""
    labels = [("job", f"tp-{i // 40}", "TP", f"op{i % 8}", f"{i % 5}MiB") for i in range(amount)]
    numbers = np.random.default_rng(1).uniform(1e6, 1e12, amount)
    view = MetricsView(
        samples={"ncclscope_busbw_bytes_per_second": Samples(labels=labels, values=numbers)}, histograms={}
    )
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_OneGauge(labels, numbers))
    library, _ = best(lambda: generate_latest(registry), passes=2)
    first, _ = best(lambda: ColumnWriter().write(view, openmetrics=False))
    writer = ColumnWriter()
    writer.write(view, openmetrics=False)
    others = [MetricsView(samples=_copied(view), histograms={}) for _ in range(_PASSES)]
    again, text = best(lambda: writer.write(others.pop(), openmetrics=False))
    packed, _ = best(lambda: gzip.compress(text, 1, mtime=0))
    best_packed, _ = best(lambda: gzip.compress(text, 9, mtime=0), passes=1)
    print(f"{amount:,} series of five labels, {len(text) / 1e6:.1f} MB\n")
    print("| way | CPU s | times the column writer |\n|---|---:|---:|")
    for name, seconds in (
        ("prometheus_client, collector and generate_latest", library),
        ("column writer, labels not met before", first),
        ("column writer", again),
        ("gzip level 9 (prometheus_client)", best_packed),
        ("gzip level 1 (ours)", packed),
    ):
        print(f"| {name} | {seconds:.3f} | {seconds / again:.1f} |")


class _OneGauge:
    """The same series as prometheus_client has them."""

    def __init__(self, labels: Sequence[Sequence[str]], numbers: NDArray[np.float64]) -> None:
        self._labels, self._numbers = labels, numbers

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The family, with a sample for each series."""
        family = GaugeMetricFamily("ncclscope_busbw_bytes_per_second", "Bus bandwidth.", labels=SERIES_LABELS)
        for labels, number in zip(self._labels, self._numbers.tolist(), strict=True):
            family.add_metric(labels, number)
        yield family


def _copied(view: MetricsView) -> dict[str, Samples]:
    """The same in objects of its own, as the next scrape has it."""
    return {
        name: Samples(labels=[(*each,) for each in own.labels], values=own.values.copy())
        for name, own in view.samples.items()
    }


def time_large_job() -> None:
    """The scrape of a job of 4,096 ranks."""
    job = large_job()
    tally, aliases, budget, writer = Tally(), Aliases(), SeriesBudget(), ColumnWriter()
    sums, cache = RecentSums.of_store(job.store, NOW_NS), ScrapeCache()
    tally.count_rows(job.store)

    def gathered() -> MetricsView:
        return gather(
            job.store,
            tally=tally,
            aliases=aliases,
            agents=job.agents,
            health=ServiceHealth(version="0"),
            now_ns=NOW_NS,
            budget=budget,
            sums=sums,
            cache=cache,
        )

    gathering, view = best(gathered)
    writer.write(view, openmetrics=True)
    views = [gathered() for _ in range(_PASSES)]
    writing, text = best(lambda: writer.write(views.pop(), openmetrics=True))
    packing, packed = best(lambda: gzip.compress(text, 1, mtime=0))
    series = sum(not line.startswith(b"#") for line in text.splitlines())
    print(f"\n4,096 ranks, {len(job.store.communicators):,} communicators: {series:,} series\n")
    print("| step | CPU s | bytes |\n|---|---:|---:|")
    print(f"| gather | {gathering:.3f} | |")
    print(f"| write | {writing:.3f} | {len(text):,} |")
    print(f"| gzip level 1 | {packing:.3f} | {len(packed):,} |")


def time_full_window(ranks: int) -> None:
    """Answers about a job with all its operations in memory."""
    job = large_job(ranks)
    store, health = job.store, ServiceHealth(version="0")
    sums, seconds = busy_window(store, OPERATIONS)
    tally, aliases, budget, cache = Tally(), Aliases(), SeriesBudget(), ScrapeCache()
    tally.count_rows(store)
    news, writer = FindingTracker(), ColumnWriter()

    def scrape(kept: RecentSums | None) -> bytes:
        view = gather(
            store, tally=tally, aliases=aliases, agents=job.agents, health=health, now_ns=NOW_NS, budget=budget,
            sums=kept, cache=cache if kept else None,
        )  # fmt: skip
        return gzip.compress(writer.write(view, openmetrics=True), 1, mtime=0)

    def page(kept: RecentSums | None) -> bytes:
        return to_json(
            make_overview(store, aliases=aliases, agents=job.agents, health=health, now_ns=NOW_NS, sums=kept)
        )

    def tick() -> int:
        aliases.update(store.communicators, store.members)
        tally.count_rows(store)
        return len(news.compare(finding_views(store, aliases, most=None), NOW_NS))

    scrape(sums)
    for name, work in (("scrape, packed", scrape), ("page, with its JSON", page)):
        kept, anew = (best(partial(work, of), passes=3)[0] for of in (sums, None))
        print(f"| {ranks:,} | {name} | {1e3 * kept:.1f} | {1e3 * anew:.1f} | {anew / kept:.1f} |")
    print(f"| {ranks:,} | names, findings and totals of a tick with nothing new | {1e3 * best(tick)[0]:.2f} | | |")
    print(f"| {ranks:,} | adding up, per thousand operations | {1e6 * seconds / OPERATIONS:.2f} | | |")


def best(work: Callable[[], _T], *, passes: int = _PASSES) -> tuple[float, _T]:
    """The CPU seconds of the quickest pass, and what it gave."""
    quickest, result = float("inf"), None
    for _ in range(passes):
        began = time.process_time()
        result = work()
        quickest = min(quickest, time.process_time() - began)
    assert result is not None
    return quickest, result


if __name__ == "__main__":
    main()

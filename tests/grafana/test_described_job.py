"""Panels about a described job's plan, against a real Prometheus that scraped the metrics of such a job."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import orjson
import pytest
from emission_samples import small
from end_to_end.processes import wait_for
from grafana.asked import Asked, panel_queries
from grafana.prometheus_server import Prometheus, prometheus
from grafana.test_against_prometheus import has_data, is_of_described_jobs

from ncclscope.offline import run_offline
from ncclscope_models.expected_step import ExpectedStep
from ncclscope_service.export.directory import write_run
from ncclscope_service.intake.aliases import Aliases
from ncclscope_service.metrics.exposition import Scrapes
from ncclscope_service.metrics.scrape import gather
from ncclscope_service.rollup.series import Tally
from ncclscope_service.show.health import ServiceHealth
from ncclscope_service.show.overview import JobView, make_overview
from ncclscope_service.store.settings import PipelineSettings
from ncclscope_simulator import write

pytestmark = pytest.mark.slow

_ASKED = [each for each in panel_queries() if is_of_described_jobs(each)]
_SHARES = {"mfu": "ncclscope_model_flops_utilization_ratio", "hfu": "ncclscope_hardware_flops_utilization_ratio"}
_EXPECTED = ExpectedStep(low=0.35, typical=0.4, high=0.45, run="before", is_same=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A simulated job whose description and GPU are known, as each place shows it."""

    server: Prometheus
    summary: dict[str, list[dict[str, float]]]
    """`summary.json`."""
    page: JobView


@contextmanager
def _serving(text: bytes) -> Generator[int]:
    """Answers every request with this text, on the port that it gives."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Described]:
    folder, run = tmp_path_factory.mktemp("described"), small("full_recompute", tp=2, dp=2, iterations=12)
    write(replace(run.config, capture="full"), folder / "job")
    settings = PipelineSettings(description=run.described(), expected_step=_EXPECTED)
    store = run_offline([folder / "job" / "logs", folder / "job" / "nsys"], job="j", settings=settings).pipeline.store
    write_run(store, folder / "out")
    health, now_ns, tally = ServiceHealth(version="0"), int(store.operations.rows["observed_at_ns"].max()), Tally()
    tally.count_rows(store)
    view = gather(store, tally=tally, aliases=Aliases(), agents=[], health=health, now_ns=now_ns)
    overview = make_overview(store, aliases=Aliases(), agents=[], health=health, now_ns=now_ns)
    with (
        _serving(Scrapes().answer(view, accept="", accept_encoding="").body) as port,
        prometheus(folder, scrapes=port) as server,
    ):
        wait_for(lambda: has_data(server, Asked(where="", expr="ncclscope_expected_step_seconds")), "a scrape")
        summary = orjson.loads((folder / "out" / "summary.json").read_bytes())
        yield Described(server=server, summary=summary, page=overview.jobs[0])


@pytest.mark.parametrize("asked", _ASKED, ids=lambda asked: asked.where)
def test_a_panel_of_the_plan_shows_data(described: Described, asked: Asked) -> None:
    wait_for(lambda: has_data(described.server, asked), f"data of {asked.expr}")


def test_there_are_panels_of_the_plan() -> None:
    assert len(_ASKED) > 5
    assert all(any(name in each.expr for each in _ASKED) for name in _SHARES.values())


@pytest.mark.parametrize("share", _SHARES)
def test_the_panel_the_page_and_the_summary_show_one_share_of_the_peak(described: Described, share: str) -> None:
    """The page's is of its own newest steps, so that it is that of the others within a thousandth."""
    (asked,) = [each for each in _ASKED if _SHARES[share] in each.expr]
    now = time.time()
    (series,) = described.server.over(asked.filled(), begin=now - 8, end=now)
    (summed_up,) = described.summary["utilization"]
    assert {float(value) for _, value in series["values"]} == {summed_up[share]}
    assert described.page.utilization is not None
    assert getattr(described.page.utilization, share) == pytest.approx(summed_up[share], rel=1e-3)
    assert summed_up["hfu"] > summed_up["mfu"], "its layers are computed twice"

"""Panels about a described job's plan, against a real Prometheus that scraped a made-up service with such a job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from end_to_end.processes import wait_for
from end_to_end.test_page import fake_service
from grafana.asked import Asked, panel_queries
from grafana.prometheus_server import Prometheus, prometheus
from grafana.test_against_prometheus import has_data, is_of_described_jobs

pytestmark = pytest.mark.slow

_ASKED = [
    each
    for each in panel_queries()
    if is_of_described_jobs(each) and "_flops_utilization_ratio" not in each.expr  # of jobs that send what they should
]


@pytest.fixture(scope="module")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with (
        fake_service(repository) as port,
        prometheus(tmp_path_factory.mktemp("described"), scrapes=port) as server,
    ):
        wait_for(lambda: has_data(server, Asked(where="steps", expr="ncclscope_expected_step_seconds")), "a scrape")
        yield server


@pytest.mark.parametrize("asked", _ASKED, ids=lambda asked: asked.where)
def test_a_panel_of_the_plan_shows_data(server: Prometheus, asked: Asked) -> None:
    wait_for(lambda: has_data(server, asked), f"data of {asked.expr}")


def test_there_are_panels_of_the_plan() -> None:
    assert len(_ASKED) > 3

"""Every query of dashboards and alert rules against a real Prometheus that scraped the demo: it returns data."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from benchmarks.ports import free_port
from end_to_end.processes import running, wait_for
from grafana.asked import Asked, alert_queries, annotation_queries, judged, panel_queries, rule_group, variable_queries
from grafana.prometheus_server import Prometheus, prometheus

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_SECONDS = 75.0
"""By then the demo has found its late rank, whose finding is what annotations draw."""

_NOTHING_TO_SAY = {
    "ncclscope_inspector_": "the demo runs no NCCL Inspector",
    "ncclscope_gaps_total": "nothing is lost",
    "ncclscope_sessions_refused_total": "nobody is refused",
    "ncclscope_http_refused_total": "nobody is refused",
    "ncclscope_agent_lines_skipped_total": "every line is understood",
    "ncclscope_notification": "the demo notifies nobody",
    "absent(": "the service is there",
    "ncclscope_finding_info": "most kinds of findings are not open",
    "ncclscope_agent_missing == 1": "no agent is gone",
    "ncclscope_agent_spool": "the demo's agents keep no spool",
    "ncclscope_alignment_disagreements": "the demo's exports carry no NVTX payloads to check against",
    "ncclscope_alignment_checked_total": "the demo's exports carry no NVTX payloads to check against",
}
"""Metrics without series in a sound run, by reason."""


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("scraped")
    port = free_port()
    faults = ("--fault", "late_rank:rank=1,ms=8,from=5")
    asked = ("demo", "--http-port", str(port), "--for", str(2 * _SECONDS), *faults)
    demo = running(folder / "demo.log", *asked, has_children=True)
    with demo, prometheus(folder, scrapes=port) as server:
        began = time.monotonic()
        late = 'ncclscope_findings{kind="late_rank"} > 0'
        wait_for(lambda: bool(server.now(late)), "the demo to find its late rank", within=2 * _SECONDS)
        wait_for(lambda: time.monotonic() - began > _SECONDS, "enough history", within=2 * _SECONDS)
        yield server


def has_data(scraped: Prometheus, asked: Asked) -> bool:
    """Whether a query gave anything within the last minute; on a busy machine single scrapes may fail."""
    now = time.time()
    return bool(scraped.over(asked.filled(interval="20s"), begin=now - 60, end=now))


def _is_excused(asked: Asked) -> bool:
    return any(name in asked.expr for name in _NOTHING_TO_SAY)


@pytest.mark.parametrize("asked", [*panel_queries(), *annotation_queries()], ids=lambda asked: asked.where)
def test_a_panel_shows_data(scraped: Prometheus, asked: Asked) -> None:
    assert has_data(scraped, asked) or _is_excused(asked), asked.expr


@pytest.mark.parametrize("asked", variable_queries(), ids=lambda asked: asked.where)
def test_a_variable_has_choices(scraped: Prometheus, asked: Asked) -> None:
    assert has_data(scraped, asked)


@pytest.mark.parametrize("asked", alert_queries(), ids=lambda asked: asked.where)
def test_an_alert_has_a_number_to_judge(scraped: Prometheus, asked: Asked) -> None:
    scraped.now(asked.expr)
    number = replace(asked, expr=judged(asked.expr))
    assert has_data(scraped, number) or _is_excused(number), number.expr


def test_the_alert_of_the_demos_late_rank_fires(scraped: Prometheus) -> None:
    rule = next(rule for rule in rule_group()["rules"] if rule["title"] == "NcclscopeLateRank")
    presence = next(step for step in rule["data"] if step["refId"] == "A")["model"]["expr"]
    wait_for(lambda: bool(scraped.now(presence)), "the finding to be scraped")
    assert [float(each["value"][1]) for each in scraped.now(presence)] == [1.0]


def test_what_has_no_data_would_be_noticed(scraped: Prometheus) -> None:
    assert not has_data(scraped, Asked(where="nowhere", expr="ncclscope_no_such_thing"))

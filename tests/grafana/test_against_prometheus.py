"""Every query of dashboards and alert rules against a real Prometheus that scraped the demo: it returns data."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from benchmarks.ports import free_port
from end_to_end.processes import PATIENCE_SECONDS, running, wait_for
from grafana.asked import Asked, alert_queries, annotation_queries, judged, panel_queries, rule_group, variable_queries
from grafana.prometheus_server import Prometheus, prometheus

pytestmark = pytest.mark.slow

NOT_DESCRIBED = "the demo's job is not described"
_NOTHING_TO_SAY = {
    "ncclscope_inspector_": "the demo runs no NCCL Inspector",
    "ncclscope_gaps_total": "nothing is lost",
    "ncclscope_sessions_refused_total": "nobody is refused",
    "ncclscope_http_refused_total": "nobody is refused",
    "ncclscope_agent_lines_skipped_total": "every line is understood",
    "ncclscope_notification": "the demo notifies nobody",
    "absent(": "the service is there",
    "ncclscope_finding_info": "most kinds of findings are not open",
    "ncclscope_finding_confidence_ratio": "most kinds of findings are not open",
    "ncclscope_agent_missing == 1": "no agent is gone",
    "ncclscope_agent_spool": "the demo's agents keep no spool",
    "ncclscope_unexplained_operations": NOT_DESCRIBED,
    "ncclscope_expected_bytes": NOT_DESCRIBED,
    "ncclscope_expected_step_seconds": NOT_DESCRIBED,
    "_flops_utilization_ratio": NOT_DESCRIBED,
    "ncclscope_alignment_disagreements": "the demo's exports carry no NVTX payloads to check against",
    "ncclscope_alignment_checked_total": "the demo's exports carry no NVTX payloads to check against",
}
"""Metrics without series in a sound run, by reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scraped:
    """What a real Prometheus has of a demo, which has ended."""

    server: Prometheus
    answered: frozenset[Asked]
    """The questions that had data."""
    late_rank: list[float]
    """What the alert of the late rank asked for gave when it was first found."""


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    """The demo runs until everything has data, however long its steps, scrapes and findings take."""
    folder = tmp_path_factory.mktemp("scraped")
    port = free_port()
    faults = ("--fault", "late_rank:rank=1,ms=8,from=5")
    asked = ("demo", "--http-port", str(port), "--for", str(3 * PATIENCE_SECONDS), *faults)
    with prometheus(folder, scrapes=port) as server:
        with running(folder / "demo.log", *asked, has_children=True):
            presence = _presence_of_late_rank()
            late: list[float] = []

            def is_late() -> bool:
                late[:] = [float(each["value"][1]) for each in server.now(presence)]
                return bool(late)

            wait_for(is_late, "the demo to find its late rank", within=2 * PATIENCE_SECONDS)
            answered = frozenset(_answered(server))
        yield Scraped(server=server, answered=answered, late_rank=late)


def _answered(server: Prometheus) -> set[Asked]:
    """Asks all questions until none is left that should have data; gives up after a while, and a test says of which."""
    asked = {*panel_queries(), *annotation_queries(), *variable_queries(), *map(_number, alert_queries())}
    awaited = {each for each in asked if not _is_excused(each)}
    until = time.monotonic() + PATIENCE_SECONDS
    answered: set[Asked] = set()
    while awaited - answered and time.monotonic() < until:
        answered |= {each for each in awaited - answered if has_data(server, each)}
        time.sleep(1)
    return answered


def has_data(server: Prometheus, asked: Asked) -> bool:
    """Whether a query gave anything within the last minute; on a busy machine single scrapes may fail."""
    now = time.time()
    return bool(server.over(asked.filled(interval="20s"), begin=now - 60, end=now))


def _is_excused(asked: Asked) -> bool:
    return any(name in asked.expr for name in _NOTHING_TO_SAY)


def is_of_described_jobs(asked: Asked) -> bool:
    """Whether a query has data only of a job that was described."""
    return any(name in asked.expr for name, reason in _NOTHING_TO_SAY.items() if reason == NOT_DESCRIBED)


def _number(alert: Asked) -> Asked:
    """What an alert judges."""
    return replace(alert, expr=judged(alert.expr))


def _presence_of_late_rank() -> str:
    """What the alert of late ranks asks for."""
    rule = next(rule for rule in rule_group()["rules"] if rule["title"] == "NcclscopeLateRank")
    expr: str = next(step for step in rule["data"] if step["refId"] == "A")["model"]["expr"]
    return expr


@pytest.mark.parametrize("asked", [*panel_queries(), *annotation_queries()], ids=lambda asked: asked.where)
def test_a_panel_shows_data(scraped: Scraped, asked: Asked) -> None:
    assert asked in scraped.answered or _is_excused(asked), asked.expr


@pytest.mark.parametrize("asked", variable_queries(), ids=lambda asked: asked.where)
def test_a_variable_has_choices(scraped: Scraped, asked: Asked) -> None:
    assert asked in scraped.answered


@pytest.mark.parametrize("asked", alert_queries(), ids=lambda asked: asked.where)
def test_an_alert_has_a_number_to_judge(scraped: Scraped, asked: Asked) -> None:
    scraped.server.now(asked.expr)
    number = _number(asked)
    assert number in scraped.answered or _is_excused(number), number.expr


def test_the_alert_of_the_demos_late_rank_fires(scraped: Scraped) -> None:
    assert scraped.late_rank == [1.0]


def test_what_has_no_data_would_be_noticed(scraped: Scraped) -> None:
    assert has_data(scraped.server, Asked(where="scrapes", expr="up == 1"))
    assert not has_data(scraped.server, Asked(where="nowhere", expr="ncclscope_no_such_thing"))

"""What a person tells a running service on the command line."""

from __future__ import annotations

import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager

import pytest
import uvicorn
from click.testing import CliRunner
from service import fake_service as fake

from ncclscope.cli import main
from ncclscope.findings import duration_seconds
from ncclscope_service.serve.routes import make_app


@pytest.fixture
def service() -> fake.FakeService:
    return fake.small(fake.FakeService())


@contextmanager
def served(service: fake.FakeService) -> Generator[str, None, None]:
    """The address of a real server."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        server = uvicorn.Server(uvicorn.Config(make_app(service, service.hub), ws="none", log_config=None))
        thread = threading.Thread(target=server.run, args=([bound],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            service.hub.close()
            server.should_exit = True
            thread.join()


def said(*arguments: str, status: int = 0) -> str:
    done = CliRunner().invoke(main, arguments, env={"USER": "ann"})
    assert done.exit_code == status, done.output
    return done.output


def test_findings_are_listed_acknowledged_muted_and_cleared(service: fake.FakeService) -> None:
    with served(service) as url:
        at = ("--service", url)
        listed = said("findings", "list", *at)
        finding = service.findings()[0]
        assert f"{finding.id}  {finding.severity}, job {fake.JOB}, since 2025-" in listed
        assert f"    {finding.summary}" in listed
        assert said("findings", "ack", finding.id, "--note", "on it", *at) == f"{finding.id} acknowledged\n"
        muted = said("findings", "mute", finding.id, "--for", "2h", "--by", "bob", *at)
        assert muted.startswith(f"mute-1  finding {finding.id} muted until 2025-11-21 ")
        said("findings", "mute", "--kind", finding.kind, "--ranks", "3,5", "--hosts", "gpu-*", "--for", "30m", *at)
        listed = said("findings", "list", "--job", fake.JOB, *at)
        assert "    acknowledged by ann: on it\n" in listed
        assert " by bob\n" in listed
        assert f"mute-2  kind {finding.kind}, ranks 3,5, hosts gpu-* muted until " in listed
        said("findings", "clear", "mute-2", *at)
        said("findings", "clear", finding.id, *at)
        assert "muted" not in said("findings", "list", *at)
        assert "there is no finding 'x'; open are: " in said("findings", "ack", "x", *at, status=1)


def test_thresholds_are_shown_changed_and_reset(service: fake.FakeService) -> None:
    with served(service) as url:
        at = ("--service", url)
        assert said("settings", *at) == "late_rank.least_share = 0.02  (default 0.01)\n"
        changed = said("settings", "detect.hang.rest_seconds=300", "job.'a-*'.hang.rest_seconds=600", *at)
        assert changed == (
            "late_rank.least_share = 0.02  (default 0.01)\n"
            "hang.rest_seconds = 300  (changed; at the start 120, default 120)\n"
            'job."a-*".hang.rest_seconds = 600\n'
        )
        assert "hang.rest_seconds = 300" not in said("settings", "--reset", "hang.rest_seconds", *at)
        assert "did you mean hang.rest_seconds?" in said("settings", "hang.rest_second=1", *at, status=1)
    assert "no service answers at" in said("settings", "--service", url, status=1)


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("30m", 1800), ("1.5h", 5400), ("7d", 604_800)])
def test_a_time_has_a_unit(text: str, seconds: float) -> None:
    assert duration_seconds(text) == seconds


def test_what_is_no_time_and_no_ranks_is_wrong_usage() -> None:
    assert "'2' is not a time such as 90s" in said("findings", "mute", "x", "--for", "2", status=2)
    assert "'1-3' is not N,N" in said("findings", "mute", "--for", "2h", "--ranks", "1-3", status=2)
    assert "is not NAME=NUMBER" in said("settings", "hang.rest_seconds", status=2)

"""The page of a real service with TLS and tokens, in a real browser, while names in it try to be scripts."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import ssl
import urllib.request
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from agent.log_samples import operation_line
from certificates import make_authority
from end_to_end.processes import PATIENCE_MS, PATIENCE_SECONDS, end, running, serving, wait_for
from playwright.sync_api import Browser, Page, expect
from wire.sample_batches import HELLO

from ncclscope_wire.codec import encode_message
from ncclscope_wire.frame import encode_frame
from ncclscope_wire.messages import AgentHealth, Heartbeat

pytestmark = pytest.mark.slow

_AGENT, _READER, _WRITER = (f"{who}-token-{secrets.token_hex(8)}" for who in ("agent", "reader", "writer"))
_SCRIPT = "<script>window.pwned=1</script>"
_IMAGE = '"><img src=x onerror="window.pwned=1">'
_INIT = (
    "node1:10:10 [0] NCCL INFO comm 0x55d0c8b3e2a0 rank 0 nranks 1 cudaDev 0 busId 1000 commId 0x1 - Init COMPLETE\n"
)


@dataclass
class Site:
    url: str
    agents: int
    ca: Path

    def fetch(self, path: str) -> bytes:
        request = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {_READER}"})
        context = ssl.create_default_context(cafile=str(self.ca))
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS, context=context) as answer:
            body: bytes = answer.read()
            return body


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    authority = make_authority(folder / "ca")
    cert, key = authority.sign("service")
    (folder / "agent-tokens").write_text(_AGENT)
    (folder / "http-tokens").write_text(f"{_READER} role=read\n{_WRITER} role=write\n")
    (folder / "token").write_text(_AGENT)
    log = folder / "nccl.log"
    log.write_text(_INIT + "".join(operation_line(op_count=f"{n:x}") + "\n" for n in range(50)))
    with serving(
        folder / "service.log",
        *("--data", str(folder / "data")),
        *("--tls-cert", str(cert), "--tls-key", str(key), "--agent-tokens", str(folder / "agent-tokens")),
        *("--http-tokens", str(folder / "http-tokens")),
    ) as service:
        site = Site(f"https://localhost:{service.web}", service.agents, authority.path)
        with running(
            folder / "agent.log",
            *("agent", "--connect", f"localhost:{service.agents}", "--logs", str(log)),
            *("--job", _IMAGE, "--name", _SCRIPT),
            *("--tls-ca", str(authority.path), "--token-file", str(folder / "token")),
        ) as agent:
            wait_for(lambda: len(json.loads(site.fetch("/api/overview"))["jobs"]) == 1, "the job")
            yield site
            end(agent)
        assert end(service.process) == 0


@contextlib.contextmanager
def page_of(browser: Browser, site: Site, token: str) -> Generator[tuple[Page, list[str]]]:
    """The page of somebody who gives this token when the browser asks, and what the browser complains of."""
    context = browser.new_context(
        ignore_https_errors=True, http_credentials={"username": "somebody", "password": token}
    )
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.goto(site.url)
    yield page, complaints
    context.close()


@contextlib.contextmanager
def live_page(browser: Browser, site: Site, token: str = _READER) -> Generator[tuple[Page, list[str]]]:
    with page_of(browser, site, token) as (page, complaints):
        expect(page.locator("#connection")).to_have_attribute("data-state", "live")
        yield page, complaints


def test_a_wrong_token_shows_nothing_and_a_right_one_the_page(browser: Browser, site: Site) -> None:
    with page_of(browser, site, "x" * 20) as (page, _):
        assert page.locator("#connection").count() == 0
        assert page.evaluate("fetch('/api/health').then((answer) => answer.status)") == 401
    with live_page(browser, site) as (page, complaints):
        assert complaints == []


def test_names_that_are_scripts_are_shown_as_text_and_nothing_of_them_runs(browser: Browser, site: Site) -> None:
    hello = replace(HELLO, agent_id="raw", session_id="1", name=_IMAGE, host=_SCRIPT, job=_SCRIPT, token=_AGENT)
    heartbeat = Heartbeat(agent_wall_ns=1, health=AgentHealth(skipped={_SCRIPT: 3}))
    tls = ssl.create_default_context(cafile=str(site.ca))
    with (
        socket.create_connection(("127.0.0.1", site.agents)) as plain,
        tls.wrap_socket(plain, server_hostname="localhost") as secured,
    ):
        secured.sendall(b"".join(encode_frame(encode_message(each)) for each in (hello, heartbeat)))
        assert secured.recv(1)
        with live_page(browser, site) as (page, complaints):
            for view in ("#/", "#/health"):
                page.goto(f"{site.url}/{view}")
                page.wait_for_timeout(1500)
                assert page.evaluate("window.pwned") is None
                assert page.locator("img[src='x']").count() == 0
            expect(page.get_by_text(_SCRIPT).first).to_be_visible()
            page.locator("#to-job").click()
            page.wait_for_timeout(1500)
            assert page.evaluate("window.pwned") is None
    assert [text for text in complaints if "Content Security Policy" in text] == []


def test_a_script_that_got_in_all_the_same_would_not_run(browser: Browser, site: Site) -> None:
    with live_page(browser, site) as (page, _):
        with page.expect_console_message(lambda message: "Content Security Policy" in message.text):
            page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.pwned=1\">')")
        assert page.evaluate("window.pwned") is None


def test_another_site_cannot_frame_the_page(browser: Browser, site: Site) -> None:
    with live_page(browser, site) as (page, _):
        other = page.context.new_page()
        with other.expect_console_message(lambda message: "frame-ancestors" in message.text):
            other.set_content(f'<iframe src="{site.url}/"></iframe>')


def test_a_reader_may_not_have_snapshots_written_and_a_writer_may(browser: Browser, site: Site) -> None:
    asked = "fetch('/api/snapshot', {method: 'POST'}).then((answer) => answer.status)"
    for token, status in ((_READER, 403), (_WRITER, 200)):
        with live_page(browser, site, token) as (page, _):
            assert page.evaluate(asked) == status

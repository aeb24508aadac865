"""The page in a real browser, over a made-up service in a process of its own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

_CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
_PATIENCE_MS = 20_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not Path(_CHROMIUM).exists():
        pytest.skip("needs the browser chromium (Debian: apt install chromium)")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=_CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield launched
        launched.close()


@contextmanager
def fake_service(repository: Path, port: int, *options: str) -> Generator[None]:
    script = repository / "tests" / "service" / "fake_service.py"
    command = [sys.executable, str(script), "--port", str(port), "--nodes", "8", *options]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port: int = bound.getsockname()[1]
        return port


def open_page(browser: Browser, port: int, *, width: int = 1280, scheme: str = "light") -> tuple[Page, list[str]]:
    """The page once it is live, and what the console said that it should not have."""
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme="dark" if scheme == "dark" else "light"
    )
    page = context.new_page()
    page.set_default_timeout(_PATIENCE_MS)
    complaints: list[str] = []

    def note(message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"}:
            complaints.append(message.text)

    page.on("console", note)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    wait_for_port(port)
    page.goto(f"http://127.0.0.1:{port}/")
    expect(page.locator("#connection")).to_have_attribute("data-state", "live", timeout=_PATIENCE_MS)
    return page, complaints


def wait_for_port(port: int) -> None:
    """Tries to connect until something listens."""
    for _ in range(200):
        with socket.socket() as attempt:
            attempt.settimeout(1)
            if attempt.connect_ex(("127.0.0.1", port)) == 0:
                return
            attempt.setblocking(True)
        signal.sigtimedwait([], 0.05)
    pytest.fail(f"nothing listens on port {port}")


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1440, "dark"), (390, "light")])
def test_the_page_shows_it_all_at_one_glance(browser: Browser, repository: Path, width: int, scheme: str) -> None:
    port = free_port()
    with fake_service(repository, port):
        page, complaints = open_page(browser, port, width=width, scheme=scheme)
        expect(page.locator("#level")).to_have_text("logs and nsys")
        expect(page.locator("#tiles > div")).to_have_count(7)
        expect(page.locator("details.finding")).to_have_count(2)
        expect(page.locator(".finding[data-severity=critical]")).to_contain_text("Rank 37")
        expect(page.locator(".multiple")).to_have_count(3)
        expect(page.locator(".multiple .js-plotly-plot")).to_have_count(3)
        expect(page.locator("#waits .js-plotly-plot")).to_have_count(1)
        expect(page.locator("#communicators tbody tr")).to_have_count(33)
        expect(page.locator("#communicators tbody tr").first).to_contain_text("tp-4")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing runs over the side"
        shots = os.environ.get("NCCLSCOPE_SCREENSHOTS")
        if shots:
            page.screenshot(path=Path(shots) / f"page-{width}-{scheme}.png", full_page=True)
        assert complaints == []


def test_what_logs_cannot_say_reads_not_recorded(browser: Browser, repository: Path) -> None:
    port = free_port()
    with fake_service(repository, port, "--logs-only"):
        page, complaints = open_page(browser, port)
        expect(page.locator("#level")).to_have_text("logs only")
        tiles = page.locator("#tiles > div")
        for name in ("Aligned", "Captured", "Clocks agree to"):
            expect(tiles.filter(has_text=name)).to_contain_text("not recorded")
        expect(page.locator("#bandwidth-title")).to_have_text("Logged volume")
        expect(page.locator("#waits")).to_contain_text("Not recorded")
        assert complaints == []


def test_a_page_without_a_job_says_what_to_do(browser: Browser, repository: Path) -> None:
    port = free_port()
    with fake_service(repository, port, "--empty"):
        page, complaints = open_page(browser, port)
        expect(page.locator("#empty")).to_contain_text("ncclscope agent")
        expect(page.locator("#main")).to_be_hidden()
        assert complaints == []


def test_the_page_is_worked_by_keyboard_and_by_click(browser: Browser, repository: Path) -> None:
    port = free_port()
    with fake_service(repository, port):
        page, complaints = open_page(browser, port)
        finding = page.locator("details.finding").first
        finding.locator("summary").focus()
        page.keyboard.press("Enter")
        expect(finding.locator("dl")).to_be_visible()
        page.wait_for_function(
            "(before) => window.performance.now() > before + 2500", arg=page.evaluate("performance.now()")
        )
        expect(page.locator("details.finding").first.locator("dl")).to_be_visible()
        page.get_by_role("button", name="dp-3", exact=True).click()
        expect(page.locator("#communicators tr[aria-selected=true]")).to_contain_text("dp-3")
        page.keyboard.press("Escape")
        expect(page.locator("#communicators tr[aria-selected=true]")).to_have_count(0)
        page.get_by_role("button", name="count").click()
        expect(page.get_by_role("button", name="count")).to_have_attribute("aria-pressed", "true")
        with page.expect_download() as download:
            page.get_by_role("button", name="Snapshot").click()
        assert download.value.suggested_filename == "ncclscope-snapshot.zip"
        assert complaints == []


def test_the_page_comes_back_when_the_service_does(browser: Browser, repository: Path) -> None:
    port = free_port()
    with fake_service(repository, port):
        page, _ = open_page(browser, port)
    expect(page.locator("#connection")).to_have_attribute("data-state", "lost", timeout=_PATIENCE_MS)
    expect(page.locator("#communicators tbody tr")).to_have_count(33)
    with fake_service(repository, port):
        expect(page.locator("#connection")).to_have_attribute("data-state", "live", timeout=_PATIENCE_MS)


def test_text_from_a_log_never_becomes_markup(browser: Browser, repository: Path) -> None:
    port = free_port()
    with fake_service(repository, port, "--host-prefix", "<img src=x onerror=document.title=1>"):
        page, complaints = open_page(browser, port)
        expect(page.locator("#agents tbody tr").first).to_contain_text("<img src=x")
        assert page.locator("main img, main script").count() == 0
        assert complaints == []

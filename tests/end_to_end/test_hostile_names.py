"""Names that are scripts, in a real browser, on every view of the page and in the report as a file: nothing runs."""

from __future__ import annotations

from pathlib import Path
from typing import Final
from urllib.parse import quote

import pytest
from end_to_end.processes import run_command
from end_to_end.test_page import fake_service, open_page
from playwright.sync_api import Browser, Page, expect

pytestmark = pytest.mark.slow

_SCRIPT: Final = "<script>window.pwned=1</script>"
_IMAGE: Final = "\"'><img src=x onerror=window.pwned=1>"
_HOSTS: Final = f"{_IMAGE}{{{{7*7}}}}javascript:window.pwned=1//<b>"
_JOB: Final = f"{_SCRIPT}{_IMAGE}%2e%2e/</textarea>"
_AT: Final = "#/job/" + quote(_JOB, safe="!'()*")


def harmless(page: Page, complaints: list[str]) -> None:
    """Nothing of the names has become an element, an address or a program."""
    assert page.evaluate("window.pwned") is None
    assert page.locator("img[src='x']").count() == 0
    assert page.evaluate("[...document.scripts].filter((each) => each.textContent.includes('pwned')).length") == 0
    assert page.evaluate("[...document.links].filter((each) => each.protocol === 'javascript:').length") == 0
    assert page.evaluate("[...document.querySelectorAll('*')].filter((each) => each.onerror).length") == 0
    assert complaints == []


_VIEWS: Final = {
    "fleet": ("#/", "#fleet-jobs"),
    "job": (_AT, "#headline"),
    "communicator": (f"{_AT}/communicator/tp-32", "#communicator-ranks"),
    "rank": (f"{_AT}/rank/37", "#rank-groups"),
    "health": ("#/health", "#agents"),
}


@pytest.mark.parametrize("silent", [False, True], ids=["at work", "hanging"])
def test_no_name_runs_on_any_view(browser: Browser, repository: Path, silent: bool) -> None:
    options = ("--host-prefix", _HOSTS, "--job", _JOB, *(("--silent",) if silent else ()))
    with fake_service(repository, *options) as port:
        for at, shows in _VIEWS.values():
            page, complaints = open_page(browser, port, at=at)
            expect(page.locator(shows)).not_to_be_empty()
            expect(page.locator("[aria-busy]")).to_have_count(0)
            for finding in page.locator("details.finding:visible").all():
                finding.locator("summary").first.click()
            expect(page.get_by_text("<img src=x onerror", exact=False).locator("visible=true").first).to_be_visible()
            for chart in page.locator(".js-plotly-plot:visible").all():
                chart.hover(force=True)
            harmless(page, complaints)
            page.context.close()


def test_no_name_runs_in_what_opens_over_a_view_or_is_copied_from_it(browser: Browser, repository: Path) -> None:
    with fake_service(repository, "--host-prefix", _HOSTS, "--job", _JOB) as port:
        page, complaints = open_page(browser, port, at=_AT)
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        finding = page.locator("#findings .finding[data-severity=critical]")
        finding.locator("summary").click()
        expect(finding.locator("[data-collective] svg.picture")).to_be_visible()
        finding.get_by_role("button", name="Copy for Slack").click()
        page.wait_for_function("navigator.clipboard.readText().then((text) => text.startsWith('*late rank*'))")
        said = page.evaluate("navigator.clipboard.readText()")
        assert said.splitlines()[-1] == f"http://127.0.0.1:{port}/{_AT}/communicator/tp-32", "the only address in it"
        with page.expect_download() as download:
            finding.get_by_role("button", name="Save as PNG").click()
        assert "<" not in download.value.suggested_filename
        for button in ("Acknowledge", "Mute"):
            finding.get_by_role("button", name=button).click()
            expect(page.locator("#mark")).to_be_visible()
            page.keyboard.press("Escape")
        page.locator("#keys").click()
        expect(page.locator("#help")).to_be_visible()
        page.keyboard.press("Escape")
        page.locator("#theme").click()
        harmless(page, complaints)
        page.locator("#find").fill(_SCRIPT)
        page.keyboard.press("Enter")
        expect(page.get_by_text("Did you mean").first).to_be_visible()
        harmless(page, [each for each in complaints if "404" not in each])  # what was asked for is not there


def test_no_name_runs_in_the_report_that_is_opened_as_a_file(browser: Browser, tmp_path: Path) -> None:
    job = ("--nodes", "2", "--gpus", "2", "--iterations", "4", "--layers", "1")
    assert run_command("simulate", "--out", str(tmp_path / "job"), *job).returncode == 0
    for log in (tmp_path / "job").rglob("*.log"):
        log.rename(log.with_name(f"{_IMAGE.replace('/', '')}{log.name}"))
    done = run_command("analyze", str(tmp_path / "job"), "--out", str(tmp_path / "out"), "--job", _JOB.replace("/", ""))
    assert done.returncode == 0, done.stderr
    (report,) = (tmp_path / "out").rglob("report.html")
    page = browser.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(report.as_uri())
    expect(page.locator(".js-plotly-plot").first).to_be_visible()
    assert "<img src=x onerror" in page.inner_text("body")
    harmless(page, complaints)

"""What proves a finding, as pictures, in a real browser; and how it is sent to somebody."""

from __future__ import annotations

from pathlib import Path

import pytest
from end_to_end.test_page import fake_service, open_page
from playwright.sync_api import Browser, expect
from service.fake_service import JOB

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (390, "dark")])
def test_an_open_finding_shows_its_proof(browser: Browser, repository: Path, width: int, scheme: str) -> None:
    with fake_service(repository) as port:
        page, complaints = open_page(browser, port, width=width, scheme=scheme)
        late = page.locator("#findings .finding[data-severity=critical]")
        late.locator("summary").click()
        picture = late.locator("[data-collective] svg.picture")
        expect(picture).to_contain_text("of tp-32")
        expect(picture).to_contain_text("rank 37 comes last, 7.")
        expect(picture).to_contain_text("36 · gpu-node04")
        assert picture.locator("rect").count() == 15, "eight transfers, and seven ranks that waited"
        expect(late.locator("dl")).to_contain_text("tp-32 number 100")
        expect(late.locator("dl")).not_to_contain_text("0x")
        expect(late.locator("pre")).to_contain_text("ssh gpu-node04 nvidia-smi -q -d CLOCK,")
        slow = page.locator("#findings .finding[data-severity=warning]")
        slow.locator("summary").click()
        expect(slow.locator("svg.picture")).to_contain_text("dp-35 in red, 31 others in grey")
        expect(slow.locator("svg.picture")).to_contain_text("⚑")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert complaints == []


def test_a_name_that_is_no_hosts_gets_no_command(browser: Browser, repository: Path) -> None:
    with fake_service(repository, "--host-prefix", "x;reboot;") as port:
        page, _ = open_page(browser, port)
        finding = page.locator("#findings .finding[data-severity=critical]")
        finding.locator("summary").click()
        expect(finding.locator("[data-collective] svg.picture")).to_be_visible()
        expect(finding.locator("pre")).to_have_count(0)


def test_a_finding_is_sent_as_text_and_as_a_picture(browser: Browser, repository: Path) -> None:
    with fake_service(repository) as port:
        page, complaints = open_page(browser, port)
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        finding = page.locator("#findings .finding[data-severity=critical]")
        finding.locator("summary").click()
        expect(finding.locator("[data-collective] svg.picture")).to_be_visible()
        finding.get_by_role("button", name="Copy for Slack").click()
        page.wait_for_function("navigator.clipboard.readText().then((text) => text.startsWith('*late rank*'))")
        said = page.evaluate("navigator.clipboard.readText()")
        assert "> Rank 37 on gpu-node04 arrives" in said
        assert said.endswith(f"http://127.0.0.1:{port}/#/job/{JOB}/communicator/tp-32")
        with page.expect_download() as download:
            finding.get_by_role("button", name="Save as PNG").click()
        assert download.value.suggested_filename.startswith("late_rank-")
        assert download.value.path().read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert complaints == []


def test_the_worst_collective_of_a_communicator_leads_to_the_timeline(browser: Browser, repository: Path) -> None:
    with fake_service(repository) as port:
        page, complaints = open_page(browser, port, at=f"#/job/{JOB}/communicator/tp-32")
        expect(page.locator("#collective svg.picture")).to_contain_text("rank 37 comes last")
        with page.expect_response(lambda each: "/timeline?" in each.url and "until_ns" in each.url) as answer:
            page.get_by_role("button", name="show in the timeline").click()
        view = answer.value.json()
        assert view["seconds"] < 0.1
        assert {view["lanes"][lane] for lane in view["lane"]} == {str(rank) for rank in range(32, 40)}
        expect(page.locator("#communicator-timeline .js-plotly-plot")).to_have_count(1)
        assert complaints == []

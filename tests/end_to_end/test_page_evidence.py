"""What proves a finding, as pictures, in a real browser; and how it is sent to somebody."""

from __future__ import annotations

from pathlib import Path

import pytest
from end_to_end.processes import run_command, serving
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
        expect(picture.locator("rect")).to_have_count(15)  # eight transfers, and seven ranks that waited
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


_GROUPS = 17
"""Communicators of eight ranks with TP 2, PP 2 and DP 2: four each of TP, DP, PP and EMBEDDING, and the world."""
_JOB = ("--nodes", "4", "--gpus", "2", "--order", "tp-pp-dp", "--iterations", "8", "--layers", "1")


def names_on_page(browser: Browser, folder: Path, seed: str, hosts: tuple[str, ...]) -> dict[str, list[str]]:
    """The ranks of each communicator that a run's page names; agents come in this order of hosts."""
    assert run_command("simulate", "--out", str(folder / "job"), "--seed", seed, *_JOB).returncode == 0
    with serving(folder / "service.log", "--data", str(folder / "data")) as service:
        for host in hosts:
            done = run_command(
                *("agent", "--once", "--connect", f"127.0.0.1:{service.agents}", "--name", host, "--job", "train"),
                *("--logs", str(folder / "job" / "logs" / f"*.{host}.*log")),
                *("--exports", str(folder / "job" / "nsys" / host)),
            )
            assert done.returncode == 0, done.stderr
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{service.web}/#/job/train")
        rows = page.locator("#communicators tbody a.name")
        expect(rows).to_have_count(_GROUPS)
        expect(page.locator("#communicators tbody a.name", has_text="c2-")).to_have_count(0)
        named: dict[str, list[str]] = {}
        for name in rows.all_inner_texts():
            page.goto(f"http://127.0.0.1:{service.web}/#/job/train/communicator/{name}")
            expect(page.locator("#communicator-name")).to_have_text(name)
            expect(page.locator("#communicator [aria-busy]")).to_have_count(0)
            named[name] = page.locator("#communicator-ranks tbody a.name").all_inner_texts()
            assert named[name]
        page.close()
        return named


def test_two_runs_whose_agents_come_in_another_order_have_the_same_names(browser: Browser, tmp_path: Path) -> None:
    hosts = tuple(f"node{number:02d}" for number in range(4))
    first = names_on_page(browser, tmp_path / "first", "1", hosts)
    second = names_on_page(browser, tmp_path / "second", "2", hosts[::-1])
    assert first == second
    assert first["tp-0"] == ["0", "1"]
    assert len(first) == _GROUPS

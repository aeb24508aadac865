"""The page in a real browser, over a made-up service in a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from emission_samples import small
from end_to_end.processes import PATIENCE_MS, PATIENCE_SECONDS, fetch_json
from playwright.sync_api import Browser, ConsoleMessage, Page, Route, expect
from service.fake_service import JOB, LACKING, NOW_NS
from service.job.plan_samples import pattern_of

from ncclscope_service.serve.routes import to_json

pytestmark = pytest.mark.slow

_CUT_TILES = """[...document.querySelectorAll("#tiles dd")]
  .filter((each) => each.scrollWidth > each.clientWidth).map((each) => each.textContent)"""


@contextmanager
def fake_service(repository: Path, *options: str, port: int = 0, moves: bool = False) -> Generator[int]:
    """A made-up service on that port (0: a free one), which it gives.

    Its time stands still, unless it `moves`: then all is made anew each second, which costs it most of a core.
    """
    script = repository / "tests" / "service" / "fake_service.py"
    command = [sys.executable, str(script), "--port", str(port), *([] if moves else ["--still"]), *options]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def open_page(
    browser: Browser, port: int, *, width: int = 1280, scheme: str = "light", at: str = ""
) -> tuple[Page, list[str]]:
    """The page once it is live, and what the console said that it should not have.

    That the machine's network changed (an interface came or went, as in a container that starts beside the tests)
    cuts the requests under way, also those to 127.0.0.1; the page asks again, and loads itself again where a part of it
    was cut, and this is no fault of it.
    """
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme="dark" if scheme == "dark" else "light"
    )
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    complaints: list[str] = []

    def note(message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"} and "net::ERR_NETWORK_CHANGED" not in message.text:
            complaints.append(message.text)

    page.on("console", note)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(f"http://127.0.0.1:{port}/{at}")
    try:
        expect(page.locator("#connection")).to_have_attribute("data-state", "live")
    except AssertionError as error:
        asked = page.evaluate(
            "performance.getEntriesByType('resource').map((each) => [each.name, each.responseStatus])"
        )
        error.add_note(f"The console said {complaints}; the page asked for {asked}.")
        raise
    return page, complaints


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1440, "dark"), (1110, "light"), (390, "light")])
def test_the_page_shows_it_all_at_one_glance(browser: Browser, repository: Path, width: int, scheme: str) -> None:
    with fake_service(repository) as port:
        page, complaints = open_page(browser, port, width=width, scheme=scheme)
        expect(page.locator("#level")).to_have_text("logs and nsys")
        expect(page.locator("#headline")).to_contain_text(
            re.compile(r"^Step 409 ms, 2\.[234] % slower since \d\d:\d\d UTC: ")
        )
        expect(page.locator("#headline")).to_contain_text("rank 37 on gpu-node04 costs 9.40 ms per step")
        expect(page.locator("#state-line")).to_contain_text("7 of 8 agents connected")
        expect(page.locator("#tiles > div")).to_have_count(4)
        expect(page.locator("#steps .js-plotly-plot")).to_have_count(1)
        expect(page.locator("#steps")).to_contain_text("⚑ Late rank")
        expect(page.locator("details.finding")).to_have_count(2)
        expect(page.locator(".finding[data-severity=critical]")).to_contain_text("Rank 37")
        expect(page.locator(".multiple")).to_have_count(3)
        expect(page.locator(".multiple .js-plotly-plot")).to_have_count(3)
        expect(page.locator("#lost-time .js-plotly-plot")).to_have_count(1)
        expect(page.locator("#plan-verdict")).to_have_text(LACKING)
        expect(page.locator("#plan-speed li").first).to_contain_text("expected 500 ms (480 ms to 520 ms)")
        expect(page.locator("#plan-speed li").last).to_contain_text("(MFU) of 64 H100 SXM")
        expect(page.locator("#plan tbody tr")).to_have_count(2)
        expect(page.locator("#plan tbody tr").last).to_contain_text("layers; UNEXPLAINED")
        is_whole = page.locator("#plan").evaluate("(each) => each.scrollWidth <= each.clientWidth")
        assert is_whole or width < 1280, "the reason is seen without scrolling"
        expect(page.locator("#lost-time-list li").first).to_contain_text("rank 37 on gpu-node04 holds up ranks 32-36")
        expect(page.locator("#lost-time")).to_contain_text("◀ 37")
        expect(page.locator("#communicators tbody tr")).to_have_count(33)
        expect(page.locator("#communicators tbody tr").first).to_contain_text("tp-32")
        for chart in ("traffic", "sizes", "timeline"):
            expect(page.locator(f"#{chart} .js-plotly-plot")).to_have_count(1)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing runs over the side"
        assert page.evaluate(_CUT_TILES) == []
        shots = os.environ.get("NCCLSCOPE_SCREENSHOTS")
        if shots:
            page.screenshot(path=Path(shots) / f"page-{width}-{scheme}.png", full_page=True)
        assert complaints == []


_OVERPRINTED = """() => [...document.querySelectorAll('.js-plotly-plot')].flatMap((plot) => {
  const boxes = [...plot.querySelectorAll('.xtick text, .cbaxis text')]
    .map((text) => [text.textContent, text.getBoundingClientRect()]);
  return boxes.flatMap(([one, a], i) => boxes.slice(i + 1)
    .filter(([, b]) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom)
    .map(([other]) => `${plot.parentElement.id}: ${one} ${other}`));
})"""


@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("at", ["", f"#/job/{JOB}/communicator/tp-32", f"#/job/{JOB}/rank/37"])
def test_no_label_of_an_axis_lies_on_another(browser: Browser, repository: Path, width: int, at: str) -> None:
    with fake_service(repository) as port:
        page, complaints = open_page(browser, port, width=width, at=at)
        expect(page.locator("[id$=timeline] .js-plotly-plot")).to_have_count(1)
        expect(page.locator(":is(#lost-time, #communicator-lost-time, #rank-waits) .js-plotly-plot")).to_have_count(1)
        assert page.evaluate(_OVERPRINTED) == []
        assert complaints == []


def test_a_phone_shows_the_efficiency_of_each_group_without_scrolling(browser: Browser, repository: Path) -> None:
    with fake_service(repository) as port:
        page, complaints = open_page(browser, port, width=390)
        expect(page.locator("#communicators tbody tr")).to_have_count(33)
        for title in ("Bus bandwidth", "Efficiency", "Wait share"):
            expect(page.locator("#communicators thead th", has_text=title)).to_be_visible()
        scroll = page.locator(".communicators .scroll")
        assert scroll.evaluate("(box) => box.scrollWidth - box.clientWidth") == 0
        page.goto(f"http://127.0.0.1:{port}/#/job/{JOB}/communicator/tp-32")
        expect(page.locator("#communicator-ranks tbody tr")).to_have_count(8)
        for table in ("communicator-ranks", "operations"):
            box = page.locator(f"#{table}")
            assert box.evaluate("(box) => box.scrollWidth - box.clientWidth") == 0, table
        assert complaints == []


def test_what_began_before_the_first_known_step_has_its_flag_there(browser: Browser, repository: Path) -> None:
    with fake_service(repository) as port:
        overview = fetch_json(f"http://127.0.0.1:{port}/api/overview")
        steps = fetch_json(f"http://127.0.0.1:{port}/api/jobs/{JOB}/steps")
        assert isinstance(overview, dict)
        assert isinstance(steps, dict)
        overview["findings"][0] |= {"since_ns": steps["started_ns"][0] - 10**9, "until_ns": None}
        overview["findings"][1] |= {"since_ns": steps["started_ns"][0] - 10**9, "until_ns": steps["started_ns"][0]}
        page = _page_of(browser, port, overview)
        expect(page.locator("#steps .annotation")).to_have_count(1)
        range_ms = page.locator("#steps .plot").evaluate("(plot) => plot._fullLayout.xaxis.range.map(Date.parse)")
        assert range_ms == [round(steps["started_ns"][at] / 1e6) for at in (0, -1)], "no flag makes the strip longer"
        page.context.close()


def test_kernels_that_were_read_long_ago_say_so(browser: Browser, repository: Path) -> None:
    with fake_service(repository) as port:
        overview = fetch_json(f"http://127.0.0.1:{port}/api/overview")
        assert isinstance(overview, dict)
        page = _page_of(browser, port, overview)
        expect(page.locator("#state-line")).to_contain_text("agents connected")
        expect(page.locator("#state-line")).not_to_contain_text("kernels until")
        page.context.close()
        overview["now_ns"] += 90 * 10**9
        page = _page_of(browser, port, overview)
        expect(page.locator("#state-line")).to_contain_text(
            re.compile(r"kernels until \d\d:\d\d:\d\d UTC, 9\d s ago|, 2 min ago")
        )
        page.context.close()


def _page_of(browser: Browser, port: int, overview: dict[str, Any]) -> Page:
    """The page as this overview makes it, whatever the service streams."""
    page = browser.new_context().new_page()
    stream = f"event: overview\ndata: {json.dumps(overview)}\n\n"
    page.route("**/api/events", lambda route: route.fulfill(body=stream, content_type="text/event-stream"))
    page.goto(f"http://127.0.0.1:{port}/")
    return page


def test_what_logs_cannot_say_reads_not_recorded(browser: Browser, repository: Path) -> None:
    with fake_service(repository, "--logs-only") as port:
        page, complaints = open_page(browser, port)
        expect(page.locator("#level")).to_have_text("logs only")
        tiles = page.locator("#tiles > div")
        for name in ("Exposed communication", "Wait share", "Efficiency"):
            expect(tiles.filter(has_text=name)).to_contain_text("not recorded")
        expect(page.locator("#state-line")).to_contain_text("kernels not recorded")
        expect(page.locator("#bandwidth-title")).to_have_text("Logged volume")
        expect(page.locator("#lost-time")).to_contain_text("Not recorded")
        assert complaints == []


_VERDICTS: dict[str, tuple[dict[str, Any], bool, str, str]] = {
    "collecting": ({"step": {"steps": 12}}, True, "Collecting: first verdict after about 30 steps", "12 so far"),
    "unknown": ({"step": None}, True, "No problems detected so far", "steps are not known yet"),
    "blind": ({}, False, "Blind: no agent is connected", "last contact"),
    "silent": ({"operations_per_second": 0}, True, "No data: nothing was logged in the last half minute", "watching"),
    "good": ({}, True, "✓ No problems detected in 30 min of data", "watching 33 communicators of 64 processes"),
}


@pytest.mark.parametrize("state", _VERDICTS)
def test_nothing_is_called_healthy_that_is_not_watched(browser: Browser, repository: Path, state: str) -> None:
    changed, is_connected, text, detail = _VERDICTS[state]
    with fake_service(repository) as port:
        overview = fetch_json(f"http://127.0.0.1:{port}/api/overview")
        assert isinstance(overview, dict)
        overview["findings"] = []
        for name, value in changed.items():
            job = overview["jobs"][0]
            job[name] = {**job[name], **value} if isinstance(value, dict) else value
        for agent in overview["agents"]:
            agent["connected"] = is_connected
        stream = f"event: overview\ndata: {json.dumps(overview)}\n\n"
        with browser.new_context() as context:
            page = context.new_page()
            page.route("**/api/events", lambda route: route.fulfill(body=stream, content_type="text/event-stream"))
            page.goto(f"http://127.0.0.1:{port}/")
            expect(page.locator("#findings .calm")).to_contain_text(text)
            expect(page.locator("#findings .calm")).to_contain_text(detail)
            expect(page.locator(".calm[data-state=good]")).to_have_count(1 if state == "good" else 0)


def test_a_page_without_a_job_says_what_to_do(browser: Browser, repository: Path) -> None:
    with fake_service(repository, "--empty") as port:
        page, complaints = open_page(browser, port)
        expect(page.locator("#empty-commands")).to_contain_text(
            "ncclscope agent --connect 127.0.0.1:9797 --logs '/var/log/nccl/*.log' --tls-ca FILE --token-file FILE"
        )
        expect(page.locator("#main")).to_be_hidden()
        assert complaints == []


def test_the_page_is_worked_by_click(browser: Browser, repository: Path) -> None:
    with fake_service(repository, moves=True) as port:
        page, complaints = open_page(browser, port)
        finding = page.locator("#findings details.finding").first
        finding.locator("summary").click()
        expect(finding.locator("dl")).to_contain_text("runbook")
        page.wait_for_function(
            "(before) => window.performance.now() > before + 2500", arg=page.evaluate("performance.now()")
        )
        expect(page.locator("#findings details.finding").first.locator("dl")).to_be_visible()
        page.get_by_role("button", name="count").click()
        expect(page.get_by_role("button", name="count")).to_have_attribute("aria-pressed", "true")
        page.get_by_role("button", name="10 s").first.click()
        expect(page.locator("#timeline-note")).to_contain_text("10.0 s")
        with page.expect_download() as download:
            page.get_by_role("button", name="Snapshot").click()
        assert download.value.suggested_filename == "ncclscope-snapshot.zip"
        page.locator("#communicators").get_by_role("link", name="dp-3", exact=True).click()
        expect(page).to_have_url(re.compile(f"#/job/{JOB}/communicator/dp-3$"))
        expect(page.locator("#communicator-ranks tbody tr")).to_have_count(4)
        page.locator("#communicator-ranks a.name").nth(1).click()
        expect(page).to_have_url(re.compile(f"#/job/{JOB}/rank/11$"))
        expect(page.locator("#rank-groups tbody tr")).to_have_count(3)
        page.go_back()
        expect(page.locator("#communicator-name")).to_have_text("dp-3")
        assert complaints == []


def test_the_page_is_worked_by_keyboard(browser: Browser, repository: Path) -> None:
    with fake_service(repository) as port:
        page, complaints = open_page(browser, port)
        page.keyboard.press("h")
        expect(page.locator("#clocks tbody tr")).to_have_count(8)
        page.keyboard.press("f")
        expect(page.locator("#fleet-jobs tbody tr")).to_have_count(1)
        page.keyboard.press("j")
        communicators = page.locator("#communicators")
        communicators.get_by_role("link", name="tp-32", exact=True).focus()
        page.keyboard.press("ArrowDown")
        expect(communicators.get_by_role("link", name="dp-35", exact=True)).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.locator("#communicator-name")).to_have_text("dp-35")
        page.keyboard.press("]")
        expect(page.locator("#communicator-name")).to_have_text("dp-36")
        page.keyboard.press("[")
        expect(page.locator("#communicator-name")).to_have_text("dp-35")
        page.keyboard.press("p")
        expect(page.locator("#communicator [aria-pressed=true]", has_text="go on")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator("#main")).to_be_visible()
        page.keyboard.press("/")
        page.keyboard.type("37")
        page.keyboard.press("Enter")
        expect(page.locator("#rank-name")).to_have_text("rank 37")
        page.keyboard.press("?")
        expect(page.locator("#help")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator("#help")).to_be_hidden()
        expect(page.locator("#rank-name")).to_be_visible()
        assert complaints == []


def test_a_finding_is_acknowledged_and_muted_by_click(browser: Browser, repository: Path) -> None:
    with fake_service(repository) as port:
        page, complaints = open_page(browser, port)
        finding = page.locator("#findings .finding[data-severity=critical]")
        finding.locator("summary").click()
        finding.get_by_role("button", name="Acknowledge").click()
        dialog = page.get_by_role("dialog", name="Acknowledge")
        expect(dialog.get_by_label("For", exact=True)).to_be_hidden()
        dialog.get_by_label("Note").fill("<b>GPU 3 is hot</b>")
        dialog.get_by_label("Your name").fill("ann")
        dialog.get_by_role("button", name="Acknowledge").click()
        expect(dialog).to_be_hidden()
        expect(finding.locator("summary")).to_contain_text("acknowledged by ann")
        expect(finding.locator("dl")).to_contain_text("by ann: <b>GPU 3 is hot</b>")
        finding.get_by_role("button", name="Mute").click()
        dialog = page.get_by_role("dialog", name="Mute")
        expect(dialog.get_by_label("Your name")).to_have_value("ann")
        dialog.get_by_label("For", exact=True).select_option("8 hours")
        dialog.get_by_label("What").select_option("every late rank of this job")
        dialog.get_by_role("button", name="Mute").click()
        expect(finding.locator("summary")).to_contain_text("muted until")
        marks = page.request.get(f"http://127.0.0.1:{port}/api/findings/marks").json()
        (mute,) = marks["mutes"]
        assert (mute["kind"], mute["job"], mute["finding"], mute["by"]) == ("late_rank", JOB, None, "ann")
        assert mute["until_ns"] - mute["at_ns"] == 8 * 3600 * 10**9
        assert complaints == []


def test_a_finding_is_muted_and_cleared_by_keyboard(browser: Browser, repository: Path) -> None:
    with fake_service(repository, moves=True) as port:
        page, complaints = open_page(browser, port)
        finding = page.locator("#findings .finding[data-severity=critical]")
        finding.locator("summary").focus()
        page.keyboard.press("Enter")
        finding.get_by_role("button", name="Mute").focus()
        page.keyboard.press("Enter")
        expect(page.locator("#mark")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator("#mark")).to_be_hidden()
        expect(page.locator("#main")).to_be_visible()
        expect(finding.get_by_role("button", name="Mute")).to_be_focused()
        page.keyboard.press("Enter")
        page.get_by_label("Note").focus()
        page.keyboard.type("fhjt? known")
        page.keyboard.press("Enter")
        expect(finding.locator("summary")).to_contain_text("muted until")
        expect(finding.get_by_role("button", name="Mute longer")).to_be_visible()
        finding.get_by_role("button", name="Clear").focus()
        page.keyboard.press("Enter")
        page.get_by_label("Your name").focus()
        page.keyboard.press("Enter")
        expect(finding.locator("summary")).not_to_contain_text("muted until")
        assert complaints == []


def test_what_the_service_refuses_is_said_and_thresholds_are_on_the_health_view(
    browser: Browser, repository: Path
) -> None:
    with fake_service(repository) as port:
        page, _ = open_page(browser, port)
        finding = page.locator("#findings .finding[data-severity=critical]")
        finding.locator("summary").click()
        finding.get_by_role("button", name="Mute").click()
        page.route("**/api/findings/mark", lambda route: route.fulfill(status=403, body='{"error": "may read only"}'))
        page.get_by_role("dialog").get_by_role("button", name="Mute").click()
        expect(page.get_by_role("alert")).to_have_text("may read only")
        page.keyboard.press("Escape")
        values = {"hang.rest_seconds": 300, 'job."a-*".hang.rest_seconds': 600}
        page.request.post(f"http://127.0.0.1:{port}/api/settings/change", data={"values": values})
        page.keyboard.press("h")
        expect(page.locator("#settings tbody tr")).to_have_count(2)
        expect(page.locator("#settings")).to_contain_text("hang.rest_seconds")
        expect(page.locator("#settings")).to_contain_text("a-*: 600")


_ADDRESSES = {
    "#/": "#fleet-jobs a.name",
    f"#/job/{JOB}": "#communicators tbody tr",
    f"#/job/{JOB}/communicator/dp-35": "#communicator-findings .finding",
    f"#/job/{JOB}/rank/37": "#rank-findings .finding",
    "#/health": "#agents tbody tr",
}


@pytest.mark.parametrize(("width", "scheme"), [(1280, "dark"), (390, "light")])
def test_an_address_leads_to_its_view(browser: Browser, repository: Path, width: int, scheme: str) -> None:
    with fake_service(repository) as port:
        for at, shown in _ADDRESSES.items():
            page, complaints = open_page(browser, port, width=width, scheme=scheme, at=at)
            expect(page.locator(shown).first).to_be_visible()
            expect(page.locator("main:visible")).to_have_count(1)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{at}: nothing runs over the side"
            assert page.evaluate("document.documentElement.dataset.theme") == scheme
            assert complaints == []
            page.context.close()


def test_the_link_of_an_alert_opens_its_finding_once(browser: Browser, repository: Path) -> None:
    with fake_service(repository) as port:
        page, complaints = open_page(browser, port, at=f"#/job/{JOB}/finding/late_rank/37")
        finding = page.locator("#findings details[data-address='late_rank/37']")
        expect(finding).to_have_attribute("open", "")
        expect(page.locator("#findings details[open]")).to_have_count(1)
        expect(finding).to_be_in_viewport()
        finding.locator("summary").click()
        expect(finding.locator("dl")).to_be_hidden()
        page.goto(f"http://127.0.0.1:{port}/#/job/{JOB}/finding/bandwidth_drop/35,43,51,59")
        expect(page.locator("#findings details[open]")).to_have_count(1)
        expect(page.locator("#findings details[data-address='bandwidth_drop/35,43,51,59']")).to_have_attribute(
            "open", ""
        )
        assert complaints == []


def test_a_page_that_came_in_part_is_loaded_again(browser: Browser, repository: Path) -> None:
    with fake_service(repository) as port:
        page = browser.new_page()
        page.route("**/static/plan.js", lambda route: route.abort("connectionreset"), times=1)
        page.goto(f"http://127.0.0.1:{port}/")
        expect(page.locator("#connection")).to_have_text("page incomplete, loading again")
        expect(page.locator("#connection")).to_have_attribute("data-state", "live")
        page.context.close()


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (1440, "dark"), (390, "light")])
def test_the_plan_shows_who_should_send_to_whom_beside_who_does(
    browser: Browser, repository: Path, width: int, scheme: str
) -> None:
    """Of a simulated job whose description has twice its layers, and of one without whole iterations."""
    wrong = pattern_of(small(tp=2, pp=2, dp=2, iterations=8), "layers=8")
    experts = pattern_of(small("experts=4,uneven", dp=4, ep=4, layers=2, nccl="2.27.5", iterations=8)).experts
    with fake_service(repository) as port:
        page, complaints = open_page(browser, port, width=width, scheme=scheme)
        expect(page.locator("#plan-expected .js-plotly-plot")).to_have_count(1)
        expect(page.locator("#plan-observed")).to_have_text(
            "Not recorded: no whole iteration of all ranks is in memory."
        )
        body = to_json(replace(wrong, experts=experts)).decode()
        page.route("**/plan/pattern", lambda route: route.fulfill(body=body, content_type="application/json"))
        page.reload()
        for square in ("plan-expected", "plan-observed"):
            expect(page.locator(f"#{square} .js-plotly-plot .hm image")).to_have_count(1)
        expect(page.locator("#plan-traffic-note")).to_contain_text(
            "bytes of an iteration, by rank; observed: the mean of"
        )
        lines = page.locator("#plan-checks li")
        expect(lines.first).to_contain_text(re.compile(r"rank \d to \d: .* where .* are expected"))
        expect(page.locator("#plan-checks")).to_contain_text(
            "32 of 32 all-to-alls of tokens, equal or transposed in pairs"
        )
        expect(page.locator("#plan-checks")).to_contain_text("rhythm of stage 1 (rank 4): 8 of 8 blocks")
        expect(page.locator("#plan-checks li.guilty")).to_have_count(7)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing runs over the side"
        shots = os.environ.get("NCCLSCOPE_SCREENSHOTS")
        if shots:
            page.locator("#plan-traffic-card").screenshot(path=Path(shots) / f"plan-{width}-{scheme}.png")
        assert complaints == []


def test_the_topology_shows_the_late_gpu_and_the_slow_link_in_red(browser: Browser, repository: Path) -> None:
    with fake_service(repository) as port:
        page, complaints = open_page(browser, port)
        expect(page.locator("#layout [data-rank]")).to_have_count(64)
        expect(page.locator("#layout [data-rank][data-tone=bad]")).to_have_attribute("data-rank", "37")
        expect(page.locator("#layout rect[data-host][data-tone=bad]")).to_have_attribute("data-host", "gpu-node06")
        # The links of dp-35 at that host, no other.
        expect(page.locator("#layout path[data-tone=bad] title")).to_contain_text(["dp-35", "dp-35"])
        page.locator("#layout a:has([data-rank='37'])").click()
        expect(page.locator("#rank-name")).to_have_text("rank 37")
        assert complaints == []


def test_what_was_drawn_of_another_group_is_not_shown_under_the_name_of_this_one(
    browser: Browser, repository: Path
) -> None:
    with fake_service(repository) as port:
        page, complaints = open_page(browser, port, at=f"#/job/{JOB}/communicator/tp-0")
        ranks = page.locator("#communicator-ranks tbody a.name")
        expect(ranks).to_have_text([str(rank) for rank in range(8)])
        held: list[Route] = []

        def hold(route: Route) -> None:
            held.append(route)

        page.route("**/communicators/tp-8?range=*", hold)
        page.goto(f"http://127.0.0.1:{port}/#/job/{JOB}/communicator/tp-8")
        expect(page.locator("#communicator-name")).to_have_text("tp-8")
        expect(page.locator("#communicator-ranks")).to_be_hidden()
        held[0].continue_()
        expect(ranks).to_have_text([str(rank) for rank in range(8, 16)])
        expect(page.locator("#communicator-ranks")).to_be_visible()
        assert complaints == []


_HIDDEN_BUT_SHOWN = """[...document.querySelectorAll("[hidden]")]
  .filter((each) => getComputedStyle(each).display !== "none").map((each) => each.id)"""
"""Found and judged in one go: the page shows and hides while the test looks."""


def test_what_is_hidden_is_not_seen(browser: Browser, repository: Path) -> None:
    with fake_service(repository) as port:
        page, _ = open_page(browser, port)
        page.evaluate("document.getElementById('plan-card').hidden = true")
        assert page.evaluate(_HIDDEN_BUT_SHOWN) == []


def test_a_stream_that_never_answers_is_asked_for_again(browser: Browser, repository: Path) -> None:
    with fake_service(repository) as port, browser.new_context() as context:
        page = context.new_page()
        page.clock.install()
        swallowed = list[Route]()
        page.route("**/api/events", lambda route: route.continue_() if swallowed else swallowed.append(route))
        page.goto(f"http://127.0.0.1:{port}/")
        page.clock.run_for(29_000)
        expect(page.locator("#connection")).to_have_attribute("data-state", "waiting")
        page.clock.run_for(3_000)
        expect(page.locator("#connection")).to_have_attribute("data-state", "live")
        assert len(swallowed) == 1


def test_how_a_silent_job_stands_is_shown_and_of_another_nothing(browser: Browser, repository: Path) -> None:
    with fake_service(repository, "--silent") as port:
        page, complaints = open_page(browser, port)
        expect(page.locator("#verdict-title")).to_have_text("Silent: hang, as its logs stand")
        expect(page.locator("#verdict-summary")).to_have_text("rank 37 never enqueued operation 400 of TP group tp-32")
        rows = page.locator("#verdict-standing tbody tr")
        expect(rows).to_have_count(2)
        expect(rows.first).to_contain_text("RuntimeError: <b>bad</b>")
        rows.last.get_by_role("link", name="37").first.click()
        expect(page.locator("#rank-name")).to_have_text("rank 37")
        assert not complaints
    with fake_service(repository) as port:
        page, _ = open_page(browser, port)
        expect(page.locator("details.finding")).to_have_count(2)
        expect(page.locator("#verdict")).to_be_hidden()


def test_what_an_address_names_that_is_not_there_is_said(browser: Browser, repository: Path) -> None:
    with fake_service(repository) as port:
        page, _ = open_page(browser, port, at=f"#/job/{JOB}/rank/99999")
        expect(page.locator("#rank-missing")).to_contain_text("has no rank 99999: unknown, or gone.")
        expect(page.locator("#rank-missing")).to_contain_text("Did you mean 0, 63?")
        expect(page.locator("#rank section:visible")).to_have_count(0)
        refused = list[str]()
        page.on("response", lambda answer: refused.append(answer.url) if answer.status == 404 else None)
        page.goto(f"http://127.0.0.1:{port}/#/job/{JOB}/communicator/none-1")
        expect(page.locator("#communicator-missing")).to_contain_text("no communicator 'none-1': unknown, or gone.")
        began_ms = page.evaluate("performance.now()")
        page.wait_for_function("(began) => performance.now() > began + 6000", arg=began_ms, timeout=PATIENCE_MS)
        assert len(refused) == len({url.partition("?")[0] for url in refused}), "what is not there is asked once"
        page.goto(f"http://127.0.0.1:{port}/#/job/no%20such%20job")
        expect(page.locator("#empty")).to_contain_text("There is no job no such job")
        expect(page.locator("#empty-others").get_by_role("link", name=JOB)).to_have_attribute("href", f"#/job/{JOB}")


def test_the_reader_chooses_between_dark_and_light(browser: Browser, repository: Path) -> None:
    with fake_service(repository) as port:
        page, complaints = open_page(browser, port)
        ground = "getComputedStyle(document.body).backgroundColor"
        light = page.evaluate(ground)
        page.keyboard.press("t")
        page.wait_for_function(f"(light) => {ground} !== light", arg=light)
        page.reload()
        expect(page.locator("html")).to_have_attribute("data-theme", "dark")
        assert complaints == []


def test_four_thousand_ranks_fit_on_the_page(browser: Browser, repository: Path) -> None:
    with fake_service(repository, "--nodes", "512") as port:
        page, complaints = open_page(browser, port)
        expect(page.locator("#state-line")).to_contain_text("4,096 processes")
        expect(page.locator("#lost-time-note")).to_contain_text("64 of 512 hosts")
        expect(page.locator("#traffic-note")).to_contain_text("by hosts")
        expect(page.locator("#timeline .js-plotly-plot")).to_have_count(1)
        page.goto(f"http://127.0.0.1:{port}/#/job/{JOB}/rank/4000")
        expect(page.locator("#rank-tiles")).to_contain_text("gpu-node500")
        assert complaints == []


def test_the_runbook_of_a_finding_is_served(browser: Browser, repository: Path) -> None:
    with fake_service(repository) as port:
        page, complaints = open_page(browser, port)
        page.goto(f"http://127.0.0.1:{port}/runbooks#late_rank")
        expect(page.locator("h2#late_rank")).to_be_in_viewport()
        expect(page.locator("main")).to_contain_text("the GPU that is named differs from its neighbours")
        assert complaints == []


def test_the_page_comes_back_when_the_service_does(browser: Browser, repository: Path) -> None:
    with fake_service(repository) as port:
        page, _ = open_page(browser, port, at=f"#/job/{JOB}/communicator/dp-3")
        expect(page.locator("#communicator-ranks tbody tr")).to_have_count(4)
    expect(page.locator("#connection")).to_have_attribute("data-state", "lost")
    expect(page.locator("#communicator-ranks tbody tr")).to_have_count(4)
    with fake_service(repository, port=port, moves=True):
        expect(page.locator("#connection")).to_have_attribute("data-state", "live")
        with page.expect_response("**/communicators/dp-3?range=*") as answer:
            pass
        assert answer.value.ok, "the view asks on"


def test_text_from_a_log_never_becomes_markup(browser: Browser, repository: Path) -> None:
    with fake_service(repository, "--host-prefix", "<img src=x onerror=document.title=1>") as port:
        page, complaints = open_page(browser, port)
        for at in ("#/health", f"#/job/{JOB}/rank/0", f"#/job/{JOB}/communicator/tp-0", f"#/job/{JOB}"):
            page.goto(f"http://127.0.0.1:{port}/{at}")
            expect(page.locator("main:visible")).to_contain_text("<img src=x")
            assert page.locator("main img, main script").count() == 0
        expect(page.locator("#node-graph figcaption").first).to_contain_text("<img src=x")
        assert complaints == []


_AXES = """() => Object.fromEntries([...document.querySelectorAll('.view:not([hidden]) .js-plotly-plot')]
  .filter((plot) => plot._fullLayout.xaxis.type === 'date')
  .map((plot, i) => [`${plot.closest('[id]').id} ${i}`,
    plot._fullLayout.xaxis.range.map((at) => new Date(at).getTime())]))"""

_FIRST_X = """(plot) => { const { x, x0 } = plot.data[0]; return x ? new Date(x[0]).getTime() : x0; }"""


def test_all_charts_over_time_reach_back_to_the_start_of_the_job(browser: Browser, repository: Path) -> None:
    """On one axis, with one cursor, and they show what the API says."""
    with fake_service(repository) as port:
        at = f"http://127.0.0.1:{port}/api"
        (job,) = _object(fetch_json(f"{at}/overview"))["jobs"]
        begin_ms, now_ms = job["begin_ns"] / 1e6, NOW_NS / 1e6
        page, complaints = open_page(browser, port, at=f"#/job/{JOB}")
        expect(page.locator("#lost-time .js-plotly-plot")).to_have_count(1)
        page.evaluate("scrollTo(0, 300)")
        page.keyboard.press("r")
        expect(page.get_by_role("button", name="whole job")).to_have_attribute("aria-pressed", "true")
        expect(page).to_have_url(re.compile(rf"#/job/{JOB}\?range=job$"))
        assert page.evaluate("scrollY") == 300, "it is the same view"
        expect(page.locator("#steps-note")).not_to_contain_text("shaded")
        page.wait_for_function(f"() => Object.values(({_AXES})()).length === 5")
        axes = page.evaluate(_AXES)
        page.wait_for_function(
            f"(begin) => Object.values(({_AXES})()).every(([from]) => Math.abs(from - begin) < 1)", arg=begin_ms
        )
        axes = page.evaluate(_AXES)
        assert all(range_ms == pytest.approx([begin_ms, now_ms], abs=1) for range_ms in axes.values()), axes
        bandwidth = _object(fetch_json(f"{at}/jobs/{JOB}/bandwidth?range=job"))
        courses = {each["alias"]: each["busbw_history"] for each in bandwidth["communicators"]}
        drawn = page.locator(".multiple .plot").first.evaluate("(plot) => plot.data.map(({name, y}) => [name, y])")
        assert len(drawn) == 8
        for name, values in drawn:
            expected = [None if each is None else pytest.approx(each / 1e9) for each in courses[name]]
            assert values == expected, name
        lost = _object(fetch_json(f"{at}/jobs/{JOB}/lost-time?range=job"))
        cells = page.locator("#lost-time .plot").evaluate("(plot) => plot.data[0].z.map((row) => [...row])")
        assert cells == [[None if each is None else each / 1000 for each in row["lost_us"]] for row in lost["rows"]]
        assert max(lost["rows"][18]["lost_us"][:80], key=lambda each: each or 0) == 6000, "rank 18, long ago"
        for chart in ("#lost-time .plot", ".multiple .plot >> nth=0"):
            first_ms = page.locator(chart).evaluate(_FIRST_X)
            assert abs(first_ms - begin_ms) < 60_000, chart
        box = page.locator("#steps .plot").bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60)
        expect(page.locator(".view:not([hidden]) .cursor:not([hidden])")).to_have_count(5)
        # Views of the job keep the range; the fleet has none.
        page.locator("#communicators a.name").first.click()
        expect(page).to_have_url(re.compile(r"\?range=job$"))
        expect(page.locator("#series .js-plotly-plot")).to_have_count(1)
        page.wait_for_function(f"(begin) => Object.values(({_AXES})()).every(([from]) => Math.abs(from - begin) < 1)",
                               arg=begin_ms)  # fmt: skip
        expect(page.locator("#communicator-lost-time-note")).to_contain_text("as far as memory reaches")
        page.get_by_role("button", name="5 min").click()
        page.wait_for_function(f"(begin) => Object.values(({_AXES})()).every(([from]) => from > begin + 60000)",
                               arg=begin_ms)  # fmt: skip
        expect(page).not_to_have_url(re.compile("range"))
        page.goto(f"http://127.0.0.1:{port}/#/job/{JOB}/rank/37?range=job")
        expect(page.locator("#rank-waits .js-plotly-plot")).to_have_count(1)
        page.wait_for_function(f"(begin) => Object.values(({_AXES})()).every(([from]) => Math.abs(from - begin) < 1)",
                               arg=begin_ms)  # fmt: skip
        page.keyboard.press("f")
        expect(page.locator("[data-range]").first).to_be_hidden()
        assert complaints == []


def test_a_job_with_logs_only_has_its_volume_since_the_start(browser: Browser, repository: Path) -> None:
    with fake_service(repository, "--logs-only") as port:
        page, complaints = open_page(browser, port, at=f"#/job/{JOB}?range=job")
        expect(page.locator("#bandwidth-title")).to_have_text("Logged volume")
        expect(page.locator(".multiple .js-plotly-plot")).to_have_count(4)
        known = page.locator(".multiple .plot").first.evaluate(
            "(plot) => plot.data[0].y.filter((each) => each !== null).length"
        )
        assert known > 170, "half an hour of ten seconds"
        assert complaints == []


def _object(answer: object) -> dict[str, Any]:
    assert isinstance(answer, dict)
    return cast("dict[str, Any]", answer)

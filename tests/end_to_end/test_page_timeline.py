"""The timeline of the page in a real browser: it draws what the API answers, and hatches what is not known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from end_to_end.test_page import fake_service, open_page
from playwright.sync_api import Browser, Page, Response, expect

pytestmark = pytest.mark.slow

_DRAWN = """() => {
  const plot = document.querySelector("#timeline .plot");
  const length = (trace) => trace.type === "bar" ? trace.x.reduce((all, each) => all + each, 0)
    : trace.x.reduce((all, to, i) => i % 3 === 1 ? all + to - trace.x[i - 1] : all, 0);
  const bars = plot.data.filter((trace) => trace.mode !== "markers");
  return { range: plot._fullLayout.xaxis.range, lengths: bars.map((trace) => [trace.name, length(trace)]) };
}"""


def drawn_like(page: Page, view: dict[str, Any]) -> None:
    """The chart shows the whole stretch of that answer, and as much waiting, transfer and unknown time, in ms."""
    page.wait_for_function(
        """(view) => { const plot = document.querySelector("#timeline .plot");
          return plot?.beginNs === view.begin_ns && plot._fullLayout.xaxis.range[1] === view.seconds * 1000; }""",
        arg={"begin_ns": view["begin_ns"], "seconds": view["seconds"]},
    )
    drawn = page.evaluate(_DRAWN)
    assert drawn["range"] == [0, view["seconds"] * 1000]
    lengths: dict[str, float] = {}
    for name, length in drawn["lengths"]:
        lengths["transfer" if name.endswith("transfers") else name] = length + lengths.get(
            "transfer" if name.endswith("transfers") else name, 0.0
        )
    known = [i for i, wait in enumerate(view["wait_us"]) if wait is not None]
    waited = sum(view["wait_us"][i] for i in known) / 1000
    transferred = sum(view["duration_us"][i] for i in known) / 1000 - waited
    unknown = sum(view["unknown_to_us"]) - sum(view["unknown_from_us"])
    assert lengths["waiting"] == pytest.approx(waited, abs=0.1)
    assert lengths["transfer"] == pytest.approx(transferred, abs=0.1)
    assert lengths.get("no data", 0.0) == pytest.approx(unknown / 1000, abs=0.1)
    assert sum(each["kernels"] for each in view["sums"]) == sum(view["kernels"])


def is_timeline(answer: Response) -> bool:
    return "/timeline?" in answer.url


def test_ten_seconds_are_ten_seconds_and_a_zoom_shows_single_kernels(browser: Browser, repository: Path) -> None:
    with fake_service(repository, "--per-minute", "600") as port:
        page, complaints = open_page(browser, port)
        expect(page.locator("#timeline .js-plotly-plot")).to_have_count(1)
        with page.expect_response(lambda each: is_timeline(each) and "seconds=10&" in f"{each.url}&") as answer:
            page.get_by_role("button", name="10 s").first.click()
        view = answer.value.json()
        page.keyboard.press("p")
        assert view["seconds"] == 10
        assert view["resolution_us"] > 0
        assert max(view["kernels"]) > 1
        drawn_like(page, view)
        expect(page.locator("#timeline-note")).to_contain_text("10.0 s ending")
        expect(page.locator("#timeline-note")).to_contain_text("drawn together")
        expect(page.locator("#timeline-sums")).to_contain_text("kernels, waiting")
        box = page.locator("#timeline .nsewdrag").bounding_box()
        assert box is not None
        with page.expect_response(lambda each: is_timeline(each) and "until_ns" in each.url) as answer:
            page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 0.5 * box["height"])
            page.mouse.down()
            page.mouse.move(box["x"] + 0.55 * box["width"], box["y"] + 0.5 * box["height"], steps=4)
            page.mouse.up()
        closer = answer.value.json()
        assert closer["seconds"] == pytest.approx(0.5, rel=0.1)
        assert closer["begin_ns"] == pytest.approx(view["begin_ns"] + 5e9, abs=0.1e9)
        assert closer["resolution_us"] == 0
        assert set(closer["kernels"]) == {1}
        drawn_like(page, closer)
        with page.expect_response(lambda each: is_timeline(each) and "until_ns" not in each.url):
            page.locator("#main").get_by_role("button", name="zoom out").click()
        assert complaints == []


def test_a_lane_without_data_is_hatched(browser: Browser, repository: Path) -> None:
    with fake_service(repository) as port:
        page, complaints = open_page(browser, port)
        view = page.request.get(f"http://127.0.0.1:{port}/api/jobs/llama-70b-pretrain/timeline?seconds=60").json()
        assert view["unknown_lane"], "eighteen seconds of each minute are not captured"
        page.route("**/timeline?*", lambda route: route.fulfill(json=view))
        page.reload()
        expect(page.locator("#timeline .js-plotly-plot")).to_have_count(1)
        drawn_like(page, view)
        expect(page.locator("#timeline-legend")).to_contain_text("no data")
        assert complaints == []

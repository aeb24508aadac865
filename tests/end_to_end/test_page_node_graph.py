"""NCCL's graph of a node on the page, in a real browser: the picture says what the API says."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from end_to_end.processes import PATIENCE_MS, fetch_json
from end_to_end.test_page import fake_service, open_page
from playwright.sync_api import Browser, Page, Route, expect
from service.fake_service import JOB, NOW_NS
from service.printed_job import PrintedJob
from topology_samples import FUSED

from ncclscope_service.intake.aliases import Aliases
from ncclscope_service.serve.routes import to_json
from ncclscope_service.show.details import query_job
from ncclscope_service.show.node_graph import node_graph_input, node_graph_view

pytestmark = pytest.mark.slow

_DRAWN = """() => [...document.querySelectorAll("#node-graph path[data-ends]")].map((path) => [path.dataset.ends,
  path.dataset.link, Number(path.getAttribute("stroke-width")), path.querySelector("title").textContent])"""
_TABLE = """() => [...document.querySelectorAll("#node-graph tbody tr")]
  .map((row) => [...row.cells].map((cell) => cell.textContent))"""


def _said(page: Page, amount: int) -> str:
    """A number of bytes as the page says it."""
    said = page.evaluate("(amount) => import('/static/format.js').then((format) => format.bytes(amount))", amount)
    assert isinstance(said, str)
    return said


def _answer(port: int) -> dict[str, Any]:
    answer = fetch_json(f"http://127.0.0.1:{port}/api/jobs/{JOB}/node-graph")
    assert isinstance(answer, dict)
    return answer


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (1440, "dark"), (390, "light")])
def test_the_picture_shows_what_the_api_says(browser: Browser, repository: Path, width: int, scheme: str) -> None:
    with fake_service(repository) as port:
        page, complaints = open_page(browser, port, width=width, scheme=scheme)
        expect(page.locator("#node-graph figure")).to_have_count(2)
        answer = _answer(port)
        (graph,) = answer["graphs"]
        nodes, links = graph["nodes"], graph["links"]
        drawn = page.locator("#node-graph [data-node]").evaluate_all("(all) => all.map((each) => each.dataset.node)")
        assert Counter(drawn) == Counter(node["kind"] for node in nodes)
        most = max(max(link["bytes"]) for link in links)
        assert most > 0
        found = {ends: rest for ends, *rest in page.evaluate(_DRAWN)}
        assert len(found) == len(links)
        for link in links:
            kind, stroke, title = found[",".join(map(str, link["ends"]))]
            share = max(link["bytes"]) / most
            assert (kind, stroke) == (link["kind"], pytest.approx(1 + 6 * share, abs=0.01))
            assert f"{link['kind']} {link['rates'][0] / 1e9:g} GB/s between " in title
            there, back = (_said(page, amount) for amount in link["bytes"])
            assert title.endswith(f": {there} one way, {back} the other") == (share > 0)
        expect(page.locator("#node-graph a[data-node=GPU]")).to_have_text(
            [re.compile(rf"rank {rank}GPU ") for rank in range(8)]
        )
        expect(page.locator("#node-graph figcaption").first).to_contain_text("gpu-node00; the same graph, not drawn: ")
        expect(page.locator("#node-graph-without")).to_have_text("Not recorded: the graph of gpu-node07.")
        edges = answer["channels"]["edges"]
        arcs = page.locator("#node-graph path[data-channels]")
        expect(arcs).to_have_count(len(edges["rings"]) + len(edges["trees"]))
        expect(arcs.first.locator("title")).to_have_text("0 to 1: 2 channels")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing runs over the side"
        shots = os.environ.get("NCCLSCOPE_SCREENSHOTS")
        if shots:
            card = page.locator("section:has(> #node-graph)")
            card.screenshot(path=Path(shots) / f"node-graph-{width}-{scheme}.png")
        assert complaints == []


def test_the_numbers_can_be_read_and_ranks_opened_by_keyboard(browser: Browser, repository: Path) -> None:
    with fake_service(repository) as port:
        page, complaints = open_page(browser, port, width=390)
        figure = page.locator("#node-graph figure").first
        region = figure.get_by_role("region")
        expect(region).to_have_accessible_name(re.compile("^gpu-node00; the same graph"))
        figure.locator("summary").focus()
        page.keyboard.press("Enter")
        link = max(_answer(port)["graphs"][0]["links"], key=lambda each: max(each["bytes"]))
        row = page.evaluate(_TABLE)[0]
        assert [row[0], *row[3:]] == [
            link["kind"],
            f"{link['rates'][0] / 1e9:g}",
            *(_said(page, n) for n in link["bytes"]),
        ]
        region.focus()
        region.evaluate("(each) => { each.scrollLeft = 90; }")
        gpu = page.locator("#node-graph [data-key='graph 1']")
        gpu.focus()
        drawn = gpu.element_handle()
        page.wait_for_function("(old) => !old.isConnected", arg=drawn, timeout=PATIENCE_MS)  # it is asked for again
        expect(gpu).to_be_focused()
        assert region.evaluate("(each) => each.scrollLeft") == 90, "drawn anew, it stays where the reader was"
        expect(figure.locator("table")).to_be_visible()
        page.keyboard.press("Enter")
        expect(page.locator("#rank-name")).to_have_text("rank 1")
        assert complaints == []


def _shown(browser: Browser, port: int, body: bytes) -> tuple[Page, list[str]]:
    """The page where the service answers this."""

    def answer(route: Route) -> None:
        route.fulfill(body=body, content_type="application/json")

    page, complaints = open_page(browser, port, at="#/health")
    page.route("**/node-graph", answer)
    page.goto(f"http://127.0.0.1:{port}/#/job/{JOB}")
    return page, complaints


def test_hosts_that_multi_node_nvlink_joins_are_drawn_as_one_and_no_graph_is_said(
    browser: Browser, repository: Path
) -> None:
    job = PrintedJob()
    hosts = ("<b>node01", "<b>node02")
    job.communicator(1, [(host, 0) for host in hosts], blocks=dict.fromkeys(hosts, FUSED))
    asked = query_job(job.store(), Aliases(), "job", NOW_NS)
    assert asked is not None
    view = node_graph_view(node_graph_input(asked))
    with fake_service(repository) as port:
        page, complaints = _shown(browser, port, to_json(view))
        caption = page.locator("#node-graph figcaption")
        expect(caption).to_have_text("<b>node01, <b>node02, which multi-node NVLink joins")
        expect(page.locator("#node-graph a[data-node=GPU] title")).to_have_text(
            ["rank 0 (GPU 0-1000) on <b>node01", "rank 1 (GPU 1-1000) on <b>node02"]
        )
        page.context.close()
        nothing = {"graphs": [], "kinds_known": 0, "hosts_without": ["a"], "hosts_without_known": 1}
        page, more = _shown(browser, port, to_json({**nothing, "assumed_ratio": None, "channels": None}))
        expect(page.locator("#node-graph")).to_contain_text("Not recorded: no log has NCCL's graph of a node.")
        expect(page.locator("#node-graph-without")).to_be_empty()
        assert [*complaints, *more] == []

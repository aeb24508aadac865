"""`ncclscope analyze A --compare B`: what changed between two runs, by the command and in a real browser."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from end_to_end.processes import PATIENCE_MS
from playwright.sync_api import Browser, Page

from ncclscope.cli import main

pytestmark = pytest.mark.slow

_SHAPE = ("--nodes", "2", "--gpus", "2", "--tp", "2", "--pp", "1", "--layers", "1", "--microbatches", "2")
_JOB = (*_SHAPE, "--iterations", "24", "--seed", "3")


def _run(*arguments: str) -> str:
    done = CliRunner().invoke(main, list(arguments))
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound run and the same job over a slow link, simulated; the sound one analyzed, the other beside it."""
    folder = tmp_path_factory.mktemp("runs")
    _run("simulate", "--out", str(folder / "sound"), *_JOB)
    _run("simulate", "--out", str(folder / "slow"), *_JOB, "--fault", "slow_link:node=1,factor=0.25")
    _run("analyze", str(folder / "sound"), "--out", str(folder / "sound-out"))
    _run("analyze", str(folder / "slow"), "--compare", str(folder / "sound-out"), "--out", str(folder / "compared"))
    return folder


def _document(out: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((out / "compare.json").read_bytes())
    return document


def test_a_slow_link_is_what_changed_and_comes_first(runs: Path) -> None:
    document = _document(runs / "compared")
    changed = [row for row in document["differences"] if row["is_change"]]
    assert document["changes"] == len(changed) > 0
    first = next(row for row in changed if row["op"] is not None)
    assert (first["parallelism"], first["op"], first["measure"]) == ("DP", "AllReduce", "busbw_bytes_per_second")
    assert 0.2 < first["ratio"] < 0.35
    assert not any(row["parallelism"] == "TP" and row["measure"].startswith("busbw") for row in changed)
    assert document["differences"][: len(changed)] == changed, "changes stand before the rest"


def test_the_folder_of_an_earlier_analysis_gives_what_its_inputs_give(runs: Path, tmp_path: Path) -> None:
    other = [part for name in ("logs", "nsys") for part in ("--compare", str(runs / "sound" / name))]
    _run("analyze", str(runs / "slow"), *other, "--out", str(tmp_path))
    assert _document(tmp_path)["differences"] == _document(runs / "compared")["differences"]


def test_the_same_job_with_other_chance_has_changed_in_nothing_that_matters(runs: Path, tmp_path: Path) -> None:
    _run("simulate", "--out", str(tmp_path / "again"), *_JOB[:-1], "4")
    _run("analyze", str(tmp_path / "again"), "--compare", str(runs / "sound-out"), "--out", str(tmp_path / "out"))
    assert _document(tmp_path / "out")["changes"] == 0
    assert "No change beyond the noise" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def _opened(browser: Browser, page_of: Path, width: int, scheme: str) -> tuple[Page, list[str]]:
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme="dark" if scheme == "dark" else "light"
    )
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    faults: list[str] = []
    page.on("console", lambda message: faults.append(message.text) if message.type in {"error", "warning"} else None)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(page_of.as_uri())
    return page, faults


@pytest.mark.parametrize(("width", "scheme"), [(1180, "light"), (1180, "dark"), (480, "light")])
def test_the_page_shows_what_changed_right_after_the_findings(
    browser: Browser, runs: Path, width: int, scheme: str
) -> None:
    page, faults = _opened(browser, runs / "compared" / "report.html", width, scheme)
    assert [text[1:] for text in page.locator("h2").all_inner_texts()[:2]] == ["Findings", "What changed"]
    table = page.locator("table", has=page.locator("caption", has_text="What changed"))
    rows = [text for text in table.locator("tbody tr").all_inner_texts() if not text.startswith("whole run")]
    assert rows[0].startswith("DP AllReduce")
    assert page.locator("#compare-busbw .main-svg, #compare-iterations .main-svg").count() > 1
    drawn = page.locator("#compare-busbw .ytick text").all_text_contents()
    assert any(text.startswith("DP AllReduce") for text in drawn)
    assert {"slow", "sound-out"} <= set(page.locator("#compare-busbw .legendtext").all_text_contents())
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing runs over the side"
    assert page.locator(".plot .main-svg").count() >= page.locator(".plot").count()
    shots = os.environ.get("NCCLSCOPE_SCREENSHOTS")
    if shots:
        page.screenshot(path=Path(shots) / f"compare-{width}-{scheme}.png", full_page=True)
    assert faults == []

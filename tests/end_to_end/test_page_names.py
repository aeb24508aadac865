"""Names on the page are those of every other run of the job: an address that was sent to somebody stays right."""

from __future__ import annotations

from pathlib import Path

import pytest
from end_to_end.processes import run_command, serving
from playwright.sync_api import Browser, expect

pytestmark = pytest.mark.slow

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

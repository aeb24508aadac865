"""The JSON files, the report, the terminal's text, and how all of it is put in place."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from end_to_end.processes import PATIENCE_MS
from plotly.offline import get_plotlyjs
from service.export.small_run import ALL_REDUCE_NAME, SEND_RECV_NAME, logs_only_run, small_run

from ncclscope_models.calibration import calibrations_of
from ncclscope_service.export.directory import WRITERS, write_run
from ncclscope_service.export.report.page import script_json
from ncclscope_service.export.selection import select
from ncclscope_service.export.summary import summary_document
from ncclscope_service.export.tables import schema
from ncclscope_service.export.tables.expected_times_file import calibration_document
from ncclscope_service.export.tables.kernels_file import kernel_totals
from ncclscope_service.export.terminal import terminal_report
from ncclscope_service.export.totals import first_of_launch, totals
from ncclscope_service.store.records import Ending, RankStanding, Verdict
from ncclscope_service.store.tables import Store

CHROMIUM = Path("/usr/bin/chromium")
RUNS: list[Callable[[], Store]] = [small_run, lambda: logs_only_run(with_stamps=True), Store]


def test_clocks_are_as_the_contract_says(tmp_path: Path) -> None:
    document = json.loads(write_run(small_run(), tmp_path)["clocks.json"].read_bytes())
    assert document.keys() == {"reference", "method", "violation_ratio", "hosts"}
    keys = ["offset_ns", "drift_ppm", "at_ns", "sigma_ns", "interval_lo_ns", "interval_hi_ns", "samples", "steps"]
    keys.append("told_by")
    assert list(document["hosts"]["node2"]) == keys
    assert document["hosts"]["node2"]["offset_ns"] == 50e6


def test_findings_are_as_the_contract_says(tmp_path: Path) -> None:
    document = json.loads(write_run(small_run(), tmp_path)["findings.json"].read_bytes())
    keys = [
        "kind",
        "severity",
        "job",
        "comm_id",
        "parallelism",
        "ranks",
        "hosts",
        "since_ns",
        "until_ns",
        "confidence",
        "summary",
        "evidence",
    ]
    assert [list(finding) for finding in document] == [keys, keys]
    assert [finding["until_ns"] is None for finding in document] == [True, False]


def test_the_summary_counts_every_row_and_every_launch_once() -> None:
    document = summary_document(select(small_run()))
    assert document["match"] == {
        "pending": 1,
        "matched": 41,
        "unmatched": 1,
        "not_covered": 2,
        "no_kernel": 1,
        "line_lost": 0,
    }
    assert document["read"] == {
        "sources": 6,
        "read": 107,
        "understood": {"operation": 46, "other_nccl": 40, "init": 12},
        "skipped": {"not_nccl": 7, "torn": 2},
        "torn": 2,
        "numbers_healed": {},
        "numbers_uncertain": 0,
        "alignment_checked": 40,
        "alignment_disagreements": 2,
    }
    sums = totals(select(small_run())).all()
    assert (sums.operations, sums.timed, sums.waits) == (46, 38, 36)
    assert sums.duration_ns == 18 * 800_000 + 18 * 500_000 + 2 * 1_000_000
    assert sums.wait_ratio == pytest.approx(18 * 0.3 / (18 * 0.8 + 18 * 0.5))


def test_what_logs_cannot_tell_is_null_in_the_summary_and_never_zero() -> None:
    document = summary_document(select(logs_only_run(with_stamps=True)))
    assert document["level"] == "logs only"
    [entry] = json.loads(json.dumps(document["operations"]))
    assert (entry["operations"], entry["bytes"]) == (6, 6 << 21)
    absent = ("matched", "duration_ns", "wait_ns", "transfer_ns", "wait_ratio")
    assert {entry[name] for name in absent} == {document["kernels"], document["matched_ratio"]} == {None}
    captured = document["captured"]
    assert isinstance(captured, dict)
    assert [captured[name] for name in ("operations_ratio", "seconds", "graph_launches")] == [None] * 3
    assert "not recorded" not in json.dumps(document)


def test_the_position_of_an_export_is_not_told_and_that_of_a_log_is() -> None:
    store = small_run()
    for state in store.sources:
        state.position = 2**31 - 1
    sources = summary_document(select(store))["sources"]
    assert isinstance(sources, list)
    assert {(source["kind"], source["position"]) for source in sources} == {("nccl_log", 2**31 - 1), ("nsys", None)}


def test_a_version_that_one_process_of_a_job_printed_counts_for_all_of_them() -> None:
    store = small_run()
    store.process_version = {0: "2.19.3+cuda12.3"}
    store.job_versions["job"] = {"2.19.3+cuda12.3"}
    versions = summary_document(select(store))["versions"]
    assert isinstance(versions, dict)
    assert versions["nccl"] == {"2.19.3+cuda12.3": 4}


def test_kernels_of_two_exports_of_one_recording_are_counted_as_duplicates() -> None:
    store = small_run()
    assert kernel_counts(store)["duplicates"] == 0
    again = store.kernels.rows[:7].copy()
    again["source"] = 3
    store.kernels.append(again)
    assert kernel_counts(store)["duplicates"] == 7
    assert sum(total.kernels for total in kernel_totals(select(store))) == 40


def kernel_counts(store: Store) -> dict[str, int]:
    kernels = summary_document(select(store))["kernels"]
    assert isinstance(kernels, dict)
    return kernels


def test_without_an_operation_the_terminal_lists_the_kernels_by_name() -> None:
    store = small_run()
    assert "NCCL kernels" not in terminal_report(select(store))
    store.operations.drop_before(store.operations.next_id)
    text = terminal_report(select(store))
    assert "40 NCCL kernels, none with an operation" in text
    [row] = [line.split() for line in text.splitlines() if SEND_RECV_NAME in line]
    assert row == [SEND_RECV_NAME, "2", "2", "ms", "1", "ms"]
    [row] = [line.split() for line in text.splitlines() if ALL_REDUCE_NAME in line]
    assert row[1] == "38"


def test_without_an_estimate_no_method_and_no_time_of_one_are_named(tmp_path: Path) -> None:
    store = small_run()
    known = store.clocks["job"].hosts["node1"]
    store.clocks["job"] = replace(store.clocks["job"], hosts={"node1": replace(known, samples=0, at_ns=0)})
    paths = write_run(store, tmp_path)
    document = json.loads(paths["clocks.json"].read_bytes())
    assert (document["method"], list(document["hosts"])) == (None, ["node1"])
    assert document["hosts"]["node1"]["at_ns"] is None
    assert "210 ns" not in paths["report.html"].read_text(encoding="utf-8").replace(get_plotlyjs(), "")


def test_the_first_row_of_each_launch_is_found_wherever_it_lies() -> None:
    launches = np.array([3, -1, 5, 3, -1, 5, 1])
    assert first_of_launch(launches).tolist() == [True, False, True, False, False, False, True]


@pytest.mark.parametrize("make", RUNS)
def test_every_run_gives_every_file_and_nothing_else(make: Callable[[], Store], tmp_path: Path) -> None:
    paths = write_run(make(), tmp_path / "new" / "folder")
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == sorted(WRITERS) == sorted(paths)
    assert all(path.stat().st_size > 0 for path in paths.values())


def test_a_run_that_fails_leaves_the_files_of_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(small_run(), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fails(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setitem(WRITERS, "trace.json.gz", fails)
    with pytest.raises(OSError, match="disk full"):
        write_run(Store(), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_second_run_replaces_the_files_of_the_first(tmp_path: Path) -> None:
    write_run(small_run(), tmp_path)
    write_run(Store(), tmp_path)
    assert json.loads((tmp_path / "findings.json").read_bytes()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(WRITERS)


class _Outside(HTMLParser):
    """Collects every attribute that could load or lead anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [f"{tag} {name}={value}" for name, value in attrs if name in {"src", "href", "action", "data"}]


@pytest.mark.parametrize("make", RUNS)
def test_the_report_loads_nothing_from_anywhere(make: Callable[[], Store], tmp_path: Path) -> None:
    text = write_run(make(), tmp_path)["report.html"].read_text(encoding="utf-8")
    own = text.replace(get_plotlyjs(), "")
    assert "http" not in own
    assert "@import" not in own
    outside = _Outside()
    outside.feed(own)
    assert outside.links == []


def test_names_from_logs_cannot_become_markup_or_end_the_script(tmp_path: Path) -> None:
    store = small_run()
    evil = "</script><img src=x onerror=alert(1)>"
    store.process_job[:] = [evil] * 4
    for communicator in store.communicators:
        communicator.parallelism = evil
        communicator.comm_id = evil
    own = write_run(store, tmp_path)["report.html"].read_text(encoding="utf-8").replace(get_plotlyjs(), "")
    assert "<img" not in own.split('<script type="application/json"')[0]
    assert len(re.findall("</script>", own)) == 3
    assert json.loads(script_json({"a": evil + "<!--"})) == {"a": evil + "<!--"}
    assert "<!--" not in script_json({"a": "<!--"})


def test_the_terminal_says_what_was_read_matched_and_found() -> None:
    text = terminal_report(select(small_run()))
    for part in ("6 files (logs and nsys)", "7 not_nccl, 2 torn", "41 matched", "97.6%", "late_rank", "dp-0 0xd0"):
        assert part in text
    assert "<" not in text.replace("<DP>", "")
    logs = terminal_report(select(logs_only_run(with_stamps=False)))
    assert "waiting     not recorded" in logs
    assert "0 s" not in logs


def test_text_from_logs_cannot_move_the_terminals_cursor() -> None:
    store = small_run()
    store.communicators[0].comm_id = "0xa1\x1b[2J\n"
    assert "\x1b" not in terminal_report(select(store))
    assert "0xa1?[2J?" in terminal_report(select(store))


def test_the_docs_name_every_file_and_every_column(repository: Path) -> None:
    text = (repository / "docs" / "outputs.md").read_text(encoding="utf-8")
    for name in WRITERS:
        assert f"## `{name}`" in text
    for file in ("operations", "kernels", "communicators", "efficiency", "traffic"):
        section = text.split(f"## `{file}.parquet`")[1].split("\n## ")[0]
        rows = re.findall(r"^\| `([a-z_]+)` \|", section, re.MULTILINE)
        assert rows == getattr(schema, file.upper()).names


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Debian's chromium to open the report")
@pytest.mark.parametrize("make", RUNS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_opens_the_report_without_an_error(
    make: Callable[[], Store], scheme: Literal["light", "dark"], tmp_path: Path
) -> None:
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - only where there is a browser

    path = write_run(make(), tmp_path)["report.html"]
    faults: list[str] = []
    asked: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"], timeout=PATIENCE_MS)
        page = browser.new_page(color_scheme=scheme)
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())
        plots = page.locator(".plot").count()
        drawn = page.locator(".plot .main-svg").count()
        browser.close()
    assert faults == []
    assert asked == [path.as_uri()]
    assert drawn >= plots


@pytest.mark.parametrize("ending", [*Ending, None])
def test_how_a_job_ended_comes_first_and_where_its_ranks_stood_only_if_they_did_not_end_together(
    ending: Ending | None, tmp_path: Path
) -> None:
    store = small_run()
    if ending is not None:
        standing = RankStanding(
            rank=1, host="node1", comm_id="0xa1", parallelism="TP", enqueued=6, behind=4, stopped_at="0xa1:6",
            waits_for=(), blamed=(), last_words="RuntimeError: bad",
        )  # fmt: skip
        verdict = Verdict(job="job", ending=ending, is_provisional=False, summary="rank 1 <did> it")
        store.verdicts["job"] = replace(verdict, standing=(standing,))
    files = write_run(store, tmp_path)
    text, page = terminal_report(select(store)), files["report.html"].read_text(encoding="utf-8")
    said = "" if ending is None else f"How it ended: {ending}: rank 1 <did> it"
    assert text.startswith(said or "Read")
    assert said.replace("<did>", "&lt;did&gt;") in page
    assert ("  tp-0      1         6       4          -             -  RuntimeError: bad\n" in text) == (
        ending not in (None, Ending.ENDED_TOGETHER)
    )
    document = json.loads(files["summary.json"].read_bytes())["verdicts"]["job"]
    assert document == (ending and {
        "ending": ending.value, "is_provisional": False, "ranks": [], "hosts": [],
        "summary": "rank 1 <did> it", "first_failure": None,
    })  # fmt: skip


def test_of_a_job_that_may_go_on_the_verdict_says_so() -> None:
    store = small_run()
    store.verdicts["job"] = Verdict(job="job", ending=Ending.HANG, is_provisional=True, summary="rank 1 is missing")
    expected = "The job is silent; as its logs stand, it is hang: rank 1 is missing"
    assert terminal_report(select(store)).splitlines()[0] == expected


@pytest.mark.parametrize(
    ("seen", "cards"),
    [
        ({}, None),
        ({"node1": {"mlx5_0:1", "mlx5_1:1"}}, 2),
        ({"node1": {"mlx5_0:1", "mlx5_1:1"}, "node2": {"mlx5_0:1", "mlx5_3:1"}, "elsewhere": {"eth0"}}, 2),
        ({"node1": {"mlx5_0:1", "mlx5_1:1"}, "node2": {"mlx5_0:1"}}, None),
    ],
)
def test_a_calibration_has_the_network_cards_of_a_node_where_nodes_do_not_differ(
    seen: dict[str, set[str]], cards: int | None
) -> None:
    store = small_run()
    store.network_devices.update({("job", host): names for host, names in seen.items()})
    selection = select(store)
    (job,) = calibrations_of(calibration_document(selection, totals(selection)), "calibration.json")
    assert job.network_cards == cards

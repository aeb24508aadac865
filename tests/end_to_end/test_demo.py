"""The demo as a newcomer runs it, scraped by a real Prometheus."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
import urllib.parse
from pathlib import Path
from typing import Any, cast

import pyarrow.parquet as pq
import pytest
from benchmarks.ports import free_port
from end_to_end.processes import PATIENCE_SECONDS, end, fetch, fetch_json, printed_port, running, wait_for

pytestmark = pytest.mark.slow

_PAGE = r"live page +http://127\.0\.0\.1:(\d+)/"
_OUTPUTS = (
    "operations.parquet",
    "kernels.parquet",
    "communicators.parquet",
    "clocks.json",
    "findings.json",
    "summary.json",
    "trace.json.gz",
    "report.html",
)


def _overview(web: int) -> dict[str, Any]:
    return cast("dict[str, Any]", fetch_json(f"http://127.0.0.1:{web}/api/overview"))


def _communicators_with_busbw(web: int) -> int:
    return sum(each["busbw"] is not None for job in _overview(web)["jobs"] for each in job["communicators"])


def _needs(program: str) -> str:
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"needs {program} (Debian's package prometheus), which is not installed")
    return found


def test_the_demo_shows_bandwidth_ends_by_itself_and_leaves_its_files(tmp_path: Path) -> None:
    demo = ("demo", "--for", "60", "--http-port", "0", "--fault", "none", "--snapshot", str(tmp_path / "out"))
    with running(tmp_path / "demo.log", *demo, has_children=True) as process:
        web = printed_port(tmp_path / "demo.log", _PAGE, process)
        wait_for(lambda: _communicators_with_busbw(web) > 0, "a communicator with busbw")
        assert b"ncclscope" in fetch(f"http://127.0.0.1:{web}/")
        assert b"ncclscope_busbw_bytes_per_second{" in fetch(f"http://127.0.0.1:{web}/metrics")
        assert process.wait(PATIENCE_SECONDS) == 0, (tmp_path / "demo.log").read_text()
    for name in _OUTPUTS:
        assert (tmp_path / "out" / name).stat().st_size > 0
    matches = pq.read_table(tmp_path / "out" / "operations.parquet", columns=["match"])["match"].to_pylist()
    assert matches.count("matched") > 0.95 * len(matches)
    assert json.loads((tmp_path / "out" / "findings.json").read_text()) == []


def test_a_real_prometheus_scrapes_the_demo_and_promtool_finds_nothing_wrong(tmp_path: Path) -> None:
    prometheus, promtool = _needs("prometheus"), _needs("promtool")
    own = free_port()
    config = tmp_path / "prometheus.yml"
    with running(tmp_path / "demo.log", "demo", "--http-port", "0", has_children=True) as demo:
        web = printed_port(tmp_path / "demo.log", _PAGE, demo)
        config.write_text(
            "scrape_configs:\n"
            "  - job_name: ncclscope\n"
            "    scrape_interval: 1s\n"
            "    honor_labels: true\n"
            f"    static_configs: [{{targets: ['127.0.0.1:{web}']}}]\n"
        )
        wait_for(lambda: _communicators_with_busbw(web) > 0, "a communicator with busbw")
        checked = subprocess.run(
            [promtool, "check", "metrics"],
            input=fetch(f"http://127.0.0.1:{web}/metrics"),
            capture_output=True,
            check=False,
        )
        assert checked.returncode == 0, checked.stderr.decode() + checked.stdout.decode()
        assert not checked.stderr
        with (tmp_path / "prometheus.log").open("wb") as log:
            server = subprocess.Popen(
                [
                    prometheus,
                    f"--config.file={config}",
                    f"--storage.tsdb.path={tmp_path / 'tsdb'}",
                    f"--web.listen-address=127.0.0.1:{own}",
                    "--enable-feature=exemplar-storage",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            wait_for(lambda: _query(own, 'up{job="ncclscope"} == 1'), "a successful scrape")
            wait_for(lambda: _query(own, "ncclscope_busbw_bytes_per_second > 0"), "bandwidth in Prometheus")
            assert _query(own, 'sum by (parallelism) (ncclscope_operations_total{job="demo"}) > 0')
            assert not _query(own, '{__name__=~"ncclscope_.*_created"}')
            exemplars = "ncclscope_collective_duration_seconds_bucket"
            wait_for(lambda: bool(_exemplars(own, exemplars)), "an exemplar")
            labels = _exemplars(own, exemplars)[0]["exemplars"][0]["labels"]
            assert set(labels) == {"communicator", "coll_seq"}
            assert _query(own, f'ncclscope_communicator_info{{communicator="{labels["communicator"]}"}}')
        finally:
            server.terminate()
            server.wait(PATIENCE_SECONDS)
        assert end(demo) == 0, (tmp_path / "demo.log").read_text()


def _query(port: int, expression: str) -> bool:
    """Whether a query gives anything."""
    url = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
    answer = cast("dict[str, Any]", fetch_json(url))
    return bool(answer["data"]["result"])


def _exemplars(port: int, series: str) -> list[dict[str, Any]]:
    """Exemplars that Prometheus has stored, by series."""
    asked = urllib.parse.urlencode({"query": series, "start": time.time() - 60, "end": time.time()})
    answer = cast("dict[str, Any]", fetch_json(f"http://127.0.0.1:{port}/api/v1/query_exemplars?{asked}"))
    found: list[dict[str, Any]] = answer["data"]
    return found


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc to name the demo's processes")
def test_a_demo_of_which_a_part_was_killed_says_so_and_leaves_no_process_behind(tmp_path: Path) -> None:
    with running(tmp_path / "demo.log", "demo", "--http-port", "0", has_children=True) as demo:
        wait_for(lambda: len(_children(demo.pid)) == 6, "service, cluster and four agents")
        children = _children(demo.pid)
        os.kill(children[-1], signal.SIGKILL)
        assert demo.wait(PATIENCE_SECONDS) == 1
    assert "agent-node03 was ended by SIGKILL" in (tmp_path / "demo.log").read_text()
    assert [child for child in children if Path(f"/proc/{child}").exists()] == []

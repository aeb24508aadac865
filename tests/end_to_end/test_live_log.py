"""A real log, appended in pieces while an agent tails it and is killed on the way, gives what `analyze` gives."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any, cast

import pyarrow.parquet as pq
import pytest
from end_to_end.processes import end, fetch_json, run_command, running, serving, wait_for

_LIVE_ONLY = ("observed_at_ns",)
_LOG = Path("nccl_logs") / "timez-zx-nccl-tests-a100pcie" / "nccl.log"
_PIECES = 60
_KILLS = (15, 30, 45)


def _operations(web: int) -> int:
    overview = cast("dict[str, Any]", fetch_json(f"http://127.0.0.1:{web}/api/overview"))
    return sum(int(job["operations"]) for job in overview["jobs"])


def _rows(out: Path) -> list[dict[str, Any]]:
    table = pq.read_table(out / "operations.parquet").drop_columns(list(_LIVE_ONLY))
    return sorted(table.to_pylist(), key=lambda row: (row["log_file"], row["log_line"], row["op_count"]))


def _pieces(content: bytes, rng: random.Random) -> list[bytes]:
    cuts = sorted(rng.sample(range(1, len(content)), _PIECES - 1))
    return [content[a:b] for a, b in zip([0, *cuts], [*cuts, len(content)], strict=True)]


@pytest.mark.corpus
@pytest.mark.parametrize("seed", [1, 2])
def test_a_log_tailed_by_an_agent_that_is_killed_gives_the_rows_of_analyze(
    corpus: Path, tmp_path: Path, seed: int
) -> None:
    content = (corpus / _LOG).read_bytes()
    log = tmp_path / "logs" / "nccl.log"
    log.parent.mkdir()
    log.touch()
    kept = ("--data", str(tmp_path / "data"), "--snapshot-on-end", str(tmp_path / "live"))
    with serving(tmp_path / "service.log", *kept) as service:
        web = service.web
        follow = ("--connect", f"127.0.0.1:{service.agents}", "--logs", str(log))
        agent = ("agent", *follow, "--job", "default", "--name", "one")
        pieces = _pieces(content, random.Random(seed))
        begun = 0
        for kill_at in (*_KILLS, _PIECES):
            with running(tmp_path / "agent.log", *agent) as process:
                for piece in pieces[begun:kill_at]:
                    with log.open("ab") as stream:
                        stream.write(piece)
                written = content[: sum(map(len, pieces[:kill_at]))]
                if kill_at != _PIECES:
                    # Killed somewhere in the middle of it: when about half of the new lines have arrived.
                    half = (written.count(b": opCount ") + _operations(web)) // 2
                    wait_for(lambda half=half: _operations(web) >= half, "half of the lines")  # type: ignore[misc]
                    process.send_signal(signal.SIGKILL)
                    process.wait()
                else:
                    wait_for(lambda: _operations(web) == content.count(b": opCount "), "every line")
                    assert end(process) == 0
            begun = kill_at
        assert end(service.process) == 0
    done = run_command("analyze", str(log.parent), "--out", str(tmp_path / "offline"))
    assert done.returncode == 0, done.stderr
    live, offline = _rows(tmp_path / "live"), _rows(tmp_path / "offline")
    assert len(live) == content.count(b": opCount ")
    for row in live:
        row["log_file"] = Path(row["log_file"]).name
    assert live == offline

"""Writing at once and playing in pieces give the same files; the truth points at the lines that were written."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from simulator.jobs import log_lines, truth

from ncclscope_simulator import Player, SimulationConfig, parse_faults, write

_SMALL = SimulationConfig(iterations=4, layers=1, microbatches=2, step_seconds=0.1, chunk_seconds=0.4)


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_equal_seeds_give_equal_files_and_other_seeds_other_numbers(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write(SimulationConfig(iterations=2, layers=1, microbatches=2, seed=seed), tmp_path / name)
    assert _contents(tmp_path / "a") == _contents(tmp_path / "b")
    transfers = [{row["transfer_ns"] for row in truth(tmp_path / name)} for name in ("a", "c")]
    assert len(transfers[0] & transfers[1]) < len(transfers[0]) / 10


@pytest.mark.parametrize("seed", range(3))
def test_pieces_of_any_length_give_what_writing_at_once_gives(seed: int, tmp_path: Path) -> None:
    write(_SMALL, tmp_path / "once")
    player = Player(_SMALL, tmp_path / "played")
    random, now = np.random.default_rng(seed), _SMALL.start_ns
    while not player.over or now < player.next_ns:
        now += int(random.exponential(80e6))
        player.advance(now)
    player.finish()
    assert _contents(tmp_path / "played") == _contents(tmp_path / "once")


def test_nothing_is_written_before_its_time(tmp_path: Path) -> None:
    player = Player(_SMALL, tmp_path)
    half = _SMALL.start_ns + 900_000_000
    player.advance(half)
    (clock,) = [
        host
        for name, host in json.loads((tmp_path / "truth" / "job.json").read_text())["hosts"].items()
        if name == "node00"
    ]
    assert clock["offset_ns"] == 0
    stamps = [line[1:27] for line in log_lines(tmp_path) if "] node00:" in line]
    assert stamps
    assert max(stamps) <= "2026-03-02 11:00:00.900000"
    assert len(list(tmp_path.rglob("*.sqlite"))) == 2
    player.finish()


def test_an_endless_job_ends_when_stopped_with_its_step_done(tmp_path: Path) -> None:
    endless = SimulationConfig(iterations=None, layers=1, microbatches=2, step_seconds=0.1)
    player = Player(endless, tmp_path)
    now = endless.start_ns + 1_500_000_000
    player.advance(now)
    assert not player.over
    player.stop(now)
    assert player.end_ns is not None
    assert now < player.end_ns < now + 500_000_000
    player.finish()
    rows = truth(tmp_path)
    assert all(row["end_true_ns"] is not None for row in rows if row["launch_id"] is not None)
    assert sum("Destroy COMPLETE" in line for line in log_lines(tmp_path)) == len(
        {(row["rank"], row["comm_ptr"]) for row in rows}
    )
    with pytest.raises(ValueError, match="number of iterations"):
        write(endless, tmp_path / "other")


def test_a_hung_job_destroys_nothing_and_is_observed_on(tmp_path: Path) -> None:
    config = SimulationConfig(
        iterations=None, layers=1, microbatches=2, step_seconds=0.1, faults=parse_faults(["hang:rank=1,at=1"]),
        chunk_seconds=0.5,
    )  # fmt: skip
    player = Player(config, tmp_path)
    now = config.start_ns + 4_000_000_000
    player.advance(now)
    assert not player.over
    assert len(list(tmp_path.rglob("*.sqlite"))) == 2 * 7
    player.stop(now)
    player.finish()
    assert not any("Destroy" in line for line in log_lines(tmp_path))
    assert json.loads((tmp_path / "truth" / "job.json").read_text())["end_ns"] >= now


def test_a_folder_that_holds_a_job_is_not_written_over(tmp_path: Path) -> None:
    write(_SMALL, tmp_path)
    with pytest.raises(FileExistsError, match="already holds a simulated job"):
        write(_SMALL, tmp_path)


def test_a_job_that_is_far_behind_begins_no_further_step_once_it_is_stopping(tmp_path: Path) -> None:
    endless = SimulationConfig(iterations=None, layers=1, microbatches=2, step_seconds=0.1)
    player = Player(endless, tmp_path)
    an_hour_later = endless.start_ns + 3_600_000_000_000
    looks = iter([False, False, True])
    player.advance(an_hour_later, is_stopping=lambda: next(looks))
    player.stop(an_hour_later)
    player.finish()
    assert {row["iteration"] for row in truth(tmp_path)} == {0, 1}


def test_a_full_disk_is_said_once_and_not_again_when_files_are_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "truth").mkdir()
    (tmp_path / "truth" / "operations.parquet.tmp").symlink_to("/dev/full")
    ignored = list[object]()
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    with pytest.raises(OSError, match="No space left on device"):
        write(_SMALL, tmp_path)
    gc.collect()
    assert ignored == []

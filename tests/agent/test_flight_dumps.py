"""Dumps of the Flight Recorder are read as they appear, each state of a file once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from agent.flight_samples import as_pytorch_pickles, dump, entry

from ncclscope_agent.files.flight_dumps import FlightDumpFollower
from ncclscope_wire.batch import Batch
from ncclscope_wire.facts import FlightRecord
from ncclscope_wire.messages import Position

WAITING = as_pytorch_pickles(dump(entry(1), entry(2), entry(3, "started")))


def follower(folder: Path) -> FlightDumpFollower:
    return FlightDumpFollower([str(folder / "nccl_trace_rank_*")])


def polled(of: FlightDumpFollower, times: int = 1) -> list[Batch]:
    return [batch for nth in range(times) for batch in of.poll(nth)]


def test_a_dump_is_read_once_it_is_whole(tmp_path: Path) -> None:
    dumps, path = follower(tmp_path), tmp_path / "nccl_trace_rank_12"
    assert polled(dumps, 2) == []
    path.write_bytes(WAITING[:-40])
    assert polled(dumps, 2) == []
    assert dumps.statistics().files_waiting == 1
    path.write_bytes(WAITING)
    (batch,) = polled(dumps, 3)
    (record,) = batch.facts
    assert isinstance(record, FlightRecord)
    assert (record.global_rank, record.sequence) == (12, 3)
    assert (batch.source.name, batch.begin, batch.end, batch.is_last) == ("nccl_trace_rank_12", 0, 1, True)


def test_a_dump_that_is_written_again_is_another_source(tmp_path: Path) -> None:
    dumps, path = follower(tmp_path), tmp_path / "nccl_trace_rank_0"
    path.write_bytes(WAITING)
    (first,) = polled(dumps)
    path.write_bytes(as_pytorch_pickles(dump(entry(1), entry(2), entry(3), entry(4, "started"))))
    (second,) = polled(dumps, 2)
    assert first.source.key != second.source.key
    assert [fact.sequence for fact in second.facts if isinstance(fact, FlightRecord)] == [4]


def test_after_a_restart_what_the_service_has_is_not_read_again(tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(WAITING)
    batches = polled(follower(tmp_path))
    again = follower(tmp_path)
    again.reset({batches[0].source.key: Position(end=1, end_line=0, is_complete=True)})
    assert [batch.source.name for batch in polled(again, 2)] == ["nccl_trace_rank_1"]
    assert again.holds(batches[1].source.key, Position(end=0, end_line=0))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(WAITING[:-40], id="cut off"),
        pytest.param(b"\x80\x02cos\nsystem\n(X\x02\x00\x00\x00lstR" + WAITING, id="a call"),
        pytest.param(WAITING + b" " * (17 << 20), id="too large"),
    ],
)
def test_what_stays_unreadable_is_one_gap(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "nccl_trace_rank_3").write_bytes(data)
    batches = polled(follower(tmp_path), 30)
    assert [(gap.reason, gap.amount) for batch in batches for gap in batch.gaps] == [("unreadable_dump", 1)]


def test_other_files_links_and_pipes_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").write_bytes(WAITING)
    (tmp_path / "nccl_trace_rank_1").symlink_to(tmp_path / "notes")
    (tmp_path / "nccl_trace_rank_2").write_text("something else")
    os.mkfifo(tmp_path / "nccl_trace_rank_3")
    dumps = follower(tmp_path)
    assert polled(dumps, 12) == []
    assert dumps.statistics().skipped == {"file_is_a_link": 12, "file_not_a_dump": 1}


def test_many_dumps_at_once_are_read_in_turns(tmp_path: Path) -> None:
    for rank in range(20):
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(WAITING)
    dumps = follower(tmp_path)
    first = polled(dumps)
    assert dumps.has_more
    rest = polled(dumps, 3)
    assert 0 < len(first) < 20
    assert len(first) + len(rest) == 20
    assert not dumps.has_more

"""A job starts again in the same log (mode "w", the same inode) while its agent is away, as in a pod: same host, same
pid, lines of the same width, so that a line ends where the agent's reading did.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from agent.log_samples import operation_line
from agent.released_logs import gaps, op_counts, read_all

from ncclscope_agent.files.logs import LogFollower
from ncclscope_wire.batch import Batch
from ncclscope_wire.messages import Position

SECOND = 1_000_000_000
SAME_HEAD = 12
"""As many lines fill the first kilobyte, and are the same in both runs."""


def run(count: int, *, begin: int, same_head: bool = False) -> bytes:
    """The log of a run of so many operations; all lines have the same length."""
    numbers = [number if same_head and number < SAME_HEAD else begin + number for number in range(count)]
    return "".join(operation_line(op_count=f"{number:06x}") + "\n" for number in numbers).encode()


def after(batches: list[Batch]) -> dict[str, Position]:
    """Where the service is."""
    return {
        each.source.key: Position(
            end=each.end, end_line=each.end_line, is_complete=each.is_last, content_check=each.content_check
        )
        for each in batches
    }


def all_after_a_minute(path: Path, positions: dict[str, Position]) -> list[Batch]:
    follower = LogFollower([str(path)], positions=positions)
    return [*read_all(follower), *(batch for now in (20, 40, 60) for batch in follower.poll(now * SECOND))]


@pytest.mark.parametrize("same_head", [False, True], ids=["other first lines", "the same first kilobyte"])
def test_a_log_begun_again_while_no_agent_ran_is_read_from_its_beginning_and_leaves_a_gap(
    tmp_path: Path, same_head: bool
) -> None:
    path = tmp_path / "nccl.trainer-0.1.log"
    path.write_bytes(run(4_000, begin=0))
    first = read_all(LogFollower([str(path)]))
    inode = path.stat().st_ino
    with path.open("wb") as again:
        again.write(run(6_000, begin=0x100000, same_head=same_head))
    assert path.stat().st_ino == inode
    second = all_after_a_minute(path, after(first))
    assert (len(op_counts(first)), len(op_counts(second))) == (4_000, 6_000)
    assert gaps(second) == [("gone", 0)]
    ended = [batch for batch in second if batch.is_last]
    assert [batch.source.key for batch in ended] == [first[0].source.key]
    assert {batch.source.key for batch in second if not batch.is_last} != {first[0].source.key}


def test_a_log_that_only_grew_while_no_agent_ran_is_read_on(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(run(4_000, begin=0) + b"half a li")
    first = read_all(LogFollower([str(path)]))
    with path.open("ab") as more:
        more.write(b"ne\n" + run(6_000, begin=4_000))
    second = all_after_a_minute(path, after(first))
    assert op_counts(first) + op_counts(second) == list(range(10_000))
    assert gaps(second) == []


@pytest.mark.parametrize("count", [1, 3, 12])
def test_a_log_of_less_than_a_kilobyte_is_told_apart_too(tmp_path: Path, count: int) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(run(1, begin=7) + run(count, begin=0))
    first = read_all(LogFollower([str(path)]))
    path.write_bytes(run(1, begin=7) + run(count + 5, begin=0x100))
    second = all_after_a_minute(path, after(first))
    assert op_counts(second) == [7, *range(0x100, 0x100 + count + 5)]
    assert gaps(second) == [("gone", 0)]


def test_a_complete_log_that_was_begun_again_is_read_and_nothing_of_it_was_lost(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(run(40, begin=0))
    follower = LogFollower([str(path)])
    first = read_all(follower) + follower.close()
    path.write_bytes(run(60, begin=0x100000))
    second = all_after_a_minute(path, after(first))
    assert len(op_counts(second)) == 60
    assert gaps(second) == []

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from agent.log_samples import operation_line, put_together
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ncclscope_agent.files.finding import FollowLimits
from ncclscope_agent.files.logs import LogFollower
from ncclscope_agent.files.paths import PathPatterns
from ncclscope_wire.batch import Batch
from ncclscope_wire.messages import Position

SECOND = 1_000_000_000


def lines(first: int, count: int) -> bytes:
    return "".join(operation_line(op_count=f"{number:x}") + "\n" for number in range(first, first + count)).encode()


def op_counts(batches: Sequence[Batch]) -> list[int]:
    return [int(value) for batch in batches for value in batch.operations["op_count"]]


def gaps(batches: Sequence[Batch]) -> list[tuple[str, int]]:
    return [(gap.reason, gap.amount) for batch in batches for gap in batch.gaps]


def position(batches: Sequence[Batch]) -> dict[str, Position]:
    return {
        each.source.key: Position(end=each.end, end_line=each.end_line, content_check=each.content_check)
        for each in batches
    }


class Clock:
    """Seconds that pass by two at each look: files are looked for at each."""

    def __init__(self) -> None:
        self.now_ns = 1_700_000_000 * SECOND

    def tick(self, seconds: int = 2) -> int:
        self.now_ns += seconds * SECOND
        return self.now_ns


@pytest.fixture
def clock() -> Clock:
    return Clock()


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as stream:
        stream.write(data)


def test_files_that_appear_later_are_followed(tmp_path: Path, clock: Clock) -> None:
    follower = LogFollower(["*.log"], root=tmp_path)
    assert follower.poll(clock.tick()) == []
    (tmp_path / "a.log").write_bytes(lines(0, 2))
    (tmp_path / "b.txt").write_bytes(lines(9, 2))
    batches = follower.poll(clock.tick())
    assert op_counts(batches) == [0, 1]
    assert batches[0].source.name == "a.log"
    assert batches[0].observed_at_ns == clock.now_ns
    assert follower.poll(clock.tick()) == []


def test_a_nudge_looks_for_files_before_the_interval_is_over(tmp_path: Path, clock: Clock) -> None:
    follower = LogFollower(["*"], root=tmp_path)
    follower.poll(clock.now_ns)
    (tmp_path / "a.log").write_bytes(lines(0, 1))
    assert follower.poll(clock.now_ns + 1) == []
    follower.nudge()
    assert op_counts(follower.poll(clock.now_ns + 2)) == [0]


def test_patterns_understand_what_nccl_debug_file_does(tmp_path: Path) -> None:
    for name in ("nccl.node17.1.log", "nccl.node18.22.log", "other.log"):
        (tmp_path / name).touch()
    (tmp_path / "more" / "deep").mkdir(parents=True)
    (tmp_path / "more" / "deep" / "x.log").touch()
    names = {
        pattern: [str(path.relative_to(tmp_path)) for path in PathPatterns([pattern], tmp_path).paths()]
        for pattern in ("nccl.%h.%p.log", "**/x.log", "more/deep", "[!n]*.log")
    }
    assert names == {
        "nccl.%h.%p.log": ["nccl.node17.1.log", "nccl.node18.22.log"],
        "**/x.log": ["more/deep/x.log"],
        "more/deep": ["more/deep/x.log"],
        "[!n]*.log": ["other.log"],
    }


def test_a_root_with_special_characters_is_taken_as_it_is(tmp_path: Path, clock: Clock) -> None:
    root = tmp_path / "[1]*"
    root.mkdir()
    (root / "a.log").write_bytes(lines(0, 1))
    assert op_counts(LogFollower(["*.log"], root=root).poll(clock.tick())) == [0]


def test_truncation_ends_the_source_and_begins_another(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "a.log"
    follower = LogFollower([str(path)])
    path.write_bytes(lines(0, 3) + b"unfinished")
    before = follower.poll(clock.tick())
    path.write_bytes(lines(0, 1))  # begins with the same line
    ended = follower.poll(clock.tick())
    after = follower.poll(clock.tick())
    assert (op_counts(before), op_counts(ended), op_counts(after)) == ([0, 1, 2], [], [0])
    assert gaps(ended) == [("truncated", 0)]
    assert ended[-1].is_last
    assert after[0].source.key == before[0].source.key + "-1"
    assert (after[0].begin, after[0].operations["line"].tolist()) == (0, [1])


def test_after_rotation_the_old_file_is_read_to_its_end_and_the_new_one_from_its_beginning(
    tmp_path: Path, clock: Clock
) -> None:
    path = tmp_path / "a.log"
    limits = FollowLimits(grace_ns=2 * SECOND, renamed_grace_ns=20 * SECOND)
    follower = LogFollower([str(path)], limits=limits)
    path.write_bytes(lines(0, 2))
    batches = follower.poll(clock.tick())
    path.rename(tmp_path / "a.log.1")
    append(tmp_path / "a.log.1", lines(2, 2))
    path.write_bytes(lines(50, 2))
    batches += follower.poll(clock.tick())
    for _ in range(8):
        batches += follower.poll(clock.tick())
    append(tmp_path / "a.log.1", lines(4, 1))  # NCCL goes on, after a pause, writing to the file that it opened
    batches += follower.poll(clock.tick())
    assert follower.statistics().files == 2
    for _ in range(12):
        batches += follower.poll(clock.tick())
    by_key: dict[str, list[Batch]] = {}
    for batch in batches:
        by_key.setdefault(batch.source.key, []).append(batch)
    assert sorted(map(op_counts, by_key.values())) == [[0, 1, 2, 3, 4], [50, 51]]
    assert gaps(batches) == []
    assert [op_counts(batches) for batches in by_key.values() if batches[-1].is_last] == [[0, 1, 2, 3, 4]]
    assert follower.statistics().files == 1


def test_files_that_are_away_make_room_where_many_are_held(tmp_path: Path, clock: Clock) -> None:
    limits = FollowLimits(grace_ns=2 * SECOND, renamed_grace_ns=3600 * SECOND, max_files=4)
    follower = LogFollower(["*.log"], root=tmp_path, limits=limits)
    for name in "abc":
        (tmp_path / f"{name}.log").write_bytes(lines(0, 1))
    follower.poll(clock.tick())
    (tmp_path / "a.log").rename(tmp_path / "a.old")
    for _ in range(3):
        follower.poll(clock.tick())
    assert follower.statistics().files == 2


def test_a_file_renamed_to_a_name_that_matches_too_is_still_the_same_source(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "a.log"
    follower = LogFollower(["a.log*"], root=tmp_path)
    path.write_bytes(lines(0, 2))
    batches = follower.poll(clock.tick())
    path.rename(tmp_path / "a.log.1")
    append(tmp_path / "a.log.1", lines(2, 1))
    batches += follower.poll(clock.tick())
    assert op_counts(batches) == [0, 1, 2]
    assert len({batch.source.key for batch in batches}) == 1
    assert not gaps(batches)


def test_a_deleted_file_is_read_to_its_end_and_then_let_go(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "a.log"
    follower = LogFollower([str(path)], limits=FollowLimits(grace_ns=3 * SECOND))
    with path.open("wb", buffering=0) as writer:
        writer.write(lines(0, 1))
        batches = follower.poll(clock.tick())
        path.unlink()
        writer.write(lines(1, 1))
        batches += follower.poll(clock.tick())
    for _ in range(5):
        batches += follower.poll(clock.tick())
    assert op_counts(batches) == [0, 1]
    assert gaps(batches) == []
    assert batches[-1].is_last
    assert follower.statistics().files == 0


def test_a_reset_sends_everything_anew_with_its_dictionaries(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(lines(0, 3))
    follower = LogFollower([str(path)])
    first = follower.poll(clock.tick())
    append(path, lines(3, 1))
    follower.reset({})
    second = follower.poll(clock.tick())
    assert op_counts(second) == [0, 1, 2, 3]
    assert put_together(second).dictionaries == put_together(first).dictionaries


def test_a_file_truncated_while_no_agent_ran_is_a_source_of_its_own(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(lines(0, 3))
    first = LogFollower([str(path)]).poll(clock.tick())
    path.write_bytes(lines(0, 1))
    second = LogFollower([str(path)], positions=position(first)).poll(clock.tick())
    assert second[0].source.key == first[0].source.key + "-1"
    append(path, lines(1, 5))
    third = LogFollower([str(path)], positions=position(first + second)).poll(clock.tick())
    assert op_counts(third) == [1, 2, 3, 4, 5]
    assert third[0].source == second[0].source


def test_another_log_with_the_same_first_line_in_the_same_file_is_not_taken_for_the_one_that_was_read(
    tmp_path: Path, clock: Clock
) -> None:
    """A job that starts again in a container has the pid of before, and opens its log with mode "w"."""
    path = tmp_path / "a.log"
    same = lines(0, 12)  # over a kilobyte of them
    path.write_bytes(same + lines(12, 5))
    follower = LogFollower([str(path)])
    first = follower.poll(clock.tick())
    path.write_bytes(same + b"node1:1:1 [0] NCCL INFO another run\n" + lines(100, 9))
    live = follower.poll(clock.tick()) + follower.poll(clock.tick())
    resumed = LogFollower([str(path)], positions=position(first)).poll(clock.tick())
    for batches in (live, resumed):
        assert op_counts(batches) == [*range(12), *range(100, 109)]
        assert {batch.source.key for batch in batches if not batch.is_last} == {first[0].source.key + "-1"}
    assert gaps(live) == [("truncated", 0)]


def test_what_another_agent_gave_back_in_front_of_the_reader_is_no_other_log(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(lines(0, 12))
    follower = LogFollower([str(path)])
    first = follower.poll(clock.tick())
    with path.open("r+b") as file:
        file.seek(1100)
        file.write(bytes(path.stat().st_size - 1100))  # a file system without holes shows zeros
    append(path, lines(12, 1))
    assert op_counts(follower.poll(clock.tick())) == [12]
    assert op_counts(LogFollower([str(path)], positions=position(first)).poll(clock.tick())) == [12]


def polled(follower: LogFollower, clock: Clock, seconds: int) -> list[Batch]:
    return [batch for _ in range(seconds // 2) for batch in follower.poll(clock.tick())]


def test_a_log_that_is_gone_when_its_reader_comes_back_is_a_gap_once_when_it_had_time_to_appear(
    tmp_path: Path, clock: Clock
) -> None:
    paths = [tmp_path / f"{name}.log" for name in "abcd"]
    for number, path in enumerate(paths):
        path.write_bytes(lines(10 * number, 3))
    first = LogFollower(["*.log"], root=tmp_path).poll(clock.tick())
    key_of = {batch.source.name: batch.source.key for batch in first}
    known = {**position(first), "fe01-1f-400-1-00ff00ff00ff00ff": Position(end=7)}  # an export's
    known[key_of["d.log"]] = replace(known[key_of["d.log"]], is_complete=True)
    paths[0].unlink()
    paths[1].write_bytes(lines(90, 9))
    paths[3].unlink()
    follower = LogFollower(["*.log"], root=tmp_path, positions=known)
    soon = polled(follower, clock, 28)
    assert gaps(soon) == []
    gone = polled(follower, clock, 60)
    assert gaps(gone) == [("gone", 0)] * 2
    assert {batch.source.key for batch in gone} == {key_of["a.log"], key_of["b.log"]}
    assert all(batch.is_last and batch.begin == batch.end == known[batch.source.key].end for batch in gone)
    assert "line 3" in gone[0].gaps[0].detail


def test_a_log_that_cannot_be_opened_or_is_read_beside_or_comes_late_is_not_gone(tmp_path: Path, clock: Clock) -> None:
    for name in ("a.log", "b.dump", "c.log"):
        (tmp_path / name).write_bytes(lines(0, 3))
    known = position(LogFollower(["*"], root=tmp_path).poll(clock.tick()))
    (tmp_path / "c.log").rename(tmp_path / "away")
    limits = FollowLimits(max_files=0)
    beside = LogFollower(["*.dump"], root=tmp_path, positions=known)
    follower = LogFollower(["*.log"], root=tmp_path, positions=known, limits=limits)
    follower.report_gone_for([beside])
    assert gaps(polled(follower, clock, 60)) == []  # the other has not begun
    assert gaps(polled(beside, clock, 60)) == []
    (tmp_path / "away").rename(tmp_path / "c.log")
    assert gaps(polled(follower, clock, 60)) == []


def test_what_was_noticed_and_never_read_is_known_to_be_lost(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(lines(0, 3))
    follower = LogFollower([str(path)])
    follower.poll(clock.tick())
    append(path, lines(3, 5))
    follower.notice(clock.tick())
    assert follower.statistics().lag_bytes == len(lines(3, 5))
    path.write_bytes(b"")
    follower.notice(clock.tick())
    append(path, lines(50, 1))
    batches = follower.poll(clock.tick()) + follower.poll(clock.tick())
    assert gaps(batches) == [("truncated", len(lines(3, 5)))]
    assert op_counts(batches) == [50]


def test_a_deleted_file_that_there_is_no_room_to_read_gives_its_disk_space_back_after_a_while(
    tmp_path: Path, clock: Clock
) -> None:
    path, kept = tmp_path / "a.log", tmp_path / "b.log"
    path.write_bytes(lines(0, 3))
    kept.write_bytes(lines(50, 1))
    follower = LogFollower(["*.log"], root=tmp_path)
    batches = follower.poll(clock.tick())
    append(path, lines(3, 5))
    path.unlink()
    for _ in range(10):
        follower.notice(clock.tick(60))
        assert holds_a_deleted_file(tmp_path)
    follower.notice(clock.tick(60))
    assert not holds_a_deleted_file(tmp_path)
    follower.notice(clock.tick(60))
    batches += follower.poll(clock.tick())
    assert gaps(batches) == [("deleted", len(lines(3, 5)))]
    assert sorted(op_counts(batches)) == [0, 1, 2, 50]
    append(kept, lines(51, 1))
    assert op_counts(follower.poll(clock.tick())) == [51]


def holds_a_deleted_file(folder: Path) -> bool:
    """Whether this process holds one that lay in this folder. *Source:* proc_pid_fd(5)."""
    handles = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
    targets = [os.readlink(handle) for handle in handles if handle.is_symlink()]
    return any(target.startswith(str(folder)) and target.endswith(" (deleted)") for target in targets)


def test_closing_reads_what_is_left_and_a_last_line_without_newline(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(lines(0, 2)[:-1])
    (tmp_path / "b.log").write_bytes(b"short")
    (tmp_path / "c.log").touch()
    follower = LogFollower(["*.log"], root=tmp_path, limits=FollowLimits(bytes_per_turn=100))
    batches = follower.poll(clock.tick())
    batches += follower.close(clock.tick())
    assert op_counts(batches) == [0, 1]
    assert [batch.source.name for batch in batches if batch.is_last] == ["a.log", "b.log"]
    assert follower.statistics().lag_bytes == 0


def test_each_file_gets_its_share(tmp_path: Path, clock: Clock) -> None:
    for name in "abcd":
        (tmp_path / f"{name}.log").write_bytes(lines(0, 100))
    size = len(lines(0, 100))
    follower = LogFollower(
        ["*.log"], root=tmp_path, limits=FollowLimits(bytes_per_turn=size // 10, bytes_per_poll=size // 5)
    )
    batches: list[Batch] = []
    polls = 0
    while not polls or follower.has_more:
        before = follower.statistics().bytes_read_total
        batches += follower.poll(clock.tick(0))
        assert follower.statistics().bytes_read_total - before <= size // 5
        polls += 1
        if polls == 4:
            assert len({batch.source.key for batch in batches}) == 4
    assert polls < 50
    assert len(op_counts(batches)) == 400


def test_a_look_reads_ahead_and_the_next_poll_gives_it_also_when_the_file_was_emptied_meanwhile(
    tmp_path: Path, clock: Clock
) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(lines(0, 2))
    follower = LogFollower([str(path)])
    batches = follower.poll(clock.tick())
    append(path, lines(2, 2))
    assert not follower.look(clock.tick(0))
    append(path, lines(4, 1)[:50])
    assert not follower.look(clock.tick(0))
    assert follower.statistics().lag_bytes == len(lines(2, 2)) + 50
    path.write_bytes(lines(7, 1))
    assert follower.look(clock.tick(0))
    assert not follower.look(clock.tick(0)), "a source that ends is told of once, and nothing of it is read any more"
    batches += follower.poll(clock.tick(0))
    assert op_counts(batches) == [0, 1, 2, 3]
    assert gaps(batches) == [("truncated", 0)]
    batches += follower.poll(clock.tick())
    assert op_counts(batches) == [0, 1, 2, 3, 7]
    assert follower.statistics().lag_bytes == 0


def test_a_look_asks_for_a_poll_when_files_are_to_be_looked_for(tmp_path: Path, clock: Clock) -> None:
    follower = LogFollower(["*.log"], root=tmp_path)
    follower.poll(clock.tick())
    assert not follower.look(clock.tick(1))
    assert follower.look(clock.tick(1))
    follower.poll(clock.tick(0))
    follower.nudge()
    assert follower.look(clock.tick(0))


def test_looks_read_no_more_ahead_than_may_be_gathered(tmp_path: Path, clock: Clock) -> None:
    for name in "abcd":
        (tmp_path / f"{name}.log").write_bytes(lines(0, 1))
    share = len(lines(10, 10))
    limits = FollowLimits(bytes_per_turn=share, gathered_bytes=2 * share)
    follower = LogFollower(["*.log"], root=tmp_path, limits=limits)
    batches = follower.poll(clock.tick())
    for name in "abcd":
        append(tmp_path / f"{name}.log", lines(10, 30))
    for _ in range(3):
        assert follower.look(clock.tick(0))
        assert follower.statistics().lag_bytes >= 2 * share
    assert follower.statistics().bytes_read_total - 4 * len(lines(0, 1)) == 2 * share
    while follower.look(clock.tick(0)) or not batches or len(op_counts(batches)) < 124:
        batches += follower.poll(clock.tick(0))
    assert sorted(op_counts(batches)) == sorted([0, *range(10, 40)] * 4)


def test_closing_gives_what_was_read_ahead_and_a_reset_reads_it_again(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(lines(0, 1))
    follower = LogFollower([str(path)])
    first = follower.poll(clock.tick())
    append(path, lines(1, 2))
    follower.look(clock.tick(0))
    follower.reset(position(first))
    assert op_counts(follower.poll(clock.tick())) == [1, 2]
    append(path, lines(3, 1))
    follower.look(clock.tick(0))
    append(path, lines(4, 1))
    assert op_counts(follower.close(clock.tick(0))) == [3, 4]


def test_what_is_no_log_is_left_alone_and_counted(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "a.sqlite").write_bytes(b"SQLite format 3\0" + bytes(500))
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "sub").mkdir()
    os.mkfifo(tmp_path / "pipe")
    follower = LogFollower(["*"], root=tmp_path)
    assert follower.poll(clock.tick()) == follower.poll(clock.tick()) == []
    assert follower.statistics().skipped == {"file_not_a_log": 1, "file_is_a_link": 2}
    assert follower.statistics().files == 0


def test_more_files_than_may_be_open_are_counted(tmp_path: Path, clock: Clock) -> None:
    for number in range(4):
        (tmp_path / f"{number}.log").write_bytes(lines(number, 1))
    follower = LogFollower(["*"], root=tmp_path, limits=FollowLimits(max_files=3))
    assert op_counts(follower.poll(clock.tick())) != []
    assert follower.statistics().skipped == {"file_too_many": 1}


def test_statistics_say_what_was_read(tmp_path: Path, clock: Clock) -> None:
    data = lines(0, 3) + b"hello\n"
    (tmp_path / "a.log").write_bytes(data)
    follower = LogFollower(["*"], root=tmp_path)
    follower.poll(clock.tick())
    told = follower.statistics()
    assert (told.files, told.bytes_read_total, told.lines_total, told.lag_bytes) == (1, len(data), 4, 0)
    assert told.skipped == {"not_nccl": 1}


_STEPS = st.lists(
    st.sampled_from(["write", "write", "part", "look", "look", "poll", "rotate", "truncate", "delete", "restart"]),
    max_size=25,
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(steps=_STEPS)
def test_every_line_comes_once_whatever_happens_to_the_file(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str]
) -> None:
    """A poll before each loss, so that what must come is known: all that was ever written, in order, once."""
    folder = tmp_path_factory.mktemp("logs")
    path = folder / "a.log"
    clock = Clock()
    limits = FollowLimits(bytes_per_turn=300, grace_ns=60 * SECOND)
    follower = LogFollower([str(path)], limits=limits)
    batches: list[Batch] = []
    written = 0
    unfinished = b""

    def drain() -> None:
        batches.extend(follower.poll(clock.tick()))
        while follower.has_more:
            batches.extend(follower.poll(clock.tick(0)))

    write = partial(append, path)
    for step in steps:
        if step in {"rotate", "truncate", "delete", "restart"}:
            write(unfinished)
            unfinished = b""
            drain()
        if step == "write":
            write(unfinished + lines(written, 3))
            unfinished = b""
            written += 3
        elif step == "part" and not unfinished:
            line = lines(written, 1)
            write(line[:70])
            unfinished = line[70:]
            written += 1
        elif step == "poll":
            drain()
        elif step == "look":
            follower.look(clock.tick(0))
        elif step == "rotate" and path.exists():
            path.rename(folder / f"old{written}")
        elif step == "truncate":
            path.write_bytes(b"")
            drain()
        elif step == "delete":
            path.unlink(missing_ok=True)
        elif step == "restart":
            known = position(batches)
            follower.reset(known)
    write(unfinished)
    drain()
    drain()
    seen = op_counts(batches)
    assert sorted(seen) == list(range(written))
    by_key: dict[str, list[Batch]] = {}
    for batch in batches:
        by_key.setdefault(batch.source.key, []).append(batch)
    for key, some in by_key.items():
        assert all(before.end == after.begin for before, after in pairwise(some)), key
    follower.reset({})

"""The spool: what it writes, gives back after a restart, removes, drops, and says of it."""

from __future__ import annotations

import pytest
from agent.spool_samples import SECOND, Disk, frame, write_all
from hypothesis import given, settings
from hypothesis import strategies as st
from wire.sample_batches import log_source

from ncclscope_agent.spool import Spool
from ncclscope_agent.spool_limits import SpoolLimits
from ncclscope_wire.messages import Position

KEY = log_source().key
SMALL = SpoolLimits(file_bytes=600, pending_bytes=1 << 20)


def begun(limits: SpoolLimits | None = None) -> Spool:
    spool = Spool(agent_id="a", limits=limits)
    spool.begin("one")
    return spool


def has_room(spool: Spool) -> bool:
    return spool.has_room


def append(spool: Spool, *numbers: int, entries: bool = False) -> None:
    for number in numbers:
        spool.append(frame(number), b"entries %d" % number if entries else None)


def acknowledge(spool: Spool, sequence: int) -> None:
    spool.acknowledge(spool.chapters[0], sequence, {KEY: 10 * sequence})


def test_a_restart_finds_what_was_written_and_where_readers_go_on() -> None:
    spool, disk = begun(SMALL), Disk()
    append(spool, *range(1, 20))
    write_all(spool, disk)
    again = disk.recovered(SMALL)
    again.begin("two")
    assert disk.frames(again) == [("one", number) for number in range(1, 20)]
    assert again.positions == {KEY: Position(end=190, end_line=190)}
    assert [chapter.session_id for chapter in again.chapters] == ["one", "two"]


def test_files_are_removed_once_all_in_them_is_acknowledged_and_positions_stay() -> None:
    spool, disk = begun(SMALL), Disk()
    append(spool, *range(1, 20))
    write_all(spool, disk)
    full = spool.statistics().bytes_on_disk
    acknowledge(spool, 19)
    write_all(spool, disk)
    assert len(disk.files) == 1
    assert spool.statistics().bytes_on_disk == sum(map(len, disk.files.values())) < full
    append(spool, 20)
    write_all(spool, disk)
    assert disk.recovered(SMALL).positions[KEY].end == 200


def test_positions_are_known_after_a_restart_though_their_batches_were_never_written() -> None:
    spool, disk = begun(SMALL), Disk()
    append(spool, *range(1, 5))
    acknowledge(spool, 4)
    spool.append(frame(5, source=2), None)
    write_all(spool, disk)
    again = disk.recovered(SMALL)
    assert again.positions == {KEY: Position(end=40, end_line=40), log_source(2).key: Position(end=50, end_line=50)}
    assert disk.frames(again) == [("one", 5)]


def test_a_batch_that_was_acknowledged_before_it_was_written_is_not_written_but_its_entries_are() -> None:
    spool, disk = begun(), Disk()
    append(spool, 1, 2, entries=True)
    acknowledge(spool, 1)
    write_all(spool, disk)
    assert disk.frames(spool) == [("one", 2)]
    (name,) = [name for name in disk.files if name.startswith("chapter")]
    assert [known.payload for known in spool.entries_of(spool.chapters[0], disk.files[name])] == [
        b"entries 1",
        b"entries 2",
    ]


def test_what_the_service_may_take_at_once_is_written_only_if_it_has_not_until_the_next_look() -> None:
    spool, disk = begun(), Disk()
    append(spool, 1, 2)
    assert spool.take_job(0, at_once=False) is None
    acknowledge(spool, 1)
    append(spool, 3)
    assert spool.take_job(0, at_once=False) is None, "batch 1 was acknowledged, and batch 2 is first now"
    job = spool.take_job(0, at_once=False)
    assert job is not None
    disk.perform(job)
    spool.on_done(0)
    assert disk.frames(spool) == [("one", 2), ("one", 3)]


def test_where_readers_are_is_noted_now_and_then_though_nothing_need_be_written() -> None:
    spool, disk = begun(), Disk()
    append(spool, 1, 2, entries=True)
    acknowledge(spool, 2)
    job = spool.take_job(5 * SECOND, at_once=False)
    assert job is not None
    disk.perform(job)
    spool.on_done(5 * SECOND)
    append(spool, 3)
    acknowledge(spool, 3)
    assert spool.take_job(9 * SECOND, at_once=False) is None
    again = disk.recovered()
    assert again.positions == {KEY: Position(end=20, end_line=20)}
    assert disk.frames(again) == []


def test_a_failed_write_is_tried_again_and_loses_nothing() -> None:
    spool, disk = begun(), Disk()
    append(spool, 1, 2, entries=True)
    assert spool.take_job(0) is not None
    assert spool.take_job(0) is None
    spool.on_done(0, fault="no space left on device")
    append(spool, 3)
    assert spool.statistics().fault == "no space left on device"
    assert spool.take_job(SECOND) is None
    write_all(spool, disk, 2 * SECOND)
    assert disk.frames(spool) == [("one", number) for number in (1, 2, 3)]
    assert spool.statistics().pending_bytes == 0
    assert disk.frames(disk.recovered()) == [("one", number) for number in (1, 2, 3)]


def test_while_the_disk_fails_the_memory_is_bounded_and_what_is_acknowledged_frees_it() -> None:
    spool = begun(SpoolLimits(pending_bytes=2000))
    number = 0
    while has_room(spool):
        number += 1
        append(spool, number)
        if spool.take_job(10 * SECOND * number) is not None:
            spool.on_done(10 * SECOND * number, fault="input/output error")
    assert 2000 <= spool.statistics().pending_bytes < 2500
    acknowledge(spool, number)
    assert has_room(spool)
    assert spool.statistics().pending_bytes == 0


def test_a_spool_that_has_all_its_bytes_takes_nothing_more_until_some_are_acknowledged() -> None:
    limits = SpoolLimits(max_bytes=4000, file_bytes=600)
    spool, disk = begun(limits), Disk()
    number = 0
    while has_room(spool):
        number += 1
        append(spool, number)
        write_all(spool, disk)
    assert 4000 <= sum(map(len, disk.files.values())) < 4500
    acknowledge(spool, number - 3)
    write_all(spool, disk)
    assert has_room(spool)


def test_what_is_too_old_is_dropped_and_counted_and_what_is_younger_stays() -> None:
    limits = SpoolLimits(max_age_ns=100 * SECOND)
    spool, disk = begun(limits), Disk()
    for number in range(1, 11):
        append(spool, number)
        write_all(spool, disk, number * 20 * SECOND)
    spool.expire(210 * SECOND)
    write_all(spool, disk, 210 * SECOND)
    assert disk.frames(spool) == [("one", number) for number in range(6, 11)]
    assert spool.statistics().dropped == {"expired": 5}
    assert list(spool.chapters[0].has(KEY)) == [(50, 100)]
    assert disk.frames(disk.recovered(limits)) == [("one", number) for number in range(6, 11)]


def test_acknowledged_batches_that_grow_old_are_not_counted_as_dropped() -> None:
    spool, disk = begun(SpoolLimits(max_age_ns=100 * SECOND)), Disk()
    append(spool, 1, 2)
    write_all(spool, disk)
    acknowledge(spool, 2)
    spool.expire(200 * SECOND)
    assert spool.statistics().dropped == {"expired": 0}


def test_files_are_synced_when_full_and_now_and_then_while_something_waits_to_be_acknowledged() -> None:
    spool, disk = begun(SpoolLimits(file_bytes=600, sync_ns=SECOND)), Disk()
    append(spool, 1, entries=True)
    write_all(spool, disk, 2 * SECOND)
    assert disk.synced == {name: len(data) for name, data in disk.files.items()}
    append(spool, 2)
    write_all(spool, disk, 2 * SECOND + 1)
    assert disk.synced != {name: len(data) for name, data in disk.files.items()}
    write_all(spool, disk, 4 * SECOND)
    assert disk.synced == {name: len(data) for name, data in disk.files.items()}
    append(spool, 3)
    acknowledge(spool, 2)
    before = dict(disk.synced)
    write_all(spool, disk, 4 * SECOND + 1)
    acknowledge(spool, 3)
    write_all(spool, disk, 6 * SECOND)
    assert disk.synced == before


def test_nothing_is_synced_while_all_that_is_on_disk_is_acknowledged_whatever_waits_in_memory() -> None:
    spool, disk = begun(SpoolLimits(sync_ns=SECOND)), Disk()
    append(spool, 1, entries=True)
    acknowledge(spool, 1)
    write_all(spool, disk)
    append(spool, 2)
    assert spool.take_job(2 * SECOND, at_once=False) is None
    assert disk.synced == {}
    write_all(spool, disk, 2 * SECOND)
    assert disk.synced == {name: len(data) for name, data in disk.files.items()}


@pytest.mark.parametrize("agent_id", ["a", "b"])
def test_files_of_others_are_left_alone_and_counted(agent_id: str) -> None:
    spool, disk = begun(), Disk()
    append(spool, 1)
    write_all(spool, disk)
    disk.files["notes.txt"] = b"mine"
    disk.files["frames-x"] = b"not of that name"
    disk.files["frames-0000000009-000009"] = b"of that name, and nothing in it"
    again = disk.recovered(agent_id=agent_id)
    assert disk.frames(again) == ([("one", 1)] if agent_id == "a" else [])
    unusable = {"no_header": 1} | ({} if agent_id == "a" else {"other_version": 1})
    assert again.statistics().unusable_files == unusable


STEPS = st.lists(
    st.sampled_from(["append", "append", "append with entries", "write", "fail", "acknowledge", "restart"]),
    max_size=60,
)


@settings(max_examples=100)
@given(STEPS, st.integers(0, 2000))
def test_whatever_happens_all_that_is_not_acknowledged_is_there_once_and_in_order(steps: list[str], cut: int) -> None:
    limits = SpoolLimits(file_bytes=900, retry_ns=0)
    spool, disk = Spool(agent_id="a", limits=limits), Disk()
    sessions = 0
    wanted: list[tuple[str, int]] = []

    def begin() -> int:
        nonlocal sessions
        sessions += 1
        spool.begin(f"s{sessions}")
        return 0

    last = begin()
    for step in steps:
        if step.startswith("append"):
            last += 1
            append(spool, last, entries="entries" in step)
            wanted.append((f"s{sessions}", last))
        elif step == "write":
            write_all(spool, disk)
        elif step == "fail" and spool.take_job(0) is not None:
            spool.on_done(0, fault="no")
        elif step == "acknowledge" and wanted:
            chapter = spool.chapters[0]
            session, sequence = wanted[cut % len([known for known in wanted if known[0] == wanted[0][0]])]
            assert chapter.session_id == session
            spool.acknowledge(chapter, sequence, {KEY: 10 * sequence})
            wanted = [known for known in wanted if known[0] != session or known[1] > sequence]
        elif step == "restart":
            write_all(spool, disk)
            spool = disk.recovered(limits)
            last = begin()
            found = [known for known in disk.frames(spool) if known in wanted]
            assert found == wanted
            _acknowledge_again(spool, wanted)
    assert disk.frames(spool) == wanted
    write_all(spool, disk)
    assert disk.frames(spool) == wanted
    known = spool.statistics()
    assert known.pending_bytes == 0
    assert known.bytes_on_disk == sum(map(len, disk.files.values()))


def _acknowledge_again(spool: Spool, wanted: list[tuple[str, int]]) -> None:
    """What the service says to one that comes back: how far it has each session."""
    for chapter in spool.chapters:
        numbers = [number for session, number in wanted if session == chapter.session_id]
        at = numbers[0] - 1 if numbers else chapter.last
        spool.acknowledge(chapter, at, {KEY: 10 * at})


@given(st.integers(0, 10**6), st.integers(0, 255), st.booleans())
def test_a_cut_or_a_flip_anywhere_leaves_the_others_in_their_order(at: int, flip: int, is_cut: bool) -> None:
    spool, disk = begun(SMALL), Disk()
    append(spool, *range(1, 20), entries=True)
    write_all(spool, disk)
    names = sorted(disk.files)
    name = names[at % len(names)]
    data = bytearray(disk.files[name])
    if is_cut:
        del data[at % (len(data) + 1) :]
    else:
        data[at % len(data)] ^= flip
    disk.files[name] = bytes(data)
    again = disk.recovered(SMALL)
    found = [number for _, number in disk.frames(again)]
    assert found == sorted(set(found))
    lost = set(range(1, 20)) - set(found)
    assert len(lost) <= (4 if is_cut else 1)
    if name.startswith("chapter"):
        assert not lost

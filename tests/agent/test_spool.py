"""The spool: what it writes, gives back after a restart, removes, drops, and says of it."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest
from agent.spool_samples import OWNER, SECOND, Disk, frame
from hypothesis import given, settings
from hypothesis import strategies as st
from wire.sample_batches import log_source

from ncclscope_agent.spool.contents import Spool
from ncclscope_agent.spool.limits import SpoolLimits
from ncclscope_agent.spool.records import Transaction
from ncclscope_wire.messages import Position

KEY = log_source().key
SMALL = SpoolLimits(transaction_bytes=600, pending_bytes=1 << 20, retry_ns=0)


def begun(disk: Disk, session_id: str = "one") -> Spool:
    spool = disk.recovered()
    spool.begin(session_id)
    return spool


def has_room(spool: Spool) -> bool:
    return spool.has_room


def append(spool: Spool, *numbers: int, entries: bool = False) -> None:
    chapter = spool.chapters[-1].number
    for number in numbers:
        spool.append(frame(number, chapter=chapter), b"entries %d" % number if entries else None)


def acknowledge(spool: Spool, sequence: int) -> None:
    spool.acknowledge(spool.chapters[0], sequence, {KEY: 10 * sequence})


def all_of(disk: Disk, *, table: str = "frame") -> int:
    disk.database.close()
    with closing(sqlite3.connect(disk.path)) as database:
        return int(database.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


def test_a_restart_finds_what_was_written_and_where_readers_go_on() -> None:
    disk = Disk(SMALL)
    spool = begun(disk)
    append(spool, *range(1, 20))
    disk.write(spool)
    again = begun(disk, "two")
    assert disk.frames(again) == [("one", number) for number in range(1, 20)]
    assert again.positions == {KEY: Position(end=190, end_line=190)}
    assert [chapter.session_id for chapter in again.chapters] == ["one", "two"]
    assert again.left_by == OWNER


def test_batches_leave_the_disk_once_they_are_acknowledged_and_positions_stay() -> None:
    disk = Disk(SMALL)
    spool = begun(disk)
    append(spool, *range(1, 20))
    disk.write(spool)
    acknowledge(spool, 12)
    disk.write(spool, 2 * SECOND)
    assert all_of(disk) == 7
    append(spool, 20)
    disk.write(spool, 3 * SECOND)
    again = disk.recovered()
    assert again.positions[KEY].end == 200
    assert disk.frames(again) == [("one", number) for number in range(13, 21)]


def test_the_file_shrinks_when_most_of_it_is_acknowledged() -> None:
    disk = Disk()
    spool = begun(disk)
    for number in range(1, 1501):
        spool.append(frame(number, operations=500), None)
    disk.write(spool)
    full = spool.statistics().bytes_on_disk
    assert full > 10 << 20
    acknowledge(spool, 1500)
    for second in range(1, 10):
        append(spool, 1500 + second)
        disk.write(spool, second * 10 * SECOND)
    assert spool.statistics().bytes_on_disk < full / 2


def test_positions_are_known_after_a_restart_though_their_batches_were_never_written() -> None:
    disk = Disk()
    spool = begun(disk)
    append(spool, *range(1, 5))
    acknowledge(spool, 4)
    spool.append(frame(5, source=2), None)
    disk.write(spool)
    again = disk.recovered()
    assert again.positions == {KEY: Position(end=40, end_line=40), log_source(2).key: Position(end=50, end_line=50)}
    assert disk.frames(again) == [("one", 5)]


def test_a_batch_that_was_acknowledged_before_it_was_written_is_not_written_but_its_entries_are() -> None:
    disk = Disk()
    spool = begun(disk)
    append(spool, 1, 2, entries=True)
    acknowledge(spool, 1)
    disk.write(spool)
    assert disk.frames(spool) == [("one", 2)]
    known = spool.entries_of(spool.chapters[0], disk.database.entries(1))
    assert [entries.payload for entries in known] == [b"entries 1", b"entries 2"]


def test_what_the_service_may_take_at_once_is_written_only_if_it_has_not_until_the_next_look() -> None:
    disk = Disk()
    spool = begun(disk)
    append(spool, 1, 2)
    assert spool.next_transaction(0, at_once=False) is None
    acknowledge(spool, 1)
    append(spool, 3)
    assert spool.next_transaction(0, at_once=False) is None, "batch 1 was acknowledged, and batch 2 is first now"
    disk.write(spool, at_once=False)
    assert [[known.sequence for known in wanted.frames] for wanted in disk.transactions] == [[2, 3]]


def test_positions_are_written_now_and_then_though_no_batch_need_be_written() -> None:
    disk = Disk()
    spool = begun(disk)
    append(spool, 1, 2, entries=True)
    acknowledge(spool, 2)
    disk.write(spool, 5 * SECOND, at_once=False)
    append(spool, 3)
    acknowledge(spool, 3)
    assert spool.next_transaction(9 * SECOND, at_once=False) is None
    again = disk.recovered()
    assert again.positions == {KEY: Position(end=20, end_line=20)}
    assert disk.frames(again) == []


def test_readers_that_go_elsewhere_are_found_there_and_never_ahead_of_what_was_written() -> None:
    disk = Disk(SpoolLimits(transaction_bytes=1, retry_ns=0))
    spool = begun(disk)
    append(spool, 1, 2)
    spool.rebase({KEY: Position(end=5, end_line=5)})
    spool.begin("two")
    spool.append(frame(1, chapter=2, source=2), None)
    found: list[dict[str, int]] = []
    for _ in range(3):
        wanted = spool.next_transaction(0)
        assert wanted is not None
        spool.on_done(0, disk.database.commit(wanted))
        disk.database.close()
        found.append({key: at.end for key, at in Disk.recovered(disk).positions.items()})
    assert found == [{KEY: 10}, {KEY: 5}, {KEY: 5, log_source(2).key: 10}]


def test_a_failed_write_is_tried_again_and_loses_nothing() -> None:
    disk = Disk()
    spool = begun(disk)
    append(spool, 1, 2, entries=True)
    assert spool.next_transaction(0) is not None
    assert spool.next_transaction(0) is None
    spool.on_failed(0, "no space left on device")
    append(spool, 3)
    assert spool.statistics().fault == "no space left on device"
    assert spool.next_transaction(SECOND) is None
    disk.write(spool, 2 * SECOND)
    assert disk.frames(spool) == [("one", number) for number in (1, 2, 3)]
    assert spool.statistics().pending_bytes == 0
    assert disk.frames(disk.recovered()) == [("one", number) for number in (1, 2, 3)]


def test_while_the_disk_fails_the_memory_is_bounded_and_what_is_acknowledged_frees_it() -> None:
    spool = begun(Disk(SpoolLimits(pending_bytes=2000)))
    number = 0
    while has_room(spool):
        number += 1
        append(spool, number)
        if spool.next_transaction(10 * SECOND * number) is not None:
            spool.on_failed(10 * SECOND * number, "input/output error")
    assert 2000 <= spool.statistics().pending_bytes < 2500
    acknowledge(spool, number)
    assert has_room(spool)
    assert spool.statistics().pending_bytes == 0


def test_a_spool_that_has_all_its_bytes_takes_nothing_more_until_some_are_acknowledged() -> None:
    disk = Disk(SpoolLimits(max_bytes=100_000))
    spool = begun(disk)
    number = 0
    while has_room(spool):
        number += 1
        append(spool, number)
        disk.write(spool)
    assert 100_000 <= spool.statistics().bytes_on_disk < 110_000
    acknowledge(spool, number - 3)
    disk.write(spool, 10 * SECOND)
    assert has_room(spool)


def test_what_is_too_old_is_dropped_and_counted_and_what_is_younger_stays() -> None:
    disk = Disk(SpoolLimits(max_age_ns=100 * SECOND))
    spool = begun(disk)
    for number in range(1, 11):
        append(spool, number)
        disk.write(spool, number * 20 * SECOND)
    disk.write(spool, 210 * SECOND)
    assert disk.frames(spool) == [("one", number) for number in range(6, 11)]
    assert spool.statistics().dropped == {"expired": 5}
    assert list(spool.chapters[0].ranges_of(KEY)) == [(50, 100)]
    assert disk.frames(disk.recovered()) == [("one", number) for number in range(6, 11)]


def test_acknowledged_batches_that_grow_old_are_not_counted_as_dropped() -> None:
    disk = Disk(SpoolLimits(max_age_ns=100 * SECOND))
    spool = begun(disk)
    append(spool, 1, 2)
    disk.write(spool)
    acknowledge(spool, 2)
    disk.write(spool, 200 * SECOND)
    assert spool.statistics().dropped == {}
    assert all_of(disk) == 0


def synced(disk: Disk) -> list[bool]:
    return [wanted.is_synced for wanted in disk.transactions]


def test_the_disk_is_synced_now_and_then_while_something_waits_to_be_acknowledged() -> None:
    disk = Disk(SpoolLimits(sync_ns=SECOND))
    spool = begun(disk)
    append(spool, 1, entries=True)
    disk.write(spool, 2 * SECOND)
    append(spool, 2)
    disk.write(spool, 2 * SECOND + 1)
    assert synced(disk) == [True, False]
    disk.write(spool, 4 * SECOND)
    assert synced(disk) == [True, False, True], "with nothing else to write"
    append(spool, 3)
    acknowledge(spool, 2)
    disk.write(spool, 4 * SECOND + 1)
    acknowledge(spool, 3)
    disk.write(spool, 6 * SECOND)
    assert not any(synced(disk)[3:])


def test_nothing_is_synced_while_all_that_is_on_disk_is_acknowledged_whatever_waits_in_memory() -> None:
    disk = Disk(SpoolLimits(sync_ns=SECOND))
    spool = begun(disk)
    append(spool, 1, entries=True)
    acknowledge(spool, 1)
    disk.write(spool)
    append(spool, 2)
    assert spool.next_transaction(2 * SECOND, at_once=False) is None
    assert synced(disk) == [False]
    disk.write(spool, 2 * SECOND)
    assert synced(disk) == [False, True]


STEPS = st.lists(
    st.sampled_from(["append", "append", "append with entries", "write", "fail", "acknowledge", "restart"]),
    max_size=60,
)


@settings(max_examples=50)
@given(STEPS, st.integers(0, 2000))
def test_whatever_happens_all_that_is_not_acknowledged_is_there_once_and_in_order(steps: list[str], cut: int) -> None:
    disk = Disk(SMALL)
    spool = begun(disk, "s1")
    sessions, last = 1, 0
    wanted: list[tuple[str, int]] = []
    for step in steps:
        if step.startswith("append"):
            last += 1
            append(spool, last, entries="entries" in step)
            wanted.append((f"s{sessions}", last))
        elif step == "write":
            disk.write(spool)
        elif step == "fail" and spool.next_transaction(0) is not None:
            spool.on_failed(0, "no")
        elif step == "acknowledge" and wanted:
            chapter = spool.chapters[0]
            session, sequence = wanted[cut % len([known for known in wanted if known[0] == wanted[0][0]])]
            assert chapter.session_id == session
            spool.acknowledge(chapter, sequence, {KEY: 10 * sequence})
            wanted = [known for known in wanted if known[0] != session or known[1] > sequence]
        elif step == "restart":
            disk.write(spool)
            sessions, last = sessions + 1, 0
            spool = begun(disk, f"s{sessions}")
            assert [known for known in disk.frames(spool) if known in wanted] == wanted
            _acknowledge_again(spool, wanted)
    assert disk.frames(spool) == wanted
    disk.write(spool)
    assert disk.frames(spool) == wanted
    assert spool.statistics().pending_bytes == 0


def _acknowledge_again(spool: Spool, wanted: list[tuple[str, int]]) -> None:
    """What the service says to one that comes back: how far it has each session."""
    for chapter in spool.chapters:
        numbers = [number for session, number in wanted if session == chapter.session_id]
        at = numbers[0] - 1 if numbers else chapter.last
        spool.acknowledge(chapter, at, {KEY: 10 * at})


def filled(disk: Disk, batches: int, *, operations: int = 100) -> None:
    """Closes a database with so many batches."""
    spool = begun(disk)
    for number in range(1, batches + 1):
        spool.append(frame(number, operations=operations), b"entries %d" % number)
    disk.write(spool)
    disk.database.close()


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 255), st.booleans())
def test_damage_anywhere_costs_what_it_hit_and_nothing_is_read_wrong(at: int, flip: int, is_cut: bool) -> None:
    disk = Disk(SMALL)
    filled(disk, 40)
    whole = disk.path.read_bytes()
    data = bytearray(whole)
    if is_cut:
        del data[at % (len(data) + 1) :]
    else:
        data[at % len(data)] ^= flip
    disk.path.write_bytes(bytes(data))
    again = disk.recovered()
    found = [number for _, number in disk.frames(again)]
    assert found == sorted(set(found))
    assert set(found) <= set(range(1, 41))
    append(begun(disk, "two"), 1)
    if not is_cut and at % len(data) >= 4096 * 12:  # behind the schema and the roots of the tables
        assert len(found) >= 30


@pytest.mark.parametrize("content", [b"", b"no database at all" * 1000])
def test_what_is_no_database_is_begun_again(content: bytes) -> None:
    disk = Disk()
    disk.path.parent.mkdir()
    disk.path.write_bytes(content)
    spool = begun(disk)
    append(spool, 1)
    disk.write(spool)
    assert disk.frames(disk.recovered()) == [("one", 1)]


def test_damage_that_shows_while_the_agent_runs_costs_no_write() -> None:
    disk = Disk(SMALL)
    filled(disk, 40)
    spool = begun(disk, "two")
    append(spool, 1)
    disk.write(spool)
    disk.database.close()
    data = bytearray(disk.path.read_bytes())
    middle = len(data) // 2 // 4096 * 4096
    data[middle : middle + 4096 * 3] = bytes(4096 * 3)
    disk.path.write_bytes(bytes(data))
    append(spool, 2)
    disk.write(spool)
    assert disk.frames(spool)[-2:] == [("two", 1), ("two", 2)]


def test_a_full_disk_takes_nothing_of_a_transaction() -> None:
    disk = Disk()
    filled(disk, 3)
    disk.database.recover()
    disk.database._open.execute("PRAGMA max_page_count = 1")  # pyright: ignore[reportPrivateUsage] - there is no disk to fill here
    wanted = Transaction(now_ns=0, owner=None, frames=[frame(number, operations=400) for number in range(4, 40)])
    with pytest.raises(OSError, match="full"):
        disk.database.commit(wanted)
    assert all_of(disk) == 3

"""Writing the journal: groups, segments, limits, and a disk that takes nothing for a while."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, MutableMapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import anyio
import pytest
import structlog

from ncclscope_service.intake.journal_entry import Ticked, decode_entry, encode_entry
from ncclscope_service.keep.journal import Journal, JournalSettings, encode_record, read_segment

pytestmark = pytest.mark.asyncio


@dataclass
class _Kept:
    number: int = 0
    changed: anyio.Event = field(default_factory=anyio.Event)

    def on_durable(self, number: int) -> None:
        self.number = number
        self.notify()

    def notify(self) -> None:
        self.changed.set()
        self.changed = anyio.Event()

    async def wait_until(self, holds: Callable[[], object]) -> None:
        with anyio.fail_after(60):
            while not holds():
                await self.changed.wait()

    async def reach(self, number: int) -> None:
        await self.wait_until(lambda: self.number >= number)


@contextmanager
def _on_each_log_line(call: Callable[[], None]) -> Generator[None]:
    """A journal that cannot write says so in a line of its log."""

    def notice(_logger: object, _method: str, _event: MutableMapping[str, Any]) -> NoReturn:
        call()
        raise structlog.DropEvent

    processors = structlog.get_config()["processors"]
    before = list(processors)
    processors[:] = [notice]
    try:
        yield
    finally:
        processors[:] = before


@asynccontextmanager
async def _running(
    folder: Path, settings: JournalSettings, next_number: int = 1
) -> AsyncGenerator[tuple[Journal, _Kept]]:
    kept = _Kept()
    journal = Journal(folder, era="x", next_number=next_number, settings=settings, on_durable=kept.on_durable)
    with _on_each_log_line(kept.notify):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(journal.run)
            yield journal, kept
            tasks.cancel_scope.cancel()
    journal.close()


def _times(folder: Path) -> list[int]:
    found = list[int]()
    for path in sorted(folder.glob("*.journal")):
        for record in read_segment(path.read_bytes()).records:
            entry = decode_entry(record.content)
            assert isinstance(entry, Ticked)
            found.append(entry.at_ns)
    return found


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _segments(folder: Path) -> int:
    return len(list(folder.iterdir()))


async def test_what_is_told_to_be_kept_is_on_disk_in_segments_of_the_size_asked_for(tmp_path: Path) -> None:
    async with _running(tmp_path, JournalSettings(group_seconds=0, segment_bytes=300)) as (journal, kept):
        for turn in range(20):
            number = journal.append(Ticked(at_ns=turn))
            await kept.reach(number)
            assert _times(tmp_path) == list(range(turn + 1))
    assert _segments(tmp_path) > 2


async def test_entries_that_came_meanwhile_are_written_at_the_end(tmp_path: Path) -> None:
    async with _running(tmp_path, JournalSettings(group_seconds=60)) as (journal, kept):
        for turn in range(5):
            journal.append(Ticked(at_ns=turn))
        assert kept.number == 0
    assert _times(tmp_path) == list(range(5))


async def test_a_disk_that_takes_nothing_is_told_and_nothing_is_lost_when_it_does_again(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    folder.mkdir()
    away = tmp_path / "away"
    async with _running(folder, JournalSettings(group_seconds=0, segment_bytes=1)) as (journal, kept):
        await kept.reach(journal.append(Ticked(at_ns=0)))
        folder.rename(away)
        for turn in range(1, 6):
            journal.append(Ticked(at_ns=turn))
        await kept.wait_until(lambda: journal.statistics().trouble)
        assert "No such file or directory" in journal.statistics().trouble
        assert kept.number < journal.last
        away.rename(folder)
        await kept.reach(journal.last)
        assert journal.statistics().trouble == ""
        assert journal.statistics().errors_total >= 1
        assert journal.statistics().waiting_bytes == 0
    assert _times(folder) == list(range(6))


async def test_at_its_limit_the_journal_keeps_nothing_until_old_segments_go(tmp_path: Path) -> None:
    settings = JournalSettings(group_seconds=0, segment_bytes=100, max_bytes=400)
    async with _running(tmp_path, settings) as (journal, kept):
        while not journal.statistics().trouble:
            journal.append(Ticked(at_ns=journal.last))
            await kept.changed.wait()
        assert "has reached its limit" in journal.statistics().trouble
        stuck = kept.number
        assert journal.statistics().bytes <= 400
        assert _bytes(tmp_path) == journal.statistics().bytes
        journal.drop_until(stuck - 1)
        await kept.reach(stuck + 1)


async def test_what_is_kept_for_an_upgrade_makes_room_where_it_is_needed(tmp_path: Path) -> None:
    settings = JournalSettings(group_seconds=0, segment_bytes=100, max_bytes=400, retained_bytes=400)
    async with _running(tmp_path, settings) as (journal, kept):
        most = 0
        for at in range(30):
            await kept.reach(journal.append(Ticked(at_ns=at)))
            journal.drop_until(journal.last)
            most = max(most, journal.statistics().bytes)
        assert 300 < most <= 400
        assert journal.statistics().errors_total == 0
        assert _bytes(tmp_path) == journal.statistics().bytes


async def test_at_its_limit_a_segment_is_not_begun_where_only_the_entry_would_fit(tmp_path: Path) -> None:
    entry = len(encode_record(1, encode_entry(Ticked(at_ns=1))))
    settings = JournalSettings(group_seconds=0, max_bytes=entry + 1)
    async with _running(tmp_path, settings) as (journal, kept):
        journal.append(Ticked(at_ns=1))
        await kept.wait_until(lambda: journal.statistics().trouble)
        assert (kept.number, _bytes(tmp_path), journal.statistics().bytes) == (0, 0, 0)


async def test_who_appends_waits_while_more_than_the_limit_waits_in_memory(tmp_path: Path) -> None:
    async with _running(tmp_path, JournalSettings(group_seconds=0.05, max_waiting_bytes=100)) as (journal, _):
        await journal.wait_for_room()
        for turn in range(10):
            journal.append(Ticked(at_ns=turn))
        with anyio.move_on_after(0) as at_once:
            await journal.wait_for_room()
        assert at_once.cancelled_caught
        with anyio.fail_after(60):
            await journal.wait_for_room()
        assert journal.statistics().waiting_bytes <= 100


async def test_a_cut_begins_a_segment_and_what_is_before_it_can_go(tmp_path: Path) -> None:
    async with _running(tmp_path, JournalSettings(group_seconds=0)) as (journal, kept):
        for turn in range(3):
            journal.append(Ticked(at_ns=turn))
        cut = journal.cut()
        for turn in range(3, 6):
            journal.append(Ticked(at_ns=turn))
        await kept.reach(journal.last)
        journal.drop_until(cut)
    assert _times(tmp_path) == [3, 4, 5]

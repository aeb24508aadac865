"""Power is lost at every moment: what was acknowledged is there, once, and the rest comes again. Simulated.

The default tests try each moment at which something was just promised and a few others, the slow ones a twelfth of all,
always the same. All of them, in two minutes:

    NCCLSCOPE_POWER_LOSS_SHARE=1 .venv/bin/python -m pytest -m slow tests/attack/test_power_loss.py
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from agent.spool_samples import OWNER, frame
from attack.power_loss import Left, Promised, RecordedFolder
from wire.sample_batches import HELLO, log_batch

from ncclscope_agent.spool import database as database_module
from ncclscope_agent.spool.database import SpoolDatabase
from ncclscope_agent.spool.records import Chapter, Frame, Transaction
from ncclscope_service.intake.journal_entry import Entry
from ncclscope_service.intake.receive import Receiver
from ncclscope_service.keep.journal import JournalSettings, sync_folder
from ncclscope_service.keep.persistence import Persistence, PersistenceSettings
from ncclscope_service.store.settings import PipelineSettings
from ncclscope_wire.codec import encode_message
from ncclscope_wire.frame import encode_frame
from ncclscope_wire.messages import BatchMessage, Message, Position

SECOND_NS = 1_000_000_000
FIRST = log_batch(0, 5, strings=("AllReduce", "h"), templates=1, operations=tuple((0, row) for row in range(1, 6)))
BATCHES = [
    FIRST,
    *(log_batch(at, at + 5, operations=tuple((0, at + row) for row in range(1, 6))) for at in range(5, 45, 5)),
]
_SETTINGS = PersistenceSettings(journal=JournalSettings(segment_bytes=1_500))


class Service:
    """A service over a folder, without its ports and tasks."""

    def __init__(self, folder: Path) -> None:
        self.persistence = Persistence(folder, _SETTINGS)
        self.folder = folder
        self.state = self.persistence.open(PipelineSettings(window_ns=1, hold_ns=1), {}, lambda _: None, 1)
        self.receiver = Receiver(agents=self.state.agents, record=self._record)
        self.receiver.open(1)
        self._say(HELLO)

    def _record(self, entry: Entry) -> int:
        return self.persistence.journal.append(entry)

    def _say(self, message: Message) -> None:
        outcome = self.receiver.on_bytes(1, encode_frame(encode_message(message)), 1)
        assert outcome.fault is None
        for received in outcome.received:
            assert self.state.ingest_batch(received)

    @property
    def applied(self) -> int:
        """Batches that it has."""
        return self.state.agents[HELLO.agent_id].applied

    def take(self, number: int) -> None:
        """The batch of this number arrives and is written; it may be acknowledged then."""
        self._say(BatchMessage(sequence=number, batch=BATCHES[number - 1]))
        ticked = self.state.next_tick({}, frozenset(), number * 1000 * SECOND_NS, "")
        self._record(ticked)
        self.state.tick(ticked, self.persistence.archive)
        self._write()

    def _write(self) -> None:
        journal = self.persistence.journal
        waiting = journal._waiting  # pyright: ignore[reportPrivateUsage]
        journal._write(list(waiting))  # pyright: ignore[reportPrivateUsage]
        waiting.clear()

    def write_state(self) -> None:
        """Now and then."""
        self.persistence.close(self.state)

    def operations(self) -> list[int]:
        """The opCounts that it holds, in memory and in parquet files."""
        found: list[int] = self.state.pipeline.store.operations.rows["op_count"].tolist()
        for path in sorted((self.folder / "operations").glob("*/*.parquet")):
            found += pq.read_table(path, columns=["op_count"])["op_count"].to_pylist()
        return sorted(found)

    def end(self) -> None:
        """It is killed."""
        self.persistence.release()


def moments(folder: RecordedFolder, share: float) -> Iterator[tuple[int, Left, random.Random]]:
    """Moments, with nothing and all of what was not synced then, and twice with some of it: that share of all these.

    And each at which something was just promised, with nothing else.
    """
    chosen = random.Random(1)
    for moment in range(len(folder.events) + 1):
        is_promise = moment > 0 and isinstance(folder.events[moment - 1], Promised)
        for at, left in enumerate((Left.NOTHING, Left.ALL, Left.SOME, Left.SOME)):
            if chosen.random() < share or (is_promise and left is Left.NOTHING):
                yield moment, left, random.Random(4 * moment + at)


SHARES = [
    0.005,
    pytest.param(float(os.environ.get("NCCLSCOPE_POWER_LOSS_SHARE", "0.08")), marks=pytest.mark.slow, id="more"),
]


@pytest.fixture
def recorded_service(tmp_path: Path) -> RecordedFolder:
    """Nine batches, each acknowledged, over several segments and two states."""
    folder = RecordedFolder(tmp_path / "data")
    folder.root.mkdir()
    with pytest.MonkeyPatch.context() as patched:
        folder.record(patched)
        service = Service(folder.root)
        for number in range(1, len(BATCHES) + 1):
            service.take(number)
            folder.promise(number)
            if number % 4 == 0:
                service.write_state()
        service.end()
    return folder


@pytest.mark.parametrize("share", SHARES)
def test_a_service_has_what_it_acknowledged_and_goes_on_from_there(
    recorded_service: RecordedFolder, share: float, tmp_path: Path
) -> None:
    everything = list(range(1, 5 * len(BATCHES) + 1))
    seen: set[int] = set()
    for moment, left, chance in moments(recorded_service, share):
        promised = recorded_service.leave(tmp_path / "left", moment, left, chance)
        service = Service(tmp_path / "left")
        has = service.applied
        seen.add(has)
        assert has >= max(promised, default=0), f"at {moment} of {len(recorded_service.events)}, {left.name} left"
        assert service.operations() == everything[: 5 * has]
        if chance.random() < 0.05:
            for number in range(has + 1, len(BATCHES) + 1):
                service.take(number)
            assert service.operations() == everything
        service.end()
    assert seen == set(range(len(BATCHES) + 1))


def test_what_was_not_synced_may_be_lost_and_so_may_a_name_whose_folder_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RecordedFolder(tmp_path / "data")
    folder.root.mkdir()

    def left(what: Left) -> bytes | None:
        folder.leave(tmp_path / "left", len(folder.events), what, random.Random(1))
        path = tmp_path / "left" / "new"
        return path.read_bytes() if path.exists() else None

    folder.record(monkeypatch)
    handle = os.open(folder.root / "old", os.O_WRONLY | os.O_CREAT)
    os.write(handle, b"abc")
    os.replace(folder.root / "old", folder.root / "new")
    assert (left(Left.NOTHING), left(Left.ALL)) == (None, b"abc")
    sync_folder(folder.root)
    assert (left(Left.NOTHING), left(Left.ALL)) == (b"", b"abc")
    os.fsync(handle)
    assert (left(Left.NOTHING), left(Left.ALL)) == (b"abc", b"abc")
    os.close(handle)


# The agent's spool: SQLite with a write-ahead log, of which each second transaction is synced


SPOOLED = 12
KEY = frame(1).key
LATE = 3
"""A batch is acknowledged by the service when so many later ones are in the spool."""


def _transaction(number: int) -> Transaction:
    return Transaction(
        now_ns=number,
        owner=OWNER,
        chapters=[Chapter(1, "s")],
        frames=[frame(number, operations=60)],
        positions={KEY: Position(end=10 * number, end_line=10 * number, content_check=number)},
        acknowledged={1: number - LATE} if number > LATE else {},
        is_synced=number % 2 == 0,
    )


@pytest.fixture
def recorded_spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordedFolder:
    """Twelve batches, of which nine are acknowledged; pages are moved from the log to the file now and then."""
    monkeypatch.setattr(database_module, "_CHECKPOINT_PAGES", 10)
    folder = RecordedFolder(tmp_path / "spool")
    folder.root.mkdir()
    database = SpoolDatabase(folder.root)
    for number in range(1, SPOOLED + 1):
        wanted = _transaction(number)
        database.commit(wanted)
        folder.note_database(database.path, is_synced=wanted.is_synced)
        if wanted.is_synced:
            folder.promise(number)
    database.close()
    return folder


def _payloads(frames: list[Frame]) -> dict[int, bytes]:
    return {each.sequence: bytes(each.payload) for each in frames}


@pytest.mark.parametrize("share", SHARES)
def test_a_spool_has_what_was_synced_and_no_position_behind_what_it_has(
    recorded_spool: RecordedFolder, share: float, tmp_path: Path
) -> None:
    sent = {number: bytes(frame(number, operations=60).payload) for number in range(1, SPOOLED + 1)}
    seen: set[int] = set()
    for moment, left, chance in moments(recorded_spool, share):
        promised = recorded_spool.leave(tmp_path / "left", moment, left, chance)
        database = SpoolDatabase(tmp_path / "left")
        found = database.recover()
        list(found.frames)
        position = found.positions.get(KEY, Position(end=0))
        last = position.end // 10
        seen.add(last)
        assert last >= max(promised, default=0), f"at {moment} of {len(recorded_spool.events)}, {left.name} left"
        assert position.content_check == (last or None)
        has = _payloads(database.frames(1, 1, SPOOLED)[0])
        assert has == {number: sent[number] for number in range(max(1, last - LATE + 1), last + 1)}
        if chance.random() < 0.1:
            for number in range(last + 1, SPOOLED + 1):
                database.commit(_transaction(number))
            assert max(_payloads(database.frames(1, 1, SPOOLED)[0])) == SPOOLED
        database.close()
    assert seen >= set(range(0, SPOOLED + 1, 2))

"""Where a journal is kept, a batch is acknowledged when it is on disk, and its entries make the same state again."""

from __future__ import annotations

import msgspec
import pytest
from service.intake.test_receive import NOW_NS, answers, connected, hello, numbered, ranges_of, said
from wire.sample_batches import log_batch

from ncclscope_service.intake.journal_entry import (
    BatchTaken,
    Entry,
    GoodbyeSaid,
    HelloSaid,
    NotificationSettled,
    SessionForgotten,
    decode_entry,
    encode_entry,
)
from ncclscope_service.intake.receive import Receiver, ReplayError
from ncclscope_wire.codec import decode_message
from ncclscope_wire.frame import Deframer
from ncclscope_wire.messages import Acknowledge, AgentHealth, Goodbye, Heartbeat, Message


class _Journal:
    """Entries, numbered from 1."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def append(self, entry: Entry) -> int:
        self.entries.append(entry)
        return len(self.entries)


def _message(frame: bytes) -> Message:
    (payload,) = Deframer().ingest_bytes(frame)
    return decode_message(payload)


def _replayed(entries: list[Entry]) -> Receiver:
    receiver = Receiver()
    for entry in entries:
        assert isinstance(entry, HelloSaid | BatchTaken | SessionForgotten | GoodbyeSaid)
        receiver.replay(entry)
    return receiver


def test_a_batch_is_acknowledged_when_it_is_on_disk_and_heartbeats_meanwhile_say_what_is() -> None:
    journal = _Journal()
    receiver = Receiver(record=journal.append)
    connected(receiver, 1)
    outcome = receiver.on_bytes(1, said(*numbered(1, log_batch(0, 5), log_batch(5, 9))), NOW_NS)
    assert ranges_of(outcome) == [(0, 5), (5, 9)]
    assert answers(outcome) == []
    beat = said(Heartbeat(agent_wall_ns=1, health=AgentHealth()))
    assert answers(receiver.on_bytes(1, beat, NOW_NS)) == [Acknowledge(sequence=0)]
    assert [_message(frame) for frame in receiver.on_durable(2).values()] == [Acknowledge(sequence=1)]
    assert answers(receiver.on_bytes(1, beat, NOW_NS)) == [Acknowledge(sequence=1)]
    assert [_message(frame) for frame in receiver.on_durable(len(journal.entries)).values()] == [
        Acknowledge(sequence=2)
    ]
    assert receiver.on_durable(len(journal.entries)) == {}


def test_after_a_new_connection_nothing_is_acknowledged_that_did_not_come_on_it() -> None:
    journal = _Journal()
    receiver = Receiver(record=journal.append)
    connected(receiver, 1)
    batches = numbered(1, log_batch(0, 5), log_batch(5, 9), log_batch(9, 12))
    receiver.on_bytes(1, said(*batches), NOW_NS)
    receiver.on_durable(2)
    receiver.on_disconnected(1)
    assert connected(receiver, 2).acknowledged == 1
    again = receiver.on_bytes(2, said(batches[1]), NOW_NS)
    assert again.received == ()
    assert [_message(frame) for frame in receiver.on_durable(len(journal.entries)).values()] == [
        Acknowledge(sequence=2)
    ]
    assert answers(receiver.on_bytes(2, said(batches[2]), NOW_NS)) == [Acknowledge(sequence=3)]


def test_the_entries_make_the_same_agents_again() -> None:
    journal = _Journal()
    receiver = Receiver(record=journal.append)
    connected(receiver, 1)
    receiver.on_bytes(1, said(*numbered(1, log_batch(0, 5), log_batch(5, 9))), NOW_NS)
    connected(receiver, 2, hello("b"))
    receiver.on_bytes(2, said(*numbered(1, log_batch(0, 7)), Goodbye(reason="done")), NOW_NS)
    again = _replayed(journal.entries)
    assert [(each.agent_id, each.batches_total, each.said_goodbye) for each in again.agents()] == [
        ("a", 2, False),
        ("b", 1, True),
    ]
    assert connected(again, 1).session_known
    assert ranges_of(again.on_bytes(1, said(*numbered(3, log_batch(9, 12))), NOW_NS)) == [(9, 12)]


@pytest.mark.parametrize("missing", [0, 1, 2, 3])
def test_behind_an_entry_that_is_missing_nothing_of_its_session_is_applied(missing: int) -> None:
    journal = _Journal()
    receiver = Receiver(record=journal.append)
    connected(receiver, 1)
    receiver.on_bytes(1, said(*numbered(1, log_batch(0, 5), log_batch(5, 9), log_batch(9, 12))), NOW_NS)
    del journal.entries[missing]
    again, applied = Receiver(), 0
    for entry in journal.entries:
        assert isinstance(entry, HelloSaid | BatchTaken)
        try:
            applied += again.replay(entry) is not None
        except ReplayError:
            continue
    assert applied == max(0, missing - 1)
    welcome = connected(again, 1)
    assert welcome.session_known == (missing == 3), "of a last one that is missing nothing can be known"
    if missing in {1, 2}:
        assert [position.end for position in welcome.positions.values()] == ([] if missing == 1 else [5])


def test_a_session_that_begins_anew_under_its_name_is_not_taken_for_the_old_one() -> None:
    journal = _Journal()
    receiver = Receiver(record=journal.append)
    connected(receiver, 1)
    receiver.on_bytes(1, said(*numbered(1, log_batch(0, 5), log_batch(5, 9))), NOW_NS)
    receiver.on_bytes(1, said(*numbered(3, log_batch(20, 25))), NOW_NS)  # a gap: the session is forgotten
    receiver.on_disconnected(1)
    connected(receiver, 2)
    receiver.on_bytes(2, said(*numbered(1, log_batch(9, 12))), NOW_NS)
    whole = _replayed(journal.entries)
    assert whole.agents()[0].batches_total == 3
    lacking = [entry for entry in journal.entries if not isinstance(entry, SessionForgotten)]
    again = Receiver()
    for entry in lacking[:-1]:
        assert isinstance(entry, HelloSaid | BatchTaken)
        again.replay(entry)
    last = lacking[-1]
    assert isinstance(last, BatchTaken)
    with pytest.raises(ReplayError):
        again.replay(last)
    assert not connected(again, 1).session_known


def test_a_settled_notification_is_read_by_the_names_that_earlier_versions_wrote() -> None:
    written = {"type": "told", "receiver": "hooks", "finding": "f", "news": "opened", "is_taken": True}
    entry = NotificationSettled(receiver="hooks", finding="f", change="opened", is_delivered=True)
    assert decode_entry(msgspec.msgpack.encode(written)) == entry == decode_entry(encode_entry(entry))

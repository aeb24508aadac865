"""Receiving: order, duplicates, positions, and what an agent that breaks the rules is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import msgpack
import msgspec
import numpy as np
import pytest
from wire.sample_batches import HELLO, log_batch, log_source

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
from ncclscope_service.intake.receive import Arrival, Outcome, ReceiveLimits, Receiver, ReplayError
from ncclscope_wire import tables
from ncclscope_wire.batch import Batch
from ncclscope_wire.codec import decode_message, encode_message
from ncclscope_wire.frame import Deframer, encode_frame
from ncclscope_wire.messages import (
    ASKING_VERSION,
    PROTOCOL_VERSION,
    Acknowledge,
    AgentHealth,
    BatchMessage,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    Position,
    Refused,
    Welcome,
)

NOW_NS = 1_700_000_000_000_000_000


def hello(agent_id: str = "a", session_id: str = "s") -> Hello:
    return replace(HELLO, agent_id=agent_id, session_id=session_id, name="node1", host="node1", job="llama")


def said(*messages: Message) -> bytes:
    return b"".join(encode_frame(encode_message(message)) for message in messages)


def numbered(first: int, *batches: Batch) -> list[BatchMessage]:
    return [BatchMessage(sequence=first + index, batch=batch) for index, batch in enumerate(batches)]


def answers(outcome: Outcome) -> list[Message]:
    return [decode_message(payload) for payload in Deframer().ingest_bytes(outcome.to_send)]


def connected(receiver: Receiver, number: int, who: Hello | None = None) -> Welcome:
    receiver.open(number)
    (answer,) = answers(receiver.on_bytes(number, said(who or hello()), NOW_NS))
    assert isinstance(answer, Welcome)
    return answer


def refused(outcome: Outcome) -> Refused:
    refusal = answers(outcome)[-1]
    assert isinstance(refusal, Refused)
    assert outcome.close
    assert outcome.fault == f"{refusal.reason}: {refusal.message}"
    return refusal


def ranges_of(outcome: Outcome) -> list[tuple[int, int]]:
    return [(received.batch.begin, received.batch.end) for received in outcome.received]


def test_an_unknown_agent_is_welcomed_to_begin_at_the_beginning() -> None:
    receiver = Receiver()
    assert connected(receiver, 1) == Welcome(
        protocol_version=PROTOCOL_VERSION, session_known=False, acknowledged=0, positions={}
    )
    (agent,) = receiver.agents()
    assert (agent.name, agent.host, agent.job, agent.connected, agent.last_contact_ns) == (
        "node1",
        "node1",
        "llama",
        True,
        NOW_NS,
    )


def test_batches_are_handed_on_in_order_and_acknowledged_together() -> None:
    receiver = Receiver()
    connected(receiver, 1)
    outcome = receiver.on_bytes(1, said(*numbered(1, log_batch(0, 5), log_batch(5, 9))), NOW_NS)
    assert ranges_of(outcome) == [(0, 5), (5, 9)]
    assert [(received.agent, received.job, received.host) for received in outcome.received] == [
        ("a", "llama", "node1")
    ] * 2
    assert answers(outcome) == [Acknowledge(sequence=2)]
    assert not outcome.close


def test_bytes_may_come_one_by_one() -> None:
    receiver = Receiver()
    receiver.open(1)
    stream = said(hello(), *numbered(1, log_batch(0, 5), log_batch(5, 9)))
    outcomes = [receiver.on_bytes(1, bytes([byte]), NOW_NS) for byte in stream]
    assert [piece for outcome in outcomes for piece in ranges_of(outcome)] == [(0, 5), (5, 9)]


def test_a_batch_that_comes_twice_is_applied_once_and_acknowledged_again() -> None:
    receiver = Receiver()
    connected(receiver, 1)
    first = said(*numbered(1, log_batch(0, 5)))
    receiver.on_bytes(1, first, NOW_NS)
    outcome = receiver.on_bytes(1, first, NOW_NS)
    assert outcome.received == ()
    assert answers(outcome) == [Acknowledge(sequence=1)]
    assert receiver.statistics().duplicates == {"sequence": 1}


def test_a_missing_batch_closes_the_connection_and_the_session_stays_known() -> None:
    receiver = Receiver()
    connected(receiver, 1)
    receiver.on_bytes(1, said(*numbered(1, log_batch(0, 5))), NOW_NS)
    refusal = refused(receiver.on_bytes(1, said(*numbered(3, log_batch(9, 12))), NOW_NS))
    assert (refusal.reason, refusal.message) == ("sequence_gap", "batch 3 came after batch 1")
    receiver.on_disconnected(1)
    again = connected(receiver, 2)
    assert (again.session_known, again.acknowledged) == (True, 1)


def test_batches_before_a_fault_in_the_same_bytes_are_handed_on() -> None:
    receiver = Receiver()
    connected(receiver, 1)
    outcome = receiver.on_bytes(1, said(*numbered(1, log_batch(0, 5))) + encode_frame(b"garbage"), NOW_NS)
    assert ranges_of(outcome) == [(0, 5)]
    assert answers(outcome)[0] == Acknowledge(sequence=1)
    assert refused(outcome).reason == "damaged"


def test_an_agent_that_starts_anew_is_told_where_its_sources_stand() -> None:
    receiver = Receiver()
    connected(receiver, 1)
    other = log_source(2)
    batches = numbered(1, log_batch(0, 5), log_batch(0, 3, source=other, is_last=True))
    receiver.on_bytes(1, said(*batches), NOW_NS)
    receiver.on_disconnected(1)
    again = connected(receiver, 2, hello(session_id="later"))
    assert not again.session_known
    assert again.positions == {
        log_source(1).key: Position(end=5, end_line=5),
        other.key: Position(end=3, end_line=3, is_complete=True),
    }


def test_positions_of_one_agent_are_not_those_of_another() -> None:
    receiver = Receiver()
    connected(receiver, 1)
    receiver.on_bytes(1, said(*numbered(1, log_batch(0, 5))), NOW_NS)
    assert connected(receiver, 2, hello(agent_id="b")).positions == {}
    assert ranges_of(receiver.on_bytes(2, said(*numbered(1, log_batch(0, 5))), NOW_NS)) == [(0, 5)]


def test_each_session_has_a_label_of_its_own_even_under_the_same_id() -> None:
    receiver = Receiver()
    connected(receiver, 1)
    first = receiver.on_bytes(1, said(*numbered(1, log_batch(0, 5))), NOW_NS)
    refused(receiver.on_bytes(1, said(*numbered(2, log_batch(7, 8))), NOW_NS))
    receiver.on_disconnected(1)
    connected(receiver, 2)
    second = receiver.on_bytes(2, said(*numbered(1, log_batch(5, 8))), NOW_NS)
    assert first.received[0].session != second.received[0].session


def test_a_batch_that_leaves_something_out_forgets_the_session() -> None:
    receiver = Receiver()
    connected(receiver, 1)
    receiver.on_bytes(1, said(*numbered(1, log_batch(0, 5))), NOW_NS)
    refusal = refused(receiver.on_bytes(1, said(*numbered(2, log_batch(6, 9))), NOW_NS))
    assert (refusal.reason, refusal.message) == ("position_gap", "rank1.log: a batch of 6 to 9 came, and 5 is reached")
    receiver.on_disconnected(1)
    again = connected(receiver, 2)
    assert not again.session_known
    assert again.positions[log_source().key].end == 5


def test_a_batch_that_overlaps_what_is_known_forgets_the_session() -> None:
    receiver = Receiver()
    connected(receiver, 1)
    receiver.on_bytes(1, said(*numbered(1, log_batch(0, 5))), NOW_NS)
    assert refused(receiver.on_bytes(1, said(*numbered(2, log_batch(3, 9))), NOW_NS)).reason == "position_gap"


def test_rows_that_are_read_again_are_dropped_but_their_dictionary_entries_are_kept() -> None:
    receiver = Receiver()
    connected(receiver, 1)
    whole = log_batch(0, 5, strings=("AllReduce",), templates=1, operations=((0, 0), (0, 1)))
    receiver.on_bytes(1, said(*numbered(1, whole)), NOW_NS)
    receiver.on_disconnected(1)
    connected(receiver, 2, hello(session_id="reads from the start"))
    outcome = receiver.on_bytes(2, said(*numbered(1, whole, log_batch(5, 6, operations=((0, 2),)))), NOW_NS)
    dictionaries, rows = (received.batch for received in outcome.received)
    assert (dictionaries.begin, dictionaries.end, dictionaries.end_line) == (5, 5, 5)
    assert (dictionaries.strings, len(dictionaries.operation_templates)) == (("AllReduce",), 1)
    assert len(dictionaries.operations) == 0
    assert rows.operations["line"].tolist() == [2]
    assert receiver.statistics().duplicates == {"position": 1}


def test_an_export_that_is_read_again_is_dropped_whole() -> None:
    receiver = Receiver()
    connected(receiver, 1)
    export = log_batch(0, 5, strings=("x",), is_last=True)
    receiver.on_bytes(1, said(*numbered(1, export)), NOW_NS)
    receiver.on_disconnected(1)
    connected(receiver, 2, hello(session_id="t"))
    outcome = receiver.on_bytes(2, said(*numbered(1, export)), NOW_NS)
    assert outcome.received == ()
    assert answers(outcome) == [Acknowledge(sequence=1)]


BAD_INDICES = [
    ("operations", "template", tables.OPERATION_ROW, "operation_templates has 1 entries"),
    ("tunings", "thread", tables.TUNING_ROW, "threads has 1 entries"),
    ("call_marks", "thread", tables.CALL_MARK, "threads has 1 entries"),
    ("kernels", "template", tables.KERNEL_ROW, "kernel_templates has 0 entries"),
    ("ranges", "template", tables.RANGE_ROW, "range_templates has 0 entries"),
    ("busy", "host", tables.BUSY_ROW, "strings has 1 entries"),
    ("inspected", "inspected_rank", tables.INSPECTED_ROW, "inspected_ranks has 0 entries"),
    ("threads", "host", tables.THREAD, "strings has 1 entries"),
    ("operation_templates", "op_name", tables.OPERATION_TEMPLATE, "strings has 1 entries"),
    ("kernel_templates", "name", tables.KERNEL_TEMPLATE, "strings has 1 entries"),
    ("range_templates", "text", tables.RANGE_TEMPLATE, "strings has 1 entries"),
    ("inspected_ranks", "name", tables.INSPECTED_RANK, "strings has 1 entries"),
]


@pytest.mark.parametrize(("table", "column", "dtype", "said_why"), BAD_INDICES)
def test_an_index_outside_its_dictionary_is_refused_by_name(
    table: str, column: str, dtype: np.dtype[np.void], said_why: str
) -> None:
    receiver = Receiver()
    connected(receiver, 1)
    receiver.on_bytes(1, said(*numbered(1, log_batch(0, 5, strings=("x",), templates=1))), NOW_NS)
    rows = np.zeros(1, dtype)
    rows[column] = 77
    changes: dict[str, Any] = {table: rows}
    bad = replace(log_batch(5, 6), **changes)
    refusal = refused(receiver.on_bytes(1, said(*numbered(2, bad)), NOW_NS))
    assert refusal.reason == "index_out_of_range"
    assert refusal.message == f"rank1.log: row 0: {table}.{column} is 77, and {said_why}"


def test_a_code_that_this_version_does_not_have_is_refused() -> None:
    receiver = Receiver()
    connected(receiver, 1)
    tunings = np.zeros(1, tables.TUNING_ROW)
    tunings["algorithm"] = 99
    bad = replace(log_batch(0, 1, strings=("x",)), tunings=tunings)
    refusal = refused(receiver.on_bytes(1, said(*numbered(1, bad)), NOW_NS))
    assert refusal.message == "rank1.log: row 0: tunings.algorithm is 99, which is no code of this version"


def test_an_agent_of_another_version_is_told_both_versions() -> None:
    receiver = Receiver()
    receiver.open(1)
    payload = cast(bytes, msgpack.packb({"kind": "hello", "protocol_version": 9, "name": ["new"]}))
    refusal = refused(receiver.on_bytes(1, encode_frame(payload), NOW_NS))
    assert refusal.reason == "wrong_version"
    assert "version 9" in refusal.message
    assert f"version {PROTOCOL_VERSION}" in refusal.message
    assert receiver.agents() == ()


@pytest.mark.parametrize("more", [{}, {"host": 7, "token": None}, {"host": "h" * 9999, "token": "\ud800"}], ids=str)
def test_who_only_asks_is_told_the_version_and_becomes_no_agent_whatever_it_says(more: dict[str, object]) -> None:
    receiver = Receiver()
    receiver.open(1)
    packer = msgpack.Packer(unicode_errors="surrogatepass")
    payload = cast(bytes, packer.pack({"kind": "hello", "protocol_version": ASKING_VERSION, **more}))
    refusal = refused(receiver.on_bytes(1, encode_frame(payload), NOW_NS))
    assert refusal.reason in ("wrong_version", "undecodable", "damaged")
    assert receiver.agents() == ()


@pytest.mark.parametrize(
    "message",
    [*numbered(1, log_batch(0, 1)), Heartbeat(agent_wall_ns=0, health=AgentHealth()), Goodbye(reason="x")],
    ids=lambda message: type(message).__name__,
)
def test_nothing_is_allowed_before_hello(message: Message) -> None:
    receiver = Receiver()
    receiver.open(1)
    assert refused(receiver.on_bytes(1, said(message), NOW_NS)).reason == "unexpected_message"


@pytest.mark.parametrize(
    "message",
    [hello(), Acknowledge(sequence=0), Refused(reason="r", message="m")],
    ids=lambda message: type(message).__name__,
)
def test_what_only_a_service_says_or_a_second_hello_is_not_allowed(message: Message) -> None:
    receiver = Receiver()
    connected(receiver, 1)
    refusal = refused(receiver.on_bytes(1, said(message), NOW_NS))
    assert refusal.message == f"{type(message).__name__} is not allowed while ESTABLISHED"


def test_a_heartbeat_is_answered_and_gives_health_and_a_clock_offset() -> None:
    receiver = Receiver()
    connected(receiver, 1)
    beats = [
        Heartbeat(agent_wall_ns=NOW_NS + ahead_ns, health=AgentHealth(lines_total=lines))
        for ahead_ns, lines in ((40, 1), (70, 2), (10, 3))
    ]
    assert answers(receiver.on_bytes(1, said(*beats), NOW_NS)) == [Acknowledge(sequence=0)]
    (agent,) = receiver.agents()
    assert agent.clock_offset_ns == 70
    assert agent.health == AgentHealth(lines_total=3)


def test_goodbye_closes_and_the_agent_is_remembered_as_gone() -> None:
    receiver = Receiver()
    connected(receiver, 1)
    outcome = receiver.on_bytes(1, said(Goodbye(reason="stopped")), NOW_NS)
    assert outcome.close
    assert outcome.fault is None
    receiver.on_disconnected(1)
    (agent,) = receiver.agents()
    assert (agent.connected, agent.said_goodbye) == (False, True)


def test_an_agent_that_comes_back_takes_over_from_its_older_connection() -> None:
    receiver = Receiver()
    connected(receiver, 1)
    receiver.on_bytes(1, said(*numbered(1, log_batch(0, 5))), NOW_NS)
    assert connected(receiver, 2).session_known
    late = receiver.on_bytes(1, said(*numbered(2, log_batch(5, 6))), NOW_NS)
    assert (late.received, late.close) == ((), True)
    receiver.on_disconnected(1)
    (agent,) = receiver.agents()
    assert agent.connected


def test_the_agent_that_was_longest_away_is_forgotten_when_there_are_too_many() -> None:
    receiver = Receiver(limits=ReceiveLimits(max_agents=2))
    for number, agent_id in enumerate(["a", "b"]):
        receiver.open(number)
        receiver.on_bytes(number, said(hello(agent_id)), NOW_NS + number)
    receiver.open(8)
    full = refused(receiver.on_bytes(8, said(hello("c")), NOW_NS))
    assert full.reason == "too_many_agents"
    receiver.on_disconnected(0)
    receiver.on_disconnected(1)
    connected(receiver, 9, hello("c"))
    assert [agent.agent_id for agent in receiver.agents()] == ["b", "c"]


def test_the_oldest_complete_source_is_forgotten_when_there_are_too_many() -> None:
    receiver = Receiver(limits=ReceiveLimits(max_sources=2))
    connected(receiver, 1)
    batches = [log_batch(0, 5, source=log_source(number), is_last=number == 2) for number in (1, 2, 3)]
    receiver.on_bytes(1, said(*numbered(1, *batches)), NOW_NS)
    refusal = refused(receiver.on_bytes(1, said(*numbered(4, log_batch(0, 1, source=log_source(4)))), NOW_NS))
    assert refusal.reason == "too_many_sources"
    receiver.on_disconnected(1)
    positions = connected(receiver, 2, hello(session_id="t")).positions
    assert set(positions) == {log_source(1).key, log_source(3).key}


def test_an_agent_that_comes_goes_and_comes_back_is_told_once_each_time() -> None:
    receiver = Receiver()
    arrivals: list[Arrival | None] = []
    for number in (1, 2):
        receiver.open(number)
        arrivals.append(receiver.on_bytes(number, said(hello()), NOW_NS).arrival)
        assert receiver.on_bytes(number, said(Goodbye(reason="done")), NOW_NS).arrival is None
        lost = receiver.on_disconnected(number)
        assert lost is not None
        assert (lost.name, lost.connected, lost.said_goodbye) == ("node1", False, True)
    known = [(arrival.agent.name, arrival.agent.job, arrival.is_known) for arrival in arrivals if arrival is not None]
    assert known == [("node1", "llama", False), ("node1", "llama", True)]


def test_an_agent_that_has_a_newer_connection_is_not_lost_with_the_older() -> None:
    receiver = Receiver()
    connected(receiver, 1)
    receiver.open(2)
    arrival = receiver.on_bytes(2, said(hello()), NOW_NS).arrival
    assert arrival is not None
    assert arrival.replaces == 1
    assert receiver.on_disconnected(1) is None
    lost = receiver.on_disconnected(2)
    assert lost is not None
    assert not lost.said_goodbye


def test_a_connection_without_a_hello_is_nobodys() -> None:
    receiver = Receiver()
    receiver.open(1)
    assert receiver.on_bytes(1, b"\0", NOW_NS).arrival is None
    assert receiver.on_disconnected(1) is None


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

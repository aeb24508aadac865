"""The agent's session: every row of its table, the window, and what happens when peers break the rules."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from wire.sample_batches import HELLO, log_batch

from ncclscope_agent.link.exchange import TRANSITIONS, SessionEvent, SessionState
from ncclscope_agent.link.frames import WindowLimits
from ncclscope_agent.link.session import Session
from ncclscope_wire import tables
from ncclscope_wire.batch import Batch
from ncclscope_wire.codec import decode_message, encode_message
from ncclscope_wire.errors import ProtocolError
from ncclscope_wire.frame import Deframer, encode_frame
from ncclscope_wire.messages import (
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


def said(message: Message) -> bytes:
    return encode_frame(encode_message(message))


def welcome(*, known: bool = False, acknowledged: int = 0, positions: dict[str, Position] | None = None) -> bytes:
    return said(
        Welcome(
            protocol_version=PROTOCOL_VERSION,
            session_known=known,
            acknowledged=acknowledged,
            positions=positions or {},
        )
    )


def sent_by(session: Session) -> list[Message]:
    """Everything that the session wants to send now."""
    deframer = Deframer()
    messages: list[Message] = []
    while data := session.to_send():
        messages.extend(decode_message(payload) for payload in deframer.ingest_bytes(data))
    return messages


def sequences(messages: list[Message]) -> list[int]:
    return [message.sequence for message in messages if isinstance(message, BatchMessage)]


def streaming(limits: WindowLimits | None = None) -> Session:
    session = Session(HELLO, limits=limits)
    session.on_connected()
    session.on_bytes(welcome())
    sent_by(session)
    return session


def reconnect(session: Session, answer: bytes) -> list[Message]:
    session.on_disconnected()
    session.on_connected()
    before = sent_by(session)
    assert sequences(before) == [], "batches were sent before the service answered"
    session.on_bytes(answer)
    return sent_by(session)


def in_state(state: SessionState) -> Session:
    session = Session(HELLO)
    if state in (SessionState.HELLO_SENT, SessionState.STREAMING):
        session.on_connected()
    if state is SessionState.STREAMING:
        session.on_bytes(welcome())
    if state is SessionState.CLOSED:
        session.exchange.finish("test")
    assert session.exchange.state is state
    return session


def cause(session: Session, event: SessionEvent) -> None:
    match event:
        case SessionEvent.CONNECTED:
            session.on_connected()
        case SessionEvent.WELCOMED:
            session.on_bytes(welcome())
        case SessionEvent.ACKNOWLEDGED:
            session.on_bytes(said(Acknowledge(sequence=0)))
        case SessionEvent.REFUSED:
            session.on_bytes(said(Refused(reason="r", message="m")))
        case SessionEvent.DISCONNECTED:
            session.on_disconnected()
        case SessionEvent.FINISHED:
            session.exchange.finish("test")


@pytest.mark.parametrize(("state", "event"), list(product(SessionState, SessionEvent)))
def test_each_event_moves_each_state_as_the_table_says_or_is_refused(state: SessionState, event: SessionEvent) -> None:
    session = in_state(state)
    if (state, event) in TRANSITIONS:
        cause(session, event)
        assert session.exchange.state is TRANSITIONS[state, event]
        return
    comes_from_peer = event in (SessionEvent.WELCOMED, SessionEvent.ACKNOWLEDGED, SessionEvent.REFUSED)
    with pytest.raises(ProtocolError if comes_from_peer else AssertionError):
        cause(session, event)
    assert session.exchange.state is state


def test_a_connection_begins_with_hello() -> None:
    session = Session(HELLO)
    assert session.to_send() == b""
    session.on_connected()
    assert sent_by(session) == [HELLO]


def test_nothing_is_accepted_before_the_service_has_said_where_to_begin() -> None:
    session = Session(HELLO)
    assert not session.offer(log_batch(0, 1))
    session.on_connected()
    assert not session.offer(log_batch(0, 1))
    session.on_bytes(welcome(positions={"k": Position(end=5, end_line=2)}))
    assert session.generation == 1
    assert session.positions == {"k": Position(end=5, end_line=2)}
    assert session.offer(log_batch(0, 1))


def test_batches_are_numbered_from_1_in_the_order_in_which_they_were_offered() -> None:
    session = streaming()
    for begin in range(3):
        assert session.offer(log_batch(begin, begin + 1))
    messages = sent_by(session)
    assert sequences(messages) == [1, 2, 3]
    assert [message.batch.begin for message in messages if isinstance(message, BatchMessage)] == [0, 1, 2]


def test_a_full_window_accepts_nothing_until_something_is_acknowledged() -> None:
    session = streaming(WindowLimits(max_batches=2))
    assert session.offer(log_batch(0, 1))
    assert session.offer(log_batch(1, 2))
    assert not session.has_room
    assert not session.offer(log_batch(2, 3))
    assert sequences(sent_by(session)) == [1, 2]
    session.on_bytes(said(Acknowledge(sequence=1)))
    assert session.offer(log_batch(2, 3))
    assert sequences(sent_by(session)) == [3]


def _large(operations: int, begin: int = 0, *, strings: tuple[str, ...] = (), templates: int = 0) -> Batch:
    """A batch of some 20 bytes per operation: no opCount and no time is like another."""
    rows = tuple((0, line) for line in range(operations))
    batch = log_batch(begin, begin + 1, strings=strings, templates=templates, operations=rows)
    noise = np.random.default_rng(begin).integers(1, 1 << 62, (2, operations))
    batch.operations["op_count"], batch.operations["logged_at_ns"] = noise
    return batch


def test_the_window_is_bounded_in_bytes_but_for_its_last_batch() -> None:
    session = streaming(WindowLimits(max_bytes=1000))
    while session.offer(_large(30)):
        pass
    statistics = session.statistics()
    assert statistics.window_batches == 2
    assert 1000 <= statistics.window_bytes < 3000


def test_batches_in_flight_are_sent_again_to_a_service_that_knows_the_session() -> None:
    session = streaming()
    for begin in range(3):
        session.offer(log_batch(begin, begin + 1))
    sent_by(session)
    session.on_bytes(said(Acknowledge(sequence=1)))
    again = reconnect(session, welcome(known=True, acknowledged=2))
    assert sequences(again) == [3]
    assert session.generation == 1


def test_a_batch_that_was_offered_while_disconnected_is_sent_after_the_others() -> None:
    session = streaming()
    session.offer(log_batch(0, 1))
    sent_by(session)
    session.on_disconnected()
    assert session.offer(log_batch(1, 2))
    assert session.to_send() == b""
    session.on_connected()
    session.on_bytes(welcome(known=True, acknowledged=0))
    assert sequences(sent_by(session)) == [1, 2]


def test_readers_begin_anew_where_the_service_does_not_know_the_session() -> None:
    session = streaming()
    session.offer(log_batch(0, 1))
    again = reconnect(session, welcome(known=False, positions={"k": Position(end=1)}))
    assert again == []
    assert session.is_drained
    assert session.generation == 2
    assert session.positions == {"k": Position(end=1)}
    session.offer(log_batch(1, 2))
    assert sequences(sent_by(session)) == [1]


def test_a_service_that_lost_what_it_had_acknowledged_makes_readers_begin_anew_next_time() -> None:
    session = streaming()
    for begin in range(3):
        session.offer(log_batch(begin, begin + 1))
    sent_by(session)
    session.on_bytes(said(Acknowledge(sequence=2)))
    with pytest.raises(ProtocolError, match="batch 1 was applied last, and batches 3 to 3 are in flight"):
        reconnect(session, welcome(known=True, acknowledged=1))
    session.on_disconnected()
    session.on_connected()
    hello = sent_by(session)[0]
    assert isinstance(hello, Hello)
    assert hello.session_id == "s+1"
    session.on_bytes(welcome())
    assert session.generation == 2


def test_acknowledging_what_was_never_sent_is_refused() -> None:
    session = streaming()
    session.offer(log_batch(0, 1))
    with pytest.raises(ProtocolError, match="batch 1 was acknowledged, and 0 was sent last"):
        session.on_bytes(said(Acknowledge(sequence=1)))


def test_an_acknowledgement_that_comes_late_says_nothing_new() -> None:
    session = streaming()
    session.offer(log_batch(0, 1))
    session.offer(log_batch(1, 2))
    sent_by(session)
    session.on_bytes(said(Acknowledge(sequence=2)) + said(Acknowledge(sequence=1)))
    assert session.is_drained
    assert session.statistics().acknowledged_total == 2


def test_a_heartbeat_that_could_not_be_sent_is_replaced_by_the_next() -> None:
    session = streaming()
    session.exchange.heartbeat(AgentHealth(lines_total=1), agent_wall_ns=1)
    session.exchange.heartbeat(AgentHealth(lines_total=2), agent_wall_ns=2)
    assert sent_by(session) == [Heartbeat(agent_wall_ns=2, health=AgentHealth(lines_total=2))]


def test_no_heartbeat_is_kept_for_the_next_connection() -> None:
    session = streaming()
    session.exchange.heartbeat(AgentHealth(), agent_wall_ns=1)
    assert reconnect(session, welcome(known=True)) == []


def test_the_end_is_said_after_the_last_heartbeat_and_then_nothing_is_accepted() -> None:
    session = streaming()
    beat = Heartbeat(agent_wall_ns=1, health=AgentHealth(lines_total=9))
    session.exchange.heartbeat(beat.health, agent_wall_ns=1)
    session.exchange.finish("stopped")
    assert sent_by(session) == [beat, Goodbye(reason="stopped")]
    assert not session.offer(log_batch(0, 1))


def test_sending_goes_in_portions() -> None:
    session = streaming()
    for begin in range(10):
        session.offer(_large(80, begin))
    portion = session.to_send(max_bytes=2000)
    assert 2000 <= len(portion) < 4000
    assert sequences([decode_message(payload) for payload in Deframer().ingest_bytes(portion)]) == [1, 2]


def test_a_batch_over_the_frame_limit_becomes_its_dictionaries_and_a_gap() -> None:
    session = streaming(WindowLimits(max_frame_bytes=1500))
    batch = _large(100, strings=("AllReduce",), templates=1)
    assert session.offer(batch)
    (message,) = sent_by(session)
    assert isinstance(message, BatchMessage)
    assert (message.batch.begin, message.batch.end, len(message.batch.operations)) == (0, 1, 0)
    assert (message.batch.strings, len(message.batch.operation_templates)) == (("AllReduce",), 1)
    assert [(gap.reason, gap.amount) for gap in message.batch.gaps] == [("batch_too_large", 100)]
    assert session.statistics().stripped == {"batch_too_large": 1}


def test_a_batch_over_the_frame_limit_says_that_marks_of_groups_were_lost() -> None:
    session = streaming(WindowLimits(max_frame_bytes=1500))
    marks = np.zeros(2, tables.CALL_MARK)
    marks["line"], marks["kind"] = [5, 9], [tables.GROUP_START, tables.GROUP_END]
    session.offer(replace(_large(100, strings=("x",), templates=1), call_marks=marks))
    (message,) = sent_by(session)
    assert isinstance(message, BatchMessage)
    assert message.batch.call_marks.tolist() == [(0, 5, tables.CALLS_TORN)]
    assert message.batch.gaps[0].amount == 102


def test_a_service_of_another_version_is_refused() -> None:
    session = Session(HELLO)
    session.on_connected()
    with pytest.raises(ProtocolError, match=f"protocol version {PROTOCOL_VERSION + 1}, not {PROTOCOL_VERSION}"):
        session.on_bytes(said(Welcome(protocol_version=PROTOCOL_VERSION + 1, session_known=False, acknowledged=0)))


def test_a_refusal_is_kept_until_the_next_welcome() -> None:
    session = in_state(SessionState.HELLO_SENT)
    session.on_bytes(said(Refused(reason="wrong_version", message="install the same")))
    assert session.exchange.refusal == Refused(reason="wrong_version", message="install the same")
    session.on_disconnected()
    session.on_connected()
    session.on_bytes(welcome())
    assert session.exchange.refusal is None


def test_the_age_of_the_window_is_that_of_its_oldest_batch() -> None:
    session = streaming()
    assert session.statistics().oldest_observed_at_ns is None
    for begin in range(2):
        batch = log_batch(begin, begin + 1)
        session.offer(type(batch)(source=batch.source, begin=begin, end=begin + 1, observed_at_ns=100 + begin))
    assert session.statistics().oldest_observed_at_ns == 100
    sent_by(session)
    session.on_bytes(said(Acknowledge(sequence=1)))
    assert session.statistics().oldest_observed_at_ns == 101

"""Who an agent is to the service: owners apart, hosts held against the token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from wire.sample_batches import HELLO, log_batch

from ncclscope_service.auth.access import AccessList, parse_access
from ncclscope_service.intake.admission import FOREIGN_HOST, Admission
from ncclscope_service.intake.journal_entry import Entry
from ncclscope_service.intake.receive import Outcome, Receiver
from ncclscope_service.keep.service_state import ReplayCounts, ServiceState
from ncclscope_wire import tables
from ncclscope_wire.batch import Batch
from ncclscope_wire.codec import decode_message, encode_message
from ncclscope_wire.frame import Deframer, encode_frame
from ncclscope_wire.messages import Acknowledge, BatchMessage, Hello, Message, Refused, Welcome

TRAIN, OTHER = "train-token-0123456789", "other-token-0123456789"


def access(*lines: str) -> AccessList:
    return parse_access("\n".join(lines), where="tokens")


def hello(token: str, *, agent_id: str = "a", session: str = "s", host: str = "node1", job: str = "j") -> Hello:
    return replace(HELLO, agent_id=agent_id, session_id=session, host=host, job=job, token=token)


def say(receiver: Receiver, connection: int, message: Message) -> tuple[Outcome, list[Message]]:
    outcome = receiver.on_bytes(connection, encode_frame(encode_message(message)), 0)
    return outcome, [decode_message(payload) for payload in Deframer().ingest_bytes(outcome.to_send)]


def opened(receiver: Receiver, connection: int, who: Hello, *, certificate: tuple[str, ...] = ()) -> Message:
    receiver.open(connection, certificate=certificate)
    return say(receiver, connection, who)[1][0]


def refusal(message: Message) -> str:
    assert isinstance(message, Refused), message
    return message.reason


def host_batch(*hosts: str, begin: int = 0, first: int = 0) -> Batch:
    """A batch with a thread of each host; `first`: how many strings the source has already."""
    threads = np.zeros(len(hosts), tables.THREAD)
    threads["host"] = np.arange(first, first + len(hosts))
    return replace(log_batch(begin, begin + 1), strings=hosts, threads=threads, operations=log_batch(0, 0).operations)


def test_only_who_shows_a_known_token_is_welcome() -> None:
    receiver = Receiver(admission=Admission(access(f"{TRAIN} name=train job=j host=node*")))
    assert isinstance(opened(receiver, 1, hello(TRAIN)), Welcome)
    assert refusal(opened(receiver, 2, hello(""))) == "unauthorized"
    assert refusal(opened(receiver, 3, hello(OTHER))) == "unauthorized"
    assert refusal(opened(receiver, 4, hello(TRAIN, job="theirs"))) == "foreign_job"
    assert refusal(opened(receiver, 5, hello(TRAIN, host="login"))) == "foreign_host"
    assert receiver.statistics().faults == {"unauthorized": 2, "foreign_job": 1, "foreign_host": 1}
    assert len(receiver.agents()) == 1


def test_nothing_that_is_kept_or_shown_of_an_agent_holds_its_token() -> None:
    receiver = Receiver(admission=Admission(access(TRAIN)))
    opened(receiver, 1, hello(TRAIN))
    assert TRAIN not in repr(receiver.agents())
    assert TRAIN not in repr(hello(TRAIN))


def test_another_owner_cannot_take_over_a_session_whose_ids_it_has_guessed() -> None:
    receiver = Receiver(admission=Admission(access(f"{TRAIN} name=train", f"{OTHER} name=other")))
    opened(receiver, 1, hello(TRAIN))
    say(receiver, 1, BatchMessage(sequence=1, batch=log_batch(0, 5)))
    stolen = opened(receiver, 2, hello(OTHER))
    assert isinstance(stolen, Welcome)
    assert (stolen.session_known, stolen.acknowledged, stolen.positions) == (False, 0, {})
    assert say(receiver, 1, BatchMessage(sequence=2, batch=log_batch(5, 6)))[1] == [Acknowledge(sequence=2)]


def test_an_unnamed_owner_cannot_write_the_id_of_a_named_ones_agent() -> None:
    receiver = Receiver(admission=Admission(access(f"{TRAIN} name=train", OTHER)))
    opened(receiver, 1, hello(TRAIN))
    opened(receiver, 2, hello(OTHER, agent_id="train/a"))
    assert {agent.agent_id for agent in receiver.agents()} == {"train/a", "train:a"}


def test_an_agent_keeps_its_session_when_its_token_is_replaced_by_one_of_the_same_name() -> None:
    receiver = Receiver(admission=Admission(access(f"{TRAIN} name=train")))
    opened(receiver, 1, hello(TRAIN))
    say(receiver, 1, BatchMessage(sequence=1, batch=log_batch(0, 5)))
    receiver.use_admission(Admission(access(f"{TRAIN} name=train", f"{OTHER} name=train")))
    welcome = opened(receiver, 2, hello(OTHER))
    assert isinstance(welcome, Welcome)
    assert (welcome.session_known, welcome.acknowledged) == (True, 1)


def test_who_loses_its_token_is_refused_at_its_next_word_and_others_go_on() -> None:
    receiver = Receiver(admission=Admission(access(f"{TRAIN} name=train", f"{OTHER} name=other")))
    opened(receiver, 1, hello(TRAIN))
    opened(receiver, 2, hello(OTHER))
    receiver.use_admission(Admission(access(f"{OTHER} name=other")))
    outcome, answers = say(receiver, 1, BatchMessage(sequence=1, batch=log_batch(0, 1)))
    assert outcome.received == ()
    assert refusal(answers[0]) == "unauthorized"
    assert say(receiver, 2, BatchMessage(sequence=1, batch=log_batch(0, 1)))[1] == [Acknowledge(sequence=1)]


def test_a_certificate_stands_for_a_token() -> None:
    receiver = Receiver(admission=Admission(access("cert:node1 host=node1")))
    assert isinstance(opened(receiver, 1, hello(""), certificate=("node1",)), Welcome)
    assert refusal(opened(receiver, 2, hello("", host="node2"), certificate=("node1",))) == "foreign_host"
    assert refusal(opened(receiver, 3, hello(""), certificate=("node2",))) == "unauthorized"


def test_rows_of_foreign_hosts_lose_the_name_and_are_counted() -> None:
    receiver = Receiver(admission=Admission(access(f"{TRAIN} host=node1")))
    opened(receiver, 1, hello(TRAIN))
    outcome, _ = say(receiver, 1, BatchMessage(sequence=1, batch=host_batch("node1", "victim")))
    (received,) = outcome.received
    assert received.batch.strings == ("node1", FOREIGN_HOST)
    assert received.batch.counts.skipped["foreign_host"] == 1


def test_a_name_that_was_said_for_another_purpose_cannot_become_a_host_later() -> None:
    receiver = Receiver(admission=Admission(access(f"{TRAIN} host=node1")))
    opened(receiver, 1, hello(TRAIN))
    innocent = replace(host_batch("node1"), strings=("node1", "victim"))
    say(receiver, 1, BatchMessage(sequence=1, batch=innocent))
    threads = np.zeros(1, tables.THREAD)
    threads["host"] = 1
    outcome, answers = say(receiver, 1, BatchMessage(sequence=2, batch=replace(host_batch(begin=1), threads=threads)))
    assert outcome.received == ()
    assert refusal(answers[0]) == "foreign_host"


def test_a_session_that_was_begun_anew_is_held_against_its_own_strings() -> None:
    receiver = Receiver(admission=Admission(access(f"{TRAIN} host=node1")))
    opened(receiver, 1, hello(TRAIN))
    say(receiver, 1, BatchMessage(sequence=1, batch=host_batch("node1", "node1")))
    say(receiver, 1, BatchMessage(sequence=2, batch=log_batch(90, 91)))  # a gap: the session is forgotten
    opened(receiver, 2, hello(TRAIN))
    outcome, _ = say(receiver, 2, BatchMessage(sequence=1, batch=host_batch("victim", begin=1)))
    assert outcome.received[0].batch.strings == (FOREIGN_HOST,)


def _restarted(kept: ServiceState, entries: list[Entry], how: str) -> ServiceState:
    """What a service that was killed goes on from."""
    if how == "state":
        restored = ServiceState.restore(b"".join(kept.parts()))
    else:
        restored, replayed = ServiceState(), ReplayCounts()
        receiver = Receiver(agents=restored.agents)
        for entry in entries:
            restored.replay(entry, receiver, lambda _known, _operations: True, replayed)
        assert replayed.left_out == 0
    restored.mark_restarted(0)
    return restored


@pytest.mark.parametrize("how", ["journal", "state"])
def test_who_is_restricted_to_hosts_goes_on_after_a_restart_and_is_held_against_what_it_said_before(how: str) -> None:
    admission, kept = Admission(access(f"{TRAIN} host=node1")), ServiceState()
    entries = list[Entry]()

    def record(entry: Entry) -> int:
        entries.append(entry)
        return len(entries)

    receiver = Receiver(admission=admission, agents=kept.agents, record=record)
    opened(receiver, 1, hello(TRAIN))
    innocent = replace(host_batch("node1"), strings=("node1", "victim"))
    for batch in (innocent, host_batch("stranger", begin=1, first=2)):
        sequence = kept.agents["a"].applied + 1
        for received in say(receiver, 1, BatchMessage(sequence=sequence, batch=batch))[0].received:
            kept.ingest_batch(received)
    again = Receiver(admission=admission, agents=_restarted(kept, entries, how).agents, record=record)
    welcome = opened(again, 1, hello(TRAIN))
    assert isinstance(welcome, Welcome)
    assert (welcome.session_known, welcome.acknowledged) == (True, 2)
    threads = np.zeros(1, tables.THREAD)
    for sequence, place in ((3, 0), (4, 2)):  # its own host, and the one that was put out
        threads["host"] = place
        batch = replace(host_batch(begin=sequence - 1), threads=threads)
        assert say(again, 1, BatchMessage(sequence=sequence, batch=batch))[0].fault is None
    threads["host"] = 1
    _, answers = say(again, 1, BatchMessage(sequence=5, batch=replace(host_batch(begin=4), threads=threads)))
    assert refusal(answers[0]) == "foreign_host"


def test_before_the_hello_no_large_frame_is_waited_for() -> None:
    receiver = Receiver()
    receiver.open(1)
    outcome = receiver.on_bytes(1, (20_000).to_bytes(4, "big"), 0)
    assert outcome.close
    assert receiver.statistics().faults == {"frame_too_long": 1}

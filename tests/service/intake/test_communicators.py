"""Communicators are told apart by what the log says of them, pointers being reused."""

from __future__ import annotations

from collections.abc import Sequence

from service.log_batches import Line, init, log_batch

from ncclscope_service.intake.communicators import Communicators
from ncclscope_service.intake.resolver import Arrived, BatchResolver, logged_operations
from ncclscope_service.store.records import Identity
from ncclscope_service.store.tables import Store
from ncclscope_wire.records import CommunicatorEvent, CommunicatorEventKind


class _Service:
    def __init__(self) -> None:
        self.store = Store()
        self.intake = BatchResolver(self.store)
        self.communicators = Communicators(self.store)

    def feed(
        self,
        lines: Sequence[Line] = (),
        events: Sequence[CommunicatorEvent] = (),
        *,
        host: str = "node1",
        pid: int = 10,
    ) -> Arrived:
        batch = log_batch(lines, events=events, host=host, pid=pid)
        arrived = self.intake.resolve_batch(batch, agent="a", session=f"{host}{pid}{id(batch)}", job="j")
        arrived.operations = logged_operations(arrived.operations)
        self.communicators.place(arrived.operations, arrived.events, arrived.event_processes)
        return arrived

    def names(self, arrived: Arrived) -> list[str]:
        members = [self.store.members[member] for member in arrived.operations["member"].tolist()]
        return [self.store.communicators[member.communicator].comm_id for member in members]


def test_ranks_with_one_comm_id_are_one_communicator() -> None:
    service = _Service()
    first = service.feed([Line(line=2)], [init(line=1, comm_id=0xBEEF, rank=0)])
    second = service.feed([Line(line=2)], [init(line=1, comm_id=0xBEEF, rank=1, host="node2")], host="node2")
    assert service.names(first) == service.names(second) == ["0xbeef"]
    assert service.store.communicators[0].members == {0: 0, 1: 1}


def test_start_and_complete_of_one_init_are_one_communicator() -> None:
    service = _Service()
    arrived = service.feed(
        [Line(line=3)],
        [init(line=1, comm_id=5, kind=CommunicatorEventKind.INIT_START), init(line=2, comm_id=5)],
    )
    assert service.names(arrived) == ["0x5"]
    assert len(service.store.members) == 1


def test_a_pointer_that_is_reused_after_destroy_is_another_communicator() -> None:
    service = _Service()
    arrived = service.feed(
        [Line(line=2), Line(line=5), Line(line=6)],
        [
            init(line=1, comm_id=1),
            init(line=3, kind=CommunicatorEventKind.DESTROY),
            init(line=4, comm_id=2),
        ],
    )
    assert service.names(arrived) == ["0x1", "0x2", "0x2"]
    assert [service.store.members[m].epoch for m in arrived.operations["member"].tolist()] == [0, 1, 1]
    assert arrived.operations["seq"].tolist() == [0, 0, 1]


def test_a_template_read_before_a_new_epoch_belongs_to_the_new_communicator_after_it() -> None:
    service = _Service()
    service.feed([Line(line=2)], [init(line=1, comm_id=1)])
    later = service.feed([Line(line=9)], [init(line=8, comm_id=2)])
    assert service.names(later) == ["0x2"]


def test_a_comm_id_that_one_rank_gets_twice_is_two_communicators() -> None:
    service = _Service()
    arrived = service.feed(
        [Line(line=3, communicator=0xA0), Line(line=4, communicator=0xB0)],
        [init(line=1, comm_id=7), init(line=2, comm_id=7, pointer=0xB0)],
    )
    assert service.names(arrived) == ["0x7", "0x7#2"]


def test_two_ranks_in_one_process_share_a_communicator() -> None:
    service = _Service()
    arrived = service.feed(
        [Line(line=3, communicator=0xA0), Line(line=4, communicator=0xB0)],
        [init(line=1, comm_id=7, rank=0), init(line=2, comm_id=7, pointer=0xB0, rank=1, cuda_device=1)],
    )
    assert service.names(arrived) == ["0x7", "0x7"]


def test_splits_without_comm_id_are_named_by_parent_count_and_colour() -> None:
    service = _Service()
    arrived = service.feed(
        [Line(line=4, communicator=0xB0), Line(line=5, communicator=0xC0)],
        [
            init(line=1, comm_id=0xFF, nranks=4),
            init(line=2, pointer=0xB0, parent=0xA0, color=-3),
            init(line=3, pointer=0xC0, parent=0xA0, color=1, split_count=9),
        ],
    )
    assert service.names(arrived) == ["0xff/1/-3", "0xff/9/1"]
    assert {c.identity for c in service.store.communicators[1:]} == {Identity.SPLIT}
    assert service.store.communicators[1].parent_comm_id == "0xff"


def test_a_communicator_that_no_init_line_named_is_inferred_and_keeps_its_size() -> None:
    service = _Service()
    arrived = service.feed([Line(line=1, nranks=8)])
    (communicator,) = service.store.communicators
    assert communicator.identity is Identity.INFERRED
    assert communicator.size == 8
    assert service.names(arrived)[0].startswith("~")


def test_collectives_are_counted_apart_from_sends_and_per_peer() -> None:
    service = _Service()
    arrived = service.feed(
        [
            Line(line=2),
            Line(line=3, op="Send", root=1),
            Line(line=4, op="Recv", root=1),
            Line(line=5, op="Send", root=1),
            Line(line=6, op="Send", root=0),
            Line(line=7),
        ],
        [init(line=1, comm_id=1)],
    )
    assert arrived.operations["seq"].tolist() == [0, 1, 2, 3, 4, 5]
    assert arrived.operations["coll_seq"].tolist() == [0, -1, -1, -1, -1, 1]
    assert arrived.operations["pair_seq"].tolist() == [-1, 0, 0, 1, 0, -1]


def test_counting_goes_on_over_batches() -> None:
    service = _Service()
    service.feed([Line(line=2), Line(line=3)], [init(line=1, comm_id=1)])
    later = service.feed([Line(line=4)])
    assert later.operations["coll_seq"].tolist() == [2]

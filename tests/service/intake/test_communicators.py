"""Communicators are told apart by what the log says of them, pointers being reused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from service.log_batches import Line, init, log_batch

from ncclscope_service.intake.communicators import NUMBERED_BY, Communicators, SequenceNumbers, split_hash
from ncclscope_service.intake.resolver import Arrived, BatchResolver, logged_operations
from ncclscope_service.store.records import Identity
from ncclscope_service.store.rows import OPERATION_TEMPLATE, empty_operations
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.records import CommunicatorEvent, CommunicatorEventKind
from ncclscope_wire.terms import NO_NUMBER, OPERATION_CODES


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


@pytest.mark.parametrize(
    ("parent", "count", "color", "expected"),
    [
        (0x8F2C4A1D0B7E6635, 1, 0, 0x7B54454AF60B12B4),
        (1, 7, 2**31 - 2, 0x605DA33C5DA0F47D),
        (2**64 - 1, 1000, 5, 0x85F93B24EDD5E88F),
    ],
)
def test_the_hash_of_a_split_is_what_nccl_computes(parent: int, count: int, color: int, expected: int) -> None:
    # Made by a C++ program around eatHash and digestHash of src/include/utils.h.
    assert split_hash(parent, count, color) == expected


_NAMES = ("AllReduce", "AlltoAll", "Send", "Recv")


def _drawn(amount: int) -> tuple[Columns, Columns]:
    random = np.random.default_rng(7)
    operations = empty_operations(amount)
    operations["member"] = random.integers(0, 5, amount)
    templates: Columns = np.zeros(amount, np.dtype([(name, OPERATION_TEMPLATE[name]) for name in NUMBERED_BY]))
    templates["op"] = np.array([OPERATION_CODES[name] for name in _NAMES], np.uint8)[random.integers(0, 4, amount)]
    templates["root"], templates["nranks"] = random.integers(0, 3, amount), 8
    templates["count"] = random.integers(0, 2, amount)
    return operations, templates


@pytest.mark.parametrize("portion", [1, 7, 500])
def test_operations_are_numbered_as_one_after_the_other(portion: int) -> None:
    operations, templates = _drawn(500)
    numbers = SequenceNumbers()
    for begin in range(0, len(operations), portion):
        part = operations[begin : begin + portion]
        numbers.give(part, templates[begin : begin + portion], int(operations["member"].max()) + 1)
    seen = Counter[tuple[object, ...]]()
    for row, of in zip(operations, templates, strict=True):
        member, op, root = int(row["member"]), int(of["op"]), int(of["root"])
        pairwise = op in (OPERATION_CODES["Send"], OPERATION_CODES["Recv"])
        launched = op == OPERATION_CODES["AllReduce"] and of["count"] > 0
        expected = {
            "seq": ("all", member),
            "coll_seq": None if pairwise else ("collective", member),
            "pair_seq": ("pair", member, op, root) if pairwise else None,
            "kind_seq": ("kind", member, op) if launched else None,
        }
        for name, key in expected.items():
            assert row[name] == (NO_NUMBER if key is None else seen[key]), name
            if key is not None:
                seen[key] += 1

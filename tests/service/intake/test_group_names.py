"""Names that PyTorch prints are tied to communicators by pointer, wherever the two lines stand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from service.log_batches import init, log_batch

from ncclscope_service.intake.stage import IntakeStage
from ncclscope_service.store.errors import InternalErrors
from ncclscope_service.store.tables import Store
from ncclscope_wire.facts import Fact, ProcessGroup, TorchCommunicator, TorchGroup
from ncclscope_wire.records import CommunicatorEvent, CommunicatorEventKind

_TENSOR, _DATA = "TENSOR_MODEL_PARALLEL_GROUP", "DATA_PARALLEL_GROUP"


class _Service:
    def __init__(self) -> None:
        self.store = Store()
        self.stage = IntakeStage(self.store, InternalErrors())

    def ingest(self, events: Sequence[CommunicatorEvent] = (), facts: Sequence[Fact] = (), *, file: str = "a") -> None:
        """The lines of a portion of a file."""
        batch = replace(log_batch([], events=events, host=file), facts=tuple(facts))
        self.stage.ingest_batch(batch, agent="a", session=file, job="j")

    def names(self) -> list[str | None]:
        self.stage.group_names.assign()
        return [each.name for each in self.store.communicators]


def _created(line: int, *, rank: int = 0, group: str | None = _TENSOR, global_rank: int | None = None) -> Fact:
    return TorchCommunicator(
        line=line, communicator=0xA0, rank=rank, group=group, group_id="2", global_rank=global_rank
    )


@pytest.mark.parametrize("line", [1, 9])
def test_a_name_is_that_of_the_communicator_with_its_pointer_before_or_behind_its_line(line: int) -> None:
    service = _Service()
    service.ingest([init(line=5, comm_id=1, rank=0)], [_created(line)])
    assert service.names() == [_TENSOR]


def test_a_name_waits_for_the_line_of_nccl() -> None:
    service = _Service()
    service.ingest(facts=[_created(1)])
    assert service.names() == []
    service.ingest([init(line=5, comm_id=1, rank=0)])
    assert service.names() == [_TENSOR]


def test_a_pointer_that_is_used_again_has_the_name_of_each_time() -> None:
    service = _Service()
    again = [init(line=3, kind=CommunicatorEventKind.DESTROY), init(line=4, comm_id=2, rank=0)]
    service.ingest([init(line=1, comm_id=1, rank=0), *again], [_created(2), _created(5, group=_DATA)])
    assert service.names() == [_TENSOR, _DATA]


def test_of_processes_that_share_a_file_and_a_pointer_rank_and_device_choose() -> None:
    service = _Service()
    one, other = init(line=1, comm_id=1, rank=0, pid=10), init(line=2, comm_id=2, rank=1, pid=11)
    service.ingest([one, other], [_created(3, rank=1)])
    assert service.names() == [None, _TENSOR]


def test_where_two_processes_fit_there_is_no_name() -> None:
    service = _Service()
    service.ingest([init(line=1, comm_id=1, rank=0, pid=10), init(line=2, comm_id=2, rank=0, pid=11)], [_created(3)])
    assert service.names() == [None, None]


def test_two_names_of_one_communicator_are_none() -> None:
    service = _Service()
    service.ingest([init(line=1, comm_id=1, rank=0)], [_created(2), _created(3, group=_DATA), _created(4)])
    assert service.names() == [None]


@pytest.mark.parametrize("group", [None, "undefined"])
def test_a_group_without_a_name_names_nothing(group: str | None) -> None:
    service = _Service()
    service.ingest([init(line=1, comm_id=1, rank=0)], [_created(2, group=group)])
    assert service.names() == [None]


def test_in_another_file_the_global_rank_names_the_process() -> None:
    service = _Service()
    service.ingest([init(line=1, comm_id=1, rank=0, pid=10), init(line=2, comm_id=2, rank=0, pid=11)])
    for member, rank in zip(service.store.members, (0, 4), strict=True):
        member.global_rank = rank
    service.ingest(facts=[_created(1, global_rank=4)], file="b")
    assert service.names() == [None, _TENSOR]


def test_the_set_up_line_of_a_group_says_the_global_rank_of_its_ranks() -> None:
    service = _Service()
    service.ingest([init(line=1, comm_id=1, rank=0, pid=10), init(line=2, comm_id=2, rank=0, pid=11)])
    for member, rank in zip(service.store.members, (0, 4), strict=True):
        member.global_rank = rank
    set_up = TorchGroup(line=1, rank=0, global_rank=0, group_id="2")
    service.ingest(facts=[set_up, _created(2)], file="b")
    assert service.names() == [_TENSOR, None]
    assert not service.stage.group_names.assign(), "what is known does not change"


def test_an_inferred_global_rank_names_nothing() -> None:
    service = _Service()
    service.ingest([init(line=1, comm_id=1, rank=0)])
    service.store.members[0].global_rank, service.store.members[0].global_rank_is_inferred = 0, True
    service.ingest(facts=[_created(1, global_rank=0)], file="b")
    assert service.names() == [None]


def _of_ranks(description: str, *ranks: int) -> Fact:
    return ProcessGroup(line=0, description=description, group_ranks=ranks)


def _pair(service: _Service, comm_id: int, pids: Sequence[int], line: int = 1) -> None:
    """A communicator of two processes whose global ranks are their pids less ten."""
    service.ingest([init(line=line + rank, comm_id=comm_id, rank=rank, pid=pid) for rank, pid in enumerate(pids)])
    for member in service.store.members:
        member.global_rank = service.store.processes[member.process].pid - 10


def test_a_group_of_which_only_the_ranks_are_known_is_the_communicator_of_these() -> None:
    service = _Service()
    service.ingest(facts=[_of_ranks(_TENSOR, 0, 1), _of_ranks(_DATA, 0, 2)], file="trace")
    _pair(service, 1, (10, 11))
    _pair(service, 2, (10, 12), line=5)
    assert service.names() == [_TENSOR, _DATA]


def test_a_second_group_or_communicator_of_the_same_ranks_takes_the_name_back() -> None:
    service = _Service()
    _pair(service, 1, (10, 11))
    service.ingest(facts=[_of_ranks(_TENSOR, 1, 0)], file="trace")
    assert service.names() == [_TENSOR]
    service.ingest(facts=[_of_ranks(_DATA, 0, 1)], file="trace")
    assert service.names() == [None]
    other = _Service()
    other.ingest(facts=[_of_ranks(_TENSOR, 0, 1)], file="trace")
    _pair(other, 1, (10, 11))
    assert other.names() == [_TENSOR]
    _pair(other, 2, (10, 11), line=5)
    assert other.names() == [None, None]


def test_what_pytorch_prints_comes_before_ranks() -> None:
    service = _Service()
    _pair(service, 1, (10, 11))
    service.ingest(facts=[_of_ranks(_DATA, 0, 1)], file="trace")
    assert service.names() == [_DATA]
    service.ingest(facts=[_created(9, global_rank=0)])
    assert service.names() == [_TENSOR]


def test_where_several_groups_have_the_same_ranks_their_communicators_have_one_of_the_names() -> None:
    service = _Service()
    _pair(service, 1, (10, 11))
    service.ingest(facts=[_of_ranks(_TENSOR, 0, 1), _of_ranks(_DATA, 0, 1)], file="trace")
    assert service.names() == [None]
    (communicator,) = service.store.communicators
    assert communicator.name is None
    assert communicator.possible_names == tuple(sorted((_TENSOR, _DATA)))


def test_names_of_a_job_are_those_of_all_groups_and_say_whether_some_have_none() -> None:
    service = _Service()
    service.ingest(facts=[_of_ranks(_TENSOR, 0, 1), _of_ranks(_DATA, 0, 2)], file="trace")
    (names,) = service.store.group_names.values()
    assert names == {_TENSOR, _DATA}
    service.ingest(facts=[_of_ranks("undefined", 0, 3)], file="trace")
    assert names == {_TENSOR, _DATA, ""}

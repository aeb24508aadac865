"""What a communicator is for is told from the sizes that a user gives, and from what it carries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from ncclscope_service import rows
from ncclscope_service.parallelism import Sizes, assign_parallelism
from ncclscope_service.rows import Communicator, Identity, Member, Process
from ncclscope_service.store import Store
from ncclscope_wire.terms import OPERATION_CODES


@dataclass
class _Job:
    """Communicators of a job whose ranks sit `per_node` to a node."""

    world: int
    per_node: int = 8
    name: str = "j"
    store: Store = field(default_factory=Store)
    peers: dict[int, int] = field(default_factory=dict[int, int])

    def __post_init__(self) -> None:
        self.first = len(self.store.processes)
        for rank in range(self.world):
            self.store.processes.append(Process(host=f"node{rank // self.per_node}", pid=rank))
            self.store.process_job.append(self.name)

    def add(self, ranks: Sequence[int], traffic: Mapping[str, int], *, seen: int | None = None, peers: int = 0) -> int:
        """A communicator of these global ranks; `traffic`: operations by name, of each rank."""
        store, index = self.store, len(self.store.communicators)
        members: dict[int, int] = {}
        for place, rank in enumerate(ranks[:seen]):
            members[place] = len(store.members)
            store.members.append(
                Member(
                    index=len(store.members),
                    communicator=index,
                    process=self.first + rank,
                    pointer=0,
                    epoch=0,
                    rank=place,
                    cuda_device=0,
                    bus_id=None,
                    global_rank=rank,
                )
            )
        store.communicators.append(
            Communicator(
                index=index,
                job=self.name,
                comm_id=f"0x{index:x}",
                size=len(ranks),
                identity=Identity.COMM_ID,
                members=members,
            )
        )
        for op, amount in traffic.items():
            series = np.zeros(1, rows.SERIES)
            series["communicator"], series["op"] = index, OPERATION_CODES[op]
            series["operations"] = amount * len(ranks)
            store.series.append(series)
        self.peers[index] = peers
        return index

    def kinds(self, sizes: Sizes | None = None) -> list[str | None]:
        assign_parallelism(self.store, self.peers, sizes)
        return [communicator.parallelism for communicator in self.store.communicators]


def test_all_ranks_of_the_job_are_the_world() -> None:
    job = _Job(8)
    job.add(range(8), {"AllReduce": 3})
    job.add(range(4), {"AllReduce": 100})
    assert job.kinds()[0] == "WORLD"


def test_a_job_with_one_dimension_has_no_world_beside_it() -> None:
    job = _Job(8)
    job.add(range(8), {"AllReduce": 30})
    assert job.kinds(Sizes(dp=8)) == ["DP"]
    assert job.kinds(Sizes(tp=8)) == ["TP"]


def test_only_sends_and_receives_are_a_pipeline() -> None:
    job = _Job(8)
    job.add(range(8), {"AllReduce": 1})
    job.add((0, 4), {"Send": 50, "Recv": 50}, peers=1)
    job.add((1, 3, 5, 7), {"Send": 50, "Recv": 50, "AllReduce": 1}, peers=2)
    assert job.kinds()[1:] == ["PP", "PP"]


def test_sends_to_everybody_and_all_to_alls_are_expert_parallelism() -> None:
    job = _Job(8)
    job.add(range(8), {"AllReduce": 1})
    job.add(range(4), {"Send": 50, "Recv": 50}, peers=3)
    job.add(range(4, 8), {"AlltoAll": 50, "AllReduce": 2})
    assert job.kinds()[1:] == ["EP", "EP"]


def test_given_sizes_decide_by_size_and_stride() -> None:
    job = _Job(16)
    job.add(range(16), {"AllReduce": 1})
    job.add((2, 3), {"AllReduce": 1})  # TP: next to each other
    job.add((0, 2), {"AllGather": 1})  # CP: then
    job.add((0, 4), {"AllReduce": 1})  # DP: then
    job.add((0, 8), {"AllReduce": 1, "Send": 1, "Recv": 1})  # PP: outermost
    assert job.kinds(Sizes(tp=2, cp=2, dp=2, pp=2)) == ["WORLD", "TP", "CP", "DP", "PP"]
    assert [of.parallelism_confidence for of in job.store.communicators[1:]] == [0.95] * 4


def test_given_sizes_decide_nothing_where_not_all_ranks_were_seen() -> None:
    job = _Job(16)
    job.add(range(16), {"AllReduce": 1})
    job.add((0, 4, 8, 12), {"AllReduce": 1}, seen=2)
    assign_parallelism(job.store, job.peers, Sizes(tp=4, dp=4))
    assert job.store.communicators[1].parallelism_confidence < 0.95


def test_two_stages_that_only_reduce_are_no_pipeline_but_its_embedding() -> None:
    job = _Job(8)
    job.add(range(8), {"AllReduce": 1})
    job.add((0, 4), {"AllReduce": 1})
    assert job.kinds(Sizes(tp=4, pp=2)) == ["WORLD", "EMBEDDING"]


def test_a_group_is_not_the_world_because_nothing_larger_was_logged() -> None:
    job = _Job(8, per_node=4)
    job.add((0, 1, 2, 3), {"AllReduce": 100})
    job.add((4, 5, 6, 7), {"AllReduce": 100})
    for rank in range(4):
        job.add((rank, rank + 4), {"AllReduce": 4})
    assert job.kinds() == ["TP", "TP", "DP", "DP", "DP", "DP"]


def test_ranks_without_a_common_stride_fit_no_size() -> None:
    job = _Job(16)
    job.add(range(16), {"AllReduce": 1})
    job.add((0, 1, 2, 4), {})
    assert job.kinds(Sizes(tp=4)) == ["WORLD", None]


def test_the_ends_of_a_pipeline_that_only_reduce_share_embeddings() -> None:
    by_sizes = _Job(8)
    by_sizes.add(range(8), {"AllReduce": 1})
    by_sizes.add((0, 6), {"AllReduce": 1})
    assert by_sizes.kinds(Sizes(tp=2, pp=4)) == ["WORLD", "EMBEDDING"]
    by_traffic = _Job(8, per_node=2)
    by_traffic.add(range(8), {"AllReduce": 1})
    by_traffic.add((0, 2, 4, 6), {"Send": 90, "Recv": 90})
    by_traffic.add((0, 6), {"AllReduce": 1})
    by_traffic.add((0, 1), {"AllReduce": 200})
    by_traffic.add((6, 7), {"AllReduce": 200})
    assert by_traffic.kinds() == ["WORLD", "PP", "EMBEDDING", "TP", "TP"]


def test_the_busiest_communicator_within_a_node_is_tensor_parallel_and_the_other_data_parallel() -> None:
    job = _Job(16)
    job.add(range(16), {"AllReduce": 1})
    for node in (0, 8):
        job.add(range(node, node + 8), {"AllReduce": 400})
    for rank in range(8):
        job.add((rank, rank + 8), {"AllReduce": 40})
    assert job.kinds() == ["WORLD", "TP", "TP", *["DP"] * 8]


def test_what_is_not_much_busier_than_the_rest_is_not_called_tensor_parallel() -> None:
    job = _Job(16)
    job.add(range(16), {"AllReduce": 1})
    job.add(range(8), {"AllReduce": 50})
    job.add((0, 8), {"AllReduce": 40})
    assert job.kinds()[1:] == ["DP", "DP"]


@pytest.mark.parametrize("traffic", [{}, {"AllReduce": 9}])
def test_one_rank_is_no_parallelism(traffic: Mapping[str, int]) -> None:
    job = _Job(8)
    job.add(range(8), {"AllReduce": 1})
    job.add((3,), traffic)
    assert job.kinds() == ["WORLD", None]
    assert job.store.communicators[1].parallelism_confidence == 0.0


def test_a_communicator_that_has_carried_nothing_is_not_told() -> None:
    job = _Job(8)
    job.add(range(8), {"AllReduce": 1})
    job.add((0, 1), {})
    assert job.kinds() == ["WORLD", None]


def test_the_answer_follows_the_traffic() -> None:
    job = _Job(16)
    job.add(range(16), {"AllReduce": 1})
    job.add((0, 8), {"AllReduce": 3})
    assert job.kinds()[1] == "DP"
    sends = np.zeros(1, rows.SERIES)
    sends["communicator"], sends["op"], sends["operations"] = 1, OPERATION_CODES["Send"], 1000
    job.store.series.append(sends)
    assert job.kinds()[1] == "PP"


def test_jobs_are_judged_each_by_itself() -> None:
    small = _Job(2)
    small.add((0, 1), {"AllReduce": 1})
    large = _Job(4, name="other", store=small.store, peers=small.peers)
    large.add(range(4), {"AllReduce": 1})
    assert large.kinds() == ["WORLD", "WORLD"]

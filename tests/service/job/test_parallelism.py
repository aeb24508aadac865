"""What a communicator is for is told from the sizes that a user gives, and from what it carries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from ncclscope_service.job.parallelism import assign_parallelism
from ncclscope_service.rollup.usage import USAGE, Pattern
from ncclscope_service.store.records import Communicator, Identity, Member, Process
from ncclscope_service.store.settings import Sizes
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import DATA_TYPES, OPERATION_CODES, REDUCTIONS

_TENSOR = 4 << 20
_SCALAR = 4
_PATTERNS = {
    "ends": Pattern(paired=0.5),
    "ring": Pattern(is_ring=True, paired=1.0),
    "pairs": Pattern(paired=1.0),
    "everybody": Pattern(sends_to_everybody=True, paired=1.0),
    "turns": Pattern(run=1.0),
    "runs": Pattern(run=4.0),
}


@dataclass(frozen=True)
class _Calls:
    """Operations of one kind, by each rank."""

    amount: int
    size: int = _TENSOR
    dtype: str = "bfloat16"
    red: str = "sum"
    buffers: int | None = None
    """Distinct ones; None: every call has its own."""


def _gradients(amount: int, buffers: int = 10) -> _Calls:
    return _Calls(amount, dtype="float32", buffers=buffers)


_NORM = {"AllReduce": _Calls(1, size=_SCALAR, dtype="float32")}
_GREETED = _NORM | {"Broadcast": _Calls(4, size=_SCALAR, dtype="int64")}


@dataclass
class _Job:
    """Communicators of a job whose ranks sit `per_node` to a node."""

    world: int
    per_node: int = 8
    name: str = "j"
    store: Store = field(default_factory=Store)
    contents: list[Columns] = field(default_factory=list[Columns])
    patterns: dict[int, Pattern] = field(default_factory=dict[int, Pattern])

    def __post_init__(self) -> None:
        self.first = len(self.store.processes)
        for rank in range(self.world):
            self.store.processes.append(Process(host=f"node{rank // self.per_node}", pid=rank))
            self.store.process_job.append(self.name)

    def add(
        self, ranks: Sequence[int], traffic: Mapping[str, int | _Calls], *, seen: int | None = None, goes: str = "turns"
    ) -> int:
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
        for op, given in traffic.items():
            self.carry(index, op, given if isinstance(given, _Calls) else _Calls(given), len(members))
        self.patterns[index] = _PATTERNS[goes]
        return index

    def carry(self, index: int, op: str, calls: _Calls, ranks: int) -> None:
        row = np.zeros(1, USAGE)
        row["communicator"], row["op"], row["message_bytes"] = index, OPERATION_CODES[op], calls.size
        row["data_type"] = [each.name for each in DATA_TYPES].index(calls.dtype)
        row["reduction"] = REDUCTIONS.index(calls.red)
        row["operations"] = calls.amount * ranks
        row["templates"] = (calls.amount if calls.buffers is None else calls.buffers) * ranks
        self.contents.append(row)

    def kinds(self, sizes: Sizes | None = None, iterations: int | None = None) -> list[str | None]:
        contents = np.concatenate(self.contents) if self.contents else np.zeros(0, USAGE)
        assign_parallelism(
            self.store, contents, self.patterns, sizes, None if iterations is None else {self.name: iterations}
        )
        return [communicator.parallelism for communicator in self.store.communicators]

    def confidences(self) -> list[float]:
        return [communicator.parallelism_confidence for communicator in self.store.communicators]


def test_of_two_communicators_that_span_the_job_the_one_that_moves_next_to_nothing_is_the_world() -> None:
    job = _Job(8)
    job.add(range(8), _NORM)
    job.add(range(8), {"AllReduce": _gradients(30)})
    assert job.kinds() == ["WORLD", "DP"]


def test_a_dimension_that_spans_the_job_may_have_the_only_communicator() -> None:
    data = _Job(8)
    data.add(range(8), _NORM | {"AllGather": _Calls(20), "ReduceScatter": _gradients(10)})
    assert data.kinds() == ["OPTIMIZER"]
    tensor = _Job(8)
    tensor.add(range(8), {"AllReduce": _Calls(900), "Broadcast": _Calls(30, dtype="int64")})
    assert tensor.kinds() == ["TP"]


def test_all_ranks_are_the_world_where_smaller_groups_carry_more() -> None:
    job = _Job(8)
    job.add(range(8), {"Broadcast": _Calls(9)})
    job.add(range(4), {"AllReduce": 100})
    job.add((0, 4), {"AllReduce": _gradients(10)})
    assert job.kinds() == ["WORLD", "TP", "DP"]


def test_a_job_that_has_moved_scalars_only_is_not_judged_further() -> None:
    job = _Job(8)
    job.add(range(8), _GREETED)
    assert job.kinds() == ["WORLD"]
    assert job.confidences() == [0.6]


@pytest.mark.parametrize(
    ("traffic", "iterations"),
    [
        ({"AllReduce": _Calls(1, size=_SCALAR)}, None),
        ({"AllReduce": _gradients(1000)}, None),
        ({"AllReduce": _gradients(1000)}, 1000),
        ({"Send": 300, "Recv": 300}, None),
        ({"AlltoAll": 300}, None),
    ],
)
def test_what_only_one_group_does_over_and_over_may_be_a_benchmark(
    traffic: Mapping[str, int | _Calls], iterations: int | None
) -> None:
    job = _Job(8)
    job.add(range(8), traffic, goes="everybody")
    assert job.kinds(iterations=iterations) == [None]
    assert job.confidences() == [0.0]


def test_iterations_of_several_calls_are_training_and_those_of_one_call_are_not() -> None:
    job = _Job(8)
    job.add(range(8), {"AllReduce": _gradients(10)})
    assert job.kinds(iterations=10) == [None]
    job.carry(0, "AllReduce", _Calls(10, size=_SCALAR, dtype="float32"), 8)
    assert job.kinds(iterations=2) == [None]
    assert job.kinds(iterations=10) == ["DP"]


def test_given_sizes_name_the_only_communicator() -> None:
    job = _Job(8)
    job.add(range(8), _NORM)
    assert job.kinds(Sizes(dp=8)) == ["DP"]
    assert job.kinds(Sizes(tp=8)) == ["TP"]


def test_sends_and_receives_are_a_pipeline() -> None:
    job = _Job(8)
    job.add(range(8), _NORM)
    job.add((0, 4), {"Send": 50, "Recv": 50}, goes="ends")
    job.add((1, 3, 5, 7), {"Send": 50, "Recv": 50, "AllReduce": _Calls(1, size=4)}, goes="ends")
    assert job.kinds()[1:] == ["PP", "PP"]


def test_sends_one_way_around_a_ring_are_context_parallelism() -> None:
    job = _Job(8)
    job.add(range(8), _NORM)
    job.add(range(4), {"Send": 50, "Recv": 50}, goes="ring")
    assert job.kinds() == ["WORLD", "CP"]


def test_two_ranks_that_exchange_and_reduce_gradients_together_share_a_sequence() -> None:
    nested = _Job(4)
    nested.add(range(4), {"AllReduce": _gradients(10)})
    nested.add((0, 1), {"Send": 50, "Recv": 50}, goes="pairs")
    assert nested.kinds() == ["DP", "CP"]
    equal = _Job(2)
    equal.add(range(2), {"AllReduce": _gradients(10)})
    equal.add(range(2), {"Send": 50, "Recv": 50}, goes="pairs")
    assert equal.kinds() == ["DP", "CP"]


def test_two_stages_of_a_pipeline_share_an_embedding_and_no_more() -> None:
    job = _Job(2)
    job.add(range(2), {"AllReduce": _gradients(3, buffers=1)})
    job.add(range(2), {"Send": 50, "Recv": 50}, goes="pairs")
    assert job.kinds() == ["EMBEDDING", "PP"]


def test_sends_to_everybody_and_all_to_alls_are_expert_parallelism() -> None:
    job = _Job(8)
    job.add(range(8), _NORM)
    job.add(range(4), {"Send": 50, "Recv": 50}, goes="everybody")
    job.add(range(4, 8), {"AlltoAll": 50, "AllReduce": _Calls(2, size=4)}, goes="everybody")
    assert job.kinds()[1:] == ["EP", "EP"]


@pytest.mark.parametrize(("goes", "kind"), [("turns", "EP"), ("runs", "CP")])
def test_activations_among_ranks_of_different_data_are_of_experts_or_of_attention(goes: str, kind: str) -> None:
    job = _Job(8)
    job.add(range(8), {"AllReduce": _gradients(10)})
    job.add(range(4), {"AllGather": 300, "ReduceScatter": 200}, goes=goes)
    job.add(range(4, 8), {"AllGather": 300, "ReduceScatter": 200}, goes=goes)
    assert job.kinds() == ["DP", kind, kind]


def test_parameters_gathered_both_ways_are_sharded_and_once_per_step_are_not() -> None:
    def kind(gathered: int, scattered: int) -> str | None:
        job = _Job(8)
        job.add(range(8), _NORM)
        job.add(range(8), {"AllGather": _Calls(gathered), "ReduceScatter": _gradients(scattered)})
        return job.kinds()[1]

    assert kind(gathered=20, scattered=10) == "OPTIMIZER"  # FSDP, ZeRO-3
    assert kind(gathered=10, scattered=10) == "DP"  # ZeRO-1
    assert kind(gathered=10, scattered=40) == "DP"  # ZeRO-2, four microbatches


def test_persistent_buffers_make_gradients_of_what_could_be_activations() -> None:
    job = _Job(8)
    job.add(range(8), _NORM)
    job.add(range(8), {"AllReduce": _Calls(100, buffers=10)})
    assert job.kinds(iterations=10) == ["WORLD", "DP"]
    assert job.kinds(iterations=2) == ["WORLD", "TP"]
    assert max(job.confidences()[1:]) < 0.9


def test_ranks_that_reduce_their_gradients_alone_do_not_do_so_together() -> None:
    job = _Job(4)
    job.add(range(4), _NORM)
    job.add(range(4), {"AllReduce": _Calls(40, dtype="float32")})
    assert job.kinds() == ["WORLD", "DP"]
    for rank in range(4):
        job.add((rank,), {"AllReduce": _gradients(10)})
    assert job.kinds() == ["WORLD", "TP", None, None, None, None]


def test_given_sizes_decide_by_size_and_stride() -> None:
    job = _Job(16)
    job.add(range(16), _NORM)
    job.add((2, 3), {"AllReduce": 9})  # TP: next to each other
    job.add((0, 2), {"AllGather": 9})  # CP: then
    job.add((0, 4), {"AllReduce": 9})  # DP: then
    job.add((0, 8), {"Send": 9, "Recv": 9}, goes="ends")  # PP: outermost
    assert job.kinds(Sizes(tp=2, cp=2, dp=2, pp=2)) == ["WORLD", "TP", "CP", "DP", "PP"]
    assert min(of.parallelism_confidence for of in job.store.communicators[1:]) >= 0.8


def test_given_sizes_decide_nothing_where_not_all_ranks_were_seen() -> None:
    job = _Job(16)
    job.add(range(16), _NORM)
    job.add((0, 4, 8, 12), {"AllReduce": 9}, seen=2)
    job.kinds(Sizes(tp=4, dp=4))
    assert job.store.communicators[1].parallelism_confidence < 0.95


def test_two_stages_that_only_reduce_are_no_pipeline_but_its_embedding() -> None:
    job = _Job(8)
    job.add(range(8), _NORM)
    job.add((0, 4), {"AllReduce": 9})
    assert job.kinds(Sizes(tp=4, pp=2)) == ["WORLD", "EMBEDDING"]


def test_a_group_is_not_the_world_because_nothing_larger_was_logged() -> None:
    job = _Job(8, per_node=4)
    job.add((0, 1, 2, 3), {"AllReduce": 100})
    job.add((4, 5, 6, 7), {"AllReduce": 100})
    for rank in range(4):
        job.add((rank, rank + 4), {"AllReduce": _gradients(4)})
    assert job.kinds() == ["TP", "TP", "DP", "DP", "DP", "DP"]


def test_communicators_of_one_layout_are_judged_together() -> None:
    job = _Job(8, per_node=4)
    job.add((0, 1, 2, 3), {"AllReduce": 100, "Broadcast": _Calls(20, dtype="int64")})  # the first stage reads the batch
    job.add((4, 5, 6, 7), {"AllReduce": 100})
    for rank in range(4):
        job.add((rank, rank + 4), {"AllReduce": _Calls(90, dtype="float32")})
    assert job.kinds() == ["TP", "TP", "DP", "DP", "DP", "DP"]
    assert len(set(job.confidences()[:2])) == 1


def test_the_ends_of_a_pipeline_that_only_reduce_share_embeddings() -> None:
    by_sizes = _Job(8)
    by_sizes.add(range(8), _NORM)
    by_sizes.add((0, 6), {"AllReduce": 9})
    assert by_sizes.kinds(Sizes(tp=2, pp=4)) == ["WORLD", "EMBEDDING"]
    by_traffic = _Job(8, per_node=2)
    by_traffic.add(range(8), _NORM)
    by_traffic.add((0, 2, 4, 6), {"Send": 90, "Recv": 90}, goes="ends")
    by_traffic.add((0, 6), {"AllReduce": _gradients(1)})
    by_traffic.add((0, 1), {"AllReduce": 200})
    by_traffic.add((6, 7), {"AllReduce": 200})
    assert by_traffic.kinds() == ["WORLD", "PP", "EMBEDDING", "TP", "TP"]


def test_a_pipeline_of_pairs_is_one_pipeline() -> None:
    job = _Job(4)
    for first in range(3):
        job.add((first, first + 1), {"Send": 90, "Recv": 90}, goes="ends")
    job.add((0, 3), {"AllReduce": _gradients(1)})
    assert job.kinds() == ["PP", "PP", "PP", "EMBEDDING"]


@pytest.mark.parametrize("traffic", [{}, {"AllReduce": 9}])
def test_one_rank_is_no_parallelism(traffic: Mapping[str, int]) -> None:
    job = _Job(8)
    job.add(range(8), _GREETED)
    job.add((3,), traffic)
    assert job.kinds() == ["WORLD", None]
    assert job.store.communicators[1].parallelism_confidence == 0.0


def test_a_communicator_that_has_carried_nothing_is_not_told() -> None:
    job = _Job(8)
    job.add(range(8), _GREETED)
    job.add((0, 1), {})
    assert job.kinds() == ["WORLD", None]


def test_the_answer_follows_the_traffic() -> None:
    job = _Job(16)
    job.add(range(16), _NORM)
    job.add((0, 8), {"AllReduce": _gradients(3)})
    assert job.kinds()[1] == "DP"
    job.carry(1, "Send", _Calls(1000), 2)
    assert job.kinds()[1] == "PP"


def test_jobs_are_judged_each_by_itself() -> None:
    small = _Job(2)
    small.add((0, 1), _GREETED)
    large = _Job(4, name="other", store=small.store, contents=small.contents, patterns=small.patterns)
    large.add(range(4), _GREETED)
    assert large.kinds() == ["WORLD", "WORLD"]


def _named(job: _Job, names: Mapping[int, str]) -> _Job:
    for index, name in names.items():
        job.store.communicators[index].name = name
    return job


def test_a_name_says_the_kind_whatever_is_carried() -> None:
    job = _Job(8)
    job.add(range(4), {"AllReduce": _gradients(30)})
    job.add((0, 4), {"AllReduce": 300})
    job.add((1, 5), {})
    _named(job, {0: "TENSOR_MODEL_PARALLEL_GROUP", 1: "DATA_PARALLEL_GROUP_WITH_CP", 2: "mesh_pp"})
    assert job.kinds() == ["TP", "DP", "PP"]
    assert job.confidences() == [1.0, 1.0, 1.0]


def test_a_name_needs_no_ground_and_an_unknown_one_changes_nothing() -> None:
    job = _Job(8)
    job.add(range(4), {"AllReduce": _gradients(1000)})
    assert _named(job, {0: "MODEL_PARALLEL_GROUP"}).kinds() == [None]
    assert _named(job, {0: "EXPERT_MODEL_PARALLEL_GROUP"}).kinds() == ["EP"]


def test_groups_of_one_layout_and_two_names_serve_two_purposes() -> None:
    job = _Job(4)
    for ranks in ((0, 1), (2, 3)):
        job.add(ranks, {"AllReduce": 100})
        job.add(ranks, {"AllReduce": 90})
    names = ("CONTEXT_PARALLEL_GROUP", "TENSOR_MODEL_PARALLEL_GROUP")
    assert _named(job, dict(enumerate(names * 2))).kinds() == ["CP", "TP", "CP", "TP"]


def test_sharded_parameters_are_the_optimizers_in_a_group_of_data_parallelism() -> None:
    job = _Job(8)
    job.add(range(4), _NORM | {"AllGather": _Calls(20), "ReduceScatter": _gradients(10)})
    assert _named(job, {0: "mesh_dp_shard"}).kinds() == ["OPTIMIZER"]


def test_the_default_group_is_the_world_unless_a_dimension_uses_it() -> None:
    data = _Job(8)
    data.add(range(8), _NORM | {"AllGather": _Calls(20), "ReduceScatter": _gradients(10)})
    assert _named(data, {0: "default_pg"}).kinds() == ["OPTIMIZER"]
    idle = _Job(8)
    idle.add(range(8), {"Broadcast": 1})
    idle.add((0, 4), {"Send": 1, "Recv": 1})
    assert _named(idle, {0: "default_pg"}).kinds() == ["WORLD", None]
    assert idle.confidences() == [1.0, 0.0]


def test_two_ranks_that_exchange_in_the_default_group_are_not_the_world() -> None:
    job = _Job(8)
    job.add(range(8), {"Broadcast": 1})
    job.add((0, 4), {"Send": 1, "Recv": 1})
    assert _named(job, {1: "default_pg"}).kinds()[1] is None


def test_sizes_that_are_given_win_over_names() -> None:
    job = _Job(8)
    for first in (0, 4):
        job.add(range(first, first + 4), {"AllReduce": 300})
    _named(job, {0: "CONTEXT_PARALLEL_GROUP", 1: "CONTEXT_PARALLEL_GROUP"})
    assert job.kinds(Sizes(tp=4)) == ["TP", "TP"]
    assert job.kinds(Sizes(cp=4)) == ["CP", "CP"]
    assert job.confidences() == [1.0, 1.0]


def test_several_names_of_one_kind_say_it() -> None:
    job = _Job(8)
    for first in (0, 1):
        job.add((first, first + 2), {"AllReduce": _gradients(2)})
        job.add((first, first + 4), {"Send": 20, "Recv": 20})
    of_data = ("DATA_PARALLEL_GROUP", "DATA_PARALLEL_GROUP_WITH_CP")
    for communicator in job.store.communicators[::2]:
        communicator.possible_names = of_data
    assert job.kinds() == ["DP", "PP", "DP", "PP"]
    job.store.communicators[0].possible_names = (*of_data, "CONTEXT_PARALLEL_GROUP")
    assert job.confidences()[2] == 1.0


def test_there_are_no_kinds_but_those_of_named_groups_where_all_are_named() -> None:
    job = _Job(8)
    for first in range(4):
        job.add((first, first + 4), {"Send": 20, "Recv": 20})
    job.add((0, 4), {"AllReduce": _gradients(2)})
    before = job.kinds()
    assert before == ["PP", "PP", "PP", "PP", "EMBEDDING"]
    job.store.group_names["j"] = {"default_pg", "PIPELINE_MODEL_PARALLEL_GROUP", "DATA_PARALLEL_GROUP", ""}
    assert job.kinds() == before, "a group without a name may be anything"
    job.store.group_names["j"].remove("")
    assert job.kinds() == ["PP", "PP", "PP", "PP", None]
    job.store.group_names["j"] = {"default_pg", "my_group"}
    assert job.kinds() == before, "names that say no kind"

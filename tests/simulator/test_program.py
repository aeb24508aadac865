"""What operations a step has, what moves opCount, and that nothing ends before all have started."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

import pytest
from simulator.jobs import Row, Simulate, log_lines, truth


def _by(rows: list[Row], *names: str) -> dict[tuple[object, ...], list[Row]]:
    groups: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[name] for name in names)].append(row)
    return groups


def _launched(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["launch_id"] is not None]


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"ep": 2, "nccl": "2.21"},
        {"ep": 2, "ep_dispatch": "allgather"},
        {"cp": 2, "dp": 1, "order": "tp-pp-dp"},
        {"cp": 2, "dp": 1, "cp_exchange": "allgather"},
        {"zero1": True, "order": "tp-pp-dp"},
        {"fsdp": True, "tp": 1, "pp": 1, "dp": 8, "shared_world": True},
        {"fsdp": True, "tp": 1, "pp": 1, "dp": 8, "replicate": 4},
        {"deepspeed": 3, "tp": 1, "pp": 1, "dp": 8},
    ],
)
def test_no_collective_ends_before_every_rank_has_started(shape: dict[str, object], simulate: Simulate) -> None:
    rows = [row for row in _launched(truth(simulate(**shape))) if row["op"] not in {"Send", "Recv", "Broadcast"}]
    collectives = _by(rows, "comm_id", "coll_seq")
    assert collectives
    for members in collectives.values():
        assert len(members) == members[0]["comm_size"]
        assert len({(row["op"], row["message_bytes"]) for row in members}) == 1
        assert min(row["end_true_ns"] for row in members) > max(row["start_true_ns"] for row in members)
        assert min(row["duration_ns"] for row in members) == members[0]["transfer_ns"]
        assert min(row["wait_ns"] for row in members) == 0


def test_a_receive_never_ends_before_its_send_has_started(simulate: Simulate) -> None:
    rows = [row for row in truth(simulate()) if row["op"] in {"Send", "Recv"}]
    sends = _by([row for row in rows if row["op"] == "Send"], "comm_id", "comm_rank", "peer")
    receives = _by([row for row in rows if row["op"] == "Recv"], "comm_id", "peer", "comm_rank")
    assert sends.keys() == receives.keys()
    for key, own in sends.items():
        for send, receive in zip(own, receives[key], strict=True):
            assert send["message_bytes"] == receive["message_bytes"]
            assert min(send["end_true_ns"], receive["end_true_ns"]) > max(
                send["start_true_ns"], receive["start_true_ns"]
            )


def test_kernels_of_one_stream_run_one_after_the_other(simulate: Simulate) -> None:
    for kernels in _by(_launched(truth(simulate())), "rank", "stream_id").values():
        launches = {row["launch_id"]: row for row in kernels}
        ordered = list(launches.values())
        assert ordered == sorted(ordered, key=lambda row: row["start_true_ns"])
        for before, after in pairwise(ordered):
            assert before["end_true_ns"] <= after["start_true_ns"]


def test_one_rank_communicators_log_and_launch_nothing(simulate: Simulate) -> None:
    rows = truth(simulate(dp=1, tp=4, zero1=True))
    alone = [row for row in rows if row["comm_size"] == 1]
    assert {row["parallelism"] for row in alone} == {"DP"}
    assert all(
        row["launch_id"] is None and row["kernel_correlation_id"] is None and row["op_count"] == 0 for row in alone
    )


def test_a_pipeline_pairs_send_and_recv_in_the_steady_state_only(simulate: Simulate) -> None:
    rows = [row for row in truth(simulate(microbatches=4)) if row["parallelism"] == "PP"]
    sizes: dict[int, set[tuple[str, ...]]] = defaultdict(set)
    for launch in _by(rows, "launch_id").values():
        sizes[len(launch)].add(tuple(sorted(row["op"] for row in launch)))
    assert sizes == {1: {("Send",), ("Recv",)}, 2: {("Recv", "Send")}}


def test_experts_exchange_by_sends_before_2_28_and_by_alltoall_since(simulate: Simulate) -> None:
    older = [row for row in truth(simulate(ep=2, nccl="2.27")) if row["parallelism"] == "EP"]
    newer = [row for row in truth(simulate(ep=2, nccl="2.28")) if row["parallelism"] == "EP"]
    assert {row["op"] for row in older} == {"Send", "Recv"}
    assert {len(launch) for launch in _by(older, "launch_id").values()} == {4}
    assert {row["op"] for row in newer} == {"AlltoAll"}
    assert {row["kernel"] for row in older + newer} == {"ncclDevKernel_SendRecv"}
    assert len(_by(older, "launch_id")) == len(_by(newer, "launch_id"))


def test_sequence_parallelism_and_zero1_change_the_mix(simulate: Simulate) -> None:
    def mix(parallelism: str, **given: object) -> set[str]:
        return {row["op"] for row in truth(simulate(**given)) if row["parallelism"] == parallelism}

    assert mix("TP") == {"Broadcast", "AllGather", "ReduceScatter", "AllReduce"}
    assert mix("TP", sequence_parallel=False) == {"Broadcast", "AllReduce"}
    assert mix("DP") == {"AllReduce"}
    assert mix("DP", zero1=True) == {"ReduceScatter", "AllGather"}


@pytest.mark.parametrize(
    ("version", "in_node", "between"),
    [("2.8", False, False), ("2.11", False, True), ("2.12", True, True), ("2.26", True, True), ("2.27", False, True)],
)
def test_op_count_moves_by_the_rule_of_its_version(
    version: str, in_node: bool, between: bool, simulate: Simulate
) -> None:
    rows = [row for row in truth(simulate(nccl=version)) if row["comm_size"] > 1]
    for launches in _by(rows, "comm_id", "rank").values():
        moves = between if launches[0]["parallelism"] in {"PP", "WORLD", "EMBEDDING"} else in_node
        values = [group[0]["op_count"] for group in _by(launches, "launch_id").values()]
        assert values == (list(range(len(values))) if moves else [0] * len(values))
        assert all(len({row["op_count"] for row in group}) == 1 for group in _by(launches, "launch_id").values())


def test_communicators_that_share_a_printed_id_are_told_apart(simulate: Simulate) -> None:
    rows = truth(simulate(nccl="2.21"))
    ids = {(row["comm_id"], row["parallelism"]) for row in rows}
    assert len({comm_id for comm_id, _ in ids}) == len(ids)
    assert {comm_id.rpartition("#")[2] for comm_id, kind in ids if kind == "EMBEDDING"} == {"2"}


def test_sharded_data_parallelism_gathers_parameters_as_often_as_its_stage_says(simulate: Simulate) -> None:
    def amounts(**given: object) -> dict[str, int]:
        rows = truth(simulate(tp=1, pp=1, dp=8, layers=3, iterations=1, **given))
        mine = [row for row in rows if row["rank"] == 5 and row["parallelism"] in {"DP", "OPTIMIZER"}]
        return dict(sorted(Counter(str(row["op"]) for row in mine).items()))

    assert amounts(zero1=True) == {"AllGather": 3, "ReduceScatter": 3}
    assert amounts(zero2=True) == {"AllGather": 3, "ReduceScatter": 2 * 3}
    assert amounts(fsdp=True) == {"AllGather": 2 * 2 * 3, "ReduceScatter": 2 * 3}
    assert amounts(fsdp=True, replicate=2) == {"AllGather": 2 * 2 * 3, "AllReduce": 2 * 3, "ReduceScatter": 2 * 3}
    assert amounts(deepspeed=1) == {"AllGather": 1, "AllReduce": 3 + 2}  # with overflow and norm
    assert amounts(deepspeed=2) == {"AllGather": 1, "AllReduce": 2 * 3 + 2}
    assert amounts(deepspeed=3) == {"AllGather": 2 * 2 * 3 * 4, "AllReduce": 2, "ReduceScatter": 2 * 3}


def test_hybrid_shards_are_neighbours_and_their_replicas_are_not(simulate: Simulate) -> None:
    rows = truth(simulate(tp=1, pp=1, dp=8, fsdp=True, replicate=2, iterations=1))
    members: dict[tuple[str, str], set[int]] = defaultdict(set)
    for row in rows:
        members[str(row["parallelism"]), str(row["comm_id"])].add(int(row["rank"]))
    groups = sorted((kind, sorted(ranks)) for (kind, _), ranks in members.items())
    shards = [("OPTIMIZER", [0, 1, 2, 3]), ("OPTIMIZER", [4, 5, 6, 7])]
    assert groups == [*(("DP", [k, k + 4]) for k in range(4)), *shards, ("WORLD", list(range(8)))]
    sizes = {row["op"]: row["message_bytes"] for row in rows if row["red_op"] == "avg"}
    assert sizes["ReduceScatter"] == 4 * sizes["AllReduce"], "replicas reduce a shard of the gradients"


def test_deepspeed_sums_gradients_in_the_type_of_the_model_from_one_buffer(simulate: Simulate) -> None:
    folder = simulate(tp=1, pp=1, dp=8, deepspeed=2, layers=3, iterations=1)
    rows = truth(folder)
    tensors = [row for row in rows if row["op"] == "AllReduce" and row["message_bytes"] > 1024]
    assert {(row["dtype"], row["red_op"]) for row in tensors} == {("bfloat16", "sum")}
    assert len({row["message_bytes"] for row in tensors}) == 2, "the embedding goes with the first layer"
    counts = {row["count"] for row in tensors}
    lines = [line for line in log_lines(folder) if any(f" count {count} " in line for count in counts)]
    buffers = {line.split("sendbuff ")[1].split()[0] for line in lines if ": opCount " in line}
    assert len(buffers) == 8, "one of each rank"


def test_context_parallelism_passes_keys_and_values_around_a_ring(simulate: Simulate) -> None:
    rows = truth(simulate(tp=1, pp=1, dp=2, cp=4, layers=3, iterations=1))
    for rank in range(8):
        ring = [row for row in rows if row["rank"] == rank and row["parallelism"] == "CP"]
        peers = {(row["op"], row["peer"]) for row in ring}
        assert peers == {("Send", (rank + 1) % 4), ("Recv", (rank - 1) % 4)}
        assert len(ring) == 2 * 2 * 3 * (3 + 4)  # each way x microbatches x layers x (forward + backward)
    assert {row["comm_size"] for row in rows if row["parallelism"] == "DP"} == {8}


def test_a_dimension_that_spans_the_job_may_use_the_communicator_of_the_world(simulate: Simulate) -> None:
    rows = truth(simulate(tp=1, pp=1, dp=8, shared_world=True))
    assert {(row["parallelism"], row["comm_size"]) for row in rows} == {("DP", 8)}

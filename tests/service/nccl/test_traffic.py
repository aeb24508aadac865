"""Traffic against closed forms: what a rank sends, what all send together, and the shape of the trees."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from ncclscope_service.nccl.topology import Channels
from ncclscope_service.nccl.traffic import NOWHERE, Calls, Flow, Seats, TrafficSums, Way, double_tree_parent, flows
from ncclscope_wire.facts import RingOrder, TreeNeighbours, TreeNode

S = 840_000
"""Divides by all sizes used here."""


def nodes_of(count: int, each: int) -> Seats:
    return Seats(tuple(rank // each for rank in range(count * each)))


def sent(op: str, seats: Seats, algorithm: str | None = "RING", peer: int | None = None) -> Counter[tuple[int, int]]:
    """Bytes by (sender, receiver) when every rank makes the call once; switches have negative numbers."""
    found: Counter[tuple[int, int]] = Counter()
    for rank in range(seats.size):
        for flow in flows(Calls(op=op, algorithm=algorithm, rank=rank, peer=peer, bytes=S), seats):
            for receiver in flow.receivers.tolist() if flow.way is Way.PEER else [-int(flow.way)]:
                found[rank, receiver] += round(flow.bytes)
    return found


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize(("op", "laps"), [("AllReduce", 2), ("AllGather", 1), ("ReduceScatter", 1)])
def test_a_ring_carries_the_busbw_factor_of_s_over_each_of_its_links(op: str, laps: int, n: int) -> None:
    expected = {(rank, (rank + 1) % n): round(laps * (n - 1) * S / n) for rank in range(n)}
    assert sent(op, nodes_of(1, n)) == expected


def test_a_ring_over_nodes_crosses_each_border_once() -> None:
    found = sent("AllReduce", nodes_of(4, 8))
    crossing = {pair: amount for pair, amount in found.items() if pair[0] // 8 != pair[1] // 8}
    assert crossing == {(7, 8): S * 62 // 32, (15, 16): S * 62 // 32, (23, 24): S * 62 // 32, (31, 0): S * 62 // 32}


def test_broadcast_and_reduce_are_chains_that_begin_or_end_at_the_root() -> None:
    assert sent("Broadcast", nodes_of(1, 4), peer=2) == {(2, 3): S, (3, 0): S, (0, 1): S}
    assert sent("Reduce", nodes_of(1, 4), peer=2) == {(3, 0): S, (0, 1): S, (1, 2): S}


def test_all_to_all_gather_and_scatter_move_one_nth_per_pair() -> None:
    pairs = {(a, b): S // 4 for a in range(4) for b in range(4) if a != b}
    assert sent("AlltoAll", nodes_of(1, 4)) == pairs
    assert sent("Gather", nodes_of(1, 4), peer=1) == {pair: S // 4 for pair in pairs if pair[1] == 1}
    assert sent("Scatter", nodes_of(1, 4), peer=1) == {pair: S // 4 for pair in pairs if pair[0] == 1}


def test_a_send_goes_to_its_peer_and_a_recv_sends_nothing() -> None:
    seats = nodes_of(1, 4)
    [flow] = flows(Calls(op="Send", algorithm=None, rank=1, peer=3, bytes=S), seats)
    assert (flow.receivers.tolist(), flow.bytes, flow.is_assumed) == ([3], S, False)
    for op in ("Recv", "Signal", "FutureOp"):
        assert not list(flows(Calls(op=op, algorithm=None, rank=1, peer=3, bytes=S), seats))
    assert not list(flows(Calls(op="Send", algorithm=None, rank=1, peer=1, bytes=S), seats))


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 7, 8, 16, 33])
@pytest.mark.parametrize("tree", [0, 1])
def test_each_tree_has_one_root_reaches_every_node_and_is_binary(nodes: int, tree: int) -> None:
    parents = [double_tree_parent(nodes, node, tree) for node in range(nodes)]
    assert parents.count(None) == 1
    assert max(Counter(parent for parent in parents if parent is not None).values(), default=0) <= 2
    for node in range(nodes):
        steps, at = 0, node
        while (parent := parents[at]) is not None:
            at, steps = parent, steps + 1
            assert steps <= nodes.bit_length() + 1


def test_the_trees_of_eight_nodes_are_those_of_nccl() -> None:
    assert [double_tree_parent(8, node, 0) for node in range(8)] == [None, 2, 4, 2, 0, 6, 4, 6]
    assert [double_tree_parent(8, node, 1) for node in range(8)] == [1, 3, 1, 7, 5, 3, 5, None]


def test_inner_nodes_of_one_tree_are_leaves_of_the_other() -> None:
    for nodes in (4, 8, 16, 32):
        inner = [{double_tree_parent(nodes, node, tree) for node in range(nodes)} - {None} for tree in (0, 1)]
        roots = {node for tree in (0, 1) for node in range(nodes) if double_tree_parent(nodes, node, tree) is None}
        assert inner[0] & inner[1] <= roots


@pytest.mark.parametrize(("nodes", "each"), [(1, 8), (2, 8), (4, 4), (5, 2), (8, 1)])
def test_a_tree_carries_s_up_and_down_each_edge_of_a_spanning_tree(nodes: int, each: int) -> None:
    """n-1 edges with S each way, of two half trees between nodes: as much as nobody can do without."""
    seats = nodes_of(nodes, each)
    found = sent("AllReduce", seats, "TREE")
    assert sum(found.values()) == 2 * S * (seats.size - 1)
    assert all(found[a, b] == found[b, a] for a, b in found)


def test_nvls_sends_into_the_switch_and_counts_no_receiver() -> None:
    assert sent("AllReduce", nodes_of(1, 8), "NVLS") == {(rank, -Way.NVSWITCH): S + S // 8 for rank in range(8)}
    assert sent("AllGather", nodes_of(1, 8), "NVLS") == {(rank, -Way.NVSWITCH): S // 8 for rank in range(8)}
    assert sent("ReduceScatter", nodes_of(1, 8), "NVLS") == {(rank, -Way.NVSWITCH): S for rank in range(8)}


def test_between_nodes_switches_of_the_network_take_s_of_each_node() -> None:
    for algorithm in ("NVLS", "COLLNET_DIRECT", "COLLNET_CHAIN"):
        found = sent("AllReduce", nodes_of(2, 4), algorithm)
        assert sum(amount for (_, to), amount in found.items() if to == -Way.NETWORK) == 2 * S


def test_an_nvls_tree_carries_s_each_way_between_two_nodes() -> None:
    found = sent("AllReduce", nodes_of(2, 4), "NVLS_TREE")
    assert sum(amount for (a, b), amount in found.items() if b >= 0 and a // 4 == 0 and b // 4 == 1) == S
    assert all(a % 4 == b % 4 for a, b in found if b >= 0)


def test_without_a_known_algorithm_or_known_nodes_a_ring_is_taken_and_said_so() -> None:
    somewhere = Seats((0, -1, 1, 1))
    for seats, algorithm in ((nodes_of(1, 4), None), (nodes_of(1, 4), "PAT"), (somewhere, "TREE"), (somewhere, "NVLS")):
        [flow] = flows(Calls(op="AllReduce", algorithm=algorithm, rank=0, peer=None, bytes=S), seats)
        assert (flow.receivers.tolist(), flow.bytes, flow.is_assumed) == ([1], S * 6 / 4, True)
    [flow] = flows(Calls(op="AllReduce", algorithm="RING", rank=0, peer=None, bytes=S), somewhere)
    assert not flow.is_assumed


def printed(*orders: tuple[int, ...]) -> Channels:
    channels = Channels(len(orders[0]))
    for channel, ranks in enumerate(orders):
        channels.add_fact(RingOrder(line=1, channel=channel, ranks=ranks))
    return channels


def test_printed_rings_share_equally_and_nothing_of_them_is_assumed() -> None:
    seats = Seats((0, 0, 1, 1), printed((0, 2, 1, 3), (0, 1, 2, 3)))
    found = sent("AllGather", seats)
    assert found == {
        (0, 2): S * 3 // 8, (0, 1): S * 3 // 8, (1, 3): S * 3 // 8, (1, 2): S * 3 // 8,
        (2, 1): S * 3 // 8, (2, 3): S * 3 // 8, (3, 0): S * 3 // 4,
    }  # fmt: skip
    ours = list(flows(Calls(op="AllGather", algorithm="RING", rank=0, peer=None, bytes=S), seats))
    assert not any(flow.is_assumed or flow.is_order_assumed for flow in ours)
    half = S // 2
    assert sent("Broadcast", seats, peer=3) == {(3, 0): S, (0, 2): half, (2, 1): half, (0, 1): half, (1, 2): half}


def test_in_printed_trees_each_link_carries_its_channels_share_both_ways() -> None:
    channels = Channels(3)
    trees = {0: ((0, -1, (1, 2)), (1, 1, ())), 1: ((0, 0, ()), (1, -1, (0, 2))), 2: ((0, 0, ()), (1, 1, ()))}
    for rank, nodes in trees.items():
        places = tuple(TreeNode(channel=channel, up=up, rank=rank, down=down) for channel, up, down in nodes)
        channels.add_fact(TreeNeighbours(line=1, nodes=places))
    expected = Counter({(0, 1): S, (1, 0): S, (0, 2): S // 2, (2, 0): S // 2, (1, 2): S // 2, (2, 1): S // 2})
    assert sent("AllReduce", Seats((0, 1, 1), channels), "TREE") == expected


def test_without_printed_rings_the_order_is_said_to_be_assumed() -> None:
    [flow] = flows(Calls(op="AllGather", algorithm="RING", rank=0, peer=None, bytes=S), nodes_of(1, 4))
    assert flow.is_order_assumed
    [pair] = flows(Calls(op="AllGather", algorithm="RING", rank=0, peer=None, bytes=S), nodes_of(1, 2))
    assert not pair.is_order_assumed


def test_a_single_rank_and_ranks_out_of_range_send_nothing() -> None:
    assert not sent("AllReduce", nodes_of(1, 1))
    assert not list(flows(Calls(op="AllReduce", algorithm="RING", rank=4, peer=None, bytes=S), nodes_of(1, 4)))
    assert not list(flows(Calls(op="Send", algorithm=None, rank=0, peer=9, bytes=S), nodes_of(1, 4)))


def test_sums_are_exact_by_pair_and_way_however_often_they_are_added_to() -> None:
    sums = TrafficSums(4000)
    many = np.repeat(np.arange(100, dtype=np.int64), 40)
    for _ in range(300):
        sums.add(1, 3999, many, Flow(many, 2.0))
        sums.add(0, 7, np.array([NOWHERE]), Flow(np.empty(0, dtype=np.int64), 5.0, Way.NVSWITCH))
        sums.add(0, 7, np.array([8]), Flow(np.array([1]), 1.0, is_assumed=True))
    rows = list(sums.rows())
    assert rows[:2] == [(0, 7, NOWHERE, Way.NVSWITCH, 1500, 0, 0), (0, 7, 8, Way.PEER, 300, 300, 0)]
    assert rows[2:] == [(1, 3999, place, Way.PEER, 24_000, 0, 0) for place in range(100)]
    assert all(a <= b for a, b in pairwise(rows))

"""NCCL's graph of a node: where nodes stand, whose GPUs they are, and which links carry the bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from service.printed_job import PrintedJob
from topology_samples import FUSED, MESH, SWITCHED, TWO_PAIRS, block_of

from ncclscope_service.job import node_graph as module
from ncclscope_service.job.node_graph import (
    OUTSIDE,
    SeatedMachine,
    Sent,
    channel_edges,
    largest_with_channels,
    link_bytes,
    node_graph,
    positions,
    seat_machines,
    sent_by_machine,
)
from ncclscope_service.nccl.topology import Channels, Machine
from ncclscope_service.nccl.traffic import Way
from ncclscope_wire.facts import RingOrder, TreeNeighbours, TreeNode
from ncclscope_wire.topology import LinkKind, NodeKind, TopologyLink, TopologyNode

BLOCKS = {"two pairs": TWO_PAIRS, "switched": SWITCHED, "mesh": MESH, "fused": FUSED}
PAIR = [("node01", 0), ("node01", 1)]


def sent(pairs: dict[tuple[int, int], int], into_nvswitch: dict[int, int] | None = None) -> Sent:
    return Sent(Counter(pairs), Counter(into_nvswitch or {}))


@pytest.mark.parametrize("name", BLOCKS)
def test_every_node_has_a_place_of_its_own_and_gpus_stand_in_a_row(name: str) -> None:
    machine = Machine(block_of(BLOCKS[name]))
    found = positions(machine)
    assert found.keys() == set(range(len(machine.nodes)))
    assert len(set(found.values())) == len(found)
    rows = {kind: {found[node][1] for node in machine.of_kind(kind)} for kind in NodeKind if machine.of_kind(kind)}
    assert rows[NodeKind.CPU] == {0}
    assert len(rows[NodeKind.GPU]) == 1
    if NodeKind.NET in rows:
        assert min(rows[NodeKind.NET]) > max(rows[NodeKind.NIC]) > 0
    if NodeKind.NVS in rows:
        assert min(rows[NodeKind.NVS]) > max(rows[NodeKind.GPU])


def test_parents_stand_above_the_middle_of_their_children() -> None:
    machine = Machine(block_of(SWITCHED))
    found = positions(machine)
    named = {machine.label(node): found[node] for node in found}
    assert named["PCI 0-18000"] == ((named["GPU 0-1b000"][0] + named["NIC 0-1a000"][0]) / 2, 1)
    assert named["CPU 0-0"] == ((named["PCI 0-18000"][0] + named["PCI 0-40000"][0]) / 2, 0)


def test_a_tree_as_deep_as_a_block_may_be_is_drawn() -> None:
    depth = 1500
    nodes = [TopologyNode(NodeKind.CPU if at == 0 else NodeKind.PCI, 0, at) for at in range(depth)]
    links = [TopologyLink(at, at + 1, LinkKind.PCI, 12_000_000_000) for at in range(depth - 1)]
    machine = Machine(replace(block_of(MESH), nodes=tuple(nodes), links=tuple(links)))
    assert max(row for _, row in positions(machine).values()) == depth - 1


def test_bytes_go_the_ways_that_nccl_takes() -> None:
    machine = Machine(block_of(TWO_PAIRS))
    gpus = dict(enumerate(machine.of_kind(NodeKind.GPU)))
    assert link_bytes(machine, gpus, sent({(0, 1): 7})) == ({(gpus[0], gpus[1]): 7}, 0), "over NVLink"
    found, _ = link_bytes(machine, gpus, sent({(1, 2): 5}))
    across = {tuple(machine.label(node) for node in link): amount for link, amount in found.items()}
    assert across == {
        ("GPU 0-25000", "CPU 0-0"): 5, ("CPU 0-0", "CPU 0-1"): 5, ("CPU 0-1", "GPU 0-c1000"): 5
    }  # fmt: skip
    kinds = [
        {
            tuple(machine.nodes[node].kind.value for node in link)
            for link in link_bytes(machine, gpus, sent({ends: 3}))[0]
        }
        for ends in ((2, OUTSIDE), (9, 2))
    ]
    assert kinds[0] == {("GPU", "CPU"), ("CPU", "NIC"), ("NIC", "NET")}
    assert kinds[1] == {(end, start) for start, end in kinds[0]}


def test_what_a_switch_reduces_goes_to_it_and_what_has_no_way_is_counted() -> None:
    switched, mesh = Machine(block_of(SWITCHED)), Machine(block_of(MESH))
    first = switched.of_kind(NodeKind.GPU)[0]
    (switch,) = switched.of_kind(NodeKind.NVS)
    assert link_bytes(switched, {4: first}, sent({}, {4: 11})) == ({(first, switch): 11}, 0)
    gpus = dict(enumerate(mesh.of_kind(NodeKind.GPU)))
    assert link_bytes(mesh, gpus, sent({(0, OUTSIDE): 3, (8, 1): 4}, {2: 5})) == ({}, 12), "no port, no NVSwitch"
    assert link_bytes(mesh, {0: gpus[0], 1: gpus[0]}, sent({(0, 1): 3})) == ({}, 0), "two ranks on one GPU"


def test_the_bytes_of_a_machine_are_those_of_its_gpus_and_none_of_ranks_that_may_be_anywhere_on_it() -> None:
    machine = Machine(block_of(TWO_PAIRS))
    gpus = machine.of_kind(NodeKind.GPU)

    def seated(ranks: list[int], without: set[int]) -> SeatedMachine:
        return SeatedMachine(
            machine=machine, hosts=("a",), alike=(), gpus=dict(zip(ranks, gpus, strict=False)),
            host_of=dict.fromkeys(ranks, "a"), without_gpu=frozenset(without),
        )  # fmt: skip

    rows = [
        (0, 1, Way.PEER, 1), (0, 2, Way.PEER, 10), (0, OUTSIDE, Way.PEER, 100), (0, None, Way.NETWORK, 1000),
        (0, None, Way.NVSWITCH, 5), (0, 9, Way.PEER, 7), (9, 2, Way.PEER, 3), (OUTSIDE, OUTSIDE, Way.PEER, 8),
    ]  # fmt: skip
    one, other = sent_by_machine((seated([0, 1], {9}), seated([2, 3], set())), rows)
    assert one.pairs == {(0, 1): 1, (0, 2): 10, (0, OUTSIDE): 1100}
    assert one.into_nvswitch == {0: 5}
    assert other.pairs == {(0, 2): 10, (9, 2): 3}, "rank 9 is on the first machine, wherever it is there"


def test_equal_hosts_are_drawn_once_and_those_without_a_graph_are_named() -> None:
    job = PrintedJob()
    for number, host in enumerate(("node01", "node02", "node03", "node04")):
        blocks = {} if host == "node03" else {host: SWITCHED if host == "node04" else TWO_PAIRS}
        job.communicator(number + 1, [(host, 0), (host, 1)], blocks=blocks)
    job.communicator(9, [(f"node{number:02d}", device) for number in range(1, 5) for device in (0, 1)])
    found = seat_machines(job.store(), "job")
    assert [(each.hosts, each.alike, dict(each.host_of)) for each in found.machines] == [
        (("node01",), ("node02",), {0: "node01", 1: "node01"}),
        (("node04",), (), {}),
    ]
    assert (found.kinds, found.hosts_without) == (2, ("node03",))
    assert found.machines[1].without_gpu == {6, 7}, "their bus ids are none of the block's"
    assert seat_machines(job.store(), "another").machines == ()


def test_kinds_beyond_the_limits_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    job = PrintedJob()
    job.communicator(1, [("node01", 0), ("node01", 1), ("node02", 0)], blocks={"node01": SWITCHED, "node02": TWO_PAIRS})
    store = job.store()
    monkeypatch.setattr(module, "MAX_PARTS", 13)
    assert [(found.kinds, [each.hosts for each in found.machines]) for found in (seat_machines(store, "job"),)] == [
        (2, [("node02",)])
    ]
    monkeypatch.setattr(module, "MAX_GRAPHS", 0)
    found = seat_machines(store, "job")
    assert (found.kinds, found.machines, found.hosts_without) == (2, (), ())


def test_hosts_that_multi_node_nvlink_joins_are_one_machine_with_the_gpus_of_all() -> None:
    job = PrintedJob()
    for number, hosts in enumerate((("node01", "node02"), ("node03", "node04"))):
        job.communicator(number + 1, [(host, 0) for host in hosts], blocks=dict.fromkeys(hosts, FUSED))
    job.communicator(9, [(f"node{number:02d}", 0) for number in range(1, 5)])
    (machine,) = seat_machines(job.store(), "job").machines
    assert machine.hosts == ("node01", "node02")
    assert machine.alike == ("node03", "node04")
    assert machine.host_of == {0: "node01", 1: "node02"}
    graph = node_graph(machine, sent({(0, 1): 6, (1, OUTSIDE): 2}))
    assert [(node.name, node.ranks, node.host) for node in graph.nodes if node.kind is NodeKind.GPU] == [
        ("GPU 0-1000", (0,), "node01"),
        ("GPU 1-1000", (1,), "node02"),
    ]
    nvlinks = [link for link in graph.links if link.kind is LinkKind.NVL]
    assert sorted(sum(link.bytes) for link in nvlinks) == [6, 6]
    assert {link.rates for link in nvlinks} == {(360_000_000_000, 360_000_000_000)}
    assert (graph.bytes_without_way, graph.ranks_without_gpu, graph.alike_known) == (2, (), 2)


def test_a_block_over_several_hosts_whose_communicator_is_not_known_is_drawn_without_ranks() -> None:
    job = PrintedJob()
    job.communicator(1, [("node01", 0), ("node02", 1)], blocks={"node01": FUSED})
    (machine,) = seat_machines(job.store(), "job").machines
    assert (machine.hosts, dict(machine.gpus), set(machine.without_gpu)) == (("node01",), {}, {0})


def test_a_link_that_is_slower_one_way_says_both_rates() -> None:
    block = TWO_PAIRS.replace("              + NVL[80.0] - GPU/0-1000", "              + NVL[40.0] - GPU/0-1000", 1)
    job = PrintedJob()
    job.communicator(1, PAIR, blocks={"node01": block})
    (machine,) = seat_machines(job.store(), "job").machines
    slow = [link.rates for link in node_graph(machine, sent({})).links if link.kind is LinkKind.NVL]
    assert slow == [(80_000_000_000, 40_000_000_000), (80_000_000_000, 80_000_000_000)]


def test_rings_and_trees_are_those_of_the_largest_communicator_that_printed_them() -> None:
    job = PrintedJob()
    job.communicator(1, PAIR)
    job.communicator(2, [("node01", device) for device in range(4)])
    store = job.store()
    index = next(each.index for each in store.communicators if each.comm_id == "0x2")
    channels = store.channels[index] = Channels(4)
    channels.add_fact(RingOrder(line=1, channel=0, ranks=(0, 1, 2, 3)))
    channels.add_fact(RingOrder(line=1, channel=1, ranks=(0, 1, 3, 2)))
    for rank in range(4):
        tree = TreeNode(channel=0, up=rank - 1, rank=rank, down=(rank + 1 if rank < 3 else -1, -1, -1))
        channels.add_fact(TreeNeighbours(line=1, nodes=(tree,)))
    largest = largest_with_channels(store, store.communicators)
    assert largest is not None
    assert largest.comm_id == "0x2"
    found = channel_edges(store, largest)
    assert (found.ranks, found.channels) == ((0, 1, 2, 3), 2)
    assert {each.ends: each.channels for each in found.rings} == {
        (0, 1): 2, (1, 2): 1, (1, 3): 1, (2, 0): 1, (2, 3): 1, (3, 0): 1, (3, 2): 1
    }  # fmt: skip
    assert [each.ends for each in found.trees] == [(0, 1), (1, 2), (2, 3)]
    smaller = [each for each in store.communicators if each.index != index]
    assert largest_with_channels(store, smaller) is None

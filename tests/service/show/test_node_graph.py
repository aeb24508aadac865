"""NCCL's graphs of a live job's nodes, with the bytes of what is in memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from service import fake_service as fake

from ncclscope_service.show.node_graph import NodeGraphView, node_graph_input, node_graph_view
from ncclscope_service.store.tables import Store
from ncclscope_wire.terms import NO_NUMBER
from ncclscope_wire.topology import LinkKind, NodeKind

SHAPE = fake.Shape(nodes=2, per_node=4, pipeline=1, late_rank=1, noise=0.0)
CALLS = 5 * 6
"""Of each rank in each communicator."""


def made(shape: fake.Shape = SHAPE, per_minute: int = 6) -> Store:
    return fake.StoreMaker(shape, now_ns=fake.NOW_NS, per_minute=per_minute).make()


def view_of(store: Store) -> NodeGraphView:
    return node_graph_view(node_graph_input(fake.asked_of(store)))


def only(store: Store, parallelism: str) -> None:
    """Leaves the sizes of one kind of group alone."""
    wanted = {each.index for each in store.communicators if each.parallelism == parallelism}
    members = [each.index for each in store.members if each.communicator in wanted]
    rows = store.operations.rows
    rows.put("message_bytes", np.flatnonzero(~np.isin(rows["member"], members)), NO_NUMBER)


def amounts(view: NodeGraphView, kind: LinkKind) -> set[tuple[int, int]]:
    return {link.bytes for link in view.graphs[0].links if link.kind is kind}


def test_a_ring_within_the_node_goes_over_its_nvswitch_alone() -> None:
    store = made()
    only(store, "TP")
    view = view_of(store)
    expected = round(2 * 3 / 4 * 64 * 1024**2 * CALLS)
    assert amounts(view, LinkKind.NVL) == {(expected, expected)}, "to the next rank, and from the one before"
    assert amounts(view, LinkKind.PCI) == amounts(view, LinkKind.NET) == {(0, 0)}
    assert view.assumed_ratio == 1, "no line says which algorithm ran"
    (graph,) = view.graphs
    assert (graph.hosts, graph.alike_known, graph.ranks_without_gpu, graph.bytes_without_way) == (
        ("gpu-node00",), 0, (), 0
    )  # fmt: skip
    gpus = [node for node in graph.nodes if node.kind is NodeKind.GPU]
    assert [(node.ranks, node.host) for node in gpus] == [((rank,), "gpu-node00") for rank in range(4)]
    assert (view.hosts_without, view.hosts_without_known) == (("gpu-node01",), 1)


def test_a_group_across_nodes_uses_the_ports() -> None:
    store = made()
    only(store, "DP")
    view = view_of(store)
    of_rank = round(1 / 2 * 512 * 1024**2 * CALLS)
    assert amounts(view, LinkKind.NVL) == amounts(view, LinkKind.SYS) == {(0, 0)}
    assert sum(link.bytes[0] for link in view.graphs[0].links if link.kind is LinkKind.NET) == 4 * of_rank
    assert sum(link.bytes[1] for link in view.graphs[0].links if link.kind is LinkKind.NET) == 4 * of_rank


def test_the_rings_are_named_as_the_page_names_the_group() -> None:
    view = view_of(made())
    assert view.channels is not None
    assert view.channels.communicator == "tp-0"
    assert view.channels.edges.channels == 2
    assert [each.ends for each in view.channels.edges.rings] == [(0, 1), (1, 2), (2, 3), (3, 0)]


def test_a_rank_whose_gpu_no_line_names_is_left_out_with_its_bytes() -> None:
    store = made()
    only(store, "TP")
    store.members[:] = [replace(each, bus_id=None) if each.global_rank == 2 else each for each in store.members]
    view = view_of(store)
    assert view.graphs[0].ranks_without_gpu == (2,)
    expected = round(2 * 3 / 4 * 64 * 1024**2 * CALLS)
    assert amounts(view, LinkKind.NVL) == {(0, 0), (expected, 0), (0, expected), (expected, expected)}
    assert view.graphs[0].bytes_without_way == 0


@pytest.mark.parametrize("with_blocks", [True, False])
def test_nothing_known_is_nothing_drawn(*, with_blocks: bool) -> None:
    store = made()
    store.channels.clear()
    if with_blocks:
        store.operations.rows["message_bytes"] = NO_NUMBER
    else:
        store.topologies.clear()
    view = view_of(store)
    assert view.channels is None
    assert view.assumed_ratio is None
    assert len(view.graphs) == view.kinds_known == int(with_blocks)
    assert not any(any(link.bytes) for graph in view.graphs for link in graph.links)
    assert view.hosts_without_known == 2 - with_blocks

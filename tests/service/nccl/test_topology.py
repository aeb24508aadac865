"""The narrowest cut of a group, and its name."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from topology_samples import MESH, SWITCHED, TWO_PAIRS, block_of

from ncclscope_service.nccl.topology import Bottleneck, Machine
from ncclscope_wire.topology import LinkKind, NodeKind, TopologyLink, TopologyNode, TopologyOrigin, TopologySeen

_GB = 1e9


def _machine(text: str) -> Machine:
    return Machine(block_of(text))


def _gpus(machine: Machine, *places: int) -> list[int]:
    gpus = machine.of_kind(NodeKind.GPU)
    return [gpus[place] for place in places]


def _outwards(machine: Machine, gpus: Sequence[int], sharing: dict[int, int] | None = None) -> Bottleneck | None:
    return machine.bottleneck_outwards(gpus, machine.ports_of(gpus), sharing=sharing)


@pytest.mark.parametrize(
    ("places", "rate", "name"),
    [
        ((0, 1), 80, "NVL 80.0 GB/s between GPU 0-1000 and GPU 0-25000"),
        ((2, 3), 80, "NVL 80.0 GB/s between GPU 0-c1000 and GPU 0-e1000"),
        ((0, 2), 16, "SYS 16.0 GB/s between CPU 0-0 and CPU 0-1"),
        ((0, 1, 2), 16, "SYS 16.0 GB/s between CPU 0-0 and CPU 0-1"),
        ((0, 1, 2, 3), 16, "SYS 16.0 GB/s between CPU 0-0 and CPU 0-1"),
    ],
)
def test_two_pairs_are_fast_inside_and_bound_by_the_sockets_across(
    places: tuple[int, ...], rate: float, name: str
) -> None:
    machine = _machine(TWO_PAIRS)
    assert machine.bottleneck(_gpus(machine, *places)) == Bottleneck(bytes_per_second=rate * _GB, name=name)


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_one_gpu_of_a_node_leaves_it_through_its_cards_pci_link_which_is_narrower_than_the_port(place: int) -> None:
    machine = _machine(TWO_PAIRS)
    found = _outwards(machine, _gpus(machine, place))
    card = "NIC 0-c2000" if place % 2 == 0 else "NIC 0-c3000"
    assert found == Bottleneck(bytes_per_second=12 * _GB, name=f"PCI 12.0 GB/s of {card}")


def test_gpus_of_one_node_add_up_their_cards_until_something_inside_is_narrower() -> None:
    machine = _machine(TWO_PAIRS)
    assert _outwards(machine, _gpus(machine, 2, 3)) == Bottleneck(
        bytes_per_second=24 * _GB, name="2 x PCI 12.0 GB/s of NIC 0-c2000, NIC 0-c3000"
    )
    assert _outwards(machine, _gpus(machine, 0, 1, 2, 3)) == Bottleneck(
        bytes_per_second=16 * _GB, name="SYS 16.0 GB/s between CPU 0-0 and CPU 0-1"
    )


def test_a_card_that_groups_share_gives_each_its_part() -> None:
    machine = _machine(TWO_PAIRS)
    gpus = _gpus(machine, 0)
    port = machine.ports_of(gpus)[gpus[0]]
    assert _outwards(machine, gpus, {port: 2}) == Bottleneck(
        bytes_per_second=6 * _GB, name="PCI 12.0 GB/s of NIC 0-c2000, shared by 2 groups"
    )


def test_equally_near_ports_are_dealt_out_by_the_number_of_the_gpu() -> None:
    machine = _machine(TWO_PAIRS)
    (gpu,) = _gpus(machine, 0)
    ports = machine.of_kind(NodeKind.NET)
    assert [machine.ports_of([gpu], {gpu: device})[gpu] for device in range(4)] == [*ports, *ports]


def test_behind_a_switch_every_gpu_has_all_of_its_nvlink_and_its_own_card() -> None:
    machine = _machine(SWITCHED)
    gpus = _gpus(machine, 0, 1, 2)
    for group in chain(combinations(gpus, 2), [gpus]):
        found = machine.bottleneck(group)
        assert found is not None
        assert found.bytes_per_second == 370.8 * _GB
        assert found.name.startswith("NVL 370.8 GB/s between GPU 0-")
    for place, card in enumerate(("1a000", "42000", "99000")):
        found = _outwards(machine, _gpus(machine, place))
        assert found == Bottleneck(bytes_per_second=48 * _GB, name=f"PCI 48.0 GB/s of NIC 0-{card}")
    found = _outwards(machine, gpus)
    assert found is not None
    assert found.bytes_per_second == 144 * _GB


@pytest.mark.parametrize(("size", "links"), [(2, 1), (3, 2), (4, 3)])
def test_in_a_mesh_rings_run_side_by_side_over_all_links_of_the_group(size: int, links: int) -> None:
    machine = _machine(MESH)
    found = machine.bottleneck(_gpus(machine, *range(size)))
    assert found is not None
    assert found.bytes_per_second == pytest.approx(links * 123.6 * _GB)
    several = f"{links} x NVL 123.6 GB/s of GPU 0-6000"
    assert found.name == (several if links > 1 else "NVL 123.6 GB/s between GPU 0-6000 and GPU 0-26000")


def test_a_link_that_is_slower_one_way_bounds_the_ring() -> None:
    slow = MESH.replace("NVL[123.6] - GPU/0-26000", "NVL[20.6] - GPU/0-26000", 1)
    machine = _machine(slow)
    found = machine.bottleneck(_gpus(machine, 0, 1))
    assert found == Bottleneck(bytes_per_second=20.6 * _GB, name="NVL 20.6 GB/s between GPU 0-6000 and GPU 0-26000")


def test_a_gpu_passes_data_on_only_where_it_is_of_the_group() -> None:
    without = [line for line in MESH.splitlines() if "NVL" not in line]
    at = {line.split("GPU/")[1].split(" ")[0]: number for number, line in enumerate(without) if "GPU/" in line}
    chain_of = {"0-6000": ["0-26000"], "0-26000": ["0-6000", "0-a6000"], "0-a6000": ["0-26000"]}
    for gpu in sorted(chain_of, key=lambda gpu: -at[gpu]):
        links = [f"              + NVL[100.0] - GPU/{other}" for other in chain_of[gpu]]
        without[at[gpu] + 1 : at[gpu] + 1] = links
    machine = _machine("\n".join(without))
    one, middle, two = _gpus(machine, 0, 1, 2)
    assert machine.best_paths(one, through=[one, middle, two])[two].type == "NVB"
    assert machine.best_paths(one, through=[one, two])[two].type == "PHB"
    found = machine.bottleneck([one, two])
    assert found is not None
    assert found.bytes_per_second == 48 * _GB


def test_one_gpu_has_no_bottleneck_and_neither_have_gpus_that_nothing_connects() -> None:
    lonely = TWO_PAIRS.replace("+ SYS[16.0] - CPU/0-1\n", "").replace("+ SYS[16.0] - CPU/0-0\n", "")
    machine = _machine(lonely)
    assert machine.bottleneck(_gpus(machine, 0)) is None
    assert machine.bottleneck(_gpus(machine, 0, 2)) is None
    assert _outwards(machine, _gpus(machine, 0)) is None  # no card on its socket
    assert _outwards(machine, _gpus(machine, 2)) is not None


def test_paths_are_those_that_nccl_prints() -> None:
    seen = block_of(SWITCHED)
    machine = Machine(seen)
    checked = 0
    for path in seen.paths:
        if path.start != path.end and path.kind != "PXN":
            found = machine.best_paths(path.start)[path.end]
            got = len(found.nodes) - 1, found.bytes_per_second, found.type
            assert got == (path.hops, path.bytes_per_second, path.kind)
            checked += 1
    assert checked == 4


@st.composite
def _machines(draw: st.DrawFn) -> Machine:
    """Up to five GPUs with random NVLinks, on up to two sockets."""
    size, sockets = draw(st.integers(2, 5)), draw(st.integers(1, 2))
    nodes = [TopologyNode(kind=NodeKind.CPU, system=0, local=number) for number in range(sockets)]
    links: list[TopologyLink] = []

    def connect(start: int, end: int, kind: LinkKind, rate: int) -> None:
        for one, other in ((start, end), (end, start)):
            links.append(TopologyLink(start=one, end=other, kind=kind, bytes_per_second=rate * 10**9))

    for number in range(size):
        nodes.append(TopologyNode(kind=NodeKind.GPU, system=0, local=number << 12, rank=number))
        connect(sockets + number, number % sockets, LinkKind.PCI, draw(st.sampled_from([12, 24])))
    if sockets == 2:
        connect(0, 1, LinkKind.SYS, draw(st.sampled_from([6, 16, 40])))
    for one, other in combinations(range(size), 2):
        rate = draw(st.sampled_from([0, 0, 20, 40]))
        if rate:
            connect(sockets + one, sockets + other, LinkKind.NVL, rate)
    return Machine(
        TopologySeen(origin=TopologyOrigin.LOG, host="n", pid=1, tid=1, line=1, nodes=tuple(nodes), links=tuple(links))
    )


@given(_machines())
def test_no_way_to_part_a_group_is_narrower(machine: Machine) -> None:
    """Against trying every set of nodes, over the links on the group's best paths."""
    gpus = machine.of_kind(NodeKind.GPU)
    used = {
        step
        for gpu in gpus
        for end, path in machine.best_paths(gpu, through=gpus).items()
        if end in gpus and end != gpu
        for step in zip(path.nodes[:-1], path.nodes[1:], strict=True)
    }
    rates = {(link.start, link.end): link.bytes_per_second for link in machine.seen.links}
    every = range(len(machine.nodes))
    cuts = [
        sum(rates[step] for step in used if step[0] in inside and step[1] not in inside)
        for inside in chain.from_iterable(combinations(every, size) for size in range(1, len(machine.nodes)))
        if 0 < len(set(inside) & set(gpus)) < len(gpus)
    ]
    found = machine.bottleneck(gpus)
    assert found is not None
    assert found.bytes_per_second == min(cuts)

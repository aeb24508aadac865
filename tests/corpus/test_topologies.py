"""System blocks, topology files and tuning tables of real logs, against what NCCL itself made of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ncclscope_agent.sources.nccl_log.reader import NcclLogReader
from ncclscope_agent.sources.topology_xml import read_topology_xml
from ncclscope_service.nccl.nccl_model import Group, choice
from ncclscope_service.nccl.topology import Machine
from ncclscope_wire.batch import Batch
from ncclscope_wire.records import Source, SourceKind
from ncclscope_wire.topology import LinkKind, NodeKind, TopologySeen, TuningTableSeen

pytestmark = pytest.mark.corpus

_GB = 1e9
_PCIE = "thomaslie210-n013/Internal_n013_GDR_On_Big/result_big_all_reduce_perf.txt"
_PAIR = "timez-zx-nccl-tests-a100pcie/nccl.log"
_PAIR_WITH_A_FAULT = "timez-zx-nccl-tests-a100pcie/nccl-fault.log"
_MESH = "surf-snellius-per-subsys/GRAPH.log"
_SWITCH = "abhivijay96-alltoall/alltoall_3_cuda_version.txt"
_RING = re.compile(rb"Pattern 4, crossNic \d, nChannels (\d+), (?:bw|speed) ([\d.]+)/([\d.]+), ")


def _batches(path: Path) -> Iterator[Batch]:
    reader = NcclLogReader(Source(kind=SourceKind.NCCL_LOG, name=path.name, key=path.name))
    yield from reader.ingest_bytes(path.read_bytes())
    yield from reader.finish()


def _blocks(corpus: Path, name: str) -> list[TopologySeen]:
    return [seen for batch in _batches(corpus / "nccl_logs" / name) for seen in batch.topologies]


def _tables(corpus: Path, name: str) -> list[TuningTableSeen]:
    return [seen for batch in _batches(corpus / "nccl_logs" / name) for seen in batch.tuning_tables]


def _ring_gbytes(corpus: Path, name: str) -> float:
    """What NCCL's search found: channels times bandwidth of the narrower of inside and outside."""
    found = _RING.search((corpus / "nccl_logs" / name).read_bytes())
    assert found is not None
    return int(found[1]) * min(float(found[2]), float(found[3]))


@pytest.mark.parametrize(
    ("name", "gbytes", "what"),
    [
        (_PCIE, 24.0, "PCI 24.0 GB/s between GPU 0-1000 and CPU 0-0"),
        (_PAIR, 240.0, "NVL 240.0 GB/s between GPU 0-17000 and GPU 0-65000"),
        (_PAIR_WITH_A_FAULT, 20.0, "NVL 20.0 GB/s between GPU 0-17000 and GPU 0-65000"),
        (_MESH, 370.8, "3 x NVL 123.6 GB/s of GPU 0-6000"),
        (_SWITCH, 252.0, "NVL 252.0 GB/s between GPU 0-27000 and NVS 0-0"),
    ],
)
def test_the_gpus_of_a_real_node_have_the_right_bottleneck(corpus: Path, name: str, gbytes: float, what: str) -> None:
    machine = Machine(_blocks(corpus, name)[0])
    found = machine.bottleneck(machine.of_kind(NodeKind.GPU))
    assert found is not None
    assert found.bytes_per_second == pytest.approx(gbytes * _GB)
    assert found.name == what


@pytest.mark.parametrize("name", [_PAIR, _PAIR_WITH_A_FAULT, _SWITCH])
def test_the_limit_inside_a_node_is_what_nccls_own_search_for_rings_found(corpus: Path, name: str) -> None:
    machine = Machine(_blocks(corpus, name)[0])
    found = machine.bottleneck(machine.of_kind(NodeKind.GPU))
    assert found is not None
    assert _ring_gbytes(corpus, name) == pytest.approx(found.bytes_per_second / _GB, rel=0.001)


def test_the_limit_over_pci_is_what_nccls_own_search_found(corpus: Path) -> None:
    name = "thomaslie210-n013/External_n013_n014_GDR_ON/result__all_reduce_perf.txt"
    machine = Machine(_blocks(corpus, name)[0])
    found = machine.bottleneck(machine.of_kind(NodeKind.GPU))
    assert found is not None
    assert _ring_gbytes(corpus, name) == found.bytes_per_second / _GB == 24


def test_the_limit_between_nodes_is_what_nccls_own_search_found(corpus: Path) -> None:
    """Four cards of 25 GB/s each; the search knows steps of bandwidth, and takes 24."""
    machine = Machine(_blocks(corpus, _MESH)[0])
    gpus = machine.of_kind(NodeKind.GPU)
    ports = machine.ports_of(gpus)
    found = machine.bottleneck_outwards(gpus, ports)
    assert found is not None
    assert found.bytes_per_second == 100 * _GB
    assert found.name == "4 x NET 25.0 GB/s of NIC 0-3000, NIC 0-23000, NIC 0-a3000, NIC 0-c3000"
    assert 0.9 < _ring_gbytes(corpus, _MESH) / 100 <= 1
    assert {machine.nodes[gpu].local: machine.nodes[port].local for gpu, port in ports.items()} == {
        0x6000: 2, 0x26000: 1, 0xA6000: 4, 0xC6000: 3,
    }  # fmt: skip
    one = machine.bottleneck_outwards(gpus[:1], ports)
    assert one is not None
    assert one.name == "NET 25.0 GB/s of NIC 0-3000"


def test_every_block_of_the_corpus_is_read_and_its_paths_are_nccls(corpus: Path) -> None:
    """Where one way is slower NCCL prints the way back, and PXN is a way of its own: both are left out."""
    blocks, paths = 0, 0
    for path in sorted((corpus / "nccl_logs").rglob("*")):
        if not path.is_file() or b"=== System : max" not in path.read_bytes():
            continue
        for batch in _batches(path):
            blocks += len(batch.topologies)
            paths += sum(map(_checked_paths, batch.topologies))
    assert blocks >= 35
    assert paths >= 150


def _checked_paths(seen: TopologySeen) -> int:
    machine = Machine(seen)
    gpus = machine.of_kind(NodeKind.GPU)
    rates = {(link.start, link.end): link.bytes_per_second for link in seen.links}
    if any(rates.get((end, start)) != rate for (start, end), rate in rates.items()):
        return 0
    checked = 0
    for path in seen.paths:
        if path.start != path.end and path.kind != "PXN":
            found = machine.best_paths(path.start, through=gpus)[path.end]
            got = len(found.nodes) - 1, found.bytes_per_second, found.type
            assert got == (path.hops, path.bytes_per_second, path.kind)
            checked += 1
    return checked


@pytest.mark.parametrize(
    ("file", "log"), [("nccl_topo_dump_normal.xml", _PAIR), ("nccl_topo_dump.xml", _PAIR_WITH_A_FAULT)]
)
def test_a_topology_file_gives_the_links_that_the_log_prints(corpus: Path, file: str, log: str) -> None:
    """The block is of a communicator inside the node, from which NCCL has taken the network ports."""

    def links(seen: TopologySeen) -> dict[tuple[str, str, LinkKind], int]:
        names = [f"{node.kind}{node.local:x}" for node in seen.nodes]
        return {
            (names[link.start], names[link.end], link.kind): link.bytes_per_second
            for link in seen.links
            if link.kind is not LinkKind.NET
        }

    data = (corpus / "nccl_logs" / "timez-zx-nccl-tests-a100pcie" / file).read_bytes()
    assert links(read_topology_xml(data)) == links(_blocks(corpus, log)[0])


def test_every_topology_file_of_the_corpus_is_read(corpus: Path) -> None:
    files = sorted((corpus / "nccl_logs").rglob("*.xml"))
    assert len(files) == 5
    for path in files:
        seen = read_topology_xml(path.read_bytes())
        machine = Machine(seen)
        assert machine.bottleneck(machine.of_kind(NodeKind.GPU)) is not None


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        (_SWITCH, 45),
        (_PAIR, 105),
        (_PAIR_WITH_A_FAULT, 105),
        ("surf-snellius-per-subsys/TUNING.log", 105),
        ("waynehacking8-nvls-collectives/scaling_attributed/g4_auto.log", 105),
    ],
)
def test_real_tuning_tables_are_read_in_every_layout(corpus: Path, name: str, cells: int) -> None:
    (table,) = _tables(corpus, name)
    assert len(table.cells) == cells


@pytest.mark.parametrize(
    ("name", "group"),
    [
        (_PAIR, Group(ranks=2, nodes=1, version=(2, 27))),
        ("waynehacking8-nvls-collectives/scaling_attributed/g4_auto.log", Group(ranks=4, nodes=1, version=(2, 27))),
        ("waynehacking8-nvls-collectives/scaling_attributed/g2_auto.log", Group(ranks=2, nodes=1, version=(2, 27))),
        ("surf-snellius-per-subsys/ALL.log", Group(ranks=8, nodes=2, version=(2, 27), channels=4)),
    ],
)
def test_the_model_chooses_what_the_tuning_lines_say_nccl_chose(corpus: Path, name: str, group: Group) -> None:
    path = corpus / "nccl_logs" / name
    (table,) = _tables(corpus, name)
    lines = set(re.findall(rb"AllReduce: (\d+) Bytes -> Algo (\w+) proto (\w+) ", path.read_bytes()))
    assert lines
    for message_bytes, algorithm, protocol in lines:
        found = choice(table.cells, "AllReduce", int(message_bytes), group)
        assert found is not None
        assert (found.algorithm, found.protocol) == (algorithm.decode(), protocol.decode()), message_bytes

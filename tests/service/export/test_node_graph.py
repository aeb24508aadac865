"""NCCL's graph of a node as a picture: where nodes stand, and which links carry the bytes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from emission_samples import small
from topology_samples import MESH, SWITCHED, TWO_PAIRS, block_of

from ncclscope.offline import run_offline
from ncclscope_service.export.report.node_graph import link_bytes, positions, topology_pictures
from ncclscope_service.export.report.page import write_report
from ncclscope_service.export.selection import select
from ncclscope_service.export.tables.traffic_file import measure_traffic
from ncclscope_service.nccl.topology import Machine
from ncclscope_service.store.settings import PipelineSettings
from ncclscope_simulator import write
from ncclscope_wire.topology import NodeKind

BLOCKS = {"two pairs": TWO_PAIRS, "switched": SWITCHED, "mesh": MESH}


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


def test_bytes_go_the_ways_that_nccl_takes() -> None:
    machine = Machine(block_of(TWO_PAIRS))
    gpus = dict(enumerate(machine.of_kind(NodeKind.GPU)))
    pair = link_bytes(machine, gpus, {(0, 1): 7})
    assert pair == {(gpus[0], gpus[1]): 7}, "over NVLink"
    across = {tuple(machine.label(node) for node in link): amount for link, amount in
              link_bytes(machine, gpus, {(1, 2): 5}).items()}  # fmt: skip
    assert across == {
        ("GPU 0-25000", "CPU 0-0"): 5, ("CPU 0-0", "CPU 0-1"): 5, ("CPU 0-1", "GPU 0-c1000"): 5
    }  # fmt: skip
    out = {tuple(machine.nodes[node].kind.value for node in link) for link in link_bytes(machine, gpus, {(2, 9): 3})}
    assert out == {("GPU", "CPU"), ("CPU", "NIC"), ("NIC", "NET")}
    into = {tuple(machine.nodes[node].kind.value for node in link) for link in link_bytes(machine, gpus, {(9, 2): 3})}
    assert into == {(end, start) for start, end in out}


def test_the_report_draws_the_node_with_ranks_and_traffic_and_the_rings(tmp_path: Path) -> None:
    write(small(tp=2, dp=2).config, tmp_path / "job")
    store = run_offline([tmp_path / "job" / "logs"], job="job", settings=PipelineSettings()).pipeline.store
    selection = select(store)
    (node, caption), (channels, told) = topology_pictures(selection, measure_traffic(selection))
    assert node.count("<rect") == 2 + 4 + 4 + 1, "CPUs, PCI switches, GPUs, NVSwitch"
    assert [f">rank {rank}<" in node for rank in range(5)] == [True] * 4 + [False]
    assert node.count('data-link="NVL"') == 4
    assert len(re.findall(r"NVL 370.8 GB/s between [^:]*NVS[^:]*: \S+ MiB one way", node)) == 4
    assert "NCCL's graph of node00" in caption
    assert "NVL 370.8, PCI 48, SYS 40" in caption
    assert all(f"{one} to {other}: " in channels for one, other in ((0, 1), (1, 2), (2, 3), (3, 0)))
    assert "(4 ranks), as NCCL printed them" in told
    write_report(selection, tmp_path / "report.html")
    assert "Topology</h2>" in (tmp_path / "report.html").read_text()

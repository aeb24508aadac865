"""NCCL's graph of a node as a picture of the report."""

from __future__ import annotations

import re
from pathlib import Path

from emission_samples import small
from service.printed_job import PrintedJob
from topology_samples import FUSED, TWO_PAIRS

from ncclscope.offline import run_offline
from ncclscope_service.export.report.node_graph import topology_pictures
from ncclscope_service.export.report.page import write_report
from ncclscope_service.export.selection import select
from ncclscope_service.export.tables.traffic_file import measure_traffic
from ncclscope_service.store.settings import PipelineSettings
from ncclscope_simulator import write


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


def test_the_report_says_what_it_does_not_draw() -> None:
    job = PrintedJob()
    job.communicator(1, [("node01", 0), ("node02", 0)], blocks={"node01": FUSED, "node02": FUSED})
    job.communicator(2, [("node<3>", 0), ("node<3>", 1)])
    job.communicator(9, [("node01", 0), ("node02", 0), ("node<3>", 0), ("node<3>", 1)])
    job.operation(1, ("node01", 0), 2)
    selection = select(job.store())
    ((node, caption),) = topology_pictures(selection, measure_traffic(selection))
    assert "NCCL's graph of node01, node02, which multi-node NVLink joins" in caption
    assert "Not recorded: the graph of node&lt;3&gt;." in caption
    assert ">rank 0<" in node
    assert ">rank 1<" in node
    assert "<title>GPU 1-1000 of node02</title>" in node


def test_the_report_names_ranks_whose_gpu_is_not_known() -> None:
    job = PrintedJob()
    places = [("node01", device) for device in range(4)]
    job.communicator(1, places, blocks={"node01": TWO_PAIRS.replace("e1000", "f1000")})
    job.operation(1, places[0], 4)
    selection = select(job.store())
    ((_, caption),) = topology_pictures(selection, measure_traffic(selection))
    assert "Left out, with their bytes: ranks of which no line says which of these GPUs is theirs (3)." in caption
    assert "1.5 MiB on the busiest link" in caption

"""A group that spans all hosts is slow: the counters of one of them say which link it is (simulated job)."""

from __future__ import annotations

from pathlib import Path

from agent.machine_samples import write_nic
from service.simulated_batches import simulated_batches

from ncclscope_agent.node.machine_port import MachineFollower
from ncclscope_service.pipeline import Pipeline
from ncclscope_service.store.records import FindingKind
from ncclscope_simulator import SimulationConfig
from ncclscope_simulator.faults import parse_faults

SECOND = 1_000_000_000
JOB = SimulationConfig(
    nodes=2, gpus=4, tp=1, pp=1, dp=8, fsdp=True, iterations=24, chunk_seconds=1.0,
    faults=parse_faults(["slow_link:node=1,factor=0.5,from=10"]),
)  # fmt: skip


def test_a_slow_link_in_a_job_of_one_group_is_located_by_counters(tmp_path: Path) -> None:
    batches = simulated_batches(JOB, tmp_path / "job", portions=4)
    times = [int(stamp) for batch in batches for stamp in batch.operations["logged_at_ns"] if stamp > 0]
    found = {}
    for has_counters in (False, True):
        pipeline = Pipeline()
        for batch in batches:
            pipeline.ingest_batch(batch, agent="agent", session="session", job="job")
        for node in (0, 1) if has_counters else ():
            port = write_nic(sys := tmp_path / f"sys{node}", "mlx5_2")
            follower = MachineFollower(f"node{node:02}", sys=sys, nvml=lambda: None)
            for look, rate in enumerate(
                ("400 Gb/sec (4X NDR)", "200 Gb/sec (2X NDR)" if node else "400 Gb/sec (4X NDR)")
            ):
                (port / "rate").write_text(rate)
                for batch in follower.poll(min(times) + look * 5 * SECOND):
                    pipeline.ingest_batch(batch, agent=f"node{node}", session=f"node{node}", job="job")
        pipeline.finish(max(times) + SECOND)
        found[has_counters] = {finding.kind: finding for finding in pipeline.store.findings}
    assert found[False][FindingKind.BELOW_LIMIT].hosts == ()
    below = found[True][FindingKind.BELOW_LIMIT]
    assert below.evidence["host_by_counters"] == "node01"
    assert "; counters point at node01: mlx5_2 port 1 of node01 runs at 2x instead of 4x since" in below.summary
    assert found[True][FindingKind.REPORTED_FAILURE].hosts == ("node01",)

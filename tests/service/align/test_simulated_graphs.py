"""Jobs with CUDA graphs, in portions and recorded long after their capture."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from service.simulated_batches import SECOND_NS, advanced, export_batches, log_batches, simulated_batches

from ncclscope_service.align.graph_replays import UNKNOWN_REPLAY
from ncclscope_service.export.directory import write_trace
from ncclscope_service.export.selection import select
from ncclscope_service.pipeline import Pipeline
from ncclscope_service.store.rows import Match
from ncclscope_service.store.settings import PipelineSettings
from ncclscope_simulator import SimulationConfig, write
from ncclscope_wire.batch import Batch
from ncclscope_wire.terms import NO_NUMBER

_JOB = SimulationConfig(
    iterations=6, nodes=2, gpus=2, tp=2, pp=1, dp=2, cuda_graphs=2, cuda_graph_trace="node", chunk_seconds=0.5
)


@pytest.mark.parametrize("is_restarted", [False, True])
def test_what_was_captured_an_hour_before_is_still_known(is_restarted: bool, tmp_path: Path) -> None:
    write(_JOB, tmp_path)
    pipeline = Pipeline(PipelineSettings())
    logs = list(chain.from_iterable(log_batches(tmp_path, portions=2)))
    advanced(pipeline, logs)
    for second in range(len(logs), 3_600, 60):
        pipeline.process_backlog(second * SECOND_NS)
        pipeline.evict(pipeline.evictable(second * SECOND_NS), second * SECOND_NS)
    assert len(pipeline.store.operations) == 0
    if is_restarted:
        pipeline = Pipeline.restore(pipeline.snapshot())
    late = [_without_the_beginning(list(host)) for host in export_batches(tmp_path)]
    advanced(pipeline, list(chain.from_iterable(late)), since=3_600)
    pipeline.finish(3_700 * SECOND_NS)
    known = pipeline.store
    assert known.skipped[UNKNOWN_REPLAY] == 0
    in_graphs = known.kernels.rows["graph_node_id"] != NO_NUMBER
    assert (known.kernels.rows["launch"][in_graphs] != NO_NUMBER).all()
    replays = known.replays.rows
    assert set(replays["match"].tolist()) == {Match.MATCHED}
    assert np.isfinite(replays["busbw"]).mean() > 0.9


def _without_the_beginning(batches: list[Batch]) -> list[Batch]:
    """Only kernels of graphs, as in a recording that began when everything was captured."""
    return [replace(batch, kernels=batch.kernels[batch.kernels["graph_node_id"] != NO_NUMBER]) for batch in batches]


def test_each_replay_has_its_own_measures_in_the_trace(tmp_path: Path) -> None:
    one_node = replace(_JOB, nodes=1, gpus=2, dp=1)
    batches = simulated_batches(one_node, tmp_path / "job", portions=1)
    pipeline = advanced(Pipeline(), batches)
    pipeline.finish((len(batches) + 1) * SECOND_NS)
    known = pipeline.store
    write_trace(select(known), tmp_path / "trace.json.gz")
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    drawn = {
        (event["args"]["correlation_id"], event["args"]["replay"], event["args"]["transfer_us"])
        for event in events
        if event.get("args", {}).get("replay") and "transfer_us" in event["args"]
    }
    rows = known.replays.rows[(known.replays.rows["replay"] > 0) & (known.replays.rows["transfer_ns"] >= 0)]
    correlations = known.kernels.take(rows["kernel"])["correlation_id"].tolist()
    transfers = (rows["transfer_ns"] / 1000).tolist()
    assert drawn == set(zip(correlations, rows["replay"].tolist(), transfers, strict=True))
    assert {replay for _, replay, _ in drawn} == {1, 2, 3}

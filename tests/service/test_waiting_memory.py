"""An operation that waits for its capture takes memory for what its log line says, not for what is measured later."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from service.simulated_batches import simulated_batches

from ncclscope_service.pipeline import Pipeline
from ncclscope_service.rollup.window import recent_operations
from ncclscope_service.store.rows import Match
from ncclscope_simulator import SimulationConfig

_MOST_BYTES = 80
"""In the table; the stages' own lists of what waits take a quarter of that."""


def test_a_waiting_operation_takes_at_most_80_bytes(tmp_path: Path) -> None:
    config = SimulationConfig(iterations=12, nodes=1, gpus=4, tp=2, pp=2, dp=1, capture="none")
    pipeline = Pipeline()
    for number, batch in enumerate(simulated_batches(config, tmp_path, portions=4)):
        pipeline.ingest_batch(replace(batch, observed_at_ns=number), agent="a", session="s", job="j")
        pipeline.process_backlog(number)
        pipeline.evict(pipeline.evictable(number), number)
    recent_operations(pipeline.store)
    pipeline.snapshot()
    table = pipeline.store.operations
    assert len(table) > 1000
    assert (table.rows["match"] == Match.PENDING).all()
    assert table.used_bytes / len(table) <= _MOST_BYTES

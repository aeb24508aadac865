"""Sends and Recvs within a host are measured though its clock is not known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from service.simulated_batches import SECOND_NS, export_batches, simulated_batches

from ncclscope_service.pipeline import Pipeline
from ncclscope_simulator import SimulationConfig
from ncclscope_wire.batch import Batch
from ncclscope_wire.records import SourceKind
from ncclscope_wire.terms import NO_TIME_NS, OPERATION_CODES

_JOB = SimulationConfig(iterations=4, nodes=2, gpus=2, tp=1, pp=4, dp=1, timestamps=False)


def test_sends_and_recvs_within_a_host_need_no_other_clock(tmp_path: Path) -> None:
    batches = simulated_batches(_JOB, tmp_path, portions=1)
    logs = [batch for batch in batches if batch.source.kind is SourceKind.NCCL_LOG]
    first, second = (list(exports) for exports in export_batches(tmp_path))
    on_reference = _measured([*logs, *first, *second], is_known=True)
    alone = _measured([*logs, *second], is_known=False)
    assert len(on_reference) == 192
    assert len(alone) == 64, "between the two ranks of the second host, whose clock nothing tells"
    assert alone == {key: on_reference[key] for key in alone}


def _measured(batches: list[Batch], *, is_known: bool) -> dict[tuple[int, int], tuple[int, int]]:
    """Transfer and wait of Sends and Recvs that were measured, by process and line; `is_known`: all clocks are."""
    pipeline = Pipeline()
    for batch in batches:
        pipeline.ingest_batch(batch, agent="a", session="s", job="j")
    pipeline.finish(SECOND_NS)
    rows = pipeline.store.operations.rows.copy()
    ops = pipeline.store.templates_of(rows, "op")["op"]
    is_measured = np.isin(ops, [OPERATION_CODES["Send"], OPERATION_CODES["Recv"]]) & (rows["transfer_ns"] >= 0)
    rows = rows[is_measured]
    assert ((rows["start_true_ns"] != NO_TIME_NS) == is_known).all()
    launches = pipeline.store.collectives.rows.copy()
    assert ((launches["end_true_ns"] != NO_TIME_NS)[launches["rank"] >= 0] == is_known).all()
    names = ("process", "line", "transfer_ns", "wait_ns")
    return {row[:2]: row[2:] for row in zip(*(rows[name].tolist() for name in names), strict=True)}

"""`expected_times.parquet`: transfers by communicator, operation and size, beside what they should take.

`calibration.json`: the same transfers by shape, and the mean step, for other runs.
"""

# pyright: reportUnknownParameterType=false
# (pyarrow carries no types)
from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa

from ncclscope_models.calibration import Calibration, ObservedStep, document_of
from ncclscope_service.export.selection import Selection
from ncclscope_service.export.summary import mean_steps
from ncclscope_service.export.tables import schema
from ncclscope_service.export.tables.operations_file import write_slices
from ncclscope_service.export.totals import Totals, collective_rows, op_name
from ncclscope_service.job.iterations import summarise
from ncclscope_service.job.ranks import host_of_ranks
from ncclscope_service.job.step_budget import MeanStep
from ncclscope_service.job.utilization import gpu_of
from ncclscope_service.measure.expected_times import observed_transfers


def write_expected_times(selection: Selection, path: Path, sums: Totals) -> None:
    """Writes the file; it has no rows if no transfer was measured."""
    store = selection.store
    records: list[dict[str, object]] = []
    for each in observed_transfers(collective_rows(selection)):
        communicator = store.communicators[each.communicator]
        expected = sums.estimators[communicator.job].expected(communicator, each.op, each.message_bytes)
        typical = None if expected is None else expected.typical_ns
        records.append(
            {
                "job": communicator.job,
                "comm_id": communicator.comm_id,
                "parallelism": communicator.parallelism,
                "op": op_name(each.op),
                "message_bytes": each.message_bytes,
                "transfers": each.samples,
                "transfer_low_ns": each.low_ns,
                "transfer_ns": each.typical_ns,
                "transfer_high_ns": each.high_ns,
                "expected_low_ns": None if expected is None else expected.low_ns,
                "expected_ns": typical,
                "expected_high_ns": None if expected is None else expected.high_ns,
                "basis": None if expected is None else expected.basis,
                "source": None if expected is None else expected.source,
                "samples": None if expected is None else expected.samples,
                "distance_ratio": None if expected is None else expected.distance,
                "over_expected_ratio": None if typical is None else each.typical_ns / typical,
                "latency_ratio": None if expected is None else expected.latency_share,
            }
        )
    table = pa.Table.from_pylist(records, schema=schema.EXPECTED_TIMES)
    write_slices([table], schema.EXPECTED_TIMES, path)


def calibration_document(selection: Selection, sums: Totals) -> dict[str, object]:
    """What the run has shown of its machine, by job."""
    steps = {step.job: step for step in mean_steps(selection, sums)}
    return document_of([_calibration(selection, sums, job, steps.get(job)) for job in selection.jobs])


def _network_cards(selection: Selection, job: str, hosts: set[str]) -> int | None:
    """Of a node of a job; None where nodes differ, or no log says it."""
    found = {len(names) for (of, host), names in selection.store.network_devices.items() if of == job and host in hosts}
    return found.pop() if len(found) == 1 else None


def _calibration(selection: Selection, sums: Totals, job: str, step: MeanStep | None) -> Calibration:
    hosts = host_of_ranks(selection.store).get(job, {})
    on_hosts = set(Counter(hosts.values()).values())
    job_of = np.asarray(selection.store.process_job, dtype=object)
    median = summarise(sums.iterations[job_of[sums.iterations["process"]] == job]).median_ns
    described, plan = selection.store.description, selection.store.plans.get(job)
    is_sure = described is not None and plan is not None and not plan.unexplained_operations
    return Calibration(
        job=job,
        ranks=len(hosts),
        ranks_per_node=on_hosts.pop() if len(on_hosts) == 1 else None,
        times=sums.estimators[job].own,
        step=None
        if step is None
        else ObservedStep(
            steps=step.steps,
            mean_ns=round(step.mean_ns),
            parts={(each.part, each.parallelism): round(each.mean_ns) for each in step.parts},
        ),
        median_step_ns=None if median is None else round(median),
        gpu=gpu_of(selection.store, job),
        network_cards=_network_cards(selection, job, set(hosts.values())),
        description={name: given.value for name, given in described.fields.items()} if described and is_sure else None,
    )

"""What is said of a job's transfers that are bound by latency, and of which nothing is said."""

from __future__ import annotations

import numpy as np
from service.export.small_run import Builder

from ncclscope_service.measure.latency_advice import advice_text, latency_advice
from ncclscope_service.store.rows import COLLECTIVE
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import ALGORITHMS, OPERATION_CODES

ALPHA_NS, BYTES_PER_NS = 50_000, 10
RANKS = 8


def job(algorithm: str | None) -> tuple[Store, Columns]:
    """A tensor parallel group of eight whose AllReduces take 50 us and their bytes, of six sizes, 25 times each."""
    build = Builder()
    processes = [build.process("node01", pid) for pid in range(RANKS)]
    group = build.communicator("0xaa", RANKS, "TP")
    members = [build.member(group, process, rank, rank, rank) for rank, process in enumerate(processes)]
    template = build.operation_template(processes[0], "AllReduce")
    sizes = [1 << power for power in (12, 14, 16, 18, 20, 22)]
    rows = np.zeros(25 * len(sizes), COLLECTIVE)
    rows["communicator"], rows["op"] = group, OPERATION_CODES["AllReduce"]
    rows["message_bytes"] = np.repeat(sizes, 25)
    rows["transfer_ns"] = ALPHA_NS + rows["message_bytes"] // BYTES_PER_NS
    rows["busbw"] = rows["message_bytes"] / rows["transfer_ns"] * 1e9
    if algorithm is not None:
        for size in sizes:
            build.operation(template, members[0], message_bytes=size, algorithm=ALGORITHMS.index(algorithm))
    return build.store, rows


def test_the_transfers_that_cost_most_are_named_with_what_ran_and_what_to_try() -> None:
    store, rows = job("RING")
    found = latency_advice(store, "job", rows)
    assert {each.message_bytes for each in found} == {1 << 12, 1 << 14, 1 << 16}
    assert all(each.latency_ratio > 0.5 for each in found)
    text = advice_text(found[0])
    assert text.startswith("AllReduce of 16,384 bytes in TP of 8 ranks on 1 node as RING: ")
    assert "do not come from its bytes; a tree would take " in text
    assert text.endswith("by the cost model of the algorithms): NCCL_ALGO=Tree")


def test_of_what_runs_as_a_tree_and_of_another_job_nothing_is_said() -> None:
    store, rows = job("TREE")
    assert latency_advice(store, "job", rows) == []
    assert latency_advice(*job(None)[:1], "other", rows) == []

"""Where operations have told nothing of clocks yet, what agents and kernels say of them stands, or nothing does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from service.simulated_batches import simulated_batches

from ncclscope_service.clock.estimator import ClockEstimator
from ncclscope_service.clock.host_clocks import LEAST_SIGMA_NS, ClockPrior, clocks_by_prior
from ncclscope_service.pipeline import Pipeline
from ncclscope_service.store.rows import Match
from ncclscope_simulator import SimulationConfig
from ncclscope_wire.terms import NO_TIME_NS, OPERATION_CODES

MILLISECOND = 1_000_000


def heard(offset_ns: int | None, error_ns: int | None = None) -> ClockPrior:
    return ClockPrior(heartbeat_offset_ns=offset_ns, error_ns=error_ns)


def test_offsets_of_heartbeats_are_compared_with_the_reference() -> None:
    clocks = clocks_by_prior({"a": heard(-200_000), "b": heard(29_800_000)}, "a", 7)
    assert list(clocks) == ["b"]
    assert clocks["b"].offset_ns == 30 * MILLISECOND
    assert clocks["b"].sigma_ns == LEAST_SIGMA_NS
    assert clocks["b"].told_by == "prior"
    assert clocks["b"].interval_lo_ns is None


def test_clocks_that_daemons_keep_agree_within_both_errors() -> None:
    clocks = clocks_by_prior({"a": heard(0, 2 * MILLISECOND), "b": heard(9 * MILLISECOND, 3 * MILLISECOND)}, "a", 7)
    assert clocks["b"].offset_ns == 0
    assert clocks["b"].sigma_ns == 5 * MILLISECOND


def test_a_daemon_that_promises_much_is_not_believed_below_a_millisecond() -> None:
    clocks = clocks_by_prior({"a": heard(None, 100), "b": heard(None, 100)}, "a", 7)
    assert clocks["b"].sigma_ns == LEAST_SIGMA_NS


def test_a_host_that_said_nothing_has_no_clock() -> None:
    assert clocks_by_prior({"a": heard(0), "b": heard(None)}, "a", 7) == {}
    assert clocks_by_prior({"b": heard(0)}, "a", 7) == {}


JOB = SimulationConfig(nodes=2, gpus=2, tp=4, pp=1, dp=1, sequence_parallel=False, iterations=2)
"""One tensor-parallel group over two hosts: AllReduces and Broadcasts."""


class Unknowing(ClockEstimator):
    def add(
        self,
        hosts: Sequence[int],
        starts_ns: NDArray[np.int64],
        ends_ns: NDArray[np.int64],
        transfer_ns: NDArray[np.int64],
    ) -> None:
        """Learns nothing."""


def measured(pipeline: Pipeline, folder: Path) -> dict[str, tuple[int, int]]:
    """By operation: how many rows have a kernel, and of those a transfer."""
    for batch in simulated_batches(JOB, folder, portions=1):
        pipeline.ingest_batch(batch, agent="a", session="s", job="j")
    pipeline.finish(JOB.start_ns)
    rows = pipeline.store.operations.rows
    ops = pipeline.store.templates_of(rows, "op")["op"]
    found: dict[str, tuple[int, int]] = {}
    for name in ("AllReduce", "Broadcast"):
        mine = rows[(ops == OPERATION_CODES[name]) & (rows["match"] == Match.MATCHED)]
        found[name] = len(mine), int(np.count_nonzero(mine["transfer_ns"] != NO_TIME_NS))
    return found


def test_with_estimated_clocks_both_are_measured(tmp_path: Path) -> None:
    found = measured(Pipeline(), tmp_path)
    assert found["AllReduce"][0] == found["AllReduce"][1] > 0
    assert found["Broadcast"][1] > 0.9 * found["Broadcast"][0] > 0


def test_without_clocks_a_broadcast_over_hosts_has_no_transfer_and_nobody_was_last(tmp_path: Path) -> None:
    pipeline = Pipeline(make_estimator=Unknowing)
    found = measured(pipeline, tmp_path)
    assert found["AllReduce"][0] == found["AllReduce"][1] > 0
    assert found["Broadcast"][1] == 0
    codes = pipeline.store.collectives.rows["op"].tolist()
    assert OPERATION_CODES["Broadcast"] not in codes


def test_what_hosts_say_of_their_clocks_measures_nothing_across_them(tmp_path: Path) -> None:
    pipeline = Pipeline(make_estimator=Unknowing)
    said = {name: ClockPrior(heartbeat_offset_ns=0, error_ns=1_000) for name in ("node00", "node01")}
    pipeline.set_clock_priors(said)
    found = measured(pipeline, tmp_path)
    assert {clock.told_by for clock in pipeline.store.clocks["j"].hosts.values()} == {"prior", "collectives"}
    assert found["AllReduce"][0] == found["AllReduce"][1] > 0
    assert found["Broadcast"][1] == 0

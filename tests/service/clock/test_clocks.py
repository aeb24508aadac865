"""Clocks of hosts are learnt from the collectives that their ranks share, and times put on the reference."""

from __future__ import annotations

import numpy as np
import pytest
from service.log_batches import BASE_NS, PERIOD_NS, rank_batches

from ncclscope_service.clock.host_clocks import ClockPrior, Clocks
from ncclscope_service.columns.table import Ids
from ncclscope_service.join.ranks import JoinedCollectives, KernelMatrix
from ncclscope_service.measure.limits import Limits
from ncclscope_service.measure.measured_rows import Measuring
from ncclscope_service.pipeline import Pipeline
from ncclscope_service.store.rows import SAME_HOST_SIGMA_NS
from ncclscope_service.store.tables import Hosts, Store
from ncclscope_wire.terms import NO_TIME_NS

_AMOUNT = 200
_AHEAD_NS = 5_000_000_000
_SECOND = 1_000_000_000


class _Service:
    """Two ranks, aligned; `behind` hosts the second, whose clock is ahead by five seconds."""

    def __init__(self, *, first: str = "node1", second: str = "node2", counts: dict[int, int] | None = None) -> None:
        pipeline = Pipeline()
        for rank, host in enumerate((first, second)):
            offset_ns = _AHEAD_NS if host == second != first else 0
            batches = rank_batches(
                rank, range(_AMOUNT), host=host, pid=10 + rank, offset_ns=offset_ns, late_ns=30_000 * rank,
                counts=counts if rank else None,
            )  # fmt: skip
            for batch in batches:
                pipeline.ingest_batch(batch, agent=host, session=str(rank), job="j")
        pipeline.finish(0)
        self.store: Store = pipeline.store
        self.store.clocks = {}
        for name in ("start_true_ns", "end_true_ns", "clock_uncertainty_ns"):
            self.store.operations.rows[name] = NO_TIME_NS
        self.hosts = Hosts(self.store)
        self.clocks = Clocks(self.store, self.hosts)

    @property
    def ids(self) -> Ids:
        return np.arange(2 * _AMOUNT)

    def kernels(self, *, first: int = 0) -> KernelMatrix:
        joined = JoinedCollectives(
            communicator=np.zeros(_AMOUNT - first, np.int64),
            coll_seq=np.arange(first, _AMOUNT),
            operations=np.stack([np.arange(first, _AMOUNT), _AMOUNT + np.arange(first, _AMOUNT)], axis=1),
        )
        return Measuring(self.store, self.hosts, Limits(self.store)).gather(joined)


def test_the_offset_of_a_host_is_found_and_its_times_corrected() -> None:
    service = _Service()
    service.clocks.learn(service.kernels())
    service.clocks.estimate(0)
    assert service.store.clocks["j"].reference == "node1"
    assert service.store.clocks["j"].hosts["node1"].offset_ns == 0.0
    assert service.store.clocks["j"].hosts["node2"].samples > 0
    service.clocks.correct(service.ids)
    table = service.store.operations.rows
    ends = table["end_true_ns"]
    assert ends[:_AMOUNT].tolist() == [BASE_NS + k * PERIOD_NS + 200_000 for k in range(_AMOUNT)]
    assert np.abs(ends[_AMOUNT:] - ends[:_AMOUNT]).max() < 1_000
    assert np.abs(table["start_true_ns"][_AMOUNT:] - table["start_true_ns"][:_AMOUNT] - 30_000).max() < 1_000
    assert set(table["clock_uncertainty_ns"][:_AMOUNT].tolist()) == {round(SAME_HOST_SIGMA_NS)}
    assert service.clocks.is_trusted("j")
    assert service.store.clocks["j"].violation_ratio == 0.0


def test_a_host_that_shares_nothing_keeps_its_times_unknown() -> None:
    service = _Service()
    service.clocks.estimate(0)
    service.clocks.correct(service.ids)
    table = service.store.operations.rows
    assert sorted(service.store.clocks["j"].hosts) == ["node1"]
    assert (table["end_true_ns"][:_AMOUNT] == table["end_ns"][:_AMOUNT]).all()
    assert (table["end_true_ns"][_AMOUNT:] == NO_TIME_NS).all()
    assert service.clocks.sigma_ns().tolist() == [SAME_HOST_SIGMA_NS, np.inf]


def test_the_reference_is_the_host_of_rank_0_and_else_the_first_by_name() -> None:
    service = _Service(first="zeta", second="alpha")
    service.clocks.estimate(0)
    assert service.store.clocks["j"].reference == "zeta"
    for member in service.store.members:
        member.global_rank_is_inferred = True
    service.clocks.estimate(0, final=True)
    assert service.store.clocks["j"].reference == "alpha"


def test_an_estimate_is_renewed_at_most_once_a_second() -> None:
    service = _Service()
    service.clocks.estimate(0)
    service.clocks.learn(service.kernels())
    service.clocks.estimate(_SECOND - 1)
    assert "node2" not in service.store.clocks["j"].hosts
    service.clocks.estimate(_SECOND)
    assert "node2" in service.store.clocks["j"].hosts


def test_at_the_end_an_estimate_is_renewed_at_any_time() -> None:
    service = _Service()
    service.clocks.estimate(0)
    service.clocks.learn(service.kernels())
    service.clocks.estimate(1, final=True)
    assert "node2" in service.store.clocks["j"].hosts


def test_collectives_in_which_ranks_disagree_say_nothing_of_clocks() -> None:
    service = _Service(counts=dict.fromkeys(range(_AMOUNT), 77))
    service.clocks.learn(service.kernels())
    service.clocks.estimate(0)
    assert sorted(service.store.clocks["j"].hosts) == ["node1"]


def test_kernels_of_one_host_that_do_not_overlap_say_nothing_of_clocks() -> None:
    service = _Service(second="node1")
    service.store.operations.rows["start_ns"][_AMOUNT:] += 500_000
    service.store.operations.rows["end_ns"][_AMOUNT:] += 500_000
    service.clocks.learn(service.kernels())
    service.clocks.estimate(0)
    assert service.store.clocks["j"].hosts["node1"].samples == 0


def test_kernels_that_a_capture_cut_say_nothing_of_clocks() -> None:
    service = _Service()
    service.store.operations.rows["censored"][_AMOUNT:] = True
    service.clocks.learn(service.kernels())
    service.clocks.estimate(0)
    assert sorted(service.store.clocks["j"].hosts) == ["node1"]


def test_before_anything_was_seen_nothing_is_claimed() -> None:
    store = Store()
    clocks = Clocks(store, Hosts(store))
    clocks.estimate(0)
    assert clocks.check("j") is None
    assert store.clocks == {}
    assert clocks.sigma_ns().tolist() == [np.inf]
    assert clocks.is_trusted("j")


def test_clocks_that_contradict_what_was_seen_are_not_trusted() -> None:
    service = _Service()
    service.clocks.learn(service.kernels())
    disagreeing = service.kernels()
    disagreeing.end_ns[:, 1] += 400_000
    disagreeing.start_ns[:, 1] += 400_000
    service.clocks.learn(disagreeing)
    service.clocks.estimate(0)
    assert not service.clocks.is_trusted("j")
    assert (service.store.clocks["j"].violation_ratio or 0) > 0.1
    assert not service.store.clocks["j"].are_trusted
    assert np.isinf(service.clocks.sigma_ns()).all()


def test_collectives_that_are_each_off_by_another_time_were_joined_wrongly_and_doubt_no_clock() -> None:
    service = _Service()
    service.clocks.learn(service.kernels())
    slipped = service.kernels()
    slipped.end_ns[:, 1] += np.where(np.arange(_AMOUNT) % 2, 400_000, -400_000)
    slipped.start_ns[:, 1] += np.where(np.arange(_AMOUNT) % 2, 400_000, -400_000)
    service.clocks.learn(slipped)
    service.clocks.estimate(0)
    check = service.clocks.check("j")
    assert check is not None
    assert (check.violations, check.misjoined) == (0, _AMOUNT)
    assert service.clocks.is_trusted("j")


@pytest.mark.parametrize("cut", [1, 150])
def test_later_collectives_improve_an_estimate(cut: int) -> None:
    service = _Service()
    service.clocks.learn(service.kernels(first=cut))
    service.clocks.estimate(0)
    few = service.store.clocks["j"].hosts["node2"].samples
    service.clocks.learn(service.kernels())
    service.clocks.estimate(_SECOND)
    assert service.store.clocks["j"].hosts["node2"].samples >= few


def test_a_young_clock_rejects_what_is_a_step_apart_and_nothing_if_it_is_contradicted() -> None:
    service = _Service()
    service.clocks.learn(service.kernels(first=_AMOUNT - 60))
    service.clocks.estimate(0)
    assert service.clocks.joining_slack_ns()[1] == 4_000_000
    disagreeing = service.kernels()
    disagreeing.end_ns[:, 1] += 400_000
    disagreeing.start_ns[:, 1] += 400_000
    service.clocks.learn(disagreeing)
    service.clocks.estimate(2 * _SECOND)
    assert not service.clocks.is_trusted("j")
    assert np.isinf(service.clocks.joining_slack_ns()[1])


def test_what_a_host_says_of_its_clock_stands_until_collectives_tell() -> None:
    service = _Service()
    said = {
        "node1": ClockPrior(heartbeat_offset_ns=0, error_ns=None),
        "node2": ClockPrior(heartbeat_offset_ns=_AHEAD_NS + 300_000, error_ns=None),
    }
    service.clocks.believe(said)
    service.clocks.estimate(0)
    assert service.store.clocks["j"].hosts["node2"].told_by == "prior"
    assert service.store.clocks["j"].hosts["node2"].offset_ns == _AHEAD_NS + 300_000
    assert np.isinf(service.clocks.joining_slack_ns()[1])
    service.clocks.learn(service.kernels())
    service.clocks.estimate(2 * _SECOND)
    assert service.store.clocks["j"].hosts["node2"].told_by == "collectives"
    assert abs(service.store.clocks["j"].hosts["node2"].offset_ns - _AHEAD_NS) < 10_000


def test_each_job_has_clocks_of_its_own() -> None:
    """Operations tie hosts of one job only: two jobs on other hosts, and a third on one host of either."""
    pipeline, hosts_of = Pipeline(), {"a": ("n1", "n2"), "b": ("n3", "n4"), "c": ("n1", "n4")}
    for number, (job, hosts) in enumerate(hosts_of.items()):
        for rank, host in enumerate(hosts):
            pid, ahead_ns = 10 * number + rank, _AHEAD_NS * rank
            for batch in rank_batches(rank, range(_AMOUNT), host=host, pid=pid, offset_ns=ahead_ns):
                pipeline.ingest_batch(batch, agent=host, session=f"{job}{rank}", job=job)
    pipeline.finish(0)
    store = pipeline.store
    assert {job: clocks.reference for job, clocks in store.clocks.items()} == {"a": "n1", "b": "n3", "c": "n1"}
    jobs = np.asarray(store.process_job)[store.operations.rows["process"]]
    for job, (_, ahead) in hosts_of.items():
        clock = store.clocks[job].hosts[ahead]
        assert (clock.told_by, round(clock.offset_ns, -4)) == ("collectives", _AHEAD_NS)
        waits = store.operations.rows["wait_ns"][jobs == job]
        assert len(waits) == (waits != NO_TIME_NS).sum() == 2 * _AMOUNT

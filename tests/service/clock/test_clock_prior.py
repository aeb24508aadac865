"""What agents and kernels say of clocks stands until operations tell."""

from __future__ import annotations

from ncclscope_service.clock.host_clocks import LEAST_SIGMA_NS, ClockPrior, clocks_by_prior

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

"""What is believed of a host's clock before any operation tells: what its agent and its kernel say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ncclscope_service.rows import HostClock

LEAST_SIGMA_NS: Final = 1_000_000.0
"""Nothing is believed to less than a millisecond that no operation has confirmed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockPrior:
    """What one host says."""

    heartbeat_offset_ns: int | None
    """Agent's minus service's wall clock, less the shortest way of a heartbeat; None before one."""
    error_ns: int | None
    """How far it may be off UTC, by the kernel; None where no daemon keeps the clock."""


def clock_by_prior(host: ClockPrior, reference: ClockPrior, at_ns: int) -> HostClock | None:
    """The clock of a host against that of the reference; None where nothing ties them.

    Two clocks that daemons keep agree within both errors. Else the difference of two heartbeats' offsets is taken,
    in which what their ways have in common cancels; its error is not known, so a millisecond is the least it is given.
    """
    if host.error_ns is not None and reference.error_ns is not None:
        return _clock(0.0, float(host.error_ns + reference.error_ns), at_ns)
    if host.heartbeat_offset_ns is None or reference.heartbeat_offset_ns is None:
        return None
    return _clock(float(host.heartbeat_offset_ns - reference.heartbeat_offset_ns), 0.0, at_ns)


def clocks_by_prior(priors: Mapping[str, ClockPrior], reference: str, at_ns: int) -> dict[str, HostClock]:
    """The same for every host but the reference, by name."""
    own = priors.get(reference)
    if own is None:
        return {}
    found = {host: clock_by_prior(prior, own, at_ns) for host, prior in priors.items() if host != reference}
    return {host: clock for host, clock in found.items() if clock is not None}


def _clock(offset_ns: float, sigma_ns: float, at_ns: int) -> HostClock:
    return HostClock(
        offset_ns=offset_ns,
        drift_ppm=0.0,
        at_ns=at_ns,
        sigma_ns=max(sigma_ns, LEAST_SIGMA_NS),
        interval_lo_ns=None,
        interval_hi_ns=None,
        samples=0,
        told_by="prior",
    )

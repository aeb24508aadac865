"""`clocks.json`: each host's clock against the reference clock."""

from __future__ import annotations

from typing import Final

from ncclscope_service.export.reference_clock import has_clock_estimate
from ncclscope_service.export.selection import Selection
from ncclscope_service.rows import HostClock

METHOD: Final = "collective_ends"
"""The estimate rests on the ends of N-to-N collectives, where all ranks leave together."""


def clocks_document(selection: Selection) -> dict[str, object]:
    """The content of the file; hosts whose clock is not known are not in it, unknown numbers are null.

    Without an estimate only the reference is in it, which is its own clock by definition: then nobody's method and no
    time at which it was estimated.
    """
    store = selection.store
    ours = {store.processes[index].host for index in selection.processes()}
    clocks = {host: clock for host, clock in sorted(store.clocks.items()) if host in ours}
    return {
        "reference": store.clock_reference,
        "method": METHOD if has_clock_estimate(store) else None,
        "violation_ratio": store.clock_violation_ratio,
        "hosts": {host: _clock(clock) for host, clock in clocks.items()},
    }


def _clock(clock: HostClock) -> dict[str, object]:
    return {
        "offset_ns": clock.offset_ns,
        "drift_ppm": clock.drift_ppm,
        "at_ns": clock.at_ns if clock.samples else None,
        "sigma_ns": clock.sigma_ns,
        "interval_lo_ns": clock.interval_lo_ns,
        "interval_hi_ns": clock.interval_hi_ns,
        "samples": clock.samples,
        "steps": list(clock.steps),
        "told_by": clock.told_by,
    }

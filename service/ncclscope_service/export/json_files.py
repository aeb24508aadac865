"""`clocks.json` and `findings.json`: each host's clock, and what a person must know, oldest first.

Host times become reference times by the formula of `clocks.json`, for whole columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.export.selection import Selection
from ncclscope_service.store.records import Finding, HostClock
from ncclscope_service.store.tables import Store
from ncclscope_wire.terms import NO_TIME_NS

Times = NDArray[np.int64]


def reference_times(store: Store, processes: NDArray[np.number], host_times: NDArray[np.number]) -> Times:
    """Times on the reference clock; NO_TIME_NS if the time or its host's clock is not known.

    `true = t - offset_ns - drift_ppm * 1e-6 * (t - at_ns)`; the correction is computed in floating point,
    which holds differences of up to 52 days exactly, the time itself stays an integer.
    """
    offset, drift, at_ns, is_known = _clock_columns(store)
    if len(is_known) == 0:
        return np.full(len(host_times), NO_TIME_NS, dtype=np.int64)
    process = processes.astype(np.intp)
    times = host_times.astype(np.int64)
    has_time = is_known[process] & (times != NO_TIME_NS)
    since = np.where(has_time, times - np.where(has_time, at_ns[process], times), 0)
    correction = np.rint(offset[process] + drift[process] * 1e-6 * since).astype(np.int64)
    return np.where(has_time, times - correction, NO_TIME_NS)


def clock_uncertainties(store: Store, processes: NDArray[np.number], host_times: NDArray[np.number]) -> Times:
    """The sigma of each time's clock in whole nanoseconds; NO_TIME_NS if `reference_times` has none."""
    clocks = [store.clock_of(process) for process in range(len(store.processes))]
    sigma = np.array([round(clock.sigma_ns) if clock else NO_TIME_NS for clock in clocks], dtype=np.int64)
    if len(sigma) == 0:
        return np.full(len(host_times), NO_TIME_NS, dtype=np.int64)
    return np.where(host_times.astype(np.int64) != NO_TIME_NS, sigma[processes.astype(np.intp)], NO_TIME_NS)


def clocks_by_host(store: Store, jobs: Iterable[str]) -> dict[str, HostClock]:
    """The clock of each host of these jobs; of several clocks of one host that which most operations tell."""
    known = [clock for job in jobs if job in store.clocks for clock in store.clocks[job].hosts.items()]
    return dict(sorted(known, key=lambda clock: clock[1].samples))


def clock_reference(store: Store, jobs: Iterable[str]) -> str | None:
    """The host on whose clock the times of these jobs are; None if it is not known, and where each has its own."""
    references = {store.clocks[job].reference for job in jobs if job in store.clocks}
    return references.pop() if len(references) == 1 else None


def clock_violation_ratio(store: Store, jobs: Iterable[str]) -> float | None:
    """Share of causality constraints that fail in the worst of these jobs; None if none could be checked."""
    ratios = [store.clocks[job].violation_ratio for job in jobs if job in store.clocks]
    return max((ratio for ratio in ratios if ratio is not None), default=None)


def has_clock_estimate(store: Store) -> bool:
    """Whether any clock was estimated: the reference alone is its own by definition, which says nothing of others."""
    return any(clock.samples > 0 for clocks in store.clocks.values() for clock in clocks.hosts.values())


def shown_times(store: Store, processes: NDArray[np.number], host_times: NDArray[np.number]) -> Times:
    """Like `reference_times`, with the host's own time if its clock is not known (the trace says which)."""
    corrected = reference_times(store, processes, host_times)
    return np.where(corrected == NO_TIME_NS, host_times.astype(np.int64), corrected)


def hosts_without_clock(store: Store) -> list[str]:
    """Hosts whose times cannot be brought to the reference clock."""
    known = enumerate(store.processes)
    return sorted({process.host for index, process in known if store.clock_of(index) is None})


def _clock_columns(
    store: Store,
) -> tuple[NDArray[np.float64], NDArray[np.float64], Times, NDArray[np.bool_]]:
    clocks = [store.clock_of(process) for process in range(len(store.processes))]
    offset = np.array([clock.offset_ns if clock else 0.0 for clock in clocks], dtype=np.float64)
    drift = np.array([clock.drift_ppm if clock else 0.0 for clock in clocks], dtype=np.float64)
    at_ns = np.array([clock.at_ns if clock else 0 for clock in clocks], dtype=np.int64)
    return offset, drift, at_ns, np.array([clock is not None for clock in clocks], dtype=np.bool_)


METHOD: Final = "collective_ends"
"""The estimate rests on the ends of N-to-N collectives, where all ranks leave together."""


def clocks_document(selection: Selection) -> dict[str, object]:
    """The content of the file; hosts whose clock is not known are not in it, unknown numbers are null.

    Without an estimate only the reference is in it, which is its own clock by definition: then nobody's method and no
    time at which it was estimated.
    """
    store = selection.store
    ours = {store.processes[index].host for index in selection.processes()}
    clocks = {host: clock for host, clock in sorted(clocks_by_host(store, selection.jobs).items()) if host in ours}
    return {
        "reference": clock_reference(store, selection.jobs),
        "method": METHOD if has_clock_estimate(store) else None,
        "violation_ratio": clock_violation_ratio(store, selection.jobs),
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


def findings_document(selection: Selection) -> list[dict[str, object]]:
    """The content of the file: one object per finding, by the time since when."""
    return [finding_record(finding) for finding in sorted(selection.findings, key=lambda finding: finding.since_ns)]


def finding_record(finding: Finding) -> dict[str, object]:
    """One finding as JSON has it."""
    return {
        "kind": finding.kind.value,
        "severity": finding.severity.value,
        "job": finding.job,
        "comm_id": finding.comm_id,
        "parallelism": finding.parallelism,
        "ranks": list(finding.ranks),
        "hosts": list(finding.hosts),
        "since_ns": finding.since_ns,
        "until_ns": finding.until_ns,
        "confidence": finding.confidence,
        "summary": finding.summary,
        "evidence": finding.evidence,
        **({"id": finding.id} if finding.id else {}),
        **({} if finding.acknowledged is None else {"acknowledged": asdict(finding.acknowledged)}),
        **({} if finding.muted is None else {"muted": asdict(finding.muted)}),
    }

"""Host times to reference times: the formula of `clocks.json`, for whole columns."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.store import Store
from ncclscope_wire.terms import NO_TIME_NS

Times = NDArray[np.int64]


def reference_times(store: Store, processes: NDArray[np.number], host_times: NDArray[np.number]) -> Times:
    """Times on the reference clock; NO_TIME_NS where the time or its host's clock is not known.

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
    """The sigma of each time's clock in whole nanoseconds; NO_TIME_NS where `reference_times` has none."""
    clocks = [store.clocks.get(process.host) for process in store.processes]
    sigma = np.array([round(clock.sigma_ns) if clock else NO_TIME_NS for clock in clocks], dtype=np.int64)
    if len(sigma) == 0:
        return np.full(len(host_times), NO_TIME_NS, dtype=np.int64)
    return np.where(host_times.astype(np.int64) != NO_TIME_NS, sigma[processes.astype(np.intp)], NO_TIME_NS)


def has_clock_estimate(store: Store) -> bool:
    """Whether any clock was estimated: the reference alone is its own by definition, which says nothing of others."""
    return any(clock.samples > 0 for clock in store.clocks.values())


def shown_times(store: Store, processes: NDArray[np.number], host_times: NDArray[np.number]) -> Times:
    """Like `reference_times`, with the host's own time where its clock is not known (the trace says which)."""
    corrected = reference_times(store, processes, host_times)
    return np.where(corrected == NO_TIME_NS, host_times.astype(np.int64), corrected)


def hosts_without_clock(store: Store) -> list[str]:
    """Hosts whose times cannot be brought to the reference clock."""
    return sorted({process.host for process in store.processes} - set(store.clocks))


def _clock_columns(
    store: Store,
) -> tuple[NDArray[np.float64], NDArray[np.float64], Times, NDArray[np.bool_]]:
    clocks = [store.clocks.get(process.host) for process in store.processes]
    offset = np.array([clock.offset_ns if clock else 0.0 for clock in clocks], dtype=np.float64)
    drift = np.array([clock.drift_ppm if clock else 0.0 for clock in clocks], dtype=np.float64)
    at_ns = np.array([clock.at_ns if clock else 0 for clock in clocks], dtype=np.int64)
    return offset, drift, at_ns, np.array([clock is not None for clock in clocks], dtype=np.bool_)

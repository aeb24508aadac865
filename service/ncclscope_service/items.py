"""The items in which launches and kernels of one thread are compared by order: one of them, or a run of several.

A run is taken as a whole, and divided only when it was paired, where nothing tells what was launched together: Sends
and Receives of one lane, and collectives of one lane, kind and type where the thread launches such in groups.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.kernel_name import KernelClass
from ncclscope_wire.batch import Columns


def items_of(
    launches: Columns, kernels: Columns, *, collapse: bool, final: bool, coalesce: bool = False
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each item begins, on both sides, with the end appended: one launch, or a run of several.

    Runs are of Send and Receive with `collapse`, of equal collectives with `coalesce`.
    """
    if not collapse and not coalesce:
        return np.arange(len(launches) + 1), np.arange(len(kernels) + 1)
    is_p2p, is_kernel_p2p = are_p2p(launches), kernels["kernel_class"] == KernelClass.SEND_RECV
    left, right = is_p2p & collapse, is_kernel_p2p & collapse
    goes_on, kernel_goes_on = _goes_on(launches, left), _goes_on(kernels, right)
    if coalesce:
        may_join, may_be_joined = ~is_p2p & (launches["plan"] == 0), ~is_kernel_p2p
        goes_on = goes_on | _repeats(launches, ("classes", "data_type"), may_join)
        kernel_goes_on = kernel_goes_on | _repeats(kernels, ("kernel_class", "data_type"), may_be_joined)
        left, right = left | may_join, right | may_be_joined
    return _runs(goes_on, left, final=final), _runs(kernel_goes_on, right, final=final)


def are_p2p(launches: Columns) -> NDArray[np.bool_]:
    """Which launches (LAUNCH) are of Sends and Receives."""
    is_p2p: NDArray[np.bool_] = launches["classes"] & (1 << int(KernelClass.SEND_RECV)) != 0
    return is_p2p


def _goes_on(rows: Columns, is_such: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Whether each row but the first is such as the one before it, on the same lane."""
    goes_on: NDArray[np.bool_] = is_such[1:] & is_such[:-1] & (rows["lane"][1:] == rows["lane"][:-1])
    return goes_on


def _repeats(rows: Columns, names: tuple[str, ...], is_such: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The same, with these columns alike."""
    repeats = _goes_on(rows, is_such)
    for name in names:
        repeats &= rows[name][1:] == rows[name][:-1]
    return repeats


def _runs(goes_on: NDArray[np.bool_], may_grow: NDArray[np.bool_], *, final: bool) -> NDArray[np.int64]:
    """Where each item begins, with the end appended; a run at the end is left out while it may still grow."""
    if len(may_grow) == 0:
        return np.zeros(1, dtype=np.int64)
    begins = np.concatenate([[0], np.flatnonzero(~goes_on) + 1])
    if may_grow[-1] and not final:
        return begins.astype(np.int64)
    return np.append(begins, len(may_grow)).astype(np.int64)

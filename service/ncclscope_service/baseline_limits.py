"""The bus bandwidth that nccl-tests showed for operations like those in the store."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.distinct import values_of
from ncclscope_service.measured_baseline import MeasuredBaseline
from ncclscope_service.rows import Communicator
from ncclscope_service.store import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, OPERATION_CODES

_RECV: Final = OPERATION_CODES["Recv"]
_SEND: Final = OPERATION_CODES["Send"]


def expected_busbw(known: Store, rows: Columns) -> NDArray[np.float64]:
    """What was measured for the kind and size of these operations (rows.OPERATION) on as many ranks and nodes.

    Bytes per second. NaN where that was not tested, or not every rank of the communicator has been seen. A Recv is
    judged as its Send.
    """
    expected = np.full(len(rows), np.nan)
    baseline = known.measured_baseline
    if baseline is None or not len(rows):
        return expected
    communicator_of = np.asarray([member.communicator for member in known.members] + [NO_NUMBER], np.int64)
    communicators = communicator_of[rows["member"]]
    codes = known.templates_of(rows, "op")["op"]
    codes = np.where(codes == _RECV, _SEND, codes)
    for index in values_of(communicators):
        place = None if index < 0 else place_of(known, known.communicators[index])
        if place is None:
            continue
        for op in values_of(codes[communicators == index]):
            at = np.flatnonzero((communicators == index) & (codes == op))
            expected[at] = baseline.busbw((op, *place), rows["message_bytes"][at])
    return expected


def series_busbw(known: Store, series: Columns) -> NDArray[np.float64]:
    """The same for the mean message of each series (rows.SERIES); NaN where there is none."""
    baseline = known.measured_baseline
    if baseline is None:
        return np.full(len(series), np.nan)
    sizes = series["bytes"] // np.maximum(series["operations"], 1)
    rates = [
        _at_size(known, baseline, index, op, size)
        for index, op, size in zip(series["communicator"].tolist(), series["op"].tolist(), sizes.tolist(), strict=True)
    ]
    return np.asarray(rates, np.float64)


def large_messages(known: Store, communicator: Communicator) -> float | None:
    """The best that was measured for the operation of a communicator that has moved most, bytes per second."""
    series = known.series.rows
    ours = series[series["communicator"] == communicator.index]
    place = place_of(known, communicator)
    if known.measured_baseline is None or place is None or not len(ours):
        return None
    return known.measured_baseline.largest_busbw((_judged_as(int(ours["op"][int(ours["bytes"].argmax())])), *place))


def _at_size(known: Store, baseline: MeasuredBaseline, communicator: int, op: int, message_bytes: int) -> float:
    place = None if communicator < 0 else place_of(known, known.communicators[communicator])
    if place is None:
        return np.nan
    return float(baseline.busbw((_judged_as(op), *place), np.asarray([message_bytes], np.int64))[0])


def _judged_as(op: int) -> int:
    return _SEND if op == _RECV else op


def place_of(known: Store, communicator: Communicator) -> tuple[int, int] | None:
    """(ranks, nodes) of a communicator; None while not every rank was seen."""
    members = (communicator.members or {}).values()
    if len(members) != communicator.size:
        return None
    return communicator.size, len({known.processes[known.members[index].process].host for index in members})

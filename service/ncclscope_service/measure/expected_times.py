"""How long transfers should take: estimates for a job's operations, from what was measured of transfers like them.

First from another run of the same machine, if the user gave its calibration, else from the job's own transfers of
groups of its kind of parallelism on as many ranks and nodes; while a slow link or a drop of bandwidth is open, those of
its communicator are left out. Where no measured basis applies: nccl-tests, then NCCL's own model, which is wide, then
the topology, which gives no more than a lower bound.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_models.transfer_estimate import (
    WIDTHS,
    Basis,
    Estimate,
    GroupShape,
    MeasuredTransfers,
    TransferTimes,
)
from ncclscope_service.columns.group_by import distinct_together, sort_into_groups
from ncclscope_service.columns.table import AnyRows
from ncclscope_service.measure import limits
from ncclscope_service.store.records import Communicator, FindingKind
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import OPERATIONS
from ncclscope_wire.topology import NodeKind

CALIBRATION: Final = "calibration"
THIS_RUN: Final = "this_run"
BASELINE: Final = "baseline"
NCCL_MODEL: Final = "nccl_model"
TOPOLOGY: Final = "topology"
_MODEL_IS_OFF_BY: Final = 2.0
_NOT_CALM: Final = (FindingKind.SLOW_LINK, FindingKind.BANDWIDTH_DROP)

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
_QUANTILES: Final = (0.1, 0.5, 0.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedTransfers:
    """Transfers of one communicator, operation and size; times in ns."""

    communicator: int
    op: int
    message_bytes: int
    samples: int
    low_ns: float
    """10th percentile."""
    typical_ns: float
    high_ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedTransfer:
    """What a transfer should take, in ns; None where a basis does not say it."""

    low_ns: float
    typical_ns: float | None
    high_ns: float | None
    basis: str
    """A `Basis`, or BASELINE, NCCL_MODEL, TOPOLOGY."""
    source: str | None
    """CALIBRATION or THIS_RUN for a `Basis`."""
    samples: int | None
    distance: float | None
    """From the nearest measured size, as a factor; None where no size was measured."""
    latency_share: float | None
    """Of the time, what does not come from bytes; None without a curve around this size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedBandwidth:
    """Bus bandwidths that a transfer should reach, bytes per second: four of five lie between `low` and `high`."""

    low: float
    typical: float
    high: float
    basis: str


def observed_transfers(rows: AnyRows) -> list[ObservedTransfers]:
    """Of these rows.COLLECTIVE, which may be in any order; of those whose transfer and size are known."""
    measured = rows[np.isfinite(rows["busbw"]) & (rows["transfer_ns"] > 0) & (rows["message_bytes"] > 0)]
    if not len(measured):
        return []
    names = ("communicator", "op", "message_bytes")
    keys, place = distinct_together(*(measured[name].astype(np.int64) for name in names))
    groups = sort_into_groups(place)
    found: list[ObservedTransfers] = []
    for at, mine in enumerate(np.split(measured["transfer_ns"][groups.order], groups.ends[:-1])):
        low, middle, high = np.quantile(mine, _QUANTILES).tolist()
        communicator, op, message_bytes = (int(key[at]) for key in keys)
        found.append(
            ObservedTransfers(
                communicator=communicator,
                op=op,
                message_bytes=message_bytes,
                samples=len(mine),
                low_ns=low,
                typical_ns=middle,
                high_ns=high,
            )
        )
    return found


def transfer_times(known: Store, job: str, rows: AnyRows) -> TransferTimes:
    """What rows.COLLECTIVE of a job in calm times say, by shape; of communicators of which every rank was seen."""
    calm = rows[_is_calm(known, job, rows)]
    shapes = {
        each.index: (*place, each.parallelism or "")
        for each in known.listed_communicators()
        if each.job == job and (place := limits.place_of(known, each)) is not None
    }
    calm = calm[np.isin(calm["communicator"], list(shapes))]
    # One number for each place, so that communicators of one shape are one history.
    places = sorted(set(shapes.values()))
    merged: Columns = calm.copy()
    number = {place: at for at, place in enumerate(places)}
    merged["communicator"] = [number[shapes[index]] for index in calm["communicator"].tolist()]
    measured: defaultdict[GroupShape, list[MeasuredTransfers]] = defaultdict(list)
    for each in observed_transfers(merged):
        measured[GroupShape(OPERATIONS[each.op].name, *places[each.communicator])].append(
            MeasuredTransfers(
                message_bytes=each.message_bytes,
                low=each.low_ns / 1e9,
                typical=each.typical_ns / 1e9,
                high=each.high_ns / 1e9,
                samples=each.samples,
            )
        )
    return TransferTimes(measured, has_switch=has_switch(known, job))


def has_switch(known: Store, job: str) -> bool:
    """Whether every node of a job of which a topology is known has an NVSwitch, and there is such a node."""
    blocks = [seen for (of, _), found in known.topologies.items() if of == job for seen in found]
    return bool(blocks) and all(any(node.kind is NodeKind.NVS for node in seen.nodes) for seen in blocks)


def _is_calm(known: Store, job: str, rows: AnyRows) -> Bools:
    calm: Bools = np.isfinite(rows["busbw"]) & (rows["op"] < len(OPERATIONS))
    by_id = {each.comm_id: each.index for each in known.listed_communicators() if each.job == job}
    for finding in known.findings:
        index = by_id.get(finding.comm_id or "")
        if finding.job == job and finding.kind in _NOT_CALM and index is not None:
            ends = rows["end_true_ns"]
            within = (ends >= finding.since_ns) & (finding.until_ns is None or ends <= (finding.until_ns or 0))
            calm &= ~((rows["communicator"] == index) & within)
    return calm


class JobEstimator:
    """Answers for one job, from some of its rows.COLLECTIVE."""

    def __init__(self, known: Store, job: str, rows: AnyRows) -> None:
        """`rows` of other jobs are left out."""
        self._known = known
        self._job = job
        self._rows = rows

    @cached_property
    def own(self) -> TransferTimes:
        """What the rows of the job say."""
        return transfer_times(self._known, self._job, self._rows)

    def expected(self, communicator: Communicator, op: int, message_bytes: int) -> ExpectedTransfer | None:
        """Of a transfer by the first basis that applies; None if none does."""
        place = limits.place_of(self._known, communicator)
        if place is not None and op < len(OPERATIONS):
            shape = GroupShape(OPERATIONS[op].name, *place, communicator.parallelism or "")
            sources: Sequence[tuple[str, TransferTimes | None]] = (
                (CALIBRATION, self._known.calibration),
                (THIS_RUN, self.own),
            )
            for source, times in sources:
                estimate = None if times is None else times.estimate(shape, message_bytes)
                if times is not None and estimate is not None:
                    return _from_estimate(estimate, source, times.latency_share(shape, message_bytes))
        return next(self._without_history(communicator, op, message_bytes), None)

    def expected_busbw(self, communicator: Communicator, op: int, message_bytes: int) -> ExpectedBandwidth | None:
        """The same as bus bandwidths; None too where a basis says no more than a bound."""
        found = self.expected(communicator, op, message_bytes)
        if found is None or found.typical_ns is None or found.high_ns is None:
            return None
        low, typical, high = (
            limits.busbw(op, communicator.size, message_bytes, ns)
            for ns in (found.high_ns, found.typical_ns, found.low_ns)
        )
        return ExpectedBandwidth(low=low, typical=typical, high=high, basis=found.basis)

    def _without_history(self, communicator: Communicator, op: int, message_bytes: int) -> Iterator[ExpectedTransfer]:
        width = exp(WIDTHS[Basis.SIZES])
        spreads = ((BASELINE, width, width), (NCCL_MODEL, _MODEL_IS_OFF_BY, _MODEL_IS_OFF_BY), (TOPOLOGY, 1.0, None))
        rates = limits.references(self._known, communicator, op, message_bytes)
        for basis, below, above in spreads:
            ns = limits.transfer_ns(op, communicator.size, message_bytes, rates[basis])
            if ns is not None:
                yield ExpectedTransfer(
                    low_ns=ns / below,
                    typical_ns=None if above is None else ns,
                    high_ns=None if above is None else ns * above,
                    basis=basis,
                    source=None,
                    samples=None,
                    distance=None,
                    latency_share=None,
                )


def calibrated_busbw(known: Store, series: Columns) -> Floats:
    """The busbw of the mean message of each rows.SERIES by the calibration, bytes per second; NaN without an answer."""
    sizes = series["bytes"] // np.maximum(series["operations"], 1)
    found = np.full(len(series), np.nan)
    for at, (index, op, size) in enumerate(
        zip(series["communicator"].tolist(), series["op"].tolist(), sizes.tolist(), strict=True)
    ):
        if index < 0:
            continue
        communicator = known.communicators[index]
        place = limits.place_of(known, communicator)
        if known.calibration is None or place is None or op >= len(OPERATIONS) or size <= 0:
            continue
        estimate = known.calibration.estimate(
            GroupShape(OPERATIONS[op].name, *place, communicator.parallelism or ""), size
        )
        if estimate is not None:
            found[at] = limits.busbw(op, place[0], size, estimate.typical * 1e9)
    return found


def _from_estimate(estimate: Estimate, source: str, latency_share: float | None) -> ExpectedTransfer:
    return ExpectedTransfer(
        low_ns=estimate.low * 1e9,
        typical_ns=estimate.typical * 1e9,
        high_ns=estimate.high * 1e9,
        basis=estimate.basis,
        source=source,
        samples=estimate.samples,
        distance=estimate.distance,
        latency_share=latency_share,
    )

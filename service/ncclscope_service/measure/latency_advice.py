"""Transfers that wait for latency and not for bytes, and what would be faster: information, never an alarm."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

import numpy as np

from ncclscope_models.latency_advice import Alternative, alternatives
from ncclscope_models.transfer_estimate import GroupShape
from ncclscope_service.columns.table import AnyRows
from ncclscope_service.measure import limits
from ncclscope_service.measure.expected_times import JobEstimator, observed_transfers
from ncclscope_service.store.tables import Store
from ncclscope_wire.terms import ALGORITHMS, OPERATIONS

_MOST: Final = 3
_LOOKED_AT: Final = 65_536
"""Newest operations, for the algorithm that ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyAdvice:
    """Transfers of one shape and size."""

    parallelism: str | None
    op: str
    message_bytes: int
    ranks: int
    nodes: int
    algorithm: str | None
    """What ran; None: not known."""
    transfers: int
    transfer_ns: float
    """Median."""
    latency_ratio: float
    """Share of it that does not come from bytes."""
    alternatives: tuple[Alternative, ...]


def latency_advice(known: Store, job: str, rows: AnyRows) -> list[LatencyAdvice]:
    """Of these rows.COLLECTIVE of a job: what would save most, of the transfers that something would make faster."""
    estimator = JobEstimator(known, job, rows)
    found: dict[tuple[GroupShape, int], LatencyAdvice] = {}
    for each in observed_transfers(rows):
        communicator = known.communicators[each.communicator]
        place = limits.place_of(known, communicator)
        if communicator.job != job or place is None or each.op >= len(OPERATIONS):
            continue
        shape = GroupShape(OPERATIONS[each.op].name, *place, communicator.parallelism or "")
        key = shape, each.message_bytes
        if key in found and found[key].transfers >= each.samples:
            continue
        ran = _algorithm(known, each.communicator, each.op, each.message_bytes)
        for times in (known.calibration, estimator.own):
            others = [] if times is None else alternatives(times, shape, each.message_bytes, ran)
            if times is not None and others:
                found[key] = LatencyAdvice(
                    parallelism=communicator.parallelism,
                    op=shape.op,
                    message_bytes=each.message_bytes,
                    ranks=shape.ranks,
                    nodes=shape.nodes,
                    algorithm=ran,
                    transfers=each.samples,
                    transfer_ns=each.typical_ns,
                    latency_ratio=times.latency_share(shape, each.message_bytes) or 0.0,
                    alternatives=tuple(others),
                )
                break
    return sorted(found.values(), key=_saved_ns, reverse=True)[:_MOST]


def _saved_ns(of: LatencyAdvice) -> float:
    """By the best of its alternatives, over all of its transfers."""
    return of.transfers * max(of.transfer_ns - each.typical * 1e9 / each.replaces for each in of.alternatives)


def _algorithm(known: Store, communicator: int, op: int, message_bytes: int) -> str | None:
    """Algorithm of most of the newest such operations."""
    rows = known.operations.rows[-_LOOKED_AT:]
    members = list((known.communicators[communicator].members or {}).values())
    mine = np.isin(rows["member"], members) & (rows["message_bytes"] == message_bytes) & (rows["algorithm"] >= 0)
    of_op = known.operation_templates.take(rows["template"][mine], "op")["op"] == op
    seen = Counter(rows["algorithm"][mine][of_op].tolist())
    return ALGORITHMS[seen.most_common(1)[0][0]] if seen else None


def advice_text(of: LatencyAdvice) -> str:
    """A sentence for people."""
    ran = "" if of.algorithm is None else f" as {of.algorithm}"
    where = f"{of.ranks:,} ranks on {of.nodes:,} node{'s' if of.nodes > 1 else ''}"
    said = [
        f"{each.what} would take {_us(each.typical)} ({_us(each.low)} to {_us(each.high)}, by {each.by})"
        f"{'' if each.replaces == 1 else f' instead of {_us(each.replaces * of.transfer_ns / 1e9)}'}: {each.attempt}"
        for each in of.alternatives
    ]
    return (
        f"{of.op} of {of.message_bytes:,} bytes in {of.parallelism or 'groups'} of {where}{ran}: "
        f"{of.latency_ratio:.0%} of its {_us(of.transfer_ns / 1e9)} do not come from its bytes; {'; '.join(said)}"
    )


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} µs"

"""The arguments of a slice: what people look for when they click on it.

Unknown ones are left out, and so is what goes without saying: a match that is sure is not mentioned.
"""

# pyright: reportUnknownParameterType=false, reportAttributeAccessIssue=false
# (pyarrow carries no types, and pyarrow.compute makes its functions as it is imported)
from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ncclscope_service.export.tables.columns import Column, Mask, OperationView, rates
from ncclscope_service.export.tables.iterations_file import limits_by_reference
from ncclscope_service.export.tables.operations_file import LIMIT_REFERENCES, collective_ids, operation_column
from ncclscope_service.export.trace.event_text import constant, field, fields, joined
from ncclscope_service.store.rows import Match
from ncclscope_service.store.tables import Store
from ncclscope_wire.terms import NO_NUMBER

Arguments: TypeAlias = dict[str, object]

MAX_LISTED: Final = 16
"""Operations of one launch that its slice lists one by one; it always says how many there are."""

MAX_COLLECTIVES: Final = 1024
"""Collectives of one launch whose ids its slice lists."""

_MEASURED: Final = frozenset(
    {"algbw_GB_per_s", "busbw_GB_per_s", "busbw_apparent_GB_per_s", "bus_factor", "wait_us"}
    | {"transfer_us", "ranks_seen", "iteration"}
)
"""Arguments of a captured operation that hold for its first replay only; so do efficiencies."""


def operation_arguments(view: OperationView, hidden: Mask | None = None) -> pa.Array:
    """The arguments that the log and the measures give as JSON, row by row: `,"name":value` for each known one.

    `hidden`: rows without those that hold for the first replay of a captured operation only.
    """
    pieces: list[pa.Array] = []
    for name, source in (*_ARGUMENTS.items(), *_other_efficiencies(view).items()):
        if source == "collective_id":  # text of arrow, not a column of ours
            texts = (constant(f',"{name}":"'), collective_ids(view), constant('"'), constant(""))
            pieces.append(pc.binary_join_element_wise(*texts))
            continue
        column = source if isinstance(source, Column) else _column(view, source)
        if hidden is not None and (name in _MEASURED or name.startswith("efficiency_")):
            column = column.where(~hidden)
        pieces.append(field(name, column))
    return joined(*pieces)


def kernel_arguments(store: Store) -> pa.Array:
    """The arguments that a kernel's template gives as JSON, by template index; without a comma in front."""
    return pa.array([fields(_template_arguments(store, row))[1:] for row in store.kernel_templates.rows], pa.string())


def descriptions(view: OperationView) -> list[str]:
    """Each operation in a few words, for the list of those that share a launch."""
    columns = [operation_column(view, name).objects() for name in ("op", "message_bytes", "peer")]
    return [_description(op, size, peer) for op, size, peer in zip(*columns, strict=True)]


def listed_collectives(view: OperationView) -> list[str | None]:
    """The id of each operation's collective; None for Send and Recv."""
    ids: list[str | None] = collective_ids(view).to_pylist()
    return [text if seq >= 0 else None for text, seq in zip(ids, view.rows["coll_seq"].tolist(), strict=True)]


def _description(op: object, size: object, peer: object) -> str:
    words = [str(op)]
    if size is not None:
        words.append(f"{size} B")
    if peer is not None:
        words.append(f"{'to' if op == 'Send' else 'from' if op == 'Recv' else 'with'} {peer}")
    return " ".join(words)


def _column(view: OperationView, source: str | Callable[[OperationView], Column]) -> Column:
    return operation_column(view, source) if isinstance(source, str) else source(view)


def _gigabytes(name: str) -> Callable[[OperationView], Column]:
    def column(view: OperationView) -> Column:
        rate = operation_column(view, name)
        return Column(significant(np.where(rate.is_known, rate.values, np.nan) / 1e9), rate.is_known)

    return column


def _microseconds(name: str) -> Callable[[OperationView], Column]:
    def column(view: OperationView) -> Column:
        span = operation_column(view, name)
        return Column(np.where(span.is_known, span.values, 0) / 1000, span.is_known)

    return column


def _rounded(name: str) -> Callable[[OperationView], Column]:
    def column(view: OperationView) -> Column:
        ratio = operation_column(view, name)
        values = np.where(ratio.is_known, ratio.values, np.nan).astype(np.float64)
        return Column(significant(values), ratio.is_known)

    return column


def _bus_factor(view: OperationView) -> Column:
    """The factor that was used: busbw / algbw."""
    algbw, busbw = view.rows["algbw"], view.rows["busbw"]
    is_known = np.isfinite(algbw) & np.isfinite(busbw) & (algbw > 0)
    return rates(significant(np.divide(busbw, algbw, out=np.full(len(busbw), np.nan), where=is_known)))


def _limit_algbw(view: OperationView) -> Column:
    """The limit as algbw: what is left of the limit of busbw without the factor."""
    limit, factor = operation_column(view, "limit_bytes_per_second"), _bus_factor(view)
    is_known = limit.is_known & factor.is_known & (factor.values > 0)
    algbw = np.divide(limit.values, factor.values, out=np.full(len(is_known), np.nan), where=is_known)
    return rates(significant(algbw / 1e9))


def _other_efficiencies(view: OperationView) -> dict[str, Column]:
    """busbw against the limits of the references that `limit_reference` does not name."""
    own = view.rows["limit_reference"]
    found: dict[str, Column] = {}
    for reference, limit in limits_by_reference(view).items():
        is_other = (own != reference) & np.isfinite(limit) & (limit > 0)
        if is_other.any():
            ratio = np.divide(view.rows["busbw"], limit, out=np.full(len(limit), np.nan), where=is_other)
            found[f"efficiency_{LIMIT_REFERENCES[reference]}_ratio"] = rates(significant(ratio))
    return found


def _less_than_sure(view: OperationView) -> Column:
    confidence = operation_column(view, "confidence")
    return _rounded("confidence")(view).where(confidence.values < 1)


def _unless_matched(view: OperationView) -> Column:
    return operation_column(view, "match").where(view.rows["match"] != Match.MATCHED)


def significant(values: NDArray[np.float64], digits: int = 5) -> NDArray[np.float64]:
    """Values rounded to `digits` significant digits: more would fill the file with noise."""
    magnitude = np.where(np.isfinite(values) & (values != 0), np.abs(values), 1.0)
    scale = 10.0 ** (digits - 1 - np.floor(np.log10(magnitude)))
    return np.round(values * scale) / scale


def _template_arguments(store: Store, row: np.void) -> Arguments:
    grid = [int(row[name]) for name in ("grid_x", "grid_y", "grid_z")]
    block = [int(row[name]) for name in ("block_x", "block_y", "block_z")]
    arguments: dict[str, object] = {
        "kernel": store.strings[int(row["name"])],
        "grid": None if NO_NUMBER in grid else "x".join(map(str, grid)),
        "block": None if NO_NUMBER in block else "x".join(map(str, block)),
        **{name: int(row[source]) for name, source in _TEMPLATE_NUMBERS.items() if row[source] > NO_NUMBER},
    }
    return {name: value for name, value in arguments.items() if value is not None}


_TEMPLATE_NUMBERS: Final = {
    "static_shared_bytes": "static_shared_bytes",
    "dynamic_shared_bytes": "dynamic_shared_bytes",
    "registers_per_thread": "registers",
    "device": "device_id",
    "cuda_stream": "stream_id",
}

_ARGUMENTS: Final[dict[str, str | Callable[[OperationView], Column]]] = {
    "iteration": "iteration",
    "op": "op",
    "op_count": "op_count",
    "collective_id": "collective_id",
    "comm_id": "comm_id",
    "coll_seq": "coll_seq",
    "count": "count",
    "dtype": "dtype",
    "red_op": "red_op",
    "root": "root",
    "peer": "peer",
    "message_bytes": "message_bytes",
    "algorithm": "algorithm",
    "protocol": "protocol",
    "channels": "channels",
    "algbw_GB_per_s": _gigabytes("algbw_bytes_per_second"),
    "busbw_GB_per_s": _gigabytes("busbw_bytes_per_second"),
    "busbw_apparent_GB_per_s": _gigabytes("busbw_apparent_bytes_per_second"),
    "bus_factor": _bus_factor,
    "limit_algbw_GB_per_s": _limit_algbw,
    "limit_busbw_GB_per_s": _gigabytes("limit_bytes_per_second"),
    "limit_reference": "limit_reference",
    "bottleneck": "bottleneck",
    "efficiency_ratio": _rounded("efficiency_ratio"),
    "wait_us": _microseconds("wait_ns"),
    "transfer_us": _microseconds("transfer_ns"),
    "ranks_seen": "ranks_seen",
    "parallelism": "parallelism",
    "comm_size": "comm_size",
    "comm_rank": "comm_rank",
    "comm_ptr": "comm_ptr",
    "log_stream": "log_stream",
    "send_buffer": "send_buffer",
    "recv_buffer": "recv_buffer",
    "log_line": "log_line",
    "launch_id": "launch_id",
    "match": _unless_matched,
    "confidence": _less_than_sure,
}
"""Named as in `operations.parquet`, with the unit in the name if it differs."""

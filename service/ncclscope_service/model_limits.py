"""The bus bandwidth that NCCL itself expects of operations, from the tuning tables in the store."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service import bandwidth, nccl_model
from ncclscope_service.distinct import distinct_together, firsts, values_of
from ncclscope_service.nccl_model import Group
from ncclscope_service.rows import Communicator
from ncclscope_service.store import Store
from ncclscope_service.version_of import version_of
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import ALGORITHMS, OPERATION_CODES, OPERATIONS, PROTOCOLS
from ncclscope_wire.topology import TuningTableSeen

MODELLED: Final = tuple(OPERATION_CODES[name] for name in nccl_model.FUNCTIONS)
"""Codes of the operations that a table has rows for."""

_ASKED: Final = np.dtype(
    [("communicator", "<i8"), ("op", "u1"), ("bytes", "<i8"), ("algorithm", "i1"), ("protocol", "i1")]
)


def expected_busbw(known: Store, rows: Columns) -> NDArray[np.float64]:
    """The busbw that NCCL expects of each of these operations (rows.OPERATION), bytes per second.

    With the algorithm and protocol of its TUNING line, else with those that the table says are fastest. NaN where
    the communicator has no table, or not every rank of it was seen, and for what NCCL has no model of.
    """
    expected = np.full(len(rows), np.nan)
    if not known.tuning_tables or not len(rows):
        return expected
    of_member = np.asarray([member.communicator for member in known.members], np.int64)
    asked = np.zeros(len(rows), _ASKED)
    asked["communicator"], asked["op"] = of_member[rows["member"]], known.templates_of(rows, "op")["op"]
    asked["bytes"], asked["algorithm"], asked["protocol"] = rows["message_bytes"], rows["algorithm"], rows["protocol"]
    usable = np.isin(asked["communicator"], list(known.tuning_tables)) & np.isin(asked["op"], MODELLED)
    _, inverse = distinct_together(*(asked[name][usable] for name in _ASKED.names or ()))
    different = asked[usable][firsts(inverse)]
    groups = {index: _group(known, known.communicators[index]) for index in values_of(different["communicator"])}
    rates = [_expected(known, each, groups[int(each["communicator"])]) for each in different]
    expected[usable] = np.asarray(rates, np.float64)[inverse]
    return expected


def busiest(known: Store) -> dict[int, int]:
    """Of each communicator that has a table, the operation that has moved most of those that a table has rows for."""
    if not known.tuning_tables:
        return {}
    series = known.series.rows
    at = np.flatnonzero(np.isin(series["op"], MODELLED) & np.isin(series["communicator"], list(known.tuning_tables)))
    order = at[np.lexsort((-at, series["bytes"][at], series["communicator"][at]))]
    return dict(zip(series["communicator"][order].tolist(), series["op"][order].tolist(), strict=True))


def large_messages(table: TuningTableSeen, op: int, ranks: int) -> float | None:
    """The busbw that a table gives large messages of an operation, bytes per second; None where it has none of it."""
    best = max((cell.bytes_per_second for cell in table.cells if cell.function == OPERATIONS[op].name), default=0)
    return best * _factor(op, ranks) or None


def _expected(known: Store, asked: np.void, group: Group | None) -> float:
    op, message_bytes = int(asked["op"]), int(asked["bytes"])
    algorithm, protocol = int(asked["algorithm"]), int(asked["protocol"])
    if group is None:
        return np.nan
    cells, name = known.tuning_tables[int(asked["communicator"])].cells, OPERATIONS[op].name
    if 0 <= algorithm < len(ALGORITHMS) and 0 <= protocol < len(PROTOCOLS):
        words = {"algorithm": ALGORITHMS[algorithm], "protocol": PROTOCOLS[protocol]}
        found = nccl_model.expected_time(cells, name, message_bytes, group, **words)
    else:
        found = nccl_model.choice(cells, name, message_bytes, group)
    return np.nan if found is None else found.algbw(message_bytes) * _factor(op, group.ranks)


def _group(known: Store, communicator: Communicator) -> Group | None:
    """What the model needs; None where not every rank was seen, and so the number of nodes is not known."""
    members = [known.members[index] for index in (communicator.members or {}).values()]
    if len(members) != communicator.size:
        return None
    version = version_of(known, members[0].process)
    return Group(
        ranks=communicator.size,
        nodes=len({known.processes[member.process].host for member in members}),
        version=None if version is None else tuple(int(part) for part in version.split(".") if part.isdigit()),
    )


def _factor(op: int, ranks: int) -> float:
    return float(bandwidth.factor(np.asarray([op], np.uint8), np.asarray([ranks], np.int32))[0])

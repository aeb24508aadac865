"""`traffic.parquet`: bytes that each rank (in large jobs, each node) sent to each other, by operation."""

# pyright: reportUnknownParameterType=false
# (pyarrow carries no types)
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from ncclscope_service.columns.group_by import distinct_together
from ncclscope_service.export.selection import Selection
from ncclscope_service.export.tables import schema
from ncclscope_service.export.tables.columns import OperationView
from ncclscope_service.export.tables.operations_file import operation_column, write_slices
from ncclscope_service.intake.tuning import Algorithms
from ncclscope_service.nccl.traffic import NOWHERE, Calls, Seats, TrafficSums, Way, flows
from ncclscope_service.store.records import Communicator
from ncclscope_wire.terms import ALGORITHMS

MAX_RANKS: Final = 512
"""With more ranks, traffic is kept node by node: rank by rank it would be millions of pairs."""

THROUGH: Final = {Way.PEER: None, Way.NVSWITCH: "nvswitch", Way.NETWORK: "network"}
_ROWS_PER_GROUP: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Place:
    """Who sends and receives: a rank, or in large jobs a node."""

    job: str
    host: str
    rank: int | None
    """Global rank; None if places are nodes."""


@dataclass(frozen=True, slots=True)
class TrafficRow:
    """Bytes from one place to another."""

    sender: Place
    receiver: Place | None
    """None if a switch received."""
    through: str | None
    op: str
    parallelism: str | None
    bytes: int
    assumed_bytes: int
    """Of an algorithm that nobody named: a ring was taken."""
    assumed_order_bytes: int
    """Along a ring or tree that NCCL did not print: in the order of ranks."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """All traffic of a selection."""

    places: tuple[Place, ...]
    rows: tuple[TrafficRow, ...]
    is_by_rank: bool
    unplaced_calls: int
    """Groups of calls whose ranks or receivers are not known: their bytes are not in the rows."""


def measure_traffic(selection: Selection) -> Traffic:
    """Traffic of the selected operations; a rank whose log is missing sends nothing here.

    An operation that was captured into a CUDA graph counts once, as in `operations.parquet`.
    """
    ranks = {
        (selection.store.process_job[member.process], member.global_rank)
        for member in selection.store.members
        if member.global_rank is not None and selection.has_process[member.process]
    }
    return _Measuring(selection, is_by_rank=len(ranks) <= MAX_RANKS).measure()


def write_traffic(traffic: Traffic, path: Path) -> None:
    """Writes the file; it has no rows if nothing was sent or nobody is known."""
    write_slices(_tables(traffic), schema.TRAFFIC, path)


def traffic_by_node(traffic: Traffic) -> list[dict[str, object]]:
    """Node by node, as `summary.json` has it: most bytes first; a null receiver is a switch."""
    sums: dict[tuple[str, str, str | None, str | None], list[int]] = {}
    for row in traffic.rows:
        host = None if row.receiver is None else row.receiver.host
        found = sums.setdefault((row.sender.job, row.sender.host, host, row.through), [0, 0, 0])
        found[0] += row.bytes
        found[1] += row.assumed_bytes
        found[2] += row.assumed_order_bytes
    return [
        {
            "job": job,
            "from": sender,
            "to": receiver,
            "through": through,
            "bytes": amount,
            "assumed_bytes": assumed,
            "assumed_order_bytes": order,
        }
        for (job, sender, receiver, through), (amount, assumed, order) in sorted(
            sums.items(), key=lambda item: -item[1][0]
        )
    ]


class _Measuring:
    def __init__(self, selection: Selection, *, is_by_rank: bool) -> None:
        self._selection = selection
        self._store = selection.store
        self._is_by_rank = is_by_rank
        self._places: dict[Place, int] = {}
        self._place_of_member = [self._place(index) for index in range(len(self._store.members))]
        self._hosts = {host: index for index, host in enumerate(sorted({p.host for p in self._store.processes}))}
        self._seats: dict[int, tuple[Seats, np.ndarray[tuple[int], np.dtype[np.int64]]]] = {}
        self._kinds: dict[tuple[str, str | None], int] = {}
        self._unplaced = 0

    def measure(self) -> Traffic:
        sums = TrafficSums(max(1, len(self._places)))
        for communicator, calls in self._calls():
            self._add(sums, communicator, calls)
        places, kinds = list(self._places), list(self._kinds)
        rows = tuple(
            TrafficRow(
                places[sender],
                None if receiver == NOWHERE else places[receiver],
                THROUGH[way],
                *kinds[kind],
                amount,
                assumed,
                order,
            )
            for kind, sender, receiver, way, amount, assumed, order in sums.rows()
        )
        return Traffic(tuple(sorted(places, key=_order)), rows, self._is_by_rank, self._unplaced)

    def _place(self, index: int) -> int:
        member = self._store.members[index]
        if member.global_rank is None:
            return NOWHERE
        job, host = self._store.process_job[member.process], self._store.processes[member.process].host
        place = Place(job, host, member.global_rank if self._is_by_rank else None)
        return self._places.setdefault(place, len(self._places))

    def _seated(self, communicator: Communicator) -> tuple[Seats, np.ndarray[tuple[int], np.dtype[np.int64]]]:
        """The nodes of a communicator's ranks, and their places."""
        found = self._seats.get(communicator.index)
        if found is None:
            size = communicator.size if 0 < communicator.size <= _MAX_SIZE else 0
            nodes, places = [-1] * size, np.full(size, NOWHERE, dtype=np.int64)
            for rank, member in (communicator.members or {}).items():
                if 0 <= rank < size:
                    nodes[rank] = self._hosts[self._store.processes[self._store.members[member].process].host]
                    places[rank] = self._place_of_member[member]
            channels = self._store.channels.get(communicator.index)
            found = self._seats[communicator.index] = Seats(tuple(nodes), channels), places
        return found

    def _add(self, sums: TrafficSums, communicator: Communicator, calls: Calls) -> None:
        seats, places = self._seated(communicator)
        kind = self._kinds.setdefault((calls.op, communicator.parallelism), len(self._kinds))
        for flow in flows(calls, seats):
            receivers = places[flow.receivers] if flow.way is Way.PEER else np.array([NOWHERE])
            sender = int(places[calls.rank])
            if sender == NOWHERE or (flow.way is Way.PEER and (receivers == NOWHERE).all()):
                self._unplaced += 1
                continue
            is_known = receivers != NOWHERE if flow.way is Way.PEER else np.ones(1, dtype=np.bool_)
            self._unplaced += not is_known.all()
            sums.add(kind, sender, receivers[is_known], flow)

    def _calls(self) -> Iterator[tuple[Communicator, Calls]]:
        """Calls that are alike, summed over the run."""
        sums: dict[tuple[int, str, int, int], int] = {}
        algorithms = Algorithms(self._store, self._selection.operations.slices())
        for rows in self._selection.operations.slices():
            view = OperationView(self._store, rows)
            ops = operation_column(view, "op")
            words: tuple[str, ...] = ops.words or ()
            other = [operation_column(view, name) for name in ("root", "peer")]
            peer = np.where(other[0].is_known, other[0].values, np.where(other[1].is_known, other[1].values, -1))
            is_known = ops.is_known & (rows["member"] >= 0) & (rows["message_bytes"] > 0)
            columns = (rows["member"], ops.values, algorithms.algorithms_of(rows), peer)
            keys, codes = distinct_together(*(column[is_known].astype(np.int64) for column in columns))
            found = np.zeros(len(keys[0]), dtype=np.int64)
            np.add.at(found, codes, rows["message_bytes"][is_known])
            for member, op, algorithm, root, amount in zip(*(key.tolist() for key in (*keys, found)), strict=True):
                key = (member, words[int(op)], algorithm, root)
                sums[key] = sums.get(key, 0) + amount
        for (member, op, algorithm, root), amount in sums.items():
            of = self._store.members[member]
            if of.rank is None:
                self._unplaced += 1
                continue
            name = ALGORITHMS[algorithm] if 0 <= algorithm < len(ALGORITHMS) else None
            peer_rank = root if root >= 0 else None
            yield (
                self._store.communicators[of.communicator],
                Calls(op=op, algorithm=name, rank=of.rank, peer=peer_rank, bytes=amount),
            )


_MAX_SIZE: Final = 1 << 20
"""A communicator that says it is larger is taken for damage of a line."""


def _order(place: Place) -> tuple[str, int, str]:
    return place.job, -1 if place.rank is None else place.rank, place.host


def _tables(traffic: Traffic) -> Iterator[pa.Table]:
    rows = traffic.rows
    for begin in range(0, len(rows), _ROWS_PER_GROUP):
        records = [_record(row) for row in rows[begin : begin + _ROWS_PER_GROUP]]
        yield pa.Table.from_pylist(records, schema=schema.TRAFFIC)


def _record(row: TrafficRow) -> dict[str, object]:
    receiver = row.receiver
    return {
        "job": row.sender.job,
        "from_rank": row.sender.rank,
        "to_rank": None if receiver is None else receiver.rank,
        "from_host": row.sender.host,
        "to_host": None if receiver is None else receiver.host,
        "through": row.through,
        "op": row.op,
        "parallelism": row.parallelism,
        "bytes": row.bytes,
        "assumed_bytes": row.assumed_bytes,
        "assumed_order_bytes": row.assumed_order_bytes,
    }

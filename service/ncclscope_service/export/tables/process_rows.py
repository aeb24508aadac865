"""The rows of a table by process, as positions: nothing is copied before it is drawn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns.table import Rows
from ncclscope_service.export.selection import Part, Positions, Selection
from ncclscope_wire.batch import Columns


@dataclass(frozen=True, slots=True)
class ProcessRows:
    """Some rows of one process."""

    table: Rows
    positions: Positions

    def __len__(self) -> int:
        return len(self.positions)

    def column(self, name: str) -> NDArray[np.int64]:
        """One column of these rows, as int64."""
        values: NDArray[np.int64] = self.table[name][self.positions].astype(np.int64)
        return values

    def take(self, chosen: Positions) -> Columns:
        """A copy of some of these rows."""
        rows: Columns = self.table[self.positions[chosen]]
        return rows

    def where(self, mask: NDArray[np.bool_]) -> ProcessRows:
        """Those of these rows for which the mask is true."""
        return ProcessRows(self.table, self.positions[mask])


def rows_by_process(part: Part, mask: NDArray[np.bool_] | None = None) -> dict[int, ProcessRows]:
    """The rows of each process that has any, in store order; with a mask over the part, only those."""
    chosen = np.arange(len(part)) if mask is None else np.nonzero(mask)[0]
    positions = chosen if part.positions is None else part.positions[chosen]
    processes = part.rows["process"][positions]
    order = np.argsort(processes, kind="stable")
    distinct, begins = np.unique(processes[order], return_index=True)
    groups = np.split(positions[order], begins[1:])
    return (
        {process: ProcessRows(part.rows, group) for process, group in zip(distinct.tolist(), groups, strict=True)}
        if len(distinct)
        else {}
    )


def process_ranks(selection: Selection) -> dict[int, list[int]]:
    """Global ranks by process index, sorted; one per process, except if a process drives several GPUs."""
    ranks: dict[int, set[int]] = {}
    for member in selection.store.members:
        if member.global_rank is not None:
            ranks.setdefault(member.process, set()).add(member.global_rank)
    return {process: sorted(found) for process, found in ranks.items()}


def processes_by_rank(selection: Selection) -> list[int]:
    """The selected processes by global rank; those without one last, by host and pid."""
    ranks, processes = process_ranks(selection), selection.store.processes

    def key(process: int) -> tuple[bool, int, str, int]:
        rank = ranks.get(process, [-1])[0]
        return rank < 0, rank, processes[process].host, processes[process].pid

    return sorted(selection.processes(), key=key)


def process_name(selection: Selection, process: int, ranks: dict[int, list[int]]) -> str:
    """For instance "rank 3 (node1 pid 123)"."""
    record = selection.store.processes[process]
    where = f"{record.host} pid {record.pid}"
    if process not in ranks:
        return where
    listed = ",".join(str(rank) for rank in ranks[process])
    return f"rank {listed} ({where})" if len(ranks[process]) == 1 else f"ranks {listed} ({where})"

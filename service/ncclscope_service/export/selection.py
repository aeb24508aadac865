"""Which part of the store is written: a whole run, one job, or a stretch of time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns.table import AnyRows, Rows
from ncclscope_service.intake.aliases import Names, names_of, with_names
from ncclscope_service.job.ranks import global_ranks
from ncclscope_service.nccl.nccl_tests import Benchmark
from ncclscope_service.store.records import Communicator, Finding, Verdict
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

Positions: TypeAlias = NDArray[np.intp]

_ABOUT_LAST_NS: Final = 20_000
"""The kernels of one collective end up to 10 us apart, which hides who of those that come within twice that is last."""

ROWS_PER_SLICE: Final = 1 << 18
"""Rows that are worked on at once; bounds the memory of a writer whatever the run's length."""


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a table that is written; None means all rows (and costs no index)."""

    rows: Rows
    positions: Positions | None

    def __len__(self) -> int:
        return len(self.rows) if self.positions is None else len(self.positions)

    def slices(self, rows_per_slice: int = ROWS_PER_SLICE) -> Iterator[AnyRows]:
        """The rows in store order, a bounded number at a time."""
        for begin in range(0, len(self), rows_per_slice):
            end = begin + rows_per_slice
            yield self.rows[begin:end] if self.positions is None else self.rows[self.positions[begin:end]]

    def column(self, name: str) -> NDArray[np.number]:
        """One column of all rows of the part."""
        values: NDArray[np.number] = self.rows[name]
        return values if self.positions is None else values[self.positions]


@dataclass(frozen=True, slots=True)
class Selection:
    """The part of a store that is written; tables are views into it and valid until it next grows."""

    store: Store
    operations: Part
    kernels: Part
    outside: Part
    """Kernels that communicate without NCCL."""
    collectives: Part
    ranges: Part
    communicators: tuple[Communicator, ...]
    findings: tuple[Finding, ...]
    """Their sentences have the names of communicators."""
    verdicts: Mapping[str, Verdict]
    """How each job ended, of those of which that is known; their sentences have names too."""
    names: Names
    jobs: tuple[str, ...]
    has_process: NDArray[np.bool_]
    """By process index: is it part of what is written."""
    benchmarks: tuple[Benchmark, ...] = ()
    """Tables of nccl-tests in the files that were read; a service that follows a run reads none."""

    def processes(self) -> list[int]:
        """Indices of the processes that are part of it."""
        listed: list[int] = np.nonzero(self.has_process)[0].tolist()
        return listed


def select(
    store: Store,
    *,
    job: str | None = None,
    since_ns: int | None = None,
    iterations: tuple[int, int] | None = None,
) -> Selection:
    """All of the store, or one job, or what has happened since a time (UTC ns), or some iterations (both ends count).

    A row belongs to the stretch by its kernel's end, else by its stamp, else by its arrival; one without
    any time is left out of a stretch, since nobody can say that it belongs there. With `iterations`, operations of
    which the iteration is not known are left out, and kernels, collectives and ranges are those of the operations.
    """
    in_job = np.array([job is None or name == job for name in store.process_job], dtype=np.bool_)
    operations = _part(store.operations.rows, in_job, ("end_ns", "logged_at_ns", "observed_at_ns"), since_ns)
    kernels = _part(store.kernels.rows, in_job, ("end_ns",), since_ns)
    outside = _part(store.outside.rows, in_job, ("end_ns",), since_ns)
    ranges = _part(store.ranges.rows, in_job, ("end_ns", "start_ns"), since_ns)
    communicators = tuple(c for c in store.listed_communicators() if job is None or c.job == job)
    collectives = store.collectives.rows
    is_ours = np.isin(collectives["communicator"], [c.index for c in communicators])
    if since_ns is not None:
        is_ours &= collectives["end_true_ns"] >= since_ns
    if iterations is not None:
        first, last = iterations
        operations = _narrowed(
            operations, (operations.column("iteration") >= first) & (operations.column("iteration") <= last)
        )
        kernels = _narrowed(kernels, np.isin(kernels.column("launch"), operations.column("launch")))
        outside = _narrowed(outside, _lies_within(outside, operations))
        ranges = _narrowed(ranges, _lies_within(ranges, operations))
        keys = collective_keys(collectives["communicator"], collectives["coll_seq"])
        is_ours &= np.isin(keys, _keys_of(store, operations))
    names = names_of(store.communicators, store.members)
    jobs = tuple(sorted({name for name, ours in zip(store.process_job, in_job, strict=True) if ours}))
    return Selection(
        store=store,
        operations=operations,
        kernels=kernels,
        outside=outside,
        collectives=Part(collectives, None if is_ours.all() else np.nonzero(is_ours)[0]),
        ranges=ranges,
        communicators=communicators,
        findings=tuple(
            replace(f, summary=with_names(f.summary, f.job, names))
            for f in store.findings
            if (job is None or f.job == job) and _is_open_at(f, since_ns)
        ),
        verdicts={
            each: replace(verdict, summary=with_names(verdict.summary, each, names))
            for each in jobs
            if (verdict := store.verdicts.get(each)) is not None
        },
        names=names,
        jobs=jobs,
        has_process=in_job,
    )


def latest_iterations(selection: Selection, operations: int) -> tuple[int, int] | None:
    """The latest iterations that have at most so many operations together, but one at least; None if that is all.

    Also None if no iteration is known.
    """
    if len(selection.operations) <= operations:
        return None
    found = selection.operations.column("iteration").astype(np.int64)
    found = found[found >= 0]
    if not len(found):
        return None
    counts = np.bincount(found)
    fits = np.cumsum(counts[::-1]) <= operations
    first = len(counts) - max(1, int(np.count_nonzero(fits)))
    return first, len(counts) - 1


def _narrowed(part: Part, keep: NDArray[np.bool_]) -> Part:
    """Of a part, the rows for which `keep` (by row of the part) is true."""
    positions = np.arange(len(part.rows)) if part.positions is None else part.positions
    return Part(part.rows, positions[keep])


def _lies_within(ranges: Part, operations: Part) -> NDArray[np.bool_]:
    """Ranges that begin between the first and the last time of the operations."""
    starts, ends = operations.column("start_ns"), operations.column("end_ns")
    known = starts != NO_TIME_NS
    if not known.any():
        return np.zeros(len(ranges), dtype=np.bool_)
    begins = ranges.column("start_ns")
    inside: NDArray[np.bool_] = (begins >= starts[known].min()) & (begins <= ends[known].max())
    return inside


def collective_keys(communicators: NDArray[np.number], coll_seq: NDArray[np.number]) -> NDArray[np.int64]:
    """One number for each collective; negative for Send and Recv, and where the communicator is not known."""
    keys: NDArray[np.int64] = communicators.astype(np.int64) << 40 | coll_seq.astype(np.int64)
    return keys


def _keys_of(store: Store, operations: Part) -> NDArray[np.int64]:
    communicator_of = np.asarray([member.communicator for member in store.members], np.int64)
    members = operations.column("member").astype(np.intp)
    return collective_keys(communicator_of[members], operations.column("coll_seq"))


@dataclass(frozen=True, slots=True)
class Seats:
    """The ranks of all communicators, one communicator after the other."""

    first: NDArray[np.int64]
    """By communicator index, where its rank 0 is; one more, for the end."""
    global_rank: NDArray[np.int64]
    """NO_NUMBER if it is not known."""

    def of_last(self, collectives: AnyRows) -> NDArray[np.int64]:
        """The seat that came last to each collective; NO_NUMBER if one was not seen or several came about last."""
        is_known = self.are_seen(collectives) & (collectives["blame_ns"] > _ABOUT_LAST_NS)
        return np.where(is_known, self.first[collectives["communicator"]] + collectives["last_rank"], NO_NUMBER)

    def are_seen(self, collectives: AnyRows) -> NDArray[np.bool_]:
        """Whether the arrivals of all ranks were measured."""
        sizes = np.diff(self.first)[collectives["communicator"]]
        seen: NDArray[np.bool_] = (collectives["last_rank"] >= 0) & (collectives["ranks_seen"] == sizes)
        return seen


def seats(store: Store) -> Seats:
    """Those of every communicator of the store."""
    first = np.cumsum([0, *(communicator.size for communicator in store.communicators)], dtype=np.int64)
    global_rank = np.full(first[-1], NO_NUMBER, dtype=np.int64)
    for communicator in store.communicators:
        for rank, known in global_ranks(store, communicator).items():
            if rank < communicator.size:
                global_rank[first[communicator.index] + rank] = known
    return Seats(first, global_rank)


def _is_open_at(finding: Finding, since_ns: int | None) -> bool:
    return since_ns is None or finding.until_ns is None or finding.until_ns >= since_ns


def _part(table: Rows, in_job: NDArray[np.bool_], clocks: tuple[str, ...], since_ns: int | None) -> Part:
    if in_job.all() and since_ns is None:
        return Part(table, None)
    is_ours = in_job[table["process"]] if len(in_job) else np.zeros(len(table), dtype=np.bool_)
    if since_ns is not None:
        at_ns = np.full(len(table), NO_TIME_NS, dtype=np.int64)
        for clock in clocks:
            at_ns = np.where(at_ns == NO_TIME_NS, table[clock], at_ns)
        is_ours = is_ours & (at_ns >= since_ns)
    return Part(table, np.nonzero(is_ours)[0])


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

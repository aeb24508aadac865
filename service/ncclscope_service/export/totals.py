"""Sums over the selected operations, and the communication signatures of communicators, as plain tables.

Summary, report and terminal show the same sums, which come from one pass over the rows. How often a rank calls each
operation in one iteration is given by kind of communicator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns.group_by import distinct_together, first_positions, group_by
from ncclscope_service.export.selection import Selection
from ncclscope_service.export.tables.columns import OperationView
from ncclscope_service.export.tables.iterations_file import selected_budget, selected_iterations
from ncclscope_service.export.tables.operations_file import operation_column
from ncclscope_service.job.step_budget import StepBudget
from ncclscope_service.measure.expected_times import JobEstimator
from ncclscope_service.measure.latency_advice import LatencyAdvice, latency_advice
from ncclscope_service.rollup.usage import Signature, Traffic, signature_of
from ncclscope_service.store.rows import Match, TimingSource, timing_sources
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS, OPERATIONS

MAX_OPERATIONS: Final = 4_000_000
"""Operations that are looked at: the latest. Bounds memory to half a gigabyte."""

_NAMES: Final = [operation.name for operation in OPERATIONS]


def signatures(selection: Selection) -> dict[int, Signature]:
    """By communicator index; communicators without an operation have none."""
    store, part = selection.store, selection.operations
    latest = slice(max(0, len(part) - MAX_OPERATIONS), None)
    columns = {
        name: part.column(name)[latest]
        for name in ("member", "template", "message_bytes", "iteration", "start_ns", "end_ns", "logged_at_ns")
    }
    communicator_of = np.asarray([member.communicator for member in store.members], np.int64)
    members = columns["member"].astype(np.intp)
    communicators = np.where(members >= 0, communicator_of[members] if len(communicator_of) else -1, -1)
    codes = store.operation_templates.rows["op"][columns["template"].astype(np.intp)].astype(np.int64)
    starts = np.where(columns["start_ns"] == NO_TIME_NS, columns["logged_at_ns"], columns["start_ns"])
    return {
        communicator: signature_of(
            Traffic(
                rank=members[mine].astype(np.int64),
                op=codes[mine],
                message_bytes=columns["message_bytes"][mine].astype(np.int64),
                iteration=columns["iteration"][mine].astype(np.int64),
                start_ns=starts[mine].astype(np.int64),
                end_ns=columns["end_ns"][mine].astype(np.int64),
            )
        )
        for communicator, mine in group_by(communicators)
        if communicator >= 0
    }


def mix_of(signature: Signature | None) -> list[dict[str, object]] | None:
    """The operation mix with names, most operations first."""
    if signature is None:
        return None
    return [{"op": op_name(op), "operations": amount, "bytes": moved} for op, amount, moved in signature.mix]


def op_name(code: int) -> str | None:
    """The operation's name; None for one that is not known."""
    return _NAMES[code] if code < len(_NAMES) else None


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls of one operation by one rank in one iteration, over the ranks and iterations that have any."""

    median: float
    least: int
    most: int
    median_bytes: float


def calls_per_iteration(selection: Selection) -> Mapping[tuple[str, str | None], Calls]:
    """By (operation, parallelism); without operations whose iteration is not known. 0.2 s for a million operations."""
    store, part = selection.store, selection.operations
    iteration = part.column("iteration")
    chosen = np.flatnonzero(iteration != NO_NUMBER)
    if not len(chosen):
        return {}
    names: list[str | None] = [*dict.fromkeys([None, *(each.parallelism for each in store.communicators)])]
    # The last place of each is that of NO_NUMBER: operations of an unknown communicator.
    kind_of = np.asarray([*(names.index(each.parallelism) for each in store.communicators), 0], np.int64)
    communicator_of = np.asarray([*(each.communicator for each in store.members), NO_NUMBER], np.int64)
    ranks = (NO_NUMBER if each.global_rank is None else each.global_rank for each in store.members)
    rank_of = np.asarray([*ranks, NO_NUMBER], np.int64)
    members = part.column("member")[chosen].astype(np.intp)
    ops = store.operation_templates.rows["op"][part.column("template")[chosen].astype(np.intp)].astype(np.int64)
    columns, place = distinct_together(
        ops,
        kind_of[communicator_of[members]],
        part.column("process")[chosen].astype(np.int64),
        rank_of[members],
        iteration[chosen].astype(np.int64),
    )
    counts = np.bincount(place)
    moved = np.zeros(len(counts), np.int64)
    np.add.at(moved, place, np.maximum(part.column("message_bytes")[chosen].astype(np.int64), 0))
    pairs, group = distinct_together(columns[0], columns[1])
    found: dict[tuple[str, str | None], Calls] = {}
    for row, (op, kind) in enumerate(zip(pairs[0].tolist(), pairs[1].tolist(), strict=True)):
        mine = counts[group == row]
        found[op_name(op) or "", names[kind]] = Calls(
            float(np.median(mine)), int(mine.min()), int(mine.max()), float(np.median(moved[group == row]))
        )
    return found


_Key = TypeVar("_Key")


@dataclass(slots=True, kw_only=True)
class Total:
    """Sums over some operations. Launches and times count each launch once, however many operations share it."""

    operations: int = 0
    sized: int = 0
    """Operations whose message size is known."""
    bytes: int = 0
    """Message bytes of those operations."""
    matched: int = 0
    timed: int = 0
    """Launches whose duration is known."""
    duration_ns: int = 0
    waits: int = 0
    """Launches whose wait is known."""
    wait_ns: int = 0
    waiting_duration_ns: int = 0
    """Duration of those launches."""
    transfers: int = 0
    """Launches whose transfer is known."""
    transfer_ns: int = 0

    def add(self, other: Total) -> None:
        """Adds another's sums to this one's."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def wait_ratio(self) -> float | None:
        """Waiting as a share of kernel time, over the launches whose wait is known; None if none is."""
        return self.wait_ns / self.waiting_duration_ns if self.waiting_duration_ns > 0 else None


_SUMS: Final = tuple(field.name for field in fields(Total))


@dataclass(frozen=True, slots=True)
class Group:
    """Key of one sum: a communicator, an operation and a process."""

    communicator: int
    """Communicator index; NO_NUMBER if the operation has none."""
    op: str
    process: int


@dataclass(frozen=True, slots=True)
class Totals:
    """All sums of a selection, by communicator, operation and process."""

    by_group: dict[Group, Total]
    match: dict[Match, int]
    iterations: Columns
    """`iteration_times.ITERATION` rows."""
    budget: StepBudget
    """Where the time of these iterations went."""
    signatures: Mapping[int, Signature]
    """By communicator index."""
    calls: Mapping[tuple[str, str | None], Calls]
    """Of one rank in one iteration, by operation and parallelism."""
    estimators: Mapping[str, JobEstimator]
    """By job: how long transfers should take."""
    advice: list[tuple[str, LatencyAdvice]]
    """By job, what would be faster than its transfers that are bound by latency."""

    def all(self) -> Total:
        """The sum of everything."""
        return self.by(lambda _: None).get(None, Total())

    def by(self, key: Callable[[Group], _Key]) -> dict[_Key, Total]:
        """Sums by any key of the groups, most operations first."""
        sums: dict[_Key, Total] = {}
        for group, total in self.by_group.items():
            sums.setdefault(key(group), Total()).add(total)
        return dict(sorted(sums.items(), key=lambda item: -item[1].operations))


def totals(selection: Selection) -> Totals:
    """Sums over the selected operations, a slice at a time."""
    by_group: dict[Group, Total] = {}
    match = np.zeros(len(Match), dtype=np.int64)
    is_first = first_of_launch(selection.operations.column("launch"))
    begin = 0
    for rows in selection.operations.slices():
        match += np.bincount(rows["match"], minlength=len(Match))[: len(Match)]
        view = OperationView(selection.store, rows)
        for group, total in _slice_totals(view, is_first[begin : begin + len(rows)]):
            by_group.setdefault(group, Total()).add(total)
        begin += len(rows)
    iterations = selected_iterations(selection)
    store, collectives = selection.store, collective_rows(selection)
    return Totals(
        by_group,
        {kind: int(match[kind]) for kind in Match},
        iterations,
        selected_budget(selection, iterations),
        signatures(selection),
        calls_per_iteration(selection),
        {job: JobEstimator(store, job, collectives) for job in selection.jobs},
        [(job, each) for job in selection.jobs for each in latency_advice(store, job, collectives)],
    )


def collective_rows(selection: Selection) -> Columns:
    """The selected rows.COLLECTIVE, with the columns that estimates need."""
    part = selection.collectives
    names = ("communicator", "op", "message_bytes", "transfer_ns", "busbw", "end_true_ns")
    found: Columns = np.empty(len(part), np.dtype([(name, part.rows.dtype[name]) for name in names]))
    for name in names:
        found[name] = part.column(name)
    return found


def first_of_launch(launches: NDArray[np.number]) -> NDArray[np.bool_]:
    """Whether a row is the first of its launch in this order; rows without a launch are not."""
    is_first = np.zeros(len(launches), dtype=np.bool_)
    has_launch = np.flatnonzero(launches >= 0)
    is_first[has_launch[first_positions(launches[has_launch].astype(np.int64))]] = True
    return is_first


def _slice_totals(view: OperationView, is_first: NDArray[np.bool_]) -> Iterable[tuple[Group, Total]]:
    ops = operation_column(view, "op")
    words: tuple[str, ...] = ops.words or ()
    columns = (view.communicators(), np.where(ops.is_known, ops.values, -1), view.rows["process"])
    keys, codes = distinct_together(*(column.astype(np.int64) for column in columns))
    sums = {name: _sums(codes, len(keys[0]), values) for name, values in _addends(view, is_first).items()}
    for index, (communicator, op, process) in enumerate(zip(*(key.tolist() for key in keys), strict=True)):
        group = Group(communicator, words[int(op)] if op >= 0 else "", process)
        yield group, Total(**{name: int(values[index]) for name, values in sums.items()})


def _sums(codes: NDArray[np.intp], groups: int, values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Integer sums by group: exact, unlike bincount's floating weights."""
    sums = np.zeros(groups, dtype=np.int64)
    np.add.at(sums, codes, values)
    return sums


def _addends(view: OperationView, is_first: NDArray[np.bool_]) -> dict[str, NDArray[np.int64]]:
    """The amount that each row adds to each sum."""
    rows = view.rows
    size = operation_column(view, "message_bytes")
    # What Inspector times has no launch that others share.
    is_first = is_first | (timing_sources(rows) == TimingSource.INSPECTOR)
    duration = operation_column(view, "duration_ns").where(is_first)
    wait = operation_column(view, "wait_ns").where(duration.is_known)
    transfer = operation_column(view, "transfer_ns").where(is_first)
    return {
        "operations": np.ones(len(rows), dtype=np.int64),
        "sized": size.is_known.astype(np.int64),
        "bytes": view.moved_bytes(),
        "matched": (rows["match"] == Match.MATCHED).astype(np.int64),
        "timed": duration.is_known.astype(np.int64),
        "duration_ns": np.where(duration.is_known, duration.values, 0),
        "waits": wait.is_known.astype(np.int64),
        "wait_ns": np.where(wait.is_known, wait.values, 0),
        "waiting_duration_ns": np.where(wait.is_known, duration.values, 0),
        "transfers": transfer.is_known.astype(np.int64),
        "transfer_ns": np.where(transfer.is_known, transfer.values, 0),
    }

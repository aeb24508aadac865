"""Certain pairs of one process, between the rows of the store and its careful aligners.

What is certain never reaches the careful aligners. They learn what they would have learnt from it: which stream a lane
of the log is, how often neighbours were launched apart, how many launches nothing was lost of, how long kernels queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ncclscope_service.align.certain import (
    CertainPairs,
    Flags,
    Integers,
    Known,
    Launched,
    Lines,
    Stretches,
    certain_pairs,
)
from ncclscope_service.align.nvtx_calls import ThreadCalls, joined_calls, thread_calls
from ncclscope_service.align.process_aligner import ProcessAligner
from ncclscope_service.align.records import MATCH, OPERATION_COLUMNS, AlignerRows
from ncclscope_service.columns import row_ops
from ncclscope_service.columns.group_by import distinct_together, first_positions, group_by
from ncclscope_service.columns.table import Ids
from ncclscope_service.intake.tuning import NO_CHANNELS
from ncclscope_service.store.rows import Match
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.records import CaptureSeen
from ncclscope_wire.terms import NO_NUMBER

_SURE: Final = 0.99
"""Confidence where no NVTX range confirms a pair: that of a careful aligner."""


@dataclass(frozen=True, slots=True)
class Certain:
    """The decisions for a process, and the rows that are left."""

    matches: Columns
    """records.MATCH."""
    left: Flags
    """Operations that are not decided."""
    left_kernels: Flags
    skipped: Integers
    """How many operations of its thread were decided between each operation that is left and the one before it."""
    stretches: Stretches
    lanes: Sequence[tuple[int, int, int]]
    """(member, device, stream) of what was decided."""


class CertainPairing:
    """Finds what is certain in rows of a store."""

    def __init__(self, known: Store, rows: AlignerRows) -> None:
        self._store = known
        self._rows = rows

    def pair(
        self,
        aligner: ProcessAligner,
        operations: Ids,
        kernels: Columns,
        calls: Columns,
        captures: Sequence[CaptureSeen],
        *,
        is_last: bool,
    ) -> Certain | None:
        """The certain matches of operations and kernels (records.ALIGN_KERNEL) of a process; None if there is none.

        `calls` (rows.API_CALL) are those of the captures; without any, the process has no NVTX ranges. `is_last`:
        nothing more of the process will come.
        """
        if not aligner.may_be_certain:
            return None
        order = np.argsort(kernels["correlation_id"], kind="stable")
        columns = row_ops.take(kernels, order)
        if (columns["correlation_id"][1:] == columns["correlation_id"][:-1]).any():
            return None
        lines = self._lines(aligner, operations)
        launched = Launched(
            columns["launch_tid"].copy(),
            columns["launch_start_ns"].copy(),
            aligner.kernel_lanes_of(columns),
            columns["kernel_class"].copy(),
            columns["data_type"].copy(),
        )
        captures = sorted(captures, key=lambda each: each.start_ns)
        known = Known(
            aligner.known_kernel_lanes,
            aligner.counting,
            np.array([each.start_ns for each in captures], np.int64),
            _by_thread(calls, captures) if len(calls) else None,
            is_whole=is_last and aligner.newest_operation == NO_NUMBER,
        )
        pairs = certain_pairs(lines, launched, known)
        if not len(pairs.lines):
            return None
        lanes = aligner.observe_certain(lines, pairs, columns, int(operations[0]))
        left, left_kernels = np.ones(len(operations), bool), np.ones(len(kernels), bool)
        left[pairs.lines], left_kernels[order[pairs.kernels]] = False, False
        skipped = _skipped(lines.tid, left)
        left[pairs.silent] = False
        return Certain(
            self._matches(operations, columns["id"], pairs, 1.0 if known.calls is not None else _SURE),
            left,
            left_kernels,
            skipped[left],
            pairs.stretches,
            lanes,
        )

    def _lines(self, aligner: ProcessAligner, operations: Ids) -> Lines:
        names = ("template", "member", "logged_at_ns", "op_count", "group", "channels")
        rows = self._store.operations.take(operations, *names)
        # What recurs is looked up once, in order of appearance.
        _, kind = distinct_together(rows["member"], rows["template"])
        first = first_positions(kind)
        appearing = np.argsort(first)
        chosen = operations[first[appearing]]
        recurring = self._rows.operations(chosen, self._store.operations.take(chosen, *OPERATION_COLUMNS))
        of_kind = np.empty(len(first), np.intp)
        of_kind[appearing] = np.arange(len(first))
        at = of_kind[kind]
        signatures, decisions = aligner.decisions_of(recurring)
        lane = np.where(decisions["launches"], decisions["lane"], NO_NUMBER).astype(np.int32)[at]
        lane[rows["channels"] == NO_CHANNELS] = NO_NUMBER
        return Lines(
            tid=recurring["tid"].astype(np.int64)[at],
            time_ns=rows["logged_at_ns"].copy(),
            lane=lane,
            signature=signatures[at],
            classes=decisions["classes"][at],
            data_type=decisions["data_type"][at],
            op_count=rows["op_count"].copy(),
            group=rows["group"].copy(),
            kind=recurring["op"][at],
        )

    @staticmethod
    def _matches(operations: Ids, kernels: Ids, pairs: CertainPairs, confidence: float) -> Columns:
        amount, own = len(pairs.lines), operations[pairs.lines]
        matches = np.empty(amount + len(pairs.silent), MATCH)
        matches["operation"][:amount], matches["kernel"][:amount] = own, kernels[pairs.kernels]
        matches["launch"][:amount] = own[np.maximum.accumulate(np.where(pairs.is_first, np.arange(amount), 0))]
        matches["match"][:amount], matches["confidence"][:amount] = Match.MATCHED, confidence
        silent = matches[amount:]
        silent["operation"], silent["kernel"], silent["launch"] = operations[pairs.silent], NO_NUMBER, NO_NUMBER
        silent["match"], silent["confidence"] = Match.NO_KERNEL, 1.0
        return matches


def _by_thread(calls: Columns, captures: Sequence[CaptureSeen]) -> dict[int, ThreadCalls]:
    """Calls (rows.API_CALL) of these captures, capture by capture."""
    found: dict[int, list[ThreadCalls]] = {}
    for capture in captures:
        inside = (calls["start_ns"] >= capture.start_ns) & (calls["start_ns"] <= capture.end_ns)
        own = calls if inside.all() else row_ops.filter_rows(calls, inside)
        for tid, mine in group_by(own["tid"]):
            found.setdefault(tid, []).append(thread_calls(row_ops.take(own, mine)))
    return {tid: joined_calls(each) for tid, each in found.items()}


def _skipped(tids: Integers, left: Flags) -> Integers:
    """For each line that is left, how many of its thread were taken since the one before it that is left."""
    skipped = np.zeros(len(left), np.int64)
    for _, mine in group_by(tids):
        kept = np.flatnonzero(left[mine])
        skipped[mine[kept]] = np.diff(kept, prepend=-1) - 1
    return skipped

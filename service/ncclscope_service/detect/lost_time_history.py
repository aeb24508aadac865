"""Puts the time that others lose to each rank of a job into the history of the job, as steps end.

A step is taken when collectives of some steps behind it were measured, with others around it, which say what is usual.
What is measured later than that is taken with the next ones, if it is a whole step of its group. Until then the steps
are in memory, where charts find them (`show.lost_time`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ncclscope_service.columns import row_ops
from ncclscope_service.columns.buckets import Int64s, LastingSums
from ncclscope_service.columns.group_by import distinct
from ncclscope_service.detect.lost_time import COLUMNS, lost_times, most_steps
from ncclscope_service.job.ranks import global_ranks
from ncclscope_service.store.job_history import JobHistory
from ncclscope_service.store.settings import SECOND_NS
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_TIME_NS

_TOGETHER: Final = 16
"""Steps that are taken together at least,"""
_LONGEST_NS: Final = 60 * SECOND_NS
"""unless they have waited for so long, or nothing has come since."""
_BEHIND_STEPS: Final = 2
_BEHIND_NS: Final = 5 * SECOND_NS
"""A step has ended when collectives that ended so much later were measured."""
_MOST_WAITING: Final = 200_000
"""Collectives: with more of them steps are taken as they are."""


@dataclass(slots=True, eq=False)
class LostTimeHistory:
    """Collectives of one job that are not in its history yet."""

    _parts: list[Columns] = field(default_factory=list[Columns])
    """COLUMNS."""
    _rows: int = 0
    _since_ns: int = 0
    """When the first of them came, or steps were taken last."""
    _came_ns: int = 0
    """When the last of them came."""
    _looked_ns: int = 0

    def ingest(self, measured: Columns, now_ns: int) -> None:
        """Takes measured collectives (`rows.COLLECTIVE`) of the job; those without a time are dropped."""
        is_timed = measured["end_true_ns"] != NO_TIME_NS
        at = np.flatnonzero(is_timed & ((measured["last_rank"] >= 0) | (measured["rank"] >= 0)))
        if not len(at):
            return
        if not self._rows:
            self._since_ns = self._looked_ns = now_ns
        self._came_ns = now_ns
        self._parts.append(row_ops.take_columns(measured, at, COLUMNS))
        self._rows += len(at)

    def process(self, store: Store, job: str, now_ns: int, step_ns: int | None, *, final: bool) -> None:
        """Adds the steps that have ended to the history of the job; `step_ns`: how long one takes, if that is known."""
        is_over = final or self._rows >= _MOST_WAITING or now_ns - self._came_ns >= _LONGEST_NS
        if not self._rows or not (is_over or now_ns - self._looked_ns >= _BEHIND_NS):
            return
        self._looked_ns = now_ns
        length_ns = SECOND_NS if step_ns is None else max(step_ns, 1)
        rows = row_ops.concat(self._parts)
        self._parts = [rows]
        steps = rows["end_true_ns"].astype(np.int64) // length_ns
        has_ended = steps <= int(steps.max()) - max(_BEHIND_STEPS, -(-_BEHIND_NS // length_ns))
        has_ended |= is_over
        at = distinct(steps[has_ended])[0]
        is_due = is_over or len(at) >= _TOGETHER or now_ns - self._since_ns >= _LONGEST_NS
        if not len(at) or not is_due:
            return
        history = store.job_histories[job]
        if history.is_lost_per_step != (step_ns is not None):
            history.lost_time, history.is_lost_per_step = LastingSums(2), step_ns is not None
        own = [each for each in store.listed_communicators() if each.job == job]
        most = most_steps(len({rank for each in own for rank in global_ranks(store, each).values()}))
        for begin in range(0, len(at), most):
            chosen = has_ended & np.isin(steps, at[begin : begin + most])
            _add(store, job, history, row_ops.filter_rows(rows, chosen), length_ns)
        history.lost_until_ns = max(history.lost_until_ns, (int(at[-1]) + 1) * length_ns)
        left = row_ops.filter_rows(rows, ~has_ended)
        self._parts, self._rows, self._since_ns = [left], len(left), now_ns


def _add(store: Store, job: str, history: JobHistory, rows: Columns, step_ns: int) -> None:
    """Adds some whole steps."""
    found = lost_times(store, job, rows, step_ns, is_whole=True)
    if found is None:
        return
    ranks, steps = np.nonzero(found.is_known)
    groups: Int64s = np.array(found.ranks, np.int64)[ranks]
    history.lost_time.add(found.at[steps] * step_ns, groups, np.rint(found.lost[ranks, steps]), np.ones(len(ranks)))

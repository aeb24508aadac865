"""Logs that stopped: of one rank while its job goes on, or of a whole job whose communicators were not destroyed.

A collective needs every rank. If the other ranks of a communicator go on enqueuing for long, a rank whose log has
stopped is alive, and only its log is lost. If all logs of a job stop at once and no rank waits for another, the job was
killed, or does something else for very long.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from ncclscope_service.columns import row_ops
from ncclscope_service.columns.group_by import distinct
from ncclscope_service.detect.context import Context, Ledger, duration_text, names_of_ranks
from ncclscope_service.store.records import Finding, FindingKind, Severity
from ncclscope_service.store.settings import SECOND_NS
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER


class StoppedLogging:
    """Logs of one job that stopped, from its counts."""

    _unheard_ns: Mapping[str, int] = MappingProxyType({})
    """By host: when its agent was out of reach last, so that nothing could come."""

    def __init__(self) -> None:
        self._ledger = Ledger()
        self._context: Context | None = None
        self._first_ns = 0
        self._newest_ns = 0
        self._longest_gap_ns = 0
        self._behind: dict[int, tuple[int, int, int]] = {}
        """By global rank that is behind: time of its last line, newest time of the others, collectives between them."""

    def ingest_progress(self, progress: Columns, context: Context) -> None:
        """Takes the present counts (`progress.PROGRESS`)."""
        self._context = context
        if not len(progress):
            return
        newest = int(progress["last_ns"].max())
        if not self._first_ns:
            self._first_ns = self._newest_ns = newest
        if newest > self._newest_ns:
            is_heard = max(self._unheard_ns.values(), default=0) <= self._newest_ns
            self._longest_gap_ns = max(self._longest_gap_ns, (newest - self._newest_ns) * is_heard)
            self._newest_ns = newest
        self._behind = _behind(progress, context)

    def findings(self, now_ns: int, *, is_stuck: bool) -> list[Finding]:
        """All findings so far; `is_stuck`: a hang is open, which explains why a job is silent."""
        context = self._context
        if context is None:
            return []
        if context.silent_hosts:
            self._unheard_ns = {**self._unheard_ns, **dict.fromkeys(context.silent_hosts, now_ns)}
        current: dict[Hashable, Finding] = {
            ("rank", rank): self._rank_finding(rank, context) for rank in self._silent_ranks(context)
        }
        if self._is_silent(now_ns, context) and not is_stuck:
            current["job", 0] = self._job_finding(now_ns, context)
        self._ledger.renew(current, now_ns)
        return self._ledger.findings()

    def _silent_ranks(self, context: Context) -> list[int]:
        silence_ns = context.settings.stopped_logging.rank_silence_seconds * SECOND_NS
        return [
            rank
            for rank, (last, newest, _) in self._behind.items()
            if newest - last > silence_ns
            and all(newest - self._unheard_ns.get(host, 0) > silence_ns for host in context.hosts_of((rank,)))
        ]

    def _is_silent(self, now_ns: int, context: Context) -> bool:
        silence = now_ns - max(self._newest_ns, *self._unheard_ns.values(), 0)
        settings = context.settings.stopped_logging
        has_lived = self._newest_ns - self._first_ns >= settings.least_life_seconds * SECOND_NS
        patience = max(settings.job_silence_seconds * SECOND_NS, settings.longest_gaps * self._longest_gap_ns)
        return has_lived and silence > patience and bool(context.groups)

    def _rank_finding(self, rank: int, context: Context) -> Finding:
        last, newest, lag = self._behind[rank]
        hosts = context.hosts_of((rank,))
        return replace(
            _finding(last, context),
            ranks=(rank,),
            hosts=hosts,
            confidence=0.9,
            summary=(
                f"{names_of_ranks((rank,))}{f' ({hosts[0]})' if hosts else ''} has logged nothing for "
                f"{duration_text(newest - last)} while the other ranks enqueued {lag} more collectives with it: "
                "the rank is alive, its log is lost"
            ),
            evidence={"behind": lag, "silent_ns": newest - last},
        )

    def _job_finding(self, now_ns: int, context: Context) -> Finding:
        silent = now_ns - self._newest_ns
        return replace(
            _finding(self._newest_ns, context),
            summary=(
                f"the job has logged nothing for {duration_text(silent)}, no rank waits for another, and no "
                "communicator was destroyed: it was killed, or is busy with something else"
            ),
            evidence={"silent_ns": silent, "longest_gap_before_ns": self._longest_gap_ns},
        )


def _behind(progress: Columns, context: Context) -> dict[int, tuple[int, int, int]]:
    """As `StoppedLogging._behind`, from the present counts."""
    is_known = np.isin(progress["communicator"], np.fromiter(context.groups, np.int64))
    rows = row_ops.filter_rows(progress, is_known & (progress["sender"] == NO_NUMBER))
    communicators, inverse = distinct(rows["communicator"])
    front, newest = np.zeros((2, len(communicators)), np.int64)
    np.maximum.at(front, inverse, rows["operations"])
    np.maximum.at(newest, inverse, rows["last_ns"])
    lags = front[inverse] - rows["operations"]
    is_behind = lags >= context.settings.stopped_logging.least_behind_operations
    if not is_behind.any():
        return {}
    names = context.global_ranks_of(rows)
    found: dict[int, tuple[int, int, int]] = {}
    late = np.flatnonzero(is_behind & (names >= 0))
    for at in late[np.argsort(inverse[late], kind="stable")].tolist():
        name = int(names[at])
        found[name] = (int(rows["last_ns"][names == name].max()), int(newest[inverse[at]]), int(lags[at]))
    return found


def _finding(since_ns: int, context: Context) -> Finding:
    """The part that both findings have in common."""
    return Finding(
        kind=FindingKind.STOPPED_LOGGING,
        severity=Severity.WARNING,
        job=context.job,
        since_ns=since_ns,
        confidence=0.6,
        summary="",
        evidence={},
    )

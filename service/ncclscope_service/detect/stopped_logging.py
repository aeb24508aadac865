"""Logs that say nothing more: of a rank while its job goes on, or of a whole job whose communicators still live.

A collective needs every rank. Where the others of a communicator go on enqueuing for long, a rank whose log has stopped
is alive, and it is its log that is lost. Where all logs of a job stop at once and nobody waits for anybody, the job was
ended without a word, or does something else for very long.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Final

import numpy as np

from ncclscope_service.detect.context import Context
from ncclscope_service.detect.findings import Ledger, duration_text, names_of_ranks
from ncclscope_service.rows import Finding, FindingKind, Severity
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER

_JOB_SILENCE_NS: Final = 300_000_000_000
_LONGEST_FACTOR: Final = 3
_LEAST_LIFE_NS: Final = 30_000_000_000
"""A job must have logged for so long before its silence means something."""
_RANK_SILENCE_NS: Final = 30_000_000_000
_LEAST_BEHIND: Final = 256
"""Collectives by which the others are ahead: no host enqueues so far ahead of its GPU."""


class StoppedLogging:
    """Feeds on counts of one job's logs."""

    def __init__(self) -> None:
        self._ledger = Ledger()
        self._context: Context | None = None
        self._first_ns = 0
        self._newest_ns = 0
        self._longest_gap_ns = 0
        self._behind: dict[int, tuple[int, int, int]] = {}
        """By global rank whose log has stopped: its last time, the newest of the others, collectives between them."""

    def feed(self, progress: Columns, context: Context) -> None:
        """Takes the present counts (`hang.PROGRESS`)."""
        self._context = context
        if not len(progress):
            return
        newest = int(progress["last_ns"].max())
        if not self._first_ns:
            self._first_ns = self._newest_ns = newest
        self._longest_gap_ns = max(self._longest_gap_ns, newest - self._newest_ns)
        self._newest_ns = max(self._newest_ns, newest)
        collective = progress[progress["sender"] == NO_NUMBER]
        last_of: dict[int, int] = {}
        behind: dict[int, tuple[int, int, int]] = {}
        for communicator in np.unique(collective["communicator"]).tolist():
            group = context.groups.get(communicator)
            if group is None:
                continue
            rows = collective[collective["communicator"] == communicator]
            front, newest = int(rows["operations"].max()), int(rows["last_ns"].max())
            for rank, count, last in zip(
                *(rows[name].tolist() for name in ("rank", "operations", "last_ns")), strict=True
            ):
                name = group.global_ranks[rank] if rank < len(group.global_ranks) else NO_NUMBER
                last_of[name] = max(last_of.get(name, 0), last)
                if name >= 0 and front - count >= _LEAST_BEHIND:
                    behind[name] = (last, newest, front - count)
        self._behind = {name: (last_of[name], newest, lag) for name, (_, newest, lag) in behind.items()}

    def findings(self, now_ns: int, *, is_stuck: bool) -> list[Finding]:
        """All findings so far; `is_stuck`: a hang is open, which explains why a job is silent."""
        context = self._context
        if context is None:
            return []
        current: dict[Hashable, Finding] = {
            ("rank", rank): self._rank_finding(rank, context) for rank in self._silent_ranks(context)
        }
        if self._is_silent(now_ns, context) and not is_stuck:
            current["job", 0] = self._job_finding(now_ns, context)
        for key, finding in current.items():
            self._ledger.update(key, finding)
        for key in self._ledger.open_keys():
            if key not in current:
                self._ledger.close(key, now_ns)
        return self._ledger.findings()

    def _silent_ranks(self, context: Context) -> list[int]:
        unheard = context.silent_hosts
        return [
            rank
            for rank, (last, newest, _) in self._behind.items()
            if newest - last > _RANK_SILENCE_NS and unheard.isdisjoint(context.hosts_of((rank,)))
        ]

    def _is_silent(self, now_ns: int, context: Context) -> bool:
        silence = now_ns - self._newest_ns
        has_lived = self._newest_ns - self._first_ns >= _LEAST_LIFE_NS
        patience = max(_JOB_SILENCE_NS, _LONGEST_FACTOR * self._longest_gap_ns)
        return has_lived and silence > patience and bool(context.groups) and not context.silent_hosts

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
                f"{duration_text(newest - last)}, while the others have enqueued {lag} more "
                "collectives with it: its log is lost"
            ),
            evidence={"behind": lag, "silent_ns": newest - last},
        )

    def _job_finding(self, now_ns: int, context: Context) -> Finding:
        silent = now_ns - self._newest_ns
        return replace(
            _finding(self._newest_ns, context),
            summary=(
                f"the job has logged nothing for {duration_text(silent)} and destroyed no communicator; nobody waits: "
                "it was ended, or does something else"
            ),
            evidence={"silent_ns": silent, "longest_gap_before_ns": self._longest_gap_ns},
        )


def _finding(since_ns: int, context: Context) -> Finding:
    """What both have in common."""
    return Finding(
        kind=FindingKind.STOPPED_LOGGING,
        severity=Severity.WARNING,
        job=context.job,
        comm_id=None,
        parallelism=None,
        ranks=(),
        hosts=(),
        since_ns=since_ns,
        until_ns=None,
        confidence=0.6,
        summary="",
        evidence={},
    )

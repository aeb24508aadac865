"""All detectors of one job behind one door."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

from ncclscope_service.clock_check import ClockCheck
from ncclscope_service.detect.bandwidth_drop import BandwidthDrop
from ncclscope_service.detect.below_limit import BelowLimit
from ncclscope_service.detect.blind import Blind, HostSight
from ncclscope_service.detect.clock_fault import ClockFault
from ncclscope_service.detect.context import Context
from ncclscope_service.detect.findings import ordered
from ncclscope_service.detect.hang import Hang
from ncclscope_service.detect.late_rank import LateRank
from ncclscope_service.detect.mismatch import Mismatch
from ncclscope_service.detect.reported import Reported, Said
from ncclscope_service.detect.stopped_logging import StoppedLogging
from ncclscope_service.rows import Finding, HostClock
from ncclscope_wire.batch import Columns


class Detectors:
    """Feed what there is, ask when you like; what is never fed stays silent."""

    def __init__(self) -> None:
        self._late_rank = LateRank()
        self._bandwidth_drop = BandwidthDrop()
        self._below_limit = BelowLimit()
        self._hang = Hang()
        self._mismatch = Mismatch()
        self._stopped_logging = StoppedLogging()
        self._reported = Reported()
        self._clock_fault = ClockFault()
        self._blind = Blind()

    def feed_collectives(self, collectives: Columns, context: Context) -> None:
        """Joined collectives (`rows.COLLECTIVE`) of this job, as they finish."""
        self._late_rank.feed(collectives, context)
        windows = self._bandwidth_drop.feed(collectives, context)
        self._below_limit.feed(windows, self._bandwidth_drop.with_links(context))

    def feed_progress(self, progress: Columns, context: Context) -> None:
        """How far each rank has come (`board.PROGRESS`), about once a second."""
        self._hang.feed(progress, context)
        self._stopped_logging.feed(progress, context)
        self._mismatch.know(context)

    def feed_calls(self, calls: Columns, context: Context) -> None:
        """Collectives as the logs name them (`mismatch.CALL`), as they are read."""
        self._mismatch.feed(calls, context)

    def feed_facts(self, said: Iterable[Said], context: Context) -> None:
        """What the logs say beside operations, as it is read."""
        self._reported.feed(said, context)

    def feed_clock(self, check: ClockCheck, hosts: Sequence[str], context: Context, at_ns: int) -> None:
        """The check of the last clock estimate."""
        self._clock_fault.feed(check, hosts, context, at_ns)

    def feed_clock_steps(self, clocks: Mapping[str, HostClock], context: Context) -> None:
        """The clocks of this job's hosts, with the steps that were found in them."""
        self._clock_fault.tell_steps(clocks, context)

    def feed_sight(self, sight: HostSight, context: Context, now_ns: int) -> None:
        """What reached us from one host."""
        self._blind.feed(sight, context, now_ns)

    def leave(self, communicators: Set[int]) -> None:
        """Nobody will call anything on these communicators: lets go of what was learnt of them, but for findings."""
        self._late_rank.leave(communicators)
        self._below_limit.leave(communicators)
        self._mismatch.leave(communicators)

    def findings(self, now_ns: int, *, watched_ns: int | None = None) -> list[Finding]:
        """All findings of this job, open ones first. `now_ns` is the clock of the logs' newest times.

        `watched_ns`: the same without the time in which nobody looked (`watched.py`), where there was such a time.
        """
        mismatches = self._mismatch.findings(now_ns)
        open_ones = {finding.comm_id: finding for finding in mismatches if finding.until_ns is None}
        slow = self._bandwidth_drop.findings(now_ns)
        hangs = self._hang.findings(now_ns if watched_ns is None else watched_ns, open_ones, self._mismatch.with_losses)
        return ordered(
            [
                *self._late_rank.findings(now_ns),
                *slow,
                *self._below_limit.findings(self._bandwidth_drop.slow_communicators),
                *hangs,
                *mismatches,
                *self._stopped_logging.findings(now_ns, is_stuck=self._hang.is_open),
                *self._reported.findings(now_ns),
                *self._clock_fault.findings(now_ns),
                *self._blind.findings(now_ns),
            ]
        )

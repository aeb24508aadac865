"""Records an nsys session now and then, until its job has ended. Runs beside the job, in a process of its own.

Nothing that fails here reaches the job: it is written down, tried again later, and at last given up.

`duty = budget / overhead`: a job that is 10 % slower while it is recorded, and may lose 1 %, is recorded a tenth of the
time. All helpers with the same settings start at the same multiples of the period since 1970, so that the ranks of a
collective are recorded together, as far as the clocks of their nodes agree.
"""

from __future__ import annotations

import math
import os
import select
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from ncclscope_capture import nsys_commands
from ncclscope_capture.chunks import Chunks
from ncclscope_capture.nsys_commands import NsysVersion
from ncclscope_capture.settings import CaptureSettings

_FIRST_BACKOFF_SECONDS = 30.0
_LAST_BACKOFF_SECONDS = 600.0
_MOST_FAILURES = 6
"""In a row. Then nothing is recorded any more: nsys does not work here."""


class Outcome(Enum):
    """The outcome of one recording."""

    FINISHED = "finished"
    FAILED = "failed"
    SKIPPED = "skipped"
    """Not begun: there is no room on the disk."""


@dataclass(frozen=True)
class Budget:
    """The time that recording may cost, and what follows from it."""

    budget_ratio: float
    """Share of the job's time that may be lost."""
    overhead_ratio: float
    """How much slower the job is while it is recorded."""
    chunk_seconds: float

    @property
    def duty(self) -> float:
        """Share of time that is recorded at most."""
        return min(1.0, self.budget_ratio / self.overhead_ratio)

    @property
    def period_seconds(self) -> float:
        """From the start of one recording to the next."""
        return self.chunk_seconds / self.duty


class Plan:
    """Says when to record next. Times are seconds since 1970."""

    def __init__(self, budget: Budget, *, now: float) -> None:
        self._budget = budget
        self._began = now
        self._spent = 0.0
        self._failures = 0
        self._not_before = now

    @property
    def has_given_up(self) -> bool:
        """Whether too many recordings failed in a row: no more is tried."""
        return self._failures >= _MOST_FAILURES

    def next_start(self, now: float) -> float:
        """The next start: a multiple of the period, late enough that the share of time stays within the budget.

        nsys records on while a command stops it, so the time of a recording counts from the command that begins it
        to the end of the one that ends it; what was longer than planned is made up for by leaving periods out.
        """
        period = self._budget.period_seconds
        affordable = self._began + (self._spent + self._budget.chunk_seconds) / self._budget.duty - period
        earliest = max(now, self._not_before, affordable)
        period_ms = max(1, round(period * 1000))
        return math.ceil(earliest * 1000 / period_ms - 1e-9) * period_ms / 1000

    def recorded(self, outcome: Outcome, *, seconds: float, now: float) -> None:
        """Records the outcome of a recording that took `seconds` from start to stop."""
        self._spent += seconds
        if outcome is not Outcome.FAILED:
            self._failures = 0 if outcome is Outcome.FINISHED else self._failures
            return
        self._failures += 1
        self._not_before = now + min(_FIRST_BACKOFF_SECONDS * 2 ** (self._failures - 1), _LAST_BACKOFF_SECONDS)


_COMMAND_SECONDS = 30.0
_STOP_SECONDS = 300.0
"""A stop of 10 s with 28,000 events/s took 5 s with nsys 2022.4 and 2023.4."""
_EXPORT_SECONDS = 600.0


def budget_of(settings: CaptureSettings) -> Budget:
    """The budget that the settings state."""
    return Budget(settings.budget_percent / 100, settings.overhead_percent / 100, settings.chunk_seconds)


@dataclass
class Cycle:
    """The recordings of one session."""

    settings: CaptureSettings
    version: NsysVersion | None
    session: str
    chunks: Chunks
    job_ended: int
    """A pipe whose other end is closed when the job has ended."""
    say: Callable[[str], None]
    is_known: bool = False
    """Whether the session has been seen; before, nsys is still starting it."""
    ending: bool = field(default=False, init=False)

    def run(self) -> None:
        """Records until the job has ended, the session is gone, or nsys has failed too often."""
        plan = Plan(budget_of(self.settings), now=time.time())
        while not plan.has_given_up and not self._sleep_until(plan.next_start(time.time())):
            listed = self._listed_id()
            if listed is None:
                if self.is_known:
                    self.say(f"nsys has no session {self.session} any more: nothing more is recorded")
                    return
                plan.recorded(Outcome.SKIPPED, seconds=0.0, now=time.time())
                continue
            self.is_known = True
            outcome, seconds = self._chunk(listed, time.time())
            plan.recorded(outcome, seconds=seconds, now=time.time())
        if plan.has_given_up:
            self.say("nsys failed too often: nothing more is recorded, the job runs on")

    def close(self) -> None:
        """Ends the session and removes what is unfinished."""
        if self._listed_id() is not None:
            self._nsys(nsys_commands.shutdown(self.settings.nsys, self.session), _COMMAND_SECONDS)
        self.chunks.close()

    def _chunk(self, listed: str, started: float) -> tuple[Outcome, float]:
        """One recording of the session of that ID; and how long it was on, stopping included."""
        if self.chunks.free_bytes() < self.settings.least_free_bytes:
            self.say("the disk has too little free space: not recorded")
            return Outcome.SKIPPED, 0.0
        name = self.chunks.name(started)
        report = self.chunks.work / f"{name}.nsys-rep"
        began = time.monotonic()
        if not self._nsys(
            nsys_commands.start(self.settings.nsys, self.session, str(report.with_suffix(""))), _COMMAND_SECONDS
        ):
            return Outcome.FAILED, 0.0
        if self._listed_id() not in {listed, None}:
            # It ended after it was looked for, and the start has made one in its place, in which nothing runs.
            self._nsys(nsys_commands.shutdown(self.settings.nsys, self.session), _COMMAND_SECONDS)
            report.unlink(missing_ok=True)
            return Outcome.SKIPPED, 0.0
        self._sleep_until(time.time() + self.settings.chunk_seconds)
        # The end of the job ends the recording too: then this fails, and the report is there.
        is_stopped = self._nsys(nsys_commands.stop(self.settings.nsys, self.session), _STOP_SECONDS)
        seconds = time.monotonic() - began
        if not report.exists():
            self.say(f"nsys left no report of {name}" + ("" if is_stopped else ", and could not be stopped"))
            return Outcome.FAILED, seconds
        return self._export(report, name), seconds

    def _export(self, report: Path, name: str) -> Outcome:
        """Exports a report under a name that agents do not follow, and renames it when it is finished."""
        unfinished = self.chunks.work / f"{name}.tmp"
        command = nsys_commands.export(self.settings, self.version, str(report), str(unfinished))
        is_done = self._nsys(command, _EXPORT_SECONDS)
        report.unlink(missing_ok=True)
        try:
            # nsys has exited with 0 and left an empty file.
            if not is_done or unfinished.stat().st_size == 0:
                self.say(f"nsys exported nothing of {name}")
                return Outcome.FAILED
            self.chunks.hand_over(unfinished, name)
        except OSError as error:
            self.say(f"{name} could not be handed over: {error}")
            return Outcome.FAILED
        deleted = self.chunks.prune()
        self.say(f"recorded {name}" + (f", deleted {deleted} old" if deleted else ""))
        return Outcome.FINISHED

    def _listed_id(self) -> str | None:
        """The session's ID; None if nsys lists no such session, or nothing."""
        printed = self._printed(nsys_commands.sessions(self.settings.nsys), _COMMAND_SECONDS)
        return None if printed is None else nsys_commands.listed_id(printed, self.session)

    def _sleep_until(self, when: float) -> bool:
        """Waits; True when the job has ended, which ends the wait."""
        if not self.ending:
            ready, _, _ = select.select([self.job_ended], [], [], max(0.0, when - time.time()))
            self.ending = bool(ready)
        return self.ending

    def _nsys(self, command: Sequence[str], seconds: float) -> bool:
        return self._printed(command, seconds) is not None

    def _printed(self, command: Sequence[str], seconds: float) -> str | None:
        """The output of a command; None if it fails or takes longer, and says why."""
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=seconds,
                check=False,
            )
        except (OSError, subprocess.SubprocessError) as error:
            self.say(f"nsys {command[1]}: {error}")
            return None
        printed = done.stdout.decode(errors="replace")
        if done.returncode != 0:
            last = printed.strip().splitlines()[-1:] or ["it printed nothing"]
            self.say(f"nsys {command[1]} ended with {done.returncode}: {last[0][:300]}")
            return None
        return printed


def lower_priority() -> None:
    """The job goes first: on the processor, and on the disk as far as the scheduler of the disk goes by it."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, 10)
    except OSError:
        return

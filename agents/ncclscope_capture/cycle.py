"""Records an nsys session now and then, until its job has ended. Runs beside the job, in a process of its own.

Nothing that fails here reaches the job: it is written down, tried again later, and at last given up.
"""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ncclscope_capture import nsys_commands
from ncclscope_capture.chunks import Chunks
from ncclscope_capture.nsys_commands import NsysVersion
from ncclscope_capture.plan import Budget, Outcome, Plan
from ncclscope_capture.settings import CaptureSettings

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

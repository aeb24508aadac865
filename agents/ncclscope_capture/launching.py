"""Starts a job through `nsys launch`, and without it if that does not start the job. Exactly once either way.

What nsys 2022.4 does, and what is done about it:

- its launcher ends the job at SIGTERM and SIGINT and then says 0: it is started with these blocked, and signals go to
  the job itself;
- it puts a program of its own behind the job's output, and if that is killed the job dies of SIGPIPE: the job
  gets its own files back;
- it exits with 1 if it cannot start the job (no temporary directory, a wrong option, a session of that name): the
  job then says nothing, and is started without nsys.

A few lines of Python stand between nsys and the job: they say that the job is about to start, and become the job.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ncclscope_capture import nsys_commands
from ncclscope_capture.job import Watch
from ncclscope_capture.settings import CaptureSettings

_OUTPUTS = (1, 2)
_FIRST_KEPT = 200
_SHIM = """
import os, signal, sys
started, own, files = sys.argv[1:4]
with open(own + str(os.getpid()), "w") as pid:
    pid.write(str(os.getpid()))
try:
    os.link(pid.name, started)
except FileExistsError:
    sys.exit(0)
for file in files.split(","):
    kept, fd = file.split(":")
    try:
        os.dup2(int(kept), int(fd))
        os.close(int(kept))
    except OSError:
        pass
signal.pthread_sigmask(signal.SIG_SETMASK, [int(number) for number in sys.argv[4].split(",") if number])
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
try:
    os.execvp(sys.argv[5], sys.argv[5:])
except OSError as error:
    print(f"{sys.argv[5]}: {error.strerror}", file=sys.stderr)
    sys.exit(127 if isinstance(error, FileNotFoundError) else 126)
"""
"""Takes the mark that decides who starts the job, gives it its files and signals back, and becomes it."""


@dataclass(frozen=True)
class Ended:
    """How the job ended."""

    status: int
    """Its wait status."""
    with_nsys: bool


class Launch:
    """One start of a job, as a context."""

    def __init__(self, settings: CaptureSettings, session: str, watch: Watch) -> None:
        self._settings = settings
        self._session = session
        self._watch = watch

    def __enter__(self) -> Launch:
        self._folder = Path(tempfile.mkdtemp(prefix="ncclscope-capture-"))
        self._mark = self._folder / "started"
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, command: Sequence[str], environment: Mapping[str, str], mask: Sequence[int]) -> Ended:
        """Starts the job and waits for its end. `mask`: the signals that were blocked when we were started."""
        launcher = self._start(command, environment, mask)
        if launcher is not None:
            status = self._watch.wait(launcher, self._job, seconds=self._settings.launch_seconds)
            if self._is_started():
                if status is None:
                    status = self._watch.wait(launcher, self._job)
                return Ended(self._status_of_job(status), with_nsys=True)
            if status is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(launcher, signal.SIGKILL)
        pid = self._watch.start(command, environment)
        status = self._watch.wait(pid, lambda: pid)
        return Ended(status or 0, with_nsys=False)

    def _start(self, command: Sequence[str], environment: Mapping[str, str], mask: Sequence[int]) -> int | None:
        """The launcher's process; None if it could not be started."""
        # Above what a launcher uses for itself; inherited, unlike those of os.dup.
        kept = [(fcntl.fcntl(fd, fcntl.F_DUPFD, _FIRST_KEPT), fd) for fd in _OUTPUTS]
        files = ",".join(f"{copy}:{fd}" for copy, fd in kept)
        numbers = ",".join(str(int(number)) for number in mask)
        shim = [sys.executable, "-I", "-S", "-c", _SHIM, str(self._mark), str(self._folder / "pid-"), files, numbers]
        try:
            return self._watch.start(
                nsys_commands.launch(self._settings, self._session, [*shim, *command]), environment, masked=True
            )
        except OSError:
            return None
        finally:
            for copy, _ in kept:
                os.close(copy)

    def _job(self) -> int | None:
        try:
            return int(self._mark.read_text())
        except (OSError, ValueError):
            return None

    def _is_started(self) -> bool:
        """Whether nsys has started the job. If not, it never will: the mark is taken away from it."""
        own = self._folder / "pid-none"
        own.write_text("")
        try:
            os.link(own, self._mark)
        except FileExistsError:
            return True
        return False

    def _status_of_job(self, launcher_status: int | None) -> int:
        """The job's status, as nsys passes it on; if nsys was killed, the job's own, for it is our child then."""
        status = launcher_status or 0
        job = self._job()
        if not os.WIFSIGNALED(status) or job is None:
            return status
        own = self._watch.wait_for_orphan(job)
        return status if own is None else own

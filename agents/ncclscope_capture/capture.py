"""Runs a job with recordings of nsys beside it, and passes its signals and its exit status through.

If nsys is missing or does not work, the job runs all the same, and exactly once either way.

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
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ncclscope_capture import nsys_commands
from ncclscope_capture.chunks import Chunks
from ncclscope_capture.cycle import Cycle, budget_of, lower_priority
from ncclscope_capture.job import Watch, become, end_as
from ncclscope_capture.nsys_commands import NsysVersion
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


_VERSION_SECONDS = 20.0


def capture(settings: CaptureSettings, command: Sequence[str]) -> NoReturn:
    """Runs the command to its end, and ends this process as it ended.

    Raises:
        SystemExit: the command ended with an exit code; 127 if there is no such program.
    """
    chunks = _chunks(settings)
    version = _version(settings.nsys)
    if chunks is None or version is None:
        become(command, os.environ)
    session = f"ncclscope-{os.getpid()}"
    duty = budget_of(settings).duty
    _say(f"records {settings.chunk_seconds:g} s of every {budget_of(settings).period_seconds:g} s ({duty:.1%})")
    mask = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])]
    with Watch() as watch, Launch(settings, session, watch) as launch:
        beside, job_runs = _start_cycle(settings, session, chunks, version)
        try:
            ended = launch.run(command, os.environ, mask)
        except OSError as error:
            print(f"{command[0]}: {error.strerror}", file=sys.stderr)
            os.close(job_runs)
            sys.exit(127 if isinstance(error, FileNotFoundError) else 126)
        if not ended.with_nsys:
            _say("nsys did not start the job: it ran without")
        os.close(job_runs)
        watch.wait(beside, lambda: None, seconds=settings.finish_seconds)
        if watch.status(beside) is None:
            os.kill(beside, signal.SIGKILL)
    end_as(ended.status)


def follow(settings: CaptureSettings) -> None:
    """Records the session that is named in the settings, until it is gone or SIGTERM or SIGINT comes.

    Raises:
        OSError: the directory cannot be written to.
    """
    chunks = Chunks(Path(settings.out), host=_host(), pid=os.getpid(), keep_bytes=settings.keep_bytes)
    chunks.prepare()
    ended, end = os.pipe()
    os.set_blocking(end, False)
    signal.set_wakeup_fd(end)  # a signal writes its number there
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: None)
    cycle = Cycle(settings, _version(settings.nsys), settings.session, chunks, ended, _say, is_known=True)
    cycle.run()
    chunks.close()


def _start_cycle(settings: CaptureSettings, session: str, chunks: Chunks, version: NsysVersion) -> tuple[int, int]:
    """The process that records, and the pipe that is closed when the job has ended."""
    job_ended, job_runs = os.pipe()
    pid = os.fork()
    if pid:
        os.close(job_ended)
        return pid, job_runs
    os.close(job_runs)
    try:
        lower_priority()
        cycle = Cycle(settings, version, session, chunks, job_ended, _logger(chunks))
        cycle.run()
        cycle.close()
    finally:
        os._exit(0)


def _logger(chunks: Chunks) -> Callable[[str], None]:
    """Writes beside the chunks: the job's output is the job's."""
    path = chunks.work.parent.parent / f"{chunks.work.name}.log"

    def say(text: str) -> None:
        try:
            with path.open("a") as log:
                log.write(f"{time.strftime('%FT%TZ', time.gmtime())} {text}\n")
        except OSError:
            return

    return say


def _chunks(settings: CaptureSettings) -> Chunks | None:
    chunks = Chunks(Path(settings.out), host=_host(), pid=os.getpid(), keep_bytes=settings.keep_bytes)
    try:
        chunks.prepare()
    except OSError as error:
        _say(f"{settings.out}: {error.strerror}: nothing is recorded, the job runs on")
        return None
    return chunks


def _version(nsys: str) -> NsysVersion | None:
    """The version of nsys; None, and said why, if it does not work."""
    if shutil.which(nsys) is None:
        _say(f"there is no {nsys} here: nothing is recorded, the job runs on")
        return None
    try:
        done = subprocess.run(
            [nsys, "--version"], stdin=subprocess.DEVNULL, capture_output=True, timeout=_VERSION_SECONDS, check=False
        )
        version = nsys_commands.read_version(done.stdout.decode(errors="replace"))
    except (OSError, subprocess.SubprocessError):
        version = None
    if version is None:
        _say(f"{nsys} does not tell its version: nothing is recorded, the job runs on")
    return version


def _host() -> str:
    """As NCCL's log and the exports have it."""
    return socket.gethostname().partition(".")[0]


def _say(text: str) -> None:
    print(f"ncclscope capture: {text}", file=sys.stderr, flush=True)

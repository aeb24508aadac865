"""Runs a job with recordings of nsys beside it, and passes its signals and its exit status through.

If nsys is missing or does not work, the job runs all the same.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from ncclscope_capture import nsys_commands
from ncclscope_capture.chunks import Chunks
from ncclscope_capture.cycle import Cycle, budget_of, lower_priority
from ncclscope_capture.job import Watch, become, end_as
from ncclscope_capture.launching import Launch
from ncclscope_capture.nsys_commands import NsysVersion
from ncclscope_capture.settings import CaptureSettings

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

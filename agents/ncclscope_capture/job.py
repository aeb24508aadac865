"""Runs a job as a child: every signal once, its exit status as its own.

A signal that is sent to us alone (by kubelet, a launcher, `kill`) is handed to the job. One that the job has got by
itself is not: what a terminal sends goes to the whole group, and what Slurm or systemd sends goes to all processes of
the step or unit. Whether a signal went to all is asked of a canary: a process of the same group, which does nothing.
A job that takes SIGTERM for "write a checkpoint" gets it once.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence, Set
from types import TracebackType
from typing import NoReturn

_FAULTS = {"SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGTRAP", "SIGSYS"}
_JOB_CONTROL = {"SIGKILL", "SIGSTOP", "SIGTSTP", "SIGTTIN", "SIGTTOU", "SIGCONT", "SIGCHLD", "SIGPIPE", "SIGXFSZ"}
PASSED: frozenset[int] = frozenset(
    int(known) for known in signal.Signals if known.name not in _FAULTS | _JOB_CONTROL
) | frozenset(range(signal.SIGRTMIN + 1, signal.SIGRTMAX))
"""Signals that are passed to the job: all but `_FAULTS`, which are our own, and `_JOB_CONTROL`."""

_FROM_KERNEL = 0x80
"""`si_code` of a signal that a terminal sent. *Source:* sigaction(2), SI_KERNEL."""
_SPREAD_SECONDS = 0.02
"""Whoever signals all processes of a step goes through their list within that time."""
_SUBREAPER = 36
"""*Source:* prctl(2), PR_SET_CHILD_SUBREAPER."""


class Canary:
    """A process beside us that does nothing, and knows which signals it got."""

    def __init__(self) -> None:
        asked, ask = os.pipe()
        answer, answered = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(ask)
            os.close(answer)
            _be_canary(asked, answered)
        os.close(asked)
        os.close(answered)
        self._ask, self._answer = ask, answer

    def got(self, number: int) -> bool:
        """Whether it got the signal too, since it was last asked; False if it is no more."""
        try:
            os.write(self._ask, bytes([number]))
            return os.read(self._answer, 1) == b"y"
        except OSError:
            return False

    def close(self) -> None:
        """Closes the pipes, at which the canary ends."""
        os.close(self._ask)
        os.close(self._answer)


def _be_canary(asked: int, answered: int) -> None:
    """Answers until nobody can ask any more. All signals are blocked here: they stay pending until asked for."""
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, PASSED)
        while question := os.read(asked, 1):
            got = signal.sigtimedwait({question[0]}, 0)
            os.write(answered, b"n" if got is None else b"y")
    except OSError:
        pass
    finally:
        os._exit(0)


class Watch:
    """Starts children, hands signals to the job and waits, as a context. One at a time in a process.

    While it is open, the signals of PASSED are blocked here; children are started without that. Processes whose
    parents die become ours, so that the job's status is known even if what started it was killed.
    """

    def __init__(self) -> None:
        self._ended: dict[int, int] = {}
        self._held: list[int] = []

    def __enter__(self) -> Watch:
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED | {signal.SIGCHLD})
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored by some launchers: then no status would be kept
        self._canary = Canary()
        ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, 1, 0, 0, 0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._canary.close()
        # What was meant for the job, and came when it had ended, ends nobody.
        while signal.sigtimedwait(PASSED, 0) is not None:
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def start(self, command: Sequence[str], environment: Mapping[str, str], *, masked: bool = False) -> int:
        """Starts a program in our group with our files, and gives its process id.

        Args:
            command: the program, sought in PATH, and its arguments.
            environment: all of its variables.
            masked: the signals of PASSED stay blocked in it.

        Raises:
            OSError: it could not be started.
        """
        return self._fork(command, environment, PASSED if masked else self._mask, apart_to=None)

    def start_apart(self, command: Sequence[str], environment: Mapping[str, str], output: int) -> int:
        """Starts a program in a session of its own, without input, which writes to `output`; gives its process id.

        Raises:
            OSError: it could not be started.
        """
        return self._fork(command, environment, self._mask, apart_to=output)

    def _fork(
        self, command: Sequence[str], environment: Mapping[str, str], mask: Set[int], *, apart_to: int | None
    ) -> int:
        failed, failure = os.pipe()
        pid = os.fork()
        if pid == 0:
            if apart_to is not None:
                _set_apart(apart_to)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            become(command, environment, failure)
        os.close(failure)
        with os.fdopen(failed, "rb") as told:
            error = told.read()
        if error:
            os.waitpid(pid, 0)
            raise OSError(int(error), os.strerror(int(error)), command[0])
        return pid

    def wait(self, pid: int, job: Callable[[], int | None], *, seconds: float | None = None) -> int | None:
        """Waits for a child to end and gives its wait status; None if it has not ended within `seconds`.

        `job`: the process that gets signals, None while it is not known: they are held until it is.
        """
        until = None if seconds is None else time.monotonic() + seconds
        while True:
            self.reap()
            if pid in self._ended:
                return self._ended[pid]
            target = job()
            self._deliver(target)
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                return None
            pause = 0.05 if target is None else left
            got = _next_signal(pause if left is None or pause is None else min(pause, left))
            if got is not None and got.si_signo != signal.SIGCHLD:
                self._hold(got)

    def wait_for_orphan(self, pid: int) -> int | None:
        """Waits for a process whose parent was killed; None if it never becomes ours."""
        while True:
            self.reap()
            if pid in self._ended:
                return self._ended[pid]
            try:
                os.kill(pid, 0)
            except OSError:
                self.reap()
                return self._ended.get(pid)
            got = _next_signal(0.5)
            if got is not None and got.si_signo != signal.SIGCHLD:
                self._hold(got)
            self._deliver(pid)

    def status(self, pid: int) -> int | None:
        """The wait status of a process that was ours and has ended."""
        return self._ended.get(pid)

    def reap(self) -> None:
        """Takes note of all children that have ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._ended[pid] = status

    def _hold(self, got: signal.struct_siginfo) -> None:
        if got.si_code == _FROM_KERNEL:
            return
        time.sleep(_SPREAD_SECONDS)
        if not self._canary.got(got.si_signo):
            self._held.append(got.si_signo)

    def _deliver(self, target: int | None) -> None:
        if target is None:
            return
        for number in self._held:
            try:
                os.kill(target, number)
            except OSError as error:
                if error.errno != errno.ESRCH:
                    raise
        self._held.clear()


def _set_apart(output: int) -> None:
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)


def become(command: Sequence[str], environment: Mapping[str, str], failure: int | None = None) -> NoReturn:
    """Becomes the program. If that fails, the number of the error goes to `failure`, or a sentence to stderr."""
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python, which programs do not expect
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execvpe(command[0], list(command), dict(environment))
    except OSError as error:
        if failure is None:
            print(f"{command[0]}: {error.strerror}", file=sys.stderr)
            sys.exit(127 if isinstance(error, FileNotFoundError) else 126)
        os.write(failure, str(error.errno).encode())
    os._exit(127)


def _next_signal(seconds: float | None) -> signal.struct_siginfo | None:
    waited = PASSED | {signal.SIGCHLD}
    return signal.sigwaitinfo(waited) if seconds is None else signal.sigtimedwait(waited, seconds)


def end_as(status: int) -> NoReturn:
    """Ends this process as the job ended: with its exit code, or by the signal that ended it."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        raise SystemExit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the core is the job's, and is written already
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
    os.kill(os.getpid(), -code)
    raise SystemExit(128 - code)

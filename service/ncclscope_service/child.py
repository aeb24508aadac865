"""A process that has the memory of this one as it is now, and does one thing with it while this one goes on.

fork(2) copies page tables, not pages: 50 ms for a gigabyte where to copy the pages takes one to three seconds. A page
is copied when one of the two writes to it.

The child has one thread, and finds locks as other threads held them at that moment: what it does must log nothing,
import nothing and wait for nobody. It holds no file, socket or lock of its parent's but the one that it is given, gives
way to its parent for processor and memory, and ends when its parent does.

*Source:* fork(2), prctl(2) PR_SET_PDEATHSIG, proc_pid_oom_score_adj(5), signal-safety(7).
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final, NoReturn

import anyio
import msgspec
from anyio import to_thread

_PRCTL: Final = getattr(ctypes.CDLL(None), "prctl", None)
"""Looked up here: the child must not."""
_DEATH_SIGNAL: Final = 1
"""PR_SET_PDEATHSIG: the signal when the thread that forked ends, which must not be before its process does."""
_NICENESS: Final = 10
_STANDARD: Final = 2
"""Descriptors up to it stay open."""
_REPORT_BYTES: Final = 4096
"""A pipe takes so much at once."""
_TEXT_CHARACTERS: Final = 500
_PARENTS_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""They may come to the whole group of processes: what they mean is the parent's to decide."""


class ChildError(Exception):
    """What the child was to do is not done: says why."""


class Child:
    """One such process. Its memory is that of the moment in which it is made."""

    def __init__(self, work: Callable[[], int], *, descriptor: int) -> None:
        """Begins to do the work there; `descriptor`: of the file that it is for. To be called in the main thread.

        Raises:
            OSError: the system gives no process, or no memory for one.
        """
        if _PRCTL is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        self._is_gone = False
        self._reaping = threading.Lock()
        self._report, writing = os.pipe()
        parent = os.getpid()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._pid = _fork()
            if self._pid == 0:
                _live(work, parent, (descriptor, writing), mask)
        except OSError:
            os.close(self._report)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.close(writing)

    async def result(self, within_seconds: float) -> int:
        """What the work gave. Where it takes longer, or this is cancelled, the child is killed.

        Raises:
            ChildError: the work failed, or the child was killed.
        """
        try:
            with anyio.fail_after(within_seconds):
                return await to_thread.run_sync(self._wait, abandon_on_cancel=True)
        except TimeoutError:
            raise ChildError(f"it has not ended within {within_seconds:g} s") from None
        finally:
            self.kill()

    def kill(self) -> None:
        """Ends it, if it has not ended by itself."""
        with self._reaping:
            if not self._is_gone:
                os.kill(self._pid, signal.SIGKILL)

    def _wait(self) -> int:
        """In a thread: until the child has ended."""
        with open(self._report, "rb") as report:
            said = report.read()
        with self._reaping:  # the number may belong to another process afterwards
            status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
            self._is_gone = True
        if not said:
            raise ChildError(f"its process {_how_it_ended(status)}")
        result, trouble = msgspec.msgpack.decode(said, type=tuple[int, str])
        if trouble:
            raise ChildError(trouble)
        return result


def _fork() -> int:
    with warnings.catch_warnings():
        # Python 3.12 and later warn of what the child finds locked: it takes no lock (see above).
        warnings.filterwarnings("ignore", ".*multi-threaded.*", DeprecationWarning)
        return os.fork()


def _how_it_ended(status: int) -> str:
    if status == -signal.SIGKILL:
        return "was killed; the system does that where memory is short"
    return f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"


# In the child


def _live(work: Callable[[], int], parent: int, keep: tuple[int, int], mask: Iterable[int]) -> NoReturn:
    try:
        gc.disable()  # it would write to every object, which copies the page that it is in
        _leave(parent, keep, mask)
        os.write(keep[1], _outcome(work))
    finally:
        os._exit(0)


def _leave(parent: int, keep: tuple[int, int], mask: Iterable[int]) -> None:
    """Lets go of what is the parent's."""
    assert _PRCTL is not None
    _PRCTL(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > _STANDARD and descriptor not in keep:
            with suppress(OSError):  # the one with which they were listed
                os.close(descriptor)
    signal.set_wakeup_fd(-1)
    for each in _PARENTS_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    with suppress(OSError):
        os.nice(_NICENESS)
    with suppress(OSError):
        _write_oom_score()


def _write_oom_score() -> None:
    """Where memory is short, the child goes and not its parent."""
    descriptor = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
    try:
        os.write(descriptor, b"1000")
    finally:
        os.close(descriptor)


def _outcome(work: Callable[[], int]) -> bytes:
    try:
        result, trouble = work(), ""
    except OSError as error:
        result, trouble = 0, error.strerror or os.strerror(error.errno or errno.EIO)
    except Exception as error:
        result, trouble = 0, f"{type(error).__name__}: {error}"
    return msgspec.msgpack.encode((result, trouble[:_TEXT_CHARACTERS]))

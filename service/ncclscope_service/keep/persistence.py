"""Writes the journal, finished operations and, now and then, the state; `restoring` reads them at the start.

The state is written by a forked process, which has a copy of this one's memory, while this one goes on. fork(2) copies
page tables, not pages: 50 ms for a gigabyte, whose pages take one to three seconds to copy. A page is copied when
either process writes to it.

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
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NoReturn

import anyio
import msgspec
import structlog
from anyio import to_thread

from ncclscope_service.columns.table import Ids
from ncclscope_service.keep.archive import DataFolder, write_state
from ncclscope_service.keep.journal import Journal, JournalSettings, first_of
from ncclscope_service.keep.restoring import Restoring
from ncclscope_service.keep.service_state import Outbox, ServiceState
from ncclscope_service.show.health import JournalHealth
from ncclscope_service.store.settings import PipelineSettings
from ncclscope_service.store.tables import Store
from ncclscope_wire.errors import StateError

_PRCTL: Final = getattr(ctypes.CDLL(None), "prctl", None)
"""Looked up here: the child must not."""
_DEATH_SIGNAL: Final = 1
"""PR_SET_PDEATHSIG: the signal when the thread that forked ends, which must not be before its process does."""
_NICENESS: Final = 10
_STANDARD: Final = 2
"""Descriptors up to it stay open."""
_TEXT_CHARACTERS: Final = 500
_PARENTS_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""They may come to the whole group of processes: what they mean is the parent's to decide."""


class ChildError(Exception):
    """The child's work is not done, and why."""


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
        """The result of the work. If it takes longer, or this is cancelled, the child is killed.

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
        return "was killed; the system does that if memory is short"
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
    """Closes and resets everything that belongs to the parent."""
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


_log = structlog.get_logger(__name__)

_PIECE_OPERATIONS: Final = 100_000
_PATIENCE_SECONDS: Final = 600.0
"""A state that takes longer to be written is not written."""
_RETRY_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistenceSettings:
    """How often the state is written, beside the settings of the journal."""

    journal: JournalSettings = field(default_factory=JournalSettings)
    state_every_seconds: float = 300.0
    state_every_bytes: int = 128 * 1024 * 1024
    """Of journal: what a restart applies again at most."""


class Persistence:
    """One data folder. `open` first; that, `close` and `archive_rest` block; `release` at last."""

    def __init__(self, path: Path, settings: PersistenceSettings) -> None:
        """Takes the folder.

        Raises:
            ConfigError: another service has it, or it cannot be written.
        """
        self._folder = DataFolder(path)
        self._settings = settings
        self._restoring: Restoring
        self._state_at: float = time.monotonic()
        self._state_bytes: int | None = None
        self._state_seconds: float | None = None
        self._pause_seconds: float | None = None
        self._state_trouble = ""
        self._entries_at_state = 0
        self._journal_bytes_at_state = 0
        self.journal: Journal

    def open(
        self,
        settings: PipelineSettings | None,
        outboxes: dict[str, Outbox],
        on_durable: Callable[[int], None],
        now_ns: int,
    ) -> ServiceState:
        """Restores the state, or begins an empty one, and opens the journal.

        `settings`: None for those of the state. `outboxes`: one for each receiver of notifications that there is now,
        new. Raises OSError if the folder cannot be read or written.
        """
        restoring = self._restoring = Restoring(self._folder, settings, outboxes)
        restoring.run()
        state = restoring.state
        state.mark_restarted(now_ns)
        restoring.archive.remove_from(state.pipeline.store.operations.first)
        self.journal = Journal(
            self._folder.journal,
            era=restoring.era,
            next_number=restoring.number + 1,
            settings=self._settings.journal,
            on_durable=on_durable,
        )
        self._entries_at_state = restoring.state_number
        self._journal_bytes_at_state = self.journal.statistics().bytes - restoring.counts.journal_bytes
        if restoring.counts.is_other_version:
            self._write_state_here(state)
        restoring.log()
        return state

    def archive(self, known: Store, operations: Ids) -> bool:
        """Writes finished operations; False if the disk does not take them now."""
        return self._restoring.archive.write(known, operations)

    def trouble(self) -> str:
        """Why the disk does not take what arrives; empty if it does."""
        return self.journal.statistics().trouble or self._restoring.archive.trouble or self._state_trouble

    def is_due(self) -> bool:
        """Whether the state should be written now."""
        if self.journal.last == self._entries_at_state:
            return False
        if self._state_trouble and time.monotonic() - self._state_at < _RETRY_SECONDS:
            return False
        grown = self.journal.statistics().bytes - self._journal_bytes_at_state
        is_old = time.monotonic() - self._state_at >= self._settings.state_every_seconds
        return is_old or grown >= self._settings.state_every_bytes

    async def write_state(self, state: ServiceState) -> None:
        """Writes the state in a process of its own: work pauses only while that is forked.

        To be called in the main thread. A failure is reported by `trouble`, and the write repeated later.
        """
        began = self._state_at = time.monotonic()
        try:
            descriptor = await to_thread.run_sync(self._folder.create_state)
            number, child = self._fork(state, descriptor)
            if child is None:
                self._write_state_here(state)
                self._pause_seconds = time.monotonic() - began
                return
            size = await child.result(_PATIENCE_SECONDS)
            await to_thread.run_sync(self._publish_state, number, size, began)
        except (OSError, ChildError) as error:
            await to_thread.run_sync(self._give_up, error)

    def close(self, state: ServiceState, on_piece: Callable[[], None] = lambda: None) -> None:
        """Writes the rest of the journal and the state; `on_piece` may raise between two pieces of the state."""
        self.journal.close()
        self._write_state_here(state, on_piece)

    def release(self) -> None:
        """Releases the folder."""
        self._folder.close()

    def archive_rest(self, known: Store, operations: Ids, on_piece: Callable[[], None] = lambda: None) -> None:
        """Writes finished operations that the state still has; they are written again when their time comes.

        `on_piece` may raise between two pieces: those that are written stay.
        """
        for begin in range(0, len(operations), _PIECE_OPERATIONS):
            on_piece()
            self.archive(known, operations[begin : begin + _PIECE_OPERATIONS])
        self._restoring.archive.sync()

    def health(self) -> JournalHealth:
        """For metrics and `/healthz`."""
        journal, found = self.journal.statistics(), self._restoring.counts
        return JournalHealth(
            bytes=journal.bytes,
            waiting_bytes=journal.waiting_bytes,
            write_seconds=journal.write_seconds,
            errors=journal.errors_total,
            trouble=self.trouble(),
            damaged=found.damaged + found.states_refused,
            missing=found.missing + found.replay.left_out,
            replayed_batches=found.replay.batches,
            restore_seconds=found.seconds,
            state_age_seconds=time.monotonic() - self._state_at,
            state_bytes=self._state_bytes,
            state_seconds=self._state_seconds,
            pause_seconds=self._pause_seconds,
        )

    # The state, now and then

    def _fork(self, state: ServiceState, descriptor: int) -> tuple[int, Child | None]:
        """Number of the last entry, and the process that writes the state as it left it; closes the file.

        None: the system gives no process.
        """
        began = time.monotonic()
        number, era = self.journal.cut(), self._restoring.era
        try:
            return number, Child(lambda: write_state(descriptor, number, era, state.parts()), descriptor=descriptor)
        except OSError as error:
            _log.warning("state_written_in_place", why=error.strerror)
            return number, None
        finally:
            os.close(descriptor)
            self._pause_seconds = time.monotonic() - began

    def _write_state_here(self, state: ServiceState, on_piece: Callable[[], None] = lambda: None) -> None:
        """Writes the state in this process: everything else waits."""
        began = self._state_at = time.monotonic()
        try:
            number, descriptor = self.journal.cut(), self._folder.create_state()
            try:
                size = write_state(descriptor, number, self._restoring.era, state.parts(), on_piece)
            finally:
                os.close(descriptor)
            self._publish_state(number, size, began)
        except (OSError, StateError) as error:
            self._give_up(error)

    def _publish_state(self, number: int, size: int, began: float) -> None:
        """Publishes a state that is written, once all that it relies on is on disk too."""
        before = self._folder.states()
        self._restoring.archive.sync()
        self._folder.publish_state(number)
        self._set_state_trouble("")
        self._state_bytes, self._entries_at_state = size, number
        if before:
            self.journal.drop_until(first_of(before[0]))
        self._journal_bytes_at_state = self.journal.statistics().bytes
        self._state_seconds = time.monotonic() - began

    def _give_up(self, error: Exception) -> None:
        """Reports a failure, and removes the unfinished file until the write is repeated."""
        why = (isinstance(error, OSError) and error.strerror) or str(error)
        self._set_state_trouble(f"the state cannot be written: {why}")
        with suppress(OSError):
            self._folder.drop_unfinished()

    def _set_state_trouble(self, why: str) -> None:
        if why and why != self._state_trouble:
            _log.warning("state_not_written", why=why)
        self._state_trouble = why

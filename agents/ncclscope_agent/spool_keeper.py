"""Has what a spool decides done on its disk, by a thread, and brings what waits there back to the session.

The thread is the only one that waits for the disk; everything else of the agent goes on while it does.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Protocol

import anyio
import anyio.to_thread
import structlog

from ncclscope_agent.session import SessionState
from ncclscope_agent.spool import Spool
from ncclscope_agent.spool_files import SpoolDirectory
from ncclscope_agent.spool_limits import SpoolJob
from ncclscope_agent.spool_records import scan
from ncclscope_agent.spooled_session import SpooledSession

_log = structlog.get_logger(__name__)

_TICK_SECONDS: Final = 2.0
"""Between two looks at what nobody tells of: syncs that are due when nothing is read, and what has become too old."""
_SLOW_SECONDS: Final = 5.0
"""A disk that takes so long for a job is told of."""


class Sending(Protocol):
    """The link, as far as it matters here."""

    def nudge(self) -> None:
        """There may be something to send."""
        ...

    async def wait_for_change(self) -> None:
        """Returns when the service has said something, or the connection was lost."""
        ...


@dataclass(frozen=True, slots=True)
class _Running:
    job: SpoolJob
    done: Future[None]


class SpoolKeeper:
    """A spool and its directory: has the jobs of the one done in the other, one after the other, in a thread.

    `now_ns` is the spool's clock: the wall clock at the start, and from then on as much later as time has passed.
    """

    def __init__(
        self, spool: Spool, directory: SpoolDirectory, *, monotonic_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.spool = spool
        self._directory = directory
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="spool")
        self._running: _Running | None = None
        self._session: SpooledSession | None = None
        self._monotonic_ns = monotonic_ns
        self._began_ns = time.time_ns() - monotonic_ns()
        self._fault: str | None = None

    def __enter__(self) -> SpoolKeeper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def recover(self) -> None:
        """Reads what is there: up to `max_bytes`, so this may take seconds."""
        for name, data in self._directory.files():
            self.spool.recover(name, data)
        known = self.spool.statistics()
        if known.bytes_on_disk:
            left = sum(chapter.last - chapter.acknowledged for chapter in self.spool.chapters)
            _log.info("spool_found", directory=str(self._directory.path), batches=left, bytes=known.bytes_on_disk)
        if known.damaged_bytes or known.unusable_files:
            _log.warning("spool_damaged", bytes=known.damaged_bytes, files=dict(known.unusable_files))

    def now_ns(self) -> int:
        """The spool's clock."""
        return self._began_ns + self._monotonic_ns()

    def nudge(self) -> None:
        """Has done what there is to do; returns at once."""
        if self._running is not None:
            if not self._running.done.done():
                return
            self._finish()
        job = self.spool.take_job(self.now_ns(), at_once=not self._is_taken())
        if job is not None:
            self._running = _Running(job, self._thread.submit(self._directory.perform, job))

    def _is_taken(self) -> bool:
        """Whether what was just read may well be acknowledged before it need be written."""
        session = self._session
        return session is not None and session.state is SessionState.STREAMING and not session.is_behind

    def tick(self) -> None:
        """The same, and drops what is too old; to be called about once a second."""
        self.spool.expire(self.now_ns())
        self.nudge()

    async def attend(self, session: SpooledSession, link: Sending) -> None:
        """Brings the session what it wants of the disk, for as long as it is not cancelled."""
        self._session = session
        while True:
            self.tick()
            if session.wants_entries:
                name = session.entries_name
                session.take_entries(name, await anyio.to_thread.run_sync(self._directory.read, name))
                link.nudge()
            elif session.wants_load:
                await self._load(session)
                link.nudge()
            elif session.is_behind:
                with anyio.move_on_after(_TICK_SECONDS):
                    await link.wait_for_change()
            else:
                await anyio.sleep(_TICK_SECONDS)

    async def _load(self, session: SpooledSession) -> None:
        stretch = session.next_stretch()
        if stretch is None or stretch.name is None:
            session.load(stretch, () if stretch is None else stretch.frames)
            return
        name = stretch.name
        scanned = await anyio.to_thread.run_sync(lambda: scan(self._directory.read(name)))
        session.load(stretch, scanned.frames)

    async def finish(self, seconds: float) -> None:
        """Writes and syncs all that waits, and says what is left for the next start."""
        is_written = await anyio.to_thread.run_sync(self.flush, max(seconds, 1.0), abandon_on_cancel=True)
        left = sum(chapter.last - chapter.acknowledged for chapter in self.spool.chapters)
        if left:
            _log.warning("kept_in_spool", directory=str(self._directory.path), batches=left, is_written=is_written)

    def discard(self) -> bool:
        """Removes the spool from its disk: all of it was acknowledged, or is of no use. False where that failed."""
        try:
            if self._directory.remove():
                return True
            why = "something else lies in it"
        except OSError as error:
            why = error.strerror or str(error)
        _log.warning("spool_not_removed", directory=str(self._directory.path), why=why)
        return False

    @property
    def written_ns(self) -> int:
        """When a file of it was written last, of the wall clock."""
        return self._directory.written_ns()

    def flush(self, seconds: float) -> bool:
        """Whether all that waits could be written and synced in time."""
        until = time.monotonic() + seconds
        while self._wait(until):
            job = self.spool.take_job(self.now_ns())
            if job is None:
                job = self.spool.take_sync()
            if job is None:
                return self.spool.statistics().pending_bytes == 0
            self._running = _Running(job, self._thread.submit(self._directory.perform, job))
        return False

    def close(self) -> None:
        """Ends the thread, unless the disk blocks it, and gives the directory free."""
        if self._running is None or self._running.done.done():
            self._thread.shutdown()
            self._directory.close()
        else:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _wait(self, until: float) -> bool:
        if self._running is None:
            return True
        with contextlib.suppress(Exception):
            self._running.done.exception(timeout=max(0.0, until - time.monotonic()))
        if not self._running.done.done():
            return False
        self._finish()
        return self._fault is None

    def _finish(self) -> None:
        assert self._running is not None, "no job of the spool is running"
        error, self._running = self._running.done.exception(), None
        if error is not None and not isinstance(error, OSError):
            raise error
        fault = None if error is None else error.strerror or str(error)
        self.spool.on_done(self.now_ns(), fault)
        if fault != self._fault:
            tell = _log.info if fault is None else _log.warning
            said = "written again" if fault is None else "not written: batches are kept in memory until it can be"
            tell("spool", directory=str(self._directory.path), said=said, **({} if fault is None else {"why": fault}))
        self._fault = fault

"""Carries out what a spool decides on its database, by a thread, and brings what waits there back to the session.

The thread is the only one that waits for the disk; everything else of the agent goes on while it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Final, TypeVar

import anyio
import anyio.to_thread
import structlog

from ncclscope_agent.link.network import Link
from ncclscope_agent.spool.contents import Spool
from ncclscope_agent.spool.database import SpoolDatabase
from ncclscope_agent.spool.directory import SpoolDirectory
from ncclscope_agent.spool.records import DiskState, Entries, Frame, Transaction
from ncclscope_agent.spool.session import Load, SpooledSession
from ncclscope_wire.errors import ConfigError

_log = structlog.get_logger(__name__)
_Answer = TypeVar("_Answer")

_TICK_SECONDS: Final = 2.0
"""Between two looks at what no event reports: syncs that are due when nothing is read, and what has become too old."""
_EXPIRY_SECONDS: Final = 60.0
"""For dropping what is too old, at the start."""


class SpoolKeeper:
    """A spool and its directory: carries out the transactions of the one in the other, in a thread.

    `now_ns` is the spool's clock: the wall clock at the start, and from then on as much later as time has passed.
    """

    def __init__(
        self, spool: Spool, directory: SpoolDirectory, *, monotonic_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.spool = spool
        self._directory = directory
        self._database = SpoolDatabase(directory.path)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="spool")
        self._running: Future[DiskState] | None = None
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
        """Reads what is there, up to `max_bytes`, so this may take seconds; what is too old is dropped.

        Raises:
            ConfigError: it cannot be read, or is another agent's.
        """
        try:
            self._thread.submit(self._recover).result()
        except OSError as error:
            raise ConfigError(f"--spool: {self._database.path} cannot be read: {error}") from error
        self.flush(_EXPIRY_SECONDS)
        left = self._unacknowledged()
        if left:
            size = self.spool.statistics().bytes_on_disk
            _log.info("spool_found", directory=str(self._directory.path), batches=left, bytes=size)
        if unusable := self.spool.unusable_files:
            _log.warning("spool_not_read", directory=str(self._directory.path), files=dict(unusable))

    def _recover(self) -> None:
        found = self._database.recover()
        if found.owner is not None and found.owner.agent_id != self._directory.path.name:
            raise ConfigError(
                f"--spool: {self._directory.path} has the spool of the agent {found.owner.agent_id}: "
                "move it to a directory of that name, or remove it"
            )
        self.spool.unusable_files = self._directory.unusable_files()
        self.spool.recover(found)

    def _unacknowledged(self) -> int:
        return sum(chapter.last - chapter.acknowledged for chapter in self.spool.chapters)

    def now_ns(self) -> int:
        """The spool's clock."""
        return self._began_ns + self._monotonic_ns()

    def nudge(self) -> None:
        """Starts what there is to do; returns at once."""
        if self._running is not None:
            if not self._running.done():
                return
            self._finish()
        self._start(self.spool.next_transaction(self.now_ns(), at_once=not self._is_acknowledged_soon()))

    def _start(self, wanted: Transaction | None) -> None:
        if wanted is not None:
            self._running = self._thread.submit(self._database.commit, wanted)

    def _is_acknowledged_soon(self) -> bool:
        """Whether what was just read may well be acknowledged before it need be written."""
        session = self._session
        return session is not None and session.exchange.is_streaming and not session.is_behind

    async def attend(self, session: SpooledSession, link: Link) -> None:
        """Brings the session what it wants of the disk, until it is cancelled."""
        self._session = session
        while True:
            self.nudge()
            if (chapter := session.wants_entries_of) is not None:
                session.load_entries(
                    chapter, await self._read(partial(self._database.entries, chapter), list[Entries]())
                )
                link.nudge()
            elif session.wants_load:
                wanted = session.next_load()
                session.load(wanted, *await self._frames(wanted))
                link.nudge()
            elif session.is_behind:
                with anyio.move_on_after(_TICK_SECONDS):
                    await link.wait_for_change()
            else:
                await anyio.sleep(_TICK_SECONDS)

    async def _frames(self, wanted: Load) -> tuple[list[Frame], int]:
        if wanted.in_memory is not None:
            return wanted.in_memory, wanted.last
        read = self._database.frames
        nothing = list[Frame](), wanted.last
        return await self._read(lambda: read(wanted.chapter, wanted.sequence, wanted.last), nothing)

    async def _read(self, read: Callable[[], _Answer], nothing: _Answer) -> _Answer:
        """The answer of the database; `nothing` if it cannot be read."""
        try:
            return await asyncio.wrap_future(self._thread.submit(read))
        except OSError as error:
            _log.warning("spool_unreadable", directory=str(self._directory.path), why=str(error))
            return nothing

    async def finish(self, seconds: float) -> None:
        """Writes and syncs all that waits, and says what is left for the next start."""
        is_written = await anyio.to_thread.run_sync(self.flush, max(seconds, 1.0), abandon_on_cancel=True)
        if left := self._unacknowledged():
            _log.warning("kept_in_spool", directory=str(self._directory.path), batches=left, is_written=is_written)

    def discard(self) -> bool:
        """Removes the spool from its disk: all of it was acknowledged, or is of no use. False if that failed."""
        try:
            self._thread.submit(self._database.close).result()
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
        while self._wait_until(until):
            self._start(self.spool.next_transaction(self.now_ns()) or self.spool.last_transaction(self.now_ns()))
            if self._running is None:
                return self.spool.statistics().pending_bytes == 0
        return False

    def close(self) -> None:
        """Ends the thread, unless the disk blocks it, and unlocks the directory."""
        if self._running is None or self._running.done():
            self._thread.submit(self._database.close)
            self._thread.shutdown()
            self._directory.close()
        else:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _wait_until(self, until: float) -> bool:
        if self._running is None:
            return True
        with contextlib.suppress(TimeoutError):
            self._running.exception(timeout=max(0.0, until - time.monotonic()))
        if not self._running.done():
            return False
        self._finish()
        return self._fault is None

    def _finish(self) -> None:
        """Reports how the transaction ended, to the spool and, if that is news, in the log."""
        assert self._running is not None, "no transaction of the spool is running"
        running, self._running = self._running, None
        fault: str | None = None
        try:
            self.spool.on_done(self.now_ns(), running.result())
        except OSError as error:
            fault = error.strerror or str(error)
            self.spool.on_failed(self.now_ns(), fault)
        where = str(self._directory.path)
        if fault is not None and fault != self._fault:
            _log.warning(
                "spool", directory=where, said="not written: batches are kept in memory until it can be", why=fault
            )
        elif fault is None and self._fault is not None:
            _log.info("spool", directory=where, said="written again")
        self._fault = fault

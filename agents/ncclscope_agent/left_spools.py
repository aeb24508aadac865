"""Spools that agents have left: each is sent under its agent's name, in its place, and then removed.

An agent that ends with its job while the service is away leaves behind what was not acknowledged, and nothing starts it
again. Who takes up its spool holds its lock, so a spool that an agent holds, or another sender, is left alone. What is
too old is dropped first, service or not: this bounds what is left on a node that has lost its service for good.

A spool goes only when the service has acknowledged all of it. One who is killed before leaves it as it is, and the
next finds out from the service what of it is wanted.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
import structlog

from ncclscope_agent.app import Agent, stop_on_signal
from ncclscope_agent.link.frames import WindowLimits
from ncclscope_agent.link.network import LinkSettings
from ncclscope_agent.spool.contents import Spool
from ncclscope_agent.spool.directory import SpoolDirectory, SpoolInUseError, agent_directories
from ncclscope_agent.spool.keeper import SpoolKeeper
from ncclscope_agent.spool.limits import SpoolLimits
from ncclscope_agent.spool.records import Owner
from ncclscope_agent.spool.session import SpooledSession
from ncclscope_wire.errors import ConfigError
from ncclscope_wire.messages import PROTOCOL_VERSION, Hello

_log = structlog.get_logger(__name__)

_LOOK_SECONDS: Final = 0.1


class Fate(Enum):
    """The outcome of sending a spool."""

    SENT = "sent"
    """The service has all that could be sent of it (which may be nothing), and it was removed."""
    EXPIRED = "expired"
    """All that waited in it was too old, and it was removed."""
    IN_USE = "in_use"
    """An agent or another sender has it."""
    WAITS = "waits"
    """The service was away, or time ran out: to be tried again."""
    STUCK = "stuck"
    """It cannot be sent as things are: somebody must look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendLimits:
    """Limits of space and time while spools are sent."""

    spool: SpoolLimits
    window: WindowLimits
    seconds: float
    """For all spools together."""


class LeftSpools:
    """Sends what is below a folder of spools, once, one agent after the other."""

    def __init__(self, folder: Path, link: LinkSettings, limits: SendLimits, *, software_version: str) -> None:
        self._folder = folder
        self._link = link
        self._limits = limits
        self._software_version = software_version
        self._until = time.monotonic() + limits.seconds
        self._running: Agent | None = None
        self._is_stopping = self._is_away = False

    def stop(self) -> None:
        """Asks for the end: what is not acknowledged stays for the next time."""
        self._is_stopping = True
        if self._running is not None:
            self._running.stop()

    async def send(self) -> Counter[Fate]:
        """Sends all, and gives how many spools had which fate.

        Raises:
            ConfigError: the folder cannot be read.
        """
        fates = Counter[Fate]()
        async with anyio.create_task_group() as tasks:
            await tasks.start(stop_on_signal, self.stop)
            for path in list(agent_directories(self._folder)):
                fate = await self._process(path)
                if fate is not None:
                    fates[fate] += 1
            tasks.cancel_scope.cancel()
        _log.info("spools", folder=str(self._folder), **{fate.value: fates[fate] for fate in Fate})
        return fates

    async def _process(self, path: Path) -> Fate | None:
        """Sends one spool and gives its fate; None if another has removed it meanwhile."""
        try:
            directory = _opened(path)
        except SpoolInUseError:
            return Fate.IN_USE
        except ConfigError as error:
            return _report_stuck(path, str(error))
        if directory is None:
            return None
        with SpoolKeeper(Spool(None, limits=self._limits.spool), directory) as keeper:
            try:
                await anyio.to_thread.run_sync(keeper.recover)
            except ConfigError as error:
                return _report_stuck(path, str(error))
            return await self._settle(path, keeper)

    async def _settle(self, path: Path, keeper: SpoolKeeper) -> Fate:
        known = keeper.spool.statistics()
        if (expired := known.dropped.get("expired", 0)) > 0:
            _log.warning("spool_expired", directory=str(path), batches=expired)
        if known.oldest_ns is None:
            return self._remove(path, keeper, Fate.EXPIRED if expired else Fate.SENT)
        left_by = keeper.spool.left_by
        if left_by is None or not left_by.job:
            return _report_stuck(path, "an older ncclscope has left it, and does not say of which job it is")
        if self._is_away or self._is_stopping or time.monotonic() >= self._until:
            return Fate.WAITS
        return await self._send(path, keeper, left_by)

    def _remove(self, path: Path, keeper: SpoolKeeper, fate: Fate) -> Fate:
        foreign = keeper.spool.statistics().unusable_files.get("other_version", 0)
        if foreign and keeper.now_ns() - keeper.written_ns <= self._limits.spool.max_age_ns:
            return _report_stuck(path, "it has files of another ncclscope, which this one cannot read")
        return fate if keeper.discard() else Fate.STUCK

    async def _send(self, path: Path, keeper: SpoolKeeper, left_by: Owner) -> Fate:
        session = SpooledSession(
            self._hello(left_by), keeper.spool, new_id=lambda: secrets.token_hex(8), limits=self._limits.window
        )
        is_complete = False
        running = self._running = Agent(session, self._link, (), flush_seconds=0, spool=keeper)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._stop_without_service, session, running)
            is_complete = await running.run(once_seconds=max(0.0, self._until - time.monotonic()))
            tasks.cancel_scope.cancel()
        self._running = None
        known = session.statistics()
        if is_complete:
            lost = {f"lost_{reason}": number for reason, number in keeper.spool.statistics().dropped.items()}
            _log.info("spool_sent", directory=str(path), job=left_by.job, batches=known.acknowledged_total, **lost)
            return self._remove(path, keeper, Fate.SENT)
        if session.exchange.refusal is not None:
            return _report_stuck(path, f"the service refused: {session.exchange.refusal.message}")
        self._is_away |= not known.connections_total
        return Fate.WAITS

    def _hello(self, left_by: Owner) -> Hello:
        return Hello(
            protocol_version=PROTOCOL_VERSION,
            agent_id=left_by.agent_id,
            session_id=secrets.token_hex(8),
            name=left_by.name,
            host=left_by.host,
            job=left_by.job,
            software_version=self._software_version,
            pid=os.getpid(),
        )

    async def _stop_without_service(self, session: SpooledSession, running: Agent) -> None:
        """Ends it if no service answers in the time for one connection, or it lets nobody in."""
        until = time.monotonic() + self._link.connect_seconds
        while not session.statistics().connections_total:
            if session.exchange.refusal is not None or time.monotonic() >= until:
                running.stop()
                return
            await anyio.sleep(_LOOK_SECONDS)


def _opened(path: Path) -> SpoolDirectory | None:
    try:
        return SpoolDirectory(path, is_left=True)
    except ConfigError:
        if path.is_dir():
            raise
        return None


def _report_stuck(path: Path, why: str) -> Fate:
    _log.warning("spool_stuck", directory=str(path), why=why)
    return Fate.STUCK

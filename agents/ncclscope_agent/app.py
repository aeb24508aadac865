"""The agent as one task group: followers read, the session keeps, the link sends.

Nothing is read before the service has said where to go on, and nothing while the window is full: what is not
read waits in the files, so the agent's memory is bounded however long the service is away.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread
import structlog
from anyio import TASK_STATUS_IGNORED
from anyio.abc import TaskStatus

from ncclscope_agent.budget import Budget, BudgetLimits, BudgetState
from ncclscope_agent.files.follower import Followed
from ncclscope_agent.health import agent_health, resident_bytes
from ncclscope_agent.link.network import Link, LinkSettings
from ncclscope_agent.link.session import AnySession
from ncclscope_agent.spool.keeper import SpoolKeeper
from ncclscope_agent.spool.session import SpooledSession
from ncclscope_wire.batch import Batch
from ncclscope_wire.messages import AgentHealth

_log = structlog.get_logger(__name__)
_Answer = TypeVar("_Answer")

_LAST_WORDS_SECONDS: Final = 1.0
"""For Goodbye to leave; a service that does not take it will see the connection close."""
_COME_BACK_SECONDS: Final = 5.0
"""For the connection after that of the last spooled session: over it Goodbye is said."""
_NO_LIMITS: Final = BudgetLimits(cpu_share=0, seconds=1, memory_bytes=0)
_NOTICE_SECONDS: Final = 0.5
"""Less than between the answers to two heartbeats, so that a service that answers and takes nothing is noticed too."""
_MEMORY_READ_NS: Final = 1_000_000_000
_SLOWDOWN: Final = 1.5
"""By this each pause grows while nothing comes: from 10 to 250 ms within a second."""
_RELEASE_SECONDS: Final = 1.0
"""Between two looks at what can be released: at 100 MB/s of log, as much waits as that."""
_BUSY_SHARE: Final = 0.002
"""Of a core, for making batches of what grows: after a poll that took 1 ms the next one waits 500 ms, and up to
`Followed.gather_seconds`. A poll costs by file and batch more than by line, the more so with the cold caches of one who
slept, so fewer are cheaper (`benchmarks/agent_budget.py`)."""


class Agent:
    """Runs followers and link until it is stopped, or until everything is sent.

    `on_spent` is called when the agent begins to stop itself, since its budget is spent.
    """

    def __init__(
        self,
        session: AnySession,
        link: LinkSettings,
        followed: Sequence[Followed],
        *,
        flush_seconds: float,
        budget: BudgetLimits | None = None,
        wall_ns: Callable[[], int] = time.time_ns,
        spool: SpoolKeeper | None = None,
        on_spent: Callable[[], object] = lambda: None,
    ) -> None:
        self._on_spent = on_spent
        self._session = session
        self._spool = spool
        self._followed = followed
        self._budget = Budget(budget or _NO_LIMITS, now_ns=time.monotonic_ns(), cpu_ns=time.process_time_ns())
        self._memory_bytes, self._memory_read_at_ns = 0, 0
        self._flush_seconds = flush_seconds
        self._wall_ns = wall_ns
        self._link = Link(session, link, health=self.health, wall_ns=wall_ns)
        self._is_stopping = False
        self._naps: set[asyncio.Future[None]] = set()
        self._reading = anyio.CancelScope()
        self._attending = anyio.CancelScope()
        self._waiting = 0

    def health(self) -> AgentHealth:
        """The agent's state now, for a heartbeat."""
        return agent_health(
            [known.follower.statistics() for known in self._followed],
            self._session.statistics(),
            waiting_batches=self._waiting,
            now_wall_ns=self._wall_ns(),
            rss_bytes=self._memory(time.monotonic_ns()),
            spool=None if self._spool is None else self._spool.spool.statistics(),
            is_slowed=self._budget.state is not BudgetState.WITHIN,
        )

    @property
    def stopped_because(self) -> str | None:
        """Why the agent stopped itself; None if it did not."""
        return self._budget.reason if self._budget.state is BudgetState.SPENT else None

    def stop(self) -> None:
        """Asks for the end: all files are read to their ends, then everything is handed over within the deadline."""
        if not self._is_stopping:
            self._is_stopping = True
            for nap in self._naps:
                _wake(nap)
            self._reading.deadline = min(self._reading.deadline, anyio.current_time() + self._flush_seconds)
            self._link.notify_change()

    async def run(self, *, once_seconds: float | None = None) -> bool:
        """Runs until `stop`, or with `once_seconds` until all that is there is read and acknowledged.

        Returns whether everything that was read was acknowledged in time.
        """
        is_complete = False
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._link.run)
            tasks.start_soon(self._attend_spool)
            if once_seconds is not None:
                self._reading.deadline = anyio.current_time() + once_seconds
            is_complete = await self._read_and_hand_over(once=once_seconds is not None)
            if is_complete and self._session.wants_reconnect:
                await self._come_back()
            self._session.exchange.heartbeat(self.health(), agent_wall_ns=self._wall_ns())
            self._session.exchange.finish("done" if once_seconds is not None else "stopped")
            self._link.nudge()
            self._attending.cancel()
            tasks.cancel_scope.deadline = anyio.current_time() + _LAST_WORDS_SECONDS
        if self._spool is not None:
            await self._spool.finish(self._flush_seconds)
        return is_complete

    async def _attend_spool(self) -> None:
        if self._spool is not None and isinstance(self._session, SpooledSession):
            with self._attending:
                await self._spool.attend(self._session, self._link)

    async def _read_and_hand_over(self, *, once: bool) -> bool:
        with self._reading:
            async with anyio.create_task_group() as pumps:
                for known in self._followed:
                    pumps.start_soon(self._pump, known, once)
            while not self._session.is_drained:
                await self._link.wait_for_change()
            return True
        _log.warning("not_all_sent", batches=self._session.statistics().window_batches + self._waiting)
        return False

    async def _come_back(self) -> None:
        """Waits for another connection, so that the service hears that this is the end."""
        with anyio.move_on_after(_COME_BACK_SECONDS):
            while self._session.wants_reconnect or not self._session.exchange.is_streaming:
                await self._link.wait_for_change()

    async def _pump(self, known: Followed, once: bool) -> None:
        """Carries batches from one follower to the session."""
        generation = 0
        pause = known.tick_min_seconds
        is_last_look = False
        release_at = float("inf") if once else 0.0
        while not is_last_look:
            is_last_look = self._is_stopping
            generation = await self._follow_generation(known, generation)
            if generation == 0:
                return
            began = time.thread_time()
            carried = await self._carry(known, known.poll, generation)
            busy_seconds = time.thread_time() - began
            release_at = await self._release(known, generation, release_at)
            is_read = once and carried == 0 and known.follower.statistics().files_waiting == 0
            if is_read and self._session.generation == generation:
                await self._carry(known, known.follower.close, generation)
                is_last_look = self._session.generation == generation
            elif is_last_look and carried and known.follower.has_more:
                is_last_look = False  # to its end, or until the deadline
                await anyio.lowlevel.checkpoint()
            elif not is_last_look:
                pause = next_pause(pause, known, read_something=carried > 0, busy_seconds=busy_seconds)
                await self._wait(known, max(pause, self._rest_seconds()), generation)

    async def _wait(self, known: Followed, seconds: float, generation: int) -> None:
        """Leaves a follower alone for so long, but for looks ahead."""
        while known.look is not None and seconds > known.tick_max_seconds:
            await self._nap(known.tick_max_seconds)
            seconds -= known.tick_max_seconds
            if self._is_stopping or self._session.generation != generation or known.look(self._wall_ns()):
                return
        await self._nap(seconds)

    def _rest_seconds(self) -> float:
        """How long to do nothing for the budget's sake; stops the agent if it is spent."""
        now_ns, was = time.monotonic_ns(), self._budget.state
        memory_bytes = self._memory(now_ns)
        state = self._budget.look(now_ns=now_ns, cpu_ns=time.process_time_ns(), memory_bytes=memory_bytes)
        if state is not was:
            self._on_budget(state)
        return self._budget.rest_ns / 1e9

    def _memory(self, now_ns: int) -> int:
        """Resident memory in bytes, as it was a second ago or later."""
        if not self._memory_bytes or now_ns - self._memory_read_at_ns >= _MEMORY_READ_NS:
            self._memory_bytes, self._memory_read_at_ns = resident_bytes(), now_ns
        return self._memory_bytes

    def _on_budget(self, state: BudgetState) -> None:
        if state is BudgetState.WITHIN:
            _log.info("within_budget")
            return
        _log.warning(
            "over_budget", does="stops" if state is BudgetState.SPENT else "slows down", why=self._budget.reason
        )
        if state is BudgetState.SPENT:
            self._on_spent()
            self._is_stopping = True
            self._reading.cancel()

    async def _nap(self, seconds: float) -> None:
        """Waits so long, or until `stop`. A bare future and timer: scopes and their cancelling cost far more."""
        if self._is_stopping:
            return
        loop = asyncio.get_running_loop()
        nap: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(seconds, _wake, nap)
        self._naps.add(nap)
        try:
            await nap
        finally:
            timer.cancel()
            self._naps.discard(nap)

    async def _release(self, known: Followed, generation: int, due: float) -> float:
        """Has the space of what was applied given back, once that is due; returns when it is due again."""
        if known.release is None or anyio.current_time() < due or self._session.generation != generation:
            return due
        # Not to be abandoned: it works with handles that its follower closes.
        await anyio.to_thread.run_sync(known.release, dict(self._session.applied))
        return anyio.current_time() + _RELEASE_SECONDS

    async def _follow_generation(self, known: Followed, generation: int) -> int:
        """Waits for the service's first word, and begins again if it asked for that. 0: stopped before it."""
        while self._session.generation == 0:
            if self._is_stopping:
                return 0
            await self._link.wait_for_change()
        if self._session.generation != generation:
            known.follower.reset(self._session.positions)
        return self._session.generation

    async def _carry(self, known: Followed, ask: Callable[[int], Iterable[Batch]], generation: int) -> int:
        """Offers what a follower gives, one batch after the other; returns how many were accepted."""
        if known.in_thread:
            return await self._carry_from_thread(known, ask, generation)
        carried = 0
        for batch in ask(self._wall_ns()):
            if not self._try_offer(batch, generation) and not await self._offer(known, batch, generation):
                break
            carried += 1
        if carried:
            self._nudge()
        return carried

    def _nudge(self) -> None:
        """Has what was offered written and sent, in this order."""
        if self._spool is not None:
            self._spool.nudge()
        self._link.nudge()

    async def _carry_from_thread(self, known: Followed, ask: Callable[[int], Iterable[Batch]], generation: int) -> int:
        batches = iter(await _in_thread(lambda: ask(self._wall_ns())))
        carried = 0
        while (batch := await _in_thread(lambda: next(batches, None))) is not None:
            if not self._try_offer(batch, generation) and not await self._offer(known, batch, generation):
                break
            carried += 1
            self._nudge()
            if (rest := self._rest_seconds()) > 0:
                await self._nap(rest)
        return carried

    def _try_offer(self, batch: Batch, generation: int) -> bool:
        return self._session.generation == generation and self._session.offer(batch)

    async def _offer(self, known: Followed, batch: Batch, generation: int) -> bool:
        """Waits for room; False if the batch is of no use any more, since its reader must begin again."""
        self._waiting += 1
        self._nudge()
        try:
            while self._session.generation == generation:
                if self._session.offer(batch):
                    return True
                with anyio.move_on_after(_NOTICE_SECONDS) as waited:
                    await self._link.wait_for_change()
                if waited.cancelled_caught and known.notice is not None:
                    known.notice(self._wall_ns())
            return False
        finally:
            self._waiting -= 1


async def _in_thread(call: Callable[[], _Answer]) -> _Answer:
    return await anyio.to_thread.run_sync(call, abandon_on_cancel=True)


def _wake(nap: asyncio.Future[None]) -> None:
    if not nap.done():
        nap.set_result(None)


def next_pause(pause: float, known: Followed, *, read_something: bool, busy_seconds: float) -> float:
    """How long a follower is left alone after a look that took `busy_seconds` of the processor.

    Not at all while it is behind; else the shortest time that keeps to the share of a core, and longer and longer
    while nothing comes.
    """
    if read_something and known.follower.has_more:
        return 0.0
    shortest = max(known.tick_min_seconds, busy_seconds / _BUSY_SHARE)
    if read_something and known.look is not None:
        return min(shortest, max(known.gather_seconds, known.tick_max_seconds))
    wanted = shortest if read_something else max(shortest, pause * _SLOWDOWN)
    return min(wanted, known.tick_max_seconds)


async def stop_on_signal(stop: Callable[[], object], *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
    """Calls `stop` at SIGTERM or SIGINT; the second signal ends the process as it would without us."""
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for received in signals:
            _log.info("stopping", signal=received.name)
            stop()
            return

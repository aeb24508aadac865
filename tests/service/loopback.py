"""A real service port on loopback, for tests: what it received, and how it may be slowed down."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio
import anyio.lowlevel
from benchmarks.ports import free_port

from ncclscope_service.auth.credentials import Credentials
from ncclscope_service.intake.receive import Received, Receiver
from ncclscope_service.serve.listen import Listener, ListenSettings


class Service:
    """A receiver behind a port."""

    def __init__(self) -> None:
        self.receiver = Receiver()
        self.received: list[Received] = []
        self.gate: Callable[[], Awaitable[None]] | None = None
        """Awaited before each delivery."""
        self.turn: Callable[[], Awaitable[None]] | None = None
        """Awaited before what a connection sent is taken."""
        self.arrived = anyio.Event()
        self.port = 0
        self.listener: Listener | None = None

    async def deliver(self, received: Received) -> None:
        if self.gate is not None:
            await self.gate()
        self.received.append(received)
        self.arrived.set()

    async def _turn(self) -> None:
        if self.turn is not None:
            await self.turn()

    def lines(self, key: str) -> list[int]:
        """The lines of a source, in the order in which they were applied."""
        batches = [received.batch for received in self.received if received.batch.source.key == key]
        return [line for batch in batches for line in batch.operations["line"].tolist()]

    async def wait_for_rows(self, key: str, rows: int) -> None:
        while len(self.lines(key)) < rows:
            self.arrived = anyio.Event()
            await self.arrived.wait()

    async def wait_for_goodbyes(self) -> None:
        """Returns when every agent has said goodbye: its last words are on their way when it has ended."""
        while not all(agent.said_goodbye for agent in self.receiver.agents()):
            await anyio.lowlevel.checkpoint()

    @asynccontextmanager
    async def listening(
        self, settings: ListenSettings | None = None, *, credentials: Credentials | None = None
    ) -> AsyncGenerator[int]:
        """Serves on a free port (or that of the settings) inside the block.

        Not on one that the system gives to whoever asks for any: tests leave a port and come back to it, or go on
        connecting to it, and meanwhile nobody else, nor the connection itself, may have it.
        """
        given = settings or ListenSettings(port=0)
        self.listener = Listener(
            self.receiver,
            self.deliver,
            given if given.port else replace(given, port=free_port()),
            credentials=credentials,
            wait_for_turn=self._turn,
        )
        async with anyio.create_task_group() as tasks:
            self.port = await tasks.start(self.listener.run)
            try:
                yield self.port
            finally:
                tasks.cancel_scope.cancel()

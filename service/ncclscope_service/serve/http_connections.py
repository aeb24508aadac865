"""Connections of the HTTP port: as many as there is room for, and who shows no right makes room for who comes.

A connection is a stranger until somebody with a right to read has asked on it for what needs one. Where there are too
many, the stranger that has been there longest is ended: so clients that hold connections open, or drip a request byte
by byte, lose theirs, while a probe, which asks at once, is answered long before its turn comes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS: Final = 512
REQUEST_SECONDS: Final = 10.0
"""By then the first request of a connection is whole."""
KNOWN: Final = "is_known"
"""In the state of a request that somebody with a right to read has made."""


def connection_class(refused: Counter[str]) -> type[H11Protocol]:
    """The protocol of a connection; counts those that are ended in `refused`."""

    class Connection(H11Protocol):
        is_leaving = False
        opened_at = 0.0
        deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            """Makes room for this connection if there are too many."""
            super().connection_made(transport)
            self.opened_at = self.loop.time()
            self.deadline = self.loop.call_later(REQUEST_SECONDS, self.end_if_silent)
            here = [each for each in self.connections if isinstance(each, Connection) and not each.is_leaving]
            if len(here) > MAX_CONNECTIONS:
                min((each for each in here if each is not self), key=Connection.leaves_after).leave("too_many")

        def connection_lost(self, exc: Exception | None) -> None:
            """Forgets the connection."""
            if self.deadline is not None:
                self.deadline.cancel()
            super().connection_lost(exc)

        @property
        def is_known(self) -> bool:
            """Whether its last request came from somebody with a right to read."""
            scope: Any = self.scope
            return scope is not None and KNOWN in scope["state"]

        def leaves_after(self) -> tuple[bool, float]:
            """Strangers leave first, the oldest of them before others."""
            return self.is_known, self.opened_at

        def end_if_silent(self) -> None:
            """Ends the connection if its first request is not whole."""
            cycle: Any = self.cycle
            if cycle is None:
                self.leave("slow")

        def leave(self, why: str) -> None:
            """Ends the connection at once."""
            self.is_leaving = True
            refused[why] += 1
            self.transport.abort()

    return Connection

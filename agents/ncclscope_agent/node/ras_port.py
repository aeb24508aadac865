"""Asks NCCL's RAS on this node every few seconds how the job is. Any process of the job answers for all of its nodes.

A port at which nobody listens, or nobody answers, is a state: it is counted when it changes, and asked again.
*Source:* NCCL `src/ras/client.cc`: lines in both directions, the answer ends with the connection.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from ncclscope_agent.node.asked import ANSWERED, AskedFollower
from ncclscope_agent.sources.ras import RasWatch, read_answer
from ncclscope_wire.errors import FormatError
from ncclscope_wire.facts import Fact
from ncclscope_wire.records import Source, SourceKind

_CLIENT: Final = b"CLIENT PROTOCOL 2\n"
_STEP_SECONDS: Final = 2.0
"""For a connection, and for each line."""
_GATHER_SECONDS: Final = 3
"""That RAS may wait for other nodes."""
_ANSWER_SECONDS: Final = 10.0
_LONGEST_LINE: Final = 4096
LONGEST_ANSWER: Final = 64 << 20
"""Bytes, in JSON."""
LONGEST_TEXT: Final = 8 << 20
"""Bytes, in text, which names only the ranks that stand out."""


class RasError(Exception):
    """No answer: `reason` is "refused" (nobody listens), "silent", "cut", "too_long" or "unexpected"."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def ask(host: str, port: int, *, as_json: bool, seconds: float = _ANSWER_SECONDS) -> bytes | None:
    """The answer to STATUS; None if the server knows no JSON, and is to be asked for text.

    Raises:
        RasError: there is none.
    """
    until = time.monotonic() + seconds
    try:
        with socket.create_connection((host, port), timeout=min(_STEP_SECONDS, seconds)) as connection:
            talk = _Talk(connection, until)
            if not talk.answer(_CLIENT).startswith(b"SERVER PROTOCOL "):
                raise RasError("unexpected")
            for request in (b"TIMEOUT %d\n" % _GATHER_SECONDS, *((b"SET FORMAT json\n",) if as_json else ())):
                if talk.answer(request).strip() != b"OK":
                    if request.startswith(b"SET"):
                        return None
                    raise RasError("unexpected")
            connection.sendall(b"VERBOSE STATUS\n")
            return talk.rest(LONGEST_ANSWER if as_json else LONGEST_TEXT)
    except ConnectionRefusedError as error:
        raise RasError("refused") from error
    except TimeoutError as error:
        raise RasError("silent") from error
    except OSError as error:
        raise RasError("cut") from error


class _Talk:
    """One conversation with a server, which ends in time however slowly it answers."""

    def __init__(self, connection: socket.socket, until: float) -> None:
        self._connection = connection
        self._until = until
        self._received = bytearray()

    def answer(self, request: bytes) -> bytes:
        """The line that answers a line."""
        self._connection.sendall(request)
        until = min(self._until, time.monotonic() + _STEP_SECONDS)
        while (end := self._received.find(b"\n")) < 0:
            if len(self._received) > _LONGEST_LINE or not self._receive(until):
                raise RasError("cut")
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        return line

    def rest(self, most: int) -> bytes:
        """All that comes until the connection ends."""
        while self._receive(self._until):
            if len(self._received) > most:
                raise RasError("too_long")
        return bytes(self._received)

    def _receive(self, until: float) -> bool:
        """Takes what comes next; False at the end."""
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        block = self._connection.recv(1 << 16)
        self._received += block
        return bool(block)


class RasFollower(AskedFollower):
    """Asks one address."""

    def __init__(self, host: str, port: int, *, seconds: float = _ANSWER_SECONDS) -> None:
        super().__init__(Source(kind=SourceKind.RAS, name=f"RAS at {host}:{port}", key=f"ras:{host}:{port}"))
        self._address = host, port
        self._seconds = seconds
        self._watch = RasWatch()
        self._knows_json = True

    def look(self, now_wall_ns: int) -> tuple[Sequence[Fact], str]:
        """What is wrong that was not before."""
        try:
            return self._watch.ingest_answer(read_answer(self._answer()), now_wall_ns), ANSWERED
        except RasError as error:
            return (), error.reason
        except FormatError:
            return (), "cut"

    def forget(self) -> None:
        """Counts of earlier answers, too."""
        self._watch = RasWatch()

    def _answer(self) -> bytes:
        if self._knows_json:
            # Before 2.28.7 a server ends the connection, or says that it does not know the command.
            with suppress(RasError):
                answer = ask(*self._address, as_json=True, seconds=self._seconds)
                if answer is not None:
                    return answer
            answer = ask(*self._address, as_json=False, seconds=self._seconds)
            assert answer is not None, "text is always known"
            self._knows_json = b"NCCL version" not in answer
            return answer
        answer = ask(*self._address, as_json=False, seconds=self._seconds)
        return answer or b""

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
"""Bytes: 65,536 ranks of 32 communicators in JSON."""


class RasError(Exception):
    """No answer: `reason` is "refused" (nobody listens), "silent", "cut" or "unexpected"."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def ask(host: str, port: int, *, as_json: bool, seconds: float = _ANSWER_SECONDS) -> bytes | None:
    """The answer to STATUS; None if the server knows no JSON, and is to be asked for text.

    Raises:
        RasError: there is none.
    """
    deadline = time.monotonic() + seconds
    try:
        with socket.create_connection((host, port), timeout=min(_STEP_SECONDS, seconds)) as connection:
            lines = connection.makefile("rb")
            connection.sendall(_CLIENT)
            if not _line(lines.readline(_LONGEST_LINE)).startswith(b"SERVER PROTOCOL "):
                raise RasError("unexpected")
            for request in (b"TIMEOUT %d\n" % _GATHER_SECONDS, *((b"SET FORMAT json\n",) if as_json else ())):
                connection.sendall(request)
                if _line(lines.readline(_LONGEST_LINE)).strip() != b"OK":
                    if request.startswith(b"SET"):
                        return None
                    raise RasError("unexpected")
            connection.sendall(b"VERBOSE STATUS\n")
            return _rest(connection, deadline)
    except ConnectionRefusedError as error:
        raise RasError("refused") from error
    except TimeoutError as error:
        raise RasError("silent") from error
    except OSError as error:
        raise RasError("cut") from error


def _line(line: bytes) -> bytes:
    if not line.endswith(b"\n"):
        raise RasError("cut")
    return line


def _rest(connection: socket.socket, deadline: float) -> bytes:
    received = bytearray()
    while True:
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        block = connection.recv(1 << 16)
        if not block:
            return bytes(received)
        received += block
        if len(received) > LONGEST_ANSWER or time.monotonic() > deadline:
            raise RasError("silent")


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

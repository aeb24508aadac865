"""Frames: messages in a stream of bytes.

A frame is the length of its payload (four bytes, big-endian, unsigned) and the payload. A frame over the
limit is refused by its announced length, before any of it is kept, so that four bytes cannot make the
reader reserve 4 GiB.
"""

from __future__ import annotations

from typing import Final

from ncclscope_wire.errors import ProtocolError

HEADER_BYTES: Final = 4
MAX_FRAME_BYTES: Final = 16 * 1024 * 1024
"""Longest payload. A batch of 16 MiB holds 700,000 operations; readers cut far earlier (64 KiB to 4 MiB).
Precedents: gRPC refuses messages over 4 MiB, Kafka over 1 MiB, both by default."""

_HTTP_METHODS: Final = frozenset({b"GET ", b"POST", b"HEAD", b"PUT ", b"OPTI", b"DELE", b"PATC", b"CONN", b"TRAC"})
"""Beginnings of requests. *Source:* RFC 9110, section 9. As lengths all are over 1 GB, so no frame begins like that."""
_HTTP_ANSWER: Final = b"HTTP"
_TLS_ALERT: Final = b"\x15\x03"
"""TLS's answer to a peer that does not speak it. *Source:* RFC 8446, section 5.1."""


def encode_frame(payload: bytes | memoryview, *, max_frame_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """The payload with its length before it.

    Raises:
        ProtocolError: the payload is longer than the limit; the peer would refuse it.
    """
    if len(payload) > max_frame_bytes:
        raise ProtocolError(f"a frame of {len(payload)} bytes cannot be sent: the limit is {max_frame_bytes} bytes")
    return b"".join((len(payload).to_bytes(HEADER_BYTES, "big"), payload))


class Deframer:
    """Cuts a stream of bytes into payloads; keeps at most one unfinished frame.

    After a ProtocolError every further `ingest_bytes` raises it again: where the next frame would begin is not known.
    """

    def __init__(self, *, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_frame_bytes = max_frame_bytes
        """May be changed between two calls."""
        self._buffer = bytearray()
        self._fault: str | None = None

    @property
    def pending_bytes(self) -> int:
        """Bytes of an unfinished frame that are kept."""
        return len(self._buffer)

    def ingest_bytes(self, data: bytes) -> list[bytes]:
        """The payloads that these bytes complete, in order.

        Raises:
            ProtocolError: a frame announces more than the limit. Complete frames of the same call are lost
                with it, which costs nothing: what was not acknowledged is sent again.
        """
        if self._fault is not None:
            raise ProtocolError(self._fault)
        self._buffer += data
        payloads: list[bytes] = []
        begin = 0
        while (end := self._frame_end(begin)) is not None and end <= len(self._buffer):
            payloads.append(bytes(memoryview(self._buffer)[begin + HEADER_BYTES : end]))
            begin = end
        del self._buffer[:begin]
        return payloads

    def finish(self) -> list[bytes]:
        """Forgets an unfinished frame at the end of the stream: the sender has it still. Always empty."""
        self._buffer.clear()
        return []

    def _frame_end(self, begin: int) -> int | None:
        """End of the frame that begins there; None if its length is not there yet."""
        header = bytes(self._buffer[begin : begin + HEADER_BYTES])
        if len(header) < HEADER_BYTES:
            return None
        length = int.from_bytes(header, "big")
        if length > self.max_frame_bytes:
            self._fault = self._why_too_long(header, length)
            self._buffer.clear()
            raise ProtocolError(self._fault)
        return begin + HEADER_BYTES + length

    def _why_too_long(self, header: bytes, length: int) -> str:
        """The sentence about a frame over the limit; a header of HTTP shows that the ports were mixed up."""
        if header == _HTTP_ANSWER:
            return "this is an HTTP port: agents connect to the service's port for agents (serve --listen)"
        if header in _HTTP_METHODS:
            return (
                "this port is for agents: the page, /metrics and the API are at the service's HTTP port (serve --http)"
            )
        if header.startswith(_TLS_ALERT):
            return "this port speaks TLS: give the agent --tls or --tls-ca FILE"
        return f"a frame announces {length} bytes: the limit is {self.max_frame_bytes} bytes"

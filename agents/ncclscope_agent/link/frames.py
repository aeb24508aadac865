"""Batches in flight: encoded, numbered, sent again on a new connection, forgotten once they are acknowledged."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Final, cast

from ncclscope_wire.batch import ROW_TABLES, Batch, without_rows
from ncclscope_wire.codec import decode_message, encode_message
from ncclscope_wire.errors import ProtocolError
from ncclscope_wire.frame import MAX_FRAME_BYTES
from ncclscope_wire.messages import BatchMessage
from ncclscope_wire.records import SourceGap


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowLimits:
    """Limits of what may be in flight."""

    max_bytes: int = 16 * 1024 * 1024
    """Encoded bytes. The last batch may pass it: a batch that is larger than all of it must get through too."""
    max_batches: int = 4096
    max_frame_bytes: int = MAX_FRAME_BYTES


@dataclass(frozen=True, slots=True)
class InFlight:
    """One batch that is not acknowledged."""

    framed: bytes
    key: str
    """Key of its source."""
    end: int
    is_last: bool
    observed_at_ns: int | None
    spooled: int = 0
    """The number under which it is in the spool."""


class Window:
    """All batches in flight, numbered from 1 in each session."""

    def __init__(self, limits: WindowLimits) -> None:
        self.limits = limits
        self.bytes = 0
        self.acknowledged = 0
        """Total number of batches that were acknowledged."""
        self.stripped = Counter[str]()
        """Total numbers of batches without their rows and records, by the reason of their gap."""
        self._batches: deque[InFlight] = deque()
        self.first = self.next_to_send = 1
        self.highest_sent = 0

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def next(self) -> int:
        """Number of the next batch that is added."""
        return self.first + len(self._batches)

    @property
    def oldest(self) -> InFlight | None:
        """The batch that waits longest."""
        return self._batches[0] if self._batches else None

    def has_room(self, *, share: int = 1) -> bool:
        """Whether a batch may be added if it may fill only one of `share` equal parts of the limits."""
        limits = self.limits
        return self.bytes < limits.max_bytes // share and len(self._batches) < max(1, limits.max_batches // share)

    def add(self, batch: InFlight) -> None:
        """Adds the next batch."""
        self._batches.append(batch)
        self.bytes += len(batch.framed)

    def clear(self, first: int = 1) -> None:
        """Forgets all; the next batch has this number."""
        self._batches.clear()
        self.bytes = 0
        self.first = self.next_to_send = first
        self.highest_sent = 0

    def acknowledge(self, sequence: int) -> Iterator[InFlight]:
        """Forgets the batches up to this number, and gives each as it goes; a late one has nothing left to forget."""
        while self.first <= sequence and self._batches:
            batch = self._batches.popleft()
            self.bytes -= len(batch.framed)
            self.first += 1
            self.acknowledged += 1
            yield batch

    def drain_into(self, sent: bytearray, max_bytes: int) -> None:
        """Adds the next batches to what is sent: one at least if nothing is in it, and none beyond `max_bytes`."""
        while self.next_to_send < self.next and (not sent or len(sent) < max_bytes):
            sent += self._batches[self.next_to_send - self.first].framed
            self.highest_sent = max(self.highest_sent, self.next_to_send)
            self.next_to_send += 1

    def payload(self, batch: Batch, sequence: int) -> bytes:
        """A batch as it is sent; its dictionaries and a gap, without its rows and records, if these do not fit a frame
        or would be refused."""
        payload = encode_message(BatchMessage(sequence=sequence, batch=batch))
        gap = self._why_not(batch, payload)
        if gap is None:
            return payload
        self.stripped[gap.reason] += 1
        return encode_message(BatchMessage(sequence=sequence, batch=without_rows(batch, gap)))

    def _why_not(self, batch: Batch, payload: bytes) -> SourceGap | None:
        """The gap in the place of the rows and records of a batch that cannot be sent."""
        if len(payload) > self.limits.max_frame_bytes:
            return _gap("batch_too_large", batch, f"a batch of {len(payload)} bytes does not fit a frame")
        if any(getattr(batch, name) for name in _RECORDS):
            try:
                decode_message(payload)
            except ProtocolError as error:
                # It would be refused each time that it is sent, for ever, and with it all that follows.
                return _gap("batch_not_valid", batch, f"the service would refuse a batch ({error})")
        return None


_RECORDS: Final = ("communicators", "versions", "facts", "topologies", "tuning_tables")
"""Records with texts and numbers of files: columns hold nothing that is out of bounds."""


def _gap(reason: str, batch: Batch, why: str) -> SourceGap:
    return SourceGap(
        reason=reason,
        amount=sum(len(cast(Sized, getattr(batch, name))) for name in (*ROW_TABLES, *_RECORDS)),
        unit="records",
        detail=f"{batch.source.name}: {why}; its rows were left out",
    )

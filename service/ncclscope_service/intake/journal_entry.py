"""Entries of the journal: all input that decides the state of the service, in the order in which it was applied.

Entries say what came from outside and when; what follows from them is not written. A batch is kept as the bytes that
its agent sent. Times are the service's wall clock.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, TypeAlias

import msgspec

from ncclscope_wire.errors import StateError


class HelloSaid(msgspec.Struct, frozen=True, kw_only=True, tag="hello", omit_defaults=True):
    """An agent's Hello was accepted."""

    payload: bytes
    """The message as `codec.encode_message` writes it."""
    at_ns: int
    forgotten: str | None = None
    """The agent that was forgotten to make room."""
    is_new: bool = False
    """The agent was not known: it gives its files from their beginning. Entries of older builds lack this."""


class BatchTaken(msgspec.Struct, frozen=True, kw_only=True, tag="batch", omit_defaults=True):
    """A batch of a session was the next one."""

    agent: str
    session: str
    payload: bytes
    """The message as it came, or without what its agent may not say."""
    at_ns: int
    is_restricted: bool = False
    """Its agent may speak of some hosts only: what strings it sent decides what it may send next."""
    job: str = ""
    """As its agent's Hello said, which the journal may have no more. Entries of older builds lack this."""


class SessionForgotten(msgspec.Struct, frozen=True, kw_only=True, tag="forgotten"):
    """A session became useless by what its agent sent: the next Hello is answered with positions."""

    agent: str


class GoodbyeSaid(msgspec.Struct, frozen=True, kw_only=True, tag="goodbye"):
    """An agent has left in order."""

    agent: str


class HostPrior(msgspec.Struct, frozen=True, array_like=True):
    """Prior of a host's clock (`clock_prior.ClockPrior`)."""

    host: str
    heartbeat_offset_ns: int | None
    error_ns: int | None


class Ticked(msgspec.Struct, frozen=True, kw_only=True, tag="tick", omit_defaults=True):
    """The pipeline worked on what had come. Priors and silent hosts are those that changed since the last one."""

    at_ns: int
    priors: tuple[HostPrior, ...] = ()
    silent: tuple[str, ...] | None = None
    """All silent hosts; None: the same as before."""
    trouble: str = ""
    """Why nothing can be kept now; empty if it can."""


_NAMES_IN_JOURNALS: Final = {"change": "news", "is_delivered": "is_taken"}
"""Of earlier versions, whose journals are read."""


class NotificationSettled(msgspec.Struct, frozen=True, kw_only=True, tag="told", rename=_NAMES_IN_JOURNALS):
    """A notification was delivered to its receiver, or given up."""

    receiver: str
    finding: str
    change: str
    is_delivered: bool


class ThresholdsChanged(msgspec.Struct, frozen=True, kw_only=True, tag="thresholds"):
    """Somebody changed thresholds of detectors (`detect.settings`) while the service ran."""

    at_ns: int
    by: str
    """Who it was; empty if nobody said."""
    values: dict[str, float | None]
    """By name; None: as given at the start again."""


class MarkAction(StrEnum):
    """What somebody does to findings."""

    ACKNOWLEDGE = "acknowledge"
    MUTE = "mute"
    CLEAR = "clear"
    """Takes an acknowledgement or mutes back."""


class FindingMarked(msgspec.Struct, frozen=True, kw_only=True, tag="mark", omit_defaults=True):
    """Somebody acknowledged or muted findings, or took it back; what is empty is not given."""

    action: MarkAction
    at_ns: int
    by: str = ""
    note: str = ""
    finding: str = ""
    """Id of a finding."""
    kind: str = ""
    job: str = ""
    """Pattern."""
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    """Patterns."""
    until_ns: int = 0
    """Of a mute."""
    mute: str = ""
    """Id of the mute that is cleared."""


OperatorEntry: TypeAlias = ThresholdsChanged | FindingMarked
"""Entries of what a person did."""
Entry: TypeAlias = (
    HelloSaid | BatchTaken | SessionForgotten | GoodbyeSaid | Ticked | NotificationSettled | OperatorEntry
)

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final[msgspec.msgpack.Decoder[Entry]] = msgspec.msgpack.Decoder(Entry)


def encode_entry(entry: Entry) -> bytes:
    """The content of the entry's record in the journal."""
    return _ENCODER.encode(entry)


def decode_entry(content: bytes) -> Entry:
    """The entry of a record whose checksum holds. Raises StateError if another version wrote it."""
    try:
        return _DECODER.decode(content)
    except (msgspec.DecodeError, msgspec.ValidationError, ValueError) as error:
        raise StateError(f"the journal holds an entry that this program does not know: {error}") from error

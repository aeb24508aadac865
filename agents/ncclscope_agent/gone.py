"""Logs that were being followed and are gone when their reader comes back: what they held since then was not read.

An agent that begins again is told where each of its sources was left. A file that was deleted, renamed to what no
pattern matches or written anew meanwhile is not found under its key any more. How much of it was not read nobody knows;
that something may be missing has to be said all the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from ncclscope_agent.tail import FileIdentity, identity_in
from ncclscope_wire.batch import Batch
from ncclscope_wire.messages import Position
from ncclscope_wire.records import Source, SourceGap, SourceKind

GONE: Final = "gone"
"""The reason of the gap."""


def gone_sources(
    positions: Mapping[str, Position], *, followed: Collection[str], unread: Collection[FileIdentity]
) -> dict[str, Position]:
    """The sources with a position that no reader has found, by key, but for those that were read to their end.

    `followed`: keys of sources that are read. `unread`: files that are there and could not be looked into.
    """
    gone: dict[str, Position] = {}
    for key, position in positions.items():
        identity = identity_in(key)
        if not (identity is None or position.is_complete or key in followed or identity in unread):
            gone[key] = position
    return gone


def last_batch_of(key: str, position: Position, kind: SourceKind, now_ns: int) -> Batch:
    """The end of a source that is gone. Its name is known to the service; here only its key is."""
    detail = (
        f"what followed byte {position.end} (line {position.end_line}) was deleted, renamed or written anew while no "
        "agent read it: whether anything did is not known. Keep logs until an agent has run again."
    )
    return Batch(
        source=Source(kind=kind, name=key, key=key),
        begin=position.end,
        end=position.end,
        end_line=position.end_line,
        is_last=True,
        observed_at_ns=now_ns,
        gaps=(SourceGap(reason=GONE, amount=0, unit="bytes", detail=detail),),
    )

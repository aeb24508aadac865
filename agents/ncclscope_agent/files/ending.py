"""Ends of sources: why a followed file ended, and sources whose files are gone when their reader comes back.

The service tells an agent that begins again where each of its sources was left. A file that was deleted, renamed to
what no pattern matches or rewritten meanwhile is not found under its key any more. How much of it was not read nobody
knows; that something may be missing has to be said all the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Final

from ncclscope_agent.files.tail import Decision, FileIdentity, identity_in
from ncclscope_agent.sources.nccl_log.batches import TextBatch
from ncclscope_wire.batch import Batch
from ncclscope_wire.messages import Position
from ncclscope_wire.records import Source, SourceGap, SourceKind

GONE: Final = "gone"
"""The reason of the gap that a source leaves if its file is gone."""
_DETAILS: Final = {
    "truncated": "{name} was truncated or written anew; {lost} bytes that were seen were not read before.",
    "deleted": "{name} was deleted, and let go after 10 minutes without room for it; {lost} bytes were not read.",
    "unreadable": "{name} cannot be read any more; {lost} bytes were not read. Look at the disk and the mount.",
}


def with_reason(last: TextBatch | Batch, decision: Decision) -> TextBatch | Batch:
    """The last batch of a source, with a gap if something of it was not read."""
    if decision.reason is None:
        return last
    detail = _DETAILS[decision.reason].format(name=last.source.name, lost=decision.lost_bytes)
    gap = SourceGap(reason=decision.reason, amount=decision.lost_bytes, unit="bytes", detail=detail)
    return replace(last, gaps=(*last.gaps, gap))


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

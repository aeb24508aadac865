"""Batches of a chapter of the spool for a service that does not know its session.

Such a service has none of the chapter's dictionaries, and may have more or less of each source than the spool thinks.
So all dictionary entries that came before are sent first, by source and without rows; what the service has already is
left out; and if something is missing before a batch, a gap says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, Protocol, TypeVar, cast

import numpy as np

from ncclscope_agent.spool.records import Entries, Frame
from ncclscope_wire.batch import DICTIONARY_TABLES, Batch, Columns
from ncclscope_wire.codec import decode_message
from ncclscope_wire.errors import ProtocolError
from ncclscope_wire.messages import BatchMessage, Position
from ncclscope_wire.records import Counts, Source, SourceGap

_TOGETHER_BYTES: Final = 1 << 20
"""As many bytes of dictionary entries go into one batch, and the last record."""
_START: Final = Position(end=0)


class _OnLine(Protocol):
    @property
    def line(self) -> int: ...


_Record = TypeVar("_Record", bound=_OnLine)


class Replay:
    """One chapter, from its first batch that the service lacks on.

    `positions`: where the service is; `entries`: the chapter's dictionary entries, from the first on; `left_out`: the
    sources that are read from their files again.
    """

    def __init__(
        self, positions: Mapping[str, Position], entries: Sequence[Entries], *, left_out: Collection[str] = ()
    ) -> None:
        self.positions = dict(positions)
        """Where the service will be when it has all that was given."""
        self.lost = Counter[str]()
        """Batches that could not be used, by why."""
        self._known_entries = len(entries)
        self._entries = _by_source(entries)
        self._given: dict[str, int] = {}
        self._left_out = left_out

    def batches_for(self, frame: Frame) -> list[Batch]:
        """Batches to send for the chapter's next frame; none if the service has it, or it is of no use."""
        position = self.positions.get(frame.key, _START)
        if frame.key in self._left_out or _is_known(frame, position):
            return []
        batch = self._decoded(frame, position)
        if batch is None:
            self.lost["unusable"] += 1
            return []
        batches = list(self._introduction(frame, batch.source, position))
        if frame.begin > position.end:
            batches.append(_bridge(batch.source, position, frame.begin))
        elif frame.begin < position.end:
            batch = behind(batch, position)
        self.positions[frame.key] = frame.position
        return [*batches, batch]

    def _decoded(self, frame: Frame, position: Position) -> Batch | None:
        """The batch; None if this version cannot read it, its dictionaries are lost, or it cannot be divided."""
        if frame.entries > self._known_entries:
            return None
        batch = _batch_of(bytes(frame.payload))
        if batch is None or (batch.source.kind.is_recording and frame.begin < position.end):
            return None
        return batch

    def _introduction(self, frame: Frame, source: Source, position: Position) -> Iterator[Batch]:
        """The dictionary entries of a source that came before this batch and were not given yet."""
        known = self._entries.get(frame.key, ())
        begin = self._given.get(frame.key, 0)
        end = next((at for at in range(begin, len(known)) if known[at][0] >= frame.sequence), len(known))
        self._given[frame.key] = end + (end < len(known) and known[end][0] == frame.sequence)
        together: list[Batch] = []
        size = 0
        for _, length, batch in known[begin:end]:
            together.append(batch)
            size += length
            if size > _TOGETHER_BYTES:
                yield _entries_batch(source, position, together)
                together, size = [], 0
        if together:
            yield _entries_batch(source, position, together)


def entries_only(batch: Batch) -> Batch | None:
    """The new dictionary entries of a batch; None if it has none."""
    # Asked of every batch, of which few have any: a loop over the tables would cost as much as all the rest.
    is_new = batch.strings or len(batch.operation_templates) or len(batch.threads) or len(batch.kernel_templates)
    if not (is_new or len(batch.range_templates) or len(batch.inspected_ranks)):
        return None
    return Batch(
        source=batch.source,
        begin=batch.begin,
        end=batch.begin,
        strings=batch.strings,
        threads=batch.threads,
        operation_templates=batch.operation_templates,
        kernel_templates=batch.kernel_templates,
        range_templates=batch.range_templates,
        inspected_ranks=batch.inspected_ranks,
    )


def behind(batch: Batch, position: Position) -> Batch:
    """The part of a batch behind a position inside it, by line. How many lines it understood is not known."""
    line = position.end_line
    return replace(
        batch,
        begin=position.end,
        operations=_rows_behind(batch.operations, line),
        tunings=_rows_behind(batch.tunings, line),
        call_marks=_rows_behind(batch.call_marks, line),
        inspected=_rows_behind(batch.inspected, line),
        communicators=_behind(batch.communicators, line),
        versions=_behind(batch.versions, line),
        facts=_behind(batch.facts, line),
        topologies=_behind(batch.topologies, line),
        tuning_tables=_behind(batch.tuning_tables, line),
        counts=Counts(),
    )


def _is_known(frame: Frame, position: Position) -> bool:
    """As the service sees it (its rules are in `docs/internals/wire.md`)."""
    return position.is_complete or (frame.end <= position.end and frame.begin < position.end)


def _by_source(entries: Sequence[Entries]) -> dict[str, list[tuple[int, int, Batch]]]:
    """Sequence number, bytes and entries, in order, for each source."""
    known: dict[str, list[tuple[int, int, Batch]]] = {}
    for one in entries:
        message = _message_of(one.payload)
        if message is not None:
            source = message.batch.source.key
            known.setdefault(source, []).append((message.sequence, len(one.payload), message.batch))
    return known


def _batch_of(payload: bytes) -> Batch | None:
    message = _message_of(payload)
    return None if message is None else message.batch


def _message_of(payload: bytes) -> BatchMessage | None:
    try:
        message = decode_message(payload)
    except ProtocolError:
        return None
    return message if isinstance(message, BatchMessage) else None


def _entries_batch(source: Source, position: Position, together: Sequence[Batch]) -> Batch:
    joined = {name: np.concatenate([_table(batch, name) for batch in together]) for name in DICTIONARY_TABLES}
    return Batch(
        source=source,
        begin=position.end,
        end=position.end,
        end_line=position.end_line,
        content_check=position.content_check,
        strings=tuple(text for batch in together for text in batch.strings),
        threads=joined["threads"],
        operation_templates=joined["operation_templates"],
        kernel_templates=joined["kernel_templates"],
        range_templates=joined["range_templates"],
        inspected_ranks=joined["inspected_ranks"],
    )


def _bridge(source: Source, position: Position, begin: int) -> Batch:
    """Brings a source to where the next batch begins, and says that what lies between was lost."""
    is_export = source.kind.is_recording
    amount, unit = (1, "files") if is_export else (begin - position.end, "bytes")
    detail = f"{source.name}: {amount} {unit} were in the agent's spool and are lost, and the file is gone."
    gap = SourceGap(reason="spool_lost", amount=amount, unit=unit, detail=detail)
    return Batch(source=source, begin=position.end, end=begin, end_line=position.end_line, gaps=(gap,))


def _table(batch: Batch, name: str) -> Columns:
    return cast(Columns, getattr(batch, name))


def _rows_behind(rows: Columns, line: int) -> Columns:
    behind_it: Columns = rows[rows["line"] > line]
    return behind_it


def _behind(records: tuple[_Record, ...], line: int) -> tuple[_Record, ...]:
    return tuple(record for record in records if record.line > line)

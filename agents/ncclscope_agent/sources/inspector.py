"""NCCL Inspector dumps to batches.

Scope: the JSON lines of NCCL's Inspector profiler plug-in, format v4.0 (NCCL 2.28) to v4.3. Up to v4.2 each record
carries its header; from v4.3 on the header stands once, in the `dump_stats` line that begins a communicator's dump,
and as many records follow as that line says. v4.1 and v4.2 have `dump_stats` lines too. Of the events of single
channels (verbose dumps) the first begin and the last end are kept: the host's clock when the plug-in saw them, a
moment after the GPU. Left out on purpose: `proxy_trace` records, which are counted. A file is of one process,
appended to at each dump; the plug-in opens it with mode "w", so a process that gets the name again truncates it.

*Source:* NCCL `ext-profiler/inspector/inspector.cc` (2.28), `plugins/profiler/inspector/inspector_json.cc` (2.29 on),
`json.cc:jsonInitFileOutput`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Final

import msgspec
import numpy as np
from msgspec import Meta, Struct

from ncclscope_agent.sources.dictionaries import Strings
from ncclscope_agent.sources.lines import HOLE, LineReader
from ncclscope_wire import tables
from ncclscope_wire.batch import Batch, Columns, no_rows
from ncclscope_wire.errors import FormatError
from ncclscope_wire.records import Counts, Source, SourceGap
from ncclscope_wire.terms import (
    ALGORITHMS,
    INSPECTOR_TIMINGS,
    NO_NUMBER,
    NO_TIME_NS,
    OPERATION_CODES,
    PROTOCOLS,
    UNKNOWN_OPERATION,
    UNKNOWN_TIMING,
)

_Natural = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Rank = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
_Size = Annotated[int, Meta(ge=0)]
"""Of a type that the plug-in does not know it is minus the count as an unsigned number: no bound is put on it here."""
_Name = Annotated[str, Meta(max_length=2048)]
"""The plug-in cuts texts at 2,047 bytes (`json.cc:jsonStr`)."""
_Rate = float | str
"""GB/s, 10**9 bytes; the text "nan" if it is not a number (`json.cc:jsonDouble`)."""

OPERATIONS: Final[Mapping[str, int]] = MappingProxyType({**OPERATION_CODES, "All2All": OPERATION_CODES["AlltoAll"]})
"""The plug-in's names of operations (`inspector.cc:ncclFuncToString`); SendRecv, AllGatherV and Invalid are none of
those that the log names."""


class RecordHeader(Struct, frozen=True, kw_only=True):
    """Communicator and rank that a record is of."""

    id: Annotated[str, Meta(pattern="^0x[0-9a-f]{1,16}$")]
    """comm->commHash."""
    rank: _Rank
    n_ranks: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    nnodes: _Rank | None = None
    comm_name: _Name | None = None


class RecordMetadata(Struct, frozen=True, kw_only=True):
    """Writer of a record, and the time."""

    inspector_output_format_version: _Name
    dump_timestamp_us: Annotated[int, Meta(ge=0, le=2**53)]
    hostname: Annotated[str, Meta(min_length=1, max_length=255)]
    pid: Annotated[int, Meta(ge=0, le=2**32 - 1)]


_Us = Annotated[int, Meta(ge=0, le=2**53)]


class _Channel(Struct, frozen=True):
    """When the plug-in saw the kernel begin and end on one channel; 0: it did not."""

    kernel_start_ts: _Us = 0
    kernel_stop_ts: _Us = 0


class _Trace(Struct, frozen=True, kw_only=True):
    coll_start_ts: _Us = 0
    p2p_start_ts: _Us = 0
    kernel_events: Annotated[list[_Channel], Meta(max_length=1024)] = msgspec.field(default_factory=list[_Channel])

    def span_us(self) -> tuple[int, int]:
        """From the first channel's begin to the last one's end; zeros if a channel was not seen whole."""
        begin = min((each.kernel_start_ts for each in self.kernel_events), default=0)
        end = max((each.kernel_stop_ts for each in self.kernel_events), default=0)
        is_whole = begin > 0 and all(each.kernel_stop_ts >= each.kernel_start_ts for each in self.kernel_events)
        return (begin, end) if is_whole else (0, 0)


class CollectiveRecord(Struct, frozen=True, kw_only=True, rename="coll_{}".format):
    """One collective that has completed."""

    name: _Name = msgspec.field(name="coll")
    sn: _Natural
    msg_size_bytes: _Size
    exec_time_us: _Us
    timing_source: _Name = "unknown"
    busbw_gbs: _Rate
    algo: _Name | None = None
    proto: _Name | None = None
    trace: _Trace = msgspec.field(name="event_trace_ts", default=_Trace())


class PairRecord(Struct, frozen=True, kw_only=True, rename="p2p_{}".format):
    """One Send or Recv that has completed."""

    name: _Name = msgspec.field(name="p2p")
    sn: _Natural
    peer: _Rank
    msg_size_bytes: _Size
    exec_time_us: _Us
    timing_source: _Name = "unknown"
    busbw_gbs: _Rate
    trace: _Trace = msgspec.field(name="event_trace_ts", default=_Trace())


class DumpStatistics(Struct, frozen=True, kw_only=True):
    """Records of one dump of a communicator, and those that were overwritten before they could be dumped."""

    coll_records: _Natural
    p2p_records: _Natural
    proxy_records: _Natural = 0
    coll_dropped_since_last_dump: _Natural = 0
    p2p_dropped_since_last_dump: _Natural = 0


class InspectorLine(Struct, frozen=True, kw_only=True):
    """One line: at most one of the last four."""

    header: RecordHeader | None = None
    metadata: RecordMetadata | None = None
    coll_perf: CollectiveRecord | None = None
    p2p_perf: PairRecord | None = None
    dump_stats: DumpStatistics | None = None
    proxy_trace: object = None


_DECODER: Final = msgspec.json.Decoder(InspectorLine)
_BEGINNING: Final = b'{"header":'


def read_line(text: bytes) -> tuple[InspectorLine, bool]:
    """The record of a line, and whether something torn stood in front of it.

    Raises:
        FormatError: its text is the reason: "inspector_torn" (no whole JSON), "inspector_field" (a field is missing, or
            is not what the plug-in writes), "not_inspector" (something else).
    """
    try:
        return _DECODER.decode(text), False
    except (msgspec.ValidationError, RecursionError) as error:  # or lists within lists, which no version writes
        raise FormatError("inspector_field") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        begin = text.rfind(_BEGINNING)
        if begin > 0:
            return read_line(text[begin:])[0], True
        raise FormatError("inspector_torn" if text.lstrip()[:1] == b"{" else "not_inspector") from error


MAX_LINE_BYTES: Final = 262_144
"""A verbose record has up to 64 channels of about 250 bytes."""
MAX_RANKS: Final = 16_384
"""Communicators of a process that are remembered; beyond it one is sent again under a new index."""
LINES_PER_BATCH: Final = 20_000
DUMP_MARK: Final = b'"dump_stats"'
"""Begins a dump from v4.1 on; from v4.3 on, records mean something only with the mark in front of them."""

_US: Final = 1000
_LARGEST_BYTES: Final = 2**62
_LARGEST_US: Final = 2**43
"""100 days; 2**43 us are less than 2**63 ns."""
_TIMINGS: Final = {name: code for code, name in enumerate(INSPECTOR_TIMINGS)}
_ALGORITHMS: Final = {name: code for code, name in enumerate(ALGORITHMS)}
_PROTOCOLS: Final = {name: code for code, name in enumerate(PROTOCOLS)}

_RankKey = tuple[str, int, int, str, int, int, int]
_Row = tuple[int, int, int, int, int, int, int, int, int, int, int, int, float, int, int]


class _Dump:
    """The communicator whose records follow, and how many are left."""

    def __init__(self, header: RecordHeader, metadata: RecordMetadata, holds: DumpStatistics) -> None:
        self.header = header
        self.metadata = metadata
        self.left = {"coll_perf": holds.coll_records, "p2p_perf": holds.p2p_records, "proxy": holds.proxy_records}

    def count_record(self, kind: str) -> bool:
        """Counts one record of a kind; False if the dump holds no more."""
        if self.left[kind] <= 0:
            return False
        self.left[kind] -= 1
        return True


def _time_ns(us: int) -> int:
    return us * _US if 0 < us < 2**53 else NO_TIME_NS


class InspectorReader(LineReader):
    """Reads one dump from bytes in any cuts; the same bytes give the same rows however they are cut.

    `begin` and `line` say where in the file the first byte stands, for resuming. Nothing raises, whatever the bytes.
    """

    def __init__(
        self,
        source: Source,
        *,
        begin: int = 0,
        line: int = 0,
        max_line_bytes: int = MAX_LINE_BYTES,
        lines_per_batch: int = LINES_PER_BATCH,
    ) -> None:
        super().__init__(source, begin=begin, line=line, max_line_bytes=max_line_bytes)
        self._lines_per_batch = lines_per_batch
        self._strings = Strings()
        self._ranks: dict[_RankKey, int] = {}
        self._ranks_sent = 0
        self._new_ranks: list[tuple[int, int, int, int, int, int, int]] = []
        self._dump: _Dump | None = None
        self._rows: list[_Row] = []
        self._understood = Counter[str]()
        self._skipped = Counter[str]()
        self._dropped = 0

    def learn(self, data: bytes) -> None:
        """Learns whose records follow, from the lines in front of `begin` up to the last mark. Gives no rows."""
        line = self._line
        for text in data.split(b"\n"):
            if text:
                self._read(text)
        self._line = line
        self._take_rows()
        self._understood.clear()
        self._skipped.clear()
        self._dropped = 0

    def ingest_bytes(self, data: bytes, observed_at_ns: int | None = None) -> list[Batch]:
        """The batches of the lines that these bytes finish; none if they finish no line."""
        cut = self._cutter.ingest_bytes(data)
        batches: list[Batch] = []
        for at in range(0, len(cut.lines), self._lines_per_batch):
            some = cut.lines[at : at + self._lines_per_batch]
            for text in some:
                self._read(text)
            size = sum(map(len, some)) + len(some) + (cut.first_line_excess if at == 0 else 0)
            batches.append(self._batch(self._position + size, observed_at_ns, is_last=False))
        return batches

    def read(self, data: bytes, observed_at_ns: int | None = None) -> list[Batch]:
        """As the reader of logs has it: nothing is left to be read together with other files."""
        return self.ingest_bytes(data, observed_at_ns)

    def read_last(self, observed_at_ns: int | None = None) -> Batch:
        """As the reader of logs has it."""
        return self.finish(observed_at_ns)[0]

    def finish(self, observed_at_ns: int | None = None) -> list[Batch]:
        """The last batch: the file is at its end, and a last line without a newline is read if it is whole."""
        end = self._position + self._cutter.unfinished_bytes
        last = self._cutter.drain_unfinished()
        if last is not None:
            self._read(last)
        self._end_dump()
        return [self._batch(end, observed_at_ns, is_last=True)]

    # One line

    def _read(self, text: bytes) -> None:
        self._line += 1
        if len(text) > self._max_line_bytes or HOLE in text:
            # A mark may have been in it: the communicator of the next records is unknown.
            self._dump = None
            self._skipped["released" if HOLE in text else "too_long"] += 1
            return
        if not text.strip():
            return
        try:
            record, is_torn = read_line(text)
        except FormatError as reason:
            self._skipped[str(reason)] += 1
            return
        self._skipped.update({"inspector_torn": 1} if is_torn else {})
        self._take(record)

    def _take(self, record: InspectorLine) -> None:
        if record.dump_stats is not None:
            self._begin_dump(record, record.dump_stats)
        elif record.coll_perf is not None:
            self._add(record, "coll_perf", record.coll_perf)
        elif record.p2p_perf is not None:
            self._add(record, "p2p_perf", record.p2p_perf)
        elif record.proxy_trace is not None:
            if self._dump is not None:
                self._dump.count_record("proxy")
            self._understood["inspector_proxy"] += 1
        else:
            self._skipped["inspector_unknown"] += 1

    def _begin_dump(self, record: InspectorLine, holds: DumpStatistics) -> None:
        self._end_dump()
        if record.header is None or record.metadata is None:
            self._skipped["inspector_without_header"] += 1
            return
        self._dump = _Dump(record.header, record.metadata, holds)
        self._dropped += holds.coll_dropped_since_last_dump + holds.p2p_dropped_since_last_dump
        self._understood["inspector_dump"] += 1

    def _end_dump(self) -> None:
        """Counts what the last dump should have held, and did not."""
        if self._dump is not None and (lost := sum(self._dump.left.values())):
            self._skipped["inspector_lost"] += lost
        self._dump = None

    def _add(self, record: InspectorLine, kind: str, done: CollectiveRecord | PairRecord) -> None:
        dump = self._dump
        is_in_dump = dump is not None and dump.count_record(kind)
        header, metadata = record.header, record.metadata
        if (header is None or metadata is None) and dump is not None and is_in_dump:
            header, metadata = dump.header, dump.metadata
        if header is None or metadata is None:
            self._skipped["inspector_without_header"] += 1
            return
        self._rows.append(self._row(self._index_of(header, metadata), metadata, done))
        self._understood["inspector_collective" if kind == "coll_perf" else "inspector_pair"] += 1

    def _row(self, rank: int, metadata: RecordMetadata, done: CollectiveRecord | PairRecord) -> _Row:
        collective = done if isinstance(done, CollectiveRecord) else None
        op = OPERATIONS.get(done.name, UNKNOWN_OPERATION)
        started_us = done.trace.p2p_start_ts if collective is None else done.trace.coll_start_ts
        start_us, end_us = done.trace.span_us()
        is_timed = 0 < done.exec_time_us < _LARGEST_US
        busbw = float(done.busbw_gbs) * 1e9 if not isinstance(done.busbw_gbs, str) and is_timed else float("nan")
        return (
            rank,
            self._line,
            op,
            _TIMINGS.get(done.timing_source, UNKNOWN_TIMING),
            NO_NUMBER if collective is None else _ALGORITHMS.get((collective.algo or "").upper(), NO_NUMBER),
            NO_NUMBER if collective is None else _PROTOCOLS.get((collective.proto or "").upper(), NO_NUMBER),
            NO_NUMBER if isinstance(done, CollectiveRecord) else done.peer,
            done.sn,
            done.msg_size_bytes if done.msg_size_bytes < _LARGEST_BYTES else NO_NUMBER,
            done.exec_time_us * _US if is_timed else NO_TIME_NS,
            _time_ns(metadata.dump_timestamp_us),
            _time_ns(started_us),
            busbw,
            _time_ns(start_us),
            _time_ns(end_us),
        )

    def _index_of(self, header: RecordHeader, metadata: RecordMetadata) -> int:
        name = header.comm_name or ""
        key = (
            metadata.hostname.partition(".")[0],
            metadata.pid,
            int(header.id, 16),
            "" if name == "unknown" else name,
            header.rank,
            header.n_ranks,
            NO_NUMBER if header.nnodes is None else header.nnodes,
        )
        known = self._ranks.get(key)
        if known is not None:
            return known
        if len(self._ranks) >= MAX_RANKS:
            self._ranks.clear()
        host, pid, comm_hash, name, rank, nranks, nnodes = key
        self._new_ranks.append(
            (self._strings.index(host), pid, comm_hash, self._strings.index(name), rank, nranks, nnodes)
        )
        self._ranks[key] = self._ranks_sent
        self._ranks_sent += 1
        return self._ranks[key]

    # Batches

    def _take_rows(self) -> Columns:
        if not self._rows:
            return no_rows(tables.INSPECTED_ROW)
        rows = np.array(self._rows, dtype=tables.INSPECTED_ROW)
        self._rows.clear()
        return rows

    def _take_ranks(self) -> Columns:
        if not self._new_ranks:
            return no_rows(tables.INSPECTED_RANK)
        ranks = np.array(self._new_ranks, dtype=tables.INSPECTED_RANK)
        self._new_ranks.clear()
        return ranks

    def _take_gaps(self) -> tuple[SourceGap, ...]:
        dropped, self._dropped = self._dropped, 0
        if not dropped:
            return ()
        detail = (
            f"{self.source.name}: NCCL Inspector overwrote {dropped} records before it could write them; a larger "
            "NCCL_INSPECTOR_DUMP_COLL_RING_SIZE or a shorter dump interval keeps more"
        )
        return (SourceGap(reason="inspector_overwritten", amount=dropped, unit="records", detail=detail),)

    def _batch(self, end: int, observed_at_ns: int | None, *, is_last: bool) -> Batch:
        begin, self._position = self._position, end
        counts = Counts(understood=dict(self._understood), skipped=dict(self._skipped))
        self._understood.clear()
        self._skipped.clear()
        return Batch(
            source=self.source,
            begin=begin,
            end=end,
            end_line=self._line,
            is_last=is_last,
            observed_at_ns=observed_at_ns,
            inspected=self._take_rows(),
            inspected_ranks=self._take_ranks(),
            strings=self._strings.drain_new(),
            gaps=self._take_gaps(),
            counts=counts,
        )

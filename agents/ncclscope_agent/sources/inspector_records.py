"""One line of an NCCL Inspector dump: what it may hold, checked.

Scope: the JSON lines of NCCL's Inspector profiler plug-in, format v4.0 (NCCL 2.28) to v4.3. Up to v4.2 each record
carries its header; from v4.3 on the header stands once, in the `dump_stats` line that begins a communicator's dump,
and as many records follow as that line says. v4.1 and v4.2 have `dump_stats` lines too. Left out on purpose: the
events of single channels (verbose dumps) and `proxy_trace` records, which are counted.

*Source:* NCCL `ext-profiler/inspector/inspector.cc` (2.28), `plugins/profiler/inspector/inspector_json.cc` (2.29 on).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from ncclscope_wire.errors import FormatError
from ncclscope_wire.terms import OPERATION_CODES

_Natural = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Rank = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
_Size = Annotated[int, Meta(ge=0)]
"""Of a type that the plug-in does not know it is minus the count as an unsigned number: no bound is put on it here."""
_Name = Annotated[str, Meta(max_length=2048)]
"""The plug-in cuts texts at 2,047 bytes (`json.cc:jsonStr`)."""
_Rate = float | str
"""GB/s, 10**9 bytes; the text "nan" where it is not a number (`json.cc:jsonDouble`)."""

OPERATIONS: Final[Mapping[str, int]] = MappingProxyType({**OPERATION_CODES, "All2All": OPERATION_CODES["AlltoAll"]})
"""The plug-in's names of operations (`inspector.cc:ncclFuncToString`); SendRecv, AllGatherV and Invalid are none of
those that the log names."""


class RecordHeader(Struct, frozen=True, kw_only=True):
    """Whose record it is."""

    id: Annotated[str, Meta(pattern="^0x[0-9a-f]{1,16}$")]
    """comm->commHash."""
    rank: _Rank
    n_ranks: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    nnodes: _Rank | None = None
    comm_name: _Name | None = None


class RecordMetadata(Struct, frozen=True, kw_only=True):
    """Who wrote it, and when."""

    inspector_output_format_version: _Name
    dump_timestamp_us: Annotated[int, Meta(ge=0, le=2**53)]
    hostname: Annotated[str, Meta(min_length=1, max_length=255)]
    pid: Annotated[int, Meta(ge=0, le=2**32 - 1)]


class _Trace(Struct, frozen=True, kw_only=True):
    coll_start_ts: Annotated[int, Meta(ge=0, le=2**53)] = 0
    p2p_start_ts: Annotated[int, Meta(ge=0, le=2**53)] = 0


class CollectiveRecord(Struct, frozen=True, kw_only=True, rename="coll_{}".format):
    """One collective that has completed."""

    name: _Name = msgspec.field(name="coll")
    sn: _Natural
    msg_size_bytes: _Size
    exec_time_us: Annotated[int, Meta(ge=0, le=2**53)]
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
    exec_time_us: Annotated[int, Meta(ge=0, le=2**53)]
    timing_source: _Name = "unknown"
    busbw_gbs: _Rate
    trace: _Trace = msgspec.field(name="event_trace_ts", default=_Trace())


class DumpStatistics(Struct, frozen=True, kw_only=True):
    """What one dump of a communicator holds, and what was overwritten before it could be dumped."""

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
    except msgspec.ValidationError as error:
        raise FormatError("inspector_field") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        begin = text.rfind(_BEGINNING)
        if begin > 0:
            return read_line(text[begin:])[0], True
        raise FormatError("inspector_torn" if text.lstrip()[:1] == b"{" else "not_inspector") from error

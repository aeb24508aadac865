"""`trace.json.gz`: the run on one clock, as a Chrome trace that opens in Perfetto.

Events are made and written in batches, so memory does not grow with the length of the run (beyond a few indices of
eight bytes per row).
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Final

import orjson

from ncclscope_service.export.selection import Selection
from ncclscope_service.export.trace_events import TraceCounts, TraceEvents
from ncclscope_service.export.trace_tracks import Event

_GZIP_LEVEL: Final = 5


def write_trace(selection: Selection, path: Path) -> TraceCounts:
    """Writes the trace; what it shows and leaves out stands in its `otherData`."""
    trace = TraceEvents(selection)
    written = 0
    with gzip.open(path, "wb", compresslevel=_GZIP_LEVEL) as file:
        file.write(b'{"displayTimeUnit":"ns","traceEvents":[\n')
        for events in trace.batches():
            if events:
                file.write(b",\n" if written else b"")
                file.write(_packed(events))
                written += len(events)
        counts = trace.counts(written)
        file.write(b'\n],"otherData":' + orjson.dumps(trace.metadata(counts)) + b"}\n")
    return counts


def _packed(events: list[Event]) -> bytes:
    """The events without the brackets around them; numbers that JSON does not have become null."""
    return orjson.dumps(events, default=str, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)[1:-1]

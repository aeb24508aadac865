"""Lines of NCCL's log, each as its version prints it, with what they say; and readers for tests.

Composed from the format strings of the named version (NCCL `src/enqueue.cc`, `src/init.cc`, `src/debug.cc`),
with invented values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from ncclscope_agent.sources.nccl_log.reader import NcclLogReader
from ncclscope_wire.batch import Batch
from ncclscope_wire.records import CommunicatorEvent, Source, SourceKind, VersionSeen
from ncclscope_wire.terms import NO_TIME_NS

NODE = "node17:41822:41903 [2] NCCL INFO "
_TUNING_NUMBERS = ("line", "op", "algorithm", "protocol", "channels", "bytes")
SOURCE = Source(kind=SourceKind.NCCL_LOG, name="nccl.log", key="1-2-abc")


def operation_line(
    name: str = "AllReduce",
    *,
    op_count: str = "1f",
    count: int = 4096,
    stream: str = "0x55d0c7f01b10",
    prefix: str = NODE,
    send: str = "0x7f2a40000000",
) -> str:
    return (
        f"{prefix}{name}: opCount {op_count} sendbuff {send} recvbuff 0x7f2a44000000 count {count} "
        f"datatype 7 op 0 root 0 comm 0x55d0c8b3e2a0 [nranks=4] stream {stream}"
    )


@dataclass
class ReadLog:
    """Everything that a reader gave, put together as the service would."""

    operations: list[dict[str, object]] = field(default_factory=list)
    tunings: list[dict[str, object]] = field(default_factory=list)
    communicators: list[CommunicatorEvent] = field(default_factory=list)
    versions: list[VersionSeen] = field(default_factory=list)
    understood: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    end: int = 0
    end_line: int = 0
    dictionaries: tuple[object, ...] = ()


def read_log(data: bytes, cuts: Sequence[int] = (), reader: NcclLogReader | None = None) -> ReadLog:
    """What a reader says of these bytes, fed in pieces that end at the cuts."""
    reader = reader or NcclLogReader(SOURCE)
    edges = [0, *sorted(cuts), len(data)]
    batches: list[Batch] = []
    for begin, end in pairwise(edges):
        batches += reader.ingest_bytes(data[begin:end], 1)
    return put_together([*batches, *reader.finish(1)])


def put_together(batches: Iterable[Batch]) -> ReadLog:
    """Resolves the dictionaries of one source's batches, which must be contiguous."""
    log = ReadLog()
    strings: list[str] = []
    threads: list[np.void] = []
    templates: list[np.void] = []
    first = True
    for batch in batches:
        assert first or batch.begin == log.end
        first = False
        strings += batch.strings
        threads += list(batch.threads)
        templates += list(batch.operation_templates)
        for row in batch.operations:
            template = templates[row["template"]]
            thread = threads[template["thread"]]
            time_ns = int(row["logged_at_ns"])
            log.operations.append(
                {
                    **{str(name): int(template[name]) for name in template.dtype.names or () if name != "thread"},
                    "op_name": strings[template["op_name"]],
                    "host": strings[thread["host"]],
                    "pid": int(thread["pid"]),
                    "tid": int(thread["tid"]),
                    "line": int(row["line"]),
                    "op_count": int(row["op_count"]),
                    "logged_at_ns": None if time_ns == NO_TIME_NS else time_ns,
                }
            )
        for row in batch.tunings:
            thread = threads[row["thread"]]
            expected = float(row["expected_us"])
            log.tunings.append(
                {
                    **{
                        str(name): int(row[name])
                        for name in ("line", "op", "algorithm", "protocol", "channels", "bytes")
                    },
                    "host": strings[thread["host"]],
                    "pid": int(thread["pid"]),
                    "expected_us": None if np.isnan(expected) else expected,
                }
            )
        log.communicators += batch.communicators
        log.versions += batch.versions
        log.understood.update(batch.counts.understood)
        log.skipped.update(batch.counts.skipped)
        log.end, log.end_line = batch.end, batch.end_line
    log.dictionaries = (tuple(strings), [row.item() for row in threads], [row.item() for row in templates])
    return log

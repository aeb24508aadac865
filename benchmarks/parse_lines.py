"""Lines per second per core of the log reader: `python benchmarks/parse_lines.py [--lines N] [--repeat N]`.

Six mixes of one process's log, each read in blocks of 1 MiB as the agent does: 2,000 operations that recur, 16,000
that do; 2,000 with time stamps of microseconds; with stamps and 5 % TUNING lines; operations of which none recurs;
and these with stamps.
Beside it, in the same run, what one would do without it, to the same numbers (process, thread, device, opCount,
buffers, count, data type, reduction, root, communicator, ranks, stream): a loop over lines with one regular
expression and int(), and polars with the same expression (`str.extract_groups`) on one thread, where it is
installed. Both leave out time stamps' values, TUNING lines, torn lines and all else.
Each figure is the median of the repeats, in processor time of this process; the repeats of the three take turns.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT / "agents"))

from ncclscope_agent.sources.nccl_log.reader import NcclLogReader  # noqa: E402
from ncclscope_wire.records import Source, SourceKind  # noqa: E402

_BLOCK = 1 << 20
_PATTERN = (
    r"^(?:\[[^\]]*\] )?(?P<host>[^:\s]+):(?P<pid>\d+):(?P<tid>\d+) \[(?P<device>\d+)\] NCCL INFO "
    r"(?P<op>\w+): opCount (?P<op_count>[0-9a-f]+) sendbuff 0x(?P<send>[0-9a-f]+) recvbuff 0x(?P<receive>[0-9a-f]+) "
    r"count (?P<count>\d+) datatype (?P<data_type>\d+) op (?P<reduction>\d+) root (?P<root>\d+) "
    r"comm 0x(?P<communicator>[0-9a-f]+) \[nranks=(?P<nranks>\d+)\] stream 0x(?P<stream>[0-9a-f]+)$"
)
_DECIMALS = ("pid", "tid", "device", "count", "data_type", "reduction", "root", "nranks")
_HEXADECIMALS = ("op_count", "send", "receive", "communicator", "stream")
_PLAIN = re.compile(_PATTERN.encode())


def operation(number: int, buffer: int, stamp: str) -> str:
    """One COLL line as NCCL 2.26 prints it."""
    name = ("AllReduce", "AllGather", "ReduceScatter")[buffer % 3]
    return (
        f"{stamp}node17:41822:41903 [2] NCCL INFO {name}: opCount {number:x} "
        f"sendbuff {0x7F2A40000000 + buffer * 512:#x} recvbuff {0x7F2A80000000 + buffer * 512:#x} "
        f"count {1024 + buffer} datatype 9 op 0 root 0 "
        f"comm 0x55d0c8b3e2a0 [nranks=8] stream 0x55d0c7f01b10"
    )


def stamp_of(number: int) -> str:
    """A stamp of `[%F %T.%6f] `, 5,000 lines a second."""
    micros = number * 200
    seconds = micros // 1_000_000
    clock = f"{10 + seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    return f"[2026-03-02 {clock}.{micros % 1_000_000:06d}] "


def log(lines: int, *, templates: int, stamps: bool, tuning_every: int) -> bytes:
    """A log of that many lines whose operations recur every `templates`; 0 = never."""
    out: list[str] = []
    for number in range(lines):
        stamp = stamp_of(number) if stamps else ""
        if tuning_every and number % tuning_every == 0:
            size = 1 << (10 + number // tuning_every % 16)
            tail = f"AllReduce: {size} Bytes -> Algo RING proto SIMPLE channel{{Lo..Hi}}={{0..23}}"
            out.append(f"{stamp}node17:41822:41903 [2] NCCL INFO {tail}")
        else:
            out.append(operation(number, number % templates if templates else number, stamp))
    return ("\n".join(out) + "\n").encode()


def read_with_reader(data: bytes) -> int:
    """Operation rows of that log, read by the agent's reader."""
    reader = NcclLogReader(Source(kind=SourceKind.NCCL_LOG, name="log", key="key"))
    rows = 0
    for at in range(0, len(data), _BLOCK):
        rows += sum(len(batch.operations) for batch in reader.ingest_bytes(data[at : at + _BLOCK], 0))
    return rows


def read_plainly(data: bytes) -> int:
    """Operation rows of that log, read line by line into tuples."""
    rows: list[tuple[object, ...]] = []
    for line in data.split(b"\n"):
        found = _PLAIN.match(line)
        if found is not None:
            decimals = [int(text) for text in found.group(*_DECIMALS)]
            hexadecimals = [int(text, 16) for text in found.group(*_HEXADECIMALS)]
            rows.append((*found.group("host", "op"), *decimals, *hexadecimals))
    return len(rows)


def polars_or_none() -> ModuleType | None:
    """polars, held to one thread; None where it is not installed. It is no dependency of ours."""
    os.environ["POLARS_MAX_THREADS"] = "1"
    try:
        return importlib.import_module("polars")
    except ImportError:
        return None


def read_with_polars(polars: ModuleType, data: bytes) -> int:
    """Operation rows of that log, read by polars into columns."""
    lines = polars.Series("line", data.decode().split("\n")[:-1])
    fields = lines.str.extract_groups(_PATTERN).struct.unnest().drop_nulls("op")
    columns = [polars.col(name).cast(polars.Int64) for name in _DECIMALS]
    columns += [polars.col(name).str.to_integer(base=16, dtype=polars.UInt64) for name in _HEXADECIMALS]
    return int(fields.with_columns(columns).height)


def rates(readers: Sequence[Callable[[bytes], int]], data: bytes, repeats: int) -> list[float]:
    """Lines per second of processor time of each reader, the median of the repeats."""
    lines = data.count(b"\n")
    seconds: list[list[float]] = [[] for _ in readers]
    for _ in range(repeats):
        for read, took in zip(readers, seconds, strict=True):
            begin = time.process_time()
            read(data)
            took.append(time.process_time() - begin)
    return [lines / statistics.median(took) for took in seconds]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--lines", type=int, default=200_000)
    parser.add_argument("--repeat", type=int, default=5)
    asked = parser.parse_args()
    mixes = {
        "2,000 templates": log(asked.lines, templates=2000, stamps=False, tuning_every=0),
        "16,000 templates": log(asked.lines, templates=16_000, stamps=False, tuning_every=0),
        "2,000 templates, stamps": log(asked.lines, templates=2000, stamps=True, tuning_every=0),
        "2,000 templates, stamps, 5 % TUNING": log(asked.lines, templates=2000, stamps=True, tuning_every=20),
        "no recurrence": log(asked.lines, templates=0, stamps=False, tuning_every=0),
        "no recurrence, stamps": log(asked.lines, templates=0, stamps=True, tuning_every=0),
    }
    polars = polars_or_none()
    readers: list[Callable[[bytes], int]] = [read_with_reader, read_plainly]
    if polars is not None:
        readers.append(partial(read_with_polars, polars))
    print("| mix | reader, lines/s | re loop, lines/s | reader to it | polars, lines/s | reader to it |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, data in mixes.items():
        ours, *others = rates(readers, data, asked.repeat)
        cells = [f"{other:,.0f} | {ours / other:.2f}" for other in others]
        if polars is None:
            cells.append("not installed | ")
        print(f"| {name} | {ours:,.0f} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()

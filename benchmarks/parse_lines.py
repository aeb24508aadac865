"""Lines per second per core of the log reader: `python benchmarks/parse_lines.py [--lines N] [--repeat N]`.

Five mixes of one process's log, each read in blocks of 1 MiB as the agent does: 2,000 operations that
recur; the same with time stamps of microseconds; with stamps and 5 % TUNING lines; operations of which
none recurs; and these with stamps.
The last column is against a plain loop in the same run: split into lines, one regular expression each, int().
Each figure is the median of the repeats, in processor time of this process.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT / "agents"))

from ncclscope_agent.sources.nccl_log import NcclLogReader  # noqa: E402
from ncclscope_wire.records import Source, SourceKind  # noqa: E402

_BLOCK = 1 << 20
_PLAIN = re.compile(
    rb"^(?:\[([^\]]*)\] )?([^:\s]+):(\d+):(\d+) \[(-?\d+)\] NCCL INFO (\w+): opCount ([0-9a-f]+) sendbuff (\S+) "
    rb"recvbuff (\S+) count (\d+) datatype (\d+) op (\d+) root (\d+) comm (\S+) \[nranks=(\d+)\] stream (\S+)$"
)


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
        rows += sum(len(batch.operations) for batch in reader.feed(data[at : at + _BLOCK], 0))
    return rows


def read_plainly(data: bytes) -> int:
    """Operation rows of that log, read line by line into tuples."""
    rows: list[tuple[int, ...]] = []
    for line in data.split(b"\n"):
        found = _PLAIN.match(line)
        if found is not None:
            rows.append((int(found[3]), int(found[4]), int(found[7], 16), int(found[10]), int(found[14], 16)))
    return len(rows)


def rate(read: Callable[[bytes], int], data: bytes, repeats: int) -> float:
    """Lines per second of processor time, the median of the repeats."""
    lines = data.count(b"\n")
    seconds: list[float] = []
    for _ in range(repeats):
        begin = time.process_time()
        read(data)
        seconds.append(time.process_time() - begin)
    return lines / statistics.median(seconds)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--lines", type=int, default=200_000)
    parser.add_argument("--repeat", type=int, default=5)
    asked = parser.parse_args()
    mixes = {
        "2,000 templates": log(asked.lines, templates=2000, stamps=False, tuning_every=0),
        "2,000 templates, stamps": log(asked.lines, templates=2000, stamps=True, tuning_every=0),
        "2,000 templates, stamps, 5 % TUNING": log(asked.lines, templates=2000, stamps=True, tuning_every=20),
        "no recurrence": log(asked.lines, templates=0, stamps=False, tuning_every=0),
        "no recurrence, stamps": log(asked.lines, templates=0, stamps=True, tuning_every=0),
    }
    print(f"{'mix':<38}{'reader, lines/s':>18}{'plain, lines/s':>18}{'ratio':>8}")
    for name, data in mixes.items():
        ours, plain = rate(read_with_reader, data, asked.repeat), rate(read_plainly, data, asked.repeat)
        print(f"{name:<38}{ours:>18,.0f}{plain:>18,.0f}{ours / plain:>8.2f}")


if __name__ == "__main__":
    main()

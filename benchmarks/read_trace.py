"""Seconds and memory to read one trace of the PyTorch profiler: `python benchmarks/read_trace.py [--megabytes 500]`.

Makes a trace in the shape and mixture of real ones (of 40 events one call of a process group with its launch and
kernel, and nine other kernels with theirs; the rest are operators and arrows, which are passed over), then reads it in
a fresh process, plain and packed, and prints a table. The bar: 100,000 events a second, in memory that does not grow
with the file but by what is kept of it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "agents"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from agent.trace_samples import kernel, launch, note, trace

from ncclscope_agent.sources.kineto.batches import read_trace
from ncclscope_wire.records import Source, SourceKind

_GEMM = "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>(cutlass::Params)"


def _round(number: int) -> Iterator[dict[str, object]]:
    """Forty events of some 200 us."""
    at = number * 200.0
    first = number * 16
    yield note(first, at, Seq=number)
    yield launch(first, at + 2)
    yield kernel(first, first, at + 40)
    for nth in range(1, 10):
        yield launch(first + nth, at + 5 * nth)
        yield kernel(0, first + nth, at + 60 + 10 * nth, _GEMM)
    for nth in range(10):
        arguments = {"External id": first + nth, "Record function id": 0, "Ev Idx": first + nth}
        common = {"pid": 42, "tid": 43, "ts": at + nth}
        yield {"ph": "X", "cat": "cpu_op", "name": "aten::addmm", "dur": 9.5, "args": arguments, **common}
    for nth in range(9):
        yield {"ph": "s", "id": first + nth, "pid": 42, "tid": 43, "ts": at + nth, "cat": "ac2g", "name": "ac2g"}


def make_trace(path: Path, megabytes: int) -> int:
    """Writes the trace, indented as Kineto does; gives the number of its events."""
    head, tail = trace([]).split(b'"traceEvents": []')
    events = size = number = 0
    with path.open("wb") as file:
        file.write(head + b'"traceEvents": [\n')
        while size < megabytes * 1_000_000:
            block = ",\n".join(json.dumps(event, indent=1) for event in _round(number))
            events += 40 - 1
            number += 1
            size += file.write((",\n" if number > 1 else "").encode() + block.encode())
        file.write(b"\n]" + tail)
    return events


def _read(path: Path) -> tuple[float, int, int, int]:
    """Seconds, peak memory beside the program in MiB, operations and kernels."""
    before = _peak_kib()
    began = time.perf_counter()
    operations = kernels = 0
    for batch in read_trace(path, source=Source(kind=SourceKind.KINETO, name="t", key="k")):
        operations += len(batch.operations)
        kernels += len(batch.kernels)
    seconds = time.perf_counter() - began
    return seconds, (_peak_kib() - before) // 1024, operations, kernels


def _peak_kib() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    assert found is not None, "Linux says the peak"
    return int(found[1])


def main() -> None:
    """Makes, reads, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=500)
    megabytes = parser.parse_args().megabytes
    with tempfile.TemporaryDirectory() as folder:
        print(f"{'file':>8} {'events':>11} {'seconds':>8} {'events/s':>9} {'MiB':>5} {'operations':>10} {'kernels':>9}")
        for size in (megabytes // 5, megabytes):
            path = Path(folder) / "a.pt.trace.json"
            events = make_trace(path, size)
            packed = path.with_suffix(".json.gz")
            with path.open("rb") as plain, gzip.open(packed, "wb", compresslevel=3) as file:
                shutil.copyfileobj(plain, file, 1 << 20)
            for each in (path, packed):
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    seconds, memory, operations, kernels = pool.apply(_read, (each,))
                name = f"{size} MB" if each is path else "packed"
                rate = events / seconds
                print(
                    f"{name:>8} {events:>11,} {seconds:>8.1f} {rate:>9,.0f} {memory:>5} {operations:>10,} {kernels:>9,}"
                )


if __name__ == "__main__":
    main()

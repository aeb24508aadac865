"""python benchmarks/wire.py: bytes of an operation on the wire, and operations encoded and received per second.

One source whose iterations of 64 operations recur, each some microseconds to milliseconds behind the one before, in
batches of so many operations; CPU time of one core, best of five. "received" is
frame, msgpack, columns, index checks and positions: all that happens before the pipeline.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from ncclscope_service.intake.receive import Receiver
from ncclscope_wire import tables
from ncclscope_wire.batch import Batch
from ncclscope_wire.codec import encode_message
from ncclscope_wire.frame import encode_frame
from ncclscope_wire.messages import PROTOCOL_VERSION, BatchMessage, Hello
from ncclscope_wire.records import Counts, Source, SourceKind

SIZES = (10, 30, 100, 300, 1000, 10_000)
OPERATIONS = 300_000
REPEATS = 5


def batches(size: int) -> list[Batch]:
    """A source of OPERATIONS rows in batches of that size; the first one brings the templates."""
    source = Source(kind=SourceKind.NCCL_LOG, name="logs/nccl.node1.4711.log", key="66306:1234567:0123456789abcdef")
    rows = np.zeros(OPERATIONS, tables.OPERATION_ROW)
    random = np.random.default_rng(7)
    rows["template"] = np.resize(random.permutation(64), OPERATIONS)
    rows["line"] = np.cumsum(np.resize(random.integers(1, 3, 64), OPERATIONS))  # a TUNING line beside some
    rows["op_count"] = np.arange(OPERATIONS) // 64 * np.resize(random.integers(0, 3, 64), OPERATIONS)
    gaps_us = np.exp(random.normal(5, 2, OPERATIONS)).astype(np.int64)
    rows["logged_at_ns"] = 1_700_000_000_000_000_000 + np.cumsum(gaps_us) * 1000
    made: list[Batch] = []
    for begin in range(0, OPERATIONS, size):
        end = min(begin + size, OPERATIONS)
        is_first = begin == 0
        made.append(
            Batch(
                source=source,
                begin=begin * 200,
                end=end * 200,
                end_line=end,
                observed_at_ns=1_700_000_000_000_000_000,
                strings=("node1", "AllReduce") if is_first else (),
                threads=np.zeros(8 if is_first else 0, tables.THREAD),
                operation_templates=np.zeros(64 if is_first else 0, tables.OPERATION_TEMPLATE),
                operations=rows[begin:end],
                counts=Counts(understood={"operation": end - begin}),
            )
        )
    return made


def encoded(known: list[Batch]) -> list[bytes]:
    """The frames of these batches."""
    return [
        encode_frame(encode_message(BatchMessage(sequence=number, batch=batch)))
        for number, batch in enumerate(known, start=1)
    ]


def receive(frames: list[bytes]) -> None:
    """Takes all frames as a service does, up to the pipeline."""
    receiver = Receiver()
    receiver.open(1)
    hello = Hello(
        protocol_version=PROTOCOL_VERSION,
        agent_id="a",
        session_id="s",
        name="n",
        host="h",
        job="j",
        software_version="0",
        pid=1,
    )
    receiver.on_bytes(1, encode_frame(encode_message(hello)), 0)
    for frame in frames:
        outcome = receiver.on_bytes(1, frame, 0)
        assert len(outcome.received) == 1, outcome.fault


def seconds(work: Callable[[], object]) -> float:
    """CPU time of the best of REPEATS."""

    def once() -> float:
        begin = time.process_time()
        work()
        return time.process_time() - begin

    return min(once() for _ in range(REPEATS))


def measure(size: int) -> str:
    """One line of the table."""
    known = batches(size)
    frames = encoded(known)
    rates = [OPERATIONS / seconds(work) / 1e6 for work in (lambda: encoded(known), lambda: receive(frames))]
    return f"| {size} | {sum(map(len, frames)) / OPERATIONS:.1f} | {rates[0]:.2f} | {rates[1]:.2f} |"


def main() -> None:
    """Prints the table."""
    print("| operations in a batch | bytes of an operation | encoded, M/s/core | received, M/s/core |")
    print("|---:|---:|---:|---:|")
    for size in SIZES:
        print(measure(size))


if __name__ == "__main__":
    main()

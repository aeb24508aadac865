"""python benchmarks/pipeline.py [--iterations 100]: operations per second through intake, align, join and measure.

A simulated job of 8 ranks is written to disk and read into batches first; what is timed is the pipeline alone.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

from ncclscope_agent.sources.nccl_log import NcclLogReader
from ncclscope_agent.sources.nsys_export import read_export
from ncclscope_service.pipeline import Pipeline
from ncclscope_simulator import SimulationConfig, write
from ncclscope_wire.batch import Batch
from ncclscope_wire.records import Source, SourceKind


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=100)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write(SimulationConfig(nccl="2.28.3", iterations=given.iterations), Path(folder))
        batches = read(Path(folder))
    print("| operations | CPU s | operations/s/core | matched | peak RSS |")
    print("|---:|---:|---:|---:|---:|")
    pipeline = Pipeline()
    began = time.process_time()
    for batch in batches:
        pipeline.feed(batch, agent="a", session="s", job="j")
    pipeline.flush(time.time_ns())
    seconds = time.process_time() - began
    operations = pipeline.store.operations.rows
    matched = int((operations["match"] == 1).sum())
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"| {len(operations)} | {seconds:.2f} | {len(operations) / seconds:,.0f} | {matched} | {peak_mib:.0f} MiB |")


def read(folder: Path) -> list[Batch]:
    """All batches of a job."""
    batches: list[Batch] = []
    for log in sorted((folder / "logs").iterdir()):
        reader = NcclLogReader(Source(kind=SourceKind.NCCL_LOG, name=log.name, key=log.name))
        batches += [*reader.feed(log.read_bytes(), None), *reader.flush()]
    for export in sorted((folder / "nsys").rglob("*.sqlite")):
        key = str(export.relative_to(folder))
        batches += read_export(export, source=Source(kind=SourceKind.NSYS, name=key, key=key))
    return batches


if __name__ == "__main__":
    main()

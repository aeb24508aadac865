"""Seconds and memory to read one nsys export: `python benchmarks/read_export.py [--kernels 2000000] [--nccl 0.1]`.

Makes an export with that many kernels, an API record for each, and NVTX ranges, in the schema of nsys 2023.4;
then reads it in a fresh process and prints a table. The bar: 5 s per million kernels of which 10 % are NCCL's,
from a finished file to the metrics.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sqlite3
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "agents"))

from ncclscope_agent.sources.nsys.export import read_export
from ncclscope_wire.records import Source, SourceKind

_TABLES = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER, utcTime TEXT, localTime TEXT);
CREATE TABLE ANALYSIS_DETAILS (globalVid INTEGER NOT NULL, duration INTEGER NOT NULL, startTime INTEGER NOT NULL,
  stopTime INTEGER NOT NULL);
CREATE TABLE TARGET_INFO_SYSTEM_ENV (globalVid INTEGER, devStateName TEXT NOT NULL, name TEXT NOT NULL,
  nameEnum INTEGER NOT NULL, value TEXT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL,
  globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL, callchainId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
  contextId INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER,
  globalPid INTEGER, demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, mangledName INTEGER,
  launchType INTEGER, cacheConfig INTEGER, registersPerThread INTEGER NOT NULL, gridX INTEGER NOT NULL,
  gridY INTEGER NOT NULL, gridZ INTEGER NOT NULL, blockX INTEGER NOT NULL, blockY INTEGER NOT NULL,
  blockZ INTEGER NOT NULL, staticSharedMemory INTEGER NOT NULL, dynamicSharedMemory INTEGER NOT NULL,
  localMemoryPerThread INTEGER NOT NULL, localMemoryTotal INTEGER NOT NULL, gridId INTEGER NOT NULL,
  sharedMemoryExecuted INTEGER, graphNodeId INTEGER, sharedMemoryLimitConfig INTEGER);
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER,
  category INTEGER, color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER,
  domainId INTEGER, uint64Value INTEGER, int64Value INTEGER, doubleValue REAL, uint32Value INTEGER,
  int32Value INTEGER, floatValue REAL, jsonTextId INTEGER, jsonText TEXT);
CREATE TABLE META_DATA_EXPORT (name TEXT NOT NULL, value TEXT);
"""

_PROCESS = 1 << 48
_GPUS = 8
_GAP_NS = 5_000
_COMPUTATIONS = 20


def make_export(path: Path, kernels: int, nccl_share: float) -> None:
    """Writes the export: eight processes with one device each; every 1/share-th kernel is NCCL's."""
    every = max(1, round(1 / nccl_share))
    process = f"({_PROCESS} + ((4000 + n % {_GPUS}) << 24))"
    numbers = f"WITH RECURSIVE c(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM c WHERE n + 1 < {kernels})"
    is_nccl = f"(n / {_GPUS}) % {every} = 0"
    start = f"(n / {_GPUS}) * {_GAP_NS} + 1000 + abs(random() % 500)"
    database = sqlite3.connect(path)
    database.executescript(_TABLES)
    database.executemany("INSERT INTO META_DATA_EXPORT VALUES (?, ?)", [("EXPORT_SCHEMA_VERSION", "3.7.2")])
    database.execute("INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES (1760000000000000000, '', '')")
    database.execute("INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES (0, '', 'Hostname', 619, 'node-0')")
    duration = kernels // _GPUS * _GAP_NS + 10**9
    database.execute("INSERT INTO ANALYSIS_DETAILS VALUES (0, ?, 0, 0)", [duration])
    names = [(1, "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"), (2, "cudaLaunchKernelExC"), (3, "NCCL")]
    names += [(100 + k, f"computation_{k}") for k in range(_COMPUTATIONS)]
    database.executemany("INSERT INTO StringIds VALUES (?, ?)", names)
    name = f"CASE WHEN {is_nccl} THEN 1 ELSE 100 + n % {_COMPUTATIONS} END"
    stream = f"CASE WHEN {is_nccl} THEN 20 ELSE 7 END"
    database.execute(
        f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL {numbers}, k AS (SELECT n, {start} AS s FROM c) "
        f"SELECT s, s + 3000 + n % 1000, 0, 1, NULL, {stream}, n / {_GPUS}, {process}, {name}, {name}, NULL, 0, 0, 64, "
        "24, 1, 1, 512, 1, 1, 0, 82240, 0, 0, n, NULL, NULL, NULL FROM k"
    )
    database.execute(
        f"INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME {numbers} SELECT n / {_GPUS} * {_GAP_NS}, "
        f"n / {_GPUS} * {_GAP_NS} + 900, 0, {process} + 4000 + n % {_GPUS}, n / {_GPUS}, 2, 0, NULL FROM c"
    )
    database.execute(
        f"INSERT INTO NVTX_EVENTS (start, end, eventType, globalTid, textId, domainId) {numbers} "
        f"SELECT n / {_GPUS} * {_GAP_NS}, n / {_GPUS} * {_GAP_NS} + 950, 59, {process}, 3, 1 FROM c WHERE {is_nccl}"
    )
    database.commit()
    database.close()


def read_once(path: Path, share: multiprocessing.SimpleQueue[tuple[float, float, float, int, int, int]]) -> None:
    """Reads the export and reports seconds, seconds of CPU, peak RSS in MiB, kernels, computation intervals, bytes."""
    source = Source(kind=SourceKind.NSYS, name=path.name, key=path.name)
    began, began_cpu = time.perf_counter(), time.process_time()
    kernels = busy = size = 0
    for batch in read_export(path, source=source):
        kernels += len(batch.kernels)
        busy += len(batch.busy)
        size += batch.kernels.nbytes + batch.busy.nbytes + batch.ranges.nbytes
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    share.put((time.perf_counter() - began, time.process_time() - began_cpu, peak, kernels, busy, size))


def main() -> None:
    """Makes, reads, prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", type=int, default=2_000_000)
    parser.add_argument("--nccl", type=float, default=0.1)
    parser.add_argument("--repeat", type=int, default=3)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "made.sqlite"
        make_export(path, asked.kernels, asked.nccl)
        print(f"{asked.kernels} kernels, {asked.nccl:.0%} NCCL's, file of {path.stat().st_size / 2**20:.0f} MiB")
        print(f"{'s':>7} {'CPU s':>7} {'s per 10^6':>11} {'RSS MiB':>8} {'NCCL rows':>10} {'busy rows':>10} {'MB':>7}")
        context = multiprocessing.get_context("spawn")
        for _ in range(asked.repeat):
            share: multiprocessing.SimpleQueue[tuple[float, float, float, int, int, int]] = context.SimpleQueue()
            reader = context.Process(target=read_once, args=(path, share))
            reader.start()
            seconds, cpu, peak, kernels, busy, size = share.get()
            reader.join()
            per_million = seconds / asked.kernels * 1e6
            print(f"{seconds:7.2f} {cpu:7.2f} {per_million:11.2f} {peak:8.0f} {kernels:10} {busy:10} {size / 1e6:7.1f}")


if __name__ == "__main__":
    main()

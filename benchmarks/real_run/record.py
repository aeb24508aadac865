"""Runs the workload with each way of watching it, several ranks on one GPU, and writes what each run left and took.

Ranks on one GPU get a `NCCL_HOSTID` of their own: NCCL takes them for nodes and connects them by sockets.
*Source:* NCCL `src/misc/utils.cc:getHostHash`; the check for duplicate GPUs compares hosts first (`src/init.cc`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ncclscope_agent.nccl_settings.advice import NcclVersion
from ncclscope_agent.nccl_settings.presets import preset

STUCK_S: Final[float] = 10
"""Ranks that wait for one that was killed are killed after so long; PyTorch's own watchdog waits for ten minutes."""
_DUMP_FILES: Final = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""*Source:* PyTorch 2.11 and earlier: `torch/csrc/distributed/c10d/FlightRecorder.cpp`, `DebugInfoWriter`."""
_STAMPS: Final = ("NCCL_DEBUG_TIMESTAMP_LEVELS", "NCCL_DEBUG_TIMESTAMP_FORMAT")


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One run: what is switched on, and what goes wrong in it."""

    name: str
    logs: bool = True
    stamps: bool = True
    calls: bool = False
    trace: bool = False
    dump: bool = False
    """Flight Recorder on, and written at the end with what RAS says."""
    dump_on_timeout: bool = False
    """Flight Recorder on, and written by PyTorch's watchdog when a rank waits too long."""
    nsys: bool = False
    inspector: Path | None = None
    """The library of NCCL Inspector, if it is to be loaded."""
    arguments: tuple[str, ...] = ()
    """Of all ranks."""
    of_rank: Mapping[int, tuple[str, ...]] = field(default_factory=dict[int, tuple[str, ...]])
    """Of one rank alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Time and size of one run: a row of `runs.json`."""

    variant: str
    nccl: str
    ranks: int
    exits: tuple[int, ...]
    step_ms: float | None
    """Of the slowest rank, on average; None if no rank came to its end, or calls were timed."""
    call_us: float | None
    """Of one call, on the host; None if steps were timed."""
    log_bytes: int


def variants(*, nsys: bool, inspector: Path | None) -> Iterator[Variant]:
    """The runs of one NCCL version: those that are compared for what they cost first, the plain one at both ends."""
    yield Variant(name="plain", logs=False)
    yield Variant(name="logs")
    yield Variant(name="logs_without_stamps", stamps=False)
    yield Variant(name="logs_and_calls", calls=True)
    yield Variant(name="logs_and_trace", trace=True)
    yield Variant(name="calls_without_stamps_and_trace", calls=True, stamps=False, trace=True)
    yield Variant(name="logs_and_flight_recorder", dump=True)
    if nsys:
        yield Variant(name="logs_and_nsys", nsys=True)
    if inspector is not None:
        yield Variant(name="inspector", logs=False, inspector=inspector)
    yield Variant(name="graph", trace=True, arguments=("--graph",))
    yield Variant(name="late", trace=True, of_rank={1: ("--late", "5")})
    yield Variant(name="killed", of_rank={1: ("--die-at", "20")})
    yield Variant(
        name="stalled", arguments=("--timeout", "15"), of_rank={1: ("--stall-at", "20")}, dump_on_timeout=True
    )
    yield Variant(name="plain_again", logs=False)


def call_variants(calls: int, *, inspector: Path | None) -> Iterator[Variant]:
    """The runs of one rank alone that time its calls: what is watched costs the host so much of each."""
    only = ("--calls", str(calls))
    yield Variant(name="plain", logs=False, arguments=only)
    yield Variant(name="logs", arguments=only)
    yield Variant(name="logs_without_stamps", stamps=False, arguments=only)
    yield Variant(name="logs_and_calls", calls=True, arguments=only)
    if inspector is not None:
        yield Variant(name="inspector", logs=False, inspector=inspector, arguments=only)
    yield Variant(name="plain_again", logs=False, arguments=only)


def environment(variant: Variant, version: NcclVersion, rank: int, folder: Path) -> dict[str, str]:
    """The variables of NCCL for one rank of a run.

    Raises:
        ValueError: CALL lines are wanted of a version that has none.
    """
    found = {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    if variant.logs:
        wanted = preset(version, log_file=str(folder / "logs" / f"nccl.rank{rank}.%h.%p.log"), calls=variant.calls)
        found |= {name: value for name, value in wanted.items() if variant.stamps or name not in _STAMPS}
    if variant.dump:
        found |= {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}
    if variant.dump_on_timeout:
        found |= {
            **dict.fromkeys(("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), "2000"),
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
            **dict.fromkeys(_DUMP_FILES, str(folder / "flight_recorder" / "nccl_trace_rank_")),
        }
    if variant.inspector is not None:
        found |= {
            "NCCL_PROFILER_PLUGIN": str(variant.inspector),
            "NCCL_INSPECTOR_ENABLE": "1",
            "NCCL_INSPECTOR_DUMP_DIR": str(folder / "inspector"),
            "NCCL_INSPECTOR_DUMP_VERBOSE": "1",
            "NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS": "1000",
        }
    return found


def run(
    variant: Variant,
    version: NcclVersion,
    *,
    ranks: int,
    folder: Path,
    library: Path | None,
    arguments: Sequence[str],
    direct: bool = False,
) -> Row:
    """Runs all ranks to their end, or to their being stuck.

    `library` is loaded before PyTorch's NCCL, or called without PyTorch's groups if `direct`.
    """
    for name in ("logs", "output", "inspector", *(["flight_recorder"] if variant.dump_on_timeout else [])):
        (folder / name).mkdir(parents=True, exist_ok=True)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(ranks)}
    module, *own = ("benchmarks.real_run.workload",)
    if library is not None and direct:
        module, own = "benchmarks.real_run.direct", ["--library", str(library)]
    elif library is not None:
        shared["LD_PRELOAD"] = str(library)
    processes: list[subprocess.Popen[bytes]] = []
    for rank in range(ranks):
        command = [sys.executable, "-m", module, *own, *arguments, *variant.arguments]
        command += variant.of_rank.get(rank, ())
        if variant.trace:
            command += ["--trace", str(folder / "traces")]
        if variant.dump:
            (folder / "flight_recorder").mkdir(exist_ok=True)
            command += ["--dump", str(folder / "flight_recorder")]
        if variant.nsys:
            command = ["nsys", "profile", "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none", "--export=sqlite",
                       "-o", str(folder / "nsys" / f"rank{rank}"), *command]  # fmt: skip
            (folder / "nsys").mkdir(exist_ok=True)
        variables = {**os.environ, **shared, "RANK": str(rank), **environment(variant, version, rank, folder)}
        with (folder / "output" / f"rank{rank}.txt").open("wb") as output:
            processes.append(subprocess.Popen(command, env=variables, stdout=output, stderr=subprocess.STDOUT))
    exits = ends(processes)
    results = list(_results(folder / "output"))
    steps = [row["seconds"] / row["steps"] for row in results if "steps" in row]
    timed = [row["seconds"] / row["calls"] for row in results if "calls" in row]
    return Row(
        variant=variant.name,
        nccl=str(version),
        ranks=ranks,
        exits=tuple(exits),
        step_ms=round(1_000 * max(steps), 4) if steps else None,
        call_us=round(1e6 * max(timed), 3) if timed else None,
        log_bytes=sum(path.stat().st_size for path in (folder / "logs").iterdir()),
    )


def ends(processes: list[subprocess.Popen[bytes]]) -> list[int]:
    """Exit statuses. Once a rank has died, the others have so long before they are killed, as a launcher does."""
    waiting = list(processes)
    while waiting:
        failed = any(process.returncode for process in processes)
        try:
            waiting[0].wait(timeout=STUCK_S if failed else 1)
        except subprocess.TimeoutExpired:
            if failed:
                for process in waiting:
                    process.kill()
        waiting = [process for process in waiting if process.poll() is None]
    return [process.returncode for process in processes]


def _results(folder: Path) -> Iterator[dict[str, float]]:
    for path in sorted(folder.iterdir()):
        for line in path.read_text(errors="replace").splitlines():
            if line.startswith('{"rank"'):
                yield json.loads(line)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def mask(folder: Path) -> None:
    """Puts `node` in the place of this machine's name in all texts and file names of a run, and drops its folders."""
    host, home = socket.gethostname(), str(folder)
    own = "|".join(re.escape(name) for name in sorted({host, host.split(".")[0]}, key=len, reverse=True))
    names = re.compile(f"(?<![A-Za-z0-9])(?:{own})(?![A-Za-z0-9])")  # a host "vm" is not in the word "nvmlDev"
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_file() and path.suffix in {".log", ".txt", ".json", ".jsonl"}:
            text = path.read_text(errors="surrogateescape").replace(home, ".").replace(str(Path.cwd()), ".")
            path.write_text(names.sub("node", text), errors="surrogateescape")
        if names.search(path.name):
            shutil.move(path, path.with_name(names.sub("node", path.name)))

"""python -m benchmarks.finished_export [--kernels 2000000] [--nccl 0.1]: from an export's rename to `/metrics`.

A real agent has read the logs of eight ranks; then an nsys export of that many kernels, which was written beside, is
moved into the folder that it watches, as the export of a finished session is. Timed is until `/metrics` says that the
operations have their kernels. CPU seconds are those of both processes meanwhile. The bar: 5 s per million kernels.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Final

from benchmarks.freshness import resident_mib, start, start_service
from benchmarks.load.watch import cpu_seconds
from benchmarks.read_export import make_export

_RANKS: Final = 8
_INIT: Final = (
    "node-0:{pid}:{pid} [{device}] NCCL INFO ncclCommInitRank comm 0x55d0c8b3e2a0 rank {device} nranks 8 "
    "cudaDev {device} nvmlDev {device} busId {device}000 commId 0x1d5f2c9b7a3e4410 - Init COMPLETE\n"
)
_LINE: Final = (
    "node-0:{pid}:{pid} [{device}] NCCL INFO AllReduce: opCount {number:x} sendbuff 0x7f2a40000000 recvbuff "
    "0x7f2a40000000 count 1048576 datatype 9 op 0 root 0 comm 0x55d0c8b3e2a0 [nranks=8] stream 0x55d0c7f01b10\n"
)
_HELD: Final = 256
"""Operations of a rank, the newest, that later lines may still turn out to be others."""
_LONGEST_SECONDS: Final = 180.0


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", type=int, default=2_000_000)
    parser.add_argument("--nccl", type=float, default=0.1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(
            "| kernels | NCCL's | rename to /metrics | per million | agent CPU s | service CPU s | agent RSS "
            "| service RSS | load |\n|" + "---:|" * 9
        )
        print(measure(Path(folder), given.kernels, given.nccl))


def measure(folder: Path, kernels: int, share: float) -> str:
    """One line of the table."""
    watched = folder / "exports"
    watched.mkdir()
    make_export(folder / "made.sqlite", kernels, share)
    each = len(range(0, kernels // _RANKS, max(1, round(1 / share))))
    for device in range(_RANKS):
        lines = (_LINE.format(pid=4000 + device, device=device, number=number) for number in range(each))
        (folder / f"nccl.{device}.log").write_text(_INIT.format(pid=4000 + device, device=device) + "".join(lines))
    started = start_service(folder / "data")
    service, port, web = started.process, started.agents, started.web
    agent = start("agent", "--logs", f"{folder}/*.log", "--exports", str(watched), f"--connect=127.0.0.1:{port}")
    try:
        wait_for(web, "ncclscope_operations_total", _RANKS * each)
        before = cpu_seconds(agent.pid), cpu_seconds(service.pid)
        began = time.monotonic()
        (folder / "made.sqlite").rename(watched / "made.sqlite")
        matched = wait_for(web, "ncclscope_matched_operations_total", _RANKS * (each - _HELD))
        seconds = time.monotonic() - began
        cpu = [cpu_seconds(process.pid) - then for process, then in zip((agent, service), before, strict=True)]
        return (
            f"| {kernels:,} | {matched:,} | {seconds:.1f} s | {seconds / kernels * 1e6:.2f} s | {cpu[0]:.1f} "
            f"| {cpu[1]:.1f} | {resident_mib(agent.pid):.0f} MiB | {resident_mib(service.pid):.0f} MiB "
            f"| {os.getloadavg()[0]:.1f} |"
        )
    finally:
        for process in (agent, service):
            process.terminate()
            process.wait(60)


def wait_for(web: int, metric: str, least: int) -> int:
    """Waits until all series of a metric together have reached so much; gives what they have."""
    counted = re.compile(rf"^{metric}\{{[^}}]*\}} (\S+)$", re.MULTILINE)
    until = time.monotonic() + _LONGEST_SECONDS
    while True:
        with urllib.request.urlopen(f"http://127.0.0.1:{web}/metrics") as answer:
            total = round(sum(float(value) for value in counted.findall(answer.read().decode())))
        if total >= least:
            return total
        if time.monotonic() > until:
            raise SystemExit(f"{metric} stands at {total}, and {least} were to be reached")
        time.sleep(0.2)


if __name__ == "__main__":
    main()

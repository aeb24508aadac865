"""python benchmarks/freshness.py [--seconds 20] [--files 8] [--rate 5000]: from a line's write to `/metrics`.

A real agent follows files that grow; a real service takes what it sends; `/metrics` is fetched as often as the service
lets one address.
A line is visible in the first answer whose `ncclscope_operations_total` counts it. The delay includes half of the pause
between two answers, which the last column gives. Memory is that of the processes at the end.
"""

from __future__ import annotations

import argparse
import bisect
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ncclscope.serve import ports_of_service

LINE = (
    "node17:41822:41903 [2] NCCL INFO AllReduce: opCount {number:x} sendbuff {buffer:#x} recvbuff {buffer:#x} "
    "count 1048576 datatype 9 op 0 root 0 comm 0x55d0c8b3e2a0 [nranks=8] stream 0x55d0c7f01b10\n"
)
TEMPLATES = 64
WRITES_PER_SECOND = 50
PAUSE_SECONDS = 0.025
"""Between two fetches."""
COUNTED = re.compile(r"^ncclscope_operations_total\{[^}]*\} (\S+)$", re.MULTILINE)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--rate", type=int, default=5000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print("| lines/s | files | to /metrics p50 | p99 | agent RSS | service RSS | lost | one answer |")
        print("|---:|---:|---:|---:|---:|---:|---:|---:|")
        print(measure(Path(folder), given))


def measure(folder: Path, given: argparse.Namespace) -> str:
    """One line of the table."""
    started = start_service(folder / "data")
    service, web = started.process, started.web
    agent = start("agent", "--logs", f"{folder}/*.log", f"--connect=127.0.0.1:{started.agents}")
    try:
        written: list[tuple[int, float]] = []
        writing = threading.Thread(target=write, args=(folder, given, written))
        writing.start()
        seen = poll(web, writing, written)
        writing.join()
        delays, total = delays_of(written, seen), written[-1][0]
        pauses = np.diff([at for at, _ in seen])
        return (
            f"| {total / given.seconds:.0f} | {given.files} | {np.quantile(delays, 0.5):.0f} ms "
            f"| {np.quantile(delays, 0.99):.0f} ms | {resident_mib(agent.pid):.0f} MiB "
            f"| {resident_mib(service.pid):.0f} MiB | {total - seen[-1][1]} | {1e3 * np.median(pauses):.0f} ms |"
        )
    finally:
        for process in (agent, service):
            process.terminate()
            process.wait(30)


def write(folder: Path, given: argparse.Namespace, written: list[tuple[int, float]]) -> None:
    """Grows the files evenly, and notes how many lines there were when."""
    streams = [(folder / f"nccl.{number}.log").open("ab", buffering=0) for number in range(given.files)]
    began, total = time.monotonic(), 0
    while (elapsed := time.monotonic() - began) < given.seconds:
        share = (round(given.rate * elapsed) - total) // len(streams)
        for stream in streams if share > 0 else ():
            lines = [
                LINE.format(number=total + k, buffer=0x7F2A40000000 + (total + k) % TEMPLATES * 512).encode()
                for k in range(share)
            ]
            stream.write(b"".join(lines))
            total += share
            written.append((total, time.monotonic()))
        time.sleep(1 / WRITES_PER_SECOND)
    for stream in streams:
        stream.close()


def poll(web: int, writing: threading.Thread, written: list[tuple[int, float]]) -> list[tuple[float, int]]:
    """(when answered, operations counted) until all is seen, or ten seconds after the last write."""
    seen: list[tuple[float, int]] = []
    deadline = float("inf")
    while not seen or writing.is_alive() or (seen[-1][1] < written[-1][0] and time.monotonic() < deadline):
        if not writing.is_alive() and deadline == float("inf"):
            deadline = time.monotonic() + 10
        time.sleep(PAUSE_SECONDS)
        with urllib.request.urlopen(f"http://127.0.0.1:{web}/metrics") as answer:
            text = answer.read().decode()
        seen.append((time.monotonic(), round(sum(float(value) for value in COUNTED.findall(text)))))
    return seen


def delays_of(written: list[tuple[int, float]], seen: list[tuple[float, int]]) -> list[float]:
    """Milliseconds from each write to the first answer that counts its last line."""
    counts = [count for _, count in seen]
    found = [(at, bisect.bisect_left(counts, total)) for total, at in written]
    return [1e3 * (seen[index][0] - at) for at, index in found if index < len(seen)]


def start(*arguments: str) -> subprocess.Popen[bytes]:
    """A process of the command."""
    return subprocess.Popen([sys.executable, "-m", "ncclscope", *arguments], stdout=subprocess.DEVNULL)


@dataclass(frozen=True, slots=True)
class RunningService:
    """A service and the ports that it listens on."""

    process: subprocess.Popen[bytes]
    agents: int
    web: int


def start_service(data: Path, *options: str) -> RunningService:
    """A service on ports of its own choice, once it listens on both."""
    command = ["serve", "--listen=127.0.0.1:0", "--http=127.0.0.1:0", f"--data={data}", *options]
    process = subprocess.Popen([sys.executable, "-m", "ncclscope", *command], stdout=subprocess.PIPE)
    assert process.stdout is not None
    printed = b"".join(process.stdout.readline() for _ in range(3)).decode()
    ports = ports_of_service(printed)
    if ports is None:
        raise SystemExit("the service did not start")
    return RunningService(process, *ports)


def resident_mib(pid: int) -> float:
    """Resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return float("nan")


if __name__ == "__main__":
    main()

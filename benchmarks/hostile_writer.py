"""python -m benchmarks.hostile_writer [--seconds 600] [--lines 20000]: one who may write a log, against all others.

A simulated job with a late rank is written in real time, and followed by two agents: of a service that has it for
itself, and of one to which a third agent, with a token of its own, sends what a hostile writer logs beside:
communicators that come and go, each said to have 100,000 ranks or 2, hosts, processes, shapes of calls and texts, all
without end.

Memory of both services, how long `/healthz` takes on the HTTP port and on that of the probes, what is said of the
names, and the figures of the honest job: they have to be equal with and without.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from benchmarks.freshness import RunningService, resident_mib, start, start_service
from benchmarks.ports import free_port

_LOGS_KEPT: Final = 4
_LOG_SECONDS: Final = 20.0
_WRITES_PER_SECOND: Final = 10
_PROBES_PER_SECOND: Final = 4
_SETTLED_WITHIN_SECONDS: Final = 300.0
_COMPARED: Final = re.compile(
    r"^(ncclscope_(?:operations|bytes|alignment_operations|iterations|steps)_total)\{([^}]*)\} (\S+)$", re.MULTILINE
)
_JOB: Final = 'job="honest"'
_SKIPPED: Final = re.compile(
    r'^ncclscope_agent_lines_skipped_total\{[^}]*reason="too_many_names"[^}]*\} (\S+)$', re.MULTILINE
)


def main() -> int:
    """Prints the tables; 1 where a figure of the honest job differs or a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--lines", type=int, default=20_000, help="of the hostile writer a second (20000)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return _run(Path(folder), given.seconds, given.lines)


@dataclass(slots=True)
class _Probe:
    """Asks a service whether it lives, in a thread of its own."""

    service: RunningService
    port: int
    """That of the probes."""
    seconds: list[float] = field(default_factory=list[float])
    http_seconds: list[float] = field(default_factory=list[float])
    most_mib: float = 0.0
    stopping: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self.stopping.wait(1 / _PROBES_PER_SECOND):
            for port, seconds in ((self.port, self.seconds), (self.service.web, self.http_seconds)):
                began = time.monotonic()
                _fetched(port, "/healthz")
                seconds.append(time.monotonic() - began)
            self.most_mib = max(self.most_mib, resident_mib(self.service.process.pid))


def _run(folder: Path, seconds: float, lines: int) -> int:
    tokens = {who: f"{who}-token-0123456789" for who in ("honest", "evil")}
    for who, token in tokens.items():
        (folder / f"{who}.token").write_text(token)
    listed = folder / "agent-tokens"
    listed.write_text("".join(f"{token} name={who} job={who}\n" for who, token in tokens.items()))
    (folder / "evil").mkdir()
    processes: list[subprocess.Popen[bytes]] = []
    ports = {name: free_port() for name in ("attacked", "alone")}
    services = {
        name: start_service(folder / name, f"--agent-tokens={listed}", f"--probes=127.0.0.1:{port}")
        for name, port in ports.items()
    }
    probes = {name: _Probe(service, ports[name]) for name, service in services.items()}
    try:
        threads = [threading.Thread(target=probe.run, daemon=True) for probe in probes.values()]
        for thread in threads:
            thread.start()
        job = start(
            *("simulate", "--live", "--for", str(seconds), "--out", str(folder / "job"), "--capture", "duty:0.4"),
            *("--fault", "late_rank:rank=5,ms=30", "--step-seconds", "0.5"),
            *("--tp", "2", "--pp", "1", "--dp", "4"),  # no pipeline, whose bubble would hide the late rank
        )
        processes.append(job)
        for service in services.values():
            inputs = ("--logs", f"{folder}/job/logs/*.log", "--exports", f"{folder}/job/nsys")
            processes.append(_agent(folder, service, "honest", *inputs))
        evil = _agent(folder, services["attacked"], "evil", "--logs", f"{folder}/evil/*.log")
        processes.append(evil)
        written = _write(folder / "evil", seconds, lines)
        evil_mib = resident_mib(evil.pid)
        job.wait()
        figures = _settled(services)
        for probe in probes.values():
            probe.stopping.set()
        for thread in threads:
            thread.join()
        text = _fetched(services["attacked"].web, "/metrics").decode()
    finally:
        for process in (*processes, *(service.process for service in services.values())):
            process.terminate()
        for process in (*processes, *(service.process for service in services.values())):
            process.wait()
    return _print(probes, figures, written, evil_mib, sum(float(value) for value in _SKIPPED.findall(text)))


def _agent(folder: Path, service: RunningService, who: str, *inputs: str) -> subprocess.Popen[bytes]:
    connect = (f"--connect=127.0.0.1:{service.agents}", f"--job={who}", f"--token-file={folder}/{who}.token")
    return start("agent", *inputs, *connect)


def _write(folder: Path, seconds: float, rate: int) -> int:
    """Writes for so long, in files that follow each other as rotated ones do; gives the number of lines."""
    lines, written, began = hostile_lines(), 0, time.monotonic()
    for number in itertools.count():
        until = min(seconds, (number + 1) * _LOG_SECONDS)
        with (folder / f"nccl.{number}.log").open("a") as stream:
            while (elapsed := time.monotonic() - began) < until:
                due = max(0, round(rate * elapsed) - written)
                stream.writelines(itertools.islice(lines, due))
                stream.flush()
                written += due
                time.sleep(1 / _WRITES_PER_SECOND)
        (folder / f"nccl.{number - _LOGS_KEPT}.log").unlink(missing_ok=True)
        if until >= seconds:
            return written
    raise AssertionError


def hostile_lines() -> Iterator[str]:
    """Lines of a hostile writer: each name comes once or twice."""
    for number in itertools.count():
        pid, pointer = 1000 + number % 1000, f"0x{0x55AA00000000 + 64 * number:x}"
        own = f"node1:{pid}:{pid} [0] NCCL INFO"
        ranks = 100_000 if number % 7 == 0 else 2
        yield (
            f"{own} ncclCommInitRank comm {pointer} rank 0 nranks {ranks} cudaDev 0 nvmlDev 0 busId 1000 "
            f"commId 0x{0xABC000 + number:x} - Init COMPLETE\n"
        )
        for call in range(3):
            yield (
                f"{own} AllReduce: opCount {call:x} sendbuff 0x7f2a40000000 recvbuff 0x7f2a40000000 count "
                f"{number + call + 1} datatype 7 op 0 root 0 comm {pointer} [nranks={ranks}] stream 0x55d0c7f01b10\n"
            )
        other = f"host{number}:{number}:{number} [0] NCCL INFO"
        yield (
            f"{other} AllReduce: opCount 0 sendbuff 0x7f2a40000000 recvbuff 0x7f2a40000000 count 8 datatype 7 op 0 "
            f"root 0 comm {pointer} [nranks=2] stream 0x55d0c7f01b10\n"
        )
        yield f"{own} NET/Plugin: what nobody says{number} {'x' * 200}\n"
        yield f"{own} NCCL WARN something{number} went wrong in shape {chr(97 + number % 26) * (number % 60)}\n"


def _settled(services: dict[str, RunningService]) -> dict[str, dict[str, float | str]]:
    """The figures of the honest job at both services, once nothing of them changes any more."""
    before: dict[str, dict[str, float | str]] = {}
    until = time.monotonic() + _SETTLED_WITHIN_SECONDS
    while True:
        figures = {name: _figures(service) for name, service in services.items()}
        if figures == before and (figures["attacked"] == figures["alone"] or time.monotonic() > until):
            return figures
        before = figures
        time.sleep(15)


def _figures(service: RunningService) -> dict[str, float | str]:
    """Operations, bytes, matches and steps of the honest job by their labels, and its findings."""
    text = _fetched(service.web, "/metrics").decode()
    found: dict[str, float | str] = {
        f"{name}{{{labels}}}": float(value) for name, labels, value in _COMPARED.findall(text) if _JOB in labels
    }
    findings: list[dict[str, Any]] = json.loads(_fetched(service.web, "/api/findings"))
    kinds = Counter((each["kind"], str(each["ranks"])) for each in findings if each["job"] == "honest")
    found["findings"] = ", ".join(f"{kind} {ranks}" for kind, ranks in sorted(kinds))
    return found


def _fetched(port: int, path: str) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
        content: bytes = answer.read()
        return content


def _print(
    probes: dict[str, _Probe], figures: dict[str, dict[str, float | str]], written: int, evil_mib: float, told: float
) -> int:
    print("| service | most RSS | probe p50 | p99 | most | HTTP port, most | of | honest operations | findings |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---|")
    for name, probe in probes.items():
        own = figures[name]
        p50, p99, most = np.quantile(probe.seconds, (0.5, 0.99, 1.0))
        operations = sum(v for k, v in own.items() if k.startswith("ncclscope_operations") and isinstance(v, float))
        print(
            f"| {name} | {probe.most_mib:,.0f} MiB | {1e3 * p50:.0f} ms | {1e3 * p99:.0f} ms | {1e3 * most:.0f} ms "
            f"| {1e3 * max(probe.http_seconds):.0f} ms "
            f"| {len(probe.seconds):,} | {operations:,.0f} | {own['findings']} |"
        )
    differ = [key for key in figures["alone"] if figures["attacked"].get(key) != figures["alone"][key]]
    print(
        f"\n{written:,} hostile lines; names over the limits, as the service counts them: {told:,.0f}; "
        f"the hostile agent's RSS {evil_mib:,.0f} MiB\n"
        f"figures of the honest job: {len(figures['alone'])} compared, {len(differ)} differ"
    )
    for key in differ[:20]:
        print(f"  {key}: {figures['alone'][key]} alone, {figures['attacked'].get(key)} attacked")
    attacked = probes["attacked"]
    return int(bool(differ) or attacked.most_mib > 1024 or max(attacked.seconds) > 1.0)


if __name__ == "__main__":
    sys.exit(main())

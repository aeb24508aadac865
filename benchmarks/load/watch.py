"""The service as a process, watched from outside: its processor and memory, and how soon it answers and counts."""

from __future__ import annotations

import os
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from benchmarks.freshness import resident_mib
from numpy.typing import NDArray

_COUNTED: Final = re.compile(rb"^ncclscope_operations_total\{([^}]*)\} (\S+)", re.MULTILINE)
_INFO: Final = re.compile(rb"^ncclscope_communicator_info\{([^}]*)\} ", re.MULTILINE)
_LABEL: Final = re.compile(rb'(\w+)="([^"]*)"')
_TIMEOUT_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One look at the service."""

    at_ns: int
    """When /metrics had answered."""
    operations: int
    """That it counts."""
    by_communicator: dict[int, int]
    """The same by commId, of those that /metrics tells apart."""
    series: int
    metrics_seconds: float
    page_seconds: float | None
    """Of /api/overview, from which the page is drawn; None where it was not asked."""
    cpu_seconds: float
    resident_mib: float
    load_average: float


class Watch:
    """Looks at a service again and again, in a thread of its own."""

    def __init__(self, web: int, pid: int, *, every_seconds: float, page_every: int = 4) -> None:
        self._web = web
        self._pid = pid
        self._every_seconds = every_seconds
        self._page_every = page_every
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.looks: list[Look] = []
        self.failures = 0
        """Requests that were not answered in a minute, or refused."""

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def stop(self) -> None:
        """Ends after the present look."""
        self._stopping.set()
        self._thread.join()

    def look(self, *, page: bool) -> Look | None:
        """One look; None where the service did not answer."""
        try:
            metrics_seconds, text = _timed(lambda: _fetched(self._web, "/metrics"))
            at_ns = time.time_ns()
            page_seconds = _timed(lambda: _fetched(self._web, "/api/overview"))[0] if page else None
        except (OSError, urllib.error.URLError):
            self.failures += 1
            return None
        counts, total = _counts(text)
        return Look(
            at_ns=at_ns,
            operations=total,
            by_communicator=counts,
            series=sum(not line.startswith(b"#") for line in text.splitlines()),
            metrics_seconds=metrics_seconds,
            page_seconds=page_seconds,
            cpu_seconds=cpu_seconds(self._pid),
            resident_mib=resident_mib(self._pid),
            load_average=os.getloadavg()[0],
        )

    def _run(self) -> None:
        number = 0
        while not self._stopping.is_set():
            began = time.monotonic()
            found = self.look(page=number % self._page_every == 0)
            if found is not None:
                self.looks.append(found)
            number += 1
            self._stopping.wait(max(0.05, self._every_seconds - (time.monotonic() - began)))


def _timed(ask: Callable[[], bytes]) -> tuple[float, bytes]:
    began = time.monotonic()
    answer = ask()
    return time.monotonic() - began, answer


def _fetched(web: int, path: str) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{web}{path}", timeout=_TIMEOUT_SECONDS) as answer:
        content: bytes = answer.read()
        return content


def _counts(text: bytes) -> tuple[dict[int, int], int]:
    """Operations by commId, and of all communicators."""
    named: dict[bytes, int] = {}
    for labels in _INFO.findall(text):
        of = dict(_LABEL.findall(labels))
        if of[b"comm_id"].startswith(b"0x") and b"/" not in of[b"comm_id"] and b"#" not in of[b"comm_id"]:
            named[of[b"communicator"]] = int(of[b"comm_id"], 16)
    counts: dict[int, int] = {}
    total = 0
    for labels, value in _COUNTED.findall(text):
        amount = round(float(value))
        total += amount
        comm_id = named.get(dict(_LABEL.findall(labels)).get(b"communicator", b""))
        if comm_id is not None:
            counts[comm_id] = counts.get(comm_id, 0) + amount
    return counts, total


def delays_s(
    looks: list[Look],
    comm_id: int,
    due_ns: Callable[[NDArray[np.int64]], NDArray[np.int64]],
    begin_ns: int,
    end_ns: int,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Seconds from each operation of a communicator to the first look that counts it, and at least: to the look before
    that one, which did not. What is true lies between them.

    Those due from `begin_ns` to `end_ns` that are counted at last; `due_ns`: when the n-th was.
    """
    counts = np.maximum.accumulate(np.array([look.by_communicator.get(comm_id, 0) for look in looks], np.int64))
    answered_ns = np.array([look.at_ns for look in looks], np.int64)
    asked_ns = answered_ns - np.array([round(look.metrics_seconds * 1e9) for look in looks], np.int64)
    due = due_ns(np.arange(counts[-1], dtype=np.int64))
    numbers = np.flatnonzero((due >= begin_ns) & (due < end_ns))
    due, first = due[numbers], np.searchsorted(counts, numbers + 1)
    before_ns = np.where(first > 0, asked_ns[np.maximum(first - 1, 0)], due)
    return (answered_ns[first] - due) / 1e9, np.maximum(before_ns - due, 0) / 1e9


def cpu_seconds(pid: int) -> float:
    """User and system time of a process. *Source:* proc(5), /proc/PID/stat, fields 14 and 15."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

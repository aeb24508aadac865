"""Reads this machine's counters every few seconds: NICs from sysfs, GPUs from NVML or DCGM. Nothing is written.

Files of sysfs are small and are read one by one; what cannot be read is not known. GPUs are asked in a thread of its
own, since one that fell off the bus may hold up NVML's calls for ever.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from ncclscope_agent.node.asked import ANSWERED, AskedFollower
from ncclscope_agent.node.dcgm import Dcgm
from ncclscope_agent.node.nvml import NvmlSource, Pynvml, load_pynvml
from ncclscope_agent.sources.machine import (
    CONGESTION_COUNTERS,
    ERROR_COUNTERS,
    GpuReading,
    MachineWatch,
    PortReading,
)
from ncclscope_wire.facts import Fact
from ncclscope_wire.records import Source, SourceKind

SYS: Final = Path("/sys")
_MOST_BYTES: Final = 4096
_GPU_SECONDS: Final = 2.0
_RATE: Final = re.compile(r"([\d.]{1,16}) Gb/sec(?: \((\d{1,3})X)?")
"""*Source:* Linux `drivers/infiniband/core/sysfs.c:rate_show`: "200 Gb/sec (4X HDR)"."""


def read_ports(sys: Path = SYS) -> list[PortReading]:
    """All ports of RDMA NICs, by name; none where there are none."""
    found: list[PortReading] = []
    for device in _entries(f"{sys}/class/infiniband"):
        for port in _entries(f"{sys}/class/infiniband/{device}/ports"):
            if not port.isdecimal():
                continue
            try:
                folder = os.open(f"{sys}/class/infiniband/{device}/ports/{port}", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue  # it has just gone
            try:
                found.append(_read_port(device, int(port), folder))
            finally:
                os.close(folder)
    return found


def _read_port(device: str, port: int, folder: int) -> PortReading:
    rate = _RATE.match(_text(folder, "rate") or "")
    state = (_text(folder, "state") or "").rpartition(": ")[2]
    counters = {name: _number(folder, f"counters/{name}") for name in ERROR_COUNTERS}
    counters |= {name: _number(folder, f"hw_counters/{name}") for name in CONGESTION_COUNTERS}
    return PortReading(
        device=device[:64],
        port=port,
        state=state[:32] or None,
        width=int(rate[2]) if rate and rate[2] else None,
        gbit_per_s=float(rate[1]) if rate and rate[1].replace(".", "", 1).isdecimal() else None,
        pcie_width=_number(folder, "../../device/current_link_width"),
        pcie_width_most=_number(folder, "../../device/max_link_width"),
        counters={name: value for name, value in counters.items() if value is not None},
    )


def _entries(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _text(folder: int, name: str) -> str | None:
    """By descriptors: a look reads hundreds of files, and buffers, Paths and the way from the root cost more."""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return None
    try:
        return os.read(descriptor, _MOST_BYTES).decode(errors="replace").strip()
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _number(folder: int, name: str) -> int | None:
    text = _text(folder, name)
    return int(text) if text and text.isascii() and text.isdecimal() and len(text) < 20 else None


class MachineFollower(AskedFollower):
    """NICs and GPUs of this host.

    `nvml`: gives the module that GPUs are asked by, None for no GPUs. `dcgm`: an endpoint that is asked instead.
    """

    def __init__(
        self,
        host: str,
        *,
        sys: Path = SYS,
        nvml: Callable[[], Pynvml | None] = load_pynvml,
        dcgm: str = "",
        gpu_seconds: float = _GPU_SECONDS,
    ) -> None:
        super().__init__(Source(kind=SourceKind.MACHINE, name=f"counters of {host}", key=f"machine:{host}"))
        self._host = host
        self._sys = sys
        self._gpu_seconds = gpu_seconds
        self._gpu_source = Dcgm(dcgm, gpu_seconds) if dcgm else _nvml_source(nvml())
        self._asking: _Asking | None = None
        self._watch = MachineWatch()

    def look(self, now_wall_ns: int) -> tuple[Sequence[Fact], str]:
        """Conditions that begin, change or end. GPUs that do not answer within 2 s keep their conditions, and the call
        is waited for at the next looks."""
        gpus, state = self._gpus()
        return self._watch.ingest_look(read_ports(self._sys), gpus, self._host, now_wall_ns), state

    def forget(self) -> None:
        """Counters of earlier looks, too."""
        self._watch = MachineWatch()

    def _gpus(self) -> tuple[list[GpuReading] | None, str]:
        if self._gpu_source is None:
            return [], ANSWERED
        asking = self._asking = self._asking or _Asking(self._gpu_source.read)
        asking.join(self._gpu_seconds)
        if asking.is_alive():
            return None, f"{self._gpu_source.name}_slow"
        self._asking = None
        if asking.gpus is None:
            return None, f"{self._gpu_source.name}_failed"
        return asking.gpus, ANSWERED


def _nvml_source(module: Pynvml | None) -> NvmlSource | None:
    return None if module is None else NvmlSource(module)


class _Asking(threading.Thread):
    """One question, of which NVML's answer may never come."""

    def __init__(self, ask: Callable[[], list[GpuReading] | None]) -> None:
        super().__init__(name="gpus", daemon=True)
        self._ask = ask
        self.gpus: list[GpuReading] | None = None
        self.start()

    def run(self) -> None:
        """Asks."""
        self.gpus = self._ask()

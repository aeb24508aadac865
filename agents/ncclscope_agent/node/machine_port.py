"""Reads this machine's counters every few seconds: NICs from sysfs, GPUs from NVML. Nothing is written anywhere.

Files of sysfs are small and are read one by one; what cannot be read is not known. NVML is asked in a thread of its
own, since a GPU that fell off the bus may hold up its calls for ever.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from ncclscope_agent.node.asked import ANSWERED, AskedFollower
from ncclscope_agent.node.nvml import Nvml, Pynvml, load_pynvml
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
_NVML_SECONDS: Final = 2.0
_RATE: Final = re.compile(r"([\d.]{1,16}) Gb/sec(?: \((\d{1,3})X)?")
"""*Source:* Linux `drivers/infiniband/core/sysfs.c:rate_show`: "200 Gb/sec (4X HDR)"."""


def read_ports(sys: Path = SYS) -> list[PortReading]:
    """All ports of RDMA NICs, by name; none where there are none."""
    found: list[PortReading] = []
    for device in _entries(sys / "class/infiniband"):
        for port in _entries(device / "ports"):
            if port.name.isdecimal():
                found.append(_read_port(device, port))
    return found


def _read_port(device: Path, port: Path) -> PortReading:
    rate = _RATE.match(_text(f"{port}/rate") or "")
    state = (_text(f"{port}/state") or "").rpartition(": ")[2]
    folders = [(f"{port}/counters", ERROR_COUNTERS), (f"{port}/hw_counters", CONGESTION_COUNTERS)]
    counters = {name: _number(f"{folder}/{name}") for folder, names in folders for name in names}
    return PortReading(
        device=device.name[:64],
        port=int(port.name),
        state=state[:32] or None,
        width=int(rate[2]) if rate and rate[2] else None,
        gbit_per_s=float(rate[1]) if rate and rate[1].replace(".", "", 1).isdecimal() else None,
        pcie_width=_number(f"{device}/device/current_link_width"),
        pcie_width_most=_number(f"{device}/device/max_link_width"),
        counters={name: value for name, value in counters.items() if value is not None},
    )


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(path: str) -> str | None:
    """By descriptor and plain name: a look reads hundreds of files, and buffers and Paths cost more than they do."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.read(descriptor, _MOST_BYTES).decode(errors="replace").strip()
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _number(path: str) -> int | None:
    text = _text(path)
    return int(text) if text and text.isascii() and text.isdecimal() and len(text) < 20 else None


class MachineFollower(AskedFollower):
    """NICs and GPUs of this host. `nvml`: gives the module that GPUs are asked by, None for no GPUs."""

    def __init__(
        self,
        host: str,
        *,
        sys: Path = SYS,
        nvml: Callable[[], Pynvml | None] = load_pynvml,
        nvml_seconds: float = _NVML_SECONDS,
    ) -> None:
        super().__init__(Source(kind=SourceKind.MACHINE, name=f"counters of {host}", key=f"machine:{host}"))
        self._host = host
        self._sys = sys
        self._nvml_seconds = nvml_seconds
        self._module = nvml()
        self._nvml: Nvml | None = None
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
        if self._module is None:
            return [], ANSWERED
        asking = self._asking = self._asking or _Asking(self._read_gpus)
        asking.join(self._nvml_seconds)
        if asking.is_alive():
            return None, "nvml_slow"
        self._asking = None
        if asking.gpus is None:
            self._nvml = None  # a driver that was loaded again is found at the next look
            return None, "nvml_failed"
        return asking.gpus, ANSWERED

    def _read_gpus(self) -> list[GpuReading] | None:
        assert self._module is not None
        with suppress(self._module.NVMLError):
            self._nvml = self._nvml or Nvml(self._module)
            return self._nvml.read()
        return None


class _Asking(threading.Thread):
    """One call of NVML, which may never come back."""

    def __init__(self, ask: Callable[[], list[GpuReading] | None]) -> None:
        super().__init__(name="nvml", daemon=True)
        self._ask = ask
        self.gpus: list[GpuReading] | None = None
        self.start()

    def run(self) -> None:
        """Asks."""
        self.gpus = self._ask()

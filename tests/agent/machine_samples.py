# ruff: noqa: N802  # NVML's names
"""A tree of /sys with RDMA NICs, and a stand-in for the module pynvml.

Names, values and forms are those of a node with ConnectX-7 in an InfiniBand fabric (Linux 5.15, mlx5): `state` is "4:
ACTIVE", `rate` is "400 Gb/sec (4X NDR)", the NIC's PCI device is behind the link `device`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from ncclscope_agent.node.nvml import Pynvml
from ncclscope_agent.sources.machine import CONGESTION_COUNTERS, ERROR_COUNTERS

ACTIVE, DOWN = "4: ACTIVE", "1: DOWN"


def write_nic(sys: Path, nic: str, number: int = 0, *, state: str = ACTIVE, rate: str = "400 Gb/sec (4X NDR)") -> Path:
    """One NIC with one port; the folder of the port."""
    pci = sys / f"devices/pci0000:{number:02x}/0000:{number:02x}:00.0"
    port = pci / f"infiniband/{nic}/ports/1"
    for folder, names in ((port / "counters", ERROR_COUNTERS), (port / "hw_counters", CONGESTION_COUNTERS)):
        folder.mkdir(parents=True)
        for name in names:
            (folder / name).write_text("0\n")
    (port / "counters/port_xmit_wait").write_text("4711\n")
    (port / "state").write_text(f"{state}\n")
    (port / "phys_state").write_text("5: LinkUp\n")
    (port / "rate").write_text(f"{rate}\n")
    for name, text in (
        ("current_link_width", "16"),
        ("max_link_width", "16"),
        ("current_link_speed", "32.0 GT/s PCIe"),
    ):
        (pci / name).write_text(f"{text}\n")
    (pci / f"infiniband/{nic}/device").symlink_to(pci)
    (sys / "class/infiniband").mkdir(parents=True, exist_ok=True)
    (sys / f"class/infiniband/{nic}").symlink_to(pci / f"infiniband/{nic}")
    return port


def as_pynvml(nvml: FakeNvml) -> Pynvml:
    """The stand-in, for who asks for the module."""
    return cast(Pynvml, nvml)


class NvmlError(Exception):
    """Stands for pynvml.NVMLError."""


class FakeGpu:
    """One GPU; what is None is not supported."""

    def __init__(self, bus: str = "00000000:1B:00.0", links: int = 4) -> None:
        self.bus = bus
        self.throttle = 1
        self.width = 16
        self.links: list[int] = [1] * links
        self.ecc: int | None = 0
        self.clock = 1980


class FakeNvml:
    """The functions of pynvml that are used; `is_failing` and `holds` are what a driver in trouble does."""

    NVMLError: type[Exception] = NvmlError

    def __init__(self, gpus: Sequence[FakeGpu]) -> None:
        self.gpus = list(gpus)
        self.is_failing = False
        self.holds: threading.Event | None = None
        """Calls wait for it."""
        self.xids: list[tuple[FakeGpu, int]] = []
        self.begun = 0

    def nvmlInit(self) -> None:
        """Counts how often."""
        self.begun += 1

    def nvmlDeviceGetCount(self) -> int:
        """Waits or fails like a driver in trouble."""
        if self.holds is not None:
            self.holds.wait(60)
        if self.is_failing:
            raise NvmlError("GPU is lost")
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        """The GPU is its handle."""
        return self.gpus[index]

    def nvmlDeviceGetIndex(self, gpu: FakeGpu) -> int:
        """In the list."""
        return self.gpus.index(gpu)

    def nvmlDeviceGetPciInfo(self, gpu: FakeGpu) -> SimpleNamespace:
        """Only the address."""
        return SimpleNamespace(busId=gpu.bus)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: FakeGpu) -> int:
        """Bits."""
        return gpu.throttle

    def nvmlDeviceGetClockInfo(self, gpu: FakeGpu, _: int) -> int:
        """MHz."""
        return gpu.clock

    def nvmlDeviceGetMaxClockInfo(self, _: FakeGpu, __: int) -> int:
        """MHz of an H100."""
        return 1980

    def nvmlDeviceGetCurrPcieLinkWidth(self, gpu: FakeGpu) -> int:
        """Lanes."""
        return gpu.width

    def nvmlDeviceGetMaxPcieLinkWidth(self, _: FakeGpu) -> int:
        """Lanes."""
        return 16

    def nvmlDeviceGetNvLinkState(self, gpu: FakeGpu, link: int) -> int:
        """1: up."""
        if link >= len(gpu.links):
            raise NvmlError("Invalid Argument")
        return gpu.links[link]

    def nvmlDeviceGetTotalEccErrors(self, gpu: FakeGpu, _: int, __: int) -> int:
        """Uncorrected ones."""
        if gpu.ecc is None:
            raise NvmlError("Not Supported")
        return gpu.ecc

    def nvmlEventSetCreate(self) -> str:
        """One set."""
        return "events"

    def nvmlDeviceRegisterEvents(self, gpu: FakeGpu, _: int, __: str) -> None:
        """All GPUs have events."""

    def nvmlEventSetWait_v2(self, _: str, __: int) -> SimpleNamespace:
        """The next Xid."""
        if not self.xids:
            raise NvmlError("Timeout")
        gpu, xid = self.xids.pop(0)
        return SimpleNamespace(device=gpu, eventData=xid)

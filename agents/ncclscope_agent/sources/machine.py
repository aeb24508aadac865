"""From readings of a machine's counters to conditions that begin and end.

Scope: ports of RDMA NICs (state, width, rate, errors, congestion notifications, the NIC's PCIe width) and GPUs
(throttle reasons, PCIe width, NVLinks, ECC, Xid). A width or rate is held against the most that the device says, else
against the most that was read of it; a GPU's PCIe speed is left out, since it changes with its power state.
`node/machine_port.py` reads them.

*Source:* Linux `Documentation/ABI/stable/sysfs-class-infiniband`, `Documentation/ABI/testing/sysfs-bus-pci`; NVML
`nvml.h`.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from ncclscope_wire.facts import Fact, MachineCondition

ERROR_COUNTERS: Final = (
    "symbol_error",
    "link_error_recovery",
    "link_downed",
    "port_rcv_errors",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
    "port_xmit_discards",
)
"""Of a port's folder `counters`. port_xmit_wait is left out: it grows in every healthy network under load."""
CONGESTION_COUNTERS: Final = ("np_cnp_sent", "rp_cnp_handled")
"""Of `hw_counters`: congestion notifications of RoCE."""

_THROTTLES: Final[Mapping[int, str]] = MappingProxyType(
    {0x04: "power", 0x08: "hardware slowdown", 0x20: "heat", 0x40: "heat (hardware)", 0x80: "power brake"}
)
"""nvmlClocksEventReason*; idle, chosen clocks and display settings are no throttling."""
_THROTTLED_LOOKS: Final = 3
"""In a row: the power limit is touched for moments by every busy GPU."""
_ERRORS_LAST_NS: Final = 60_000_000_000
"""A condition by a counter ends when the counter has stood still for so long."""
_CONGESTED_PER_S: Final = 100
_SECOND_NS: Final = 1_000_000_000
_MOST_DEVICES: Final = 64
_MOST_XIDS: Final = 16
_GPU: Final = "GPU "


@dataclass(frozen=True, slots=True, kw_only=True)
class PortReading:
    """One port of an RDMA NIC at one look; None: not readable."""

    device: str
    port: int
    state: str | None = None
    """ "ACTIVE", "DOWN", ..."""
    width: int | None = None
    """Lanes."""
    gbit_per_s: float | None = None
    pcie_width: int | None = None
    pcie_width_most: int | None = None
    """That the NIC is capable of."""
    counters: Mapping[str, int] = field(default_factory=dict[str, int])
    """Since the driver was loaded; those of `ERROR_COUNTERS` and `CONGESTION_COUNTERS` that the NIC has."""

    @property
    def name(self) -> str:
        """ "mlx5_2 port 1"."""
        return f"{self.device} port {self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """One GPU at one look; None: the GPU or its driver does not say."""

    index: int
    """NVML's."""
    bus_id: int | None = None
    """As NCCL writes it: the digits of the PCI address as one hexadecimal number."""
    throttle: int | None = None
    """Bits of nvmlClocksEventReasons."""
    sm_mhz: int | None = None
    sm_mhz_most: int | None = None
    pcie_width: int | None = None
    pcie_width_most: int | None = None
    nvlinks: int | None = None
    """That are up."""
    ecc_uncorrected: int | None = None
    """Since the driver was loaded."""
    xids: tuple[int, ...] = ()
    """Since the last look."""

    @property
    def name(self) -> str:
        """ "GPU 3"."""
        return f"{_GPU}{self.index}"


def bus_id_of(address: str) -> int | None:
    """A PCI address as one number; None if it is none. *Source:* NCCL `src/misc/utils.cc:busIdToInt64`."""
    digits = re.sub(r"[.:]", "", address)
    return int(digits, 16) if re.fullmatch(r"[0-9a-fA-F]{4,16}", digits) else None


@dataclass(frozen=True, slots=True)
class _Seen:
    """A condition that holds at a look. `identity`: what must change for it to be said again."""

    text: str
    is_fault: bool
    identity: Hashable
    bus_id: int | None = None


_Key = tuple[str, str]
"""Device, and kind of condition."""


class MachineWatch:
    """Conditions of one host, look after look."""

    def __init__(self) -> None:
        self._holding: dict[_Key, _Seen] = {}
        self._most: dict[_Key, float] = {}
        """The most that was read."""
        self._counters: dict[_Key, int] = {}
        self._grown: dict[_Key, tuple[int, int]] = {}
        """Of a counter that grows: by how much so far, and when last."""
        self._throttled: dict[str, int] = {}
        """Looks in a row."""
        self._last_ns: int | None = None
        self._facts = 0

    def ingest_look(
        self, ports: Sequence[PortReading], gpus: Sequence[GpuReading] | None, host: str, now_ns: int
    ) -> list[Fact]:
        """Conditions that begin, change or end with this look (the host's wall clock). `gpus`: None if they did not
        answer, and are as they were."""
        holding: dict[_Key, _Seen] = {}
        for port in ports[:_MOST_DEVICES]:
            holding.update({(port.name, kind): seen for kind, seen in self._of_port(port, now_ns)})
        if gpus is None:
            holding.update({key: seen for key, seen in self._holding.items() if key[0].startswith(_GPU)})
        for gpu in (gpus or ())[:_MOST_DEVICES]:
            holding.update({(gpu.name, kind): seen for kind, seen in self._of_gpu(gpu)})
        self._last_ns = now_ns
        before, self._holding = self._holding, holding
        changed = {
            key: (seen, False)
            for key, seen in holding.items()
            if key not in before or before[key].identity != seen.identity
        }
        over = {key: (seen, True) for key, seen in before.items() if key not in holding}
        return [
            self._fact(key, seen, host, now_ns, is_over=is_over) for key, (seen, is_over) in {**changed, **over}.items()
        ]

    def _fact(self, key: _Key, seen: _Seen, host: str, now_ns: int, *, is_over: bool) -> Fact:
        self._facts += 1
        return MachineCondition(
            line=self._facts,
            host=host,
            logged_at_ns=now_ns,
            device=key[0][:128],
            what=key[1],
            text=seen.text,
            gpu_bus_id=seen.bus_id,
            is_fault=seen.is_fault,
            is_over=is_over,
        )

    def _of_port(self, port: PortReading, now_ns: int) -> Iterator[tuple[str, _Seen]]:
        name = port.name
        was_active = self._peak(name, "active", float(port.state == "ACTIVE")) > 0
        if port.state not in (None, "ACTIVE"):
            if was_active:  # a port without a cable is down from the start
                yield "state", _Seen(f"is {port.state}", is_fault=True, identity=port.state)
            return
        yield from self._narrow(name, "width", port.width, None, "runs at {}x instead of {}x")
        yield from self._narrow(name, "rate", port.gbit_per_s, None, "runs at {:g} instead of {:g} Gbit/s")
        pcie = "has a PCIe link of x{} instead of x{}"
        yield from self._narrow(name, "pcie_width", port.pcie_width, port.pcie_width_most, pcie)
        for counter in ERROR_COUNTERS:
            if (grown := self._growth(name, counter, port.counters.get(counter), now_ns)) is not None:
                text = f"counts {counter} ({_at_least(grown)} since this began)"
                yield counter, _Seen(text, is_fault=False, identity=_at_least(grown))
        for counter in CONGESTION_COUNTERS:
            least = _CONGESTED_PER_S * (now_ns - (self._last_ns or now_ns)) // _SECOND_NS
            if (grown := self._growth(name, counter, port.counters.get(counter), now_ns, least)) is not None:
                text = f"is congested ({counter}: {_at_least(grown)} since this began)"
                yield counter, _Seen(text, is_fault=False, identity=_at_least(grown))

    def _of_gpu(self, gpu: GpuReading) -> Iterator[tuple[str, _Seen]]:
        reasons = tuple(reason for bit, reason in _THROTTLES.items() if (gpu.throttle or 0) & bit)
        self._throttled[gpu.name] = self._throttled.get(gpu.name, 0) + 1 if reasons else 0
        if self._throttled[gpu.name] >= _THROTTLED_LOOKS:
            clock = f" ({gpu.sm_mhz:,} of {gpu.sm_mhz_most:,} MHz)" if gpu.sm_mhz and gpu.sm_mhz_most else ""
            yield "throttle", _Seen(f"throttles: {', '.join(reasons)}{clock}", False, reasons, gpu.bus_id)
        for kind, seen in (
            *self._narrow(
                gpu.name, "pcie_width", gpu.pcie_width, gpu.pcie_width_most, "has a PCIe link of x{} instead of x{}"
            ),
            *self._narrow(gpu.name, "nvlinks", gpu.nvlinks, None, "has {} of {} NVLinks"),
        ):
            yield kind, _Seen(seen.text, seen.is_fault, seen.identity, gpu.bus_id)
        if gpu.ecc_uncorrected is not None:
            first = self._counters.setdefault((gpu.name, "ecc"), gpu.ecc_uncorrected)
            if (amount := gpu.ecc_uncorrected - first) > 0:
                yield (
                    "ecc",
                    _Seen(f"had {_at_least(amount)} uncorrected ECC errors", True, _at_least(amount), gpu.bus_id),
                )
        for xid in dict.fromkeys(gpu.xids[:_MOST_XIDS]):
            self._most[gpu.name, f"Xid {xid}"] = 1
        for device, kind in self._most:
            if device == gpu.name and kind.startswith("Xid "):
                yield kind, _Seen(f"reported {kind}", True, kind, gpu.bus_id)

    def _narrow(
        self, name: str, kind: str, value: float | None, capable: int | None, text: str
    ) -> Iterator[tuple[str, _Seen]]:
        """The condition that there is less than there could be; a fault if there was more while this watch ran."""
        if value is None or value <= 0:
            return
        read = self._peak(name, kind, value)
        most = max(read, capable or 0)
        if value < most:
            yield kind, _Seen(text.format(value, most if most != int(most) else int(most)), value < read, (value, most))

    def _peak(self, name: str, kind: str, value: float) -> float:
        self._most[name, kind] = max(value, self._most.get((name, kind), value))
        return self._most[name, kind]

    def _growth(self, name: str, counter: str, value: int | None, now_ns: int, least: int = 0) -> int | None:
        """By how much a counter has grown since it began to, if it still does. One that was reset has not grown."""
        if value is None:
            return None
        key = name, counter
        step = value - self._counters.get(key, value)
        self._counters[key] = value
        if step > least:
            self._grown[key] = self._grown.get(key, (0, now_ns))[0] + step, now_ns
        amount, since_ns = self._grown.get(key, (0, now_ns))
        if now_ns - since_ns > _ERRORS_LAST_NS:
            del self._grown[key]
            return None
        return amount or None


def _at_least(amount: int) -> str:
    """A power of ten, so that what grows is not said at each look."""
    return f"at least {10 ** (len(str(amount)) - 1):,}"

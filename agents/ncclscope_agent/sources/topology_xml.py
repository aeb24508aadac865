"""Reads a topology file: what NCCL_TOPO_DUMP_FILE writes and NCCL_TOPO_FILE reads.

The file says what is plugged in where (`link_width="16" link_speed="16.0 GT/s PCIe"`); how fast that is, NCCL
says in its source. The same constants are used here, those of NCCL 2.30: between the sockets of some machines
older versions assume less (AMD from Zen 3 on: 16 GB/s). A block in the log is what the running version says, and
goes before.

*Source:* NCCL `src/graph/topo.cc:ncclTopoGetSystemFromXml` and what it calls, `src/graph/topo.h`.
"""

from __future__ import annotations

import re
from itertools import permutations
from typing import Final
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from ncclscope_wire.errors import FormatError
from ncclscope_wire.topology import LinkKind, NodeKind, TopologyLink, TopologyNode, TopologyOrigin, TopologySeen

MAX_BYTES: Final = 4 << 20
"""NCCL itself takes at most 256 elements per machine; a larger file is none of its own."""
_MAX_DEPTH: Final = 64
_MAX_MACHINES: Final = 256
_MAX_CPUS: Final = 256
"""NUMA nodes of one machine; each is linked to each other."""

_LANE_GBPS: Final = {"2.5": 1.5, "5": 3.0, "5.0": 3.0, "8": 6.0, "8.0": 6.0, "16": 12.0, "16.0": 12.0}
_LANE_GBPS_LATER: Final = {"32": 24.0, "32.0": 24.0, "64.0": 48.0}
_OTHER_LANE_GBPS: Final = 6.0
"""Gb/s of payload per lane by GT/s; any other text counts as generation 3."""
_ALL_LANES: Final = 16
_LOCAL_GBYTES: Final = 5000.0
_NVLINK_GBYTES: Final = ((100, 40.1), (90, 20.6), (87, 20.0), (86, 12.0), (70, 20.0), (60, 18.0))
"""GB/s of one NVLink by compute capability, newest first."""
_OTHER_NVLINK_GBYTES: Final = 20.0
_DEFAULT_MBPS: Final = 10_000
"""Speed of a network card that names none or -1."""
_NOT_BRIDGES: Final = ("0x0680", "0x02", "0x03")
"""PCI classes of NVSwitches, network cards and GPUs, which are no bridges even if nothing is said of them."""
_BUS_ID: Final = re.compile(r"([0-9a-fA-F]{1,8}):([0-9a-fA-F]{1,2}):([0-9a-fA-F]{1,2})\.([0-9a-fA-F])")
_NIC_FUNCTIONS: Final = 0xF
"""The functions of a card are ports of one NIC."""

_Key = tuple[NodeKind, int, int]


def read_topology_xml(data: bytes, host: str | None = None) -> TopologySeen:
    """The topology of one file; `host` is where it was written, if known: the file does not say.

    Raises:
        FormatError: it is not a topology file, or something in it cannot be read; says what.
    """
    if len(data) > MAX_BYTES:
        raise FormatError(f"a topology file of {len(data)} bytes is larger than any that NCCL writes ({MAX_BYTES})")
    if b"<!" in data.replace(b"<!--", b""):
        raise FormatError("a topology file has no document type or entities, this one does")
    try:
        root = ElementTree.fromstring(data)
    except (ElementTree.ParseError, ValueError) as error:
        raise FormatError(f"a topology file that is no XML: {error}") from error
    if root.tag != "system":
        raise FormatError(f"a topology file begins with <system>, this one with <{str(root.tag)[:40]}>")
    reading = _Reading()
    for cpu in root.iterfind("cpu"):
        reading.add_cpu(cpu)
    reading.connect()
    if not any(kind is NodeKind.GPU for kind, _, _ in reading.nodes):
        raise FormatError("a topology file without a GPU that has a rank")
    return reading.seen(host)


class _Reading:
    """One file on its way to nodes and links."""

    def __init__(self) -> None:
        self.nodes: dict[_Key, TopologyNode] = {}
        self._links: dict[tuple[_Key, _Key, LinkKind], float] = {}
        """GB/s; NVLinks between the same two add up."""
        self._hosts: dict[str, int] = {}
        self._cpus: dict[int, list[tuple[_Key, float]]] = {}
        """By machine each CPU, and GB/s between its sockets."""
        self._gpus: list[tuple[_Key, _Key, Element]] = []
        """Each GPU, its CPU and its element."""
        self._switches: list[tuple[int, Element]] = []
        self._merged: dict[_Key, _Key] = {}
        """Lower halves of a PCI switch that shows itself as two, and the half that stands for both."""

    def seen(self, host: str | None) -> TopologySeen:
        """The record of all that was read."""
        index = {key: number for number, key in enumerate(self.nodes)}
        return TopologySeen(
            origin=TopologyOrigin.XML,
            host=host,
            pid=None,
            tid=None,
            line=0,
            nodes=tuple(self.nodes.values()),
            links=tuple(
                TopologyLink(start=index[start], end=index[end], kind=kind, bytes_per_second=round(rate * 1e9))
                for (start, end, kind), rate in self._links.items()
            ),
        )

    def add_cpu(self, element: Element) -> None:
        """One NUMA node and all below it."""
        machine = element.get("host_hash", "")
        system = self._hosts.setdefault(machine, len(self._hosts))
        if system >= _MAX_MACHINES:
            raise FormatError(f"a topology file has more than {_MAX_MACHINES} machines")
        cpu = self._add(NodeKind.CPU, system, _number(element, "numaid") & (1 << 56) - 1)
        cpus = self._cpus.setdefault(system, [])
        if len(cpus) == _MAX_CPUS:
            raise FormatError(f"a topology file has a machine of more than {_MAX_CPUS} NUMA nodes")
        cpus.append((cpu, _between_sockets(element)))
        cards = 0
        for child in element:
            if child.tag == "pci":
                self._add_pci(child, cpu, cpu, 0)
            elif child.tag == "nic":
                nic = self._add(NodeKind.NIC, system, (cpu[2] & 0xFF) << 48 | cards)
                cards += 1
                self._connect(cpu, nic, LinkKind.PCI, _LOCAL_GBYTES)
                self._add_ports(child, nic)

    def connect(self) -> None:
        """The links that may point forward in the file: NVLink, chip to chip, and between sockets."""
        for gpu, cpu, element in self._gpus:
            for child in element:
                if child.tag == "nvlink":
                    self._add_nvlink(gpu, cpu, element, child)
                elif child.tag == "c2c":
                    self._connect(gpu, cpu, LinkKind.C2C, _number(child, "bw") * _number(child, "count") / 1000)
        for system, element in self._switches:
            self._add_pci_links(system, element)
        for cpus in self._cpus.values():
            for (cpu, rate), (other, _) in permutations(cpus, 2):
                if other != cpu:
                    self._links[cpu, other, LinkKind.SYS] = rate

    def _add(
        self, kind: NodeKind, system: int, local: int, *, rank: int | None = None, speed: float | None = None
    ) -> _Key:
        key = (kind, system, local)
        if key not in self.nodes:
            self.nodes[key] = TopologyNode(
                kind=kind,
                system=system,
                local=local,
                rank=rank,
                bytes_per_second=None if speed is None else round(speed * 1e9),
            )
        return key

    def _connect(self, one: _Key, other: _Key, kind: LinkKind, rate: float) -> None:
        self._links[one, other, kind] = self._links[other, one, kind] = rate

    def _add_pci(self, element: Element, parent: _Key, cpu: _Key, depth: int) -> None:
        """A PCI bridge, GPU or network card."""
        if depth > _MAX_DEPTH:
            raise FormatError(f"a topology file nests PCI bridges more than {_MAX_DEPTH} deep")
        system, bus_id, rate = cpu[1], _bus_id(element, "busid"), _pci_gbytes(element)
        gpu = element.find("gpu")
        if gpu is not None:
            self._add_gpu(gpu, system, bus_id, parent, cpu, rate)
        elif (card := element.find("nic")) is not None:
            nic = self._add(NodeKind.NIC, system, bus_id & ~_NIC_FUNCTIONS)
            if (parent, nic, LinkKind.PCI) not in self._links:
                self._connect(parent, nic, LinkKind.PCI, rate)
            self._add_ports(card, nic)
        elif not element.get("class", "").startswith(_NOT_BRIDGES):
            self._add_bridge(element, bus_id, parent, cpu, rate, depth)

    def _add_gpu(self, element: Element, system: int, bus_id: int, parent: _Key, cpu: _Key, rate: float) -> None:
        if element.get("rank") is None:
            return  # not of the communicator for which the file was written
        rank = _number(element, "rank")
        gpu = self._add(NodeKind.GPU, system, bus_id, rank=rank if rank >= 0 else None)
        self._connect(parent, gpu, LinkKind.PCI, rate)
        self._gpus.append((gpu, cpu, element))

    def _add_bridge(self, element: Element, bus_id: int, parent: _Key, cpu: _Key, rate: float, depth: int) -> None:
        if _is_lower_half(element, self.nodes[parent].text):
            bridge = parent
        else:
            bridge = self._add(NodeKind.PCI, cpu[1], bus_id)
            self.nodes[bridge] = TopologyNode(kind=NodeKind.PCI, system=cpu[1], local=bus_id, text=_device(element))
            self._connect(parent, bridge, LinkKind.PCI, rate)
        self._merged[NodeKind.PCI, cpu[1], bus_id] = bridge
        self._switches.append((cpu[1], element))
        for child in element.iterfind("pci"):
            self._add_pci(child, bridge, cpu, depth + 1)

    def _add_ports(self, card: Element, nic: _Key) -> None:
        for port in card.iterfind("net"):
            if port.get("dev") is None or port.get("net") == "0":
                continue  # a port that was fused into another
            speed = _number(port, "speed", default=0)
            gbytes = (speed if speed > 0 else _DEFAULT_MBPS) / 8000
            net = self._add(NodeKind.NET, nic[1], _number(port, "dev") & (1 << 56) - 1, speed=gbytes)
            self._connect(nic, net, LinkKind.NET, gbytes)

    def _add_nvlink(self, gpu: _Key, cpu: _Key, element: Element, nvlink: Element) -> None:
        rate = _number(nvlink, "count") * _nvlink_gbytes(_number(element, "sm"))
        target_class = nvlink.get("tclass", "")
        if target_class.startswith("0x03"):
            other = (NodeKind.GPU, gpu[1], _bus_id(nvlink, "target"))
            if other in self.nodes:
                self._links[gpu, other, LinkKind.NVL] = self._links.get((gpu, other, LinkKind.NVL), 0.0) + rate
            return
        other = cpu if target_class == "0x068001" else self._add(NodeKind.NVS, 0, 0)
        self._connect(gpu, other, LinkKind.NVL, self._links.get((gpu, other, LinkKind.NVL), 0.0) + rate)

    def _add_pci_links(self, system: int, element: Element) -> None:
        here = self._merged[NodeKind.PCI, system, _bus_id(element, "busid")]
        for link in element.iterfind("pcilink"):
            there = self._merged.get((NodeKind.PCI, system, _bus_id(link, "target")))
            if there is not None and there != here:
                self._links[here, there, LinkKind.LOC] = _LOCAL_GBYTES


def _number(element: Element, name: str, default: int | None = None) -> int:
    text = element.get(name)
    if text is None and default is not None:
        return default
    try:
        number = int(text or "", 0)
    except ValueError:
        raise FormatError(f"a topology file: <{element.tag}> has {name}={text!r}, which is no number") from None
    if not -(2**31) <= number < 2**31:
        raise FormatError(f"a topology file: <{element.tag}> has {name}={number}, which is out of range")
    return number


def _bus_id(element: Element, name: str) -> int:
    found = _BUS_ID.fullmatch(element.get(name, ""))
    if found is None:
        raise FormatError(f"a topology file: <{element.tag}> has {name}={element.get(name)!r}, which is no bus id")
    domain, bus, device, function = (int(part, 16) for part in found.groups())
    return domain << 20 | bus << 12 | device << 4 | function


def _pci_gbytes(element: Element) -> float:
    width = _number(element, "link_width", default=0) or _ALL_LANES
    speed = element.get("link_speed", "").removesuffix(" PCIe").removesuffix(" GT/s")
    return width * (_LANE_GBPS | _LANE_GBPS_LATER).get(speed, _OTHER_LANE_GBPS) / 8


def _nvlink_gbytes(capability: int) -> float:
    return next((rate for lowest, rate in _NVLINK_GBYTES if capability >= lowest), _OTHER_NVLINK_GBYTES)


def _between_sockets(cpu: Element) -> float:
    """GB/s that NCCL assumes between two sockets of this kind."""
    arch = cpu.get("arch", "")
    if arch != "x86_64":
        return {"ppc64": 32.0, "arm64": 6.0}.get(arch, _LOCAL_GBYTES)
    match cpu.get("vendor"):
        case "GenuineIntel":
            return _between_intel(_number(cpu, "familyid"), _number(cpu, "modelid"))
        case "AuthenticAMD":
            return {0xBF: 32.0, 26: 32.0, 0xAF: 24.0, 25: 24.0}.get(_number(cpu, "familyid"), 16.0)
        case "CentaurHauls" | "  Shanghai  ":
            return 9.0 if (_number(cpu, "familyid"), _number(cpu, "modelid")) == (7, 0x5B) else 6.0
        case _:
            return _LOCAL_GBYTES


def _between_intel(family: int, model: int) -> float:
    newest_first = ((0xCF, 40.0), (0x8F, 22.0), (0x55, 10.0))
    if family != 6:
        return 6.0
    if model in (0xAD, 0xAE, 0xAF):
        return 40.0
    return next((rate for lowest, rate in newest_first if model >= lowest), 6.0)


def _device(element: Element) -> str:
    """The four identifiers of a PCI device in one number, as a system block prints it."""
    parts = [element.get(name, "0x0") for name in ("vendor", "device", "subsystem_vendor", "subsystem_device")]
    try:
        numbers = [int(part, 0) & 0xFFFF for part in parts]
    except ValueError:
        return ""
    return f"{numbers[0] << 48 | numbers[1] << 32 | numbers[2] << 16 | numbers[3]:x}"


def _is_lower_half(element: Element, above: str) -> bool:
    """Broadcom switches show themselves as two levels, and NCCL takes them as one.

    *Source:* NCCL `src/graph/topo.cc:ncclTopoFlattenBcmSwitches`.
    """
    upper, lower = _broadcom(above, 0), _broadcom(_device(element), 1)
    return upper != 0 and upper == lower


def _broadcom(device: str, level: int) -> int:
    number = int(device or "0", 16) & 0xFFFFFFFFFFFFF000
    if number == 0x1000C0101000A000:
        return 4
    return 5 if number == 0x1000C03010000000 | level * 0x1000 else 0

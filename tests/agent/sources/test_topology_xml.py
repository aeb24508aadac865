"""Topology files: links and rates as NCCL would give them, and files that are none."""

from __future__ import annotations

import pytest

from ncclscope_agent.files.recognise import FileKind, recognise
from ncclscope_agent.sources.topology_xml import MAX_BYTES, read_topology_xml
from ncclscope_wire.errors import FormatError
from ncclscope_wire.topology import TopologyOrigin, TopologySeen

_GPU = '<pci busid="0000:{bus}:00.0" class="0x030200" link_speed="{speed}" link_width="16">{inside}</pci>'
_BRIDGE = 'vendor="0x1000" device="0xc010" subsystem_vendor="0x1000" subsystem_device="0xa096"'


def _gpu(bus: str, inside: str, speed: str = "16.0 GT/s PCIe") -> str:
    return _GPU.format(bus=bus, speed=speed, inside=inside)


def _cpu(
    inside: str, numa: int = 0, words: str = 'arch="x86_64" vendor="AuthenticAMD" familyid="25" modelid="1"'
) -> str:
    return f'<cpu numaid="{numa}" affinity="ff" {words}>{inside}</cpu>'


def _read(*cpus: str) -> TopologySeen:
    return read_topology_xml(f'<system version="1">\n{"".join(cpus)}</system>'.encode(), "node01")


def _links(seen: TopologySeen) -> dict[str, float]:
    names = [f"{node.kind}/{node.local:x}" for node in seen.nodes]
    return {f"{names[link.start]} {link.kind} {names[link.end]}": link.bytes_per_second / 1e9 for link in seen.links}


def test_bridges_gpus_and_cards_get_the_rates_that_nccl_gives_them() -> None:
    card = (
        '<pci busid="0000:05:00.0" class="0x020000" link_speed="8.0 GT/s PCIe" link_width="16"><nic>'
        '<net name="mlx5_0" dev="0" speed="200000" port="1" gdr="1"/></nic></pci>'
    )
    switch = f'<pci busid="0000:02:00.0" class="0x060400" link_speed="16.0 GT/s PCIe" link_width="16">{card}'
    switch += _gpu(
        "03", '<gpu dev="0" sm="80" rank="7"><nvlink target="0000:00:00.0" count="12" tclass="0x068000"/></gpu>'
    )
    seen = _read(_cpu(switch + "</pci>"), _cpu("", 1))
    assert _links(seen) == {
        "CPU/0 PCI PCI/2000": 24, "PCI/2000 PCI CPU/0": 24,
        "PCI/2000 PCI NIC/5000": 12, "NIC/5000 PCI PCI/2000": 12,
        "NIC/5000 NET NET/0": 25, "NET/0 NET NIC/5000": 25,
        "PCI/2000 PCI GPU/3000": 24, "GPU/3000 PCI PCI/2000": 24,
        "GPU/3000 NVL NVS/0": 240, "NVS/0 NVL GPU/3000": 240,
        "CPU/0 SYS CPU/1": 24, "CPU/1 SYS CPU/0": 24,
    }  # fmt: skip
    assert [node.rank for node in seen.nodes if node.kind == "GPU"] == [7]
    assert (seen.origin, seen.host) == (TopologyOrigin.XML, "node01")


def test_an_nvlink_is_as_fast_as_the_end_that_names_it_says() -> None:
    one = _gpu("03", '<gpu dev="0" sm="90" rank="0"><nvlink target="0000:04:00.0" count="6" tclass="0x030200"/></gpu>')
    two = _gpu("04", '<gpu dev="1" sm="90" rank="1"><nvlink target="0000:03:00.0" count="1" tclass="0x030200"/></gpu>')
    links = _links(_read(_cpu(one + two)))
    assert links["GPU/3000 NVL GPU/4000"] == pytest.approx(123.6)
    assert links["GPU/4000 NVL GPU/3000"] == pytest.approx(20.6)


def test_a_gpu_without_a_rank_is_not_of_the_communicator() -> None:
    seen = _read(_cpu(_gpu("03", '<gpu dev="0" sm="80" rank="0"/>') + _gpu("04", '<gpu dev="1" sm="80"/>')))
    assert [node.local for node in seen.nodes if node.kind == "GPU"] == [0x3000]


def test_a_broadcom_switch_of_two_levels_is_one() -> None:
    below = f'<pci busid="0000:02:00.0" class="0x060400" link_speed="16.0 GT/s PCIe" link_width="16" {_BRIDGE}>'
    above = f'<pci busid="0000:01:00.0" class="0x060400" link_speed="16.0 GT/s PCIe" link_width="16" {_BRIDGE}>'
    seen = _read(_cpu(above + below + _gpu("03", '<gpu dev="0" sm="80" rank="0"/>') + "</pci></pci>"))
    assert [node.local for node in seen.nodes if node.kind == "PCI"] == [0x1000]
    assert "PCI/1000 PCI GPU/3000" in _links(seen)


@pytest.mark.parametrize(
    ("words", "rate"),
    [
        ('arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="79"', 6),
        ('arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="106"', 10),
        ('arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143"', 22),
        ('arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="207"', 40),
        ('arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="173"', 40),
        ('arch="x86_64" vendor="AuthenticAMD" familyid="23" modelid="49"', 16),
        ('arch="x86_64" vendor="AuthenticAMD" familyid="26" modelid="2"', 32),
        ('arch="ppc64"', 32),
        ('arch="arm64"', 6),
    ],
)
def test_sockets_are_as_far_apart_as_nccl_says(words: str, rate: float) -> None:
    seen = _read(_cpu(_gpu("03", '<gpu dev="0" sm="80" rank="0"/>'), 0, words), _cpu("", 1, words))
    assert _links(seen)["CPU/0 SYS CPU/1"] == rate


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"<graphs version='1'/>", "begins with <system>"),
        (b"<system version='1'>", "no XML"),
        (b"<!DOCTYPE s [<!ENTITY a 'b'>]><system/>", "document type"),
        (b"<system version='1'><cpu numaid='0' arch='arm64'/></system>", "without a GPU"),
        (b"<system version='1'><cpu numaid='x' arch='arm64'/></system>", "no number"),
        (b"<system version='1'><cpu numaid='0' arch='arm64'><pci busid='1:2'/></cpu></system>", "no bus id"),
        (b" " * (MAX_BYTES + 1), "larger than"),
    ],
)
def test_what_is_no_topology_file_is_refused_with_a_reason(data: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        read_topology_xml(data)


def test_bridges_nested_without_end_are_refused() -> None:
    nested = '<pci busid="0000:01:00.0" class="0x060400">' * 200 + "</pci>" * 200
    with pytest.raises(FormatError, match="deep"):
        _read(_cpu(nested))


def test_a_topology_file_is_recognised_and_another_xml_is_not() -> None:
    whole = f'<system version="1">\n  {_cpu("")}</system>'.encode()
    assert recognise(whole, "any.name") is FileKind.NCCL_TOPOLOGY
    assert recognise(b'<?xml version="1.0"?>\n' + whole, "any.name") is FileKind.NCCL_TOPOLOGY
    assert recognise(b'<graphs version="1"><graph id="0"/></graphs>', "graph.xml") is FileKind.UNKNOWN

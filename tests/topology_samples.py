"""System blocks for tests, as NCCL prints them, and how to read them."""

from __future__ import annotations

from collections.abc import Iterable

from ncclscope_agent.sources.nccl_log.prefix import Writer
from ncclscope_agent.sources.nccl_log.topology_lines import TopologyLines
from ncclscope_wire.topology import TopologySeen

WRITER = Writer(host="node01", pid=100, tid=101, device=0)
END = "=========================================="

TWO_PAIRS = """\
=== System : maxBw 80.0 totalBw 80.0 ===
CPU/0-0 (1/2/-1)
+ PCI[24.0] - GPU/0-1000 (0)
              + NVL[80.0] - GPU/0-25000
+ PCI[24.0] - GPU/0-25000 (1)
              + NVL[80.0] - GPU/0-1000
+ SYS[16.0] - CPU/0-1
CPU/0-1 (1/2/-1)
+ PCI[24.0] - GPU/0-c1000 (2)
              + NVL[80.0] - GPU/0-e1000
+ PCI[24.0] - GPU/0-e1000 (3)
              + NVL[80.0] - GPU/0-c1000
+ SYS[16.0] - CPU/0-0
+ PCI[12.0] - NIC/0-c2000
              + NET[12.5] - NET/0-0 (0/7b6a/1/12.500000)
+ PCI[12.0] - NIC/0-c3000
              + NET[12.5] - NET/0-1 (0/7b6b/1/12.500000)
==========================================
"""
"""Four A100, two pairs with NVLink, both network cards on the second socket."""

SWITCHED = """\
=== System : maxBw 48.0 totalBw 370.8 ===
CPU/0-0 (1/1/2)
+ PCI[48.0] - PCI/0-18000 (1000c0301000100b)
              + PCI[48.0] - GPU/0-1b000 (0)
                            + NVL[370.8] - NVS/0-0
              + PCI[48.0] - NIC/0-1a000
                            + NET[50.0] - NET/0-0 (0/1a/1/50.000000)
+ PCI[48.0] - PCI/0-40000 (1000c0301000100b)
              + PCI[48.0] - GPU/0-43000 (1)
                            + NVL[370.8] - NVS/0-0
              + PCI[48.0] - NIC/0-42000
                            + NET[50.0] - NET/0-1 (0/42/1/50.000000)
+ SYS[40.0] - CPU/0-1
CPU/0-1 (1/1/2)
+ PCI[48.0] - PCI/0-97000 (1000c0301000100b)
              + PCI[48.0] - GPU/0-9a000 (2)
                            + NVL[370.8] - NVS/0-0
              + PCI[48.0] - NIC/0-99000
                            + NET[50.0] - NET/0-2 (0/99/1/50.000000)
+ SYS[40.0] - CPU/0-0
==========================================
GPU/0-1b000 :GPU/0-1b000 (0/5000.0/LOC) GPU/0-43000 (2/370.8/NVL) GPU/0-9a000 (2/370.8/NVL) CPU/0-0 (2/48.0/PHB) \
NET/0-0 (3/48.0/PIX) NET/0-1 (5/48.0/PXN) NET/0-2 (5/48.0/PXN)
"""
"""Three GPUs of an H100 node: NVSwitch, and a network card beside each GPU."""

MESH = """\
=== System : maxBw 123.6 totalBw 370.8 ===
CPU/0-0 (1/2/-1)
+ PCI[48.0] - GPU/0-6000 (0)
              + NVL[123.6] - GPU/0-26000
              + NVL[123.6] - GPU/0-a6000
              + NVL[123.6] - GPU/0-c6000
+ PCI[48.0] - GPU/0-26000 (1)
              + NVL[123.6] - GPU/0-6000
              + NVL[123.6] - GPU/0-a6000
              + NVL[123.6] - GPU/0-c6000
+ PCI[48.0] - GPU/0-a6000 (2)
              + NVL[123.6] - GPU/0-6000
              + NVL[123.6] - GPU/0-26000
              + NVL[123.6] - GPU/0-c6000
+ PCI[48.0] - GPU/0-c6000 (3)
              + NVL[123.6] - GPU/0-6000
              + NVL[123.6] - GPU/0-26000
              + NVL[123.6] - GPU/0-a6000
==========================================
"""
"""Four H100 with NVLinks between any two."""

FUSED = """\
=== System : maxBw 360.0 totalBw 360.0 ===
CPU/0-0 (1/1/2)
+ PCI[48.0] - GPU/0-1000 (0)
              + NVL[360.0] - NVS/0-0
CPU/1-0 (1/1/2)
+ PCI[48.0] - GPU/1-1000 (1)
              + NVL[360.0] - NVS/0-0
==========================================
"""
"""Two hosts with one GPU each, which multi-node NVLink joins; bus ids repeat."""


def blocks_of(text: str, writer: Writer = WRITER) -> tuple[TopologySeen, ...]:
    """The blocks of lines that one thread printed."""
    lines = TopologyLines()
    feed(lines, text.splitlines(), writer)
    lines.finish()
    return lines.drain_blocks()


def block_of(text: str, writer: Writer = WRITER) -> TopologySeen:
    """The only block of such lines."""
    (block,) = blocks_of(text, writer)
    return block


def feed(lines: TopologyLines, messages: Iterable[str], writer: Writer = WRITER) -> list[bool]:
    """Feeds messages in order; gives which were understood."""
    return [lines.ingest_line(writer, number, message.encode()) for number, message in enumerate(messages, 1)]


def printed(block: str, host: str, pid: int, tid: int) -> str:
    """A block as lines of a log."""
    return "".join(f"{host}:{pid}:{tid} [0] NCCL INFO {line}\n" for line in block.splitlines())

# ruff: noqa: E501  a pattern is as long as the line that it reads
"""Lines that one fork of NCCL prints: builds of 2.23 with MSCCL, which show the paths that they compute."""

from __future__ import annotations

from typing import Final

from ncclscope_agent.sources.log_family import Family, form
from ncclscope_wire import facts

FAMILIES: Final[tuple[Family, ...]] = (
    form(
        "fork_msccl",
        facts.ForkLine,
        "Link ",
        r"(?P<step>Link) (?P<number>\d+): ID = (?P<second_number>-?\d+), Bandwidth = (?P<bandwidth>\d+\.\d+)",
        fixed={"fork": "msccl"},
    ),
    form(
        "fork_msccl",
        facts.ForkLine,
        "Node Type",
        r"(?P<step>Node Type): (?P<name>[A-Z]{2,4}), ID: (?P<address>[0-9a-f:.]{1,32})",
        fixed={"fork": "msccl"},
    ),
    form(
        "fork_msccl",
        facts.ForkLine,
        "  -> Dest",
        r"  -> (?P<step>Dest Type): (?P<name>[A-Z]{2,4})",
        fixed={"fork": "msccl"},
    ),
    form(
        "fork_msccl",
        facts.ForkLine,
        "     Total",
        r"     (?P<step>Total Paths): (?P<number>\d+), BW: (?P<bandwidth>\d+\.\d+) GB/s, Type: (?P<path>PATH_\w{2,4})",
        fixed={"fork": "msccl"},
    ),
    form(
        "fork_msccl",
        facts.ForkLine,
        "     Hop",
        r"     (?P<step>Hop) (?P<number>\d+): Type=(?P<path>PATH_\w{2,4}), BW=(?P<bandwidth>\d+\.\d+) GB/s, RemNodeType=(?P<name>[A-Z]{2,4}), id (?P<address>[0-9a-f:.]{1,32})",
        fixed={"fork": "msccl"},
    ),
    form("fork_msccl", facts.ForkLine, "  Channel", r"  (?P<step>Channel) (?P<number>\d+):", fixed={"fork": "msccl"}),
    form(
        "fork_msccl",
        facts.ForkLine,
        "Intra-node",
        r"(?P<step>Intra-node paths|Inter-node paths) \(nChannels=(?P<number>\d+)\):",
        fixed={"fork": "msccl"},
    ),
    form("fork_msccl", facts.ForkLine, "", r"(?P<number>\d{1,6})", fixed={"fork": "msccl", "step": "rank"}),
    form(
        "fork_msccl",
        facts.ForkLine,
        "MSCCL",
        r"MSCCL: (?P<step>No external scheduler found|Initialization finished|Teardown finished)(?:, using internal implementation)?",
        fixed={"fork": "msccl"},
    ),
    form(
        "fork_msccl",
        facts.ForkLine,
        "MSCCL",
        r"MSCCL: (?P<step>Internal Scheduler) will use (?P<name>\S{1,400}) as algorithm directory and [\x20-\x7e]{1,900}",
        fixed={"fork": "msccl"},
    ),
    form(
        "fork_msccl",
        facts.ForkLine,
        "Using MSCCL",
        r"Using (?P<step>MSCCL Algo files) from (?P<name>\S{1,400})",
        fixed={"fork": "msccl"},
    ),
)
"""msccl-like builds of 2.23: they print the paths that they compute. One line of it is a bare number."""

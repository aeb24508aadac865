"""How long data takes between GPUs: over NVLink inside a node, over network cards between nodes.

Simplified: bandwidth is not shared between groups that run at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from ncclscope_simulator.config import SimulationConfig
from ncclscope_simulator.groups import Group


@dataclass(frozen=True, slots=True)
class Links:
    """The model of the links of a job, with the faults that slow them."""

    config: SimulationConfig

    def collective_ns(self, group: Group, bus_bytes: float, iteration: int) -> float:
        """From the last rank's start to the end of a collective that moves so many bytes."""
        if not group.spans_nodes:
            rate = 0.8 * self.config.traits.nvlink_switch
            return 6_000 + 1_500 * log2(group.size) + bus_bytes / rate
        local = min(sum(rank // self.config.gpus == node for rank in group.members) for node in group.nodes)
        rate = 0.9 * self._card() * local * self._remaining(group.members, iteration)
        return 18_000 + 5_000 * log2(group.size) + bus_bytes / rate

    def pair_ns(self, one: int, two: int, size: int, iteration: int) -> float:
        """From the later start of a Send and its Recv to their end, between two ranks."""
        if one // self.config.gpus == two // self.config.gpus:
            return 6_000 + size / (0.75 * self.config.traits.nvlink_switch)
        return 14_000 + size / (0.92 * self._card() * self._remaining((one, two), iteration))

    def _card(self) -> float:
        """Bytes per ns of the one network card beside each GPU."""
        return 50.0 if self.config.traits.nvlink_switch > 300 else 25.0

    def _remaining(self, ranks: tuple[int, ...], iteration: int) -> float:
        """What is left of the bandwidth between nodes: a ring is as slow as its slowest card."""
        gpus = self.config.gpus
        nodes = {rank // gpus for rank in ranks}
        touching = [fault for fault in self.config.of_kind("slow_link") if fault.node in nodes]
        for fault in self.config.of_kind("slow_nic"):
            first = fault.node * gpus + fault.gpu
            if any(first <= rank < first + fault.gpus for rank in ranks):
                touching.append(fault)
        return min((fault.factor for fault in touching if fault.active(iteration)), default=1.0)

"""How long the steps of a job take: its schedule alone, without anything that it leaves behind."""

from __future__ import annotations

from itertools import pairwise

from ncclscope_simulator.cluster import build_cluster
from ncclscope_simulator.config import SimulationConfig
from ncclscope_simulator.groups import build_endpoints, build_groups
from ncclscope_simulator.program import build_programs
from ncclscope_simulator.timeline import Timeline


def step_durations(config: SimulationConfig, steps: int) -> list[int]:
    """Nanoseconds from when the first rank begins a step to when the first one begins the next; without faults.

    They are those of the job as it would be written, but that all ranks begin the first step at once.
    """
    groups = build_groups(config)
    programs = build_programs(config, groups, build_endpoints(config, build_cluster(config), groups))
    timeline = Timeline(config, groups)
    begins = [timeline.next_ns]
    for iteration in range(steps):
        timeline.run_step(iteration, programs)
        begins.append(timeline.next_ns)
    return [after - before for before, after in pairwise(begins)]

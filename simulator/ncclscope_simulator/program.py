"""What each rank does in one training step of a Megatron-LM-like job: a list of actions for its host thread.

Pipeline: which microbatch when -> Layers: what it computes and exchanges -> Gradients -> Script: the actions
"""

from __future__ import annotations

from ncclscope_simulator.actions import Action
from ncclscope_simulator.config import SimulationConfig
from ncclscope_simulator.data_types import FLOAT32, MAX
from ncclscope_simulator.gradients import Gradients
from ncclscope_simulator.groups import Endpoint, Group
from ncclscope_simulator.layers import Layers
from ncclscope_simulator.pipeline import Pipeline
from ncclscope_simulator.script import Script


def build_programs(
    config: SimulationConfig, groups: tuple[Group, ...], endpoints: list[dict[int, Endpoint]]
) -> list[list[Action]]:
    """For each rank the actions of one step; every step is the same."""
    scripts = [Script(config, groups, endpoints[rank], rank) for rank in range(config.world)]
    for script in scripts:
        write_step(script)
    return [script.actions for script in scripts]


def write_step(script: Script) -> None:
    """Writes down all that a rank does in a step."""
    gradients = Gradients(script)
    script.late("step")
    Pipeline(script, Layers(script, gradients)).run()
    gradients.finish()
    script.launch(script.collective(script.world, "AllReduce", "norm", 1, FLOAT32, MAX))
    script.synchronise()

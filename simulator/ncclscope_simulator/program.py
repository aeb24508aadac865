"""The program of each rank in one training step of a Megatron-LM-like job: a list of actions for its host thread.

Pipeline: which microbatch when -> Layers: what it computes and exchanges -> Gradients -> Script: the actions

The faults `hang` and `mismatch`: a rank gets stuck in a collective, or calls another one than the others. Its step is
the same but for one collective in the middle, which never ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ncclscope_simulator.actions import Action
from ncclscope_simulator.config import SimulationConfig
from ncclscope_simulator.data_types import FLOAT32, MAX
from ncclscope_simulator.gradients import Gradients
from ncclscope_simulator.groups import Endpoint, Group
from ncclscope_simulator.layers import Layers
from ncclscope_simulator.megatron import MegatronGradients, MegatronLayers
from ncclscope_simulator.operations import Launch, Meeting
from ncclscope_simulator.pipeline import Pipeline
from ncclscope_simulator.script import Script


def build_programs(
    config: SimulationConfig, groups: tuple[Group, ...], endpoints: list[dict[int, Endpoint]]
) -> list[list[Action]]:
    """For each rank the actions of one step; every step is the same."""
    return _written(write_step, config, groups, endpoints)


def build_evaluations(
    config: SimulationConfig, groups: tuple[Group, ...], endpoints: list[dict[int, Endpoint]]
) -> list[list[Action]]:
    """For each rank the actions of a step behind which the model is evaluated."""
    return _written(_write_evaluated_step, config, groups, endpoints)


def _written(
    write: Callable[[Script], None],
    config: SimulationConfig,
    groups: tuple[Group, ...],
    endpoints: list[dict[int, Endpoint]],
) -> list[list[Action]]:
    """For each rank the actions that `write` writes down."""
    scripts = [Script(config, groups, endpoints[rank], rank) for rank in range(config.world)]
    for script in scripts:
        write(script)
    return [script.actions for script in scripts]


def _write_evaluated_step(script: Script) -> None:
    write_step(script)
    pipeline = Pipeline(script, Layers(script, Gradients(script)))
    for _ in range(script.config.evaluate_steps):
        pipeline.evaluate()
        script.launch(script.collective(script.world, "AllReduce", "evaluated", 1, FLOAT32))
        script.synchronise()


def write_step(script: Script) -> None:
    """Writes down all that a rank does in a step."""
    script.late("step")
    model = script.config.megatron
    if model is not None:
        own = MegatronGradients(script, model)
        Pipeline(script, MegatronLayers(script, model, own)).run()
        own.finish()
        script.synchronise()
        return
    gradients = Gradients(script)
    Pipeline(script, Layers(script, gradients)).run()
    gradients.finish()
    script.launch(script.collective(script.world, "AllReduce", "norm", 1, FLOAT32, MAX))
    script.synchronise()


def wrong_programs(
    config: SimulationConfig, groups: tuple[Group, ...], endpoints: list[dict[int, Endpoint]]
) -> dict[tuple[int, int], list[Action]]:
    """By rank and step, what ranks do in place of their program. Raises ValueError if nothing can be swapped."""
    made: dict[tuple[int, int], list[Action]] = {}
    for fault in config.faults:
        if fault.kind == "mismatch" or (fault.kind == "hang" and fault.how == "inside"):
            script = Script(config, groups, endpoints[fault.rank], fault.rank)
            write_step(script)
            _spoil(script, fault.how or "count")
            made[fault.rank, fault.first] = script.actions
    return made


def _spoil(script: Script, how: str) -> None:
    """Has a collective in the middle stick: `inside` as it is, else because it is another one here."""
    actions = script.actions
    at = next(at for at in range(len(actions) // 2, len(actions)) if _is_collective(actions[at]))
    here = actions[at]
    if how == "order":
        other = _next_other(actions, at)
        here, actions[other] = (
            replace(here, launch=actions[other].issued),
            replace(actions[other], launch=here.issued),
        )
    elif how != "inside":
        here = replace(here, launch=_other_call(script, here.issued, how))
    actions[at] = replace(here, sticks=True)


def _next_other(actions: list[Action], at: int) -> int:
    """The next collective of the same communicator that is another one."""
    launch = actions[at].issued
    for after in range(at + 1, len(actions)):
        if _is_collective(actions[after]):
            other = actions[after].issued
            if other.endpoint is launch.endpoint and _call_of(other) != _call_of(launch):
                return after
    raise ValueError("fault mismatch: after the middle of a step no other collective follows to be swapped")


def _other_call(script: Script, launch: Launch, how: str) -> Launch:
    """The same launch with half the count, or of another operation."""
    operation = launch.operations[0]
    count = operation.count // (operation.dtype.bytes if operation.dtype_id != operation.dtype.id else 1)
    op = operation.op
    if how == "operation":
        op = "AllGather" if op != "AllGather" else "AllReduce"
    else:
        count //= 2
    return script.builder.collective(
        launch.endpoint.group, op, name="wrong", count=count, dtype=operation.dtype, autograd=launch.autograd
    )


def _is_collective(action: Action) -> bool:
    return action.launch is not None and action.blocking and action.launch.meeting is Meeting.EVERYBODY


def _call_of(launch: Launch) -> tuple[str, int]:
    return launch.operations[0].op, launch.size_bytes

"""Expected against observed in 65 simulated jobs, whose operations Megatron-LM's source was read for a second time.

Simulated: `ncclscope simulate --emission megatron`, which shares nothing with the emission rules. NCCL 2.8 to 2.30 in
turns, logs alone. Clean, and with 1 % of the lines lost.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Final

from ncclscope.description_files import described_fields
from ncclscope.offline import run_offline
from ncclscope_models.description import Completed, Description, completed
from ncclscope_models.explanation import Explanation, explain, is_off_plan, typical_iteration, typical_ranks
from ncclscope_models.job import ModelError
from ncclscope_models.minimal_edit import minimal_edits
from ncclscope_models.reconstruct import Reconstruction, reconstruct
from ncclscope_service.job.step_lines import StepLines, step_lines
from ncclscope_service.store.settings import PipelineSettings
from ncclscope_simulator import MegatronModel, SimulationConfig, parse_faults, parse_model, write

_LOST: Final = 0.01
VERSIONS: Final = (
    *("2.8.4", "2.9.9", "2.10.3", "2.11.4", "2.12.12", "2.13.4", "2.14.3", "2.15.5", "2.16.2", "2.17.1", "2.18.3"),
    *("2.19.3", "2.20.5", "2.21.5", "2.22.3", "2.23.4", "2.24.3", "2.25.1", "2.26.2", "2.27.5", "2.28.3", "2.29.2"),
    "2.30.3",
)
_DENSE: Final = ("4 1 1", "1 4 1", "1 1 4", "2 2 2", "2 1 4", "1 2 4", "8 1 1", "2 4 1", "4 2 2", "2 2 4", "1 3 2")
"""tensor, pipeline, data."""
_OPTIONS: Final = (
    "",
    "micro_batch=2",
    "fp16,mask",
    "rms,gated,bias=0,learned=0,tied=0,ffn=1536",
    "full_recompute",
    "rms,learned=0,kv=128",
    "fp16,skipped,tensorboard",
    "tied=0,micro_batch=4,overlap",
    "vocabulary=50688,mask,ffn=1792",
)
_MIXTURES: Final = ("1 1 4 2", "1 1 4 4", "1 2 4 2", "1 2 2 2", "1 1 8 4")
"""tensor, pipeline, data, expert."""
_MIXTURE_OPTIONS: Final = ("experts=8", "experts=4,top_k=1,every=2", "experts=8,rms,gated,bias=0,expert_ffn=512,fp16")


@dataclass(frozen=True, slots=True)
class ShapeOfJob:
    """One simulated job."""

    name: str
    config: SimulationConfig

    def fields(self) -> list[str]:
        """Its description, as assignments `name=value`; what a user would give, nothing derived."""
        config, model = self.config, self.config.megatron or MegatronModel()
        own = {
            "framework": "megatron", "version": "0.13", "layers": config.layers * config.pp, "hidden": config.hidden,
            "ffn": model.ffn or 4 * config.hidden, "heads": config.hidden // 32,
            "kv_heads": (model.kv or config.hidden) // 32, "sequence": config.sequence,
            "positions_learned": config.sequence if model.learned else 0, "vocabulary": model.vocabulary,
            "gated": model.gated, "norm": "RMSNorm" if model.rms else "LayerNorm", "bias": model.bias,
            "tied": model.tied, "tensor": config.tp, "pipeline": config.pp, "ranks": config.world,
            "chunks": config.interleave, "sequence_parallel": config.sequence_parallelism,
            "micro_batch": model.micro_batch,
            "global_batch": config.microbatches * config.dp * model.micro_batch,
            "precision": "FP16" if model.fp16 else "BF16", "gradients_fp32": not model.fp16,
            "recompute": "full" if model.full_recompute else "none", "distributed_optimizer": config.zero1,
            "overlap_gradients": model.overlap, "attention_mask": model.mask, "clip_gradients": model.clip,
            "tensorboard_timers": model.tensorboard,
        }  # fmt: skip
        if model.experts:
            own |= {
                "expert": config.ep, "experts": model.experts, "experts_top_k": model.top_k,
                "expert_layer_frequency": model.every, "expert_ffn": model.expert_ffn or own["ffn"],
                "dispatcher": config.ep_dispatch,
            }  # fmt: skip
        return [f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in own.items()]

    def described(self) -> Completed:
        """Its description, whole."""
        return completed(self.description())

    def description(self, changed: Sequence[str] = ()) -> Description:
        """Its description as it is given, with some assignments changed."""
        names = {assignment.partition("=")[0] for assignment in changed}
        own = [assignment for assignment in self.fields() if assignment.partition("=")[0] not in names]
        return described_fields([*own, *changed])


@cache
def shapes() -> tuple[ShapeOfJob, ...]:
    """65 jobs: dense on 11 layouts, with sequence parallel, distributed optimizer and chunks in turns; mixtures."""
    versions = cycle(VERSIONS)
    found: list[ShapeOfJob] = []
    for nth, (degrees, option) in enumerate(_dense()):
        tp, pp, dp = map(int, degrees.split())
        found.append(
            _shape(
                f"t{tp} p{pp} d{dp}", tp, pp, dp, 1, option, next(versions), nth,
                chunks=2 if pp > 1 and nth % 3 == 0 else 1, is_sequence_parallel=tp > 1 and nth % 2 == 0,
                zero1=dp > 1 and nth % 4 < 2,
            )
        )  # fmt: skip
    for nth, (degrees, option) in enumerate((degrees, option) for degrees in _MIXTURES for option in _MIXTURE_OPTIONS):
        tp, pp, dp, ep = map(int, degrees.split())
        found.append(
            _shape(
                f"t{tp} p{pp} d{dp} e{ep}", tp, pp, dp, ep, option, next(versions), nth,
                dispatch="allgather" if nth % 2 else "alltoall", zero1=nth % 3 == 0,
            )
        )  # fmt: skip
    return tuple(found)


def _dense() -> Iterator[tuple[str, str]]:
    """50 pairs: every layout and every option, in changing company."""
    pairs = [(degrees, _OPTIONS[(row + 2 * turn) % len(_OPTIONS)]) for turn in range(5) for row, degrees in
             enumerate(_DENSE)]  # fmt: skip
    yield from pairs[:50]


def _shape(
    name: str, tp: int, pp: int, dp: int, ep: int, option: str, version: str, nth: int, *,
    chunks: int = 1, is_sequence_parallel: bool = False, zero1: bool = False, dispatch: str = "alltoall",
) -> ShapeOfJob:  # fmt: skip
    if version in VERSIONS[:2] and "fp16" not in option:  # before BF16
        option = f"fp16,{option}" if option else "fp16"
    layers = 4 if ep > 1 else 2 * chunks
    config = SimulationConfig(
        nccl=version,
        nodes=1 if tp * pp * dp <= 8 else 2,
        gpus=min(tp * pp * dp, 8),
        tp=tp,
        pp=pp,
        dp=dp,
        ep=ep,
        ep_dispatch=dispatch,
        sequence_parallel=is_sequence_parallel,
        zero1=zero1,
        interleave=chunks,
        layers=layers,
        microbatches=(pp * 2 if pp > 1 else 4) + (0 if chunks > 1 else nth % 2),
        hidden=512 + 256 * (nth % 2),
        sequence=256 if nth % 3 else 512,
        iterations=10,
        seed=nth,
        capture="none",
        megatron=parse_model(option),
    )
    said = [name, f"v{chunks}" if chunks > 1 else "", "sp" if is_sequence_parallel else "", "zero1" if zero1 else ""]
    return ShapeOfJob(" ".join(filter(None, [*said, dispatch if ep > 1 else "", option, f"nccl {version}"])), config)


def observed(config: SimulationConfig) -> StepLines:
    """Lines of this job's log, iteration by iteration."""
    with tempfile.TemporaryDirectory() as folder:
        write(config, Path(folder) / "job")
        run = run_offline([Path(folder) / "job" / "logs"], job="job", settings=PipelineSettings())
        store = run.pipeline.store
        return step_lines(store, "job", store.operations.rows)


def with_lines_lost(config: SimulationConfig, ratio: float) -> SimulationConfig:
    """The same job whose logs lack a share of their lines, over twice as many iterations."""
    return replace(config, faults=parse_faults([f"drop_lines:ratio={ratio}"]), iterations=20)


def explained(shape: ShapeOfJob, lines: StepLines) -> Explanation:
    """Held against its own description."""
    return explain(shape.described().job, lines.seen, lines.gaps)


def truth(shape: ShapeOfJob) -> dict[str, object]:
    """Fields of its description by name, and what follows from them."""
    described = shape.described()
    job = described.job
    tokens = job.training.micro_batch * job.shape.sequence
    derived = {"expert": job.layout.expert, "micro_batches": job.micro_batches, "tokens": tokens}
    return {**{name: given.value for name, given in described.fields.items()}, **derived}


def reconstructed(lines: StepLines) -> Reconstruction:
    """From a typical iteration of every rank."""
    return reconstruct({rank: typical_iteration(lines.seen, rank) for rank in sorted({rank for rank, _ in lines.seen})})


def main() -> None:
    """Prints the tables."""
    sums: Counter[str] = Counter()
    answers: Counter[str] = Counter()
    for shape in shapes():
        lines = observed(shape.config)
        lossy_lines = observed(with_lines_lost(shape.config, _LOST))
        for name, each in (("clean", explained(shape, lines)), ("lossy", explained(shape, lossy_lines))):
            sums[f"{name} rank iterations"] += len(each.differences)
            sums[f"{name} unexplained"] += each.unexplained
            sums[f"{name} jobs off plan"] += is_off_plan(each)
            sums[f"{name} control"] += sum(one.control_difference for one in each.differences.values())
            if each.unexplained:
                print(f"{shape.name}: {name}, {each.unexplained} unexplained", flush=True)
        found, known = reconstructed(lines), truth(shape)
        is_right = any(all(known[name] == value for name, value in each.items()) for each in found.known)
        answers[f"{found.answer}, {'right' if is_right else 'wrong'}"] += 1
    print(f"\n{len(shapes())} simulated jobs (--emission megatron), NCCL 2.8 to 2.30, logs alone\n")
    print("| log | iterations of ranks | unexplained operations | jobs off_plan |\n|---|---|---|---|")
    for name, said in (("clean", "whole"), ("lossy", f"{100 * _LOST:g} % of lines lost")):
        cells = [f"{sums[f'{name} {part}']:,}" for part in ("rank iterations", "unexplained", "jobs off plan")]
        print(f"| {said} | {' | '.join(cells)} |")
    print("\nReconstructed from one iteration, all fields that it says compared with the truth:")
    print("\n".join(f"  {answer}: {amount}" for answer, amount in sorted(answers.items())))


def wrong_fields() -> None:
    """Every field of every description changed once: which one is named. Takes a quarter of an hour."""
    sums: Counter[str] = Counter()
    for shape in shapes():
        lines = observed(shape.config)
        for assignment in shape.fields():
            name, _, value = assignment.partition("=")
            changed = next((each for each in _other_values(name, value) if _is_possible(shape, f"{name}={each}")), None)
            if changed is None:
                continue
            described = completed(shape.description([f"{name}={changed}"]))
            explanation = explain(described.job, lines.seen, lines.gaps)
            if not explanation.unexplained:
                sums["not visible"] += 1
                continue
            sample = {rank: typical_iteration(lines.seen, rank) for rank in typical_ranks(explanation)}
            named = {edit.field for edit in minimal_edits(described, explanation.order, sample)}
            sums["right alone" if named == {name} else "right among several" if name in named else "not named"] += 1
            if name not in named:
                print(f"{shape.name}: {name} {value} -> {changed}: {sorted(named)}", flush=True)
    differing = sums.total() - sums["not visible"]
    right = sums["right alone"] + sums["right among several"]
    print(f"\nOne field of a description wrong, {sums.total()} cases; visible in the traffic: {differing}")
    print(f"  named {right} ({100 * right / differing:.1f} %), alone {sums['right alone']}")


def _is_possible(shape: ShapeOfJob, assignment: str) -> bool:
    try:
        completed(shape.description([assignment]))
    except ModelError:
        return False
    return True


def _other_values(name: str, value: str) -> tuple[str, ...]:
    words = ({"LayerNorm", "RMSNorm"}, {"BF16", "FP16"}, {"none", "full"}, {"alltoall", "allgather"}, {"true", "false"})
    for pair in words:
        if value in pair:
            return tuple(pair - {value})
    if name in ("framework", "version", "ranks", "heads"):
        return ()
    number = int(value)
    if name == "positions_learned":
        return ("0",) if number else ("1024",)
    if name == "vocabulary":
        return (str(number + 1024),)
    return (str(3 - number),) if name == "expert_layer_frequency" else (str(2 * number), str(number // 2))

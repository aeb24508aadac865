"""`ncclscope tune`: which layout of a job would be faster, by a run of it that was recorded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from math import expm1
from pathlib import Path
from typing import Final

import click

from ncclscope.calibration import calibration_option, read_calibrations
from ncclscope.description_files import describe
from ncclscope.extras import require_models
from ncclscope_models import flops
from ncclscope_models.calibration import Calibration, added_up
from ncclscope_models.fitted_machine import ASSUMED_GPU, FittedMachine, fitted_machine, machine_before_fitting
from ncclscope_models.job import Job, ModelError, Recompute
from ncclscope_models.layout_space import Space, layouts
from ncclscope_models.learned_steps import CORRECTED, corrected, learned_from
from ncclscope_models.memory import MemoryNeed, covers_activations
from ncclscope_models.ranking import Ranked, Ranking, differences, rank, widest
from ncclscope_models.residual import NotLearnedError, Residual
from ncclscope_models.step_time import days, rent_usd
from ncclscope_wire.errors import ConfigError

_GIB: Final = 2**30
_OVERHEAD_BYTES: Final = 2 * _GIB
"""NCCL's buffers, the CUDA context and fragmentation, where no run says it."""
_WHY: Final = {
    "computation": "computation",
    "tensor": "tensor and expert parallel",
    "bubble": "pipeline",
    "data": "gradients",
    "embedding": "tied embedding",
    "optimizer": "optimizer",
    "idle": "idle",
    "learned": "learned from runs",
}
_SETTLES: Final = {
    "computation": "how fast GPUs compute at other micro-batches and tensor ranks",
    "inside": "transfers inside a node",
    "between": "transfers between nodes",
    "model": "what the model leaves out",
    "left open": "what the recorded run took beyond its parts",
    "learned": "what corrections are off by",
}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("files", nargs=-1, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@calibration_option
@click.option("--gpus", type=click.IntRange(min=1), required=True, help="GPUs to lay the job out on.")
@click.option("--set", "assignments", multiple=True, metavar="NAME=VALUE", help="A field, for what no file says.")
@click.option("--job", "name", help="The job of the calibration, if it has several.")
@click.option("--gpus-per-node", type=click.IntRange(min=1), help="If the calibration does not say it.")
@click.option(
    "--gpu", type=click.Choice(list(flops.PEAK_FLOPS), case_sensitive=False), help="Else that of the calibration."
)
@click.option("--gpu-memory", type=click.FloatRange(min=0, min_open=True), metavar="GIB", help="Memory of a GPU.")
@click.option("--memory-used-gib", type=click.FloatRange(min=0), metavar="GIB", help="Peak of the calibrating run.")
@click.option("--inside-gb-per-s", type=click.FloatRange(min=0, min_open=True), help="Of a GPU's links, unmeasured.")
@click.option("--node-gb-per-s", type=click.FloatRange(min=0, min_open=True), help="Of a node's network, unmeasured.")
@click.option("--nics", type=click.IntRange(min=1), help="Network cards of a node; else those of the calibration.")
@click.option("--max-tensor", type=click.IntRange(min=1), help="Tensor parallel ranks at most; else those of a node.")
@click.option("--attention-scores", is_flag=True, help="Attention is not fused: its scores go to memory.")
@click.option("--tokens", type=click.FloatRange(min=0, min_open=True), help="Tokens to train on: days and cost.")
@click.option("--usd-per-gpu-hour", type=click.FloatRange(min=0), help="Price of a GPU, for the cost of --tokens.")
@click.option("--learn", is_flag=True, help="Correct steps by what those of 100 calibrations and more were off by.")
@click.option("--top", type=click.IntRange(min=1), default=20, show_default=True, help="Layouts that are listed.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def tune(  # noqa: PLR0917  (click passes them by name)
    files: tuple[Path, ...],
    calibrations: tuple[Path, ...],
    gpus: int,
    assignments: tuple[str, ...],
    name: str | None,
    gpus_per_node: int | None,
    gpu: str | None,
    gpu_memory: float | None,
    memory_used_gib: float | None,
    inside_gb_per_s: float | None,
    node_gb_per_s: float | None,
    nics: int | None,
    max_tensor: int | None,
    attention_scores: bool,
    tokens: float | None,
    usd_per_gpu_hour: float | None,
    learn: bool,
    top: int,
    as_json: bool,
) -> None:
    """Rank the layouts of a job by their predicted step, from one run of it that was recorded.

    FILES describe the job that ran, as for `ncclscope model`; --calibration is what `analyze` wrote of it.
    """
    if not calibrations:
        raise click.UsageError("give --calibration: calibration.json, which analyze writes of a run of this job")
    if learn:
        require_models()
    described = describe(files, assignments)
    now, read = described.completed.job, read_calibrations(calibrations)
    try:
        per_node = gpus_per_node or next((each.ranks_per_node for each in read if each.ranks_per_node), None)
        if per_node is None:
            raise click.UsageError("the calibration does not say how many GPUs a node has: give --gpus-per-node")
        recomputes = tuple(sorted({Recompute.NONE, Recompute.FULL, now.training.recompute}))
        space = Space(gpus=gpus, gpus_per_node=per_node, most_tensor=max_tensor, recomputes=recomputes)
        candidates = layouts(now, space)
        of_job = _calibration_of(read, name, now)
        given = [None if each is None else each * 1e9 for each in (inside_gb_per_s, node_gb_per_s)]
        gpu, nics = gpu or of_job.gpu, nics or of_job.network_cards
        base = machine_before_fitting(gpu, per_node, network_cards=nics, writes_scores=attention_scores)
        fitted = fitted_machine(base, now, of_job, added_up(read), inside_node=given[0], between_nodes=given[1])
        if fitted.inside is None and per_node > 1:
            raise click.UsageError("no group of the calibration lies in a node: give --inside-gb-per-s")
        if fitted.between is None and gpus > per_node:
            raise click.UsageError("no group of the calibration crosses nodes: give --node-gb-per-s")
        need = _need(now, gpu_memory, memory_used_gib, keeps_scores=attention_scores)
        residual, not_learned = _learned(read, fitted) if learn else (None, None)
        ranking = rank(candidates, now, fitted, need, most=top if residual is None else max(top, CORRECTED))
        if residual is not None:
            ranking = corrected(ranking, residual, per_node, top)
    except ModelError as error:
        raise ConfigError(str(error)) from error
    if not ranking.ranked:
        raise ConfigError(
            f"no layout on {gpus} GPUs: {ranking.considered} are possible, {ranking.do_not_fit} of them do not fit"
        )
    assumed = [
        *(f"{field} {described.completed.fields[field].value}" for field in described.completed.assumed),
        *([] if gpu else [f"memory bandwidth to peak of an {ASSUMED_GPU} (--gpu)"]),
        *([] if nics or gpus <= per_node else ["a network card for each GPU (--nics)"]),
        *([] if attention_scores else ["fused attention (--attention-scores)"]),
        *([] if memory_used_gib else [f"{_OVERHEAD_BYTES / _GIB:g} GiB beside the model's memory (--memory-used-gib)"]),
    ]
    costs = _Costs(now, gpus, tokens, usd_per_gpu_hour)
    if as_json:
        click.echo(json.dumps(_document(ranking, fitted, costs, assumed, residual, not_learned), indent=1))
    else:
        said = () if not learn else (_said(residual, not_learned),)
        click.echo("\n".join(_lines(ranking, fitted, costs, assumed, need, said)))


def _learned(read: Sequence[Calibration], fitted: FittedMachine) -> tuple[Residual | None, str | None]:
    """A correction that the runs teach, or the reason why they teach none."""
    try:
        return learned_from(read, fitted), None
    except NotLearnedError as error:
        return None, str(error)


def _said(residual: Residual | None, not_learned: str | None) -> str:
    if residual is None:
        return f"steps   are not corrected: {not_learned}"
    return (
        f"learned from {residual.times:,} runs: of runs that are left out steps are off {expm1(residual.error):.1%}, "
        f"uncorrected {expm1(residual.plain_error):.1%}"
    )


def _calibration_of(read: Sequence[Calibration], name: str | None, now: Job) -> Calibration:
    """The first of that name, or of as many ranks as the description has."""
    ranks = now.layout.ranks
    found = [each for each in read if (each.job == name if name else each.ranks == ranks)]
    if not found:
        listed = ", ".join(f"{each.job} ({each.ranks} ranks)" for each in read)
        raise click.UsageError(f"no job {name or f'of {ranks} ranks'} in the calibration, which has: {listed}")
    if found[0].ranks != ranks:
        raise click.UsageError(f"job {found[0].job} ran on {found[0].ranks} ranks, and the description has {ranks}")
    return found[0]


def _need(now: Job, limit_gib: float | None, used_gib: float | None, *, keeps_scores: bool) -> MemoryNeed:
    limit = None if limit_gib is None else round(limit_gib * _GIB)
    more = _OVERHEAD_BYTES
    if used_gib is not None:
        more = round(used_gib * _GIB) - MemoryNeed(None, keeps_scores=keeps_scores).bytes(now)
    return MemoryNeed(limit, more_bytes=more, keeps_scores=keeps_scores)


class _Costs:
    """Days and dollars of a token budget."""

    def __init__(self, now: Job, gpus: int, tokens: float | None, usd_per_gpu_hour: float | None) -> None:
        self._tokens_of_a_step = now.training.global_batch * now.shape.sequence
        self._gpus, self._tokens, self._usd = gpus, tokens, usd_per_gpu_hour

    def of(self, seconds: float) -> tuple[float | None, float | None]:
        """Days and dollars at this step; None where it was not asked."""
        if self._tokens is None:
            return None, None
        found = days(self._tokens, self._tokens_of_a_step, seconds)
        return found, None if self._usd is None else rent_usd(self._gpus, found, self._usd)


def _lines(
    ranking: Ranking,
    fitted: FittedMachine,
    costs: _Costs,
    assumed: Sequence[str],
    need: MemoryNeed,
    said: Iterable[str],
) -> Iterator[str]:
    now = ranking.now
    yield (
        f"now     {_layout(now.job)}: {now.seconds:.3f} s a step, of {now.job.layout.ranks} GPUs, "
        f"global batch {now.job.training.global_batch}"
    )
    fits = (
        "memory of a GPU not known (--gpu-memory)" if need.limit_bytes is None else f"{ranking.do_not_fit:,} do not fit"
    )
    yield f"looked  at {ranking.considered:,} layouts; {fits}"
    yield from said
    if not covers_activations(now.job):
        yield "        memory of experts' activations is not counted: more may not fit"
    columns = f"{'t':>4}{'p':>4}{'d':>5}{'e':>4}{'b':>4}{'v':>4}{'zero':>5}"
    yield f"{'':>4}{columns} {'recompute':<10}{'memory':>10}  step (80 %)"
    for place, each in enumerate(ranking.ranked, 1):
        yield f"{place:>4}{_row(each)}  {_step(each)}{_gain(each, now)}{_cost(costs, each.seconds)}"
        yield f"{'':>52}{_differences(each, now)}"
        if each.not_corrected is not None:
            yield f"{'':>52}not corrected: {each.not_corrected}"
    listed = min(ranking.alike, len(ranking.ranked))
    if listed > 1:
        more = " and maybe more that are not listed" if listed == len(ranking.ranked) else ""
        yield f"1 to {listed}{more} are not told apart"
    settles = widest(ranking.ranked[:listed])
    if settles is not None:
        term, share, at = settles
        yield f"a run at {_layout(at.job)} would settle most: {_SETTLES[term]} is {share:.0%} of the width"
    if not fitted.is_from_parts:
        yield "computation was not recorded: the whole step says how fast GPUs are"
    yield f"assumed {'; '.join(assumed)}"
    yield "predicted, not measured: run the first ones for some steps"


def _layout(job: Job) -> str:
    layout, training = job.layout, job.training
    parts = [f"t{layout.tensor} p{layout.pipeline} d{layout.data} b{training.micro_batch}"]
    parts += [f"c{layout.context}"] * (layout.context > 1) + [f"e{layout.expert}"] * (layout.expert > 1)
    parts += [f"v{layout.chunks}"] * (layout.chunks > 1)
    return " ".join(parts)


def _row(each: Ranked) -> str:
    layout, training = each.job.layout, each.job.training
    tight = {"tight": "!"}.get(each.fit or "", " ")
    return (
        f"{layout.tensor:>4}{layout.pipeline:>4}{layout.data:>5}{layout.expert:>4}{training.micro_batch:>4}"
        f"{layout.chunks:>4}{int(training.has_distributed_optimizer):>5} {training.recompute:<10}"
        f"{each.memory_bytes / _GIB:>6.1f} GiB{tight}"
    )


def _step(each: Ranked) -> str:
    return f"{each.seconds:.3f} s ({each.low:.3f}-{each.high:.3f})"


def _gain(each: Ranked, now: Ranked) -> str:
    return f" {each.seconds / now.seconds - 1:+.0%}"


def _cost(costs: _Costs, seconds: float) -> str:
    found, usd = costs.of(seconds)
    return ("" if found is None else f"  {found:,.1f} days") + ("" if usd is None else f", {usd:,.0f} USD")


def _differences(each: Ranked, now: Ranked) -> str:
    return ", ".join(f"{_WHY[part]} {off:+.3f} s" for part, off in differences(each, now) if abs(off) >= 0.0005)


def _document(
    ranking: Ranking,
    fitted: FittedMachine,
    costs: _Costs,
    assumed: Sequence[str],
    residual: Residual | None,
    not_learned: str | None,
) -> dict[str, object]:
    settles = widest(ranking.ranked[: max(1, ranking.alike)])
    return {
        "considered": ranking.considered,
        "do_not_fit": ranking.do_not_fit,
        "not_told_apart": ranking.alike,
        "now": _record(ranking.now, ranking.now, costs),
        "layouts": [_record(each, ranking.now, costs) for each in ranking.ranked],
        "settles_most": None if settles is None else {"term": settles[0], "share": settles[1]},
        "observed_over_predicted_ratio": fitted.factor,
        "is_computation_measured": fitted.is_from_parts,
        "assumed": list(assumed),
        "learned_runs": None if residual is None else residual.times,
        "learned_error_ratio": None if residual is None else expm1(residual.error),
        "uncorrected_error_ratio": None if residual is None else expm1(residual.plain_error),
        "not_learned": not_learned,
    }


def _record(each: Ranked, now: Ranked, costs: _Costs) -> dict[str, object]:
    layout, training = each.job.layout, each.job.training
    found, usd = costs.of(each.seconds)
    return {
        "tensor": layout.tensor,
        "pipeline": layout.pipeline,
        "data": layout.data,
        "context": layout.context,
        "expert": layout.expert,
        "chunks": layout.chunks,
        "micro_batch": training.micro_batch,
        "distributed_optimizer": training.has_distributed_optimizer,
        "recompute": training.recompute.value,
        "memory_bytes": each.memory_bytes,
        "fit": None if each.fit is None else each.fit.value,
        "step_seconds": each.seconds,
        "step_low_seconds": each.low,
        "step_high_seconds": each.high,
        "not_corrected": each.not_corrected,
        "parts_seconds": dict(each.parts),
        "differences_seconds": dict(differences(each, now)),
        "days": found,
        "usd": usd,
    }

"""`ncclscope simulate`: writes a simulated job's logs, nsys exports and truth, at once or in real time."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any, Final

import click

from ncclscope.options import sectioned
from ncclscope_simulator import (
    CONTEXT_EXCHANGES,
    EXPERT_DISPATCHERS,
    GRAPH_TRACES,
    INSPECTOR_FORMATS,
    NSYS_VERSIONS,
    ORDERS,
    MegatronModel,
    Player,
    SimulationConfig,
    parse_contention,
    parse_faults,
    parse_gpu_speed,
    parse_model,
    write,
)

_LIVE_CHUNK_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 0.05


_SECTIONS: Final = {
    "What is written": (
        *("out", "nccl", "nsys", "capture", "chunk_seconds"),
        *("inspector", "profiled", "inspector_holes", "inspector_verbose"),
    ),
    "Machine and parallelism": ("nodes", "gpus", "tp", "pp", "dp", "ep", "cp", "order", "process_per_node"),
    "Time and chance": (
        *("iterations", "step_seconds", "seed", "live", "seconds", "compute_cv", "bandwidth_cv"),
        *("noise_correlation", "imbalance", "contention", "gpu_speed", "evaluate_every", "evaluate_steps"),
    ),
    "Faults": ("fault",),
    "Model and framework": (
        *("layers", "interleave", "microbatches", "hidden", "sequence", "sequence_parallel", "zero1", "zero2", "fsdp"),
        *("replicate", "deepspeed", "emission", "shared_world", "ep_dispatch", "cp_exchange", "coalesce"),
        "broadcast_parameters",
    ),
    "Lines of NCCL": ("timestamps", "calls", "stuck_op_count", "work_fifo", "split"),
    "Ranges and CUDA graphs": (
        *("nvtx", "nvtx_payload", "cuda_graphs", "graphs_per_step", "recapture_every", "cuda_graph_trace"),
    ),
    "Clocks": ("clock_offset_ms", "clock_drift_ppm", "launch_lead_us"),
}


@click.command(cls=sectioned(_SECTIONS), context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="Output folder.")
@click.option("--nccl", default="2.28.3", help="NCCL version, 2.8 to 2.30; 2.21 means 2.21.5.")
@click.option("--nsys", default="2025.3", type=click.Choice(NSYS_VERSIONS), help="nsys version of the exports.")
@click.option("--nodes", default=2, help="Nodes.")
@click.option("--gpus", default=4, help="GPUs, and ranks, per node.")
@click.option("--tp", default=2, help="Ranks per tensor-parallel group.")
@click.option("--pp", default=2, help="Pipeline stages.")
@click.option("--dp", default=None, type=int, help="Data-parallel replicas.  [default: what the ranks allow]")
@click.option("--ep", default=1, help="Ranks per expert-parallel group; divides --dp; 1: a dense model.")
@click.option(
    "--ep-dispatch",
    default=EXPERT_DISPATCHERS[0],
    type=click.Choice(EXPERT_DISPATCHERS),
    help="How experts get tokens.",
)
@click.option("--cp", default=1, help="Ranks that share a sequence (context parallelism); 1: none.")
@click.option(
    "--cp-exchange",
    default=CONTEXT_EXCHANGES[0],
    type=click.Choice(CONTEXT_EXCHANGES),
    help="How attention gets keys and values of other ranks.",
)
@click.option(
    "--order",
    default=ORDERS[0],
    type=click.Choice(ORDERS),
    help="Order of dimensions; the first has neighbouring ranks.",
)
@click.option(
    "--sequence-parallel/--no-sequence-parallel", default=None, help="Sequence parallelism.  [default: where --tp > 1]"
)
@click.option("--zero1", is_flag=True, help="ReduceScatter and AllGather instead of the gradients' AllReduce.")
@click.option("--zero2", is_flag=True, help="As --zero1, with the gradients of every microbatch reduced at once.")
@click.option("--fsdp", is_flag=True, help="Parameters gathered for each layer and gradients scattered (ZeRO-3, FSDP).")
@click.option(
    "--replicate", default=1, show_default=True, help="With --fsdp: groups of shards that reduce gradients (HSDP)."
)
@click.option("--deepspeed", type=click.IntRange(1, 3), help="DeepSpeed's ZeRO of this stage.")
@click.option("--shared-world", is_flag=True, help="A dimension that spans the job uses the world's communicator.")
@click.option(
    "--emission",
    default="simple",
    metavar="simple|megatron[:KEY=VALUE,...]",
    help="Which operations: simple ones of each dimension, or those of Megatron-LM core 0.13, call by call; "
    "keys in docs/internals/simulator.md.",
)
@click.option("--iterations", default=None, type=int, help="Training steps.  [default: 10; with --live: no end]")
@click.option("--seed", default=0, help="Random seed; equal seeds give equal files.")
@click.option("--layers", default=2, help="Layers per pipeline stage.")
@click.option("--interleave", default=1, help="Chunks of layers per stage, each stage in turn; 1: plain 1F1B.")
@click.option("--microbatches", default=4, help="Microbatches per step.")
@click.option("--hidden", default=2048, help="Hidden size: message sizes follow.")
@click.option("--sequence", default=2048, help="Sequence length: message sizes follow.")
@click.option("--step-seconds", default=0.4, help="Length of a step if communication cost nothing.")
@click.option("--evaluate-every", default=None, type=int, help="Evaluate, forward only, after so many steps.")
@click.option("--evaluate-steps", default=10, help="With --evaluate-every: how often a step goes forward then.")
@click.option(
    "--gpu-speed",
    metavar="tflops=N,memory=N[,processors=N]",
    help="With --emission megatron: computation takes as long as this GPU needs for the model in its layout, not "
    "--step-seconds; memory in GB/s.",
)
@click.option("--compute-cv", default=0.01, help="Spread of computation times, relative.")
@click.option("--bandwidth-cv", default=0.03, help="Spread of transfer times, relative.")
@click.option(
    "--contention",
    metavar="nics=N,slowdown=S",
    help="Groups share N network cards of a node and its NVLink; NCCL slows computation beside it by the share S.",
)
@click.option("--noise-correlation", default=0.0, help="Correlation of both from step to step, with heavy tails.")
@click.option("--imbalance", default=0.0, help="Spread of the logarithm of the experts' computation times.")
@click.option(
    "--fault",
    multiple=True,
    metavar="KIND:key=value,...",
    help="none; late_rank:rank=,ms=[,every=step|microbatch|layer]; slow_link:node=,factor=; "
    "slow_nic:node=,gpu=,factor=[,gpus=]; hang:rank=,at=[,how=enqueue|inside]; "
    "mismatch:rank=,at=[,how=count|operation|order]; kill:at=; pause:at=,seconds=[,only=]; "
    "drop_lines:ratio=; drop_kernels:ratio=; torn_lines:ratio=; clock_step:node=,ms=,at=. "
    "All without at= take from= and until= (steps). Repeatable.",
)
@click.option("--capture", default="full", metavar="full|duty:F|none", help="How much of the time nsys records.")
@click.option(
    "--chunk-seconds", default=None, type=float, help="One export per so many seconds.  [default: one; --live, duty: 5]"
)
@click.option("--clock-offset-ms", default=50.0, help="Largest clock offset of the nodes, except the first.")
@click.option("--clock-drift-ppm", default=20.0, help="Largest clock drift of these nodes.")
@click.option("--launch-lead-us", default=400.0, help="How far hosts enqueue ahead of their GPUs.")
@click.option("--timestamps/--no-timestamps", default=None, help="Stamp log lines.  [default: from NCCL 2.26.2 on]")
@click.option("--calls", is_flag=True, help="Write CALL lines, which show groups.")
@click.option("--stuck-op-count", is_flag=True, help="opCount does not move within a node, as beside a CUDA graph.")
@click.option("--coalesce", is_flag=True, help="Put the gradients of all layers into one group.")
@click.option(
    "--broadcast-parameters", is_flag=True, help="With --zero1, --zero2: gather parameters by groups of Broadcasts."
)
@click.option(
    "--work-fifo",
    default=None,
    type=int,
    help="Size of NCCL's work FIFO; one kernel takes at most half of it, so a small one cuts groups.",
)
@click.option("--split/--no-split", default=None, help="Groups by ncclCommSplit.  [default: from NCCL 2.18 on]")
@click.option("--nvtx/--no-nvtx", default=True, help="Write NVTX ranges into the exports.")
@click.option(
    "--cuda-graphs",
    default=None,
    type=int,
    metavar="STEPS",
    help="Capture the step into CUDA graphs after this many steps, then replay it.",
)
@click.option("--graphs-per-step", default=1, help="With --cuda-graphs: number of graphs per step.")
@click.option(
    "--recapture-every", default=None, type=int, help="With --cuda-graphs: capture again after this many steps."
)
@click.option(
    "--cuda-graph-trace",
    default=GRAPH_TRACES[0],
    type=click.Choice(GRAPH_TRACES),
    help="As in nsys: record a graph launch as a whole, or its kernels.",
)
@click.option(
    "--nvtx-payload",
    is_flag=True,
    help="Write the payloads of NCCL's ranges, as nsys export --include-blobs=true does.",
)
@click.option("--process-per-node", is_flag=True, help="One process per node, with a thread per GPU.")
@click.option(
    "--inspector", default=None, type=click.Choice(INSPECTOR_FORMATS), help="Write NCCL Inspector dumps in this format."
)
@click.option(
    "--profiled", default=None, metavar="FIRST-LAST", help="Iterations that a PyTorch profiler on each rank records."
)
@click.option("--inspector-verbose", is_flag=True, help="Inspector says when each channel began and ended.")
@click.option("--inspector-holes", default=0.0, metavar="RATIO", help="Share of Inspector's records that are lost.")
@click.option("--live", is_flag=True, help="Write in real time until stopped.")
@click.option("--for", "seconds", default=None, type=float, help="With --live: stop after this many seconds.")
def simulate(out: Path, live: bool, seconds: float | None, **given: object) -> None:
    """Simulate a training job: write its NCCL logs, nsys exports and the truth about them.

    Logs go to OUT/logs, exports to OUT/nsys/HOST, Inspector dumps to OUT/inspector, PyTorch traces to OUT/kineto, the
    truth to OUT/truth. With --live the job is written in real time; SIGINT and SIGTERM finish the current step, write
    the rest and exit with 0.
    """
    if seconds is not None and not live:
        raise click.UsageError("--for needs --live")
    config = _config(given, live)
    try:
        if live:
            _play(config, out, seconds)
        else:
            write(config, out)
    except (FileExistsError, ModuleNotFoundError) as error:
        raise click.ClickException(str(error)) from error


def configuration_of(arguments: Sequence[str]) -> SimulationConfig:
    """The job that `ncclscope simulate ARGUMENTS` would write; nothing is written.

    Raises:
        click.UsageError: the arguments are wrong.
    """
    with simulate.make_context("simulate", list(arguments)) as context:
        return _config(context.params, bool(context.params["live"]))


def _config(given: Mapping[str, Any], live: bool) -> SimulationConfig:
    """The job of these options: those that are named as a setting are that setting, the others are read here."""
    settings = {field.name: given[field.name] for field in fields(SimulationConfig) if field.name in given}
    if given["dp"] is None:
        per_replica = max(1, given["tp"] * given["pp"] * given["cp"])
        settings["dp"] = max(1, given["nodes"] * given["gpus"] // per_replica)
    if given["iterations"] is None and not live:
        settings["iterations"] = 10
    if given["chunk_seconds"] is None and live:
        settings["chunk_seconds"] = _LIVE_CHUNK_SECONDS
    try:
        settings |= {
            "megatron": _megatron(given["emission"]),
            "gpu_speed": None if given["gpu_speed"] is None else parse_gpu_speed(given["gpu_speed"]),
            "contention": None if given["contention"] is None else parse_contention(given["contention"]),
            "faults": parse_faults(given["fault"]),
            "profiled": _iterations(given["profiled"]),
        }
        return SimulationConfig(**settings)
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _megatron(text: str) -> MegatronModel | None:
    """The model that is given with Megatron-LM's emission; None with the simple one."""
    name, _, settings = text.partition(":")
    if name not in {"simple", "megatron"} or (name == "simple" and settings):
        raise ValueError(f"emission {text!r} is neither simple nor megatron[:KEY=VALUE,...]")
    return parse_model(settings) if name == "megatron" else None


def _iterations(text: str | None) -> tuple[int, int] | None:
    """Two numbers with a dash between them, or one; raises ValueError if they are none."""
    if text is None:
        return None
    first, _, last = text.partition("-")
    if not (first.isdecimal() and (last or first).isdecimal()):
        raise ValueError(f"--profiled {text!r} names no iterations: FIRST-LAST, such as 5-24")
    return int(first), int(last or first)


BEHIND: Final = "this machine is too busy to simulate in real time: the job wrote nothing for"
_BEHIND_NS: Final = 3_000_000_000


def _play(config: SimulationConfig, out: Path, seconds: float | None) -> None:
    """Plays a job against the wall clock until its end, a signal, or the time given."""
    stop = threading.Event()

    def _on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _on_signal)
    begins_ns = time.time_ns()
    player = Player(config, out, begins_ns)
    click.echo(f"simulating {config.world} ranks into {out}", err=True)
    ends_ns = None if seconds is None else begins_ns + int(seconds * 1e9)
    stopped = False
    looked_ns = time.time_ns()
    while True:
        now_ns = time.time_ns()
        if now_ns - looked_ns > _BEHIND_NS and not stopped:
            click.echo(f"{BEHIND} {(now_ns - looked_ns) / 1e9:.0f} s", err=True)
        looked_ns = now_ns
        player.advance(now_ns, is_stopping=stop.is_set)
        if not stopped and (stop.is_set() or (ends_ns is not None and now_ns >= ends_ns)):
            player.stop(now_ns)
            stopped = True
        if player.over and now_ns >= player.next_ns:
            break
        time.sleep(_LOOK_SECONDS) if stopped else stop.wait(_LOOK_SECONDS)
    player.finish()

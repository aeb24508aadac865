"""What each communicator is for is found without a hint, in every shape that the simulator can write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from ncclscope.offline import run_offline
from ncclscope.simulate import configuration_of
from ncclscope_service.pipeline import PipelineSettings
from ncclscope_service.store import Store
from ncclscope_simulator import write

_ONE_NODE = "--nodes 1 --tp 1 --pp 1"
_SHAPES = {
    "DP4": _ONE_NODE,
    "DP4 of many layers": f"{_ONE_NODE} --layers 24 --microbatches 1",
    "DP4 coalesced": f"{_ONE_NODE} --layers 8 --coalesce",
    "DP8 on two nodes": "--tp 1 --pp 1",
    "DP4 in the world's communicator": f"{_ONE_NODE} --shared-world",
    "ZeRO-1": f"{_ONE_NODE} --zero1",
    "ZeRO-2": f"{_ONE_NODE} --zero2",
    "FSDP4": f"{_ONE_NODE} --fsdp",
    "FSDP8, one microbatch": "--tp 1 --pp 1 --fsdp --microbatches 1 --layers 6",
    "FSDP4 in the world's communicator": f"{_ONE_NODE} --fsdp --shared-world",
    "PP4": "--nodes 1 --tp 1 --pp 4",
    "PP4 interleaved": "--nodes 1 --tp 1 --pp 4 --interleave 2",
    "PP3 interleaved": "--nodes 1 --gpus 3 --tp 1 --pp 3 --interleave 2 --microbatches 6",
    "PP2": "--nodes 1 --gpus 2 --tp 1 --pp 2",
    "PP2, one microbatch": "--nodes 1 --tp 2 --pp 2 --microbatches 1",
    "TP4": "--nodes 1 --tp 4 --pp 1 --no-sequence-parallel",
    "TP4, one microbatch": "--nodes 1 --tp 4 --pp 1 --no-sequence-parallel --microbatches 1",
    "TP4 with sequence parallelism": "--nodes 1 --tp 4 --pp 1",
    "TP4 in the world's communicator": "--nodes 1 --tp 4 --pp 1 --shared-world",
    "TP8 on two nodes": "--tp 8 --pp 1",
    "EP4": f"{_ONE_NODE} --ep 4",
    "EP4 by Send and Recv": f"{_ONE_NODE} --ep 4 --nccl 2.21",
    "EP4 by AllGather": f"{_ONE_NODE} --ep 4 --ep-dispatch allgather",
    "EP4 by AllGather, ZeRO-1": f"{_ONE_NODE} --ep 4 --ep-dispatch allgather --zero1",
    "CP4": f"{_ONE_NODE} --cp 4",
    "CP4 by AllGather": f"{_ONE_NODE} --cp 4 --cp-exchange allgather",
    "CP2 DP2": f"{_ONE_NODE} --cp 2",
    "CP2": "--nodes 1 --gpus 2 --tp 1 --pp 1 --cp 2",
    "TP2 DP2": "--nodes 1 --tp 2 --pp 1",
    "PP2 DP2": "--nodes 1 --tp 1 --pp 2",
    "TP2 PP2 DP2": "--tp 2 --pp 2",
    "TP2 PP2 DP2 without sequence parallelism": "--tp 2 --pp 2 --no-sequence-parallel",
    "TP4 FSDP2": "--tp 4 --pp 1 --fsdp",
    "TP2 PP2 FSDP2": "--tp 2 --pp 2 --fsdp",
}
_LARGE_SHAPES = {
    "TP4 PP4": "--nodes 4 --tp 4 --pp 4",
    "TP4 PP2 DP2": "--nodes 4 --tp 4 --pp 2",
    "TP2 PP2 DP4, pipelines of neighbours": "--nodes 4 --tp 2 --pp 2 --order tp-pp-dp",
    "TP2 DP8 EP4": "--nodes 4 --tp 2 --pp 1 --ep 4",
    "TP2 PP2 DP4 EP2": "--nodes 4 --tp 2 --pp 2 --ep 2",
    "TP2 PP2 DP4 EP4 by AllGather": "--nodes 4 --tp 2 --pp 2 --ep 4 --ep-dispatch allgather",
    "TP2 CP2 PP2 DP2": "--nodes 4 --tp 2 --pp 2 --cp 2",
    "TP2 CP2 PP2 DP2 by AllGather": "--nodes 4 --tp 2 --pp 2 --cp 2 --cp-exchange allgather",
    "TP2 CP2 FSDP4": "--nodes 4 --tp 2 --pp 1 --cp 2 --fsdp",
    "TP2 CP4 PP2 DP2, pipelines of neighbours": "--nodes 8 --tp 2 --pp 2 --cp 4 --order tp-pp-dp",
    "TP8 PP4 DP2": "--nodes 8 --gpus 8 --tp 8 --pp 4",
    "TP4 PP4 DP4, ZeRO-1": "--nodes 8 --gpus 8 --tp 4 --pp 4 --zero1",
    "TP2 PP8 DP4 interleaved": "--nodes 8 --gpus 8 --tp 2 --pp 8 --interleave 2 --microbatches 8",
    "TP4 PP2 DP8 EP8": "--nodes 8 --gpus 8 --tp 4 --pp 2 --ep 8",
}

Kinds = dict[str, str | None]


def _analysed(folder: Path, *arguments: str) -> tuple[Store, list[dict[str, Any]]]:
    write(configuration_of(("--out", str(folder), "--iterations", "3", *arguments)), folder)
    run = run_offline([folder], job="default", settings=PipelineSettings())
    truth: list[dict[str, Any]] = pq.read_table(folder / "truth" / "operations.parquet").to_pylist()
    return run.pipeline.store, truth


def _kinds(store: Store, truth: list[dict[str, Any]]) -> tuple[Kinds, Kinds]:
    """What was found and what is true, for each communicator of two ranks or more."""
    true: Kinds = {row["comm_id"]: row["parallelism"] for row in truth if row["comm_size"] > 1}
    found: Kinds = {each.comm_id: each.parallelism for each in store.listed_communicators() if each.size > 1}
    return found, true


@pytest.mark.parametrize("shape", _SHAPES.values(), ids=_SHAPES.keys())
def test_logs_alone_tell_what_a_communicator_is_for(shape: str, tmp_path: Path) -> None:
    found, true = _kinds(*_analysed(tmp_path, "--capture", "none", *shape.split()))
    assert found == true


@pytest.mark.slow
@pytest.mark.parametrize("shape", _LARGE_SHAPES.values(), ids=_LARGE_SHAPES.keys())
def test_logs_alone_tell_it_in_mixes_of_many_dimensions(shape: str, tmp_path: Path) -> None:
    found, true = _kinds(*_analysed(tmp_path, "--capture", "none", *shape.split()))
    assert found == true


@pytest.mark.slow
@pytest.mark.parametrize("shape", [*_SHAPES.values(), *_LARGE_SHAPES.values()], ids=[*_SHAPES, *_LARGE_SHAPES])
def test_logs_with_kernels_tell_what_a_communicator_is_for(shape: str, tmp_path: Path) -> None:
    found, true = _kinds(*_analysed(tmp_path, *shape.split()))
    assert found == true

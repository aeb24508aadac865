"""MFU and HFU: from the description, the GPU and the median step, or not known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.models.shapes import ShapeOfJob
from service import fake_service as fake

from ncclscope_models.expected_step import ExpectedStep
from ncclscope_models.flops import gpu_named
from ncclscope_service.job.utilization import gpu_of, utilization_of
from ncclscope_service.serve.routes import to_json
from ncclscope_service.store.plan_records import PlanEdit
from ncclscope_service.store.records import Process
from ncclscope_service.store.tables import Store
from ncclscope_simulator import MegatronModel, SimulationConfig, parse_model
from ncclscope_wire.records import CaptureSeen

SHAPE = ShapeOfJob(
    "small",
    SimulationConfig(nodes=1, gpus=2, tp=2, pp=1, dp=1, hidden=512, sequence=256, megatron=MegatronModel()),
)
STEP_NS = 10_000_000.0


def store(model: str = "", gpu: str | None = "A100") -> Store:
    shape = replace(SHAPE, config=replace(SHAPE.config, megatron=parse_model(model)))
    return Store(description=shape.described(), gpu=gpu, plans={"j": replace(fake.plan("j"), edits=())})


def test_it_is_the_operations_of_a_step_over_those_that_the_peak_allows() -> None:
    found = utilization_of(store(), "j", STEP_NS)
    assert found is not None
    b, s, h, layers = 4, 256, 512, 2
    vocabulary = SHAPE.described().job.shape.vocabulary
    # 24 b s h^2 for a forward pass of a layer's matrices, 2 b s^2 h of causal attention; twice as much backward.
    operations = 3 * layers * (24 * b * s * h * h + 2 * b * s * s * h) + 6 * b * s * h * vocabulary
    assert found.step_flops == operations
    assert found.mfu == found.hfu == pytest.approx(operations / (2 * 312e12 * 0.01))


def test_a_step_of_more_operations_than_64_bits_hold_can_be_written() -> None:
    """Of 405 billion parameters and 17 million tokens there are 4e19."""
    known = store()
    assert known.description is not None
    job = known.description.job
    huge = replace(job, shape=replace(job.shape, vocabulary=10**14))
    known.description = replace(known.description, job=huge)
    found = utilization_of(known, "j", STEP_NS)
    assert found is not None
    assert found.step_flops > 2**64
    assert b"step_flops" in to_json(found)


def test_layers_that_are_computed_again_count_for_the_hardware_alone() -> None:
    once, again = utilization_of(store(), "j", STEP_NS), utilization_of(store("full_recompute"), "j", STEP_NS)
    assert once is not None
    assert again is not None
    assert again.mfu == once.mfu
    head = 6 * 4 * 256 * 512 * SHAPE.described().job.shape.vocabulary
    assert again.hfu / again.mfu == pytest.approx(1 + (once.step_flops - head) / 3 / once.step_flops)


@pytest.mark.parametrize("lacking", ["gpu", "step", "description", "plan", "agreement"])
def test_nothing_is_guessed(lacking: str) -> None:
    known = store(gpu=None if lacking == "gpu" else "A100")
    if lacking == "description":
        known.description = None
    if lacking == "plan":
        known.plans.clear()
    if lacking == "agreement":
        edit = PlanEdit(field="layers", described=3, observed=2, sentence="the description says 3, the traffic says 2")
        known.plans["j"] = replace(known.plans["j"], edits=(edit,))
    assert utilization_of(known, "j", None if lacking == "step" else STEP_NS) is None


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA A40", "A40"),
        ("NVIDIA RTX A4000", None),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("Tesla V100-PCIE-16GB", None),
        ("Tesla T4", None),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_cuda_names_the_gpu(name: str, gpu: str | None) -> None:
    assert gpu_named(name) == gpu


def capture(host: str, gpu: str | None) -> CaptureSeen:
    return CaptureSeen(
        host=host, host_is_recorded=True, start_ns=0, end_ns=1, pids=(), product_version="2025.3",
        schema_version="3.20.0", nccl_kernels=0, other_kernels=0, graph_launches=0, gpu=gpu,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("names", "gpu"),
    [
        (("NVIDIA H200", "NVIDIA H200"), "H200"),
        (("NVIDIA H200", "NVIDIA A40"), None),
        (("NVIDIA H200", None), None),
        (("something new", "something new"), None),
    ],
)
def test_captures_name_the_gpu_if_all_agree(names: tuple[str | None, ...], gpu: str | None) -> None:
    known = store(gpu=None)
    for nth, name in enumerate(names):
        known.processes.append(Process(host=f"n{nth}", pid=1))
        known.process_job.append("j")
        known.captures.append((0, capture(f"n{nth}", name)))
    found = utilization_of(known, "j", STEP_NS)
    assert (None if found is None else found.gpu) == gpu


@pytest.mark.parametrize(
    ("names", "gpu"), [((), "A100"), ((None,), "A100"), (("NVIDIA H200",), "H200"), (("something new",), None)]
)
def test_where_no_capture_names_it_it_is_the_gpu_of_the_run_by_which_a_step_is_expected(
    names: tuple[str | None, ...], gpu: str | None
) -> None:
    known = store(gpu=None)
    known.expected_step = ExpectedStep(low=1.0, typical=1.0, high=1.0, run="before", is_same=True, gpu="A100")
    for nth, name in enumerate(names):
        known.processes.append(Process(host=f"n{nth}", pid=1))
        known.process_job.append("j")
        known.captures.append((0, capture(f"n{nth}", name)))
    assert gpu_of(known, "j") == gpu

"""`ncclscope tune`: layouts of a job by a run of it, and what it refuses."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from click.testing import CliRunner

from ncclscope.cli import main

GIVEN = {
    "framework": "megatron", "version": "0.13", "layers": "24", "hidden": "4096", "ffn": "16384", "heads": "32",
    "kv_heads": "32", "sequence": "2048", "positions_learned": "2048", "vocabulary": "51200", "gated": "false",
    "norm": "LayerNorm", "bias": "true", "tied": "true", "tensor": "4", "pipeline": "2", "data": "4",
    "micro_batch": "1", "global_batch": "64", "precision": "BF16", "sequence_parallel": "true",
}  # fmt: skip


def transfers(op: str, ranks: int, nodes: int, kind: str, bytes_per_ns: float) -> list[dict[str, object]]:
    return [
        {
            "op": op, "ranks": ranks, "nodes": nodes, "parallelism": kind, "message_bytes": size, "samples": 50,
            **{f"{name}_ns": round(20_000 + size / bytes_per_ns) for name in ("low", "typical", "high")},
        }
        for size in (1 << 16, 1 << 20, 1 << 24, 1 << 28)
    ]  # fmt: skip


@pytest.fixture
def calibration(tmp_path: Path) -> Path:
    found = transfers("AllGather", 4, 1, "TP", 200) + transfers("ReduceScatter", 4, 1, "TP", 200)
    job: dict[str, object] = {
        "job": "run1", "ranks": 32, "ranks_per_node": 8, "has_switch": True, "median_step_ns": 2_000_000_000,
        "step": None, "transfers": found + transfers("AllReduce", 4, 2, "DP", 20),
    }  # fmt: skip
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps({"format": 1, "jobs": [job]}))
    return path


def run(*arguments: str, **changed: str) -> tuple[int, str]:
    flags = [word for name, text in {**GIVEN, **changed}.items() for word in ("--set", f"{name}={text}")]
    done = CliRunner().invoke(main, ["tune", *arguments, *flags])
    return done.exit_code, done.output


def test_layouts_are_listed_with_intervals_reasons_and_what_was_assumed(calibration: Path) -> None:
    arguments = ("--calibration", str(calibration), "--gpus", "32", "--gpu-memory", "80", "--top", "4")
    status, output = run(*arguments, "--tokens", "1e11", "--usd-per-gpu-hour", "2")
    assert status == 0, output
    lines = output.splitlines()
    assert lines[0].startswith("now     t4 p2 d4 b1: 2.000 s a step, of 32 GPUs")
    assert "do not fit" in lines[1]
    assert "days, " in lines[3]
    assert "USD" in lines[3]
    assert "are not told apart" in output
    assert "would settle most" in output
    assert "computation was not recorded" in output
    assert "assumed " in output
    assert "predicted, not measured" in output


def test_the_calibration_names_the_gpu(calibration: Path) -> None:
    arguments = ("--calibration", str(calibration), "--gpus", "32", "--json")
    assert "memory bandwidth to peak of an A100 (--gpu)" in json.loads(run(*arguments)[1])["assumed"]
    document = json.loads(calibration.read_text())
    document["jobs"][0]["gpu"] = "H200"
    calibration.write_text(json.dumps(document))
    named = json.loads(run(*arguments)[1])
    assert not any("--gpu" in each for each in named["assumed"])
    assert named["layouts"] == json.loads(run(*arguments, "--gpu", "H200")[1])["layouts"]


def test_the_calibration_says_how_many_network_cards_a_node_has(calibration: Path) -> None:
    arguments = ("--calibration", str(calibration), "--gpus", "32", "--json")
    assert "a network card for each GPU (--nics)" in json.loads(run(*arguments)[1])["assumed"]
    given = json.loads(run(*arguments, "--nics", "2")[1])
    document = json.loads(calibration.read_text())
    document["jobs"][0]["network_cards"] = 2
    calibration.write_text(json.dumps(document))
    read = json.loads(run(*arguments)[1])
    assert read == given
    assert not any("--nics" in each for each in read["assumed"])


def test_json_has_the_same(calibration: Path) -> None:
    status, output = run("--calibration", str(calibration), "--gpus", "64", "--top", "3", "--json")
    assert status == 0, output
    found = json.loads(output)
    assert found["now"]["step_seconds"] == pytest.approx(2.0)
    assert len(found["layouts"]) == 3
    first = found["layouts"][0]
    assert first["tensor"] * first["pipeline"] * first["data"] == 64
    assert first["step_low_seconds"] < first["step_seconds"] < first["step_high_seconds"]
    assert sum(first["parts_seconds"].values()) == pytest.approx(first["step_seconds"])
    assert first["fit"] is None
    assert first["days"] is None


def test_what_the_run_did_not_show_must_be_given(calibration: Path) -> None:
    document = json.loads(calibration.read_text())
    job = document["jobs"][0]
    job["transfers"] = [each for each in job["transfers"] if each["nodes"] == 1]
    calibration.write_text(json.dumps(document))
    arguments = ("--calibration", str(calibration), "--gpus", "32")
    status, output = run(*arguments)
    assert status == 2
    assert "no group of the calibration crosses nodes: give --node-gb-per-s" in output
    status, output = run(*arguments, "--node-gb-per-s", "100")
    assert status == 0, output
    job["transfers"] = transfers("AllReduce", 4, 4, "DP", 20)
    calibration.write_text(json.dumps(document))
    status, output = run(*arguments)
    assert status == 2
    assert "no group of the calibration lies in a node: give --inside-gb-per-s" in output
    status, output = run(*arguments, "--inside-gb-per-s", "200")
    assert status == 0, output


@pytest.mark.parametrize(
    ("changed", "arguments", "says"),
    [
        ({"framework": "fsdp2"}, (), "this job is of fsdp2"),
        ({"data": "8"}, (), "no job of 64 ranks in the calibration, which has: run1 (32 ranks)"),
        ({}, ("--gpu-memory", "1"), "do not fit"),
        ({}, ("--job", "other"), "no job other in the calibration"),
    ],
)
def test_refusals_say_why(calibration: Path, changed: dict[str, str], arguments: tuple[str, ...], says: str) -> None:
    status, output = run("--calibration", str(calibration), "--gpus", "32", *arguments, **changed)
    assert status != 0
    assert says in output


def test_a_calibration_is_needed() -> None:
    status, output = run("--gpus", "32")
    assert status == 2
    assert "give --calibration" in output


def many_runs(calibration: Path, folder: Path, scale: Callable[[int, int], float]) -> list[str]:
    """Calibrations of 120 runs with other layers, batches and degrees; their steps are `scale` times the first's."""
    document = json.loads(calibration.read_text())
    first = document["jobs"][0]
    typed = {
        name: {"true": True, "false": False}.get(text, int(text) if text.isdecimal() else text)
        for name, text in GIVEN.items()
    }
    jobs: list[dict[str, object]] = [{**first, "description": typed}]
    for layers, micro_batch, tensor in product(range(8, 48, 4), (1, 2, 4), (1, 2, 4, 8)):
        described = {**typed, "layers": layers, "micro_batch": micro_batch, "tensor": tensor, "data": 16 // tensor}
        described["sequence_parallel"] = tensor > 1
        step = round(2e9 * layers / 24 * scale(micro_batch, tensor))
        jobs.append({**first, "job": f"l{layers}b{micro_batch}t{tensor}", "description": described,
                     "median_step_ns": step, "transfers": []})  # fmt: skip
    path = folder / "many.json"
    path.write_text(json.dumps({"format": 1, "jobs": jobs}))
    return ["--calibration", str(path), "--job", "run1", "--gpus", "32", "--learn"]


def test_many_runs_correct_the_layouts_inside_of_them_and_name_why_others_are_not(
    calibration: Path, tmp_path: Path
) -> None:
    arguments = many_runs(calibration, tmp_path, lambda micro_batch, tensor: (1 + 0.1 * micro_batch) * tensor**0.3)
    status, output = run(*arguments, "--top", "300")
    assert status == 0, output
    assert "learned from 121 runs: of runs that are left out steps are off " in output
    assert "not corrected: pipeline 4 lies outside of the runs' 2 to 2" in output
    assert "learned from runs " in output
    status, output = run(*arguments, "--top", "300", "--json")
    found = json.loads(output)
    assert found["learned_runs"] == 121
    assert found["learned_error_ratio"] < found["uncorrected_error_ratio"]
    is_corrected = [each["not_corrected"] is None for each in found["layouts"]]
    assert any(is_corrected)
    assert not all(is_corrected)
    for each in found["layouts"]:
        assert sum(each["parts_seconds"].values()) == pytest.approx(each["step_seconds"])
        assert each["step_low_seconds"] <= each["step_seconds"] <= each["step_high_seconds"]  # equal where it ran
    steps = [each["step_seconds"] for each in found["layouts"]]
    assert steps == sorted(steps)


def test_too_few_runs_correct_nothing_and_it_is_said(calibration: Path) -> None:
    status, output = run("--calibration", str(calibration), "--gpus", "32", "--learn")
    assert status == 0, output
    assert "steps   are not corrected: a correction is learned from 100 measured times on, not from 0" in output


def test_without_the_extra_learning_says_what_to_install(calibration: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    status, output = run("--calibration", str(calibration), "--gpus", "32", "--learn")
    assert status == 1
    assert "pip install 'ncclscope[models]'" in output

"""`ncclscope model`: what it prints, and what it refuses."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from ncclscope.cli import main

GIVEN = {
    "framework": "megatron", "version": "0.13", "layers": "4", "hidden": "512", "ffn": "2048", "heads": "8",
    "kv_heads": "8", "sequence": "1024", "positions_learned": "1024", "vocabulary": "50304", "gated": "false",
    "norm": "LayerNorm", "bias": "true", "tied": "true", "tensor": "1", "pipeline": "2", "data": "2",
    "micro_batch": "4", "global_batch": "64", "precision": "BF16",
}  # fmt: skip


def _run(*arguments: str, without: str = "") -> tuple[int, str]:
    flags = [word for name, text in GIVEN.items() if name != without for word in ("--set", f"{name}={text}")]
    result = CliRunner().invoke(main, ["model", *arguments, *flags])
    return result.exit_code, result.output


def test_flags_alone_describe_a_job() -> None:
    status, output = _run("--gpu-memory", "80")
    assert status == 0
    assert "rules of megatron 0.13\n" in output
    assert "micro-batches  8 of 4 samples" in output
    assert "fits into 80 GiB" in output
    assert "assumed        attention_sink" in output
    status, output = _run("--gpu-memory", "1")
    assert "does not into 1 GiB" not in output
    assert "does not fit into 1 GiB" in output


def test_what_is_missing_is_named() -> None:
    status, output = _run(without="hidden")
    assert status == 1
    assert "not known: hidden (width of activations)" in output


def test_the_toml_is_read_again(tmp_path: Path) -> None:
    status, output = _run("--toml")
    assert status == 0
    written = tmp_path / "model.toml"
    written.write_text(output)
    again = CliRunner().invoke(main, ["model", "--toml", str(written)])
    assert again.exit_code == 0
    assert [line.split("  #")[0] for line in again.output.splitlines()] == [
        line.split("  #")[0] for line in output.splitlines()
    ]
    contradicted = CliRunner().invoke(main, ["model", str(written), "--set", "layers=8"])
    assert contradicted.exit_code == 1
    assert "layers is 8 in --set layers=8, and 4 in model.toml" in contradicted.output


def test_yaml_and_broken_files(tmp_path: Path) -> None:
    nemo = tmp_path / "nemo.yaml"
    nemo.write_text("model:\n  num_layers: 4\ntrainer:\n  devices: 2\n  num_nodes: 2\n")
    output = CliRunner().invoke(main, ["model", str(nemo)])
    assert "not known: hidden" in output.output
    broken = tmp_path / "config.json"
    broken.write_text("{")
    output = CliRunner().invoke(main, ["model", str(broken)])
    assert output.exit_code == 1
    assert "config.json" in output.output


def test_the_fields_are_listed() -> None:
    output = CliRunner().invoke(main, ["model", "--fields"]).output
    assert "positions_learned         int   rows of the table of learned positions" in output

"""Options of `serve` and `analyze` that tell the pipeline what is known: sizes, and what nccl-tests measured."""

from __future__ import annotations

from pathlib import Path

import click
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from ncclscope.cli import main
from ncclscope.pipeline_options import Sizes, size_options
from ncclscope_service.store.settings import Sizes as PipelineSizes


def _run(*arguments: str) -> tuple[Result, Sizes | None]:
    taken: list[Sizes] = []

    @click.command()
    @click.argument("what")
    @size_options
    def command(what: str, sizes: Sizes) -> None:
        assert what == "x"
        taken.append(sizes)

    result = CliRunner().invoke(command, ["x", *arguments])
    return result, taken[0] if taken else None


def test_what_is_not_given_is_not_known() -> None:
    result, sizes = _run()
    assert result.exit_code == 0
    assert sizes == Sizes(tp=None, pp=None, dp=None, ep=None, cp=None, gpus_per_node=None)
    assert sizes is not None
    assert sizes.for_pipeline().is_empty()


def test_every_dimension_has_an_option_of_its_own() -> None:
    _, sizes = _run("--tp", "1", "--pp", "2", "--dp", "3", "--ep", "4", "--cp", "5", "--gpus-per-node", "8")
    assert sizes == Sizes(tp=1, pp=2, dp=3, ep=4, cp=5, gpus_per_node=8)
    assert sizes is not None
    assert sizes.for_pipeline() == PipelineSizes(tp=1, pp=2, dp=3, ep=4, cp=5)


@pytest.mark.parametrize("option", ["--tp", "--pp", "--dp", "--ep", "--cp", "--gpus-per-node"])
@pytest.mark.parametrize("value", ["0", "-2", "two", "1.5"])
def test_a_size_is_a_whole_number_from_1_on(option: str, value: str) -> None:
    result, sizes = _run(option, value)
    assert (result.exit_code, sizes) == (2, None)
    assert option in result.output


def test_help_lists_the_dimensions_in_the_order_in_which_people_say_them() -> None:
    result, _ = _run("--help")
    places = [result.output.index(f"--{name} ") for name in ("tp", "pp", "dp", "ep", "cp")]
    assert places == sorted(places)
    assert "Size of tensor parallelism." in result.output


_DEVICES = """\
# nThread 1 nGpus 1 minBytes 8 maxBytes 1073741824
#  Rank  0 Group  0 Pid  11 on     alpha device  0 [0x07] NVIDIA A100
#  Rank  1 Group  0 Pid  12 on     alpha device  1 [0x46] NVIDIA A100
"""
_ROW = "  1048576   262144   float   sum   -1   200.0   5.24   5.24   0   190.0   5.52   5.52   0\n"
_BEST = 5.52e9


@pytest.fixture
def job(tmp_path: Path) -> Path:
    shape = ["--nodes", "1", "--gpus", "4", "--tp", "2", "--pp", "1", "--iterations", "3"]
    done = CliRunner().invoke(main, ["simulate", "--out", str(tmp_path / "job"), *shape])
    assert done.exit_code == 0, done.output
    return tmp_path / "job"


def _analyze(job: Path, out: Path, *baselines: Path) -> str:
    named = [word for path in baselines for word in ("--baseline", str(path))]
    done = CliRunner().invoke(main, ["analyze", str(job), "--out", str(out), *named])
    return f"{done.exit_code} {done.output}"


def test_what_was_tested_is_judged_by_it_and_the_rest_by_the_job(job: Path, tmp_path: Path) -> None:
    tested = tmp_path / "all_gather_perf.txt"
    tested.write_text(_DEVICES + _ROW)
    assert _analyze(job, tmp_path / "out", tested).startswith("0 ")
    rows = pq.read_table(tmp_path / "out" / "efficiency.parquet").to_pylist()
    judged = [row for row in rows if row["reference"] == "baseline"]
    pairs = pq.read_table(tmp_path / "out" / "communicators.parquet").to_pylist()
    size_of = {row["comm_id"]: row["size"] for row in pairs}
    tested_rows = [row for row in judged if row["op"] == "AllGather" and size_of[row["comm_id"]] == 2]
    assert tested_rows
    assert all(row["limit_bytes_per_second"] == pytest.approx(_BEST) for row in tested_rows)
    others = [row for row in judged if row["op"] == "AllReduce"]
    assert others
    assert all(row["limit_bytes_per_second"] != pytest.approx(_BEST) for row in others)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("numbers.txt", _DEVICES + _ROW, "does not say which operation"),
        ("all_reduce_perf.txt", _ROW, "no list of devices"),
        ("all_reduce_perf.txt", "nothing here\n", "no row of nccl-tests"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_what_is_wrong(
    name: str, text: str, says: str, job: Path, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(text)
    said = _analyze(job, tmp_path / "out", path)
    assert said.startswith("2 ")
    assert says in said

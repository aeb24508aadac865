"""The sizes of parallel dimensions as options of a command."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner, Result

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

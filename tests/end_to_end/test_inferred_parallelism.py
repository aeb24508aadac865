"""What each communicator is for is found without a hint, in every shape that the simulator can write.

With kernels, and with lines lost, each takes half of them: all, and the largest ones, are rows of
`python benchmarks/shapes.py`, as they take minutes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.shapes import LARGE_SHAPES, SHAPES, analysed


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_logs_alone_tell_what_a_communicator_is_for_and_what_each_iteration_calls(shape: str, tmp_path: Path) -> None:
    job = analysed(tmp_path, "--capture", "none", *shape.split())
    found, true = job.kinds()
    assert found == true
    counted, called = job.counts()
    assert counted == called


@pytest.mark.slow
@pytest.mark.parametrize("shape", LARGE_SHAPES.values(), ids=LARGE_SHAPES.keys())
def test_logs_alone_tell_it_in_mixes_of_many_dimensions(shape: str, tmp_path: Path) -> None:
    job = analysed(tmp_path, "--capture", "none", *shape.split())
    found, true = job.kinds()
    assert found == true
    counted, called = job.counts()
    assert counted == called


@pytest.mark.slow
@pytest.mark.parametrize("shape", list(SHAPES.values())[::2], ids=list(SHAPES)[::2])
def test_logs_with_kernels_tell_what_a_communicator_is_for(shape: str, tmp_path: Path) -> None:
    found, true = analysed(tmp_path, *shape.split()).kinds()
    assert found == true


@pytest.mark.slow
@pytest.mark.parametrize("shape", list(SHAPES.values())[1::2], ids=list(SHAPES)[1::2])
def test_a_tenth_of_the_lines_may_be_lost(shape: str, tmp_path: Path) -> None:
    arguments = ("--capture", "none", "--fault", "drop_lines:ratio=0.1")
    found, true = analysed(tmp_path, *shape.split(), *arguments, iterations=8).kinds()
    assert found == true

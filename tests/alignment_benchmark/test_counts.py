from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.alignment.counts import TP2_PP2, TP4, ThesisJob, counted


@pytest.mark.parametrize("job", [TP4, TP2_PP2], ids=lambda job: str(job.name))
def test_every_launch_has_its_kernel_whatever_the_lines_are(job: ThesisJob, tmp_path: Path) -> None:
    found = counted(job, tmp_path / "job", iterations=1)
    assert sum(count.kernels for count in found) > 500
    assert [count.launches - count.kernels for count in found] == [0] * len(found)


def _differing(job: ThesisJob, folder: Path) -> dict[tuple[int, str], tuple[int, int]]:
    found = {(count.rank, count.operation): (count.lines, count.kernels) for count in counted(job, folder)}
    return {cell: found[cell] for cell, printed in job.printed.items() if found[cell] != printed}


@pytest.mark.slow
def test_table_4_2_follows_figure_by_figure(tmp_path: Path) -> None:
    assert _differing(TP4, tmp_path / "job") == {}


@pytest.mark.slow
def test_two_cells_of_table_4_1_follow_from_no_rule(tmp_path: Path) -> None:
    assert _differing(TP2_PP2, tmp_path / "job") == {(1, "AllReduce"): (5952, 2966), (2, "AllReduce"): (2986, 2966)}

from __future__ import annotations

import numpy as np

from ncclscope_service.align.by_order.loss_model import KernelGrids
from ncclscope_service.align.expected_launches import LAUNCH
from ncclscope_service.align.thread_backlog import THREAD_KERNEL
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER


def kernels(grids: list[int]) -> Columns:
    rows = np.zeros(len(grids), THREAD_KERNEL)
    rows["grid_x"] = grids
    return rows


def launches(texts: list[int], *, channels: list[int] | None = None) -> Columns:
    rows = np.zeros(len(texts), LAUNCH)
    rows["text"], rows["channels"] = texts, NO_NUMBER if channels is None else channels
    return rows


def test_channels_of_the_tuning_line_tell_the_grid() -> None:
    odds = KernelGrids().odds(launches([0, 0], channels=[16, 2]), kernels([16, 2, 16]))
    assert odds[0, 0] > 1.3
    assert odds[0, 1] < 0.1
    assert odds[1, 1] > 2.5
    assert odds[1, 0] < 0.1


def test_without_channels_nothing_is_told_at_first() -> None:
    assert np.allclose(KernelGrids().odds(launches([0, 1]), kernels([16, 2, 16])), 1.0)


def test_kinds_of_launches_have_the_grids_that_their_pairs_had() -> None:
    grids = KernelGrids()
    grids.learn(launches([0, 1] * 20), kernels([16, 2] * 20), np.eye(40))
    odds = grids.odds(launches([0, 1]), kernels([16, 2]))
    assert odds[0, 0] > 1.8
    assert odds[0, 1] < 0.25
    assert odds[1, 1] > 1.8


def test_a_kernel_of_unknown_grid_fits_all_alike() -> None:
    odds = KernelGrids().odds(launches([0], channels=[16]), kernels([0, 16]))
    assert odds[0, 0] == 1.0

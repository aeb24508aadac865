"""The hash of a split, against numbers that NCCL's own functions gave."""

from __future__ import annotations

import pytest

from ncclscope_service.intake.communicators import split_hash


@pytest.mark.parametrize(
    ("parent", "count", "color", "expected"),
    [
        (0x8F2C4A1D0B7E6635, 1, 0, 0x7B54454AF60B12B4),
        (1, 7, 2**31 - 2, 0x605DA33C5DA0F47D),
        (2**64 - 1, 1000, 5, 0x85F93B24EDD5E88F),
    ],
)
def test_the_hash_of_a_split_is_what_nccl_computes(parent: int, count: int, color: int, expected: int) -> None:
    # Made by a C++ program around eatHash and digestHash of src/include/utils.h.
    assert split_hash(parent, count, color) == expected

"""No kernel is let go of while an operation that is kept names it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ncclscope_service.store.records import KernelReferences

_END = 20_000
_NAMED = st.dictionaries(st.integers(0, _END - 1), st.integers(0, 1000), min_size=1, max_size=30)


@given(st.lists(_NAMED, max_size=5), st.lists(st.integers(0, _END), max_size=4).map(sorted))
def test_the_first_kernel_is_the_first_that_a_kept_operation_names(
    noted: list[dict[int, int]], firsts: list[int]
) -> None:
    named, kernels = KernelReferences(), np.full(_END, -1, np.int64)
    for each in noted:
        new = {operation: kernel for operation, kernel in each.items() if kernels[operation] < 0}
        for operation, kernel in new.items():
            kernels[operation] = kernel
        named.record(np.array(list(new), np.int64), np.array(list(new.values()), np.int64))
    for first in firsts:
        kept = kernels[first:]
        kept = kept[kept >= 0]
        assert named.first_from(first, kernels[first:]) == (kept.min() if len(kept) else None)


def test_nothing_is_named_without_kernels() -> None:
    assert KernelReferences().first_from(0, np.empty(0, np.int64)) is None

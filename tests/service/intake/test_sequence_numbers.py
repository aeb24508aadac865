"""Each member counts its own operations: all, collectives, kinds and pairs, in whatever portions they come."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from ncclscope_service.intake.communicators import NUMBERED_BY, SequenceNumbers
from ncclscope_service.store.rows import OPERATION_TEMPLATE, empty_operations
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, OPERATION_CODES

_NAMES = ("AllReduce", "AlltoAll", "Send", "Recv")


def _drawn(amount: int) -> tuple[Columns, Columns]:
    random = np.random.default_rng(7)
    operations = empty_operations(amount)
    operations["member"] = random.integers(0, 5, amount)
    templates: Columns = np.zeros(amount, np.dtype([(name, OPERATION_TEMPLATE[name]) for name in NUMBERED_BY]))
    templates["op"] = np.array([OPERATION_CODES[name] for name in _NAMES], np.uint8)[random.integers(0, 4, amount)]
    templates["root"], templates["nranks"] = random.integers(0, 3, amount), 8
    templates["count"] = random.integers(0, 2, amount)
    return operations, templates


@pytest.mark.parametrize("portion", [1, 7, 500])
def test_operations_are_numbered_as_one_after_the_other(portion: int) -> None:
    operations, templates = _drawn(500)
    numbers = SequenceNumbers()
    for begin in range(0, len(operations), portion):
        part = operations[begin : begin + portion]
        numbers.give(part, templates[begin : begin + portion], int(operations["member"].max()) + 1)
    seen = Counter[tuple[object, ...]]()
    for row, of in zip(operations, templates, strict=True):
        member, op, root = int(row["member"]), int(of["op"]), int(of["root"])
        pairwise = op in (OPERATION_CODES["Send"], OPERATION_CODES["Recv"])
        launched = op == OPERATION_CODES["AllReduce"] and of["count"] > 0
        expected = {
            "seq": ("all", member),
            "coll_seq": None if pairwise else ("collective", member),
            "pair_seq": ("pair", member, op, root) if pairwise else None,
            "kind_seq": ("kind", member, op) if launched else None,
        }
        for name, key in expected.items():
            assert row[name] == (NO_NUMBER if key is None else seen[key]), name
            if key is not None:
                seen[key] += 1

"""How often a rank calls each operation in one iteration, by kind of communicator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ncclscope_service.distinct import distinct_together
from ncclscope_service.export.selection import Selection
from ncclscope_service.export.signatures import op_name
from ncclscope_wire.terms import NO_NUMBER


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls of one operation by one rank in one iteration, over the ranks and iterations that have any."""

    median: float
    least: int
    most: int
    median_bytes: float


def calls_per_iteration(selection: Selection) -> Mapping[tuple[str, str | None], Calls]:
    """By (operation, parallelism); without operations whose iteration is not known. 0.2 s for a million operations."""
    store, part = selection.store, selection.operations
    iteration = part.column("iteration")
    chosen = np.flatnonzero(iteration != NO_NUMBER)
    if not len(chosen):
        return {}
    names: list[str | None] = [*dict.fromkeys([None, *(each.parallelism for each in store.communicators)])]
    # The last place of each is that of NO_NUMBER: operations of an unknown communicator.
    kind_of = np.asarray([*(names.index(each.parallelism) for each in store.communicators), 0], np.int64)
    communicator_of = np.asarray([*(each.communicator for each in store.members), NO_NUMBER], np.int64)
    ranks = (NO_NUMBER if each.global_rank is None else each.global_rank for each in store.members)
    rank_of = np.asarray([*ranks, NO_NUMBER], np.int64)
    members = part.column("member")[chosen].astype(np.intp)
    ops = store.operation_templates.rows["op"][part.column("template")[chosen].astype(np.intp)].astype(np.int64)
    columns, place = distinct_together(
        ops,
        kind_of[communicator_of[members]],
        part.column("process")[chosen].astype(np.int64),
        rank_of[members],
        iteration[chosen].astype(np.int64),
    )
    counts = np.bincount(place)
    moved = np.zeros(len(counts), np.int64)
    np.add.at(moved, place, np.maximum(part.column("message_bytes")[chosen].astype(np.int64), 0))
    pairs, group = distinct_together(columns[0], columns[1])
    found: dict[tuple[str, str | None], Calls] = {}
    for row, (op, kind) in enumerate(zip(pairs[0].tolist(), pairs[1].tolist(), strict=True)):
        mine = counts[group == row]
        found[op_name(op) or "", names[kind]] = Calls(
            float(np.median(mine)), int(mine.min()), int(mine.max()), float(np.median(moved[group == row]))
        )
    return found

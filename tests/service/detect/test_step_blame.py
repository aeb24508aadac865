"""The last steps of groups, in whatever order what belongs to them comes."""

from __future__ import annotations

import numpy as np

from ncclscope_service.detect.context import Context, Group
from ncclscope_service.detect.step_blame import StepBlames
from ncclscope_service.store import rows
from ncclscope_wire.batch import Columns

STEP_NS = 1_000_000_000
SIZES = {7: 4, 3: 2}
CONTEXT = Context(
    job="job",
    groups={
        index: Group(comm_id=f"{index:x}", parallelism="DP", global_ranks=tuple(range(size)), hosts=("a",) * size)
        for index, size in SIZES.items()
    },
)


def collectives(communicator: int, steps: range, seed: int = 0) -> Columns:
    """Six of each step."""
    random, amount = np.random.default_rng(seed), 6 * len(steps)
    made = np.zeros(amount, rows.COLLECTIVE)
    made["communicator"], made["coll_seq"] = communicator, np.arange(amount)
    made["op"] = random.integers(0, 2, amount)
    made["end_true_ns"] = np.repeat(steps, 6) * STEP_NS + 1
    made["last_rank"] = random.integers(0, SIZES[communicator], amount)
    made["blame_ns"], made["transfer_ns"], made["confidence"] = random.integers(1, 10**6, amount), 5, 0.9
    return made


def test_all_groups_are_summed_by_rank_and_step_in_whatever_order_their_collectives_come() -> None:
    told = np.concatenate([collectives(7, range(100, 120)), collectives(3, range(100, 110), 1)])
    blames = StepBlames()
    for part in np.array_split(np.random.default_rng(2).permutation(told), 9):
        blames.ingest_collectives(part, STEP_NS, CONTEXT, 64)
    for communicator, size in SIZES.items():
        mine = told[told["communicator"] == communicator]
        steps = mine["end_true_ns"] // STEP_NS
        found = blames.steps_at(communicator, np.unique(steps) * STEP_NS)
        expected = np.zeros((size, len(np.unique(steps))), np.int64)
        np.add.at(expected, (mine["last_rank"], steps - 100), mine["blame_ns"])
        assert found.blame_ns.tolist() == expected.tolist()
        assert set(found.hits.sum(axis=0).tolist()) == {6}
        rank = int(mine["last_rank"][0])
        largest = np.sort(mine["blame_ns"][(steps == 100) & (mine["last_rank"] == rank)])[::-1][:4]
        assert found.largest_ns[rank, 0, : len(largest)].tolist() == largest.tolist()


def test_the_newest_steps_are_remembered_and_older_ones_leave_nothing_behind() -> None:
    rolling, fresh = StepBlames(), StepBlames()
    told = collectives(7, range(100, 300))
    for part in np.split(told, 50):
        rolling.ingest_collectives(part, STEP_NS, CONTEXT, 20)
    fresh.ingest_collectives(told[-6 * 20 :], STEP_NS, CONTEXT, 20)
    rolling.ingest_collectives(told[:6], STEP_NS, CONTEXT, 20)  # too late
    kept, expected = (blames.history(7, 16) for blames in (rolling, fresh))
    assert kept.at_ns[-16:].tolist() == expected.at_ns[-16:].tolist()
    for name in ("blame_ns", "hits", "largest_ns", "largest_seq"):
        assert getattr(kept, name)[:, -16:].tolist() == getattr(expected, name)[:, -16:].tolist()


def test_evicted_communicators_leave_the_others_as_they_were() -> None:
    blames, alone = StepBlames(), StepBlames()
    for communicator in SIZES:
        blames.ingest_collectives(collectives(communicator, range(100, 110)), STEP_NS, CONTEXT, 64)
    alone.ingest_collectives(collectives(3, range(100, 110)), STEP_NS, CONTEXT, 64)
    blames.evict_communicators({7})
    assert blames.communicators() == [3]
    more = collectives(3, range(110, 120), 5)
    for each in (blames, alone):
        each.ingest_collectives(more, STEP_NS, CONTEXT, 64)
    assert blames.history(3).blame_ns.tolist() == alone.history(3).blame_ns.tolist()
    assert len(blames.judged([3], 4)) == 1

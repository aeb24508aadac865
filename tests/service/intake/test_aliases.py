"""How communicators are named, and how sentences name them: by what people can say, with the id behind it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest
from service.simulated_batches import SECOND_NS, advanced, simulated_batches

from ncclscope_service.intake.aliases import Aliases, names_of, with_names
from ncclscope_service.job.ranks import global_ranks
from ncclscope_service.pipeline import Pipeline
from ncclscope_service.store.records import Communicator, Identity, Member
from ncclscope_service.store.tables import Store
from ncclscope_simulator import SimulationConfig
from ncclscope_wire.batch import Batch

_NAMES = {("j", "0xa1"): "dp-2", ("j", "0xa1/3/0"): "tp-0", ("j", "~9f3e"): "c4-8"}


@pytest.mark.parametrize(
    ("sentence", "said"),
    [
        ("Rank 3 is late in DP group 0xa1 by 5 ms.", "Rank 3 is late in DP group dp-2 by 5 ms."),
        ("communicator 0xa1 (TENSOR) lost 5 %", "communicator dp-2 (TENSOR) lost 5 %"),
        ("TP group 0xa1/3/0: stuck since operation 7 of 0xa1.", "TP group tp-0: stuck since operation 7 of dp-2."),
        ("communicator ~9f3e hangs, 0xa1:12 came last", "communicator c4-8 hangs, dp-2:12 came last"),
        ("DP group 0xa1#2 hangs.", "DP group 0xa1#2 hangs."),
        ("DP group 0xb2 hangs, the log says c0xa1.", "DP group 0xb2 hangs, the log says c0xa1."),
        ("The clock of node02 was set.", "The clock of node02 was set."),
    ],
)
def test_a_sentence_has_the_names_of_communicators_in_the_place_of_their_ids(sentence: str, said: str) -> None:
    assert with_names(sentence, "j", _NAMES) == said
    assert with_names(sentence, "another job", _NAMES) == sentence


def _member(index: int, rank: int | None) -> Member:
    return Member(
        index=index, communicator=0, process=0, pointer=0, epoch=0, rank=0, cuda_device=None, bus_id=None,
        global_rank=rank,
    )  # fmt: skip


def _communicator(index: int, kind: str | None, *members: int, job: str = "a") -> Communicator:
    return Communicator(
        index=index, job=job, comm_id=f"0x{index}", size=2, identity=Identity.COMM_ID, parallelism=kind,
        members=dict(enumerate(members)),
    )  # fmt: skip


def _named(communicators: Sequence[Communicator], members: Sequence[Member]) -> list[str]:
    names = names_of(communicators, members)
    return [names[each.job, each.comm_id] for each in communicators]


def test_a_name_is_the_kind_and_the_lowest_rank_that_is_known() -> None:
    members = [_member(index, rank) for index, rank in enumerate([9, 8, 0, 1, 4, None])]
    asked = [_communicator(0, "TP", 0, 1), _communicator(1, "TP", 2, 3), _communicator(2, None, 4, 5)]
    assert _named(asked, members) == ["tp-8", "tp-0", "c2-4"]
    members[5].global_rank = 3
    assert _named(asked, members) == ["tp-8", "tp-0", "c2-3"]


def test_of_several_on_one_lowest_rank_the_first_that_it_created_has_the_plain_name() -> None:
    members = [_member(index, rank) for index, rank in enumerate([4, 0, 0, 4, 0, 0])]
    asked = [_communicator(0, "DP", 3, 5), _communicator(1, "DP", 0, 2), _communicator(2, "DP", 1)]
    asked += [_communicator(3, "DP", 4, job="another")]
    assert _named(asked, members) == ["dp-0.3", "dp-0.2", "dp-0", "dp-0"]


def test_where_no_rank_is_known_names_differ_all_the_same() -> None:
    members = [_member(index, None) for index in range(2)]
    assert _named([_communicator(0, "PP", 0), _communicator(1, None, 1)], members) == ["pp-x0", "c2-x1"]


def test_names_are_given_anew_only_if_something_is_known_better() -> None:
    aliases, members = Aliases(), [_member(0, 0), _member(1, 1)]
    asked = [_communicator(0, None, 0, 1)]
    aliases.update(asked, members)
    aliases.update(asked, members)
    assert (aliases[0], aliases.names_given) == ("c2-0", 1)
    asked[0].parallelism = "TP"
    aliases.update(asked, members)
    assert (aliases[0], aliases.names_given) == ("tp-0", 2)


def _shuffled(batches: list[Batch], seed: int) -> list[Batch]:
    """The same batches, those of each source in their order, sources in any."""
    by_source = {key: list(of) for key, of in groupby(sorted(batches, key=_source_key), key=_source_key)}
    turns = [key for key, of in by_source.items() for _ in of]
    random.Random(seed).shuffle(turns)
    return [by_source[key].pop(0) for key in turns]


def _source_key(batch: Batch) -> str:
    return batch.source.key


def _ranks_by_name(store: Store) -> dict[str, tuple[int, ...]]:
    names = names_of(store.communicators, store.members)
    return {
        names[each.job, each.comm_id]: tuple(sorted(global_ranks(store, each).values()))
        for each in store.listed_communicators()
    }


_JOBS = {
    "eight": SimulationConfig(iterations=6),
    "sixty-four": SimulationConfig(iterations=2, nodes=8, gpus=8, tp=8, pp=2, dp=4, layers=4, capture="none"),
    "unnamed": SimulationConfig(iterations=6, nccl="2.12"),
}


_COUNTS = {
    "eight": {"tp": 4, "dp": 4, "pp": 4, "embedding": 4, "world": 1},
    "sixty-four": {"tp": 8, "dp": 16, "pp": 32, "embedding": 32, "world": 1},
    "unnamed": {"tp": 4, "dp": 4, "pp": 4, "embedding": 4, "world": 1},
}


@pytest.mark.parametrize("job", _JOBS)
def test_two_runs_of_a_job_name_their_communicators_alike_in_whatever_order_data_comes(
    job: str, tmp_path: Path
) -> None:
    found: list[dict[str, tuple[int, ...]]] = []
    for run in (1, 2):
        batches = simulated_batches(replace(_JOBS[job], seed=run), tmp_path / str(run), portions=6)
        live = advanced(Pipeline(), _shuffled(batches, run))
        live.process_backlog(200 * SECOND_NS)
        found.append(_ranks_by_name(live.store))
        offline = Pipeline()
        for batch in _shuffled(batches, 10 + run):
            offline.ingest_batch(batch, agent="a", session="s", job="j")
        offline.finish(SECOND_NS)
        found.append(_ranks_by_name(offline.store))
    assert found[0] == found[1] == found[2] == found[3]
    assert all(name.endswith(f"-{ranks[0]}") for name, ranks in found[0].items()), found[0]
    counts = Counter(name.split("-")[0] for name in found[0])
    assert counts == _COUNTS[job]

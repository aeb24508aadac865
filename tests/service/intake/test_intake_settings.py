from __future__ import annotations

from ncclscope_service.intake.resolver import BatchResolver
from ncclscope_service.store.records import SETTINGS_KEPT
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Batch
from ncclscope_wire.facts import Fact, NetworkChosen, RingNeighbours
from ncclscope_wire.records import Counts, Source, SourceKind

SOURCE = Source(kind=SourceKind.NCCL_LOG, name="nccl.log", key="1-2-abc")


def ingested(*facts: Fact) -> Store:
    store = Store()
    batch = Batch(source=SOURCE, begin=0, end=10, facts=facts, counts=Counts(understood={"network": len(facts)}))
    BatchResolver(store).resolve_batch(batch, agent="a", session="s", job="llama")
    return store


def network(line: int) -> NetworkChosen:
    return NetworkChosen(line=line, host="node17", pid=1, tid=1, network="IB")


def test_settings_are_kept_by_type_with_their_job_and_source_and_the_oldest_are_forgotten() -> None:
    store = ingested(*map(network, range(SETTINGS_KEPT + 5)))
    kept = store.settings["NetworkChosen"]
    assert [(known.job, known.source, known.fact.line) for known in (kept[0], kept[-1])] == [
        ("llama", 0, 5),
        ("llama", 0, SETTINGS_KEPT + 4),
    ]
    assert store.understood["network"] == SETTINGS_KEPT + 5
    assert not store.processes


def test_other_facts_are_left_to_those_who_read_them() -> None:
    store = ingested(network(1), RingNeighbours(line=2, channel=0, previous=3, rank=0, next=1))
    assert set(store.settings) == {"NetworkChosen"}

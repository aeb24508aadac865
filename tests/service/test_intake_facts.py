from __future__ import annotations

from ncclscope_service.intake import Intake
from ncclscope_service.store import FACTS_KEPT, Store
from ncclscope_wire.batch import Batch
from ncclscope_wire.facts import NetworkChosen
from ncclscope_wire.records import Counts, Source, SourceKind

SOURCE = Source(kind=SourceKind.NCCL_LOG, name="nccl.log", key="1-2-abc")


def test_facts_are_kept_by_type_with_their_job_and_source_and_the_oldest_are_forgotten() -> None:
    store = Store()
    facts = tuple(NetworkChosen(line=line, host="node17", pid=1, tid=1, network="IB") for line in range(FACTS_KEPT + 5))
    counts = Counts(understood={"network": len(facts)})
    batch = Batch(source=SOURCE, begin=0, end=10, facts=facts, counts=counts)
    Intake(store).feed(batch, agent="a", session="s", job="llama")
    kept = store.facts["NetworkChosen"]
    assert [(known.job, known.source, known.fact.line) for known in (kept[0], kept[-1])] == [
        ("llama", 0, 5),
        ("llama", 0, FACTS_KEPT + 4),
    ]
    assert store.understood["network"] == FACTS_KEPT + 5
    assert not store.processes

"""Rings and trees that NCCL printed belong to the communicator that its thread was initialising."""

from __future__ import annotations

import numpy as np

from ncclscope_agent.sources.nccl_log.reader import NcclLogReader
from ncclscope_service.nccl.topology import Channels
from ncclscope_service.pipeline import Pipeline
from ncclscope_service.store.tables import Store
from ncclscope_wire.facts import RingNeighbours, RingOrder
from ncclscope_wire.records import Source, SourceKind


def store_of(*lines: str) -> Store:
    """What is known after one process's log; in `lines`, COMPLETE:P stands for the communicator of pointer P."""
    pipeline = Pipeline()
    reader = NcclLogReader(Source(kind=SourceKind.NCCL_LOG, name="rank0.log", key="rank0.log"))
    texts = []
    for line in lines:
        pointer = line.removeprefix("COMPLETE:")
        complete = (
            f"comm 0x{pointer} rank 0 nranks 4 cudaDev 0 nvmlDev 0 busId 1000 commId 0xc{pointer} - Init COMPLETE"
        )
        texts.append(f"node1:10:11 [0] NCCL INFO {complete if line.startswith('COMPLETE') else line}\n")
    for batch in [*reader.ingest_bytes("".join(texts).encode(), None), *reader.finish()]:
        pipeline.ingest_batch(batch, agent="a", session="s", job="j")
    return pipeline.store


def test_lines_belong_to_the_next_communicator_that_is_complete() -> None:
    rings, trees = ("Channel 00/02 : 0 2 1 3", "Channel 01/02 : 0 1 2 3"), "Trees [0] 2/-1/-1->0->-1 [1] 1/3/-1->0->2"
    store = store_of(*rings, trees, "COMPLETE:a0", "Channel 00/01 : 0 3 2 1", "COMPLETE:b0")
    first, second = store.channels[0], store.channels[1]
    assert [first.next_of(rank).tolist() for rank in range(4)] == [[2, 1], [3, 2], [1, 3], [0, 0]]
    assert second.next_of(0).tolist() == [3]
    neighbours, channels = first.neighbours_of(0)
    assert (sorted(neighbours.tolist()), channels) == ([1, 2, 2, 3], 2)
    assert first.neighbours_of(1)[1] == 0


def test_a_ring_that_was_cut_or_is_of_others_tells_nothing() -> None:
    store = store_of("Channel 00/03 : 0 1 2 3 ...", "Channel 01/03 : 0 1 2", "Ring 02 : 7 -> 0 -> 9", "COMPLETE:a0")
    assert store.channels[0].next_of(0).tolist() == []


def test_what_other_ranks_printed_is_added() -> None:
    mine, theirs = Channels(3), Channels(3)
    mine.add_fact(RingNeighbours(line=1, channel=0, rank=0, next=1))
    theirs.add_fact(RingNeighbours(line=1, channel=1, rank=1, next=2))
    mine.merge(theirs)
    assert mine.following.tolist() == [[1, -1, -1], [-1, 2, -1]]


def test_a_channel_that_nccl_cannot_have_is_left_aside() -> None:
    channels = Channels(2)
    channels.add_fact(RingOrder(line=1, channel=64, ranks=(0, 1)))
    assert np.size(channels.following) == 0

"""A job without logs, of which NCCL's RAS alone says something: the rank that stays behind is named."""

from __future__ import annotations

from agent.ras_server import RasServer, json_status, missing, rank

from ncclscope_agent.node.ras_port import RasFollower
from ncclscope_agent.sources.ras import LOOKS
from ncclscope_service.pipeline import Pipeline
from ncclscope_service.store.records import FindingKind

SECOND = 1_000_000_000


def _answer(_: bool) -> bytes:
    ranks = [rank(number, AllReduce=100 if number == 5 else 101) for number in range(7)]
    return json_status(("0xc0ffee", ranks, [missing(7, dead=True)]))


def test_what_ras_says_of_two_nodes_becomes_one_finding_for_each_trouble() -> None:
    pipeline = Pipeline()
    with RasServer(_answer, knows_json=True) as server:
        for agent in ("node0", "node1"):
            follower = RasFollower("127.0.0.1", server.port)
            for nth in range(LOOKS + 1):
                for batch in follower.poll(nth * SECOND):
                    pipeline.ingest_batch(batch, agent=agent, session=agent, job="job")
    pipeline.finish(LOOKS * SECOND)
    found = {finding.summary: finding for finding in pipeline.store.findings}
    assert {finding.kind for finding in found.values()} == {FindingKind.REPORTED_FAILURE}
    late, gone = sorted(found)
    says = "NCCL's RAS says: rank"
    assert gone.startswith(f"{says} 7 (process 107 on 10.0.0.1) of communicator 0xc0ffee cannot be reached")
    assert late == (
        f"{says} 5 (process 105 on 10.0.0.1) of communicator 0xc0ffee stays behind: "
        "launched 100 x AllReduce and others 101"
    )
    assert (found[gone].ranks, found[late].ranks) == ((7,), (5,))

"""What each situation launches, row by row: NCCL's own rules, as its source has them from 2.8 to 2.30.

*Source:* NCCL `src/enqueue.cc` (taskAppend, ncclLaunchPrepare, scheduleCollTasksToPlan, scheduleP2pTasksToPlan),
`src/device/onerank.cu`, `src/ce_coll.cc`, `src/proxy.cc:ncclProxyStart`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from ncclscope_service.align.expected_launches import Translator
from ncclscope_service.align.records import blank_operations
from ncclscope_service.intake.call_groups import ALONE
from ncclscope_service.intake.tuning import NO_CHANNELS
from ncclscope_service.nccl.launch_rules import KernelClass, rules_of
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, OPERATION_CODES

WITH_COUNTS = ("2.12.12", "2.18.3", "2.21.5", "2.26.6")
ALL = ("2.8.4", "2.10.3", "2.12.12", "2.14.3", "2.18.3", "2.21.5", "2.26.6", "2.28.9", "2.30.7")
LATE = ("2.28.9", "2.30.7")

AR, AG, RS = KernelClass.ALL_REDUCE, KernelClass.ALL_GATHER, KernelClass.REDUCE_SCATTER
BC, P2P, V = KernelClass.BROADCAST, KernelClass.SEND_RECV, KernelClass.ALL_GATHER_V


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Lines of one process, and the launches they lead to."""

    name: str
    versions: Sequence[str]
    ops: Sequence[str]
    told: Mapping[str, object] = field(default_factory=dict[str, object])
    """Columns: one value for all, or one each."""
    launches: Sequence[Sequence[int]]
    """Operations of each launch; those of none launch nothing."""
    shows: Sequence[set[KernelClass]] = ()
    """Classes that each launch may show, among others."""
    never_shows: Sequence[set[KernelClass]] = ()


GROUP = {"group": 7, "op_count": 3}
SITUATIONS = (
    Situation(
        name="one collective, not grouped: one kernel",
        versions=ALL,
        ops=("AllReduce", "AllGather"),
        told={"group": ALONE, "op_count": [3, 4]},
        launches=[[0], [1]],
        shows=[{AR}, {AG}],
    ),
    Situation(
        name="collectives of one kind in one group: one kernel",
        versions=ALL,
        ops=("AllReduce",) * 4,
        told={**GROUP, "count": [4096, 16, 1024, 64]},
        launches=[[0, 1, 2, 3]],
        shows=[{AR}],
    ),
    Situation(
        name="different collectives in one group, sorted by size: one kernel of either name",
        versions=ALL,
        ops=("AllReduce", "AllGather", "ReduceScatter"),
        told={**GROUP, "count": [16, 4096, 1024]},
        launches=[[0, 1, 2]],
        shows=[{AR, AG, RS}],
    ),
    Situation(
        name="a group that opCount tells: one kernel",
        versions=WITH_COUNTS,
        ops=("AllReduce", "AllReduce", "AllReduce"),
        told={"op_count": [3, 3, 4], "count": [16, 4096, 16]},
        launches=[[0, 1], [2]],
    ),
    Situation(
        name="a group of several plans: its lines stay together, the next count is that many more",
        versions=WITH_COUNTS,
        ops=("AllReduce", "AllReduce", "AllReduce"),
        told={"op_count": [3, 3, 6]},
        launches=[[0, 1], [2]],
    ),
    Situation(
        name="all Sends and Recvs of one communicator in one group: one SendRecv",
        versions=ALL,
        ops=("Send", "Recv") * 8,
        told=GROUP,
        launches=[list(range(16))],
        shows=[{P2P}],
    ),
    Situation(
        name="Send and Recv not grouped: one SendRecv each",
        versions=ALL,
        ops=("Send", "Recv"),
        told={"group": ALONE, "op_count": [3, 4]},
        launches=[[0], [1]],
        shows=[{P2P}, {P2P}],
    ),
    Situation(
        name="AlltoAll, Gather, Scatter: lowered to one SendRecv each",
        versions=LATE,
        ops=("AlltoAll", "Gather", "Scatter"),
        told={"group": ALONE},
        launches=[[0], [1], [2]],
        shows=[{P2P}, {P2P}, {P2P}],
    ),
    Situation(
        name="AlltoAll in a group with Sends: fused",
        versions=LATE,
        ops=("AlltoAll", "Send", "Recv"),
        told=GROUP,
        launches=[[0, 1, 2]],
        shows=[{P2P}],
    ),
    Situation(
        name="collectives and Sends in one group: one plan, either name",
        versions=ALL,
        ops=("AllReduce", "Send", "Recv"),
        told=GROUP,
        launches=[[0, 1, 2]],
        shows=[{AR, P2P}],
    ),
    Situation(
        name="one rank: nothing, or a copy",
        versions=ALL,
        ops=("AllReduce", "AllGather", "Broadcast", "ReduceScatter", "Reduce"),
        told={"one_rank": True, "nranks": 1},
        launches=[],
    ),
    Situation(
        name="one rank with a user reduction, 2.11 to 2.18: shown as SendRecv",
        versions=("2.11.4", "2.14.3", "2.18.3"),
        ops=("AllReduce", "AllGather"),
        told={"one_rank": True, "reduction": 77_777},
        launches=[[0]],
        shows=[{P2P}],
    ),
    Situation(
        name="one rank with a user reduction or an average of floats, from 2.19: oneRankReduce",
        versions=("2.19.3", "2.26.6", "2.30.7"),
        ops=("AllReduce", "AllReduce", "AllReduce"),
        told={"one_rank": True, "reduction": [77_777, 4, 4], "data_type": [7, 7, 2], "op_count": [3, 4, 5]},
        launches=[[0], [1]],
        shows=[{KernelClass.ONE_RANK_REDUCE}] * 2,
    ),
    Situation(
        name="Send and Recv to oneself: one SendRecv",
        versions=ALL,
        ops=("Send", "Recv"),
        told={**GROUP, "one_rank": True, "nranks": 1},
        launches=[[0, 1]],
        shows=[{P2P}],
    ),
    Situation(
        name="collectives of count 0 before 2.20.3: launched",
        versions=("2.8.4", "2.18.3", "2.19.4"),
        ops=("AllGather",),
        told={"count": 0},
        launches=[[0]],
    ),
    Situation(
        name="collectives of count 0 from 2.20.3: dropped, Sends and Recvs not",
        versions=("2.20.3", "2.26.6", "2.30.7"),
        ops=("AllGather", "Send", "Recv"),
        told={"count": 0, "group": 7},
        launches=[[1, 2]],
    ),
    Situation(
        name="collectives on copy engines: no kernel",
        versions=LATE,
        ops=("AllGather", "AllGather"),
        told={"channels": [NO_CHANNELS, NO_NUMBER], "group": ALONE},
        launches=[[1]],
    ),
    Situation(
        name="one-sided operations: no kernel",
        versions=("2.29.2", "2.30.7"),
        ops=("PutSignal", "Signal", "WaitSignal"),
        launches=[],
    ),
    Situation(
        name="Broadcasts of one group with several roots, from 2.29: AllGatherV",
        versions=("2.29.2", "2.30.7"),
        ops=("Broadcast", "Broadcast"),
        told={**GROUP, "root": [0, 1]},
        launches=[[0, 1]],
        shows=[{V}],
    ),
    Situation(
        name="Broadcasts of one group with one root: Broadcast",
        versions=("2.29.2", "2.30.7"),
        ops=("Broadcast", "Broadcast"),
        told={**GROUP, "root": 1},
        launches=[[0, 1]],
        shows=[{BC}],
        never_shows=[{V}],
    ),
    Situation(
        name="Broadcasts of several roots before 2.29: Broadcast",
        versions=("2.18.3", "2.28.9"),
        ops=("Broadcast", "Broadcast"),
        told={**GROUP, "root": [0, 1]},
        launches=[[0, 1]],
        shows=[{BC}],
        never_shows=[{V}],
    ),
    Situation(
        name="a group over several communicators: one kernel of each",
        versions=ALL,
        ops=("AllReduce", "AllReduce", "AllReduce", "AllReduce"),
        told={"group": 7, "member": [0, 1, 0, 1]},
        launches=[[0, 2], [1, 3]],
    ),
    Situation(
        name="2.13: collectives that do not run LL are shown as SendRecv",
        versions=("2.13.4",),
        ops=("AllReduce",),
        launches=[[0]],
        shows=[{AR, P2P}],
    ),
)


def operations(situation: Situation) -> Columns:
    rows = blank_operations(len(situation.ops))
    rows["id"] = np.arange(len(rows))
    rows["op"] = [OPERATION_CODES[name] for name in situation.ops]
    rows["count"], rows["nranks"], rows["data_type"], rows["tid"] = 1024, 4, 7, 9
    for name, value in situation.told.items():
        rows[name] = value
    return rows


@pytest.mark.parametrize(
    ("situation", "version"),
    [(each, version) for each in SITUATIONS for version in each.versions],
    ids=lambda value: value.name if isinstance(value, Situation) else value,
)
def test_lines_lead_to_the_launches_that_nccl_makes(situation: Situation, version: str) -> None:
    translator = Translator(rules_of(version))
    rows = operations(situation)
    silent = translator.ingest_operations(rows).tolist()
    launches, ids = translator.drain_launches(final=True)
    found = [ids[row["begin"] : row["end"]].tolist() for row in launches]
    assert found == [list(each) for each in situation.launches]
    assert silent == sorted(set(range(len(rows))) - {each for launch in found for each in launch})
    for launch, shown in zip(launches, situation.shows, strict=False):
        assert all(int(launch["classes"]) >> kind & 1 for kind in shown)
    for launch, hidden in zip(launches, situation.never_shows, strict=False):
        assert not any(int(launch["classes"]) >> kind & 1 for kind in hidden)


def test_the_step_behind_a_group_of_several_plans_is_told() -> None:
    several = next(each for each in SITUATIONS if "several plans" in each.name)
    translator = Translator(rules_of("2.21.5"))
    translator.ingest_operations(operations(several))
    assert translator.drain_launches(final=True)[0]["lines_lost"].tolist() == [NO_NUMBER, 2]

"""Lines to kernels, situation by situation and version by version, as docs/internals/alignment.md has them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from ncclscope_service.align.expected_launches import Translator
from ncclscope_service.align.records import blank_operations
from ncclscope_service.intake.call_groups import ALONE
from ncclscope_service.nccl.launch_rules import KernelClass, parse_kernel_name, rules_of
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import OPERATION_CODES

AVG, USER = 4, 1_583_027_713


@dataclass(frozen=True, slots=True)
class Situation:
    """What is called, and what is launched: the operations of each launch with a name that its kernel may have."""

    name: str
    versions: tuple[str, ...]
    calls: tuple[str, ...]
    launches: tuple[tuple[tuple[int, ...], str], ...]
    columns: dict[str, object] = field(default_factory=dict[str, object])
    never: str = ""
    """A name that the kernels cannot have."""


_LL = "ncclKernel_AllReduce_RING_LL_Sum_float"
_DEV = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
_P2P, _OLD_P2P = "ncclDevKernel_SendRecv", "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t"
_ONE_RANK = "void oneRankReduce<FuncPreMulSum<float>>(void *, void *, unsigned long, unsigned long, bool)"
_ALL = ("2.8.4", "2.11.4", "2.12.12", "2.18.3", "2.22.3", "2.27.7", "2.30.7")

_TABLE = (
    Situation("an ungrouped collective", ("2.8.4", "2.18.3"), ("AllReduce",), (((0,), _LL),), {"group": ALONE}),
    Situation("an ungrouped collective", ("2.19.3", "2.30.7"), ("AllReduce",), (((0,), _DEV),), {"group": ALONE}),
    Situation("collectives of one group", _ALL[3:], ("AllReduce",) * 3, (((0, 1, 2), ""),), {"group": 1}),
    Situation(
        "different collectives of one group", _ALL[4:], ("AllReduce", "AllGather"), (((0, 1), _DEV),), {"group": 1}
    ),
    Situation(
        "Sends and Recvs of one group", _ALL[:4], ("Send", "Recv") * 2, (((0, 1, 2, 3), _OLD_P2P),), {"group": 1}
    ),
    Situation("Sends and Recvs of one group", _ALL[4:], ("Send", "Recv") * 2, (((0, 1, 2, 3), _P2P),), {"group": 1}),
    Situation("Send and Recv not grouped", _ALL[4:], ("Send", "Recv"), (((0,), _P2P), ((1,), _P2P)), {"group": ALONE}),
    Situation("AlltoAll lowered to Sends and Recvs", ("2.28.3", "2.30.7"), ("AlltoAll",), (((0,), _P2P),)),
    Situation("Gather and Scatter lowered", ("2.28.3",), ("Gather", "Scatter"), (((0, 1), _P2P),), {"group": 1}),
    Situation(
        "AlltoAll fused with a Send of its group", ("2.28.3",), ("AlltoAll", "Send"), (((0, 1), _P2P),), {"group": 1}
    ),
    Situation("a mixed group, shown as SendRecv", _ALL[4:], ("AllReduce", "Send"), (((0, 1), _P2P),), {"group": 1}),
    Situation(
        "a mixed group, shown as the collective", _ALL[4:], ("AllReduce", "Send"), (((0, 1), _DEV),), {"group": 1}
    ),
    Situation("one rank", _ALL, ("AllReduce", "AllGather", "Broadcast"), (), {"one_rank": True}),
    Situation(
        "one rank, user reduction, before it existed",
        ("2.8.4",),
        ("AllReduce",),
        (),
        {"one_rank": True, "reduction": USER},
    ),
    Situation(
        "one rank, user reduction",
        ("2.11.4", "2.18.3"),
        ("AllReduce",),
        (((0,), _OLD_P2P),),
        {"one_rank": True, "reduction": USER},
    ),
    Situation(
        "one rank, user reduction",
        ("2.19.3", "2.30.7"),
        ("AllReduce",),
        (((0,), _ONE_RANK),),
        {"one_rank": True, "reduction": USER},
    ),
    Situation("one rank, average of floats", ("2.18.3",), ("AllReduce",), (), {"one_rank": True, "reduction": AVG}),
    Situation(
        "one rank, average of floats",
        ("2.19.3", "2.30.7"),
        ("AllReduce",),
        (((0,), _ONE_RANK),),
        {"one_rank": True, "reduction": AVG},
    ),
    Situation(
        "one rank, Send and Recv to itself",
        _ALL[4:],
        ("Send", "Recv"),
        (((0, 1), _P2P),),
        {"one_rank": True, "group": 1},
    ),
    Situation("an empty collective", ("2.8.4", "2.19.3"), ("AllReduce",), (((0,), ""),), {"count": 0}),
    Situation("an empty collective", ("2.20.3", "2.30.7"), ("AllReduce",), (), {"count": 0}),
    Situation("an empty Send", ("2.20.3", "2.30.7"), ("Send",), (((0,), _P2P),), {"count": 0, "group": ALONE}),
    Situation("one-sided operations", ("2.29.2", "2.30.7"), ("PutSignal", "Signal", "WaitSignal"), ()),
    Situation(
        "Broadcasts of several roots in one group",
        ("2.29.2", "2.30.7"),
        ("Broadcast", "Broadcast"),
        (((0, 1), "ncclDevKernel_AllGatherV_RING_LL"),),
        {"group": 1, "root": [0, 1]},
    ),
    Situation(
        "Broadcasts of one root in one group",
        ("2.28.3", "2.30.7"),
        ("Broadcast", "Broadcast"),
        (((0, 1), "ncclDevKernel_Broadcast_RING_LL"),),
        {"group": 1, "root": 3},
        never="ncclDevKernel_AllGatherV_RING_LL",
    ),
    Situation(
        "a Broadcast that is not grouped",
        ("2.28.3", "2.29.2"),
        ("Broadcast",),
        (((0,), "ncclDevKernel_Broadcast_RING_LL"),),
        {"group": ALONE},
        never="ncclDevKernel_AllGatherV_RING_LL",
    ),
    Situation(
        "Broadcasts of several roots before AllGatherV",
        ("2.28.3",),
        ("Broadcast", "Broadcast"),
        (((0, 1), "ncclDevKernel_Broadcast_RING_LL"),),
        {"group": 1, "root": [0, 1]},
        never="ncclDevKernel_AllGatherV_RING_LL",
    ),
    Situation(
        "Broadcasts of which no group is known",
        ("2.29.2",),
        ("Broadcast",),
        (((0,), "ncclDevKernel_AllGatherV_RING_LL"),),
        {"root": 3},
    ),
    Situation(
        "copied by copy engines, as a TUNING line said",
        ("2.29.2", "2.30.7"),
        ("AllGather", "AlltoAll", "AllGather"),
        (((2,), _DEV.replace("AllReduce_Sum_f32", "AllGather")),),
        {"channels": [0, 0, 4], "group": ALONE},
    ),
    Situation(
        "a group over several communicators",
        _ALL,
        ("AllReduce", "AllReduce", "AllReduce"),
        (((0, 2), ""), ((1,), "")),
        {"group": 1, "member": [0, 1, 0]},
    ),
    Situation(
        "2.13 shows SendRecv for what is not LL", ("2.13.4",), ("AllReduce",), (((0,), _OLD_P2P),), {"group": ALONE}
    ),
    Situation(
        "a symmetric kernel",
        ("2.27.7",),
        ("AllReduce",),
        (((0,), "ncclSymDevKernel_AllReduce_RSxLDMC_AGxSTMC_sum_f32"),),
    ),
    Situation(
        "a symmetric kernel", ("2.28.3", "2.30.7"), ("AllGather",), (((0,), "ncclSymkDevKernel_AllGather_STMC"),)
    ),
    Situation(
        "a filtered build", ("2.19.3", "2.30.7"), ("AllReduce",), (((0,), "ncclDevKernel_Generic"),), {"group": ALONE}
    ),
)


@pytest.mark.parametrize(
    ("situation", "version"),
    [
        pytest.param(situation, version, id=f"{situation.name}-{version}")
        for situation in _TABLE
        for version in situation.versions
    ],
)
def test_lines_lead_to_the_kernels_of_their_situation(situation: Situation, version: str) -> None:
    translator = Translator(rules_of(version))
    rows = _operations(situation)
    silent = translator.ingest_operations(rows)
    launches, ids = translator.drain_launches(final=True)
    assert [tuple(ids[row["begin"] : row["end"]].tolist()) for row in launches] == [of for of, _ in situation.launches]
    launched = {one for of, _ in situation.launches for one in of}
    assert set(silent.tolist()) == set(range(len(rows))) - launched
    for row, (_, name) in zip(launches, situation.launches, strict=True):
        if name:
            kernel_class = parse_kernel_name(name).kernel_class
            assert kernel_class is not KernelClass.UNKNOWN
            assert int(row["classes"]) >> int(kernel_class) & 1, f"{name} is not expected"
        if situation.never:
            assert not int(row["classes"]) >> int(parse_kernel_name(situation.never).kernel_class) & 1


def _operations(situation: Situation) -> Columns:
    rows = blank_operations(len(situation.calls))
    rows["id"] = np.arange(len(rows))
    rows["op"] = [OPERATION_CODES[name] for name in situation.calls]
    rows["count"], rows["nranks"], rows["data_type"], rows["tid"] = 1024, 4, 7, 9
    for name, value in situation.columns.items():
        rows[name] = value
    return rows

"""What PyTorch calls a collective, in NCCL's terms.

The profiler notes each call of a process group as `record_param_comms` with the group, the element type and how many
elements go in and come out of this rank; from PyTorch 2.3 on the kernel's event repeats it. NCCL's count is per rank:
what goes in for an AllGather, what comes out of a ReduceScatter, what goes to each rank in an AlltoAll.
*Source:* PyTorch `torch/csrc/profiler/util.cpp:saveNcclMeta`,
`torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp` (RECORD_PARAM_COMMS_DATA), 2.1 to 2.11.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from types import MappingProxyType
from typing import Final

from ncclscope_agent.sources.kineto.json_stream import number_of, text_of
from ncclscope_wire.terms import DATA_TYPES, NO_NUMBER, OPERATION_CODES


class _Count(Enum):
    """Which number of elements NCCL's count is."""

    IN = auto()
    OUT = auto()
    IN_PER_RANK = auto()


_CALLS: Final[Mapping[str, tuple[str, _Count]]] = MappingProxyType(
    {
        "allreduce": ("AllReduce", _Count.IN),
        "allreduce_coalesced": ("AllReduce", _Count.IN),
        "barrier": ("AllReduce", _Count.IN),
        "broadcast": ("Broadcast", _Count.IN),
        "_broadcast_oop": ("Broadcast", _Count.IN),
        "reduce": ("Reduce", _Count.IN),
        "_reduce_oop": ("Reduce", _Count.IN),
        "all_gather": ("AllGather", _Count.IN),
        "_allgather_base": ("AllGather", _Count.IN),
        "allgather_into_tensor_coalesced": ("AllGather", _Count.IN),
        "reduce_scatter": ("ReduceScatter", _Count.OUT),
        "_reduce_scatter_base": ("ReduceScatter", _Count.OUT),
        "reduce_scatter_tensor_coalesced": ("ReduceScatter", _Count.OUT),
        "all_to_all": ("AlltoAll", _Count.IN_PER_RANK),
        "all_to_allv": ("AlltoAll", _Count.IN_PER_RANK),
        "gather": ("Gather", _Count.IN),
        "scatter": ("Scatter", _Count.OUT),
        "send": ("Send", _Count.IN),
        "recv": ("Recv", _Count.OUT),
    }
)
_NO_CALLS: Final = frozenset({"", "wait", "init", "coalesced", "startCoalescing", "endCoalescing"})
"""Notes about a group that move no data themselves."""

_DATA_TYPES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "Byte": "uint8",
        "Char": "int8",
        "Bool": "uint8",
        "Int": "int32",
        "Long": "int64",
        "Half": "float16",
        "Float": "float32",
        "Double": "float64",
        "BFloat16": "bfloat16",
        "Float8_e4m3fn": "float8e4m3",
        "Float8_e5m2": "float8e5m2",
    }
)
"""c10::ScalarType to ncclDataType_t. *Source:* `torch/csrc/distributed/c10d/NCCLUtils.hpp`."""
_NUMBERS: Final = {data_type.name: number for number, data_type in enumerate(DATA_TYPES)}

_MOST_RANKS: Final = 1 << 20
_MOST_RANKS_OF_ALL: Final = 1 << 21
"""Of the groups of a trace together: a few bytes may name a group of a million."""
_MOST_NAMES: Final = 1 << 16
"""Of groups, as events name them."""
_LARGEST_RANK: Final = 2**31 - 1
_LONGEST_NAME: Final = 4096
_LONGEST_DESCRIPTION: Final = 128
"""As `TorchCommunicator` takes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A process group, as a trace names it."""

    name: str
    ranks: tuple[int, ...]
    """Global ranks, in the order of the group's own."""
    description: str = field(default="", compare=False)
    """What the job calls it ("TP", "mesh_dp"); "" if it is not told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a process group."""

    op: str
    group: Group
    count: int
    """As NCCL counts: elements of one rank."""
    data_type: int
    """ncclDataType_t."""
    peer: int
    """The other rank of a Send or Recv, in the group; NO_NUMBER for collectives, whose root is not told."""

    @property
    def code(self) -> int:
        """The code of its operation (`terms.OPERATIONS`)."""
        return OPERATION_CODES[self.op]


class CallReader:
    """Calls from the arguments of events, by the groups that the trace lists."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, str], Group | None] = {}
        self._listed: dict[str, Group] = {}
        self._ranks_left = _MOST_RANKS_OF_ALL

    def learn(self, distributed: object) -> None:
        """Takes the member `distributedInfo` of a trace: events cut the ranks of large groups short."""
        listed = distributed.get("pg_config") if isinstance(distributed, Mapping) else None
        for entry in listed if isinstance(listed, list) else ():
            if isinstance(entry, Mapping) and isinstance(entry.get("pg_name"), str):
                name, ranks = text_of(entry["pg_name"], _LONGEST_NAME), _ranks(entry.get("ranks"))
                if ranks is not None and self._has_room_for(ranks):
                    self._listed[name] = _group_of(name, ranks, entry.get("pg_desc"))

    def call(self, arguments: Mapping[str, object]) -> Call | str | None:
        """The call that these arguments describe; a reason if it cannot be told, None if they describe none.

        Reasons: "unknown_collective", "without_group" (traces before PyTorch 2.3 name none), "incomplete".
        """
        name = arguments.get("Collective name")
        if not isinstance(name, str):
            return "without_group"
        if name in _NO_CALLS:
            return None
        known = _CALLS.get(name)
        if known is None:
            return "unknown_collective"
        op, counted = known
        group = self._group(arguments)
        if group is None:
            return "without_group"
        data_type = _NUMBERS.get(_DATA_TYPES.get(str(arguments.get("dtype")), ""))
        count = number_of(arguments.get("Out msg nelems" if counted is _Count.OUT else "In msg nelems"))
        peer = self._peer(op, group, arguments)
        if data_type is None or count is None or peer is None:
            return "incomplete"
        if counted is _Count.IN_PER_RANK:
            count //= len(group.ranks)
        return Call(op=op, group=group, count=count, data_type=data_type, peer=peer)

    def groups(self) -> list[Group]:
        """The groups that the trace lists, and those that calls were of: a name may come again with other ranks."""
        return list(dict.fromkeys((*self._listed.values(), *filter(None, self._groups.values()))))

    def _peer(self, op: str, group: Group, arguments: Mapping[str, object]) -> int | None:
        if op not in ("Send", "Recv"):
            return NO_NUMBER
        peer = number_of(arguments.get("Dst Rank" if op == "Send" else "Src Rank"))
        return group.ranks.index(peer) if peer in group.ranks else None

    def _group(self, arguments: Mapping[str, object]) -> Group | None:
        name, ranks = arguments.get("Process Group Name"), arguments.get("Process Group Ranks")
        if not isinstance(name, str):
            return None
        name = text_of(name, _LONGEST_NAME)
        key = (name, str(ranks))
        if key not in self._groups:
            if len(self._groups) >= _MOST_NAMES:
                return None
            found = self._listed.get(name) or _group(name, ranks, arguments, self._ranks_left)
            self._groups[key] = found if found is None or self._has_room_for(found.ranks) else None
        return self._groups[key]

    def _has_room_for(self, ranks: tuple[int, ...]) -> bool:
        """Whether these may be remembered too."""
        self._ranks_left -= len(ranks)
        return self._ranks_left >= 0


def _group(name: str, ranks: object, arguments: Mapping[str, object], most: int) -> Group | None:
    """The group that these arguments describe; None if they do not, or it has more ranks than `most`."""
    found = _ranks(ranks)
    size = number_of(arguments.get("Group size"))
    if found is None or len(found) != size:  # cut short: every so many ranks from the first on, if it says so
        first, stride = number_of(arguments.get("Global rank start")), number_of(arguments.get("Global rank stride"))
        if first is None or not stride or not size or size > min(most, _MOST_RANKS):
            return None
        if first + (size - 1) * stride > _LARGEST_RANK:
            return None
        found = tuple(range(first, first + size * stride, stride))
    return _group_of(name, found, arguments.get("Process Group Description"))


def _group_of(name: str, ranks: tuple[int, ...], description: object) -> Group:
    return Group(name=name, ranks=ranks, description=text_of(description, _LONGEST_DESCRIPTION))


def _ranks(value: object) -> tuple[int, ...] | None:
    """Ranks from a list or from its text; None if it is cut short ("[0, 1, ..., 63]") or something else."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if not isinstance(value, list) or not value or len(value) > _MOST_RANKS:
        return None
    ranks = tuple(rank for rank in value if number_of(rank, _LARGEST_RANK) is not None)
    return ranks if len(ranks) == len(value) == len(set(ranks)) else None

"""What kind of parallelism a communicator serves: from the sizes a user gives, else from what it carries.

Rules, in the order in which they are tried:

1. All ranks of the job, and more than one: WORLD, unless all that it carries is one kind of parallelism
   (a pure data-parallel job has no smaller group).
2. Only Send and Recv: PP; all-to-all (AlltoAll, or Send/Recv with every peer of three ranks or more): EP.
3. Sizes given (`--tp 2 --dp 4`): Megatron-LM's order of ranks puts TP next to each other, then CP, DP, and PP
   outermost, so size and stride decide. Source: Megatron-LM `core/parallel_state.py` (default order
   tp-cp-ep-dp-pp).
4. Two ranks that carry only reductions and are the ends of a pipeline: EMBEDDING.
5. A rank's busiest communicator, if it stays inside one node and is much busier than the next: TP. What is
   left carries gradients or parameters once per iteration: DP.

Every answer has a confidence; where nothing decides, the answer is None.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.ranks import global_ranks, hosts_of
from ncclscope_service.rows import Communicator
from ncclscope_service.store import Store
from ncclscope_wire.terms import OPERATION_CODES

_SEND = OPERATION_CODES["Send"]
_RECV = OPERATION_CODES["Recv"]
_ALL_TO_ALL = OPERATION_CODES["AlltoAll"]
_BUSIER = 4
"""TP carries operations of every layer, DP of every bucket: in Megatron shapes a factor of 4 and more apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the parallel dimensions as the user gave them; None = not given."""

    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    ep: int | None = None
    cp: int | None = None

    def is_empty(self) -> bool:
        """True when the user gave none."""
        return all(size is None for size in (self.tp, self.pp, self.dp, self.ep, self.cp))


@dataclass(slots=True)
class _Traffic:
    """What a communicator has carried."""

    operations: int = 0
    by_op: dict[int, int] | None = None

    def share(self, *codes: int) -> float:
        return sum((self.by_op or {}).get(code, 0) for code in codes) / self.operations if self.operations else 0.0


def assign_parallelism(known: Store, peers: Mapping[int, int], sizes: Sizes | None = None) -> None:
    """Sets parallelism and its confidence on every communicator.

    `peers` is, per communicator, the largest number of distinct Send/Recv peers that one of its members had.
    """
    traffic = _traffic(known)
    by_job: dict[str, list[Communicator]] = defaultdict(list)
    for communicator in known.listed_communicators():
        by_job[communicator.job].append(communicator)
    for communicators in by_job.values():
        _assign_job(known, communicators, traffic, peers, sizes or Sizes())


def _traffic(known: Store) -> dict[int, _Traffic]:
    traffic: dict[int, _Traffic] = defaultdict(_Traffic)
    series = known.series.rows
    for communicator, op, operations in zip(
        series["communicator"].tolist(), series["op"].tolist(), series["operations"].tolist(), strict=True
    ):
        of = traffic[communicator]
        of.operations += operations
        by_op = of.by_op = of.by_op or {}
        by_op[op] = by_op.get(op, 0) + operations
    return traffic


def _assign_job(
    known: Store,
    communicators: list[Communicator],
    traffic: Mapping[int, _Traffic],
    peers: Mapping[int, int],
    sizes: Sizes,
) -> None:
    seen = {rank for communicator in communicators for rank in global_ranks(known, communicator).values()}
    world = max(len(seen), max((communicator.size for communicator in communicators), default=0))
    open_ones: list[Communicator] = []
    for communicator in communicators:
        carried = traffic.get(communicator.index, _Traffic())
        named = _by_kind(communicator, carried, peers.get(communicator.index, 0), world, sizes)
        if named is None and not sizes.is_empty():
            exchanges = carried.share(_SEND, _RECV) > 0
            named = _by_sizes(_seen_ranks(known, communicator), communicator.size, world, sizes, exchanges=exchanges)
        if named is None:
            open_ones.append(communicator)
            continue
        communicator.parallelism, communicator.parallelism_confidence = named
    _by_busyness(known, open_ones, communicators, traffic, world)


def _by_kind(
    communicator: Communicator, carried: _Traffic, peers: int, world: int, sizes: Sizes
) -> tuple[str, float] | None:
    """What the mix of operations alone decides."""
    if communicator.size <= 1:
        return None
    if carried.share(_ALL_TO_ALL) > 0.5:
        return "EP", 0.9
    if carried.share(_SEND, _RECV) > 0.9:
        if communicator.size > 2 and peers >= communicator.size - 1:
            return "EP", 0.8
        return "PP", 0.9
    if communicator.size == world and world > 1 and not _is_only_dimension(world, sizes):
        return "WORLD", 0.8
    return None


def _is_only_dimension(world: int, sizes: Sizes) -> bool:
    return world in (sizes.tp, sizes.dp, sizes.cp, sizes.ep)


def _seen_ranks(known: Store, communicator: Communicator) -> NDArray[np.int64]:
    return np.sort(np.fromiter(global_ranks(known, communicator).values(), np.int64))


def _by_sizes(
    ranks: NDArray[np.int64], size: int, world: int, sizes: Sizes, *, exchanges: bool
) -> tuple[str, float] | None:
    """What size and stride decide, given the dimensions; None unless all ranks were seen."""
    if len(ranks) != size or size <= 1:
        return None
    strides = np.unique(np.diff(ranks))
    if len(strides) != 1:
        return None
    stride = int(strides[0])
    tp, cp, pp = sizes.tp or 1, sizes.cp or 1, sizes.pp or 1
    expected = (
        ("TP", sizes.tp, 1),
        ("CP", sizes.cp, tp),
        ("EP", sizes.ep if sizes.ep != sizes.dp else None, tp * cp),
        ("DP", sizes.dp, tp * cp),
        ("PP", sizes.pp if pp > 2 or exchanges else None, world // pp),
    )
    for name, wanted, wanted_stride in expected:
        if wanted == size and stride == wanted_stride:
            return name, 0.95
    if size == 2 and pp > 1 and stride == (pp - 1) * (world // pp):
        return "EMBEDDING", 0.9
    return None


def _by_busyness(
    known: Store,
    open_ones: list[Communicator],
    communicators: list[Communicator],
    traffic: Mapping[int, _Traffic],
    world: int,
) -> None:
    """Tells TP from DP by how busy a communicator is beside the others of its ranks."""
    pipelines = [set(_seen_ranks(known, c).tolist()) for c in communicators if c.parallelism == "PP"]
    ends = {(min(ranks), max(ranks)) for ranks in pipelines if ranks}
    busiest: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for communicator in open_ones:
        if communicator.size > 1:
            for rank in global_ranks(known, communicator).values():
                busiest[rank].append((_operations(traffic, communicator), communicator.index))
    for communicator in open_ones:
        communicator.parallelism, communicator.parallelism_confidence = _one_by_busyness(
            known, communicator, traffic, ends, busiest, world
        )


def _operations(traffic: Mapping[int, _Traffic], communicator: Communicator) -> int:
    carried = traffic.get(communicator.index)
    return 0 if carried is None else carried.operations // max(1, communicator.size)


def _one_by_busyness(
    known: Store,
    communicator: Communicator,
    traffic: Mapping[int, _Traffic],
    ends: set[tuple[int, int]],
    busiest: Mapping[int, list[tuple[int, int]]],
    world: int,
) -> tuple[str | None, float]:
    operations = _operations(traffic, communicator)
    ranks = _seen_ranks(known, communicator)
    if communicator.size <= 1 or not operations or not len(ranks):
        return None, 0.0
    rivals = [count for rank in ranks.tolist() for count, index in busiest[rank] if index != communicator.index]
    in_one_node = len(hosts_of(known, communicator)) == 1
    if in_one_node and operations >= _BUSIER * max(rivals, default=0) and communicator.size < world:
        return "TP", 0.8 if rivals else 0.5
    if communicator.size == 2 and (int(ranks[0]), int(ranks[-1])) in ends and rivals and operations < min(rivals):
        return "EMBEDDING", 0.6
    return "DP", 0.7 if rivals else 0.5

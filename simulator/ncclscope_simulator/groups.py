"""The communicators of the job: who belongs to them, and how NCCL and the log call them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from ncclscope_simulator.cluster import Cluster, stable_hash
from ncclscope_simulator.config import SimulationConfig

_FIRST_GROUP_STREAM = 19
"""CUPTI stream ids below belong to PyTorch's own streams; 7 is the default stream."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """One communicator."""

    index: int
    parallelism: str
    """WORLD, TP, DP, OPTIMIZER, PP, EP, CP or EMBEDDING; with Megatron-LM's emission MP, EXPERT_DP, EXPERT_MP too."""
    members: tuple[int, ...]
    """Global ranks by communicator rank."""
    nodes: tuple[int, ...]
    """Nodes that the members run on, ascending."""
    comm_id: str
    """The identity as the outputs spell it: the printed commId, else `<parent>/<split>/<colour>`."""
    comm_hash: int | None
    """The commId that Init lines print; None if they print none."""
    parent: int | None
    """Index of the group that this one was split from."""
    split_count: int | None
    """Which ncclCommSplit of the parent made it, from 1. Each rank calls each split, if with no colour."""
    color: int | None

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.members)

    @property
    def spans_nodes(self) -> bool:
        """Whether the members run on more than one node."""
        return len(self.nodes) > 1


@dataclass(slots=True)
class Endpoint:
    """One rank's handle on a communicator, with what NCCL counts there."""

    group: Group
    rank: int
    comm_rank: int
    comm_ptr: str
    stream_ptr: str
    stream_id: int
    """CUDA stream that its kernels run on, as CUPTI numbers it."""
    op_count: int = 0
    seq: int = 0
    coll_seq: int = 0


def coordinates(config: SimulationConfig, rank: int) -> tuple[int, int, int]:
    """(tensor, data, pipeline) place of a rank; those that share a sequence are neighbours in data.

    Source: Megatron-LM core/parallel_state.py RankGenerator.
    """
    tensor, rest = rank % config.tp, rank // config.tp
    if config.order == "tp-dp-pp":
        return tensor, rest % config.replicas, rest // config.replicas
    context, rest = rest % config.cp, rest // config.cp
    return tensor, context + config.cp * (rest // config.pp), rest % config.pp


def rank_at(config: SimulationConfig, tensor: int, data: int, pipeline: int) -> int:
    """The rank at a place; inverse of `coordinates`."""
    if config.order == "tp-dp-pp":
        return tensor + config.tp * (data + config.replicas * pipeline)
    context, data = data % config.cp, data // config.cp
    return tensor + config.tp * (context + config.cp * (pipeline + config.pp * data))


def build_groups(config: SimulationConfig) -> tuple[Group, ...]:
    """All communicators, in the order in which the ranks make them; the world is the first."""
    groups: list[Group] = []
    ordinals: dict[int, int] = {}
    seen_ids: dict[int, int] = {}
    for parallelism, members in _memberships(config):
        index = len(groups)
        split = config.splits and index > 0
        color = stable_hash(members) % (2**31 - 1) if split else None
        printed = _printed_hash(config, index, color)
        for rank in members:
            ordinals[rank] = ordinals.get(rank, -1) + 1
        if printed is None:
            by_count = config.traits.version >= (2, 24, 0)
            k = index if by_count else ordinals[members[0]]
            comm_id = f"{groups[0].comm_id}/{k}/{color}"
        else:
            seen_ids[printed] = seen_ids.get(printed, 0) + 1
            comm_id = f"{printed:#x}" + (f"#{seen_ids[printed]}" if seen_ids[printed] > 1 else "")
        groups.append(
            Group(
                index=index,
                parallelism=parallelism,
                members=members,
                nodes=tuple(sorted({rank // config.gpus for rank in members})),
                comm_id=comm_id,
                comm_hash=printed,
                parent=0 if split else None,
                split_count=index if split else None,
                color=color,
            )
        )
    return tuple(groups)


def _printed_hash(config: SimulationConfig, index: int, color: int | None) -> int | None:
    """The commId of Init lines: none before 2.16, of splits the hash of parent and colour up to 2.22, then none.

    Source: NCCL src/init.cc ncclCommInitRankFunc. Before 2.16 the communicator still gets its number here, as its
    identity in the truth; no log line shows it.
    """
    world = stable_hash(config.seed, "commId", 0)
    if color is None:
        return stable_hash(config.seed, "commId", index)
    return stable_hash(world, color) if config.traits.version[1] < 23 else None


def _memberships(config: SimulationConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    everybody = tuple(range(config.world))
    shared = [
        (parallelism, members)
        for parallelism, members in _dimensions(config)
        if config.shared_world and members == everybody
    ][:1]
    yield shared[0] if shared else ("WORLD", everybody)
    for group in _dimensions(config):
        if group not in shared:
            yield group


def _dimensions(config: SimulationConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    if config.megatron is not None:
        yield from _of_megatron(config)
        return
    tensors, datas, stages = range(config.tp), range(config.replicas), range(config.pp)
    yield from _gradients(config)
    if config.tp > 1:
        for p, d in product(stages, datas):
            yield "TP", tuple(rank_at(config, t, d, p) for t in tensors)
    if config.cp > 1:
        for p, t, first in product(stages, tensors, range(0, config.replicas, config.cp)):
            yield "CP", tuple(rank_at(config, t, first + c, p) for c in range(config.cp))
    if config.pp > 1:
        for d, t in product(datas, tensors):
            yield "PP", tuple(rank_at(config, t, d, p) for p in stages)
    if config.ep > 1:
        for p, t, first in product(stages, tensors, range(0, config.replicas, config.ep)):
            yield "EP", tuple(rank_at(config, t, first + e, p) for e in range(config.ep))
    if config.pp > 1:
        for d, t in product(datas, tensors):
            yield "EMBEDDING", (rank_at(config, t, d, 0), rank_at(config, t, d, config.pp - 1))


def _of_megatron(config: SimulationConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Those that Megatron-LM makes, of one rank too. Source: core/parallel_state.py initialize_model_parallel."""
    tensors, datas, stages = range(config.tp), range(config.replicas), range(config.pp)
    shards = range(0, config.replicas, config.ep)
    for p, t in product(stages, tensors):
        yield "DP", tuple(rank_at(config, t, d, p) for d in datas)
    for p, d in product(stages, datas):
        yield "TP", tuple(rank_at(config, t, d, p) for t in tensors)
    for d in datas:
        yield "MP", tuple(rank_at(config, t, d, p) for p in stages for t in tensors)
    if config.zero1:
        yield "OPTIMIZER", tuple(range(config.world))
    if config.pp > 1:
        for d, t in product(datas, tensors):
            yield "PP", tuple(rank_at(config, t, d, p) for p in stages)
            yield "EMBEDDING", (rank_at(config, t, d, 0), rank_at(config, t, d, config.pp - 1))
    if config.megatron is None or not config.megatron.experts:
        return
    for p, t, first in product(stages, tensors, shards):
        yield "EP", tuple(rank_at(config, t, first + e, p) for e in range(config.ep))
    for p, t, e in product(stages, tensors, range(config.ep)):
        yield "EXPERT_DP", tuple(rank_at(config, t, first + e, p) for first in shards)
    for first in shards:
        members = product(stages, range(config.ep), tensors)
        yield "EXPERT_MP", tuple(rank_at(config, t, first + e, p) for p, e, t in members)


def _gradients(config: SimulationConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Those that reduce gradients: shards of the parameters, their replicas."""
    tensors, stages = range(config.tp), range(config.pp)
    for p, t, first in product(stages, tensors, range(0, config.replicas, config.shards)):
        shards = range(first, first + config.shards)
        yield ("OPTIMIZER" if config.is_sharded else "DP"), tuple(rank_at(config, t, d, p) for d in shards)
    if config.replicate > 1:
        for p, t, shard in product(stages, tensors, range(config.shards)):
            yield "DP", tuple(rank_at(config, t, d, p) for d in range(shard, config.replicas, config.shards))


def build_endpoints(config: SimulationConfig, cluster: Cluster, groups: tuple[Group, ...]) -> list[dict[int, Endpoint]]:
    """For each rank: group index to its handle. Pointers and stream ids are the process's own."""
    endpoints: list[dict[int, Endpoint]] = [{} for _ in cluster.workers]
    own_stream = 1 if config.traits.own_stream else 0
    for group in groups:
        for comm_rank, rank in enumerate(group.members):
            base = stable_hash(config.seed, "heap", cluster.workers[rank].process.pid) % 2**32
            heap = 0x5500_0000_0000 + (base << 8)
            place = rank % config.gpus
            nth = len(endpoints[rank])
            endpoints[rank][group.index] = Endpoint(
                group=group,
                rank=rank,
                comm_rank=comm_rank,
                comm_ptr=f"{heap + 0x2E2A0 + 0x1_8E0A0 * nth + 0x200_0000 * place:#x}",
                stream_ptr=f"{heap + 0x1B10 + 0x9F0 * nth + 0x200_0000 * place:#x}",
                stream_id=_FIRST_GROUP_STREAM + 4 * nth + own_stream,
            )
    return endpoints

"""The kind of parallelism that a communicator serves, from the sizes that a user gives, else from what it carries.

Communicators with the same layout of ranks serve the same purpose: they are *families*, and judged together. Two that
have the same ranks are distinguished by how much they carry. Then, in this order:

1. *The world.* All ranks of the job, and next to nothing moved, or gradients move in smaller groups: WORLD.
2. *Exchanges.* AlltoAll, or Sends to everybody: EP. One way around a ring, or among ranks that reduce gradients
   together: CP. Other Sends and Recvs: PP.
3. *Gradients or activations.* Gradients are averaged, in 32 bits, of persistent buffers, once per iteration;
   activations are summed in 16 bits, for each layer and microbatch, and TP brings token ids and maxima along. Each of
   these is evidence with a weight; their sum decides, and is the confidence.
4. Gradients among some stages of one pipeline: EMBEDDING. Parameters gathered more often than gradients are scattered:
   OPTIMIZER (FSDP, ZeRO-3). Else DP, which ZeRO-1 and ZeRO-2 are too.
5. Activations among ranks that reduce gradients together are not TP, since those ranks hold different data: gathered
   and scattered in turns, EP; several gathered at once, CP. All others: TP.

All this needs ground to stand on: several groups, or calls of two kinds (a benchmark has one), or iterations in which
tensors of several sizes or a scalar beside them recur. Without it, and without sizes that are given, nothing is said.

A name that PyTorch printed says the kind (`KIND_OF_NAME`): such communicators are a family by themselves, and help to
judge the others. So do several names of which a communicator has one, if all are of one kind. Two names leave something
to the traffic: DP may be OPTIMIZER, and the default group, which dimensions that span the job use too, is WORLD only if
it carries nothing that is another's. Where all groups of a job have names, there are no kinds but theirs.

Sizes that a user gives (`--tp 2 --dp 4`) win: they say which kinds a size and stride can be.

Every answer has a confidence; if nothing decides, the answer is None. The rules are explained in
`docs/internals/parallelism.md`.

*Source:* Megatron-LM `core/parallel_state.py` (order tp-cp-ep-dp-pp, or tp-cp-ep-pp-dp), `core/distributed`,
`core/tensor_parallel`; torchtitan `distributed/parallel_dims.py`; DeepSpeed `runtime/zero`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Final

import numpy as np

from ncclscope_service.job.ranks import global_ranks, hosts_of
from ncclscope_service.rollup.usage import SMALL_BYTES, USAGE_PER_RANK, Pattern, usage_per_rank
from ncclscope_service.store.records import Communicator
from ncclscope_service.store.settings import Sizes
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns

_NAMES: Final = {
    "TP": ("TENSOR_MODEL_PARALLEL_GROUP", "EXPERT_TENSOR_PARALLEL_GROUP", "mesh_tp", "mesh_etp"),
    "PP": ("PIPELINE_MODEL_PARALLEL_GROUP", "mesh_pp"),
    "DP": (
        "DATA_PARALLEL_GROUP",
        "DATA_PARALLEL_GROUP_WITH_CP",
        "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP",
        "INTER_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP",
        "EXPERT_DATA_PARALLEL_GROUP",
        "INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP",
        "INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP",
        "mesh_dp",
        "mesh_dp_replicate",
        "mesh_dp_shard",
        "mesh_dp_shard_cp",
        "mesh_dp_shard_mod_ep",
        "mesh_dp_cp",
        "mesh_fsdp",
        "mesh_efsdp",
    ),
    "EP": ("EXPERT_MODEL_PARALLEL_GROUP", "mesh_ep"),
    "CP": ("CONTEXT_PARALLEL_GROUP", "mesh_cp"),
    "EMBEDDING": ("EMBEDDING_GROUP", "POSITION_EMBEDDING_GROUP"),
    "WORLD": ("default_pg", "mesh_default"),
}
KIND_OF_NAME: Final[Mapping[str | None, str]] = MappingProxyType(
    {name: kind for kind, names in _NAMES.items() for name in names}
)
"""Names that are not here (MODEL_PARALLEL_GROUP, mesh_loss) are of groups that serve several dimensions, or none."""


_SURE: Final = 0.95
_LEAST_SURE: Final = 0.5
_MOSTLY: Final = 0.5
_BUSIER: Final = 4
"""TP carries operations of every layer, DP of every bucket: in Megatron shapes a factor of 4 and more apart."""
_NEXT_TO_NOTHING: Final = 0.01
"""Share of the bytes of the busiest communicator of the same ranks, below which one carries no tensors to speak of."""
_GATHERED_TWICE: Final = 1.4
"""AllGathers for one ReduceScatter: 1 and less with ZeRO-1 and -2, 2 with FSDP, less for what it keeps gathered."""
_IN_TURNS: Final = 1.6
"""AllGathers or ReduceScatters in a row, up to which they count as taking turns: routing makes 1.3, k and v 2."""
_TOGETHER: Final = 0.8
_TWO: Final = 2
"""As many are remembered of those that a family is compared with: more would cost the square of all."""
_ONE_BUFFER: Final = 1.5
_ONCE: Final = 1.0
_ROUGHLY: Final = 0.5
_ONE_SIZE: Final = 1.5
_LEAST_CALLS: Final = 4
"""Calls of one rank, below which nothing is concluded: greetings and barriers."""
_LEAST_ITERATIONS: Final = 3
_FEW_SIZES: Final = 2.5


@dataclass(slots=True, eq=False)
class _Family:
    """Communicators of one layout and purpose, and what they carry."""

    communicators: list[Communicator]
    ranks: list[frozenset[int]]
    """Global ranks of each, as far as seen."""
    carried: np.void
    """USAGE_PER_RANK, mean of the communicators."""
    size: int
    is_whole: bool
    """All ranks of each were seen."""
    hosts: int
    """Over how many nodes one spans."""
    pattern: Pattern
    kind: str | None = None
    confidence: float = 0.0

    def be(self, kind: str | None, confidence: float) -> None:
        self.kind, self.confidence = kind, min(max(confidence, 0.0), 1.0)

    @property
    def named(self) -> str | None:
        """The kind that its name says; all its communicators have the same name."""
        return _named_kind(self.communicators[0])

    @property
    def is_said(self) -> bool:
        """Whether its name decides, whatever it carries."""
        return self.named not in {None, "WORLD"}

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are gathered more often than gradients are scattered."""
        gathered, scattered = self.carried["gathered"], self.carried["scattered"]
        return bool(scattered > 0 and gathered >= _GATHERED_TWICE * scattered)

    @property
    def exchanges(self) -> bool:
        """Whether Sends, Recvs and AlltoAlls are most of it."""
        carried = self.carried
        return bool(carried["exchanged"] + carried["all_to_all"] > _MOSTLY * carried["operations"])

    @property
    def stride(self) -> int | None:
        """The step from rank to rank, the same in all of it; None if there is none."""
        steps = {after - before for ranks in self.ranks for before, after in pairwise(sorted(ranks))}
        return next(iter(steps)) if len(steps) == 1 and self.is_whole else None


def assign_parallelism(
    known: Store,
    contents: Columns,
    patterns: Mapping[int, Pattern],
    sizes: Sizes | None = None,
    iterations: Mapping[str, int] | None = None,
    *,
    jobs: Collection[str] | None = None,
) -> set[int]:
    """Sets parallelism and its confidence on every communicator of these jobs that is listed; None: of all jobs.

    `contents` are `contents.CONTENT`, `patterns` by communicator index; `iterations`: how many each job has done, where
    that is known. Gives the communicators that serve something else now, by index.
    """
    seen = np.zeros(len(known.communicators), np.int64)
    by_job: dict[str, list[Communicator]] = defaultdict(list)
    for communicator in known.listed_communicators():
        if jobs is None or communicator.job in jobs:
            by_job[communicator.job].append(communicator)
        seen[communicator.index] = len(communicator.members or {})
    carried = usage_per_rank(contents, seen)
    changed: set[int] = set()
    for job, communicators in by_job.items():
        ranks = {each.index: frozenset(global_ranks(known, each).values()) for each in communicators}
        families = _families(known, communicators, ranks, carried, patterns)
        names = known.group_names.get(job, set[str]())
        steps = (iterations or {}).get(job)
        _Job(known, families, ranks, communicators, sizes or Sizes(), steps, names).decide()
        told = {of.index: family for family in families for of in family.communicators}
        for communicator in communicators:
            family = told.get(communicator.index)
            kind, confidence = _of_idle(communicator) if family is None else (family.kind, family.confidence)
            if communicator.parallelism != kind:
                changed.add(communicator.index)
            communicator.parallelism, communicator.parallelism_confidence = kind, confidence
    return changed


def _named_kind(communicator: Communicator) -> str | None:
    """The kind that its name says, or all of the names of which it has one."""
    if communicator.name is not None or not communicator.possible_names:
        return KIND_OF_NAME.get(communicator.name)
    kinds = {KIND_OF_NAME.get(name) for name in communicator.possible_names}
    return next(iter(kinds)) if len(kinds) == 1 else None


def _of_idle(communicator: Communicator) -> tuple[str | None, float]:
    """Kind and confidence of a communicator that carries nothing."""
    named = _named_kind(communicator)
    return (None, 0.0) if named in {None, "WORLD"} or communicator.size <= 1 else (named, 1.0)


def _families(
    known: Store,
    communicators: Sequence[Communicator],
    ranks: Mapping[int, frozenset[int]],
    carried: Columns,
    patterns: Mapping[int, Pattern],
) -> list[_Family]:
    """The families that carry something: nothing can be concluded from the others."""
    on_ranks: dict[frozenset[int], list[Communicator]] = defaultdict(list)
    for communicator in communicators:
        on_ranks[ranks[communicator.index]].append(communicator)
    together: dict[tuple[object, ...], list[Communicator]] = defaultdict(list)
    for same in on_ranks.values():
        same.sort(key=lambda each: (-carried["operations"][each.index], each.index))
        for place, communicator in enumerate(same):
            together[_layout(communicator, ranks[communicator.index], place)].append(communicator)
    is_used = carried["operations"] > 0
    return [
        _family(known, members, ranks, carried, patterns)
        for members in together.values()
        if any(is_used[each.index] for each in members)
    ]


def _layout(communicator: Communicator, ranks: frozenset[int], place: int) -> tuple[object, ...]:
    if len(ranks) != communicator.size or communicator.size <= 1:
        return (communicator.index,)
    first = min(ranks)
    return (
        communicator.size,
        tuple(sorted(rank - first for rank in ranks)),
        communicator.name or place,
        _named_kind(communicator),
    )


def _family(
    known: Store,
    members: list[Communicator],
    ranks: Mapping[int, frozenset[int]],
    carried: Columns,
    patterns: Mapping[int, Pattern],
) -> _Family:
    mean = rows = carried[[each.index for each in members]]
    if len(members) > 1:
        mean = np.zeros(1, USAGE_PER_RANK)
        for name in USAGE_PER_RANK.names or ():
            mean[name] = rows[name].max() if name == "largest" else rows[name].mean()
    found = [patterns.get(each.index, Pattern()) for each in members]
    return _Family(
        communicators=members,
        ranks=[ranks[each.index] for each in members],
        carried=mean[0],
        size=members[0].size,
        is_whole=all(len(ranks[each.index]) == each.size for each in members),
        hosts=max(len(hosts_of(known, each)) for each in members),
        pattern=Pattern(
            sends_to_everybody=2 * sum(each.sends_to_everybody for each in found) > len(found),
            is_ring=all(each.is_ring for each in found),
            paired=min((each.paired for each in found if each.paired is not None), default=None),
            run=next((each.run for each in found if each.run is not None), None),
        ),
    )


class _Job:
    """Decides on the families of one job."""

    def __init__(
        self,
        known: Store,
        families: list[_Family],
        ranks: Mapping[int, frozenset[int]],
        communicators: Sequence[Communicator],
        sizes: Sizes,
        iterations: int | None,
        names: Collection[str],
    ) -> None:
        kinds = {KIND_OF_NAME[name] for name in names if name in KIND_OF_NAME} - {"WORLD"}
        self._kinds = frozenset(kinds) if kinds and "" not in names else None
        """Of its named groups, where all are named."""
        self._families = [each for each in families if each.size > 1]
        seats = frozenset[int]().union(*ranks.values())
        self._world = max(len(seats), max((each.size for each in communicators), default=0))
        members = (member for each in communicators for member in (each.members or {}).values())
        self._is_spread = len({known.processes[known.members[member].process].host for member in members}) > 1
        self._sizes = sizes
        self._iterations = iterations
        self._reduce_alone = {
            rank
            for family in families
            if family.size == 1 and family.carried["reduced"] + family.carried["scattered"] > 0
            for ranks in family.ranks
            for rank in ranks
        }
        self._most_bytes = max((float(each.carried["bytes"]) for each in self._families), default=0.0)
        self._alone = len(self._families) == 1
        self._has_ground = not sizes.is_empty() or self._shows_training()

    def decide(self) -> None:
        """Sets kind and confidence of every family; without names, only if something shows that the job trains."""
        for family in self._families:
            if family.is_said:
                is_sharded = family.named == "DP" and family.is_sharded
                family.be("OPTIMIZER" if is_sharded else family.named, _SURE if is_sharded else 1.0)
        if self._has_ground:
            self._judge()
        for family in self._families:
            if self._kinds is not None and family.kind not in {None, "WORLD", *self._kinds}:
                is_data = family.kind == "OPTIMIZER" and "DP" in self._kinds
                if not is_data:
                    family.be(None, 0.0)
            if family.named == "WORLD" and family.size == self._world and family.kind in {None, "WORLD"}:
                family.be("WORLD", 1.0)
            self._obey(family)

    def _judge(self) -> None:
        reducing = [each for each in self._families if not each.exchanges]
        tensors = [each for each in reducing if not self._is_next_to_nothing(each)]
        busy = _busiest_on(tensors)
        odds = {id(each): self._odds_of_gradients(each, busy) for each in tensors}
        smaller = [each for each in tensors if each.size < self._world and odds[id(each)] > 0]
        for family in [each for each in reducing if each.size == self._world and not each.is_said]:
            self._judge_world(family, tensors, smaller)
        reduced = [each for each in tensors if (each.kind is None or each.is_said) and odds[id(each)] > 0]
        gradients = _Groups(reduced)
        # One buffer alone is an embedding's, which the ends of a pipeline share. NCCL Inspector tells of no buffers.
        model = _Groups([each for each in reduced if _buffers(each) > _ONE_BUFFER])
        for family in [each for each in self._families if each.exchanges and not each.is_said]:
            self._judge_exchanges(family, gradients, model)
        stages = _stages(self._families)
        for family in reducing:
            if family.kind is None:
                self._judge_reductions(family, gradients, odds, stages)

    def _shows_training(self) -> bool:
        """Whether there are several groups, or calls of several kinds, or steps that are not one and the same call."""
        used = [each.carried for each in self._families if each.carried["operations"] >= _LEAST_CALLS]
        kinds = ("exchanged", "all_to_all", "all_reduced", "all_gathered", "reduce_scattered", "integers")
        if sum(any(each[kind] > 0 for each in used) for kind in kinds) > 1:
            return True
        if len(self._families) > 1 and sum(each.carried["operations"] for each in self._families) >= _LEAST_CALLS:
            return True
        is_mixed = any(
            carried["reduced_sizes"] + carried["gathered_sizes"] > _ONE_SIZE
            or 0 < carried["tensors"] < carried["operations"]
            for carried in used
        )
        return is_mixed and (self._iterations or 0) >= _LEAST_ITERATIONS

    def _is_next_to_nothing(self, family: _Family) -> bool:
        moved = float(family.carried["bytes"])
        return family.carried["largest"] <= SMALL_BYTES and moved <= _NEXT_TO_NOTHING * self._most_bytes

    def _judge_world(self, family: _Family, tensors: list[_Family], smaller: list[_Family]) -> None:
        if family not in tensors:
            family.be("WORLD", 0.9)
        elif family.carried["largest"] <= SMALL_BYTES and self._alone:
            family.be("WORLD", 0.6)  # nothing else has been seen yet
        elif smaller:
            family.be("WORLD", 0.8)

    def _judge_exchanges(self, family: _Family, gradients: _Groups, model: _Groups) -> None:
        pattern, nested = family.pattern, gradients.hold(family, strictly=True)
        equal = not nested and model.hold(family, strictly=False)
        together = pattern.paired is not None and pattern.paired >= _TOGETHER
        if family.carried["all_to_all"] > family.carried["exchanged"]:
            family.be("EP", 0.9)
        elif pattern.sends_to_everybody:
            family.be("EP", 0.85)
        elif pattern.is_ring:
            family.be("CP", 0.9)
        elif nested or (equal and together):
            family.be("CP", 0.8 if nested else 0.6)
        else:
            family.be("PP", 0.9)

    def _judge_reductions(
        self, family: _Family, gradients: _Groups, odds: Mapping[int, float], stages: Mapping[int, set[int]]
    ) -> None:
        odds_of = odds.get(id(family))
        if family.is_whole and any(ranks <= stages.get(min(ranks), set()) for ranks in family.ranks):
            family.be("EMBEDDING", 0.85)
        elif odds_of is None:
            family.be("DP", _LEAST_SURE)
        elif odds_of > 0:
            self._judge_gradients(family, _sureness(odds_of))
        elif not gradients.hold(family, strictly=False):
            family.be("TP", _sureness(odds_of))
        elif family.carried["reduced"] > family.carried["gathered"]:
            family.be("DP", _LEAST_SURE)
        else:
            in_turns = family.pattern.run is None or family.pattern.run < _IN_TURNS
            family.be("EP" if in_turns else "CP", 0.9 * _sureness(odds_of))

    def _judge_gradients(self, family: _Family, sureness: float) -> None:
        family.be("OPTIMIZER" if family.is_sharded else "DP", sureness)

    def _odds_of_gradients(self, family: _Family, busy: Mapping[int, list[_Family]]) -> float:
        """Evidence for gradients (above 0) against activations (below), as log odds; `busy` as `_busiest_on`."""
        if family.is_said:
            return math.inf if family.named == "DP" else -math.inf
        carried = family.carried
        odds = 3.0 * (carried["averaged"] > 0)
        if carried["wide"] + carried["narrow"] > 0:
            odds += 1.5 if carried["wide"] > carried["narrow"] else -0.7
        odds += 2.0 * (carried["narrow_gathered"] > 0 and carried["wide_scattered"] > 0)
        odds -= 2.5 * (carried["maxima"] > 0) + 1.0 * (carried["integers"] > 1)
        odds += self._odds_of_sizes(family) + self._odds_of_repetition(family) + self._odds_of_busyness(family, busy)
        if self._is_spread:
            odds += 0.5 if family.hosts > 1 else -0.3
        if all(ranks <= self._reduce_alone for ranks in family.ranks):
            odds -= 2.0  # each of these ranks reduces its gradients by itself
        return float(odds)

    def _odds_of_sizes(self, family: _Family) -> float:
        """Activations are of one size; gradients and parameters of as many as the model has tensors, or buckets."""
        carried = family.carried
        odds = 1.0 * (carried["reduced_sizes"] > _ONE_SIZE) + 1.5 * (carried["gathered_sizes"] > _FEW_SIZES)
        # Each rank updates a part of what all have reduced: DeepSpeed's ZeRO-1 and ZeRO-2.
        shards_updates = carried["reduced"] > 0 and carried["gathered"] > 0 and carried["scattered"] == 0
        return float(odds + 1.5 * shards_updates)

    def _odds_of_repetition(self, family: _Family) -> float:
        """Gradients are reduced once per iteration from buffers that stay; activations for each microbatch."""
        carried, iterations = family.carried, self._iterations
        if not iterations or iterations <= 1 or not carried["calls"]:
            return 0.0
        repeats = carried["tensors"] / carried["calls"] / iterations
        if repeats > _ONCE * (1 + _ROUGHLY):
            return -1.0
        return 1.5 if repeats > _ONCE * (1 - _ROUGHLY) else 0.0

    def _odds_of_busyness(self, family: _Family, busy: Mapping[int, list[_Family]]) -> float:
        mine = float(family.carried["operations"])
        on_its_ranks = {each for ranks in family.ranks for rank in ranks for each in busy.get(rank, ())}
        rivals = [float(each.carried["operations"]) for each in on_its_ranks if each is not family]
        if not rivals:
            return 0.0
        if mine >= _BUSIER * max(rivals):
            return -1.5
        return 1.5 if max(rivals) >= _BUSIER * mine else 0.0

    def _obey(self, family: _Family) -> None:
        """Lets the sizes that the user gave decide if size and stride fit one of them."""
        fitting = self._fitting(family)
        if not fitting or (family.kind == "WORLD" and not self._alone):
            return
        if family.kind in fitting or (family.kind == "OPTIMIZER" and "DP" in fitting):
            family.be(family.kind, max(_SURE, family.confidence) if family.named == family.kind else _SURE)
            return
        by_exchange = {"PP", "CP", "EP"} if family.exchanges else {"TP", "CP", "EP", "DP", "EMBEDDING"}
        usable = [kind for kind in fitting if kind in by_exchange]
        if usable:
            family.be(usable[0], _SURE if len(usable) == 1 else 0.8)

    def _fitting(self, family: _Family) -> list[str]:
        """Kinds whose size and stride are those of the family. Both orders of Megatron-LM are tried."""
        sizes, stride = self._sizes, family.stride
        if sizes.is_empty() or stride is None:
            return []
        tp, cp, pp = sizes.tp or 1, sizes.cp or 1, sizes.pp or 1
        outermost = max(1, self._world // pp)
        pipeline = {outermost, tp * cp}
        layouts: tuple[tuple[str, int | None, set[int]], ...] = (
            ("TP", sizes.tp, {1}),
            ("CP", sizes.cp, {tp}),
            ("EP", sizes.ep if sizes.ep != sizes.dp else None, {tp, tp * cp}),
            ("DP", sizes.dp, {tp * cp, tp * cp * pp}),
            ("DP", sizes.dp * cp if sizes.dp and cp > 1 else None, {tp}),
            ("PP", sizes.pp, pipeline),
            ("EMBEDDING", 2 if pp > 1 else None, {(pp - 1) * step for step in pipeline}),
        )
        return [name for name, size, strides in layouts if size == family.size > 1 and stride in strides]


class _Groups:
    """The groups of ranks that some families have."""

    def __init__(self, families: Sequence[_Family]) -> None:
        self._with_rank: dict[int, dict[frozenset[int], list[_Family]]] = defaultdict(dict)
        """By rank, each group with it and two of its families: one of them is another than whichever is asked for."""
        for family in families:
            for ranks in family.ranks:
                for rank in ranks:
                    of_group = self._with_rank[rank].setdefault(ranks, [])
                    if len(of_group) < _TWO:
                        of_group.append(family)
        self._some_rank = next(iter(self._with_rank), 0)

    def hold(self, family: _Family, *, strictly: bool) -> bool:
        """Whether the ranks of each of its communicators are within a group of another family; `strictly`: a larger."""
        return all(
            any(
                (ranks < group or (not strictly and ranks == group)) and any(other is not family for other in of_group)
                for group, of_group in self._with_rank.get(min(ranks, default=self._some_rank), {}).items()
            )
            for ranks in family.ranks
        )


def _buffers(family: _Family) -> float:
    """How many a rank has at least."""
    return float(max(family.carried["calls"], family.carried["reduced_sizes"]))


def _busiest_on(families: Sequence[_Family]) -> dict[int, list[_Family]]:
    """By rank, the two busiest of the families whose first communicator has it."""
    found: dict[int, list[_Family]] = defaultdict(list)
    for family in sorted(families, key=lambda each: -each.carried["operations"]):
        for rank in family.ranks[0]:
            if len(found[rank]) < _TWO:
                found[rank].append(family)
    return found


def _stages(families: list[_Family]) -> dict[int, set[int]]:
    """The pipeline of each rank: where each pair of stages has a communicator of its own, they are put together."""
    pipelines: dict[int, set[int]] = {}
    for family in families:
        for ranks in family.ranks if family.kind == "PP" else ():
            together = set(ranks).union(*(pipelines[rank] for rank in ranks if rank in pipelines))
            pipelines.update(dict.fromkeys(together, together))
    return pipelines


def _sureness(odds: float) -> float:
    """The probability that log odds stand for."""
    return min(0.97, 1 / (1 + math.exp(-abs(odds))))

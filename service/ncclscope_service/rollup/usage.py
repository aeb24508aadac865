"""Communication signature of each group: what it calls, how large, how bursty, how often, and when it is silent.

The signature shows in numbers how parallel strategies differ: tensor parallelism calls all the time, pipelines in even
steps, data parallelism in one burst per iteration.

Counts alone do not show who sends to whom, and how the operations of a communicator follow each other: a
pipeline sends both ways and has ends; context parallelism sends one way around a ring; experts send to everybody.

Usage is how many operations of which kind, type, reduction and size each communicator has carried. It is counted by
template, since operations of one template carry the same; a template costs eight bytes here, and each operation an
addition. Templates are put together only when somebody asks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns.group_by import distinct, distinct_together, group_by
from ncclscope_service.columns.intervals import Integers, Spans, union
from ncclscope_service.nccl import bandwidth
from ncclscope_service.store.records import Communicator
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import DATA_TYPES, NO_NUMBER, NO_TIME_NS, OPERATION_CODES, REDUCTIONS

_QUANTILES: Final = (0.1, 0.5, 0.9)
_PAUSE: Final = 20
"""A pause longer than the period divided by this ends a burst."""
_LEAST_PAUSE_NS: Final = 1_000_000
"""If no period is known, a pause longer than this ends a burst."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Operations of one communicator as columns of equal length, in any order."""

    rank: Integers
    op: Integers
    message_bytes: Integers
    """NO_NUMBER if unknown."""
    iteration: Integers
    """NO_NUMBER if unknown."""
    start_ns: Integers
    """Of the kernel, else the stamp; NO_TIME_NS if there is none. One clock per rank."""
    end_ns: Integers
    """Of the kernel; NO_TIME_NS without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """How one communicator communicates; None in a field if it is not known."""

    mix: tuple[tuple[int, int, int], ...]
    """(operation code, operations, bytes), over all ranks, most operations first."""
    sizes: int
    """Different message sizes."""
    p10_bytes: int | None
    median_bytes: int | None
    p90_bytes: int | None
    largest_bytes: int | None
    operations_per_iteration: float | None
    """Of one rank, in iterations in which it communicates at all: median."""
    bytes_per_iteration: float | None
    burstiness: float | None
    """(s - m) / (s + m) of the times between the starts of a rank's operations; m is their mean, s their deviation.

    -1 is a clock, 0 is chance, towards 1 are bursts. *Source:* Goh and Barabasi, EPL 81 (2008) 48002.
    """
    period_ns: float | None
    """From its first operation in an iteration to that in the next one in which it communicates: median."""
    active_ratio: float | None
    """Share of the time from its first to its last kernel in which a kernel of it ran, of a rank: median."""
    bursts_per_iteration: float | None
    """Stretches without a pause, of a rank. A pause is longer than a twentieth of the period."""
    burst_ns: float | None
    """How long bursts last: median."""
    pause_ns: float | None
    """How long the pauses last: median."""


def signature_of(traffic: Traffic) -> Signature:
    """The signature of one communicator."""
    known = traffic.message_bytes[traffic.message_bytes != NO_NUMBER]
    tenth, half, most = np.quantile(known, _QUANTILES, method="lower").tolist() if len(known) else (None,) * 3
    per_iteration = _per_iteration(traffic)
    period = _period(traffic)
    bursts = _bursts(traffic, period)
    return Signature(
        mix=_mix(traffic),
        sizes=len(np.unique(known)),
        p10_bytes=tenth,
        median_bytes=half,
        p90_bytes=most,
        largest_bytes=int(known.max()) if len(known) else None,
        operations_per_iteration=_median(per_iteration[0]),
        bytes_per_iteration=_median(per_iteration[1]),
        burstiness=_burstiness(traffic),
        period_ns=period,
        active_ratio=_active_ratio(traffic),
        bursts_per_iteration=bursts[2],
        burst_ns=_median(bursts[0]),
        pause_ns=_median(bursts[1]),
    )


def _mix(traffic: Traffic) -> tuple[tuple[int, int, int], ...]:
    codes, place = distinct(traffic.op)
    moved = np.zeros(len(codes), np.int64)
    np.add.at(moved, place, np.maximum(traffic.message_bytes, 0))
    amounts = np.bincount(place, minlength=len(codes))
    rows = zip(codes.tolist(), amounts.tolist(), moved.tolist(), strict=True)
    return tuple(sorted(rows, key=lambda row: (-row[1], row[0])))


def _groups(traffic: Traffic, chosen: NDArray[np.intp]) -> NDArray[np.intp]:
    """(rank, iteration) of these operations as one number each."""
    return distinct_together(traffic.rank[chosen], traffic.iteration[chosen])[1]


def _per_iteration(traffic: Traffic) -> tuple[Integers, Integers]:
    chosen = np.flatnonzero(traffic.iteration != NO_NUMBER)
    if not len(chosen):
        return chosen.astype(np.int64), chosen.astype(np.int64)
    place = _groups(traffic, chosen)
    moved = np.zeros(int(place.max()) + 1, np.int64)
    np.add.at(moved, place, np.maximum(traffic.message_bytes[chosen], 0))
    return np.bincount(place), moved


def _period(traffic: Traffic) -> float | None:
    chosen = np.flatnonzero((traffic.iteration != NO_NUMBER) & (traffic.start_ns != NO_TIME_NS))
    if not len(chosen):
        return None
    place = _groups(traffic, chosen)
    order = np.lexsort((traffic.start_ns[chosen], place))
    first = order[np.concatenate([[True], np.diff(place[order]) > 0])]
    begins, ranks = traffic.start_ns[chosen][first], traffic.rank[chosen][first]
    return _median(np.diff(begins)[ranks[1:] == ranks[:-1]])


def _burstiness(traffic: Traffic) -> float | None:
    gaps = _gaps(traffic.rank, traffic.start_ns, traffic.start_ns)
    if len(gaps) < 2 or not gaps.any():
        return None
    return float((gaps.std() - gaps.mean()) / (gaps.std() + gaps.mean()))


def _gaps(ranks: Integers, starts: Integers, ends: Integers) -> Integers:
    """Time from the end of each to the start of the next of the same rank, if both are known."""
    known = np.flatnonzero(starts != NO_TIME_NS)
    order = known[np.lexsort((starts[known], ranks[known]))]
    same = ranks[order][1:] == ranks[order][:-1]
    gaps: Integers = (starts[order][1:] - ends[order][:-1])[same]
    return gaps


def _active_ratio(traffic: Traffic) -> float | None:
    spans = _running(traffic)
    if not len(spans.group):
        return None
    ranks, place = distinct(spans.group)
    begin, end = np.full(len(ranks), np.iinfo(np.int64).max), np.zeros(len(ranks), np.int64)
    np.minimum.at(begin, place, spans.start)
    np.maximum.at(end, place, spans.end)
    running = np.zeros(len(ranks), np.int64)
    np.add.at(running, place, spans.end - spans.start)
    return _median(running[end > begin] / (end - begin)[end > begin])


def _running(traffic: Traffic) -> Spans:
    """Times in which kernels of the communicator ran, by rank."""
    known = np.flatnonzero((traffic.start_ns != NO_TIME_NS) & (traffic.end_ns != NO_TIME_NS))
    return union(Spans(traffic.rank[known], traffic.start_ns[known], traffic.end_ns[known]))


def _bursts(traffic: Traffic, period: float | None) -> tuple[Integers, Integers, float | None]:
    """Lengths of bursts and of the pauses between them, and how many bursts an iteration has."""
    known = np.flatnonzero(traffic.start_ns != NO_TIME_NS)
    starts = traffic.start_ns[known]
    ends = np.where(traffic.end_ns[known] == NO_TIME_NS, starts, traffic.end_ns[known])
    spans = union(Spans(traffic.rank[known], starts, ends))
    if not len(spans.group):
        return starts, starts, None
    pauses = spans.start[1:] - spans.end[:-1]
    same = spans.group[1:] == spans.group[:-1]
    is_pause = pauses > (_LEAST_PAUSE_NS if period is None else period / _PAUSE)
    opens = np.concatenate([[True], ~same | is_pause])
    first = np.flatnonzero(opens)
    last = np.append(first[1:], len(spans.group)) - 1
    chosen = np.flatnonzero(traffic.iteration != NO_NUMBER)
    iterations = int(_groups(traffic, chosen).max()) + 1 if len(chosen) else 0
    return (
        spans.end[last] - spans.start[first],
        pauses[same & is_pause],
        len(first) / iterations if iterations else None,
    )


def _median(values: Sequence[float] | NDArray[np.number]) -> float | None:
    return float(np.median(values)) if len(values) else None


_SEND: Final = OPERATION_CODES["Send"]
_RECV: Final = OPERATION_CODES["Recv"]
_GATHER: Final = OPERATION_CODES["AllGather"]
_SCATTER: Final = OPERATION_CODES["ReduceScatter"]
_IS_PAIRWISE: Final = np.isin(np.arange(256), (_SEND, _RECV))
_LOOKED_AT: Final = 4096
"""Operations of one member that are looked at: the latest."""
_SCANNED_AT_ONCE: Final = 65_536
"""Operations that are looked through in one go, the latest first: they stay in the cache."""
_NOBODYS: Final = (np.empty(0, np.int32), np.empty(0, np.uint8))
_MEMBERS_LOOKED_AT: Final = 4
"""Members of one communicator that are looked at."""
_MANY: Final = 3
"""In groups of at most this many ranks all are neighbours: there only who sends to itself sends to everybody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """Who sends to whom in a communicator, and how its operations follow each other."""

    sends_to_everybody: bool = False
    is_ring: bool = False
    """Every rank sends to one neighbour only and receives from the other only, the last to the first as well."""
    paired: float | None = None
    """Share of neighbouring Sends and Recvs, two by two, that are one of each: 1 if they always come together."""
    run: float | None = None
    """How many AllGathers, or ReduceScatters, follow each other before the other comes, on average."""


class Patterns:
    """Follows the peers of a store's members, and looks at their operations if asked."""

    def __init__(self, known: Store) -> None:
        self._store = known
        self._sends: defaultdict[int, set[int]] = defaultdict(set)
        self._receives: defaultdict[int, set[int]] = defaultdict(set)

    def count_logged(
        self, members: NDArray[np.integer], codes: NDArray[np.integer], peers: NDArray[np.integer]
    ) -> None:
        """Operations that were read from a log, as columns; those that have no peer are left out."""
        p2p = np.flatnonzero(_IS_PAIRWISE[codes])
        if not len(p2p):
            return
        found, _ = distinct_together(members[p2p], codes[p2p], peers[p2p])
        for member, code, peer in zip(*(column.tolist() for column in found), strict=True):
            (self._sends if code == _SEND else self._receives)[member].add(peer)

    def patterns_of(self, communicators: Sequence[Communicator]) -> dict[int, Pattern]:
        """The pattern of each of these communicators, by index."""
        looked_at = {each.index: _spread(list((each.members or {}).values())) for each in communicators}
        sequences = self._sequences({member for members in looked_at.values() for member in members})
        return {each.index: self._pattern(each, looked_at[each.index], sequences) for each in communicators}

    def _pattern(
        self, communicator: Communicator, looked_at: list[int], sequences: dict[int, NDArray[np.uint8]]
    ) -> Pattern:
        codes = [sequences[member] for member in looked_at if member in sequences]
        members = communicator.members or {}
        exchanging = {rank: member for rank, member in members.items() if self._sends[member] or self._receives[member]}
        return Pattern(
            sends_to_everybody=bool(exchanging) and self._sends_to_everybody(communicator.size, exchanging),
            is_ring=len(exchanging) > 1 and any(self._is_ring(communicator.size, exchanging, step) for step in (1, -1)),
            paired=_least([_paired(each) for each in codes]),
            run=_mean([_run(each) for each in codes]),
        )

    def _sends_to_everybody(self, size: int, members: dict[int, int]) -> bool:
        to_all = [
            len(self._sends[member] | {rank}) == size and (size > _MANY or rank in self._sends[member])
            for rank, member in members.items()
        ]
        return 2 * sum(to_all) > len(to_all)

    def _is_ring(self, size: int, members: dict[int, int], step: int) -> bool:
        return size > 2 and all(  # of two, each is the other's both neighbours
            self._sends[member] == {(rank + step) % size} and self._receives[member] == {(rank - step) % size}
            for rank, member in members.items()
        )

    def _sequences(self, members: set[int]) -> dict[int, NDArray[np.uint8]]:
        """The operation codes of each of these members, oldest first."""
        is_asked = np.zeros(len(self._store.members) + 1, np.bool_)
        is_asked[list(members)] = True
        amounts = np.zeros(len(is_asked), np.int64)
        rows, code_of = self._store.operations.rows, self._store.operation_templates.rows["op"].copy()
        found: list[tuple[NDArray[np.int32], NDArray[np.uint8]]] = []
        for end in range(len(rows), 0, -_SCANNED_AT_ONCE):
            part = rows[max(0, end - _SCANNED_AT_ONCE) : end]
            at = np.flatnonzero(is_asked[part["member"]])
            own = part["member"][at]
            found.append((own, code_of[part["template"][at]]))
            amounts += np.bincount(own, minlength=len(amounts))
            is_asked &= amounts < _LOOKED_AT
            if not is_asked.any():
                break
        owners, codes = (np.concatenate(parts) for parts in zip(*found[::-1], strict=True)) if found else _NOBODYS
        return {member: codes[mine[-_LOOKED_AT:]] for member, mine in group_by(owners)}


def _spread(members: list[int]) -> list[int]:
    """Some of them, the first and the last among them."""
    if len(members) <= _MEMBERS_LOOKED_AT:
        return members
    places = np.linspace(0, len(members) - 1, _MEMBERS_LOOKED_AT).astype(np.intp)
    return [members[place] for place in places.tolist()]


def _paired(codes: NDArray[np.uint8]) -> float | None:
    p2p = codes[_IS_PAIRWISE[codes]]
    p2p = p2p[: len(p2p) // 2 * 2]
    return float(np.mean(p2p[::2] != p2p[1::2])) if len(p2p) else None


def _run(codes: NDArray[np.uint8]) -> float | None:
    chosen = codes[(codes == _GATHER) | (codes == _SCATTER)]
    return len(chosen) / (1 + int(np.count_nonzero(np.diff(chosen)))) if len(chosen) else None


def _least(values: list[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


USAGE: Final = np.dtype(
    [
        ("communicator", "<i4"),
        ("op", "<u1"),
        ("data_type", "<i2"),
        ("reduction", "<i2"),  # user operations are all REDUCTION_OF_USER
        ("message_bytes", "<i8"),
        ("operations", "<i8"),  # over all ranks
        ("templates", "<i8"),  # distinct ones, over all ranks: calls that differ in their buffers too
    ]
)
"""Operations of one communicator that carry the same."""

REDUCTION_OF_USER: Final = 5


class UsageCounts:
    """Counts a store's operations by template."""

    def __init__(self, known: Store) -> None:
        self._store = known
        self._counts: NDArray[np.int64] = np.zeros(0, np.int64)
        self._members: NDArray[np.int32] = np.zeros(0, np.int32)
        self._inspected: Counter[tuple[int, int, int]] = Counter()
        """By (communicator, operation code, message size): records of NCCL Inspector."""
        self.operations = 0
        """Number of operations that were counted."""

    def count_logged(self, rows: Columns) -> None:
        """Operations (rows.PLACED) that were read from a log: each exactly once."""
        self._reserve(len(self._store.operation_templates))
        np.add.at(self._counts, np.ascontiguousarray(rows["template"]), 1)
        # A pointer that is used again makes the same template another communicator's; the newest one has all.
        self._members[rows["template"]] = rows["member"]
        self.operations += len(rows)

    def count_inspected(self, records: Columns) -> None:
        """Records (rows.INSPECTED) whose communicator is known, of processes whose lines are not read."""
        columns = (records["communicator"], records["op"], records["message_bytes"])
        keys, inverse = distinct_together(*columns)
        amounts = np.bincount(inverse, minlength=len(keys[0])).tolist()
        for *key, amount in zip(*(column.tolist() for column in keys), amounts, strict=True):
            self._inspected[key[0], key[1], key[2]] += amount
        self.operations += len(records)

    def table(self) -> Columns:
        """The counts as USAGE rows; those of NCCL Inspector have no type, no reduction and no templates."""
        if not self._inspected:
            return self._logged()
        told: Columns = np.zeros(len(self._inspected), USAGE)
        told["data_type"] = told["reduction"] = NO_NUMBER
        for row, (key, amount) in enumerate(self._inspected.items()):
            told["communicator"][row], told["op"][row], told["message_bytes"][row] = key
            told["operations"][row] = amount
        return np.concatenate([self._logged(), told])

    def _logged(self) -> Columns:
        used = np.flatnonzero(self._counts)
        communicator_of = np.asarray([member.communicator for member in self._store.members], np.int32)
        templates = self._store.operation_templates.take(
            used.astype(np.int64), "op", "data_type", "reduction", "count", "nranks"
        )
        sizes = bandwidth.message_bytes(
            templates["op"], templates["count"], templates["data_type"], templates["nranks"]
        )
        members = self._members[used]
        reductions = templates["reduction"]
        user = (reductions < 0) | (reductions >= REDUCTION_OF_USER)
        columns = (
            np.where(members >= 0, communicator_of[members] if len(communicator_of) else 0, NO_NUMBER).astype(np.int32),
            templates["op"],
            templates["data_type"],
            np.where(user, REDUCTION_OF_USER, reductions).astype(np.int16),
            sizes,
        )
        keys, inverse = distinct_together(*columns)
        table: Columns = np.zeros(len(keys[0]), USAGE)
        for name, key in zip(("communicator", "op", "data_type", "reduction", "message_bytes"), keys, strict=True):
            table[name] = key
        np.add.at(table["operations"], inverse, self._counts[used])
        np.add.at(table["templates"], inverse, 1)
        return table

    def _reserve(self, templates: int) -> None:
        if templates > len(self._counts):
            grown = max(templates, 2 * len(self._counts))
            self._counts = np.concatenate([self._counts, np.zeros(grown - len(self._counts), np.int64)])
            self._members = np.concatenate([self._members, np.full(grown - len(self._members), NO_NUMBER, np.int32)])


SMALL_BYTES: Final = 64 * 1024
"""Messages up to this size are scalars, norms, losses and flags rather than tensors."""

USAGE_PER_RANK: Final = np.dtype(
    [
        ("operations", "<f8"),
        ("bytes", "<f8"),
        ("largest", "<f8"),  # bytes of the largest message
        ("exchanged", "<f8"),  # Sends and Recvs
        ("all_to_all", "<f8"),
        ("all_reduced", "<f8"),  # AllReduces of any size; all_gathered and reduce_scattered likewise
        ("all_gathered", "<f8"),
        ("reduce_scattered", "<f8"),
        ("reduced", "<f8"),  # AllReduce and Reduce of more than SMALL_BYTES
        ("gathered", "<f8"),  # AllGather of more than SMALL_BYTES
        ("scattered", "<f8"),  # ReduceScatter of more than SMALL_BYTES
        ("integers", "<f8"),  # Broadcasts of 64-bit integers: token ids
        ("averaged", "<f8"),  # reductions that divide by the ranks
        ("maxima", "<f8"),  # AllReduce of maxima of more than 1 KiB: a softmax over parts of the vocabulary
        ("wide", "<f8"),  # bytes reduced in 32 bits and more
        ("narrow", "<f8"),  # bytes reduced in 16 bits and less
        ("narrow_gathered", "<f8"),  # AllGathers in 16 bits and less
        ("wide_scattered", "<f8"),  # ReduceScatters in 32 bits and more
        ("calls", "<f8"),  # distinct calls of tensors, buffers included
        ("tensors", "<f8"),  # operations of more than SMALL_BYTES
        ("reduced_sizes", "<f8"),  # different sizes of tensors that are reduced
        ("gathered_sizes", "<f8"),  # different sizes of tensors that are gathered
    ]
)
"""Amounts per rank, but for `largest` and the numbers of sizes."""

_SCALAR_BYTES: Final = 1024
_SELDOM: Final = 0.02
"""Share of a communicator's tensors below which a size is a rare event: the first weights, a checkpoint."""
_TYPE_BYTES: Final = np.array([each.size_bytes for each in DATA_TYPES] + [0] * 64)
_IS_FLOAT: Final = np.array(["float" in each.name for each in DATA_TYPES] + [False] * 64)
_INT64: Final = next(number for number, each in enumerate(DATA_TYPES) if each.name == "int64")
_MAX: Final = REDUCTIONS.index("max")
_AVG: Final = REDUCTIONS.index("avg")


def _codes(*names: str) -> list[int]:
    return [OPERATION_CODES[name] for name in names]


def usage_per_rank(contents: Columns, ranks: NDArray[np.int64]) -> Columns:
    """USAGE_PER_RANK of each communicator, by index; `contents` as `USAGE`, `ranks` is how many were seen of each.

    AllGathers up to NCCL 2.21.5 log no type: they count neither as narrow nor as wide.
    """
    known = contents[contents["communicator"] >= 0]
    at, op, size = known["communicator"], known["op"], known["message_bytes"]
    amount, moved = known["operations"].astype(np.float64), known["operations"] * np.maximum(size, 0.0)
    types = known["data_type"].clip(-1, len(_TYPE_BYTES) - 1)
    width = np.where(_IS_FLOAT[types], _TYPE_BYTES[types], 0)
    is_tensor = size > SMALL_BYTES
    reducing = np.isin(op, _codes("AllReduce", "Reduce", "ReduceScatter"))
    gathers, scatters = op == OPERATION_CODES["AllGather"], op == OPERATION_CODES["ReduceScatter"]
    maxima = (op == OPERATION_CODES["AllReduce"]) & (known["reduction"] == _MAX) & (size > _SCALAR_BYTES)
    columns = {
        "operations": amount,
        "bytes": moved,
        "exchanged": amount * np.isin(op, _codes("Send", "Recv")),
        "all_to_all": amount * (op == OPERATION_CODES["AlltoAll"]),
        "all_reduced": amount * (op == OPERATION_CODES["AllReduce"]),
        "all_gathered": amount * gathers,
        "reduce_scattered": amount * scatters,
        "reduced": amount * (reducing & ~scatters & is_tensor),
        "gathered": amount * (gathers & is_tensor),
        "scattered": amount * (scatters & is_tensor),
        "integers": amount * ((op == OPERATION_CODES["Broadcast"]) & (types == _INT64)),
        "averaged": amount * (reducing & (known["reduction"] == _AVG) & is_tensor),
        "maxima": amount * maxima,
        "wide": moved * (reducing & is_tensor & (width >= 4)),  # bytes of float32
        "narrow": moved * (reducing & is_tensor & (width > 0) & (width <= 2)),  # bytes of bfloat16
        "narrow_gathered": amount * (gathers & is_tensor & (width > 0) & (width <= 2)),
        "wide_scattered": amount * (scatters & is_tensor & (width >= 4)),
        "calls": known["templates"] * is_tensor.astype(np.float64),
        "tensors": amount * is_tensor,
    }
    carried: Columns = np.zeros(len(ranks), USAGE_PER_RANK)
    for name, values in columns.items():
        carried[name] = np.bincount(at, weights=values, minlength=len(ranks)) / np.maximum(ranks, 1)
    np.maximum.at(carried["largest"], at, size)
    tensors = carried["tensors"] * np.maximum(ranks, 1)
    is_usual = is_tensor & (amount > _SELDOM * tensors[at])
    for name, chosen in (("reduced_sizes", is_usual & reducing), ("gathered_sizes", is_usual & gathers)):
        pairs = np.unique(np.stack([at[chosen].astype(np.int64), size[chosen]], axis=1), axis=0)
        carried[name] = np.bincount(pairs[:, 0].astype(np.intp), minlength=len(ranks))
    return carried

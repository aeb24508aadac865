"""The difference of a whole run: every rank and iteration, with the lines that were lost told from those never sent.

All ranks of a communicator call the same collectives. Where one of them has fewer lines of a kind in an iteration than
another, lines of its process were lost, and what it has too few there is no difference. Nothing excuses too many.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Final, TypeAlias

from ncclscope_models.difference import Difference, Line, Reason, Row, Seen, SeenGroup, best_order, compare
from ncclscope_models.job import Job
from ncclscope_models.rank_groups import Order, stage_of

At: TypeAlias = tuple[int, int]
"""(global rank, iteration)."""

AGREEING_ITERATIONS: Final = 3
"""Iterations of a rank that must show the same difference before it counts."""
_ONCE: Final = "rerun"
"""Rule of an operation of all ranks in each step."""
_TRIED: Final = 4
"""Ranks from which the order of ranks is decided."""
_TIMES_THE_LOSS: Final = 5
_PAIRS: Final = frozenset({"Send", "Recv"})


@dataclass(frozen=True, slots=True)
class Explanation:
    """Every line of a run, expected and observed."""

    job: Job
    order: Order
    differences: Mapping[At, Difference]
    lossy: frozenset[At]
    """Where lines were lost."""

    def iterations(self) -> list[int]:
        """Those that were compared."""
        return sorted({iteration for _, iteration in self.differences})

    @property
    def unexplained(self) -> int:
        """Operations of all ranks and iterations."""
        return sum(each.unexplained for each in self.differences.values())

    @property
    def unexplained_bytes(self) -> int:
        """Logged bytes of them."""
        return sum(each.unexplained_bytes for each in self.differences.values())

    def classes(self) -> list[RankClass]:
        """Ranks and iterations whose rows are alike, the largest first. What a router spread is their mean."""
        found: dict[tuple[Row, ...], list[tuple[At, list[Row]]]] = defaultdict(list)
        known: dict[int, tuple[tuple[Row, ...], list[Row]]] = {}  # ranks share what is the same in their iterations
        for at, difference in self.differences.items():
            if id(difference) not in known:
                pairs = sorted(((_alike(row), row) for row in difference.rows), key=lambda pair: _place(pair[0]))
                known[id(difference)] = tuple(pair[0] for pair in pairs), [pair[1] for pair in pairs]
            alike, rows = known[id(difference)]
            found[alike].append((at, rows))
        classes = [
            RankClass(_means([rows for _, rows in own]), tuple(sorted(at for at, _ in own))) for own in found.values()
        ]
        return sorted(classes, key=lambda each: (-len(each.places), each.places))


@dataclass(frozen=True, slots=True)
class RankClass:
    """Ranks and iterations with equal rows."""

    rows: tuple[Row, ...]
    places: tuple[At, ...]

    @property
    def ranks(self) -> list[int]:
        """Global ranks."""
        return sorted({rank for rank, _ in self.places})

    @property
    def iterations(self) -> list[int]:
        """Iterations of any of them."""
        return sorted({iteration for _, iteration in self.places})


def explain(job: Job, seen: Mapping[At, Seen], gaps: Collection[At] = ()) -> Explanation:
    """Compares every rank and iteration; `gaps`: where the log itself is known to lack lines.

    Raises:
        ModelError: the job's framework has no rules for its layout.
    """
    ranks = sorted({rank for rank, _ in seen if rank < job.layout.ranks})
    order = best_order(job, {rank: _typical(seen, rank) for rank in _spread(ranks, _TRIED)})
    known: dict[tuple[int, tuple[object, ...]], Difference] = {}
    found: dict[At, Difference] = {}
    for (rank, iteration), own in sorted(seen.items()):
        if rank >= job.layout.ranks:
            continue
        key = rank, _fingerprint(own)
        if key not in known:
            known[key] = compare(job, rank, order, own)
        found[rank, iteration] = known[key]
    losses = _losses(seen, gaps)
    if losses.places:
        excuses = _Excuses(found, losses)
        found = {at: excuses.apply(at, difference) for at, difference in found.items()}
    return Explanation(job, order, found, losses.places)


def is_off_plan(explanation: Explanation) -> bool:
    """Whether the job does something else than described, for certain: the same difference on a rank, three times
    and in more than half of its iterations.

    Of tensor operations, in iterations of which no line is known to be lost.
    """
    return bool(off_plan_rows(explanation))


def off_plan_rows(explanation: Explanation) -> list[Row]:
    """The differences for which a job is off its plan: those of the rank that has most of them."""
    by_rank: dict[int, Counter[Row]] = defaultdict(Counter)
    whole: Counter[int] = Counter()
    for (rank, iteration), difference in explanation.differences.items():
        if (rank, iteration) not in explanation.lossy:
            whole[rank] += 1
            if is_one_step(difference):
                by_rank[rank].update(row for row in difference.rows if row.is_unexplained)
    rows = [
        [row for row, times in counts.items() if times >= AGREEING_ITERATIONS and 2 * times > whole[rank]]
        for rank, counts in by_rank.items()
    ]
    return max(rows, key=len, default=[])


def is_one_step(difference: Difference) -> bool:
    """Whether the lines are of one step, neither of a part nor of two: it has what all ranks call once in each.

    Where iterations are numbered by what repeats, micro-batches may be taken for iterations at first.
    """
    own = [row for row in difference.rows if any(name == _ONCE for name, _ in row.rules)]
    return all(0 < row.observed < 2 * row.expected for row in own)


def _spread(ranks: list[int], amount: int) -> list[int]:
    """So many of them, the first and the last among them."""
    if len(ranks) <= amount:
        return ranks
    return sorted({ranks[place * (len(ranks) - 1) // (amount - 1)] for place in range(amount)})


def typical_ranks(explanation: Explanation) -> list[int]:
    """One rank for each pipeline stage that behaves differently: first, second, last."""
    by_stage: dict[int, int] = {}
    for rank, _ in explanation.differences:
        by_stage.setdefault(stage_of(explanation.job.layout, rank, explanation.order), rank)
    stages = sorted(by_stage)
    return [by_stage[stage] for stage in dict.fromkeys([stages[0], *stages[1:2], stages[-1]])] if stages else []


def _typical(seen: Mapping[At, Seen], rank: int) -> Seen:
    """The most frequent iteration of a rank."""
    own = {at: lines for at, lines in seen.items() if at[0] == rank}
    counts = Counter(_fingerprint(lines) for lines in own.values())
    most = counts.most_common(1)[0][0]
    return next(lines for lines in own.values() if _fingerprint(lines) == most)


def typical_iteration(seen: Mapping[At, Seen], rank: int) -> Seen:
    """Of each line the count that most iterations of a rank have; the larger of equals, since lines may be lost."""
    own = [lines for (each, _), lines in seen.items() if each == rank]
    keys = {(group, line) for lines in own for group, counts in lines.items() for line in counts}
    found: dict[SeenGroup, dict[Line, int]] = defaultdict(dict)
    for group, line in keys:
        counts = Counter(lines.get(group, {}).get(line, 0) for lines in own)
        times = max(counts.values())
        usual = max(count for count, amount in counts.items() if amount == times)
        if usual:
            found[group][line] = usual
    return found


def _fingerprint(seen: Seen) -> tuple[object, ...]:
    return tuple(sorted((group.name, line, count) for group, lines in seen.items() for line, count in lines.items()))


@dataclass(frozen=True, slots=True)
class _Losses:
    """Where lines were lost, and how many of all."""

    places: frozenset[At]
    ratio: float


def _losses(seen: Mapping[At, Seen], gaps: Collection[At]) -> _Losses:
    """By ranks that have fewer lines of a collective than others of its communicator, and Sends without Recvs."""
    counts: dict[tuple[str, int, Line], dict[int, int]] = defaultdict(dict)
    sizes: dict[str, int] = {}
    callers: dict[str, set[int]] = defaultdict(set)
    for (rank, iteration), own in seen.items():
        for group, lines in own.items():
            sizes[group.name] = group.size
            callers[group.name].add(rank)
            for line, count in lines.items():
                counts[group.name, iteration, line][rank] = count
    places = set(gaps)
    # Apart: of Sends and Recvs only what the losses of both do not balance shows.
    lost, total = [0, 0], [1, 1]
    for (name, iteration, line), by_rank in counts.items():
        ranks = {rank for rank in callers[name] if (rank, iteration) in seen}
        is_pair = line.op in _PAIRS
        total[is_pair] += sum(by_rank.values())
        if not is_pair:
            most = max(by_rank.values())
            fewer = {rank for rank in ranks if by_rank.get(rank, 0) < most}
            lost[is_pair] += most * len(ranks) - sum(by_rank.values())
            places |= {(rank, iteration) for rank in fewer}
        elif len(ranks) == sizes[name]:
            other = Line("Recv" if line.op == "Send" else "Send", line.dtype, line.elements)
            missing = sum(counts.get((name, iteration, other), {}).values()) - sum(by_rank.values())
            if missing:
                lost[is_pair] += max(missing, 0)
                places |= {(rank, iteration) for rank in ranks}
    return _Losses(frozenset(places), max(lost[0] / total[0], lost[1] / total[1]))


class _Excuses:
    """What is missing because lines were lost is explained by that.

    Lines are missing in an iteration in which losses are proven; or, in a log that loses lines, the same line is whole
    in another iteration, or its count changes and lacks no more than a few times the share of the log that is lost.
    """

    def __init__(self, found: Mapping[At, Difference], losses: _Losses) -> None:
        self._losses = losses
        self._counts: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for (rank, _), difference in found.items():
            for row in difference.rows:
                self._counts[rank, *_key(row)].append(row.observed)

    def apply(self, at: At, difference: Difference) -> Difference:
        """The same with rows that losses explain."""
        if not difference.unexplained:
            return difference
        rows = [
            replace(row, reason=Reason.LOST) if row.is_unexplained and self._fits(at, row) else row
            for row in difference.rows
        ]
        return replace(difference, rows=tuple(rows))

    def _fits(self, at: At, row: Row) -> bool:
        if row.difference > 0 or row.logged_bytes > row.expected_bytes:
            return False
        if at in self._losses.places:
            return True
        counts = self._counts[at[0], *_key(row)]
        is_few = -row.difference <= 1 + _TIMES_THE_LOSS * self._losses.ratio * row.expected
        return max(counts) >= row.expected or (is_few and len(set(counts)) > 1)


def _key(row: Row) -> tuple[object, ...]:
    return row.groups, row.ranks, row.op, row.dtype, row.elements


def _alike(row: Row) -> Row:
    """Without what differs between ranks that are alike: names, and how much a router gave."""
    if row.reason is not Reason.ROUTING:
        return replace(row, communicators=())
    return replace(row, communicators=(), observed=0, logged_bytes=0, message_bytes=0, wire_bytes=0.0)


def _means(found: Sequence[Sequence[Row]]) -> tuple[Row, ...]:
    """Of rows that are alike."""
    return tuple(
        replace(
            _alike(own[0]),
            observed=round(fmean(row.observed for row in own)),
            logged_bytes=round(fmean(row.logged_bytes for row in own)),
            message_bytes=round(fmean(row.message_bytes for row in own)),
            wire_bytes=fmean(row.wire_bytes for row in own),
        )
        for own in zip(*found, strict=True)
    )


def _place(row: Row) -> tuple[object, ...]:
    return row.is_control, row.groups, -row.logged_bytes, row.op, row.elements or 0, row.expected

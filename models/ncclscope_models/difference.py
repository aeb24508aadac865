"""Observed less expected: every line of a rank's iteration, with the reason why it is there or is missing.

Lines are compared within *cells*: communicators with the same ranks, and the description's groups with these ranks.
Which of two groups of the same ranks sent a line is not visible, and need not be. A communicator belongs to the groups
of its size whose ranks include all of its ranks that are known; where ranks are not known, cells are larger.

What differs between logs and rules is converted first: AllGather and Broadcast in bytes up to NCCL 2.21.5, BOOL as
UINT8, and an all-to-all that is logged as Sends and Recvs, of which only the sum is known (the router decides to whom).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, TypeAlias

from ncclscope_models.emission.megatron import Step
from ncclscope_models.emission.operations import Emitted, Group
from ncclscope_models.emission.step import expected_operations, kinds_of_steps
from ncclscope_models.job import ELEMENT_BYTES, Job
from ncclscope_models.rank_groups import Order, groups_of, stage_of

CONTROL_BYTES: Final = 1024
"""Largest operation that counts as control if no rule knows it and its type is not that of tensors."""
_EVEN_SIZES: Final = 2
"""Sizes of Sends where tokens are spread evenly: tokens, and their probabilities."""
_IN_BYTES: Final = ("AllGather", "Broadcast")
_EXCHANGES: Final = ("Send", "Recv", "AlltoAll")


class Reason(StrEnum):
    """Why observed and expected are as they are."""

    RULE = "rule"
    """As many as expected."""
    ROUTING = "routing"
    """An all-to-all whose sum is as expected; how it is spread is the router's choice."""
    CONTROL = "control"
    """Synchronisation and statistics, counted apart."""
    LOST = "lines lost"
    """Other ranks, or other iterations, show that lines of this rank are missing."""
    UNEXPLAINED = "unexplained"


@dataclass(frozen=True, slots=True, order=True)
class Line:
    """Like operations, as NCCL logs them."""

    op: str
    dtype: str
    """As `ELEMENT_BYTES` names it, BOOL as UINT8; another name if NCCL has another type."""
    elements: int

    @property
    def logged_bytes(self) -> int:
        """Count x type."""
        return self.elements * ELEMENT_BYTES.get(self.dtype, 1)


@dataclass(frozen=True, slots=True)
class SeenGroup:
    """A communicator of the log."""

    name: str
    size: int
    ranks: frozenset[int]
    """Global ranks of those members that were seen."""


Seen: TypeAlias = Mapping[SeenGroup, Mapping[Line, int]]
"""How often each line, by communicator, of one rank in one iteration."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the difference."""

    groups: tuple[Group, ...]
    """Of the description, that send it, or that have these ranks; empty if none has."""
    communicators: tuple[str, ...]
    """Names of those of the log that carried it, or that have these ranks."""
    ranks: int
    op: str
    dtype: str
    elements: int | None
    """None: several sizes, or not known."""
    expected: int
    observed: int
    rules: tuple[tuple[str, int], ...]
    """Rule and its operations."""
    reason: Reason
    is_control: bool
    expected_bytes: int
    """Logged."""
    logged_bytes: int
    message_bytes: int
    wire_bytes: float

    @property
    def is_one_rank(self) -> bool:
        """Logged, but launches and moves nothing."""
        return self.ranks == 1

    @property
    def is_unexplained(self) -> bool:
        """Whether nothing says why it differs."""
        return self.reason is Reason.UNEXPLAINED

    @property
    def difference(self) -> int:
        """Observed less expected."""
        return self.observed - self.expected


@dataclass(frozen=True, slots=True)
class Difference:
    """All lines of one rank and iteration."""

    rows: tuple[Row, ...]
    step: Step

    @property
    def unexplained(self) -> int:
        """Operations that are too many or missing for no known reason."""
        return sum(abs(row.difference) or 1 for row in self.rows if row.is_unexplained)

    @property
    def unexplained_bytes(self) -> int:
        """Logged bytes of them."""
        return sum(abs(row.logged_bytes - row.expected_bytes) for row in self.rows if row.is_unexplained)

    @property
    def control_difference(self) -> int:
        """Control operations that are too many or missing."""
        return sum(abs(row.difference) for row in self.rows if row.is_control)


def compare(job: Job, rank: int, order: Order, seen: Seen) -> Difference:
    """Observed less expected of a rank's iteration, as the kind of step that fits best.

    Raises:
        ModelError: the job's framework has no rules for its layout.
    """
    groups = groups_of(job.layout, job.framework, rank, order)
    stage = stage_of(job.layout, rank, order)
    cells = _cells(groups, seen)
    found = [
        Difference(_rows(job, cells, expected_operations(job, stage, step), seen), step) for step in kinds_of_steps(job)
    ]
    return min(found, key=lambda each: (each.unexplained, each.control_difference))


def best_order(job: Job, seen: Mapping[int, Seen]) -> Order:
    """The order of ranks with the fewest unexplained operations of these ranks; Megatron-LM's own of equals."""
    orders = list(Order) if job.layout.pipeline > 1 and job.layout.data > 1 else [Order.DATA_FIRST]
    if len(orders) == 1:
        return orders[0]
    return min(orders, key=lambda order: sum(compare(job, rank, order, seen[rank]).unexplained for rank in seen))


@dataclass(frozen=True, slots=True)
class _Cell:
    groups: tuple[Group, ...]
    communicators: tuple[SeenGroup, ...]
    ranks: int


def _cells(groups: Mapping[Group, Sequence[int]], seen: Seen) -> list[_Cell]:
    """Groups and communicators that nothing tells apart."""
    sets: list[tuple[set[Group], set[SeenGroup]]] = []

    def join(own_groups: set[Group], own_seen: set[SeenGroup]) -> None:
        for others in [each for each in sets if each[0] & own_groups or each[1] & own_seen]:
            sets.remove(others)
            own_groups, own_seen = own_groups | others[0], own_seen | others[1]
        sets.append((own_groups, own_seen))

    by_ranks: dict[tuple[int, ...], set[Group]] = defaultdict(set)
    for group, ranks in groups.items():
        by_ranks[tuple(ranks)].add(group)
    for same in by_ranks.values():
        join(same, set())
    for communicator, lines in seen.items():
        own = {
            group for group, ranks in groups.items()
            if len(ranks) == communicator.size and communicator.ranks <= set(ranks)
        }  # fmt: skip
        if not own and communicator.size == 2 and all(line.op in ("Send", "Recv") for line in lines):
            # Sends without a group have a communicator for each pair (PyTorch 2.7 ProcessGroupNCCL.cpp:pointToPoint).
            own = {group for group in (Group.PIPELINE,) if communicator.ranks <= set(groups.get(group, ()))}
        join(own, {communicator})
    return [
        _Cell(
            tuple(sorted(own)),
            tuple(sorted(communicators, key=lambda each: each.name)),
            len(groups[min(own)]) if own else max((each.size for each in communicators), default=0),
        )
        for own, communicators in sets
    ]


@dataclass(slots=True)
class _Expectation:
    """Expected lines of a cell that are alike."""

    lines: int
    rules: Counter[str]
    groups: set[Group]
    is_control: bool
    like: Emitted


def _rows(job: Job, cells: Iterable[_Cell], expected: Sequence[Emitted], seen: Seen) -> tuple[Row, ...]:
    in_bytes = _are_logged_in_bytes(seen)
    by_group: dict[Group, list[Emitted]] = defaultdict(list)
    for operation in expected:
        by_group[operation.group].append(_as_logged(operation, in_bytes=in_bytes))
    tensor_types = {_logged_type(job.training.precision.value)}
    rows: list[Row] = []
    for cell in cells:
        operations = [operation for group in cell.groups for operation in by_group[group]]
        observed: Counter[Line] = Counter()
        for communicator in cell.communicators:
            observed.update(seen[communicator])
        if operations or observed:
            rows += _Comparison(cell, seen, observed, tensor_types).rows(operations)
    return tuple(rows)


def _are_logged_in_bytes(seen: Seen) -> bool:
    """Up to NCCL 2.21.5. Source: NCCL `src/misc/argcheck.cc`, `src/enqueue.cc:ncclInfoSetDerived`."""
    types = {line.dtype for lines in seen.values() for line in lines if line.op in _IN_BYTES}
    return types == {"INT8"}


def _logged_type(dtype: str) -> str:
    return "UINT8" if dtype == "BOOL" else dtype


def _as_logged(operation: Emitted, *, in_bytes: bool) -> Emitted:
    if in_bytes and operation.op in _IN_BYTES:
        elements = operation.elements
        return replace(
            operation, dtype="INT8", elements=None if elements is None else elements * operation.element_bytes
        )
    return replace(operation, dtype=_logged_type(operation.dtype))


class _Comparison:
    """One cell: expected lines are taken off the observed ones, the most certain first."""

    def __init__(self, cell: _Cell, seen: Seen, observed: Counter[Line], tensor_types: set[str]) -> None:
        self._cell, self._seen, self._left, self._tensor_types = cell, seen, observed, tensor_types
        self._rows: list[Row] = []

    def rows(self, operations: Sequence[Emitted]) -> list[Row]:
        exact: dict[Line, _Expectation] = {}
        control: list[Emitted] = []
        exchanges: list[Emitted] = []
        for operation in operations:
            if operation.op == "AlltoAll":
                exchanges.append(operation)
            elif operation.is_control or operation.elements is None:
                control.append(operation)
            else:
                line = Line(operation.op, operation.dtype, operation.elements)
                one = exact.setdefault(line, _Expectation(0, Counter(), set(), False, operation))
                one.lines += operation.lines
                one.rules[operation.rule] += operation.lines
                one.groups.add(operation.group)
        short: list[tuple[Line, _Expectation, int]] = []
        for line, one in exact.items():
            taken = self._take(line, one.lines)
            is_more = self._left[line] and not (exchanges and line.op in _EXCHANGES)
            if taken == one.lines and not is_more:
                self._add(line, one, taken, Reason.RULE)
            else:
                short.append((line, one, taken))
        self._exchanged(exchanges)
        for line, one, taken in short:
            more = self._take(line, self._left[line])
            is_as_many = taken + more == one.lines
            self._add(line, one, taken + more, Reason.RULE if is_as_many else Reason.UNEXPLAINED)
        self._controlled(control)
        for line, lines in sorted(self._left.items()):
            if lines:
                is_control = line.logged_bytes <= CONTROL_BYTES and line.dtype not in self._tensor_types
                reason = Reason.CONTROL if is_control else Reason.UNEXPLAINED
                like = self._emitted(line)
                self._add(line, _Expectation(0, Counter(), set(), is_control, like), lines, reason)
        return self._rows

    def _take(self, line: Line, most: int) -> int:
        taken = min(most, self._left[line])
        self._left[line] -= taken
        return taken

    def _emitted(self, line: Line) -> Emitted:
        group = self._cell.groups[0] if self._cell.groups else Group.WORLD
        return Emitted(group, self._cell.ranks, line.op, line.dtype, line.elements, 0, 0, "")

    def _exchanged(self, exchanges: Sequence[Emitted]) -> None:
        """All-to-alls: the sum that a rank hands out, self included, is known; who gets how much is not.

        Of half of them, that is: results go back to where the tokens came from, as many as the rank was given.
        """
        if not exchanges:
            return
        sizes = [(line, lines) for line, lines in self._left.items() if line.op in _EXCHANGES and lines]
        sent = sum(
            line.logged_bytes * lines * (self._cell.ranks if line.op == "AlltoAll" else 1)
            for line, lines in sizes
            if line.op != "Recv"
        )
        wanted = sum(operation.logged_bytes for operation in exchanges)
        calls = sum(operation.lines for operation in exchanges)
        is_paired = any(line.op == "Send" for line, _ in sizes)
        for op in ("Send", "Recv") if is_paired else ("AlltoAll",):
            own = [(line, lines) for line, lines in sizes if line.op == op]
            lines = sum(each for _, each in own)
            most = calls * self._cell.ranks if is_paired else calls
            # Of what a rank gets the sum is not known.
            is_known = sent == wanted or (is_paired and self._is_routed(sizes, sent, wanted))
            fits = (is_known or op == "Recv") and (lines == most if op == "AlltoAll" else lines <= most)
            is_even = sent == wanted and lines == most
            reason = Reason.UNEXPLAINED if not fits else Reason.RULE if is_even else Reason.ROUTING
            logged = sum(line.logged_bytes * each for line, each in own)
            message = logged * (self._cell.ranks if op == "AlltoAll" else 1)
            rules = Counter[str]()
            for operation in exchanges:
                rules[operation.rule] += operation.lines * (self._cell.ranks if is_paired else 1)
            one = _Expectation(most, rules, {operation.group for operation in exchanges}, False, exchanges[0])
            wire = 0.0 if op == "Recv" else float(message) * (1 - 1 / self._cell.ranks)
            self._add(
                Line(op, exchanges[0].dtype, 0), one, lines, reason,
                sizes=None, all_bytes=(wanted // (1 if is_paired else self._cell.ranks), logged, message, wire),
                carried=[line for line, _ in own],
            )  # fmt: skip
            for line, each in own:
                self._left[line] -= each

    def _is_routed(self, sizes: Sequence[tuple[Line, int]], sent: int, wanted: int) -> bool:
        """Whether a router that likes some ranks better can have made it: sizes differ, and the sum lies between what
        it is if the rank is given nothing, and all. An even spread has few sizes, and its sum is known.
        """
        different = {line.elements for line, _ in sizes if line.op == "Send"}
        least = wanted // 3  # of tokens a half is certain; of probabilities that are computed again a third comes back
        return len(different) > _EVEN_SIZES and least <= sent <= least + (wanted - least) * self._cell.ranks

    def _controlled(self, control: Sequence[Emitted]) -> None:
        """By operation and elements, whatever the type; those of unknown size last, small ones of the operation."""
        by_kind: dict[tuple[str, int | None], _Expectation] = {}
        for operation in sorted(control, key=lambda each: each.elements is None):
            kind = operation.op, operation.elements if operation.dtype != "INT8" else None
            one = by_kind.setdefault(kind, _Expectation(0, Counter(), set(), True, operation))
            one.lines += operation.lines
            one.rules[operation.rule] += operation.lines
            one.groups.add(operation.group)
        for (op, elements), one in by_kind.items():
            fitting = [
                line for line in sorted(self._left)
                if line.op == op and (line.elements == elements or elements is None)
                and line.logged_bytes <= CONTROL_BYTES
            ]  # fmt: skip
            taken = Counter[Line]()
            for line in fitting:
                taken[line] = self._take(line, one.lines - taken.total())
            lines = taken.total()
            logged = sum(line.logged_bytes * each for line, each in taken.items())
            dtype = next((line.dtype for line in taken if taken[line]), one.like.dtype)
            self._add(
                Line(op, dtype, elements or 0), one, lines, Reason.RULE if lines == one.lines else Reason.CONTROL,
                sizes=elements, all_bytes=(logged, logged, logged, 0.0), carried=list(taken),
            )  # fmt: skip

    def _add(
        self,
        line: Line,
        one: _Expectation,
        observed: int,
        reason: Reason,
        *,
        sizes: int | None = -1,
        all_bytes: tuple[int, int, int, float] | None = None,
        carried: Sequence[Line] = (),
    ) -> None:
        """`sizes`: elements to show, where they are not the line's; `all_bytes`: expected, logged, message, wire."""
        if all_bytes is None:
            like = replace(
                one.like, op=line.op, dtype=line.dtype, elements=line.elements, ranks=self._cell.ranks, lines=observed
            )
            if line.dtype in ELEMENT_BYTES:
                expected = replace(like, lines=one.lines).logged_bytes
                all_bytes = expected, like.logged_bytes, like.message_bytes, like.wire_bytes
            else:
                logged = line.logged_bytes * observed
                all_bytes = 0, logged, logged, 0.0
        wanted = {line, *carried}
        carriers = [each.name for each in self._cell.communicators if wanted & set(self._seen[each])]
        self._rows.append(
            Row(
                groups=tuple(sorted(one.groups)) or self._cell.groups,
                communicators=tuple(carriers) or tuple(each.name for each in self._cell.communicators),
                ranks=self._cell.ranks,
                op=line.op,
                dtype=line.dtype,
                elements=line.elements if sizes == -1 else sizes,
                expected=one.lines,
                observed=observed,
                rules=tuple(sorted(one.rules.items(), key=lambda each: (-each[1], each[0]))),
                reason=reason,
                is_control=one.is_control,
                expected_bytes=all_bytes[0],
                logged_bytes=all_bytes[1],
                message_bytes=all_bytes[2],
                wire_bytes=all_bytes[3],
            )
        )

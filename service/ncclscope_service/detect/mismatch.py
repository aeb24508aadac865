"""Ranks of one communicator that call different collectives at the same place of its sequence.

NCCL does not check it: the job hangs or computes garbage. A lost log line looks alike, so ranks on hosts whose input
was lost prove nothing; and if the following calls agree better when shifted by some places, a line was lost without
notice. From then on the calls of the job are aligned across ranks (`lossy_calls`), and a wrong call is one at which the
job stands still.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns import row_ops
from ncclscope_service.columns.group_by import distinct, group_by
from ncclscope_service.detect import measured_confidence
from ncclscope_service.detect.context import Context, Group, Ledger, names_of_ranks
from ncclscope_service.detect.lossy_calls import UNTOLD, Difference, LossyCalls, NumberedCalls
from ncclscope_service.detect.recent_calls import WINDOW, RecentCalls
from ncclscope_service.join.ranks import NewestCollectives
from ncclscope_service.store.records import Finding, FindingKind, Severity
from ncclscope_service.store.rows import Match
from ncclscope_service.store.settings import SECOND_NS
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS, OPERATIONS

CALL: Final = np.dtype(
    [
        ("communicator", "<i4"),
        ("rank", "<i4"),  # communicator rank
        ("coll_seq", "<i8"),
        ("op", "<u1"),
        ("message_bytes", "<i8"),
        ("logged_ns", "<i8"),  # logged, or observed if lines have no stamp
        ("stamp_ns", "<i8"),  # logged; NO_TIME_NS
        ("op_count", "<u8"),
    ]
)
"""One collective as one rank called it."""

_FOLLOWED: Final = 40
"""Calls after a dispute by which a lost line is distinguished from another call."""
_LOST_AT_MOST: Final = 8
"""Lines lost in a row that are looked for."""
_SHIFTED: Final = 3
"""A wrong call differs in one place, two that were swapped in two."""
_CODES: Final = 256
"""A call is a number: bytes times this, plus the code of the operation."""
_CONTEXT: Final = 12
"""Calls that identify a place of a sequence that repeats itself."""
_LEAST_ALIKE: Final = 3
"""Times that the same must have followed the same calls for it to be what was to be called."""


@dataclass(slots=True)
class _Dispute:
    at_ns: int
    newest_ns: int
    ranks_by_call: dict[int, set[int]] = field(default_factory=lambda: defaultdict[int, set[int]](set))
    streams: dict[int, dict[int, int]] = field(default_factory=dict[int, dict[int, int]])
    """Calls of the first two ranks that differed, from there on, by place."""


@dataclass(slots=True)
class _Sequence:
    """Calls of one communicator at each of the last places, and the places at which its ranks differ."""

    places: RecentCalls
    number: int
    """Among those of `places`."""
    disputes: dict[int, _Dispute] = field(default_factory=dict[int, _Dispute])
    has_losses: bool = False
    """Lines were lost, by calls that cannot be compared any more; the next ones go to `lossy`."""
    lossy: LossyCalls | None = None
    """Its calls since lines were lost: places of different ranks are not the same collectives."""

    @property
    def calls(self) -> NDArray[np.int64]:
        """Call at each of the last places."""
        return self.places.calls[self.places.of(self.number)]

    @property
    def seqs(self) -> NDArray[np.int64]:
        """Number of each place in the whole sequence."""
        return self.places.seqs[self.places.of(self.number)]

    @property
    def first_rank(self) -> NDArray[np.int32]:
        """The rank that reached each place first."""
        return self.places.first_rank[self.places.of(self.number)]

    @property
    def agreeing(self) -> NDArray[np.int32]:
        """Number of ranks that made the same call."""
        return self.places.agreeing[self.places.of(self.number)]


class Mismatch:
    """Mismatched calls of one job, from its logs; needs no captures."""

    def __init__(self) -> None:
        self._places = RecentCalls()
        self._sequences: dict[int, _Sequence] = {}
        self._ledger = Ledger()
        self._context: Context | None = None
        self._is_lossy = False
        """Whether lines of the job are known to be lost."""

    def ingest_calls(self, calls: Columns, context: Context) -> None:
        """Takes collectives as they were called (`CALL`), of each rank in order."""
        if self._context is None:
            self._context = context
        communicators, inverse = distinct(calls["communicator"])
        sequences = [self._sequence(communicator) for communicator in communicators.tolist()]
        if self._is_lossy:
            self._align(communicators.tolist(), context)
        is_taken = _agree(self._places, sequences, inverse, calls)
        if is_taken.all():
            return
        for communicator, mine in group_by(np.where(is_taken[inverse], NO_NUMBER, calls["communicator"])):
            if communicator == NO_NUMBER:
                continue
            rows = row_ops.take(calls, mine)
            lossy = self._sequences[communicator].lossy
            if lossy is not None:
                lossy.ingest(rows, _codes(rows))
                continue
            for _, own in group_by(rows["rank"]):
                self._compare(row_ops.take(rows, own))

    def _sequence(self, communicator: int) -> _Sequence:
        sequence = self._sequences.get(communicator)
        if sequence is None:
            sequence = self._sequences[communicator] = _Sequence(self._places, self._places.add())
        return sequence

    def _align(self, communicators: list[int], context: Context) -> None:
        """Lines of the job were lost: the next calls of these communicators are aligned across their ranks."""
        for communicator in communicators:
            sequence, group = self._sequences[communicator], context.groups.get(communicator)
            group = group or (self._context.groups.get(communicator) if self._context else None)
            if sequence.lossy is None and group is not None and not sequence.disputes:
                sequence.lossy = LossyCalls(len(group.hosts), int(sequence.seqs.max()) + 1)

    def evict_communicators(self, communicators: Set[int]) -> None:
        """Forgets these communicators, except those with an open finding."""
        for communicator in communicators & self._sequences.keys():
            if not self._ledger.is_open(communicator):
                self._places.give_back(self._sequences.pop(communicator).number)

    def update_context(self, context: Context) -> None:
        """Takes the job as it stands now: communicators that it lacks have ended."""
        self._context = context

    def findings(self, now_ns: int, numbered: Callable[[int], NumberedCalls | None] = lambda _: None) -> list[Finding]:
        """All findings so far. A mismatch does not heal: its finding stays open while the communicator lives.

        Where lines were lost it is one only while the job stands still at it. `numbered`: last calls of a communicator
        of which none waits any more to be numbered.
        """
        context = self._context
        if context is None:
            return []
        if context.has_lost_lines and not self._is_lossy:  # calls that are all equal do not show it
            self._is_lossy = True
            self._align(list(self._sequences), context)
        for communicator, sequence in self._sequences.items():
            group = context.groups.get(communicator)
            if group is None:
                self._ledger.close(communicator, now_ns)
            elif sequence.lossy is not None or not self._ledger.is_open(communicator):
                finding = self._found(sequence, group, context, now_ns, partial(numbered, communicator))
                if finding is not None:
                    self._ledger.update(communicator, finding)
                elif sequence.lossy is not None and self._ledger.is_open(communicator):
                    self._ledger.close(communicator, now_ns)  # the job goes on
        return self._ledger.findings()

    def _found(
        self,
        sequence: _Sequence,
        group: Group,
        context: Context,
        now_ns: int,
        numbered: Callable[[], NumberedCalls | None],
    ) -> Finding | None:
        if sequence.lossy is not None:
            lossy = sequence.lossy
            if context.is_over or now_ns - lossy.newest_ns >= _silence_ns(context):
                known = numbered()
                if known is None:
                    lossy.place(is_end=True)
                else:
                    lossy.settle(known)
            return _finding_of_difference(sequence, lossy, group, context) if lossy.is_placed else None
        if not sequence.disputes or not _is_settled(sequence, now_ns, context, is_lossy=self._is_lossy):
            self._is_lossy |= sequence.has_losses
            return None
        return _finding_of_dispute(sequence, group, context)

    @property
    def with_losses(self) -> frozenset[int]:
        """Communicators whose log lines were lost, and of which it is not known how far their ranks have come."""
        return frozenset(
            communicator
            for communicator, known in self._sequences.items()
            if (known.has_losses if known.lossy is None else not known.lossy.is_placed)
        )

    def enqueued(self) -> dict[int, dict[int, int]]:
        """By communicator whose log lines were lost: how many collectives each rank has enqueued, lost lines
        included; those of `with_losses` are left out.
        """
        lossy = ((communicator, known.lossy) for communicator, known in self._sequences.items())
        return {communicator: own.enqueued() for communicator, own in lossy if own is not None and own.is_placed}

    def _compare(self, rows: Columns) -> None:
        rows = row_ops.filter_rows(rows, rows["message_bytes"] >= 0)
        for begin in range(0, len(rows), WINDOW):
            self._compare_window(self._sequences[int(rows["communicator"][0])], rows[begin : begin + WINDOW])

    def _compare_window(self, sequence: _Sequence, rows: Columns) -> None:
        if sequence.has_losses:
            return
        rank, seqs = int(rows["rank"][0]), rows["coll_seq"]
        calls = _codes(rows)
        sequence.places.reserve(sequence.number, int(seqs.max()))
        places = seqs % len(sequence.seqs)
        is_new = sequence.seqs[places] < seqs
        fresh = places[is_new]
        sequence.seqs[fresh], sequence.calls[fresh] = seqs[is_new], calls[is_new]
        sequence.first_rank[fresh], sequence.agreeing[fresh] = rank, 1
        others = ~is_new & (sequence.seqs[places] == seqs)
        agrees = others & (sequence.calls[places] == calls)
        sequence.agreeing[places[agrees]] += 1
        disputed = np.isin(seqs, list(sequence.disputes)) if sequence.disputes else np.zeros(len(seqs), np.bool_)
        for at in np.flatnonzero(agrees & disputed).tolist():
            sequence.disputes[int(seqs[at])].ranks_by_call[int(calls[at])].add(rank)
        for at in np.flatnonzero(others & ~agrees)[:8].tolist():
            self._dispute(sequence, int(seqs[at]), int(places[at]), rank, int(calls[at]), int(rows["logged_ns"][at]))
        self._follow(sequence, rank, rows, calls)

    def _follow(self, sequence: _Sequence, rank: int, rows: Columns, calls: NDArray[np.int64]) -> None:
        """Records the calls of the two ranks of the first dispute from there on."""
        if not sequence.disputes:
            return
        first = min(sequence.disputes)
        dispute = sequence.disputes[first]
        dispute.newest_ns = max(dispute.newest_ns, int(rows["logged_ns"].max()))
        stream = dispute.streams.get(rank)
        if stream is not None:
            near = (rows["coll_seq"] >= first) & (rows["coll_seq"] < first + _FOLLOWED)
            stream.update(zip(rows["coll_seq"][near].tolist(), calls[near].tolist(), strict=True))

    def _dispute(self, sequence: _Sequence, seq: int, place: int, rank: int, call: int, at_ns: int) -> None:
        if seq not in sequence.disputes and len(sequence.disputes) >= 64:
            return  # one is enough to name; the first are the ones that matter
        if seq not in sequence.disputes:
            sequence.disputes[seq] = _Dispute(at_ns, at_ns, streams=_streams(sequence, seq, place, rank))
        dispute = sequence.disputes[seq]
        dispute.ranks_by_call[int(sequence.calls[place])].add(int(sequence.first_rank[place]))
        dispute.ranks_by_call[call].add(rank)


def _codes(rows: Columns) -> NDArray[np.int64]:
    """Operation and bytes of each call as one number."""
    codes: NDArray[np.int64] = rows["message_bytes"] * _CODES + rows["op"]
    return codes


def calls_of_operations(store: Store, operations: Columns, times: NDArray[np.int64]) -> Columns:
    """Collectives as the logs name them (`CALL`), from operations that are collectives."""
    calls = np.zeros(len(operations), CALL)
    found, inverse = distinct(operations["member"])
    members = [store.members[member] for member in found.tolist()]
    ranks = [NO_NUMBER if member.rank is None else member.rank for member in members]
    calls["communicator"] = np.asarray([member.communicator for member in members], np.int32)[inverse]
    calls["rank"] = np.asarray(ranks, np.int32)[inverse]
    calls["coll_seq"] = operations["coll_seq"]
    calls["op"] = store.templates_of(operations, "op")["op"]
    calls["message_bytes"] = operations["message_bytes"]
    calls["logged_ns"], calls["stamp_ns"] = times, operations["logged_at_ns"]
    calls["op_count"] = operations["op_count"]
    return calls


def numbered_calls(store: Store, found: NewestCollectives) -> NumberedCalls:
    """What ranks called in these collectives."""
    ids = found.operations
    calls, stamps_ns = np.full(ids.shape, NO_NUMBER, np.int64), np.full(ids.shape, NO_TIME_NS, np.int64)
    is_known = ids >= store.operations.first
    rows = store.operations.take(ids[is_known], "template", "message_bytes", "match", "kernel", "logged_at_ns")
    has_kernel = np.zeros(ids.shape, np.bool_)
    has_kernel[is_known] = rows["kernel"] != NO_NUMBER
    codes = rows["message_bytes"] * _CODES + store.templates_of(rows, "op")["op"]
    calls[is_known] = np.where((rows["match"] == Match.LINE_LOST) | (rows["message_bytes"] < 0), UNTOLD, codes)
    stamps_ns[is_known] = rows["logged_at_ns"]
    if found.is_by_lines:
        calls[_may_be_of_other_places(calls)] = UNTOLD
    return NumberedCalls(
        begin=found.begin,
        calls=calls,
        stamps_ns=stamps_ns.max(axis=1, initial=NO_TIME_NS),
        enqueued=found.enqueued,
        is_told=found.are_counted or bool(has_kernel.any(axis=0).all()),
    )


def _may_be_of_other_places(calls: NDArray[np.int64]) -> NDArray[np.bool_]:
    """K: whether ranks called differently (K x R), but nothing that is not called elsewhere: lines may be of there."""
    is_told = calls >= 0
    first = calls[np.arange(len(calls)), is_told.argmax(axis=1)]
    differs = np.any(is_told & (calls != first[:, None]), axis=1)
    usual = np.unique(calls[~differs][is_told[~differs]])
    of_other_places: NDArray[np.bool_] = differs & np.all(~is_told | np.isin(calls, usual), axis=1)
    return of_other_places


def _agree(
    places: RecentCalls, sequences: list[_Sequence], inverse: NDArray[np.intp], calls: Columns
) -> NDArray[np.bool_]:
    """Takes calls of communicators whose ranks all agree, as they do in a healthy job: of all ranks in one pass.

    `inverse`: of which of these sequences each call is. Gives for each sequence whether its calls were taken: none of
    one whose ranks do not agree, or if only their order can tell.
    """
    if not len(calls):
        return np.ones(len(sequences), np.bool_)
    seqs, ranks = calls["coll_seq"].astype(np.int64), calls["rank"]
    newest, oldest = np.full(len(sequences), np.iinfo(np.int64).min), np.full(len(sequences), np.iinfo(np.int64).max)
    np.maximum.at(newest, inverse, seqs)
    np.minimum.at(oldest, inverse, seqs)
    is_taken = np.asarray([not (of.disputes or of.has_losses or of.lossy) for of in sequences])
    is_taken &= newest - oldest < WINDOW
    is_taken[inverse[calls["message_bytes"] < 0]] = False
    for of, seq in zip(sequences, newest.tolist(), strict=True):
        places.reserve(of.number, seq)
    numbers = np.asarray([of.number for of in sequences], np.int64)[inverse]
    place = places.begins[numbers] + seqs % places.widths[numbers]
    # Of each place the lowest rank first: its call counts if no rank has come before.
    usable = np.flatnonzero(is_taken[inverse])
    order = usable[np.argsort(place[usable] << 32 | ranks[usable])]
    begins = np.flatnonzero(np.diff(place[order], prepend=-1))
    if not len(begins):
        return is_taken
    called = _codes(calls)[order]
    own, own_seq = place[order[begins]], seqs[order[begins]]
    known_seq = places.seqs[own]
    is_new, is_known = known_seq < own_seq, known_seq == own_seq
    expected = np.where(is_known, places.calls[own], called[begins])
    amounts = np.diff(np.append(begins, len(order)))
    differs = (called != np.repeat(expected, amounts)) & np.repeat(is_new | is_known, amounts)
    is_taken[inverse[order[differs]]] = False
    is_kept = is_taken[inverse[order[begins]]]
    fresh = is_new & is_kept
    places.seqs[own[fresh]], places.calls[own[fresh]] = own_seq[fresh], expected[fresh]
    places.first_rank[own[fresh]] = ranks[order[begins]][fresh]
    places.agreeing[own[fresh]] = 0
    met = is_kept & (is_new | is_known)
    places.agreeing[own[met]] += amounts[met].astype(np.int32)
    return is_taken


def _streams(sequence: _Sequence, seq: int, place: int, rank: int) -> dict[int, dict[int, int]]:
    """Calls since this place of the rank that reached it first, as far as it was first; none yet of the other."""
    first = int(sequence.first_rank[place])
    known = (sequence.first_rank == first) & (sequence.seqs >= seq) & (sequence.seqs < seq + _FOLLOWED)
    since = dict(zip(sequence.seqs[known].tolist(), sequence.calls[known].tolist(), strict=True))
    return {first: since, rank: {}}


def _silence_ns(context: Context) -> float:
    """Ranks that called different operations usually make no further calls."""
    return context.settings.other.mismatch_silence_seconds * SECOND_NS


def _is_settled(sequence: _Sequence, now_ns: int, context: Context, *, is_lossy: bool) -> bool:
    """Whether enough has followed to tell a wrong call from a lost line, and it is no lost line.

    `is_lossy`: lines of the job are known to be lost; what few calls may show is taken for another one.
    """
    dispute = sequence.disputes[min(sequence.disputes)]
    one, other = (dispute.streams[rank] for rank in list(dispute.streams)[:2])
    compared = one.keys() & other.keys()
    is_enough = len(compared) >= context.settings.other.mismatch_calls or context.is_over
    if not is_enough and now_ns - dispute.newest_ns < _silence_ns(context):
        return False
    first = min(sequence.disputes)
    agreement = {
        shift: _agreement(one, other, shift)
        for shift in range(-_LOST_AT_MOST, _LOST_AT_MOST + 1)
        if shift == 0 or _explains(one, other, first, shift)
    }
    best = max(agreement, key=lambda shift: (agreement[shift], -abs(shift)))
    differing = sum(one[seq] != other[seq] for seq in compared)
    other_kinds = sum(one[seq] % _CODES != other[seq] % _CODES for seq in compared)
    # a job that calls different operations time and again stands still: one that goes on has lost lines
    is_lossy |= not all(context.is_fully_observed(host) for group in context.groups.values() for host in group.hosts)
    if (best and (is_lossy or differing >= _SHIFTED)) or other_kinds >= _SHIFTED:
        sequence.has_losses = True
        sequence.disputes.clear()
        return False
    return True


def _agreement(one: dict[int, int], other: dict[int, int], shift: int) -> float:
    """Share of the calls of one that the other made `shift` places later."""
    compared = [one[seq] == other[seq + shift] for seq in one if seq + shift in other]
    return sum(compared) / len(compared) if compared else 0.0


def _explains(one: dict[int, int], other: dict[int, int], first: int, shift: int) -> bool:
    """Whether lost lines of one of them explain the place at which they differ first."""
    at_one, at_other = (first, first + shift) if shift > 0 else (first - shift, first)
    return at_one in one and at_other in other and one[at_one] == other[at_other]


def _finding_of_dispute(sequence: _Sequence, group: Group, context: Context) -> Finding | None:
    seq = min(sequence.disputes)
    dispute = sequence.disputes[seq]
    lost = {rank for rank, host in enumerate(group.hosts) if not context.is_fully_observed(host)}
    place = seq % len(sequence.seqs)
    calls = {call: set(ranks) for call, ranks in dispute.ranks_by_call.items()}
    _add_early_ranks(sequence, place, calls, len(group.global_ranks))
    calls = {call: ranks - lost for call, ranks in calls.items() if ranks - lost}
    support = {call: len(ranks) for call, ranks in calls.items()}
    if sequence.seqs[place] == seq and int(sequence.calls[place]) in support:
        first = int(sequence.calls[place])
        support[first] = max(support[first], int(sequence.agreeing[place]))
    return _finding(sequence, Difference(seq, dispute.at_ns, calls), support, group, context)


def _finding_of_difference(sequence: _Sequence, lossy: LossyCalls, group: Group, context: Context) -> Finding | None:
    found = lossy.difference()
    if found is None:
        return None
    support = {call: len(ranks) for call, ranks in found.ranks_by_call.items()}
    made = _finding(sequence, found, support, group, context)
    if made is None:
        return None
    return replace(made, confidence=min(made.confidence, measured_confidence.MISMATCH_AMONG_LOSSES))


def _finding(
    sequence: _Sequence, found: Difference, support: dict[int, int], group: Group, context: Context
) -> Finding | None:
    """`support`: by call, how many ranks made it, those included that are not named."""
    seq, calls = found.coll_seq, found.ranks_by_call
    if len(calls) < 2 or all(group.global_ranks[rank] < 0 for ranks in calls.values() for rank in ranks):
        return None
    usual = max(support, key=lambda call: support[call])
    is_clear = sum(count == support[usual] for count in support.values()) == 1
    how_sure = measured_confidence.MISMATCH_BY_MOST if is_clear else measured_confidence.MISMATCH_UNDECIDED
    past, alike = _alike_before(sequence, seq)
    expected = set(past[alike].tolist()) & calls.keys()
    by_past = not is_clear and len(alike) >= _LEAST_ALIKE and len(expected) == 1
    if by_past:
        (usual,), is_clear, how_sure = expected, True, measured_confidence.MISMATCH_BY_PAST
    minority = {rank for call, ranks in calls.items() if call != usual or not is_clear for rank in ranks}
    ranks = tuple(sorted(group.global_ranks[rank] for rank in minority if group.global_ranks[rank] >= 0))
    odd = next(call for call in calls if call != usual)
    hosts = context.hosts_of(ranks)
    differs_in = _differs_in(odd, usual, past, alike)
    order = "; this is the next call of the sequence, so ranks make their calls in different orders"
    who, is_one = names_of_ranks(ranks), len(ranks) == 1
    calls_text = (
        f"{who} {'calls' if is_one else 'call'} {_call_text(odd)} as collective {seq} of {group.name}, "
        f"but the other ranks call {_call_text(usual)}{', as before' if by_past else ''}"
        if is_clear
        else f"{who} {'disagrees' if is_one else 'disagree'} on collective {seq} of {group.name}: {_call_text(odd)} or "
        f"{_call_text(usual)}"
    )
    return Finding(
        kind=FindingKind.MISMATCH,
        severity=Severity.CRITICAL,
        job=context.job,
        comm_id=group.comm_id,
        parallelism=group.parallelism,
        ranks=ranks,
        hosts=hosts,
        since_ns=found.at_ns,
        confidence=how_sure,
        summary=f"{calls_text}{order if differs_in == 'order' else ''}",
        evidence={
            "coll_seq": seq,
            "collectives": [f"{group.comm_id}:{seq}"],
            "differs_in": differs_in,
            "calls": {
                _call_text(call): sorted(group.global_ranks[rank] for rank in ranks) for call, ranks in calls.items()
            },
            "disputed_collectives": max(1, len(sequence.disputes)),
        },
    )


def _differs_in(odd: int, usual: int, past: NDArray[np.int64], alike: NDArray[np.intp]) -> str:
    """`size`; or `order` if the odd call is the one that follows here, by the sequence's own past; `operation`."""
    if odd % _CODES == usual % _CODES:
        return "size"
    ends = alike[(past[alike] == usual) & (alike + 1 < len(past))]
    return "order" if len(ends) and int(past[ends[-1] + 1]) == odd else "operation"


def _alike_before(sequence: _Sequence, seq: int) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
    """The calls before a place, in order, and where among them is what followed the same calls as precede the place."""
    known = (sequence.seqs >= 0) & (sequence.seqs < seq)
    past = sequence.calls[known][np.argsort(sequence.seqs[known])]
    if len(past) <= 2 * _CONTEXT:
        return past, np.empty(0, np.intp)
    alike = np.lib.stride_tricks.sliding_window_view(past[:-1], _CONTEXT)
    return past, np.flatnonzero((alike == past[-_CONTEXT:]).all(axis=1)) + _CONTEXT


def _add_early_ranks(sequence: _Sequence, place: int, calls: dict[int, set[int]], size: int) -> None:
    """Names the ranks that agreed with the first before anybody differed: they were only counted."""
    first = int(sequence.calls[place])
    if first in calls:
        silent = set(range(size)) - set[int]().union(*(ranks for call, ranks in calls.items() if call != first))
        if len(silent) == int(sequence.agreeing[place]):
            calls[first] = silent


def _call_text(call: int) -> str:
    moved, code = divmod(call, _CODES)
    return f"{OPERATIONS[code].name if code < len(OPERATIONS) else 'an unknown operation'} of {moved} bytes"

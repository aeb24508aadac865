"""Ranks of one communicator that call different collectives at the same place of its sequence.

NCCL does not check it: the job hangs or computes rubbish. A line that was lost looks alike, so ranks on hosts of
which input was lost prove nothing; and where what follows fits better some places on, a line was lost that nobody told
of, and the communicator is judged no more.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service import whole_rows
from ncclscope_service.detect.context import Context, Group
from ncclscope_service.detect.findings import Ledger, names_of_ranks
from ncclscope_service.distinct import distinct, groups
from ncclscope_service.rows import Finding, FindingKind, Severity
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, OPERATIONS

CALL: Final = np.dtype(
    [
        ("communicator", "<i4"),
        ("rank", "<i4"),  # communicator rank
        ("coll_seq", "<i8"),
        ("op", "<u1"),
        ("message_bytes", "<i8"),
        ("logged_ns", "<i8"),  # logged, or observed where lines have no stamp
    ]
)
"""One collective as one rank called it."""

_WINDOW: Final = 4096
"""Places of a sequence that are remembered: ranks do not run further apart."""
_UNSEEN: Final = -1
_FOLLOWED: Final = 40
"""Calls after a dispute by which a lost line is told from another call."""
_ENOUGH: Final = 12
_LOST_AT_MOST: Final = 8
_SHIFTED: Final = 3
"""A wrong call differs in one place, two that were swapped in two."""
_SILENCE_NS: Final = 5_000_000_000
"""Ranks that called different operations most often call no more."""
_CODES: Final = 256
_CONTEXT: Final = 12
"""Calls by which a place of a sequence that repeats itself is found again."""


@dataclass(slots=True)
class _Dispute:
    at_ns: int
    newest_ns: int
    ranks_by_call: dict[int, set[int]] = field(default_factory=lambda: defaultdict[int, set[int]](set))
    streams: dict[int, dict[int, int]] = field(default_factory=dict[int, dict[int, int]])
    """Of the first two ranks that differed: what they called from there on, by its place."""


@dataclass(slots=True)
class _Sequence:
    """What the first rank to come there called at each of the last places, and the places where ranks differ."""

    calls: NDArray[np.int64] = field(default_factory=lambda: np.full(_WINDOW, _UNSEEN, dtype=np.int64))
    seqs: NDArray[np.int64] = field(default_factory=lambda: np.full(_WINDOW, _UNSEEN, dtype=np.int64))
    first_rank: NDArray[np.int32] = field(default_factory=lambda: np.full(_WINDOW, NO_NUMBER, dtype=np.int32))
    agreeing: NDArray[np.int32] = field(default_factory=lambda: np.zeros(_WINDOW, dtype=np.int32))
    disputes: dict[int, _Dispute] = field(default_factory=dict[int, _Dispute])
    has_losses: bool = False
    """Lines were lost: places of different ranks are not the same collectives."""


class Mismatch:
    """Feeds on the collectives that one job's logs name; needs no captures."""

    def __init__(self) -> None:
        self._sequences: dict[int, _Sequence] = defaultdict(_Sequence)
        self._ledger = Ledger()
        self._context: Context | None = None

    def feed(self, calls: Columns, context: Context) -> None:
        """Takes collectives as they were called (`CALL`); of each rank in order."""
        if self._context is None:
            self._context = context
        for communicator, mine in groups(calls["communicator"]):
            rows = whole_rows.taken(calls, mine)
            if not _agree(self._sequences[communicator], rows):
                for _, own in groups(rows["rank"]):
                    self._compare(whole_rows.taken(rows, own))

    def know(self, context: Context) -> None:
        """Takes the job as it stands now: communicators that it lacks have ended."""
        self._context = context

    def findings(self, now_ns: int) -> list[Finding]:
        """All findings so far. A mismatch does not heal: its finding stays open while the communicator lives."""
        context = self._context
        if context is None:
            return []
        for communicator, sequence in self._sequences.items():
            group = context.groups.get(communicator)
            if group is None:
                self._ledger.close(communicator, now_ns)
            elif sequence.disputes and not self._ledger.is_open(communicator):
                finding = _finding(sequence, group, context)
                if finding is not None and _is_settled(sequence, now_ns, context):
                    self._ledger.update(communicator, finding)
        return self._ledger.findings()

    @property
    def with_losses(self) -> frozenset[int]:
        """Communicators of which log lines were lost: how many of its operations a rank has enqueued is not known."""
        return frozenset(communicator for communicator, known in self._sequences.items() if known.has_losses)

    def _compare(self, rows: Columns) -> None:
        rows = whole_rows.kept(rows, rows["message_bytes"] >= 0)
        for begin in range(0, len(rows), _WINDOW):
            self._compare_window(self._sequences[int(rows["communicator"][0])], rows[begin : begin + _WINDOW])

    def _compare_window(self, sequence: _Sequence, rows: Columns) -> None:
        if sequence.has_losses:
            return
        rank, seqs = int(rows["rank"][0]), rows["coll_seq"]
        calls = rows["message_bytes"] * _CODES + rows["op"]
        places = seqs % _WINDOW
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
        """Notes what the two ranks of the first dispute call from there on."""
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


def _agree(sequence: _Sequence, rows: Columns) -> bool:
    """Takes calls of one communicator where all ranks agree, as they do in a healthy job: of all ranks in one go.

    False, and nothing is taken, where they do not, or where only their order can tell.
    """
    seqs, inverse = distinct(rows["coll_seq"])
    if (
        sequence.disputes
        or sequence.has_losses
        or int(seqs[-1] - seqs[0]) >= _WINDOW
        or (rows["message_bytes"] < 0).any()
    ):
        return False
    calls = rows["message_bytes"] * _CODES + rows["op"]
    first = np.full(len(seqs), np.iinfo(np.int32).max, np.int32)
    np.minimum.at(first, inverse, rows["rank"])
    places = seqs % _WINDOW
    is_new = sequence.seqs[places] < seqs
    is_known = sequence.seqs[places] == seqs
    expected = np.where(is_known, sequence.calls[places], _UNSEEN)
    of_first = rows["rank"] == first[inverse]
    expected[inverse[of_first & is_new[inverse]]] = calls[of_first & is_new[inverse]]
    if ((calls != expected[inverse]) & (is_new | is_known)[inverse]).any():
        return False
    fresh = places[is_new]
    sequence.seqs[fresh], sequence.calls[fresh] = seqs[is_new], expected[is_new]
    sequence.first_rank[fresh], sequence.agreeing[fresh] = first[is_new], 0
    amounts = np.bincount(inverse, minlength=len(seqs)).astype(np.int32)
    taken = is_new | is_known
    sequence.agreeing[places[taken]] += amounts[taken]
    return True


def _streams(sequence: _Sequence, seq: int, place: int, rank: int) -> dict[int, dict[int, int]]:
    """Of the rank that came first to this place what it called since, where it was the first; of the other nothing."""
    first = int(sequence.first_rank[place])
    known = (sequence.first_rank == first) & (sequence.seqs >= seq) & (sequence.seqs < seq + _FOLLOWED)
    since = dict(zip(sequence.seqs[known].tolist(), sequence.calls[known].tolist(), strict=True))
    return {first: since, rank: {}}


def _is_settled(sequence: _Sequence, now_ns: int, context: Context) -> bool:
    """Whether enough has followed to tell a wrong call from a lost line, and it is no lost line."""
    dispute = sequence.disputes[min(sequence.disputes)]
    one, other = (dispute.streams[rank] for rank in list(dispute.streams)[:2])
    compared = one.keys() & other.keys()
    if len(compared) < _ENOUGH and now_ns - dispute.newest_ns < _SILENCE_NS and not context.is_over:
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
    if (best and differing >= _SHIFTED) or other_kinds >= _SHIFTED:
        sequence.has_losses = True
        sequence.disputes.clear()
        return False
    return True


def _agreement(one: dict[int, int], other: dict[int, int], shift: int) -> float:
    """Share of the calls of one that the other made so many places on."""
    compared = [one[seq] == other[seq + shift] for seq in one if seq + shift in other]
    return sum(compared) / len(compared) if compared else 0.0


def _explains(one: dict[int, int], other: dict[int, int], first: int, shift: int) -> bool:
    """Whether so many lines lost of one of them explain the place at which they differ first."""
    at_one, at_other = (first, first + shift) if shift > 0 else (first - shift, first)
    return at_one in one and at_other in other and one[at_one] == other[at_other]


def _finding(sequence: _Sequence, group: Group, context: Context) -> Finding | None:
    seq = min(sequence.disputes)
    dispute = sequence.disputes[seq]
    lost = {
        rank for rank, host in enumerate(group.hosts) if host in context.lossy_hosts or host in context.silent_hosts
    }
    place = seq % _WINDOW
    calls = {call: set(ranks) for call, ranks in dispute.ranks_by_call.items()}
    _add_early_ranks(sequence, place, calls, len(group.global_ranks))
    calls = {call: ranks - lost for call, ranks in calls.items() if ranks - lost}
    if len(calls) < 2 or all(group.global_ranks[rank] < 0 for ranks in calls.values() for rank in ranks):
        return None
    support = {call: len(ranks) for call, ranks in calls.items()}
    if sequence.seqs[place] == seq and int(sequence.calls[place]) in support:
        first = int(sequence.calls[place])
        support[first] = max(support[first], int(sequence.agreeing[place]))
    usual = max(support, key=lambda call: support[call])
    is_clear = sum(count == support[usual] for count in support.values()) == 1
    minority = {rank for call, ranks in calls.items() if call != usual or not is_clear for rank in ranks}
    ranks = tuple(sorted(group.global_ranks[rank] for rank in minority if group.global_ranks[rank] >= 0))
    odd = next(call for call in calls if call != usual)
    hosts = context.hosts_of(ranks)
    differs_in = _differs_in(sequence, seq, odd, usual)
    order = ", and what it calls is the next one of this sequence: they call them in another order"
    return Finding(
        kind=FindingKind.MISMATCH,
        severity=Severity.CRITICAL,
        job=context.job,
        comm_id=group.comm_id,
        parallelism=group.parallelism,
        ranks=ranks,
        hosts=hosts,
        since_ns=dispute.at_ns,
        until_ns=None,
        confidence=0.9 if is_clear else 0.5,
        summary=(
            f"{names_of_ranks(ranks)} {'differs' if len(ranks) == 1 else 'differ'} in collective {seq} "
            f"of {group.name}: "
            f"{_call_text(odd)} where {'the others call' if is_clear else 'another calls'} {_call_text(usual)}"
            f"{order if differs_in == 'order' else ''}"
        ),
        evidence={
            "coll_seq": seq,
            "collectives": [f"{group.comm_id}:{seq}"],
            "differs_in": differs_in,
            "calls": {
                _call_text(call): sorted(group.global_ranks[rank] for rank in ranks) for call, ranks in calls.items()
            },
            "disputed_collectives": len(sequence.disputes),
        },
    )


def _differs_in(sequence: _Sequence, seq: int, odd: int, usual: int) -> str:
    """`size`; or `order` where the odd call is the one that follows here, by the sequence's own past; `operation`."""
    if odd % _CODES == usual % _CODES:
        return "size"
    known = sequence.seqs >= 0
    order = np.argsort(sequence.seqs[known])
    past = sequence.calls[known][order][sequence.seqs[known][order] < seq]
    before = past[-_CONTEXT:]
    if len(past) > 2 * _CONTEXT:
        alike = np.lib.stride_tricks.sliding_window_view(past[:-2], _CONTEXT)
        ends = np.flatnonzero((alike == before).all(axis=1)) + _CONTEXT
        ends = ends[past[ends] == usual]
        if len(ends) and int(past[ends[-1] + 1]) == odd:
            return "order"
    return "operation"


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

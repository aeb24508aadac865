"""Ranks of one communicator that call different collectives at the same place of its sequence.

NCCL does not check it: the job hangs or computes rubbish. A line that was lost looks the same, so ranks on hosts of
which input was lost prove nothing.
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
from ncclscope_service.distinct import distinct_together, groups
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
_CODES: Final = 256


@dataclass(slots=True)
class _Dispute:
    at_ns: int
    ranks_by_call: dict[int, set[int]] = field(default_factory=lambda: defaultdict[int, set[int]](set))


@dataclass(slots=True)
class _Sequence:
    """What the first rank to come there called at each of the last places, and the places where ranks differ."""

    calls: NDArray[np.int64] = field(default_factory=lambda: np.full(_WINDOW, _UNSEEN, dtype=np.int64))
    seqs: NDArray[np.int64] = field(default_factory=lambda: np.full(_WINDOW, _UNSEEN, dtype=np.int64))
    first_rank: NDArray[np.int32] = field(default_factory=lambda: np.full(_WINDOW, NO_NUMBER, dtype=np.int32))
    agreeing: NDArray[np.int32] = field(default_factory=lambda: np.zeros(_WINDOW, dtype=np.int32))
    disputes: dict[int, _Dispute] = field(default_factory=dict[int, _Dispute])


class Mismatch:
    """Feeds on the collectives that one job's logs name; needs no captures."""

    def __init__(self) -> None:
        self._sequences: dict[int, _Sequence] = defaultdict(_Sequence)
        self._ledger = Ledger()
        self._context: Context | None = None

    def feed(self, calls: Columns, context: Context) -> None:
        """Takes collectives as they were called (`CALL`); of each rank in order."""
        self._context = context
        _, of_rank = distinct_together(calls["communicator"], calls["rank"])
        for _, mine in groups(of_rank):
            self._compare(whole_rows.taken(calls, mine))

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
                if finding is not None:
                    self._ledger.update(communicator, finding)
        return self._ledger.findings()

    def _compare(self, rows: Columns) -> None:
        rows = whole_rows.kept(rows, rows["message_bytes"] >= 0)
        for begin in range(0, len(rows), _WINDOW):
            self._compare_window(self._sequences[int(rows["communicator"][0])], rows[begin : begin + _WINDOW])

    def _compare_window(self, sequence: _Sequence, rows: Columns) -> None:
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

    def _dispute(self, sequence: _Sequence, seq: int, place: int, rank: int, call: int, at_ns: int) -> None:
        if seq not in sequence.disputes and len(sequence.disputes) >= 64:
            return  # one is enough to name; the first are the ones that matter
        dispute = sequence.disputes.setdefault(seq, _Dispute(at_ns))
        dispute.ranks_by_call[int(sequence.calls[place])].add(int(sequence.first_rank[place]))
        dispute.ranks_by_call[call].add(rank)


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
    if len(calls) < 2:
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
        ),
        evidence={
            "coll_seq": seq,
            "calls": {
                _call_text(call): sorted(group.global_ranks[rank] for rank in ranks) for call, ranks in calls.items()
            },
            "disputed_collectives": len(sequence.disputes),
        },
    )


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

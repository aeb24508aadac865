"""Joined operations to measured rows: gathers their kernels, measures, and writes back.

`transfer.py` has the mathematics over matrices; here rows of the store become such matrices and the results go
to the rows of every rank and to one `rows.COLLECTIVE` per launch.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.clock.host_clocks import Clocked, Clocks
from ncclscope_service.columns import row_ops
from ncclscope_service.columns.group_by import distinct, first_positions
from ncclscope_service.columns.table import Ids, Table
from ncclscope_service.join import ranks
from ncclscope_service.join.ranks import JoinedCollectives, KernelMatrix
from ncclscope_service.join.send_recv import SIDE, ExchangeBook, Exchanges
from ncclscope_service.measure import transfer
from ncclscope_service.measure.limits import Limits
from ncclscope_service.measure.transfer import ExchangeMeasures, Measures, collective_rows
from ncclscope_service.nccl import bandwidth
from ncclscope_service.nccl.bandwidth import classify
from ncclscope_service.store import rows
from ncclscope_service.store.tables import Hosts, Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS, OPERATION_CODES, OPERATIONS

_ROOTED = np.array(
    [code < len(OPERATIONS) and OPERATIONS[code].is_collective and OPERATIONS[code].is_rooted for code in range(256)]
)
_ROOT_SENDS = np.zeros(256, bool)
_ROOT_SENDS[[OPERATION_CODES["Broadcast"], OPERATION_CODES["Scatter"]]] = True

_OF_SIDES: Final = (
    "process", "launch", "template", "start_ns", "end_ns", "start_true_ns", "censored", "message_bytes"
)  # fmt: skip

_SKEW_NS = 20_000.0
"""Ranks of one collective end up to 10 us apart between nodes; twice that is still one collective."""


class Measuring:
    """Measures what the join found: operations, or replays of captured ones."""

    def __init__(self, known: Store, hosts: Hosts, limits: Limits, table: Table | None = None) -> None:
        """`table`: what the ids of joined operations are of, with the columns of rows.OPERATION."""
        self._limits = limits
        self._store = known
        self._table = known.operations if table is None else table
        self._hosts = hosts

    def gather(self, joined: JoinedCollectives) -> KernelMatrix:
        """The kernels of joined collectives."""
        known = self._store
        host_of = self._hosts.of_processes()
        communicators, group = distinct(joined.communicator)
        size = joined.operations.shape[1]
        hosts = np.full((len(communicators), size), NO_NUMBER, np.int32)
        for of, communicator in zip(hosts, communicators.tolist(), strict=True):
            for rank, member in (known.communicators[communicator].members or {}).items():
                if 0 <= rank < size:
                    of[rank] = host_of[known.members[member].process]
        return ranks.gather(known, joined, group, hosts, self._table)

    def measure_joined(
        self, joined: Clocked, book: ExchangeBook, clocks: Clocks, mixed: set[int]
    ) -> tuple[list[Columns], list[Ids]]:
        """Measures collectives, and the launches of Sends and Recvs that these complete in the book.

        Gives what the store shall keep of them (rows.COLLECTIVE), and the rows that were measured.
        """
        sigma_ns, slack_ns = clocks.sigma_ns(), clocks.joining_slack_ns()
        added = [self.measure(each, sigma_ns, slack_ns, mixed) for each in joined.collectives]
        rows = [each.joined.operations[each.present] for each in joined.collectives]
        if len(joined.sends):
            book.add(self.sides_of(joined.sends, joined.receives, sigma_ns))
        exchanges = book.take_complete()
        if len(exchanges.operations):
            added.append(self.measure_exchanges(exchanges, mixed))
            rows.append(exchanges.operations)
        return added, rows

    def measure(
        self, kernels: KernelMatrix, sigma_ns: NDArray[np.float64], slack_ns: NDArray[np.float64], mixed: set[int]
    ) -> Columns:
        """Measures collectives, writes the results to their rows, and gives what the store shall keep of each launch.

        `sigma_ns`: uncertainty of each host's clock, by host index; `slack_ns`: how far it may be off at most; `mixed`:
        launches that also hold Send or Recv, whose bandwidth nothing defines.
        """
        kernels = self._believable(kernels, slack_ns)
        leading, moved, weighted = self._launch_bytes(kernels, mixed)
        rooted = _ROOTED[kernels.op]
        results = np.empty(0, rows.COLLECTIVE)
        for of_kind in (np.flatnonzero(~rooted), np.flatnonzero(rooted)):
            chosen = of_kind
            if not len(chosen):
                continue
            part = kernels.take(chosen)
            if rooted[chosen[0]]:
                measures = self._measure_rooted(part, moved[chosen], weighted[chosen], sigma_ns)
            else:
                measures = transfer.measure_all_to_all(
                    part.start_ns, part.end_ns, part.censored, moved[chosen], weighted[chosen]
                )
            surely = part.confidence.min(axis=1, initial=1)
            is_wrong = self._limits.impossible(measures.busbw, part.joined.communicator, part.op, surely)
            if is_wrong.any():
                self._doubt(part.joined.operations[part.present & is_wrong[:, None]])
                left = np.flatnonzero(~is_wrong)
                part, measures, chosen = part.take(left), measures.take(left), chosen[left]
            self._write_back(part, measures)
            new = _collectives(part, measures, moved[chosen])
            wanted = leading[chosen] & (measures.transfer_ns >= 0) & ~self._is_counted(part)
            results = row_ops.concat([results, row_ops.filter_rows(new, wanted)])
        return results

    def _is_counted(self, part: KernelMatrix) -> NDArray[np.bool_]:
        """K: what NCCL Inspector told of the collective was counted before its kernels came."""
        if not self._store.inspected.next_id:
            return np.zeros(len(part.present), bool)
        table = self._table
        counted = np.zeros(part.present.shape, bool)
        counted[part.present] = table.rows.values("inspected", table.at(part.joined.operations[part.present]))
        by_collective: NDArray[np.bool_] = np.logical_or.reduce(counted, axis=1)
        return by_collective

    def sides_of(self, sends: Ids, receives: Ids, sigma_ns: NDArray[np.float64]) -> Columns:
        """Both sides (exchanges.SIDE) of Send/Recv pairs, each as its own rank sees it."""
        both = np.stack([sends, receives], axis=1)
        cells = self._table.take(both.ravel(), *_OF_SIDES).reshape(both.shape)
        hosts = self._hosts.of_processes()[cells["process"]]
        uncertainty = transfer.pair_uncertainty(hosts[:, 0], hosts[:, 1], sigma_ns[hosts[:, 0]], sigma_ns[hosts[:, 1]])
        is_one_host = hosts[:, 0] == hosts[:, 1]  # whose clock is exact between them; another may not be known yet
        starts = np.where(is_one_host[:, None], cells["start_ns"], cells["start_true_ns"])
        sides = np.zeros(cells.shape, SIDE)
        for name in ("launch", "censored"):
            sides[name] = cells[name]
        sides["start_true_ns"], sides["peer_start_true_ns"] = starts, starts[:, ::-1]
        sides["end_true_ns"] = _ends(starts, cells)
        sides["operation"] = both
        sides["uncertainty_ns"] = uncertainty[:, None]
        sides["bytes"] = np.maximum(cells["message_bytes"], 0)
        sides["sends"] = [True, False]
        sides["peer"] = self._store.templates_of(cells.ravel(), "root")["root"].reshape(cells.shape)
        return sides.ravel()

    def measure_exchanges(self, exchanges: Exchanges, mixed: set[int]) -> Columns:
        """Measures launches of sends and receives, and writes the results to the rows of all of their operations.

        Gives what the store shall keep of each launch (rows.COLLECTIVE), of those that could be measured.

        `mixed`: launches that also hold collectives, whose bandwidth nothing defines.
        """
        measures = transfer.measure_exchanges(
            exchanges.start_true_ns,
            exchanges.end_true_ns,
            exchanges.censored,
            exchanges.last_peer_start_true_ns,
            exchanges.uncertainty_ns,
            exchanges.moved_bytes,
        )
        rows = self._table.take(
            exchanges.first_operations(), "member", "template", "confidence", "start_ns", "end_ns", "start_true_ns"
        )
        launches = _exchange_rows(self._store, rows, exchanges, measures)
        launches["peer"] = self._peers(exchanges)
        at = self._table.at(exchanges.operations)
        of = exchanges.launch_of
        is_wrong = self._limits.impossible(
            measures.busbw,
            launches["communicator"],
            launches["op"],
            launches["confidence"],
            (launches["rank"], launches["peer"]),
        )
        if is_wrong.any():
            self._doubt(exchanges.operations[is_wrong[of]])
            at, of = at[~is_wrong[of]], of[~is_wrong[of]]
        defined = ~np.isin(self._table.rows.values("launch", at), np.asarray(sorted(mixed), np.int64))
        self._write(at, "wait_ns", _times(measures.wait_ns)[of])
        self._write(at, "transfer_ns", _times(measures.transfer_ns)[of])
        self._write(at, "algbw", np.where(defined, measures.busbw[of], np.nan))
        self._write(at, "busbw", np.where(defined, measures.busbw[of], np.nan))
        self._write(at, "busbw_apparent", np.where(defined, measures.busbw_apparent[of], np.nan))
        self._write(at, "ranks_seen", np.full(len(at), 2))
        is_measured = ~is_wrong & (measures.transfer_ns >= 0) & np.isfinite(measures.busbw)
        return row_ops.filter_rows(launches, is_measured)

    def _peers(self, exchanges: Exchanges) -> NDArray[np.int64]:
        """With whom each launch exchanged; NO_NUMBER if that were several ranks."""
        templates = self._store.templates_of(self._table.take(exchanges.operations, "template"), "root")
        lowest = np.full(len(exchanges.start_true_ns), np.iinfo(np.int32).max, np.int64)
        highest = np.full(len(lowest), NO_NUMBER, np.int64)
        np.minimum.at(lowest, exchanges.launch_of, templates["root"])
        np.maximum.at(highest, exchanges.launch_of, templates["root"])
        return np.where(lowest == highest, lowest, NO_NUMBER)

    def _believable(self, kernels: KernelMatrix, slack_ns: NDArray[np.float64]) -> KernelMatrix:
        """The collectives that can be what their number says. The rest are counted and stay unmeasured.

        When a line is lost, numbers slip and kernels of different collectives meet under one number: a wrong bandwidth
        would be worse than none. Kernels of a rooted collective need not overlap; those of collectives beside it do.
        """
        rooted = _ROOTED[kernels.op]
        overlaps = kernels.overlap_on_each_host()
        slack = _SKEW_NS + np.where(kernels.hosts >= 0, slack_ns[kernels.hosts], 0.0).max(axis=1)
        ends = np.where(kernels.censored, NO_TIME_NS, kernels.end_true_ns)
        overlaps &= ranks.overlaps(kernels.start_true_ns, ends, slack[kernels.group])
        believable = kernels.agrees & np.where(rooted, _fit_beside(overlaps, rooted, kernels.group), overlaps)
        if believable.all():
            return kernels
        self._store.skipped["unjoinable_collective"] += int(np.count_nonzero(~believable))
        return kernels.take(np.flatnonzero(believable))

    def _doubt(self, operations: Ids) -> None:
        """Faster than the wires: these operations were paired with kernels of others. They stay unmeasured."""
        self._store.skipped["faster_than_wires"] += len(operations)
        at = self._table.at(operations)
        confidence = self._table.rows.values("confidence", at)
        self._write(at, "confidence", np.minimum(confidence, np.float32(rows.A_GUESS)))

    def _launch_bytes(
        self, kernels: KernelMatrix, mixed: set[int]
    ) -> tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.float64]]:
        """Per collective: is it the first of its launch, and the launch's sum of S and of S x factor."""
        factors = bandwidth.factor(kernels.op, np.full(len(kernels.op), kernels.hosts.shape[1], np.int32))
        moved = kernels.message_bytes
        weighted = np.where(moved >= 0, moved * factors, np.nan)
        launches, inverse = distinct(kernels.launch)
        total = np.zeros(len(launches), np.int64)
        np.add.at(total, inverse, np.maximum(moved, 0))
        weight = np.zeros(len(launches))
        np.add.at(weight, inverse, weighted)
        if mixed:
            weight[np.isin(launches, list(mixed))] = np.nan
        leading = np.zeros(len(moved), bool)
        leading[first_positions(kernels.launch)] = True
        return leading, total[inverse], weight[inverse]

    def _measure_rooted(
        self,
        part: KernelMatrix,
        moved: NDArray[np.int64],
        weighted: NDArray[np.float64],
        sigma_ns: NDArray[np.float64],
    ) -> Measures:
        # Ranks of one host share its clock: no other is needed.
        is_one_host = (part.hosts == part.hosts[:, :1]).all(axis=1)[part.group]
        starts = np.where(is_one_host[:, None], part.start_ns, part.start_true_ns)
        # If the clock of one rank is not known, the others may not be who was last.
        incomplete = (part.present & (starts == NO_TIME_NS)).any(axis=1)
        starts = np.where(incomplete[:, None], NO_TIME_NS, starts)
        # A duration is the host's own: on the reference clock it would be off by the drift.
        own = part.end_ns - part.start_ns
        return transfer.measure_rooted(
            starts,
            np.where(starts == NO_TIME_NS, NO_TIME_NS, starts + own),
            part.censored,
            part.root,
            _ROOT_SENDS[part.op],
            part.hosts[part.group],
            np.where(part.hosts >= 0, sigma_ns[part.hosts], np.inf)[part.group],
            moved,
            weighted,
        )

    def _write_back(self, part: KernelMatrix, measures: Measures) -> None:
        present = part.present
        at = self._table.at(part.joined.operations[present])
        shape = present.shape
        self._write(at, "wait_ns", _times(measures.wait_ns[present]))
        self._write(at, "busbw_apparent", measures.busbw_apparent[present])
        for name, values in (
            ("transfer_ns", _times(measures.transfer_ns)),
            ("algbw", measures.algbw),
            ("busbw", measures.busbw),
            ("ranks_seen", measures.ranks_seen),
        ):
            self._write(at, name, np.broadcast_to(values[:, None], shape)[present])

    def _write(self, at: NDArray[np.intp], name: str, values: NDArray[np.generic]) -> None:
        self._table.rows.put(name, at, values)


def _fit_beside(overlaps: NDArray[np.bool_], rooted: NDArray[np.bool_], group: NDArray[np.intp]) -> NDArray[np.bool_]:
    """K: the collectives before and behind each, of its communicator and not rooted, overlap; true without any."""
    fits, every = np.ones(len(rooted), np.bool_), np.arange(len(rooted))
    before = np.maximum.accumulate(np.where(rooted, NO_NUMBER, every))
    behind = np.minimum.accumulate(np.where(rooted, len(rooted), every)[::-1])[::-1]
    for beside in (before, behind):
        is_there = (beside >= 0) & (beside < len(rooted))
        at = np.where(is_there, beside, 0)
        fits &= ~is_there | (group[at] != group) | overlaps[at]
    return fits


def _exchange_rows(known: Store, operations: Columns, exchanges: Exchanges, measures: ExchangeMeasures) -> Columns:
    """One rows.COLLECTIVE for each launch, as its own rank saw it: nobody is last in it. Its peer is the caller's."""
    communicator_of = np.asarray([member.communicator for member in known.members], np.int32)
    rank_of = np.asarray([NO_NUMBER if of.rank is None else of.rank for of in known.members], np.int32)
    launches = np.zeros(len(operations), rows.COLLECTIVE)
    launches["communicator"] = communicator_of[operations["member"]]
    launches["coll_seq"] = NO_NUMBER
    launches["op"] = known.templates_of(operations, "op")["op"]
    launches["size_class"] = classify(exchanges.moved_bytes)
    launches["message_bytes"] = exchanges.moved_bytes
    launches["ranks_seen"] = 1
    launches["first_start_true_ns"] = operations["start_true_ns"]
    launches["end_true_ns"] = _ends(operations["start_true_ns"], operations)
    launches["transfer_ns"] = measures.transfer_ns
    launches["wait_ns"] = measures.wait_ns
    launches["spread_ns"] = measures.wait_ns
    launches["busy_ns"] = exchanges.end_true_ns - exchanges.start_true_ns
    launches["last_rank"] = NO_NUMBER
    launches["blame_ns"] = NO_NUMBER
    launches["busbw"] = measures.busbw
    launches["confidence"] = operations["confidence"]
    launches["rank"] = rank_of[operations["member"]]
    return launches


def _ends(starts: NDArray[np.int64], kernels: Columns) -> NDArray[np.int64]:
    """Ends of kernels that began at these times; NO_TIME_NS as those.

    A duration is the host's own: on the reference clock it would be off by the drift.
    """
    return np.where(starts != NO_TIME_NS, starts + (kernels["end_ns"] - kernels["start_ns"]), NO_TIME_NS)


def _times(durations: NDArray[np.int64]) -> NDArray[np.int64]:
    """Durations as the store keeps them: NO_TIME_NS if not known."""
    return np.where(durations < 0, NO_TIME_NS, durations)


def _collectives(part: KernelMatrix, measures: Measures, moved: NDArray[np.int64]) -> Columns:
    """One rows.COLLECTIVE for each."""
    starts, ends = part.start_true_ns, part.end_true_ns
    some = np.where(starts == NO_TIME_NS, np.iinfo(np.int64).max, starts).min(axis=1, initial=np.iinfo(np.int64).max)
    last = np.where(measures.last_rank >= 0, measures.last_rank, ends.argmax(axis=1))
    collectives = collective_rows(part.op, moved, measures)
    collectives["communicator"] = part.joined.communicator
    collectives["coll_seq"] = part.joined.coll_seq
    collectives["first_start_true_ns"] = np.where(some == np.iinfo(np.int64).max, NO_TIME_NS, some)
    collectives["end_true_ns"] = ends[np.arange(len(moved)), last]
    # With ranks missing the transfer is an upper bound, and the last arriver may be one that was not seen.
    collectives["confidence"] = part.confidence.min(axis=1, initial=1.0) * measures.ranks_seen / part.present.shape[1]
    return collectives

"""The kernels of joined collectives, as matrices: one row per collective, one column per rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.clock_check import SAME_HOST_SIGMA_NS
from ncclscope_service.distinct import values_of
from ncclscope_service.join import JoinedCollectives
from ncclscope_service.store import Store, Table
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

Times = NDArray[np.int64]
_Number = TypeVar("_Number", bound=np.generic)
_GATHERED: Final = (
    "template", "message_bytes", "start_ns", "end_ns", "start_true_ns", "end_true_ns", "censored", "confidence",
    "launch",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelMatrix:
    """Kernels of K collectives on the R ranks of their communicator."""

    joined: JoinedCollectives
    hosts: NDArray[np.int32]
    """R: index of each rank's host; NO_NUMBER where the rank was never seen."""
    present: NDArray[np.bool_]
    """K x R: the rank has a kernel for it."""
    start_ns: Times
    """K x R, on the host's own clock; NO_TIME_NS where there is no kernel, as in all times."""
    end_ns: Times
    start_true_ns: Times
    """K x R, on the reference clock."""
    end_true_ns: Times
    censored: NDArray[np.bool_]
    """K x R: the capture ended before the kernel did."""
    confidence: NDArray[np.float32]
    """K x R, of the match; 1 where there is no kernel."""
    op: NDArray[np.uint8]
    """K, as all of the following: of the first rank that has a kernel for it."""
    root: NDArray[np.int32]
    launch: NDArray[np.int64]
    message_bytes: NDArray[np.int64]
    agrees: NDArray[np.bool_]
    """K: all ranks that were seen did the same operation with as many bytes.

    Where they differ, lines were lost and the numbers have slipped, or the job itself is wrong.
    """

    def refresh(self, table: Table) -> None:
        """Takes the times on the reference clock anew from the table of its rows, after clocks were estimated."""
        at = table.at(self.joined.operations[self.present])
        for name, times in (("start_true_ns", self.start_true_ns), ("end_true_ns", self.end_true_ns)):
            times[self.present] = table.rows[name][at]

    def overlap_on_each_host(self) -> NDArray[np.bool_]:
        """K: kernels that share a host's clock overlap, which needs no other clock. Cut ends say nothing."""
        overlap = np.ones(len(self.present), bool)
        ends = np.where(self.censored, NO_TIME_NS, self.end_ns)
        for host in values_of(self.hosts[self.hosts >= 0]):
            ranks = np.flatnonzero(self.hosts == host)
            if len(ranks) > 1:
                overlap &= overlaps(self.start_ns[:, ranks], ends[:, ranks], SAME_HOST_SIGMA_NS)
        return overlap

    def take(self, chosen: NDArray[np.intp]) -> KernelMatrix:
        """These collectives only."""
        if len(chosen) == len(self.present):
            return self
        return KernelMatrix(
            joined=JoinedCollectives(
                communicator=self.joined.communicator,
                coll_seq=self.joined.coll_seq[chosen],
                operations=self.joined.operations[chosen],
            ),
            hosts=self.hosts,
            present=self.present[chosen],
            start_ns=self.start_ns[chosen],
            end_ns=self.end_ns[chosen],
            start_true_ns=self.start_true_ns[chosen],
            end_true_ns=self.end_true_ns[chosen],
            censored=self.censored[chosen],
            confidence=self.confidence[chosen],
            op=self.op[chosen],
            root=self.root[chosen],
            launch=self.launch[chosen],
            message_bytes=self.message_bytes[chosen],
            agrees=self.agrees[chosen],
        )


def gather(known: Store, joined: JoinedCollectives, hosts: NDArray[np.int32], table: Table) -> KernelMatrix:
    """The kernels of joined collectives. `hosts`: index of each rank's host; `table`: what their ids are of."""
    present = joined.operations != NO_NUMBER
    rows = table.take(joined.operations[present], *_GATHERED)
    templates = known.operation_templates.take(rows["template"], "op", "root")
    op = _matrix(present, templates["op"], np.uint8(0))
    message_bytes = _matrix(present, rows["message_bytes"], np.int64(NO_NUMBER))
    every = np.arange(len(present))
    first = present.argmax(axis=1)
    agree = (op == op[every, first][:, None]) & (message_bytes == message_bytes[every, first][:, None])
    return KernelMatrix(
        joined=joined,
        hosts=hosts,
        present=present,
        start_ns=_matrix(present, rows["start_ns"], np.int64(NO_TIME_NS)),
        end_ns=_matrix(present, rows["end_ns"], np.int64(NO_TIME_NS)),
        start_true_ns=_matrix(present, rows["start_true_ns"], np.int64(NO_TIME_NS)),
        end_true_ns=_matrix(present, rows["end_true_ns"], np.int64(NO_TIME_NS)),
        censored=_matrix(present, rows["censored"], np.bool_(False)),
        confidence=_matrix(present, rows["confidence"], np.float32(1)),
        op=op[every, first],
        root=_matrix(present, templates["root"], np.int32(NO_NUMBER))[every, first],
        launch=_matrix(present, rows["launch"], np.int64(NO_NUMBER))[every, first],
        message_bytes=message_bytes[every, first],
        agrees=(agree | ~present).all(axis=1),
    )


def overlaps(starts_ns: Times, ends_ns: Times, slack_ns: float) -> NDArray[np.bool_]:
    """K: no rank ended before another started, within `slack_ns`; true where fewer than two times are known.

    In an N-to-N collective every output needs every input, so kernels that do not overlap are not of one.
    """
    known = (starts_ns != NO_TIME_NS) & (ends_ns != NO_TIME_NS)
    latest = np.where(known, starts_ns, np.iinfo(np.int64).min // 2).max(axis=1)
    earliest = np.where(known, ends_ns, np.iinfo(np.int64).max // 2).min(axis=1)
    overlap: NDArray[np.bool_] = (known.sum(axis=1) < 2) | (latest - earliest <= slack_ns)
    return overlap


def _matrix(present: NDArray[np.bool_], values: NDArray[_Number], absent: _Number) -> NDArray[_Number]:
    """Values of the cells that are present, row by row, as a matrix."""
    if len(values) == present.size:
        return values.reshape(present.shape)
    matrix = np.full(present.shape, absent, values.dtype)
    matrix[present] = values
    return matrix

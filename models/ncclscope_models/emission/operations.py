"""Operations that a rank is expected to log, and the bytes of them counted in three ways."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from ncclscope_models.job import ELEMENT_BYTES
from ncclscope_models.textbook import allreduce_wire, alltoall_wire, gather_wire


class Group(StrEnum):
    """The kind of communicator."""

    TENSOR = "tp"
    PIPELINE = "pp"
    DATA = "dp"
    EXPERT = "ep"
    EXPERT_DATA = "expert dp"
    EXPERT_MODEL = "expert mp"
    """Expert x pipeline ranks: norms of experts' gradients."""
    EMBEDDING = "embedding"
    MODEL = "mp"
    """Tensor x pipeline ranks."""
    OPTIMIZER = "optimizer"
    """All ranks, of a distributed optimizer."""
    SHARD = "shard"
    REPLICA = "replica"
    WORLD = "world"


@dataclass(frozen=True, slots=True)
class Emitted:
    """Like operations of one rank: one line of what is expected."""

    group: Group
    ranks: int
    """Of the communicator. An operation on one rank is logged, launches nothing and moves nothing."""
    op: str
    """NCCL's name; AlltoAll also where it is logged as groups of Send and Recv."""
    dtype: str
    elements: int | None
    """As the line's count has it: AllGather what a rank gives, ReduceScatter what it gets, AlltoAll what it hands out
    to all, itself included. None: not known (control operations of the start)."""
    lines: int
    """How often; an AlltoAll counts once."""
    kernels: int
    """Kernels of these lines. Of a group of Sends and Recvs the kernel is counted with its Sends."""
    rule: str
    """Name of the rule in `rules.RULES`."""
    is_control: bool = False
    """Synchronisation and statistics: no tensor of the model."""

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def logged_bytes(self) -> int:
        """Count x type of the lines, of all of them."""
        return (self.elements or 0) * self.element_bytes * self.lines

    @property
    def message_bytes(self) -> int:
        """nccl-tests' S, of all lines: for AllGather and ReduceScatter the whole array."""
        whole = self.ranks if self.op in ("AllGather", "ReduceScatter") else 1
        return self.logged_bytes * whole

    @property
    def wire_bytes(self) -> float:
        """What this rank sends with ring algorithms; of a Broadcast the mean over the ranks."""
        if self.ranks == 1 or self.op == "Recv":
            return 0.0
        if self.op == "AllReduce":
            return allreduce_wire(self.message_bytes, self.ranks)
        if self.op == "AlltoAll":
            return alltoall_wire(self.message_bytes, self.ranks)
        if self.op == "Send":
            return float(self.message_bytes)
        return gather_wire(self.message_bytes, self.ranks)

    def times(self, iterations: int) -> Emitted:
        """The same over so many iterations."""
        return replace(self, lines=self.lines * iterations, kernels=self.kernels * iterations)


def emitted(
    group: Group,
    ranks: int,
    op: str,
    dtype: str,
    elements: int | None,
    lines: int,
    rule: str,
    *,
    kernels: int | None = None,
    is_control: bool = False,
) -> tuple[Emitted, ...]:
    """One expected line, or none of no operation; kernels as many as lines unless they are given."""
    if lines == 0:
        return ()
    launched = (lines if kernels is None else kernels) if ranks > 1 else 0
    return (Emitted(group, ranks, op, dtype, elements, lines, launched, rule, is_control),)


def lines_by_op(operations: Iterable[Emitted]) -> Counter[str]:
    """Lines of each operation, one-rank communicators included."""
    found: Counter[str] = Counter()
    for operation in operations:
        found[operation.op] += operation.lines
    return found


def kernels_by_op(operations: Iterable[Emitted]) -> Counter[str]:
    """Kernels of each operation as nsys names them: Send, Recv and AlltoAll are SendRecv."""
    found: Counter[str] = Counter()
    for operation in operations:
        name = "SendRecv" if operation.op in ("Send", "Recv", "AlltoAll") else operation.op
        found[name] += operation.kernels
    return +found


def logged_by_op(operations: Iterable[Emitted]) -> Counter[str]:
    """Logged bytes of each operation; an AlltoAll's are those of its Sends, self included."""
    found: Counter[str] = Counter()
    for operation in operations:
        found["Send" if operation.op == "AlltoAll" else operation.op] += operation.logged_bytes
    return found

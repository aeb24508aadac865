"""Operations that a rank asks NCCL for, and the launches that NCCL makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from ncclscope_simulator.data_types import INT8, RED_NAMES, REDUCING, DataType
from ncclscope_simulator.groups import Endpoint
from ncclscope_simulator.plans import Plan

_POINT_TO_POINT = {"Send", "Recv"}


class Meeting(Enum):
    """How the ranks of a launch wait for each other."""

    NOBODY = auto()
    """A communicator of one rank, in place: NCCL launches nothing."""
    EVERYBODY = auto()
    """N-to-N: nobody ends before everybody has started."""
    ROOT = auto()
    """Everybody waits for the root, the root for nobody."""
    PEERS = auto()
    """Each Send waits for its Recv and the reverse."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One call of NCCL's API by one rank: one operation line."""

    op: str
    count: int
    """Elements, as the log prints them."""
    dtype_id: int
    """As logged: 0 for AllGather and Broadcast up to 2.21.5."""
    dtype: DataType
    """The type that the caller asked for."""
    red: int
    root: int
    """Root, or peer of Send and Recv, as communicator rank; 0 elsewhere."""
    message_bytes: int
    before_count: str
    after_count: str
    call: str

    @property
    def logged_dtype(self) -> str | None:
        """The type that the line tells; None if it logs bytes."""
        return None if self.dtype_id == 0 and self.dtype is not INT8 else self.dtype.name

    @property
    def collective(self) -> bool:
        """Whether all ranks of the communicator take part."""
        return self.op not in _POINT_TO_POINT

    @property
    def red_name(self) -> str | None:
        """The reduction's name; None if nothing is reduced."""
        return RED_NAMES[self.red] if self.op in REDUCING else None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Launch:
    """The launch that NCCL makes of one call, or of the calls of one group: one kernel, several, or none."""

    endpoint: Endpoint
    operations: tuple[Operation, ...]
    grouped: bool
    meeting: Meeting
    autograd: bool
    """Called from autograd's thread."""
    kernel: str
    grid: int
    block: int
    tunings: tuple[str, ...]
    """The TUNING lines that communicator rank 0 prints; none elsewhere."""
    bus_bytes: float
    """Bytes that bus bandwidth counts: S x factor, or the larger of bytes sent and received."""
    peers: tuple[tuple[int, bool, int], ...]
    """(global rank, whether we send, bytes) of each Send and Recv, self excluded."""
    root: int | None
    """Global rank of the root; None without one."""
    network: bool
    """NCCL's proxy has work: data crosses nodes."""
    size_bytes: int
    """message_bytes of the largest operation; of all, if collectives are coalesced."""
    plans: tuple[Plan, ...] = ()
    """The kernels, if it takes several; `kernel` is the first one's."""
    outside: str = ""
    """Qualified name of its kernel if a library other than NCCL launches it: then no line and no range is of it."""

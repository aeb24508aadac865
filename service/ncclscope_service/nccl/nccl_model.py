"""NCCL's own estimate: the time that it expects of a collective, from the tuning table that it prints.

    time = latency x plateau + bytes / (bandwidth x correction)

NCCL computes this for every algorithm and protocol and takes the fastest. It is a model of ideal links without
contention: real kernels reach some 75 to 100 % of its bandwidth for large messages, and its latencies are rough
(off by up to two). So it is named "NCCL's own estimate" wherever it is shown, never a peak. Sends and receives
have no such model, nor have symmetric kernels and the copy engine.

*Source:* NCCL `src/graph/tuning.cc:ncclTopoTuneModel, ncclTopoGetAlgoTime`; 2.30 `src/tuning/tree.cc`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from ncclscope_wire.topology import TuningCell

FUNCTIONS: Final = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")
"""Operations that a tuning table has rows for."""

_TREE_OLD: Final[Mapping[str, tuple[float, ...]]] = {
    "LL": (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1),
    "LL128": (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.5, 0.6, 0.6, 0.7, 0.7, 0.8, 0.9, 0.9, 1),
    "SIMPLE": (*(0.9,) * 7, 0.8, 0.7, 0.6, 0.6, *(0.5,) * 6, 0.6, 0.6, 0.7, 0.8, 0.9),
}
"""64 B to 128 MB, by powers of two; while CollNet was one algorithm (to 2.13)."""
_TREE: Final[Mapping[str, tuple[float, ...]]] = {
    "LL": (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1),
    "LL128": (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, *(0.6,) * 6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1),
    "SIMPLE": (*(0.9,) * 7, 0.8, 0.7, 0.6, 0.6, *(0.5,) * 4, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9),
}
"""64 B to 256 MB, by powers of two."""
_TREE_SPLIT_COLLNET: Final = (2, 14)
_TREE_LONGER: Final = (2, 30)
_PLATEAU_BY_CHANNEL: Final = (2, 18)
_PLATEAU_17: Final = (2, 17)
_PLATEAU_VOLTA: Final = 1.9
_PLATEAU_AMPERE: Final = 1.4
_PLATEAU_HOPPER_17: Final = 1.5
_AMPERE: Final = 80
_HOPPER: Final = 90


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Properties of a communicator that the model needs."""

    ranks: int
    nodes: int
    version: tuple[int, ...] | None = None
    """Of NCCL; None takes the newest form of the model."""
    channels: int | None = None
    """Collective channels of the communicator; None if no line said them."""
    compute_capability: int | None = None
    """Lowest of its GPUs, 80 for 8.0; None takes 8.0 or newer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """NCCL's estimate for one collective."""

    algorithm: str
    protocol: str
    time_us: float

    def algbw(self, message_bytes: int) -> float:
        """Bytes per second of the whole message."""
        return message_bytes / self.time_us * 1e6


def expected_time(
    cells: Iterable[TuningCell], function: str, message_bytes: int, group: Group, *, algorithm: str, protocol: str
) -> Expected | None:
    """The time of one collective with this algorithm and protocol; None if the table has no such cell.

    `message_bytes` is nccl-tests' S: of all ranks together for AllGather and ReduceScatter.
    """
    for cell in cells:
        if (cell.function, cell.algorithm, cell.protocol) == (function, algorithm, protocol):
            return _expected(cell, message_bytes, group)
    return None


def choice(cells: Iterable[TuningCell], function: str, message_bytes: int, group: Group) -> Expected | None:
    """NCCL's choice: the fastest of what is available; None if nothing is."""
    times = [
        found
        for cell in cells
        if cell.function == function and (found := _expected(cell, message_bytes, group)) is not None
    ]
    return min(times, key=lambda found: found.time_us, default=None)


def _expected(cell: TuningCell, message_bytes: int, group: Group) -> Expected | None:
    if cell.bytes_per_second == 0 or message_bytes <= 0:
        return None
    bandwidth = cell.bytes_per_second * _tree_correction(cell, message_bytes, group)
    latency_us = cell.latency_us * _ring_plateau(cell, message_bytes, group)
    time_us = latency_us + message_bytes / bandwidth * 1e6
    return Expected(algorithm=cell.algorithm, protocol=cell.protocol, time_us=time_us)


def _tree_correction(cell: TuningCell, message_bytes: int, group: Group) -> float:
    """ "Trees are not perfectly sticking to the model for medium sizes": a factor by power of two."""
    if cell.algorithm != "TREE" or cell.function != "AllReduce" or message_bytes < 64:
        return 1.0
    is_old = group.version is not None and group.version < _TREE_SPLIT_COLLNET
    factors = (_TREE_OLD if is_old else _TREE).get(cell.protocol, ())
    if group.version is not None and group.version >= _TREE_LONGER:
        factors = (*factors, factors[-1])
    power = (message_bytes >> 6).bit_length() - 1
    return factors[power] if power < len(factors) else 1.0


def _ring_plateau(cell: TuningCell, message_bytes: int, group: Group) -> float:
    """Large rings over several nodes wait longer than their steps."""
    is_ring = (cell.algorithm, cell.protocol, cell.function) == ("RING", "SIMPLE", "AllReduce")
    if not is_ring or group.nodes <= 1:
        return 1.0
    capability = group.compute_capability or _AMPERE
    if group.version is not None and group.version < _PLATEAU_17:
        return _PLATEAU_VOLTA if message_bytes >= group.ranks / 16 * 65536 else 1.0
    # Without the number of channels: with NCCL's most, 64, still true for all but the smallest messages.
    if message_bytes / ((group.channels or 64) * group.ranks) < 64:
        return 1.0
    if group.version is not None and group.version < _PLATEAU_BY_CHANNEL:
        return _PLATEAU_HOPPER_17 if capability >= _HOPPER else _PLATEAU_VOLTA
    return _PLATEAU_AMPERE if capability >= _AMPERE else _PLATEAU_VOLTA

"""Contention: groups share network cards and NVLink, and communication slows the computation beside it.

Simplified: groups of one kind of parallelism that leave a node are taken to communicate at once, so that each of their
GPUs has its share of the node's cards; of two kinds that overlap on a node's cards or NVLink, the one that is worked
out later has half of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import Final

NETWORK: Final = "network"
NVLINK: Final = "nvlink"


@dataclass(frozen=True, slots=True)
class Contention:
    """How much is shared."""

    nics: int
    """Network cards of a node."""
    slowdown: float
    """How much longer computation takes while a kernel of NCCL runs on its GPU: 0.2 is a fifth."""


def parse_contention(text: str) -> Contention:
    """`nics=N,slowdown=S`, each once. Raises ValueError for what is none."""
    parts = {name: value for name, _, value in (part.partition("=") for part in text.split(","))}
    try:
        found = Contention(int(parts.pop("nics")), float(parts.pop("slowdown")))
    except (KeyError, ValueError) as error:
        raise ValueError(f"contention {text!r} is not nics=N,slowdown=S") from error
    if parts or found.nics < 1 or not 0 <= found.slowdown < inf:
        raise ValueError(f"contention {text!r}: nics at least 1, slowdown at least 0, and nothing else")
    return found


class SharedLinks:
    """Bytes sent over time, by node, medium and kind of parallelism."""

    def __init__(self) -> None:
        self._busy: defaultdict[tuple[int, str], dict[str, list[tuple[int, int]]]] = defaultdict(dict)

    def forget_before(self, time_ns: int) -> None:
        """Drops what was over by then."""
        for kinds in self._busy.values():
            for kind, found in kinds.items():
                kinds[kind] = [each for each in found if each[1] > time_ns]

    def took(self, nodes: Iterable[int], medium: str, kind: str, start_ns: int, alone_ns: int) -> int:
        """How long a transfer takes that would take `alone_ns` alone; notes it."""
        keys = [(node, medium) for node in nodes]
        beside = sorted(
            each
            for key in keys
            for of, found in self._busy[key].items()
            if of != kind
            for each in found
            if each[1] > start_ns
        )
        at, left = start_ns, alone_ns
        for begin, end in beside:
            if end <= at:
                continue
            if begin > at:  # alone until then
                if left <= begin - at:
                    break
                left -= begin - at
                at = begin
            halved = min(end - at, 2 * left)
            at += halved
            left -= halved // 2
            if left <= 0:
                break
        ends = at + max(0, left)
        for key in keys:
            self._busy[key].setdefault(kind, []).append((start_ns, ends))
        return ends - start_ns

"""What detectors must know about a job besides the collectives themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.clock_check import OTHER_HOST_SIGMA_NS
from ncclscope_service.distinct import distinct
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One communicator of a job."""

    comm_id: str
    parallelism: str | None
    """TP, DP, PP, EP, CP, EMBEDDING, WORLD, ...; None where it cannot be told."""
    global_ranks: tuple[int, ...]
    """By communicator rank; NO_NUMBER where not known."""
    hosts: tuple[str, ...]
    """By communicator rank; "" where not known."""
    limit: float | None = None
    """What its links can carry, bus bandwidth in bytes per second; None where the topology does not tell."""
    limit_name: str = ""
    """What stops it there."""

    @property
    def name(self) -> str:
        """How sentences call it."""
        return f"{self.parallelism or 'communicator'} group {self.comm_id}"

    def host_set(self) -> frozenset[str]:
        """The hosts that are known."""
        return frozenset(host for host in self.hosts if host)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """A job as it stands: cheap to build, passed with every feed."""

    job: str
    groups: Mapping[int, Group] = field(default_factory=dict[int, Group])
    """By communicator index. Communicators that ended are left out: nothing is expected of them."""
    clock_sigma_ns: float = OTHER_HOST_SIGMA_NS
    """The worst clock of the job."""
    clock_is_trusted: bool = True
    """False while causality is violated: then no rank is named."""
    step_ns: int | None = None
    """Duration of an iteration; None while not known."""
    silent_hosts: frozenset[str] = frozenset()
    """Hosts whose agent does not answer: what they do not say proves nothing."""
    lossy_hosts: frozenset[str] = frozenset()
    """Hosts of which input was lost: counts and sequences of their ranks prove nothing."""

    resting_ranks: frozenset[int] = frozenset()
    """Global ranks that stand between two steps: they may evaluate or write a checkpoint."""
    knows_steps: bool = False
    """Whether it is known of all ranks where a step ends."""

    is_over: bool = False
    """Whether nothing more comes."""

    def hears_all_of(self, host: str) -> bool:
        """Whether nothing is known to be missing of what this host says."""
        return host not in self.silent_hosts and host not in self.lossy_hosts

    def hosts_of(self, ranks: tuple[int, ...]) -> tuple[str, ...]:
        """The hosts of these global ranks, each once, by name."""
        wanted = set(ranks)
        return tuple(
            sorted(
                {
                    host
                    for group in self.groups.values()
                    for rank, host in zip(group.global_ranks, group.hosts, strict=True)
                    if rank in wanted and host
                }
            )
        )

    def global_ranks_of(self, rows: Columns) -> NDArray[np.int64]:
        """Of each row, by its `communicator` (one of `groups`) and `rank`; NO_NUMBER where not known."""
        found, inverse = distinct(rows["communicator"])
        of = [self.groups[communicator].global_ranks for communicator in found.tolist()]
        sizes = np.asarray([len(ranks) for ranks in of], np.int64)
        every = np.fromiter(chain(*of, (NO_NUMBER,)), np.int64)
        is_known = (rows["rank"] >= 0) & (rows["rank"] < sizes[inverse])
        begins = np.cumsum(sizes) - sizes
        return every[np.where(is_known, begins[inverse] + rows["rank"], len(every) - 1)]

"""What the page asks about one job beside the overview: where to find it, and what each answer is made from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ncclscope_service.aliases import Aliases
from ncclscope_service.recent_sums import RecentSums
from ncclscope_service.rows import Communicator, Member
from ncclscope_service.store import Store
from ncclscope_service.wait_map import Waits
from ncclscope_service.window import Bools, Int64s, RecentOperations, Window, recent_operations, window_until


@dataclass(frozen=True, kw_only=True)
class JobAsked:
    """One job of a store at one time."""

    store: Store
    aliases: Aliases
    job: str
    window: Window
    sums: RecentSums

    @cached_property
    def operations(self) -> RecentOperations:
        """The newest ones: what is told of single operations, and costs a look at each of them."""
        return recent_operations(self.store)

    @cached_property
    def waits(self) -> Waits:
        """Of all ranks, over the window."""
        return Waits(self.store, self.sums, self.window)

    @property
    def is_own(self) -> Bools:
        """Which of `operations` are the job's."""
        belongs = np.array([name == self.job for name in self.store.process_job] or [False], np.bool_)
        return belongs[self.operations.process]

    def communicator(self, alias: str) -> Communicator | None:
        """The communicator of a short name; None where the job has none of that name."""
        own = (each for each in self.store.listed_communicators() if each.job == self.job)
        return next((each for each in own if self.aliases[each.index] == alias), None)

    def members(self) -> list[Member]:
        """All members of the job's communicators."""
        return [each for each in self.store.members if self.store.process_job[each.process] == self.job]

    def ranks_of(self, communicator: Communicator) -> dict[int, int]:
        """Communicator rank to global rank, where both are known."""
        found = {rank: self.store.members[index].global_rank for rank, index in (communicator.members or {}).items()}
        return {rank: global_rank for rank, global_rank in found.items() if global_rank is not None}


def ask_job(
    store: Store, aliases: Aliases, job: str, now_ns: int, *, sums: RecentSums | None = None
) -> JobAsked | None:
    """What can be asked about a job; None where there is no job of that name. Gives communicators their short names.

    `sums`: those of this store, where somebody has kept them.
    """
    if job not in store.process_job and all(each.job != job for each in store.communicators):
        return None
    aliases.update(store.communicators, store.members)
    sums = sums or RecentSums.of_store(store, now_ns)
    return JobAsked(store=store, aliases=aliases, job=job, window=window_until(now_ns), sums=sums)


def newest(columns: Int64s, chosen: Bools, limit: int) -> Int64s:
    """Positions of the chosen values, the largest `limit` of them, in ascending order of value."""
    positions = np.flatnonzero(chosen)
    order = np.argsort(columns[positions], kind="stable")
    return positions[order[max(0, len(order) - limit) :]]

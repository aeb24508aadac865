"""Short names for communicators that are the same in every run of a job: "tp-0", "dp-3", "c4-8".

A commId is 16 digits that change with every run; no one can talk about it and it must not be a label value.
A name says what a communicator is for and the lowest global rank in it: `tp-4` is the TP group that begins at rank 4.
Where it is not known what it is for, its size stands there: `c4-8` has 4 ranks, from rank 8 on.

Of several on one lowest rank (groups that share their ranks, or a restart within one job) the first that this rank
created has the plain name, and the others are `dp-0.2`, `dp-0.3`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from ncclscope_service.store.records import Communicator, Member

Names: TypeAlias = Mapping[tuple[str, str], str]
"""The alias of a communicator, by its job and its `comm_id`."""


_COMM_ID: Final = re.compile(r"(?<![\w/#~])(?:0x[0-9a-f]+|~[0-9a-f]+)(?:[/#][\w-]+)*")
"""A `comm_id` in a sentence: printed, of a split (`/count/color`), repeated (`#2`), or inferred (`~`)."""


class Aliases:
    """The alias of every communicator, by its index in the store.

    They follow from what is known of the communicators and from nothing before: a service that was restarted, another
    order of arrival and `analyze` give the same. A name changes as its kind or a lower rank becomes known.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._known: list[tuple[str | None, int | None, int]] = []
        """Kind, lowest global rank and the member that has it, of all communicators at the last update."""
        self.names_given = 0
        """How often names were given; as long as it stays, all names and kinds do."""

    def update(self, communicators: Sequence[Communicator], members: Sequence[Member]) -> None:
        """Names all anew if anything is; `communicators` are all of a store. Linear in their members."""
        known = [(each.parallelism, *_lowest_rank(each, members)) for each in communicators]
        if known != self._known:
            self._known = known
            self._names = _names(communicators, known)
            self.names_given += 1

    def __getitem__(self, communicator: int) -> str:
        return self._names[communicator]


def _names(communicators: Sequence[Communicator], known: Sequence[tuple[str | None, int | None, int]]) -> list[str]:
    """The name of each communicator; those on one lowest rank are numbered in the order in which it created them."""
    names = [""] * len(communicators)
    taken: Counter[tuple[str, str]] = Counter()
    for communicator in sorted(communicators, key=lambda each: (known[each.index][2], each.index)):
        kind, lowest, _ = known[communicator.index]
        stem = f"c{communicator.size}" if kind is None else kind.lower()
        # Nobody's rank is known: no number would be the same in the next run.
        name = f"{stem}-{lowest}" if lowest is not None else f"{stem}-x{communicator.index}"
        taken[communicator.job, name] += 1
        again = taken[communicator.job, name]
        names[communicator.index] = name if again == 1 else f"{name}.{again}"
    return names


def names_of(communicators: Sequence[Communicator], members: Sequence[Member]) -> Names:
    """The aliases of communicators that are all there; none was named before."""
    aliases = Aliases()
    aliases.update(communicators, members)
    return {(each.job, each.comm_id): aliases[each.index] for each in communicators}


def with_names(sentence: str, job: str, names: Names) -> str:
    """The sentence of a finding or verdict with names for the ids of communicators: "TP group tp-0".

    An id whose name is not known stays as it is.
    """
    return _COMM_ID.sub(lambda found: names.get((job, found[0]), found[0]), sentence)


def _lowest_rank(communicator: Communicator, members: Sequence[Member]) -> tuple[int | None, int]:
    """The lowest global rank known in it, and the member that has it; members of one process are in its log's order."""
    ranks = ((members[index].global_rank, index) for index in (communicator.members or {}).values())
    return min(((rank, index) for rank, index in ranks if rank is not None), default=(None, len(members)))

"""Short, stable names for communicators: "tp-0", "dp-3", "c17".

A commId is 16 digits that change with every run; no one can talk about it and it must not be a label value.
An alias says the kind and a number, is given once, and is never given to another communicator.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from ncclscope_service.store.records import Communicator, Member

Names: TypeAlias = Mapping[tuple[str, str], str]
"""The alias of a communicator, by its job and its `comm_id`."""


class Aliases:
    """The alias of every communicator, by its index in the store.

    Communicators that appear together are numbered by the lowest global rank in them, so that "tp-0" holds
    rank 0 wherever that was known in time. A communicator whose kind becomes known (or changes) gets one new name.
    """

    def __init__(self) -> None:
        self._names: dict[int, tuple[str | None, str]] = {}
        self._used: Counter[tuple[str, str]] = Counter()
        self._kinds: list[str | None] = []
        """Of all communicators, at the last update."""
        self.names_given = 0
        """So far; as long as it stays, all names and kinds do."""

    def update(self, communicators: Sequence[Communicator], members: Sequence[Member]) -> None:
        """Names what is new; `communicators` are all of a store. Linear in them, and quick if nothing is new."""
        kinds = [each.parallelism for each in communicators]
        if kinds == self._kinds:
            return
        self._kinds = kinds
        unnamed = [each for each in communicators if self._is_unnamed(each)]
        unnamed.sort(key=lambda each: (_lowest_rank(each, members), each.index))
        for communicator in unnamed:
            self._names[communicator.index] = (communicator.parallelism, self._next_name(communicator))
            self.names_given += 1

    def __getitem__(self, communicator: int) -> str:
        return self._names[communicator][1]

    def _is_unnamed(self, communicator: Communicator) -> bool:
        known = self._names.get(communicator.index)
        return known is None or known[0] != communicator.parallelism

    def _next_name(self, communicator: Communicator) -> str:
        if communicator.parallelism is None:
            return f"c{communicator.index}"
        key = (communicator.job, communicator.parallelism)
        number = self._used[key]
        self._used[key] += 1
        return f"{communicator.parallelism.lower()}-{number}"


def names_of(communicators: Sequence[Communicator], members: Sequence[Member]) -> Names:
    """The aliases of communicators that are all there; none was named before."""
    aliases = Aliases()
    aliases.update(communicators, members)
    return {(each.job, each.comm_id): aliases[each.index] for each in communicators}


def with_name(sentence: str, job: str, comm_id: str | None, names: Names) -> str:
    """The sentence of a finding with the alias of its communicator before its `comm_id`, if it names that."""
    name = None if comm_id is None else names.get((job, comm_id))
    if comm_id is None or name is None:
        return sentence
    return re.sub(
        rf"\b(group|communicator) {re.escape(comm_id)}(?![\w/#])",
        lambda found: f"{found[1]} {name} ({comm_id})",
        sentence,
    )


def _lowest_rank(communicator: Communicator, members: Sequence[Member]) -> int:
    """The lowest global rank known in it; after all others if none is."""
    ranks = (members[index].global_rank for index in (communicator.members or {}).values())
    return min((rank for rank in ranks if rank is not None), default=2**31)

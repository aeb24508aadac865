"""Where slow groups meet: the hosts that all slow groups touch and no healthy one does."""

from __future__ import annotations

from collections.abc import Sequence


def culprits(slow: Sequence[frozenset[str]], healthy: Sequence[frozenset[str]]) -> frozenset[str]:
    """The hosts that explain the slow groups; empty where nothing does.

    A host of a healthy group is innocent. Of the rest, hosts are taken greedily by how many slow groups they explain
    until all are; hosts that explain the same groups cannot be told apart and are all named. Groups between hosts and
    groups within one cross different wires: ask for each kind apart.
    """
    innocent = frozenset[str]().union(*healthy)
    unexplained = list(slow)
    named: set[str] = set()
    while unexplained:
        candidates = sorted({host for group in unexplained for host in group} - innocent - named)
        if not candidates:
            return frozenset()
        explains = {host: frozenset(i for i, group in enumerate(unexplained) if host in group) for host in candidates}
        best = max(candidates, key=lambda host: len(explains[host]))
        named |= {host for host in candidates if explains[host] == explains[best]}
        unexplained = [group for i, group in enumerate(unexplained) if i not in explains[best]]
    return frozenset(named)

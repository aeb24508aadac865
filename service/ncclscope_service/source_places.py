"""Places of sources that are read to their end and of which no row is left: captures and rotated logs come for as long
as a service runs, and new ones take the places of old ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, TypeAlias

from ncclscope_service.store import Store

_APART_NS: Final = 60_000_000_000
"""Between two looks, which go over all sources that were read to their end."""
_Ends: TypeAlias = tuple[int, int, int]
"""Operations, kernels and records of Inspector before these are those of a source, or older."""


@dataclass(slots=True)
class SourcePlaces:
    """Which places of a store's sources are free."""

    _known: Store
    _complete: dict[int, _Ends | None] = field(default_factory=dict[int, "_Ends | None"])
    """Sources that were read to their end, and where the tables ended at the first look after that."""
    _free: dict[int, None] = field(default_factory=dict[int, None])
    """The one that is free for longest first."""
    _looked_at_ns: int = 0

    def note(self, source: int, *, is_complete: bool) -> None:
        """A batch of a source came, its last one or another."""
        self._free.pop(source, None)
        self._complete.pop(source, None)
        if is_complete:
            self._complete[source] = None

    def look(self, now_ns: int) -> list[int]:
        """Frees the places of sources of which all rows have left the store, and that are no process's first log.

        Gives those that are free now and were not before; now and then only.
        """
        if 0 <= now_ns - self._looked_at_ns < _APART_NS:
            return []
        self._looked_at_ns = now_ns
        known = self._known
        tables = known.operations, known.kernels, known.inspected
        firsts = tuple(table.first for table in tables)
        named = set(known.process_source.values())
        freed: list[int] = []
        for source, ends in list(self._complete.items()):
            if ends is None:
                operations, kernels, inspected = (table.next_id for table in tables)
                self._complete[source] = operations, kernels, inspected
            elif source not in named and all(first >= end for first, end in zip(firsts, ends, strict=True)):
                del self._complete[source]
                freed.append(source)
        self._free.update(dict.fromkeys(freed))
        return freed

    def take(self) -> int | None:
        """A place that is free, for another source: what is known of the one before goes over to `Store.left`."""
        source = next(iter(self._free), None)
        if source is None:
            return None
        del self._free[source]
        known, left = self._known, self._known.left
        kind, hosts = known.sources[source].source.kind, hosts_of(known, source)
        left.kinds[kind] += 1
        if (gaps := known.gaps.pop(source, None)) is not None:
            left.gaps += gaps.by_reason
            left.gaps_of_hosts.update(dict.fromkeys(((kind, host) for host in hosts), len(gaps)))
        if torn := known.torn_lines.pop(source, 0):
            left.torn_lines.update(dict.fromkeys(hosts, torn))
        known.source_hosts.pop(source, None)
        known.source_versions.pop(source, None)
        return source


def hosts_of(known: Store, source: int) -> set[str]:
    """The hosts that a source told of; where it told of none, such as an export that could not be read, the one of its
    agent, if that is only one.
    """
    hosts = known.source_hosts.get(source)
    if hosts:
        return hosts
    agent = known.sources[source].agent
    beside = [of for other, of in known.source_hosts.items() if known.sources[other].agent == agent]
    found = set[str]().union(*beside)
    return found if len(found) == 1 else set()

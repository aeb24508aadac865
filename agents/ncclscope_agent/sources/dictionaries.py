"""The dictionaries of one source: strings, threads and templates, each sent once and then named by its index.

Indices only grow and are never taken back. What is remembered for looking them up is bounded: beyond the
limit the look-up is emptied, and an entry may be sent again under a new index, which is allowed.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ncclscope_agent.sources.text_columns import WordTable
from ncclscope_wire import tables
from ncclscope_wire.batch import Columns, no_rows

LOOKUP_LIMIT: Final = 65_536
"""Entries that a dictionary remembers; a log of one node has a few hundred at most."""


class Strings:
    """Text to index, for one source."""

    def __init__(self, limit: int = LOOKUP_LIMIT) -> None:
        self._limit = limit
        self._known: dict[str, int] = {}
        self._new: list[str] = []
        self._size = 0

    def index(self, text: str) -> int:
        """The index of this text, which becomes a new entry if it was not known."""
        known = self._known.get(text)
        if known is not None:
            return known
        if len(self._known) >= self._limit:
            self._known.clear()
        index = self._size
        self._known[text] = index
        self._new.append(text)
        self._size += 1
        return index

    def drain_new(self) -> tuple[str, ...]:
        """The entries made since this was last asked, in the order of their indices."""
        taken = tuple(self._new)
        self._new.clear()
        return taken


class Threads:
    """(host, pid, tid) to index, for one source."""

    def __init__(self, strings: Strings, limit: int = LOOKUP_LIMIT) -> None:
        self._strings = strings
        self._limit = limit
        self._known: dict[tuple[str, int, int], int] = {}
        self._new: list[tuple[int, int, int]] = []
        self._size = 0

    def index(self, host: str, pid: int, tid: int) -> int:
        """The index of this thread, which becomes a new entry if it was not known."""
        key = (host, pid, tid)
        known = self._known.get(key)
        if known is not None:
            return known
        if len(self._known) >= self._limit:
            self._known.clear()
        index = self._size
        self._known[key] = index
        self._new.append((self._strings.index(host), pid, tid))
        self._size += 1
        return index

    def drain_new(self) -> Columns:
        """The entries made since this was last asked (THREAD), in the order of their indices."""
        if not self._new:
            return no_rows(tables.THREAD)
        taken = np.array(self._new, dtype=tables.THREAD)
        self._new.clear()
        return taken


class Templates:
    """Rows of OPERATION_TEMPLATE, for one source. What is known already is looked up by its bytes elsewhere."""

    def __init__(self) -> None:
        self._new: list[bytes] = []
        self._beginnings: list[bytes] = []
        self._begun: list[int] = []
        self.size = 0
        """Templates made so far."""

    @property
    def has_new(self) -> bool:
        """Whether templates were made since the new ones were last taken."""
        return bool(self._new)

    def add(self, packed: bytes) -> int:
        """The index of a new template."""
        self._new.append(packed)
        self.size += 1
        return self.size - 1

    def add_like(self, packed: bytes, beginning: bytes) -> int:
        """The index of a new template that is another one's but for buffers and count.

        `beginning` says these: it is a full match of `operation_lines.BUFFERS_AND_COUNT`. It is read later, together
        with the others.
        """
        self._begun.append(len(self._new))
        self._beginnings.append(beginning)
        return self.add(packed)

    def drain_new(self) -> Columns:
        """The templates made since this was last asked (OPERATION_TEMPLATE), in the order of their indices."""
        if not self._new:
            return no_rows(tables.OPERATION_TEMPLATE)
        rows = np.frombuffer(bytearray().join(self._new), dtype=tables.OPERATION_TEMPLATE)
        if self._begun:
            words = WordTable(self._beginnings, words=6)
            rows["send_buffer"][self._begun] = words.pointers(1)
            rows["recv_buffer"][self._begun] = words.pointers(3)
            rows["count"][self._begun] = words.decimals(5)
        self._new.clear()
        self._beginnings.clear()
        self._begun.clear()
        return rows

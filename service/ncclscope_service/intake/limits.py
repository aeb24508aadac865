"""Limits on what agents bring: names, words that become labels, long texts, and the dictionaries of a batch.

Names (communicators, processes, hosts, templates, texts) stay as long as the service runs, so whoever may write a log
could fill its memory with them. What is over a limit counts under the name "other": its operations are counted, and
take part in nothing that would need to know them apart. It is counted as skipped, and is a gap of its log. Each name
that never did anything takes 2 KiB at most (`tests/attack/test_names.py`), each that was used 6 KiB.

Words of agents (reasons why lines were skipped, families of lines, reasons of gaps) become values of labels, of which
there must be few. An honest agent has some dozens; what is no word, or one too many, counts as "other". A batch whose
rows refer to nothing closes its session.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from operator import attrgetter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Batch, Columns
from ncclscope_wire.errors import ProtocolError
from ncclscope_wire.messages import AgentHealth
from ncclscope_wire.records import SourceGap
from ncclscope_wire.tables import CALL_MARK_KINDS, CALLS_BEGIN
from ncclscope_wire.terms import (
    ALGORITHMS,
    INSPECTOR_TIMINGS,
    NO_NUMBER,
    OPERATIONS,
    PROTOCOLS,
    UNKNOWN_OPERATION,
    UNKNOWN_TIMING,
)

MAX_TEXT_CHARACTERS: Final = 64 * 1024
"""Longest text of a dictionary; the rest is cut off. Readers take no longer lines."""
MAX_WORDS: Final = 512
"""Most different words, over all agents."""
OTHER: Final = "other"
"""The name, or the word, of all that are over a limit."""
_WORD: Final = re.compile(r"[A-Za-z0-9_.:/ -]{1,64}")


class ContentLimits:
    """Keeps batches within the limits, and the words that are known so far."""

    def __init__(self, *, max_words: int = MAX_WORDS) -> None:
        self._max_words = max_words
        self._words = {OTHER}

    def bounded(self, batch: Batch) -> Batch:
        """The batch within the limits; the same one if it is."""
        counts = batch.counts
        understood, skipped = self._counted(counts.understood), self._counted(counts.skipped)
        if understood is not counts.understood or skipped is not counts.skipped:
            batch = replace(batch, counts=replace(counts, understood=dict(understood), skipped=dict(skipped)))
        if batch.strings and max(map(len, batch.strings)) > MAX_TEXT_CHARACTERS:
            batch = replace(batch, strings=tuple(text[:MAX_TEXT_CHARACTERS] for text in batch.strings))
        if batch.gaps and any(self._word(gap.reason) != gap.reason for gap in batch.gaps):
            batch = replace(batch, gaps=tuple(replace(gap, reason=self._word(gap.reason)) for gap in batch.gaps))
        return batch

    def bounded_health(self, health: AgentHealth) -> AgentHealth:
        """The same for what an agent says of itself."""
        skipped, dropped = self._counted(health.skipped), self._counted(health.dropped)
        if skipped is health.skipped and dropped is health.dropped:
            return health
        return replace(health, skipped=dict(skipped), dropped=dict(dropped))

    def _counted(self, counts: Mapping[str, int]) -> Mapping[str, int]:
        if counts.keys() <= self._words or all(self._word(word) == word for word in counts):
            return counts
        merged = Counter[str]()
        for word, count in counts.items():
            merged[self._word(word)] += count
        return merged

    def _word(self, word: str) -> str:
        if word in self._words:
            return word
        if len(self._words) >= self._max_words or _WORD.fullmatch(word) is None:
            return OTHER
        self._words.add(word)
        return word


_REFERENCES: Final[Mapping[str, Mapping[str, str]]] = {
    "threads": {"host": "strings"},
    "operation_templates": {"thread": "threads", "op_name": "strings"},
    "kernel_templates": {"host": "strings", "name": "strings"},
    "range_templates": {"host": "strings", "domain": "strings", "text": "strings"},
    "inspected_ranks": {"host": "strings", "name": "strings"},
    "operations": {"template": "operation_templates"},
    "tunings": {"thread": "threads"},
    "call_marks": {"thread": "threads"},
    "kernels": {"template": "kernel_templates"},
    "outside": {"template": "kernel_templates"},
    "ranges": {"template": "range_templates"},
    "busy": {"host": "strings"},
    "inspected": {"inspected_rank": "inspected_ranks"},
}
"""Table to the columns of it that are indices, and into which dictionary."""

_DICTIONARIES: Final = (
    "strings",
    "threads",
    "operation_templates",
    "kernel_templates",
    "range_templates",
    "inspected_ranks",
)

_CODES: Final[Mapping[str, Sequence[tuple[str, int, int]]]] = {
    "operation_templates": (("op", len(OPERATIONS), UNKNOWN_OPERATION),),
    "tunings": (
        ("op", len(OPERATIONS), UNKNOWN_OPERATION),
        ("algorithm", len(ALGORITHMS), NO_NUMBER),
        ("protocol", len(PROTOCOLS), NO_NUMBER),
    ),
    "call_marks": (("kind", CALL_MARK_KINDS, CALLS_BEGIN),),
    "inspected": (
        ("op", len(OPERATIONS), UNKNOWN_OPERATION),
        ("timing", len(INSPECTOR_TIMINGS), UNKNOWN_TIMING),
        ("algorithm", len(ALGORITHMS), NO_NUMBER),
        ("protocol", len(PROTOCOLS), NO_NUMBER),
    ),
}
"""Table to the columns of it that index a tuple of terms.py: column, length of the tuple, and the value that means
none."""

_tables_of: Final[Callable[[Batch], tuple[Columns, ...]]] = attrgetter(*_REFERENCES)
"""The tables of a batch that have indices, in the order of `_REFERENCES`."""

MAX_ENTRIES: Final[Mapping[str, int]] = {
    "strings": 1 << 20,
    "threads": 1 << 16,
    "operation_templates": 1 << 20,
    "kernel_templates": 1 << 18,
    "range_templates": 1 << 20,
    "inspected_ranks": 1 << 16,
}
"""Of one source in one session. Readers start a dictionary again far earlier (`max_templates`)."""
MAX_STRING_CHARACTERS: Final = 64 * 1024**2
"""Of all strings of one source in one session."""


class DictionaryFullError(ProtocolError):
    """A source has more entries than a source may have."""


class Dictionaries:
    """The sizes of one source's dictionaries in one session."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = dict.fromkeys(_DICTIONARIES, 0)
        self._characters = 0

    def apply(self, batch: Batch) -> None:
        """Adds the new entries of a batch after checking every index and code in it.

        Raises:
            DictionaryFullError: there are too many entries.
            ProtocolError: one points outside; nothing was added.
        """
        # Most tables of most batches are empty, and batches are many: only what is there is looked at.
        filled = [(name, rows) for name, rows in zip(_REFERENCES, _tables_of(batch), strict=True) if len(rows)]
        if not batch.strings and all(name not in self._sizes for name, _ in filled):
            _check(filled, self._sizes)
            return
        added = {name: len(rows) for name, rows in filled if name in self._sizes}
        sizes = {**self._sizes, "strings": self._sizes["strings"] + len(batch.strings)}
        for name, amount in added.items():
            sizes[name] += amount
        for name in ("strings", *added):
            if sizes[name] > MAX_ENTRIES[name]:
                raise DictionaryFullError(f"{name} has {sizes[name]} entries, and {MAX_ENTRIES[name]} is the limit")
        characters = self._characters + sum(map(len, batch.strings))
        if characters > MAX_STRING_CHARACTERS:
            raise DictionaryFullError(f"strings have {characters} characters, and {MAX_STRING_CHARACTERS} is the limit")
        _check(filled, sizes)
        self._sizes, self._characters = sizes, characters


def _check(filled: Sequence[tuple[str, Columns]], sizes: Mapping[str, int]) -> None:
    """Whether all indices of these tables point inside dictionaries of these sizes, and all codes are known."""
    for table, rows in filled:
        for column, dictionary in _REFERENCES[table].items():
            _check_indices(rows[column], sizes[dictionary], table, column, dictionary)
        for column, length, none in _CODES.get(table, ()):
            _check_codes(rows[column], length, none, f"{table}.{column}")


def _check_indices(indices: NDArray[np.integer], size: int, table: str, column: str, dictionary: str) -> None:
    row = int(indices.argmax())  # half of what the largest itself takes, of a few rows
    if int(indices[row]) >= size:
        raise ProtocolError(f"row {row}: {table}.{column} is {int(indices[row])}, and {dictionary} has {size} entries")


def _check_codes(codes: NDArray[np.integer], length: int, none: int, where: str) -> None:
    wrong = ((codes < 0) | (codes >= length)) & (codes != none)
    if wrong.any():
        row = int(wrong.argmax())
        raise ProtocolError(f"row {row}: {where} is {int(codes[row])}, which is no code of this version")


TOO_MANY_NAMES: Final = "too_many_names"
"""The reason by which is counted what has no name of its own."""


class Named(StrEnum):
    """Kinds of names, each with limits of its own."""

    COMMUNICATORS = "communicators"
    MEMBERS = "communicators of processes"
    RANKS = "ranks of communicators"
    """As many as communicators say that they have: each rank has its place in memory."""
    PROCESSES = "processes"
    HOSTS = "hosts"
    TEMPLATES = "shapes of calls and kernels"
    TEXTS = "bytes of texts"


MOST_OF_AGENT: Final[Mapping[Named, int]] = {
    Named.COMMUNICATORS: 8_192,
    Named.MEMBERS: 32_768,
    Named.RANKS: 1 << 20,
    Named.PROCESSES: 4_096,
    Named.HOSTS: 1_024,
    Named.TEMPLATES: 1 << 17,
    Named.TEXTS: 1 << 27,
}
"""An honest agent has 8 processes on a node with some thirty communicators each: it may start a thousand times."""
MOST_OF_JOB: Final[Mapping[Named, int]] = {
    Named.COMMUNICATORS: 1 << 17,
    Named.MEMBERS: 1 << 20,
    Named.RANKS: 1 << 22,
    Named.PROCESSES: 1 << 16,
    Named.HOSTS: 1 << 14,
    Named.TEMPLATES: 1 << 21,
    Named.TEXTS: 1 << 29,
}
"""Of all its agents: 4,096 ranks have 120,000 communicators of processes."""


class NameLimits:
    """Counts the names of one store by agent and by job."""

    def __init__(self, known: Store) -> None:
        self.are_enforced = False
        """Offline all names are the user's own, and memory is what the job needs."""
        self.source: int | None = None
        """The source whose events are being followed: processes that logged no call yet have no log of their own."""
        self._store = known
        self._used: Counter[tuple[Named, str]] = Counter()
        """By agent, and by job behind a slash, with which no agent begins."""
        self._refused: Counter[tuple[int | None, Named]] = Counter()
        """By source; None: by one that is gone."""

    def take(self, what: Named, *, agent: str, job: str, source: int | None, amount: int = 1) -> bool:
        """Whether an agent may bring so many more names; if not, that is counted for its source."""
        if not self.are_enforced:
            return True
        of_agent, of_job = (what, agent), (what, f"/{job}")
        is_over = self._used[of_agent] + amount > MOST_OF_AGENT[what] or self._used[of_job] + amount > MOST_OF_JOB[what]
        if is_over:
            self._refused[source, what] += 1
            return False
        self._used[of_agent] += amount
        self._used[of_job] += amount
        return True

    def take_of_process(self, what: Named, process: int, amount: int = 1) -> bool:
        """As `take`, for the agent that named this process first."""
        known = self._store
        source = known.process_source.get(process, self.source)
        return self.take(
            what, agent=known.process_agent[process], job=known.process_job[process], source=source, amount=amount
        )

    def report_refused(self) -> None:
        """Counts what was over the limits since the last time as skipped, and as gaps of its sources."""
        for (source, what), amount in self._refused.items():
            self._store.skipped[TOO_MANY_NAMES] += amount
            if source is not None:
                detail = f"more {what} than an agent or a job may have: what is over the limit counts as {OTHER!r}"
                gap = SourceGap(reason=TOO_MANY_NAMES, amount=amount, unit="names", detail=detail)
                self._store.gaps[source].append(gap)
        self._refused.clear()

"""Batches of logs whose stamps and opCounts are still text, and reading these together.

An agent that follows a node's logs gets a hundred lines of each at a time. Columns of so few rows cost by the step
and not by the row, the more so for a process whose code has left the caches while it slept. So readers leave their
numbers as text, and those of all files are read in one go.
"""

from __future__ import annotations

from binascii import unhexlify
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_agent.sources.log_rows import Gathered
from ncclscope_agent.sources.log_stamp import Clock
from ncclscope_agent.sources.text_columns import read_hexadecimals
from ncclscope_wire import tables
from ncclscope_wire.batch import Batch, Columns, no_rows
from ncclscope_wire.records import Source, SourceGap
from ncclscope_wire.terms import NO_TIME_NS
from ncclscope_wire.topology import TopologySeen, TuningTableSeen


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What a log said for the first time; nothing in most batches of a log that is tailed."""

    strings: tuple[str, ...] = ()
    threads: Columns = field(default_factory=lambda: no_rows(tables.THREAD))
    operation_templates: Columns = field(default_factory=lambda: no_rows(tables.OPERATION_TEMPLATE))
    topologies: tuple[TopologySeen, ...] = ()
    tuning_tables: tuple[TuningTableSeen, ...] = ()


NO_NEWS: Final = News()


@dataclass(frozen=True, slots=True, kw_only=True)
class TextBatch:
    """What a `Batch` will hold; its operations are in `gathered`, as text."""

    source: Source
    begin: int
    end: int
    end_line: int
    is_last: bool
    observed_at_ns: int | None
    news: News
    gathered: Gathered
    gaps: tuple[SourceGap, ...] = ()
    """Those that whoever followed the log knows; what the log itself tells is in `gathered`."""


def batches_of(read: Sequence[TextBatch | Batch]) -> list[Batch]:
    """These batches with their numbers read, in the same order; their operations are parts of one table."""
    together = [text.gathered for text in read if isinstance(text, TextBatch)]
    _settle_times(together)
    operations = iter(_operations(together))
    return [_batch(text, next(operations)) if isinstance(text, TextBatch) else text for text in read]


def _settle_times(together: Sequence[Gathered]) -> None:
    """Reads the stamps that still wait; those of one form in one go."""
    waiting: dict[tuple[bytes, Clock], list[Gathered]] = {}
    for gathered in together:
        if gathered.times.stamps and gathered.layout is not None:
            waiting.setdefault(gathered.layout.form, []).append(gathered)
    for alike in waiting.values():
        layout = alike[0].layout
        assert layout is not None, "stamps wait, and their form is not known"
        times = layout.read(list(chain.from_iterable(gathered.times.stamps for gathered in alike)))
        are_known = times.min() > NO_TIME_NS
        at = 0
        for gathered in alike:
            begin, at = at, at + gathered.times.waiting
            gathered.take_times(times[begin:at], are_known=are_known)


def _operations(together: Sequence[Gathered]) -> list[Columns]:
    """One row per operation line (OPERATION_ROW), in the order of the file, for each.

    A line known by its bytes but for an opCount that is no number was torn: it is counted there.
    """
    ends = list(accumulate(len(gathered.templates) for gathered in together))
    if not ends or not ends[-1]:
        return [no_rows(tables.OPERATION_ROW) for _ in together]
    rows = np.empty(ends[-1], dtype=tables.OPERATION_ROW)
    rows["template"] = np.frombuffer(b"".join([gathered.templates for gathered in together]), dtype=np.uint32)
    rows["line"] = np.frombuffer(b"".join([gathered.lines for gathered in together]), dtype=np.uint32)
    rows["logged_at_ns"] = np.frombuffer(b"".join([gathered.time_column() for gathered in together]), dtype=np.int64)
    rows["op_count"], good = _op_counts(together)
    parts = [rows[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    return parts if good is None else _without_torn(together, parts, good)


def _op_counts(together: Sequence[Gathered]) -> tuple[NDArray[np.uint64], NDArray[np.bool_] | None]:
    """All opCounts, and which of them are numbers at all; None: all."""
    are_digits = [bool(gathered.op_count_digits) for gathered in together]
    if not any(are_digits):
        return read_hexadecimals(list(chain.from_iterable([gathered.op_counts for gathered in together])))
    digits = np.frombuffer(unhexlify(b"".join([gathered.op_count_digits for gathered in together])), dtype=">u8")
    texts = list(chain.from_iterable([gathered.op_counts for gathered in together]))
    if not texts:
        return digits, None
    is_text = np.repeat(np.logical_not(are_digits), [len(gathered.templates) for gathered in together])
    values, good = np.empty(len(is_text), dtype=np.uint64), np.ones(len(is_text), dtype=np.bool_)
    values[~is_text] = digits
    values[is_text], whole = read_hexadecimals(texts)
    if whole is None:
        return values, None
    good[is_text] = whole
    return values, good


def _without_torn(together: Sequence[Gathered], parts: Sequence[Columns], good: NDArray[np.bool_]) -> list[Columns]:
    whole: list[Columns] = []
    at = 0
    for gathered, part in zip(together, parts, strict=True):
        begin, at = at, at + len(part)
        whole.append(part[good[begin:at]])
        if torn := len(part) - len(whole[-1]):
            gathered.skipped["torn"] += torn
    return whole


def _batch(text: TextBatch, operations: Columns) -> Batch:
    gathered, news = text.gathered, text.news
    return Batch(
        source=text.source,
        begin=text.begin,
        end=text.end,
        end_line=text.end_line,
        is_last=text.is_last,
        observed_at_ns=text.observed_at_ns,
        strings=news.strings,
        threads=news.threads,
        operation_templates=news.operation_templates,
        operations=operations,
        tunings=gathered.tuning_rows(),
        call_marks=gathered.mark_rows(),
        communicators=tuple(gathered.communicators),
        versions=tuple(gathered.versions),
        facts=tuple(gathered.facts),
        topologies=news.topologies,
        tuning_tables=news.tuning_tables,
        gaps=(*gathered.gaps(text.source.name), *text.gaps),
        counts=gathered.counts(len(operations)),
    )

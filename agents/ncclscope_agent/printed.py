"""Batches as lines for a person: what `ncclscope agent --print` shows instead of sending."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import anyio
import numpy as np

from ncclscope_agent.files.follower import Followed
from ncclscope_wire.batch import Batch, Columns
from ncclscope_wire.terms import DATA_TYPES, NO_TIME_NS

_MAX_ROWS: Final = 20
"""Rows of a kind that are printed of one batch; the others are counted."""


class Printer:
    """Keeps the dictionaries of each source, since rows of a batch may point at those of earlier ones."""

    def __init__(self) -> None:
        self._strings: dict[str, list[str]] = {}
        self._templates: dict[str, list[np.void]] = {}
        self._kernel_names: dict[str, list[str]] = {}

    def lines_for(self, batch: Batch) -> Iterator[str]:
        """The lines for one batch: a heading, then its records and first rows."""
        strings = self._strings.setdefault(batch.source.key, [])
        templates = self._templates.setdefault(batch.source.key, [])
        names = self._kernel_names.setdefault(batch.source.key, [])
        strings.extend(batch.strings)
        templates.extend(batch.operation_templates)
        names.extend(strings[int(index)] for index in batch.kernel_templates["name"])
        yield _heading(batch)
        yield from _first(batch.operations, lambda row: _operation(row, templates[int(row["template"])], strings))
        yield from _first(batch.kernels, lambda row: _kernel(row, names[int(row["template"])]))
        for record in (*batch.communicators, *batch.versions, *batch.captures, *batch.gaps):
            yield f"  {record}"
        if batch.is_last:
            for known in (self._strings, self._templates, self._kernel_names):
                known.pop(batch.source.key, None)


def _heading(batch: Batch) -> str:
    sizes = {
        "operations": len(batch.operations),
        "tunings": len(batch.tunings),
        "kernels": len(batch.kernels),
        "ranges": len(batch.ranges),
        "inspected": len(batch.inspected),
        "new_texts": len(batch.strings),
        **{f"skipped_{reason}": number for reason, number in batch.counts.skipped.items()},
    }
    said = " ".join(f"{name}={number}" for name, number in sizes.items() if number)
    return f"{batch.source.name} [{batch.begin}, {batch.end}){' last' if batch.is_last else ''} {said}".rstrip()


def _first(rows: Columns, printed: Callable[[np.void], str]) -> Iterator[str]:
    for row in rows[:_MAX_ROWS]:
        yield "  " + printed(row)
    if len(rows) > _MAX_ROWS:
        yield f"  ... and {len(rows) - _MAX_ROWS} more"


def _operation(row: np.void, template: np.void, strings: list[str]) -> str:
    logged_at_ns = int(row["logged_at_ns"])
    stamp = "" if logged_at_ns == NO_TIME_NS else f" at={logged_at_ns}ns"
    number = int(template["data_type"])
    data_type = DATA_TYPES[number].name if 0 <= number < len(DATA_TYPES) else str(number)
    return (
        f"line {row['line']}: {strings[int(template['op_name'])]} opCount={int(row['op_count']):x} "
        f"count={template['count']} {data_type} nranks={template['nranks']} "
        f"comm={int(template['communicator']):#x}{stamp}"
    )


def _kernel(row: np.void, name: str) -> str:
    return f"kernel {name} correlation={row['correlation_id']} start={row['start_ns']}ns end={row['end_ns']}ns"


async def print_batches(
    followed: Sequence[Followed],
    write: Callable[[str], object],
    stopping: anyio.Event,
    *,
    once: bool,
    wall_ns: Callable[[], int] = time.time_ns,
) -> None:
    """Writes what would be sent, from the beginning of every source, until stopped (or with `once` to its end)."""
    printer = Printer()

    def show(batches: Iterable[Batch]) -> int:
        shown = [write(line) for batch in batches for line in printer.lines_for(batch)]
        return len(shown)

    for known in followed:
        known.follower.reset({})
    while True:
        is_last_look = stopping.is_set()
        written = sum(show(known.poll(wall_ns())) for known in followed)
        if once and not written and not any(known.follower.statistics().files_waiting for known in followed):
            for known in followed:
                show(known.follower.close(wall_ns()))
            return
        if is_last_look:
            return
        with anyio.move_on_after(min(known.tick_min_seconds for known in followed)):
            await stopping.wait()

"""Tries a format of time stamps: what the log reader makes of the lines that NCCL would print with it."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from enum import Enum, auto
from typing import Final

from ncclscope_agent.sources.nccl_log.reader import NcclLogReader
from ncclscope_wire.records import Source, SourceKind
from ncclscope_wire.terms import NO_TIME_NS

_MOMENTS: Final = (
    datetime(2026, 3, 2, 23, 20, 33, 4217, tzinfo=UTC),
    datetime(2026, 11, 9, 1, 2, 3, 999_000, tzinfo=UTC),
)
"""Dates that may be read in two ways; an afternoon and a morning."""
_LINE: Final = (
    "node17:41822:41903 [2] NCCL INFO AllReduce: opCount 0 sendbuff 0x7f2a40000000 recvbuff 0x7f2a44000000 count 1 "
    "datatype 7 op 0 root 0 comm 0x55d0c8b3e2a0 [nranks=4] stream 0x55d0c7f01b10\n"
)
_SOURCE: Final = Source(kind=SourceKind.NCCL_LOG, name="trial", key="trial")
_NS: Final = 1_000_000_000


class Trial(Enum):
    """How the stamps of a format are read."""

    TOLD = auto()
    """Their time is read."""
    TOLD_BY_FILE = auto()
    """The year or the order of the date follows from the file's last change only."""
    NOT_TOLD = auto()
    """The lines are read without a time."""
    WRONG = auto()
    """Their time is read, and is another one."""
    NOT_READ = auto()
    """The lines are not read: the host cannot be separated from the stamp."""


def try_format(form: str, *, blanks: bool) -> Trial:
    """How the stamps of a format are read, at worst; `blanks` says whether NCCL prints `_` as a blank."""
    worst = Trial.TOLD
    for moment in _MOMENTS:
        stamp = _stamp(form.replace("_", " ") if blanks else form, moment)
        wanted = int(moment.timestamp()) * _NS
        trial = _try(stamp, wanted, None)
        if trial is Trial.NOT_TOLD and _try(stamp, wanted, wanted + 86_400 * _NS) is Trial.TOLD:
            trial = Trial.TOLD_BY_FILE
        worst = max(worst, trial, key=lambda one: one.value)
    return worst


def _try(stamp: str, wanted_ns: int, near_ns: int | None) -> Trial:
    reader = NcclLogReader(_SOURCE, written_near_ns=near_ns)
    batches = [*reader.ingest_bytes((stamp + _LINE).encode()), *reader.finish()]
    times = [int(row["logged_at_ns"]) for batch in batches for row in batch.operations]
    hosts = {text for batch in batches for text in batch.strings}
    if len(times) != 1 or "node17" not in hosts:
        return Trial.NOT_READ
    if times[0] == NO_TIME_NS:
        return Trial.NOT_TOLD
    return Trial.TOLD if 0 <= times[0] - wanted_ns < _NS else Trial.WRONG


def _stamp(form: str, moment: datetime) -> str:
    """The stamp as NCCL prints it. *Source:* `src/debug.cc:ncclDebugInit`; %1f to %9f are digits of the second."""
    digits = f"{moment.microsecond * 1000:09d}"
    form = re.sub(r"%([1-9])f", lambda found: digits[: int(found[1])], form, count=1)
    return moment.strftime(form.replace("%s", str(int(moment.timestamp()))))

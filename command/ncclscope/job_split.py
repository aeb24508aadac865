"""Tells the jobs of several files apart, before they are read: by hosts and processes, commIds, and printed ranks.

Files belong together if they name the same process or the same communicator (commId, or NCCL Inspector's id). What
belongs together is a job of its own if every rank of its largest communicator prints its Init line in it: then nothing
of it is missing that other files could hold. Where two or more such jobs are found, each is given a name; everything
else, which may be a part of any, keeps the name that was given. A job whose files share nothing and of which each holds
a whole group, but none the communicator of all, cannot be told from several jobs, and is taken for these.

Jobs that wrote one file one after the other are not told apart.
"""

from __future__ import annotations

import mmap
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ncclscope.discover import FoundFile
from ncclscope_agent.files.recognise import FileKind

_FIRST_BYTES: Final = 256 << 10
"""Of each file that are searched for processes."""
_LONGEST_LINE: Final = 4096
_PROCESS: Final = re.compile(
    rb"\b([A-Za-z0-9][\w.-]{0,254}+):(\d{1,10}):\d{1,10} (?:\[\d+\] )?NCCL (?:INFO|WARN|TRACE)"
)
_RANK: Final = re.compile(rb" rank (\d{1,7}) nranks (\d{1,7}) ")
_COMM_ID: Final = re.compile(rb" commId (0x[0-9a-f]+)")
_INSPECTED: Final = re.compile(rb'"id": ?"(0x[0-9a-f]+)", ?"rank": ?(\d{1,7}), ?"n_ranks": ?(\d{1,7})')
_INSPECTED_PROCESS: Final = re.compile(rb'"hostname": ?"([^".]{1,255})[^"]*", ?"pid": ?(\d{1,10})')
"""*Source:* NCCL `src/init.cc` (Init lines), `plugins/profiler/inspector` (dumps)."""


@dataclass(slots=True)
class Traces:
    """Marks of a job in one file."""

    ties: set[Hashable] = field(default_factory=set[Hashable])
    """Processes and communicators."""
    ranks: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict[int, set[int]](set))
    """By size of a communicator: ranks whose Init lines are in the file."""


def jobs_of_files(found: Sequence[FoundFile], *, job: str) -> dict[Path, str]:
    """The job of each of these logs and dumps; all are `job`, unless several jobs are shown."""
    if len(found) < 2:
        return {each.path: job for each in found}
    return name_jobs({each.path: _traces_of(each) for each in found}, job=job)


def name_jobs(traces: Mapping[Path, Traces], *, job: str) -> dict[Path, str]:
    """The job of each file, by its traces: `<job>-1`, `<job>-2`, ... in order of the files if there are several."""
    whole = [files for files in _together(traces) if _is_whole(traces[path] for path in files)]
    names = dict.fromkeys(traces, job)
    if len(whole) > 1:
        for number, files in enumerate(whole, 1):
            names.update(dict.fromkeys(files, f"{job}-{number}"))
    return names


def _together(traces: Mapping[Path, Traces]) -> list[list[Path]]:
    """Files that are tied to each other, directly or by others, in the order in which they come."""
    group_of: dict[Hashable, list[Path]] = {}
    groups: dict[int, list[Path]] = {}
    for path, trace in traces.items():
        mine = [path]
        for group in {id(group_of[tie]): group_of[tie] for tie in trace.ties if tie in group_of}.values():
            mine = group + mine
            groups.pop(id(group))
            for tie in [tie for tie, of in group_of.items() if of is group]:
                group_of[tie] = mine
        groups[id(mine)] = mine
        group_of.update(dict.fromkeys(trace.ties, mine))
    order = {path: place for place, path in enumerate(traces)}
    return sorted((sorted(group, key=order.__getitem__) for group in groups.values()), key=lambda of: order[of[0]])


def _is_whole(traces: Iterable[Traces]) -> bool:
    ranks: defaultdict[int, set[int]] = defaultdict(set)
    for trace in traces:
        for size, printed in trace.ranks.items():
            ranks[size] |= printed
    return bool(ranks) and ranks[max(ranks)] == set(range(max(ranks)))


def _traces_of(found: FoundFile) -> Traces:
    traces = Traces()
    try:
        with found.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if found.kind is FileKind.INSPECTOR:
                _read_dump(data, traces)
            else:
                _read_log(data, traces)
    except (OSError, ValueError):  # what cannot be read, or is empty, has no traces
        return traces
    return traces


def _read_log(data: mmap.mmap, traces: Traces) -> None:
    for host, pid in _PROCESS.findall(data[:_FIRST_BYTES]):
        traces.ties.add((host.partition(b".")[0], int(pid)))
    at = data.find(b" Init ")
    while at >= 0:
        end = data.find(b"\n", at, at + _LONGEST_LINE)
        line = data[max(data.rfind(b"\n", max(0, at - _LONGEST_LINE), at), 0) : end if end >= 0 else at + 16]
        if (rank := _RANK.search(line)) is not None:
            traces.ranks[int(rank[2])].add(int(rank[1]))
            if (comm_id := _COMM_ID.search(line)) is not None:
                traces.ties.add(comm_id[1])
            if (process := _PROCESS.search(line)) is not None:
                traces.ties.add((process[1].partition(b".")[0], int(process[2])))
        at = data.find(b" Init ", at + 1)


def _read_dump(data: mmap.mmap, traces: Traces) -> None:
    """One process writes a dump, whose first lines name its communicators."""
    first = data[:_FIRST_BYTES]
    for comm_id, rank, size in _INSPECTED.findall(first):
        traces.ties.add(comm_id)
        traces.ranks[int(size)].add(int(rank))
    for host, pid in _INSPECTED_PROCESS.findall(first):
        traces.ties.add((host, int(pid)))

"""What a dump of PyTorch's Flight Recorder says of each process group of its rank.

Scope: dumps of ProcessGroupNCCL, versions 2.0 to 2.10, as pickle (`TORCH_NCCL_DEBUG_INFO_TEMP_FILE`, one file per rank)
or JSON. Of each group the first collective that did not complete is kept, or the last that did, with its stack; Sends
and Recvs, which have no number that all ranks share, are left out. The rank stands in the name of the file alone.
*Source:* PyTorch `torch/csrc/distributed/c10d/FlightRecorder.hpp`, `FlightRecorderDetail.hpp`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Final

from ncclscope_agent.sources.flight_recorder.plain_pickle import load_plain
from ncclscope_wire.batch import Batch
from ncclscope_wire.errors import FormatError
from ncclscope_wire.facts import FlightRecord
from ncclscope_wire.records import Counts, Source, SourceGap

MOST_BYTES: Final = 256 << 20
_RANK: Final = re.compile(r"(\d{1,7})(?:\.(?:json|pkl|pickle|bin|dump))?$")
_COALESCED: Final = "nccl:coalesced"
_COMPLETED: Final = "completed"
_FRAMES: Final = 12
_LOOKED_AT_FRAMES: Final = 256
_LONGEST_FRAME: Final = 240
_MOST_GROUPS: Final = 4_096
_MOST_CHARACTERS: Final = 8 << 20
"""Of the lists of all groups' ranks."""
_MOST_ITEMS: Final = 2_000_000
"""Lists, maps and what is in them, of a dump in JSON: 2,000 entries with stacks of fifty frames have 800,000."""
_RANKS: Final = 2**31
_SEQUENCES: Final = 2**32
"""Larger numbers of ranks and of collectives are damage: no service takes them."""
_LIST: Final = re.compile(r"\[\s*\d{1,9}(?:\s*,\s*\d{1,9})*\s*\]")


def rank_of_name(name: str) -> int | None:
    """The rank that ends a file's name ("nccl_trace_rank_12"); None if there is none."""
    found = _RANK.search(name)
    return None if found is None else int(found[1])


def read_dump(data: bytes, name: str) -> list[FlightRecord]:
    """One record per process group.

    Raises:
        FormatError: the file is no such dump, is cut off or holds more than plain values, or its name has no rank.
    """
    rank = rank_of_name(name)
    if rank is None:
        raise FormatError(f"{name} is a dump of the Flight Recorder, and its name does not end with the rank")
    if data[:1] == b"\x80":
        content = load_plain(data)
    else:
        # Two bytes of a text may be a list of 64 in memory.
        if sum(map(data.count, (b"[", b"{", b","))) > _MOST_ITEMS:
            raise FormatError(f"{name} holds more than {_MOST_ITEMS} items")
        try:
            content = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{name} is cut off or damaged: {error}") from error
    if not isinstance(content, dict) or not isinstance(entries := content.get("entries"), list):
        raise FormatError(f"{name} is no dump of PyTorch's Flight Recorder: it has no entries")
    config = content.get("pg_config")
    return list(_records(entries, config if isinstance(config, Mapping) else {}, rank))


def dump_batch(data: bytes, source: Source) -> Batch:
    """The batch of a whole dump.

    Raises:
        FormatError: as `read_dump`.
    """
    records = tuple(read_dump(data, source.name))
    counts = Counts(understood={"flight_record": len(records)})
    return Batch(source=source, begin=0, end=1, is_last=True, facts=records, counts=counts)


def unreadable_dump(source: Source, why: str) -> Batch:
    """The batch of a dump that cannot be read: a gap."""
    gap = SourceGap(reason="unreadable_dump", amount=1, unit="files", detail=why[:500])
    return Batch(source=source, begin=0, end=1, is_last=True, gaps=(gap,))


def _records(entries: list[object], config: Mapping[object, object], rank: int) -> Iterator[FlightRecord]:
    groups: dict[str, list[Mapping[str, object]]] = {}
    descriptions: dict[str, str] = {}
    of_pairs = set[tuple[str, int | None]]()
    for entry in entries:
        if not isinstance(entry, Mapping) or _number(entry.get("collective_seq_id"), _SEQUENCES) is None:
            continue
        group, description = _group_of(entry)
        call = group, _number(entry.get("op_id"))
        if entry.get("is_p2p"):
            of_pairs.add(call)
            continue
        if call in of_pairs and entry.get("profiling_name") == _COALESCED:
            continue  # Sends and Recvs together: it has the number of the last of them, and of the last collective
        if group and (group in groups or len(groups) < _MOST_GROUPS):
            groups.setdefault(group, []).append(entry)
            descriptions[group] = description
    ranks_of, left = dict[str, tuple[int, ...]](), _MOST_CHARACTERS
    for group in groups:
        ranks_of[group], looked_at = _ranks(config.get(group), left)
        left -= looked_at
    for line, (group, own) in enumerate(groups.items(), 1):
        newest = max(own, key=_sequence)
        waiting = min((each for each in own if each.get("state") != _COMPLETED), key=_sequence, default=None)
        shown = newest if waiting is None else waiting
        completed = max((_sequence(each) for each in own if each.get("state") == _COMPLETED), default=-1)
        yield FlightRecord(
            line=line,
            logged_at_ns=_number(shown.get("time_created_ns")),
            global_rank=rank,
            group=group,
            description=descriptions[group],
            group_ranks=ranks_of.get(group, ()),
            last_enqueued=_sequence(newest),
            last_completed=completed,
            sequence=_sequence(shown),
            operation=_text(shown.get("profiling_name"), "nccl:unknown").removeprefix("nccl:")[:128] or "unknown",
            state=_text(shown.get("state"), "unknown")[:32] or "unknown",
            sizes=_sizes(shown.get("input_sizes")),
            stack=tuple(_frames(shown.get("frames"))),
        )


def _group_of(entry: Mapping[str, object]) -> tuple[str, str]:
    """Name and description; dumps before 2.2 have a number alone."""
    named = entry.get("process_group")
    if isinstance(named, list | tuple) and named and isinstance(named[0], str):
        return named[0][:128], _text(named[1] if len(named) > 1 else "", "")[:128]
    number = _number(entry.get("pg_id"))
    return ("" if number is None else str(number)), ""


def _ranks(config: object, most: int) -> tuple[tuple[int, ...], int]:
    """Of a group's configuration, whose ranks are a list in text; empty if it is not known, or longer than `most`.

    Also how much was looked at: many groups may name one long list.
    """
    text = config.get("ranks") if isinstance(config, Mapping) else None
    if not isinstance(text, list | str) or len(text) > most:
        return (), 0
    if isinstance(text, list):  # not made text as a whole: lists that hold each other many times would fill memory
        numbers = [_number(rank, _RANKS) for rank in text]
        return (() if None in numbers else tuple(rank or 0 for rank in numbers)), len(text)
    is_list = _LIST.fullmatch(text.strip()) is not None
    return (tuple(int(digits) for digits in re.findall(r"\d+", text)) if is_list else ()), len(text)


def _sizes(shapes: object) -> str:
    """Shapes of what goes in, as text; empty if they are something else."""
    if not isinstance(shapes, list) or not all(isinstance(shape, list) for shape in shapes[:16]):
        return ""
    numbers = [[_number(size) for size in shape[:16]] for shape in shapes[:16]]
    return "" if any(None in shape for shape in numbers) else str(numbers)[:200]


def _frames(frames: object) -> Iterator[str]:
    """The innermost frames that are not PyTorch's own, "file:line in function"."""
    if not isinstance(frames, list):
        return
    shown = 0
    for frame in frames[:_LOOKED_AT_FRAMES]:
        if shown == _FRAMES:
            return
        if isinstance(frame, Mapping):
            where = f"{_text(frame.get('filename'), '?')[-_LONGEST_FRAME:]}:{_number(frame.get('line')) or 0}"
            if "/torch/" not in where:
                shown += 1
                yield f"{where[-_LONGEST_FRAME:]} in {_text(frame.get('name'), '?')[:80]}"


def _sequence(entry: Mapping[str, object]) -> int:
    return _number(entry.get("collective_seq_id"), _SEQUENCES) or 0


def _text(value: object, otherwise: str) -> str:
    return value if isinstance(value, str) else otherwise


def _number(value: object, below: int = 2**62) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < below else None

"""The trace in Perfetto's own format: read back with the library's messages, it is the Chrome trace."""

from __future__ import annotations

import gzip
import json
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import pytest
from service.export.small_run import Builder, logs_only_run, small_run

from ncclscope.extras import require_perfetto
from ncclscope_service.export import perfetto_trace
from ncclscope_service.export.chrome_trace import write_trace
from ncclscope_service.export.directory import PERFETTO_TRACE, WRITERS, write_run
from ncclscope_service.export.perfetto_trace import write_perfetto_trace
from ncclscope_service.export.selection import select
from ncclscope_service.store import Store

messages: Any = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")

Drawn = tuple[str, str, str, int, int | None, str]
"""Process, track, name, start, length (None: an instant), arguments as JSON."""


def with_stamps() -> Store:
    return logs_only_run(with_stamps=True)


RUNS = [small_run, with_stamps, Store]


@dataclass
class Read:
    """A trace as a reader builds it up from its packets."""

    tracks: dict[int, Any] = field(default_factory=dict)
    drawn: list[Drawn] = field(default_factory=list)
    counters: list[tuple[str, int, float]] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    interned: list[tuple[str, int]] = field(default_factory=list)


def packets_of(path: Path) -> Iterator[Any]:
    for outer in messages.Trace.FromString(path.read_bytes()).packet:
        yield from messages.Trace.FromString(zlib.decompress(outer.compressed_packets)).packet


def read(path: Path) -> Read:
    """Reads as Perfetto does: strings in file order, events by time, in file order where times are equal."""
    found = Read()
    strings: dict[tuple[str, int], str] = {}
    events: list[tuple[int, Any, dict[str, object], str]] = []
    is_begun = False
    for packet in packets_of(path):
        if packet.HasField("interned_data"):
            for kind in ("event_names", "debug_annotation_names", "debug_annotation_string_values"):
                for entry in getattr(packet.interned_data, kind):
                    found.interned.append((kind, entry.iid))
                    text = entry.str.decode() if kind.endswith("values") else entry.name
                    assert strings.setdefault((kind, entry.iid), text) == text
        if packet.sequence_flags & messages.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED:
            assert not is_begun
            is_begun = True
        if packet.HasField("track_descriptor"):
            track = packet.track_descriptor
            assert not track.HasField("parent_uuid") or track.parent_uuid in found.tracks
            assert track.uuid not in found.tracks
            found.tracks[track.uuid] = track
        if packet.HasField("track_event"):
            assert is_begun
            assert packet.trusted_packet_sequence_id == 1
            event = packet.track_event
            assert event.track_uuid in found.tracks
            name = strings["event_names", event.name_iid] if event.name_iid else event.name
            args = {label(a, strings): value_of(a, strings) for a in event.debug_annotations}
            events.append((packet.timestamp, event, args, name))
    draw(found, sorted(events, key=lambda one: one[0]))
    return found


def draw(found: Read, events: list[tuple[int, Any, dict[str, object], str]]) -> None:
    kinds = messages.TrackEvent
    open_slices: dict[int, list[tuple[int, str, str]]] = defaultdict(list)
    for at, event, args, name in events:
        track = found.tracks[event.track_uuid]
        where = (process_name(found, track), track.name)
        if event.type == kinds.TYPE_SLICE_BEGIN:
            open_slices[event.track_uuid].append((at, name, json.dumps(args)))
        elif event.type == kinds.TYPE_SLICE_END:
            start, opened, text = open_slices[event.track_uuid].pop()
            found.drawn.append((*where, opened, start, at - start, text))
        elif event.type == kinds.TYPE_COUNTER:
            found.counters.append((track.name, at, event.double_counter_value))
        elif event.flow_ids or event.terminating_flow_ids:
            assert open_slices[event.track_uuid] or any(
                d[:2] == where and sum((d[3], d[4] or 0)) == at for d in found.drawn
            )
            found.begins += event.flow_ids
            found.ends += event.terminating_flow_ids
        else:
            found.drawn.append((*where, name, at, None, json.dumps(args)))
    assert not any(open_slices.values())


def process_name(found: Read, track: Any) -> str:
    if not track.HasField("parent_uuid"):
        return ""
    name: str = found.tracks[track.parent_uuid].process.process_name
    return name


def label(annotation: Any, strings: dict[tuple[str, int], str]) -> str:
    return strings["debug_annotation_names", annotation.name_iid] if annotation.name_iid else str(annotation.name)


def value_of(annotation: Any, strings: dict[tuple[str, int], str]) -> object:
    if annotation.string_value_iid:
        return strings["debug_annotation_string_values", annotation.string_value_iid]
    if annotation.dict_entries:
        return {entry.name: value_of(entry, strings) for entry in annotation.dict_entries}
    if annotation.array_values:
        return [value_of(entry, strings) for entry in annotation.array_values]
    [value] = [value for named, value in annotation.ListFields() if named.name.endswith("_value")]
    return value


def chrome(
    store: Store, folder: Path
) -> tuple[list[Drawn], list[tuple[str, int, float]], list[int], dict[str, object]]:
    write_trace(select(store), folder / "trace.json.gz")
    document = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))
    events = document["traceEvents"]
    named = {(e["name"], e["pid"], e.get("tid")): e["args"]["name"] for e in events if "name" in e.get("args", {})}
    drawn = [
        (
            named["process_name", e["pid"], None],
            named["thread_name", e["pid"], e["tid"]],
            e["name"],
            round(e["ts"] * 1000),
            round(e["dur"] * 1000) if e["ph"] == "X" else None,
            json.dumps(printed(e["args"]) if "args" in e else {}),
        )
        for e in events
        if e["ph"] in ("X", "i")
    ]
    counters = [(e["name"], round(e["ts"] * 1000), next(iter(e["args"].values()))) for e in events if e["ph"] == "C"]
    return drawn, counters, [e["id"] for e in events if e["ph"] == "s"], document["otherData"]


def printed(value: Any) -> Any:
    """Perfetto has no null and no empty list."""
    if isinstance(value, dict):
        return {name: printed(inner) for name, inner in value.items()} or "none"
    return "null" if value is None else "none" if value in ([], {}) else value


@pytest.mark.parametrize("make", RUNS)
def test_read_back_it_is_the_chrome_trace(make: Callable[[], Store], tmp_path: Path) -> None:
    write_perfetto_trace(select(make()), tmp_path / "trace")
    found = read(tmp_path / "trace")
    drawn, counters, arrows, about = chrome(make(), tmp_path)
    [said] = [one for one in found.drawn if one[2] == "about this trace"]
    assert sorted(one for one in found.drawn if one is not said) == sorted(drawn)
    assert sorted(found.counters) == sorted(counters)
    assert sorted(found.begins) == sorted(found.ends) == sorted(arrows)
    shown = json.loads(said[5])
    assert {name: shown[name] for name in ("time", "events")} == {name: about[name] for name in ("time", "events")}


def test_each_string_is_told_once_and_before_it_is_used(tmp_path: Path) -> None:
    write_perfetto_trace(select(small_run()), tmp_path / "trace")
    interned = read(tmp_path / "trace").interned
    assert len(interned) == len(set(interned)) > 20


def test_strings_beyond_the_limit_stand_where_they_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perfetto_trace, "_MAX_INTERNED", 3)
    monkeypatch.setattr(perfetto_trace, "_MAX_KEPT", 10)
    write_perfetto_trace(select(small_run()), tmp_path / "trace")
    found = read(tmp_path / "trace")
    assert len(found.interned) == 9
    assert sorted(one for one in found.drawn if one[0]) == sorted(chrome(small_run(), tmp_path)[0])


def test_tracks_stand_in_the_order_of_the_chrome_trace(tmp_path: Path) -> None:
    write_perfetto_trace(select(small_run()), tmp_path / "trace")
    tracks = read(tmp_path / "trace").tracks.values()
    processes = [track.process for track in tracks if track.HasField("process")]
    ordered = [process.process_name for process in sorted(processes, key=lambda one: one.legacy_sort_index)]
    assert ordered[:3] == ["findings job", "communicators", "rank 0 (node1 pid 100)"]
    [first] = [track for track in tracks if track.process.process_name == "rank 0 (node1 pid 100)"]
    assert first.child_ordering == messages.TrackDescriptor.EXPLICIT
    own = sorted((track for track in tracks if track.parent_uuid == first.uuid), key=lambda one: one.sibling_order_rank)
    assert [track.name.split()[0] for track in own] == [
        "NVTX",
        *["parallelism"] * 2,
        *["NCCL"] * 3,
        "logged,",
        "logged,",
    ]


def test_times_are_exact_to_the_nanosecond_far_from_the_origin(tmp_path: Path) -> None:
    build = Builder()
    process = build.process("node1", 1)
    day = 86_400 * 10**9
    for start in (0, 50 * day + 1, 90 * day + 123_456_789):
        build.range(process, 7, str(start), 10**18 + start, 10**18 + start + 7)
    write_perfetto_trace(select(build.store), tmp_path / "trace")
    found = [one for one in read(tmp_path / "trace").drawn if one[1] == "NVTX"]
    assert [(str(start), length) for _, _, _, start, length, _ in found] == [(one[2], 7) for one in found]
    assert len(found) == 3


def test_a_run_has_it_where_it_is_asked_for_and_no_old_one_stays(tmp_path: Path) -> None:
    paths = write_run(small_run(), tmp_path, with_perfetto=True)
    assert sorted(paths) == sorted([*WRITERS, PERFETTO_TRACE])
    write_run(small_run(), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(WRITERS)


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "perfetto", None)
    with pytest.raises(click.ClickException, match=r"pip install 'ncclscope\[perfetto\]'"):
        require_perfetto()

"""NCCL Inspector dumps: what each format version says, what is torn, and reading on where an agent stopped."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from agent.inspector_samples import DUMPED_US, coll_perf, dump_v43, mark, metadata, p2p_perf, record, text
from agent.log_samples import operation_line
from hypothesis import given
from hypothesis import strategies as st

from ncclscope_agent.files.logs import LogFollower
from ncclscope_agent.sources.inspector import InspectorReader
from ncclscope_wire.batch import Batch, Columns
from ncclscope_wire.messages import Position
from ncclscope_wire.records import Source, SourceKind
from ncclscope_wire.terms import KERNEL_GPU, NO_NUMBER, NO_TIME_NS, OPERATION_CODES, UNKNOWN_OPERATION, UNKNOWN_TIMING

SECOND = 1_000_000_000


def reader() -> InspectorReader:
    return InspectorReader(Source(kind=SourceKind.INSPECTOR, name="node1-pid41.log", key="k"))


def read(data: bytes) -> list[Batch]:
    made = reader()
    return [*made.ingest_bytes(data), *made.finish()]


def rows(batches: Sequence[Batch]) -> Columns:
    return np.concatenate([batch.inspected for batch in batches])


def ranks(batches: Sequence[Batch]) -> Columns:
    return np.concatenate([batch.inspected_ranks for batch in batches])


def skipped(batches: Sequence[Batch]) -> dict[str, int]:
    found: dict[str, int] = {}
    for batch in batches:
        for reason, number in batch.counts.skipped.items():
            found[reason] = found.get(reason, 0) + number
    return found


def follower(folder: Path) -> LogFollower:
    return LogFollower(["*"], root=folder, kind=SourceKind.INSPECTOR)


def test_a_record_with_its_header_becomes_a_row() -> None:
    batches = read(text(record(coll_perf(7, op="AllGather", size=1024, us=44))))
    (row,), (of,) = rows(batches), ranks(batches)
    assert row["op"] == OPERATION_CODES["AllGather"]
    assert (row["sequence"], row["bytes"], row["duration_ns"], row["timing"]) == (7, 1024, 44_000, KERNEL_GPU)
    assert (row["dumped_at_ns"], row["started_at_ns"], row["peer"]) == (DUMPED_US * 1000, NO_TIME_NS, NO_NUMBER)
    assert (of["comm_hash"], of["rank"], of["nranks"], of["nnodes"], of["pid"]) == (0xAA498EFB3B18BC, 0, 4, 1, 41)
    assert batches[0].strings == ("node1", "")
    assert batches[-1].is_last


def test_algorithm_protocol_and_start_are_read_where_they_are_written() -> None:
    more = (
        ',"coll_algo":"RING","coll_proto":"LL","event_trace_ts":{"coll_start_ts":1752867229235059,"kernel_events":[]}'
    )
    (row,) = rows(read(text(record(coll_perf(1, more=more), version="v4.2"))))
    assert (row["algorithm"], row["protocol"], row["started_at_ns"]) == (1, 0, 1752867229235059000)


def test_marks_of_dumps_whose_records_carry_their_header_lose_nothing() -> None:
    """v4.1 and v4.2: a mark begins each dump, and each record says itself whose it is."""
    about = dump_v43(2)[0].replace('"v4.3"', '"v4.1"')
    records = [record(coll_perf(number), version="v4.1") for number in range(2)]
    batches = read(text(about, *records, about, records[0]))
    assert rows(batches)["sequence"].tolist() == [0, 1, 0]
    assert set(ranks(batches)["comm_hash"].tolist()) == {0xAA498EFB3B18BC}
    assert set(skipped(batches)) <= {"inspector_lost"}


def channels(*times: tuple[int, int]) -> str:
    events = ",".join(f'{{"channel_id":1,"kernel_start_ts":{start},"kernel_stop_ts":{stop}}}' for start, stop in times)
    return f',"event_trace_ts":{{"coll_start_ts":1752867229235059,"kernel_events":[{events}]}}'


@pytest.mark.parametrize(
    ("times", "span_us"),
    [
        (((1000, 1090), (1002, 1095)), (1000, 1095)),
        (((1000, 1090), (0, 0)), None),  # a channel of which nothing was seen
        (((1000, 0),), None),
        ((), None),
    ],
)
def test_channels_of_verbose_dumps_tell_when_the_kernel_began_and_ended(
    times: Sequence[tuple[int, int]], span_us: tuple[int, int] | None
) -> None:
    (row,) = rows(read(text(record(coll_perf(1, us=80, more=channels(*times)), version="v4.2"))))
    expected = (NO_TIME_NS, NO_TIME_NS) if span_us is None else tuple(1000 * each for each in span_us)
    assert (row["start_ns"], row["end_ns"]) == expected
    assert row["duration_ns"] == 80_000  # by the GPU's timer


def test_more_channels_than_any_kernel_has_are_refused() -> None:
    batches = read(text(record(coll_perf(1, more=channels(*[(1, 2)] * 2000)))))
    assert skipped(batches) == {"inspector_field": 1}


def test_sends_and_receives_are_rows_with_a_peer() -> None:
    (send, recv) = rows(read(text(record(p2p_perf(1)), record(p2p_perf(2, op="Recv", peer=3)))))
    assert (send["op"], send["peer"], send["sequence"]) == (OPERATION_CODES["Send"], 1, 1)
    assert (recv["op"], recv["peer"], recv["duration_ns"]) == (OPERATION_CODES["Recv"], 3, 20_000)


def test_records_without_header_belong_to_the_mark_in_front_of_them() -> None:
    batches = read(text(*dump_v43(2), mark(1, 1, comm_hash=0xB), f"{{{coll_perf(5)}}}", f"{{{p2p_perf(1)}}}"))
    assert rows(batches)["inspected_rank"].tolist() == [0, 0, 1, 1]
    assert ranks(batches)["comm_hash"].tolist() == [0xAA498EFB3B18BC, 0xB]
    assert skipped(batches) == {}


def test_records_beyond_what_the_mark_announces_are_nobodys() -> None:
    batches = read(text(*dump_v43(2), '{"header":{"id":"0x9","rank', f"{{{coll_perf(0)}}}", f"{{{coll_perf(1)}}}"))
    assert len(rows(batches)) == 2
    assert skipped(batches) == {"inspector_torn": 1, "inspector_without_header": 2}


def test_records_that_a_mark_announces_and_that_never_come_are_counted() -> None:
    batches = read(text(mark(3), f"{{{coll_perf(0)}}}", *dump_v43(1, first=3)))
    assert skipped(batches) == {"inspector_lost": 2}


def test_overwritten_records_are_a_gap() -> None:
    batches = read(text(mark(0, dropped=12)))
    assert [(gap.reason, gap.amount) for batch in batches for gap in batch.gaps] == [("inspector_overwritten", 12)]


def test_what_has_no_size_time_or_name_that_we_know_is_kept_as_unknown() -> None:
    # ncclTypeSize gives -1 for a type that it does not know, times the count as size_t.
    odd = coll_perf(1, op="AllGatherV", size=2**64 - 4096, us=0, timing="abacus")
    (row,) = rows(read(text(record(odd))))
    assert (row["op"], row["bytes"], row["duration_ns"]) == (UNKNOWN_OPERATION, NO_NUMBER, NO_TIME_NS)
    assert row["timing"] == UNKNOWN_TIMING
    assert np.isnan(row["busbw"])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (record(coll_perf(1))[:120], "inspector_torn"),
        ("some words", "not_inspector"),
        ('{"header":{"id":"zz","rank":0,"n_ranks":4}}', "inspector_field"),
        (record(coll_perf(1).replace('"coll_sn":1', '"coll_sn":-1')), "inspector_field"),
        (f"{{{metadata()}}}", "inspector_unknown"),
        (f"{{{coll_perf(1)}}}", "inspector_without_header"),
        (" " * 300_000, "too_long"),
    ],
)
def test_bad_lines_are_counted_by_reason_and_nothing_else_is_lost(line: str, reason: str) -> None:
    batches = read(text(record(coll_perf(1)), line, record(coll_perf(2))))
    assert skipped(batches) == {reason: 1}
    assert rows(batches)["sequence"].tolist() == [1, 2]
    assert rows(batches)["line"].tolist() == [1, 3]


def test_a_record_behind_a_torn_one_on_the_same_line_is_read() -> None:
    batches = read(text(record(coll_perf(1))[:90] + record(coll_perf(2))))
    assert rows(batches)["sequence"].tolist() == [2]
    assert skipped(batches) == {"inspector_torn": 1}


def test_a_last_line_without_its_end_is_read_if_it_is_whole() -> None:
    whole = text(record(coll_perf(1)))[:-1]
    assert rows(read(whole))["sequence"].tolist() == [1]
    assert skipped(read(whole[:-5])) == {"inspector_torn": 1}


@given(cuts=st.lists(st.integers(0, 2200), max_size=8))
def test_the_same_bytes_give_the_same_rows_however_they_are_cut(cuts: list[int]) -> None:
    data = text(*dump_v43(3), "oops", record(coll_perf(9)), mark(1, comm_hash=0xB), f"{{{coll_perf(1)}}}")
    made = reader()
    batches: list[Batch] = []
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for begin, end in pairwise(edges):
        batches += made.ingest_bytes(data[begin:end])
    batches += made.finish()
    assert rows(batches).tobytes() == rows(read(data)).tobytes()
    assert ranks(batches).tobytes() == ranks(read(data)).tobytes()
    assert [batch.begin for batch in batches[1:]] == [batch.end for batch in batches[:-1]]


def test_the_follower_reads_on_in_the_middle_of_a_dump(tmp_path: Path) -> None:
    path = tmp_path / "node1-pid41.log"
    whole = text(*dump_v43(2, comm_hash=0xA), *dump_v43(4, first=2, comm_hash=0xB))
    upto = whole.find(b'"coll_sn":4')
    path.write_bytes(whole[:upto])
    first = follower(tmp_path).poll(SECOND)
    path.write_bytes(whole)
    again = follower(tmp_path)
    again.reset({batch.source.key: Position(end=batch.end, end_line=batch.end_line) for batch in first})
    batches = [*again.poll(2 * SECOND), *again.close()]
    assert rows(first)["sequence"].tolist() == [0, 1, 2, 3]
    assert rows(batches)["sequence"].tolist() == [4, 5]
    assert rows(batches)["line"].tolist() == [7, 8]
    assert ranks(batches)["comm_hash"][rows(batches)["inspected_rank"]].tolist() == [0xB, 0xB]
    assert skipped(batches) == {}
    assert batches[0].begin == first[-1].end


def test_the_follower_leaves_logs_alone_and_the_logs_follower_leaves_dumps_alone(tmp_path: Path) -> None:
    (tmp_path / "nccl.log").write_text(operation_line() + "\n")
    (tmp_path / "node1-pid41.log").write_bytes(text(record(coll_perf(1))))
    dumps, logs = follower(tmp_path), LogFollower(["*"], root=tmp_path)
    assert [batch.source.name for batch in dumps.poll(SECOND)] == ["node1-pid41.log"]
    assert [batch.source.name for batch in logs.poll(SECOND)] == ["nccl.log"]
    assert dumps.statistics().skipped == {"file_not_inspector": 1}
    assert logs.statistics().skipped == {"file_not_a_log": 1}


def test_a_dump_that_is_written_anew_is_another_source(tmp_path: Path) -> None:
    path = tmp_path / "node1-pid41.log"
    path.write_bytes(text(record(coll_perf(1)), record(coll_perf(2))))
    followed = follower(tmp_path)
    assert len(rows(followed.poll(SECOND))) == 2
    path.write_bytes(text(record(coll_perf(3), at_us=DUMPED_US + 5)))
    batches = [batch for at in (2, 3, 4) for batch in followed.poll(at * SECOND)]
    assert rows(batches)["sequence"].tolist() == [3]
    assert len({batch.source.key for batch in batches}) == 2

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from nsys_made import DURATION_NS, EPOCH_NS, MadeExport, nccl_export

from ncclscope_agent.sources.nsys import export
from ncclscope_agent.sources.nsys.export import EXPORT_END, ExportLimits, check_complete, describe_export, read_export
from ncclscope_wire import tables
from ncclscope_wire.batch import Batch, Columns
from ncclscope_wire.errors import SourceError
from ncclscope_wire.records import CaptureSeen, Source, SourceKind
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

SOURCE = Source(kind=SourceKind.NSYS, name="chunks/made.sqlite", key="k")


def read(path: Path, *, host: str | None = None, begin: int = 0, limits: ExportLimits | None = None) -> list[Batch]:
    return list(read_export(path, source=SOURCE, host=host, begin=begin, limits=limits))


def capture_of(batches: list[Batch]) -> CaptureSeen:
    (capture,) = batches[-1].captures
    return capture


def whole(batches: list[Batch], rows: str) -> Columns:
    parts: list[Columns] = [getattr(batch, rows) for batch in batches]
    return np.concatenate(parts)


def strings(batches: list[Batch]) -> list[str]:
    return [text for batch in batches for text in batch.strings]


def reason_of(path: Path) -> str:
    with pytest.raises(SourceError) as caught:
        check_complete(path)
    assert str(path) in str(caught.value)
    return caught.value.reason


def skipped(batches: list[Batch]) -> dict[str, int]:
    return {reason: n for batch in batches for reason, n in batch.counts.skipped.items()}


def test_nccl_kernels_come_with_names_launches_and_utc_times(tmp_path: Path) -> None:
    batches = read(nccl_export().write(tmp_path / "e.sqlite"))
    kernels, templates, names = whole(batches, "kernels"), whole(batches, "kernel_templates"), strings(batches)
    assert [names[templates[k["template"]]["name"]] for k in kernels] == [
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL",
        "ncclDevKernel_SendRecv",
    ]
    assert (kernels["start_ns"] - EPOCH_NS).tolist() == [5_000, 12_000]
    assert (kernels["end_ns"] - EPOCH_NS).tolist() == [9_000, 13_500]
    assert (kernels["launch_start_ns"] - EPOCH_NS).tolist() == [300, 500]
    assert (kernels["launch_end_ns"] - EPOCH_NS).tolist() == [400, 600]
    assert kernels["launch_tid"].tolist() == [101, 101]
    assert kernels["correlation_id"].tolist() == [11, 12]
    assert kernels["flags"].tolist() == [0, 0]
    assert kernels["graph_node_id"].tolist() == [NO_NUMBER] * 2
    first = templates[0]
    assert names[first["host"]] == "node-0"
    assert [int(first[c]) for c in ("pid", "device_id", "stream_id", "grid_x", "block_x", "registers")] == [
        100, 0, 7, 24, 512, 96,
    ]  # fmt: skip


def test_the_capture_says_what_it_covers(tmp_path: Path) -> None:
    batches = read(nccl_export().write(tmp_path / "e.sqlite"))
    capture = capture_of(batches)
    assert (capture.start_ns, capture.end_ns) == (EPOCH_NS, EPOCH_NS + DURATION_NS)
    assert (capture.host, capture.host_is_recorded, capture.pids) == ("node-0", True, (100,))
    assert (capture.product_version, capture.schema_version) == ("2023.4.4.54", "3.7.2")
    assert (capture.nccl_kernels, capture.other_kernels, capture.graph_launches) == (2, 1, 0)
    assert capture.missing == ("NVTX_EVENTS", "DIAGNOSTIC_EVENT")
    assert [batch.is_last for batch in batches] == [False] * (len(batches) - 1) + [True]


def test_a_launch_is_looked_for_in_its_own_process(tmp_path: Path) -> None:
    made = MadeExport()
    made.session()
    for pid in (100, 200):
        made.kernel("ncclDevKernel_SendRecv", 5_000 + pid, 9_000, pid=pid, correlationId=1)
        made.launch(1, pid, pid + 1, pid=pid, tid=pid + 7)
    made.kernel("ncclDevKernel_SendRecv", 6_000, 9_000, pid=300, correlationId=1)
    kernels = whole(read(made.write(tmp_path / "e.sqlite")), "kernels")
    assert kernels["launch_tid"].tolist() == [107, 207, NO_NUMBER]
    assert kernels["launch_start_ns"].tolist() == [EPOCH_NS + 100, EPOCH_NS + 200, NO_TIME_NS]


def test_times_that_the_exporter_shifted_are_shifted_back(tmp_path: Path) -> None:
    made = MadeExport()
    made.session()
    made.add("META_DATA_EXPORT", name="EXPORT_CONFIG_TIME_SHIFT", value=str(EPOCH_NS + 5))
    made.kernel("ncclDevKernel_SendRecv", EPOCH_NS + 5 + 700, EPOCH_NS + 5 + DURATION_NS)
    made.kernel("gemm", EPOCH_NS + 5 + 100, EPOCH_NS + 5 + 200)
    batches = read(made.write(tmp_path / "e.sqlite"))
    kernels = whole(batches, "kernels")
    assert kernels["start_ns"].tolist() == [EPOCH_NS + 700]
    assert kernels["flags"].tolist() == [tables.KERNEL_CENSORED]
    assert whole(batches, "busy")[["start_ns", "end_ns"]].tolist() == [(EPOCH_NS + 100, EPOCH_NS + 200)]
    assert capture_of(batches).end_ns == EPOCH_NS + DURATION_NS


def test_kernels_without_usable_times_are_counted_and_left_out(tmp_path: Path) -> None:
    made = MadeExport()
    made.session()
    for name in ("ncclDevKernel_SendRecv", "gemm"):
        made.kernel(name, 0, 0)
        made.kernel(name, -5, 10)
        made.kernel(name, 20, 10)
        made.kernel(name, 20, 2**62)
        made.kernel(name, 20, 30)
    batches = read(made.write(tmp_path / "e.sqlite"))
    assert len(whole(batches, "kernels")) == 1
    assert (capture_of(batches).nccl_kernels, capture_of(batches).other_kernels) == (1, 1)
    assert skipped(batches) == {
        "kernel_without_times": 2,
        "kernel_before_capture": 2,
        "kernel_with_impossible_times": 4,
    }


def test_kernels_are_sorted_by_start_and_correlation_whatever_the_order_in_the_file(tmp_path: Path) -> None:
    made = MadeExport()
    made.session()
    order = [(start, correlation) for start in range(1, 40) for correlation in (3, 1, 2)]
    random.Random(1).shuffle(order)
    for start, correlation in order:
        made.kernel("ncclDevKernel_SendRecv", start, start + 5, correlationId=correlation)
    kernels = whole(read(made.write(tmp_path / "e.sqlite"), limits=ExportLimits(batch_rows=10)), "kernels")
    found = [(int(k["start_ns"]) - EPOCH_NS, int(k["correlation_id"])) for k in kernels]
    assert found == sorted(order)


def ranges_made() -> MadeExport:
    made = nccl_export()
    made.range("NCCL", -900, None, kind=75, domain=2)
    made.range("other", -900, None, kind=75, domain=2, pid=200)
    made.range("ncclAllReduce", 250, 450, domain=2)
    made.range("forward", 1_000, DURATION_NS)
    made.range("epoch", 2_000, None, kind=60)
    made.range("tick", 3_000, None, kind=34)
    made.range("theirs", 4_000, 5_000, pid=200, domain=2)
    made.range("early", -10, 50)
    made.range("unnamed", 6_000, 7_000, domain=9)
    return made


def test_nvtx_ranges_have_their_domain_and_end_as_far_as_known(tmp_path: Path) -> None:
    made = ranges_made()
    thread = (1 << 48) | (100 << 24) | 101
    registered = made.string("registered")
    made.add("NVTX_EVENTS", start=8_000, end=9_000, eventType=59, textId=registered, globalTid=thread)
    batches = read(made.write(tmp_path / "e.sqlite"))
    names, templates = strings(batches), whole(batches, "range_templates")
    found = [
        (
            names[templates[r["template"]]["text"]],
            names[templates[r["template"]]["domain"]],
            int(r["start_ns"]) - EPOCH_NS,
            None if r["end_ns"] == NO_TIME_NS else int(r["end_ns"]) - EPOCH_NS,
        )
        for r in whole(batches, "ranges")
    ]
    assert found == [
        ("ncclAllReduce", "NCCL", 250, 450),
        ("forward", "", 1_000, None),
        ("epoch", "", 2_000, None),
        ("tick", "", 3_000, 3_000),
        ("theirs", "other", 4_000, 5_000),
        ("unnamed", "domain 9", 6_000, 7_000),
        ("registered", "", 8_000, 9_000),
    ]
    assert templates["tid"].tolist()[0] == 101
    assert skipped(batches) == {"nvtx_before_capture": 1}


def test_of_too_many_ranges_nccls_and_the_longest_are_kept(tmp_path: Path) -> None:
    made = ranges_made()
    for at in range(50):
        made.range(f"op {at}", 10_000 + at, 10_000 + at + 3)
    batches = read(made.write(tmp_path / "e.sqlite"), limits=ExportLimits(ranges=3))
    names, templates = strings(batches), whole(batches, "range_templates")
    kept = [names[templates[r["template"]]["text"]] for r in whole(batches, "ranges")]
    assert kept == ["ncclAllReduce", "forward", "theirs"]
    (gap,) = batches[-1].gaps
    assert (gap.reason, gap.amount, gap.unit) == ("nvtx_limit", 53, "records")


def test_ranges_beyond_the_number_of_texts_are_counted(tmp_path: Path) -> None:
    made = nccl_export()
    for at in range(30):
        made.range(f"step {at % 10}", 1_000 + at, 2_000 + at)
    batches = read(made.write(tmp_path / "e.sqlite"), limits=ExportLimits(range_templates=4))
    assert len(whole(batches, "ranges")) == 12
    assert [(gap.reason, gap.amount) for gap in batches[-1].gaps] == [("nvtx_texts", 18)]


def test_kernels_outside_nccl_have_rows_of_their_own_and_are_no_computation(tmp_path: Path) -> None:
    made = nccl_export()
    made.kernel("mscclKernel_Sum_float_Simple", 20_000, 30_000)
    made.kernel("gemm", 3_000, 4_500, streamId=8)
    made.kernel("gemm", 50_000, 50_010, deviceId=1)
    batches = read(made.write(tmp_path / "e.sqlite"))
    busy = whole(batches, "busy")
    assert [(r["device_id"], r["start_ns"] - EPOCH_NS, r["end_ns"] - EPOCH_NS, r["kernels"]) for r in busy] == [
        (0, 1_000, 4_500, 2),
        (1, 50_000, 50_010, 1),
    ]
    assert batches[-1].counts.understood == {"other_kernel": 3}
    (outside,) = whole(batches, "outside")
    name = strings(batches)[whole(batches, "kernel_templates")[outside["template"]]["name"]]
    assert (name, outside["start_ns"] - EPOCH_NS) == ("MSCCL++/mscclKernel_Sum_float_Simple", 20_000)


def test_a_reader_that_goes_on_gives_exactly_the_rest(tmp_path: Path) -> None:
    path = ranges_made().write(tmp_path / "e.sqlite")
    limits = ExportLimits(batch_rows=1)
    everything = read(path, limits=limits)
    assert [batch.begin for batch in everything] == list(range(len(everything)))
    assert [batch.end for batch in everything[:-1]] == [batch.begin for batch in everything[1:]]
    assert everything[-1].end == EXPORT_END
    for position in range(len(everything)):
        rest = read(path, begin=position, limits=limits)
        assert [(batch.begin, batch.end) for batch in rest] == [(b.begin, b.end) for b in everything[position:]]
        for rows in ("kernels", "ranges", "busy"):
            expected = whole(everything[position:], rows)
            found = whole(rest, rows)
            time = "start_ns"
            assert found[time].tolist() == expected[time].tolist()
        assert capture_of(rest) == capture_of(everything)
    assert read(path, begin=EXPORT_END) == []


def test_dictionaries_begin_anew_where_a_reader_goes_on(tmp_path: Path) -> None:
    path = nccl_export().write(tmp_path / "e.sqlite")
    rest = read(path, begin=1, limits=ExportLimits(batch_rows=1))
    names, templates = strings(rest), whole(rest, "kernel_templates")
    (kernel,) = whole(rest, "kernels")
    assert names[templates[kernel["template"]]["name"]] == "ncclDevKernel_SendRecv"


@pytest.mark.parametrize(
    ("recorded", "given", "found", "is_recorded"),
    [
        ("node-7.cluster.example", "agent", "node-7", True),
        (None, "agent", "agent", False),
        (None, None, "made", False),
        ("", "agent", "agent", False),
    ],
)
def test_the_host_is_the_recorded_one_cut_at_the_first_dot(
    tmp_path: Path, recorded: str | None, given: str | None, found: str, is_recorded: bool
) -> None:
    made = MadeExport()
    made.session(host=recorded)
    made.kernel("ncclDevKernel_SendRecv", 1, 2)
    path = made.write(tmp_path / "e.sqlite")
    capture = capture_of(read(path, host=given))
    assert (capture.host, capture.host_is_recorded) == (found, is_recorded)
    assert describe_export(path).host == (found if is_recorded else None)


@pytest.mark.parametrize(
    "without",
    [
        ("NVTX_EVENTS.textId", "NVTX_EVENTS.domainId"),
        ("NVTX_EVENTS.end", "NVTX_EVENTS.text"),
        ("NVTX_EVENTS.globalTid",),
        ("CUPTI_ACTIVITY_KIND_KERNEL.graphNodeId", "CUPTI_ACTIVITY_KIND_KERNEL.gridX"),
        ("CUPTI_ACTIVITY_KIND_KERNEL.shortName",),
        ("CUPTI_ACTIVITY_KIND_RUNTIME",),
        ("CUPTI_ACTIVITY_KIND_RUNTIME.globalTid",),
        ("CUPTI_ACTIVITY_KIND_KERNEL.correlationId",),
        ("CUPTI_ACTIVITY_KIND_KERNEL.globalPid",),
        ("CUPTI_ACTIVITY_KIND_KERNEL.streamId", "CUPTI_ACTIVITY_KIND_KERNEL.deviceId"),
        ("ANALYSIS_DETAILS",),
        ("TARGET_INFO_SYSTEM_ENV",),
    ],
)
def test_kernels_are_read_whatever_else_is_missing(tmp_path: Path, without: tuple[str, ...]) -> None:
    batches = read(ranges_made().write(tmp_path / "e.sqlite", without=without), host="h")
    assert (whole(batches, "kernels")["start_ns"] - EPOCH_NS).tolist() == [5_000, 12_000]
    assert set(without) <= set(capture_of(batches).missing)


@pytest.mark.parametrize(
    "without", [("StringIds",), ("CUPTI_ACTIVITY_KIND_KERNEL",), ("CUPTI_ACTIVITY_KIND_KERNEL.start",)]
)
def test_an_export_without_kernels_still_says_what_it_covers(tmp_path: Path, without: tuple[str, ...]) -> None:
    batches = read(ranges_made().write(tmp_path / "e.sqlite", without=without))
    assert len(whole(batches, "kernels")) == 0
    assert set(without) <= set(capture_of(batches).missing)
    assert capture_of(batches).end_ns == EPOCH_NS + DURATION_NS


def test_without_a_session_start_times_count_from_zero_and_it_is_said(tmp_path: Path) -> None:
    path = nccl_export().write(tmp_path / "e.sqlite", without=("TARGET_INFO_SESSION_START_TIME",))
    batches = read(path)
    assert whole(batches, "kernels")["start_ns"].tolist() == [5_000, 12_000]
    assert "TARGET_INFO_SESSION_START_TIME" in capture_of(batches).missing


def test_graph_launches_are_counted(tmp_path: Path) -> None:
    made = nccl_export()
    made.add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", start=1, end=2)
    made.add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", start=3, end=4)
    assert capture_of(read(made.write(tmp_path / "e.sqlite"))).graph_launches == 2


def test_warnings_of_nsys_are_shown_once_short_and_without_paths(tmp_path: Path) -> None:
    made = nccl_export()
    lost = "Not all CUDA events might have been collected."
    for severity, text, process in [
        (1, "Number of CUDA events collected: 5", 0),
        (2, lost, 0),
        (2, lost, 1 << 24),
        (2, "No NVTX events collected. Does the process use NVTX?", 77 << 24),
        (3, "Cannot write '/home/somebody/data/report.qdstrm' " + "x" * 500, 0),
    ]:
        made.add("DIAGNOSTIC_EVENT", severity=severity, text=text, globalPid=process)
    first, second = capture_of(read(made.write(tmp_path / "e.sqlite"))).warnings
    assert first == lost
    assert second.startswith("Cannot write '<path>' xxx")
    assert len(second) == 300


def test_nothing_of_the_environment_leaves_the_export(tmp_path: Path) -> None:
    made = ranges_made()
    made.string("NCCL_SECRET=hunter2")
    made.string("nccl_secret_path=/home/hunter2")
    for name in ("DeviceEnvironment", "CpuInfo"):
        made.add("TARGET_INFO_SYSTEM_ENV", devStateName="d", name=name, nameEnum=1, value="hunter2")
    assert "hunter2" not in repr(read(made.write(tmp_path / "e.sqlite")))


def test_identifiers_beyond_two_to_the_53rd_stay_exact(tmp_path: Path) -> None:
    made = MadeExport()
    made.session()
    made.kernel("ncclDevKernel_SendRecv", 1, 2, graphNodeId=2**62 + 1, correlationId=2**53 + 1, streamId=2**53 + 3)
    batches = read(made.write(tmp_path / "e.sqlite"))
    (kernel,) = whole(batches, "kernels")
    assert (int(kernel["graph_node_id"]), int(kernel["correlation_id"])) == (2**62 + 1, 2**53 + 1)
    assert whole(batches, "kernel_templates")["stream_id"].tolist() == [2**53 + 3]


def test_an_older_metadata_table_is_accepted(tmp_path: Path) -> None:
    path = nccl_export().write(tmp_path / "e.sqlite")
    database = sqlite3.connect(path)
    database.execute("ALTER TABLE META_DATA_EXPORT RENAME TO EXPORT_META_DATA")
    database.execute("UPDATE EXPORT_META_DATA SET value = '2.9.1' WHERE name = 'EXPORT_SCHEMA_VERSION'")
    database.commit()
    database.close()
    assert capture_of(read(path)).schema_version == "2.9.1"


def test_an_unknown_major_of_the_schema_is_refused(tmp_path: Path) -> None:
    made = MadeExport()
    made.add("META_DATA_EXPORT", name="EXPORT_SCHEMA_VERSION", value="4.0.0")
    assert reason_of(made.write(tmp_path / "e.sqlite")) == "unknown_schema"


def test_each_unreadable_file_gives_the_reason_that_names_it(tmp_path: Path) -> None:
    whole_file = nccl_export().write(tmp_path / "whole.sqlite").read_bytes()
    contents = {
        "empty": b"",
        "incomplete": bytes(4096) + whole_file[4096:],
        "not_sqlite": random.Random(7).randbytes(4096),
    }
    for reason, content in contents.items():
        path = tmp_path / f"{reason}.sqlite"
        path.write_bytes(content)
        assert reason_of(path) == reason
    (tmp_path / "cut.sqlite").write_bytes(whole_file[: len(whole_file) // 2])
    assert reason_of(tmp_path / "cut.sqlite") == "incomplete"
    assert reason_of(tmp_path / "gone.sqlite") == "vanished"
    assert reason_of(tmp_path) == "not_a_file"


def test_a_database_without_the_last_table_is_incomplete(tmp_path: Path) -> None:
    path = nccl_export().write(tmp_path / "e.sqlite", without=("META_DATA_EXPORT",))
    assert reason_of(path) == "incomplete"


def test_a_database_of_another_program_is_told_from_an_export(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / "e.sqlite")
    database.execute("CREATE TABLE other (a)")
    database.commit()
    database.close()
    assert reason_of(tmp_path / "e.sqlite") == "not_nsys"


_HOLD_A_LOCK = """
import sqlite3, sys
writer = sqlite3.connect(sys.argv[1], isolation_level=None)
writer.execute(sys.argv[2])
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def locked(path: Path, begin: str) -> Generator[None, None, None]:
    """Another process has begun to write to a database; locks of one's own process are of no use to a test."""
    command = [sys.executable, "-c", _HOLD_A_LOCK, str(path), begin]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        yield


@pytest.mark.parametrize("begin", ["BEGIN EXCLUSIVE", "BEGIN IMMEDIATE"])
def test_a_locked_export_is_left_alone(tmp_path: Path, begin: str) -> None:
    path = nccl_export().write(tmp_path / "e.sqlite")
    with locked(path, begin):
        assert reason_of(path) == "locked"
    check_complete(path)


def test_an_export_that_is_read_can_be_written_and_nothing_appears_beside_it(tmp_path: Path) -> None:
    path = nccl_export().write(tmp_path / "e.sqlite")
    reading = read_export(path, source=SOURCE)
    next(reading)
    with locked(path, "BEGIN EXCLUSIVE"):
        assert list(tmp_path.iterdir()) == [path]
        assert list(reading)[-1].is_last


@pytest.mark.parametrize("ending", ["-journal", "-wal"])
def test_an_export_whose_writer_was_killed_is_not_read(tmp_path: Path, ending: str) -> None:
    path = nccl_export().write(tmp_path / "e.sqlite")
    Path(f"{path}{ending}").write_bytes(b"left")
    assert reason_of(path) == "incomplete"


def test_a_text_where_a_number_belongs_is_a_named_error(tmp_path: Path) -> None:
    made = nccl_export()
    made.kernel("gemm", 1, 2, deviceId="first")
    with pytest.raises(SourceError) as caught:
        read(made.write(tmp_path / "e.sqlite"))
    assert caught.value.reason == "malformed"


def test_an_export_that_changes_while_it_is_read_has_no_last_batch(tmp_path: Path) -> None:
    path = nccl_export().write(tmp_path / "e.sqlite")
    batches = read_export(path, source=SOURCE)
    next(batches)
    with path.open("ab") as file:
        file.write(b"more")
    with pytest.raises(SourceError) as caught:
        list(batches)
    assert caught.value.reason == "changed"


def test_a_report_of_a_broken_export_is_a_source_of_its_own(tmp_path: Path) -> None:
    batch = export.broken_export(SOURCE, SourceError("incomplete", "e is not finished"))
    assert (batch.source.name, batch.source.key) == (SOURCE.name, "k!incomplete")
    assert (batch.begin, batch.end, batch.is_last) == (0, 1, True)
    assert [(gap.reason, gap.amount, gap.unit) for gap in batch.gaps] == [("incomplete", 1, "files")]


def test_a_database_of_another_program_is_counted_and_no_loss() -> None:
    batch = export.broken_export(SOURCE, SourceError("not_nsys", "e is a SQLite file"))
    assert (batch.counts.skipped, batch.gaps) == ({"file_not_nsys": 1}, ())


def test_the_key_of_an_export_survives_renaming_and_not_rewriting(tmp_path: Path) -> None:
    path = nccl_export().write(tmp_path / "a.sqlite")
    key = export.export_key(path)
    moved = path.rename(tmp_path / "b.sqlite")
    assert export.export_key(moved) == key
    moved.unlink()
    ranges_made().write(moved)
    assert export.export_key(moved) != key

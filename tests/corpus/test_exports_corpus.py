"""Every real export of the corpus, against plain SQL."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from ncclscope_agent.sources.nsys.export import ExportLimits, describe_export, read_export
from ncclscope_wire.batch import Batch, Columns
from ncclscope_wire.errors import SourceError
from ncclscope_wire.records import Source, SourceKind
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

pytestmark = pytest.mark.corpus

UNREADABLE = {
    "local-nsys-2022/broken_exports/just_created_0_bytes.sqlite": "empty",
    "local-nsys-2022/broken_exports/killed_midway.sqlite": "incomplete",
    "pipit/test.sqlite": "not_nsys",
}

WITH_NCCL = {
    "zy-uestc-yccl/ring4.nsys2022.sqlite": 172,
    "zy-uestc-yccl/ring4.nsys2023.sqlite": 172,
    "gindachen-nsys-ai/mfu_2gpu_before.sqlite": 66,
}

LAUNCHED = """
SELECT s.value, k.correlationId, (k.globalPid >> 24) & 16777215, k.deviceId, k.streamId, k.gridX, k.blockX,
  k.start, k.end, r.start, r.end, r.globalTid & 16777215
FROM CUPTI_ACTIVITY_KIND_KERNEL k
JOIN StringIds s ON s.id = k.shortName
LEFT JOIN CUPTI_ACTIVITY_KIND_RUNTIME r ON r.correlationId = k.correlationId AND r.globalTid >> 24 = k.globalPid >> 24
WHERE s.value LIKE 'nccl%'
"""


def exports(corpus: Path) -> list[Path]:
    return sorted((corpus / "nsys").rglob("*.sqlite"))


def read(path: Path, limits: ExportLimits | None = None) -> list[Batch]:
    return list(read_export(path, source=Source(kind=SourceKind.NSYS, name=path.name, key=str(path)), limits=limits))


def whole(batches: list[Batch], rows: str) -> Columns:
    parts: list[Columns] = [getattr(batch, rows) for batch in batches]
    return np.concatenate(parts)


def asked(path: Path, query: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True)) as database:
        return database.execute(query).fetchall()


def epoch_of(path: Path) -> int:
    ((epoch,),) = asked(path, "SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME")
    assert isinstance(epoch, int)
    return epoch


def kernel_rows(batches: list[Batch]) -> list[tuple[object, ...]]:
    """As LAUNCHED, in UTC."""
    names = [text for batch in batches for text in batch.strings]
    templates = whole(batches, "kernel_templates")
    return [
        (
            names[template["name"]],
            *(int(kernel["correlation_id"]), int(template["pid"]), int(template["device_id"])),
            *(int(template["stream_id"]), int(template["grid_x"]), int(template["block_x"])),
            *(int(kernel["start_ns"]), int(kernel["end_ns"])),
            *(int(kernel["launch_start_ns"]), int(kernel["launch_end_ns"]), int(kernel["launch_tid"])),
        )
        for kernel in whole(batches, "kernels")
        for template in [templates[kernel["template"]]]
    ]


@pytest.mark.parametrize(("name", "amount"), WITH_NCCL.items())
def test_nccl_kernels_and_their_launches_agree_with_plain_sql(corpus: Path, name: str, amount: int) -> None:
    path = corpus / "nsys" / name
    epoch = epoch_of(path)
    expected = [
        (
            *row[:7],
            *(epoch + time if isinstance(time, int) else NO_TIME_NS for time in row[7:11]),
            NO_NUMBER if row[11] is None else row[11],
        )
        for row in asked(path, LAUNCHED)
    ]
    for limits in (ExportLimits(), ExportLimits(batch_rows=7)):
        found = kernel_rows(read(path, limits))
        assert len(found) == amount
        assert sorted(found, key=repr) == sorted(expected, key=repr)
        assert [row[7] for row in found] == sorted(int(str(row[7])) for row in expected)


def test_the_same_report_exported_by_two_versions_reads_the_same(corpus: Path) -> None:
    old, new = (read(corpus / "nsys" / "zy-uestc-yccl" / f"ring4.nsys{year}.sqlite") for year in (2022, 2023))
    assert kernel_rows(old) == kernel_rows(new)
    for rows in ("ranges", "busy"):
        assert whole(old, rows).tobytes() == whole(new, rows).tobytes()


def test_every_export_ends_in_a_capture_or_in_the_reason_why_not(corpus: Path) -> None:
    reasons: dict[str, str] = {}
    for path in exports(corpus):
        try:
            batches = read(path)
        except SourceError as error:
            reasons[str(path.relative_to(corpus / "nsys"))] = error.reason
            continue
        assert [batch.is_last for batch in batches].count(True) == 1
        assert len(batches[-1].captures) == 1
    assert reasons == UNREADABLE


def test_nvtx_ranges_and_marks_agree_with_plain_sql(corpus: Path) -> None:
    query = """SELECT n.start, coalesce(n.text, s.value) FROM NVTX_EVENTS n LEFT JOIN StringIds s ON s.id = n.textId
      WHERE eventType IN (34, 59, 60) AND n.start >= 0 ORDER BY n.start"""
    for name in (
        "zy-uestc-yccl/ring4.nsys2022.sqlite",
        "local-nsys-2022/capture_range_repeat/rep.2.sqlite",
        "local-nsys-2023.4/session_chunks/chunk_1.sqlite",
        "gindachen-nsys-ai/h100_2gpu_1s.sqlite",
        "pipit/saxpy-mpi-cuda_nsys_perlmutter0.sqlite",
    ):
        path = corpus / "nsys" / name
        batches = read(path)
        names, rows = [text for b in batches for text in b.strings], whole(batches, "ranges")
        texts = [names[text] for text in whole(batches, "range_templates")["text"].tolist()]
        starts = (rows["start_ns"] - epoch_of(path)).tolist()
        found = [(start, texts[template]) for start, template in zip(starts, rows["template"].tolist(), strict=True)]
        assert sorted(found) == sorted((start, str(text)[:200]) for start, text in asked(path, query))


def test_times_normalised_by_the_exporter_give_the_same_utc(corpus: Path) -> None:
    """Both exports are of one program run twice; each must lie in its own session."""
    path = corpus / "nsys" / "local-nsys-2023.4" / "nccl_like_profile" / "nccl_utc.sqlite"
    batches = read(path)
    (capture,) = batches[-1].captures
    ((first,),) = asked(path, "SELECT min(start) FROM NVTX_EVENTS WHERE eventType = 59")
    starts = whole(batches, "ranges")["start_ns"]
    assert int(starts.min()) == first
    assert capture.start_ns <= int(starts.min()) <= int(starts.max()) <= capture.end_ns
    assert capture.start_ns == epoch_of(path)


def test_marks_that_carry_the_wall_clock_lie_where_it_says(corpus: Path) -> None:
    path = corpus / "nsys" / "local-nsys-2022" / "session_chunks" / "chunk_0003.sqlite"
    batches = read(path)
    names, templates = [text for b in batches for text in b.strings], whole(batches, "range_templates")
    off = []
    for mark in whole(batches, "ranges"):
        digits = [
            part for part in names[templates[mark["template"]]["text"]].replace("=", " ").split() if len(part) == 19
        ]
        off += [abs(int(mark["start_ns"]) - int(digits[0]))] if digits and digits[0].isdigit() else []
        assert mark["start_ns"] == mark["end_ns"]
    assert len(off) > 90
    assert max(off) < 1_000_000


def test_the_host_is_recorded_without_its_domain_in_every_complete_export(corpus: Path) -> None:
    for path in exports(corpus):
        relative = str(path.relative_to(corpus / "nsys"))
        if relative in UNREADABLE:
            continue
        host = describe_export(path).host
        assert (host is None) == ("healthy" in relative), relative
        assert host is None or "." not in host

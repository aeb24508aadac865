"""What lies under a path is told by its content; what is double, hidden or linked is left out."""

from __future__ import annotations

import os
from pathlib import Path

from agent.log_samples import operation_line
from nsys_made import nccl_export

from ncclscope.discover import Discovery, discover
from ncclscope_agent.files.recognise import FileKind

_REPORT = b"\0\1\2 a report of nsys"


def _log(path: Path, *, count: int = 1) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(operation_line(count=count) + "\n")
    return path


def _names(discovery: Discovery) -> list[str]:
    return [found.name for found in discovery.files]


def test_folders_are_walked_in_order_and_names_are_relative_to_what_was_asked_for(tmp_path: Path) -> None:
    _log(tmp_path / "b" / "deep" / "rank1.log", count=1)
    _log(tmp_path / "a.log", count=2)
    _log(tmp_path / "b" / "rank0.log", count=3)
    found = discover([tmp_path])
    assert _names(found) == ["a.log", "b/deep/rank1.log", "b/rank0.log"]
    assert [each.size_bytes for each in found.files] == [each.path.stat().st_size for each in found.files]
    assert not found.skipped


def test_a_file_that_is_asked_for_has_its_own_name(tmp_path: Path) -> None:
    assert _names(discover([_log(tmp_path / "deep" / "rank.log")])) == ["rank.log"]


def test_kinds_are_told_by_content_and_can_be_asked_for(tmp_path: Path) -> None:
    _log(tmp_path / "looks-like.sqlite")
    nccl_export().write(tmp_path / "looks-like.log")
    (tmp_path / "report.nsys-rep").write_bytes(_REPORT)
    found = discover([tmp_path])
    assert [each.name for each in found.of_kind(FileKind.NCCL_LOG)] == ["looks-like.sqlite"]
    assert [each.name for each in found.of_kind(FileKind.NSYS_SQLITE, FileKind.NSYS_REPORT)] == [
        "looks-like.log",
        "report.nsys-rep",
    ]


def test_other_files_are_counted_by_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "empty.log").touch()
    (tmp_path / "notes.txt").write_text("nothing of that")
    (tmp_path / "photo.png").write_bytes(b"\x89PNG\r\n\x1a\n\0")
    found = discover([tmp_path])
    assert found.files == []
    assert found.skipped == {"not_read_empty": ["empty.log"], "not_read_unknown": ["notes.txt", "photo.png"]}


def test_hidden_files_and_folders_are_not_looked_at(tmp_path: Path) -> None:
    _log(tmp_path / ".rank.log.swp")
    _log(tmp_path / ".git" / "rank.log")
    found = discover([tmp_path])
    assert found.files == []
    assert not found.skipped


def test_links_in_a_folder_are_not_followed_and_one_that_is_asked_for_is(tmp_path: Path) -> None:
    log = _log(tmp_path / "elsewhere" / "rank.log")
    folder = tmp_path / "asked"
    folder.mkdir()
    (folder / "link.log").symlink_to(log)
    (folder / "round").symlink_to(folder)
    (folder / "broken.log").symlink_to(tmp_path / "nowhere")
    assert discover([folder]).files == []
    assert _names(discover([folder / "link.log"])) == ["link.log"]


def test_equal_content_is_read_once_whatever_its_name(tmp_path: Path) -> None:
    for name in ("a.log", "b.log", "copy/a.log"):
        _log(tmp_path / name)
    _log(tmp_path / "c.log", count=2)
    found = discover([tmp_path])
    assert _names(found) == ["a.log", "c.log"]
    assert found.skipped == {"duplicate": ["b.log", "copy/a.log"]}


def test_a_file_asked_for_twice_is_read_once(tmp_path: Path) -> None:
    log = _log(tmp_path / "a.log")
    found = discover([log, tmp_path])
    assert _names(found) == ["a.log"]
    assert found.skipped == {"duplicate": ["a.log"]}


def test_equal_sizes_alone_make_no_duplicate(tmp_path: Path) -> None:
    first, second = _log(tmp_path / "a.log", count=1), _log(tmp_path / "b.log", count=2)
    assert first.stat().st_size == second.stat().st_size
    assert _names(discover([tmp_path])) == ["a.log", "b.log"]


def test_a_report_beside_its_export_is_left_to_the_export(tmp_path: Path) -> None:
    nccl_export().write(tmp_path / "rank0.sqlite")
    (tmp_path / "rank0.nsys-rep").write_bytes(_REPORT)
    (tmp_path / "rank1.nsys-rep").write_bytes(_REPORT + b"another")
    found = discover([tmp_path])
    assert _names(found) == ["rank0.sqlite", "rank1.nsys-rep"]
    assert found.skipped == {"report_with_export": ["rank0.nsys-rep"]}


def test_a_report_is_read_where_its_export_is_not(tmp_path: Path) -> None:
    (tmp_path / "rank0.sqlite").touch()
    report = tmp_path / "rank0.nsys-rep"
    report.write_bytes(_REPORT)
    assert _names(discover([tmp_path])) == ["rank0.nsys-rep"]
    nccl_export().write(tmp_path / "rank1.sqlite")
    other = tmp_path / "rank1.nsys-rep"
    other.write_bytes(_REPORT + b"another")
    assert _names(discover([other])) == ["rank1.nsys-rep"]


def test_what_is_no_plain_file_is_left_out(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.log")
    _log(tmp_path / "a.log")
    assert _names(discover([tmp_path])) == ["a.log"]


def test_an_empty_folder_gives_nothing(tmp_path: Path) -> None:
    found = discover([tmp_path])
    assert (found.files, dict(found.skipped)) == ([], {})


def test_means_of_inspector_for_prometheus_are_named_and_not_read(tmp_path: Path) -> None:
    (tmp_path / "nccl_inspector_metrics_GPU-1.prom").write_text('nccl_p2p_bus_bandwidth_gbs{nranks="8"} 41.2\n')
    found = discover([tmp_path])
    assert not found.files
    assert found.skipped == {"not_read_inspector_metrics": ["nccl_inspector_metrics_GPU-1.prom"]}

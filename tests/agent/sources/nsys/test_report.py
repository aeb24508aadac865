from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from nsys_made import copying_nsys, nccl_export, stand_in_for_nsys

from ncclscope_agent.sources.nsys.report import export_arguments, export_of, export_report
from ncclscope_wire.errors import SourceError


def report_in(folder: Path) -> Path:
    folder.mkdir()
    path = folder / "chunk.1.nsys-rep"
    path.write_bytes(b"a report")
    return path


def test_the_command_is_what_every_nsys_understands() -> None:
    arguments = export_arguments("nsys", Path("a b.nsys-rep"), Path("a b.sqlite.tmp"))
    assert arguments[:2] == ["nsys", "export"]
    assert arguments[-1] == "a b.nsys-rep"
    assert "--output=a b.sqlite.tmp" in arguments


def test_an_export_appears_beside_its_report_and_leaves_nothing_else(tmp_path: Path) -> None:
    report = report_in(tmp_path / "r")
    made = export_report(report, nsys=copying_nsys(tmp_path))
    assert made == report.parent / "chunk.1.sqlite"
    assert sorted(path.name for path in report.parent.iterdir()) == ["chunk.1.nsys-rep", "chunk.1.sqlite"]


def test_an_export_that_lies_beside_the_report_is_taken(tmp_path: Path) -> None:
    report = report_in(tmp_path / "r")
    nccl_export().write(export_of(report))
    assert export_report(report, nsys="/nonexistent/nsys") == export_of(report)


def test_a_missing_nsys_is_said_with_what_to_do(tmp_path: Path) -> None:
    report = report_in(tmp_path / "r")
    with pytest.raises(SourceError, match=r"nsys export --type sqlite -o chunk\.1\.sqlite") as caught:
        export_report(report, nsys="/nonexistent/nsys")
    assert caught.value.reason == "nsys_missing"


@pytest.mark.parametrize(
    ("body", "reason", "within_s"),
    [
        ('sys.exit("cannot import")', "nsys_failed", 60.0),
        ('open(arguments["--output"], "w")', "empty", 60.0),  # nsys exits 0 when it lost its lock
        ("pass", "vanished", 60.0),
        ("import time; time.sleep(60)", "nsys_timeout", 0.5),
    ],
)
def test_a_failed_export_is_named_and_leaves_no_file(tmp_path: Path, body: str, reason: str, within_s: float) -> None:
    report = report_in(tmp_path / "r")
    with pytest.raises(SourceError) as caught:
        export_report(report, nsys=stand_in_for_nsys(tmp_path, body), timeout_s=within_s)
    assert caught.value.reason == reason
    assert list(report.parent.iterdir()) == [report]


@pytest.mark.skipif(shutil.which("nsys") is None, reason="needs Nsight Systems; install nsys to run it")
def test_a_report_that_is_none_is_refused_by_nsys_itself(tmp_path: Path) -> None:
    with pytest.raises(SourceError):
        export_report(report_in(tmp_path / "r"))

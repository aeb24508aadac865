"""Every log of the corpus, held against a count of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from agent.log_samples import read_log

from ncclscope_agent.files.recognise import ENOUGH_BYTES, FileKind, recognise

pytestmark = pytest.mark.corpus

_INTACT = re.compile(
    r"[^\s:/%\[\]]+:\d+:\d+ (?:\[-?\d+\] )?(?:(?!NCCL )\S.{0,160}? )?NCCL INFO \w+: opCount [0-9a-f]+ "
    r"sendbuff (?:0x[0-9a-f]+|\(nil\)) recvbuff (?:0x[0-9a-f]+|\(nil\)) count \d+ datatype -?\d+ op -?\d+ root -?\d+ "
    r"comm 0x[0-9a-f]+ \[nranks=\d+\] stream (?:0x[0-9a-f]+|\(nil\))(?: task -?\d+ globalrank -?\d+)?\s*$"
)
"""A whole operation line, from its host to the end of the physical line; written for this test alone."""

_FOLDERS = ("nccl_logs", "nccl_tests", "inspector")


def logs_of(corpora: list[Path]) -> list[Path]:
    files = [
        path
        for corpus in corpora
        for folder in _FOLDERS
        for path in sorted((corpus / folder).rglob("*"))
        if path.is_file()
    ]
    return [path for path in files if recognise(path.read_bytes()[:ENOUGH_BYTES], path.name) is FileKind.NCCL_LOG]


def test_each_log_gives_one_row_per_intact_operation_line(corpora: list[Path]) -> None:
    total = 0
    for path in logs_of(corpora):
        data = path.read_bytes()
        log = read_log(data, [len(data) // 3])
        intact = [
            number
            for number, line in enumerate(data.decode("latin-1").split("\n"), 1)
            if ": opCount " in line and _INTACT.search(line)
        ]
        assert [operation["line"] for operation in log.operations] == intact, path
        assert log.end == len(data)
        total += len(intact)
    assert total > 20_000


def test_each_log_is_counted_line_by_line(corpora: list[Path]) -> None:
    for path in logs_of(corpora):
        data = path.read_bytes()
        log = read_log(data)
        physical = data.count(b"\n") + (not data.endswith(b"\n"))
        assert log.end_line == physical, path
        assert sum(log.understood.values()) + sum(log.skipped.values()) >= physical, path


def test_random_bytes_of_the_corpus_raise_nothing(corpus: Path) -> None:
    for path in sorted((corpus / "nccl_logs").rglob("*")):
        if path.is_file() and path.suffix in {".png", ".xml", ".json", ".csv"}:
            assert not read_log(path.read_bytes()[:200_000]).operations


def test_torn_lines_of_a_shared_file_are_counted_and_whole_records_recovered(corpus: Path) -> None:
    log = read_log((corpus / "nccl_logs/raddet-single-gpu/nccl_debug.log").read_bytes())
    assert len(log.communicators) == 2
    assert log.skipped["torn"] > 0


def test_a_communicator_of_each_generation_is_read(corpora: list[Path]) -> None:
    events = [event for path in logs_of(corpora) for event in read_log(path.read_bytes()).communicators]
    assert any(event.comm_id is None and event.bus_id is not None for event in events)  # up to 2.15
    assert any(event.comm_id is None and event.bus_id is None for event in events)  # 2.4
    assert any(event.parent is not None and event.split_count is not None for event in events)  # splits, 2.24 on
    assert any(event.api == "ncclCommInitRankConfig" for event in events)
    assert all(0 <= event.rank < event.nranks for event in events if event.rank >= 0)

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


def test_random_bytes_of_the_corpus_raise_nothing(corpus: Path) -> None:
    for path in sorted((corpus / "nccl_logs").rglob("*")):
        if path.is_file() and path.suffix in {".png", ".xml", ".json", ".csv"}:
            assert not read_log(path.read_bytes()[:200_000]).operations

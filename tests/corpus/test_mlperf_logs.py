"""Ranks, hosts, jobs and communicators of complete MLPerf Training logs, as their own Init lines say."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from ncclscope.offline import run_offline
from ncclscope_service.store.records import FindingKind
from ncclscope_service.store.settings import PipelineSettings
from ncclscope_service.store.tables import Store

pytestmark = [pytest.mark.corpus]

_INIT = re.compile(
    rb"([A-Za-z0-9._-]+):(\d+):\d+ (?:\[\d+\] )?NCCL INFO (?:\w+ )?comm (0x[0-9a-f]+) rank (\d+) nranks (\d+) "
    rb"cudaDev (\d+)[^\n]{0,80}?busId ([0-9a-f]+)(?: commId (0x[0-9a-f]+))?[^\n]{0,40}Init (?:START|COMPLETE)"
)
"""Written for this test alone."""


def _second(corpus: Path) -> Path:
    folder = corpus.parent / "corpus2" / "nccl_logs"
    if not folder.is_dir():
        pytest.skip(f"needs the second corpus, and {folder} is not a folder")
    return folder


def _logs(corpus: Path) -> list[Path]:
    return [path for path in sorted(_second(corpus).glob("mlcommons-*/*")) if path.name != "SOURCE.txt"]


def _store(path: Path) -> Store:
    return run_offline([path], job="job", settings=PipelineSettings()).pipeline.store


def test_every_rank_and_host_is_the_one_that_its_init_lines_print(corpus: Path) -> None:
    ranks = 0
    for path in _logs(corpus):
        store, lines = _store(path), _INIT.findall(path.read_bytes())
        largest = max((int(line[4]) for line in lines), default=0)
        printed = {
            (line[0].decode().partition(".")[0], int(line[1]), int(line[5])): int(line[3])
            for line in lines
            if int(line[4]) == largest
        }
        found = {
            (store.processes[each.process].host, store.processes[each.process].pid, each.cuda_device): each.global_rank
            for each in store.members
        }
        assert found == printed, path.name
        assert not any(each.global_rank_is_inferred for each in store.members)
        assert len(set(found.values())) <= largest
        ranks += len(set(found.values()))
    assert ranks == 168


def test_communicators_are_as_many_as_init_lines_tell(corpus: Path) -> None:
    for path in _logs(corpus):
        lines = {line[:5] + line[7:] for line in _INIT.findall(path.read_bytes())}
        named: dict[int, set[bytes]] = defaultdict(set)
        unnamed: Counter[tuple[int, int]] = Counter()
        for _, _, _, rank, size, comm_id in lines:
            if comm_id:
                named[int(size)].add(comm_id)
            else:
                unnamed[int(size), int(rank)] += 1
        expected = {size: len(ids) for size, ids in named.items()}
        expected |= {size: amount for (size, rank), amount in unnamed.items() if rank == 0}
        found = Counter(each.size for each in _store(path).listed_communicators())
        assert found == expected, path.name


def test_jobs_in_one_folder_are_told_apart(corpus: Path) -> None:
    store = _store(_second(corpus) / "mlcommons-training_results_v2.0")
    ranks: dict[str, set[int | None]] = defaultdict(set)
    for member in store.members:
        ranks[store.process_job[member.process]].add(member.global_rank)
    assert sorted(len(of) for of in ranks.values()) == [8, 8, 32, 64]
    assert all(of == set(range(len(of))) for of in ranks.values())
    assert {finding.kind for finding in store.findings} == {FindingKind.MISCONFIGURATION}, "SHARP did not work there"

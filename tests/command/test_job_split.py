"""Several jobs in one folder are told apart where what they hold is whole, and are one where it may be one."""

from __future__ import annotations

from pathlib import Path

from ncclscope.discover import FoundFile, discover
from ncclscope.job_split import jobs_of_files
from ncclscope.offline import run_offline
from ncclscope_service.export.selection import select
from ncclscope_service.export.terminal import terminal_report
from ncclscope_service.store.settings import PipelineSettings


def _init(rank: int, nranks: int, *, comm_id: str | None = None, host: str = "node1", pid: int = 100) -> str:
    named = "" if comm_id is None else f" commId {comm_id}"
    return (
        f"{host}:{pid + rank}:{pid + rank + 1} [{rank}] NCCL INFO comm 0x55{rank:02x} rank {rank} nranks {nranks} "
        f"cudaDev {rank} busId {0x1000 * (rank + 1):x}{named} - Init COMPLETE\n"
    )


def _jobs(folder: Path) -> list[str]:
    found: list[FoundFile] = discover([folder]).files
    return list(jobs_of_files(found, job="j").values())


def test_two_files_that_hold_a_whole_job_each_are_two_jobs(tmp_path: Path) -> None:
    for name, comm_id, pid in (("a.log", "0xa1", 100), ("b.log", "0xb2", 200)):
        (tmp_path / name).write_text("".join(_init(rank, 2, comm_id=comm_id, pid=pid) for rank in range(2)))
    assert _jobs(tmp_path) == ["j-1", "j-2"]
    store = run_offline([tmp_path], job="j", settings=PipelineSettings()).pipeline.store
    assert store.process_job == ["j-1", "j-1", "j-2", "j-2"]
    assert [member.global_rank for member in store.members] == [0, 1, 0, 1]
    assert "jobs        j-1 (2 processes on 1 host), j-2 (2 processes on 1 host)" in terminal_report(select(store))


def test_logs_of_the_ranks_of_one_communicator_are_one_job_and_stay_so_beside_another(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"a{rank}.log").write_text(_init(rank, 2, comm_id="0xa1"))
    assert _jobs(tmp_path) == ["j", "j"]
    (tmp_path / "b.log").write_text("".join(_init(rank, 4, host="node2") for rank in range(4)))
    assert _jobs(tmp_path) == ["j-1", "j-1", "j-2"]


def test_files_of_one_process_are_of_its_job_whatever_communicators_they_name(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("".join(_init(rank, 2, comm_id="0xa1") for rank in range(2)))
    (tmp_path / "a.log.1").write_text("".join(_init(rank, 2, comm_id="0xb2") for rank in range(2)))
    assert _jobs(tmp_path) == ["j", "j"]


def test_what_is_not_whole_may_be_a_part_of_one_job(tmp_path: Path) -> None:
    for name, first in (("a.log", 0), ("b.log", 2)):  # NCCL before 2.16, a file for each host
        lines = (_init(rank, 4, host=name[0], pid=100 * first + 100) for rank in (first, first + 1))
        (tmp_path / name).write_text("".join(lines))
    assert _jobs(tmp_path) == ["j", "j"]


def test_dumps_of_inspector_are_tied_by_their_communicators(tmp_path: Path) -> None:
    for name, comm_id, rank in (("a0", "0xa1", 0), ("a1", "0xa1", 1), ("b0", "0xb2", 0), ("b1", "0xb2", 1)):
        (tmp_path / f"{name}.log").write_text(
            f'{{"header":{{"id":"{comm_id}","rank":{rank},"n_ranks":2,"nnodes":1}},"metadata":'
            f'{{"inspector_output_format_version":"v4.0","git_rev":"","hostname":"{name}","pid":7}}}}\n'
        )
    assert _jobs(tmp_path) == ["j-1", "j-1", "j-2", "j-2"]

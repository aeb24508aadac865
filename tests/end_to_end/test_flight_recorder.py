"""Dumps of several ranks, as `analyze` reads them: the one that misses a collective is named, with the stacks."""

from __future__ import annotations

from pathlib import Path

from agent.flight_samples import as_pytorch_pickles, dump, entry

from ncclscope.offline import OfflineRun, run_offline
from ncclscope_agent.files.flight_dumps import FlightDumpFollower
from ncclscope_service.export.selection import select
from ncclscope_service.export.summary import level
from ncclscope_service.export.terminal import terminal_report
from ncclscope_service.pipeline import Pipeline
from ncclscope_service.store.records import Finding
from ncclscope_service.store.settings import PipelineSettings


def _analysed(folder: Path, dumps: dict[int, dict[str, object]]) -> OfflineRun:
    for rank, content in dumps.items():
        (folder / f"nccl_trace_rank_{rank}").write_bytes(as_pytorch_pickles({**content, "host_name": f"node{rank}"}))
    return run_offline([folder], job="job", settings=PipelineSettings())


def _finding(folder: Path, dumps: dict[int, dict[str, object]]) -> Finding:
    (finding,) = _analysed(folder, dumps).pipeline.store.findings
    return finding


def test_the_rank_that_has_not_called_what_others_wait_in_is_named(tmp_path: Path) -> None:
    dumps = {rank: dump(entry(1), entry(2), entry(3, "started")) for rank in (0, 1, 3)}
    finding = _finding(tmp_path, {**dumps, 2: dump(entry(1), entry(2))})
    assert finding.ranks == (2,)
    assert finding.summary == (
        "rank 2 has not called all_reduce 3 of default_pg; ranks 0, 1 and 3 are waiting (PyTorch's flight recorder)"
    )
    stacks = finding.evidence["stacks"]
    assert isinstance(stacks, dict)
    assert stacks["rank 2, in all_reduce 2"] == ["train.py:102 in train_step", "train.py:7 in main"]


def test_ranks_that_called_something_else_are_named(tmp_path: Path) -> None:
    other = entry(3, "scheduled", profiling_name="nccl:all_gather")
    dumps = {rank: dump(entry(1), entry(2), entry(3, "started")) for rank in (0, 1, 3)}
    finding = _finding(tmp_path, {**dumps, 2: dump(entry(1), entry(2), other)})
    assert finding.ranks == (2,)
    assert "rank 2 called all_gather [[3, 4]]" in finding.summary


def test_ranks_without_a_dump_are_not_accused(tmp_path: Path) -> None:
    finding = _finding(tmp_path, {rank: dump(entry(1), entry(2, "started")) for rank in (0, 1, 3)})
    assert finding.ranks == ()
    assert finding.summary.endswith("rank 2 left no dump (PyTorch's flight recorder)")


def test_ranks_that_wait_for_nothing_are_no_finding(tmp_path: Path) -> None:
    run = _analysed(tmp_path, {rank: dump(entry(1), entry(2)) for rank in range(4)})
    assert not run.pipeline.store.findings
    assert run.files_read == 4


def test_a_report_of_dumps_alone_says_what_they_are_and_what_they_lack(tmp_path: Path) -> None:
    selection = select(_analysed(tmp_path, {rank: dump(entry(1)) for rank in range(2)}).pipeline.store)
    assert level(selection) == "Flight Recorder dumps only"
    text = terminal_report(selection)
    assert "(Flight Recorder dumps only)" in text
    assert "Findings only" in text
    assert "--include-blobs" not in text, "no recording is there to be exported otherwise"


def test_a_dump_that_cannot_be_read_is_a_gap(tmp_path: Path) -> None:
    (tmp_path / "nccl_trace_rank_0").write_bytes(as_pytorch_pickles(dump(entry(1)))[:-20])
    run = run_offline([tmp_path], job="job", settings=PipelineSettings())
    assert dict(run.skipped) == {"unreadable_dump": ["nccl_trace_rank_0"]}


def test_two_agents_that_watch_a_shared_folder_give_one_finding_while_the_job_hangs(tmp_path: Path) -> None:
    pipeline = Pipeline()
    agents = {name: FlightDumpFollower([str(tmp_path / "nccl_trace_rank_*")]) for name in ("node0", "node1")}
    for now, rank in enumerate((0, 1, 3, 2)):
        content = dump(entry(1), entry(2), *([] if rank == 2 else [entry(3, "started")]))
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(as_pytorch_pickles(content))
        for name, follower in agents.items():
            for batch in follower.poll(now):
                pipeline.ingest_batch(batch, agent=name, session=name, job="job")
        pipeline.process_backlog(now * 1_000_000_000)
    (finding,) = pipeline.store.findings
    assert finding.ranks == (2,)
    assert finding.summary.startswith("rank 2 has not called all_reduce 3 of default_pg; ranks 0, 1 and 3 are waiting")

"""The script for a real run on a GPU, as far as it can be tried without one."""

from __future__ import annotations

import dataclasses
import socket
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from benchmarks.real_run import record
from benchmarks.real_run.__main__ import print_cost
from benchmarks.real_run.score import Launch, Line, Score, score, truth

from ncclscope.offline import run_offline
from ncclscope_agent.nccl_settings.advice import NcclVersion
from ncclscope_service.store.records import Ending, FindingKind
from ncclscope_service.store.settings import PipelineSettings

NCCL = NcclVersion(2, 28, 3)
VARIANTS = {variant.name: variant for variant in record.variants(nsys=True, inspector=Path("inspector.so"))}


CAPTURE = Path(__file__).with_name("capture.tar.xz")
"""Logs and traces of real runs on one H200: docs/benchmarks.md, "On a GPU". Traces hold only what NCCL launched."""


ON_H100 = Path(__file__).with_name("h100.tar.xz")
"""Real runs on one H100: logs, outputs and Flight Recorder of 4 ranks of which rank 1 stalled at step 20, or was
killed; logs of 2 ranks with NCCL 2.31.2.
"""


@pytest.fixture(scope="module")
def on_h100(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs of `ON_H100`."""
    folder = tmp_path_factory.mktemp("h100")
    with tarfile.open(ON_H100) as kept:
        kept.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs of `CAPTURE`."""
    folder = tmp_path_factory.mktemp("real")
    with tarfile.open(CAPTURE) as kept:
        kept.extractall(folder, filter="data")
    return folder


@pytest.mark.parametrize(
    ("run", "lines"),
    [
        ("nccl-2.28.9-2-logs_and_trace", 852),
        ("nccl-2.28.9-4-logs_and_trace", 768),
        ("nccl-2.27.5-direct-2-logs_and_trace", 524),
    ],
)
def test_lines_with_stamps_are_given_the_kernels_of_the_trace(real: Path, run: str, lines: int) -> None:
    assert score(real / run) == Score(known=lines, given=lines, right=lines)


@pytest.mark.parametrize(
    "run",
    [
        "nccl-2.18.3-direct-2-logs_and_trace",
        "nccl-2.21.5-direct-2-graph",
        "nccl-2.28.9-2-calls_without_stamps_and_trace",
    ],
)
def test_kernels_of_lines_without_stamps_in_the_middle_of_a_job_are_guesses(real: Path, run: str) -> None:
    found = score(real / run)
    assert found.given == 0
    assert found.guessed > 0


def test_ranks_that_share_a_gpu_are_said_to_and_none_of_them_is_called_late(real: Path) -> None:
    for run, ranks in (("nccl-2.28.9-2-logs_and_trace", (0, 1)), ("nccl-2.28.9-4-logs_and_trace", (0, 1, 2, 3))):
        done = run_offline([real / run / "logs", real / run / "traces"], job="job", settings=PipelineSettings())
        (found,) = done.pipeline.store.findings
        assert (found.kind, found.ranks, found.evidence["bus_id"]) == (FindingKind.MISCONFIGURATION, ranks, "60")


@pytest.mark.parametrize(
    ("run", "inputs", "ending", "words"),
    [
        ("stalled", ["logs", "output"], Ending.HANG, "all waits end at rank 1 (node)"),
        ("stalled", ["logs"], Ending.HANG, "after 80.7 s without an operation connections broke"),
        ("killed", ["logs", "output"], Ending.KILLED, "rank 1 (node) ended first, without a word"),
        ("killed", ["logs"], Ending.KILLED, "rank 1 (node) ended first, without a word"),
    ],
)
def test_a_rank_that_stalled_is_told_from_one_that_was_killed(
    on_h100: Path, run: str, inputs: list[str], ending: Ending, words: str
) -> None:
    folder = on_h100 / f"nccl-2.28.9-4-{run}"
    done = run_offline([folder / each for each in inputs], job="job", settings=PipelineSettings())
    verdict = done.pipeline.store.verdicts["job"]
    assert (verdict.ending, verdict.ranks) == (ending, (1,))
    assert words in verdict.summary


def test_dumps_of_the_flight_recorder_name_the_rank_that_stalled_once(on_h100: Path) -> None:
    folder = on_h100 / "nccl-2.28.9-4-stalled"
    done = run_offline([folder / "logs", folder / "flight_recorder"], job="job", settings=PipelineSettings())
    (found,) = (each for each in done.pipeline.store.findings if "flight recorder" in each.summary)
    assert found.ranks == (1,)
    assert found.evidence["waiting"] == [0, 2, 3]


def test_parts_of_a_communicator_of_nccl_2_31_are_put_together(on_h100: Path) -> None:
    done = run_offline([on_h100 / "nccl-2.31.2-direct-2-logs"], job="job", settings=PipelineSettings())
    assert sorted(each.size for each in done.pipeline.store.communicators) == [1, 1, 2, 2, 2]


def test_a_trace_beside_logs_names_the_groups_of_which_the_ranks_are_unique(real: Path) -> None:
    run = real / "nccl-2.28.9-4-logs_and_trace"
    done = run_offline([run / "logs", run / "traces"], job="job", settings=PipelineSettings())
    named = {(each.name, each.parallelism) for each in done.pipeline.store.communicators if each.name is not None}
    assert named == {("TENSOR_MODEL_PARALLEL_GROUP", "TP")}  # data and pipeline groups of this job have the same ranks


def test_the_last_launches_belong_to_the_last_groups_of_calls() -> None:
    early, send, receive = Line("AllReduce", ("a", 0), None), Line("Send", ("b", 7), 11), Line("Recv", ("b", 7), None)
    gather = Line("AllGather", ("b", 7), 12)  # beside replays of a graph opCount stands still
    launches = [Launch(1.0, 11, "ncclDevKernel_SendRecv(...)"), Launch(2.0, 12, "ncclDevKernel_AllGather_RING_LL(...)")]
    assert list(truth([early, send, receive, gather], launches)) == [(send, 11), (receive, 11), (gather, 12)]


def test_launches_that_are_not_those_of_the_log_are_refused() -> None:
    line, launch = Line("AllReduce", ("a", 0), None), Launch(1.0, 11, "ncclDevKernel_AllGather_RING_LL(...)")
    with pytest.raises(ValueError, match="AllGather"):
        list(truth([line], [launch]))
    with pytest.raises(ValueError, match="2 launches"):
        list(truth([line], [launch, launch]))


def test_a_wrong_kernel_costs_both_precision_and_recall_and_a_missing_one_recall() -> None:
    assert Score(known=4, given=3, right=2).f1 == pytest.approx(4 / 7)


def test_nothing_is_scored_where_nothing_is_known() -> None:
    assert Score(known=0, given=0, right=0).f1 is None


def test_each_rank_is_a_node_of_its_own_and_has_the_variables_of_its_run(tmp_path: Path) -> None:
    found = record.environment(VARIANTS["logs"], NCCL, 3, tmp_path)
    assert found["NCCL_HOSTID"] == "rank3"
    assert found["NCCL_DEBUG_FILE"] == str(tmp_path / "logs" / "nccl.rank3.%h.%p.log")
    assert "NCCL_DEBUG_TIMESTAMP_FORMAT" in found
    without = record.environment(VARIANTS["logs_without_stamps"], NCCL, 3, tmp_path)
    assert found.keys() - without.keys() == {"NCCL_DEBUG_TIMESTAMP_FORMAT", "NCCL_DEBUG_TIMESTAMP_LEVELS"}
    assert "CALL" in record.environment(VARIANTS["logs_and_calls"], NCCL, 0, tmp_path)["NCCL_DEBUG_SUBSYS"]


def test_plain_runs_log_nothing_and_frame_the_others(tmp_path: Path) -> None:
    names = list(VARIANTS)
    assert (names[0], names[-1]) == ("plain", "plain_again")
    for name in (names[0], names[-1]):
        assert not any("DEBUG" in variable for variable in record.environment(VARIANTS[name], NCCL, 0, tmp_path))


def test_the_name_of_the_machine_and_its_folders_leave_a_capture(tmp_path: Path) -> None:
    host = socket.gethostname()
    (tmp_path / f"nccl.{host}.7.log").write_text(f"{host}:7:7 [0] NCCL INFO {tmp_path}/x n{host}lDev\n")
    record.mask(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "nccl.node.7.log": f"node:7:7 [0] NCCL INFO ./x n{host}lDev\n"
    }


def test_others_are_ended_when_a_rank_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "STUCK_S", 0.1)
    waits = "import sys; sys.stdin.read()"
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
        for code in (waits, "import os; os._exit(3)")
    ]
    assert record.ends(processes) == [-9, 3]
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()


def test_the_cost_is_a_ratio_to_the_plain_runs_at_both_ends(capsys: pytest.CaptureFixture[str]) -> None:
    row = record.Row(
        variant="logs", nccl="2.28.3", ranks=2, exits=(0, 0), step_ms=5.25, call_us=None, log_bytes=2_500_000
    )
    print_cost(
        [
            dataclasses.replace(row, variant="plain", step_ms=4.0, log_bytes=0),
            row,
            dataclasses.replace(row, variant="killed", exits=(1, -9), step_ms=None),
            dataclasses.replace(row, variant="plain_again", step_ms=6.0, log_bytes=0),
            dataclasses.replace(row, ranks=4),
        ]
    )
    lines = capsys.readouterr().out.splitlines()[3:]
    assert lines[1] == "| 2.28.3 | 2 | logs | 5.25 |  | 1.050 | 2.50 |"
    assert lines[2] == "| 2.28.3 | 2 | killed |  |  | not measured | 2.50 |"
    assert lines[4] == "| 2.28.3 | 4 | logs | 5.25 |  | not measured | 2.50 |"

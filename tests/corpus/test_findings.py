"""What real logs report is found and named; logs of jobs that went well give no finding."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from corpus.conformance import logs_of

from ncclscope.offline import run_offline
from ncclscope_service.store.records import Ending, Finding, FindingKind, Verdict
from ncclscope_service.store.settings import PipelineSettings

pytestmark = [pytest.mark.corpus, pytest.mark.slow]

_TROUBLE = re.compile(
    rb"^[^#>`]{0,200}(?:Watchdog caught collective operation timeout: WorkNCCL"
    rb"|NCCL WARN (?:Cuda failure|No transport found|socketProgress: Connection closed)|Got completion with error"
    rb"|NCCL WARN NET/OFI Unable to register memory"
    rb"|(?:\[rank\d+\]: [A-Z]|OutOfMemory|Runtime)\w*Error: (?!NCCL))",
    re.MULTILINE,
)
"""What NCCL and PyTorch print when something failed; written for this test alone."""
_NO_COLLNET = re.compile(rb"NCCL WARN (?:Cannot initialize CollNet|NET/IB :SHARP coll init error)")
_SLOWER = re.compile(
    rb"NCCL WARN (?:Cannot initialize CollNet|NET/IB :SHARP coll init error)"
    rb"|NCCL_(?:P2P|SHM|IB)_DISABLE set by environment to 1"
)
"""What they print when a faster path is not used."""


def findings_of(path: Path) -> list[Finding]:
    return run_offline([path], job="job", settings=PipelineSettings()).pipeline.store.findings


def test_a_log_gives_findings_where_it_reports_a_failure_and_only_there(corpora: list[Path]) -> None:
    troubled = []
    for path in (path for corpus in corpora for path in logs_of(corpus)):
        if path.suffix in {".md", ".rst"}:
            continue  # pages that quote logs
        found, text = findings_of(path), path.read_bytes()
        reports = bool(_TROUBLE.search(text))
        failures = [finding.summary for finding in found if finding.kind is FindingKind.REPORTED_FAILURE]
        slower = [finding.summary for finding in found if finding.kind is FindingKind.MISCONFIGURATION]
        assert len(failures) + len(slower) == len(found), path
        assert bool(failures) == reports, (path, failures)
        assert not slower or _SLOWER.search(text), (path, slower)
        assert any(summary.startswith("CollNet") for summary in slower) == bool(_NO_COLLNET.search(text)), path
        troubled += [path] if reports else []
    assert len(troubled) >= 7


_MEGATRON = "stark-sim-megatron-v100"
_SMOKE = f"{_MEGATRON}/dual8_tp4pp1dp2_smoke_nohup_20260331_r2.log"


@pytest.mark.parametrize(
    ("log", "words", "ranks"),
    [
        (
            "elena-alps-megatron/2340723.err",
            r"BROADCAST 805827 of TENSOR_MODEL_PARALLEL_GROUP after 600 s",
            tuple(range(1, 56, 2)),
        ),
        (f"{_MEGATRON}/watch_and_launch_dual8_tp4pp1dp2_20260328.log", r"FileNotFoundError", (4,)),
        (f"{_MEGATRON}/watch_and_launch_dual8_tp4pp1dp2_20260328.log", r"ALLREDUCE 8 of default_pg", (0, 1, 2, 3)),
        (_SMOKE, r"CUDA call failed: out of memory", (0, 1, 2, 3)),
        (_SMOKE, r"NCCL connection broke: closed", (4, 5, 6, 7)),
        ("sparticlesteve-nersc-pytorch/slurm-nccl-416593.out", r"InfiniBand work request failed with status 12", (10,)),
        ("zy-uestc-yccl/test.log", r"No transport found", (0, 1, 2, 3)),
    ],
)
def test_what_a_log_names_is_named(corpus: Path, log: str, words: str, ranks: tuple[int, ...]) -> None:
    named = [finding for finding in findings_of(corpus / "nccl_logs" / log) if re.search(words, finding.summary)]
    assert [finding.ranks for finding in named] == [ranks]
    assert named[0].evidence["where"]


def second(corpus: Path) -> Path:
    folder = corpus.parent / "corpus2" / "nccl_logs"
    if not folder.is_dir():
        pytest.skip(f"needs the second corpus, and {folder} is not a folder")
    return folder


@pytest.mark.parametrize(
    ("folder", "kinds"),
    [
        ("oom_trial_1_0_10_20260323_005014", [FindingKind.MISMATCH, FindingKind.REPORTED_FAILURE]),
        ("normal_trial_4_iter10_timeout60_20260715_002117", []),
    ],
)
def test_logs_without_stamps_show_that_ranks_called_different_operations(
    corpus: Path, folder: str, kinds: list[FindingKind]
) -> None:
    found = findings_of(second(corpus) / "gf-bench" / folder)
    assert [finding.kind for finding in found] == kinds
    assert all(finding.evidence["coll_seq"] == 11 for finding in found if finding.kind is FindingKind.MISMATCH)


def verdict_of(path: Path) -> Verdict | None:
    return run_offline([path], job="job", settings=PipelineSettings()).pipeline.store.verdicts.get("job")


_POLARIS, _GF = "alcf-polaris-pytorch/VAE__2024-11-08-21", "gf-bench"


@pytest.mark.parametrize(
    ("log", "ending", "ranks", "words"),
    [
        (f"{_GF}/oom_trial_1_0_10_20260323_005014", Ending.CRASHED, (0,), r"failed first: RuntimeError: CUDA out of"),
        (f"{_GF}/normal_trial_4_iter10_timeout60_20260715_002117", Ending.ENDED_TOGETHER, (), r"ended its comm"),
        (f"{_POLARIS}-21-27__with_aws.log", Ending.HANG, (), r"BROADCAST 5 of process group 0"),
        (f"{_POLARIS}-21-45__with_aws.log", Ending.HANG, (1,), r"rank 1 is furthest behind"),
        (f"{_POLARIS}-22-03__with_aws.log", Ending.HANG, (), r"BROADCAST 7 of process group 0"),
        (f"{_POLARIS}-23-03__with_aws.log", Ending.HANG, (), r"BROADCAST 7 of process group 0"),
        (f"{_POLARIS}-23-14__with_aws.log", Ending.HANG, (1, 4, 5, 6), r"BROADCAST 3861 \(ranks 1, 4, 5 and 6\)"),
        (
            "alcf-polaris-pytorch/resnet50__2024-11-08-21-24-51__with_aws.log",
            Ending.HANG,
            (),
            r"BROADCAST 3 of process group 0",
        ),
    ],
)
def test_the_verdict_is_that_of_a_person_who_reads_the_log(
    corpus: Path, log: str, ending: Ending, ranks: tuple[int, ...], words: str
) -> None:
    found = verdict_of(second(corpus) / log)
    assert found is not None
    assert (found.ending, found.ranks) == (ending, ranks)
    assert re.search(words, found.summary)


@pytest.mark.parametrize(
    ("log", "ending", "ranks", "words"),
    [
        (f"{_MEGATRON}/dual8_tp4pp1dp2_smoke_nohup_20260328.log", Ending.CRASHED, (4,), r"FileNotFoundError"),
        (_SMOKE, Ending.CRASHED, (0, 1, 2, 3), r"a CUDA call failed: out of memory"),
        (f"{_MEGATRON}/dual8_tp4pp1dp2_smoke_nohup_20260331_r3.log", Ending.ENDED_TOGETHER, (), r"every rank ended"),
        (f"{_MEGATRON}/ib_dual16_smoke_1080_driver_20260410.log", Ending.CRASHED, (8, 12), r"FileNotFoundError"),
        (f"{_MEGATRON}/watch_and_launch_dual8_tp4pp1dp2_20260328.log", Ending.CRASHED, (4,), r"FileNotFoundError"),
        ("elena-alps-megatron/2340723.err", Ending.HANG, (), r"BROADCAST 805827 of TENSOR_MODEL_PARALLEL_GROUP"),
        ("bigscience-jeanzay-megatron-v100/meg_gpt2_perf_n16-1999618.out", Ending.KILLED, (), r"DUE TO TIME LIMIT"),
        ("sparticlesteve-nersc-pytorch/slurm-nccl-416593.out", Ending.CRASHED, (10,), r"failed with status 12"),
    ],
)
def test_the_verdict_of_older_logs_is_that_of_a_person_who_reads_them(
    corpus: Path, log: str, ending: Ending, ranks: tuple[int, ...], words: str
) -> None:
    found = verdict_of(corpus / "nccl_logs" / log)
    assert found is not None
    assert (found.ending, found.ranks) == (ending, ranks)
    assert re.search(words, found.summary)


def test_complete_mlperf_logs_ended_together_or_do_not_say(corpus: Path) -> None:
    endings = Counter(
        None if (found := verdict_of(path)) is None else found.ending
        for path in sorted(second(corpus).glob("mlcommons-*/*"))
        if path.name != "SOURCE.txt"
    )
    # one aborted behind its results, as NCCL refused a call; seven end without a word about their communicators
    assert endings == {Ending.ENDED_TOGETHER: 5, Ending.UNCLEAR: 5, None: 2, Ending.CRASHED: 1}

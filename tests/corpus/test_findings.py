"""What real logs report is found and named; logs of jobs that went well give no finding."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from corpus.test_logs import logs_of

from ncclscope.offline import run_offline
from ncclscope_service.store.records import Finding, FindingKind
from ncclscope_service.store.settings import PipelineSettings

pytestmark = [pytest.mark.corpus, pytest.mark.slow]

_TROUBLE = re.compile(
    rb"^[^#>`]{0,200}(?:Watchdog caught collective operation timeout: WorkNCCL"
    rb"|NCCL WARN (?:Cuda failure|No transport found|socketProgress: Connection closed)|Got completion with error)",
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
    for path in logs_of(corpora):
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


@pytest.mark.parametrize(
    ("folder", "mismatches"),
    [("oom_trial_1_0_10_20260323_005014", 1), ("normal_trial_4_iter10_timeout60_20260715_002117", 0)],
)
def test_logs_without_stamps_show_that_ranks_called_different_operations(
    corpus: Path, folder: str, mismatches: int
) -> None:
    path = corpus.parent / "corpus2" / "nccl_logs" / "gf-bench" / folder
    if not path.is_dir():
        pytest.skip(f"needs the second corpus, and {path} is not a folder")
    found = findings_of(path)
    assert [finding.kind for finding in found] == [FindingKind.MISMATCH] * mismatches
    assert all(finding.evidence["coll_seq"] == 11 for finding in found)

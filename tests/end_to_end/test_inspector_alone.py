"""A job of which only NCCL Inspector's records are read: its groups are named, and nobody healthy is accused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from ncclscope.offline import run_offline
from ncclscope.simulate import configuration_of
from ncclscope_service.store.settings import PipelineSettings
from ncclscope_simulator import write


@pytest.mark.slow
def test_groups_are_named_by_records_alone_and_a_healthy_pipeline_accuses_nobody(tmp_path: Path) -> None:
    shape = ("--nodes", "2", "--gpus", "4", "--tp", "2", "--pp", "2", "--iterations", "24")
    write(configuration_of(("--out", str(tmp_path), *shape, "--inspector", "v4.0", "--capture", "none")), tmp_path)
    store = run_offline([tmp_path / "inspector"], job="j", settings=PipelineSettings()).pipeline.store
    kinds = Counter(each.parallelism for each in store.listed_communicators() if each.size > 1)
    assert kinds == {"WORLD": 1, "TP": 4, "DP": 4, "PP": 4, "EMBEDDING": 4}
    assert store.findings == []

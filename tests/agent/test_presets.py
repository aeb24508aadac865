"""NCCL's variables in the forms that scripts, prologs, manifests and files take."""

from __future__ import annotations

import fnmatch
import json
import shutil
import subprocess

import pytest
import yaml

from ncclscope_agent.nccl_settings.advice import (
    NcclVersion,
    Verdict,
    remarks_on_environment,
    stamped_levels,
    subsystem_mask,
    wanted,
)
from ncclscope_agent.nccl_settings.presets import Form, glob_of, preset, written

_KNOWN = [
    NcclVersion(2, minor, patch) for minor, patch in ((8, 4), (16, 5), (21, 5), (26, 3), (28, 3), (30, 4), (30, 7))
]


@pytest.mark.parametrize("version", _KNOWN, ids=str)
def test_the_preset_for_all_versions_gives_operations_and_times_in_each(version: NcclVersion) -> None:
    variables = preset(None)
    assert "COLL" in subsystem_mask(version, variables["NCCL_DEBUG_SUBSYS"]).names
    if version >= NcclVersion(2, 26, 2):
        assert "INFO" in stamped_levels(version, variables["NCCL_DEBUG_TIMESTAMP_LEVELS"]).names
    change = [each for each in remarks_on_environment(version, variables) if each.verdict is Verdict.CHANGE]
    # The one thing that it does without: the end of communicators from 2.30.3 on.
    assert all("DESTROY" in each.text for each in change)


@pytest.mark.parametrize("version", _KNOWN, ids=str)
def test_a_preset_for_a_version_is_what_check_recommends(version: NcclVersion) -> None:
    recommended = wanted(version, log_file="/logs/%h.%p", calls=True)
    assert preset(version, log_file="/logs/%h.%p", calls=True) == {**recommended, "TORCH_CPP_LOG_LEVEL": "INFO"}


_ODD = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "/a b/$x'%h.%p", "NCCL_DEBUG_TIMESTAMP_FORMAT": "[%F %T] "}


def test_a_shell_reads_back_what_was_written_for_it() -> None:
    show = written(_ODD, Form.SH) + "env -0"
    printed = subprocess.run(["sh", "-c", show], capture_output=True, text=True, check=True, env={}).stdout
    found = dict(each.split("=", 1) for each in printed.split("\0") if each)
    assert _ODD.items() <= found.items()


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish_reads_back_what_was_written_for_it() -> None:
    show = written({"NCCL_DEBUG_FILE": "/a b/%h"}, Form.FISH) + 'echo "$NCCL_DEBUG_FILE"'
    assert subprocess.run(["fish", "-c", show], capture_output=True, text=True, check=True).stdout == "/a b/%h\n"


def test_manifests_and_json_read_back_the_same() -> None:
    assert {each["name"]: each["value"] for each in yaml.safe_load(written(_ODD, Form.KUBERNETES))} == _ODD
    assert json.loads(written(_ODD, Form.JSON)) == _ODD


def test_a_task_prolog_and_a_file_have_no_quotes() -> None:
    assert written(_ODD, Form.TASK_PROLOG).splitlines()[2] == "export NCCL_DEBUG_TIMESTAMP_FORMAT=[%F %T] "
    assert written(_ODD, Form.PLAIN).splitlines()[2] == "NCCL_DEBUG_TIMESTAMP_FORMAT=[%F %T] "


def test_the_glob_of_a_pattern_finds_its_files_and_not_those_of_another() -> None:
    glob = glob_of("/logs/a[1]/100%%/nccl.%h.%p.log")
    assert fnmatch.fnmatchcase("/logs/a[1]/100%/nccl.node01.4711.log", glob)
    assert not fnmatch.fnmatchcase("/logs/a1/100%/nccl.node01.4711.log", glob)

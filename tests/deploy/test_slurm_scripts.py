"""Prolog and epilog of Slurm run by hand: what they do as root where users write beside them."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from end_to_end.processes import wait_for

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="they are root's")

_DAY_SECONDS = 86_400
_NOBODY = 65_534
_SENDER = "started---send-spools"
"""What the agent writes down where it is started to send what others left."""


@dataclass(frozen=True)
class Node:
    """A node's folders, with an agent that only writes down how it was started."""

    folder: Path
    scripts: Path

    @property
    def logs(self) -> Path:
        return self.folder / "nccl"

    def run(self, script: str, job: int) -> None:
        environment = {
            "PATH": os.environ["PATH"],
            "NCCLSCOPE_SITE": str(self.folder / "site.sh"),
            "SLURM_JOB_ID": str(job),
            "SLURM_JOB_UID": str(_NOBODY),
            "SLURMD_NODENAME": "n1",
        }
        done = subprocess.run([self.scripts / f"ncclscope-{script}"], env=environment, capture_output=True, check=False)
        assert done.returncode == 0, "a script that fails drains the node"

    def told(self, job: int | str) -> str:
        """How the agent of a job was started; it may do so after the prolog has ended."""
        path = self.folder / f"started-{job}"
        wait_for(path.exists, "the agent")
        return path.read_text()


@pytest.fixture
def node(tmp_path: Path, repository: Path) -> Node:
    if Path("/run/systemd/system").is_dir():
        pytest.skip("there is systemd here: the scripts would start units")
    scripts = repository / "deploy" / "slurm"
    agent = tmp_path / "ncclscope"
    agent.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/writing-$$\nmv {tmp_path}/writing-$$ {tmp_path}/started-${{2#--job=}}\n'
    )
    agent.chmod(0o755)
    ours = {
        "NCCLSCOPE_DIR": tmp_path / "nccl",
        "NCCLSCOPE_USER": "root",
        "NCCLSCOPE_GROUP": "root",
        "NCCLSCOPE_BIN": agent,
        "NCCLSCOPE_AGENT_ENV": tmp_path / "none",
    }
    given = (scripts / "ncclscope-site.sh").read_text()
    (tmp_path / "site.sh").write_text(given + "".join(f"{name}={value}\n" for name, value in ours.items()))
    return Node(tmp_path, scripts)


def test_an_agent_follows_the_logs_and_exports_of_its_job_alone(node: Node) -> None:
    node.run("prolog", 17)
    folder = node.logs / "17"
    assert (folder.stat().st_uid, folder.stat().st_mode & 0o7777) == (_NOBODY, 0o2750)
    told = node.told(17).split()
    assert f"--logs={folder}/*.log" in told
    assert f"--exports={folder}/exports" in told
    assert "--name=n1-17" in told
    (spool,) = (Path(word.removeprefix("--spool=")) for word in told if word.startswith("--spool="))
    assert spool.stat().st_mode & 0o777 == 0o700, "what is in it is the agent's alone"


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_where_users_may_write_the_prolog_gives_nothing_away(node: Node, mode: int) -> None:
    secret = node.folder / "secret"
    secret.mkdir(mode=0o700)
    node.logs.mkdir()
    (node.logs / "17").symlink_to(secret)
    node.logs.chmod(mode)
    node.run("prolog", 17)
    node.run("prolog", 18)
    assert (secret.stat().st_uid, secret.stat().st_mode & 0o777) == (0, 0o700)
    assert not (node.logs / "18").exists()


def test_a_link_in_the_place_of_a_jobs_folder_is_not_followed(node: Node) -> None:
    secret = node.folder / "secret"
    secret.mkdir(mode=0o700)
    node.logs.mkdir(mode=0o755)
    (node.logs / "17").symlink_to(secret)
    node.run("prolog", 17)
    assert (secret.stat().st_uid, secret.stat().st_mode & 0o777) == (0, 0o700)


def test_logs_of_jobs_that_ended_days_ago_go_and_those_of_a_job_that_has_run_for_weeks_stay(node: Node) -> None:
    for job in (17, 18, 19):
        node.run("prolog", job)
        node.told(job)
        (node.logs / str(job) / "nccl.log").write_text("a line\n")
    node.run("epilog", 17)
    long_ago = time.time() - 30 * _DAY_SECONDS
    for path in (node.logs / "17", node.logs / "18", node.logs / ".ended" / "17"):
        os.utime(path, (long_ago, long_ago))
    node.run("epilog", 19)
    assert sorted(path.name for path in node.logs.glob("[0-9]*")) == ["18", "19"]
    assert sorted(path.name for path in (node.logs / ".ended").iterdir()) == ["19"]


def test_an_epilog_has_sent_what_agents_have_left_and_does_not_wait_for_it(node: Node) -> None:
    node.run("prolog", 17)
    node.told(17)
    node.run("epilog", 17)
    assert not (node.folder / _SENDER).exists(), "where nothing is left nothing is started"
    spool = node.logs / ".agents" / "spool"
    (spool / "n1-0123456789ab").mkdir()
    node.run("epilog", 17)
    assert node.told("--send-spools").split()[:3] == ["agent", "--send-spools", f"--spool={spool}"]


def test_where_users_may_write_the_epilog_neither_writes_nor_deletes_nor_starts_anything(node: Node) -> None:
    precious = node.folder / "precious"
    precious.write_text("precious")
    (node.logs / ".agents" / "spool" / "n1-0123456789ab").mkdir(parents=True)
    (node.logs / ".agents" / "spools.log").symlink_to(precious)
    (node.logs / ".ended").symlink_to(node.folder)
    node.logs.chmod(0o777)
    node.run("epilog", 17)
    node.run("send-spools", 17)
    assert precious.read_text() == "precious"
    assert not (node.folder / "17").exists()
    assert not (node.folder / _SENDER).exists()

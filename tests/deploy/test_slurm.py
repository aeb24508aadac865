"""Wrapper, prologs and epilog under a real Slurm: two virtual nodes on the loopback."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from benchmarks.ports import free_port
from deploy.slurm_cluster import Cluster, missing_programs, slurm
from end_to_end.processes import PATIENCE_SECONDS, fetch_json, run_command, running, wait_for

pytestmark = pytest.mark.slow
_RANKS = 4
_PATIENT = f"--linger {PATIENCE_SECONDS} --hand-over {PATIENCE_SECONDS}"


@dataclass(frozen=True)
class Stage:
    """A service, and a job's logs that the tasks of a step write as NCCL would."""

    folder: Path
    agents: str
    web: str
    operations: int

    @property
    def program(self) -> Path:
        """`ncclscope`, wherever it is installed."""
        return self.folder / "ncclscope"

    @property
    def task(self) -> Path:
        """A task of a job: writes its rank's log to where NCCL_DEBUG_FILE says."""
        return self.folder / "task"

    def answers(self) -> bool:
        """Whether the service does: it may know of jobs at once. Raises OSError where it does not."""
        self.jobs()
        return True

    def jobs(self) -> dict[str, int]:
        overview = fetch_json(f"{self.web}/api/overview")
        return {job["name"]: job["operations"] for job in overview["jobs"]}  # type: ignore[index]


@contextlib.contextmanager
def stage(folder: Path) -> Generator[Stage]:
    made = staged(folder)
    with serving(made):
        yield made


def staged(folder: Path) -> Stage:
    """All but the service."""
    simulated = folder / "simulated"
    sizes = ("--nodes", "2", "--gpus", "2", "--tp", "2", "--pp", "1", "--dp", "2", "--iterations", "4")
    assert run_command("simulate", "--out", str(simulated), *sizes).returncode == 0
    logs = sorted((simulated / "logs").glob("*.log"))
    assert len(logs) == _RANKS
    for rank, log in enumerate(logs):
        log.rename(folder / f"rank{rank}")
    agents, web = free_port(), free_port()
    made = Stage(
        folder,
        f"127.0.0.1:{agents}",
        f"http://127.0.0.1:{web}",
        sum((folder / f"rank{rank}").read_text().count(": opCount ") for rank in range(_RANKS)),
    )
    path = os.pathsep.join(each for each in sys.path if each)
    made.program.write_text(f'#!/bin/sh\nPYTHONPATH={path} exec {sys.executable} -m ncclscope "$@"\n')
    made.task.write_text(
        f'#!/bin/sh\nfile=$(echo "$NCCL_DEBUG_FILE" | sed "s/%h/$SLURMD_NODENAME/; s/%p/$SLURM_PROCID/")\n'
        f'cp {folder}/rank$SLURM_PROCID "$file" || exit 99\n'
        f"until [ -e {folder}/go ]; do sleep 0.2; done\nexit ${{STATUS:-0}}\n"
    )
    for program in (made.program, made.task):
        program.chmod(0o755)
    return made


@contextlib.contextmanager
def serving(made: Stage) -> Generator[None]:
    """The service, from then on."""
    listening = ("--listen", made.agents, "--http", made.web.removeprefix("http://"), "--data", f"{made.folder}/data")
    with running(made.folder / "serve.log", "serve", *listening):
        wait_for(made.answers, "the service")
        yield


def _needs_slurm() -> None:
    if missing := missing_programs():
        pytest.skip(f"needs {', '.join(missing)} (Debian: apt install slurmctld slurmd slurm-client munge)")


def test_srun_with_the_wrapper_brings_all_ranks_of_all_nodes_to_the_service_and_keeps_the_status(
    tmp_path: Path,
) -> None:
    _needs_slurm()
    with stage(tmp_path) as made, slurm(tmp_path) as cluster:
        # A folder for each node: on a cluster each has its own disk.
        logs = f"{tmp_path}/logs-$SLURMD_NODENAME/nccl.%h.%p.log"
        wrapped = f"exec {made.program} run {_PATIENT} --log-file {logs} -- {made.task}"
        variables = {"NCCLSCOPE_CONNECT": made.agents, "STATUS": "7"}
        (tmp_path / "go").touch()  # what is written last, while the agent may still be starting, counts too
        done = cluster.run("srun", "-N2", f"-n{_RANKS}", "sh", "-c", wrapped, variables=variables)
        assert done.returncode == 7, done.stderr
        wait_for(lambda: list(made.jobs().values()) == [made.operations], f"{made.operations} operations")
        (job,) = made.jobs()
        assert job.isdigit(), "the job is called as Slurm calls it"
        for node in ("n1", "n2"):
            assert len(list((tmp_path / f"logs-{node}").glob("ncclscope-agent.*.log"))) == 1


def _site(made: Stage, cluster_folder: Path, repository: Path) -> str:
    site = cluster_folder / "site.sh"
    given = (repository / "deploy" / "slurm" / "ncclscope-site.sh").read_text()
    ours = {
        "NCCLSCOPE_DIR": f"{cluster_folder}/nccl-$SLURMD_NODENAME",
        "NCCLSCOPE_USER": "root",
        "NCCLSCOPE_GROUP": "root",
        "NCCLSCOPE_BIN": str(made.program),
        "NCCLSCOPE_AGENT_ENV": f"{cluster_folder}/agent.env",
        "NCCLSCOPE_TASK_ENV": f"{cluster_folder}/task-prolog.env",
    }
    site.write_text(given + "".join(f"{name}={value}\n" for name, value in ours.items()))
    (cluster_folder / "agent.env").write_text(f"NCCLSCOPE_CONNECT={made.agents}\n")
    printed = run_command("env", "--format", "task-prolog", "--log-file", "%j/nccl.%h.%p.log")
    (cluster_folder / "task-prolog.env").write_text(printed.stdout)
    lines = ["PrologFlags=Alloc"]
    for name in ("Prolog", "Epilog", "TaskProlog"):
        script = cluster_folder / name
        shipped = {"Prolog": "prolog", "Epilog": "epilog", "TaskProlog": "task-prolog"}[name]
        script.write_text(f"#!/bin/sh\nNCCLSCOPE_SITE={site} exec {repository}/deploy/slurm/ncclscope-{shipped}\n")
        script.chmod(0o755)
        lines.append(f"{name}={script}")
    return "\n".join(lines)


def _states(cluster: Cluster) -> set[str]:
    return set(cluster.run("sinfo", "-h", "-N", "-o", "%T").stdout.split())


def _senders(cluster_folder: Path) -> list[int]:
    """The processes that send what agents below that folder have left."""

    def command_line(process: Path) -> str:
        with contextlib.suppress(OSError):  # it has ended
            return (process / "cmdline").read_text()
        return ""

    lines = {int(path.name): command_line(path) for path in Path("/proc").glob("[0-9]*")}
    return [number for number, line in lines.items() if "--send-spools" in line and str(cluster_folder) in line]


def test_prologs_and_epilog_follow_a_job_that_knows_nothing_of_ncclscope(tmp_path: Path, repository: Path) -> None:
    _needs_slurm()
    with stage(tmp_path) as made, slurm(tmp_path, more=_site(made, tmp_path, repository)) as cluster:
        with ThreadPoolExecutor() as threads:
            step = threads.submit(cluster.run, "srun", "-N2", f"-n{_RANKS}", str(made.task))
            try:
                arrived = f"{made.operations} operations"
                wait_for(lambda: step.done() or list(made.jobs().values()) == [made.operations], arrived)
            finally:
                (tmp_path / "go").touch()
            done = step.result()
        assert done.returncode == 0, done.stderr
        assert len(made.jobs()) == 1

        def has_no_agent() -> bool:
            return not list(tmp_path.glob("nccl-*/.agents/*.pid"))

        wait_for(has_no_agent, "the epilogs, which end the agents")
        # A user who wants none of it, and a site whose files are gone: jobs run all the same, and no node is drained.
        done = cluster.run("srun", "-n1", "env", variables={"NCCLSCOPE": "off"})
        assert done.returncode == 0
        assert "NCCL_DEBUG" not in done.stdout
        wait_for(has_no_agent, "the epilog of that job, which needs the site's file")
        (tmp_path / "site.sh").unlink()
        assert cluster.run("srun", "-N2", "true").returncode == 0
        wait_for(lambda: _states(cluster) == {"idle"}, "idle nodes")


def test_what_agents_could_not_hand_over_is_sent_after_a_later_job_though_the_logs_are_gone(
    tmp_path: Path, repository: Path
) -> None:
    _needs_slurm()
    made = staged(tmp_path)
    site = _site(made, tmp_path, repository)
    with (tmp_path / "agent.env").open("a") as settings:
        settings.write("NCCLSCOPE_FLUSH_SECONDS=0.5\n")
    with slurm(tmp_path, more=site) as cluster:

        def spooled() -> list[Path]:
            return list(tmp_path.glob("nccl-n?/.agents/spool/*/spool-*.sqlite"))

        def has_no_agent() -> bool:
            return not list(tmp_path.glob("nccl-*/.agents/*.pid"))

        with ThreadPoolExecutor() as threads:
            step = threads.submit(cluster.run, "srun", "-N2", f"-n{_RANKS}", str(made.task))
            try:
                wait_for(lambda: step.done() or len({path.parent for path in spooled()}) == 2, "spools of both nodes")
            finally:
                (tmp_path / "go").touch()
            assert step.result().returncode == 0
        wait_for(lambda: _states(cluster) == {"idle"}, "the epilogs, which end the agents and start senders")
        for sender in _senders(tmp_path):  # as when the nodes are started anew
            os.kill(sender, signal.SIGKILL)
        wait_for(lambda: not _senders(tmp_path), "the end of the senders")
        assert has_no_agent()
        logs = list(tmp_path.glob("nccl-n?/[0-9]*"))
        (job,) = {path.name for path in logs}
        for path in logs:
            shutil.rmtree(path)
        assert spooled()
        with serving(made):
            assert cluster.run("srun", "-N2", "true").returncode == 0
            wait_for(lambda: made.jobs().get(job) == made.operations, f"{made.operations} operations")
            wait_for(lambda: has_no_agent() and not spooled(), "spools that are sent and removed")
            assert made.jobs()[job] == made.operations
        wait_for(lambda: _states(cluster) == {"idle"}, "idle nodes")

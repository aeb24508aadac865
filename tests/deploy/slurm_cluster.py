"""A real Slurm of two virtual nodes on the loopback, for tests: started, used, stopped."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from benchmarks.ports import free_port
from end_to_end.processes import PATIENCE_SECONDS, wait_for

PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "srun", "sinfo")


def missing_programs() -> list[str]:
    """What must be installed for it, and is not."""
    folders = os.environ["PATH"] + ":/usr/sbin:/sbin"
    return [name for name in PROGRAMS if shutil.which(name, path=folders) is None]


@dataclass(frozen=True)
class Cluster:
    """Where it is."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """What makes the commands of Slurm talk to this one."""
        plain = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "NCCL"))}
        return plain | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *command: str, variables: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Runs a command of Slurm."""
        return subprocess.run(
            command,
            env=self.environment | dict(variables or {}),
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=2 * PATIENCE_SECONDS,
        )

    def is_idle(self, daemons: Sequence[subprocess.Popen[bytes]]) -> bool:
        """Whether both nodes wait for work; fails with what was logged if one of its programs has ended."""
        for daemon in daemons:
            if daemon.poll() is not None:
                logs = "\n".join(path.read_text() for path in sorted(self.folder.glob("slurm*.log")))
                pytest.fail(f"{daemon.args!r} ended with {daemon.returncode}:\n{logs}")
        return self.run("sinfo", "-h", "-o", "%T").stdout.split() == ["idle"]


@contextlib.contextmanager
def slurm(folder: Path, *, more: str = "") -> Generator[Cluster]:
    """A cluster of the nodes n1 and n2, both this machine; `more` is added to slurm.conf."""
    programs = contextlib.ExitStack()
    cluster = Cluster(folder)
    _write(folder, more)
    with programs:
        _start(programs, folder, "munged", *_munge(folder))
        wait_for((folder / "munge.socket").exists, "munged")
        daemons = [
            _start(programs, folder, *command, environment=cluster.environment)
            for command in (["slurmctld", "-D", "-i"], ["slurmd", "-D", "-N", "n1"], ["slurmd", "-D", "-N", "n2"])
        ]
        wait_for(lambda: cluster.is_idle(daemons), "two idle nodes")
        yield cluster


def _write(folder: Path, more: str) -> None:
    subprocess.run(["/usr/sbin/mungekey", "-c", "-k", folder / "munge.key"], check=True)
    control, first, second = (free_port() for _ in range(3))
    host = socket.gethostname()
    for name in ("state", "spool-n1", "spool-n2"):
        (folder / name).mkdir()
    (folder / "slurm.conf").write_text(f"""\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SchedulerParameters=sched_interval=1
KillWait=5
MessageTimeout=90
TCPTimeout=60
SlurmdTimeout=3600
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=2 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=2 State=UNKNOWN
PartitionName=all Nodes=n1,n2 Default=YES State=UP
{more}
""")


def _munge(folder: Path) -> list[str]:
    names = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munge.pid", "seed-file": "munge.seed"}
    return ["-F", "-f", *(f"--{name}={folder / file}" for name, file in names.items())]


def _start(
    programs: contextlib.ExitStack,
    folder: Path,
    name: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    log = programs.enter_context((folder / f"{name}.log").open("ab"))
    process = subprocess.Popen(
        [shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin") or name, *arguments],
        stdout=log,
        stderr=subprocess.STDOUT,
        env=dict(environment or os.environ),
        start_new_session=True,
    )
    programs.callback(_end, process)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

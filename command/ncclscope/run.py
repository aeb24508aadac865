"""`ncclscope run`: runs a job with NCCL's variables set and, once per node, an agent beside it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

from ncclscope import node
from ncclscope.options import nccl_version
from ncclscope.run_report import ReportRun, say
from ncclscope_agent.config import variable_of
from ncclscope_agent.nccl_settings.advice import NcclVersion, Verdict, remarks_on_environment
from ncclscope_agent.nccl_settings.presets import glob_of, preset
from ncclscope_capture.job import Watch, become, end_as

_LOCAL_SIZES: Final = (
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "PALS_LOCAL_SIZE",
    "JSM_NAMESPACE_LOCAL_SIZE",
    "LOCAL_WORLD_SIZE",
)
"""Where launchers say it as a number. *Source:* Open MPI, MPICH (Hydra), HPE PALS, IBM jsrun, torchrun."""
_TASKS_PER_NODE: Final = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
_STEPS: Final = (
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "PMIX_NAMESPACE",
    "PMI_JOBID",
    "PBS_JOBID",
    "LSB_JOBID",
    "FLUX_JOB_ID",
)
_RUN_OF_NODES: Final = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_LONGEST_NAME: Final = 200


def local_tasks(environment: Mapping[str, str]) -> int | None:
    """Processes of this step on this node; None if the launcher does not say."""
    for name in _LOCAL_SIZES:
        if environment.get(name, "").isdigit():
            return int(environment[name])
    told = next((environment[name] for name in _TASKS_PER_NODE if name in environment), None)
    node = environment.get("SLURM_NODEID", "")
    return None if told is None or not node.isdigit() else _of_node(told, int(node))


def step_name(environment: Mapping[str, str]) -> str:
    """The same for all processes of a step, and another for the next step, as far as launchers tell them apart."""
    named = ".".join(environment[name] for name in _STEPS if environment.get(name))
    return re.sub(r"[^\w.,:-]", "_", named)[:_LONGEST_NAME] or "step"


def note_arrival(descriptor: int, environment: Mapping[str, str]) -> None:
    """Adds this process to the list in an open file, in one write."""
    os.lseek(descriptor, 0, os.SEEK_END)
    os.write(descriptor, f"{step_name(environment)}\n".encode())


def arrivals(descriptor: int, environment: Mapping[str, str]) -> int:
    """How many processes of this step are in the list."""
    listed = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    return listed.split(b"\n").count(step_name(environment).encode())


def _of_node(told: str, node: int) -> int | None:
    """Of one node in a list like 2(x3),1: two on each of three nodes, one on the fourth. *Source:* sbatch(1)."""
    first = 0
    for part in told.split(","):
        found = _RUN_OF_NODES.fullmatch(part.strip())
        if found is None:
            return None
        first += int(found[2] or 1)
        if node < first:
            return int(found[1])
    return None


_LOCAL_RANKS: Final = (
    "SLURM_LOCALID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "PMI_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
    "FLUX_TASK_LOCAL_ID",
    "JSM_NAMESPACE_LOCAL_RANK",
    "LOCAL_RANK",
)
"""Variables in which launchers say the how-manieth process of its node this is. *Source:* srun(1); Open MPI's,
Intel MPI's and MPICH's launchers (Hydra); HPE PALS; flux-run(1); IBM jsrun; torchrun."""
_JOBS: Final = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID")
_NEWEST: Final = NcclVersion(2, 30, 7)
"""Where the version is not known, what is set is judged by the one that forgives least."""
_STRICTEST_MODE: Final = 0o700
_LOCK: Final = ".ncclscope-run"
_NOT_EVERYTHING: Final = "the service does not have everything of this job"
_CONNECTED: Final = re.compile(rb"(?<![_a-z])connected(?![_a-z])")
"""The agent's event in its log, which is JSON or text, and not `not_connected`."""
_STOP_SECONDS: Final = 20.0
"""An agent that is asked to end sends for 5 s what it has, and is gone then."""
_WRONG_SETTINGS: Final = 2
"""Exit status of an agent that does not start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The environment and the log file that a job is started with."""

    environment: dict[str, str]
    log_file: str
    is_own_log: bool
    """The logs are in the folder that was made for this job alone."""
    changed: tuple[str, ...]
    """Variables that were set otherwise, and why they were replaced: a sentence each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Patience:
    """How long is waited when the job has ended, in seconds: for other processes, then for the agent."""

    linger: float
    hand_over: float | None
    """None: nobody wants the rest, because the report is made of the files."""


@click.command(context_settings={"help_option_names": ["-h", "--help"], "allow_interspersed_args": False})
@click.option(
    "--nccl", callback=nccl_version, metavar="VERSION", help="NCCL's version; default: settings that suit all versions."
)
@click.option(
    "--log-file", metavar="PATTERN", help="NCCL_DEBUG_FILE; default: in a folder of this user and job in TMPDIR."
)
@click.option(
    "--calls", is_flag=True, help="Also log every API call (NCCL 2.13 and newer), which shows groups exactly."
)
@click.option("--keep", is_flag=True, help="Keep NCCL variables that are set, even if NCCL would then log nothing.")
@click.option("--connect", metavar="HOST:PORT", help="Address of the service; default: NCCLSCOPE_CONNECT.")
@click.option("--exports", multiple=True, metavar="DIR", help="Directory in which nsys exports appear. Repeatable.")
@click.option("--agent", "wants_agent", type=click.Choice(["auto", "yes", "no"]), default="auto", show_default=True,
              help="Whether to start an agent. auto: in the first process of each node.")  # fmt: skip
@click.option("--linger", type=click.FloatRange(0, 3600), default=30.0, show_default=True, metavar="SECONDS",
              help="After the job ends, wait this long for other processes of the node, then stop the "
                   "agent.")  # fmt: skip
@click.option("--hand-over", type=click.FloatRange(0, 3600), default=20.0, show_default=True, metavar="SECONDS",
              help="Time for the agent to send the rest after that.")  # fmt: skip
@click.option("--report", "report_to", type=click.Path(path_type=Path, file_okay=False), is_flag=False,
              flag_value="ncclscope-report", metavar="[DIR]",
              help="For a job on one node, without a service: start one beside the job, record with nsys where it is "
                   "installed, and leave a report in DIR (default: ncclscope-report).")  # fmt: skip
@click.argument("command", nargs=-1, required=True, metavar="-- COMMAND...")
def run(
    *,
    nccl: NcclVersion | None,
    log_file: str | None,
    calls: bool,
    keep: bool,
    connect: str | None,
    exports: tuple[str, ...],
    wants_agent: str,
    linger: float,
    hand_over: float,
    report_to: Path | None,
    command: tuple[str, ...],
) -> None:
    """Run a job with NCCL's variables set and an agent beside it: srun ncclscope run -- python train.py

    The agent's settings may be given as variables (NCCLSCOPE_CONNECT and so on). The job runs even if the agent fails.
    Signals and exit status are the job's.
    """
    report = None if report_to is None else ReportRun(report_to)
    if report is not None:
        report.prepare(os.environ, local_tasks(os.environ))
        log_file, exports = log_file or report.log_file, (*exports, str(report.exports))
    prepared = prepare(os.environ, nccl, log_file=log_file, calls=calls, keep=keep)
    first = is_first_on_node(os.environ) if wants_agent == "auto" else wants_agent == "yes"
    if first:
        for sentence in prepared.changed:
            say(sentence)
    environment = prepared.environment
    if connect is not None:
        environment[variable_of("connect")] = connect
    if prepared.is_own_log:
        environment.setdefault(variable_of("release_logs"), "yes")
        environment.setdefault(variable_of("release_owner"), str(os.geteuid()))
    folder = Path(prepared.log_file).parent
    locked = _lock(folder)
    if not first:
        # The lock goes with the job, and tells the first process when the last of this node has ended.
        become(command, environment)
    with Watch() as watch:
        patience = _Patience(linger=linger, hand_over=hand_over)
        if report is not None:
            own = report.start_service(watch)
            environment[variable_of("connect")] = own or connect or ""
            command = report.recorded(command)
            if own is not None:
                patience = _Patience(linger=linger, hand_over=None)
        status = _run_beside_agent(watch, command, environment, prepared.log_file, exports, locked, patience)
        if report is not None:
            report.stop_service(watch)
    if report is not None:
        report.write(prepared.log_file)
    end_as(status)


def prepare(
    environment: Mapping[str, str], version: NcclVersion | None, *, log_file: str | None, calls: bool, keep: bool
) -> Prepared:
    """The job's variables: the preset, and what is set already if that serves.

    A variable that is set is replaced if `check` says that it must change, and not at all with `keep`.
    """
    given = node.nccl_variables(environment)
    own = _own_log_file(environment)
    wanted = preset(version, log_file=log_file or own, calls=calls)
    must_change = {
        remark.about: remark.text
        for remark in remarks_on_environment(version or _NEWEST, given)
        if remark.verdict is Verdict.CHANGE and remark.found is not None
    }
    if log_file is not None:
        must_change.setdefault("NCCL_DEBUG_FILE", "--log-file or --report was given")
    result, changed = dict(environment), list[str]()
    for name, value in wanted.items():
        if environment.get(name, value) != value and (keep or name not in must_change):
            continue
        if name in given and given[name] != value:
            changed.append(f"{name}={given[name]} is replaced by {value}: {must_change[name]}")
        result[name] = value
    found = result.get("NCCL_DEBUG_FILE") or given.get("NCCL_DEBUG_FILE") or wanted["NCCL_DEBUG_FILE"]
    return Prepared(environment=result, log_file=found, is_own_log=found == own, changed=tuple(changed))


def is_first_on_node(environment: Mapping[str, str]) -> bool:
    """Whether this is the first process of its node, as the launcher says; a lone process is."""
    told = [environment[name] for name in _LOCAL_RANKS if name in environment]
    return not told or told[0] == "0"


def _own_log_file(environment: Mapping[str, str]) -> str:
    """A folder that only this user can write to, for each job."""
    job = next((environment[name] for name in _JOBS if environment.get(name)), "job")
    plain = "".join(each if each.isalnum() or each in "-_." else "_" for each in job)
    return f"{tempfile.gettempdir()}/ncclscope-{os.getuid()}/{plain}/nccl.%h.%p.log"


def _lock(folder: Path) -> int | None:
    """A shared lock that lasts as long as this process and what it becomes; None if there cannot be one."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=_STRICTEST_MODE)
        if folder.stat().st_uid == os.getuid():
            descriptor = os.open(
                folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
            os.set_inheritable(descriptor, True)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            note_arrival(descriptor, os.environ)
            return descriptor
    except OSError as error:
        say(f"{folder}: {error.strerror}: the job runs, and NCCL may log to its output")
    return None


def _run_beside_agent(
    watch: Watch,
    command: tuple[str, ...],
    environment: dict[str, str],
    log_file: str,
    exports: tuple[str, ...],
    locked: int | None,
    patience: _Patience,
) -> int:
    told_before = _size(_told_by_agent(log_file))
    agent = _start_agent(watch, environment, log_file, exports)
    try:
        job = watch.start(command, environment)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        if agent is not None:
            _drop_agent(watch, agent)  # there is nothing to hand over
        return (127 if isinstance(error, FileNotFoundError) else 126) << 8
    else:
        status = watch.wait(job, lambda: job) or 0
    if agent is not None:
        _wait_for_others(watch, locked, patience.linger)
        if patience.hand_over is None:
            _stop_agent(watch, agent)
        elif _end_agent(watch, agent, environment, log_file, exports, patience.hand_over):
            _tell_what_is_left(_told_by_agent(log_file), told_before)
    return status


def _drop_agent(watch: Watch, agent: int) -> None:
    """Ends an agent that has read nothing."""
    watch.reap()
    if watch.status(agent) is None:
        os.kill(agent, signal.SIGKILL)
        watch.wait(agent, lambda: None)


def _stop_agent(watch: Watch, agent: int) -> None:
    """Ends an agent in order, whatever it has not sent."""
    watch.reap()
    if watch.status(agent) is None:
        os.kill(agent, signal.SIGTERM)
        _ended_within(watch, agent, _STOP_SECONDS)


def _agent_command(log_file: str, exports: tuple[str, ...], *more: str) -> list[str]:
    options = [part for directory in exports for part in ("--exports", directory)]
    return [sys.executable, "-m", "ncclscope", "agent", "--logs", glob_of(log_file), *options, *more]


def _start_agent(
    watch: Watch, environment: Mapping[str, str], log_file: str, exports: tuple[str, ...], *more: str
) -> int | None:
    """The agent's process; it writes beside the logs, since the job's output is the job's."""
    try:
        with _told_by_agent(log_file).open("ab") as output:
            return watch.start_apart(_agent_command(log_file, exports, *more), environment, output.fileno())
    except OSError as error:
        say(f"no agent: {error.strerror}: the job runs without")
        return None


def _told_by_agent(log_file: str) -> Path:
    host = socket.gethostname().partition(".")[0]
    return Path(log_file).parent / f"ncclscope-agent.{host}.log"


def _wait_for_others(watch: Watch, locked: int | None, seconds: float) -> None:
    """Waits until all processes of this node have come, and none holds the lock any more, for so long at most.

    One that comes late would else find its log unread if a job ends at once, as one that fails at its start.
    """
    until = time.monotonic() + seconds
    expected = local_tasks(os.environ) or 1
    while locked is not None and time.monotonic() < until:
        if arrivals(locked, os.environ) < expected:
            watch.reap()
            time.sleep(0.1)
            continue
        try:
            fcntl.flock(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EINTR):
                return
            watch.reap()
            time.sleep(0.1)
        else:
            return


def _end_agent(
    watch: Watch, agent: int, environment: Mapping[str, str], log_file: str, exports: tuple[str, ...], seconds: float
) -> bool:
    """Lets the agent hand over what it read; True if it ended as it was asked to, and may have left something.

    One that ended before, or before it could begin, is followed by one that reads the rest and ends.
    """
    watch.reap()
    status = watch.status(agent)
    if status is None:
        os.kill(agent, signal.SIGTERM)
        status = _ended_within(watch, agent, seconds)
        if status == 0:
            return True
    if status != _WRONG_SETTINGS << 8:
        late = ("--once", "--once-seconds", f"{seconds:g}")
        again = _start_agent(watch, environment, log_file, exports, *late)
        status = None if again is None else _ended_within(watch, again, seconds)
    if status == _WRONG_SETTINGS << 8:
        say(f"the agent did not start, and nothing was sent: {_told_by_agent(log_file)} says why")
    elif status != 0:
        say(f"{_NOT_EVERYTHING}: {_told_by_agent(log_file)} says why")
    return False


def _tell_what_is_left(told: Path, begin: int) -> None:
    """Warns if an agent that ended in order did not hand over everything, as its log says from that byte on."""
    with contextlib.suppress(OSError), told.open("rb") as stream:
        stream.seek(begin)
        said = stream.read()
        if b"kept_in_spool" in said:
            say(f"{_NOT_EVERYTHING}: the rest is in the agent's spool; `ncclscope agent --send-spools` sends it")
        elif b"not_all_sent" in said or _CONNECTED.search(said) is None:
            say(f"{_NOT_EVERYTHING}: {told} says why")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _ended_within(watch: Watch, agent: int, seconds: float) -> int | None:
    """The agent's wait status; None for one that had to be killed."""
    status = watch.wait(agent, lambda: None, seconds=seconds)
    if status is None:
        os.kill(agent, signal.SIGKILL)
    return status

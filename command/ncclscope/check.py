"""`ncclscope check`: is this node set up right, and what to change."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
import orjson

from ncclscope import node
from ncclscope.check_report import Checked, in_json, report
from ncclscope.check_sources import SourceFacts
from ncclscope.options import nccl_version
from ncclscope_agent.config import AgentSettings
from ncclscope_agent.credentials import Credentials
from ncclscope_agent.files.recognise import FileKind
from ncclscope_agent.files.release import shared_file_system
from ncclscope_agent.nccl_settings.advice import (
    DEFAULT_LOG_FILE,
    NcclVersion,
    Verdict,
    read_version,
    remark_on_log_directory,
    remarks_on_environment,
    remarks_on_logs,
    wanted,
)
from ncclscope_agent.nccl_settings.volume import Volume, by_node, by_process, shares
from ncclscope_agent.sources.kineto.batches import is_trace
from ncclscope_agent.spool.database import left_bytes
from ncclscope_agent.spool.directory import SPOOL_LOCK, agent_directories
from ncclscope_wire.errors import ConfigError
from ncclscope_wire.messages import PROTOCOL_VERSION

_GB: Final = 1e9
_GIB: Final = 1 << 30
_MIB: Final = 1 << 20
_FULL_HOURS: Final = 24.0
"""A disk that the logs fill within a day is reported."""
_NO_LOGS: Final = "is it quoted, and the folder of NCCL_DEBUG_FILE? Logs appear when a job makes its first communicator"
_TOLERATED_OFFSET_SECONDS: Final = 1.0


def _address(_: click.Context, __: click.Parameter, value: str | None) -> tuple[str, int] | None:
    if value is None:
        return None
    host, _colon, port = value.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 2**16:
        raise click.BadParameter(f"{value!r} is not HOST:PORT with a port of 1 to 65535")
    return host.strip("[]"), int(port)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--nccl", callback=nccl_version, metavar="VERSION", help="NCCL's version, for example 2.27.5; default: look it up."
)
@click.option(
    "--logs", multiple=True, metavar="GLOB", help="Check these logs: content, and volume per hour. Repeatable."
)
@click.option("--env", "with_environment", is_flag=True, help="Check the NCCL_* variables of this environment.")
@click.option("--service", callback=_address, metavar="HOST:PORT", help="Check the service's port for agents.")
@click.option("--tls", is_flag=True, help="Use TLS for that port; implied by --tls-ca and --tls-cert.")
@click.option("--tls-ca", default="", metavar="FILE", help="CA certificates that sign the service's certificate.")
@click.option("--tls-cert", default="", metavar="FILE", help="This node's certificate, if the service requires one.")
@click.option("--tls-key", default="", metavar="FILE", help="Private key; default: in the certificate file.")
@click.option(
    "--tls-server-name",
    default="",
    metavar="NAME",
    help="Host name in the service's certificate; default: the host of --service.",
)
@click.option(
    "--token-file", default="", metavar="FILE", help="Check that the agent's token file is readable and accepted."
)
@click.option("--spool", metavar="DIR", help="Check that the agent can keep its spool here: permissions and space.")
@click.option("--page", metavar="URL", help="Address of the page: compare the clock of its host with this one.")
@click.option("--exports", multiple=True, metavar="DIR", help="Check this directory for nsys exports. Repeatable.")
@click.option("--inspector", multiple=True, metavar="GLOB", help="Look for dumps of NCCL Inspector. Repeatable.")
@click.option(
    "--flight-recorder", multiple=True, metavar="GLOB", help="Look for dumps of PyTorch's Flight Recorder. Repeatable."
)
@click.option("--ras", callback=_address, default="localhost:28028", show_default=True, metavar="HOST:PORT",
              help="Ask NCCL's RAS here.")  # fmt: skip
@click.option("--observe", type=click.FloatRange(0, 600), default=0.0, metavar="SECONDS",
              help="Watch logs without time stamps grow for this long.")  # fmt: skip
@click.option("--log-file", default=DEFAULT_LOG_FILE, show_default=True, metavar="PATTERN",
              help="NCCL_DEBUG_FILE in the printed settings.")  # fmt: skip
@click.option("--most-per-hour", type=click.FloatRange(min=0), default=10.0, show_default=True, metavar="GB",
              help="Warn if a node logs more than this per hour (GB: 10^9 bytes).")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the results as one JSON object.")
def check(
    *,
    nccl: NcclVersion | None,
    logs: tuple[str, ...],
    with_environment: bool,
    service: tuple[str, int] | None,
    tls: bool,
    tls_ca: str,
    tls_cert: str,
    tls_key: str,
    tls_server_name: str,
    token_file: str,
    spool: str | None,
    page: str | None,
    exports: tuple[str, ...],
    inspector: tuple[str, ...],
    flight_recorder: tuple[str, ...],
    ras: tuple[str, int],
    observe: float,
    log_file: str,
    most_per_hour: float,
    as_json: bool,
) -> None:
    """Check whether this node is set up right, and print what to set.

    Run it as the job runs: on the node, as its user, in its environment. Exit status: 0 everything that was checked is
    right; 1 something must change; 2 wrong usage.
    """
    checked = Checked(host=socket.gethostname().partition(".")[0])
    if logs:
        _look_at_logs(checked, logs, observe)
    _find_version(checked, nccl)
    if with_environment:
        _check_environment(checked, with_exports=bool(exports))
    if logs:
        _check_logs(checked, logs, most_per_hour * _GB)
    _check_scheduler(checked)
    _check_exports(checked, exports)
    _look_for_sources(checked.sources, inspector, flight_recorder, ras)
    if spool is not None:
        _check_spool(checked, spool)
    credentials = Credentials(
        tls=tls,
        tls_ca=tls_ca,
        tls_cert=tls_cert,
        tls_key=tls_key,
        server_name=tls_server_name,
        token_file=token_file,
    )
    are_usable = _check_credentials(checked, credentials)
    _check_clock(checked, page, credentials if are_usable else Credentials())
    if service is not None and are_usable:
        _check_service(checked, *service, credentials)
    if checked.version is not None:
        checked.variables = wanted(checked.version, log_file=log_file)
        checked.variables_with_calls = wanted(checked.version, log_file=log_file, calls=True)
    if as_json:
        click.echo(orjson.dumps(in_json(checked), option=orjson.OPT_INDENT_2))
    else:
        click.echo("\n".join(report(checked)))
    if checked.must_change:
        raise click.exceptions.Exit(1)


# What is looked at


def _look_at_logs(checked: Checked, patterns: Sequence[str], observe_seconds: float) -> None:
    checked.logs = node.look_at_logs(patterns, observe_seconds=observe_seconds)
    checked.sources.logs = len(checked.logs)
    checked.sources.logs_with_operations = sum(bool(look.operations) for look, _ in checked.logs)
    checked.processes = by_process(checked.logs)
    checked.nodes = by_node(checked.processes)
    checked.shares = shares(look for look, _ in checked.logs)


def _find_version(checked: Checked, given: NcclVersion | None) -> None:
    """The version that was given, else the logs', else this node's."""
    told = {text for look, _ in checked.logs for text in look.versions}
    in_logs = sorted(found for found in map(read_version, told) if found is not None)
    if given is not None:
        checked.nccl = node.FoundVersion(version=given, told_by="--nccl")
        if in_logs and given not in in_logs:
            checked.say(Verdict.NOTE, "NCCL", f"the logs are of {', '.join(map(str, in_logs))}, not of {given}")
    elif in_logs:
        checked.nccl = node.FoundVersion(version=in_logs[-1], told_by="the logs")
        if len(in_logs) > 1:
            versions = ", ".join(map(str, in_logs))
            checked.say(Verdict.NOTE, "NCCL", f"the logs are of {versions}; the advice is for the newest")
    else:
        checked.nccl = node.nccl_on_this_node()
    if checked.nccl is None:
        text = "its version is not known, and what to set depends on it: give --nccl VERSION, or --logs that name it"
        checked.say(Verdict.CHANGE, "NCCL", text)


def _check_environment(checked: Checked, *, with_exports: bool) -> None:
    variables = node.nccl_variables(os.environ)
    if checked.version is None:
        return
    checked.remarks += remarks_on_environment(checked.version, variables, with_exports=with_exports)
    pattern = variables.get("NCCL_DEBUG_FILE")
    state = node.directory_state(pattern) if pattern else None
    if pattern and state is not None:
        checked.remarks.append(remark_on_log_directory(pattern, state))


def _check_scheduler(checked: Checked) -> None:
    found = scheduler_here(os.environ)
    if found is not None:
        job = f" job {found.job}" if found.job else ""
        checked.say(Verdict.NOTE, "scheduler", f"{found.name}{job}: {found.advice}", found.name)


def _check_logs(checked: Checked, patterns: Sequence[str], most_bytes_per_hour: float) -> None:
    if unreadable := node.unreadable_logs(patterns):
        text = (
            f"{len(unreadable)} of them ({unreadable[0]}) cannot be read by this user: run the agent as the job's, "
            "or the job with umask 022"
        )
        checked.say(Verdict.CHANGE, "logs", text)
    if not checked.logs:
        checked.say(Verdict.CHANGE, "logs", f"no readable file matches {', '.join(patterns)}: {_NO_LOGS}")
        return
    looks = [look for look, _ in checked.logs]
    checked.remarks += remarks_on_logs(checked.version, looks)
    if any(rate is None for look, rate in checked.logs if look.nccl_lines):
        text = "some logs have too few time stamps to tell how much is written: --observe 10 watches them grow"
        checked.say(Verdict.NOTE, "log volume", text)
    for volume in checked.nodes:
        _check_volume(checked, volume, most_bytes_per_hour)
    _check_space(checked, Path(looks[0].name))


def _check_volume(checked: Checked, volume: Volume, most_bytes_per_hour: float) -> None:
    if volume.bytes_per_hour is None:
        return
    text = f"{volume.host} writes {volume.bytes_per_hour / _GB:.3g} GB of log per hour"
    if volume.bytes_per_hour > most_bytes_per_hour:
        text += (
            f", more than {most_bytes_per_hour / _GB:.3g}: leave out what is not needed, or let the agent give space "
            "back (--release-logs)"
        )
        checked.say(Verdict.CHANGE, "log volume", text)
    else:
        checked.say(Verdict.RIGHT, "log volume", text)


def _check_space(checked: Checked, log: Path) -> None:
    """Holds the volume of this host's logs against the free space of their disk."""
    here = [volume for volume in checked.nodes if volume.host == checked.host]
    rate = here[0].bytes_per_hour if here else None
    free = node.free_bytes(log)
    if rate and free is not None and free / rate < _FULL_HOURS:
        room = f"{free / _GIB:.3g} GiB free, which is {free / rate:.1f} hours of log"
        text = f"the disk of {log} has {room} (--release-logs)"
        checked.say(Verdict.CHANGE, "log volume", text)


def _check_exports(checked: Checked, directories: Sequence[str]) -> None:
    checked.nsys = node.nsys_version()
    for directory in directories:
        path = Path(directory)
        if not path.is_dir():
            checked.say(Verdict.CHANGE, "exports", f"{directory} is no directory: nsys cannot write there", directory)
        elif not os.access(path, os.R_OK | os.X_OK):
            checked.say(Verdict.CHANGE, "exports", f"{directory} cannot be read: run it as the job's user", directory)
        else:
            found = sum(1 for entry in path.iterdir() if entry.suffix in {".sqlite", ".nsys-rep"})
            checked.sources.exports = (checked.sources.exports or 0) + found
            traces = sum(is_trace(entry.name) for entry in path.iterdir())
            checked.sources.traces = (checked.sources.traces or 0) + traces
            checked.say(Verdict.RIGHT, "exports", f"{directory} can be read and holds {found} exports", directory)
            _check_graphs(checked, path)
    if checked.nsys is not None:
        checked.say(Verdict.RIGHT, "nsys", "it can profile, and export .nsys-rep files", checked.nsys)
    else:
        text = "there is none in PATH: .nsys-rep files cannot be exported here, .sqlite files can be read all the same"
        checked.say(Verdict.CHANGE if directories else Verdict.NOTE, "nsys", text)


def _look_for_sources(
    facts: SourceFacts, inspector: Sequence[str], flight_recorder: Sequence[str], ras: tuple[str, int]
) -> None:
    facts.has_nsys = node.nsys_version() is not None
    if inspector:
        facts.dumps = node.count_files(inspector, FileKind.INSPECTOR)
    if flight_recorder:
        facts.flight_dumps = node.count_files(flight_recorder, FileKind.FLIGHT_RECORDER)
    facts.ras, facts.ras_address = node.ras_state(*ras), f"{ras[0]}:{ras[1]}"
    facts.ports = node.rdma_ports()
    facts.has_nvml = node.has_nvml()
    facts.variables = {name: value for name, value in os.environ.items() if name.startswith(("NCCL_", "TORCH_"))}


def _check_graphs(checked: Checked, directory: Path) -> None:
    """Says whether CUDA graphs are recorded as a whole, which is nsys's default and hides their kernels."""
    launches = node.graph_launches(directory)
    if launches:
        text = (
            f"{launches:,} graph launches were recorded as a whole: where graphs hold NCCL operations, record with "
            "--cuda-graph-trace=node (at a noticeable cost), else these stay unmeasured"
        )
        checked.say(Verdict.NOTE, "CUDA graphs", text, str(directory))


def _check_spool(checked: Checked, directory: str) -> None:
    fault = fault_of_spool(directory)
    verdict = Verdict.RIGHT if fault is None else Verdict.CHANGE
    checked.say(verdict, "spool", fault or "this user can write there, and there is room", directory)
    agents, left = left_in_spools(directory)
    if agents:
        text = (
            f"agents that do not run have left {left / _MIB:.3g} MiB there ({agents} of them): where they are not "
            "started again, `ncclscope agent --send-spools` sends it"
        )
        checked.say(Verdict.NOTE, "spool", text, directory)


def _check_credentials(checked: Checked, credentials: Credentials) -> bool:
    """Whether the credentials can be used; says why if they cannot."""
    fault = fault_of_credentials(credentials)
    if fault is not None:
        checked.say(Verdict.CHANGE, "credentials", f"{fault}; the service was not asked")
        return False
    for name in secrets_that_others_can_read(credentials):
        text = "every user of this machine can read it: chmod 600, and make it the agent's own"
        checked.say(Verdict.NOTE, "credentials", text, name)
    return True


def _check_clock(checked: Checked, page: str | None, credentials: Credentials) -> None:
    state = checked.clock = node.clock_state()
    if state.synchronised is None:
        checked.say(Verdict.NOTE, "clock", "whether it is synchronised is not known")
    elif state.synchronised:
        error = f", within {state.error_seconds * 1e3:.3g} ms" if state.error_seconds is not None else ""
        checked.say(Verdict.RIGHT, "clock", f"{state.told_by} says that it is synchronised{error}")
    else:
        text = (
            f"{state.told_by} says that it is not synchronised: time stamps of logs cannot be compared between nodes "
            "(exports can: their clocks are measured)"
        )
        checked.say(Verdict.NOTE, "clock", text)
    if page is not None:
        _check_offset(checked, page, credentials)


def _check_offset(checked: Checked, page: str, credentials: Credentials) -> None:
    offset = checked.clock_offset = node.clock_offset(page, credentials)
    if offset is None:
        text = "it does not answer with a date: give its whole URL, with https:// and --tls-ca FILE where it speaks TLS"
        checked.say(Verdict.CHANGE, "page", text, page)
        return
    told = f"this clock is {offset.seconds:+.1f} s off the service's, give or take {offset.uncertainty_seconds:.1f} s"
    is_off = abs(offset.seconds) > _TOLERATED_OFFSET_SECONDS + offset.uncertainty_seconds
    checked.say(Verdict.CHANGE if is_off else Verdict.RIGHT, "clock", told + (": set both right" if is_off else ""))


def _check_service(checked: Checked, host: str, port: int, credentials: Credentials) -> None:
    answer = checked.service = node.ask_service(host, port, credentials)
    address = f"{host}:{port}"
    if not answer.answered or answer.seconds is None:
        checked.say(Verdict.CHANGE, "service", answer.text, address)
    elif answer.protocol_version is None:
        checked.say(Verdict.NOTE, "service", f"it answered, and does not name its version: {answer.text}", address)
    elif not node.speaks_our_version(answer):
        text = f"it speaks protocol version {answer.protocol_version}, and agents from here {PROTOCOL_VERSION}"
        checked.say(Verdict.CHANGE, "service", f"{text}: install the same ncclscope on both", address)
    elif answer.refused is not None:
        checked.say(Verdict.CHANGE, "service", f"it would not let an agent in from here: {answer.refused}", address)
    else:
        text = f"it answered in {answer.seconds * 1e3:.1f} ms and speaks protocol version {answer.protocol_version}"
        lets_in = ", and would let them in" if answer.lets_in else ""
        checked.say(Verdict.RIGHT, "service", f"{text}, as agents from here do{lets_in}", address)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduler:
    """The scheduler that starts jobs here."""

    name: str
    job: str | None
    """The job that this process belongs to."""
    advice: str


_KNOWN: Final = (
    ("Slurm", "SLURM_JOB_ID", "srun ncclscope run -- COMMAND, or the site's prologs (docs/deploy-slurm.md)"),
    ("Kubernetes", "KUBERNETES_SERVICE_HOST", "an agent as a sidecar in each pod (docs/deploy-kubernetes.md)"),
    ("PBS", "PBS_JOBID", "ncclscope run -- COMMAND around each task (docs/commands.md)"),
    ("LSF", "LSB_JOBID", "ncclscope run -- COMMAND around each task (docs/commands.md)"),
    ("Flux", "FLUX_JOB_ID", "ncclscope run -- COMMAND around each task (docs/commands.md)"),
    ("torchrun", "TORCHELASTIC_RUN_ID", "ncclscope run -- torchrun ... on each node (docs/deploy-systemd.md)"),
)
"""Name, the variable that tells, and what to do. *Source:* srun(1); Kubernetes, "Accessing the API
from a Pod"; qsub(1B); bsub(1); flux-run(1); torchrun's documentation, "Environment variables"."""


def scheduler_here(environment: Mapping[str, str]) -> Scheduler | None:
    """The scheduler that the environment names; None if it names none. Slurm is asked before what runs in its jobs."""
    for name, variable, advice in _KNOWN:
        if environment.get(variable):
            job = environment[variable] if name != "Kubernetes" else None
            return Scheduler(name=name, job=job, advice=advice)
    return None


def secrets_that_others_can_read(credentials: Credentials) -> list[str]:
    """Files with a token or a key that every user of this machine can read, or change."""
    named = (credentials.token_file, credentials.tls_key or credentials.tls_cert)
    return [name for name in named if name and _mode(name) & (stat.S_IROTH | stat.S_IWOTH)]


def fault_of_credentials(credentials: Credentials) -> str | None:
    """Why one of the files cannot be used, and what to do; None if all can."""
    try:
        credentials.check()
    except ConfigError as error:
        return str(error)
    return None


def fault_of_spool(directory: str) -> str | None:
    """Why an agent could not keep its spool below this directory; None if it could."""
    place = Path(directory).absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        return f"{place} is no directory"
    if not os.access(place, os.W_OK | os.X_OK):
        return f"this user may not write to {place}: make a directory there that is the agent's own"
    if kind := _network_of(place):
        return f"{place} is on {kind}: take a disk of this node, which is there when the network is not"
    free, wanted = node.free_bytes(place), AgentSettings().spool_max_bytes
    if free is not None and free < wanted:
        return (
            f"the disk of {place} has {free / _GIB:.3g} GiB free, and the spool takes up to {wanted / _GIB:.3g} GiB: "
            "make room, or give the agent less with --spool-max-bytes"
        )
    return None


def left_in_spools(directory: str) -> tuple[int, int]:
    """How many agents that do not run have left something below this directory, and how many bytes."""
    held = _locked_inodes()
    sizes: list[int] = []
    try:
        for path in agent_directories(Path(directory)):
            if (path / SPOOL_LOCK).exists() and (path / SPOOL_LOCK).stat().st_ino not in held:
                sizes.append(left_bytes(path.absolute()))
    except (OSError, ConfigError):
        return 0, 0  # another user's, or changed while it was looked at
    return sum(size > 0 for size in sizes), sum(sizes)


def _locked_inodes() -> frozenset[int]:
    """Files that a process has locked; to take a lock would keep an agent from it. Source: proc_locks(5)."""
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return frozenset()
    words = [line.split() for line in lines]
    return frozenset(int(each[5].rpartition(":")[2]) for each in words if len(each) > 5 and each[1] == "FLOCK")


def _network_of(directory: Path) -> str | None:
    try:
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return shared_file_system(handle)
    except OSError:
        return None
    finally:
        os.close(handle)


def _mode(name: str) -> int:
    try:
        return os.stat(name).st_mode
    except OSError:
        return 0

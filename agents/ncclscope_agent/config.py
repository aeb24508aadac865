"""The agent's settings: one table, from which flags, environment and documentation come.

A setting is given by its flag (`--window-bytes`), else by its variable (`NCCLSCOPE_WINDOW_BYTES`; several
values are separated by colons), else by a file, else it has its default. `load` reports all faults at once.
"""

from __future__ import annotations

import hashlib
import re
import zoneinfo
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import Final, TypeVar, cast
from urllib.parse import urlsplit

from ncclscope_agent.credentials import Credentials
from ncclscope_wire.errors import ConfigError
from ncclscope_wire.loopback import is_loopback

LEAST_MEMORY_BYTES: Final = 128 * 1024**2
"""Beside the window: twice what the agent has while it reads an export of two million kernels."""
_OFFSET = re.compile(r"([+-])(\d\d):?(\d\d)")
_NS: Final = 1_000_000_000
_Value = TypeVar("_Value")
_TRUTHS: Final = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Description of one setting, beside its name and default."""

    help: str
    """A sentence, for `--help` and the documentation."""
    unit: str = ""
    """Unit or form of the value."""
    low: float | None = None
    high: float | None = None


def _set(default: _Value, text: str, *, unit: str = "", low: float | None = None, high: float | None = None) -> _Value:
    setting = Setting(help=text, unit=unit, low=low, high=high)
    return field(default=default, metadata={"setting": setting})


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """All settings of `ncclscope agent`."""

    logs: tuple[str, ...] = _set((), "NCCL logs to follow, including files that appear later.", unit="GLOB")
    exports: tuple[str, ...] = _set(
        (),
        "Directories in which nsys exports (.sqlite, .nsys-rep) and PyTorch traces (.pt.trace.json) appear.",
        unit="DIR",
    )
    inspector: tuple[str, ...] = _set(
        (), "Dumps of NCCL Inspector to follow (HOST-pidPID.log in NCCL_INSPECTOR_DUMP_DIR).", unit="GLOB"
    )
    flight_recorder: tuple[str, ...] = _set(
        (),
        "Dumps of PyTorch's Flight Recorder to read when they appear (TORCH_NCCL_DEBUG_INFO_TEMP_FILE and the rank).",
        unit="GLOB",
    )
    connect: str = _set("127.0.0.1:9797", "Address of the service.", unit="HOST:PORT")
    name: str = _set("", "Name of this agent on the page; default: the host's name.")
    job: str = _set("", "Name of the job that wrote the files; default: SLURM_JOB_ID, else 'default'.")
    log_timezone: str = _set(
        "auto",
        "Time zone of the log's stamps, which NCCL prints in local time. auto: local or UTC, "
        "whichever fits the file's last change.",
        unit="auto|UTC|local|±HH:MM|NAME",
    )
    nsys: str = _set("nsys", "Command that exports .nsys-rep files.", unit="COMMAND")
    release_logs: bool = _set(
        False,
        "Free the disk space of log data that the service has, by punching holes. It cannot be read again.",
        unit="yes|no",
    )
    release_owner: str = _set(
        "",
        "Release logs of this user only; required of an agent of root. Default: the owner of their folder, or the "
        "agent's user.",
        unit="USER",
    )
    follow_links: bool = _set(
        False,
        "Follow symbolic links to logs and dumps; who may write there can have the agent read what it may read.",
        unit="yes|no",
    )
    window_bytes: int = _set(
        16 * 1024**2,
        "Limit on data that is sent and not acknowledged. Beyond it, files wait unread.",
        unit="bytes",
        low=64 * 1024,
        high=1024**3,
    )
    window_batches: int = _set(4096, "The same limit as a number of batches.", unit="batches", low=1, high=1_000_000)
    spool: str = _set(
        "", "Keep unacknowledged data in this directory across restarts; default: in memory only.", unit="DIR"
    )
    spool_max_bytes: int = _set(
        1024**3, "Size limit of the spool. Beyond it, files wait unread.", unit="bytes", low=64 * 1024**2, high=2**40
    )
    spool_max_age_seconds: float = _set(
        259200.0,
        "Data that waits longer in the spool is dropped and counted as a gap.",
        unit="seconds",
        low=60,
        high=31_536_000,
    )
    spool_sync_seconds: float = _set(
        1.0,
        "Interval between syncs of the spool to disk: what a power loss may take.",
        unit="seconds",
        low=0.05,
        high=3600,
    )
    tick_min_seconds: float = _set(
        0.01,
        "Shortest pause between looks at logs; longer if that would take over 0.2 % of a core.",
        unit="seconds",
        low=0.01,
        high=10,
    )
    tick_max_seconds: float = _set(0.25, "Longest pause between looks at logs.", unit="seconds", low=0.01, high=60)
    gather_seconds: float = _set(
        1.0,
        "Longest time to collect log data before sending, if sending sooner would take over 0.2 % "
        "of a core. Values up to --tick-max-seconds: do not collect.",
        unit="seconds",
        low=0,
        high=10,
    )
    export_tick_seconds: float = _set(
        1.0, "Pause between looks for finished exports.", unit="seconds", low=0.05, high=60
    )
    ras: str = _set(
        "",
        "Address of NCCL's RAS (2.24 and newer, usually localhost:28028): ask it which ranks are dead or behind.",
        unit="HOST:PORT",
    )
    ras_seconds: float = _set(5.0, "Pause between questions to --ras.", unit="seconds", low=0.5, high=3600)
    counters: bool = _set(
        False,
        "Read the counters of this machine's NICs (sysfs) and GPUs (NVML), as evidence in findings.",
        unit="yes|no",
    )
    dcgm: str = _set(
        "",
        "Endpoint of dcgm-exporter (usually http://localhost:9400/metrics) that --counters asks about GPUs, not NVML.",
        unit="URL",
    )
    counters_seconds: float = _set(5.0, "Pause between looks of --counters.", unit="seconds", low=0.5, high=3600)
    nice: int = _set(
        10, "Niceness of the agent and its children; higher means lower priority; 0: unchanged.", low=0, high=19
    )
    io_priority: int = _set(
        7, "Best-effort I/O priority of the agent and its children; 7 is the lowest; -1: unchanged.", low=-1, high=7
    )
    max_cpu_percent: float = _set(
        25.0,
        "CPU budget, percent of one core over --budget-seconds. The agent slows down when it is "
        "used up, and stops at twice as much; 0: no limit.",
        unit="percent",
        low=0,
        high=6400,
    )
    max_memory_bytes: int = _set(
        512 * 1024**2,
        "Limit on resident memory. The agent stops after 10 s above it; 0: no limit.",
        unit="bytes",
        low=0,
        high=1024**4,
    )
    budget_seconds: float = _set(60.0, "Period of --max-cpu-percent.", unit="seconds", low=1, high=3600)
    heartbeat_seconds: float = _set(1.0, "Interval between heartbeats.", unit="seconds", low=0.05, high=10)
    silence_seconds: float = _set(
        20.0, "Reconnect if the service is silent for this long.", unit="seconds", low=0.2, high=3600
    )
    connect_seconds: float = _set(10.0, "Time limit of one attempt to connect.", unit="seconds", low=0.1, high=600)
    retry_seconds: float = _set(15.0, "Longest pause between attempts to connect.", unit="seconds", low=0.25, high=3600)
    flush_seconds: float = _set(
        5.0, "Time to send the rest when the agent is stopped.", unit="seconds", low=0, high=600
    )
    once_seconds: float = _set(300.0, "Time limit of --once.", unit="seconds", low=0.1, high=86400)
    tls: bool = _set(False, "Use TLS; implied by --tls-ca and --tls-cert.", unit="yes|no")
    tls_ca: str = _set("", "CA certificates that sign the service's certificate; default: the system's.", unit="FILE")
    tls_cert: str = _set("", "This agent's certificate (PEM), if the service requires one.", unit="FILE")
    tls_key: str = _set("", "Private key; default: in the certificate file.", unit="FILE")
    tls_server_name: str = _set(
        "", "Host name in the service's certificate; default: the host of --connect.", unit="NAME"
    )
    token_file: str = _set("", "File with this agent's token.", unit="FILE")
    log_format: str = _set(
        "auto", "Format of the agent's own log on stderr. auto: text at a terminal, else JSON.", unit="auto|json|text"
    )
    insecure: bool = _set(
        False, "Allow connections to other machines without TLS; anyone on the network can read them.", unit="yes|no"
    )

    @property
    def credentials(self) -> Credentials:
        """The files that say who is who."""
        return Credentials(
            tls=self.tls,
            tls_ca=self.tls_ca,
            tls_cert=self.tls_cert,
            tls_key=self.tls_key,
            server_name=self.tls_server_name,
            token_file=self.token_file,
        )

    @property
    def ras_address(self) -> tuple[str, int] | None:
        """Host and port of `ras`; None if it names none."""
        host, _, port = self.ras.rpartition(":")
        is_port = port.isascii() and port.isdigit() and 0 < int(port) < 2**16
        return (host.strip("[]"), int(port)) if host and is_port else None

    @property
    def service(self) -> tuple[str, int]:
        """Host and port of `connect`."""
        host, _, port = self.connect.rpartition(":")
        return host.strip("[]"), int(port)


def settings_table() -> Iterator[tuple[str, object, Setting]]:
    """Name, default and description of every setting, in the order of the documentation."""
    for known in fields(AgentSettings):
        yield known.name, known.default, cast(Setting, known.metadata["setting"])


def flag_of(name: str) -> str:
    """The command's flag of a setting."""
    return "--" + name.replace("_", "-")


def load(
    given: Mapping[str, object],
    environment: Mapping[str, str],
    *,
    host: str,
    file: Mapping[str, object] | None = None,
    sends_spools: bool = False,
) -> AgentSettings:
    """The settings, from what the command line gave (None or () if it gave nothing), the environment and a file.

    With `sends_spools` they are of one who only sends what agents have left, and follows nothing.

    Raises:
        ConfigError: names every setting that is wrong, its value and what is allowed.
    """
    values: dict[str, object] = {}
    faults: list[str] = []
    for name, default, about in settings_table():
        told = (given.get(name), environment.get(variable_of(name)), (file or {}).get(name))
        try:
            values[name] = _value(name, default, about, _first(told, is_list=isinstance(default, tuple)))
        except ValueError as fault:
            faults.append(f"{flag_of(name)}: {fault}")
            values[name] = default
    values["name"] = values["name"] or host
    values["job"] = values["job"] or environment.get("SLURM_JOB_ID") or "default"
    settings = AgentSettings(**values)  # type: ignore[arg-type]  # each was converted to its default's type
    files = settings.logs, settings.exports, settings.inspector, settings.flight_recorder
    if not sends_spools and not any((*files, settings.ras, settings.counters)):
        faults.append(
            "--logs, --exports, --inspector, --flight-recorder, --ras or --counters: at least one is needed, or there "
            "is nothing to follow"
        )
    if sends_spools and not settings.spool:
        faults.append("--spool: --send-spools needs the folder that the agents were given")
    faults.extend(_faults(settings))
    if faults:
        raise ConfigError("\n".join(faults))
    return settings


def variable_of(name: str) -> str:
    """The environment variable of a setting."""
    return "NCCLSCOPE_" + name.upper()


def agent_id(settings: AgentSettings, *, host: str, directory: str) -> str:
    """The same for every start of an agent with these patterns in this directory, so that it can read on.

    Two agents on one host that follow the same patterns need different names.
    """
    dumps = ["", *sorted(settings.inspector)] if settings.inspector else []
    dumps += ["", "flight", *sorted(settings.flight_recorder)] if settings.flight_recorder else []
    dumps += ["", "ras", settings.ras] if settings.ras else []
    dumps += ["", "counters"] if settings.counters else []
    identity = "\0".join([settings.name, directory, *sorted(settings.logs), "", *sorted(settings.exports), *dumps])
    return f"{host}-{hashlib.blake2s(identity.encode(errors='replace'), digest_size=6).hexdigest()}"


def zones_ns(zone: str, *, now_ns: int) -> tuple[int, ...]:
    """How far local time may be ahead of UTC in logs, the likeliest first: two with `auto`, which may be alike, and
    leave it to each file (`files/reading.py`).

    Raises:
        ValueError: there is no such zone.
    """
    if zone.lower() != "auto":
        return (zone_offset_ns(zone, now_ns=now_ns),)
    return zone_offset_ns("local", now_ns=now_ns), 0


def zone_offset_ns(zone: str, *, now_ns: int) -> int:
    """How far local time is ahead of UTC in that zone, now.

    A log that spans a change of summer time has stamps that are an hour off on one side of it.

    Raises:
        ValueError: there is no such zone.
    """
    now = datetime.fromtimestamp(now_ns // _NS, tz=UTC)
    offset = now.astimezone(_zone(zone)).utcoffset() or timedelta()
    return int(offset.total_seconds()) * _NS


def _zone(zone: str) -> tzinfo | None:
    """The zone; None stands for the machine's own."""
    if zone.lower() == "local":
        return None
    if zone.upper() == "UTC":
        return UTC
    if fixed := _OFFSET.fullmatch(zone):
        sign = -1 if fixed[1] == "-" else 1
        return timezone(sign * timedelta(hours=int(fixed[2]), minutes=int(fixed[3])))
    try:
        return zoneinfo.ZoneInfo(zone)
    except (zoneinfo.ZoneInfoNotFoundError, OSError) as error:
        raise ValueError(f"{zone!r} is no time zone") from error


def _first(told: Sequence[object], *, is_list: bool) -> object:
    """The first that says something; nothing in a list is nothing said."""
    return next((each for each in told if each is not None and (each or not is_list)), None)


def _value(name: str, default: object, about: Setting, given: object) -> object:
    if isinstance(default, tuple):
        parts = given.split(":") if isinstance(given, str) else cast(Sequence[str], given or ())
        return tuple(filter(None, parts))
    if given is None:
        return default
    if isinstance(default, bool):
        return _truth(str(given))
    if isinstance(default, str):
        return _text(name, str(given))
    return _number(default, about, given)


def _text(name: str, text: str) -> str:
    if name in ("name", "job") and len(text) > 200:
        raise ValueError("has over 200 characters")
    if name in ("name", "job") and not text.isprintable():
        raise ValueError("has characters that cannot be printed")
    return text


def _truth(text: str) -> bool:
    known = _TRUTHS.get(text.strip().lower())
    if known is None:
        raise ValueError(f"{text[:40]!r} is neither yes nor no")
    return known


def _number(default: object, about: Setting, given: object) -> float:
    number = _parsed(str(given), whole=isinstance(default, int))
    if not (about.low is None or number >= about.low) or not (about.high is None or number <= about.high):
        raise ValueError(f"{number} is not between {about.low:.10g} and {about.high:.10g} {about.unit}".rstrip())
    return number


def _parsed(text: str, *, whole: bool) -> float:
    try:
        return int(text) if whole else float(text)
    except ValueError:
        raise ValueError(f"{text[:40]!r} is not a {'whole ' if whole else ''}number") from None


def _faults(settings: AgentSettings) -> Iterator[str]:
    """Faults between settings, and of settings that have a form: a sentence each."""
    host, _, port = settings.connect.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 2**16:
        yield f"--connect: {settings.connect!r} is not HOST:PORT with a port of 1 to 65535"
    elif not (settings.credentials.is_encrypted or settings.insecure or is_loopback(settings.service[0])):
        yield (
            f"--connect: {settings.service[0]} is another machine: give --tls or --tls-ca FILE, or say --insecure "
            "where the network is trusted"
        )
    if settings.ras and settings.ras_address is None:
        yield f"--ras: {settings.ras!r} is not HOST:PORT with a port of 1 to 65535"
    if settings.dcgm and not settings.counters:
        yield "--dcgm says whom --counters asks about GPUs: give --counters too"
    if settings.dcgm and not _is_endpoint(settings.dcgm):
        yield f"--dcgm: {settings.dcgm!r} is not the address of an endpoint, such as http://localhost:9400/metrics"
    if settings.log_format not in ("auto", "json", "text"):
        yield f"--log-format: {settings.log_format!r} is not auto, json or text"
    if settings.tls_key and not settings.tls_cert:
        yield "--tls-key: there is no --tls-cert that it belongs to"
    if 0 < settings.max_memory_bytes < settings.window_bytes + LEAST_MEMORY_BYTES:
        least = settings.window_bytes + LEAST_MEMORY_BYTES
        yield f"--max-memory-bytes: {settings.max_memory_bytes} is under {least}, with this --window-bytes"
    if settings.tick_min_seconds > settings.tick_max_seconds:
        yield f"--tick-min-seconds: {settings.tick_min_seconds} is over --tick-max-seconds {settings.tick_max_seconds}"
    if settings.silence_seconds < 2 * settings.heartbeat_seconds:
        yield f"--silence-seconds: {settings.silence_seconds} is under two heartbeats of {settings.heartbeat_seconds}"
    try:
        zones_ns(settings.log_timezone, now_ns=0)
    except ValueError as fault:
        yield f"--log-timezone: {fault}; give auto, UTC, local, +02:00 or a name such as Europe/Berlin"


def _is_endpoint(address: str) -> bool:
    """Whether this is the address of an endpoint: http or https, with a host."""
    parts = urlsplit(address)
    return parts.scheme in ("http", "https") and bool(parts.hostname)

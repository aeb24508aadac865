"""`ncclscope agent`: follows logs and exports on one node, and sends them to the service."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeVar

import anyio
import click
import structlog

from ncclscope import __version__
from ncclscope.config_file import keys_of_agent, read_table
from ncclscope.logs import configure_logs
from ncclscope.options import sectioned
from ncclscope_agent.app import Agent, stop_on_signal
from ncclscope_agent.budget import BudgetLimits
from ncclscope_agent.config import AgentSettings, agent_id, flag_of, load, settings_table, variable_of
from ncclscope_agent.following import followers
from ncclscope_agent.left_spools import Fate, LeftSpools, SendLimits
from ncclscope_agent.link.frames import WindowLimits
from ncclscope_agent.link.network import LinkSettings
from ncclscope_agent.link.session import AnySession, Session
from ncclscope_agent.printed import print_batches
from ncclscope_agent.priority import step_back
from ncclscope_agent.spool.contents import Spool
from ncclscope_agent.spool.directory import SpoolDirectory
from ncclscope_agent.spool.keeper import SpoolKeeper
from ncclscope_agent.spool.limits import SpoolLimits
from ncclscope_agent.spool.records import Owner
from ncclscope_agent.spool.session import SpooledSession
from ncclscope_wire.errors import ConfigError
from ncclscope_wire.messages import PROTOCOL_VERSION, Hello

_log = structlog.get_logger(__name__)

OVER_BUDGET = 3
"""Exit status of an agent that stopped itself."""

_LEAVES_WITHIN_S = 30.0
"""After its budget was spent: last words take a second, a spool that is synced `--flush-seconds`."""

WAITS = 1
"""Exit status of --once and --send-spools: not everything could be handed over in time."""
STUCK = 4
"""Exit status of --send-spools: something cannot be sent as things are."""

_Function = TypeVar("_Function", bound=Callable[..., object])


def _readable(name: str, value: object) -> str:
    """A default as a person reads it: bytes in MiB."""
    if name.endswith("_bytes") and isinstance(value, int) and value >= 1 << 20 and value % (1 << 20) == 0:
        return f"{value}, which is {value >> 20:,} MiB"
    return str(value)


def _setting_options(function: _Function) -> _Function:
    """One flag for every setting of the agent, from its table."""
    for name, default, about in reversed(list(settings_table())):
        shown = "" if default in ("", (), False) else f"  [default: {_readable(name, default)}]"
        told = f"{about.help}{shown}  [{variable_of(name)}]"
        if isinstance(default, bool):
            function = click.option(flag_of(name), name, flag_value="yes", default=None, help=told)(function)
            continue
        is_list = isinstance(default, tuple)
        metavar = about.unit or "TEXT"
        function = click.option(flag_of(name), name, multiple=is_list, metavar=metavar, help=told)(function)
    return function


_SECTIONS: Final = {
    "What to read": (
        "logs",
        "exports",
        "inspector",
        "flight_recorder",
        "ras",
        "counters",
        "dcgm",
        "log_timezone",
        "nsys",
        "follow_links",
    ),
    "Where to send": ("connect", "name", "job", "config_file"),
    "TLS and token": ("tls", "tls_ca", "tls_cert", "tls_key", "tls_server_name", "token_file", "insecure"),
    "Instead of following": ("print_only", "once", "once_seconds", "send_spools"),
    "Logs that were read": ("release_logs", "release_owner"),
    "While the service is away": (
        *("spool", "spool_max_bytes", "spool_max_age_seconds", "spool_sync_seconds", "window_bytes", "window_batches"),
    ),
    "Budget": ("max_cpu_percent", "max_memory_bytes", "budget_seconds", "nice", "io_priority"),
    "Pace": (
        *("tick_min_seconds", "tick_max_seconds", "gather_seconds", "export_tick_seconds", "ras_seconds"),
        *("counters_seconds", "heartbeat_seconds", "silence_seconds", "connect_seconds", "retry_seconds"),
        "flush_seconds",
    ),
}


@click.command(cls=sectioned(_SECTIONS), context_settings={"help_option_names": ["-h", "--help"]})
@_setting_options
@click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    envvar="NCCLSCOPE_CONFIG",
    help="TOML file with settings in the table [agent]; flags and variables override it.",
)
@click.option("--print", "print_only", is_flag=True, help="Print what would be sent, and do not connect.")
@click.option(
    "--once", is_flag=True, help="Read everything that is there, send it, wait for acknowledgement, and exit."
)
@click.option("--send-spools", is_flag=True, help="Send what ended agents left below --spool, delete it, and exit.")
def agent(*, config_file: Path | None, print_only: bool, once: bool, send_spools: bool, **given: object) -> None:
    """Follow NCCL logs and nsys exports on this node and send them to the service.

    SIGTERM and SIGINT send the rest and stop it. Exit status: 0 done; 1 not everything was sent in time (--once,
    --send-spools); 2 wrong settings; 3 the agent stopped itself over its budget; 4 something cannot be sent
    (--send-spools).
    """
    if send_spools and (print_only or once):
        raise click.UsageError("--send-spools follows nothing: leave out --print and --once")
    full_host = socket.gethostname()
    # NCCL prints the host's name up to the first dot (src/misc/utils.cc:getHostName), and exports are held against it.
    host = full_host.partition(".")[0]
    try:
        in_file = {} if config_file is None else read_table(config_file, "agent", keys_of_agent())
        settings = load(given, os.environ, host=host, file=in_file, sends_spools=send_spools)
        if print_only or once:
            settings = replace(settings, max_cpu_percent=0)  # somebody waits for it to end
        if not print_only:
            settings.credentials.check()
        configure_logs(settings.log_format)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    if refused := step_back(nice=settings.nice, io_priority=settings.io_priority):
        _log.warning("priority_refused", why="; ".join(refused))
    with ExitStack() as resources:
        if print_only:
            anyio.run(_print, settings, host, once, resources)
            return
        if send_spools:
            _send_spools(settings)
            return
        hello = _hello(settings, host=host, full_host=full_host)
        try:
            ended = anyio.run(_run, settings, hello, once, resources)
        except ConfigError as error:
            raise click.UsageError(str(error)) from error
    if ended.stopped_because is not None:
        click.echo(f"ncclscope agent: stopped itself: {ended.stopped_because}", err=True)
        raise click.exceptions.Exit(OVER_BUDGET)
    if once and not ended.is_complete:
        raise click.exceptions.Exit(WAITS)


def _send_spools(settings: AgentSettings) -> None:
    limits = SendLimits(spool=_spool_limits(settings), window=_window(settings), seconds=settings.once_seconds)
    left = LeftSpools(Path(settings.spool), _link(settings), limits, software_version=__version__)
    try:
        fates = anyio.run(left.send)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    if fates[Fate.STUCK]:
        raise click.exceptions.Exit(STUCK)
    if fates[Fate.WAITS]:
        raise click.exceptions.Exit(WAITS)


def _hello(settings: AgentSettings, *, host: str, full_host: str) -> Hello:
    return Hello(
        protocol_version=PROTOCOL_VERSION,
        agent_id=agent_id(settings, host=full_host, directory=os.getcwd()),
        session_id=secrets.token_hex(8),
        name=settings.name,
        host=host,
        job=settings.job,
        software_version=__version__,
        pid=os.getpid(),
    )


@dataclass(frozen=True, slots=True)
class _Ended:
    """How the agent ended."""

    is_complete: bool
    """Everything that was read was acknowledged in time."""
    stopped_because: str | None


async def _run(settings: AgentSettings, hello: Hello, once: bool, resources: ExitStack) -> _Ended:
    followed = followers(settings, resources, host=hello.host, now_wall_ns=time.time_ns())
    limits = _window(settings)
    is_complete = False
    keeper = _spool(settings, hello, resources) if settings.spool else None
    if keeper is None:
        session: AnySession = Session(hello, limits=limits)
    else:
        session = SpooledSession(
            hello,
            keeper.spool,
            new_id=lambda: secrets.token_hex(8),
            holds=lambda key, position: any(known.follower.holds(key, position) for known in followed),
            limits=limits,
        )
    budget = BudgetLimits(
        cpu_share=settings.max_cpu_percent / 100,
        seconds=settings.budget_seconds,
        memory_bytes=settings.max_memory_bytes,
    )
    running = Agent(
        session,
        _link(settings),
        followed,
        flush_seconds=settings.flush_seconds,
        spool=keeper,
        budget=budget,
        on_spent=_leave_for_certain,
    )
    async with anyio.create_task_group() as tasks:
        await tasks.start(stop_on_signal, running.stop)
        is_complete = await running.run(once_seconds=settings.once_seconds if once else None)
        tasks.cancel_scope.cancel()
    return _Ended(is_complete, running.stopped_because)


def _leave_for_certain() -> None:
    """Has the process end, whatever a thread of it hangs in, unless it ends by itself before."""
    timer = threading.Timer(_LEAVES_WITHIN_S, os._exit, (OVER_BUDGET,))
    timer.daemon = True
    timer.start()


def _spool(settings: AgentSettings, hello: Hello, resources: ExitStack) -> SpoolKeeper:
    """The spool of this agent: a directory of its own, so that several may be given the same one."""
    directory = SpoolDirectory(Path(settings.spool) / hello.agent_id)
    owner = Owner(hello.agent_id, name=hello.name, host=hello.host, job=hello.job)
    spool = Spool(owner, limits=_spool_limits(settings))
    keeper = resources.enter_context(SpoolKeeper(spool, directory))
    keeper.recover()
    return keeper


def _link(settings: AgentSettings) -> LinkSettings:
    service_host, service_port = settings.service
    return LinkSettings(
        host=service_host,
        port=service_port,
        credentials=settings.credentials,
        connect_seconds=settings.connect_seconds,
        heartbeat_seconds=settings.heartbeat_seconds,
        silence_seconds=settings.silence_seconds,
        last_retry_seconds=settings.retry_seconds,
    )


def _window(settings: AgentSettings) -> WindowLimits:
    return WindowLimits(max_bytes=settings.window_bytes, max_batches=settings.window_batches)


def _spool_limits(settings: AgentSettings) -> SpoolLimits:
    return SpoolLimits(
        max_bytes=settings.spool_max_bytes,
        max_age_ns=int(settings.spool_max_age_seconds * 1e9),
        entries_bytes=settings.spool_max_bytes // 8,
        pending_bytes=settings.window_bytes,
        sync_ns=int(settings.spool_sync_seconds * 1e9),
    )


async def _print(settings: AgentSettings, host: str, once: bool, resources: ExitStack) -> None:
    followed = followers(settings, resources, host=host, now_wall_ns=time.time_ns())
    stopping = anyio.Event()
    async with anyio.create_task_group() as tasks:
        await tasks.start(stop_on_signal, stopping.set)
        await print_batches(followed, click.echo, stopping, once=once)
        tasks.cancel_scope.cancel()

"""`ncclscope serve`: the service, until it is stopped."""

from __future__ import annotations

import re
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from ncclscope import __version__
from ncclscope.config_file import config_option
from ncclscope.extras import require_service, require_writable
from ncclscope.logs import configure_logs
from ncclscope.notifications import Notifications, notification_options
from ncclscope.options import gathered, sectioned
from ncclscope.pipeline_options import PipelineOptions, pipeline_options
from ncclscope.security import Security, security_options

if TYPE_CHECKING:
    from ncclscope_service.keep.persistence import PersistenceSettings

_UNSYNCED_SECONDS: Final = 0.005
_STATES_PER_JOURNAL: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """The options that say how the state is kept on disk, as given."""

    journal_fsync: str
    journal_limit: int
    state_every: float
    stop_seconds: float

    def for_service(self) -> PersistenceSettings:
        """As the service takes them. Raises click.UsageError."""
        from ncclscope_service.keep.journal import JournalSettings  # noqa: PLC0415  (needs [service])
        from ncclscope_service.keep.persistence import PersistenceSettings  # noqa: PLC0415

        group_seconds = _group_seconds(self.journal_fsync)
        max_bytes = self.journal_limit << 20
        return PersistenceSettings(
            journal=JournalSettings(
                group_seconds=_UNSYNCED_SECONDS if group_seconds is None else group_seconds,
                sync=group_seconds is not None,
                max_bytes=max_bytes,
                retained_bytes=max_bytes // 2,
            ),
            state_every_seconds=60 * self.state_every,
            state_every_bytes=max_bytes // _STATES_PER_JOURNAL,
        )


keeping_options: Final = gathered(
    "keeping",
    Keeping,
    click.option(
        "--journal-fsync",
        default="20",
        show_default=True,
        metavar="MS|off",
        help="How long batches wait to be synced to disk together, before they are acknowledged. off: "
        "do not sync; a power loss may lose acknowledged data.",
    ),
    click.option(
        "--journal-limit",
        type=click.IntRange(64),
        default=1024,
        show_default=True,
        metavar="MIB",
        help="Size limit of the journal on disk. The state is written after every eighth of it.",
    ),
    click.option(
        "--state-every",
        type=click.FloatRange(0.05),
        default=5.0,
        show_default=True,
        metavar="MINUTES",
        help="Write the state at least this often. A restart repeats at most this much work.",
    ),
    click.option(
        "--stop-seconds",
        type=click.FloatRange(min=1),
        default=45.0,
        show_default=True,
        metavar="SECONDS",
        help="Time limit for stopping. What is not decided or written by then is left to the next start.",
    ),
)
"""Adds the options; the command gets them as `keeping`."""


def _group_seconds(text: str) -> float | None:
    """The value of --journal-fsync in seconds; None for off."""
    if text == "off":
        return None
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = -1.0
    if not 0 <= milliseconds <= 10_000:
        raise click.UsageError(f"--journal-fsync: {text!r} is neither off nor milliseconds from 0 to 10000")
    return milliseconds * 1e-3


_SECTIONS: Final = {
    "Ports and data": ("listen", "http", "probes", "data", "config"),
    "TLS and who may connect": (
        *("tls_cert", "tls_key", "client_ca", "agent_tokens", "http_tls", "http_client_ca", "http_tokens", "insecure"),
    ),
    "Who gets findings and metrics": ("webhooks", "apprise_urls", "otlp_url", "least", "public_url"),
    "Reports of jobs": ("snapshot_on_end", "keep_snapshots", "job_silence"),
    "What is known of the machine and the job": (
        *("baseline", "calibration", "models", "gpu", "gpus_per_node", "tp", "pp", "dp", "ep", "cp", "set"),
    ),
    "State on disk": ("journal_fsync", "journal_limit", "state_every", "stop_seconds"),
}


@click.command(
    cls=sectioned(_SECTIONS),
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "NCCLSCOPE_SERVE"},
)
@click.option(
    "--listen", default="127.0.0.1:9797", show_default=True, metavar="HOST:PORT", help="Address that agents connect to."
)
@click.option(
    "--http",
    default="127.0.0.1:9798",
    show_default=True,
    metavar="HOST:PORT",
    help="Address of the live page, /metrics and the API.",
)
@click.option(
    "--probes",
    metavar="HOST:PORT",
    help="Serve /healthz and /readyz here too, without TLS, from a thread of their own: for probes that must not wait "
    "for the service's work.",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("ncclscope-data"),
    show_default=True,
    help="Folder for state, journal and finished operations (parquet). Each service needs its own.",
)
@keeping_options
@click.option(
    "--snapshot-on-end",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write the files of `ncclscope snapshot` to this folder when the service stops, and to a "
    "subfolder for each job that ends.",
)
@click.option(
    "--keep-snapshots",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    metavar="N",
    help="Number of subfolders of ended jobs to keep; older ones are deleted.",
)
@click.option(
    "--job-silence",
    type=click.FloatRange(min=1),
    default=1800.0,
    show_default=True,
    metavar="SECONDS",
    help="A job that was silent for this long has ended, even if it never said so.",
)
@click.option(
    "--log-format",
    type=click.Choice(["auto", "json", "text"]),
    default="auto",
    show_default=True,
    help="Format of the service's own log on stderr. auto: text at a terminal, else JSON.",
)
@security_options
@pipeline_options
@notification_options
def serve(
    *,
    listen: str,
    http: str,
    probes: str | None,
    data: Path,
    keeping: Keeping,
    snapshot_on_end: Path | None,
    log_format: str,
    security: Security,
    keep_snapshots: int,
    job_silence: float,
    pipeline: PipelineOptions,
    notifications: Notifications,
) -> None:
    """Run the service: it takes data from agents and serves the live page, /metrics and the API."""
    require_service()
    configure_logs(log_format)
    import anyio  # noqa: PLC0415  (the packages of the service are only there now)

    from ncclscope_service.app import ServiceSettings, run_service  # noqa: PLC0415
    from ncclscope_service.serve.listen import ListenSettings  # noqa: PLC0415

    agents_host, agents_port = address_of(listen, "--listen")
    http_host, http_port = address_of(http, "--http")
    security.check(listen=agents_host, http=http_host)
    require_writable(data, "--data")
    if snapshot_on_end is not None:
        require_writable(snapshot_on_end, "--snapshot-on-end")
    settings = ServiceSettings(
        version=__version__,
        agents=ListenSettings(host=agents_host, port=agents_port),
        http_host=http_host,
        http_port=http_port,
        probes=None if probes is None else address_of(probes, "--probes"),
        agent_files=security.for_agents(),
        http_files=security.for_http(),
        data=data,
        persistence=keeping.for_service(),
        pipeline=pipeline.settings(),
        read_thresholds=pipeline.thresholds,
        receivers=notifications.for_service(),
        push_metrics=notifications.pushers(),
        public_url=notifications.public_url,
        snapshot_on_end=snapshot_on_end,
        snapshots_kept=keep_snapshots,
        job_silence_ns=round(job_silence * 1e9),
        stop_seconds=keeping.stop_seconds,
    )

    def say_where(agents: int, web: int) -> None:
        scheme, files = "http" if settings.http_files.cert is None else "https", settings.agent_files
        page = f"{scheme}://{_reachable(http_host)}:{web}/"
        needs = {"--tls-ca": files.cert, "--token-file": files.tokens, "--tls-cert": files.client_ca}
        more = "".join(f" {option} FILE" for option, file in needs.items() if file is not None)
        click.echo(f"live page   {page}")
        click.echo(f"metrics     {page}metrics")
        click.echo(f"agents      ncclscope agent --connect {_reachable(agents_host)}:{agents}{more}")
        sys.stdout.flush()

    anyio.run(lambda: run_service(settings, on_started=say_where))


serve.params.append(config_option("serve"))


def _reachable(host: str) -> str:
    """The address at which others reach what listens on this one: of all addresses, this machine's name."""
    return socket.getfqdn() if host in ("0.0.0.0", "::") else host


def address_of(text: str, option: str) -> tuple[str, int]:
    """Host and port of an address as given.

    Raises:
        click.UsageError: it has not that form.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise click.UsageError(f"{option}: {text!r} is not HOST:PORT, for instance 127.0.0.1:9797")
    return host.strip("[]"), int(port)


def ports_of_service(printed: str) -> tuple[int, int] | None:
    """The ports for agents and for the page in what `ncclscope serve` prints; None if it does not listen yet."""
    web, agents = re.search(r"live page +https?://[^:]+:(\d+)/", printed), re.search(r"--connect [^:]+:(\d+)", printed)
    return None if web is None or agents is None else (int(agents[1]), int(web[1]))


def is_free_port(port: int) -> bool:
    """Whether nobody listens on a port of this machine."""
    try:
        with socket.create_server(("127.0.0.1", port)):
            return True
    except OSError:
        return False

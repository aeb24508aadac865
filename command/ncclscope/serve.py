"""`ncclscope serve`: the service, until it is stopped."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ncclscope import __version__
from ncclscope.baseline import baseline_option, read_baselines
from ncclscope.config_file import config_option
from ncclscope.extras import require_service, require_writable
from ncclscope.keeping import Keeping, keeping_options
from ncclscope.logs import configure_logs
from ncclscope.notifications import Notifications, notification_options
from ncclscope.security import Security, security_options
from ncclscope.sizes import Sizes, size_options


@click.command(
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "NCCLSCOPE_SERVE"},
)
@click.option(
    "--listen", default="127.0.0.1:9797", show_default=True, metavar="HOST:PORT", help="Where agents connect."
)
@click.option(
    "--http",
    default="127.0.0.1:9798",
    show_default=True,
    metavar="HOST:PORT",
    help="Where the live page, /metrics and the API are.",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("ncclscope-data"),
    show_default=True,
    help="Folder for state, journal and finished operations (parquet); one service each.",
)
@keeping_options
@click.option(
    "--snapshot-on-end",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder that gets the files of `ncclscope snapshot` when the service is stopped, and, in a folder of its own, "
    "those of each job that ends.",
)
@click.option(
    "--keep-snapshots",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    metavar="N",
    help="Folders of ended jobs to keep; the oldest are removed.",
)
@click.option(
    "--job-silence",
    type=click.FloatRange(min=1),
    default=1800.0,
    show_default=True,
    metavar="SECONDS",
    help="A job that said nothing for so long has ended, also where it did not say so.",
)
@click.option(
    "--log-format",
    type=click.Choice(["auto", "json", "text"]),
    default="auto",
    show_default=True,
    help="How the service tells of itself on stderr; auto: text at a terminal, else JSON.",
)
@security_options
@baseline_option
@size_options
@notification_options
def serve(
    listen: str,
    http: str,
    data: Path,
    keeping: Keeping,
    snapshot_on_end: Path | None,
    log_format: str,
    security: Security,
    keep_snapshots: int,
    job_silence: float,
    baselines: tuple[Path, ...],
    sizes: Sizes,
    notifications: Notifications,
) -> None:
    """Run the service: agents connect to it; it serves the live page, /metrics and the API."""
    require_service()
    configure_logs(log_format)
    import anyio  # noqa: PLC0415  (the packages of the service are only there now)

    from ncclscope_service.app import ServiceSettings, run_service  # noqa: PLC0415
    from ncclscope_service.listen import ListenSettings  # noqa: PLC0415
    from ncclscope_service.pipeline import PipelineSettings  # noqa: PLC0415

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
        agent_files=security.for_agents(),
        http_files=security.for_http(),
        data=data,
        persistence=keeping.for_service(),
        pipeline=PipelineSettings(
            sizes=sizes.for_pipeline(), gpus_per_node=sizes.gpus_per_node, baseline=read_baselines(baselines)
        ),
        webhooks=notifications.for_service(),
        public_url=notifications.public_url,
        snapshot_on_end=snapshot_on_end,
        snapshots_kept=keep_snapshots,
        job_silence_ns=round(job_silence * 1e9),
        stop_seconds=keeping.stop_seconds,
    )

    def say_where(agents: int, web: int) -> None:
        scheme = "http" if settings.http_files.cert is None else "https"
        click.echo(f"live page   {scheme}://{http_host}:{web}/")
        click.echo(f"metrics     {scheme}://{http_host}:{web}/metrics")
        click.echo(f"agents      ncclscope agent --connect {agents_host}:{agents}")
        sys.stdout.flush()

    anyio.run(lambda: run_service(settings, on_started=say_where))


serve.params.append(config_option("serve"))


def address_of(text: str, option: str) -> tuple[str, int]:
    """Host and port of an address as given.

    Raises:
        click.UsageError: it has not that form.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise click.UsageError(f"{option}: {text!r} is not HOST:PORT, for instance 127.0.0.1:9797")
    return host.strip("[]"), int(port)

"""`ncclscope snapshot`: the files of a run, asked of a running service or read from what a stopped one left."""

from __future__ import annotations

import io
import urllib.parse
import zipfile
from pathlib import Path, PurePosixPath
from typing import Final

import click

from ncclscope.extras import require_service, require_writable
from ncclscope.service_port import ask, service_options
from ncclscope_agent.credentials import Credentials

_MINUTE_NS: Final = 60_000_000_000


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--out", required=True, type=click.Path(path_type=Path, file_okay=False), help="Output folder.")
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Read the folder of a stopped service (`serve --data`) instead.",
)
@click.option("--job", help="Only this job.")
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), help="Only the last N minutes.")
@service_options
def snapshot(
    out: Path,
    data: Path | None,
    job: str | None,
    minutes: float | None,
    service: str,
    credentials: Credentials,
) -> None:
    """Write the files of `analyze` and a Chrome trace of what a running service has in memory.

    With --data, of what a stopped service had in memory; --minutes then count back from its end.
    """
    require_writable(out, "--out")
    if data is not None:
        for path in write_stopped(data, out, job=job, minutes=minutes):
            click.echo(path)
        return
    for name in fetch_snapshot(service, out, job=job, minutes=minutes, credentials=credentials):
        click.echo(out / name)


def write_stopped(data: Path, out: Path, *, job: str | None, minutes: float | None) -> list[Path]:
    """Writes the files of what a stopped service left in its data folder, and gives their paths.

    Raises:
        click.ClickException: packages are missing, or nothing of that job is there.
        ConfigError: nothing can be read from the folder.
    """
    require_service()
    from ncclscope_service.export.directory import write_run  # noqa: PLC0415  (needs the packages of the service)
    from ncclscope_service.keep.restoring import read_stopped  # noqa: PLC0415

    state = read_stopped(data)
    store = state.pipeline.store
    jobs = sorted({communicator.job for communicator in store.communicators})
    if job is not None and job not in jobs:
        raise click.ClickException(f"--job {job}: not in {data}, which has {', '.join(jobs) or 'none'}")
    since_ns = None if minutes is None else state.at_ns - round(minutes * _MINUTE_NS)
    return list(write_run(store, out, job=job, since_ns=since_ns).values())


def fetch_snapshot(
    service: str,
    out: Path,
    *,
    job: str | None = None,
    minutes: float | None = None,
    credentials: Credentials | None = None,
) -> list[str]:
    """Writes the files of a snapshot into `out` and gives their names.

    Raises:
        click.ClickException: the service is not there, or refuses; says which and what to do.
    """
    given = (("job", job), ("minutes", minutes))
    asked = {name: str(value) for name, value in given if value is not None}
    path = "/api/snapshot" + (f"?{urllib.parse.urlencode(asked)}" if asked else "")
    return _unpack(io.BytesIO(ask(service, path, method="POST", credentials=credentials)), out)


def _unpack(packed: io.BytesIO, out: Path) -> list[str]:
    """Writes the members under `out`, each whole or not at all; names may not leave it."""
    out.mkdir(parents=True, exist_ok=True)
    names: list[str] = []
    with zipfile.ZipFile(packed) as members:
        for member in members.infolist():
            name = PurePosixPath(member.filename).name
            unfinished = out / f".{name}.part"
            unfinished.write_bytes(members.read(member))
            unfinished.replace(out / name)
            names.append(name)
    return names

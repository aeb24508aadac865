"""`ncclscope grafana push`: dashboards and alert rules into a running Grafana."""

from __future__ import annotations

from pathlib import Path

import click

from ncclscope.extras import require_grafana
from ncclscope.grafana_push import LIVE_PAGE, Wish, packaged_files, push, read_content


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def grafana() -> None:
    """Dashboards and alert rules for Grafana."""


@grafana.command("push", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--url", required=True, metavar="URL", help="Grafana's address; a path before /api is kept.")
@click.option(
    "--token",
    envvar="NCCLSCOPE_GRAFANA_TOKEN",
    metavar="TOKEN",
    help="Token of a service account. Visible in the list of processes; prefer --token-file.",
)
@click.option("--token-file", type=click.Path(path_type=Path, dir_okay=False, exists=True), help="File with the token.")
@click.option(
    "--prometheus", metavar="URL", help="Create a data source for this Prometheus (its address as Grafana sees it)."
)
@click.option("--datasource", metavar="UID", help="Use this existing data source.")
@click.option(
    "--live-page", default=LIVE_PAGE, show_default=True, metavar="URL", help="Address of ncclscope's page in links."
)
@click.option("--webhook", metavar="URL", help="Create a contact point and send the alerts there.")
@click.option("--insecure", is_flag=True, help="Do not verify Grafana's certificate.")
def push_command(
    url: str,
    token: str | None,
    token_file: Path | None,
    prometheus: str | None,
    datasource: str | None,
    live_page: str,
    webhook: str | None,
    insecure: bool,
) -> None:
    """Install folder, data source, dashboards and alert rules into Grafana; existing objects stay untouched."""
    require_grafana()
    from ncclscope.grafana_port import HttpGrafana  # noqa: PLC0415

    if prometheus is not None and datasource is not None:
        raise click.UsageError("--prometheus makes a data source, --datasource uses another one: give one of them")
    server = HttpGrafana(url, _token(token, token_file), verify=not insecure)
    wish = Wish(prometheus=prometheus, datasource=datasource, live_page=live_page, webhook=webhook)
    for pushed in push(server, read_content(packaged_files()), wish):
        click.echo(f"{pushed.change:9}  {pushed.what}")


def _token(token: str | None, file: Path | None) -> str:
    if file is not None:
        token = file.read_text().strip()
    if not token:
        raise click.UsageError(
            "give the token of a service account with --token-file, NCCLSCOPE_GRAFANA_TOKEN or --token"
        )
    return token

"""Plans what has to be in Grafana, and makes the calls that bring it there: nothing is sent that is there already.

Never touched: notification policies (the API replaces the whole tree), data sources by number (refused by Grafana 13),
and whatever lies outside ncclscope's own folder, rule group, data source and contact point.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from ncclscope.grafana_port import Answer, GrafanaError, GrafanaPort

Json = dict[str, Any]

FOLDER: Final = "ncclscope"
DATASOURCE: Final = "ncclscope-prometheus"
CONTACT_POINT: Final = "ncclscope-webhook"
LIVE_PAGE: Final = "http://localhost:9798"
"""As the generated files have it."""

_SERVER_SETS: Final = frozenset({"id", "version"})


class Change(StrEnum):
    """The outcome of pushing one thing."""

    CREATED = "created"
    UPDATED = "updated"
    UNCHANGED = "unchanged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """One thing that is in Grafana now."""

    what: str
    change: Change


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """The generated files."""

    dashboards: Sequence[Json]
    rule_group: Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """How the content is fitted to one Grafana."""

    prometheus: str | None = None
    """Address of the Prometheus that scrapes ncclscope, as Grafana reaches it: makes a data source for it."""
    datasource: str | None = None
    """Uid of a data source that is there already."""
    live_page: str = LIVE_PAGE
    """Where people reach ncclscope's page: links and runbooks lead there."""
    webhook: str | None = None
    """Makes a contact point and sends the alerts to it; without it they follow Grafana's own policies."""


def packaged_files() -> Path:
    """The folder of the generated files: in the package, or beside it in a checkout."""
    packaged = Path(__file__).parent / "grafana_files"
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "dashboards" / "grafana"


def read_content(folder: Path) -> Content:
    """The dashboards and rules in a folder; raises GrafanaError if they are not there."""
    boards = [json.loads(path.read_bytes()) for path in sorted(folder.glob("ncclscope-*.json"))]
    if not boards:
        raise GrafanaError(f"{folder}: there are no dashboards: run `python dashboards/generate` in a checkout")
    return Content(dashboards=boards, rule_group=json.loads((folder / "alert-rules.json").read_bytes()))


def push(grafana: GrafanaPort, content: Content, wish: Wish) -> Iterator[Pushed]:
    """Brings everything there, in the order in which one thing needs the other; says of each what it did.

    Raises:
        GrafanaError: Grafana refuses something; what came before it is there.
    """
    _check_health(grafana)
    yield _push_folder(grafana)
    datasource = wish.datasource or DATASOURCE
    yield _push_datasource(grafana, datasource, wish.prometheus)
    for board in content.dashboards:
        yield _push_dashboard(grafana, _fitted_board(board, wish.live_page, datasource))
    if wish.webhook is not None:
        yield _push_contact_point(grafana, wish.webhook)
    yield _push_rules(grafana, _fitted_rules(content.rule_group, datasource, wish))


def _check_health(grafana: GrafanaPort) -> None:
    health = grafana.call("GET", "/health")
    if not health.is_success:
        raise GrafanaError(f"Grafana is not well: {health.message}")


def _push_folder(grafana: GrafanaPort) -> Pushed:
    what = f"folder {FOLDER}"
    there = grafana.call("GET", f"/folders/{FOLDER}")
    if there.is_success:
        return Pushed(what=what, change=Change.UNCHANGED)  # its title is the owner's business
    _must_be_absent(there, what)
    made = grafana.call("POST", "/folders", {"uid": FOLDER, "title": FOLDER})
    if made.status in (409, 412):
        raise GrafanaError(f"Grafana has a folder of the name {FOLDER} with another uid: rename it ({made.message})")
    _must_succeed(made, what)
    return Pushed(what=what, change=Change.CREATED)


def _push_datasource(grafana: GrafanaPort, uid: str, prometheus: str | None) -> Pushed:
    what = f"data source {uid}"
    there = grafana.call("GET", f"/datasources/uid/{uid}")
    if prometheus is None:
        if not there.is_success:
            raise GrafanaError(
                f"Grafana has no data source with the uid {uid}: name the Prometheus that scrapes ncclscope with "
                "--prometheus URL, or a data source that is there with --datasource UID"
            )
        return Pushed(what=what, change=Change.UNCHANGED)
    wanted: Json = {
        "uid": uid,
        "name": "ncclscope",
        "type": "prometheus",
        "access": "proxy",
        "url": prometheus,
        "jsonData": {"httpMethod": "POST", "timeInterval": "5s"},
    }
    if there.is_success:
        if _holds(there.body, wanted):
            return Pushed(what=what, change=Change.UNCHANGED)
        kept = {"isDefault": there.body.get("isDefault", False)}
        _must_succeed(grafana.call("PUT", f"/datasources/uid/{uid}", {**wanted, **kept}), what)
        return Pushed(what=what, change=Change.UPDATED)
    _must_be_absent(there, what)
    made = grafana.call("POST", "/datasources", wanted)
    if made.status == 409:
        raise GrafanaError(
            "Grafana has a data source of the name ncclscope with another uid: use it with --datasource UID"
        )
    _must_succeed(made, what)
    return Pushed(what=what, change=Change.CREATED)


def _push_dashboard(grafana: GrafanaPort, board: Json) -> Pushed:
    what = f"dashboard {board['uid']}"
    there = grafana.call("GET", f"/dashboards/uid/{board['uid']}")
    if there.is_success:
        kept = {name: value for name, value in there.body["dashboard"].items() if name not in _SERVER_SETS}
        wanted = {name: value for name, value in board.items() if name not in _SERVER_SETS}
        if there.body["meta"].get("folderUid") == FOLDER and _holds(kept, wanted):
            return Pushed(what=what, change=Change.UNCHANGED)
    else:
        _must_be_absent(there, what)
    wanted = {**board, "id": None}
    sent = {"dashboard": wanted, "folderUid": FOLDER, "overwrite": True, "message": "ncclscope grafana push"}
    made = grafana.call("POST", "/dashboards/db", sent)
    if made.status == 412:
        raise GrafanaError(f"{what}: Grafana has another one of that title in the folder: rename it ({made.message})")
    _must_succeed(made, what)
    return Pushed(what=what, change=Change.UPDATED if there.is_success else Change.CREATED)


def _push_contact_point(grafana: GrafanaPort, webhook: str) -> Pushed:
    what = f"contact point {CONTACT_POINT}"
    wanted: Json = {
        "uid": CONTACT_POINT,
        "name": CONTACT_POINT,
        "type": "webhook",
        "settings": {"url": webhook, "httpMethod": "POST"},
        "disableResolveMessage": False,
    }
    known = grafana.call("GET", "/v1/provisioning/contact-points")
    _must_succeed(known, what)
    there = [point for point in known.body if point.get("uid") == CONTACT_POINT]
    if there and _holds(there[0], wanted):
        return Pushed(what=what, change=Change.UNCHANGED)
    if there:
        _must_succeed(grafana.call("PUT", f"/v1/provisioning/contact-points/{CONTACT_POINT}", wanted), what)
        return Pushed(what=what, change=Change.UPDATED)
    _must_succeed(grafana.call("POST", "/v1/provisioning/contact-points", wanted), what)
    return Pushed(what=what, change=Change.CREATED)


def _push_rules(grafana: GrafanaPort, group: Json) -> Pushed:
    """Rules are made one by one, then the group is put: not every Grafana makes a rule of a given uid by the latter."""
    what = f"alert rules {group['title']}"
    path = f"/v1/provisioning/folder/{FOLDER}/rule-groups/{group['title']}"
    there = grafana.call("GET", path)
    if there.is_success and _holds(there.body, group):
        return Pushed(what=what, change=Change.UNCHANGED)
    if not there.is_success:
        _must_be_absent(there, what)
    known = {rule["uid"] for rule in (there.body.get("rules") or [])} if there.is_success else set[str]()
    for rule in group["rules"]:
        if rule["uid"] not in known:
            _must_succeed(grafana.call("POST", "/v1/provisioning/alert-rules", rule), f"alert rule {rule['title']}")
    _must_succeed(grafana.call("PUT", path, group), what)
    return Pushed(what=what, change=Change.UPDATED if known else Change.CREATED)


def _fitted_board(board: Json, live_page: str, datasource: str) -> Json:
    """The dashboard with the address of the page and its first choice of data source."""
    fitted: Json = json.loads(json.dumps(board).replace(LIVE_PAGE, live_page.rstrip("/")))
    for variable in fitted["templating"]["list"]:
        if variable["type"] == "datasource":
            variable["current"] = {"selected": True, "text": datasource, "value": datasource}
    return fitted


def _fitted_rules(group: Json, datasource: str, wish: Wish) -> Json:
    text = json.dumps(group).replace(LIVE_PAGE, wish.live_page.rstrip("/"))
    fitted: Json = json.loads(text.replace(json.dumps(DATASOURCE), json.dumps(datasource)))
    if wish.webhook is not None:
        for rule in fitted["rules"]:
            rule["notification_settings"] = {"receiver": CONTACT_POINT}
    return fitted


def _holds(there: object, wanted: object) -> bool:
    """Whether all that is wanted is there; servers add fields of their own, but never entries to a list."""
    if isinstance(wanted, Mapping):
        return isinstance(there, Mapping) and all(
            _holds(there[name], value) if name in there else value is None for name, value in wanted.items()
        )
    if isinstance(wanted, list):
        return isinstance(there, list) and len(there) == len(wanted) and all(map(_holds, there, wanted))
    return bool(there == wanted)


def _must_be_absent(answer: Answer, what: str) -> None:
    if answer.status != 404:
        raise GrafanaError(f"{what}: Grafana refuses to show it: {answer.message}")


def _must_succeed(answer: Answer, what: str) -> None:
    if not answer.is_success:
        raise GrafanaError(f"{what}: Grafana refuses it ({answer.status}): {answer.message}")

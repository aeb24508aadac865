"""All files of `dashboards/` that are written, as text by path: nothing here touches the disk."""

from __future__ import annotations

import json
from typing import Final

import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from ncclscope_dashboards import alerts, clocks, communicator, fleet, health, job, ranks
from ncclscope_dashboards.board import Board

BOARDS: Final[tuple[Board, ...]] = (
    fleet.fleet(),
    job.job(),
    communicator.communicator(),
    ranks.ranks(),
    clocks.clocks(),
    health.health(),
)

Json = dict[str, object]

_MADE: Final = "# Written by `python dashboards/generate`; change dashboards/ncclscope_dashboards instead.\n"


def generated() -> dict[str, str]:
    """Path below `dashboards/` to content."""
    group = plain(alerts.rule_group())
    files = {f"grafana/{board.uid}.json": as_json(plain(board.build())) for board in BOARDS}
    files["grafana/alert-rules.json"] = as_json(group)
    files["provisioning/alerting/ncclscope-rules.yaml"] = as_yaml(_rules_file(group))
    files["provisioning/alerting/ncclscope-contact-point.yaml"] = as_yaml(_contact_file(plain(alerts.contact_point())))
    files["provisioning/dashboards/ncclscope.yaml"] = as_yaml(_dashboards_file())
    files["provisioning/datasources/ncclscope.yaml"] = as_yaml(_datasources_file())
    return files


def plain(value: object) -> Json:
    """A type of the SDK as the JSON object that it stands for."""
    decoded: Json = json.loads(json.dumps(value, cls=JSONEncoder))
    return decoded


def as_json(value: object) -> str:
    """As it is kept in the repository."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def as_yaml(value: Json) -> str:
    """As it is kept in the repository."""
    return _MADE + yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=110)


def _rules_file(group: Json) -> Json:
    rules = group["rules"]
    assert isinstance(rules, list)
    of_file = [{name: value for name, value in rule.items() if name not in _API_ONLY} for rule in rules]
    one = {
        "orgId": 1,
        "name": group["title"],
        "folder": alerts.FOLDER_TITLE,
        "interval": f"{group['interval']}s",
        "rules": of_file,
    }
    return {"apiVersion": 1, "groups": [one]}


_API_ONLY: Final = frozenset({"folderUID", "ruleGroup", "orgID"})
"""What the API wants in a rule, and a file says of the group."""


def _contact_file(point: Json) -> Json:
    names = {"uid": "uid", "type": "type", "settings": "settings", "disableResolveMessage": "disableResolveMessage"}
    receiver = {name: point[name] for name in names}
    return {"apiVersion": 1, "contactPoints": [{"orgId": 1, "name": point["name"], "receivers": [receiver]}]}


def _dashboards_file() -> Json:
    provider = {
        "name": "ncclscope",
        "orgId": 1,
        "folder": alerts.FOLDER_TITLE,
        "folderUid": alerts.FOLDER_UID,
        "type": "file",
        "disableDeletion": False,
        "updateIntervalSeconds": 30,
        "allowUiUpdates": False,
        "options": {"path": "/var/lib/grafana/dashboards/ncclscope", "foldersFromFilesStructure": False},
    }
    return {"apiVersion": 1, "providers": [provider]}


def _datasources_file() -> Json:
    source = {
        "name": "ncclscope",
        "uid": alerts.DATASOURCE_UID,
        "type": "prometheus",
        "access": "proxy",
        "orgId": 1,
        "url": "http://localhost:9090",
        "isDefault": False,
        "editable": True,
        "jsonData": {"httpMethod": "POST", "timeInterval": "5s"},
    }
    return {"apiVersion": 1, "datasources": [source]}

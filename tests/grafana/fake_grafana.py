"""A Grafana that is none: the calls that ncclscope makes, with the statuses that Grafana 13 gives.

Made from the contract in grafana-openapi-client-go (generated from Grafana's own API description), traps included: 201,
202 and 204 where Grafana has them, 412 for a taken title, refusal of numeric ids, fields that the server adds, and no
body for a deletion. A server of the real thing could not be had here: docs/grafana.md has what only one can prove.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

TOKEN: Final = "glsa_right"

Reply = tuple[int, object]


class FakeGrafana:
    """State and rules of the server."""

    def __init__(self) -> None:
        self.folders: dict[str, Any] = {}
        self.datasources: dict[str, Any] = {}
        self.dashboards: dict[str, Any] = {}
        self.rules: dict[str, Any] = {}
        self.intervals: dict[str, int] = {}
        self.contact_points: dict[str, Any] = {}
        self.calls: list[tuple[str, str]] = []
        self.disabled_provenance: list[bool] = []
        self.is_well = True
        self.answers_html = False

    @property
    def writes(self) -> list[tuple[str, str]]:
        """The calls that change something."""
        return [call for call in self.calls if call[0] != "GET"]

    def answer(self, method: str, path: str, body: Any) -> Reply:  # noqa: PLR0911
        """Status and body of one call; the path is below /api."""
        self.calls.append((method, path))
        parts = path.strip("/").split("/")
        match parts:
            case ["health"]:
                return (200, {"database": "ok"}) if self.is_well else (503, {"message": "database is not there"})
            case ["folders", *uid]:
                return self._folder(method, uid, body)
            case ["datasources", "uid", uid]:
                return self._datasource(method, uid, body)
            case ["datasources"] if method == "POST":
                return self._new_datasource(body)
            case ["datasources", _]:
                return 403, {"message": "the use of numeric ids is disabled"}
            case ["dashboards", "db"]:
                return self._save_dashboard(body)
            case ["dashboards", "uid", uid]:
                return self._dashboard(method, uid)
            case ["v1", "provisioning", *rest]:
                return self._provisioning(method, rest, body)
            case _:
                return 404, {"message": "Not found"}

    def _folder(self, method: str, uid: list[str], body: Any) -> Reply:
        if method == "GET":
            return (200, self.folders[uid[0]]) if uid[0] in self.folders else (404, {"message": "folder not found"})
        if any(body["title"] == each["title"] for each in self.folders.values()):
            return 409, {"message": "a folder with the same name already exists"}
        self.folders[body["uid"]] = {"id": len(self.folders) + 1, "version": 1, **body}
        return 200, self.folders[body["uid"]]

    def _new_datasource(self, body: Any) -> Reply:
        if any(body["name"] == each["name"] for each in self.datasources.values()):
            return 409, {"message": "data source with the same name already exists"}
        self.datasources[body["uid"]] = {"id": 1, "orgId": 1, "isDefault": False, "readOnly": False, **body}
        return 200, {"datasource": self.datasources[body["uid"]], "id": 1, "message": "Datasource added"}

    def _datasource(self, method: str, uid: str, body: Any) -> Reply:
        if uid not in self.datasources:
            return 404, {"message": "Data source not found"}
        if method == "PUT":
            self.datasources[uid] |= body
            return 200, {"message": "Datasource updated", "datasource": self.datasources[uid]}
        return 200, self.datasources[uid]

    def _save_dashboard(self, body: Any) -> Reply:
        board = body["dashboard"]
        if board.get("id") is not None:
            return 404, {"message": "Dashboard not found"}
        if body["folderUid"] not in self.folders:
            return 400, {"message": "folder not found"}
        for uid, other in self.dashboards.items():
            if uid != board["uid"] and other["dashboard"]["title"] == board["title"]:
                return 412, {"status": "name-exists", "message": "A dashboard with the same name already exists"}
        version = self.dashboards.get(board["uid"], {"dashboard": {"version": 0}})["dashboard"]["version"] + 1
        if version > 1 and not body["overwrite"]:
            return 412, {"status": "version-mismatch", "message": "The dashboard has been changed by someone else"}
        saved = {**board, "id": len(self.dashboards) + 1, "version": version}
        self.dashboards[board["uid"]] = {"dashboard": saved, "meta": {"folderUid": body["folderUid"], "slug": "x"}}
        return 200, {"uid": board["uid"], "status": "success", "version": version}

    def _dashboard(self, method: str, uid: str) -> Reply:
        assert method == "GET"
        return (200, self.dashboards[uid]) if uid in self.dashboards else (404, {"message": "Dashboard not found"})

    def _provisioning(self, method: str, rest: list[str], body: Any) -> Reply:
        match rest:
            case ["folder", folder, "rule-groups", group]:
                return self._rule_group(method, folder, group, body)
            case ["alert-rules"] if method == "POST":
                if body["uid"] in self.rules:
                    return 409, {"message": "a conflicting alert rule is found"}
                self.rules[body["uid"]] = self._stored(body)
                return 201, self.rules[body["uid"]]
            case ["contact-points", *uid]:
                return self._contact_point(method, uid, body)
            case _:
                raise AssertionError(f"{method} {rest} is not to be called")

    def _rule_group(self, method: str, folder: str, group: str, body: Any) -> Reply:
        own = {
            uid: rule for uid, rule in self.rules.items() if (rule["folderUID"], rule["ruleGroup"]) == (folder, group)
        }
        if method == "GET":
            if not own:
                return 404, {"message": "rule group not found"}
            rules = list(own.values())
            return 200, {"title": group, "folderUid": folder, "interval": self.intervals.get(group, 60), "rules": rules}
        if any(rule["uid"] not in self.rules for rule in body["rules"]):
            return 400, {"message": "failed to update rule: could not find alert rule"}
        self.intervals[group] = body["interval"]
        for uid in own:
            del self.rules[uid]
        self.rules |= {rule["uid"]: self._stored(rule) for rule in body["rules"]}
        return 200, body

    @staticmethod
    def _stored(rule: Any) -> Any:
        stored = copy.deepcopy(rule) | {"id": 7, "updated": "2026-01-01T00:00:00Z", "provenance": ""}
        for step in stored["data"]:
            step["queryType"] = ""
            step["model"] |= {"intervalMs": 1000, "maxDataPoints": 43200}
        return stored

    def _contact_point(self, method: str, uid: list[str], body: Any) -> Reply:
        if method == "GET":
            return 200, list(self.contact_points.values())
        self.contact_points[body["uid"]] = {**body, "provenance": ""}
        return 202, self.contact_points[body["uid"]] if method == "POST" else {"message": "contactpoint updated"}


@contextmanager
def serving(grafana: FakeGrafana, *, prefix: str = "") -> Generator[str]:
    """The address of the fake on loopback."""

    class Handler(BaseHTTPRequestHandler):
        def _do(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            grafana.disabled_provenance.append(self.headers.get("X-Disable-Provenance") == "true")
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self._send(401, {"message": "Invalid API key"})
            elif grafana.answers_html:
                self._send_bytes(200, b"<html>please log in</html>")
            elif not self.path.startswith(f"{prefix}/api/"):
                self._send(404, {"message": "Not found"})
            else:
                self._send(*grafana.answer(self.command, self.path.removeprefix(f"{prefix}/api"), body))

        do_GET = do_POST = do_PUT = do_DELETE = _do  # noqa: N815

        def _send(self, status: int, body: object) -> None:
            self._send_bytes(status, b"" if body is None else json.dumps(body).encode())

        def _send_bytes(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}{prefix}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

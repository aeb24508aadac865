"""The HTTP side, over a made-up service."""

from __future__ import annotations

import errno
import io
import os
import socket
import zipfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import httpx
import orjson
import pytest
import uvicorn
from service import fake_service as fake
from service.detect.test_sight_and_clock import FINDING

from ncclscope_service.auth.access import parse_access
from ncclscope_service.serve.http_server import HttpAccess
from ncclscope_service.serve.live import Hub
from ncclscope_service.serve.routes import make_app
from ncclscope_service.store.records import FindingKind

pytestmark = pytest.mark.asyncio


def small_service() -> fake.FakeService:
    return fake.small(fake.FakeService())


def client_of(service: fake.FakeService, access: HttpAccess | None = None) -> httpx.AsyncClient:
    """A client without a network; event streams need `served`."""
    transport = httpx.ASGITransport(make_app(service, service.hub, access))
    return httpx.AsyncClient(transport=transport, base_url="http://service")


@asynccontextmanager
async def served(service: fake.FakeService) -> AsyncGenerator[httpx.AsyncClient, None]:
    """A client of a real server on a port of its own."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        config = uvicorn.Config(make_app(service, service.hub), ws="none", log_config=None, timeout_graceful_shutdown=5)
        server = uvicorn.Server(config)
        address = f"http://127.0.0.1:{bound.getsockname()[1]}"
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.serve, [bound])
            async with httpx.AsyncClient(base_url=address, timeout=60) as client:
                yield client
            service.hub.close()
            server.should_exit = True


async def events_of(client: httpx.AsyncClient, amount: int) -> list[tuple[str, bytes]]:
    """The first events of the stream."""
    found: list[tuple[str, bytes]] = []
    name = ""
    async with client.stream("GET", "/api/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-store"
        async for line in answer.aiter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                found.append((name, line.removeprefix("data: ").encode()))
                if len(found) == amount:
                    break
    return found


async def test_a_mistake_of_ours_is_an_answer_that_a_page_can_read(monkeypatch: pytest.MonkeyPatch) -> None:
    service = small_service()

    def fails(*_: object) -> None:
        raise TypeError("Integer exceeds 64-bit range")

    monkeypatch.setattr(service, "job", fails)
    transport = httpx.ASGITransport(make_app(service, service.hub, None), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
        answer = await client.get("/api/jobs/a/steps")
    assert answer.status_code == 500
    assert answer.json() == {"error": "the service failed to answer (TypeError): see its log"}


async def test_the_page_and_its_files_come_from_the_service_alone() -> None:
    async with client_of(small_service()) as client:
        page = await client.get("/")
        assert page.headers["content-type"].startswith("text/html")
        assert "http" not in page.text.replace("http-equiv", ""), "nothing is loaded from elsewhere"
        for name in ("app.js", "charts.js", "panels.js", "dom.js", "format.js", "style.css", "icon.svg"):
            file = await client.get(f"/static/{name}")
            assert file.status_code == 200
            assert "https://" not in file.text
        assert (await client.get("/static/../routes.py")).status_code == 404


async def test_every_answer_forbids_scripts_from_elsewhere() -> None:
    async with client_of(small_service()) as client:
        for path in ("/", "/metrics", "/static/app.js", "/nothing-here"):
            policy = (await client.get(path)).headers["content-security-policy"]
            assert "default-src 'self'" in policy
            assert "unsafe-eval" not in policy
            assert "script-src" not in policy


async def test_the_runbook_of_every_finding_is_where_alerts_link_to() -> None:
    async with client_of(small_service()) as client:
        page = await client.get("/runbooks")
        assert page.headers["content-type"].startswith("text/html")
        for kind in FindingKind:
            assert f'id="{kind}"' in page.text


async def test_plotly_comes_from_its_package_once() -> None:
    async with client_of(small_service()) as client:
        script = await client.get("/static/plotly.min.js")
        assert script.headers["content-encoding"] == "gzip"
        assert "max-age" in script.headers["cache-control"]
        assert b"plotly.js" in script.content[:200]
        plain = await client.get("/static/plotly.min.js", headers={"Accept-Encoding": "identity"})
        assert plain.content == script.content
        again = await client.get("/static/plotly.min.js", headers={"If-None-Match": script.headers["etag"]})
        assert again.status_code == 304


async def test_a_scraper_gets_the_format_it_asks_for() -> None:
    async with client_of(small_service()) as client:
        plain = await client.get("/metrics", headers={"Accept-Encoding": "identity"})
        assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert "ncclscope_operations_total{" in plain.text
        assert "process_resident_memory_bytes" in plain.text
        modern = await client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
        assert modern.headers["content-type"].startswith("application/openmetrics-text")
        assert modern.headers["content-encoding"] == "gzip"
        assert modern.text.endswith("# EOF\n")


async def test_readiness_says_why_not() -> None:
    service = small_service()
    async with client_of(service) as client:
        alive = await client.get("/healthz")
        assert (alive.status_code, alive.json()["status"]) == (200, "ok")
        assert (await client.get("/readyz")).status_code == 200
        service.ready = (False, "the store is being read")
        answer = await client.get("/readyz")
        assert (answer.status_code, answer.json()["status"]) == (503, "not_ready")
        assert answer.json()["reasons"] == ["ready: the store is being read"]


async def test_a_service_that_cannot_keep_what_comes_is_alive_and_says_so() -> None:
    service = small_service()
    service.disk_trouble = "the journal cannot be written: No space left on device"
    async with client_of(service) as client:
        answer = await client.get("/healthz")
        assert (answer.status_code, answer.json()["status"]) == (200, "degraded")
        assert answer.json()["reasons"] == [f"journal: {service.disk_trouble}"]
        assert (await client.get("/readyz")).status_code == 200


async def test_the_overview_and_the_findings_are_json() -> None:
    async with client_of(small_service()) as client:
        overview = (await client.get("/api/overview")).json()
        assert overview["jobs"][0]["name"] == fake.JOB
        findings = (await client.get("/api/findings")).json()
        assert [each["kind"] for each in findings] == ["late_rank"]
        assert (await client.get("/api/findings", params={"job": "another"})).json() == []


async def test_a_snapshot_is_one_zip_of_its_files() -> None:
    service = small_service()
    async with client_of(service) as client:
        answer = await client.post("/api/snapshot", params={"job": fake.JOB, "minutes": "2.5"})
        assert answer.headers["content-type"] == "application/zip"
        assert int(answer.headers["content-length"]) == len(answer.content)
        with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
            assert archive.namelist() == ["summary.json", "trace.json.gz"]
            assert archive.testzip() is None
        assert (await client.post("/api/snapshot")).status_code == 200
    assert service.snapshots == [(fake.JOB, 2.5), (None, None)]


class _FullDisk(fake.FakeService):
    async def write_snapshot(self, directory: Path, job: str | None, minutes: float | None) -> None:
        await super().write_snapshot(directory, job, minutes)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def test_where_there_is_no_room_for_a_snapshot_that_is_said_and_the_next_one_may_be_asked_for() -> None:
    service = _FullDisk()
    async with client_of(service) as client:
        for _ in range(2):
            answer = await client.post("/api/snapshot")
            assert answer.status_code == 507
            assert "No space left on device; ask for fewer minutes" in answer.json()["error"]


@pytest.mark.parametrize(
    ("query", "status", "says"),
    [
        ({"job": "none-such"}, 404, "none-such"),
        ({"minutes": "soon"}, 400, "minutes"),
        ({"minutes": "-1"}, 400, "minutes"),
        ({"minutes": "nan"}, 400, "minutes"),
        ({"minutes": "inf"}, 400, "minutes"),
    ],
)
async def test_a_snapshot_of_nonsense_is_refused_with_the_reason(query: dict[str, str], status: int, says: str) -> None:
    service = small_service()
    async with client_of(service) as client:
        answer = await client.post("/api/snapshot", params=query)
        assert answer.status_code == status
        assert says in answer.json()["error"]
        assert (await client.get("/api/snapshot")).status_code == 405
    assert service.snapshots == []


async def test_a_listener_gets_an_overview_at_once_and_then_every_second() -> None:
    async with served(small_service()) as client:
        with anyio.fail_after(60):
            events = await events_of(client, 3)
    assert [name for name, _ in events] == ["overview"] * 3
    assert orjson.loads(events[2][1])["jobs"][0]["name"] == fake.JOB


async def test_a_new_finding_is_an_event_of_its_own() -> None:
    service = small_service()
    new = replace(FINDING, kind=FindingKind.HANG, job=fake.JOB, ranks=(3,))
    async with served(service) as client:
        with anyio.fail_after(60):
            async with client.stream("GET", "/api/events") as answer:
                seen = 0
                async for line in answer.aiter_lines():
                    seen += line == "event: overview"
                    if seen == 2 and not service.extra_findings:
                        service.extra_findings.append(new)
                    if line == "event: finding":
                        break
            assert service.extra_findings


async def test_a_listener_that_leaves_is_forgotten() -> None:
    service = small_service()
    async with served(service) as client:
        with anyio.fail_after(60):
            await events_of(client, 1)
            while service.hub.statistics().clients:
                await anyio.lowlevel.checkpoint()
    assert service.hub.statistics().clients == 0


async def test_too_many_listeners_are_told_so() -> None:
    service = small_service()
    service.hub = Hub(max_clients=0)
    async with client_of(service) as client:
        answer = await client.get("/api/events")
        assert answer.status_code == 503
        assert "listeners" in answer.json()["error"]


async def test_a_listener_that_comes_back_is_told_of_findings_in_between() -> None:
    service = small_service()
    query = {"events": "finding"}
    async with served(service) as client:
        with anyio.fail_after(60):
            lines: list[str] = []
            for _ in ("while it is found", "after that"):
                back = client.stream("GET", "/api/events", params=query, headers={"Last-Event-ID": "old-1"})
                async with back as answer:
                    lines = [line async for line in lines_until(answer, "data: {", 2)]
    assert [line for line in lines if line.startswith("event: ")] == ["event: missed", "event: finding"]
    told = orjson.loads(lines[-1].removeprefix("data: "))
    assert (told["event"], told["finding"]["kind"]) == ("opened", "late_rank")


async def lines_until(answer: httpx.Response, begin: str, times: int) -> AsyncGenerator[str, None]:
    """The lines up to the one that begins so for the given time."""
    async for line in answer.aiter_lines():
        yield line
        times -= line.startswith(begin)
        if not times:
            return


async def test_a_listener_may_ask_for_health_alone() -> None:
    service = small_service()
    async with served(service) as client:
        with anyio.fail_after(60):
            async with client.stream("GET", "/api/events", params={"events": "health"}) as answer:
                lines = [line async for line in lines_until(answer, "data: {", 1)]
    assert [line for line in lines if line.startswith("event: ")] == ["event: health"]
    assert orjson.loads(lines[-1].removeprefix("data: "))["version"] == "0.1.0"


async def test_a_timeline_is_asked_of_a_rank_or_of_a_group() -> None:
    async with client_of(small_service()) as client:
        of_rank = (await client.get(f"/api/jobs/{fake.JOB}/timeline?rank=5&seconds=60")).json()
        assert "tp-4" in of_rank["lanes"]
        of_group = (await client.get(f"/api/jobs/{fake.JOB}/timeline?communicator=tp-4&seconds=60")).json()
        assert of_group["lanes"] == ["4", "5", "6", "7"]


async def test_what_is_not_there_or_makes_no_sense_is_refused_with_a_sentence() -> None:
    async with client_of(small_service()) as client:
        for path, status in (
            ("nothing/traffic", 404),
            (f"{fake.JOB}/communicators/none-1", 404),
            (f"{fake.JOB}/ranks/99", 404),
            (f"{fake.JOB}/timeline?communicator=none-1", 404),
            (f"{fake.JOB}/timeline?seconds=0", 400),
            (f"{fake.JOB}/timeline?seconds=x", 400),
            (f"{fake.JOB}/timeline?rank=first", 400),
        ):
            answer = await client.get(f"/api/jobs/{path}")
            assert answer.status_code == status, path
            assert answer.json()["error"]


async def test_a_job_of_a_name_with_a_slash_is_found() -> None:
    service = small_service()
    asked: list[str] = []
    service.job = asked.append  # type: ignore[method-assign, assignment]
    async with client_of(service) as client:
        await client.get("/api/jobs/team%2Frun/traffic")
    assert asked == ["team/run"]


async def test_findings_are_acknowledged_muted_and_cleared_over_the_api() -> None:
    async with client_of(small_service()) as client:
        first = (await client.get("/api/findings")).json()[0]
        assert (first["acknowledged"], first["muted"]) == (None, None)
        body = {"action": "acknowledge", "finding": first["id"], "note": "on it", "by": "ann"}
        marks = (await client.post("/api/findings/mark", json=body)).json()
        assert marks["acknowledged"][first["id"]]["note"] == "on it"
        body = {"action": "mute", "kind": first["kind"], "seconds": 60}
        (mute,) = (await client.post("/api/findings/mark", json=body)).json()["mutes"]
        overview = (await client.get("/api/overview")).json()
        (shown,) = [each for each in overview["findings"] if each["id"] == first["id"]]
        assert (shown["acknowledged"]["by"], shown["muted"]) == ("ann", mute)
        for named in ({"finding": first["id"]}, {"mute": mute["id"]}):
            answer = await client.post("/api/findings/mark", json={"action": "clear", **named})
            assert answer.status_code == 200
        assert (await client.get("/api/findings/marks")).json() == {"acknowledged": {}, "mutes": []}


async def test_thresholds_are_changed_and_reset_over_the_api() -> None:
    async with client_of(small_service()) as client:
        values = {"detect.hang.rest_seconds": 300, 'job."a-*".hang.rest_seconds': 600, "siblings.least_groups": 4}
        changed = await client.post("/api/settings/change", json={"values": values})
        by_name = {each["name"]: each for each in changed.json()["thresholds"]}
        rest = by_name["hang.rest_seconds"]
        assert (rest["default"], rest["started"], rest["changed"], rest["jobs"]) == (120, None, 300, {"a-*": 600})
        assert by_name["late_rank.least_share"]["started"] == 0.02
        await client.post("/api/settings/change", json={"values": {"hang.rest_seconds": None}})
        thresholds = (await client.get("/api/settings")).json()["thresholds"]
        assert [each["name"] for each in thresholds if each["changed"] is not None] == ["siblings.least_groups"]


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("findings/mark", b"{}", 400, "missing required field `action`"),
        ("findings/mark", b'{"action": "forget"}', 400, "Invalid enum value 'forget'"),
        ("findings/mark", b'{"action": "mute", "kind": "hang", "hours": 3}', 400, "unknown field `hours`"),
        ("findings/mark", b'{"action": "acknowledge", "finding": "x"}', 400, "there is no finding 'x'; open are: "),
        ("findings/mark", b"x" * 70_000, 413, "the body has over 65536 bytes"),
        ("settings/change", b'{"values": {"hang.rest": 3}}', 400, "did you mean hang.rest_seconds?"),
        ("settings/change", b'{"values": {"hang.zzz": null}}', 400, "there is no threshold 'hang.zzz'"),
        ("settings/change", b'{"values": {"late_rank.info_share": 0.5}}', 400, "must not be above"),
        ("settings/change", b'{"values": {"siblings.least_groups": 2.5}}', 400, "is a whole number, not 2.5"),
        ("settings/change", b"[", 400, "the body is not understood"),
    ],
)
async def test_what_cannot_be_changed_is_refused_with_a_sentence(
    path: str, body: bytes, status: int, said: str
) -> None:
    async with client_of(small_service()) as client:
        answer = await client.post(f"/api/{path}", content=body)
        assert (answer.status_code, said in answer.json()["error"]) == (status, True), answer.text


async def test_nothing_is_changed_before_the_state_is_restored() -> None:
    service = small_service()
    service.ready = (False, "the state of before the restart is being restored")
    async with client_of(service) as client:
        for path in ("findings/mark", "settings/change"):
            answer = await client.post(f"/api/{path}", json={})
            assert (answer.status_code, answer.json()) == (503, {"error": service.ready[1]})


async def test_only_who_may_write_marks_findings_and_a_named_token_says_who_it_was() -> None:
    tokens = f"{'r' * 16} name=grafana\n{'w' * 16} name=ops role=write\n"
    access = HttpAccess(lambda: parse_access(tokens, where="tokens"))
    async with client_of(small_service(), access) as client:
        body = {"action": "mute", "kind": "hang", "seconds": 60, "by": "somebody else"}
        for token, status in (("", 401), ("r" * 16, 403)):
            headers = {"Authorization": f"Bearer {token}"}
            answer = await client.post("/api/findings/mark", json=body, headers=headers)
            assert answer.status_code == status
        headers = {"Authorization": f"Bearer {'w' * 16}"}
        answer = await client.post("/api/findings/mark", json=body, headers=headers)
        assert [each["by"] for each in answer.json()["mutes"]] == ["ops"]
        answer = await client.post("/api/findings/mark", json=body, auth=("ann", "w" * 16))
        assert answer.status_code == 200
        headers = {"Authorization": f"Bearer {'w' * 16}", "Sec-Fetch-Site": "cross-site"}
        assert (await client.post("/api/findings/mark", json=body, headers=headers)).status_code == 403


async def test_courses_cover_the_last_minutes_or_the_job_since_its_start() -> None:
    async with client_of(small_service()) as client:
        (job,) = (await client.get("/api/overview")).json()["jobs"]
        at = f"/api/jobs/{fake.JOB}"
        began_ns = (await client.get(f"{at}/steps")).json()["started_ns"][0]
        assert job["begin_ns"] == began_ns, "charts begin where the steps do"
        recent = (await client.get(f"{at}/bandwidth")).json()
        assert recent == (await client.get(f"{at}/bandwidth?range=recent")).json()
        courses = {each["alias"]: each for each in recent["communicators"]}
        for each in job["communicators"]:
            assert courses[each["alias"]]["busbw_history"] == each["busbw_history"]
            assert courses[each["alias"]]["bytes_history"] == each["bytes_history"]
        whole = (await client.get(f"{at}/bandwidth?range=job")).json()
        assert whole["window_begin_ns"] <= began_ns < whole["window_begin_ns"] + whole["bucket_seconds"] * 1e9
        detail = (await client.get(f"{at}/communicators/tp-0?range=job")).json()
        rank = (await client.get(f"{at}/ranks/5?range=job")).json()
        (tp,) = (each for each in whole["communicators"] if each["alias"] == "tp-0")
        for found, history in (
            (whole, tp["busbw_history"]),
            (detail, detail["summary"]["busbw_history"]),
            (detail, detail["series"][0]["busbw_history"]),
            (rank, rank["wait_history"]),
        ):
            assert (found["window_begin_ns"], found["bucket_seconds"]) == (whole["window_begin_ns"], 10.0)
            assert len(history) <= 256
            assert found["window_begin_ns"] + len(history) * 10 * fake.SECOND > fake.NOW_NS
            assert sum(each is not None for each in history[:150]) == 150, "all that was before the window"
        assert detail["summary"]["busbw_history"] == tp["busbw_history"] == detail["series"][0]["busbw_history"]
        assert detail["summary"]["wait_ratio"] == job["communicators"][1]["wait_ratio"], "now stays now"
        lost = (await client.get(f"{at}/lost-time?range=job")).json()
        assert lost["begin_ns"] <= began_ns < lost["begin_ns"] + lost["column_ns"]
        worst = max(lost["rows"], key=lambda row: max(row["lost_us"][:60], key=lambda each: each or 0))
        assert worst["ranks"] == [2]
        assert max(each or 0 for each in worst["lost_us"]) == 6000
        refused = await client.get(f"{at}/bandwidth?range=week")
        assert (refused.status_code, refused.json()) == (400, {"error": "range must be recent or job, not 'week'"})

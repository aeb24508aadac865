"""Who may ask what over HTTP."""

from __future__ import annotations

from base64 import b64encode

import pytest
from service import fake_service
from service.serve.test_routes import client_of

from ncclscope_service.auth.access import parse_access
from ncclscope_service.serve.http_server import HttpAccess, Refusal

READER, WRITER = "reader-token-0123456789", "writer-token-0123456789"


def closed() -> HttpAccess:
    access = parse_access(f"{READER} name=r\n{WRITER} role=write", where="f")
    return HttpAccess(lambda: access)


def basic(password: str, *, name: str = "somebody") -> str:
    return "Basic " + b64encode(f"{name}:{password}".encode()).decode()


def check(access: HttpAccess, path: str, authorization: str = "", *, method: str = "GET") -> Refusal | None:
    return access.check(method, path, {"authorization": authorization} if authorization else {})


def test_a_reader_reads_a_writer_does_more_and_others_nothing() -> None:
    access = closed()
    assert check(access, "/api/overview", f"Bearer {READER}") is None
    assert check(access, "/metrics", f"bearer  {READER} ") is None
    assert check(access, "/api/snapshot", f"Bearer {READER}", method="POST") is Refusal.FORBIDDEN
    assert check(access, "/api/snapshot", f"Bearer {WRITER}", method="POST") is None
    assert check(access, "/metrics", "Bearer " + "x" * 16) is Refusal.UNAUTHORIZED
    assert check(access, "/metrics") is Refusal.UNAUTHORIZED
    assert access.refused == {"forbidden": 1, "unauthorized": 2}


def test_a_browser_sends_the_token_as_the_password_of_any_name() -> None:
    for name in ("", "somebody", "ü"):
        assert check(closed(), "/", basic(READER, name=name)) is None
    assert check(closed(), "/api/snapshot", basic(READER), method="POST") is Refusal.FORBIDDEN
    for wrong in (
        basic("x" * 16),
        basic("", name=READER),
        "Basic",
        "Basic %%%",
        "Basic /w==",
        "Basic \xff",
        f"Digest {READER}",
    ):
        assert check(closed(), "/", wrong) is Refusal.UNAUTHORIZED


def test_a_list_that_changes_counts_from_the_next_request_on() -> None:
    lists = [parse_access(READER, where="f")]
    access = HttpAccess(lambda: lists[-1])
    assert check(access, "/", f"Bearer {READER}") is None
    lists.append(parse_access(WRITER, where="f"))
    assert check(access, "/", f"Bearer {READER}") is Refusal.UNAUTHORIZED


def test_probes_and_the_pages_own_files_are_open() -> None:
    for path in ("/healthz", "/readyz", "/static/app.js"):
        assert check(closed(), path) is None
    for path in ("/", "/healthz/", "/static", "/api/health", "/runbooks", "/healthz/../metrics"):
        assert check(closed(), path) is Refusal.UNAUTHORIZED


@pytest.mark.asyncio
async def test_who_has_no_token_is_asked_for_it_and_gets_nothing() -> None:
    async with client_of(fake_service.FakeService(), closed()) as client:
        refused = await client.get("/api/overview")
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"].startswith("Basic realm=")
        assert "Bearer TOKEN" in refused.json()["error"]
        assert refused.headers["x-content-type-options"] == "nosniff"
        assert (await client.get("/api/health", auth=("me", READER))).status_code == 200
        assert (await client.post("/api/snapshot", auth=("me", READER))).status_code == 403


@pytest.mark.parametrize(
    ("headers", "refusal"),
    [
        ({}, None),
        ({"sec-fetch-site": "same-origin"}, None),
        ({"sec-fetch-site": "cross-site"}, Refusal.CROSS_SITE),
        ({"sec-fetch-site": "same-site"}, Refusal.CROSS_SITE),
        ({"origin": "http://localhost:9798", "host": "localhost:9798"}, None),
        ({"origin": "http://evil.example", "host": "localhost:9798"}, Refusal.CROSS_SITE),
        ({"origin": "null", "host": "localhost:9798"}, Refusal.CROSS_SITE),
    ],
)
def test_another_sites_page_may_not_have_anything_done(headers: dict[str, str], refusal: Refusal | None) -> None:
    assert HttpAccess().check("POST", "/api/snapshot", headers) is refusal


@pytest.mark.parametrize(
    ("host", "refusal"),
    [
        ("localhost:9798", None),
        ("LocalHost", None),
        ("127.0.0.1:9798", None),
        ("[::1]:9798", None),
        ("10.1.2.3", None),
        ("monitor.example", None),
        ("evil.example:9798", Refusal.WRONG_NAME),
        ("localhost.evil.example", Refusal.WRONG_NAME),
        ("[evil", Refusal.WRONG_NAME),
        ("", Refusal.WRONG_NAME),
    ],
)
def test_an_open_port_on_loopback_is_not_read_under_a_foreign_name(host: str, refusal: Refusal | None) -> None:
    access = HttpAccess(names=frozenset({"monitor.example"}))
    assert access.check("GET", "/api/overview", {"host": host}) is refusal
    assert HttpAccess().check("GET", "/api/overview", {"host": host}) is None

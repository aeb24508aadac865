"""Who may ask what over HTTP."""

from __future__ import annotations

import pytest

from ncclscope_service.access import parse_access
from ncclscope_service.http_gate import COOKIE, Answer, Asked, HttpGate, HttpLimits

READER, WRITER = "reader-token-0123456789", "writer-token-0123456789"


def closed(limits: HttpLimits | None = None) -> HttpGate:
    return HttpGate(
        access=parse_access(f"{READER} name=r\n{WRITER} role=write\ncert:ops role=write", where="f"), limits=limits
    )


def asked(
    path: str = "/api/overview",
    *,
    method: str = "GET",
    token: str | None = None,
    certificate: tuple[str, ...] = (),
    address: str = "10.0.0.1",
    **headers: str,
) -> Asked:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    if token is not None:
        given["authorization"] = f"Bearer {token}"
    return Asked(method=method, path=path, address=address, headers=given, certificate=certificate)


def test_a_reader_reads_a_writer_does_more_and_others_nothing() -> None:
    gate = closed()
    assert gate.decide(asked(token=READER), 0) is Answer.GO_ON
    assert gate.decide(asked("/metrics", token=READER), 0) is Answer.GO_ON
    assert gate.decide(asked("/api/snapshot", method="POST", token=READER), 0) is Answer.FORBIDDEN
    assert gate.decide(asked("/api/snapshot", method="POST", token=WRITER), 0) is Answer.GO_ON
    assert gate.decide(asked(certificate=("ops",)), 0) is Answer.GO_ON
    assert gate.decide(asked(certificate=("somebody",)), 0) is Answer.UNAUTHORIZED
    assert gate.decide(asked(token="x" * 16), 0) is Answer.UNAUTHORIZED
    assert gate.decide(asked(), 0) is Answer.UNAUTHORIZED
    assert gate.refused == {"forbidden": 1, "unauthorized": 3}


def test_probes_and_the_pages_own_files_are_open() -> None:
    for path in ("/healthz", "/readyz", "/static/app.js", "/login"):
        assert closed().decide(asked(path), 0) is Answer.GO_ON
    for path in ("/", "/healthz/", "/static", "/api/health", "/runbooks", "/healthz/../metrics"):
        assert closed().decide(asked(path), 0) is Answer.UNAUTHORIZED


def test_a_browser_without_a_token_is_sent_to_the_form() -> None:
    assert closed().decide(asked("/", accept="text/html,*/*"), 0) is Answer.LOGIN
    assert closed().decide(asked("/api/snapshot", method="POST", accept="text/html"), 0) is Answer.UNAUTHORIZED


def test_a_login_lasts_until_its_end_its_logout_or_the_end_of_its_token() -> None:
    gate = closed(HttpLimits(login_seconds=100))
    cookie = gate.login(READER, "a", 0)
    assert cookie is not None
    assert READER not in cookie
    given = f"other=1; {COOKIE}={cookie}"
    assert gate.decide(asked(cookie=given), 99) is Answer.GO_ON
    assert gate.decide(asked(cookie=f"{COOKIE}={cookie}x"), 99) is Answer.UNAUTHORIZED
    assert gate.decide(asked(cookie=given), 101) is Answer.UNAUTHORIZED
    second = f"{COOKIE}={gate.login(READER, 'a', 200)}"
    assert gate.decide(asked(cookie=second), 201) is Answer.GO_ON
    gate.logout({"cookie": second})
    assert gate.decide(asked(cookie=second), 202) is Answer.UNAUTHORIZED
    third = f"{COOKIE}={gate.login(READER, 'a', 200)}"
    gate.access = parse_access(WRITER, where="f")
    assert gate.decide(asked(cookie=third), 203) is Answer.UNAUTHORIZED


def test_logins_are_bounded_and_the_oldest_ends() -> None:
    gate = closed(HttpLimits(max_logins=2))
    first, second, third = (gate.login(READER, "a", 0) for _ in range(3))
    answers = [gate.decide(asked(cookie=f"{COOKIE}={cookie}"), 1) for cookie in (first, second, third)]
    assert answers == [Answer.UNAUTHORIZED, Answer.GO_ON, Answer.GO_ON]


def test_who_guesses_tokens_has_to_wait_and_others_do_not() -> None:
    gate = closed(HttpLimits(failures_per_minute=3))
    answers = [gate.decide(asked(token="x" * 16), 0) for _ in range(5)]
    assert answers == [Answer.UNAUTHORIZED] * 3 + [Answer.TOO_MANY] * 2
    assert gate.login(READER, "10.0.0.1", 0) is None
    assert gate.decide(asked(token=READER, address="10.0.0.2"), 0) is Answer.GO_ON
    assert gate.decide(asked(token=READER), 21) is Answer.GO_ON, "one more may be tried after 20 s"


def test_a_path_that_is_longer_than_any_is_not_looked_at() -> None:
    assert closed().decide(asked("/" + "1" * 1024, token=READER), 0) is Answer.TOO_LONG


def test_requests_of_one_address_are_bounded_but_not_probes() -> None:
    gate = closed(HttpLimits(requests_per_second=1, burst=2, max_addresses=2))
    answers = [gate.decide(asked(token=READER), 0) for _ in range(3)]
    assert answers == [Answer.GO_ON, Answer.GO_ON, Answer.TOO_MANY]
    assert gate.decide(asked("/healthz"), 0) is Answer.GO_ON
    assert gate.decide(asked(token=READER), 1) is Answer.GO_ON
    for number in range(50):
        gate.decide(asked(token=READER, address=f"10.1.0.{number}"), 1)
    assert gate.decide(asked(token=READER), 1) is Answer.GO_ON, "the table of addresses is bounded"


@pytest.mark.parametrize(
    ("headers", "answer"),
    [
        ({}, Answer.GO_ON),
        ({"sec_fetch_site": "same-origin"}, Answer.GO_ON),
        ({"sec_fetch_site": "cross-site"}, Answer.CROSS_SITE),
        ({"sec_fetch_site": "same-site"}, Answer.CROSS_SITE),
        ({"origin": "http://localhost:9798", "host": "localhost:9798"}, Answer.GO_ON),
        ({"origin": "http://evil.example", "host": "localhost:9798"}, Answer.CROSS_SITE),
        ({"origin": "null", "host": "localhost:9798"}, Answer.CROSS_SITE),
    ],
)
def test_another_sites_page_may_not_have_anything_done(headers: dict[str, str], answer: Answer) -> None:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    asked_for = Asked(method="POST", path="/api/snapshot", address="a", headers=named)
    assert HttpGate().decide(asked_for, 0) is answer


@pytest.mark.parametrize(
    ("host", "answer"),
    [
        ("localhost:9798", Answer.GO_ON),
        ("LocalHost", Answer.GO_ON),
        ("127.0.0.1:9798", Answer.GO_ON),
        ("[::1]:9798", Answer.GO_ON),
        ("10.1.2.3", Answer.GO_ON),
        ("monitor.example", Answer.GO_ON),
        ("evil.example:9798", Answer.WRONG_NAME),
        ("localhost.evil.example", Answer.WRONG_NAME),
        ("[evil", Answer.WRONG_NAME),
        ("", Answer.WRONG_NAME),
    ],
)
def test_an_open_port_on_loopback_is_not_read_under_a_foreign_name(host: str, answer: Answer) -> None:
    gate = HttpGate(names=frozenset({"monitor.example"}))
    assert gate.decide(asked(host=host), 0) is answer
    assert HttpGate().decide(asked(host=host), 0) is Answer.GO_ON

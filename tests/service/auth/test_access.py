"""The list of who may come in, and what each may say."""

from __future__ import annotations

import pytest

from ncclscope_service.auth.access import Grant, Role, certificate_names, parse_access
from ncclscope_wire.errors import ConfigError

OLD, NEW = "old-token-0123456789", "new-token-0123456789"


def test_several_tokens_hold_at_once_each_with_what_it_may_say() -> None:
    known = parse_access(
        f"# agents\n{OLD} name=a job=llama-*,bert host=node0* # till June\n\n{NEW} role=write\n", where="f"
    )
    grant = known.grant_for_token(OLD)
    assert grant is not None
    assert grant == Grant(name="a", jobs=("llama-*", "bert"), hosts=("node0*",), role=Role.READ)
    assert [grant.allows_job(job) for job in ("llama-7b", "bert", "gpt", "")] == [True, True, False, False]
    assert [grant.allows_host(host) for host in ("node07", "node1", "xnode07")] == [True, False, False]
    assert known.grant_for_token(NEW) == Grant(role=Role.WRITE)
    assert known.grant_for_token(OLD + "x") is None
    assert known.grant_for_token("") is None


def test_a_certificate_is_known_by_any_of_its_names() -> None:
    known = parse_access("cert:node07 host=node07", where="f")
    certificate = {
        "subject": ((("organizationName", "x"),), (("commonName", "node07"),)),
        "subjectAltName": (("DNS", "node07.cluster"), ("IP Address", "10.0.0.1"), ("URI", "spiffe://a/b")),
    }
    assert certificate_names(certificate) == ("node07.cluster", "spiffe:::a:b", "node07")
    assert known.grant_for_certificate(certificate_names(certificate)) == Grant(hosts=("node07",))
    assert known.grant_for_certificate(certificate_names(None)) is None
    assert known.grant_for_certificate(("other",)) is None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("short", "line 2: a token has 16 to 512 characters"),
        (f"{OLD}\x07", "line 2: a token is of printable ASCII characters"),
        (f"{OLD} jobs=a", "line 2: after the token come name=..., job=..., host=..., role=..., separated by blanks"),
        (f"{OLD} role=admin", "line 2: role is read or write"),
        (f"{OLD} name=a/b", "line 2: a name has no slash"),
    ],
)
def test_a_wrong_line_is_named_and_its_token_is_not_repeated(line: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_access(f"# x\n{line}\n", where="tokens")
    assert str(caught.value) == f"tokens, {said}"
    assert OLD not in str(caught.value)


def test_a_list_without_tokens_lets_nobody_in_by_mistake() -> None:
    with pytest.raises(ConfigError, match="there is no token in it"):
        parse_access("# all gone\n", where="tokens")

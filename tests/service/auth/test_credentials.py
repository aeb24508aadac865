"""TLS and tokens over real sockets: who gets in, and what changes while the service runs."""

from __future__ import annotations

import itertools
import os
import ssl
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from certificates import Authority, make_authority
from service.loopback import Service
from structlog.testing import capture_logs
from wire.sample_batches import HELLO, log_batch

from ncclscope import node
from ncclscope_agent.credentials import Credentials as AgentCredentials
from ncclscope_agent.link.exchange import SessionState
from ncclscope_agent.link.network import Link, LinkSettings
from ncclscope_agent.link.session import Session
from ncclscope_service.auth.credentials import CredentialFiles, Credentials
from ncclscope_service.serve.listen import ListenSettings
from ncclscope_wire.errors import ConfigError
from ncclscope_wire.loopback import is_loopback
from ncclscope_wire.messages import AgentHealth

pytestmark = pytest.mark.asyncio

TOKEN = "a-token-0123456789"
_STARTS = itertools.count()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("ca") / "one")


@pytest.fixture(scope="module")
def other_authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("ca") / "two")


def port_of(authority: Authority, **files: Path | bool) -> Credentials:
    cert, key = authority.sign("service")
    return Credentials(CredentialFiles(cert=cert, key=key, **files), what="agents")  # type: ignore[arg-type]


def a_session() -> Session:
    return Session(replace(HELLO, session_id=f"s{next(_STARTS)}"))


async def sent(port: int, credentials: AgentCredentials) -> str | None:
    """Sends one batch; why it could not be, None where it was acknowledged."""
    known = a_session()
    settings = LinkSettings(
        host="127.0.0.1", port=port, credentials=credentials, first_retry_seconds=60, last_retry_seconds=60
    )
    link = Link(known, settings, health=AgentHealth, jitter=lambda: 1.0)
    with capture_logs() as logs, anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(link.run)
            while known.exchange.state is not SessionState.STREAMING and not any("why" in line for line in logs):
                await link.wait_for_change()
            if known.exchange.state is SessionState.STREAMING:
                known.offer(log_batch(0, 1))
                link.nudge()
                while not known.is_drained:
                    await link.wait_for_change()
            tasks.cancel_scope.cancel()
    return next((str(line["why"]) for line in logs if "why" in line), None)


async def test_a_batch_goes_through_tls(authority: Authority) -> None:
    service = Service()
    async with service.listening(credentials=port_of(authority)) as port:
        assert await sent(port, AgentCredentials(tls_ca=str(authority.path))) is None
    assert len(service.received) == 1


async def test_an_agent_does_not_talk_to_whom_nobody_vouches_for(
    authority: Authority, other_authority: Authority
) -> None:
    service = Service()
    async with service.listening(credentials=port_of(authority)) as port:
        why = await sent(port, AgentCredentials(tls_ca=str(other_authority.path)))
        assert why is not None
        assert "the service's certificate is refused" in why
        why = await sent(port, AgentCredentials(tls_ca=str(authority.path), server_name="elsewhere"))
        assert why is not None
        assert "elsewhere" in why
    assert service.received == []


async def test_with_a_client_ca_only_who_has_a_certificate_of_it_is_heard(
    authority: Authority, other_authority: Authority
) -> None:
    service = Service()
    cert, key = map(str, authority.sign("node1"))
    foreign, foreign_key = map(str, other_authority.sign("node1"))
    ca = str(authority.path)
    async with service.listening(credentials=port_of(authority, client_ca=authority.path)) as port:
        assert await sent(port, AgentCredentials(tls_ca=ca)) is not None
        assert await sent(port, AgentCredentials(tls_ca=ca, tls_cert=foreign, tls_key=foreign_key)) is not None
        assert service.received == []
        assert await sent(port, AgentCredentials(tls_ca=ca, tls_cert=cert, tls_key=key)) is None
        assert service.listener is not None
        assert service.listener.refused == {"no_tls": 2}
    assert [agent.agent_id for agent in service.receiver.agents()] == ["node1/a"]


async def test_who_speaks_no_tls_gets_a_sentence_that_says_so(authority: Authority) -> None:
    service = Service()
    async with service.listening() as port:
        why = await sent(port, AgentCredentials(tls_ca=str(authority.path)))
        assert why is not None
    async with service.listening(ListenSettings(port=0), credentials=port_of(authority)) as port:
        assert await sent(port, AgentCredentials()) is not None
        assert service.listener is not None
        assert service.listener.refused == {"no_tls": 1}


async def test_certificates_signers_and_tokens_are_replaced_without_a_restart(
    authority: Authority, other_authority: Authority, tmp_path: Path
) -> None:
    cert, key, ca, tokens = (tmp_path / name for name in ("cert", "key", "ca", "tokens"))

    def install(who: Authority, listed: str) -> None:
        for path, source in zip((cert, key), who.sign("service"), strict=True):
            path.write_bytes(source.read_bytes())
        ca.write_bytes(who.path.read_bytes())
        tokens.write_text(listed)

    def agent_of(who: Authority) -> AgentCredentials:
        own, own_key = map(str, who.sign("node1"))
        return AgentCredentials(tls_ca=str(who.path), tls_cert=own, tls_key=own_key, token_file=str(tmp_path / "t"))

    (tmp_path / "t").write_text(f"# for the agent\n{TOKEN}\n")
    install(authority, TOKEN)
    known = Credentials(CredentialFiles(cert=cert, key=key, client_ca=ca, tokens=tokens), what="agents")
    service = Service()
    async with service.listening(credentials=known) as port:
        assert await sent(port, agent_of(authority)) is None
        assert not known.reload(), "nothing has changed"
        install(other_authority, TOKEN + "-new")
        assert known.reload()
        assert await sent(port, agent_of(authority)) is not None
        why = await sent(port, agent_of(other_authority))
        assert why == "the service refused: this token is not known"
        (tmp_path / "t").write_text(TOKEN + "-new")
        assert await sent(port, agent_of(other_authority)) is None


async def test_files_that_are_wrong_are_told_once_and_what_held_before_holds_on(
    authority: Authority, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(TOKEN)
    known = port_of(authority, tokens=tokens)
    before = known.access
    tokens.write_text("short")
    with capture_logs() as logs:
        assert not known.reload()
        os.utime(tokens, ns=(1, 1))
        assert not known.reload()
        tokens.unlink()
        assert not known.reload()
    assert [line["event"] for line in logs] == ["credentials_not_reloaded"] * 2
    assert known.access is before
    assert TOKEN not in str(logs)


async def test_files_that_are_wrong_at_the_start_are_named(authority: Authority, tmp_path: Path) -> None:
    cert, key = authority.sign("service")
    (tmp_path / "x").write_text("nothing")
    for files in (
        CredentialFiles(cert=tmp_path / "missing", key=key),
        CredentialFiles(cert=tmp_path / "x", key=key),
        CredentialFiles(cert=cert, key=key, client_ca=tmp_path / "x"),
        CredentialFiles(client_ca=authority.path),
        CredentialFiles(tokens=tmp_path / "missing"),
    ):
        with pytest.raises(ConfigError, match=r"missing|x: |certificates of clients need TLS"):
            Credentials(files, what="agents")
    with pytest.raises(ConfigError, match="give --tls-key FILE too"):
        Credentials(CredentialFiles(cert=cert), what="agents")
    with pytest.raises(ConfigError, match="--tls-ca"):
        AgentCredentials(tls_ca=str(tmp_path / "x")).check()
    with pytest.raises(ConfigError, match=r"--token-file .*missing"):
        AgentCredentials(token_file=str(tmp_path / "missing")).check()


async def test_old_versions_of_tls_are_not_spoken(authority: Authority) -> None:
    context = port_of(authority).context
    assert context is not None
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2


async def test_only_addresses_of_this_machine_are_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost", "LOCALHOST")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "localhost.evil.example", "node1", "")))


async def test_a_node_can_check_that_the_service_speaks_tls_with_it(
    authority: Authority, other_authority: Authority
) -> None:
    async with Service().listening(credentials=port_of(authority)) as port:
        for ca, answered, said in (
            (authority, True, "this service version"),
            (other_authority, False, "certificate is refused"),
            (None, False, "does it want TLS"),
        ):
            credentials = AgentCredentials(tls_ca="" if ca is None else str(ca.path))
            answer = await anyio.to_thread.run_sync(node.ask_service, "127.0.0.1", port, credentials)
            assert (answer.answered, said in answer.text) == (answered, True), answer

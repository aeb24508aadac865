"""A service and an agent from one configuration file, with mutual TLS; files that are replaced while they run."""

from __future__ import annotations

import json
import signal
import ssl
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from agent.log_samples import operation_line
from benchmarks.ports import free_port
from certificates import Authority, make_authority
from end_to_end.processes import PATIENCE_SECONDS, end, run_command, running, wait_for

pytestmark = pytest.mark.slow

_INIT = (
    "node1:10:10 [0] NCCL INFO comm 0x55d0c8b3e2a0 rank 0 nranks 1 cudaDev 0 busId 1000 commId 0x1 - Init COMPLETE\n"
)
_FILE = """
[agent]
logs = ["{folder}/nccl.log"]
connect = "localhost:{agents}"
tls-ca = "{folder}/ca.pem"
tls-cert = "{folder}/agent.pem"
tls-key = "{folder}/agent.key"
retry-seconds = 1

[serve]
listen = "0.0.0.0:{agents}"
http = "0.0.0.0:{web}"
data = "{folder}/data"
tls-cert = "{folder}/service.pem"
tls-key = "{folder}/service.key"
client-ca = "{folder}/ca.pem"
http-client-ca = "{folder}/ca.pem"
http-tokens = "{folder}/http-tokens"
"""


def install(authority: Authority, folder: Path, name: str) -> None:
    for path, source in zip((f"{name}.pem", f"{name}.key"), authority.sign(name), strict=True):
        (folder / path).write_bytes(source.read_bytes())


class Client:
    """Asks as a program with this certificate, or none, would."""

    def __init__(self, web: int, ca: Path, certificate: tuple[Path, Path] | None = None) -> None:
        self._url = f"https://localhost:{web}"
        self._context = ssl.create_default_context(cafile=str(ca))
        if certificate is not None:
            self._context.load_cert_chain(*certificate)

    def ask(self, path: str, *, token: str = "") -> tuple[int, bytes]:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            request = urllib.request.Request(self._url + path, headers=headers)
            with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS, context=self._context) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()


def test_mutual_tls_from_a_file_and_what_changes_while_it_runs(tmp_path: Path) -> None:
    authority, other = make_authority(tmp_path / "one"), make_authority(tmp_path / "two")
    agents, web = free_port(), free_port()
    (tmp_path / "ca.pem").write_bytes(authority.path.read_bytes())
    install(authority, tmp_path, "service")
    install(authority, tmp_path, "agent")
    tokens, settings, log = tmp_path / "http-tokens", tmp_path / "ncclscope.toml", tmp_path / "nccl.log"
    tokens.write_text("first-token-0123456789\n")
    settings.write_text(_FILE.format(folder=tmp_path, agents=agents, web=web))
    log.write_text(_INIT + "".join(operation_line(op_count=f"{n:x}") + "\n" for n in range(10)))
    assert run_command("config", str(settings)).returncode == 0
    ops = Client(web, authority.path, authority.sign("ops"))

    first, second = "first-token-0123456789", "second-token-0123456789"

    def operations(client: Client, token: str) -> int:
        jobs = json.loads(client.ask("/api/overview", token=token)[1])["jobs"]
        return sum(int(job["operations"]) for job in jobs)

    with (
        running(tmp_path / "service.log", "serve", "--config", str(settings)) as service,
        running(tmp_path / "agent.log", "agent", "--config", str(settings)) as agent,
    ):
        wait_for(lambda: ops.ask("/readyz")[0] == 200, "the service")
        wait_for(lambda: operations(ops, first) == 10, "the agent's log")
        assert ops.ask("/metrics")[0] == 401, "a certificate and a token are needed"
        for stranger in (None, other.sign("ops")):
            with pytest.raises(OSError, match=r"(?i)alert|closed|reset|unknown ca"):
                Client(web, authority.path, stranger).ask("/metrics", token=first)

        tokens.write_text(f"{second}\n")
        service.send_signal(signal.SIGHUP)
        wait_for(lambda: ops.ask("/metrics", token=second)[0] == 200, "the new token")
        assert ops.ask("/metrics", token=first)[0] == 401

        install(other, tmp_path, "service")
        trusting_both = Client(web, other.path, authority.sign("ops"))
        wait_for(lambda: trusting_both.ask("/healthz")[0] == 200, "the new certificate")
        with log.open("a") as stream:
            stream.write(operation_line(op_count="a") + "\n")
        wait_for(lambda: operations(trusting_both, second) == 11, "the agent's old connection")
        assert end(agent) == 0
        assert end(service) == 0

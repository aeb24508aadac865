"""python -m benchmarks.alerting [--until-step 280]: from a fault to the webhook, and from its healing to "resolved".

The demo's simulated cluster gets a slow link that heals. A real Prometheus scrapes the service with the configuration
and the rules of deploy/, a real Alertmanager routes with the configuration of deploy/, and a receiver on the loopback
takes what Alertmanager sends; the service's own webhook leads to the same receiver. When the link became slow, and when
it healed, is taken from the simulator's truth. Exit status 1 where the alert does not fire or does not resolve.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as pq
from benchmarks.ports import free_port

_DEPLOY: Final = Path(__file__).resolve().parent.parent / "deploy"
_ALERT: Final = "NcclscopeSlowLink"
_KIND: Final = "slow_link"


@dataclass(frozen=True, slots=True)
class Message:
    """Something that the receiver got."""

    at_seconds: float
    """Since 1970."""
    path: str
    body: dict[str, Any]


@dataclass(slots=True)
class Inbox:
    """Alerts that the receiver has got so far."""

    port: int = 0
    messages: list[Message] = field(default_factory=list[Message])

    def own(self, event: str) -> Message | None:
        """The first of the service's own notifications of such an event of the slow link."""
        return self._first(lambda m: m.body.get("event") == event and m.body["finding"]["kind"] == _KIND)

    def alert(self, status: str) -> Message | None:
        """The first message of Alertmanager in which the slow link has that status: `firing` or `resolved`."""
        return self._first(
            lambda m: any(
                each["labels"]["alertname"] == _ALERT and each["status"] == status for each in m.body.get("alerts", ())
            )
        )

    def fingerprints(self) -> set[str]:
        """The alerts of Alertmanager about the slow link: each is one notification."""
        every = [each for message in self.messages for each in message.body.get("alerts", ())]
        return {each["fingerprint"] for each in every if each["labels"]["alertname"] == _ALERT}

    def _first(self, matches: Callable[[Message], bool]) -> Message | None:
        return next((each for each in self.messages if matches(each)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """When what happened, in seconds since 1970; None = it did not."""

    slow: float
    healed: float
    slow_host: str
    opened: float | None
    firing: float | None
    named_hosts: str
    """The label of the alert that fired."""
    notifications: int
    """Different alerts that Alertmanager sent for the one fault while it lasted, of any severity."""
    closed: float | None
    resolved: float | None

    def is_whole(self) -> bool:
        """Whether the alert fired on the slow link, named its host and nobody else, and resolved after it healed."""
        return (
            self.firing is not None
            and self.resolved is not None
            and self.slow < self.firing
            and self.healed < self.resolved
            and self.named_hosts == self.slow_host
            and self.notifications == 1
        )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--from-step", type=int, default=120, help="a step is 0.4 s; a baseline takes 30 s and more")
    parser.add_argument("--until-step", type=int, default=280)
    parser.add_argument("--factor", type=float, default=0.4, help="what is left of the link's bandwidth")
    given = parser.parse_args()
    if missing := missing_programs():
        sys.exit(f"not installed: {', '.join(missing)}")
    with tempfile.TemporaryDirectory() as folder:
        timeline = run(Path(folder), first=given.from_step, until=given.until_step, factor=given.factor)
    print(f"{timeline.slow_host} had {given.factor:.0%} of its bandwidth; named: {timeline.named_hosts or 'nobody'}\n")
    print("| event | s after the link became slow | s after it healed |\n|---|---:|---:|")
    for event, at in (
        ("the link is slow", timeline.slow),
        ("the service's own webhook: opened", timeline.opened),
        ("Prometheus and Alertmanager: firing", timeline.firing),
        ("the link has healed", timeline.healed),
        ("the service's own webhook: closed", timeline.closed),
        ("Prometheus and Alertmanager: resolved", timeline.resolved),
    ):
        since_healed = "" if at is None or at < timeline.healed else f"{at - timeline.healed:.1f}"
        print(f"| {event} | {'never' if at is None else f'{at - timeline.slow:.1f}'} | {since_healed} |")
    sys.exit(0 if timeline.is_whole() else 1)


def missing_programs() -> list[str]:
    """Programs that must be installed for it, and are not."""
    missing = [] if shutil.which("prometheus") else ["prometheus"]
    return missing if _alertmanager() else [*missing, "prometheus-alertmanager"]


def run(folder: Path, *, first: int, until: int, factor: float, patience_seconds: float = 300) -> Timeline:
    """Lets the fault come and heal, in steps of 0.4 s, and waits so long after each for its message."""
    web, prometheus, alertmanager = free_port(), free_port(), free_port()
    (folder / "run").mkdir()
    with receiving() as inbox, contextlib.ExitStack() as programs:
        _write_configuration(folder, web=web, alertmanager=alertmanager, receiver=inbox.port)
        fault = f"slow_link:node=1,factor={factor},from={first},until={until}"
        demo = programs.enter_context(
            running(
                folder / "demo.log",
                *(sys.executable, "-m", "ncclscope", "demo", "--http-port", str(web)),
                *("--keep", str(folder / "run"), "--fault", fault),
                variables={"NCCLSCOPE_WEBHOOK": f"http://127.0.0.1:{inbox.port}/own"},
            )
        )
        for command in _commands(folder, prometheus=prometheus, alertmanager=alertmanager):
            programs.enter_context(running(folder / f"{Path(command[0]).name}.log", *command))
        healed = time.time() + until * 0.4
        _wait(lambda: inbox.alert("firing") is not None, demo, healed + patience_seconds)
        _wait(lambda: inbox.alert("resolved") is not None, demo, healed + patience_seconds)
        _wait(lambda: inbox.own("closed") is not None, demo, time.time() + patience_seconds)
        if demo.poll() is not None:
            raise RuntimeError(f"the demo ended: {(folder / 'demo.log').read_text().strip()[-500:]}")
    return _timeline(folder / "run" / "cluster" / "truth", inbox, first=first, until=until)


@contextlib.contextmanager
def receiving() -> Generator[Inbox]:
    """A receiver of webhooks on the loopback."""
    inbox = Inbox()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            at = time.time()
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            inbox.messages.append(Message(at, self.path, body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (the library's name)
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    inbox.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, args=(0.1,))
    thread.start()
    try:
        yield inbox
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def running(log: Path, *command: str, variables: Mapping[str, str] | None = None) -> Generator[subprocess.Popen[bytes]]:
    """A program that writes to a log; told to end, and waited for, at the end."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **(variables or {})}
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(600)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _alertmanager() -> str | None:
    return shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")


def _write_configuration(folder: Path, *, web: int, alertmanager: int, receiver: int) -> None:
    """The files of deploy/ with the ports of this run."""
    for rules in (_DEPLOY / "prometheus").glob("ncclscope_*.yml"):
        shutil.copy(rules, folder)
    text = (_DEPLOY / "prometheus" / "prometheus.yml").read_text()
    text = text.replace("localhost:9798", f"127.0.0.1:{web}").replace("localhost:9093", f"127.0.0.1:{alertmanager}")
    (folder / "prometheus.yml").write_text(text)
    text = (_DEPLOY / "alertmanager" / "alertmanager.yml").read_text()
    (folder / "alertmanager.yml").write_text(text.replace("localhost:9099", f"127.0.0.1:{receiver}"))


def _commands(folder: Path, *, prometheus: int, alertmanager: int) -> list[list[str]]:
    program = _alertmanager()
    assert program is not None, "Alertmanager is not installed"
    return [
        [
            program,
            f"--config.file={folder / 'alertmanager.yml'}",
            f"--storage.path={folder / 'alerts'}",
            f"--web.listen-address=127.0.0.1:{alertmanager}",
            "--cluster.listen-address=",
        ],
        [
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{prometheus}",
        ],
    ]


def _wait(condition: Callable[[], bool], demo: subprocess.Popen[bytes], until_seconds: float) -> None:
    """Waits for a condition, until a time; ends at once where the demo has ended."""
    while not condition() and time.time() < until_seconds and demo.poll() is None:
        time.sleep(0.1)


def _timeline(truth: Path, inbox: Inbox, *, first: int, until: int) -> Timeline:
    table = pq.read_table(truth / "operations.parquet", columns=["iteration", "start_true_ns", "called_ns"])
    starts = {
        step: min(ns for ns in table.filter(table["iteration"].to_numpy() == step)["start_true_ns"].to_pylist() if ns)
        for step in (first, until)
    }
    firing = inbox.alert("firing")
    alerts = [] if firing is None else [each["labels"] for each in firing.body["alerts"]]
    hosts = json.loads((truth / "job.json").read_text())["hosts"]
    return Timeline(
        slow=starts[first] * 1e-9,
        healed=starts[until] * 1e-9,
        slow_host=list(hosts)[1],
        opened=_at(inbox.own("opened")),
        firing=_at(firing),
        named_hosts=",".join(sorted({each["hosts"] for each in alerts if each["alertname"] == _ALERT})),
        notifications=len(inbox.fingerprints()),
        closed=_at(inbox.own("closed")),
        resolved=_at(inbox.alert("resolved")),
    )


def _at(message: Message | None) -> float | None:
    return None if message is None else message.at_seconds


if __name__ == "__main__":
    main()

"""`ncclscope demo`: the whole loop on this machine, without a GPU.

A small simulated cluster trains and writes logs and exports as NCCL and nsys do; one real agent per node follows
them; a real service takes what they send. All are processes of their own, as they would be on a cluster.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final, cast

import click

from ncclscope.extras import require_service, require_writable
from ncclscope.serve import is_free_port, ports_of_service
from ncclscope.simulate import BEHIND, configuration_of
from ncclscope.snapshot import fetch_snapshot

_START_SECONDS: Final = 180
"""Far more than a busy machine takes; a process that has ended is reported at once."""
_STOP_SECONDS: Final = 60
_SETTLE_SECONDS: Final = 60
_STILL_SECONDS: Final = 2.0
"""Nothing is open and nothing came for so long: agents look for exports several times in it."""
_STUCK_SECONDS: Final = 5.0
"""Something is open, but nothing came for so long: it will stay open."""
_LOOK_SECONDS: Final = 1.0
DEFAULT_FAULTS: Final = ("late_rank:rank=1,ms=4,from=10", "slow_link:node=1,factor=0.5,from=120")
"""The faults that the demo has to find: a rank that comes late from the fourth second on, and a link between the nodes
that degrades after three quarters of a minute, when it is known how fast it was."""

_SHOWS: Final = {
    "late_rank": "late_rank",
    "slow_link": "slow_link",
    "slow_nic": "slow_link",
    "hang": "hang",
    "mismatch": "mismatch",
    "kill": "hang",
    "clock_step": "clock_fault",
}
"""The kind of finding that a kind of fault ends in; the others are disturbances in which nothing should be found."""

_LAYOUT: Final = ("--nodes", "4", "--gpus", "2", "--tp", "2", "--pp", "2", "--dp", "2", "--order", "tp-pp-dp")
"""Pipelines and data parallelism across the nodes: a slow node shows in some groups and not in others."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--for", "seconds", type=click.FloatRange(min=1), help="Stop after this many seconds.")
@click.option(
    "--snapshot",
    "snapshot_to",
    type=click.Path(path_type=Path),
    help="At the end, write the files of `ncclscope snapshot` to this folder.",
)
@click.option("--seed", default=1, show_default=True, help="Random seed; different seeds give different runs.")
@click.option(
    "--fault",
    "faults",
    multiple=True,
    metavar="KIND:key=value...",
    help="Fault to inject, as for `simulate`; `none`: a healthy run. Repeatable.",
)
@click.option(
    "--capture", default="full", show_default=True, help="How much nsys records: full, duty:F, or none (logs only)."
)
@click.option("--nccl", default="2.28.3", show_default=True, help="NCCL version to imitate.")
@click.option(
    "--keep", type=click.Path(path_type=Path, file_okay=False), help="Keep the files of the run in this folder."
)
@click.option(
    "--http-port", default=9798, show_default=True, help="Port of the page; if it is in use, another one is taken."
)
def demo(
    seconds: float | None,
    snapshot_to: Path | None,
    seed: int,
    faults: tuple[str, ...],
    capture: str,
    nccl: str,
    keep: Path | None,
    http_port: int,
) -> None:
    """Run everything on this machine without a GPU: a simulated cluster, real agents, a real service."""
    require_service()
    simulator = ["--seed", str(seed), "--capture", capture, "--nccl", nccl, *_fault_options(faults)]
    _check_simulator(simulator)
    if snapshot_to is not None:
        require_writable(snapshot_to, "--snapshot")
    if keep is not None:
        require_writable(keep, "--keep")
    with _folder(keep) as folder:
        run = DemoRun(folder=folder, simulator=simulator, http_port=http_port if is_free_port(http_port) else 0)
        with _signals_end_it(), closing(run):
            try:
                click.echo("starting a service, a simulated cluster and its agents")
                run.start()
                _say_where(run)
                for fault in _faults(faults):
                    click.echo(f"injected    {fault} (counted in steps of the simulated job)")
                click.echo("end it with Ctrl-C")
                run.watch(seconds)
            except KeyboardInterrupt:
                click.echo("\nstopping")
            for fault in _faults(faults):
                click.echo(run.found.outcome(fault))
            click.echo("ending the simulated job")
            run.end_training()
            if snapshot_to is not None:
                click.echo("waiting until the service has decided all that was read, then writing its files")
                run.wait_until_settled()
                for name in fetch_snapshot(run.url, snapshot_to):
                    click.echo(f"wrote {snapshot_to / name}")


@dataclass(slots=True)
class FoundFindings:
    """The findings of the service so far, each said once, and after how long the first of each kind came."""

    _said: set[str] = field(default_factory=set[str])
    _first: dict[str, float] = field(default_factory=dict[str, float])

    def new_lines(self, findings: Sequence[Mapping[str, Any]], seconds: float) -> list[str]:
        """A line for each finding that was not there before, `seconds` after the start; the oldest first."""
        lines = list[str]()
        for each in sorted(findings, key=lambda finding: finding["since_ns"]):
            if each["id"] not in self._said:
                self._said.add(each["id"])
                self._first.setdefault(each["kind"], seconds)
                lines.append(
                    f"+{seconds:3.0f} s      {each['kind']} ({each['confidence']:.0%} sure): {each['summary']}"
                )
        return lines

    def outcome(self, fault: str) -> str:
        """Whether a finding of the kind that this fault ends in came, and when."""
        kind = _SHOWS.get(fault.partition(":")[0])
        if kind is None:
            return f"injected    {fault}: no finding is expected of it alone"
        first = self._first.get(kind)
        when = "no such finding so far" if first is None else f"found {first:.0f} s after the start"
        return f"injected    {fault}: {kind}, {when}"


@dataclass(slots=True)
class DemoRun:
    """The processes of one demo."""

    folder: Path
    simulator: Sequence[str]
    http_port: int
    """0: any; the one that the service has once it is started."""
    agents_port: int = 0
    nodes: int = 4
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict[str, "subprocess.Popen[bytes]"])
    found: FoundFindings = field(default_factory=FoundFindings)
    _pauses_told: int = field(default=0, init=False)

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def cluster(self) -> Path:
        """Where the simulated cluster writes."""
        return self.folder / "cluster"

    def start(self) -> None:
        """Starts service, cluster and agents, and waits until each is ready.

        Raises:
            click.ClickException: one of them ended, or is not ready in time; says which, and what it said last.
        """
        self._spawn(
            "service",
            "serve",
            *("--listen", "127.0.0.1:0", "--http", f"127.0.0.1:{self.http_port}"),
            *("--data", str(self.folder / "data")),
        )
        self._wait("service", self._has_read_ports)
        self._wait("service", lambda: _answers(f"{self.url}/readyz"))
        self._spawn("cluster", "simulate", "--live", "--out", str(self.cluster), *_LAYOUT, *self.simulator)
        self._wait("cluster", lambda: len(self.hosts()) == self.nodes)
        for host in self.hosts():
            self._spawn(
                f"agent-{host}",
                "agent",
                *("--connect", f"127.0.0.1:{self.agents_port}", "--name", host, "--job", "demo"),
                *("--logs", str(self.cluster / "logs" / f"*.{host}.*log")),
                *("--exports", str(self.cluster / "nsys" / host)),
            )

    def _has_read_ports(self) -> bool:
        """Takes the ports that the service prints once it listens on both."""
        ports = ports_of_service((self.folder / "service.log").read_text())
        if ports is None:
            return False
        self.agents_port, self.http_port = ports
        return True

    def hosts(self) -> list[str]:
        """The nodes that have begun to write."""
        return sorted({path.name.split(".")[1] for path in (self.cluster / "logs").glob("nccl.*.log")})

    def watch(self, seconds: float | None) -> None:
        """Waits, for so long or until it is interrupted; a process that ends on the way ends the demo."""
        began = looked = time.monotonic()
        until = None if seconds is None else began + seconds
        while until is None or time.monotonic() < until:
            if time.monotonic() - looked >= _LOOK_SECONDS:
                for line in self.found.new_lines(_overview_of(self.url).get("findings", []), time.monotonic() - began):
                    click.echo(line)
                for line in self.new_pauses():
                    click.echo(
                        f"+{time.monotonic() - began:3.0f} s      {line}; that pause is no fault, and may be called one"
                    )
                sys.stdout.flush()
                looked = time.monotonic()
            for name, process in self.processes.items():
                if process.poll() is not None:
                    raise click.ClickException(f"{name} {_how(process)}: {self._last_words(name)}")
            time.sleep(0.2)

    def new_pauses(self) -> list[str]:
        """Sentences of the simulator, since the last look, on times in which it could not keep up."""
        lines = (self.folder / "cluster.log").read_text(errors="replace").splitlines()
        pauses = [line for line in lines if line.startswith(BEHIND)]
        new, self._pauses_told = pauses[self._pauses_told :], len(pauses)
        return new

    def end_training(self) -> None:
        """Lets the job end: communicators are destroyed, the last capture is finished."""
        self._end("cluster")

    def wait_until_settled(self) -> None:
        """Waits until the service has decided all that the agents could read."""
        settling = Settling()
        until = time.monotonic() + _SETTLE_SECONDS
        while time.monotonic() < until and not settling.is_over(
            _overview_of(self.url).get("jobs", []), time.monotonic()
        ):
            time.sleep(0.5)

    def close(self) -> None:
        """Ends what still runs: the cluster, its agents, and at last the service, which was started first."""
        for name in [*list(self.processes)[1:], *list(self.processes)[:1]]:
            self._end(name)

    def _spawn(self, name: str, *arguments: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "ncclscope", *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                # Of a group of its own: a Ctrl-C on the terminal ends the demo, which ends its parts in order.
                start_new_session=True,
            )

    def _wait(self, name: str, is_ready: Callable[[], bool]) -> None:
        until = time.monotonic() + _START_SECONDS
        while not is_ready():
            if self.processes[name].poll() is not None:
                raise click.ClickException(f"{name} did not start: {self._last_words(name)}")
            if time.monotonic() > until:
                raise click.ClickException(f"{name} is not ready after {_START_SECONDS} s: {self._last_words(name)}")
            time.sleep(0.05)

    def _end(self, name: str) -> None:
        process = self.processes.pop(name, None)
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _last_words(self, name: str) -> str:
        text = (self.folder / f"{name}.log").read_text(errors="replace").strip()
        return text.splitlines()[-1] if text else "it said nothing"


def _how(process: subprocess.Popen[bytes]) -> str:
    """How a process that ran too short a time has ended."""
    if process.returncode < 0:
        return f"was ended by {signal.Signals(-process.returncode).name}; it said last"
    return f"ended by itself with {process.returncode}"


@dataclass(slots=True)
class Settling:
    """Watches a service work off what it was sent, from one look at its jobs to the next."""

    _seen: object = None
    _looked: float = 0.0
    _still: float = 0.0

    def is_over(self, jobs: Sequence[Mapping[str, Any]], now: float) -> bool:
        """Whether nothing is open any more, or what is open stays so. `now` in seconds, of any clock.

        Nothing that is open does not suffice: what an agent has not read yet is not open either. Of the time between
        two looks a second counts at most: on a machine that stood still the agents stood still too.
        """
        passed, self._looked = min(now - self._looked, _LOOK_SECONDS), now
        progress = [(job.get("operations"), job.get("alignment")) for job in jobs]
        if progress != self._seen:
            self._seen, self._still = progress, 0.0
            return False
        self._still += passed
        is_open = not jobs or any(job["alignment"]["pending"] for job in jobs)
        return self._still >= (_STUCK_SECONDS if is_open else _STILL_SECONDS)


@contextmanager
def _folder(keep: Path | None) -> Generator[Path]:
    """The folder of the run: the one that is to be kept, emptied of an earlier run, or a temporary one."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="ncclscope-demo-") as folder:
            yield Path(folder)
        return
    keep.mkdir(parents=True, exist_ok=True)
    for part in ("cluster", "data"):
        shutil.rmtree(keep / part, ignore_errors=True)
    yield keep


@contextmanager
def _signals_end_it() -> Generator[None]:
    """SIGTERM, and the SIGHUP of a terminal that is closed, end the demo as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _faults(faults: tuple[str, ...]) -> tuple[str, ...]:
    """Those that are injected; none of a healthy run."""
    return tuple(fault for fault in faults or DEFAULT_FAULTS if fault != "none")


def _fault_options(faults: tuple[str, ...]) -> Iterator[str]:
    for fault in faults or DEFAULT_FAULTS:
        yield "--fault"
        yield fault


def _check_simulator(arguments: Sequence[str]) -> None:
    """Ends the demo as wrong usage if its cluster could not be simulated, before anything is started."""
    try:
        configuration_of(["--live", "--out", ".", *_LAYOUT, *arguments])
    except click.UsageError as error:
        raise click.UsageError(error.format_message()) from error


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _overview_of(url: str) -> dict[str, list[dict[str, Any]]]:
    """A service's overview; empty if it does not answer."""
    try:
        with urllib.request.urlopen(f"{url}/api/overview", timeout=10) as answer:
            return cast("dict[str, list[dict[str, Any]]]", json.loads(answer.read()))
    except (urllib.error.URLError, OSError, ValueError):
        return {}


def _say_where(run: DemoRun) -> None:
    click.echo(f"live page   {run.url}/")
    click.echo(f"metrics     {run.url}/metrics")
    click.echo(f"cluster     {run.cluster} ({run.nodes} nodes, simulated)")
    sys.stdout.flush()

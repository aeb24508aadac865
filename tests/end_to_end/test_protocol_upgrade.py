"""Two versions of the protocol: whichever side is upgraded first, however it ends, nothing is lost or told twice."""

from __future__ import annotations

import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import pytest
from agent.log_samples import operation_line
from benchmarks.ports import free_port
from end_to_end.processes import PATIENCE_SECONDS, fetch_json, running, wait_for
from end_to_end.spool_node import spooled_to

pytestmark = pytest.mark.slow

_INIT = (
    "node17:41822:41903 [2] NCCL INFO comm 0x55d0c8b3e2a0 rank 0 nranks 1 cudaDev 0 busId 1000 commId 0x1 - "
    "Init COMPLETE\n"
)
_OLD, _NEW = 2, 3


class Site:
    """A service and an agent with a spool, of either version."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._agents, self._web = free_port(), free_port()
        self.log = folder / "nccl.log"
        self.log.write_text(_INIT)
        self._written = 0

    def service(self, protocol: int) -> subprocess.Popen[bytes]:
        listen = ("--listen", f"127.0.0.1:{self._agents}", "--http", f"127.0.0.1:{self._web}")
        arguments = ("serve", *listen, "--data", str(self._folder / "data"))
        return self._stack.enter_context(running(self._folder / "service.log", *arguments, protocol=protocol))

    def agent(self, protocol: int) -> subprocess.Popen[bytes]:
        arguments = ("agent", "--connect", f"127.0.0.1:{self._agents}", "--logs", str(self._folder / "nccl.*"))
        spool = ("--spool", str(self._folder / "spool"), "--retry-seconds", "0.5")
        return self._stack.enter_context(running(self._folder / "agent.log", *arguments, *spool, protocol=protocol))

    def write(self, operations: int) -> None:
        lines = [operation_line(op_count=f"{self._written + number:x}") + "\n" for number in range(operations)]
        self._written += operations
        with self.log.open("a") as stream:
            stream.writelines(lines)

    def operations(self) -> int:
        overview = cast("dict[str, list[dict[str, int]]]", fetch_json(f"http://127.0.0.1:{self._web}/api/overview"))
        return sum(job["operations"] for job in overview["jobs"])

    def wait_until_all_arrived(self) -> None:
        wait_for(lambda: self.operations() >= self._written, f"{self._written} operations")
        assert self.operations() == self._written, "each once"

    def begun(self) -> tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]:
        """A service and an agent of the old version, when all has arrived."""
        service, agent = self.service(_OLD), self.agent(_OLD)
        self.write(300)
        self.wait_until_all_arrived()
        return service, agent

    def wait_until_refused_and_spooled(self) -> None:
        told = "install the same ncclscope on both"
        wait_for(lambda: told in (self._folder / "agent.log").read_text(), "the refusal")
        self.write(100)
        written = self.log.stat().st_size
        spools = self._folder / "spool"
        wait_for(lambda: max(map(spooled_to, spools.glob("*")), default=0) >= written, "the spool")


def stop(process: subprocess.Popen[bytes], how: signal.Signals) -> None:
    process.send_signal(how)
    process.wait(PATIENCE_SECONDS)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=lambda how: how.name)
def test_a_service_may_be_upgraded_before_its_agents(tmp_path: Path, how: signal.Signals) -> None:
    with ExitStack() as stack:
        site = Site(tmp_path, stack)
        service, agent = site.begun()
        stop(service, how)
        site.service(_NEW)
        site.wait_until_refused_and_spooled()
        stop(agent, how)
        site.log.unlink()
        site.agent(_NEW)
        site.wait_until_all_arrived()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=lambda how: how.name)
def test_agents_may_be_upgraded_before_their_service(tmp_path: Path, how: signal.Signals) -> None:
    with ExitStack() as stack:
        site = Site(tmp_path, stack)
        service, agent = site.begun()
        stop(agent, how)
        site.agent(_NEW)
        site.wait_until_refused_and_spooled()
        site.log.unlink()
        stop(service, how)
        site.service(_NEW)
        site.wait_until_all_arrived()

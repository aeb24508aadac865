"""`ncclscope run --report`: a service of its own beside the job, captures where nsys is there, and a report at the end.

Everything of the run is in one folder: NCCL's logs in `logs`, exports in `exports`, what the service keeps in
`service`, and beside them what `ncclscope analyze` writes. An earlier run's are replaced.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import click

from ncclscope.extras import require_service, require_writable
from ncclscope.serve import is_free_port, ports_of_service
from ncclscope_agent.nccl_settings.presets import glob_of
from ncclscope_capture.job import Watch

_START_SECONDS: Final = 60
_STOP_SECONDS: Final = 60
_ANSWER_SECONDS: Final = 10
_PAGE_PORT: Final = 9798
_NODES: Final = ("SLURM_NNODES", "SLURM_JOB_NUM_NODES", "PBS_NUM_NODES", "OMPI_MCA_orte_num_nodes")
_JUST_NOW_NS: Final = 30_000_000_000
_WITHOUT_NSYS: Final = (
    "nsys is not in PATH: counts, sizes, order and step times only. With it there are also waiting, bandwidth and who "
    "is late"
)


@dataclass(slots=True)
class ReportRun:
    """The parts of one run that are there for its report."""

    folder: Path
    _service: int | None = field(default=None, init=False)
    _page: str | None = field(default=None, init=False)
    _stuck: Sequence[Mapping[str, Any]] = field(default=(), init=False)
    """Hangs that the service saw."""

    @property
    def exports(self) -> Path:
        """Where captures go."""
        return self.folder / "exports"

    @property
    def log_file(self) -> str:
        """The pattern for NCCL_DEBUG_FILE."""
        return f"{self.folder.absolute() / 'logs'}/".replace("%", "%%") + "nccl.%h.%p.log"

    def prepare(self, environment: Mapping[str, str], processes: int | None) -> None:
        """Makes the folders, emptied of an earlier run.

        Raises:
            click.ClickException: this is one of several processes of its step or of several nodes, the packages of the
                service are missing, or the folder cannot be written.
        """
        nodes = max((int(environment[name]) for name in _NODES if environment.get(name, "").isdigit()), default=1)
        if nodes > 1 or (processes or 1) > 1:
            raise click.UsageError(
                "--report is for a job on one node, started once: ncclscope run --report -- torchrun ... For more "
                "nodes start `ncclscope serve` where all of them reach it, and give --connect instead"
            )
        require_service()
        require_writable(self.folder, "--report")
        for part in ("logs", "exports", "service"):
            shutil.rmtree(self.folder / part, ignore_errors=True)
            (self.folder / part).mkdir(parents=True)

    def recorded(self, command: tuple[str, ...]) -> tuple[str, ...]:
        """The command as it is recorded now and then by nsys; as it is, with a word on that, where nsys is missing."""
        if shutil.which("nsys") is None:
            say(_WITHOUT_NSYS)
            return command
        return (sys.executable, "-m", "ncclscope", "capture", "--out", str(self.exports), "--", *command)

    def start_service(self, watch: Watch) -> str | None:
        """Starts the service, and gives the address for agents; None, with a reason printed, if it did not start."""
        log = self.folder / "service" / "service.log"
        http = f"127.0.0.1:{_PAGE_PORT if is_free_port(_PAGE_PORT) else 0}"
        command = [sys.executable, "-m", "ncclscope", "serve", "--listen", "127.0.0.1:0", "--http", http]
        with log.open("wb") as output:
            self._service = watch.start_apart(
                [*command, "--data", str(log.parent / "data")], os.environ, output.fileno()
            )
        until = time.monotonic() + _START_SECONDS
        while (ports := ports_of_service(log.read_text(errors="replace"))) is None:
            watch.reap()
            if watch.status(self._service) is not None or time.monotonic() > until:
                say(f"no live page: {log} says why; the report is written all the same")
                return None
            time.sleep(0.05)
        agents, web = ports
        self._page = f"http://127.0.0.1:{web}"
        host = socket.gethostname()
        say(f"live page http://127.0.0.1:{web}/ (from another machine: ssh -L {web}:127.0.0.1:{web} {host})")
        return f"127.0.0.1:{agents}"

    def stop_service(self, watch: Watch) -> None:
        """Ends the service, which has nothing to give that the files do not have, but how long nothing came."""
        if self._service is None or watch.status(self._service) is not None:
            return
        self._stuck = hangs(self._overview())
        os.kill(self._service, signal.SIGTERM)
        if watch.wait(self._service, lambda: None, seconds=_STOP_SECONDS) is None:
            os.kill(self._service, signal.SIGKILL)

    def _overview(self) -> dict[str, Any]:
        """The service's overview; empty if it does not answer."""
        try:
            with urllib.request.urlopen(f"{self._page}/api/overview", timeout=_ANSWER_SECONDS) as answer:
                return cast("dict[str, Any]", json.loads(answer.read()))
        except (urllib.error.URLError, OSError, ValueError):
            return {}

    def write(self, log_file: str) -> None:
        """Analyzes the run's logs and exports into the folder, and prints what it found in ten lines."""
        say("writing the report")
        paths = [*sorted(glob.glob(glob_of(log_file))), str(self.exports)]
        seen = self.folder / "service" / "hangs.json"
        seen.write_text(json.dumps(self._stuck))
        command = [sys.executable, "-m", "ncclscope", "analyze", "--brief", "--seen", str(seen), *paths]
        command += ["--out", str(self.folder)]
        if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
            say(f"no report: give {self.folder} to `ncclscope analyze`")
        else:
            say(f"report {self.folder / 'report.html'}")


def hangs(overview: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The hangs that were open when the job ended, or that are said to be over since, because of that; as open.

    Files do not say how long nothing came before somebody ended the job: a job that was killed at work looks the same.
    """
    found: Sequence[Mapping[str, Any]] = overview.get("findings", ())
    newest: dict[tuple[int, ...], Mapping[str, Any]] = {}
    for each in sorted(found, key=lambda finding: finding["since_ns"]):
        is_last = each["until_ns"] is None or overview["now_ns"] - each["until_ns"] < _JUST_NOW_NS
        if each["kind"] == "hang" and is_last:
            newest[tuple(each["ranks"])] = {**each, "until_ns": None}
    return sorted(newest.values(), key=lambda each: not each["ranks"])


def say(text: str) -> None:
    """Prints a line of ours, to stderr: the job's output is the job's."""
    print(f"ncclscope run: {text}", file=sys.stderr, flush=True)

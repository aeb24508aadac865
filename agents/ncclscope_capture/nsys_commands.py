"""The commands of nsys that a recording takes, by version.

*Source:* NVIDIA Nsight Systems User Guide, "CLI Interactive" (launch, start, stop, export, shutdown, sessions).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ncclscope_capture.settings import CaptureSettings

_BLOBS_SINCE = (2026, 1)
"""`nsys export --include-blobs`: the first version whose exports record the option."""


@dataclass(frozen=True, order=True)
class NsysVersion:
    """A version, in its order."""

    year: int
    release: int


def read_version(printed: str) -> NsysVersion | None:
    """The version in what `nsys --version` prints; None if it is something else."""
    found = re.search(r"version (\d{4})\.(\d+)", printed)
    return None if found is None else NsysVersion(int(found[1]), int(found[2]))


def launch(settings: CaptureSettings, session: str, command: Sequence[str]) -> list[str]:
    """Starts the job with nsys in it, recording nothing yet."""
    graphs = [f"--cuda-graph-trace={settings.cuda_graph_trace}"] if settings.cuda_graph_trace != "graph" else []
    return [
        settings.nsys,
        "launch",
        f"--session-new={session}",
        f"--trace={settings.trace}",
        *graphs,
        "--wait=primary",
        *command,
    ]


def start(nsys: str, session: str, output: str) -> list[str]:
    """Begins a recording. Thread scheduling is recorded too unless it is turned off beside sampling."""
    quiet = ["--sample=none", "--cpuctxsw=none"]
    return [nsys, "start", f"--session={session}", *quiet, "--force-overwrite=true", f"--output={output}"]


def stop(nsys: str, session: str) -> list[str]:
    """Ends a recording, and returns when its report is written."""
    return [nsys, "stop", f"--session={session}"]


def sessions(nsys: str) -> list[str]:
    """Lists sessions. `nsys start` makes a session that is not there, so it has to be asked for before and after."""
    return [nsys, "sessions", "list"]


def shutdown(nsys: str, session: str) -> list[str]:
    """Ends the session, and not the job."""
    return [nsys, "shutdown", f"--session={session}", "--kill=none"]


def export(settings: CaptureSettings, version: NsysVersion | None, report: str, output: str) -> list[str]:
    """Turns a report into SQLite, with the payloads of NCCL's ranges if the version keeps them."""
    blobs = version is not None and (version.year, version.release) >= _BLOBS_SINCE
    return [
        settings.nsys,
        "export",
        "--type=sqlite",
        "--force-overwrite=true",
        *(["--include-blobs=true"] if blobs else []),
        *([f"--tables={settings.tables}"] if settings.tables else []),
        f"--output={output}",
        report,
    ]


def listed_id(printed: str, session: str) -> str | None:
    """The ID under which `nsys sessions list` names the session; None if it does not.

    The name is in the last column, the ID in the first: a session that is made again under a name has another ID.
    """
    lines = (line.split() for line in printed.splitlines())
    return next((columns[0] for columns in lines if columns[-1:] == [session]), None)

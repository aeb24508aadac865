"""A real Prometheus that scrapes one address, for as long as it is needed."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import urllib.parse
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from benchmarks.ports import free_port
from end_to_end.processes import PATIENCE_SECONDS, fetch, fetch_json, wait_for

_CONFIGURATION: Final = """
global: {{scrape_interval: 4s}}
scrape_configs:
  - job_name: ncclscope
    honor_labels: true
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prometheus:
    """Its HTTP API."""

    url: str

    def now(self, expr: str) -> list[dict[str, Any]]:
        """The series that an expression gives now."""
        return self._ask("query", {"query": expr})

    def over(self, expr: str, *, begin: float, end: float, step: float = 2) -> list[dict[str, Any]]:
        """The series that an expression gives over a time."""
        return self._ask("query_range", {"query": expr, "start": str(begin), "end": str(end), "step": str(step)})

    def _ask(self, what: str, query: dict[str, str]) -> list[dict[str, Any]]:
        answer: Any = fetch_json(f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(query)}")
        assert answer["status"] == "success"
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result


@contextlib.contextmanager
def prometheus(folder: Path, *, scrapes: int) -> Generator[Prometheus]:
    """A Prometheus that scrapes port `scrapes` every four seconds; skips the test where there is none."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("needs prometheus (Debian: apt-get install prometheus)")
    configuration = folder / "prometheus.yml"
    configuration.write_text(_CONFIGURATION.format(port=scrapes))
    port = free_port()
    command = [
        program,
        f"--config.file={configuration}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
    ]
    with (folder / "prometheus.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        server = Prometheus(url=f"http://127.0.0.1:{port}")
        wait_for(lambda: b"Ready" in fetch(f"{server.url}/-/ready"), "Prometheus to be ready")
        yield server
    finally:
        process.terminate()
        process.wait(PATIENCE_SECONDS)

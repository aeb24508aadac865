"""What agent and service tell of themselves: one form for machines, fixed words, each word in the documentation."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

_TELL = (
    "import logging, structlog; from ncclscope.logs import configure_logs; configure_logs({form!r});"
    "structlog.get_logger().warning('not_connected', service='h:1', why='a \"quoted\"\\nword');"
    "logging.getLogger('uvicorn.error').error('Exception in %s', 'application')"
)


def told(form: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", _TELL.format(form=form)], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout == ""
    return done.stderr.splitlines()


@pytest.mark.parametrize("form", ["json", "auto"])
def test_each_line_is_json_where_nobody_looks(form: str) -> None:
    own, library = map(json.loads, told(form))
    assert own.pop("timestamp").endswith("Z")
    assert own == {"event": "not_connected", "level": "warning", "service": "h:1", "why": 'a "quoted"\nword'}
    assert (library["event"], library["level"]) == ("Exception in application", "error")


def test_text_is_for_people() -> None:
    assert any("not_connected" in line and "service=h:1" in line for line in told("text"))


def test_every_event_is_documented_and_the_documentation_names_no_other(repository: Path) -> None:
    named: set[str] = set()
    for folder in ("agents", "service", "command"):
        for path in (repository / folder).rglob("*.py"):
            text = path.read_text()
            named.update(re.findall(r"_log\.(?:info|warning|error|exception)\(\s*\"(\w+)\"", text))
    rows = [line.split("|")[1] for line in (repository / "docs" / "logs.md").read_text().splitlines() if "| `" in line]
    assert named == {word for row in rows for word in re.findall(r"`(\w+)`", row)}

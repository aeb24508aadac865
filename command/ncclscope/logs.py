"""Log lines of the agent and the service: text for people at a terminal, else JSON for those who collect logs."""

from __future__ import annotations

import logging
import sys

import structlog
from structlog.typing import Processor


def configure_logs(form: str) -> None:
    """Has all log lines written to stderr; `auto` is text at a terminal and JSON otherwise.

    One line of JSON each: `event` (a fixed word, docs/logs.md), `level`, `timestamp` (UTC) and what belongs to it.
    """
    is_json = form == "json" or (form == "auto" and not sys.stderr.isatty())
    shared: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    renderer: Processor = (
        structlog.processors.JSONRenderer() if is_json else structlog.dev.ConsoleRenderer(colors=False)
    )
    structlog.configure(processors=[*shared, renderer], logger_factory=lambda *_: structlog.PrintLogger(sys.stderr))
    # What libraries log, for instance uvicorn about an exception.
    handler = logging.StreamHandler(sys.stderr)
    to_text = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=[to_text, renderer]))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)

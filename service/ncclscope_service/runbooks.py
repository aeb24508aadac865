"""The runbooks as a page of the service: docs/findings.md, so that a link of an alert needs no network."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from ncclscope_service.runbook_page import runbook_page
from ncclscope_service.web_files import WEB

_PACKED: Final = WEB / "findings.md"
"""Where the wheel puts it."""
_CHECKOUT: Final = Path(__file__).parents[2] / "docs" / "findings.md"


async def runbooks(_: Request) -> Response:
    """The page."""
    text = await to_thread.run_sync((_PACKED if _PACKED.exists() else _CHECKOUT).read_text)
    return HTMLResponse(runbook_page(text), headers={"Cache-Control": "no-cache"})

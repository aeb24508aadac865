"""The page's own files, and plotly's script out of its installed wheel: nothing is vendored or fetched."""

from __future__ import annotations

import gzip
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

WEB: Final = Path(__file__).parent / "web"

_SCRIPT: Final = "text/javascript; charset=utf-8"


def plotly_script_path() -> Path:
    """Where the installed plotly keeps its browser script.

    Found without importing plotly, which would cost the service 100 MB and half a second.
    """
    spec = find_spec("plotly")
    assert spec is not None, "plotly belongs to the extra `service` and is not installed"
    assert spec.origin is not None
    return Path(spec.origin).parent / "package_data" / "plotly.min.js"


class PageFiles(StaticFiles):
    """The page's files; a browser asks each time whether they are still the same, so an upgrade shows at once."""

    def __init__(self) -> None:
        super().__init__(directory=WEB)

    async def get_response(self, path: str, scope: Scope) -> Response:
        """One file, or 304 where the browser has it."""
        response = await super().get_response(path, scope)
        response.headers["Cache-Control"] = "no-cache"
        return response


async def page(_: Request) -> Response:
    """The page itself."""
    return FileResponse(WEB / "index.html", headers={"Cache-Control": "no-cache"})


class PlotlyScript:
    """Serves plotly's script, compressed once and kept: 1.4 MB instead of 4.6 MB for each new browser."""

    def __init__(self) -> None:
        self._compressed: bytes | None = None

    async def __call__(self, request: Request) -> Response:
        """The script, or 304 where the browser has this version."""
        etag = f'"plotly-{version("plotly")}"'
        headers = {"ETag": etag, "Cache-Control": "public, max-age=86400", "Vary": "Accept-Encoding"}
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=headers)
        if "gzip" not in request.headers.get("accept-encoding", ""):
            return FileResponse(plotly_script_path(), headers=headers, media_type=_SCRIPT)
        if self._compressed is None:
            self._compressed = await to_thread.run_sync(_compressed_script)
        return Response(self._compressed, headers={**headers, "Content-Encoding": "gzip"}, media_type=_SCRIPT)


def _compressed_script() -> bytes:
    return gzip.compress(plotly_script_path().read_bytes(), compresslevel=6, mtime=0)

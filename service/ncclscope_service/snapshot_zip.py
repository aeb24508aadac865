"""A snapshot as one zip: the files are written to a folder that is gone before the first byte is sent."""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import IO, Final

from anyio import to_thread
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

_CHUNK_BYTES: Final = 1 << 18

_COMPRESSED: Final = frozenset({".parquet", ".gz"})
"""Files that are compressed already."""


def zip_folder(folder: Path) -> IO[bytes]:
    """An unnamed file, at its start, that holds every file of the folder."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the answer that streams it closes it
    with zipfile.ZipFile(file, "w", compresslevel=1) as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                method = zipfile.ZIP_STORED if path.suffix in _COMPRESSED else zipfile.ZIP_DEFLATED
                archive.write(path, path.relative_to(folder), compress_type=method)
    file.seek(0)
    return file


class ZipResponse(StreamingResponse):
    """Streams an open zip and closes it, also where the client goes away."""

    def __init__(self, file: IO[bytes], *, name: str) -> None:
        size = file.seek(0, 2)
        file.seek(0)
        headers = {"Content-Length": str(size), "Content-Disposition": f'attachment; filename="{name}"'}
        self._chunks = _chunks(file)
        super().__init__(self._chunks, media_type="application/zip", headers=headers)
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the zip."""
        with self._file:
            async with aclosing(self._chunks):
                await super().__call__(scope, receive, send)


async def _chunks(file: IO[bytes]) -> AsyncGenerator[bytes, None]:
    while chunk := await to_thread.run_sync(file.read, _CHUNK_BYTES):
        yield chunk

"""Files of a run as the service has it now: one zip on request, and a folder for each job that ends."""

from __future__ import annotations

import re
import shutil
import tempfile
import time
import zipfile
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import IO, Final

import structlog
from anyio import to_thread
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ncclscope_service.export.directory import write_run
from ncclscope_service.store.tables import Store

_log = structlog.get_logger(__name__)

_CHUNK_BYTES: Final = 1 << 18
_COMPRESSED: Final = frozenset({".parquet", ".gz"})
"""Files that are compressed already."""
_NOT_IN_A_NAME: Final = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST_NAME: Final = 80
_STAMPED: Final = re.compile(r".+_\d{4}-\d{2}-\d{2}T\d{6}Z(-\d+)?$")


async def write_snapshot(store: Store, directory: Path, *, job: str | None = None, since_ns: int | None = None) -> None:
    """Writes the files of a run as the store is now; it may change meanwhile."""
    frozen = store.copy()
    await to_thread.run_sync(lambda: write_run(frozen, directory, job=job, since_ns=since_ns))


class SnapshotShelf:
    """Folders of ended jobs below one folder: a new one for each job, the oldest removed beyond a number."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    async def write(self, store: Store, job: str) -> None:
        """Writes the files of a job that has ended into a folder of its own."""
        folder = self.place(job, time.time_ns())
        try:
            await write_snapshot(store, folder, job=job)
            await to_thread.run_sync(self.tidy)
        except OSError as error:
            _log.warning("snapshot_failed", job=job, folder=str(folder), reason=str(error))
        else:
            _log.info("snapshot_written", job=job, folder=str(folder))

    def place(self, job: str, now_ns: int) -> Path:
        """A folder that is not there yet: `JOB_2026-01-31T235959Z`, without what no file name should hold.

        The job's name comes from an agent: no separator and no leading dot of it gets into a path.
        """
        stamp = time.strftime("%Y-%m-%dT%H%M%SZ", time.gmtime(now_ns // 1_000_000_000))
        name = f"{_NOT_IN_A_NAME.sub('-', job)[:_LONGEST_NAME].strip('.-') or 'job'}_{stamp}"
        candidate, again = self._folder / name, 2
        while candidate.exists():
            candidate, again = self._folder / f"{name}-{again}", again + 1
        return candidate

    def tidy(self) -> list[Path]:
        """Removes the oldest folders of ended jobs beyond those that are kept, and gives them. Others are not touched.

        Raises:
            OSError: a folder could not be listed or removed.
        """
        stamped = [path for path in self._folder.iterdir() if path.is_dir() and _STAMPED.match(path.name)]
        oldest_first = sorted(stamped, key=lambda path: (path.stat().st_mtime_ns, path.name))
        removed = oldest_first[: max(0, len(oldest_first) - self._keep)]
        for path in removed:
            shutil.rmtree(path)
        return removed


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
    """Streams an open zip and closes it, also if the client goes away."""

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

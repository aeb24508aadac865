"""Looks now and then whether the disk of --data takes what is written; in a thread, since a disk may not answer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import anyio
from anyio import to_thread

from ncclscope_service.vitals import Vital, disk_vital

_LOOK_SECONDS: Final = 15.0
_PATIENCE_SECONDS: Final = 30.0
_NAME: Final = ".ncclscope-writable"


class DiskProbe:
    """What the last look found."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._trouble: str | None = None
        self._free_bytes: int | None = None

    def vital(self) -> Vital:
        """As of the last look."""
        return disk_vital(trouble=self._trouble, free_bytes=self._free_bytes)

    async def run(self) -> None:
        """Looks for ever."""
        while True:
            with anyio.move_on_after(_PATIENCE_SECONDS) as patience:
                await self.look()
            if patience.cancelled_caught:
                self._trouble = f"it has not answered for {_PATIENCE_SECONDS:g} s"
            await anyio.sleep(_LOOK_SECONDS)

    async def look(self) -> None:
        """Looks once."""
        try:
            self._free_bytes = await to_thread.run_sync(self._try, abandon_on_cancel=True)
            self._trouble = None
        except OSError as error:
            self._trouble = error.strerror or type(error).__name__

    def _try(self) -> int:
        """Writes a little, and gives the free space."""
        path = self._folder / _NAME
        with path.open("wb") as stream:
            stream.write(b"x" * 4096)
        path.unlink()
        status = os.statvfs(self._folder)
        return status.f_bavail * status.f_frsize

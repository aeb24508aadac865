"""What a stopped service had: read from its data folder, of which nothing is changed."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Final

from ncclscope_service.data_folder import DataFolder, FolderInUseError
from ncclscope_service.kept import Kept
from ncclscope_service.persistence import Persistence, PersistenceSettings
from ncclscope_wire.errors import ConfigError

_PARTS: Final = ("state", "journal")


def read_stopped(data: Path) -> Kept:
    """The state that the last service left in this folder, with what it had not decided yet decided.

    State and journal are copied first, since to go on from them changes them; that takes as much room again.

    Raises:
        ConfigError: no service kept its state there, one still runs on it, or this version cannot read it.
        OSError: it cannot be read or copied.
    """
    if not any((data / part).is_dir() for part in _PARTS):
        raise ConfigError(
            f"--data {data}: no service kept its state here: name the folder that `serve --data` was given"
        )
    with tempfile.TemporaryDirectory(prefix="ncclscope-stopped-") as temporary:
        copied = Path(temporary)
        try:
            locked = DataFolder(data)
        except FolderInUseError as error:
            raise ConfigError(f"{error.said}; ask it for a snapshot with --service, or stop it first") from error
        try:
            for part in _PARTS:
                shutil.copytree(data / part, copied / part)
        finally:
            locked.close()
        persistence = Persistence(copied, PersistenceSettings())
        try:
            kept = persistence.open(None, {}, lambda entry: None, 0)
        finally:
            persistence.release()
        if (copied / "aside").is_dir():
            raise ConfigError(f"--data {data}: what is there is damaged or of another version of ncclscope")
    kept.pipeline.flush(kept.at_ns)
    return kept

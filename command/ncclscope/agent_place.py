"""What an agent needs on its node beside logs: files that only it can read, and a disk for its spool."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from ncclscope.node import free_bytes
from ncclscope_agent.config import AgentSettings
from ncclscope_agent.credentials import Credentials
from ncclscope_agent.release import shared_file_system
from ncclscope_agent.spool_files import SPOOL_LOCK, agent_directories
from ncclscope_wire.errors import ConfigError

_GB: Final = 1e9


def secrets_that_others_can_read(credentials: Credentials) -> list[str]:
    """Files with a token or a key that every user of this machine can read, or change."""
    named = (credentials.token_file, credentials.tls_key or credentials.tls_cert)
    return [name for name in named if name and _mode(name) & (stat.S_IROTH | stat.S_IWOTH)]


def fault_of_credentials(credentials: Credentials) -> str | None:
    """Why one of the files cannot be used, and what to do; None where all can."""
    try:
        credentials.check()
    except ConfigError as error:
        return str(error)
    return None


def fault_of_spool(directory: str) -> str | None:
    """Why an agent could not keep its spool below this directory; None where it could."""
    place = Path(directory).absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        return f"{place} is no directory"
    if not os.access(place, os.W_OK | os.X_OK):
        return f"this user may not write to {place}: make a directory there that is the agent's own"
    if kind := _network_of(place):
        return f"{place} is on {kind}: take a disk of this node, which is there when the network is not"
    free, wanted = free_bytes(place), AgentSettings().spool_max_bytes
    if free is not None and free < wanted:
        return (
            f"the disk of {place} has {free / _GB:.3g} GB free, and the spool takes up to {wanted / _GB:.3g} GB: "
            "make room, or give the agent less with --spool-max-bytes"
        )
    return None


def left_in_spools(directory: str) -> tuple[int, int]:
    """How many agents that do not run have left something below this directory, and how many bytes."""
    held = _locked_inodes()
    sizes: list[int] = []
    try:
        for path in agent_directories(Path(directory)):
            if (path / SPOOL_LOCK).exists() and (path / SPOOL_LOCK).stat().st_ino not in held:
                sizes.append(sum(file.stat().st_size for file in path.glob("frames-*")))
    except (OSError, ConfigError):
        return 0, 0  # another user's, or changed while it was looked at
    return sum(size > 0 for size in sizes), sum(sizes)


def _locked_inodes() -> frozenset[int]:
    """Files that a process has locked; to take a lock would keep an agent from it. Source: proc_locks(5)."""
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return frozenset()
    words = [line.split() for line in lines]
    return frozenset(int(each[5].rpartition(":")[2]) for each in words if len(each) > 5 and each[1] == "FLOCK")


def _network_of(directory: Path) -> str | None:
    try:
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return shared_file_system(handle)
    except OSError:
        return None
    finally:
        os.close(handle)


def _mode(name: str) -> int:
    try:
        return os.stat(name).st_mode
    except OSError:
        return 0

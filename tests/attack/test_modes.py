"""Another user of the machine reads what the service keeps, whatever its umask is and whoever made the folder."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from service.log_batches import rank_batches

from ncclscope_service.app import Service, ServiceSettings
from ncclscope_service.serve.listen import ListenSettings


@pytest.fixture
def careless() -> Iterator[None]:
    """A umask that closes nothing."""
    before = os.umask(0)
    yield
    os.umask(before)


def _open_to_others(folder: Path) -> list[Path]:
    """What another user can read below a folder."""

    def is_closed(path: Path) -> bool:
        return path.stat().st_mode & 0o077 == 0

    return [path for path in folder.rglob("*") if not any(map(is_closed, (path, *path.parents)))]


@pytest.mark.asyncio
@pytest.mark.usefixtures("careless")
@pytest.mark.parametrize("is_there", [False, True])
async def test_nothing_in_the_data_folder_is_open_to_others(tmp_path: Path, is_there: bool) -> None:
    data = tmp_path / "data"
    if is_there:
        for folder in (data, data / "journal", data / "operations"):
            folder.mkdir(mode=0o777)
    service = Service(ServiceSettings(version="0", agents=ListenSettings(port=0), http_port=0, data=data))
    async with anyio.create_task_group() as tasks:
        await tasks.start(service.run)
        log, _ = rank_batches(0, range(3))
        service.pipeline.ingest_batch(log, agent="a", session="s", job="j")
        service.tick(1)
        tasks.cancel_scope.cancel()
    service.finish(2)
    kept = [path for path in data.rglob("*") if path.is_file()]
    assert {path.suffix for path in kept} >= {".journal", ".state", ".parquet"}
    assert _open_to_others(data) == []
    assert [path for path in kept if path.stat().st_mode & 0o077] == []


def test_secrets_are_not_made_in_a_folder_that_others_can_enter(repository: Path, tmp_path: Path) -> None:
    """Keys and tokens are readable by their user alone, or with --containers closed by the folder alone."""
    make = repository / "deploy" / "make-secrets"
    subprocess.run([make, tmp_path / "new"], check=True, capture_output=True)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    public = {path.name for path in (tmp_path / "new").iterdir() if path.stat().st_mode & 0o077}
    assert public == {"ca.pem", "service.pem"}
    subprocess.run([make, "--containers", tmp_path / "contained"], check=True, capture_output=True)
    assert (tmp_path / "contained").stat().st_mode & 0o777 == 0o700
    assert {(tmp_path / "contained" / name).stat().st_mode & 0o777 for name in ("service.key", "agent.token")} == {
        0o644
    }
    (tmp_path / "open").mkdir(mode=0o755)
    refused = subprocess.run([make, tmp_path / "open"], capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "chmod 700" in refused.stderr
    assert list((tmp_path / "open").iterdir()) == []
    (tmp_path / "open").chmod(0o700)
    subprocess.run([make, tmp_path / "open"], check=True, capture_output=True)

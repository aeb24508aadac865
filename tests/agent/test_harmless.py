"""A real agent beside real writers: nothing that it does can hold them up, and nothing that they do ends it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import pytest
from anyio.abc import Process
from end_to_end.processes import PATIENCE_SECONDS
from service.loopback import Service

LINES = 400

_WRITE = """
import fcntl, os, sys, time
path, lines = sys.argv[1], int(sys.argv[2])
log = open(path, "ab", buffering=0)
fcntl.flock(log, fcntl.LOCK_EX)
fcntl.lockf(log, fcntl.LOCK_EX)
line = b"node17:41822:41903 [2] NCCL INFO AllReduce: opCount %x sendbuff 0x7f2a40000000 recvbuff 0x7f2a80000000 " \\
    b"count 1024 datatype 9 op 0 root 0 comm 0x55d0c8b3e2a0 [nranks=8] stream 0x55d0c7f01b10\\n"
for number in range(lines):
    if number == lines // 2:
        print("half", flush=True)
        sys.stdin.readline()
        if sys.argv[3] == "delete":
            os.unlink(path)
    log.write(line % number)
    time.sleep(0.001)
print("written", flush=True)
sys.stdin.read()
"""
"""Locks its file in both ways that Linux knows, until its input is closed; waits for a word in the middle."""


@asynccontextmanager
async def agent_on(
    service: Service, pattern: str, *options: str, ballast_mebibytes: int = 0
) -> AsyncGenerator[Process, None]:
    """A real agent that follows a pattern and sends to this service; it has so much memory more than it needs."""
    run = f"ballast = b'x' * ({ballast_mebibytes} << 20); from ncclscope.cli import main; main()"
    command = [sys.executable, "-c", run, "agent", "--logs", pattern, *options]
    async with service.listening() as port:
        process = await anyio.open_process(
            [*command, "--connect", f"127.0.0.1:{port}"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.aclose()


def rows_of(service: Service, name: str) -> int:
    """Operations that came of the source of this name."""
    batches = [received.batch for received in service.received if Path(received.batch.source.name).name == name]
    return sum(len(batch.operations) for batch in batches)


async def wait_for_rows(service: Service, name: str, rows: int) -> None:
    while rows_of(service, name) < rows:
        service.arrived = anyio.Event()
        await service.arrived.wait()


async def wait_for_word(process: Process, word: bytes) -> None:
    assert process.stdout is not None
    said = b""
    while word not in said:
        said += await process.stdout.receive()


def has_reader(fifo: Path) -> bool:
    """Whether somebody reads a pipe: who would write would be woken, and killed when the reader goes."""
    try:
        os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
    except OSError as error:
        if error.errno == errno.ENXIO:
            return False
        raise
    return True


def niceness_of(process: int) -> int:
    """*Source:* proc_pid_stat(5), field 19."""
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[16])


@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.parametrize("deed", ["keep", "delete"])
async def test_a_writer_with_locks_is_read_and_never_waits(tmp_path: Path, deed: str) -> None:
    service = Service()
    with anyio.fail_after(PATIENCE_SECONDS):
        async with agent_on(service, f"{tmp_path}/*.log") as agent:
            command = [sys.executable, "-c", _WRITE, str(tmp_path / "nccl.log"), str(LINES), deed]
            async with await anyio.open_process(command, stderr=None) as writer:
                assert writer.stdin is not None
                await wait_for_word(writer, b"half")
                await wait_for_rows(service, "nccl.log", LINES // 2)
                await writer.stdin.send(b"go on\n")
                await wait_for_word(writer, b"written")
                await wait_for_rows(service, "nccl.log", LINES)
                assert agent.returncode is None
                await writer.stdin.aclose()
                assert await writer.wait() == 0
    assert rows_of(service, "nccl.log") == LINES


def good_log(path: Path) -> None:
    subprocess.run(
        [sys.executable, "-c", _WRITE, str(path), str(LINES), "keep"],
        stdin=subprocess.DEVNULL,
        check=True,
        timeout=PATIENCE_SECONDS,
    )


@pytest.mark.asyncio
@pytest.mark.slow
async def test_what_lies_among_the_logs_does_neither_end_the_agent_nor_hold_it_up(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    os.mkfifo(logs / "pipe.log")
    (logs / "folder.log").mkdir()
    (logs / "nowhere.log").symlink_to(tmp_path / "none")
    (logs / "itself.log").symlink_to(logs / "itself.log")
    (logs / "refused.log").write_text("x\n")
    (logs / "refused.log").chmod(0)
    with (logs / "sparse.log").open("wb") as sparse:
        sparse.write(b"node17:1:1 [0] NCCL INFO begins\n")
        sparse.truncate(64 << 30)
    service = Service()
    with anyio.fail_after(PATIENCE_SECONDS):
        async with agent_on(service, f"{logs}/*.log") as agent:
            await anyio.to_thread.run_sync(good_log, logs / "nccl.log")
            await wait_for_rows(service, "nccl.log", LINES)
            assert not has_reader(logs / "pipe.log")
            logs.rename(tmp_path / "away")
            logs.write_text("a file where the directory was\n")
            (tmp_path / "away" / "nccl.log").chmod(0)
            logs.unlink()
            logs.mkdir()
            await anyio.to_thread.run_sync(good_log, logs / "again.log")
            await wait_for_rows(service, "again.log", LINES)
            assert agent.returncode is None


def opened_for_writing(process: int, below: Path) -> list[str]:
    """Files below a folder that a process could write to. *Source:* proc_pid_fdinfo(5), the flags are octal."""
    found: list[str] = []
    for handle in Path(f"/proc/{process}/fdinfo").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            path = os.readlink(f"/proc/{process}/fd/{handle.name}")
            flags = next(line for line in handle.read_text().splitlines() if line.startswith("flags:"))
            if path.startswith(str(below)) and int(flags.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY:
                found.append(path)
    return found


@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "ballast_mebibytes", "why"),
    [
        (
            ("--max-cpu-percent", "0.0001", "--budget-seconds", "1"),
            0,
            b"it used more processor time than its budget of 0.0001 % of a core over 1 s",
        ),
        (("--max-memory-bytes", str(160 << 20)), 160, b"MiB of memory, and its budget is 160 MiB"),
    ],
)
async def test_an_agent_steps_back_and_one_over_its_budget_stops_itself_and_says_so(
    tmp_path: Path, budget: tuple[str, ...], ballast_mebibytes: int, why: bytes
) -> None:
    good_log(tmp_path / "nccl.log")
    service = Service()
    with anyio.fail_after(PATIENCE_SECONDS):
        options = ("--nice", "17", *budget)
        async with agent_on(service, f"{tmp_path}/*.log", *options, ballast_mebibytes=ballast_mebibytes) as agent:
            await service.arrived.wait()
            assert niceness_of(agent.pid) == 17
            assert opened_for_writing(agent.pid, tmp_path) == []
            assert agent.stderr is not None
            said = b"".join([part async for part in agent.stderr])
            assert await agent.wait() == 3
            while [record.said_goodbye for record in service.receiver.agents()] != [True]:  # noqa: ASYNC110
                await anyio.sleep(0.02)  # it may still be on its way
    assert b"stopped itself: it " in said
    assert why in said

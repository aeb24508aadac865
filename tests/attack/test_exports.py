"""A user who may write exports has the agent read one for ever, into all memory, or from a pipe."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import anyio
import pytest
from agent.test_harmless import agent_on
from attack.bad_exports import endless_kernels, huge_texts, many_long_texts
from end_to_end.processes import PATIENCE_SECONDS
from nsys_made import EPOCH_NS, nccl_export
from service.loopback import Service

from ncclscope_agent.budget import BudgetLimits
from ncclscope_agent.files.exports import ExportFollower, Timing
from ncclscope_agent.sources.nsys.export import ExportLimits
from ncclscope_agent.sources.nsys.reader_process import ExportReader, ReaderLimits
from ncclscope_wire.batch import Batch
from ncclscope_wire.errors import SourceError
from ncclscope_wire.records import Source, SourceKind

SECOND = 1_000_000_000
SHORT = ReaderLimits(cpu_seconds=1, memory_bytes=96 << 20)


def follow(folder: Path, *, limits: ReaderLimits = SHORT, polls: int = 20, timing: Timing | None = None) -> list[Batch]:
    follower = ExportFollower(
        [folder], host="h", is_applied=lambda _: None, nsys="/nonexistent", reader_limits=limits, timing=timing
    )
    return [batch for number in range(polls) for batch in follower.poll(EPOCH_NS + number * SECOND)]


def told(batches: list[Batch]) -> dict[str, list[str]]:
    """The files that were read to their end, with the reasons of their gaps."""
    return {Path(each.source.name).name: [gap.reason for gap in each.gaps] for each in batches if each.is_last}


def test_an_export_without_end_kills_two_readers_and_is_left_out_and_others_are_read(tmp_path: Path) -> None:
    nccl_export().write(tmp_path / "good.sqlite")
    bad = endless_kernels(tmp_path / "bad.sqlite")
    os.utime(bad, ns=(0, 0))  # it comes first
    assert told(follow(tmp_path)) == {"good.sqlite": [], "bad.sqlite": ["killed_reader"]}


def test_what_left_two_readers_dead_is_not_read_a_third_time(tmp_path: Path) -> None:
    endless_kernels(tmp_path / "bad.sqlite")
    follower = ExportFollower([tmp_path], host="h", is_applied=lambda _: None, reader_limits=SHORT)
    first = [batch for number in range(20) for batch in follower.poll(EPOCH_NS + number * SECOND)]
    assert told(first) == {"bad.sqlite": ["killed_reader"]}
    follower.look_again()
    used = os.times().children_user
    again = [batch for number in range(20) for batch in follower.poll(EPOCH_NS + number * SECOND)]
    assert told(again) == {"bad.sqlite": ["killed_reader"]}
    assert os.times().children_user == used


def test_texts_of_150_megabytes_take_no_memory_of_the_agent_and_end_nothing(tmp_path: Path) -> None:
    huge_texts(tmp_path / "bad.sqlite")
    nccl_export().write(tmp_path / "good.sqlite")
    assert told(follow(tmp_path)) == {"good.sqlite": [], "bad.sqlite": ["malformed"]}


def test_thousands_of_long_texts_are_cut_before_they_are_fetched(tmp_path: Path) -> None:
    """All of them together are twice the memory that the reader may have."""
    many_long_texts(tmp_path / "long.sqlite", 1_500, 128 << 10)
    batches = follow(tmp_path)
    assert told(batches) == {"long.sqlite": []}
    assert sum(len(batch.ranges) for batch in batches) == 1_500


def test_a_hundred_thousand_texts_are_no_more_than_the_limit_of_templates(tmp_path: Path) -> None:
    many_long_texts(tmp_path / "many.sqlite", 100_000, 12)
    batches = follow(tmp_path, limits=ReaderLimits())
    assert told(batches) == {"many.sqlite": ["nvtx_texts"]}
    assert sum(len(batch.range_templates) for batch in batches) == ExportLimits().range_templates


@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
def test_what_lies_beside_an_export_in_the_name_of_its_payloads_is_read_only_if_it_is_a_file(
    tmp_path: Path, kind: str
) -> None:
    made = nccl_export()
    made.range("NCCL", 0, None, kind=75, domain=1)
    made.range("ncclAllReduce", 1_000, 2_000, domain=1)
    made.write(tmp_path / "old.sqlite")
    beside = tmp_path / "old.json"
    if kind == "fifo":
        os.mkfifo(beside)
    elif kind == "device":
        beside.symlink_to("/dev/zero")
    else:
        beside.mkdir()
    assert told(follow(tmp_path)) == {"old.sqlite": []}


def test_a_pipe_that_takes_the_place_of_an_export_ends_with_the_reader(tmp_path: Path) -> None:
    """Between the look at the file and SQLite's opening it."""
    os.mkfifo(tmp_path / "pipe.sqlite")
    source = Source(kind=SourceKind.NSYS, name="pipe", key="k")
    read = ExportReader(ReaderLimits(cpu_seconds=1)).read(
        tmp_path / "pipe.sqlite", source=source, host="h", begin=0, limits=ExportLimits()
    )
    with pytest.raises(SourceError, match="not a plain file"):
        next(read)


def test_an_agent_that_ends_does_not_wait_for_a_reader(tmp_path: Path) -> None:
    endless_kernels(tmp_path / "bad.sqlite")
    reader = ExportReader(ReaderLimits(cpu_seconds=600))
    source = Source(kind=SourceKind.NSYS, name="bad", key="k")
    ended: list[str] = []

    def read() -> None:
        try:
            list(reader.read(tmp_path / "bad.sqlite", source=source, host="h", begin=0, limits=ExportLimits()))
        except SourceError as error:
            ended.append(error.reason)

    thread = threading.Thread(target=read)
    thread.start()
    while reader.process_id is None:
        thread.join(0.01)
    reader.stop()
    thread.join(60)
    assert ended == ["killed_reader"]


def test_a_reader_rests_when_its_share_is_used_up(tmp_path: Path) -> None:
    endless_kernels(tmp_path / "bad.sqlite")
    half = ReaderLimits(cpu_seconds=1, budget=BudgetLimits(cpu_share=0.5, seconds=0.1, memory_bytes=0))
    source = Source(kind=SourceKind.NSYS, name="bad", key="k")
    before = os.times()
    with pytest.raises(SourceError):
        list(ExportReader(half).read(tmp_path / "bad.sqlite", source=source, host="h", begin=0, limits=ExportLimits()))
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    assert after.elapsed - before.elapsed > 1.5 * used > 0


def children_of(process: int) -> set[str]:
    tasks = Path(f"/proc/{process}/task").iterdir()
    return {child for task in tasks for child in (task / "children").read_text().split()}


@pytest.mark.asyncio
@pytest.mark.slow
async def test_a_real_agent_that_is_stopped_amid_an_endless_export_ends_and_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "exports").mkdir()
    endless_kernels(tmp_path / "exports" / "bad.sqlite")
    options = ("--exports", str(tmp_path / "exports"), "--flush-seconds", "1")
    with anyio.fail_after(PATIENCE_SECONDS):
        async with agent_on(Service(), f"{tmp_path}/*.log", *options) as agent:
            while not (children := await anyio.to_thread.run_sync(children_of, agent.pid)):  # noqa: ASYNC110
                await anyio.sleep(0.01)
            agent.terminate()
            assert await agent.wait() == 0
    assert not any(os.path.exists(f"/proc/{child}") for child in children)  # noqa: ASYNC240

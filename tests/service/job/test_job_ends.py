"""Jobs end by their communicators, by their agents, or by silence; and once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from service.simulated_batches import log_batches

from ncclscope_service.app import Service, ServiceSettings
from ncclscope_service.intake.receive import AgentRecord
from ncclscope_service.keep.service_state import JobEnds, has_destroyed_all
from ncclscope_service.pipeline import Pipeline
from ncclscope_service.serve.snapshots import SnapshotShelf
from ncclscope_simulator import SimulationConfig, write

_SECOND_NS = 1_000_000_000
_SETTLED_NS = 40 * _SECOND_NS

_AGENT = AgentRecord(
    agent_id="a",
    name="a",
    host="node1",
    job="train",
    connected=True,
    last_contact_ns=0,
    said_goodbye=False,
    clock_offset_ns=None,
    batches_total=7,
    health=None,
)
_GONE = replace(_AGENT, connected=False, said_goodbye=True)


def _never(job: str) -> bool:
    return False


def _always(job: str) -> bool:
    return True


def test_a_job_whose_agents_all_said_goodbye_has_ended_once_it_is_quiet() -> None:
    ends = JobEnds()
    assert ends.take_ended([_GONE], _never, 0) == []
    assert ends.take_ended([_GONE], _never, _SECOND_NS) == [], "the last export may be on its way"
    assert ends.take_ended([_GONE], _never, _SETTLED_NS) == ["train"]
    assert ends.take_ended([_GONE], _never, 2 * _SETTLED_NS) == [], "told once"


@pytest.mark.parametrize("other", [_AGENT, replace(_GONE, said_goodbye=False)], ids=["connected", "lost"])
def test_one_agent_that_did_not_leave_by_itself_keeps_the_job_going(other: AgentRecord) -> None:
    ends = JobEnds()
    for now_ns in (0, _SETTLED_NS):
        assert ends.take_ended([_GONE, replace(other, agent_id="b")], _never, now_ns) == []


def test_a_job_whose_communicators_are_all_destroyed_has_ended_while_its_agents_stay() -> None:
    ends = JobEnds()
    assert ends.take_ended([_AGENT], _always, 0) == []
    assert ends.take_ended([_AGENT], _always, _SETTLED_NS) == ["train"]


def test_silence_ends_a_job_that_never_said_so() -> None:
    ends, silence_ns = JobEnds(), 100 * _SECOND_NS
    assert ends.take_ended([_AGENT], _never, 0, silence_ns=silence_ns) == []
    assert ends.take_ended([_AGENT], _never, 99 * _SECOND_NS, silence_ns=silence_ns) == []
    assert ends.take_ended([_AGENT], _never, 100 * _SECOND_NS, silence_ns=silence_ns) == ["train"]


def test_a_job_that_speaks_again_ends_again_and_another_job_is_not_touched() -> None:
    ends = JobEnds()
    other = replace(_AGENT, agent_id="b", job="other")
    assert ends.take_ended([_GONE, other], _never, 0) == []
    assert ends.take_ended([_GONE, other], _never, _SETTLED_NS) == ["train"]
    again = replace(_GONE, batches_total=8)
    assert ends.take_ended([again, other], _never, _SETTLED_NS + 1) == []
    assert ends.take_ended([again, other], _never, 2 * _SETTLED_NS + 1) == ["train"]


def test_an_agent_that_sent_nothing_is_no_job() -> None:
    ends = JobEnds()
    silent = replace(_GONE, batches_total=0)
    assert [ends.take_ended([silent], _always, now_ns, silence_ns=1) for now_ns in (0, _SETTLED_NS)] == [[], []]


def test_a_simulated_job_has_destroyed_all_once_its_last_lines_are_read(tmp_path: Path) -> None:
    write(SimulationConfig(nodes=1, gpus=2, tp=2, pp=1, dp=1, iterations=2, capture="none"), tmp_path)
    pipeline = Pipeline()
    portions = [list(batches) for batches in log_batches(tmp_path, portions=4)]
    seen: list[bool] = []
    for step in range(max(map(len, portions))):
        for batches in portions:
            for batch in batches[step : step + 1]:
                pipeline.ingest_batch(batch, agent="a", session="s", job="train")
        pipeline.process_backlog(step)
        seen.append(has_destroyed_all(pipeline.store, "train"))
    assert seen[0] is False
    assert seen[-1] is True
    assert not has_destroyed_all(pipeline.store, "another")


@pytest.mark.asyncio
async def test_the_files_of_a_job_that_ended_are_written_beside_those_of_jobs_before(tmp_path: Path) -> None:
    write(SimulationConfig(nodes=1, gpus=2, tp=2, pp=1, dp=1, iterations=2, capture="none"), tmp_path / "run")
    shelf = tmp_path / "ended"
    service = Service(ServiceSettings(version="0"))
    for batches in log_batches(tmp_path / "run", portions=1):
        for batch in batches:
            service.pipeline.ingest_batch(batch, agent="a", session="s", job="../train")
    service.tick(1)
    await SnapshotShelf(shelf, 1).write(service.pipeline.store, "../train")
    await SnapshotShelf(shelf, 1).write(service.pipeline.store, "../train")
    (folder,) = shelf.iterdir()
    assert folder.name.startswith("train_2")
    assert {"operations.parquet", "trace.json.gz", "report.html"} <= {path.name for path in folder.iterdir()}


def test_a_name_from_outside_stays_a_name(tmp_path: Path) -> None:
    shelf = SnapshotShelf(tmp_path, keep=3)
    for name in ("../../etc", "/etc/passwd", "a/b", "..", "", "x" * 500, "é\n\x00"):
        place = shelf.place(name, 0)
        assert place.parent == tmp_path
        assert place.name.endswith("_1970-01-01T000000Z")
        assert len(place.name) < 128


def test_the_oldest_folders_of_jobs_go_and_what_else_lies_there_stays(tmp_path: Path) -> None:
    shelf = SnapshotShelf(tmp_path, keep=2)
    (tmp_path / "notes").mkdir()
    (tmp_path / "operations.parquet").touch()
    made = []
    for second in range(4):
        made.append(shelf.place("train", second * _SECOND_NS))
        made[-1].mkdir()
    assert shelf.tidy() == made[:2]
    assert {path.name for path in tmp_path.iterdir()} == {"notes", "operations.parquet", made[2].name, made[3].name}
    assert shelf.tidy() == []


def test_two_jobs_of_one_name_in_one_second_get_folders_of_their_own(tmp_path: Path) -> None:
    shelf = SnapshotShelf(tmp_path, keep=9)
    first = shelf.place("train", 0)
    first.mkdir()
    assert shelf.place("train", 0) != first

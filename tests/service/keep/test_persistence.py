"""A service that is killed goes on from its folder as if it had not been, whatever was torn or turned over."""

from __future__ import annotations

import builtins
import errno
import os
import random
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import cast

import anyio
import msgspec
import numpy as np
import pytest
from service.same_state import assert_same
from service.simulated_batches import SECOND_NS, log_batches, simulated_batches
from wire.sample_batches import HELLO, log_batch

from ncclscope_service.intake.communicators import MAX_RANKS
from ncclscope_service.intake.journal_entry import (
    Entry,
    FindingMarked,
    MarkAction,
    NotificationSettled,
    OperatorEntry,
    ThresholdsChanged,
)
from ncclscope_service.intake.receive import Receiver
from ncclscope_service.keep.journal import (
    FORMAT,
    HEADER_BYTES,
    JournalSettings,
    SegmentHeader,
    encode_header,
    first_of,
    read_segment,
)
from ncclscope_service.keep.persistence import Persistence, PersistenceSettings
from ncclscope_service.keep.service_state import Outbox
from ncclscope_service.pipeline import Pipeline
from ncclscope_service.show.finding_events import FindingEvent
from ncclscope_service.store import state
from ncclscope_service.store.rows import LOGGED, TUNING
from ncclscope_service.store.settings import PipelineSettings
from ncclscope_simulator import SimulationConfig, parse_faults, write
from ncclscope_wire.batch import Batch, no_rows
from ncclscope_wire.codec import encode_message
from ncclscope_wire.errors import ConfigError
from ncclscope_wire.frame import encode_frame
from ncclscope_wire.messages import BatchMessage, Hello
from ncclscope_wire.records import CommunicatorEvent, CommunicatorEventKind

_JOB = SimulationConfig(iterations=4, nodes=1, gpus=2, tp=2, pp=1, dp=1)
_SETTINGS = PersistenceSettings(journal=JournalSettings(sync=False, segment_bytes=20_000))


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> list[Batch]:
    """Of one agent, in order."""
    return simulated_batches(_JOB, tmp_path_factory.mktemp("job"), portions=12)


@pytest.fixture(scope="module")
def hang(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Batch], int]:
    """Logs of a job that hangs, and a time long after its last line."""
    folder = tmp_path_factory.mktemp("hang")
    job = replace(_JOB, iterations=30, capture="none", faults=parse_faults(["hang:rank=0,at=20"]))
    write(job, folder)
    batches = [batch for turn in zip_longest(*log_batches(folder, portions=4)) for batch in turn if batch]
    return batches, job.start_ns + 60 * SECOND_NS


class _Life:
    """One run of a service over a folder, without its ports; `kill` leaves what a kill -9 leaves."""

    def __init__(
        self, folder: Path, settings: PersistenceSettings = _SETTINGS, outboxes: tuple[Outbox, ...] = ()
    ) -> None:
        self.persistence = Persistence(folder, settings)
        known = {each.name: each for each in outboxes}
        self.state = self.persistence.open(PipelineSettings(), known, lambda _: None, 1)
        self.receiver = Receiver(agents=self.state.agents, record=self._record)
        self._connections = 0

    def _record(self, entry: Entry) -> int:
        return self.persistence.journal.append(entry)

    def sync(self) -> None:
        """What the journal's task does between two groups."""
        self.persistence.journal.close()
        self.persistence.journal._waiting.clear()  # pyright: ignore[reportPrivateUsage]

    def send(self, batches: list[Batch], *, session: str = "s", agent: str = "a", job: str = "j") -> int:
        """An agent with these batches connects, and sends what is not acknowledged; gives how many that were."""
        self._connections += 1
        self.receiver.open(self._connections)
        hello = replace(HELLO, agent_id=agent, session_id=session, name=agent, job=job)
        assert self.say(hello) is None
        done = self.state.agents[agent].applied
        for number, batch in enumerate(batches[done:], done + 1):
            assert self.say(BatchMessage(sequence=number, batch=batch)) is None
            self.tick(number * SECOND_NS)
        self.sync()
        return len(batches) - done

    def send_and_keep(self, batches: list[Batch], *cuts: int, **who: str) -> None:
        """Sends up to each of these numbers of batches, and writes the state then."""
        for cut in cuts:
            self.send(batches[:cut], **who)
            self.persistence.close(self.state)

    def tick(self, now_ns: int) -> list[FindingEvent]:
        """Works on what came."""
        ticked = self.state.next_tick({}, frozenset(), now_ns, "")
        self._record(ticked)
        return self.state.tick(ticked, self.persistence.archive)

    def tell(self, receiver: str) -> list[str]:
        """Delivers what waits for a receiver of notifications; gives what of which finding."""
        told = list[str]()
        outbox = self.state.outboxes[receiver]
        while (event := outbox.first()) is not None:
            outbox.settle(event.id, event.event, is_delivered=True)
            self._record(
                NotificationSettled(receiver=receiver, finding=event.id, change=event.event, is_delivered=True)
            )
            told.append(f"{event.event} {event.id}")
        self.sync()
        return told

    def operate(self, entry: OperatorEntry) -> None:
        """A person marks findings or changes thresholds."""
        self._record(entry)
        self.state.apply(entry)
        self.sync()

    def say(self, message: Hello | BatchMessage) -> str | None:
        """The agent of the last connection says something; gives what was wrong with it."""
        outcome = self.receiver.on_bytes(self._connections, encode_frame(encode_message(message)), 1)
        for received in outcome.received:
            if not self.state.ingest_batch(received):
                self.receiver.end_session(received.agent)
        return outcome.fault

    def write_state(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Writes the state beside the work; `meanwhile` is done while a child is at it."""

        async def both() -> None:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.persistence.write_state, self.state)
                number = self.persistence.journal.last
                while self._cut() < number:  # noqa: ASYNC110
                    await anyio.sleep(0.001)
                meanwhile()

        anyio.run(both)

    def _cut(self) -> int:
        return self.persistence.journal._cut  # pyright: ignore[reportPrivateUsage]

    def kill(self) -> None:
        """The process is gone."""
        self.persistence.release()


@pytest.fixture
def whole(batches: list[Batch], tmp_path: Path) -> Callable[[int], Pipeline]:
    """The pipeline's state after so many batches, where nothing was ever killed."""

    def after(amount: int) -> Pipeline:
        life = _Life(tmp_path / f"whole-{amount}")
        life.send(batches[:amount])
        life.kill()
        return life.state.pipeline

    return after


def test_a_killed_service_goes_on_exactly(
    batches: list[Batch], whole: Callable[[int], Pipeline], tmp_path: Path
) -> None:
    cuts = sorted(random.Random(3).sample(range(1, len(batches)), 3))
    for cut in [*cuts, len(batches)]:
        life = _Life(tmp_path / "data")
        life.send(batches[:cut])
        life.kill()
    again = _Life(tmp_path / "data")
    assert_same(again.state.pipeline, whole(len(batches)))
    assert again.state.agents["a"].acknowledged == len(batches)
    again.kill()


def test_a_state_file_takes_the_place_of_the_journal_before_it(batches: list[Batch], tmp_path: Path) -> None:
    life = _Life(tmp_path)
    life.send_and_keep(batches, 3, 6, 9)
    life.kill()
    assert len(list((tmp_path / "state").glob("*.state"))) == 2
    firsts = [read_segment(path.read_bytes()).records[0].number for path in sorted((tmp_path / "journal").iterdir())]
    assert firsts[0] > 1
    again = _Life(tmp_path)
    assert again.persistence.health().replayed_batches == 0
    assert again.state.agents["a"].acknowledged == 9
    again.kill()


def _imported_here_only() -> Callable[..., object]:
    """A child that imports something may wait for ever for the lock of another thread; what is there takes none."""
    here, known = os.getpid(), builtins.__import__

    def imported(*arguments: object, **named: object) -> object:
        assert os.getpid() == here or arguments[0] in sys.modules, f"imports {arguments[0]}"
        return cast("Callable[..., object]", known)(*arguments, **named)

    return imported


def test_a_state_that_a_child_writes_is_that_of_the_moment_and_relies_on_nothing_of_the_journal_before(
    batches: list[Batch], whole: Callable[[int], Pipeline], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = _Life(tmp_path / "data")
    life.send(batches[:6])
    last = life.persistence.journal.last
    with monkeypatch.context() as patched:
        patched.setattr(builtins, "__import__", _imported_here_only())
        life.write_state(meanwhile=lambda: life.send(batches[:9]))
    assert life.persistence.trouble() == ""
    assert [int(each.stem) for each in (tmp_path / "data" / "state").iterdir()] == [last]
    assert life.persistence.health().state_bytes == (tmp_path / "data" / "state" / f"{last:016d}.state").stat().st_size
    life.kill()
    for path in (tmp_path / "data" / "journal").iterdir():
        if first_of(path) <= last:
            path.unlink()
    again = _Life(tmp_path / "data")
    assert again.persistence.health().replayed_batches == 3
    assert_same(again.state.pipeline, whole(9))
    again.kill()


def _killed_at_the_end(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("what", ["killed", "full"])
def test_a_state_that_a_child_cannot_write_is_told_and_written_again_later(
    what: str, batches: list[Batch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = _Life(tmp_path, replace(_SETTINGS, state_every_seconds=0.0))
    life.send(batches[:3])
    life.write_state()
    before = sorted((tmp_path / "state").iterdir())
    life.send(batches[:6])
    segments = sorted((tmp_path / "journal").iterdir())
    assert life.persistence.is_due()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with monkeypatch.context() as patched:
        if what == "killed":
            patched.setattr(os, "fsync", _killed_at_the_end)
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        try:
            life.write_state()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    why = "its process was killed; the system does that if memory is short" if what == "killed" else "File too large"
    assert life.persistence.trouble() == f"the state cannot be written: {why}"
    assert sorted((tmp_path / "state").iterdir()) == before
    assert sorted((tmp_path / "journal").iterdir()) == segments
    assert not life.persistence.is_due()  # not at once
    life.write_state()
    assert life.persistence.trouble() == ""
    assert len(list((tmp_path / "state").iterdir())) == 2
    life.kill()
    again = _Life(tmp_path)
    assert again.persistence.health().replayed_batches == 0
    assert again.state.agents["a"].acknowledged == 6
    again.kill()


class _OutOfTimeError(Exception):
    pass


def _out_of_time() -> None:
    raise _OutOfTimeError


def test_a_service_that_has_no_time_to_write_its_state_goes_on_from_the_journal(
    batches: list[Batch], tmp_path: Path
) -> None:
    life = _Life(tmp_path)
    life.send(batches[:6])
    with pytest.raises(_OutOfTimeError):
        life.persistence.close(life.state, _out_of_time)
    with pytest.raises(_OutOfTimeError):
        life.persistence.archive_rest(life.state.pipeline.store, np.arange(3), _out_of_time)
    life.kill()
    assert not list((tmp_path / "state").glob("*.state"))
    again = _Life(tmp_path)
    assert again.state.agents["a"].acknowledged == 6
    again.kill()


def test_where_the_system_gives_no_process_the_state_is_written_by_the_service_itself(
    batches: list[Batch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    life = _Life(tmp_path)
    life.send(batches[:6])
    with monkeypatch.context() as patched:
        patched.setattr(os, "fork", refused)
        life.write_state()
    assert life.persistence.trouble() == ""
    health = life.persistence.health()
    assert health.pause_seconds is not None
    assert health.state_seconds is not None
    assert health.pause_seconds >= health.state_seconds
    life.kill()
    again = _Life(tmp_path)
    assert again.persistence.health().replayed_batches == 0
    assert again.state.agents["a"].acknowledged == 6
    again.kill()


def test_a_damaged_state_file_costs_a_longer_replay_and_nothing_else(
    batches: list[Batch], whole: Callable[[int], Pipeline], tmp_path: Path
) -> None:
    life = _Life(tmp_path / "data")
    life.send_and_keep(batches, 4, 8)
    life.kill()
    newest = max((tmp_path / "data" / "state").glob("*.state"))
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    again = _Life(tmp_path / "data")
    assert_same(again.state.pipeline, whole(8))
    assert again.persistence.health().damaged == 1
    assert again.persistence.health().replayed_batches == 4
    again.kill()


def test_a_torn_end_is_cut_off_and_what_it_held_is_sent_again(
    batches: list[Batch], whole: Callable[[int], Pipeline], tmp_path: Path
) -> None:
    life = _Life(tmp_path / "data", PersistenceSettings(journal=JournalSettings(sync=False)))
    life.send(batches)
    life.kill()
    (segment,) = (tmp_path / "data" / "journal").iterdir()
    for keep in (0.9, 0.7, 0.5):
        data = segment.read_bytes()
        segment.write_bytes(data[: round(keep * len(data)) - 1])
        again = _Life(tmp_path / "data", PersistenceSettings(journal=JournalSettings(sync=False)))
        done = again.state.agents["a"].acknowledged
        assert 0 < done < len(batches)
        assert again.state.agents["a"].on_hello(again.state.agents["a"].hello).acknowledged == done
        again.kill()
    last = _Life(tmp_path / "data")
    assert last.send(batches) > 0
    assert len(last.state.pipeline.store.operations) == _operations(batches)
    last.kill()


def test_behind_a_damaged_record_the_agent_reads_on_from_its_position(batches: list[Batch], tmp_path: Path) -> None:
    life = _Life(tmp_path, PersistenceSettings(journal=JournalSettings(sync=False)))
    life.send(batches)
    life.kill()
    (segment,) = (tmp_path / "journal").iterdir()
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 0x10
    segment.write_bytes(data)
    again = _Life(tmp_path)
    health = again.persistence.health()
    assert health.damaged == 1
    assert health.missing >= 1
    welcome = again.state.agents["a"].on_hello(again.state.agents["a"].hello)
    assert not welcome.session_known or welcome.acknowledged == len(batches)
    again.kill()


def test_a_second_service_on_the_folder_is_refused_with_what_to_do(tmp_path: Path) -> None:
    first = Persistence(tmp_path, _SETTINGS)
    with pytest.raises(ConfigError, match=r"another service \(process \d+\) uses this folder; stop it, or"):
        Persistence(tmp_path, _SETTINGS)
    first.release()
    Persistence(tmp_path, _SETTINGS).release()


def test_the_state_of_another_version_is_set_aside_and_the_service_begins_anew(
    batches: list[Batch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = _Life(tmp_path)
    life.send_and_keep(batches, 2, 4, 6)
    life.kill()
    monkeypatch.setattr(state, "_FORMAT", 0)
    again = _Life(tmp_path)
    monkeypatch.undo()
    assert again.state.agents == {}
    assert len(list((tmp_path / "aside").iterdir())) == 1
    assert again.send(batches[:3], session="s2") == 3
    again.kill()
    assert _Life(tmp_path).state.agents["a"].acknowledged == 3


def _upgrade(folder: Path) -> None:
    """The state files become those of a build whose classes are others: a new one cannot read them."""
    for path in (folder / "state").glob("*.state"):
        data = path.read_bytes()
        begin = HEADER_BYTES + 8 + int.from_bytes(data[HEADER_BYTES : HEADER_BYTES + 8], "big")
        magic, version, *rest = msgspec.msgpack.decode(data[HEADER_BYTES + 8 : begin])
        header = msgspec.msgpack.encode((magic, version - 1, *rest))
        path.write_bytes(data[:HEADER_BYTES] + len(header).to_bytes(8, "big") + header + data[begin:])


_KEEPING = PersistenceSettings(journal=JournalSettings(sync=False, segment_bytes=2_000, retained_bytes=1 << 20))


def _first_kept(folder: Path) -> int:
    return int(min((folder / "journal").iterdir()).stem)


def test_after_an_upgrade_a_whole_journal_gives_the_state_again(
    batches: list[Batch], whole: Callable[[int], Pipeline], tmp_path: Path
) -> None:
    life = _Life(tmp_path / "data", _KEEPING)
    life.send_and_keep(batches, 3, 6, 9)
    life.kill()
    _upgrade(tmp_path / "data")
    for replayed in (9, 0):  # the second start finds the state that the first one wrote
        again = _Life(tmp_path / "data", _KEEPING)
        assert again.persistence.health().replayed_batches == replayed
        assert_same(again.state.pipeline, whole(9))
        assert again.state.agents["a"].acknowledged == 9
        again.kill()
    assert not (tmp_path / "data" / "aside").exists()


def test_after_an_upgrade_jobs_that_began_within_the_journal_go_on_and_agents_of_others_read_again(
    batches: list[Batch], tmp_path: Path
) -> None:
    life = _Life(tmp_path)
    life.send_and_keep(batches, 2, 4, 6, agent="old", job="long")
    life.send(batches[:8], agent="new", job="short")
    life.send(batches[:3], agent="late", job="long")
    life.send(batches[:7], agent="old", job="long")
    life.kill()
    assert _first_kept(tmp_path) > 1
    _upgrade(tmp_path)
    again = _Life(tmp_path)
    assert {name: agent.acknowledged for name, agent in again.state.agents.items()} == {"new": 8}
    assert len(again.state.pipeline.store.operations) == _operations(batches[:8])
    health = again.persistence.health()
    assert (health.replayed_batches, health.missing) == (8, 3 + 3)
    assert again.send(batches[:8], agent="new", job="short") == 0
    assert again.send(batches[:7], agent="old", session="s2", job="long") == 7
    again.kill()
    assert {name: agent.acknowledged for name, agent in _Life(tmp_path).state.agents.items()} == {"new": 8, "old": 7}


def test_an_agent_that_reads_again_after_an_upgrade_is_whole_from_then_on(batches: list[Batch], tmp_path: Path) -> None:
    life = _Life(tmp_path)
    life.send_and_keep(batches, 2, 4, 6, agent="old", job="long")
    life.send(batches[:2], agent="new", job="short")
    life.kill()
    _upgrade(tmp_path)
    again = _Life(tmp_path, _KEEPING)
    assert again.send(batches[:5], agent="old", session="s2", job="long") == 5
    again.persistence.close(again.state)
    again.kill()
    _upgrade(tmp_path)
    third = _Life(tmp_path, _KEEPING)
    assert {name: agent.acknowledged for name, agent in third.state.agents.items()} == {"new": 2, "old": 5}
    assert len(third.state.pipeline.store.operations) == _operations(batches[:2]) + _operations(batches[:5])
    third.kill()


def test_after_an_upgrade_findings_that_were_told_are_not_told_again(
    hang: tuple[list[Batch], int], tmp_path: Path
) -> None:
    batches, end_ns = hang
    life = _Life(tmp_path / "data", outboxes=(Outbox("hooks"),))
    for cut in (1, 2, 3):
        life.send([log_batch(10 * at, 10 * at + 10) for at in range(cut)], agent="old", job="long")
        life.persistence.close(life.state)
    life.send(batches)
    for at in range(-60, 3):
        life.tick(end_ns + at * SECOND_NS)
    assert [told.split()[0] for told in life.tell("hooks")] == ["opened"]
    life.kill()
    _upgrade(tmp_path / "data")
    again = _Life(tmp_path / "data", outboxes=(Outbox("hooks"),))
    assert list(again.state.agents) == ["a"]
    again.tick(end_ns + 10 * SECOND_NS)
    assert [each.kind for each in again.state.findings() if each.until_ns is None] == ["hang"]
    assert not [told for told in again.tell("hooks") if told.startswith("opened")]
    again.kill()


def test_as_much_of_the_journal_is_kept_for_an_upgrade_as_is_asked_for(batches: list[Batch], tmp_path: Path) -> None:
    def kept_after_three_states(retained_bytes: int, folder: str) -> int:
        settings = JournalSettings(sync=False, segment_bytes=2_000, retained_bytes=retained_bytes)
        life = _Life(tmp_path / folder, PersistenceSettings(journal=settings))
        for cut in (3, 6, 9):
            life.send(batches[:cut])
            life.persistence.close(life.state)
        life.kill()
        return _first_kept(tmp_path / folder)

    assert kept_after_three_states(0, "none") > 1
    assert kept_after_three_states(1 << 20, "all") == 1
    assert kept_after_three_states(10_000, "some") > 1


@pytest.mark.parametrize("version", [1, FORMAT + 1])
def test_a_journal_of_another_format_is_set_aside_and_the_service_begins_anew(
    version: int, batches: list[Batch], tmp_path: Path
) -> None:
    life = _Life(tmp_path)
    life.send(batches[:3])
    life.kill()
    (segment,) = (tmp_path / "journal").iterdir()
    other = encode_header(SegmentHeader(format=version, first=1, era="2026"))
    segment.write_bytes(other + segment.read_bytes()[len(other) :])
    again = _Life(tmp_path)
    assert again.state.agents == {}
    assert [path.name for path in (tmp_path / "aside").glob("*/journal/*")] == [segment.name]
    assert again.send(batches[:3]) == 3
    again.kill()


def test_an_open_finding_keeps_its_id_and_its_beginning_and_is_not_told_again(
    hang: tuple[list[Batch], int], tmp_path: Path
) -> None:
    batches, end_ns = hang
    life = _Life(tmp_path / "data", outboxes=(Outbox("hooks"),))
    life.send(batches)
    opened = [event for at in range(-60, 3) for event in life.tick(end_ns + at * SECOND_NS)]
    assert [(event.event, event.finding.kind) for event in opened] == [("opened", "hang")]
    assert life.tell("hooks") == [f"opened {opened[0].id}"]
    life.kill()
    for seconds in (10, 20):
        again = _Life(tmp_path / "data", outboxes=(Outbox("hooks"),))
        assert [event.event for event in again.tick(end_ns + seconds * SECOND_NS) if event.event != "changed"] == []
        (finding,) = [each for each in again.state.findings() if each.until_ns is None]
        assert (finding.kind, finding.since_ns) == ("hang", opened[0].finding.since_ns)
        assert not [told for told in again.tell("hooks") if told.startswith("opened")]
        again.kill()


def test_marks_and_thresholds_survive_a_kill_and_a_muted_finding_is_told_again_when_its_mute_ends(
    hang: tuple[list[Batch], int], tmp_path: Path
) -> None:
    batches, end_ns = hang
    life = _Life(tmp_path / "data", outboxes=(Outbox("hooks"),))
    life.operate(
        FindingMarked(
            action=MarkAction.MUTE, at_ns=end_ns, by="ann", kind="hang", job="j", until_ns=end_ns + 15 * SECOND_NS
        )
    )
    life.operate(ThresholdsChanged(at_ns=end_ns, by="bob", values={"hang.rest_seconds": 600.0, "hang.usual_gaps": 9}))
    life.operate(ThresholdsChanged(at_ns=end_ns + 1, by="", values={"hang.usual_gaps": None}))
    life.send(batches)
    for at in range(-60, 3):
        life.tick(end_ns + at * SECOND_NS)
    (finding,) = [each for each in life.state.findings() if each.until_ns is None]
    assert finding.muted is not None
    assert life.tell("hooks") == [], "nobody hears of a muted finding"
    life.operate(FindingMarked(action=MarkAction.ACKNOWLEDGE, at_ns=end_ns, by="ann", note="on it", finding=finding.id))
    life.kill()
    for seconds, told in ((10, []), (20, [f"opened {finding.id}"]), (30, [])):
        again = _Life(tmp_path / "data", outboxes=(Outbox("hooks"),))
        again.tick(end_ns + seconds * SECOND_NS)
        (found,) = [each for each in again.state.findings() if each.until_ns is None]
        assert found.acknowledged is not None
        assert (found.id, found.acknowledged.note) == (finding.id, "on it")
        assert (found.muted is None, again.tell("hooks")) == (seconds > 15, told)
        assert again.state.pipeline.changed_thresholds == {"hang.rest_seconds": 600.0}
        assert [(each.by, each.name, each.value) for each in again.state.threshold_changes] == [
            ("bob", "hang.rest_seconds", 600.0), ("bob", "hang.usual_gaps", 9), ("", "hang.usual_gaps", None),
        ]  # fmt: skip
        if seconds == 10:
            again.persistence.close(again.state)
        again.kill()


def test_a_disk_that_takes_nothing_is_a_finding_of_every_job_until_it_does(
    batches: list[Batch], tmp_path: Path
) -> None:
    life = _Life(tmp_path)
    life.send(batches)
    why = "the journal cannot be written: No space left on device"
    seen = list[tuple[str, int]]()
    for second in (100, 101, 102):
        life.state.tick(life.state.next_tick({}, frozenset(), second * SECOND_NS, why), life.persistence.archive)
        (found,) = [each for each in life.state.findings() if each.kind == "blind" and not each.hosts]
        seen.append((found.summary, found.since_ns))
    assert (
        seen == [(f"the service cannot write to disk: {why}; agents hold their data until it can", 100 * SECOND_NS)] * 3
    )
    news = life.tick(103 * SECOND_NS)
    assert [event.event for event in news if event.finding.kind == "blind" and not event.finding.hosts] == ["closed"]
    life.kill()


def test_operations_stay_in_memory_while_they_cannot_be_archived(batches: list[Batch], tmp_path: Path) -> None:
    kept = _Life(tmp_path)
    kept.send(batches)
    amount, later = len(kept.state.pipeline.store.operations), 5_000 * SECOND_NS
    kept.state.tick(kept.state.next_tick({}, frozenset(), later, ""), lambda _known, _operations: False)
    assert len(kept.state.pipeline.store.operations) == amount
    kept.state.tick(kept.state.next_tick({}, frozenset(), later + SECOND_NS, ""), kept.persistence.archive)
    assert len(kept.state.pipeline.store.operations) < amount
    kept.kill()


_COMPLETE = log_batch(0, 100, strings=("AllReduce",), templates=1, operations=((0, 1),), is_last=True)
_BREAKING = [
    log_batch(0, 50, strings=("AllReduce",), templates=1),
    log_batch(100, 120, operations=((0, 2), (0, 3))),
    log_batch(120, 130, operations=((0, 4),)),
]
"""A file that was read to its end is sent again, and then has grown: the dictionary that its rows point into was in
what had to be dropped, so the receiver knows it, and the pipeline does not."""


def test_a_batch_that_our_own_code_fails_on_is_skipped_and_counted_live_and_after_a_crash(
    batches: list[Batch], whole: Callable[[int], Pipeline], tmp_path: Path
) -> None:
    life = _Life(tmp_path / "data")
    life.send(batches[:6])
    life.send([_COMPLETE], agent="b")
    life.send(_BREAKING[:2], agent="b", session="s2")
    known = life.state.pipeline.store
    assert known.skipped["internal_error"] == 2
    assert [gap.reason for gaps in known.gaps.values() for gap in gaps] == ["internal_error"]
    (mistake,) = life.state.pipeline.errors.drain()
    assert (mistake.where, "IndexError" in mistake.trace) == ("batch", True)
    life.send(batches)
    live = life.state.pipeline
    life.kill()
    again = _Life(tmp_path / "data")
    assert not (tmp_path / "data" / "aside").exists()
    assert_same(again.state.pipeline, live)
    assert again.persistence.health().replayed_batches == len(batches) + 2
    assert len(again.state.pipeline.store.operations) == _operations(batches) + 1
    again.kill()


def test_what_follows_a_failed_batch_in_its_session_is_not_misread_and_its_agent_begins_another(
    tmp_path: Path,
) -> None:
    life = _Life(tmp_path)
    life.send([_COMPLETE], agent="b")
    life.send(_BREAKING[:2], agent="b", session="s2")
    life.kill()
    again = _Life(tmp_path)
    assert again.send(_BREAKING, agent="b", session="s2") == 1
    assert again.state.pipeline.store.skipped["internal_error"] == 3
    fault = again.say(BatchMessage(sequence=4, batch=log_batch(130, 140)))
    assert fault == "internal_error: a batch could not be applied: begin another session"
    anew = log_batch(130, 140, strings=("AllReduce",), templates=1, operations=((0, 5),))
    assert again.send([anew], agent="b", session="s3") == 1
    assert again.state.pipeline.store.operations.rows["op_count"].tolist() == [1, 5]
    assert again.state.pipeline.store.skipped["internal_error"] == 3
    again.kill()


def test_a_communicator_that_is_said_to_have_two_billion_ranks_takes_no_memory_for_them(tmp_path: Path) -> None:
    event = CommunicatorEvent(
        kind=CommunicatorEventKind.INIT_COMPLETE, host="h", pid=0, tid=0, line=1, pointer=0, rank=0, nranks=2**31 - 1,
        comm_id=5,
    )  # fmt: skip
    batch = log_batch(0, 10, strings=("h",), templates=1, operations=((0, 2),))
    life = _Life(tmp_path)
    life.send([replace(batch, communicators=(event,))])
    assert [known.size for known in life.state.pipeline.store.communicators] == [MAX_RANKS]
    assert not life.state.pipeline.store.skipped
    life.kill()


def test_operations_that_cannot_be_numbered_are_lost_and_counted_and_those_after_them_are_not(tmp_path: Path) -> None:
    life = _Life(tmp_path)
    batches = [
        log_batch(0, 10, strings=("AllReduce",), templates=1, operations=((0, 1),)),
        log_batch(10, 20, operations=((0, 2),)),
    ]
    life.send(batches[:1])
    pipeline = life.state.pipeline
    damaged = np.zeros(2, LOGGED)  # whose templates are nowhere
    damaged["source"], damaged["template"] = 0, 999
    pipeline._intake._unplaced.append(damaged, no_rows(TUNING))  # pyright: ignore[reportPrivateUsage]
    life.tick(50 * SECOND_NS)
    assert pipeline.store.skipped["internal_error"] == 2
    assert [gap.amount for gaps in pipeline.store.gaps.values() for gap in gaps] == [2]
    life.send(batches)
    assert pipeline.store.operations.rows["op_count"].tolist() == [1, 2]
    life.kill()


def _operations(batches: list[Batch]) -> int:
    return sum(len(batch.operations) for batch in batches)

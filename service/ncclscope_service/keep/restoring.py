"""Goes on from a data folder: the newest state file that is whole, and what the journal holds behind it.

If another version wrote the state, the whole journal is applied, provided it goes back to the beginning; else what it
has of jobs that it has completely, and the agents of all others read their files again from the beginning. If the
journal is of no use either, both are set aside, and all agents read again.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import structlog

from ncclscope_service.intake.agents import KnownAgent
from ncclscope_service.intake.journal_entry import (
    BatchTaken,
    Entry,
    HelloSaid,
    NotificationSettled,
    OperatorEntry,
    Ticked,
    decode_entry,
)
from ncclscope_service.intake.receive import Receiver, ReplayError
from ncclscope_service.keep.archive import Archive, DataFolder, FolderInUseError
from ncclscope_service.keep.journal import FORMAT, Record, first_of, read_segment
from ncclscope_service.keep.service_state import Outbox, ReplayCounts, ServiceState
from ncclscope_service.store.settings import PipelineSettings
from ncclscope_wire.codec import decode_message
from ncclscope_wire.errors import ConfigError, OtherVersionError, ProtocolError, StateError
from ncclscope_wire.messages import Hello

_log = structlog.get_logger(__name__)

_MOST_NAMED: Final = 8
_ERA_FORMAT: Final = "%Y-%m-%dT%H%M%SZ"
_COPIED: Final = ("state", "journal")


@dataclass(slots=True)
class RestoreCounts:
    """How a start went."""

    replay: ReplayCounts = field(default_factory=ReplayCounts)
    damaged: int = 0
    """Stretches of the journal that hold no whole entry."""
    missing: int = 0
    """Entries that the journal lacks."""
    torn_bytes: int = 0
    states_refused: int = 0
    is_other_version: bool = False
    """Another version wrote the state: the journal alone was applied."""
    is_set_aside: bool = False
    """Neither was of use."""
    journal_bytes: int = 0
    seconds: float = 0.0


class Restoring:
    """One start from a folder: `state`, once `run` has returned."""

    def __init__(
        self, folder: DataFolder, settings: PipelineSettings | None = None, outboxes: dict[str, Outbox] | None = None
    ) -> None:
        """`settings`: None for those of the state. `outboxes`: one for each receiver of notifications that there is
        now, new.
        """
        self._folder = folder
        self._settings = settings
        self._outboxes = {} if outboxes is None else outboxes
        self.counts = RestoreCounts()
        self.state: ServiceState
        self.number = 0
        """Of the last entry of the journal that is in the state."""
        self.state_number = 0
        """Of the last one that is in the state file."""
        self.era = ""
        self.archive: Archive

    def run(self) -> None:
        """Restores what can be restored. Raises OSError if the folder cannot be read or written."""
        began = time.monotonic()
        try:
            self._restore()
        except (StateError, ProtocolError) as error:
            self._start_empty(str(error))
        except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
            # Entries that our own code fails on: a service that starts empty is better than one that never starts.
            _log.error("replay_failed", exc_info=True)
            self._start_empty(f"the journal holds what cannot be applied: {type(error).__name__}: {error}")
        self.state.outboxes = self._outboxes
        self.counts.seconds = time.monotonic() - began

    def _restore(self) -> None:
        if not self._read_newest_state():
            self._replay_complete_agents()
            return
        for name, new in self._outboxes.items():
            self._outboxes[name] = replace(self.state.outboxes.get(name, new), least=new.least)
        self.state.outboxes = self._outboxes
        receiver = Receiver(agents=self.state.agents)
        for record in self._records(self.number):
            self.state.replay(decode_entry(record.content), receiver, self.archive.write, self.counts.replay)
            self.number = record.number

    def _replay_complete_agents(self) -> None:
        """Applies what the journal, which does not go back to the beginning, has completely.

        Receivers of notifications come in at the end: the version before has notified them.
        """
        begin, complete = first_of(self._folder.segments()[0]) - 1, _CompleteAgents()
        refused = self.counts.states_refused
        for record in self._records(begin):
            complete.ingest_entry(record.number, decode_entry(record.content))
        agents = complete.agents()
        if not agents:
            raise StateError("another version wrote the state, and the journal holds no job from its beginning")
        self.counts = RestoreCounts(states_refused=refused, is_other_version=True)
        self.state, self.number = ServiceState(self._settings), begin
        receiver = Receiver(agents=self.state.agents)
        for record in self._records(begin):
            self.number, entry = record.number, decode_entry(record.content)
            if complete.accepts(agents, self.number, entry):
                self.state.replay(entry, receiver, self.archive.write, self.counts.replay)
            elif isinstance(entry, BatchTaken):
                self.counts.replay.left_out += 1
                self.counts.replay.agents.add(entry.agent)

    def _read_newest_state(self) -> bool:
        """Takes the newest state file that is whole, or an empty state if the journal goes back to the beginning.

        False if another version wrote the state, and the journal does not go back so far.
        """
        why: str | None = None
        is_other_version = False
        for path in self._folder.states():
            try:
                header, snapshot = self._folder.read_state(path)
                self.state = ServiceState.restore(snapshot, self._settings)
            except StateError as error:
                why = f"{path.name}: {error}"
                is_other_version |= isinstance(error, OtherVersionError)
                self.counts.states_refused += 1
                _log.warning("state_refused", file=path.name, why=str(error))
                if not isinstance(error, OtherVersionError):  # of use to that version still
                    self._folder.mark_damaged(path)
                continue
            self._start_era(header.era)
            self.number = self.state_number = header.first
            return True
        segments = self._folder.segments()
        is_partial = bool(segments) and first_of(segments[0]) != 1
        if is_partial and not is_other_version:
            raise StateError(why or "the journal has lost its beginning, and there is no state file")
        # Another version may number operations otherwise: those that it has finished are not to be taken for ours.
        first = read_segment(segments[0].read_bytes()).header if segments and not is_other_version else None
        self._start_era(first.era if first is not None else _era_now())
        self.counts.is_other_version = is_other_version and bool(segments)
        self.state = ServiceState(self._settings)
        return not is_partial

    def _records(self, number: int) -> Iterator[Record]:
        """The entries behind that number, in order."""
        segments = self._folder.segments()
        for place, path in enumerate(segments):
            is_last = place + 1 == len(segments)
            if not is_last and first_of(segments[place + 1]) <= number + 1:
                continue
            read = read_segment(path.read_bytes())
            if read.header is not None and read.header.format != FORMAT:
                raise StateError(
                    f"{path.name} has format {read.header.format}, this program reads {FORMAT}: agents read again; if "
                    "their files are gone, start the version that wrote it on the folder that was set aside"
                )
            self.counts.damaged += read.damaged + (read.header is None and bool(read.records))
            self.counts.torn_bytes += read.torn_bytes
            self.counts.journal_bytes += read.end
            if is_last and read.torn_bytes and read.end:
                with path.open("r+b") as file:
                    file.truncate(read.end)
            for record in read.records:
                if record.number > number:
                    self.counts.missing += record.number - number - 1
                    number = record.number
                    yield record

    def _start_empty(self, why: str) -> None:
        """Nothing of what is there is of use: it is set aside."""
        era = _era_now()
        aside = self._folder.set_aside(era)
        _log.warning("state_set_aside", where=str(aside), why=why, then="agents are asked to read again")
        self.counts = RestoreCounts(states_refused=max(1, self.counts.states_refused), is_set_aside=True)
        self.number = self.state_number = 0
        self._start_era(era)
        self.state = ServiceState(self._settings)

    def _start_era(self, era: str) -> None:
        self.era = era
        self.archive = Archive(self._folder.operations(era))

    def log(self) -> None:
        """Logs how it went, if there was anything to restore."""
        for failure in self.state.pipeline.errors.drain():
            _log.error("work_failed", where=failure.where, what=failure.what, trace=failure.trace)
        found = self.counts
        if found.journal_bytes or found.states_refused:
            _log.info(
                "restored",
                batches=found.replay.batches,
                left_out=found.replay.left_out,
                **({"from": "the journal alone: another version wrote the state"} if found.is_other_version else {}),
                **({"read_again": _some(found.replay.agents)} if found.is_other_version else {}),
                damaged=found.damaged,
                missing=found.missing,
                torn_bytes=found.torn_bytes,
                seconds=round(found.seconds, 3),
            )


def read_stopped(data: Path) -> ServiceState:
    """The state that the last service left in this folder, with what it had not decided yet decided.

    State and journal are copied first, since to go on from them changes them; that takes as much room again.

    Raises:
        ConfigError: no service kept its state there, one still runs on it, or this version cannot read it.
        OSError: it cannot be read or copied.
    """
    if not any((data / part).is_dir() for part in _COPIED):
        raise ConfigError(
            f"--data {data}: no service kept its state here: name the folder that `serve --data` was given"
        )
    with tempfile.TemporaryDirectory(prefix="ncclscope-stopped-") as temporary:
        try:
            locked = DataFolder(data)
        except FolderInUseError as error:
            raise ConfigError(f"{error.said}; ask it for a snapshot with --service, or stop it first") from error
        try:
            for part in _COPIED:
                shutil.copytree(data / part, Path(temporary) / part)
        finally:
            locked.close()
        copied = DataFolder(Path(temporary))
        try:
            restoring = Restoring(copied)
            restoring.run()
        finally:
            copied.close()
    if restoring.counts.is_set_aside:
        raise ConfigError(f"--data {data}: what is there is damaged or of another version of ncclscope")
    state = restoring.state
    state.pipeline.finish(state.at_ns)
    return state


class _CompleteAgents:
    """Which agents a journal has from their first batch on, for a version that cannot read the state before it.

    All others read their files again from the beginning. What an agent gave must come either from the journal or from
    the agent, or it would count twice; and the ranks of a job must come from one of both, or those that are still to
    come would be taken for missing: the agents of a job stand or fall together.

    `ingest_entry` takes every entry, in order; then `accepts` says which of them may be applied.
    """

    def __init__(self) -> None:
        self._agents: dict[str, KnownAgent] = {}
        self._receiver = Receiver(agents=self._agents)
        self._begins: dict[str, int] = {}
        """Number of the entry with which an agent was new, by agent."""
        self._jobs: dict[str, str] = {}
        self._broken: set[str] = set()

    def ingest_entry(self, number: int, entry: Entry) -> None:
        """The next entry, and its number.

        Raises:
            StateError: another version wrote it, and its agent is not known.
        """
        if isinstance(entry, Ticked | NotificationSettled | OperatorEntry):
            return
        agent = _agent_of(entry)
        if isinstance(entry, HelloSaid):
            self._jobs[agent] = _hello_of(entry).job
            if entry.is_new:
                self._agents.pop(agent, None)
                self._begins[agent] = number
                self._broken.discard(agent)
        elif isinstance(entry, BatchTaken):
            self._jobs.setdefault(agent, entry.job)
        if agent not in self._begins:
            self._broken.add(agent)
            return
        try:
            self._receiver.replay(entry)
        except (ReplayError, ProtocolError):
            self._broken.add(agent)

    def agents(self) -> frozenset[str]:
        """Those that are complete, of jobs all of whose agents are; all others are to read their files again."""
        broken_jobs = {self._jobs.get(agent, "") for agent in self._broken}
        if "" in broken_jobs:
            return frozenset()  # of one of them the job is not known: it may be any
        return frozenset(agent for agent in self._begins if self._jobs[agent] not in broken_jobs)

    def accepts(self, agents: frozenset[str], number: int, entry: Entry) -> bool:
        """Whether an entry may be applied where there is no state, for these agents.

        Settled notifications are left out: there are no receivers while entries are applied so.
        """
        if isinstance(entry, Ticked | NotificationSettled | OperatorEntry):
            return not isinstance(entry, NotificationSettled)
        agent = _agent_of(entry)
        return agent in agents and number >= self._begins[agent]


def _agent_of(entry: Entry) -> str:
    if isinstance(entry, HelloSaid):
        return _hello_of(entry).agent_id
    assert not isinstance(entry, Ticked | NotificationSettled | OperatorEntry), "the entry is of no agent"
    return entry.agent


def _hello_of(entry: HelloSaid) -> Hello:
    try:
        hello = decode_message(entry.payload)
    except ProtocolError as error:
        raise StateError(f"the journal holds a Hello that this program cannot read: {error}") from error
    if not isinstance(hello, Hello):
        raise StateError("the journal holds a Hello of another protocol version")
    return hello


def _era_now() -> str:
    return time.strftime(_ERA_FORMAT, time.gmtime())


def _some(agents: Collection[str]) -> str:
    """The first names of many, and how many there are."""
    named = ", ".join(sorted(agents)[:_MOST_NAMED])
    return named if len(agents) <= _MOST_NAMED else f"{named} and {len(agents) - _MOST_NAMED} more"

"""Keeps the service's state over crashes: restores it at the start, writes the journal and, now and then, the state.

The newest state file that is whole is restored, and what the journal holds behind it is applied again. Where another
version wrote the state, the whole journal is applied where it goes back to the beginning; else what it has of jobs that
it has whole (`whole_agents.py`), and the agents of all others read their files again from the beginning. Where the
journal is of no use either, both are set aside, and all agents do.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import structlog
from anyio import to_thread

from ncclscope_service.archive import Archive
from ncclscope_service.child import Child, ChildError
from ncclscope_service.data_folder import DataFolder, write_state
from ncclscope_service.health import JournalHealth
from ncclscope_service.journal import Journal, JournalSettings, JournalStatistics, first_of
from ncclscope_service.journal_entry import BatchTaken, decode_entry
from ncclscope_service.journal_segment import FORMAT, READABLE_FORMATS, Record, read_segment
from ncclscope_service.kept import Kept, Replayed
from ncclscope_service.outbox import Outbox
from ncclscope_service.pipeline import PipelineSettings
from ncclscope_service.receive import Receiver
from ncclscope_service.store import Ids, Store
from ncclscope_service.whole_agents import WholeAgents
from ncclscope_wire.errors import OtherVersionError, ProtocolError, StateError

_log = structlog.get_logger(__name__)

_MOST_NAMED: Final = 8
_PIECE_OPERATIONS: Final = 100_000
_PATIENCE_SECONDS: Final = 600.0
"""A state that takes longer to be written is not written."""
_RETRY_SECONDS: Final = 10.0
_ERA_FORMAT: Final = "%Y-%m-%dT%H%M%SZ"


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistenceSettings:
    """How often the state is written, beside the settings of the journal."""

    journal: JournalSettings = field(default_factory=JournalSettings)
    state_every_seconds: float = 300.0
    state_every_bytes: int = 128 * 1024 * 1024
    """Of journal: what a restart applies again at most."""


@dataclass(slots=True)
class _Restored:
    """How the start went."""

    replayed: Replayed = field(default_factory=Replayed)
    damaged: int = 0
    """Stretches of the journal that hold no whole entry."""
    missing: int = 0
    """Entries that the journal lacks."""
    torn_bytes: int = 0
    states_refused: int = 0
    is_foreign: bool = False
    """Another version wrote the state: the journal alone was applied."""
    journal_bytes: int = 0
    seconds: float = 0.0


class Persistence:
    """One data folder. `open` first; that, `close` and `archive_rest` block; `release` at last."""

    def __init__(self, path: Path, settings: PersistenceSettings) -> None:
        """Takes the folder.

        Raises:
            ConfigError: another service has it, or it cannot be written.
        """
        self._folder = DataFolder(path)
        self._settings = settings
        self._restored = _Restored()
        self._era = ""
        self._state_at: float = time.monotonic()
        self._state_bytes: int | None = None
        self._state_seconds: float | None = None
        self._pause_seconds: float | None = None
        self._state_trouble = ""
        self._entries_at_state = 0
        self._journal_bytes_at_state = 0
        self._archive: Archive
        self._archive_trouble = ""
        self.journal: Journal

    def open(
        self,
        settings: PipelineSettings | None,
        outboxes: dict[str, Outbox],
        on_kept: Callable[[int], None],
        now_ns: int,
    ) -> Kept:
        """The state as it was, or a new one; then the journal can be appended to.

        `settings`: None for those of the state. `outboxes`: one for each receiver of notifications that there is now,
        new. Raises OSError where the folder cannot be read or written.
        """
        began = time.monotonic()
        try:
            kept, number = self._restore(settings, outboxes)
        except (StateError, ProtocolError) as error:
            kept, number = self._begin_anew(settings, outboxes, str(error))
        except OSError:
            raise
        except Exception as error:  # a service that begins anew is better than one that never starts
            _log.error("replay_failed", exc_info=True)
            why = f"the journal holds what cannot be applied: {type(error).__name__}: {error}"
            kept, number = self._begin_anew(settings, outboxes, why)
        for mistake in kept.pipeline.mistakes.take():
            _log.error("work_failed", where=mistake.where, what=mistake.what, trace=mistake.trace)
        kept.reopened(now_ns)
        self._archive.withdraw(kept.pipeline.store.operations.first)
        self.journal = Journal(
            self._folder.journal,
            era=self._era,
            next_number=number + 1,
            settings=self._settings.journal,
            on_kept=on_kept,
        )
        self._journal_bytes_at_state = self.journal.statistics().bytes - self._restored.journal_bytes
        if self._restored.is_foreign:
            self._write_state_here(kept)
        self._restored.seconds = time.monotonic() - began
        self._tell()
        return kept

    def archive(self, known: Store, operations: Ids) -> bool:
        """Writes finished operations; False where the disk does not take them now."""
        try:
            self._archive.append(known, operations)
        except OSError as error:
            self._note_archive_trouble(f"finished operations cannot be written: {error.strerror or error}")
            return False
        self._note_archive_trouble("")
        return True

    def trouble(self) -> str:
        """Why what comes cannot be kept now; empty where it can."""
        return self.journal.statistics().trouble or self._archive_trouble or self._state_trouble

    def is_due(self) -> bool:
        """Whether the state should be written now."""
        if self.journal.last == self._entries_at_state:
            return False
        if self._state_trouble and time.monotonic() - self._state_at < _RETRY_SECONDS:
            return False
        grown = self.journal.statistics().bytes - self._journal_bytes_at_state
        is_old = time.monotonic() - self._state_at >= self._settings.state_every_seconds
        return is_old or grown >= self._settings.state_every_bytes

    async def write_state(self, kept: Kept) -> None:
        """Writes the state, in a process of its own: work stands still only while that is made.

        To be called in the main thread. What goes wrong is told (`trouble`), and tried again later.
        """
        began = self._state_at = time.monotonic()
        try:
            descriptor = await to_thread.run_sync(self._folder.begin_state)
            number, child = self._fork(kept, descriptor)
            if child is None:
                self._write_state_here(kept)
                self._pause_seconds = time.monotonic() - began
                return
            size = await child.result(_PATIENCE_SECONDS)
            await to_thread.run_sync(self._keep_state, number, size, began)
        except (OSError, ChildError) as error:
            await to_thread.run_sync(self._give_up, error)

    def close(self, kept: Kept) -> None:
        """Writes the rest of the journal and the state."""
        self.journal.close()
        self._write_state_here(kept)

    def release(self) -> None:
        """Gives the folder back."""
        self._folder.close()

    def archive_rest(self, known: Store, operations: Ids) -> None:
        """Writes finished operations that the state still has; they are written again when their time comes.

        In pieces: where it is cut short, those that are done stay.
        """
        for begin in range(0, len(operations), _PIECE_OPERATIONS):
            self.archive(known, operations[begin : begin + _PIECE_OPERATIONS])
        self._archive.sync()

    def health(self) -> JournalHealth:
        """For metrics and `/healthz`."""
        journal: JournalStatistics = self.journal.statistics()
        return JournalHealth(
            bytes=journal.bytes,
            waiting_bytes=journal.waiting_bytes,
            write_seconds=journal.write_seconds,
            errors=journal.errors_total,
            trouble=self.trouble(),
            damaged=self._restored.damaged + self._restored.states_refused,
            missing=self._restored.missing + self._restored.replayed.left_out,
            replayed_batches=self._restored.replayed.batches,
            restore_seconds=self._restored.seconds,
            state_age_seconds=time.monotonic() - self._state_at,
            state_bytes=self._state_bytes,
            state_seconds=self._state_seconds,
            pause_seconds=self._pause_seconds,
        )

    # Restoring

    def _restore(self, settings: PipelineSettings | None, outboxes: dict[str, Outbox]) -> tuple[Kept, int]:
        kept, number = self._newest_state(settings)
        if kept is None:
            return self._restore_whole_agents(settings, outboxes)
        for name, new in outboxes.items():
            outboxes[name] = kept.outboxes.get(name, new)
            outboxes[name] = replace(outboxes[name], least=new.least, limits=new.limits)
        kept.outboxes = outboxes
        receiver = Receiver(agents=kept.agents)
        for record in self._records(number):
            kept.replay(decode_entry(record.content), receiver, self.archive, self._restored.replayed)
            number = record.number
        return kept, number

    def _restore_whole_agents(self, settings: PipelineSettings | None, outboxes: dict[str, Outbox]) -> tuple[Kept, int]:
        """What the journal alone gives, which does not go back to the beginning.

        Receivers of notifications come in at the end: they were told by the build before.
        """
        begin, whole = first_of(self._folder.segments()[0]) - 1, WholeAgents()
        refused = self._restored.states_refused
        for record in self._records(begin):
            whole.feed(record.number, decode_entry(record.content))
        agents = whole.agents()
        if not agents:
            raise StateError("another version wrote the state, and the journal holds no job from its beginning")
        self._restored = _Restored(states_refused=refused, is_foreign=True)
        kept, number = Kept(settings), begin
        receiver = Receiver(agents=kept.agents)
        for record in self._records(begin):
            number, entry = record.number, decode_entry(record.content)
            if whole.takes(agents, number, entry):
                kept.replay(entry, receiver, self.archive, self._restored.replayed)
            elif isinstance(entry, BatchTaken):
                self._restored.replayed.left_out += 1
                self._restored.replayed.agents.add(entry.agent)
        kept.outboxes = outboxes
        return kept, number

    def _newest_state(self, settings: PipelineSettings | None) -> tuple[Kept | None, int]:
        """The state of the newest file that is whole, and the number of the last entry in it.

        None where another version wrote it, and the journal does not go back to the beginning.
        """
        why: str | None = None
        is_foreign = False
        for path in self._folder.states():
            try:
                header, snapshot = self._folder.read_state(path)
                kept = Kept.restore(snapshot, settings)
            except StateError as error:
                why = f"{path.name}: {error}"
                is_foreign |= isinstance(error, OtherVersionError)
                self._restored.states_refused += 1
                _log.warning("state_refused", file=path.name, why=str(error))
                if not isinstance(error, OtherVersionError):  # of use to that version still
                    self._folder.spoil(path)
                continue
            self._begin_era(header.era)
            self._entries_at_state = header.first
            return kept, header.first
        segments = self._folder.segments()
        is_partial = bool(segments) and first_of(segments[0]) != 1
        if is_partial and not is_foreign:
            raise StateError(why or "the journal has lost its beginning, and there is no state file")
        # Another build may number operations otherwise: those that it has finished are not to be taken for ours.
        first = read_segment(segments[0].read_bytes()).header if segments and not is_foreign else None
        self._begin_era(first.era if first is not None else time.strftime(_ERA_FORMAT, time.gmtime()))
        self._restored.is_foreign = is_foreign and bool(segments)
        return None if is_partial else Kept(settings), 0

    def _records(self, number: int) -> Iterator[Record]:
        """The entries behind that number, in order."""
        segments = self._folder.segments()
        for place, path in enumerate(segments):
            is_last = place + 1 == len(segments)
            if not is_last and first_of(segments[place + 1]) <= number + 1:
                continue
            read = read_segment(path.read_bytes())
            if read.header is not None and read.header.format not in READABLE_FORMATS:
                raise StateError(f"{path.name} has format {read.header.format}, this program reads {FORMAT}")
            self._restored.damaged += read.damaged + (read.header is None and bool(read.records))
            self._restored.torn_bytes += read.torn_bytes
            self._restored.journal_bytes += read.end
            if is_last and read.torn_bytes and read.end:
                _cut(path, read.end)
            for record in read.records:
                if record.number > number:
                    self._restored.missing += record.number - number - 1
                    number = record.number
                    yield record

    def _begin_anew(self, settings: PipelineSettings | None, outboxes: dict[str, Outbox], why: str) -> tuple[Kept, int]:
        """Nothing of what is there is of use: it is set aside."""
        era = time.strftime(_ERA_FORMAT, time.gmtime())
        aside = self._folder.set_aside(era)
        _log.warning("state_set_aside", where=str(aside), why=why, then="agents are asked to read again")
        self._restored = _Restored(states_refused=max(1, self._restored.states_refused))
        self._entries_at_state = 0
        self._begin_era(era)
        kept = Kept(settings)
        kept.outboxes = outboxes
        return kept, 0

    def _begin_era(self, era: str) -> None:
        self._era = era
        self._archive = Archive(self._folder.operations(era))

    def _tell(self) -> None:
        found = self._restored
        if found.journal_bytes or found.states_refused:
            _log.info(
                "restored",
                batches=found.replayed.batches,
                left_out=found.replayed.left_out,
                **({"from": "the journal alone: another version wrote the state"} if found.is_foreign else {}),
                **({"read_again": _some(found.replayed.agents)} if found.is_foreign else {}),
                damaged=found.damaged,
                missing=found.missing,
                torn_bytes=found.torn_bytes,
                seconds=round(found.seconds, 3),
            )

    # The state, now and then

    def _fork(self, kept: Kept, descriptor: int) -> tuple[int, Child | None]:
        """The process that writes the state as the last entry left it, and that entry's number; closes the file.

        None: the system makes none.
        """
        began = time.monotonic()
        number, era = self.journal.cut(), self._era
        try:
            return number, Child(lambda: write_state(descriptor, number, era, kept.parts()), descriptor=descriptor)
        except OSError as error:
            _log.warning("state_written_in_place", why=error.strerror)
            return number, None
        finally:
            os.close(descriptor)
            self._pause_seconds = time.monotonic() - began

    def _write_state_here(self, kept: Kept) -> None:
        """Writes the state in this process: nothing else can be done meanwhile."""
        began = self._state_at = time.monotonic()
        try:
            number, descriptor = self.journal.cut(), self._folder.begin_state()
            try:
                size = write_state(descriptor, number, self._era, kept.parts())
            finally:
                os.close(descriptor)
            self._keep_state(number, size, began)
        except (OSError, StateError) as error:
            self._give_up(error)

    def _keep_state(self, number: int, size: int, began: float) -> None:
        """What is written counts: all that it relies on is on disk too."""
        before = self._folder.states()
        self._archive.sync()
        self._folder.keep_state(number)
        self._note_state_trouble("")
        self._state_bytes, self._entries_at_state = size, number
        if before:
            self.journal.drop_until(first_of(before[0]))
        self._journal_bytes_at_state = self.journal.statistics().bytes
        self._state_seconds = time.monotonic() - began

    def _give_up(self, error: Exception) -> None:
        """It is tried again; until then what is half written takes no room."""
        why = (isinstance(error, OSError) and error.strerror) or str(error)
        self._note_state_trouble(f"the state cannot be written: {why}")
        with suppress(OSError):
            self._folder.drop_unfinished()

    def _note_state_trouble(self, why: str) -> None:
        if why and why != self._state_trouble:
            _log.warning("state_not_written", why=why)
        self._state_trouble = why

    def _note_archive_trouble(self, why: str) -> None:
        if why and not self._archive_trouble:
            _log.warning("operations_not_archived", why=why)
        self._archive_trouble = why


def _some(agents: Collection[str]) -> str:
    """The first names of many, and how many there are."""
    named = ", ".join(sorted(agents)[:_MOST_NAMED])
    return named if len(agents) <= _MOST_NAMED else f"{named} and {len(agents) - _MOST_NAMED} more"


def _cut(path: Path, end: int) -> None:
    """Takes away what a crash left half written."""
    with path.open("r+b") as file:
        file.truncate(end)

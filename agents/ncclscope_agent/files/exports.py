"""Follows directories in which nsys exports appear, and reads each export once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import structlog

from ncclscope_agent.sources.kineto.batches import is_trace
from ncclscope_agent.sources.nsys.export import EXPORT_END, ExportLimits, broken_export, export_key
from ncclscope_agent.sources.nsys.open_export import check_ready, look_at
from ncclscope_agent.sources.nsys.reader_process import KILLED, ExportReader, ReaderLimits
from ncclscope_agent.sources.nsys.report import EXPORT_SUFFIX, REPORT_SUFFIX, export_of, export_report
from ncclscope_wire.batch import Batch
from ncclscope_wire.errors import SourceError
from ncclscope_wire.records import Source, SourceKind

PASSING_REASONS: Final = frozenset({"empty", "incomplete", "locked", "changed"})
"""Reasons of SourceError that pass by themselves when the exporter continues."""

_MILLISECOND: Final = 1_000_000
_SECOND: Final = 1_000_000_000
_TRIES_IN_A_LIFE: Final = 10
"""Each attempt is a process: a file that its exporter left half must not cost some every few seconds for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Times of waiting for files, in ns."""

    settle_ns: int = 200 * _MILLISECOND
    """A file is tried when it has stayed the same for this long."""
    longest_pause_ns: int = 5 * _SECOND
    """Pauses between attempts double up to this, or a tenth of the time for which the file could not be read."""
    give_up_ns: int = 60 * _SECOND
    """A file that could not be read for this long is reported."""
    report_grace_ns: int = 5 * _SECOND
    """A .nsys-rep is exported when nobody else did so for this long: nsys writes the .sqlite after it."""
    rescan_ns: int = 2 * _SECOND
    """Directories are looked through at least this often; a nudge does it at once."""


@dataclass(slots=True)
class Waiting:
    """One file that is waited for. All times are of one clock, given by the caller.

    seen ── same for `settle_ns` ──> tried ──> read, or refused for good: done with this state of the file
      ^                                │
      └── changed: all forgotten       └── not complete yet: again after a pause that doubles; after
                                           `give_up_ns` its reason is reported, once, and trying continues,
                                           unless a try reads the whole file: then there are two
    """

    timing: Timing
    patience_ns: int
    """Time for which the file must stay the same before the first attempt."""
    is_dear: bool = False
    """An attempt reads the whole file, also where that is not complete."""
    is_done: bool = False
    """Nothing more is to be done with the file as it is now."""
    _sight: object = None
    _next_try_ns: int = 0
    _pause_ns: int = 0
    _failing_since_ns: int | None = None
    _reported: set[str] = field(default_factory=set[str])

    def see(self, sight: object, now_ns: int) -> None:
        """The file was looked at; anything that compares equal means that it is the same as before."""
        if sight == self._sight:
            return
        self._sight = sight
        self.is_done = False
        self._next_try_ns = now_ns + self.patience_ns
        self._pause_ns = self.timing.settle_ns
        self._failing_since_ns = None
        self._reported.clear()

    def is_due(self, now_ns: int) -> bool:
        """Whether the file should be tried now."""
        return not self.is_done and self._sight is not None and now_ns >= self._next_try_ns

    def postpone(self, now_ns: int) -> None:
        """The next attempt is after the longest pause: other files come first."""
        self._next_try_ns = now_ns + self.timing.longest_pause_ns

    def failed(self, reason: str, now_ns: int) -> bool:
        """An attempt failed; True if that should be reported now."""
        if reason not in PASSING_REASONS:
            self.is_done = True
            return True
        if self._failing_since_ns is None:
            self._failing_since_ns = now_ns
        self._next_try_ns = now_ns + (self.timing.give_up_ns if self.is_dear else self._pause_ns)
        longest_ns = max(self.timing.longest_pause_ns, (now_ns - self._failing_since_ns) // _TRIES_IN_A_LIFE)
        self._pause_ns = min(2 * self._pause_ns, longest_ns)
        if now_ns - self._failing_since_ns < self.timing.give_up_ns or reason in self._reported:
            return False
        self._reported.add(reason)
        self.is_done = self.is_dear
        return True


_log = structlog.get_logger(__name__)

_NSYS_TIMEOUT_S: Final = 600.0
_KILLS: Final = 2
"""A file that has killed as many readers is left out until the agent starts again."""


@dataclass(frozen=True, slots=True)
class ExportStatistics:
    """Counts of the files of the followed directories, by what became of them since the start."""

    waiting: int
    """Files that are there and neither read nor refused."""
    read: int
    skipped: int
    """Exports that the service had already."""
    refused: int
    """Reports of a file that could not be read; a file may give several."""
    vanished: int
    """Files that went away before they could be read, such as the probe files of nsys itself."""


class ExportFollower:
    """Finds exports and reports of nsys and traces of PyTorch in directories and turns each into batches, once.

    `host` is the host of exports that record none. `is_applied` says which position of a source the service
    has, by Source.key; None if it does not know the source. A source is named by the directory's own name and
    the path below it, such as node01/capture_0000.sqlite: nodes often name their captures alike. Hidden files and
    links are left alone. A directory that is not there is reported in the log, once, and again when it has come.
    `with_calls`: whether operations are taken from traces; where logs are followed, they have them.
    """

    def __init__(
        self,
        directories: Sequence[Path],
        *,
        host: str,
        is_applied: Callable[[str], int | None],
        limits: ExportLimits | None = None,
        nsys: str | None = None,
        timing: Timing | None = None,
        work_directory: Path | None = None,
        with_calls: bool = True,
        reader_limits: ReaderLimits | None = None,
    ) -> None:
        self._reader = ExportReader(reader_limits)
        self._kills: dict[str, int] = {}
        """How often the reader of a source was killed."""
        self._directories = tuple(directories)
        self._host = host
        self._is_applied = is_applied
        self._limits = limits or ExportLimits()
        self._nsys = nsys
        self._timing = timing or Timing()
        self._work_directory = work_directory
        self._with_calls = with_calls
        self._files: dict[Path, _Followed] = {}
        self._missing = set[Path]()
        self._nudged = threading.Event()
        self._next_scan_ns: int | None = None
        self._said_nsys_missing = False
        self._read = self._skipped = self._refused = self._vanished = 0

    def nudge(self) -> None:
        """Something happened in a directory: the next poll looks at once. May be called from any thread."""
        self._nudged.set()

    def stop(self) -> None:
        """Ends the process that reads an export, if there is one; nothing is read after this. From any thread."""
        self._reader.stop()

    def look_again(self) -> None:
        """Forgets what was read: the service may have lost it. Each file is offered to `is_applied` once more.

        A poll that is not at its end yet is best closed: what it would still give belongs to the time before.
        """
        self._files.clear()
        self.nudge()

    def holds(self, key: str) -> bool:
        """Whether the export of this source is in one of the directories. Looks at each; from any thread."""
        paths = [path for directory in self._directories for path in _found_below(directory)]
        return any(source is not None and source.key == key for source in map(_source_at, paths))

    def statistics(self) -> ExportStatistics:
        """Counts of the files so far."""
        waiting = sum(not file.waiting.is_done for file in self._files.values())
        return ExportStatistics(waiting, self._read, self._skipped, self._refused, self._vanished)

    def poll(self, now_wall_ns: int) -> Iterator[Batch]:
        """Batches of whatever can be read now; to be called every 50 to 250 ms, and each to its end.

        Blocks while it reads a file, and while nsys exports a report (minutes): call it, or each step of it, on
        a worker thread. A file that stays unreadable gives one batch with a SourceGap per reason.
        """
        self._look(now_wall_ns)
        due = [path for path, file in self._files.items() if file.waiting.is_due(now_wall_ns)]
        for path in sorted(due, key=lambda path: (self._files[path].mtime_ns, path)):
            if path not in self._files:  # `look_again` came in between
                continue
            batches = self._report(path, now_wall_ns) if _is_report(path) else self._export(path, now_wall_ns)
            for batch in batches:
                yield replace(batch, observed_at_ns=now_wall_ns)

    def _look(self, now_ns: int) -> None:
        """Looks at the files that are waited for, and now and then at all files and for new ones."""
        is_scan = self._nudged.is_set() or self._next_scan_ns is None or now_ns >= self._next_scan_ns
        if is_scan:
            self._nudged.clear()
            self._next_scan_ns = now_ns + self._timing.rescan_ns
            self._scan()
        for path, file in list(self._files.items()):
            if is_scan or not file.waiting.is_done:
                self._look_at(path, file, now_ns)

    def _look_at(self, path: Path, file: _Followed, now_ns: int) -> None:
        try:
            sight = look_at(path)
        except SourceError:
            del self._files[path]
            self._vanished += not file.waiting.is_done
        else:
            file.mtime_ns = sight.mtime_ns
            file.waiting.see(sight, now_ns)

    def _scan(self) -> None:
        for directory in self._directories:
            self._report_presence(directory)
            named = Path(Path(os.path.abspath(directory)).name)
            for path in _found_below(directory):
                if path not in self._files:
                    patience = self._timing.report_grace_ns if _is_report(path) else self._timing.settle_ns
                    waiting = Waiting(self._timing, patience, is_dear=is_trace(path.name))
                    self._files[path] = _Followed(name=str(named / path.relative_to(directory)), waiting=waiting)

    def _report_presence(self, directory: Path) -> None:
        """Says that a directory is missing, and that it is no longer, once each."""
        if directory.is_dir():
            if directory in self._missing:
                self._missing.discard(directory)
                _log.info("exports_directory", said=f"directory {directory} is there now")
        elif directory not in self._missing:
            self._missing.add(directory)
            said = "is not a directory" if directory.exists() else "does not exist yet"
            _log.warning("exports_directory", said=f"directory {directory} {said}")

    def _export(self, path: Path, now_ns: int) -> Iterator[Batch]:
        """The batches of one export that is due."""
        source = self._source_of(path)
        if source is not None:
            yield from self._read_as(source, path, self._files[path].waiting, now_ns)

    def _read_as(self, source: Source, path: Path, file: Waiting, now_ns: int) -> Iterator[Batch]:
        begin = self._is_applied(source.key) or 0
        if begin >= EXPORT_END:
            file.is_done = True
            self._skipped += 1
            return
        has_begun = False
        try:
            if self._kills.get(source.key, 0) >= _KILLS:
                raise SourceError(KILLED, f"{path} is left out: it has ended {_KILLS} processes that read it")
            if source.kind is SourceKind.NSYS:
                check_ready(path)
            batches = self._reader.read(
                path,
                source=source,
                host=self._host,
                begin=begin,
                limits=self._limits,
                with_calls=self._with_calls,
            )
            for batch in batches:
                has_begun = True
                yield batch
        except SourceError as error:
            if error.reason == KILLED:
                # Once may have been for want of memory on the machine.
                self._kills[source.key] = _KILLS if has_begun else self._kills.get(source.key, 0) + 1
                if self._kills[source.key] < _KILLS:
                    file.postpone(now_ns)
                    return
            # What was given cannot be taken back, nor given twice: a file that fails on the way is done with.
            if file.failed("broke_off" if has_begun else error.reason, now_ns):
                yield self._refusal(source, error)
        else:
            file.is_done = True
            self._read += 1

    def _report(self, path: Path, now_ns: int) -> Iterator[Batch]:
        """The batches of one report that is due: none if its export lies beside it, or will after this."""
        file = self._files[path].waiting
        source = self._source_of(path)
        if source is None or export_of(path) in self._files:
            return
        if self._is_applied(source.key) == EXPORT_END:
            file.is_done = True
            return
        try:
            made = export_report(path, nsys=self._nsys, timeout_s=_NSYS_TIMEOUT_S, work_directory=self._work_directory)
        except SourceError as error:
            file.is_done = True
            yield self._refusal(source, self._said_once(error))
            return
        if made.parent == path.parent:
            file.is_done = True
            self.nudge()
            return
        yield from self._read_as(source, made, file, now_ns)
        made.unlink(missing_ok=True)

    def _said_once(self, error: SourceError) -> SourceError:
        """The long sentence about a missing nsys is for the first report only; all are counted."""
        if error.reason != "nsys_missing":
            return error
        said, self._said_nsys_missing = self._said_nsys_missing, True
        return SourceError(error.reason, "") if said else error

    def _refusal(self, source: Source, error: SourceError) -> Batch:
        self._refused += 1
        return broken_export(source, error)

    def _source_of(self, path: Path) -> Source | None:
        """The source as the file is now; None if it has just gone."""
        try:
            return _source(path, self._files[path].name)
        except SourceError:
            return None


@dataclass(slots=True)
class _Followed:
    name: str
    """The name of the directory in which it was found, and the path below it."""
    waiting: Waiting
    mtime_ns: int = 0


def _source_at(path: Path) -> Source | None:
    try:
        return _source(path, path.name)
    except SourceError:
        return None


def _source(path: Path, name: str) -> Source:
    kind = SourceKind.KINETO if is_trace(path.name) else SourceKind.NSYS
    return Source(kind=kind, name=name, key=export_key(path))


def _is_report(path: Path) -> bool:
    return path.name.endswith(REPORT_SUFFIX)


def _found_below(directory: Path) -> Iterator[Path]:
    """Exports, reports and traces below a directory; what cannot be listed is passed over until it can."""
    for folder, folders, names in os.walk(directory):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if (name.endswith((EXPORT_SUFFIX, REPORT_SUFFIX)) or is_trace(name)) and not name.startswith("."):
                path = Path(folder, name)
                if not path.is_symlink():
                    yield path

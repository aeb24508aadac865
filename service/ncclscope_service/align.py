"""Which kernel ran each logged operation of one process.

Operations become expected launches (`translate`), each thread's launches are paired with the kernels it
launched, by time where lines carry stamps (`timed`), else by order (`sequence`), and every operation gets a match
and a confidence. Incremental: rows may come in any portions, and what is given out never changes. The order of the
kernels is that of their correlation ids, not of their starts. docs/alignment.md says what is decided how.

Kernels replayed by CUDA graphs have no log line of their own; `graphs` pairs them with what was captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.coverage import Coverage
from ncclscope_service.orphans import CONTEXT, Placing, ThreadMemory, place_by_time
from ncclscope_service.rows import Match
from ncclscope_service.signatures import Signatures
from ncclscope_service.track import TRACK_KERNEL, Lanes, Outcome, Track
from ncclscope_service.translate import Counting, Translator, rules_of
from ncclscope_service.unmatched import Undecided
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

ALIGN_OPERATION: Final = np.dtype(
    [
        ("id", "<i8"),  # opaque, increasing in log order
        ("tid", "<u4"),
        ("stream", "<u8"),  # pointer as logged
        ("member", "<i4"),  # the communicator as this process knows it
        ("nranks", "<i4"),
        ("device", "<i4"),  # CUDA ordinal of the communicator (Init line's cudaDev); NO_NUMBER
        ("op", "<u1"),  # code in terms.OPERATIONS
        ("data_type", "<i2"),
        ("reduction", "<i8"),  # as logged
        ("count", "<u8"),
        ("message_bytes", "<i8"),
        ("root", "<i4"),
        ("op_count", "<u8"),
        ("logged_at_ns", "<i8"),  # stamp in the line, host clock; NO_TIME_NS
        ("observed_at_ns", "<i8"),  # arrival at the agent; NO_TIME_NS
        ("channels", "<i2"),  # of its TUNING line; NO_NUMBER
        ("group", "<i8"),  # as rows.OPERATION
        ("one_rank", "?"),
    ]
)
"""One logged operation, as the aligner needs it; `blank_operations` gives rows in which all is unknown."""

ALIGN_KERNEL: Final = np.dtype(
    [
        ("id", "<i8"),
        ("stream_id", "<i8"),
        ("device_id", "<i4"),
        ("correlation_id", "<i8"),
        ("launch_start_ns", "<i8"),  # host clock; NO_TIME_NS
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),
        ("launch_tid", "<i8"),  # NO_NUMBER
        ("kernel_class", "<u1"),  # kernel_name.KernelClass
        ("data_type", "<i2"),  # as kernel_name.merged_data_type; NO_NUMBER
        ("grid_x", "<i4"),
        ("block_x", "<i4"),
        ("graph_node_id", "<i8"),  # NO_NUMBER outside CUDA graphs
        ("censored", "?"),
    ]
)
"""One NCCL kernel, as the aligner needs it; class and type come from its name."""

MATCH: Final = np.dtype(
    [
        ("operation", "<i8"),
        ("kernel", "<i8"),  # of its launch; NO_NUMBER
        ("launch", "<i8"),  # equal for operations of one launch: the id of the first; NO_NUMBER where none is launched
        ("match", "<u1"),  # rows.Match
        ("confidence", "<f4"),
    ]
)
"""What became of one operation. Final: no later row speaks of the same operation."""

PENDING_LIMIT: Final = 1_000_000
"""Launches of one thread that wait for their kernels; beyond, the oldest are given up (a job without captures)."""

_FIRST_LOOK: Final = 32
"""Kernels that are looked at to choose how to pair."""

_ENOUGH_OPERATIONS: Final = 4096
"""Operations after which the choice is made although stamps and launches do not meet."""

_FINEST_NS: Final = 100_000
"""Stamps that are all multiples of this are too coarse to tell launches apart."""

_FAR_FUTURE: Final = 2**62

_UNSURE_NS: Final = 1_000_000
"""Two threads' launches may be numbered in another order than they are timed, by this much."""

_NEAR_NS: Final = 1_000_000_000
"""Lines this much older than the launch before an orphan are looked at, for it."""

_AFTER_ORPHANS: Final = 256
"""Kernels behind an orphan that are looked at, to tell which lines are theirs."""


def blank_operations(count: int) -> Columns:
    """Rows of ALIGN_OPERATION in which everything that may be unknown is."""
    rows = np.zeros(count, dtype=ALIGN_OPERATION)
    for name in ("device", "channels", "group"):
        rows[name] = NO_NUMBER
    for name in ("logged_at_ns", "observed_at_ns"):
        rows[name] = NO_TIME_NS
    return rows


def blank_kernels(count: int) -> Columns:
    """Rows of ALIGN_KERNEL in which everything that may be unknown is."""
    rows = np.zeros(count, dtype=ALIGN_KERNEL)
    for name in ("launch_tid", "graph_node_id", "data_type"):
        rows[name] = NO_NUMBER
    rows["launch_start_ns"] = NO_TIME_NS
    return rows


@dataclass(frozen=True, slots=True)
class AlignerStatistics:
    """What the aligner of one process has seen and left open."""

    pending_launches: int
    pending_kernels: int
    undecided: int
    """Operations without a kernel for which it is not known yet whether a capture was running."""
    late_kernels: int
    replayed_kernels: int
    given_up: int
    is_timed: bool | None


@dataclass(slots=True)
class ProcessAligner:
    """Aligns one process. `version` is NCCL's, None where it is not known."""

    version: str | None
    _translator: Translator = field(init=False)
    _lanes: Lanes = field(default_factory=Lanes)
    _tracks: dict[int, Track] = field(default_factory=dict[int, Track])
    _kernel_lanes: Signatures = field(default_factory=lambda: Signatures(("device_id", "stream_id")))
    _waiting_kernels: list[Columns] = field(default_factory=list[Columns])
    _operation_tids: set[int] = field(default_factory=set[int])
    _coverage: Coverage = field(default_factory=Coverage)
    _undecided: Undecided = field(default_factory=Undecided)
    _first_kernels: Columns = field(default_factory=lambda: np.empty(0, dtype=ALIGN_KERNEL))
    _first_stamps: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    _held: Columns = field(default_factory=lambda: np.empty(0, dtype=ALIGN_KERNEL))
    """Kernels from the first on whose thread or launch time cannot be told yet."""
    _held_since_ns: int = _FAR_FUTURE
    """The launch before the first held kernel: from there on nothing can be decided by time."""
    _placed_until_ns: int = NO_TIME_NS
    _threads: ThreadMemory = field(default_factory=ThreadMemory)
    _out: list[Columns] = field(default_factory=list[Columns])
    _operations: int = 0
    _stamped_until_ns: int = NO_TIME_NS
    _newest_start_ns: int = NO_TIME_NS
    _longest_queue_ns: int = 0
    _knows_groups: bool = False
    """Whether the log tells groups, as far as its first operation shows."""
    _is_timed: bool | None = None
    _is_threaded: bool = True
    _replayed: int = 0
    _given_up: int = 0

    def __post_init__(self) -> None:
        self._translator = Translator(rules_of(self.version))

    def statistics(self) -> AlignerStatistics:
        """Counts of what is pending and of what was left out."""
        tracks = self._tracks.values()
        return AlignerStatistics(
            pending_launches=sum(len(track.launches) for track in tracks),
            pending_kernels=sum(len(track.kernels) for track in tracks)
            + sum(map(len, self._waiting_kernels))
            + len(self._held),
            undecided=len(self._undecided),
            late_kernels=sum(track.late_kernels for track in tracks),
            replayed_kernels=self._replayed,
            given_up=self._given_up,
            is_timed=self._is_timed,
        )

    def feed_operations(self, rows: Columns) -> None:
        """Takes further operations (ALIGN_OPERATION) in log order."""
        if len(rows) == 0:
            return
        if self._operations == 0:
            self._knows_groups = int(rows["group"][0]) != NO_NUMBER
        silent = self._translator.feed(rows)
        self._emit(silent, NO_NUMBER, NO_NUMBER, Match.NO_KERNEL, 1.0)
        self._operations += len(rows)
        self._operation_tids.update(np.unique(rows["tid"]).tolist())
        self._stamped_until_ns = max(self._stamped_until_ns, int(rows["logged_at_ns"].max()))
        if self._is_timed is None:
            self._first_stamps = np.concatenate([self._first_stamps, rows["logged_at_ns"]])

    def feed_kernels(self, rows: Columns) -> None:
        """Takes further kernels (ALIGN_KERNEL) in any order; replays of CUDA graphs are counted and left alone."""
        replayed = rows["graph_node_id"] != NO_NUMBER
        self._replayed += int(np.count_nonzero(replayed))
        rows = rows[~replayed]
        if len(rows) == 0:
            return
        launched = rows["launch_start_ns"] != NO_TIME_NS
        if launched.any():
            queue = int((rows["start_ns"] - rows["launch_start_ns"])[launched].max())
            self._longest_queue_ns = max(self._longest_queue_ns, queue)
        self._newest_start_ns = max(self._newest_start_ns, int(rows["start_ns"].max()))
        self._waiting_kernels.append(rows)

    def withdraw(self, operations: NDArray[np.int64]) -> None:
        """Takes out operations that were captured into a CUDA graph: none of the kernels to come is theirs.

        What was decided of them stays. From now on opCount is not believed, which graphs make stand still or jump.
        """
        self._translator.withdraw(operations)
        for track in self._tracks.values():
            track.withdraw(operations)

    def feed_coverage(self, begin_ns: int, end_ns: int) -> None:
        """Says that this process was recorded between two times of the host clock, all of it fed by now."""
        self._coverage.add(begin_ns, end_ns)

    def give_up(self, before: int) -> None:
        """Operations with an id below `before` wait no longer: no capture came for too long after them."""
        for track in self._tracks.values():
            amount = int(np.searchsorted(track.launches["first_op"], before))
            if amount:
                self._given_up += amount
                self._settle(track, track.give_up(amount))
        decided = self._undecided.decide(self._coverage, final=False, before=before)
        ids, launches, matches, confidence = decided
        self._emit(ids, NO_NUMBER, launches, matches, confidence)

    def advance(self, *, final: bool) -> Columns:
        """What was decided since the last call (MATCH rows, in no particular order); everything with `final`."""
        self._step(final=False)
        if final:
            self._step(final=True)
        decided = np.concatenate([np.empty(0, dtype=MATCH), *self._out])
        self._out = []
        return decided

    def _step(self, *, final: bool) -> None:
        self._place_launches(final=final)
        until_ns = self._kernels_known_until(final=final)
        if not self._place_kernels(until_ns, final=final):
            return
        until_ns = min(until_ns, self._held_since_ns - _UNSURE_NS)
        if self._is_timed:
            for track in self._tracks.values():
                self._settle(track, self._pair(track, until_ns, final=final))
        else:
            self._pair_stretches(until_ns, final=final)
        for track in self._tracks.values():
            self._limit(track)
        self._emit_undecided(final=final)

    def _pair_stretches(self, until_ns: int, *, final: bool) -> None:
        """By order, one recorded stretch after the other; no thread is a stretch ahead of another."""
        for track in self._tracks.values():
            track.in_doubt = None
        while True:
            stretches = {tid: track.stretch(self._coverage) for tid, track in self._tracks.items()}
            earliest = min((each for each in stretches.values() if each is not None), default=None)
            first = [self._tracks[tid] for tid, own in stretches.items() if own == earliest]
            sure = [track for track in first if track.in_doubt is None]
            moved = [self._move(track, self._pair(track, until_ns, final=final)) for track in sure]
            if not any(moved) and not self._place_doubtful(first, final=final):
                break
        if final:
            # Nothing tells where the recording goes on: the rest has no kernel.
            for track in self._tracks.values():
                self._settle(track, self._pair(track, until_ns, final=True))
                self._settle(track, track.give_up(len(track.launches)))

    def _move(self, track: Track, outcome: Outcome) -> bool:
        """Settles what was decided; whether there is anything, or more can be."""
        self._settle(track, outcome)
        return len(outcome.launches) + len(outcome.kernels) > 0 or track.is_at_border

    def _place_doubtful(self, tracks: Sequence[Track], *, final: bool) -> bool:
        """Places the surest of the threads in doubt behind a hole by the others; False if none is, or they lag."""
        in_doubt = [track for track in tracks if track.in_doubt is not None]
        if not in_doubt:
            return False
        others = [track for track in self._tracks.values() if track.in_doubt is None]
        until = max(int(track.in_doubt.ids[-1]) for track in in_doubt if track.in_doubt is not None)
        if not all(other.has_passed(until) for other in others):
            return False
        track = min(in_doubt, key=lambda each: each.doubt)
        told = [other for other in others if len(other.landmarks.ids)]
        return self._move(track, track.resume_between(told, final=final))

    def _place_launches(self, *, final: bool) -> None:
        rows, ids = self._translator.launches(final=final)
        self._lanes.grow(self._translator.lane_devices)
        if len(rows) == 0:
            return
        if not self._is_threaded:
            self._track(0).add_launches(rows, ids)
            return
        for tid in np.unique(rows["tid"]).tolist():
            self._track(tid).add_launches(rows[rows["tid"] == tid], ids)

    def _track(self, tid: int) -> Track:
        if tid not in self._tracks:
            self._tracks[tid] = Track(self._lanes, knows_groups=self._knows_groups, may_coalesce=self._collapses)
        return self._tracks[tid]

    def _kernels_known_until(self, *, final: bool) -> int:
        """The launch time before which all kernels have been fed.

        Exports are sorted by start, so a kernel that queued long comes long after its launch. Half as much again as
        the longest queue seen is allowed for.
        """
        if final:
            return _FAR_FUTURE
        if self._newest_start_ns == NO_TIME_NS:
            return NO_TIME_NS
        return self._newest_start_ns - self._longest_queue_ns * 3 // 2 - 1

    def _place_kernels(self, until_ns: int, *, final: bool) -> bool:
        """Hands kernels to their threads once how to pair is chosen; False before."""
        rows = self._take_kernels(until_ns)
        if self._is_timed is None:
            self._first_kernels = np.concatenate([self._first_kernels, rows])
            if not self._choose(final=final):
                return False
            rows, self._first_kernels = self._first_kernels, self._first_kernels[:0]
            self._first_stamps = self._first_stamps[:0]
        rows = self._placed(rows, final=final)
        if len(rows) == 0:
            return True
        known = self._track_kernels(rows)
        if not self._is_threaded:
            self._track(0).add_kernels(known)
            return True
        for tid in np.unique(rows["launch_tid"]).tolist():
            self._track(tid).add_kernels(known[rows["launch_tid"] == tid])
        return True

    def _placed(self, rows: Columns, *, final: bool) -> Columns:
        """Kernels with thread and launch time told where an export lacks the launch call; the rest is held."""
        if len(self._held) == 0 and (rows["launch_start_ns"] != NO_TIME_NS).all() and self._is_timed:
            if len(rows):
                self._placed_until_ns = max(self._placed_until_ns, int(rows["launch_start_ns"].max()))
            return rows
        rows = np.concatenate([self._held, rows])
        rows = rows[np.argsort(rows["correlation_id"], kind="stable")]
        if self._is_timed:
            return self._placed_by_time(rows, final=final)
        if not self._is_threaded:
            return rows
        orphans = np.flatnonzero(rows["launch_tid"] == NO_NUMBER)
        early = orphans[orphans + CONTEXT >= len(rows)]
        amount = len(rows) if final or len(early) == 0 else int(early[0])
        symbols = (self._kernel_lanes.number(rows).astype(np.int64) << 16) | rows["kernel_class"]
        rows["launch_tid"][:amount] = self._threads.recall(symbols, rows["launch_tid"].copy(), amount)
        self._held = rows[amount:]
        return rows[:amount]

    def _placed_by_time(self, rows: Columns, *, final: bool) -> Columns:
        is_orphan = rows["launch_start_ns"] == NO_TIME_NS
        before_ns = np.maximum.accumulate(np.where(is_orphan, self._placed_until_ns, rows["launch_start_ns"]))
        latest_ns = np.minimum.accumulate(_launch_time(rows)[::-1])[::-1]
        pending = None if final else self._translator.first_pending()
        told_until_ns = min(self._stamped_until_ns, pending[1]) if pending else self._stamped_until_ns
        early = np.flatnonzero(is_orphan & (latest_ns >= told_until_ns))
        amount = len(rows) if final or len(early) == 0 else int(early[0])
        self._held, rows = rows[amount:], rows[:amount].copy()
        self._held_since_ns = int(before_ns[amount]) if amount < len(before_ns) else _FAR_FUTURE
        orphans = np.flatnonzero(rows["launch_start_ns"] == NO_TIME_NS)
        if len(orphans):
            self._place_orphans(rows, orphans, int(before_ns[orphans[0]]))
        known = rows["launch_start_ns"][rows["launch_start_ns"] != NO_TIME_NS]
        if len(known):
            self._placed_until_ns = max(self._placed_until_ns, int(known.max()))
        return rows

    def _place_orphans(self, rows: Columns, orphans: NDArray[np.intp], since_ns: int) -> None:
        """Gives orphans the time just after the line that they belong to."""
        if not self._tracks:
            return
        kernels, until_ns = self._track_kernels(rows), int(_launch_time(rows)[orphans].max())
        tids = rows["launch_tid"] if self._is_threaded else np.zeros(len(rows), dtype=np.int64)
        pending = [
            (track.kernels[track.kernels["time_ns"] >= since_ns - _NEAR_NS], tid) for tid, track in self._tracks.items()
        ]
        kernels = np.concatenate([*(own for own, _ in pending), kernels])
        tids = np.concatenate([*(np.full(len(own), tid, dtype=np.int64) for own, tid in pending), tids])
        order = np.argsort(kernels["correlation_id"], kind="stable")
        places = np.argsort(order)[len(kernels) - len(rows) :][orphans]
        launches, continues = self._lines_between(since_ns - _NEAR_NS, until_ns + _NEAR_NS, kernels, tids)
        if len(launches) == 0:
            return
        kernels, tids = kernels[order], tids[order]
        last = int(places[-1]) + _AFTER_ORPHANS
        given = Placing(launches, kernels[:last], tids[:last], self._lanes.fits(launches, kernels[:last]), continues)
        times, threads = place_by_time(given, places)
        found = times != NO_TIME_NS
        rows["launch_start_ns"][orphans[found]] = times[found]
        rows["launch_tid"][orphans[found]] = threads[found]

    def _lines_between(
        self, since_ns: int, until_ns: int, kernels: Columns, tids: NDArray[np.int64]
    ) -> tuple[Columns, NDArray[np.bool_]]:
        """Pending launches of all threads logged between two times, and which are launched with their next one."""
        found: list[Columns] = []
        together: list[NDArray[np.bool_]] = []
        for tid, track in self._tracks.items():
            near, joins = track.launched_together(since_ns, until_ns, kernels[(tids == tid) & ~kernels["is_orphan"]])
            own = near.copy()
            own["tid"] = tid
            found.append(own)
            together.append(joins)
        launches, continues = np.concatenate(found), np.concatenate(together)
        order = np.argsort(launches["logged_at_ns"], kind="stable")
        return launches[order], continues[order]

    def _take_kernels(self, until_ns: int) -> Columns:
        if not self._waiting_kernels:
            return np.empty(0, dtype=ALIGN_KERNEL)
        rows = np.concatenate(self._waiting_kernels)
        is_known = _launch_time(rows) <= until_ns
        self._waiting_kernels = [] if is_known.all() else [rows[~is_known]]
        return rows[is_known]

    def _track_kernels(self, rows: Columns) -> Columns:
        known = np.empty(len(rows), dtype=TRACK_KERNEL)
        known["id"], known["correlation_id"] = rows["id"], rows["correlation_id"]
        known["time_ns"] = _launch_time(rows)
        known["lane"] = self._kernel_lanes.number(rows)
        known["is_orphan"] = rows["launch_start_ns"] == NO_TIME_NS
        known["device"] = rows["device_id"]
        known["duration_ns"] = np.where(rows["censored"], 0, rows["end_ns"] - rows["start_ns"])
        known["kernel_class"], known["data_type"] = rows["kernel_class"], rows["data_type"]
        return known

    def _choose(self, *, final: bool) -> bool:
        """Chooses between time and order, and between threads and the whole process; False if it is too early."""
        if self._operations == 0 and not final:
            return False
        rows = self._first_kernels[np.argsort(self._first_kernels["correlation_id"], kind="stable")][:_FIRST_LOOK]
        if len(rows) < _FIRST_LOOK and not final:
            return False
        rows = _without_orphans(rows)
        tids = set(np.unique(rows["launch_tid"]).tolist())
        is_threaded = len(rows) > 0 and tids <= self._operation_tids
        stamps = self._first_stamps
        has_stamps = _is_stamped(stamps) and bool((rows["launch_start_ns"] != NO_TIME_NS).all())
        waits = not is_threaded or (has_stamps and self._stamped_until_ns < int(rows["launch_start_ns"].max()))
        if waits and not final and self._operations < _ENOUGH_OPERATIONS:
            return False
        is_timed = has_stamps and len(rows) > 0 and _meets(stamps, rows["launch_start_ns"])
        starts_clean: bool | None = True
        if is_threaded and not is_timed:
            starts_clean = self._starts_clean(rows, final=final)
        if starts_clean is None:
            return False
        self._is_timed = is_timed
        if len(rows) and not (is_threaded and starts_clean):
            self._merge_tracks()
        return True

    def _starts_clean(self, rows: Columns, *, final: bool) -> bool | None:
        """Whether each thread's first kernels are just those expected; None if it is too early to say.

        Threads are exact on their own, but where rows are missing the order between threads is worth more.
        """
        known = self._track_kernels(rows)
        enough = final or self._operations >= _ENOUGH_OPERATIONS
        answers = [
            self._track(tid).agrees_with(known[rows["launch_tid"] == tid], collapse=self._collapses, enough=enough)
            for tid in np.unique(rows["launch_tid"]).tolist()
        ]
        if any(answer is None for answer in answers):
            return None
        return all(answers)

    @property
    def _collapses(self) -> bool:
        """Whether Sends and Receives may have been fused without the log telling."""
        return self._translator.rules.counting is not Counting.PER_PLAN and not self._knows_groups

    def _merge_tracks(self) -> None:
        """From now on the process is one thread: kernels are launched by threads that log nothing."""
        self._is_threaded = False
        tracks, self._tracks = self._tracks, {}
        rows = [track.launches for track in tracks.values() if len(track.launches)]
        if not rows:
            return
        offsets = np.cumsum([0, *(len(track.ids) for track in tracks.values() if len(track.launches))])
        for launches, offset in zip(rows, offsets[:-1].tolist(), strict=True):
            launches["begin"] += offset
            launches["end"] += offset
        ids = np.concatenate([track.ids for track in tracks.values() if len(track.launches)])
        merged = np.concatenate(rows)
        self._track(0).add_launches(merged[np.argsort(merged["first_op"], kind="stable")], ids)

    def _pair(self, track: Track, until_ns: int, *, final: bool) -> Outcome:
        pending = None if final else self._translator.first_pending()
        if self._is_timed:
            until = _FAR_FUTURE if final else min(until_ns, self._stamped_until_ns - 1)
            return track.pair_by_time(until_ns=min(until, pending[1] - 1) if pending else until, final=final)
        # One thread's launches come in order, but on merged threads one that is still open may come before others.
        before_op = pending[0] if pending and not self._is_threaded else _FAR_FUTURE
        signatures = self._translator.signatures
        kinds = signatures.rows if len(signatures) else np.empty(0, dtype=ALIGN_OPERATION)
        return track.pair_by_order(
            before_op=before_op,
            collapse=self._collapses,
            kinds=kinds,
            coverage=self._coverage,
            may_ask=len(self._tracks) > 1,
            final=final,
        )

    def _settle(self, track: Track, outcome: Outcome) -> None:
        """Gives out what was matched, and keeps the rest until it is known whether it was captured."""
        del track
        launches = outcome.launches
        if len(launches) == 0:
            return
        matched = outcome.kernel != NO_NUMBER
        first_ops = _first_of_kernel(launches["first_op"], outcome.kernel)
        sizes = launches["end"] - launches["begin"]
        kernel_ids = np.full(len(launches), NO_NUMBER, dtype=np.int64)
        kernel_ids[matched] = outcome.kernels["id"][outcome.kernel[matched]]
        of_launch = np.repeat(matched, sizes)
        self._emit(
            outcome.ids[of_launch],
            np.repeat(kernel_ids, sizes)[of_launch],
            np.repeat(first_ops, sizes)[of_launch],
            Match.MATCHED,
            np.repeat(outcome.confidence, sizes)[of_launch],
        )
        times = np.full(len(launches), NO_TIME_NS, dtype=np.int64)
        times[matched] = outcome.kernels["time_ns"][outcome.kernel[matched]]
        track_key = int(launches["tid"][0]) if self._is_threaded else 0
        self._undecided.add(track_key, outcome, times, sizes)

    def _limit(self, track: Track) -> None:
        if len(track.launches) <= PENDING_LIMIT:
            return
        amount = PENDING_LIMIT // 2
        self._given_up += amount
        self._settle(track, track.give_up(amount))

    def _emit_undecided(self, *, final: bool) -> None:
        ids, launches, matches, confidence = self._undecided.decide(self._coverage, final=final)
        self._emit(ids, NO_NUMBER, launches, matches, confidence)

    def _emit(
        self,
        operations: NDArray[np.int64],
        kernels: NDArray[np.int64] | int,
        launches: NDArray[np.int64] | int,
        match: NDArray[np.uint8] | Match,
        confidence: NDArray[np.float32] | float,
    ) -> None:
        if len(operations) == 0:
            return
        rows = np.empty(len(operations), dtype=MATCH)
        rows["operation"], rows["kernel"], rows["launch"] = operations, kernels, launches
        rows["match"], rows["confidence"] = match, confidence
        self._out.append(rows)


def _without_orphans(rows: Columns) -> Columns:
    """The kernels before the first whose launch call is in no export; or after the last, where those come first."""
    orphans = np.flatnonzero((rows["launch_tid"] == NO_NUMBER) & (rows["launch_start_ns"] == NO_TIME_NS))
    if len(orphans) == 0 or len(orphans) == len(rows):
        return rows
    return rows[: orphans[0]] if orphans[0] >= len(rows) // 2 else rows[orphans[-1] + 1 :]


def _launch_time(rows: Columns) -> NDArray[np.int64]:
    """When each kernel was launched; its start, which is later, where that is not known."""
    times: NDArray[np.int64] = np.where(
        rows["launch_start_ns"] == NO_TIME_NS, rows["start_ns"], rows["launch_start_ns"]
    )
    return times


def _is_stamped(stamps: NDArray[np.int64]) -> bool:
    """Whether nearly every line has a stamp, and a fine one."""
    known = stamps[stamps != NO_TIME_NS]
    return len(known) >= 0.9 * len(stamps) and len(known) > 0 and bool(np.any(known % _FINEST_NS != 0))


def _meets(stamps: NDArray[np.int64], launched: NDArray[np.int64]) -> bool:
    """Whether most launches follow a line within a second: else the stamps are of another zone or clock."""
    known = np.sort(stamps[stamps != NO_TIME_NS])
    before = np.searchsorted(known, launched, side="right") - 1
    near = (before >= 0) & (launched - known[np.maximum(before, 0)] < 1_000_000_000)
    return bool(np.count_nonzero(near) >= 0.5 * len(launched))


def _first_of_kernel(first_ops: NDArray[np.int64], kernel: NDArray[np.int64]) -> NDArray[np.int64]:
    """The launch id: the first operation of all launches that share a kernel, else the launch's own."""
    launch = first_ops.copy()
    matched = np.flatnonzero(kernel != NO_NUMBER)
    _, first, inverse = np.unique(kernel[matched], return_index=True, return_inverse=True)
    launch[matched] = first_ops[matched[first]][inverse]
    return launch

"""Launches paired with kernels by time, if log lines carry stamps and kernels the time of their launch call.

On one thread, calls and launches alternate: an operation is logged, then launched, before the next one is
logged; a group logs all of its operations, then launches. So time cuts each thread into bursts (operations, then
launches), and an operation's kernel can only be in its own burst. Within a burst the kernel of a lane belongs to
the last operation of that lane, and to those before it that form one group with it.

Source: NCCL `src/enqueue.cc:ncclEnqueueCheck` prints before it launches; `src/group.cc:groupLaunch`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns import row_ops
from ncclscope_service.columns.group_by import distinct_together
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER

Positions = NDArray[np.intp]

CALIBRATION: Final = 32
"""Pairs from which the usual delay between line and launch is learnt."""

GROUP_GAP_NS: Final = 100_000
"""Operations of one group are logged within this of each other: only the caller's own code lies between."""

_LONGEST_BURST_NS: Final = 5_000_000
"""Operations logged over a longer time without a launch are not one group: their kernels were not recorded."""

_SILENCE_NS: Final = 1_000_000_000
"""A thread that logs nothing for this long has launched what it logged."""

SPLIT_PRIOR: Final = 0.4
"""That a further kernel right after a group's is the group's: one vote for it decides."""

_LOSSY_SHARE: Final = 0.005
"""From this share of lost lines and of lost kernels on, a late kernel may be another operation's."""


TIMED_LAUNCH: Final = np.dtype(
    [
        ("position", "<i8"),
        ("time_ns", "<i8"),
        ("lane", "<i4"),  # kernel lane
        ("signature", "<i4"),
        ("classes", "<u4"),
        ("data_type", "<i2"),
        ("is_open", "?"),
        ("may_split", "?"),
    ]
)

TIMED_KERNEL: Final = np.dtype(
    [
        ("position", "<i8"),
        ("time_ns", "<i8"),
        ("lane", "<i4"),
        ("kernel_class", "<u1"),
        ("data_type", "<i2"),
    ]
)


@dataclass(frozen=True, slots=True)
class TimedPairs:
    """Decided launches, the kernel of each or NO_NUMBER, and a confidence."""

    kernels: NDArray[np.int64]
    """Kernel position of each launch; several launches may share one; NO_NUMBER: there is none."""
    confidence: NDArray[np.float32]
    launches_used: int
    """How many launches from the front are decided."""
    kernels_used: int
    further: NDArray[np.int64]
    """Positions of kernels that some of these launches took beside their first one."""
    first_of_further: NDArray[np.int64]
    """Position of the first one of the same launch."""


@dataclass(slots=True)
class GroupVotes:
    """How often two neighbouring operations of one lane were launched together, and how often apart.

    A lost kernel makes two launches look like one group; over many iterations the truth wins. Causal: what is
    decided about a pair depends on what came before it, never on how the data were cut.
    """

    _together: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])

    def share(
        self, keys: NDArray[np.int64], together: NDArray[np.bool_], prior: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """The share of votes for "together" up to and with each event; `prior` is the share before any."""
        if len(keys) == 0:
            return np.empty(0, dtype=np.float64)
        order = np.argsort(keys, kind="stable")
        sorted_keys = keys[order]
        starts = np.flatnonzero(np.concatenate([[True], np.diff(sorted_keys) != 0]))
        lengths = np.diff(np.append(starts, len(keys)))
        sums = np.cumsum(together[order].astype(np.int64))
        before = np.repeat(sums[starts] - together[order][starts], lengths)
        yes = sums - before
        seen = np.arange(len(keys)) - np.repeat(starts, lengths) + 1
        carried = [self._together.get(key, (0, 0)) for key in sorted_keys[starts].tolist()]
        carried_yes = np.repeat([c[0] for c in carried], lengths)
        carried_seen = np.repeat([c[1] for c in carried], lengths)
        yes, seen = yes + carried_yes, seen + carried_seen
        for end, key in zip((starts + lengths - 1).tolist(), sorted_keys[starts].tolist(), strict=True):
            self._together[key] = (int(yes[end]), int(seen[end]))
        share = np.empty(len(keys), dtype=np.float64)
        share[order] = (yes + 2.0 * prior[order]) / (seen + 2.0)
        return share

    def count(self, before: NDArray[np.int32], after: NDArray[np.int32], together: NDArray[np.bool_]) -> None:
        """Counts votes on neighbours, by their signatures."""
        pairs, inverse = distinct_together(before, after)
        found = _vote_keys(pairs[0], pairs[1])
        yes, seen = np.bincount(inverse, weights=together), np.bincount(inverse)
        for key, votes, every in zip(found.tolist(), yes.tolist(), seen.tolist(), strict=True):
            carried = self._together.get(key, (0, 0))
            self._together[key] = (carried[0] + int(votes), carried[1] + every)

    def counted(self, keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Votes for "together", and all votes, so far."""
        votes = np.array([self._together.get(key, (0, 0)) for key in keys.tolist()], dtype=np.int64).reshape(-1, 2)
        return votes[:, 0], votes[:, 1]


@dataclass(slots=True)
class TimePairing:
    """Pairs the launches of one thread with its kernels by time."""

    knows_groups: bool = False
    """Groups are known from the log, so that each row is one launch."""
    votes: GroupVotes = field(default_factory=GroupVotes)
    _delays: list[int] = field(default_factory=list[int])
    _splits: GroupVotes = field(default_factory=GroupVotes)
    """How often a launch was followed by further kernels of its lane."""
    _units: int = 0
    _anchors: int = 0
    _kernels: int = 0
    _lost_kernels: int = 0
    _last_of_lane: Columns = field(default_factory=lambda: np.empty(0, dtype=TIMED_LAUNCH))
    """The last launch of each lane that was decided and found its kernel."""

    def pair_bursts(self, launches: Columns, kernels: Columns, *, until_ns: int, final: bool) -> TimedPairs:
        """Decides all bursts that are over: launches (TIMED_LAUNCH) and kernels (TIMED_KERNEL), each by time.

        `until_ns`: all rows of this thread before that time were ingested. A burst is over once the next
        operation of the thread is logged, or a second has passed.
        """
        times = np.concatenate([launches["time_ns"], kernels["time_ns"]])
        is_kernel = np.concatenate([np.zeros(len(launches), dtype=bool), np.ones(len(kernels), dtype=bool)])
        order = np.lexsort((is_kernel, times))
        kernel_first = is_kernel[order]
        begins = np.concatenate([[True], ~kernel_first[1:] & kernel_first[:-1]]) if len(order) else kernel_first
        burst = np.empty(len(order), dtype=np.int64)
        burst[order] = np.cumsum(begins)
        done = np.iinfo(np.int64).max if final else self._open_burst(times, burst, until_ns)
        launch_burst, kernel_burst = burst[: len(launches)], burst[len(launches) :]
        launches_used = int(np.searchsorted(launch_burst, done))
        kernels_used = int(np.searchsorted(kernel_burst, done))
        paired, confidence, further = self._pair(
            launches[:launches_used],
            launch_burst[:launches_used],
            kernels[:kernels_used],
            kernel_burst[:kernels_used],
        )
        return TimedPairs(paired, confidence, launches_used, kernels_used, *further)

    def observe_certain(self, lines: int, launches: int) -> None:
        """Counts lines that others paired, and their launches: nothing was lost among them."""
        self._units += lines
        self._anchors += launches
        self._kernels += launches

    def observe_neighbours(
        self, before: NDArray[np.int32], after: NDArray[np.int32], together: NDArray[np.bool_]
    ) -> None:
        """Counts neighbours, by their signatures, that were seen to be of one launch or not where nothing was lost.

        Those that are to be paired here vote once more: what is seen of a whole capture counts from its begin.
        """
        if not self.knows_groups:
            self.votes.count(before, after, together)

    def joins_next(self, launches: Columns, launched: Columns) -> NDArray[np.bool_]:
        """Which of these launches, in order, are launched together with the next of their lane, by all votes so far.

        `launched`: the kernels of the thread whose launch time is known, in order; their votes count too.
        """
        joins = np.zeros(len(launches), dtype=bool)
        before, after = _neighbours(launches["lane"])
        if len(before) == 0 or self.knows_groups:
            return joins
        gaps = launches["time_ns"][after] - launches["time_ns"][before]
        keys, prior = _keys_and_prior(launches, before, after, gaps)
        # A kernel is known to be missing here, which is the likelier reason for lines without one between.
        prior = np.minimum(prior, np.where(launches["is_open"][before] & launches["is_open"][after], 0.9, 0.3))
        times = launches["time_ns"]
        apart = _launched_between(launches["lane"][before], times[before], times[after], launched)
        # Where nothing follows either, nothing was recorded: that says nothing.
        says = apart | _launched_between(
            launches["lane"][before], times[after], times[after] + _LONGEST_BURST_NS, launched
        )
        yes, seen = self.votes.counted(keys)
        _, inverse = np.unique(keys, return_inverse=True)
        seen = seen + np.bincount(inverse, weights=says)[inverse]
        yes = yes + np.bincount(inverse, weights=says & ~apart)[inverse]
        joins[before] = ((yes + 2.0 * prior) / (seen + 2.0) > 0.5) & ~apart & (gaps <= _LONGEST_BURST_NS)
        return joins

    @staticmethod
    def _open_burst(times: NDArray[np.int64], burst: NDArray[np.int64], until_ns: int) -> int:
        """The number of the first burst that may still grow."""
        if len(burst) == 0:
            return 0
        seen = burst[times <= until_ns]
        if len(seen) == 0:
            return 0
        newest = int(seen.max())
        is_silent = until_ns - int(times[burst == newest].max()) > _SILENCE_NS
        return newest + 1 if is_silent and newest == int(burst.max()) else newest

    def _pair(
        self, launches: Columns, launch_burst: NDArray[np.int64], kernels: Columns, kernel_burst: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32], tuple[NDArray[np.int64], NDArray[np.int64]]]:
        paired = np.full(len(launches), NO_NUMBER, dtype=np.int64)
        confidence = np.full(len(launches), 0.9, dtype=np.float32)
        none = np.empty(0, dtype=np.int64)
        if len(launches) == 0 or len(kernels) == 0:
            self._kernels += len(kernels)
            self._units += len(launches)
            self._lost_kernels += len(launches)
            return paired, confidence, (none, none)
        first = _first_kernel_of_key(launches, launch_burst, kernels, kernel_burst)
        anchor_of = _last_of_kernel(first)
        is_anchor = anchor_of == np.arange(len(launches))
        delay = np.where(is_anchor, kernels["time_ns"][first] - launches["time_ns"], 0)
        doubtful = self._is_doubtful(launches, launch_burst, kernel_burst, delay, is_anchor)
        accepted = is_anchor & ~doubtful
        in_group, share = self._grouped(launches, launch_burst, anchor_of, accepted)
        if self.knows_groups:
            in_group &= False
        chosen = accepted | in_group
        paired[chosen] = kernels["position"][first[chosen]]
        confidence[chosen] = np.where(in_group[chosen], share[chosen], 0.99)
        may_split = launches["may_split"].copy()
        may_split[anchor_of[in_group]] = True
        anchors = np.flatnonzero(accepted & may_split)
        further, of = self._further(launches, anchors, first[anchors], kernels, kernel_burst)
        self._anchors += len(further)
        return paired, confidence, (kernels["position"][further], kernels["position"][of])

    def _further(
        self,
        launches: Columns,
        anchors: Positions,
        first: NDArray[np.int64],
        kernels: Columns,
        kernel_burst: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Kernels that these launches took beside their first ones, and which first one each belongs to.

        One ncclGroupEnd launches all plans of a group, one right after the other: before the thread's next call. Where
        lines get lost, a kernel there may be another operation's: whether it is the launch's is voted on.
        """
        keys = kernel_burst << 20 | kernels["lane"].astype(np.int64) + 1
        order = np.argsort(keys, kind="stable")
        begins, ends = (
            np.searchsorted(keys[order], keys[first]),
            np.searchsorted(keys[order], keys[first], side="right"),
        )
        found: dict[int, NDArray[np.int64]] = {}
        for nth in np.flatnonzero(ends - begins > 1).tolist():
            own, one = order[begins[nth] : ends[nth]], int(first[nth])
            own = own[own > one]
            fits = _agree(np.repeat(launches[anchors[nth] : anchors[nth] + 1], len(own)), kernels, own)
            fits &= np.diff(kernels["time_ns"][np.append(one, own)]) <= GROUP_GAP_NS
            found[nth] = own[np.logical_and.accumulate(fits & ~np.isin(own, first))]
        amounts = np.zeros(len(anchors), dtype=np.int64)
        for nth, own in found.items():
            amounts[nth] = len(own)
        signatures = launches["signature"][anchors].astype(np.int64)
        amounts[self._splits.share(signatures, amounts > 0, np.full(len(signatures), SPLIT_PRIOR)) <= 0.5] = 0
        further = [found[nth][: amounts[nth]] for nth in sorted(found)]
        return np.concatenate([np.empty(0, dtype=np.int64), *further]), np.repeat(first, amounts)

    def _is_doubtful(
        self,
        launches: Columns,
        launch_burst: NDArray[np.int64],
        kernel_burst: NDArray[np.int64],
        delay: NDArray[np.int64],
        is_anchor: NDArray[np.bool_],
    ) -> NDArray[np.bool_]:
        """Whether a pair is later than usual while both lines and kernels get lost, so that it may be two losses."""
        seen = self._units + np.arange(1, len(delay) + 1)
        lost_kernels = self._lost_kernels + np.cumsum(~is_anchor & ~launches["is_open"])
        burst_ends = np.searchsorted(launch_burst, launch_burst, side="right") - 1
        anchors = self._anchors + np.cumsum(is_anchor)
        kernels = self._kernels + np.searchsorted(kernel_burst, launch_burst, side="right")
        lost_lines = kernels - anchors[burst_ends]
        enough = _LOSSY_SHARE * seen + 4
        is_lossy = (lost_kernels > enough) & (lost_lines > enough)
        usual, calibrated_at = self._usual_delay(delay, is_anchor)
        self._units, self._lost_kernels = int(seen[-1]), int(lost_kernels[-1])
        self._anchors, self._kernels = int(anchors[-1]), self._kernels + len(kernel_burst)
        is_late = (delay > 6 * usual + 20_000) & (np.arange(len(delay)) >= calibrated_at)
        doubtful: NDArray[np.bool_] = is_lossy & is_late
        return doubtful

    def _usual_delay(self, delay: NDArray[np.int64], is_anchor: NDArray[np.bool_]) -> tuple[int, int]:
        """The median of the first delays, and the index of the launch from which on it is known."""
        if len(self._delays) >= CALIBRATION:
            return int(np.median(self._delays)), 0
        sample = np.flatnonzero(is_anchor)[: CALIBRATION - len(self._delays)]
        self._delays.extend(delay[sample].tolist())
        if len(self._delays) < CALIBRATION:
            return 0, len(delay)
        return int(np.median(self._delays)), int(sample[-1]) + 1

    def _grouped(
        self,
        launches: Columns,
        launch_burst: NDArray[np.int64],
        anchor_of: NDArray[np.int64],
        accepted: NDArray[np.bool_],
    ) -> tuple[NDArray[np.bool_], NDArray[np.float32]]:
        """Which launches before the anchor of their lane and burst are of one group with it."""
        carried = len(self._last_of_lane)
        launches = row_ops.concat([self._last_of_lane, launches])
        launch_burst = np.concatenate([np.full(carried, -1, dtype=np.int64), launch_burst])
        anchor_of = np.concatenate([np.full(carried, NO_NUMBER, dtype=np.int64), anchor_of + carried])
        accepted = np.concatenate([np.ones(carried, dtype=bool), accepted])
        in_group = np.zeros(len(launches), dtype=bool)
        share = np.zeros(len(launches), dtype=np.float32)
        before, after = _neighbours(launches["lane"])
        together = launch_burst[before] == launch_burst[after]
        is_long = _is_long(launches["time_ns"], launch_burst)[after] & together
        counted = (together & ~is_long) | (~together & accepted[before] & accepted[after])
        gaps = launches["time_ns"][after] - launches["time_ns"][before]
        # Many operations before the first launch: the capture began later. Only what is surely a group is one.
        near = is_long & launches["is_open"][before] & launches["is_open"][after] & (gaps <= GROUP_GAP_NS)
        votes = np.where(near, 0.9, 0.0)
        events = np.flatnonzero(counted)
        events = events[np.argsort(after[events], kind="stable")]
        votes[events] = self._vote(launches, before[events], after[events], together[events])
        joined = together & (votes > 0.5)
        self._spread(in_group, share, (before, after, joined, votes), anchor_of, accepted)
        self._carry(launches, accepted)
        return in_group[carried:], share[carried:]

    def _vote(
        self, launches: Columns, before: Positions, after: Positions, together: NDArray[np.bool_]
    ) -> NDArray[np.float64]:
        gaps = launches["time_ns"][after] - launches["time_ns"][before]
        keys, prior = _keys_and_prior(launches, before, after, gaps)
        return self.votes.share(keys, together, prior)

    def _carry(self, launches: Columns, accepted: NDArray[np.bool_]) -> None:
        """Keeps the last launch of each lane, if it found its kernel, as the next one's neighbour."""
        order = np.argsort(launches["lane"], kind="stable")
        lanes = launches["lane"][order]
        last = order[np.append(lanes[1:] != lanes[:-1], True)] if len(order) else order
        self._last_of_lane = row_ops.take(launches, last[accepted[last]])

    @staticmethod
    def _spread(
        in_group: NDArray[np.bool_],
        share: NDArray[np.float32],
        pairs: tuple[Positions, Positions, NDArray[np.bool_], NDArray[np.float64]],
        anchor_of: NDArray[np.int64],
        accepted: NDArray[np.bool_],
    ) -> None:
        """Walks from each anchor back along its joined neighbours."""
        before, after, joined, votes = pairs
        reached = accepted.copy()
        start, stop = before[joined], after[joined]
        weight = votes[joined]
        while len(start):
            grows = reached[stop] & ~reached[start] & (anchor_of[start] == anchor_of[stop])
            if not grows.any():
                return
            reached[start[grows]] = True
            in_group[start[grows]] = True
            share[start[grows]] = np.minimum(0.99, weight[grows])
            start, stop, weight = start[~grows], stop[~grows], weight[~grows]


def _first_kernel_of_key(
    launches: Columns, launch_burst: NDArray[np.int64], kernels: Columns, kernel_burst: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Index of the first kernel in the burst and lane of each launch that may be its, or NO_NUMBER.

    Kernels that may not be its are passed over only to one right behind them, as one group's are: else the line of
    such a kernel was rather lost, and the next one may be anyone's.
    """
    if len(kernels) == 0:
        return np.full(len(launches), NO_NUMBER, dtype=np.int64)
    kernel_keys = kernel_burst << 20 | kernels["lane"].astype(np.int64) + 1
    order = np.argsort(kernel_keys, kind="stable")
    ordered = np.append(kernel_keys[order], -1)
    keys = launch_burst << 20 | launches["lane"].astype(np.int64) + 1
    places = np.searchsorted(ordered[:-1], keys)
    found = np.full(len(launches), NO_NUMBER, dtype=np.int64)
    left = np.flatnonzero(ordered[places] == keys)
    while len(left):
        tried = order[places[left]]
        fits = _agree(row_ops.take(launches, left), kernels, tried)
        found[left[fits]] = tried[fits]
        left = left[~fits]
        passed = order[places[left]]
        places[left] += 1
        is_there = ordered[places[left]] == keys[left]
        left, passed = left[is_there], passed[is_there]
        left = left[kernels["time_ns"][order[places[left]]] - kernels["time_ns"][passed] <= GROUP_GAP_NS]
    return found


def _agree(launches: Columns, kernels: Columns, chosen: NDArray[np.int64]) -> NDArray[np.bool_]:
    kernel_class = kernels["kernel_class"][chosen].astype(np.uint32)
    data_type = kernels["data_type"][chosen]
    fits: NDArray[np.bool_] = (launches["classes"] >> kernel_class) & 1 == 1
    fits &= (data_type == launches["data_type"]) | (data_type == NO_NUMBER) | (launches["data_type"] == NO_NUMBER)
    return fits


def _last_of_kernel(first: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each launch the index of the last one that has the same first kernel; NO_NUMBER for those without one."""
    anchors = np.full(len(first), NO_NUMBER, dtype=np.int64)
    chosen = np.flatnonzero(first != NO_NUMBER)
    if len(chosen) == 0:
        return anchors
    order = np.argsort(first[chosen], kind="stable")
    ends = np.flatnonzero(np.append(np.diff(first[chosen][order]) != 0, True))
    lengths = np.diff(np.concatenate([[-1], ends]))
    anchors[chosen[order]] = np.repeat(chosen[order[ends]], lengths)
    return anchors


def _is_long(times: NDArray[np.int64], burst: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether the operations of each launch's burst span longer than any group does."""
    starts = np.flatnonzero(np.concatenate([[True], burst[1:] != burst[:-1]]))
    lengths = np.diff(np.append(starts, len(burst)))
    spans = times[starts + lengths - 1] - times[starts]
    return np.repeat(spans > _LONGEST_BURST_NS, lengths)


def _launched_between(
    lanes: NDArray[np.int32], begins_ns: NDArray[np.int64], ends_ns: NDArray[np.int64], launched: Columns
) -> NDArray[np.bool_]:
    """Whether a kernel of each lane, or of any if that is not known, was launched between two times."""
    between = np.zeros(len(lanes), dtype=bool)
    for lane in np.unique(lanes).tolist():
        times = np.sort(launched["time_ns"][(launched["lane"] == lane) | (lane < 0)])
        mine = lanes == lane
        between[mine] = np.searchsorted(times, ends_ns[mine]) > np.searchsorted(times, begins_ns[mine])
    return between


def _keys_and_prior(
    launches: Columns, before: Positions, after: Positions, gaps: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Keys under which votes on two neighbours are counted, and the prior."""
    keys = _vote_keys(launches["signature"][before], launches["signature"][after])
    both_open = launches["is_open"][before] & launches["is_open"][after]
    return keys, np.where(gaps <= GROUP_GAP_NS, np.where(both_open, 0.9, 0.6), 0.1)


def _vote_keys(before: NDArray[np.integer], after: NDArray[np.integer]) -> NDArray[np.int64]:
    keys: NDArray[np.int64] = before.astype(np.int64) << 32 | after
    return keys


def _neighbours(lanes: NDArray[np.int32]) -> tuple[Positions, Positions]:
    """Pairs of launches that follow each other on one lane."""
    order = np.argsort(lanes, kind="stable")
    before, after = order[:-1], order[1:]
    same = lanes[before] == lanes[after]
    return before[same], after[same]

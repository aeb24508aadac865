"""Calls of NCCL's API that a capture holds for one thread, and where they belong among its log lines.

What an outermost NVTX range holds is one *unit*: an ungrouped call, or all calls from the outermost ncclGroupStart to
its ncclGroupEnd, inside which they are launched. Ranges inside a range of an operation (up to 2.22 ncclSend and
ncclRecv open a group of their own) are parts of it.

A thread's lines are the same calls in the same order. A program that repeats fits at many places. Stamps decide
which one is meant, else how far correlation ids (or the time) have moved since calls that were placed before, at the
distance of one period; else the first is taken. From there on each line is of a call, in the same order, and calls
whose line was lost are skipped: the nearest and the farthest call that each line may be of follow from that. Where both
are one it is known; a line that could be of several is left to others, who know more of its kernels.

*Source:* NCCL `src/collectives.cc`, `src/group.cc`: every public function is one range of its thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from ncclscope_service.align.records import COARSE_STAMP_NS
from ncclscope_service.columns import row_ops
from ncclscope_service.store.rows import GROUP_END, GROUP_START
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

CALL: Final = np.dtype(
    [
        ("kind", "<i2"),  # code in terms.OPERATIONS
        ("bytes", "<i8"),
        ("communicator", "<u8"),
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),
        ("unit", "<i8"),  # index into units
    ]
)
UNIT: Final = np.dtype(
    [
        ("launch_from_ns", "<i8"),  # where its launches lie
        ("launch_until_ns", "<i8"),
    ]
)

_FOREVER: Final = 2**62

LINE: Final = np.dtype(
    [
        ("id", "<i8"),
        ("kind", "<i2"),  # code in terms.OPERATIONS
        ("bytes", "<i8"),  # count x size of the call; NO_NUMBER
        ("member", "<i4"),
        ("logged_at_ns", "<i8"),  # NO_TIME_NS
        ("text", "<i4"),  # number of the line's text
        ("is_lost", "?"),  # put in where others of its program have it (lost_calls); its id is that of the next line
        ("unit", "<i8"),  # lines of one unit share it, once they were placed; NO_NUMBER
    ]
)
"""One operation line of a thread."""

_LENGTHS: Final = (1024, 256, 64, 24)
"""Calls that must follow each other in the log as they do in the capture, somewhere: the most that do."""

_TRIES: Final = 16
"""Stretches of a capture that are looked for."""

_LOOKED_AT: Final = 64
"""Places that are tried, the likeliest first."""

_ENOUGH: Final = 0.8
"""Share of the calls that must have a line."""

_LIKENESS: Final = 1024
"""Calls of two captures that are compared to see at which distance they lie."""

_AHEAD: Final = 64
"""Lines and calls that may be missing at one place."""

_AGREE: Final = 8
"""Calls that must agree behind a gap."""

_SURE: Final = 0.3
"""Periods by which a distance may be off from a whole number of them."""

_LOST: Final = 3.0
"""What a lost line tells against a place."""
_CLEAR: Final = 3.0
_SHORTEST: Final = 12
"""Calls that must follow each other where lines were lost."""
_FAR: Final = 2.0
"""Deviations of how many lines were lost between two captures."""

STAMP_NS: Final = 999
"""Stamps are cut to microseconds."""

_IN_TIME: Final = 1.0
"""Share of the lines of a capture's time that must be printed during a call of their kind, for stamps to decide."""

_SOON_NS: Final = 600 * 1_000_000_000
"""Lines older than a capture by less than this have not come that far; older by more, stamps are of another zone."""

_FIRST: Final = 0.95
"""Calls from the first line on, at the first capture of a thread, if they would fit later lines as well."""
_TELLING: Final = 20
"""Calls of a program: a capture that begins anywhere in it fits the first line by chance once in so many times."""

GUESSED: Final = 0.5

_COMPARED_AT_ONCE: Final = 1 << 20
"""Calls, by the places where a pattern may be."""

_NO_PACES: Final = ((0, 0.0), (0, 0.0))

_Integers = NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class ThreadCalls:
    """Calls of one thread in one capture, in order."""

    calls: Columns
    """CALL: operations only."""
    units: Columns
    """UNIT, in order of time; their times do not overlap."""

    def units_at(self, times_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """The unit in which something was launched then; NO_NUMBER if none was open."""
        at = np.searchsorted(self.units["launch_from_ns"], times_ns, side="right") - 1
        inside = (
            (at >= 0) & (times_ns <= self.units["launch_until_ns"][np.maximum(at, 0)]) if len(self.units) else at > 0
        )
        return np.where(inside, at, NO_NUMBER)


def thread_calls(ranges: Columns) -> ThreadCalls:
    """The calls of one thread in one capture, from its ranges (rows.API_CALL) in any order.

    A group whose start was before the capture begins with the capture; a range that was cut lasts forever.
    """
    rows = row_ops.take(ranges, np.lexsort((-_ends(ranges), ranges["start_ns"])))
    rows = row_ops.filter_rows(rows, ~_is_inside_operation(rows))
    kinds, ends = rows["kind"], _ends(rows)
    opens, closes = kinds == GROUP_START, kinds == GROUP_END
    level = np.cumsum(opens.astype(np.int64) - closes)
    depth = level - np.minimum(np.minimum.accumulate(level), 0) if len(rows) else level
    before = np.concatenate([np.zeros(1, np.int64), depth[:-1]]) if len(rows) else depth
    is_operation = ~(opens | closes)
    is_unit = (is_operation & (depth == 0)) | (closes & (before > 0) & (depth == 0))
    closed = np.flatnonzero(closes & (depth == 0))
    if len(closed) and before[closed[0]] == 0:
        is_unit[: closed[0]] = False  # its start was not recorded: all so far is of this group
        is_unit[closed[0]] = True
    calls = np.empty(int(np.count_nonzero(is_operation)), CALL)
    for name in ("kind", "bytes", "communicator", "start_ns"):
        calls[name] = rows[name][is_operation]
    calls["end_ns"] = ends[is_operation]
    calls["unit"] = (np.cumsum(is_unit) - is_unit)[is_operation]
    units = np.full(int(np.count_nonzero(is_unit)) + bool(len(rows) and depth[-1]), _FOREVER, UNIT)
    # The last group may have been open when the capture ended: nothing of it was launched.
    units["launch_from_ns"][: np.count_nonzero(is_unit)] = rows["start_ns"][is_unit]
    units["launch_until_ns"][: np.count_nonzero(is_unit)] = ends[is_unit]
    return ThreadCalls(calls, units)


def joined_calls(parts: Sequence[ThreadCalls]) -> ThreadCalls:
    """The calls of several captures of a thread, one after the other."""
    if len(parts) == 1:
        return parts[0]
    calls = row_ops.concat([part.calls for part in parts])
    offsets = np.cumsum([0, *(len(part.units) for part in parts[:-1])])
    calls["unit"] += np.repeat(offsets, [len(part.calls) for part in parts])
    return ThreadCalls(calls, row_ops.concat([part.units for part in parts]))


def _is_inside_operation(rows: Columns) -> NDArray[np.bool_]:
    """Which ranges, in order of time, begin within one of an operation: ranges of a thread lie in each other."""
    is_operation = (rows["kind"] != GROUP_START) & (rows["kind"] != GROUP_END)
    until = np.maximum.accumulate(np.where(is_operation, _ends(rows), NO_TIME_NS)) if len(rows) else rows["end_ns"]
    inside = np.zeros(len(rows), dtype=bool)
    inside[1:] = rows["start_ns"][1:] < until[:-1]
    return inside


def _ends(ranges: Columns) -> NDArray[np.int64]:
    return np.where(ranges["end_ns"] == NO_TIME_NS, _FOREVER, ranges["end_ns"])


@dataclass(frozen=True, slots=True)
class Place:
    """Lines beside calls, both as indices, increasing."""

    lines: NDArray[np.int64]
    calls: NDArray[np.int64]
    held: range
    """All lines of the capture: those beside no call could be of several."""
    trust: float
    period: int
    """Calls after which the program repeats; 0 if that is not known."""
    paces: tuple[tuple[int, float], ...]
    """As in Placed."""
    is_timed: bool = False
    """The place follows from stamps rather than from order."""


@dataclass(frozen=True, slots=True)
class Placed:
    """The capture before, and where it ended."""

    calls: Columns
    correlation_ids: NDArray[np.int64]
    last_call: int
    last_line: int
    trust: float
    paces: tuple[tuple[int, float], ...] = ((0, 0.0), (0, 0.0))
    """Periods from capture to capture so far, and how far correlation ids, and the time, moved in them."""
    seen: tuple[int, int] = (0, 0)
    """Lines and calls of the captures so far: the fewer lines, the more were lost."""


def find_place(
    lines: Columns,
    begin: int,
    calls: Columns,
    correlation_ids: NDArray[np.int64],
    before: Placed | None,
    *,
    is_first: bool = True,
    begins_with_log: bool = True,
) -> Place | None:
    """Places calls (CALL) among lines (LINE) from `begin` on; None if they fit nowhere.

    `correlation_ids` are those of the calls' launches, NO_NUMBER if they have none. `is_first`: no capture came before.
    `begins_with_log`: the first capture began before anything was launched.
    """
    progress = None if before is None else _progress(before, calls, correlation_ids)
    if _is_behind(lines[begin:], int(calls["start_ns"][0])):
        return None
    timed = _by_time(lines, begin, calls)
    if timed is not None:
        paces = progress.paces if progress is not None else _NO_PACES
        held = range(int(timed[0][:1].sum()), int(timed[0][-1:].sum()) + min(len(timed[0]), 1))
        period = progress.period if progress is not None else period_of(calls)
        return Place(*timed, held, 1.0, period, paces, is_timed=True)
    expected, deviation = None, 0.0
    if before is not None and progress is not None:
        amount, (lines_seen, calls_seen) = max(progress.calls, 0), before.seen
        left = min(1.0, (lines_seen + 1) / (calls_seen + 1))
        expected = before.last_line + progress.calls - round((1 - left) * amount)
        deviation = (left * (1 - left) * amount * (1 + amount / (calls_seen + 1))) ** 0.5
    starts = _starts(lines, begin, calls, expected, is_lossy=deviation > 0)
    best: tuple[int, int, _Walked] | None = None
    rivals, is_clear = 0, True
    if expected is not None and deviation > 0:
        best, is_clear, starts = *_likeliest(lines, begin, calls, starts, expected, deviation), []
    for start, line, call in starts:
        walked = _walk_from(lines[begin:], calls, line - begin, call)
        score = int(np.count_nonzero(walked.calls >= 0))
        is_enough = score >= _ENOUGH * len(calls)
        rivals += is_enough
        if is_enough and (expected is not None or start == begin == 0 or lines["logged_at_ns"][line] != NO_TIME_NS):
            best = (score, start, walked)
            break
        if best is None or score > best[0]:
            best = (score, start, walked)
    if best is None:
        return None
    period = progress.period if progress is not None else period_of(calls)
    _, start, walked = best
    first = begin + walked.first
    is_stamped = bool((lines["logged_at_ns"][first : first + 1] != NO_TIME_NS).any())
    if is_stamped:
        trust = 1.0
    elif before is None:
        begins_log = begin == start == first == 0 and walked.calls[:1].tolist() == [0]
        # A capture that begins anywhere begins where so short a program does as likely as not.
        begins_log &= begins_with_log or not 0 < period < _TELLING
        trust = GUESSED if not is_first else 1.0 if len(starts) == 1 else _FIRST if begins_log else GUESSED
    elif progress is None or expected is None:
        trust = before.trust if rivals == 1 and len(starts) < _LOOKED_AT else GUESSED
    else:
        away = abs(start - expected) + _FAR * deviation
        is_sure = is_clear and progress.error < _SURE and away < max(period / 2, 1)
        trust = before.trust if is_sure else GUESSED
    sure = np.flatnonzero(walked.is_sure)
    held = range(first, first + len(walked.calls))
    return Place(
        first + sure, walked.calls[sure], held, trust, period, progress.paces if progress is not None else _NO_PACES
    )


def _likeliest(
    lines: Columns, begin: int, calls: Columns, starts: list[tuple[int, int, int]], expected: int, deviation: float
) -> tuple[tuple[int, int, _Walked] | None, bool]:
    """The likeliest of these places (`_starts`), with its lines, and whether no other is nearly as likely.

    It is near the expected one, and few lines were lost there.
    """
    found: dict[int, tuple[float, int, int, _Walked]] = {}
    for start, line, call in starts:
        walked = _walk_from(lines[begin:], calls, line - begin, call)
        known = np.flatnonzero(walked.calls >= 0)
        if len(known) < _ENOUGH * len(calls):
            continue
        cost = _LOST * (len(calls) - len(known)) + 0.5 * ((start - expected) / (1 + deviation)) ** 2
        place = walked.first + int(known[0]) - int(walked.calls[known[0]])
        if place not in found or cost < found[place][0]:
            found[place] = cost, len(known), start, walked
    if not found:
        return None, False
    best, *others = sorted(found.values(), key=lambda each: each[0])
    return best[1:], all(other[0] >= best[0] + _CLEAR for other in others)


def _is_behind(lines: Columns, start_ns: int) -> bool:
    """Whether lines have not come as far as a capture, by stamps that are fine enough."""
    stamps = lines["logged_at_ns"][-_AHEAD:]
    if len(stamps) == 0 or (stamps == NO_TIME_NS).any() or not (stamps % COARSE_STAMP_NS).any():
        return False
    return 0 < start_ns - int(stamps[-1]) < _SOON_NS


def _by_time(lines: Columns, begin: int, calls: Columns) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Each line beside the call during which it was printed; None if stamps are too coarse or of another clock.

    So a line lost among equal ones costs only itself. A call that the end of the capture cut has none: it launched
    nothing in it, and when it was over is not known.
    """
    calls = row_ops.filter_rows(calls, calls["end_ns"] != _FOREVER)
    if not len(calls):
        return None
    stamps = lines["logged_at_ns"][begin:]
    at = np.searchsorted(calls["start_ns"], stamps + STAMP_NS, side="right") - 1
    within = np.flatnonzero((stamps != NO_TIME_NS) & (at >= 0) & (stamps <= int(calls["end_ns"][-1])))
    held = at[within]
    fits = (stamps[within] <= calls["end_ns"][held]) & _same(lines[begin + within], calls[held])
    is_first = np.concatenate([[True], held[1:] > np.maximum.accumulate(held)[:-1]]) if len(held) else fits
    fits &= is_first
    if np.count_nonzero(fits) < _IN_TIME * max(len(within), 1):
        return None
    return begin + within[fits], held[fits]


def _starts(
    lines: Columns, begin: int, calls: Columns, expected: int | None, *, is_lossy: bool
) -> list[tuple[int, int, int]]:
    """Where the calls may begin, the likeliest first: the line of the first call, and a line and call that agree."""
    found: dict[int, tuple[int, int]] = {}
    lengths = (*_LENGTHS, _SHORTEST) if is_lossy else _LENGTHS
    for length in sorted({min(length, len(calls)) for length in lengths}, reverse=True):
        for call in range(0, min(len(calls) - length + 1, _TRIES * length), max(length, 1)):
            for line in (_occurrences(lines[begin:], calls[call : call + length]) + begin).tolist():
                if line - call >= begin - _AHEAD:
                    found.setdefault(line - call, (line, call))
        if expected is None and found:
            break
        if not is_lossy and any(abs(start - expected) <= _AHEAD for start in found if expected is not None):
            break
    if expected is None and begin == 0 and len(lines) and len(calls):
        found.setdefault(0, (0, 0))
    starts = [(start, *at) for start, at in found.items()]
    if expected is not None:
        starts.sort(key=lambda each: (abs(each[0] - expected), each[0]))
    else:
        starts.sort()
    stamps = lines["logged_at_ns"]
    if starts and all(stamps[line] != NO_TIME_NS for _, line, _ in starts):
        starts.sort(key=lambda each: abs(int(stamps[each[1]]) - int(calls["start_ns"][each[2]])))
    return starts[:_LOOKED_AT]


def _occurrences(lines: Columns, pattern: Columns) -> NDArray[np.int64]:
    """Where the pattern occurs. What its first calls leave is compared with the rest in one go: few, but long."""
    own, wanted = _kinds_and_bytes(lines), _kinds_and_bytes(pattern)
    places = np.arange(max(0, len(lines) - len(pattern) + 1), dtype=np.int64)
    for at in range(len(pattern)):
        if len(places) == 0:
            break
        if at >= _AGREE and len(places) * (len(pattern) - at) <= _COMPARED_AT_ONCE:
            kinds, sizes = (sliding_window_view(column, len(pattern))[places, at:] for column in own)
            return places[_equal(kinds, sizes, wanted[0][at:], wanted[1][at:]).all(axis=1)]
        there = places + at
        places = places[_equal(own[0][there], own[1][there], wanted[0][at], wanted[1][at])]
    return places


def _kinds_and_bytes(lines: Columns) -> tuple[_Integers, _Integers]:
    return np.ascontiguousarray(lines["kind"]), np.ascontiguousarray(lines["bytes"])


def _same(lines: Columns, calls: Columns) -> NDArray[np.bool_]:
    return _equal(lines["kind"], lines["bytes"], calls["kind"], calls["bytes"])


def _equal(
    kinds: _Integers, sizes: _Integers, other_kinds: _Integers | np.integer, other_sizes: _Integers | np.integer
) -> NDArray[np.bool_]:
    same: NDArray[np.bool_] = kinds == other_kinds
    if (other_sizes != NO_NUMBER).any():
        same &= (sizes == NO_NUMBER) | (other_sizes == NO_NUMBER) | (sizes == other_sizes)
    return same


@dataclass(frozen=True, slots=True)
class _Progress:
    calls: int
    """How many calls after the last one of the capture before the first of this one is."""
    period: int
    error: float
    """How far the distance is from a whole number of periods, in periods."""
    paces: tuple[tuple[int, float], ...]
    """As in Placed."""


def period_of(calls: Columns) -> int:
    """Calls after which all of them repeat; 0 if they do not."""
    kinds, sizes = _kinds_and_bytes(calls)
    for lag in _occurrences(calls, calls[: min(_AGREE, len(calls))])[1:].tolist():
        if 2 * lag > 3 * (len(calls) - lag):
            break
        if _equal(kinds[lag:], sizes[lag:], kinds[:-lag], sizes[:-lag]).all():
            return int(lag)
    return 0


def _progress(before: Placed, calls: Columns, correlation_ids: NDArray[np.int64]) -> _Progress | None:
    """How the program went on, from how far correlation ids (if these stand, the time) moved in whole periods."""
    sides = ((calls, correlation_ids), (before.calls, before.correlation_ids))
    period, side = next(((found, side) for side in sides if (found := period_of(side[0]))), (0, sides[0]))
    meeting = _meeting(before.calls, calls)
    if period == 0 or meeting is None:
        return None
    old, new = meeting
    likely: list[tuple[float, int]] = []
    moved: list[float] = []
    for (known_periods, known), steps_of, was, now in (
        (before.paces[0], side[1], before.correlation_ids[old:], correlation_ids[new:]),
        (before.paces[1], side[0]["start_ns"], before.calls["start_ns"][old:], calls["start_ns"][new:]),
    ):
        moved.append(0.0)
        later, earlier = steps_of[period:], steps_of[:-period]
        steps = (later - earlier)[(later >= 0) & (earlier >= 0)]
        amount = min(len(was), len(now))
        both = np.flatnonzero((was[:amount] >= 0) & (now[:amount] >= 0))
        if len(steps) == 0 or len(both) == 0:
            continue
        seen = len(steps_of) / period
        pace = (float(np.mean(steps)) * seen + known) / (seen + known_periods)
        moved[-1] = float(now[both[0]] - was[both[0]])
        if moved[-1] > 0 and pace > 0:
            exactly = moved[-1] / pace
            likely.append((abs(exactly - round(exactly)), round(exactly)))
    if not likely:
        return None
    error, periods = min(likely)
    if len({each for _, each in likely}) > 1:
        error = 1.0 - error  # correlation ids and time do not agree
    return _Progress(
        calls=periods * period - new - (before.last_call - old),
        period=period,
        error=error,
        paces=tuple(
            (count + periods, known + distance) if distance > 0 else (count, known)
            for (count, known), distance in zip(before.paces, moved, strict=True)
        ),
    )


def _meeting(before: Columns, calls: Columns) -> tuple[int, int] | None:
    """A call of each side from which on both look alike for as long as the shorter lasts."""
    for length in (_LIKENESS, _AHEAD, _AGREE):
        for old_first in (True, False):
            pattern, among = (before, calls) if old_first else (calls, before)
            if len(pattern) < min(length, len(among)):
                continue
            for at in _occurrences(among, pattern[: min(length, len(pattern), len(among))]).tolist():
                amount = min(len(pattern), len(among) - at)
                if _same(among[at : at + amount], pattern[:amount]).all():
                    return (0, at) if old_first else (at, 0)
    return None


@dataclass(frozen=True, slots=True)
class _Walked:
    """Lines that follow each other, with the call that each may be of; NO_NUMBER where its range is missing."""

    first: int
    """Line of the first."""
    calls: NDArray[np.int64]
    is_sure: NDArray[np.bool_]
    """It can be of no other call."""


def _walk_from(lines: Columns, calls: Columns, line: int, call: int) -> _Walked:
    """Calls of the lines around one that is of this call."""
    ahead, sure_ahead = _walk(lines[line:], calls[call:])
    behind, sure_behind = _walk(lines[:line][::-1], calls[:call][::-1])
    return _Walked(
        line - len(behind),
        np.concatenate(
            [np.where(behind < 0, behind, call - 1 - behind)[::-1], np.where(ahead < 0, ahead, call + ahead)]
        ),
        np.concatenate([sure_behind[::-1], sure_ahead]),
    )


def _walk(lines: Columns, calls: Columns) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The nearest call that each of the first lines may be of, all in their order, and whether it is the farthest too.

    Of a run of equal calls that lost a line, all that the lost one may have been before or behind are not sure.
    """
    nearest = _embedded(lines, calls)
    amount = len(nearest)
    # Lines that end far before the calls say nothing of the rest.
    last = int(nearest.max(initial=NO_NUMBER))
    end = len(calls) if amount < len(lines) or len(calls) - last <= _AGREE else last + 1
    farthest = end - 1 - _embedded(lines[:amount][::-1], calls[:end][::-1])[::-1]
    is_sure = np.zeros(amount, np.bool_)
    is_sure[amount - len(farthest) :] = nearest[amount - len(farthest) :] == farthest
    is_sure &= nearest >= 0
    return nearest, is_sure


def _embedded(lines: Columns, calls: Columns) -> NDArray[np.int64]:
    """The first call like each line behind that of the line before; ends where none is near.

    NO_NUMBER: a line whose range is missing, as the lines behind it go on with the calls.
    """
    found: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
    line = call = gaps = 0
    while line < len(lines) and call < len(calls):
        amount = min(len(lines) - line, len(calls) - call)
        same = _same(lines[line : line + amount], calls[call : call + amount])
        run = amount if same.all() else int((~same).argmax())
        found.append(np.arange(call, call + run))
        line, call = line + run, call + run
        if run == amount:
            break
        gaps += 1
        if gaps > _AGREE + line // _AGREE:
            break
        like = np.flatnonzero(_same(lines[line : line + 1], calls[call : call + _AHEAD]))
        behind, there = lines[line + 1 : line + 1 + _AGREE], calls[call : call + _AGREE]
        if len(behind) == len(there) and (not len(like) or like[0] > _AGREE) and _same(behind, there).all():
            found.append(np.array([NO_NUMBER]))
            line += 1
        elif len(like):
            call += int(like[0])
        else:
            break
    return np.concatenate(found)

"""How many calls of a communicator lost their line before a call, by the program of its process.

Every line is one place of a program that repeats itself (`align.lost_calls`), and the places between two lines lost
theirs. So a count of lines becomes a number of calls, once a program is learnt from the first few hundred lines. Of a
Send or Recv what was lost before that is not counted if lines of its way were numbered: then kernels have shown it.

Where many are missing in a row, the other processes of the job tell more. If most of them left out calls at the same
time, those were not made (an evaluation). Else whole steps may be among the lost ones: none makes more steps than
another for long, so as many as they made meanwhile were made here. Those of the same host are asked, whose clock is the
same; where it has no other, all.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.align.lost_calls import Filled, LostCalls
from ncclscope_service.columns import row_ops
from ncclscope_service.columns.group_by import distinct, distinct_together, group_by
from ncclscope_service.nccl.launch_rules import SENDS_AND_RECVS
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.records import SourceKind
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

_LINE: Final = np.dtype([("id", "<i8"), ("member", "<i4"), ("text", "<i4"), ("way", "<i8"), ("at_ns", "<i8")])
COLLECTIVE: Final = NO_NUMBER
"""The way of collectives; of a Send or Recv it says the operation and the peer."""
_LEAST: Final = 2
_BURST: Final = 4
"""Missing lines in a row, from which on other processes are asked; fewer, down to the least, where so many are hardly
lost one by one.
"""
_OF_STEP: Final = 0.9
"""... or any within a pause of so much of a step. A pause alone shows nothing: a job may stand still."""
_PARTS: Final = 8
"""Of a step, after which it is noted when it was."""
_REMEMBERED: Final = 1024
_ASKED: Final = 64
"""Processes of a job by which the steps of another one are counted: after a pause of all, each has to be told."""
_BURSTS: Final = 256
_HOUR_NS: Final = 3_600_000_000_000
_WHOLE: Final = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class _Burst:
    """Where many lines in a row may have been lost."""

    following: int
    """The line behind them."""
    since_ns: int
    """When the line before them was logged, or came."""
    until_ns: int
    """... and that behind them."""
    lost: Columns
    """The calls (`_LINE`) that the program has there."""


@dataclass(slots=True)
class _Lines:
    """Lines of one process."""

    calls: LostCalls = field(default_factory=lambda: LostCalls(("text",)))
    waiting: Columns = field(default_factory=lambda: np.empty(0, _LINE))
    came_ns: int = 0
    """When the last of its lines came."""
    is_over: bool = False
    """Whether none came for long, or none will."""
    is_stamped: bool = False
    """Whether they say when they were logged: when they came tells of no pause between them."""
    bursts: list[_Burst] = field(default_factory=list[_Burst])
    """Of which it is not known yet whether their calls were made, and how many steps more."""
    _bursts_ns: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_BURSTS))
    """When the last ones began and ended."""
    _made: float = 0.0
    """Steps so far, from any place on."""
    _last_ns: int = NO_TIME_NS
    _at_ns: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """When it had made `_steps`."""
    _steps: NDArray[np.float64] = field(default_factory=lambda: np.empty(0, np.float64))

    def fill(self) -> tuple[Columns, NDArray[np.int64]]:
        """Looks at the waiting lines that are known by now; gives calls that were lost one by one among them, and the
        ids of the lines behind these.
        """
        filled = self.calls.fill(self.waiting, final=self.is_over)
        self.waiting = self.waiting[filled.amount :]
        following = filled.rows["id"][filled.following]
        lost = filled.rows[filled.is_lost]
        if self.calls.step and filled.amount:
            is_alone = ~np.isin(following, self._note(filled))
            lost, following = row_ops.filter_rows(lost, is_alone), following[is_alone]
        if filled.missed:
            last = filled.rows["id"][~filled.is_lost][-1]
            lost = row_ops.concat([lost, *filled.missed])
            following = np.append(following, np.full(len(filled.missed), last))
        return lost, following

    def _note(self, filled: Filled) -> list[int]:
        """Gives the lines that are behind a burst."""
        lines = np.flatnonzero(~filled.is_lost)
        at_ns = filled.rows["at_ns"][lines]
        amounts = np.diff(lines, prepend=-1) - 1
        before_ns = np.append(self._last_ns, at_ns[:-1])
        paused = at_ns - before_ns > _OF_STEP * self._step_ns()
        is_burst = (amounts >= max(_LEAST, min(_BURST, self.calls.many))) | (self.is_stamped & paused & (amounts > 0))
        behind: list[int] = []
        for nth in np.flatnonzero(is_burst & (before_ns != NO_TIME_NS)).tolist():
            behind.append(int(filled.rows["id"][lines[nth]]))
            lost = filled.rows[lines[nth] - amounts[nth] : lines[nth]]
            self.bursts.append(_Burst(behind[-1], int(before_ns[nth]), int(at_ns[nth]), lost))
            self._bursts_ns.append((int(before_ns[nth]), int(at_ns[nth])))
        steps = self._made + (lines + 1) / self.calls.step
        is_noted = np.append(np.diff(np.floor(_PARTS * steps)) != 0, True)
        self._made, self._last_ns = float(steps[-1]), int(at_ns[-1])
        self._at_ns = np.append(self._at_ns, np.maximum.accumulate(at_ns)[is_noted])[-_REMEMBERED:]
        self._steps = np.append(self._steps, steps[is_noted])[-_REMEMBERED:]
        return behind

    def _step_ns(self) -> float:
        """How long a step usually takes; infinite if that is not known."""
        steps = float(self._steps[-1] - self._steps[0]) if len(self._steps) else 0.0
        return float(self._at_ns[-1] - self._at_ns[0]) / steps if steps > 1 else np.inf

    def steps_made(self, since_ns: int, until_ns: int) -> float | None:
        """How many steps it made from before one time up to another; None if that is not known."""
        begin = int(np.searchsorted(self._at_ns, since_ns)) - 1
        end = int(np.searchsorted(self._at_ns, until_ns, side="right")) - 1
        if begin < 0 or self._at_ns[-1] < until_ns or (self.waiting["at_ns"][:1] <= until_ns).any():
            return None
        return float(self._steps[end] - self._steps[begin])

    def has_burst_beside(self, other: _Burst) -> bool:
        """Whether it has one at the same time as another process, within half a step."""
        near_ns = min(self._step_ns() / 2, _HOUR_NS)
        return any(
            since_ns - near_ns <= other.until_ns and other.since_ns <= until_ns + near_ns
            for since_ns, until_ns in self._bursts_ns
        )

    def add_steps(self, burst: _Burst, steps: float) -> None:
        """It made so many more in a burst."""
        self._made += steps
        self._steps[self._at_ns >= burst.until_ns] += steps


class LineLosses:
    """Lost lines of one store."""

    def __init__(self, known: Store, *, settle_ns: int) -> None:
        """`settle_ns`: after so long without a line, those that would tell more of the last ones are not waited for."""
        self._store = known
        self._settle_ns = settle_ns
        self._processes: defaultdict[int, _Lines] = defaultdict(_Lines)
        self._known: set[int] = set()
        """Processes that were forgotten and had a program."""
        self._lost: dict[tuple[int, int], NDArray[np.int64]] = {}
        """By member and way: ids of the lines behind lost ones, ascending, of those in memory."""
        self._gone = Counter[tuple[int, int]]()
        """By member and way: how many more there were."""
        self._numbered: dict[tuple[int, int], int] = {}
        """By member and way: the last line that was numbered."""
        self._next = 0

    def process_lines(self, has_ended: Callable[[int], bool], now_ns: int) -> None:
        """Looks at the lines that came since the last time. `has_ended`: whether a process will log nothing more."""
        self._forget_ended(has_ended)
        table = self._store.operations
        ids = np.arange(max(self._next, table.first), table.next_id)
        self._next = table.next_id
        rows = table.take(ids, "process", "template", "member", "source", "line", "logged_at_ns")
        found, of = distinct(rows["source"])
        is_log = np.asarray([self._is_log(source) for source in found.tolist()], np.bool_)[of]
        logged = np.flatnonzero((rows["line"] != NO_NUMBER) & is_log)
        ids, rows = ids[logged], row_ops.take(rows, logged)
        lines = np.empty(len(ids), _LINE)
        lines["id"], lines["member"], lines["text"] = ids, rows["member"], rows["template"]
        lines["way"] = way_of(self._store.templates_of(rows, "op", "root"))
        lines["at_ns"] = np.where(rows["logged_at_ns"] == NO_TIME_NS, now_ns, rows["logged_at_ns"])
        for process, mine in group_by(rows["process"]):
            own = self._processes[process]
            own.waiting = row_ops.concat([own.waiting, row_ops.take(lines, mine)])
            own.came_ns = now_ns
            own.is_stamped = bool((rows["logged_at_ns"][mine] != NO_TIME_NS).all())
        for process, own in self._processes.items():
            own.is_over = has_ended(process) or now_ns - own.came_ns > self._settle_ns
            if len(own.waiting):
                lost, following = own.fill()
                if len(lost):
                    self._count(lost, following)
        with_bursts = {process: own for process, own in self._processes.items() if own.bursts}
        asked = self._with_programs() if with_bursts else {}
        for process, own in with_bursts.items():
            job, host = self._store.process_job[process], self._store.processes[process].host
            near, all_of_job = ([each for each in asked.get((job, on), []) if each is not own] for on in (host, None))
            self._count_steps(own, (near or all_of_job)[:_ASKED])

    def _is_log(self, source: int) -> bool:
        """Whether lines of a source may be lost: those of logs; calls of an export or a trace are all there."""
        return source != NO_NUMBER and self._store.sources[source].source.kind is SourceKind.NCCL_LOG

    def _forget_ended(self, has_ended: Callable[[int], bool]) -> None:
        """Forgets the processes of jobs of which all have ended, but for whether they had a program."""
        goes_on = {
            self._store.process_job[process]
            for process, own in self._processes.items()
            if len(own.waiting) or own.bursts or not has_ended(process)
        }
        for process in [of for of in self._processes if self._store.process_job[of] not in goes_on]:
            if self._processes.pop(process).calls.step:
                self._known.add(process)

    def evict(self, processes: Set[int]) -> None:
        """Forgets these processes, which are gone."""
        for process in processes:
            self._processes.pop(process, None)
        self._known -= processes
        of = self._store.members
        for key in [each for each in {*self._lost, *self._numbered} if of[each[0]].process in processes]:
            self._lost.pop(key, None)
            self._numbered.pop(key, None)
            self._gone.pop(key, None)

    def _with_programs(self) -> dict[tuple[str, str | None], list[_Lines]]:
        """By job and host (None: any) the first processes whose program is known, one more than are asked."""
        found: defaultdict[tuple[str, str | None], list[_Lines]] = defaultdict(list[_Lines])
        for process, own in self._processes.items():
            if not own.calls.step:
                continue
            for host in (self._store.processes[process].host, None):
                known = found[self._store.process_job[process], host]
                if len(known) <= _ASKED:
                    known.append(own)
        return found

    def _count_steps(self, own: _Lines, others: Sequence[_Lines]) -> None:
        """Counts the calls of bursts, and the whole steps that these hold, as soon as most other processes have come as
        far. Calls that most others leave out at the same time were not made.
        """
        while own.bursts:
            burst = own.bursts[0]
            made = [each.steps_made(burst.since_ns, burst.until_ns) for each in others]
            known = [each for each in made if each is not None]
            mine = own.steps_made(burst.since_ns, burst.until_ns)
            awaited = sum(steps is None and not each.is_over for each, steps in zip(others, made, strict=True))
            if (2 * awaited > len(others) or mine is None) and not own.is_over:
                return
            del own.bursts[0]
            if not own.calls.step:  # given up meanwhile
                self._count(burst.lost, np.full(len(burst.lost), burst.following))
                continue
            beside = sum(each.has_burst_beside(burst) for each in others)
            if others and 2 * beside >= len(others):
                own.add_steps(burst, -len(burst.lost) / own.calls.step)
                continue
            steps = round(float(np.median(known)) - mine) if known and mine is not None else 0
            own.add_steps(burst, max(steps, 0))
            lost = row_ops.concat([burst.lost, *([own.calls.program_rows()] * steps)])
            self._count(lost, np.full(len(lost), burst.following))

    def are_counted(self, process: int) -> bool:
        """Whether the program of a process is known, so that all of its lost lines are counted."""
        own = self._processes.get(process)
        return process in self._known if own is None else own.calls.step > 0

    def known_until(self, members: NDArray[np.int32]) -> NDArray[np.int64]:
        """For each of these members the first line before which others may prove to be lost; if all is known, a larger
        one than any.
        """
        until = np.full(len(members), _WHOLE)
        for member, mine in group_by(members):
            own = self._processes.get(self._store.members[member].process)
            if own is not None and own.calls.step:
                waiting = [*own.waiting["id"][:1].tolist(), *(each.following for each in own.bursts[:1])]
                until[mine] = min(waiting, default=_WHOLE)
        return until

    def _count(self, lost: Columns, following: NDArray[np.int64]) -> None:
        (members, ways), of = distinct_together(lost["member"], lost["way"])
        for nth, mine in group_by(of):
            key = int(members[nth]), int(ways[nth])
            new = following[mine]
            if key[1] != COLLECTIVE:
                new = new[new > self._numbered.get(key, NO_NUMBER)]
            own = np.sort(np.concatenate([self._lost.get(key, new[:0]), new]))
            gone = int(np.searchsorted(own, self._store.operations.first))
            self._gone[key] += gone
            self._lost[key] = own[gone:]

    def before(self, ids: NDArray[np.int64], members: NDArray[np.int32], ways: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many calls of its member and way lost their line before each of these operations, as far as is known."""
        found = np.zeros(len(ids), np.int64)
        (own, own_ways), of = distinct_together(members, ways)
        for nth, mine in group_by(of):
            key = int(own[nth]), int(own_ways[nth])
            if key[1] != COLLECTIVE:
                self._numbered[key] = max(self._numbered.get(key, NO_NUMBER), int(ids[mine].max()))
            if key in self._lost:
                found[mine] = self._gone[key] + np.searchsorted(self._lost[key], ids[mine], side="right")
        return found


def way_of(templates: Columns) -> NDArray[np.int64]:
    """The way (op, root) of each of these templates; `COLLECTIVE`."""
    is_pair = np.isin(templates["op"], list(SENDS_AND_RECVS))
    way = templates["root"].astype(np.int64) << 8 | templates["op"]
    return np.where(is_pair, way, COLLECTIVE)

"""Whether the agent keeps to its budget of processor and memory, and what it does about it: slow down, then stop.

The processor's budget is a share of one core over a named time. It is kept as credit: full at the start, it grows
with time and shrinks with use, so that an agent may catch up quickly and must rest when the credit is used up. Who
rests as long as `Budget` says never owes more than one look; an agent that owes a whole budget all the same does not
do what it should, and stops itself.

    WITHIN ──credit used up, memory over──▶ SLOWED ──owes a budget, memory over for long──▶ SPENT
       ◀──a quarter is back, memory under──

Precedent: the token bucket of CFS bandwidth control (Linux, Documentation/scheduler/sched-bwc.rst), which would stop
the agent in the middle of anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

_NS: Final = 1_000_000_000
_LONGEST_REST_NS: Final = 5 * _NS
"""Longest rest at a time: an agent that must rest for longer asks again after it."""
_BACK_SHARE: Final = 0.25
"""Of the budget must be back before the agent works as it did: else many changes would be reported."""
_MEMORY_PATIENCE_NS: Final = 10 * _NS
"""Memory over the budget for so long does not go by itself: one export, or one burst, takes less."""


class BudgetState(Enum):
    """How the agent stands; see the module."""

    WITHIN = auto()
    SLOWED = auto()
    SPENT = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetLimits:
    """Limits of what the agent may use."""

    cpu_share: float
    """Of one core: 0.25 is a quarter. 0: no limit."""
    seconds: float
    """The time over which that is meant."""
    memory_bytes: int
    """Resident memory. 0: no limit."""


class Budget:
    """The processor time and memory that one agent has used, and what follows from them.

    It counts from the start at `now_ns`, when the processor time was `cpu_ns`. `now_ns` is of a clock that never goes
    back; processor time is of user and system, of all threads.
    """

    def __init__(self, limits: BudgetLimits, *, now_ns: int, cpu_ns: int) -> None:
        self._limits = limits
        self._full_ns = limits.cpu_share * limits.seconds * _NS
        self._credit_ns = self._full_ns
        self._now_ns = now_ns
        self._cpu_ns = cpu_ns
        self._memory_over_since_ns: int | None = None
        self.state = BudgetState.WITHIN
        self.reason = ""
        """Why it is not within its budget: a sentence without a full stop."""

    @property
    def credit_ns(self) -> float:
        """Processor time that may be used at once; below 0 if it was overdrawn."""
        return self._credit_ns

    @property
    def rest_ns(self) -> int:
        """How long to do nothing now, so that the share is kept."""
        if not self._limits.cpu_share or self._credit_ns >= 0:
            return 0
        return int(min(-self._credit_ns / self._limits.cpu_share, _LONGEST_REST_NS))

    def look(self, *, now_ns: int, cpu_ns: int, memory_bytes: int) -> BudgetState:
        """The state after this was used; SPENT is the last."""
        self._use(now_ns - self._now_ns, cpu_ns - self._cpu_ns)
        self._now_ns, self._cpu_ns = now_ns, cpu_ns
        is_memory_over = bool(self._limits.memory_bytes) and memory_bytes > self._limits.memory_bytes
        if not is_memory_over:
            self._memory_over_since_ns = None
        elif self._memory_over_since_ns is None:
            self._memory_over_since_ns = now_ns
        if self.state is not BudgetState.SPENT:
            self.state = self._state(now_ns, memory_bytes if is_memory_over else None)
        return self.state

    def _use(self, passed_ns: int, used_ns: int) -> None:
        if self._limits.cpu_share:
            grown = self._credit_ns + self._limits.cpu_share * passed_ns - used_ns
            self._credit_ns = min(self._full_ns, grown)

    def _state(self, now_ns: int, memory_bytes: int | None) -> BudgetState:
        limits = self._limits
        is_cpu_over = bool(limits.cpu_share) and self._credit_ns <= 0
        if is_cpu_over:
            share = f"{100 * limits.cpu_share:g} % of a core over {limits.seconds:g} s"
            self.reason = f"it used more processor time than its budget of {share}"
            if self._credit_ns <= -self._full_ns:
                return BudgetState.SPENT
        if memory_bytes is not None:
            self.reason = (
                f"it has {memory_bytes >> 20} MiB of memory, and its budget is {limits.memory_bytes >> 20} MiB"
            )
            since_ns = self._memory_over_since_ns
            is_for_long = since_ns is not None and now_ns - since_ns >= _MEMORY_PATIENCE_NS
            return BudgetState.SPENT if is_for_long else BudgetState.SLOWED
        is_back = not limits.cpu_share or self._credit_ns >= _BACK_SHARE * self._full_ns
        if is_cpu_over or (self.state is BudgetState.SLOWED and not is_back):
            return BudgetState.SLOWED
        self.reason = ""
        return BudgetState.WITHIN

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ncclscope_agent.budget import Budget, BudgetLimits, BudgetState

SECOND = 1_000_000_000
QUARTER = BudgetLimits(cpu_share=0.25, seconds=60, memory_bytes=100 << 20)


class Used:
    """An agent that uses what it is told to."""

    def __init__(self, limits: BudgetLimits = QUARTER) -> None:
        self.budget = Budget(limits, now_ns=0, cpu_ns=0)
        self.now_ns = self.cpu_ns = 0

    def run(self, seconds: float, cpu_seconds: float, *, memory_bytes: int = 50 << 20) -> BudgetState:
        self.now_ns += int(seconds * SECOND)
        self.cpu_ns += int(cpu_seconds * SECOND)
        return self.budget.look(now_ns=self.now_ns, cpu_ns=self.cpu_ns, memory_bytes=memory_bytes)


def test_an_agent_may_use_its_budget_at_once_and_rests_when_it_is_used_up() -> None:
    agent = Used()
    assert agent.run(14, 14) is BudgetState.WITHIN  # of 15 s, 3.5 s came back
    assert agent.budget.rest_ns == 0
    assert agent.run(7, 7) is BudgetState.SLOWED
    assert agent.budget.rest_ns == 3 * SECOND  # 0.75 s owed, at a quarter of a core
    assert "25 % of a core over 60 s" in agent.budget.reason
    agent.run(3, 0)
    assert agent.budget.rest_ns == 0


def test_it_is_slowed_until_a_quarter_of_the_budget_is_back() -> None:
    agent = Used()
    agent.run(21, 21)
    assert agent.run(17, 0) is BudgetState.SLOWED
    assert agent.run(2, 0) is BudgetState.WITHIN
    assert agent.budget.reason == ""


def test_who_owes_a_whole_budget_is_spent_and_stays_so() -> None:
    agent = Used()
    assert agent.run(39, 39) is BudgetState.SLOWED
    assert agent.run(2, 2) is BudgetState.SPENT
    assert agent.run(1000, 0) is BudgetState.SPENT
    assert "processor" in agent.budget.reason


def test_memory_over_the_budget_slows_at_once_and_stops_when_it_stays() -> None:
    agent = Used()
    assert agent.run(1, 0, memory_bytes=101 << 20) is BudgetState.SLOWED
    assert agent.budget.reason == "it has 101 MiB of memory, and its budget is 100 MiB"
    assert agent.run(9, 0, memory_bytes=101 << 20) is BudgetState.SLOWED
    assert agent.run(1, 0, memory_bytes=101 << 20) is BudgetState.SPENT


def test_a_burst_of_memory_passes() -> None:
    agent = Used()
    agent.run(1, 0, memory_bytes=101 << 20)
    assert agent.run(9, 0) is BudgetState.WITHIN
    agent.run(1, 0, memory_bytes=101 << 20)
    assert agent.run(9, 0, memory_bytes=101 << 20) is BudgetState.SLOWED


def test_without_limits_nothing_is_too_much() -> None:
    agent = Used(BudgetLimits(cpu_share=0, seconds=60, memory_bytes=0))
    assert agent.run(1000, 64_000, memory_bytes=1 << 50) is BudgetState.WITHIN
    assert agent.budget.rest_ns == 0


@given(works=st.lists(st.floats(0.001, 2), min_size=50, max_size=100), share=st.floats(0.01, 2))
def test_who_rests_as_told_keeps_the_share_and_is_never_spent(works: list[float], share: float) -> None:
    agent = Used(BudgetLimits(cpu_share=share, seconds=60, memory_bytes=0))
    for work in [min(work, 0.9 * share * 60) for work in works]:
        assert agent.run(work, work) is not BudgetState.SPENT
        while agent.budget.rest_ns:
            agent.run(agent.budget.rest_ns / SECOND + 1e-6, 0)
    assert agent.cpu_ns <= share * agent.now_ns + share * 60 * SECOND + 2 * SECOND

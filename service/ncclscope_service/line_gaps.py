"""How many lines are missing before each launch, by opCount where it counts, else by what usually follows what.

opCount says how many launches of a communicator have no line (`count_jumps`). Elsewhere the program does: what comes
after a kind of call is nearly always the same, and where something else comes, what is usually between was lost. If
every line is lost with chance q, and T[a, b] is how often b is called after a, then b is logged next after a with
probability O = (1 - q) (T + q T^2 + q^2 T^3 + ...). O is counted; T = O ((1 - q) + q O)^-1 follows, made likeliest
by expectation maximisation, and with it how many lines lie between: q T^2 (1 - q T)^-2 over T (1 - q T)^-1. Where calls
are independent of each other this is the same for all and nothing is told.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.pair_hmm import Floats
from ncclscope_service.recurring import Recurring
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER

Indices = NDArray[np.intp]

KINDS_LIMIT: Final = 192
"""Kinds of calls of a communicator that are told apart; others are one more."""

_ROUNDS: Final = 6
"""Of estimating what is called after what from what was logged and lost, and that again."""

_UNSEEN: Final = 1.0
"""Calls after each kind that are taken to be as frequent there as anywhere."""

_TOLD: Final = 8.0
"""What follows what must make a communicator's calls so much likelier (logarithm) than their frequencies alone do."""

_STANDING: Final = 0.1
"""Share of launches before which opCount may stand for its steps to be believed."""

_MEMORY: Final = 20_000.0
"""Calls of a communicator after which older ones count less."""

_LEAST, _GREATEST = 0.003, 64.0
"""Expected lines between two calls, at least and at most."""


@dataclass(frozen=True, slots=True)
class MissingLines:
    """Lines that are expected to be missing, by where between the launches of a window they would stand."""

    amount: Floats
    """(n + 1,): before each launch and behind the last."""
    lanes: Floats
    """(n + 1, m): how much likelier each kernel's lane is for one of them than for any kernel."""


@dataclass(slots=True)
class _Calls:
    """What was called after what on one communicator."""

    kinds: dict[int, int] = field(default_factory=dict[int, int])
    """Number of each kind in `counts`."""
    counts: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    last: int | None = None
    """Number of the last call's kind."""
    steps: float = 0.0
    """Launches before which opCount moved."""
    stands: float = 0.0

    def number(self, kinds: NDArray[np.int32]) -> Indices:
        values, inverse = np.unique(kinds, return_inverse=True)
        numbers = [self.kinds.setdefault(kind, min(len(self.kinds), KINDS_LIMIT)) for kind in values.tolist()]
        missing = max(self.kinds.values()) + 1 - len(self.counts)
        if missing > 0:
            self.counts = np.pad(self.counts, (0, missing))
        return np.array(numbers, dtype=np.intp)[inverse]

    def between(self, numbers: Indices, rate: float) -> Floats:
        """Lines expected between calls, these included; before the first where the one before it is known."""
        counts = self.counts.copy()
        if self.last is not None:
            numbers = np.concatenate([[self.last], numbers])
        np.add.at(counts, (numbers[:-1], numbers[1:]), 1.0)
        if _gain(counts) < _TOLD:
            return np.full(len(numbers) - 1, rate / (1 - rate))
        table = _lines_between(counts, rate)
        found: Floats = table[numbers[:-1], numbers[1:]]
        return found

    def learn(self, numbers: Indices, lost: NDArray[np.int32]) -> None:
        known = np.concatenate([[self.last], numbers]).astype(np.intp) if self.last is not None else numbers
        np.add.at(self.counts, (known[:-1], known[1:]), 1.0)
        self.last = int(numbers[-1])
        self.stands += float(np.count_nonzero(lost == NO_NUMBER))
        self.steps += float(np.count_nonzero(lost != NO_NUMBER))
        fading = min(1.0, _MEMORY / max(float(self.counts.sum()), 1.0))
        self.counts *= fading

    def counts_every_launch(self, lost: NDArray[np.int32]) -> bool:
        stands = self.stands + np.count_nonzero(lost == NO_NUMBER)
        return bool(stands - 1 <= _STANDING * (self.steps + self.stands + len(lost)))


@dataclass(slots=True)
class LineGaps:
    """What the lines of one thread say of missing ones, communicator by communicator."""

    _kinds: Recurring = field(default_factory=Recurring)
    _calls: dict[int, _Calls] = field(default_factory=dict[int, _Calls])

    def missing(
        self, launches: Columns, launch_lanes: NDArray[np.int32], kernel_lanes: NDArray[np.int32], rate: float
    ) -> MissingLines:
        """Lines missing in a window of launches (LAUNCH).

        `launch_lanes`: on which lane of the kernels each runs, negative where that is not known; `rate`: the share of
        lines that is lost.
        """
        lanes, amounts = np.unique(kernel_lanes, return_counts=True)
        share: Floats = amounts / len(kernel_lanes)
        expected = np.zeros((len(launches) + 1, len(lanes)))
        kinds = self._kinds.number(launches)
        prior = rate / (1 - rate)
        for member in np.unique(launches["member"]).tolist():
            at = np.flatnonzero(launches["member"] == member)
            own = self._of_member(member, launches[at], kinds[at], at, len(launches), prior)
            place = np.searchsorted(lanes, launch_lanes[at[0]])
            if place < len(lanes) and lanes[place] == launch_lanes[at[0]]:
                expected[:, place] += own
            else:
                expected += own[:, None] * share
        expected = np.maximum(expected, _LEAST * share)
        amount = expected.sum(axis=1)
        return MissingLines(amount, (expected / amount[:, None] / share)[:, np.searchsorted(lanes, kernel_lanes)])

    def learn(self, launches: Columns) -> None:
        """Takes in decided launches."""
        kinds = self._kinds.number(launches)
        for member in np.unique(launches["member"]).tolist():
            mine = launches["member"] == member
            calls = self._calls.setdefault(member, _Calls())
            calls.learn(calls.number(kinds[mine]), launches["lines_lost"][mine])

    def _of_member(
        self, member: int, rows: Columns, kinds: NDArray[np.int32], at: Indices, size: int, prior: float
    ) -> Floats:
        """(size + 1,): its missing lines before each launch of the window; `at`: where its own launches are."""
        calls = self._calls.setdefault(member, _Calls())
        begins = np.concatenate([[0], at[:-1] + 1])
        lost = rows["lines_lost"]
        between: Floats = np.full(len(rows), prior)
        known = calls.last is not None
        if calls.counts_every_launch(lost):
            between = np.where(lost == NO_NUMBER, prior, lost).astype(np.float64)
        else:
            between[0 if known else 1 :] = calls.between(calls.number(kinds), prior / (1 + prior))
        density = prior * len(rows) / size
        rate = np.clip(between, _LEAST, _GREATEST) / (at + 1 - begins)
        if not known:
            rate[0] = density
        own = np.full(size + 1, density)
        own[: at[-1] + 1] = np.repeat(rate, at + 1 - begins)
        return own


def _gain(counts: Floats) -> float:
    """How much likelier (logarithm) calls are by the call before them, each foretold by all the others."""
    often = counts.sum(axis=0) / max(float(counts.sum()), 1.0)
    pairs = counts > 0
    others = np.maximum(counts - 1, 0.0)
    before = np.maximum(counts.sum(axis=1, keepdims=True) - 1, 0.0)
    told = (others + _UNSEEN * often) / (before + _UNSEEN)
    ratio = np.where(pairs, told / np.where(often > 0, often, 1.0), 1.0)
    return float((counts * np.log(ratio)).sum())


def _lines_between(counts: Floats, rate: float) -> Floats:
    """How many lines are expected to be lost between two calls that are logged one after the other.

    What was seen once is not taken for usual: it may be the loss that is asked about.
    """
    size = len(counts)
    often = counts.sum(axis=0) / max(float(counts.sum()), 1.0)
    logged = np.maximum(counts - 1, 0.0) + _UNSEEN * often
    shares = logged / logged.sum(axis=1, keepdims=True)
    called = shares @ np.linalg.inv((1 - rate) * np.eye(size) + rate * shares)
    called = np.maximum(called, 1e-3 * often)
    for _ in range(_ROUNDS):
        called /= called.sum(axis=1, keepdims=True)
        further = np.linalg.inv(np.eye(size) - rate * called)
        next_logged = np.maximum(called @ further, 1e-12)
        called = called * (further.T @ (logged / next_logged) @ further.T)
    called /= called.sum(axis=1, keepdims=True)
    further = np.linalg.inv(np.eye(size) - rate * called)
    first = called @ further
    expected: Floats = rate * called @ first @ further / np.maximum(first, 1e-12)
    return np.clip(expected, _LEAST, _GREATEST)

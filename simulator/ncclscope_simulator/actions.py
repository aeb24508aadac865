"""The actions that a rank's host thread goes through in a step, one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, auto

from ncclscope_simulator.operations import Launch


class Act(IntEnum):
    """The kinds of action."""

    COMPUTE = auto()
    """The compute stream is busy for `duration_ns`."""
    ISSUE = auto()
    """Operations are enqueued; with `blocking` the compute stream waits for their kernel."""
    WAIT = auto()
    """The compute stream waits for what the group's stream still has to do."""
    SYNCHRONISE = auto()
    """The host waits for the GPU."""
    LATE = auto()
    """A place at which a late rank loses time; `every` says which."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """One step of a rank's host thread."""

    act: Act
    duration_ns: int = 0
    kernel: str = ""
    launch: Launch | None = None
    blocking: bool = True
    group: int = 0
    every: str = ""
    autograd: bool = False
    is_uneven: bool = False
    """Of a computation: how much there is to do differs each time."""
    sticks: bool = False
    """Of operations: their collective never ends."""

    @property
    def issued(self) -> Launch:
        """The launch of an ISSUE action."""
        if self.launch is None:
            raise AssertionError("an ISSUE action carries a launch")
        return self.launch

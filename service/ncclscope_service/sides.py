"""The two sides that are paired by order, what came of a step, and what pairing them has taught."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.dirty import Found, Learnt
from ncclscope_service.equal_runs import EqualRuns
from ncclscope_wire.batch import Columns

Symbols = NDArray[np.int32]
Compatible = NDArray[np.bool_]
"""Compatible[launch symbol, kernel symbol]"""


@dataclass(slots=True)
class Experience:
    """What pairing one thread has taught so far."""

    learnt: Learnt = field(default_factory=Learnt)
    straight: int = 0
    """Items that agreed since anything was learnt."""
    runs: EqualRuns = field(default_factory=EqualRuns)
    starts: float = 1.0
    """How sure it is that the first pending launch and kernel began together."""
    has_begun: bool = False


@dataclass(frozen=True, slots=True)
class Sides:
    """Pending launches and kernels of one thread, and the items in which they are compared.

    An item is one launch or kernel, or a run of Sends and Receives of which it is not known how they were grouped.
    """

    launches: Columns
    kernels: Columns
    launch_symbols: Symbols
    kernel_symbols: Symbols
    items: NDArray[np.int64]
    """Where each item of the launches begins, with the end appended."""
    runs: NDArray[np.int64]
    """The same of the kernels."""
    joinable: NDArray[np.bool_]
    """Launches that may run in the kernel of the launch before them."""
    kernel_lanes: NDArray[np.int32]
    """The lane of the kernels that each lane of the launches is, as far as known; negative where not."""


@dataclass(slots=True)
class Decided:
    """What one step decided, as indices from the front of what was pending."""

    pairs: list[Found] = field(default_factory=list[Found])
    launches_used: int = 0
    kernels_used: int = 0
    holes: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Ranges of launches that no capture seems to hold."""

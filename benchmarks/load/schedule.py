"""How fast a job runs: a clock of its own, which phases of the benchmark drive faster or slower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_Times = NDArray[np.int64]
_FOR_EVER_NS = 10**17


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A stretch of wall time."""

    name: str
    seconds: float
    speed: float
    """Seconds of the job per second."""


class Schedule:
    """Job times to wall times and back; job time 0 is `begin_ns`. After the last phase its speed goes on."""

    def __init__(self, begin_ns: int, phases: Sequence[Phase]) -> None:
        walls, jobs = [0], [0]
        for phase in phases:
            walls.append(walls[-1] + round(phase.seconds * 1e9))
            jobs.append(jobs[-1] + round(phase.seconds * phase.speed * 1e9))
        walls.append(walls[-1] + _FOR_EVER_NS)
        jobs.append(jobs[-1] + round(_FOR_EVER_NS * phases[-1].speed))
        self.begin_ns = begin_ns
        """Wall time of job time 0."""
        self._walls, self._jobs = np.array(walls, np.float64), np.array(jobs, np.float64)
        # Exact from here to the last phase: within 100 days nanoseconds are whole numbers of a float64.

    def wall_ns(self, job_ns: _Times) -> _Times:
        """UTC ns of these times of the job."""
        found: _Times = np.rint(np.interp(job_ns, self._jobs, self._walls)).astype(np.int64) + self.begin_ns
        return found

    def job_ns(self, wall_ns: int) -> int:
        """The time of the job at this moment; below 0 before it begins."""
        past = wall_ns - self.begin_ns
        return past if past < 0 else int(np.interp(past, self._walls, self._jobs))

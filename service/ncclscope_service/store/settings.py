"""Settings of the pipeline, and the one table of its time-outs and bounds.

How long an operation may wait, in the order in which it waits: for a capture of its process, for that capture to cover
it, for the other ranks, for the clocks of its hosts, for detectors; then how long it stays in memory. Times are the
rows' own or the service's clock as it was given to the tick, so a restart decides the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from ncclscope_models.description import Completed
from ncclscope_models.expected_step import ExpectedStep
from ncclscope_models.transfer_estimate import TransferTimes
from ncclscope_service.nccl.nccl_tests import MeasuredBaseline
from ncclscope_service.store.records import Finding

SECOND_NS: Final = 1_000_000_000

# What waits

WITHOUT_CAPTURE_NS: Final = 30 * SECOND_NS
"""An operation of whose process nothing was captured by then is given to the aligners all the same."""
CLOCKS_WITHIN_NS: Final = 10 * SECOND_NS
"""Joined operations wait that long for the clocks of their hosts, if there is always something to align."""
JUDGED_WITHIN_NS: Final = 10 * SECOND_NS
"""Measured operations wait that long for more of the same time before detectors see it."""
MARKS_WITHIN_NS: Final = 60 * SECOND_NS
"""NVTX marks that come later no longer change the iteration of a decided operation."""
COVERED_IDLE_NS: Final = SECOND_NS
"""How long after its communicators ended a process may still send something, if captures cover its last line."""
WAITED_WINDOWS: Final = 2
"""Ranks are waited for at most while this many times `window_operations` come."""

# What is done how often

WATERMARKS_EVERY_NS: Final = SECOND_NS
"""How often the ends of the tables are recorded."""
LOOKS_EVERY_NS: Final = SECOND_NS // 2
"""Detectors look that often while a backlog is worked off."""
GIVE_UP_EVERY_NS: Final = 30 * SECOND_NS
GIVE_UP_SHARE: Final = 0.25
"""How often operations stop waiting for a capture; and earlier, if so large a share more than may wait has come. All
aligners have to be asked for that, which have nothing to do otherwise."""
DUE_SHARE: Final = 0.5
"""Of the operations that may wait for a capture: if so many could be aligned and wait for their turn, nothing more is
ingested. Else those whose captures are there would be given up, and others be paired with their kernels."""
PAUSE_PER_MEMBER_NS: Final = 100_000
"""Least time between two assignments of ranks and parallelism, for each member: they take some 10 us for each."""
LONGEST_PAUSE_NS: Final = 2 * SECOND_NS
"""That long names may be missing or out of date while communicators keep coming."""
RETENTION_EVERY_NS: Final = 60 * SECOND_NS
"""How often all processes, communicators and sources are looked through for those that are gone."""

# What is done at once

COUNTED_AT_ONCE: Final = 65_536
"""Operations that are numbered and counted in one go at most: 20 MB of rows."""
JOINED_AT_ONCE: Final = 65_536
"""Operations of joined collectives that are measured in one `process_backlog`."""
EVICTED_AT_ONCE: Final = 131_072
"""Operations that leave memory after one `process_backlog`: twice as many as come in a busy second, or memory would
fill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the parallel dimensions as the user gave them; None = not given."""

    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    ep: int | None = None
    cp: int | None = None

    def is_empty(self) -> bool:
        """True when the user gave none."""
        return all(size is None for size in (self.tp, self.pp, self.dp, self.ep, self.cp))


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSettings:
    """Settings of a user, and the bounds on what stays in memory."""

    sizes: Sizes = field(default_factory=Sizes)
    gpus_per_node: int | None = None
    baseline: MeasuredBaseline | None = None
    """Results of nccl-tests on this machine: the baseline of what it tested, preferred to what the job itself shows."""
    calibration: TransferTimes | None = None
    """Transfers of another run of this machine: what those of this run should take."""
    description: Completed | None = None
    """What a job is: those of so many ranks are held against it."""
    expected_step: ExpectedStep | None = None
    """Of the job that `description` is of, by the calibration of another run."""
    gpu: str | None = None
    """Of all nodes, one of `flops.PEAK_FLOPS`; None: as captures name it."""
    thresholds: dict[str, float] = field(default_factory=dict[str, float])
    """Thresholds of detectors that are not as by default, by name (`detect.settings.THRESHOLDS`)."""
    seen_hangs: tuple[Finding, ...] = ()
    """Of files: hangs that a service saw while the job ran. Files do not tell how long nothing came before its end."""
    settle_ns: int = 10 * SECOND_NS
    """How long ranks that logged nothing yet are waited for before a collective counts as complete without them."""
    patience_ns: int = 120 * SECOND_NS
    """How long a collective waits for a rank that did log, and a Send for its Recv; less long if twice
    `window_operations` came in less time, but never less than `settle_ns`."""
    hold_ns: int = 600 * SECOND_NS
    """How long an operation waits for a capture of its process: nsys's maker supports captures of five minutes."""
    window_ns: int = 900 * SECOND_NS
    """How long what is finished stays in memory."""
    held_operations: int = 4_000_000
    """How many operations wait for a capture at most, or a quarter more: then the oldest count as not covered."""
    window_operations: int = 1_000_000
    """How many operations stay in memory at most behind those that wait for a capture; about half a kilobyte each with
    kernels and ranges."""
    aligned_at_once: int = 24_576
    """Kernels that are aligned, with all that follows from it, in one `process_backlog`, or work that takes as long:
    about a quarter of a second."""
    idle_ns: int = 30 * SECOND_NS
    """How long after its communicators ended a process may still send something."""
    gone_ns: int = 24 * 3600 * SECOND_NS
    """How long after its last sign what was learned of a process is kept, and of a job with its findings."""
    groups_every_ns: int = 5 * SECOND_NS
    """How often parallelism is assigned again from the traffic."""

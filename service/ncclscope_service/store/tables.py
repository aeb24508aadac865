"""The store: growing tables of columns, and the few records they point at.

The pipeline's stages write here and everything that shows (metrics, page, trace, files) reads here.
Row ids are absolute and never reused: `Table.drop_before` forgets old rows, ids of later ones stay.

Also gives the hosts of a source, and the NCCL version of a process.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from copy import copy
from dataclasses import dataclass, field, fields, replace

import numpy as np
from numpy.typing import NDArray

from ncclscope_models.description import Completed
from ncclscope_models.expected_step import ExpectedStep
from ncclscope_models.transfer_estimate import TransferTimes
from ncclscope_service.columns.group_by import Interner
from ncclscope_service.columns.table import AnyRows, Ids, Table
from ncclscope_service.nccl.nccl_tests import MeasuredBaseline
from ncclscope_service.nccl.topology import Channels
from ncclscope_service.store import rows
from ncclscope_service.store.job_history import JobHistories, JobHistory
from ncclscope_service.store.plan_records import PlanRecord
from ncclscope_service.store.records import (
    Captures,
    Communicator,
    Finding,
    HostClock,
    JobClocks,
    KernelReferences,
    Member,
    Process,
    RetiredSources,
    SourceGaps,
    SourceState,
    Verdict,
)
from ncclscope_service.store.stamp_offsets import StampOffsets
from ncclscope_service.store.step_history import StepHistories, StepHistory
from ncclscope_wire.batch import Columns
from ncclscope_wire.records import SourceKind
from ncclscope_wire.topology import TopologySeen, TuningTableSeen


class Hosts:
    """Hosts as small integers, over all processes of a store: those of each job by themselves, so that no job has a say
    in the clocks of another.
    """

    def __init__(self, known: Store) -> None:
        self._store = known
        self.names: list[str] = []
        self.jobs: list[str] = []
        self._index: dict[tuple[str, str], int] = {}
        self._of_process: NDArray[np.int32] = np.empty(0, np.int32)

    def of_processes(self) -> NDArray[np.int32]:
        """The host of every process."""
        new = range(len(self._of_process), len(self._store.processes))
        keys = [(self._store.process_job[process], self._store.processes[process].host) for process in new]
        for job, host in keys:
            if (job, host) not in self._index:
                self._index[job, host] = len(self.names)
                self.names.append(host)
                self.jobs.append(job)
        if keys:
            hosts = np.asarray([self._index[key] for key in keys], np.int32)
            self._of_process = np.concatenate([self._of_process, hosts])
        return self._of_process


def hosts_of(known: Store, source: int) -> set[str]:
    """The hosts that a source named; if it named none, such as an export that could not be read, the one of its
    agent, if that is only one.
    """
    hosts = known.source_hosts.get(source)
    if hosts:
        return hosts
    agent = known.sources[source].agent
    beside = [of for other, of in known.source_hosts.items() if known.sources[other].agent == agent]
    found = set[str]().union(*beside)
    return found if len(found) == 1 else set()


def version_of(known: Store, process: int) -> str | None:
    """The version that the process printed itself, else the only one in its log, else the only one of its job.

    Up to 2.21 one process of a job prints it, without saying which; later communicator rank 0 does. Two versions in
    one place are a mistake that NCCL warns of, or logs of several runs: then that place says nothing.
    """
    own = known.process_version.get(process)
    if own is not None:
        return own
    source = known.process_source.get(process)
    for seen in (known.source_versions.get(source, set()) if source is not None else set(), _of_job(known, process)):
        if len(seen) == 1:
            return next(iter(seen))
    return None


def _of_job(known: Store, process: int) -> set[str]:
    return known.job_versions.get(known.process_job[process], set())


@dataclass(slots=True)
class Store:
    """All that is known, of all jobs."""

    strings: Interner = field(default_factory=Interner)
    sources: list[SourceState] = field(default_factory=list[SourceState])
    processes: list[Process] = field(default_factory=list[Process])
    process_job: list[str] = field(default_factory=list[str])
    """Job of each process, by process index."""
    process_agent: list[str] = field(default_factory=list[str])
    """The agent that named each process first, by process index."""
    process_version: dict[int, str] = field(default_factory=dict[int, str])
    """NCCL version of a process, if a line said it, or else the only one its source or job printed."""
    process_source: dict[int, int] = field(default_factory=dict[int, int])
    """The log in which a process was first seen."""
    stamp_offsets: StampOffsets = field(default_factory=StampOffsets)
    source_hosts: defaultdict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Hosts that a source named."""
    job_versions: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    source_versions: defaultdict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    group_names: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """By job: names of its process groups as far as PyTorch said them; with "" where it has groups without a name."""

    operation_templates: Table = field(default_factory=lambda: Table(rows.OPERATION_TEMPLATE))
    kernel_templates: Table = field(default_factory=lambda: Table(rows.KERNEL_TEMPLATE))
    operations: Table = field(
        default_factory=lambda: Table(rows.OPERATION, unknown=rows.UNKNOWN_OPERATION, packed=rows.PACKED)
    )
    kernels: Table = field(default_factory=lambda: Table(rows.KERNEL))
    kernel_references: KernelReferences = field(default_factory=KernelReferences)
    """Recorded by whoever writes `kernel` of an operation."""
    replays: Table = field(default_factory=lambda: Table(rows.REPLAYED))
    """Of operations that were captured into CUDA graphs."""
    collectives: Table = field(default_factory=lambda: Table(rows.COLLECTIVE))
    series: Table = field(default_factory=lambda: Table(rows.SERIES))
    """One row per (communicator, op, size class); never dropped, bounded by communicators x 13 x 6."""
    inspected: Table = field(default_factory=lambda: Table(rows.INSPECTED))
    ranges: Table = field(default_factory=lambda: Table(rows.RANGE))
    busy: Table = field(default_factory=lambda: Table(rows.BUSY))
    outside: Table = field(default_factory=lambda: Table(rows.KERNEL))
    """Kernels that communicate without NCCL, of no operation; the name of their template is LIBRARY/KERNEL."""

    launches: int = 0
    """Launch ids that were given out."""
    communicators: list[Communicator] = field(default_factory=list[Communicator])
    members: list[Member] = field(default_factory=list[Member])
    iteration_confidence: dict[int, float] = field(default_factory=dict[int, float])
    """By process: how sure the period is by which its operations are numbered."""
    step_histories: StepHistories = field(default_factory=lambda: StepHistories(StepHistory))
    job_histories: JobHistories = field(default_factory=lambda: JobHistories(JobHistory))
    captures: Captures = field(default_factory=Captures)
    """(source, capture) in order of arrival; live, those that came within the window."""
    topologies: dict[tuple[str, str | None], list[TopologySeen]] = field(
        default_factory=dict[tuple[str, str | None], list[TopologySeen]]
    )
    """By (job, host): blocks that differ, in order of arrival; host None for files that nothing ties to a host."""
    topologies_seen: int = 0
    """Number of all blocks that were added to `topologies`."""
    network_devices: dict[tuple[str, str], set[str]] = field(default_factory=dict[tuple[str, str], set[str]])
    """By (job, host): network cards as NCCL names them, of all processes together."""
    tuning_tables: dict[int, TuningTableSeen] = field(default_factory=dict[int, TuningTableSeen])
    """By communicator."""
    channels: dict[int, Channels] = field(default_factory=dict[int, Channels])
    """Rings and trees by communicator, of those that printed them."""
    measured_baseline: MeasuredBaseline | None = None
    """Results of nccl-tests on this machine, if the user gave its output."""
    calibration: TransferTimes | None = None
    """Of another run of this machine, as the user gave it."""
    description: Completed | None = None
    """Of a job, as the user gave it."""
    expected_step: ExpectedStep | None = None
    """Of that job."""
    gpu: str | None = None
    """Of all nodes, as the user named it."""
    plans: dict[str, PlanRecord] = field(default_factory=dict[str, PlanRecord])
    """By job that the description fits: what the last look showed of a sample of its ranks."""
    clocks: dict[str, JobClocks] = field(default_factory=dict[str, JobClocks])
    """By job, of those whose clocks were estimated."""
    findings: list[Finding] = field(default_factory=list[Finding])
    verdicts: dict[str, Verdict] = field(default_factory=dict[str, Verdict])
    """By job, of those that are over or silent: how they ended."""

    understood: Counter[str] = field(default_factory=Counter[str])
    """Lines and records by family."""
    torn_lines: Counter[int] = field(default_factory=Counter[int])
    """By source."""
    numbers_healed: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    numbers_uncertain: Counter[str] = field(default_factory=Counter[str])
    """By job: operations whose place among those around them nothing shows (`rows.NumberState.UNCERTAIN`)."""
    """Lost lines that were found, by job and by what showed them."""
    alignment_checked: Counter[str] = field(default_factory=Counter[str])
    """Operations of each job whose alignment was checked against an exact join."""
    alignment_disagreements: Counter[str] = field(default_factory=Counter[str])
    """Checked operations to which alignment gave another kernel, or one if there is none."""
    skipped: Counter[str] = field(default_factory=Counter[str])
    """Lines and records by the reason they were skipped."""
    finished: Counter[tuple[str, int]] = field(default_factory=Counter[tuple[str, int]])
    """Operations of which nothing more will be learned, by job and rows.Match, those that were forgotten included."""
    inspector_records: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    """Records of NCCL Inspector by job and what became of them: "with_operation", "without_operation",
    "not_gpu_timed"."""
    gaps: defaultdict[int, SourceGaps] = field(default_factory=lambda: defaultdict(SourceGaps))
    """By source."""
    retired: RetiredSources = field(default_factory=RetiredSources)
    """Sums over sources whose places others have now."""

    def copy(self) -> Store:
        """The store as it is now: tables are copied, so that another thread may read them while this one goes on."""
        copied = replace(self)
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Table | Captures):
                setattr(copied, each.name, value.copy())
            elif isinstance(value, list | dict):
                setattr(copied, each.name, copy(value))
        return copied

    def clock_of(self, process: int) -> HostClock | None:
        """The clock of a process's host against the reference of its job; None if it is not known."""
        clocks = self.clocks.get(self.process_job[process])
        return None if clocks is None else clocks.hosts.get(self.processes[process].host)

    def listed_communicators(self) -> list[Communicator]:
        """All communicators but those that were absorbed by another."""
        return [each for each in self.communicators if each.absorbed_by is None]

    def moved_bytes(self, communicators: NDArray[np.integer], message_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Bytes that go to another rank, as message sizes; 0 in a communicator of one rank, and where it is not known.

        `communicators`: by index, of each size; NO_NUMBER where it is not known.
        """
        is_alone = np.asarray([*(each.size == 1 for each in self.communicators), False], np.bool_)
        return np.where(is_alone[communicators], 0, np.maximum(message_bytes, 0))

    def finish(self, at: NDArray[np.intp]) -> None:
        """Nothing more will be learned of the operations at these places, each of which is finished once."""
        table = self.operations.rows
        table["finished"][at] = True
        states = len(rows.Match)
        keys = table["process"][at].astype(np.int64) * states + table["match"][at]
        for key, amount in enumerate(np.bincount(keys).tolist()):
            if amount:
                self.finished[self.process_job[key // states], key % states] += amount

    def new_launches(self, amount: int) -> Ids:
        """`amount` launch ids that are not in use yet."""
        self.launches += amount
        return np.arange(self.launches - amount, self.launches, dtype=np.int64)

    @property
    def has_logs(self) -> bool:
        """Whether a log of NCCL was read: only then is known where ranks stopped."""
        kind = SourceKind.NCCL_LOG
        return self.retired.kinds[kind] > 0 or any(state.source.kind is kind for state in self.sources)

    def expected_step_of(self, job: str) -> ExpectedStep | None:
        """Time that a step of the job should take; None unless its traffic is what the description says."""
        plan = self.plans.get(job)
        return self.expected_step if plan is not None and not plan.edits else None

    def templates_of(self, operations: AnyRows, *names: str) -> Columns:
        """The operation template of each of these operations; these columns of it only, if some are named."""
        return self.operation_templates.take(operations["template"], *names)

    def kernel_templates_of(self, kernels: AnyRows, *names: str) -> Columns:
        """The kernel template of each of these kernels; these columns of it only, if some are named."""
        return self.kernel_templates.take(kernels["template"], *names)

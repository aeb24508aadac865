"""Every metric of the service, in one table: exposition, documentation and tests follow from it.

Names end in their base unit; a counter's `_total` is added by the exposition. Label values are bounded: what
bounds them is said in words beside each metric, and a test holds `docs/metrics.md` against this table.
Source: Prometheus, "Metric and label naming"; OpenMetrics 1.0, section 5 (metric types).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from prometheus_client.utils import floatToGoString


class Kind(StrEnum):
    """What a metric's value does."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric family."""

    name: str
    """As exposed, without the suffix of its type (`_total`, `_bucket`)."""
    kind: Kind
    unit: str = ""
    """Base unit, which is also how the name ends; empty for plain numbers."""
    labels: tuple[str, ...] = ()
    help: str
    bound: str
    """What bounds the number of its series, in words."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, +Inf left out; classic ones, twelve with +Inf at most."""

    @property
    def exposed_name(self) -> str:
        """The name that a query uses; of a histogram, the common part of its three series."""
        return f"{self.name}_total" if self.kind is Kind.COUNTER else self.name

    @property
    def bucket_names(self) -> tuple[str, ...]:
        """Values of the label `le`, +Inf included."""
        return (*(number_text(bound) for bound in self.buckets), "+Inf")


def number_text(value: float) -> str:
    """A number as Go prints it, which is how Prometheus's own clients write them."""
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]


MAX_SERIES: Final = 50_000
"""Series of a scrape at 4,096 ranks; the limits below keep to it, and a test adds up a simulated job."""

MAX_COMMUNICATORS: Final = 2_500
"""Communicators that have series of their own; the rest is summed as communicator="other"."""

MAX_GROUP_SERIES: Final = 4_000
"""(communicator, operation, size class) with series of their own, nine each; the rest is summed like the above."""

MAX_RANKS: Final = 32
"""Ranks of a job that have series of their own: those that wait least and those that wait most."""

MAX_FINDINGS: Final = 50
"""Open findings that are exposed one by one, the gravest first; `ncclscope_findings` counts all."""

DURATION_BOUNDS_SECONDS: Final = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 1.0, 10.0)
"""Upper bounds of the histograms of times; with +Inf twelve buckets, each about three times the last."""

BUSBW_BOUNDS: Final = (1e8, 1e9, 5e9, 1e10, 2e10, 3e10, 4e10, 5e10, 1e11, 2e11, 4e11)
"""Bytes per second: fine between 10 and 50 GB/s, where networks of 100 to 400 Gbit/s are, coarse elsewhere."""

SERIES_LABELS: Final = ("job", "communicator", "parallelism", "op", "size_class")
HISTOGRAM_LABELS: Final = ("job", "parallelism", "op")
KIND_LABELS: Final = ("job", "parallelism", "op", "size_class")
"""Without the communicator: what nobody asks of one alone."""

_PER_SERIES: Final = (
    f"{MAX_GROUP_SERIES:,} (communicator, operation, size class) of {MAX_COMMUNICATORS:,} communicators; "
    "the rest is `other`"
)
_PER_COMMUNICATOR: Final = f"{MAX_COMMUNICATORS:,} communicators"
_PER_KIND: Final = "kinds of communicators x operations x size classes of a job"
_PER_HISTOGRAM: Final = (
    "kinds of communicators x operations of a job, twelve buckets each; never per communicator or rank"
)
_PER_JOB: Final = "jobs that the service keeps"
_PER_HOST: Final = "hosts with a clock estimate"
_PER_AGENT: Final = "agents that have connected"
_PER_SPOOL: Final = "agents with a spool"
_PER_REASON: Final = "a fixed set of reasons in the code"
_ONE: Final = "one"

METRICS: Final[tuple[Metric, ...]] = (
    # What was communicated, counted from the log
    Metric(
        name="ncclscope_operations",
        kind=Kind.COUNTER,
        labels=SERIES_LABELS,
        help="NCCL operations logged, and replays of those in CUDA graphs after the first recorded, over all ranks.",
        bound=_PER_SERIES,
    ),
    Metric(
        name="ncclscope_bytes",
        kind=Kind.COUNTER,
        unit="bytes",
        labels=SERIES_LABELS,
        help="Message size (nccl-tests) of what ncclscope_operations_total counts, replays included, over all ranks.",
        bound=_PER_SERIES,
    ),
    # How long it took, measured on the kernels
    Metric(
        name="ncclscope_matched_operations",
        kind=Kind.COUNTER,
        labels=KIND_LABELS,
        help="Operations for which a GPU kernel was found, over all ranks.",
        bound=_PER_KIND,
    ),
    Metric(
        name="ncclscope_kernel_seconds",
        kind=Kind.COUNTER,
        unit="seconds",
        labels=SERIES_LABELS,
        help="Time that the kernels of matched operations ran, waiting for other ranks included, over all ranks.",
        bound=_PER_SERIES,
    ),
    Metric(
        name="ncclscope_joined_kernel_seconds",
        kind=Kind.COUNTER,
        unit="seconds",
        labels=SERIES_LABELS,
        help="The part of the kernel time for which it is known how much of it was waiting: divide the wait by this.",
        bound=_PER_SERIES,
    ),
    Metric(
        name="ncclscope_wait_seconds",
        kind=Kind.COUNTER,
        unit="seconds",
        labels=SERIES_LABELS,
        help="Time that kernels waited for the last rank to arrive, over all ranks.",
        bound=_PER_SERIES,
    ),
    Metric(
        name="ncclscope_collectives",
        kind=Kind.COUNTER,
        labels=KIND_LABELS,
        help="Collectives whose kernels were seen on two ranks or more.",
        bound=_PER_KIND,
    ),
    Metric(
        name="ncclscope_transfer_seconds",
        kind=Kind.COUNTER,
        unit="seconds",
        labels=KIND_LABELS,
        help="Time from the last rank's arrival to the end, summed over the collectives that were joined.",
        bound=_PER_KIND,
    ),
    Metric(
        name="ncclscope_collective_duration_seconds",
        kind=Kind.HISTOGRAM,
        unit="seconds",
        labels=HISTOGRAM_LABELS,
        help="Kernel time of one collective, the mean of the ranks that were seen, waiting included.",
        bound=_PER_HISTOGRAM,
        buckets=DURATION_BOUNDS_SECONDS,
    ),
    Metric(
        name="ncclscope_collective_wait_seconds",
        kind=Kind.HISTOGRAM,
        unit="seconds",
        labels=HISTOGRAM_LABELS,
        help="Longest wait of any rank in one collective for the last rank to arrive.",
        bound=_PER_HISTOGRAM,
        buckets=DURATION_BOUNDS_SECONDS,
    ),
    Metric(
        name="ncclscope_collective_busbw_bytes_per_second",
        kind=Kind.HISTOGRAM,
        unit="bytes_per_second",
        labels=HISTOGRAM_LABELS,
        help="Bus bandwidth of the transfer of one collective of more than 1 MiB, without the waiting.",
        bound=_PER_HISTOGRAM,
        buckets=BUSBW_BOUNDS,
    ),
    # How fast it was
    Metric(
        name="ncclscope_busbw_bytes_per_second",
        kind=Kind.GAUGE,
        unit="bytes_per_second",
        labels=SERIES_LABELS,
        help="Bus bandwidth of the transfer, without the waiting: median over the last minute that has data.",
        bound=_PER_SERIES,
    ),
    Metric(
        name="ncclscope_efficiency_ratio",
        kind=Kind.GAUGE,
        unit="ratio",
        labels=(*SERIES_LABELS, "reference"),
        help="Bus bandwidth divided by a named reference: topology (what the wires can do) or baseline (measured).",
        bound=f"{_PER_SERIES} x references",
    ),
    Metric(
        name="ncclscope_bandwidth_drift_ratio",
        kind=Kind.GAUGE,
        unit="ratio",
        labels=SERIES_LABELS,
        help="Bus bandwidth against the best that this series has shown, minus one: -0.2 is a fifth slower.",
        bound=_PER_SERIES,
    ),
    Metric(
        name="ncclscope_wait_ratio",
        kind=Kind.GAUGE,
        unit="ratio",
        labels=("job", "communicator", "parallelism"),
        help="Share of the kernel time of collectives that was waiting for the last rank, over the last minute.",
        bound=_PER_COMMUNICATOR,
    ),
    Metric(
        name="ncclscope_rank_wait_ratio",
        kind=Kind.GAUGE,
        unit="ratio",
        labels=("job", "rank"),
        help="Share of a global rank's kernel time that was waiting, over the last minutes; a late rank waits least.",
        bound=f"the {MAX_RANKS} ranks of a job that wait least or most",
    ),
    Metric(
        name="ncclscope_host_wait_ratio",
        kind=Kind.GAUGE,
        unit="ratio",
        labels=("job", "host"),
        help="The same of a host, mean of its ranks: the host that waits least has the late rank.",
        bound="hosts of a job",
    ),
    # What NCCL Inspector told
    Metric(
        name="ncclscope_inspector_records",
        kind=Kind.COUNTER,
        labels=KIND_LABELS,
        help="Completed operations that NCCL Inspector reported, over all ranks.",
        bound=_PER_KIND,
    ),
    Metric(
        name="ncclscope_inspector_kernel_seconds",
        kind=Kind.COUNTER,
        unit="seconds",
        labels=KIND_LABELS,
        help="Time that their kernels ran as NCCL Inspector says, waiting for other ranks included, over all ranks.",
        bound=_PER_KIND,
    ),
    Metric(
        name="ncclscope_inspector_outcomes",
        kind=Kind.COUNTER,
        labels=("job", "outcome"),
        help="Records of NCCL Inspector by what became of them: with_operation, without_operation, not_gpu_timed.",
        bound="jobs x 3 outcomes",
    ),
    Metric(
        name="ncclscope_inspector_busbw_ratio",
        kind=Kind.GAUGE,
        unit="ratio",
        labels=KIND_LABELS,
        help="Bus bandwidth as NCCL Inspector prints it over that of the kernel, both with waiting: 1 is agreement.",
        bound=_PER_KIND,
    ),
    # How much of an iteration it is
    Metric(
        name="ncclscope_iteration_seconds",
        kind=Kind.GAUGE,
        unit="seconds",
        labels=("job", "percentile"),
        help="Duration of the recent training iterations over all ranks: the 50th and 90th percentile.",
        bound=f"{_PER_JOB} x 2 percentiles",
    ),
    Metric(
        name="ncclscope_communication_ratio",
        kind=Kind.GAUGE,
        unit="ratio",
        labels=("job",),
        help="Share of the recent iterations in which a rank's GPU ran a NCCL kernel, waiting included.",
        bound=_PER_JOB,
    ),
    Metric(
        name="ncclscope_exposed_communication_ratio",
        kind=Kind.GAUGE,
        unit="ratio",
        labels=("job",),
        help="Share of the recent iterations in which a rank's GPU ran NCCL kernels only: communication nothing hid.",
        bound=_PER_JOB,
    ),
    # Who communicates
    Metric(
        name="ncclscope_communicators",
        kind=Kind.GAUGE,
        labels=("job",),
        help="Communicators that the service knows.",
        bound=_PER_JOB,
    ),
    Metric(
        name="ncclscope_communicators_summed",
        kind=Kind.GAUGE,
        labels=("job",),
        help='Communicators without series of their own, which are summed as communicator="other".',
        bound=_PER_JOB,
    ),
    Metric(
        name="ncclscope_communicator_info",
        kind=Kind.GAUGE,
        labels=("job", "communicator", "comm_id", "size", "parallelism", "identity", "hosts"),
        help="Always 1: what a communicator's short name stands for; hosts is how many it spans.",
        bound=_PER_COMMUNICATOR,
    ),
    # How much of it is known
    Metric(
        name="ncclscope_alignment_matched_ratio",
        kind=Kind.GAUGE,
        unit="ratio",
        labels=("job",),
        help="Share of the recent operations inside a capture for which the kernel was found.",
        bound=_PER_JOB,
    ),
    Metric(
        name="ncclscope_alignment_operations",
        kind=Kind.COUNTER,
        labels=("job", "match"),
        help="Operations whose alignment is settled, by what became of them; all four once there are any.",
        bound="jobs x 4 states",
    ),
    Metric(
        name="ncclscope_alignment_checked",
        kind=Kind.COUNTER,
        labels=("job",),
        help="Operations whose alignment was checked against an exact join through NVTX ranges, which wins.",
        bound=_PER_JOB,
    ),
    Metric(
        name="ncclscope_alignment_disagreements",
        kind=Kind.COUNTER,
        labels=("job",),
        help="Checked operations to which the alignment gave another kernel, or one where there is none.",
        bound=_PER_JOB,
    ),
    Metric(
        name="ncclscope_captured_ratio",
        kind=Kind.GAUGE,
        unit="ratio",
        labels=("job",),
        help="Share of the last minutes that captures of GPU kernels cover, mean over the processes that log.",
        bound=_PER_JOB,
    ),
    Metric(
        name="ncclscope_gaps",
        kind=Kind.COUNTER,
        labels=("reason",),
        help="Stretches of a source that were lost or skipped.",
        bound=_PER_REASON,
    ),
    # Clocks
    Metric(
        name="ncclscope_clock_offset_seconds",
        kind=Kind.GAUGE,
        unit="seconds",
        labels=("host",),
        help="Host clock minus reference clock, now, by the host's fitted line.",
        bound=_PER_HOST,
    ),
    Metric(
        name="ncclscope_clock_drift_ratio",
        kind=Kind.GAUGE,
        unit="ratio",
        labels=("host",),
        help="How much faster the host's clock runs than the reference clock: 1e-6 is 1 ppm.",
        bound=_PER_HOST,
    ),
    Metric(
        name="ncclscope_clock_uncertainty_seconds",
        kind=Kind.GAUGE,
        unit="seconds",
        labels=("host",),
        help="Standard deviation of the host's clock offset.",
        bound=_PER_HOST,
    ),
    Metric(
        name="ncclscope_clock_violation_ratio",
        kind=Kind.GAUGE,
        unit="ratio",
        help="Share of causality constraints that fail after the clocks are corrected: near 0 where all is well.",
        bound=_ONE,
    ),
    # What is wrong
    Metric(
        name="ncclscope_findings",
        kind=Kind.GAUGE,
        labels=("job", "kind", "severity"),
        help="Findings that are open now.",
        bound="jobs x kinds x 3 severities, 0 where there is none",
    ),
    Metric(
        name="ncclscope_finding_info",
        kind=Kind.GAUGE,
        labels=("job", "kind", "severity", "communicator", "parallelism", "ranks", "hosts"),
        help="Always 1: a finding that is open now, with the culprits it names; empty labels are not known.",
        bound=f"the {MAX_FINDINGS} gravest open findings; at most 8 ranks and 4 hosts are named",
    ),
    # Agents
    Metric(
        name="ncclscope_agent_connected",
        kind=Kind.GAUGE,
        labels=("agent", "host"),
        help="1 while the agent's session is open, else 0.",
        bound=_PER_AGENT,
    ),
    Metric(
        name="ncclscope_agent_missing",
        kind=Kind.GAUGE,
        labels=("agent", "host"),
        help="1 where the agent's session is closed and it did not say goodbye, else 0.",
        bound=_PER_AGENT,
    ),
    Metric(
        name="ncclscope_agent_lines",
        kind=Kind.COUNTER,
        labels=("agent", "host"),
        help="Lines of logs that the agent has read.",
        bound=_PER_AGENT,
    ),
    Metric(
        name="ncclscope_agent_read_bytes",
        kind=Kind.COUNTER,
        unit="bytes",
        labels=("agent", "host"),
        help="Bytes of logs and exports that the agent has read.",
        bound=_PER_AGENT,
    ),
    Metric(
        name="ncclscope_agent_lag_seconds",
        kind=Kind.GAUGE,
        unit="seconds",
        labels=("agent", "host"),
        help="How far a connected agent is behind the files that it reads.",
        bound=_PER_AGENT,
    ),
    Metric(
        name="ncclscope_agent_unread_bytes",
        kind=Kind.GAUGE,
        unit="bytes",
        labels=("agent", "host"),
        help="Bytes in the logs that a connected agent has seen and not read: they wait there while it has no room.",
        bound=_PER_AGENT,
    ),
    Metric(
        name="ncclscope_agent_queued_batches",
        kind=Kind.GAUGE,
        labels=("agent", "host"),
        help="Batches that the agent has read and the service has not acknowledged.",
        bound=_PER_AGENT,
    ),
    Metric(
        name="ncclscope_agent_spool_bytes",
        kind=Kind.GAUGE,
        unit="bytes",
        labels=("agent", "host"),
        help="What the agent's spool takes on its disk.",
        bound=_PER_SPOOL,
    ),
    Metric(
        name="ncclscope_agent_spool_oldest_seconds",
        kind=Kind.GAUGE,
        unit="seconds",
        labels=("agent", "host"),
        help="Age of what waits longest in the agent's spool, as the agent last said; 0 where nothing waits.",
        bound=_PER_SPOOL,
    ),
    Metric(
        name="ncclscope_agent_spool_dropped_batches",
        kind=Kind.COUNTER,
        labels=("agent", "host"),
        help="Batches that were lost to the agent's spool: too old, damaged, or of no use to a service without state.",
        bound=_PER_SPOOL,
    ),
    Metric(
        name="ncclscope_agent_spool_replayed_batches",
        kind=Kind.COUNTER,
        labels=("agent", "host"),
        help="Batches that the agent has read back from its spool.",
        bound=_PER_SPOOL,
    ),
    Metric(
        name="ncclscope_agent_spool_failures",
        kind=Kind.COUNTER,
        labels=("agent", "host"),
        help="Writes to the agent's spool that failed: the disk is full or broken. They are tried again.",
        bound=_PER_SPOOL,
    ),
    Metric(
        name="ncclscope_agent_cpu_seconds",
        kind=Kind.COUNTER,
        unit="seconds",
        labels=("agent", "host"),
        help="CPU time that the agent has used.",
        bound=_PER_AGENT,
    ),
    Metric(
        name="ncclscope_agent_resident_memory_bytes",
        kind=Kind.GAUGE,
        unit="bytes",
        labels=("agent", "host"),
        help="Resident memory of the agent.",
        bound=_PER_AGENT,
    ),
    Metric(
        name="ncclscope_agent_sent_bytes",
        kind=Kind.COUNTER,
        unit="bytes",
        labels=("agent", "host"),
        help="Bytes that the agent gave to its connection, what was sent again included.",
        bound=_PER_AGENT,
    ),
    Metric(
        name="ncclscope_agent_slowed",
        kind=Kind.GAUGE,
        labels=("agent", "host"),
        help="1 while an agent rests because it has used up its budget of processor or memory.",
        bound=_PER_AGENT,
    ),
    Metric(
        name="ncclscope_agent_files_skipped",
        kind=Kind.COUNTER,
        labels=("agent", "host", "reason"),
        help="Files that an agent could not read: file_unreadable and file_too_many at each look, export_refused once.",
        bound=f"{_PER_AGENT} x 3 reasons, where there is one",
    ),
    Metric(
        name="ncclscope_agent_lines_skipped",
        kind=Kind.COUNTER,
        labels=("reason",),
        help="Lines and records that were read and not used, over all agents.",
        bound=_PER_REASON,
    ),
    Metric(
        name="ncclscope_agent_lines_understood",
        kind=Kind.COUNTER,
        labels=("family",),
        help="Lines and records that were understood, over all agents.",
        bound="a fixed set of line families in the code",
    ),
    # The service itself
    Metric(
        name="ncclscope_sessions_refused",
        kind=Kind.COUNTER,
        labels=("reason",),
        help="Sessions of agents that the service refused or closed.",
        bound=_PER_REASON,
    ),
    Metric(
        name="ncclscope_http_refused",
        kind=Kind.COUNTER,
        labels=("reason",),
        help="HTTP connections that the service closed, and requests that it refused.",
        bound=_PER_REASON,
    ),
    Metric(
        name="ncclscope_ingest_lag_seconds",
        kind=Kind.GAUGE,
        unit="seconds",
        help="From the reading of a line by an agent to its place in these metrics, for the newest line.",
        bound=_ONE,
    ),
    Metric(
        name="ncclscope_ingest_backlog_batches",
        kind=Kind.GAUGE,
        help="Batches that connected agents hold because the service has not taken them yet, as they last said.",
        bound=_ONE,
    ),
    Metric(
        name="ncclscope_window_operations",
        kind=Kind.GAUGE,
        help="Operations that the service keeps in memory.",
        bound=_ONE,
    ),
    Metric(
        name="ncclscope_rows_uncounted",
        kind=Kind.COUNTER,
        help="Collectives that left the memory before histograms had counted them.",
        bound=_ONE,
    ),
    Metric(
        name="ncclscope_tick_seconds",
        kind=Kind.GAUGE,
        unit="seconds",
        help="How long the last pass over what had come took: aligning, joining, measuring, detecting.",
        bound=_ONE,
    ),
    Metric(
        name="ncclscope_mistakes",
        kind=Kind.COUNTER,
        labels=("where",),
        help="What our own code failed on and left out, by where: please report it, with the service's log.",
        bound=_PER_REASON,
    ),
    Metric(
        name="ncclscope_journal_bytes",
        kind=Kind.GAUGE,
        unit="bytes",
        help="What the journal takes on disk.",
        bound=_ONE,
    ),
    Metric(
        name="ncclscope_journal_waiting_bytes",
        kind=Kind.GAUGE,
        unit="bytes",
        help="Received, and not on disk yet: agents keep it until then.",
        bound=_ONE,
    ),
    Metric(
        name="ncclscope_journal_write_seconds",
        kind=Kind.GAUGE,
        unit="seconds",
        help="How long the last group of entries took to reach the disk, or takes so far.",
        bound=_ONE,
    ),
    Metric(
        name="ncclscope_journal_errors",
        kind=Kind.COUNTER,
        help="Writes to the journal that failed and are made again.",
        bound=_ONE,
    ),
    Metric(
        name="ncclscope_journal_failing",
        kind=Kind.GAUGE,
        help="1 while what comes cannot be kept: nothing is acknowledged, agents keep it.",
        bound=_ONE,
    ),
    Metric(
        name="ncclscope_journal_damaged",
        kind=Kind.GAUGE,
        help="State files and stretches of the journal that were not whole at the last start.",
        bound=_ONE,
    ),
    Metric(
        name="ncclscope_journal_missing_entries",
        kind=Kind.GAUGE,
        help="Entries lost, or behind one that was, at the last start: agents send again what they have of it.",
        bound=_ONE,
    ),
    Metric(
        name="ncclscope_replayed_batches",
        kind=Kind.GAUGE,
        help="Batches that the last start applied from the journal.",
        bound=_ONE,
    ),
    Metric(
        name="ncclscope_restore_seconds",
        kind=Kind.GAUGE,
        unit="seconds",
        help="How long the last start took to restore the state.",
        bound=_ONE,
    ),
    Metric(
        name="ncclscope_state_age_seconds",
        kind=Kind.GAUGE,
        unit="seconds",
        help="Since the state was written last, or tried to be.",
        bound=_ONE,
    ),
    Metric(
        name="ncclscope_state_bytes",
        kind=Kind.GAUGE,
        unit="bytes",
        help="Size of the newest state file.",
        bound=_ONE,
    ),
    Metric(
        name="ncclscope_state_write_seconds",
        kind=Kind.GAUGE,
        unit="seconds",
        help="How long the newest state file took to be written, beside the work.",
        bound=_ONE,
    ),
    Metric(
        name="ncclscope_state_pause_seconds",
        kind=Kind.GAUGE,
        unit="seconds",
        help="For how long work stood still when the process that writes it was made.",
        bound=_ONE,
    ),
    Metric(
        name="ncclscope_operations_not_archived",
        kind=Kind.COUNTER,
        help="Operations that left memory while the disk took nothing, and are in no parquet file.",
        bound=_ONE,
    ),
    Metric(
        name="ncclscope_page_clients",
        kind=Kind.GAUGE,
        help="Open event streams of the live page.",
        bound=_ONE,
    ),
    Metric(
        name="ncclscope_page_events_dropped",
        kind=Kind.COUNTER,
        help="Events that were dropped because a page read too slowly.",
        bound=_ONE,
    ),
    Metric(
        name="ncclscope_page_clients_refused",
        kind=Kind.COUNTER,
        help="Listeners that were refused because too many were there.",
        bound=_ONE,
    ),
    Metric(
        name="ncclscope_notifications",
        kind=Kind.COUNTER,
        labels=("receiver", "outcome"),
        help="Notifications of findings by what became of them: delivered, failed (tried for the last time), dropped.",
        bound="webhooks that are configured x 3 outcomes, 0 where there is none",
    ),
    Metric(
        name="ncclscope_notification_retries",
        kind=Kind.COUNTER,
        labels=("receiver",),
        help="Attempts to deliver a notification that failed and are made again.",
        bound="webhooks that are configured",
    ),
    Metric(
        name="ncclscope_notifications_queued",
        kind=Kind.GAUGE,
        labels=("receiver",),
        help="Notifications that wait for their delivery.",
        bound="webhooks that are configured",
    ),
    Metric(
        name="ncclscope_build_info",
        kind=Kind.GAUGE,
        labels=("version",),
        help="Always 1: the version of the service.",
        bound=_ONE,
    ),
)
"""In the order in which they are exposed."""

METRICS_BY_NAME: Final = MappingProxyType({metric.name: metric for metric in METRICS})


def metric_table_markdown() -> str:
    """The table as `docs/metrics.md` carries it: one row per metric."""
    head = "| metric | kind | labels | means | series are bounded by |\n|---|---|---|---|---|\n"
    return head + "".join(_row_markdown(metric) for metric in METRICS)


def _row_markdown(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels) or "none"
    return f"| `{metric.exposed_name}` | {metric.kind} | {labels} | {metric.help} | {metric.bound} |\n"

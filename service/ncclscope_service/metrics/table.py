"""Every metric of the service, in one table: exposition, documentation and tests follow from it.

Names end in their base unit; a counter's `_total` is added by the exposition. Label values are bounded: what
bounds them is said in words beside each metric, and a test holds `docs/metrics.md` against this table.
Source: Prometheus, "Metric and label naming"; OpenMetrics 1.0, section 5 (metric types).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from types import MappingProxyType
from typing import Final

from prometheus_client.utils import floatToGoString

from ncclscope_service.rollup.series import HISTOGRAM_BOUNDS


class Kind(StrEnum):
    """Type of a metric."""

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
    """Bound on the number of its series, in words."""
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


_UNITS: Final = ("bytes_per_second", "seconds", "bytes", "ratio")


def _metric(kind: Kind, name: str, labels: tuple[str, ...], bound: str, help_text: str) -> Metric:
    """A metric's unit is how its name ends; a histogram's buckets are those that the tally fills."""
    return Metric(
        name=name,
        kind=kind,
        unit=next((unit for unit in _UNITS if name.endswith(f"_{unit}")), ""),
        labels=labels,
        help=help_text,
        bound=bound,
        buckets=HISTOGRAM_BOUNDS.get(name, ()),
    )


counter: Final = partial(_metric, Kind.COUNTER)
gauge: Final = partial(_metric, Kind.GAUGE)
histogram: Final = partial(_metric, Kind.HISTOGRAM)

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

SERIES_LABELS: Final = ("job", "communicator", "parallelism", "op", "size_class")
HISTOGRAM_LABELS: Final = ("job", "parallelism", "op")
KIND_LABELS: Final = ("job", "parallelism", "op", "size_class")
"""Without the communicator: what nobody asks of one alone."""
_AGENT_LABELS: Final = ("agent", "host")
_CULPRITS: Final = ("job", "kind", "severity", "ranks", "hosts")

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

# fmt: off
METRICS: Final[tuple[Metric, ...]] = (
    # What was communicated, counted from the log
    counter("ncclscope_operations", SERIES_LABELS, _PER_SERIES,
            "NCCL operations logged, and replays of those in CUDA graphs after the first recorded, over all ranks."),
    counter("ncclscope_bytes", SERIES_LABELS, _PER_SERIES,
            "Message size (nccl-tests) of what ncclscope_operations_total counts, replays included, over all ranks."),
    # How long it took, measured on the kernels
    counter("ncclscope_matched_operations", KIND_LABELS, _PER_KIND,
            "Operations for which a GPU kernel was found, over all ranks."),
    counter("ncclscope_kernel_seconds", SERIES_LABELS, _PER_SERIES,
            "Time that the kernels of matched operations ran, waiting for other ranks included, over all ranks."),
    counter("ncclscope_joined_kernel_seconds", SERIES_LABELS, _PER_SERIES,
            "The part of the kernel time for which it is known how much of it was waiting: divide the wait by this."),
    counter("ncclscope_wait_seconds", SERIES_LABELS, _PER_SERIES,
            "Time that kernels waited for the last rank to arrive, over all ranks."),
    counter("ncclscope_collectives", KIND_LABELS, _PER_KIND,
            "Collectives whose kernels were seen on two ranks or more."),
    counter("ncclscope_transfer_seconds", KIND_LABELS, _PER_KIND,
            "Time from the last rank's arrival to the end, summed over the collectives that were joined."),
    histogram("ncclscope_collective_duration_seconds", HISTOGRAM_LABELS, _PER_HISTOGRAM,
              "Kernel time of one collective, the mean of the ranks that were seen, waiting included."),
    histogram("ncclscope_collective_wait_seconds", HISTOGRAM_LABELS, _PER_HISTOGRAM,
              "Longest wait of any rank in one collective for the last rank to arrive."),
    histogram("ncclscope_collective_busbw_bytes_per_second", HISTOGRAM_LABELS, _PER_HISTOGRAM,
              "Bus bandwidth of the transfer of one collective of more than 1 MiB, without the waiting."),
    # How fast it was
    gauge("ncclscope_busbw_bytes_per_second", SERIES_LABELS, _PER_SERIES,
          "Bus bandwidth of the transfer, without the waiting: median over the last minute that has data."),
    gauge("ncclscope_efficiency_ratio", (*SERIES_LABELS, "reference"), f"{_PER_SERIES} x references",
          "Bus bandwidth divided by a named reference: topology (what the wires can do) or baseline (measured)."),
    gauge("ncclscope_bandwidth_drift_ratio", SERIES_LABELS, _PER_SERIES,
          "Bus bandwidth against the best that this series has shown, minus one: -0.2 is a fifth slower."),
    gauge("ncclscope_transfer_over_expected_ratio", SERIES_LABELS, _PER_SERIES,
          "Time of the transfer over what the run of --calibration says it should take: 1.5 is half again as long."),
    gauge("ncclscope_wait_ratio", ("job", "communicator", "parallelism"), _PER_COMMUNICATOR,
          "Share of the kernel time of collectives that was waiting for the last rank, over the last minute measured."),
    gauge("ncclscope_rank_wait_ratio", ("job", "rank"), f"the {MAX_RANKS} ranks of a job that wait least or most",
          "Share of a global rank's kernel time that was waiting, over the last minutes; a late rank waits least."),
    gauge("ncclscope_host_wait_ratio", ("job", "host"), "hosts of a job",
          "The same of a host, mean of its ranks: the host that waits least has the late rank."),
    # What NCCL Inspector told
    counter("ncclscope_inspector_records", KIND_LABELS, _PER_KIND,
            "Completed operations that NCCL Inspector reported, over all ranks."),
    counter("ncclscope_inspector_kernel_seconds", KIND_LABELS, _PER_KIND,
            "Time that their kernels ran as NCCL Inspector says, waiting for other ranks included, over all ranks."),
    counter("ncclscope_inspector_outcomes", ("job", "outcome"), "jobs x 3 outcomes",
            "Records of NCCL Inspector by what became of them: with_operation, without_operation, not_gpu_timed."),
    gauge("ncclscope_inspector_busbw_ratio", KIND_LABELS, _PER_KIND,
          "Bus bandwidth as NCCL Inspector prints it over that of the kernel, both with waiting: 1 is agreement."),
    # How much of an iteration it is
    gauge("ncclscope_iteration_seconds", ("job", "percentile"), f"{_PER_JOB} x 2 percentiles",
          "Duration of the recent training iterations over all ranks: the 50th and 90th percentile."),
    counter("ncclscope_steps", ("job",), _PER_JOB,
            "Training steps that the job has made, of those whose duration is known."),
    counter("ncclscope_step_seconds", ("job",), _PER_JOB,
            "What these steps took together: divide it by their number."),
    gauge("ncclscope_communication_ratio", ("job",), _PER_JOB,
          "Share of the recent iterations in which a rank's GPU ran a NCCL kernel, waiting included."),
    gauge("ncclscope_exposed_communication_ratio", ("job",), _PER_JOB,
          "Share of the recent iterations in which a rank's GPU ran NCCL kernels only: communication nothing hid."),
    gauge("ncclscope_step_part_seconds", ("job", "part", "parallelism"), "jobs x 9 parts x kinds of parallelism",
          "Where the recent steps of a rank go, mean over ranks and steps whose kernels are all known: computation, "
          "hidden, exposed_transfer, exposed_wait, bubble, imbalance, late, exposed or idle; they sum up to the step."),
    gauge("ncclscope_model_flops_utilization_ratio", ("job",), _PER_JOB,
          "Operations of the model in a step as a share of what the GPUs' 16-bit peak allows in the median iteration "
          "(MFU)."),
    gauge("ncclscope_hardware_flops_utilization_ratio", ("job",), _PER_JOB,
          "The same with what is computed again in the backward pass (HFU)."),
    # What it should communicate
    gauge("ncclscope_plan_known", ("job", "source"), _PER_JOB,
          "Always 1: the job is held against a description (serve --model), the source of which is given."),
    gauge("ncclscope_expected_operations", ("job", "parallelism", "op"), "jobs x kinds of groups x operations",
          "Operations of an iteration by the description, of the rank that has most of the ranks that were looked at."),
    gauge("ncclscope_expected_bytes", ("job", "parallelism", "op"), "jobs x kinds of groups x operations",
          "Bytes of these operations, elements x type."),
    gauge("ncclscope_expected_step_seconds", ("job", "bound"), "jobs x 3",
          "What a step should take by the description and the calibration of another run: low, typical or high; four "
          "of five jobs lie between low and high."),
    gauge("ncclscope_unexplained_operations", ("job", "parallelism"), "jobs x kinds of groups",
          "Operations of the last look that are too many or missing for no known reason, over all that it saw."),
    # Who communicates
    gauge("ncclscope_communicators", ("job",), _PER_JOB,
          "Communicators that the service knows."),
    gauge("ncclscope_communicators_summed", ("job",), _PER_JOB,
          'Communicators without series of their own, which are summed as communicator="other".'),
    gauge("ncclscope_communicator_info", ("job", "communicator", "comm_id", "size", "parallelism", "identity", "hosts"),
          _PER_COMMUNICATOR,
          "Always 1: what a communicator's short name stands for; hosts is how many it spans."),
    # How much of it is known
    gauge("ncclscope_alignment_matched_ratio", ("job",), _PER_JOB,
          "Share of the recent operations inside a capture for which the kernel was found."),
    counter("ncclscope_alignment_operations", ("job", "match"), "jobs x 5 states",
            "Operations whose alignment is settled, by what became of them; all five once there are any."),
    counter("ncclscope_numbers_healed", ("job", "reason"), "jobs x 5 reasons",
            "Lost log lines that were found, by what showed them: kernel, overlap, op_count, ranks or steps."),
    counter("ncclscope_numbers_uncertain", ("job",), _PER_JOB,
            "Operations beside lost lines whose place among those around them nothing shows: they are not measured."),
    counter("ncclscope_alignment_checked", ("job",), _PER_JOB,
            "Operations whose alignment was checked against an exact join through NVTX ranges, which wins."),
    counter("ncclscope_alignment_disagreements", ("job",), _PER_JOB,
            "Checked operations to which the alignment gave another kernel, or one where there is none."),
    gauge("ncclscope_captured_ratio", ("job",), _PER_JOB,
          "Share of the last minutes that captures of GPU kernels cover, mean over the processes that log."),
    counter("ncclscope_gaps", ("reason",), _PER_REASON,
            "Stretches of a source that were lost or skipped."),
    # Clocks
    gauge("ncclscope_clock_offset_seconds", ("host",), _PER_HOST,
          "Host clock minus the reference clock of its job, now, by the host's fitted line."),
    gauge("ncclscope_stamp_offset_seconds", ("job", "host"), "hosts of jobs that the service keeps",
          "Stamps of the log minus their arrival at the service, of the process on the host where they differ most."),
    gauge("ncclscope_clock_drift_ratio", ("host",), _PER_HOST,
          "How much faster the host's clock runs than the reference clock: 1e-6 is 1 ppm."),
    gauge("ncclscope_clock_uncertainty_seconds", ("host",), _PER_HOST,
          "Standard deviation of the host's clock offset."),
    gauge("ncclscope_clock_violation_ratio", (), _ONE,
          "Share of causality constraints that fail after the clocks are corrected, in the worst job: near 0 where all "
          "is well."),
    # What is wrong
    gauge("ncclscope_findings", ("job", "kind", "severity"), "jobs x kinds x 3 severities, 0 where there is none",
          "Findings that are open now."),
    gauge("ncclscope_finding_info", _CULPRITS,
          f"the {MAX_FINDINGS} gravest open findings; at most 8 ranks and 4 hosts are named",
          "Always 1: a finding that is open now, with the culprits it names, if it names any."),
    gauge("ncclscope_finding_muted", _CULPRITS, "those of ncclscope_finding_info that somebody has muted",
          "Always 1: that finding is muted now, and fires no alert; its labels are those of ncclscope_finding_info."),
    gauge("ncclscope_finding_confidence_ratio", _CULPRITS, "as ncclscope_finding_info",
          "How sure the service is of that finding, from 0 to 1: the largest of those that name these culprits."),
    gauge("ncclscope_finding_cost_seconds", _CULPRITS, "those of ncclscope_finding_info that cost steps time",
          "By how much that finding makes each step longer, where it is known."),
    gauge("ncclscope_finding_loss_ratio", _CULPRITS, "those of ncclscope_finding_info that cost bandwidth",
          "Share of the bandwidth of the groups of that finding that is lost, where it is known."),
    # Agents
    gauge("ncclscope_agent_connected", _AGENT_LABELS, _PER_AGENT,
          "1 while the agent's session is open, else 0."),
    gauge("ncclscope_agent_missing", _AGENT_LABELS, _PER_AGENT,
          "1 where the agent's session is closed and it did not say goodbye, else 0."),
    counter("ncclscope_agent_lines", _AGENT_LABELS, _PER_AGENT,
            "Lines of logs that the agent has read."),
    counter("ncclscope_agent_read_bytes", _AGENT_LABELS, _PER_AGENT,
            "Bytes of logs and exports that the agent has read."),
    gauge("ncclscope_agent_lag_seconds", _AGENT_LABELS, _PER_AGENT,
          "How far a connected agent is behind the files that it reads."),
    gauge("ncclscope_agent_unread_bytes", _AGENT_LABELS, _PER_AGENT,
          "Bytes in the logs that a connected agent has seen and not read: they wait there while it has no room."),
    gauge("ncclscope_agent_queued_batches", _AGENT_LABELS, _PER_AGENT,
          "Batches that the agent has read and the service has not acknowledged."),
    gauge("ncclscope_agent_spool_bytes", _AGENT_LABELS, _PER_SPOOL,
          "What the agent's spool takes on its disk."),
    gauge("ncclscope_agent_spool_oldest_seconds", _AGENT_LABELS, _PER_SPOOL,
          "Age of what waits longest in the agent's spool, as the agent last said; 0 where nothing waits."),
    counter("ncclscope_agent_spool_dropped_batches", _AGENT_LABELS, _PER_SPOOL,
            "Batches that were lost to the agent's spool: too old, damaged, or of no use to a service without state."),
    counter("ncclscope_agent_spool_replayed_batches", _AGENT_LABELS, _PER_SPOOL,
            "Batches that the agent has read back from its spool."),
    counter("ncclscope_agent_spool_failures", _AGENT_LABELS, _PER_SPOOL,
            "Writes to the agent's spool that failed: the disk is full or broken. They are tried again."),
    counter("ncclscope_agent_cpu_seconds", _AGENT_LABELS, _PER_AGENT,
            "CPU time that the agent has used."),
    gauge("ncclscope_agent_resident_memory_bytes", _AGENT_LABELS, _PER_AGENT,
          "Resident memory of the agent."),
    counter("ncclscope_agent_sent_bytes", _AGENT_LABELS, _PER_AGENT,
            "Bytes that the agent gave to its connection, what was sent again included."),
    gauge("ncclscope_agent_slowed", _AGENT_LABELS, _PER_AGENT,
          "1 while an agent rests because it has used up its budget of processor or memory."),
    counter("ncclscope_agent_files_skipped", ("agent", "host", "reason"),
            f"{_PER_AGENT} x 3 reasons, where there is one",
            "Files that an agent could not read: file_unreadable and file_too_many at each look, export_refused once."),
    counter("ncclscope_agent_lines_skipped", ("reason",), _PER_REASON,
            "Lines and records that were read and not used, over all agents."),
    counter("ncclscope_agent_lines_understood", ("family",), "a fixed set of line families in the code",
            "Lines and records that were understood, over all agents."),
    # The service itself
    counter("ncclscope_sessions_refused", ("reason",), _PER_REASON,
            "Sessions of agents that the service refused or closed."),
    counter("ncclscope_http_refused", ("reason",), _PER_REASON,
            "HTTP connections that the service closed, and requests that it refused."),
    gauge("ncclscope_ingest_lag_seconds", (), _ONE,
          "From the reading of a line by an agent to its place in these metrics, for the newest line."),
    gauge("ncclscope_ingest_backlog_batches", (), _ONE,
          "Batches that connected agents hold because the service has not taken them yet, as they last said."),
    gauge("ncclscope_window_operations", (), _ONE,
          "Operations that the service keeps in memory."),
    counter("ncclscope_rows_uncounted", (), _ONE,
            "Collectives that left the memory before histograms had counted them."),
    gauge("ncclscope_tick_seconds", (), _ONE,
          "How long the last pass over what had come took: aligning, joining, measuring, detecting."),
    counter("ncclscope_mistakes", ("where",), _PER_REASON,
            "What our own code failed on and left out, by where: please report it, with the service's log."),
    gauge("ncclscope_journal_bytes", (), _ONE,
          "What the journal takes on disk."),
    gauge("ncclscope_journal_waiting_bytes", (), _ONE,
          "Received, and not on disk yet: agents keep it until then."),
    gauge("ncclscope_journal_write_seconds", (), _ONE,
          "How long the last group of entries took to reach the disk, or takes so far."),
    counter("ncclscope_journal_errors", (), _ONE,
            "Writes to the journal that failed and are made again."),
    gauge("ncclscope_journal_failing", (), _ONE,
          "1 while what comes cannot be kept: nothing is acknowledged, agents keep it."),
    gauge("ncclscope_journal_damaged", (), _ONE,
          "State files and stretches of the journal that were not whole at the last start."),
    gauge("ncclscope_journal_missing_entries", (), _ONE,
          "Entries lost, or behind one that was, at the last start: agents send again what they have of it."),
    gauge("ncclscope_replayed_batches", (), _ONE,
          "Batches that the last start applied from the journal."),
    gauge("ncclscope_restore_seconds", (), _ONE,
          "How long the last start took to restore the state."),
    gauge("ncclscope_state_age_seconds", (), _ONE,
          "Since the state was written last, or tried to be."),
    gauge("ncclscope_state_bytes", (), _ONE,
          "Size of the newest state file."),
    gauge("ncclscope_state_write_seconds", (), _ONE,
          "How long the newest state file took to be written, beside the work."),
    gauge("ncclscope_state_pause_seconds", (), _ONE,
          "For how long work stood still when the process that writes it was made."),
    counter("ncclscope_operations_not_archived", (), _ONE,
            "Operations that left memory while the disk took nothing, and are in no parquet file."),
    gauge("ncclscope_page_clients", (), _ONE,
          "Open event streams of the live page."),
    counter("ncclscope_page_events_dropped", (), _ONE,
            "Events that were dropped because a page read too slowly."),
    counter("ncclscope_page_clients_refused", (), _ONE,
            "Listeners that were refused because too many were there."),
    counter("ncclscope_notifications", ("receiver", "outcome"),
            "webhooks that are configured x 3 outcomes, 0 where there is none",
            "Notifications of findings by what became of them: delivered, failed (tried for the last time), dropped."),
    counter("ncclscope_notification_retries", ("receiver",), "webhooks that are configured",
            "Attempts to deliver a notification that failed and are made again."),
    gauge("ncclscope_notifications_queued", ("receiver",), "webhooks that are configured",
          "Notifications that wait for their delivery."),
    gauge("ncclscope_build_info", ("version",), _ONE,
          "Always 1: the version of the service."),
)
# fmt: on
"""In the order in which they are exposed."""

METRICS_BY_NAME: Final = MappingProxyType({metric.name: metric for metric in METRICS})

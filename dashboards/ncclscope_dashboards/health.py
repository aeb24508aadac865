"""The dashboard of ncclscope itself."""

from __future__ import annotations

from typing import Final

from ncclscope_dashboards.board import HOST_VARIABLE, JOB_VARIABLE, Board
from ncclscope_dashboards.panels import NONE_IS_GOOD, PLAIN, Query, lines, number
from ncclscope_dashboards.queries import JOB, rate

_HOST: Final = 'host=~"$host"'


def health() -> Board:
    """Whether ncclscope itself sees and keeps up."""
    return Board(
        uid="ncclscope-health",
        title="ncclscope / Own health",
        description="Whether ncclscope sees enough and keeps up: agents, alignment, what was lost, the service itself.",
        variables=[JOB_VARIABLE, HOST_VARIABLE],
        rows=[
            (
                "Now",
                [
                    number("Agents connected", "Open sessions.", "short", f"sum(ncclscope_agent_connected{{{_HOST}}})"),
                    number(
                        "Agents gone",
                        "Agents that are gone and did not say goodbye.",
                        "short",
                        f"sum(ncclscope_agent_missing{{{_HOST}}})",
                        steps=NONE_IS_GOOD,
                    ),
                    number(
                        "Aligned",
                        "Of the operations inside a capture, those whose kernel was found.",
                        "percentunit",
                        f"min(ncclscope_alignment_matched_ratio{{{JOB}}})",
                        steps=((None, "red"), (0.9, "orange"), (0.98, "green")),
                    ),
                    number(
                        "Captured",
                        "Share of the last minutes that captures of kernels cover.",
                        "percentunit",
                        f"min(ncclscope_captured_ratio{{{JOB}}})",
                        steps=PLAIN,
                    ),
                    number(
                        "Behind",
                        "From the reading of a line to its place in these metrics.",
                        "s",
                        "max(ncclscope_ingest_lag_seconds)",
                        steps=((None, "green"), (2, "orange"), (10, "red")),
                    ),
                    number(
                        "Version",
                        "Of the service; the number of services that run it.",
                        "short",
                        "count by (version) (ncclscope_build_info)",
                    ),
                ],
            ),
            (
                "What is known",
                [
                    lines(
                        "Aligned",
                        "Of the recent operations inside a capture, those whose kernel was found.",
                        "percentunit",
                        Query(expr=f"ncclscope_alignment_matched_ratio{{{JOB}}}", legend="{{job}}"),
                        width=8,
                        highest=1,
                    ),
                    lines(
                        "Operations by match",
                        "What became of them; not_covered lies outside every capture.",
                        "ops",
                        Query(
                            expr=f"sum by (match) ({rate('ncclscope_alignment_operations_total', JOB)})",
                            legend="{{match}}",
                        ),
                        is_stacked=True,
                        width=8,
                    ),
                    lines(
                        "Against exact joins",
                        "Share of the checked operations to which the alignment gave another kernel.",
                        "percentunit",
                        Query(
                            expr=f"sum by (job) (ncclscope_alignment_disagreements_total{{{JOB}}}) / "
                            f"sum by (job) (ncclscope_alignment_checked_total{{{JOB}}})",
                            legend="{{job}}",
                        ),
                        width=8,
                    ),
                    lines(
                        "Lines understood",
                        "Lines and records by family, over all agents.",
                        "ops",
                        Query(
                            expr=f"sum by (family) ({rate('ncclscope_agent_lines_understood_total')})",
                            legend="{{family}}",
                        ),
                        is_stacked=True,
                        width=8,
                    ),
                    lines(
                        "Lines skipped",
                        "Lines and records that were read and not used, by reason.",
                        "ops",
                        Query(
                            expr=f"sum by (reason) ({rate('ncclscope_agent_lines_skipped_total')})",
                            legend="{{reason}}",
                        ),
                        width=8,
                    ),
                    lines(
                        "Lost",
                        "Stretches of a source that were lost or skipped, and sessions that were refused.",
                        "short",
                        Query(
                            expr="sum by (reason) (increase(ncclscope_gaps_total[$__rate_interval]))",
                            legend="{{reason}}",
                        ),
                        Query(
                            expr="sum by (reason) (increase(ncclscope_sessions_refused_total[$__rate_interval]))",
                            legend="refused: {{reason}}",
                        ),
                        width=8,
                    ),
                    lines(
                        "NCCL Inspector's records",
                        "By what became of them.",
                        "ops",
                        Query(
                            expr=f"sum by (outcome) ({rate('ncclscope_inspector_outcomes_total', JOB)})",
                            legend="{{outcome}}",
                        ),
                        width=8,
                    ),
                    lines(
                        "Groups without own series",
                        'Communicators that are summed as communicator="other".',
                        "short",
                        Query(expr=f"ncclscope_communicators_summed{{{JOB}}}", legend="{{job}}"),
                        width=8,
                    ),
                ],
            ),
            (
                "Agents",
                [
                    lines(
                        "Behind the files",
                        "How far a connected agent is behind what it reads.",
                        "s",
                        Query(expr=f"ncclscope_agent_lag_seconds{{{_HOST}}}", legend="{{agent}}"),
                        width=8,
                    ),
                    lines(
                        "Lines read",
                        "Lines of logs by agent.",
                        "ops",
                        Query(
                            expr=f"sum by (agent) ({rate('ncclscope_agent_lines_total', _HOST)})", legend="{{agent}}"
                        ),
                        width=8,
                    ),
                    lines(
                        "Bytes read",
                        "Logs and exports by agent.",
                        "Bps",
                        Query(
                            expr=f"sum by (agent) ({rate('ncclscope_agent_read_bytes_total', _HOST)})",
                            legend="{{agent}}",
                        ),
                        width=8,
                    ),
                    lines(
                        "CPU",
                        "Cores that an agent uses: what watching costs a node.",
                        "percentunit",
                        Query(
                            expr=f"sum by (agent) ({rate('ncclscope_agent_cpu_seconds_total', _HOST)})",
                            legend="{{agent}}",
                        ),
                        width=8,
                    ),
                    lines(
                        "Memory",
                        "Resident memory of an agent.",
                        "bytes",
                        Query(expr=f"ncclscope_agent_resident_memory_bytes{{{_HOST}}}", legend="{{agent}}"),
                        width=8,
                    ),
                    lines(
                        "Waiting to be sent",
                        "Batches that were read and are not acknowledged.",
                        "short",
                        Query(expr=f"ncclscope_agent_queued_batches{{{_HOST}}}", legend="{{agent}}"),
                        width=8,
                    ),
                ],
            ),
            (
                "The service",
                [
                    lines(
                        "Behind",
                        "From the reading of a line to its place in these metrics, for the newest line.",
                        "s",
                        Query(expr="ncclscope_ingest_lag_seconds", legend="{{instance}}"),
                        width=8,
                    ),
                    lines(
                        "Pass",
                        "How long the last pass over what had come took.",
                        "s",
                        Query(expr="ncclscope_tick_seconds", legend="{{instance}}"),
                        width=8,
                    ),
                    lines(
                        "Uncounted",
                        "Rows that left the memory before they were counted.",
                        "short",
                        Query(expr="increase(ncclscope_rows_uncounted_total[$__rate_interval])", legend="{{instance}}"),
                        width=8,
                    ),
                    lines(
                        "Notifications",
                        "Notifications of findings, by receiver and what became of them.",
                        "short",
                        Query(
                            expr="sum by (receiver, outcome) "
                            "(increase(ncclscope_notifications_total[$__rate_interval]))",
                            legend="{{receiver}} {{outcome}}",
                        ),
                        Query(expr="ncclscope_notifications_queued", legend="{{receiver}} waiting"),
                        width=8,
                    ),
                    lines(
                        "In memory",
                        "Operations that the service keeps.",
                        "short",
                        Query(expr="ncclscope_window_operations", legend="{{instance}}"),
                        width=8,
                    ),
                    lines(
                        "CPU",
                        "Cores that the service uses.",
                        "percentunit",
                        Query(
                            expr=f"{rate('process_cpu_seconds_total')} and on (instance) ncclscope_build_info",
                            legend="{{instance}}",
                        ),
                        width=8,
                    ),
                    lines(
                        "Memory",
                        "Resident memory of the service.",
                        "bytes",
                        Query(
                            expr="process_resident_memory_bytes and on (instance) ncclscope_build_info",
                            legend="{{instance}}",
                        ),
                        width=8,
                    ),
                    lines(
                        "Live pages",
                        "Open pages, and events that slow ones lost.",
                        "short",
                        Query(expr="ncclscope_page_clients", legend="open"),
                        Query(
                            expr="increase(ncclscope_page_events_dropped_total[$__rate_interval])", legend="events lost"
                        ),
                        width=8,
                    ),
                ],
            ),
        ],
    )

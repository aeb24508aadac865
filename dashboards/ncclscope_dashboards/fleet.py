"""The dashboard that one opens first: all jobs at one glance."""

from __future__ import annotations

from grafana_foundation_sdk.models import dashboard

from ncclscope_dashboards.board import JOB_VARIABLE, Board
from ncclscope_dashboards.panels import NONE_IS_GOOD, Query, history, lines, number, rows
from ncclscope_dashboards.queries import JOB, LARGE, TOGETHER, rate, wait_share


def fleet() -> Board:
    """All jobs at one glance."""
    return Board(
        uid="ncclscope-fleet",
        title="ncclscope / Fleet",
        description="Every training job that ncclscope watches: is communication slow anywhere, and is anybody stuck.",
        variables=[JOB_VARIABLE],
        rows=[
            ("Now", _fleet_numbers()),
            ("Jobs", [_jobs_table(), _findings_history()]),
            ("What is wrong", [findings_table()]),
            ("Course", _fleet_courses()),
        ],
    )


def _fleet_numbers() -> list[dashboard.Panel]:
    return [
        number(
            "Critical findings",
            "Findings that are open now and stop or ruin a job.",
            "short",
            f'sum(ncclscope_findings{{{JOB}, severity="critical"}})',
            steps=NONE_IS_GOOD,
        ),
        number(
            "Warnings",
            "Findings that are open now and cost a job time.",
            "short",
            f'sum(ncclscope_findings{{{JOB}, severity="warning"}})',
            steps=((None, "green"), (1, "orange")),
        ),
        number("Jobs", "Training jobs with communicators.", "short", f"count(ncclscope_communicators{{{JOB}}})"),
        number(
            "Communicators",
            "Communicators that the service knows, over all jobs.",
            "short",
            f"sum(ncclscope_communicators{{{JOB}}})",
        ),
        number(
            "Operations",
            "NCCL operations logged, over all ranks.",
            "ops",
            f"sum({rate('ncclscope_operations_total', JOB)})",
        ),
        number(
            "Agents gone",
            "Agents that are gone and did not say goodbye.",
            "short",
            "sum(ncclscope_agent_missing)",
            steps=((None, "green"), (1, "orange")),
        ),
    ]


def _jobs_table() -> dashboard.Panel:
    worst = f'min by (job) (ncclscope_efficiency_ratio{{{JOB}, reference="topology", {LARGE}}})'
    queries = [
        f'sum by (job) (ncclscope_findings{{{JOB}, severity!="info"}})',
        worst,
        wait_share("by (job) ", f"{JOB}, {TOGETHER}"),
        f"ncclscope_exposed_communication_ratio{{{JOB}}}",
        f'ncclscope_iteration_seconds{{{JOB}, percentile="50"}}',
        f"ncclscope_alignment_matched_ratio{{{JOB}}}",
        f"ncclscope_captured_ratio{{{JOB}}}",
    ]
    headings = ["Findings", "Slowest group", "Waiting", "Exposed", "Iteration", "Aligned", "Captured"]
    units = ["short", "percentunit", "percentunit", "percentunit", "s", "percentunit", "percentunit"]
    renamed = {"job": "Job"} | {f"Value #{ref}": heading for ref, heading in zip("ABCDEFG", headings, strict=True)}
    return rows(
        "Jobs",
        "One line for each job: open findings, the group that is farthest from its limit, the share of kernel "
        "time spent waiting, communication that nothing hid, iteration time, and how much of it all is known.",
        *(Query(expr=query, is_instant=True) for query in queries),
        renamed=renamed,
        units=dict(zip(headings, units, strict=True)),
        hidden=["percentile"],
        links={"Job": "/d/ncclscope-job?var-job=${__value.raw}&${__url_time_range}"},
        width=14,
    )


def _findings_history() -> dashboard.Panel:
    return history(
        "Findings",
        "Open findings by kind; dark while one is open.",
        "short",
        Query(expr=f"sum by (kind) (ncclscope_findings{{{JOB}}})", legend="{{kind}}"),
        steps=((None, "transparent"), (1, "red")),
        width=10,
        height=8,
        is_continuous=False,
    )


def findings_table() -> dashboard.Panel:
    """The open findings with the culprits that they name."""
    return rows(
        "Open findings",
        "Who is accused of what; the kind leads to its runbook, and the live page has the evidence.",
        Query(expr=f"ncclscope_finding_confidence_ratio{{{JOB}}}", is_instant=True),
        renamed={
            "kind": "Kind",
            "severity": "Severity",
            "job": "Job",
            "ranks": "Ranks",
            "hosts": "Hosts",
            "Value": "Sure",
        },
        units={"Sure": "percentunit"},
        links={"Kind": "${live_page}/runbooks#${__value.raw}", "Job": "${live_page}/#/job/${__value.raw}"},
        height=6,
    )


def _fleet_courses() -> list[dashboard.Panel]:
    return [
        lines(
            "Slowest group of each job",
            "Bus bandwidth over the limit by topology, of the group that is farthest from it; large messages only.",
            "percentunit",
            Query(
                expr=f'min by (job) (ncclscope_efficiency_ratio{{{JOB}, reference="topology", {LARGE}}})',
                legend="{{job}}",
            ),
        ),
        lines(
            "Waiting",
            "Share of kernel time that was waiting for the last rank; groups that span pipeline stages left out.",
            "percentunit",
            Query(
                expr=wait_share("by (job) ", f"{JOB}, {TOGETHER}"),
                legend="{{job}}",
            ),
            highest=1,
        ),
        lines(
            "Moved",
            "Message bytes by job, over all ranks.",
            "Bps",
            Query(expr=f"sum by (job) ({rate('ncclscope_bytes_total', JOB)})", legend="{{job}}"),
            is_stacked=True,
        ),
        lines(
            "Iteration time",
            "Median of the recent iterations.",
            "s",
            Query(expr=f'ncclscope_iteration_seconds{{{JOB}, percentile="50"}}', legend="{{job}}"),
        ),
    ]

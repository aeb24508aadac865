"""The dashboard of one communicator."""

from __future__ import annotations

from typing import Final

from ncclscope_dashboards.board import COMMUNICATOR_VARIABLE, JOB_VARIABLE, PARALLELISM_VARIABLE, Board
from ncclscope_dashboards.panels import Query, lines, rows
from ncclscope_dashboards.queries import KIND, rate

_ONE: Final = f'{KIND}, communicator=~"$communicator"'
_KEYS: Final = "job, communicator, parallelism, op, size_class"


def communicator() -> Board:
    """One communicator, or a few beside each other."""
    series = "{{communicator}} {{op}} {{size_class}}"
    limit = (
        f"ncclscope_busbw_bytes_per_second{{{_ONE}}} / ignoring (reference) group_right () "
        f"ncclscope_efficiency_ratio{{{_ONE}}}"
    )
    mean = "sum by ({keys}) ({upper}) / sum by ({keys}) ({lower})".format
    return Board(
        uid="ncclscope-communicator",
        title="ncclscope / Communicator",
        description="One communicator: how fast each of its operations is against its limits, and how long it waits.",
        variables=[JOB_VARIABLE, PARALLELISM_VARIABLE, COMMUNICATOR_VARIABLE],
        rows=[
            (
                "How fast",
                [
                    lines(
                        "Bus bandwidth and limits",
                        "Of the transfer, without the waiting; dashed, what it is compared with.",
                        "Bps",
                        Query(expr=f"ncclscope_busbw_bytes_per_second{{{_ONE}}}", legend=series),
                        Query(expr=limit, legend=series + " {{reference}} limit", is_dashed=True),
                        width=24,
                        height=10,
                        is_table=True,
                    ),
                    lines(
                        "Efficiency",
                        "Bus bandwidth over a named reference.",
                        "percentunit",
                        Query(expr=f"ncclscope_efficiency_ratio{{{_ONE}}}", legend=series + " of {{reference}}"),
                    ),
                    lines(
                        "Drift",
                        "Bus bandwidth against the best that it has shown: -0.2 is a fifth slower.",
                        "percentunit",
                        Query(expr=f"ncclscope_bandwidth_drift_ratio{{{_ONE}}}", legend=series),
                        lowest=None,
                    ),
                ],
            ),
            (
                "How long",
                [
                    lines(
                        "Waiting",
                        "Share of kernel time that was waiting for the last rank.",
                        "percentunit",
                        Query(expr=f"ncclscope_wait_ratio{{{_ONE}}}", legend="{{communicator}}"),
                        highest=1,
                        width=8,
                    ),
                    lines(
                        "Waiting of kernels",
                        "Share of kernel time that was waiting, by operation and size.",
                        "percentunit",
                        Query(
                            expr=mean(
                                keys=_KEYS,
                                upper=rate("ncclscope_wait_seconds_total", _ONE),
                                lower=rate("ncclscope_joined_kernel_seconds_total", _ONE),
                            ),
                            legend=series,
                        ),
                        width=8,
                        highest=1,
                    ),
                    lines(
                        "Kernel time",
                        "Seconds per second that its kernels ran, waiting included, over all ranks.",
                        "short",
                        Query(expr=f"sum by ({_KEYS}) ({rate('ncclscope_kernel_seconds_total', _ONE)})", legend=series),
                        width=8,
                        is_stacked=True,
                    ),
                ],
            ),
            (
                "What it moves",
                [
                    lines(
                        "Operations",
                        "Logged, over all ranks.",
                        "ops",
                        Query(expr=f"sum by ({_KEYS}) ({rate('ncclscope_operations_total', _ONE)})", legend=series),
                        is_stacked=True,
                    ),
                    lines(
                        "Bytes",
                        "Message bytes, over all ranks.",
                        "Bps",
                        Query(expr=f"sum by ({_KEYS}) ({rate('ncclscope_bytes_total', _ONE)})", legend=series),
                        is_stacked=True,
                    ),
                    rows(
                        "What the names stand for",
                        "commId, ranks and hosts of each communicator.",
                        Query(expr=f"ncclscope_communicator_info{{{_ONE}}}", is_instant=True),
                        renamed={
                            "communicator": "Communicator",
                            "parallelism": "Parallelism",
                            "size": "Ranks",
                            "hosts": "Hosts",
                            "comm_id": "commId",
                            "identity": "Known by",
                            "job": "Job",
                        },
                        units={},
                        hidden=["Value"],
                    ),
                ],
            ),
        ],
    )

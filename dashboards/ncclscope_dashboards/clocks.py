"""The dashboard of the hosts' clocks."""

from __future__ import annotations

from typing import Final

from ncclscope_dashboards.board import HOST_VARIABLE, JOB_VARIABLE, Board
from ncclscope_dashboards.panels import Query, lines, number

_HOST: Final = 'host=~"$host"'


def clocks() -> Board:
    """The hosts' clocks."""
    return Board(
        uid="ncclscope-clocks",
        title="ncclscope / Clocks",
        description="The hosts' clocks against the reference clock, estimated from the ends of collectives.",
        variables=[JOB_VARIABLE, HOST_VARIABLE],
        rows=[
            (
                "Now",
                [
                    number(
                        "Largest offset",
                        "Host clock minus reference clock.",
                        "s",
                        f"max(abs(ncclscope_clock_offset_seconds{{{_HOST}}}))",
                        width=6,
                    ),
                    number(
                        "Largest drift",
                        "How much faster or slower a clock runs: 1e-6 is 1 ppm.",
                        "percentunit",
                        f"max(abs(ncclscope_clock_drift_ratio{{{_HOST}}}))",
                        width=6,
                    ),
                    number(
                        "Largest uncertainty",
                        "Standard deviation of an offset: what two hosts can be compared to.",
                        "s",
                        f"max(ncclscope_clock_uncertainty_seconds{{{_HOST}}})",
                        width=6,
                        steps=((None, "green"), (1e-5, "orange"), (1e-3, "red")),
                    ),
                    number(
                        "Order checks that fail",
                        "Share of causality constraints that fail after correction.",
                        "percentunit",
                        "ncclscope_clock_violation_ratio",
                        width=6,
                        steps=((None, "green"), (0.001, "orange"), (0.01, "red")),
                    ),
                ],
            ),
            (
                "Course",
                [
                    lines(
                        "Offset",
                        "Host clock minus reference clock; a jump is a clock that was set.",
                        "s",
                        Query(expr=f"ncclscope_clock_offset_seconds{{{_HOST}}}", legend="{{host}}"),
                        lowest=None,
                        is_table=True,
                    ),
                    lines(
                        "Uncertainty",
                        "Standard deviation of the offset.",
                        "s",
                        Query(expr=f"ncclscope_clock_uncertainty_seconds{{{_HOST}}}", legend="{{host}}"),
                        is_table=True,
                    ),
                    lines(
                        "Drift",
                        "How much faster a clock runs than the reference clock.",
                        "ppm",
                        Query(expr=f"ncclscope_clock_drift_ratio{{{_HOST}}} * 1e6", legend="{{host}}"),
                        lowest=None,
                        is_table=True,
                    ),
                    lines(
                        "Order checks that fail",
                        "Share of causality constraints that fail after correction: near 0 where all is well.",
                        "percentunit",
                        Query(expr="ncclscope_clock_violation_ratio", legend="failing"),
                    ),
                ],
            ),
        ],
    )

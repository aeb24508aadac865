"""The dashboard of ranks and nodes: who waits for whom."""

from __future__ import annotations

from ncclscope_dashboards.board import JOB_VARIABLE, Board
from ncclscope_dashboards.panels import WAIT, Query, history, lines
from ncclscope_dashboards.queries import JOB


def ranks() -> Board:
    """Who waits for whom."""
    return Board(
        uid="ncclscope-ranks",
        title="ncclscope / Ranks and nodes",
        description="Who waits for whom: the rank or node that does not wait while all others do is the late one.",
        variables=[JOB_VARIABLE],
        rows=[
            (
                "Nodes",
                [
                    history(
                        "Waiting by node",
                        "Share of the kernel time of a node's ranks that was waiting. A late node is the "
                        "pale row among dark ones. Groups that span pipeline stages are left out.",
                        "percentunit",
                        Query(expr=f"ncclscope_host_wait_ratio{{{JOB}}}", legend="{{host}}"),
                        steps=WAIT,
                        height=10,
                    ),
                ],
            ),
            (
                "Ranks",
                [
                    history(
                        "Waiting by rank",
                        "The same by global rank: the 32 ranks of a job that wait least or most.",
                        "percentunit",
                        Query(expr=f"ncclscope_rank_wait_ratio{{{JOB}}}", legend="{{rank}}"),
                        steps=WAIT,
                        height=14,
                    ),
                    lines(
                        "Ranks that wait least",
                        "The candidates for being late: five ranks of a job.",
                        "percentunit",
                        Query(expr=f"bottomk(5, ncclscope_rank_wait_ratio{{{JOB}}})", legend="rank {{rank}}"),
                        highest=1,
                        is_table=True,
                    ),
                    lines(
                        "Ranks that wait most",
                        "Those who pay for it: five ranks of a job.",
                        "percentunit",
                        Query(expr=f"topk(5, ncclscope_rank_wait_ratio{{{JOB}}})", legend="rank {{rank}}"),
                        highest=1,
                        is_table=True,
                    ),
                ],
            ),
        ],
    )

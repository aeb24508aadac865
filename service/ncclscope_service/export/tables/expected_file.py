"""Rows of `expected.parquet`: every line of every rank and whole iteration, expected and observed."""

# pyright: reportUnknownParameterType=false
# (pyarrow carries no types)
from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import pyarrow as pa

from ncclscope_service.export.tables import schema
from ncclscope_service.job.plan import Plan

_ROWS_AT_ONCE: Final = 65_536


def expected_tables(plans: Mapping[str, Plan]) -> Iterator[pa.Table]:
    """Rows of `expected.parquet`, a bounded number at a time: every line of every rank and whole iteration."""
    records: list[dict[str, object]] = []
    for plan in plans.values():
        for (rank, iteration), difference in plan.explanation.differences.items():
            for row in difference.rows:
                comm_ids = dict.fromkeys(plan.lines.comm_ids.get(name, name) for name in row.communicators)
                records.append(
                    {
                        "job": plan.job,
                        "comm_id": " ".join(comm_ids) or None,
                        "parallelism": " ".join(row.groups) or None,
                        "comm_size": row.ranks,
                        "rank": rank,
                        "iteration": iteration,
                        "op": row.op,
                        "dtype": row.dtype.lower(),
                        "count": row.elements,
                        "expected": row.expected,
                        "observed": row.observed,
                        "logged_bytes": row.logged_bytes,
                        "message_bytes": row.message_bytes,
                        "wire_bytes": round(row.wire_bytes),
                        "reason": row.reason,
                        "rules": ", ".join(name for name, _ in row.rules) or None,
                        "is_control": row.is_control,
                    }
                )
            if len(records) >= _ROWS_AT_ONCE:
                yield pa.Table.from_pylist(records, schema=schema.EXPECTED)
                records = []
    if records:
        yield pa.Table.from_pylist(records, schema=schema.EXPECTED)

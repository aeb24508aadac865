"""What two peers' rules say of the same kernels: those of the last half minute of a simulated job.

*Lowest bandwidth*: the rank with the lowest bus bandwidth, bytes by the duration of its own kernels, is the straggler
(ROCm cvs, `lib/rccl_lib.py`). *Relative score*: for each kernel the fastest rank's median duration is the reference; a
rank's score is the mean of reference / own median, weighted by time, and below 0.75 it is a straggler (NVIDIA's
resiliency extension, `nvidia_resiliency_ext/attribution/straggler/reporting.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

Numbers = NDArray[np.int64]

_LOOKED_AT_NS: Final = 30_000_000_000
_LOWEST_SCORE: Final = 0.75
_COLUMNS: Final = (
    "rank",
    "comm_id",
    "kernel",
    "op",
    "start_ns",
    "duration_ns",
    "busbw_bytes_per_second",
    "transfer_ns",
)


@dataclass(frozen=True, slots=True)
class PeerNames:
    """Ranks that either rule names; empty where there is nothing to judge by."""

    lowest_bandwidth: frozenset[int] = frozenset()
    relative_score: frozenset[int] = frozenset()


def names(folder: Path) -> PeerNames:
    """What they say of a simulated job."""
    table = pq.read_table(folder / "truth" / "operations.parquet", columns=list(_COLUMNS))
    columns = {name: table[name].to_numpy(zero_copy_only=False) for name in _COLUMNS}
    known = ~np.isnan(columns["duration_ns"].astype(np.float64)) & (columns["busbw_bytes_per_second"] > 0)
    columns = {name: values[known] for name, values in columns.items()}
    if not known.any():
        return PeerNames()
    recent = columns["start_ns"] > columns["start_ns"].max() - _LOOKED_AT_NS
    ranks = columns["rank"][recent].astype(np.int64)
    durations = columns["duration_ns"][recent].astype(np.float64)
    moved = columns["busbw_bytes_per_second"][recent] * columns["transfer_ns"][recent].astype(np.float64) / 1e9
    of_rank = np.bincount(ranks, moved) / np.maximum(np.bincount(ranks, durations), 1) * 1e9
    return PeerNames(
        lowest_bandwidth=frozenset({int(of_rank.argmin())}),
        relative_score=_below_score(ranks, columns["kernel"][recent].astype(str), durations),
    )


def _below_score(ranks: Numbers, kernels: NDArray[np.str_], durations: NDArray[np.float64]) -> frozenset[int]:
    everyone = np.unique(ranks)
    medians = np.full((len(everyone), len(np.unique(kernels))), np.nan)
    totals = np.zeros_like(medians)
    for row, rank in enumerate(everyone.tolist()):
        for column, kernel in enumerate(np.unique(kernels).tolist()):
            mine = durations[(ranks == rank) & (kernels == kernel)]
            if len(mine):
                medians[row, column], totals[row, column] = np.median(mine), mine.sum()
    references = np.nanmin(medians, axis=0)
    scores = np.where(np.isnan(medians), 0.0, references / medians)
    by_rank = (scores * totals).sum(axis=1) / totals.sum(axis=1)
    return frozenset(everyone[by_rank < _LOWEST_SCORE].tolist())

"""How often healthy jobs are accused: simulated at the level of the detectors' own windows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray
from service.detect.simulated_job import ORIGIN_NS

from ncclscope_service.detect.context import Context, Group
from ncclscope_service.detect.late_rank import LateRank
from ncclscope_service.detect.statistics import QUICK, STEADY, DropWatch
from ncclscope_service.store import rows
from ncclscope_wire.batch import Columns

STEP_NS = 250_000_000


def correlated(random: np.random.Generator, shape: tuple[int, int], phi: float, heavy: bool) -> NDArray[np.float64]:
    """AR(1) columns of unit variance, Gaussian or with the tails of t4."""
    noise = random.standard_t(4, shape) / np.sqrt(2) if heavy else random.normal(size=shape)
    values = np.empty(shape)
    values[0] = noise[0]
    for row in range(1, len(values)):
        values[row] = phi * values[row - 1] + np.sqrt(1 - phi**2) * noise[row]
    return values


def drop_alarms(rule_name: str, series: int, windows: int, cv: float, phi: float, heavy: bool) -> int:
    """False alarms of one rule over so many healthy series, each from its birth."""
    rule = {"quick": QUICK, "steady": STEADY}[rule_name]
    random = np.random.default_rng(1)
    values = np.log(100e9) + cv * correlated(random, (windows, series), phi, heavy)
    alarms = 0
    for column in range(series):
        watch, was_on = DropWatch(rule), False
        for at, level in enumerate(values[:, column].tolist()):
            watch.ingest_window(at, level)
            alarms += watch.drop is not None and not was_on
            was_on = watch.drop is not None
    return alarms


def jittering_groups(
    groups: int, ranks: int, seconds: float, jitter: float, phi: float, seed: int
) -> Iterator[tuple[Columns, Context]]:
    """Batches of four seconds of groups whose ranks' compute times jitter, correlated from step to step."""
    random = np.random.default_rng(seed)
    steps = int(seconds * 1e9 / STEP_NS)
    context = Context(
        job="job",
        step_ns=STEP_NS,
        groups={
            index: Group(
                comm_id=str(index),
                parallelism="TP",
                global_ranks=tuple(range(index * ranks, (index + 1) * ranks)),
                hosts=("node",) * ranks,
            )
            for index in range(groups)
        },
    )
    lateness = correlated(random, (steps, groups * ranks), phi, heavy=True).reshape(steps, groups, ranks)
    ordered = np.sort(lateness, axis=2)
    blame = (ordered[:, :, -1] - ordered[:, :, -2]) * jitter * STEP_NS
    last = lateness.argmax(axis=2)
    for begin in range(0, steps, 16):
        part = slice(begin, min(steps, begin + 16))
        count = last[part].size
        batch = np.zeros(count, dtype=rows.COLLECTIVE)
        batch["communicator"] = np.tile(np.arange(groups), len(last[part]))
        batch["end_true_ns"] = ORIGIN_NS + np.repeat(np.arange(begin, begin + len(last[part])) * STEP_NS, groups)
        batch["last_rank"], batch["blame_ns"] = last[part].reshape(-1), blame[part].reshape(-1)
        batch["ranks_seen"], batch["confidence"] = ranks, 1.0
        yield batch, context


def late_rank_alarms(groups: int, ranks: int, seconds: float, jitter: float, phi: float, seed: int) -> int:
    """False names in so many seconds of a healthy job."""
    detector = LateRank()
    named = 0
    for batch, context in jittering_groups(groups, ranks, seconds, jitter, phi, seed):
        detector.ingest_collectives(batch, context)
        named = max(named, len(detector.findings()))
    return named


@pytest.mark.parametrize("rule", ["quick", "steady"])
def test_healthy_bandwidth_raises_no_alarm(rule: str) -> None:
    assert drop_alarms(rule, series=20, windows=720, cv=0.05, phi=0.6, heavy=True) == 0


def test_jittering_ranks_are_not_named() -> None:
    assert late_rank_alarms(groups=4, ranks=2, seconds=600, jitter=0.02, phi=0.6, seed=3) == 0
    assert late_rank_alarms(groups=6, ranks=4, seconds=300, jitter=0.02, phi=0.0, seed=5) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cv", "phi", "heavy"), [(0.05, 0.0, False), (0.05, 0.6, True), (0.1, 0.6, False), (0.1, 0.6, True)]
)
@pytest.mark.parametrize(("rule", "windows"), [("quick", 3600), ("steady", 2160)])
def test_200_healthy_series_raise_no_alarm(rule: str, windows: int, cv: float, phi: float, heavy: bool) -> None:
    """8.3 days of series by the quick rule, 50 by the steady one."""
    assert drop_alarms(rule, 200, windows, cv, phi, heavy) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("jitter", "phi"), [(0.003, 0.6), (0.02, 0.6), (0.05, 0.6), (0.02, 0.0)])
@pytest.mark.parametrize("ranks", [2, 8])
def test_two_hours_of_jittering_groups_name_nobody(ranks: int, jitter: float, phi: float) -> None:
    assert late_rank_alarms(groups=8, ranks=ranks, seconds=2 * 3600, jitter=jitter, phi=phi, seed=ranks) == 0

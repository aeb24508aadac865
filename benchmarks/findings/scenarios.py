"""The jobs: their shapes, their faults, and what is to be found in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from ncclscope_service.store.records import FindingKind
from ncclscope_simulator import SimulationConfig, parse_faults

_QUIET: Final = frozenset[FindingKind]()

_JOB: Final = SimulationConfig(
    layers=1, step_seconds=0.9, hidden=4096, sequence=2048, chunk_seconds=2.0, hang_seconds=40.0
)
SHAPES: Final[dict[str, SimulationConfig]] = {
    "8: tp2 pp2 dp2": replace(_JOB, nodes=2, gpus=4, tp=2, pp=2, dp=2),
    "8: fsdp": replace(_JOB, nodes=2, gpus=4, tp=1, pp=1, dp=8, fsdp=True, microbatches=2),
    "8: pp8": replace(_JOB, nodes=2, gpus=4, tp=1, pp=8, dp=1, microbatches=8),
    "16: tp2 pp2 dp4": replace(_JOB, nodes=4, gpus=4, tp=2, pp=2, dp=4, microbatches=2),
    "16: tp4 dp4": replace(_JOB, nodes=4, gpus=4, tp=4, pp=1, dp=4, microbatches=2),
    "16: ep4 dp16": replace(_JOB, nodes=4, gpus=4, tp=1, pp=1, dp=16, ep=4, microbatches=2),
    "32: tp2 ep4 dp16": replace(_JOB, nodes=4, gpus=8, tp=2, pp=1, dp=16, ep=4, microbatches=2),
    "32: tp4 pp2 dp4": replace(_JOB, nodes=4, gpus=8, tp=4, pp=2, dp=4, microbatches=2, sequence_parallel=False),
    "64: tp8 pp4 dp2": replace(_JOB, nodes=8, gpus=8, tp=8, pp=4, dp=2, microbatches=2, sequence_parallel=False),
    "32: tp4 pp2 dp4 sp": replace(_JOB, nodes=4, gpus=8, tp=4, pp=2, dp=4, microbatches=2),
    "64: tp8 pp4 dp2 sp": replace(_JOB, nodes=8, gpus=8, tp=8, pp=4, dp=2, microbatches=2),
    "32: tp8 dp4": replace(_JOB, nodes=4, gpus=8, tp=8, pp=1, dp=4, hidden=2048, step_seconds=2.0),
    "8: demo": replace(
        _JOB, nodes=4, gpus=2, tp=2, pp=2, dp=2, order="tp-pp-dp", layers=2, hidden=2048, step_seconds=0.4
    ),
    "32: tp4 pp2 dp4 by node": replace(_JOB, nodes=8, gpus=4, tp=4, pp=2, dp=4, order="tp-pp-dp", microbatches=2),
}
"""Ranks and their parallelism. Tensor parallelism within nodes, data and pipeline parallelism between them. All have
one layer per stage and few microbatches, to be played soon: a real step has many times their operations, in which
lateness shows the better. `sp`: with sequence parallelism, as smaller ones have it. `demo` is the job of `ncclscope
demo`; there and `by node` each node holds one stage of one replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """As in `SimulationConfig`."""

    compute_cv: float = 0.01
    bandwidth_cv: float = 0.03
    noise_correlation: float = 0.0
    imbalance: float = 0.0


NOISE: Final[dict[str, Noise]] = {
    "plain": Noise(),
    "calm": Noise(compute_cv=0.003),
    "correlated": Noise(compute_cv=0.02, bandwidth_cv=0.05, noise_correlation=0.6),
    "rough": Noise(compute_cv=0.05, bandwidth_cv=0.10, noise_correlation=0.6),
    "moe": Noise(compute_cv=0.02, bandwidth_cv=0.05, noise_correlation=0.6, imbalance=0.4),
}
"""Correlated noise has the tails of Student's t with four degrees of freedom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What is to be said of a job."""

    kinds: frozenset[FindingKind] = _QUIET
    """Any of these; none: nothing may be said."""
    ranks: tuple[int, ...] | None = None
    """Whom the finding must name; None: that is not compared."""
    hosts: tuple[str, ...] | None = None
    allowed: frozenset[FindingKind] = _QUIET
    """What may be said beside it, as it is true as well."""
    may_name_nobody: bool = False
    """Whether a finding without ranks is right too."""
    evidence: Mapping[str, str] = field(default_factory=dict[str, str])
    """What its evidence must say, too."""
    within: float | None = None
    """Seconds from the fault by which it is to be found; None: no bar."""
    from_step: int | None = None
    """Where the fault begins; None: where the first of the job does."""
    beside: Expected | None = None
    """Another fault of the same job that must be found as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One job."""

    family: str
    """The row of the table that it counts to."""
    name: str
    config: SimulationConfig
    expected: Expected
    fault_step: int | None = None
    """The step with which the fault begins."""
    healed_step: int | None = None
    """The first step without it; None: it lasts."""
    lagging: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds by which exports of hosts come later than they are finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    family: str
    shape: str
    noise: str = "plain"
    faults: tuple[str, ...] = ()
    steps: int = 60
    evaluate_every: int | None = None
    chunk_seconds: float = 2.0
    hang_seconds: float = 40.0
    lagging: Mapping[str, float] = field(default_factory=dict[str, float])
    expected: Expected = field(default_factory=Expected)

    def scenario(self, seed: int) -> Scenario:
        noise = NOISE[self.noise]
        config = replace(
            SHAPES[self.shape],
            compute_cv=noise.compute_cv,
            bandwidth_cv=noise.bandwidth_cv,
            noise_correlation=noise.noise_correlation,
            imbalance=noise.imbalance,
            chunk_seconds=self.chunk_seconds,
            hang_seconds=self.hang_seconds,
            iterations=self.steps,
            evaluate_every=self.evaluate_every,
            faults=parse_faults(self.faults),
            seed=seed,
        )
        first = min((fault.first for fault in config.faults if not fault.kind.startswith("drop")), default=None)
        healed = [fault.until for fault in config.faults if fault.until is not None and self.expected.kinds]
        lags = "".join(f"; {host} {seconds:g} s late" for host, seconds in self.lagging.items())
        name = f"{self.family}; {self.shape}; {self.noise}; {' '.join(self.faults) or 'no fault'}{lags}; seed {seed}"
        return Scenario(
            family=self.family,
            name=name,
            config=config,
            expected=self.expected,
            fault_step=first,
            healed_step=max(healed, default=None),
            lagging=self.lagging,
        )


_LATE: Final = frozenset({FindingKind.LATE_RANK})
_SLOW: Final = frozenset({FindingKind.SLOW_LINK})
_HANG: Final = frozenset({FindingKind.HANG})
_MISMATCH: Final = frozenset({FindingKind.MISMATCH})
_LOSSES: Final = frozenset({FindingKind.BLIND, FindingKind.CLOCK_FAULT})


def scenarios(*, seeds: int, short: bool) -> Iterator[Scenario]:
    """All jobs, each with so many seeds; `short`: a few of each kind."""
    for seed in range(1, seeds + 1):
        for draft in (
            *_healthy(),
            *_interrupted(),
            *_late(),
            *_late_behind_slow_links(),
            *_slow(),
            *_cards(),
            *_hangs(),
            *_mismatches(),
            *_sight(),
        ):
            if not short or draft.shape.startswith(("8", "16: tp")):
                yield draft.scenario(seed)


def _healthy() -> Iterator[_Draft]:
    for shape in SHAPES:
        if shape.endswith(("sp", "demo", "by node")):
            continue
        noise = ("moe", "correlated") if "ep" in shape else ("plain", "correlated", "rough")
        is_large = shape.startswith(("32", "64"))
        for each in noise if not is_large else ("moe",) if "ep" in shape else ("correlated",):
            kind = "MoE skew" if each == "moe" else "pipeline of 8" if shape == "8: pp8" else "noise"
            yield _Draft(family=f"healthy, {kind}", shape=shape, noise=each, steps=60)


def _interrupted() -> Iterator[_Draft]:
    """Healthy jobs that stand still, or start slowly."""
    evaluation = ("pause:at=40,seconds=25", "pause:at=70,seconds=12")
    checkpoint = ("pause:at=40,seconds=20,only=0",)
    # some compile longer than others, and the first transfers open connections
    start = (
        "late_rank:rank=3,ms=1500,until=2", "late_rank:rank=1,ms=700,from=1,until=3", "pause:at=1,seconds=8",
        "slow_link:node=1,factor=0.5,until=3",
    )  # fmt: skip
    for shape in ("8: tp2 pp2 dp2", "16: tp4 dp4"):
        for name, faults in (("evaluation", evaluation), ("checkpoint by rank 0", checkpoint), ("start-up", start)):
            steps = 60 if name == "start-up" else 80
            every = 40 if name == "evaluation" else None
            yield _Draft(
                family=f"healthy, {name}", shape=shape, noise="correlated", faults=faults, steps=steps,
                evaluate_every=every,
            )  # fmt: skip


def _late() -> Iterator[_Draft]:
    shapes = ("8: tp2 pp2 dp2", "16: tp2 pp2 dp4", "16: tp4 dp4", "32: tp4 pp2 dp4 sp", "64: tp8 pp4 dp2 sp")
    for ms, noises in ((0.2, ("calm",)), (1.0, ("calm", "plain")), (5.0, ("correlated",))):
        for noise in noises:
            for shape in shapes if noise != "plain" else shapes[:3]:
                expected = Expected(kinds=_LATE, ranks=(5,), within=20.0 if ms >= 1 else None)
                faults = (f"late_rank:rank=5,ms={ms},every=layer,from=20",)
                jitter = f"{NOISE[noise].compute_cv:.1%}"
                yield _Draft(
                    family=f"late rank, {ms:g} ms, jitter {jitter}", shape=shape, noise=noise, faults=faults,
                    expected=expected, steps=50,
                )  # fmt: skip
    # groups within hosts are seen as soon as their host is, those across hosts with the last of theirs
    faults = ("late_rank:rank=13,ms=20,from=10,every=layer",)
    for lagging in ({}, {"node03": 11.0}, {"node00": 7.0, "node02": 13.0}, {"node00": 22.0}):
        yield _Draft(
            family="late rank, 20 ms, exports of 10 s", shape="32: tp8 dp4", faults=faults, steps=50,
            chunk_seconds=10.0, lagging=lagging, expected=Expected(kinds=_LATE, ranks=(13,)),
        )  # fmt: skip
    for shape in ("8: fsdp", *shapes[:3]):  # of the first pipeline stage: the others wait for it anyway
        faults = ("late_rank:rank=1,ms=30,from=20",)
        expected = Expected(kinds=_LATE, ranks=(1,), within=20.0)
        yield _Draft(family="late rank, 30 ms once a step", shape=shape, faults=faults, expected=expected, steps=50)


def _late_behind_slow_links() -> Iterator[_Draft]:
    """Victims of both come late to their data-parallel groups: neither may be named."""
    link = Expected(kinds=_SLOW, hosts=("node01",), within=180.0, from_step=100)
    for shape, layer in (("8: demo", "4"), ("32: tp4 pp2 dp4 by node", "4,every=layer")):
        faults = (f"late_rank:rank=1,ms={layer},from=20", "slow_link:node=1,factor=0.5,from=100")
        yield _Draft(
            family="late rank and slow link", shape=shape, faults=faults, steps=160,
            expected=Expected(kinds=_LATE, ranks=(1,), within=20.0, beside=link),
        )  # fmt: skip
        yield _Draft(
            family="late rank whose host is seen late", shape=shape, faults=faults[:1], steps=100,
            expected=Expected(kinds=_LATE, ranks=(1,), within=36.0), lagging={"node00": 16.0},
        )  # fmt: skip


def _slow() -> Iterator[_Draft]:
    expected = Expected(kinds=_SLOW, hosts=("node01",), within=180.0)
    for loss in (20, 40, 60):
        for shape in ("16: tp2 pp2 dp4", "32: tp4 pp2 dp4", "64: tp8 pp4 dp2"):
            yield _Draft(
                family=f"slow link, {loss} %", shape=shape, noise="correlated", expected=expected, steps=95,
                faults=(f"slow_link:node=1,factor={1 - loss / 100:.1f},from=45",),
            )  # fmt: skip
    for shape in ("16: tp2 pp2 dp4", "32: tp4 pp2 dp4"):
        yield _Draft(
            family="slow link that heals, 40 %", shape=shape, noise="correlated", expected=expected, steps=125,
            faults=("slow_link:node=1,factor=0.6,from=45,until=75",),
        )  # fmt: skip
        yield _Draft(
            family="slow link from the first step", shape=shape, faults=("slow_link:node=1,factor=0.5",),
            expected=expected, steps=50,
        )  # fmt: skip
    yield _Draft(
        family="below the limit", shape="8: tp2 pp2 dp2", faults=("slow_link:node=1,factor=0.3",),
        expected=Expected(kinds=frozenset({FindingKind.BELOW_LIMIT}), ranks=(), within=180.0), steps=50,
    )  # fmt: skip


def _cards() -> Iterator[_Draft]:
    for gpus, family in ((1, "slow network card"), (2, "slow network card, shared by two")):
        for shape in ("16: tp2 pp2 dp4", "32: tp4 pp2 dp4"):
            ranks = tuple(SHAPES[shape].gpus + gpu for gpu in range(gpus))
            yield _Draft(
                family=family, shape=shape, noise="correlated", steps=80,
                faults=(f"slow_nic:node=1,gpu=0,gpus={gpus},factor=0.5,from=45",),
                expected=Expected(kinds=_SLOW, hosts=("node01",), ranks=ranks, within=180.0),
            )  # fmt: skip


def _hangs() -> Iterator[_Draft]:
    shapes = ("8: tp2 pp2 dp2", "16: tp4 dp4", "16: tp2 pp2 dp4", "64: tp8 pp4 dp2")
    for shape in shapes:
        yield _Draft(
            family="hang, not enqueued", shape=shape, faults=("hang:rank=5,at=40",),
            expected=Expected(kinds=_HANG, ranks=(5,), evidence={"state": "not_enqueued"}, within=15.0),
        )  # fmt: skip
    for shape in shapes[:3]:
        yield _Draft(
            family="hang, inside", shape=shape, faults=("hang:rank=5,at=40,how=inside",),
            expected=Expected(kinds=_HANG, ranks=(), evidence={"state": "inside"}, within=15.0),
        )  # fmt: skip
    for shape in shapes[:2]:
        yield _Draft(
            family="killed", shape=shape, faults=("kill:at=40",), hang_seconds=90.0,
            expected=Expected(kinds=frozenset({FindingKind.STOPPED_LOGGING, FindingKind.HANG}), within=90.0),
        )  # fmt: skip


def _mismatches() -> Iterator[_Draft]:
    for how, differs in (("count", "size"), ("operation", "operation"), ("order", "order")):
        for shape in ("16: tp4 dp4",) if how == "order" else ("8: fsdp", "16: tp4 dp4"):
            yield _Draft(
                family=f"mismatch, {how}", shape=shape, faults=(f"mismatch:rank=5,at=40,how={how}",),
                expected=Expected(
                    kinds=_MISMATCH, ranks=(5,), evidence={"differs_in": differs}, within=15.0, allowed=_HANG
                ),
            )  # fmt: skip
    for how in ("count", "order"):
        yield _Draft(
            family="mismatch, 1 % of lines lost", shape="16: tp4 dp4",
            faults=(f"mismatch:rank=5,at=40,how={how}", "drop_lines:ratio=0.01"),
            expected=Expected(
                kinds=_MISMATCH | _HANG, ranks=(5,), may_name_nobody=True, within=15.0, allowed=_LOSSES
            ),
        )  # fmt: skip


def _sight() -> Iterator[_Draft]:
    """Clocks and logs that are not what they should be."""
    for shape in ("8: tp2 pp2 dp2", "16: tp4 dp4"):
        yield _Draft(
            family="clock step", shape=shape, faults=("clock_step:node=1,ms=5,at=30",),
            expected=Expected(
                kinds=frozenset({FindingKind.CLOCK_FAULT}),
                hosts=("node01",) if shape.startswith("16") else ("node00", "node01"),
            ),
        )  # fmt: skip
        yield _Draft(
            family="1 % of lines and kernels lost", shape=shape,
            faults=("drop_lines:ratio=0.01", "drop_kernels:ratio=0.01"),
            expected=Expected(allowed=_LOSSES),
        )  # fmt: skip

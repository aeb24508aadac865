"""The plan of a job as it is kept and shown: what its description has it send, what it sent, and the reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRule:
    """One emission rule of a line."""

    operations: int
    source: str
    """File and version that it was read from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLine:
    """Operations of a rank and iteration that are alike."""

    groups: tuple[str, ...]
    """Of the description, that send it, or that have these ranks; empty if none has."""
    comm_size: int
    op: str
    dtype: str
    count: int | None
    """Elements; None: several sizes, or not known."""
    expected: int
    observed: int
    expected_bytes: int
    """Elements x type, as `logged_bytes`."""
    logged_bytes: int
    message_bytes: int
    wire_bytes: int
    reason: str
    rules: dict[str, PlanRule]
    is_control: bool
    why: str
    """Rules and reason in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanClass:
    """Ranks and iterations with equal lines."""

    ranks: tuple[int, ...]
    iterations: tuple[int, ...]
    rank_iterations: int
    lines: tuple[PlanLine, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanField:
    """One field of the description."""

    value: int | bool | str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEdit:
    """A change of one field after which nothing is unexplained."""

    field: str
    described: int | bool | str
    observed: int | bool | str
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """What a job should send and what it sent."""

    job: str
    model: str
    """The job in words."""
    verdict: str
    rules: str
    """Basis of the rules."""
    may_raise: bool
    """Whether a difference may be a finding."""
    not_covered: tuple[str, ...]
    not_nccl: tuple[PlanField, ...]
    fields: dict[str, PlanField]
    micro_batches: int
    batch: str
    """Where their number comes from."""
    rank_order: str
    iterations: tuple[int, ...]
    rank_iterations: int
    rank_iterations_with_lost_lines: int
    rank_iterations_skipped: int
    unexplained_operations: int
    unexplained_bytes: int
    edits: tuple[PlanEdit, ...]
    classes: tuple[PlanClass, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCell:
    """A sender and receiver whose bytes are not as expected."""

    sender: str
    receiver: str
    expected: int
    observed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTraffic:
    """Who should send how many bytes to whom in an iteration, and who does."""

    by: str
    """Kind of a place: rank, host, or hosts."""
    places: tuple[str, ...]
    expected: tuple[tuple[int, ...], ...]
    """A row for each sender, a column for each receiver, in the order of `places`. What routers spread is spread
    evenly."""
    observed: tuple[tuple[int, ...], ...] | None
    """The mean of `iterations`; None without any."""
    iterations: tuple[int, ...]
    """Whole on all ranks whose logs are there."""
    differing: tuple[PlanCell, ...]
    """More than 1 % of what the sender should send apart, the largest difference first; never what routers spread."""
    differing_known: int
    """How many there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanExperts:
    """The all-to-alls of tokens of one expert group."""

    comm_id: str
    ranks: tuple[int, ...]
    iterations: tuple[int, ...]
    expected: int
    """All-to-alls of an iteration."""
    exchanges: tuple[int, ...]
    """Those that were seen, by iteration; 0 where lines were lost."""
    is_whole: bool
    """As many as expected in all iterations, each with its transpose, and again in the backward pass."""
    imbalance: tuple[float | None, ...]
    """By iteration: tokens that the busiest rank gets over the mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRhythm:
    """Blocks of tensor-parallel operations of one rank."""

    rank: int
    stage: int
    expected: int
    """Blocks of an iteration: two for each micro-batch."""
    blocks: tuple[int, ...]
    """By iteration."""
    spread: float | None
    """How the length of a block scatters over iterations; None where kernels are not recorded."""
    beat: str
    """Verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPattern:
    """Who talks to whom, and when, by the description and in the log."""

    traffic: PlanTraffic
    experts: tuple[PlanExperts, ...]
    rhythm: tuple[PlanRhythm, ...]

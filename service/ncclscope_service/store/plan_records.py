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
    """What the rules rest on."""
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

"""One group's case against one rank: how late it is there, how sure that is, and what is said of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ncclscope_service.detect.context import Context, Group
from ncclscope_service.detect.findings import duration_text
from ncclscope_service.rows import Finding, FindingKind, Severity
from ncclscope_wire.terms import OPERATIONS

_UNEVEN: Final = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Accusation:
    """The case of one group."""

    communicator: int
    group: Group
    global_rank: int
    per_step_ns: float
    """Median blame per step."""
    per_operation_ns: float
    share: float
    """Of steps in which it was last."""
    largest_ns: float
    """Its usual largest lateness in a step."""
    firmness: float
    """Mean margin over its standard error."""
    steps: int
    operations: int
    hits: int
    since_ns: int
    last_ns: int
    wait_share: float
    """Of the time that every other rank of the group waits for it."""
    confidence: float
    op: int
    collectives: tuple[str, ...]
    """Those that waited longest for it."""

    @property
    def at_once_ns(self) -> float:
        """How far it is behind the others. What delays a rank shows in all that it does in an outer group until the
        next step, and is counted there again and again; in an inner one its peers wait for it each time."""
        return self.per_step_ns if self.is_inner else min(self.per_step_ns, self.largest_ns)

    @property
    def is_inner(self) -> bool:
        """Whether the group is the one in which lateness is born rather than passed on."""
        return self.group.parallelism in {"TP", "CP", "EP"}


def finding_of(rank: int, cases: list[Accusation], context: Context) -> Finding:
    """What is said of a late rank, by its strongest case."""
    case = cases[0]
    others = len(case.group.global_ranks) - 1
    hosts = context.hosts_of((rank,))
    operation = OPERATIONS[case.op].name if case.op < len(OPERATIONS) else "operations"
    wait = max(one.wait_share for one in cases)
    waiters = "the other rank waits" if others == 1 else f"the {others} other ranks wait"
    is_uneven = case.largest_ns > _UNEVEN * case.per_operation_ns
    how_late = f"up to {duration_text(case.largest_ns)}" if is_uneven else duration_text(case.per_operation_ns)
    return Finding(
        kind=FindingKind.LATE_RANK,
        severity=Severity.CRITICAL if wait >= 0.1 else Severity.WARNING,
        job=context.job,
        comm_id=case.group.comm_id,
        parallelism=case.group.parallelism,
        ranks=(rank,),
        hosts=hosts,
        since_ns=min(one.since_ns for one in cases),
        until_ns=None,
        confidence=round(max(one.confidence for one in cases), 3),
        summary=(
            f"rank {rank}{f' ({hosts[0]})' if hosts else ''} arrives {how_late} late in "
            f"{100 * case.hits / max(1, case.operations):.0f} % of {operation} of {case.group.name}; "
            f"{waiters} for it {100 * case.wait_share:.0f} % of each step"
        ),
        evidence={
            "blame_per_operation_ns": round(case.per_operation_ns),
            "blame_per_step_ns": round(case.per_step_ns),
            "steps_last": round(case.share * case.steps),
            "steps": case.steps,
            "operations_last": case.hits,
            "operations": case.operations,
            "wait_share": round(wait, 4),
            "largest_ns": round(case.largest_ns),
            "firmness": round(min(case.firmness, 1e6), 2),
            "collectives": list(case.collectives),
            "groups": [one.group.comm_id for one in cases],
            "from_ns": case.since_ns,
            "to_ns": case.last_ns,
        },
    )

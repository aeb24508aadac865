"""How the service is, for probes: `/healthz` (would a restart help?) and `/readyz` (may agents and people come?)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

MAX_TICK_AGE_SECONDS: Final = 60.0
"""A service that has not looked at what came for so long hangs. The longest look that was seen took 4 s."""
MIN_FREE_BYTES: Final = 256 * 1024**2
"""Less free space than that on the disk of --data is told, before it is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vital:
    """One thing that was looked at."""

    name: str
    is_ok: bool
    told: str
    """A sentence with numbers, either way."""
    is_fatal: bool = False
    """Where it is not ok, only a restart can mend it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeAnswer:
    """The JSON of a probe."""

    status: str
    """"ok", "degraded" (works, and something should be looked at), "failing"; "ready", "not_ready"."""
    reasons: tuple[str, ...]
    """What is wrong; empty where nothing is."""
    checks: dict[str, str]
    """All that was looked at, in words."""


def tick_vital(seconds_since: float | None) -> Vital:
    """Whether the loop that works on what came turns; None before its first turn."""
    if seconds_since is None:
        return Vital(name="tick", is_ok=True, told="not turned yet")
    told = f"turned {seconds_since:.1f} s ago"
    return Vital(name="tick", is_ok=seconds_since < MAX_TICK_AGE_SECONDS, told=told, is_fatal=True)


def disk_vital(*, trouble: str | None, free_bytes: int | None) -> Vital:
    """Whether the disk of --data takes what is written; `trouble`: what the last try said."""
    if trouble is not None:
        return Vital(name="disk", is_ok=False, told=f"cannot be written to: {trouble}")
    if free_bytes is None:
        return Vital(name="disk", is_ok=True, told="not looked at yet")
    told = f"{free_bytes // 1024**2} MiB are free"
    return Vital(name="disk", is_ok=free_bytes >= MIN_FREE_BYTES, told=told)


def journal_vital(trouble: str) -> Vital:
    """Whether what agents send can be kept; `trouble`: why not, empty where it can. Nothing is lost meanwhile."""
    return Vital(name="journal", is_ok=not trouble, told=trouble or "is written")


def liveness(vitals: Sequence[Vital]) -> tuple[HTTPStatus, ProbeAnswer]:
    """503 only where a restart would help: a full disk is no reason to forget what is in memory."""
    wrong = [vital for vital in vitals if not vital.is_ok]
    is_failing = any(vital.is_fatal for vital in wrong)
    status = "failing" if is_failing else "degraded" if wrong else "ok"
    return (HTTPStatus.SERVICE_UNAVAILABLE if is_failing else HTTPStatus.OK), _answer(status, vitals)


def readiness(is_ready: bool, why: str, vitals: Sequence[Vital]) -> tuple[HTTPStatus, ProbeAnswer]:
    """200 once both ports are open and what was kept is there again, and while the service lives."""
    status, _ = liveness(vitals)
    is_ready = is_ready and status is HTTPStatus.OK
    ready = Vital(name="ready", is_ok=is_ready, told=why)
    answer = _answer("ready" if is_ready else "not_ready", [ready, *vitals])
    return (HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE), answer


def _answer(status: str, vitals: Sequence[Vital]) -> ProbeAnswer:
    return ProbeAnswer(
        status=status,
        reasons=tuple(f"{vital.name}: {vital.told}" for vital in vitals if not vital.is_ok),
        checks={vital.name: vital.told for vital in vitals},
    )

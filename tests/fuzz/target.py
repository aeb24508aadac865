"""What a reader is to those that feed it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """One reader."""

    check: Callable[[bytes], None]
    """Raises nothing but what is wrong: the errors that a reader may answer with are caught in it."""
    seeds: Callable[[], Sequence[bytes]]

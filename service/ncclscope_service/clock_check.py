"""How far clocks may be believed: least uncertainties, and whether what was seen agrees with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SAME_HOST_SIGMA_NS: Final = 2_000.0
"""GPUs of one host end a collective 1 to 3 us apart: no averaging removes what is systematic of it."""
OTHER_HOST_SIGMA_NS: Final = 10_000.0
"""The same between hosts."""
VIOLATION_LIMIT: Final = 0.001
"""Share of operations that contradict causality beyond which nothing that compares ranks should be believed."""

_LEAST_OPERATIONS: Final = 100
_LEAST_VIOLATIONS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockCheck:
    """How well the last estimate explains the operations it was checked on."""

    operations: int = 0
    violations: int = 0
    """Operations in which, on the corrected clocks, a rank ends before another has started, beyond 3 sigma."""
    suspects: tuple[int, ...] = ()
    """Hosts whose causality bounds contradict each other, worst first."""

    @property
    def violation_ratio(self) -> float | None:
        """Violations per operation; None where none could be checked."""
        return self.violations / self.operations if self.operations else None

    @property
    def is_trusted(self) -> bool:
        """Whether ranks of different hosts may be compared; where too little was seen to judge, yes."""
        ratio = self.violation_ratio
        is_violated = (
            ratio is not None
            and self.operations >= _LEAST_OPERATIONS
            and self.violations >= _LEAST_VIOLATIONS
            and ratio > VIOLATION_LIMIT
        )
        return not is_violated and not self.suspects

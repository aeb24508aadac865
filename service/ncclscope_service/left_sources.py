"""What stays of sources whose places others have now: what was lost of them, as numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ncclscope_wire.records import SourceKind


@dataclass(slots=True)
class LeftSources:
    """What is known of all sources whose places were given to others."""

    kinds: Counter[SourceKind] = field(default_factory=Counter[SourceKind])
    gaps: Counter[str] = field(default_factory=Counter[str])
    """By reason."""
    gaps_of_hosts: Counter[tuple[SourceKind, str]] = field(default_factory=Counter[tuple[SourceKind, str]])
    torn_lines: Counter[str] = field(default_factory=Counter[str])
    """By host."""

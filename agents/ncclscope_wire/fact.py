"""What all facts have in front, and the bounds of their fields; `facts.py` has all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias

from msgspec import Meta

Number: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""Counts, device numbers, channels."""
Rank: TypeAlias = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
"""A rank of a communicator; -1 = none, as NCCL prints it in trees."""
Signed: TypeAlias = Annotated[int, Meta(ge=-(2**31), le=2**32 - 1)]
Size: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""Bytes."""
Word: TypeAlias = Annotated[int, Meta(ge=0)]
"""64 bits: a pointer, a hash, an identifier."""
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=1e9)]
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=128)]
Text: TypeAlias = Annotated[str, Meta(max_length=2048)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """Where a line stands, and who wrote it."""

    line: Annotated[int, Meta(ge=0, le=2**53)]
    host: Annotated[str, Meta(max_length=256)] | None = None
    """None for lines that are not NCCL's own, and name no process."""
    pid: Annotated[int, Meta(ge=0, le=2**32 - 1)] | None = None
    tid: Annotated[int, Meta(ge=0, le=2**32 - 1)] | None = None
    logged_at_ns: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    file: Name | None = None
    """Source file that printed it, where the line says so (warnings, allocations)."""
    file_line: Number | None = None

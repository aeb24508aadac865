"""Which bytes of a followed log can be released: read, applied by the service, and wanted by nobody else.

    0 ......... block ........................ applied - margin ... applied ...... size
    |  kept     |  released, in whole blocks   |  kept    |  not applied yet  |

The first block stays, because the file is known by it (`tail.py`), and a last stretch stays for people who look
at the end of the log. What lies in between and was not released before goes once it is worth a call.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Final

_PAGE_BYTES: Final = 4096
_LARGEST_BLOCK_BYTES: Final = 16 << 20
"""Network file systems name the size of their favourite read as that of a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseLimits:
    """What is kept, and how much goes at once."""

    keep_bytes: int = 1 << 20
    """Kept in front of what the service has not applied: some 4,000 lines."""
    step_bytes: int = 1 << 20
    """Less is not worth a call; above the longest line, so that a hole is never read as a piece of one."""
    piece_bytes: int = 64 << 20
    """Released by one call: the writer waits for it, about 10 ms on ext4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteRange:
    """Bytes of a file from `begin` up to and without `end`."""

    begin: int
    end: int

    @property
    def size(self) -> int:
        """How many they are."""
        return self.end - self.begin


def block_bytes(told_bytes: int) -> int:
    """The unit in which a file system that tells this size of a block can free space: whole pages too."""
    if not 0 < told_bytes <= _LARGEST_BLOCK_BYTES:
        return _PAGE_BYTES
    return lcm(told_bytes, _PAGE_BYTES)


def releasable(*, applied: int, size: int, released: int, block: int, limits: ReleaseLimits) -> ByteRange | None:
    """The bytes to release now, from what was `released` before on; None where it is too early.

    `applied` is how far the service has the file, `size` the file's. A file that is shorter than what was applied
    is another one, and nothing of it is released.
    """
    if applied > size:
        return None
    begin = max(block, -(-released // block) * block)
    end = (applied - limits.keep_bytes) // block * block
    return ByteRange(begin=begin, end=end) if end - begin >= limits.step_bytes else None


def pieces(whole: ByteRange, limits: ReleaseLimits) -> list[ByteRange]:
    """The range, cut into calls that are short for the writer."""
    starts = range(whole.begin, whole.end, limits.piece_bytes)
    return [ByteRange(begin=at, end=min(whole.end, at + limits.piece_bytes)) for at in starts]

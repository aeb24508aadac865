"""The hash by which NCCL itself names a communicator, where no log line prints it: that of a split.

Init lines print the hash of a communicator made from a unique id (commId); up to 2.22 also that of a split. From 2.24
on they print parent, split count and colour instead, from which NCCL makes the hash, and so can we. From 2.26 on it is
the number that NCCL Inspector and NCCL's NVTX payloads carry.

*Source:* NCCL `src/init.cc:ncclCommInitRankFunc` (2.26 on), `src/include/utils.h:eatHash`, `digestHash`.
"""

from __future__ import annotations

from typing import Final

_WORD: Final = 2**64 - 1


def split_hash(parent: int, split_count: int, color: int) -> int:
    """comm->commHash of a communicator that was split from the one with that hash."""
    state = (1, 1)
    for value, size in ((parent, 8), (split_count, 4), (color, 4)):
        state = _eat(state, value & (2 ** (8 * size) - 1), size)
    return _digest(state)


def _eat(state: tuple[int, int], value: int, size: int) -> tuple[int, int]:
    """Takes in a number of up to eight bytes."""
    first, second = state[0] ^ size, state[1]
    first = (first + second) & _WORD
    second ^= first
    first = ((first ^ first >> 31) * 0x9DE62BBC8CEF3CE3) & _WORD
    second = ((second ^ second >> 32) * 0x485CD6311B599E79) & _WORD
    return (first + value) & _WORD, second


def _digest(state: tuple[int, int]) -> int:
    result = ((state[0] ^ state[0] >> 31) * 0xBAC3BD562846DE6B) & _WORD
    result = (result + state[1]) & _WORD
    return ((result ^ result >> 32) * 0x995A187A14E7B445) & _WORD

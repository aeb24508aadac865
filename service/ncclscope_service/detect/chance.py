"""How often one rank of n would be last by chance."""

from __future__ import annotations

import math
from functools import lru_cache


@lru_cache(maxsize=4096)
def hits_needed(trials: int, ranks: int, level: float = 1e-3) -> int:
    """The fewest times out of `trials` that one rank must be last for chance to be ruled out.

    Under chance every rank is last with probability 1/ranks; the tail is corrected for naming any of them (times
    ranks) and must lie below `level`. More than `trials` where no count suffices. For 100 trials: 67 of 2 ranks,
    42 of 4, 27 of 8, 18 of 16, 10 of 64, 6 of 256.
    """
    if ranks < 2:
        return trials + 1
    chance, tail = 1.0 / ranks, 0.0
    for hits in range(trials, -1, -1):
        tail += math.exp(
            math.lgamma(trials + 1)
            - math.lgamma(hits + 1)
            - math.lgamma(trials - hits + 1)
            + hits * math.log(chance)
            + (trials - hits) * math.log1p(-chance)
        )
        if tail * ranks >= level:
            return hits + 1
    return 0

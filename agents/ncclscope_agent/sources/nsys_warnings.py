"""What nsys says about lost events, fit to be shown: short, once each, and without private paths."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Final

from ncclscope_agent.sources.nsys_schema import pid_of

_NOTHING_COLLECTED: Final = re.compile(r"^No .* events collected", re.IGNORECASE)
_PATH: Final = re.compile(r"(?<![\w.])~?/[^\s\"')]*/[^\s\"',;)]*")


def shown_warnings(
    found: Iterable[tuple[str, int]], cuda_pids: Collection[int], *, limit: int, length: int
) -> tuple[str, ...]:
    """Texts of (text, globalPid) worth showing, in order of first appearance; at most `limit`, each cut at `length`.

    "No ... events collected" is said of every launcher (mpirun, torchrun), so it counts only where its
    process has CUDA records or none has.
    """
    kept: dict[str, None] = {}
    for text, process in found:
        if _NOTHING_COLLECTED.match(text) and cuda_pids and pid_of(process) not in cuda_pids:
            continue
        kept[_PATH.sub("<path>", " ".join(text.split()))[:length]] = None
        if len(kept) == limit:
            break
    return tuple(kept)

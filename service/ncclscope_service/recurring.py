"""Kinds of launches that recur: by the text of their line, buffers included, else by what decides about them.

Allocators reuse buffers, so a training step logs the very same texts as the one before, and a text tells its place in
the step. A program whose texts never recur would make kinds without end: then texts are believed no more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.signatures import Signatures
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER

TEXTS_LIMIT: Final = 4096
"""Kinds after which texts are left out of account."""

_KIND: Final = np.dtype([("signature", "<i4"), ("text", "<i4")])


@dataclass(slots=True)
class Recurring:
    """Numbers kinds of launches in order of appearance."""

    _kinds: Signatures = field(default_factory=lambda: Signatures(("signature", "text")))

    def __len__(self) -> int:
        return len(self._kinds)

    def number(self, launches: Columns) -> NDArray[np.int32]:
        """The kind of each launch (LAUNCH)."""
        rows = np.empty(len(launches), _KIND)
        rows["signature"], rows["text"] = launches["signature"], launches["text"]
        if len(self._kinds) >= TEXTS_LIMIT:
            rows["text"] = NO_NUMBER
        return self._kinds.number(rows)

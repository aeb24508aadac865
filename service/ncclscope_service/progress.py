"""How many operations each rank has enqueued on each channel, from the logs as they are read."""

from __future__ import annotations

from typing import Final

import numpy as np

from ncclscope_service import whole_rows
from ncclscope_service.detect.board import PROGRESS
from ncclscope_service.key_places import KeyPlaces
from ncclscope_wire.batch import Columns

_KEY: Final = ("communicator", "sender", "receiver", "rank")


class Progress:
    """The present counts of one job."""

    def __init__(self) -> None:
        self._places = KeyPlaces(len(_KEY))
        self._rows: Columns = np.zeros(0, PROGRESS)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def rows(self) -> Columns:
        """All of them (`PROGRESS`), in the order in which they came first."""
        return self._rows[: len(self._places)]

    def put(self, counts: Columns) -> None:
        """Takes newer counts (`PROGRESS`)."""
        places = self._places.of(*(counts[name] for name in _KEY))
        if len(self._places) > len(self._rows):
            grown = np.zeros(2 * len(self._places), PROGRESS)
            whole_rows.put(grown, 0, self._rows)
            self._rows = grown
        self._rows[places] = counts

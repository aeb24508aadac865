"""Hosts by number, in the order in which their processes appeared."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.store import Store


class Hosts:
    """Host names to small integers, over all processes of a store."""

    def __init__(self, known: Store) -> None:
        self._store = known
        self.names: list[str] = []
        self._index: dict[str, int] = {}
        self._of_process: NDArray[np.int32] = np.empty(0, np.int32)

    def of_processes(self) -> NDArray[np.int32]:
        """The host of every process."""
        new = self._store.processes[len(self._of_process) :]
        for process in new:
            if process.host not in self._index:
                self._index[process.host] = len(self.names)
                self.names.append(process.host)
        if new:
            hosts = np.asarray([self._index[process.host] for process in new], np.int32)
            self._of_process = np.concatenate([self._of_process, hosts])
        return self._of_process

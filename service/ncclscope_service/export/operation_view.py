"""Some operations with what they point at laid out beside them: templates, processes, members, kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.distinct import distinct
from ncclscope_service.export.columns import (
    Column,
    Mask,
    optional_numbers_at,
    optional_words_at,
    plain,
    spread,
)
from ncclscope_service.store import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER


class OperationView:
    """Operations and, row by row, what they point at.

    What lies in templates is computed once per template that occurs, then laid out over the rows.
    """

    def __init__(self, store: Store, rows: Columns) -> None:
        self.store = store
        self.rows = rows
        used, self._of_row = distinct(rows["template"])
        self._templates: Columns = store.operation_templates.rows[used]
        self._kernels: tuple[Columns, Mask] | None = None

    def of_template(self, make: Callable[[Columns], Column]) -> Column:
        """A column of the templates."""
        return spread(make(self._templates), self._of_row)

    def is_op(self, table: Mask) -> Mask:
        """Whether the row's operation code has what the table (by code, 256 long) says."""
        is_so: Mask = table[self._templates["op"]][self._of_row]
        return is_so

    def of_source(self) -> Column:
        """The name of the log."""
        return optional_words_at(self.rows["source"], [state.source.name for state in self.store.sources])

    def of_process(self, words: Sequence[str | None]) -> Column:
        """A word per process."""
        return optional_words_at(self.rows["process"], words)

    def pids(self) -> Column:
        """The process id."""
        pids = np.array([process.pid for process in self.store.processes], dtype=np.int64)
        return plain(pids[self.rows["process"]])

    def of_member(self, table: Sequence[int | None]) -> Column:
        """A number per member."""
        return optional_numbers_at(self.rows["member"], table, np.int64)

    def of_communicator(self, words: Sequence[str | None]) -> Column:
        """A word per communicator."""
        return optional_words_at(self.communicators(), words)

    def communicators(self) -> NDArray[np.intp]:
        """The communicator index; NO_NUMBER where the row has no member."""
        table = np.array([*[member.communicator for member in self.store.members], NO_NUMBER], dtype=np.intp)
        member = self.rows["member"]
        is_known = (member >= 0) & (member < len(self.store.members))
        return table[np.where(is_known, member, len(table) - 1)]

    def of_kernel(self, name: str) -> Column:
        """A column of the first kernel of the row's launch; unknown where there is none or it was dropped."""
        kernels, is_known = self.kernels()
        return Column(kernels[name], is_known)

    def of_kernel_template(self, name: str) -> Column:
        """A column of that kernel's template; negative numbers are unknown."""
        kernels, is_known = self.kernels()
        if not is_known.any():
            return Column(np.zeros(len(self.rows), dtype=np.int64), is_known)
        values = self.store.kernel_templates.rows[name][kernels["template"]]
        return Column(values, is_known & (values > NO_NUMBER))

    def kernels(self) -> tuple[Columns, Mask]:
        """The first kernel of each row's launch, and where it is known."""
        if self._kernels is None:
            table = self.store.kernels
            positions = self.rows["kernel"] - table.first
            is_known = (self.rows["kernel"] >= 0) & (positions >= 0) & (positions < len(table))
            kernels: Columns = np.zeros(len(self.rows), dtype=table.dtype)
            kernels[is_known] = table.rows[positions[is_known]]
            self._kernels = kernels, is_known
        return self._kernels

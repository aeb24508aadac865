"""Rows of the aligners: operations and kernels, made from those of the store, and matches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns.group_by import distinct
from ncclscope_service.columns.table import Ids
from ncclscope_service.nccl.launch_rules import parse_kernel_name
from ncclscope_service.store.rows import OPERATION, OPERATION_TEMPLATE
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

COARSE_STAMP_NS: Final = 100_000
"""Stamps that are all multiples of this are too coarse to distinguish calls or launches."""

ALIGN_OPERATION: Final = np.dtype(
    [
        ("id", "<i8"),  # opaque, increasing in log order
        ("tid", "<u4"),
        ("stream", "<u8"),  # pointer as logged
        ("member", "<i4"),  # the communicator as this process knows it
        ("nranks", "<i4"),
        ("device", "<i4"),  # CUDA ordinal of the communicator (Init line's cudaDev); NO_NUMBER
        ("op", "<u1"),  # code in terms.OPERATIONS
        ("data_type", "<i2"),
        ("reduction", "<i8"),  # as logged
        ("count", "<u8"),
        ("message_bytes", "<i8"),
        ("root", "<i4"),
        ("op_count", "<u8"),
        ("logged_at_ns", "<i8"),  # stamp in the line, host clock; NO_TIME_NS
        ("observed_at_ns", "<i8"),  # arrival at the agent; NO_TIME_NS
        ("channels", "<i2"),  # of its TUNING line; NO_NUMBER
        ("group", "<i8"),  # as rows.OPERATION
        ("one_rank", "?"),
        ("text", "<i4"),  # number of the line's text behind opCount, buffers included; NO_NUMBER
    ]
)
"""One logged operation, as the aligner needs it; `blank_operations` gives rows in which all is unknown."""

ALIGN_KERNEL: Final = np.dtype(
    [
        ("id", "<i8"),
        ("stream_id", "<i8"),
        ("device_id", "<i4"),
        ("correlation_id", "<i8"),
        ("launch_start_ns", "<i8"),  # host clock; NO_TIME_NS
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),
        ("launch_tid", "<i8"),  # NO_NUMBER
        ("kernel_class", "<u1"),  # kernel_name.KernelClass
        ("data_type", "<i2"),  # as kernel_name.merged_data_type; NO_NUMBER
        ("grid_x", "<i4"),
        ("block_x", "<i4"),
        ("graph_node_id", "<i8"),  # NO_NUMBER outside CUDA graphs
        ("censored", "?"),
    ]
)
"""One NCCL kernel, as the aligner needs it; class and type come from its name."""

MATCH: Final = np.dtype(
    [
        ("operation", "<i8"),
        ("kernel", "<i8"),  # of its launch; NO_NUMBER
        ("launch", "<i8"),  # equal for operations of one launch: the id of the first; NO_NUMBER if none is launched
        ("match", "<u1"),  # rows.Match
        ("confidence", "<f4"),
    ]
)
"""Outcome of one operation. Final: no later row is about the same operation."""

PLAN: Final = np.dtype([("kernel", "<i8"), ("first", "<i8")])
"""One more kernel of a launch that needed several, which the matches name by its first one (`thread_backlog`)."""


def blank_operations(count: int) -> Columns:
    """Rows of ALIGN_OPERATION in which everything that may be unknown is."""
    rows = np.zeros(count, dtype=ALIGN_OPERATION)
    for name in ("device", "channels", "group", "text"):
        rows[name] = NO_NUMBER
    for name in ("logged_at_ns", "observed_at_ns"):
        rows[name] = NO_TIME_NS
    return rows


def blank_kernels(count: int) -> Columns:
    """Rows of ALIGN_KERNEL in which everything that may be unknown is."""
    rows = np.zeros(count, dtype=ALIGN_KERNEL)
    for name in ("launch_tid", "graph_node_id", "data_type"):
        rows[name] = NO_NUMBER
    rows["launch_start_ns"] = NO_TIME_NS
    return rows


def launch_times(kernels: Columns) -> NDArray[np.int64]:
    """When each kernel (ALIGN_KERNEL) was launched; its start, which is later, if that is not known."""
    times: NDArray[np.int64] = np.where(
        kernels["launch_start_ns"] == NO_TIME_NS, kernels["start_ns"], kernels["launch_start_ns"]
    )
    return times


_Column = NDArray[np.generic]

OPERATION_COLUMNS: Final = (
    "template",
    *(name for name in ALIGN_OPERATION.names or () if name in (OPERATION.names or ())),
)
"""Columns of an operation in the store that an aligner needs."""

_TEMPLATE_COLUMNS: Final = tuple(
    name for name in ALIGN_OPERATION.names or () if name in (OPERATION_TEMPLATE.names or ()) and name != "device"
)
"""Columns of its template."""


class AlignerRows:
    """Makes rows of the aligners from those of the store."""

    def __init__(self, known: Store) -> None:
        self._store = known
        self._name_columns: dict[int, tuple[int, int]] = {}
        """Class and data type of kernels by their name."""

    def operations(self, ids: Ids, rows: Columns) -> Columns:
        """ALIGN_OPERATION rows of operations, from their rows in the store (OPERATION_COLUMNS)."""
        templates = self._store.templates_of(rows, *_TEMPLATE_COLUMNS)
        computed: dict[str, _Column] = {
            "id": ids,
            "one_rank": templates["nranks"] == 1,
            "device": self._devices(rows["member"]),
            "text": rows["template"],
        }
        return _filled(ALIGN_OPERATION, len(rows), computed, rows, templates)

    def _devices(self, members: NDArray[np.int32]) -> NDArray[np.int32]:
        """CUDA ordinal of these members, by their Init lines."""
        found, inverse = distinct(members)
        devices = [self._store.members[member].cuda_device for member in found.tolist()]
        return np.asarray([NO_NUMBER if device is None else device for device in devices], np.int32)[inverse]

    def kernels(self, ids: Ids, rows: Columns) -> Columns:
        """ALIGN_KERNEL rows of kernels, from their rows in the store."""
        templates = self._store.kernel_templates_of(rows)
        names, inverse = distinct(templates["name"])
        parsed = np.asarray([self._parsed_name(name) for name in names.tolist()], np.int64).reshape(-1, 2)[inverse]
        computed: dict[str, _Column] = {
            "id": ids,
            "kernel_class": parsed[:, 0],
            "data_type": parsed[:, 1],
        }
        return _filled(ALIGN_KERNEL, len(rows), computed, rows, templates)

    def _parsed_name(self, name: int) -> tuple[int, int]:
        if name not in self._name_columns:
            parsed = parse_kernel_name(self._store.strings[name])
            self._name_columns[name] = (int(parsed.kernel_class), parsed.data_type)
        return self._name_columns[name]


def _filled(dtype: np.dtype[np.void], amount: int, computed: Mapping[str, _Column], *tables: Columns) -> Columns:
    """A table of that dtype: each column computed, or else from the first table that has it."""
    filled = np.zeros(amount, dtype)
    for name in dtype.names or ():
        if name in computed:
            filled[name] = computed[name]
        else:
            filled[name] = next(table[name] for table in tables if name in (table.dtype.names or ()))
    return filled

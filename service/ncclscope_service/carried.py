"""What a communicator has carried, in the amounts from which its parallelism is told."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import DATA_TYPES, OPERATION_CODES, REDUCTIONS

SMALL_BYTES: Final = 64 * 1024
"""Messages up to this size are scalars, norms, losses and flags rather than tensors."""

CARRIED: Final = np.dtype(
    [
        ("operations", "<f8"),
        ("bytes", "<f8"),
        ("largest", "<f8"),  # bytes of the largest message
        ("exchanged", "<f8"),  # Sends and Recvs
        ("all_to_all", "<f8"),
        ("reduced", "<f8"),  # AllReduce and Reduce of more than SMALL_BYTES
        ("gathered", "<f8"),  # AllGather of more than SMALL_BYTES
        ("scattered", "<f8"),  # ReduceScatter of more than SMALL_BYTES
        ("integers", "<f8"),  # Broadcasts of 64-bit integers: token ids
        ("averaged", "<f8"),  # reductions that divide by the ranks
        ("maxima", "<f8"),  # AllReduce of maxima of more than 1 KiB: a softmax over parts of the vocabulary
        ("wide", "<f8"),  # bytes reduced in 32 bits and more
        ("narrow", "<f8"),  # bytes reduced in 16 bits and less
        ("narrow_gathered", "<f8"),  # AllGathers in 16 bits and less
        ("wide_scattered", "<f8"),  # ReduceScatters in 32 bits and more
        ("calls", "<f8"),  # distinct calls of tensors, buffers included
        ("tensors", "<f8"),  # operations of more than SMALL_BYTES
        ("reduced_sizes", "<f8"),  # different sizes of tensors that are reduced
        ("gathered_sizes", "<f8"),  # different sizes of tensors that are gathered
    ]
)
"""Amounts per rank, but for `largest` and the numbers of sizes."""

_SCALAR_BYTES: Final = 1024
_SELDOM: Final = 0.02
"""Share of a communicator's tensors below which a size is a rare event: the first weights, a checkpoint."""
_TYPE_BYTES: Final = np.array([each.size_bytes for each in DATA_TYPES] + [0] * 64)
_IS_FLOAT: Final = np.array(["float" in each.name for each in DATA_TYPES] + [False] * 64)
_INT64: Final = next(number for number, each in enumerate(DATA_TYPES) if each.name == "int64")
_MAX: Final = REDUCTIONS.index("max")
_AVG: Final = REDUCTIONS.index("avg")


def _codes(*names: str) -> list[int]:
    return [OPERATION_CODES[name] for name in names]


def carried_by(contents: Columns, ranks: NDArray[np.int64]) -> Columns:
    """CARRIED of each communicator, by index; `contents` as `contents.CONTENT`, `ranks` is how many were seen of each.

    AllGathers up to NCCL 2.21.5 log no type: they count neither as narrow nor as wide.
    """
    known = contents[contents["communicator"] >= 0]
    at, op, size = known["communicator"], known["op"], known["message_bytes"]
    amount, moved = known["operations"].astype(np.float64), known["operations"] * np.maximum(size, 0.0)
    types = known["data_type"].clip(-1, len(_TYPE_BYTES) - 1)
    width = np.where(_IS_FLOAT[types], _TYPE_BYTES[types], 0)
    is_tensor = size > SMALL_BYTES
    reducing = np.isin(op, _codes("AllReduce", "Reduce", "ReduceScatter"))
    gathers, scatters = op == OPERATION_CODES["AllGather"], op == OPERATION_CODES["ReduceScatter"]
    maxima = (op == OPERATION_CODES["AllReduce"]) & (known["reduction"] == _MAX) & (size > _SCALAR_BYTES)
    columns = {
        "operations": amount,
        "bytes": moved,
        "exchanged": amount * np.isin(op, _codes("Send", "Recv")),
        "all_to_all": amount * (op == OPERATION_CODES["AlltoAll"]),
        "reduced": amount * (reducing & ~scatters & is_tensor),
        "gathered": amount * (gathers & is_tensor),
        "scattered": amount * (scatters & is_tensor),
        "integers": amount * ((op == OPERATION_CODES["Broadcast"]) & (types == _INT64)),
        "averaged": amount * (reducing & (known["reduction"] == _AVG) & is_tensor),
        "maxima": amount * maxima,
        "wide": moved * (reducing & is_tensor & (width >= 4)),  # bytes of float32
        "narrow": moved * (reducing & is_tensor & (width > 0) & (width <= 2)),  # bytes of bfloat16
        "narrow_gathered": amount * (gathers & is_tensor & (width > 0) & (width <= 2)),
        "wide_scattered": amount * (scatters & is_tensor & (width >= 4)),
        "calls": known["templates"] * is_tensor.astype(np.float64),
        "tensors": amount * is_tensor,
    }
    carried: Columns = np.zeros(len(ranks), CARRIED)
    for name, values in columns.items():
        carried[name] = np.bincount(at, weights=values, minlength=len(ranks)) / np.maximum(ranks, 1)
    np.maximum.at(carried["largest"], at, size)
    tensors = carried["tensors"] * np.maximum(ranks, 1)
    is_usual = is_tensor & (amount > _SELDOM * tensors[at])
    for name, chosen in (("reduced_sizes", is_usual & reducing), ("gathered_sizes", is_usual & gathers)):
        pairs = np.unique(np.stack([at[chosen].astype(np.int64), size[chosen]], axis=1), axis=0)
        carried[name] = np.bincount(pairs[:, 0].astype(np.intp), minlength=len(ranks))
    return carried

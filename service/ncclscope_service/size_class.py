"""Size classes: message sizes in few bounded groups, so that series and labels stay few."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.rows import SIZE_CLASS_BOUNDS

UNKNOWN_SIZE_CLASS: Final = 255
"""The class of a message whose size is not known; it has no name and belongs to no series."""

_BOUNDS: Final = np.array(SIZE_CLASS_BOUNDS, dtype=np.int64)


def classify(message_bytes: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The size class of each message: an index into `rows.SIZE_CLASSES`; bounds belong to the class they end.

    A size that is not known (negative) gets UNKNOWN_SIZE_CLASS.
    """
    sizes = np.asarray(message_bytes, dtype=np.int64)
    classes = np.searchsorted(_BOUNDS, sizes, side="left").astype(np.uint8)
    return np.where(sizes >= 0, classes, np.uint8(UNKNOWN_SIZE_CLASS))

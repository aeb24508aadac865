"""Shapes of lines that have no family: what is left when numbers, pointers and names are masked."""

from __future__ import annotations

import re
from collections import Counter
from typing import Final

_MASKS: Final = (
    (re.compile(r"0x[0-9a-f.]+|\(nil\)"), "P"),
    (re.compile(r"(?<![\w/|>-])/[\w./+-]{2,}"), "/PATH"),
    (re.compile(r"\b[\w.-]+<\d+>"), "ADDRESS"),
    (re.compile(r"\b(?=[0-9a-f]*\d)[0-9a-f]+\b"), "N"),
    (re.compile(r"\d+"), "N"),
)
_LONGEST: Final = 120
SHAPE_LIMIT: Final = 1000
"""Shapes that are kept apart; further ones are counted together."""
REST: Final = "(further shapes)"


def shape_of(message: bytes) -> str:
    """The message with digits, hexadecimal numbers, pointers, paths and addresses masked, at most 120 characters."""
    text = message[:4096].decode("utf-8", "replace")
    for pattern, mask in _MASKS:
        text = pattern.sub(mask, text)
    return text[:_LONGEST]


class Shapes:
    """Counts shapes; memory is bounded by `SHAPE_LIMIT`."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def add(self, message: bytes) -> None:
        """Counts the shape of one message."""
        shape = shape_of(message)
        if shape not in self.counts and len(self.counts) >= SHAPE_LIMIT:
            shape = REST
        self.counts[shape] += 1

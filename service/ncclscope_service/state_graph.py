"""What the nodes of a snapshot are: plain values stand for themselves, all else is a list that begins with its tag."""

from __future__ import annotations

from collections import Counter, deque
from enum import IntEnum
from typing import Final, Protocol

from ncclscope_service.state_classes import name_of

BUILTINS: Final[dict[str, type]] = {
    name_of(kind): kind for kind in (bool, int, float, str, bytes, list, dict, set, tuple, deque, Counter)
}
"""Classes of Python that a default dictionary may make its values with."""


class Tag(IntEnum):
    """What a node is, and what follows the tag."""

    KNOWN = 0
    """index: what came before, once, and is referred to again."""
    OUTSIDE = 1
    """index: one of the objects that the caller keeps."""
    LIST = 2
    """items"""
    TUPLE = 3
    SET = 4
    FROZENSET = 5
    DEQUE = 6
    """items, greatest length"""
    DICT = 7
    """keys, values"""
    COUNTER = 8
    DEFAULTDICT = 9
    """keys, values, factory"""
    ARRAY = 10
    """dtype, shape, bytes or the index of what is kept beside the graph"""
    DTYPE = 11
    """dtype"""
    SCALAR = 12
    """dtype, bytes: a scalar of numpy"""
    ENUM = 13
    """class, value"""
    NAMED_TUPLE = 14
    """class, items"""
    OBJECT = 15
    """class, values of its attributes"""
    CLASS = 16
    """name"""
    FUNCTION = 17
    """nothing: a function is not kept"""
    LARGE_INT = 18
    """decimal digits of what 64 bits do not hold"""


class Compactable(Protocol):
    """What holds room to spare, that a snapshot should not."""

    def compacted(self) -> object:
        """An equal object without it."""
        ...

"""Which classes a snapshot may hold, and what tells one version of a class from another.

They are found, not listed: every class of the packages `ncclscope_*` that is defined in the machine's module or in
one that it refers to, directly or through others. Nothing else is ever built from a snapshot.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache
from types import ModuleType
from typing import Final

_OURS: Final = "ncclscope_"


def name_of(kind: type) -> str:
    """How a snapshot calls a class."""
    return f"{kind.__module__}:{kind.__qualname__}"


@lru_cache(maxsize=64)
def classes_of(module: str) -> dict[str, type]:
    """The classes that a snapshot of a machine of this module may hold, by name."""
    found: dict[str, type] = {}
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in seen or name not in sys.modules:
            continue
        seen.add(name)
        for value in vars(sys.modules[name]).values():
            home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            if not isinstance(home, str) or not home.startswith(_OURS):
                continue
            waiting.append(home)
            if isinstance(value, type) and home == name:
                found[name_of(value)] = value
    return found


def attributes_of(machine: object) -> tuple[str, ...]:
    """The attributes that make up the state of an object, in the order in which they are set."""
    if is_dataclass(machine):
        return tuple(each.name for each in fields(machine))
    slots = [name for kind in type(machine).__mro__ for name in getattr(kind, "__slots__", ())]
    return (*slots, *getattr(machine, "__dict__", ()))


def is_frozen(kind: type) -> bool:
    """Whether objects of this class are records that never change."""
    return bool(getattr(getattr(kind, "__dataclass_params__", None), "frozen", False))


def fingerprint_of(kind: type) -> str:
    """Differs where a class's fields and their types, an enumeration's members or the names in `__init__` differ."""
    if is_dataclass(kind):
        said = [f"{each.name}: {each.type}" for each in fields(kind)]
    elif issubclass(kind, Enum):
        said = [f"{member.name} = {member.value!r}" for member in kind]
    elif issubclass(kind, tuple):
        said = list(getattr(kind, "_fields", ()))
    else:
        code = getattr(kind.__init__, "__code__", None)
        said = sorted(code.co_names) if code is not None else []
    return hashlib.blake2b("\n".join(said).encode(), digest_size=8).hexdigest()

"""The faults that a simulated job can have, and how they are written: `KIND:key=value,key=value`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. Which of the numbers mean something depends on the kind (`FAULT_KEYS`)."""

    kind: str
    """One of `FAULT_KEYS`."""
    rank: int = 0
    """The global rank that is late, hangs or calls something else."""
    node: int = 0
    """The node whose links are slow or whose clock steps."""
    gpu: int = 0
    """The first GPU of the node that uses the slow network card."""
    gpus: int = 1
    """How many GPUs share it."""
    ms: float = 0.0
    """How late the rank is, or how far the clock steps forward, in milliseconds."""
    seconds: float = 0.0
    """How long the pause is."""
    only: int | None = None
    """The global rank that pauses; None: all."""
    factor: float = 1.0
    """The share that is left of the bandwidth of the node's links to other nodes."""
    ratio: float = 0.0
    """The share of lines or kernels that is lost or torn."""
    first: int = 0
    """The first iteration that has the fault (`from=` or `at=`)."""
    until: int | None = None
    """The first iteration that has it no longer; None: to the end."""
    every: str = "step"
    """Late how often: once a `step`, at each `microbatch`, or at each `layer` of each microbatch."""
    how: str = ""
    """The way in which it hangs or calls something else, one of `HOW`; empty: the first of these."""

    def active(self, iteration: int) -> bool:
        """Whether the fault is there in an iteration."""
        return self.first <= iteration and (self.until is None or iteration < self.until)


FAULT_KEYS: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "late_rank": (("rank", "ms"), ("from", "until", "every")),
    "slow_link": (("node", "factor"), ("from", "until")),
    "slow_nic": (("node", "gpu", "factor"), ("gpus", "from", "until")),
    "hang": (("rank", "at"), ("how",)),
    "mismatch": (("rank", "at"), ("how",)),
    "kill": (("at",), ()),
    "pause": (("at", "seconds"), ("only",)),
    "drop_lines": (("ratio",), ("from", "until")),
    "drop_kernels": (("ratio",), ("from", "until")),
    "torn_lines": (("ratio",), ("from", "until")),
    "clock_step": (("node", "ms", "at"), ()),
}
"""Kind to the keys that it needs and the keys that it may have."""

HOW: Final[dict[str, tuple[str, ...]]] = {"hang": ("enqueue", "inside"), "mismatch": ("count", "operation", "order")}
"""`enqueue`: the rank enqueues nothing more; `inside`: it does, but the collective never ends. `count`, `operation`:
the rank calls half the count or another collective; `order`: two of its collectives in the other order."""

_FIELDS: Final = {"from": "first", "at": "first"}
_EVERY: Final = ("step", "microbatch", "layer")


def parse_faults(texts: tuple[str, ...] | list[str]) -> tuple[Fault, ...]:
    """The faults that texts such as `late_rank:rank=3,ms=2,from=20` name; `none` names none.

    Raises:
        ValueError: with a sentence for each text that is not understood.
    """
    faults: list[Fault] = []
    complaints: list[str] = []
    for text in texts:
        if text.strip() in {"", "none"}:
            continue
        try:
            faults.append(_parse(text.strip()))
        except ValueError as error:
            complaints.append(str(error))
    if complaints:
        raise ValueError("; ".join(complaints))
    return tuple(faults)


def _parse(text: str) -> Fault:
    kind, _, rest = text.partition(":")
    if kind not in FAULT_KEYS:
        raise ValueError(f"fault {text!r}: no kind {kind!r}; kinds are none, {', '.join(sorted(FAULT_KEYS))}")
    needed, allowed = FAULT_KEYS[kind]
    given = _pairs(text, rest)
    missing = [key for key in needed if key not in given]
    unknown = [key for key in given if key not in needed + allowed]
    if missing:
        raise ValueError(f"fault {text!r}: {kind} needs {', '.join(f'{key}=' for key in missing)}")
    if unknown:
        raise ValueError(f"fault {text!r}: {kind} has no key {', '.join(unknown)}")
    return _checked(text, Fault(kind, **{_FIELDS.get(key, key): _value(text, key, given[key]) for key in given}))  # type: ignore[arg-type]  # each key's type is what _value gives


def _pairs(text: str, rest: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"fault {text!r}: {part!r} is not key=value")
        pairs[key.strip()] = value.strip()
    return pairs


def _value(text: str, key: str, value: str) -> int | float | str:
    if key in {"every", "how"}:
        return value
    try:
        return float(value) if key in {"ms", "seconds", "factor", "ratio"} else int(value)
    except ValueError:
        raise ValueError(f"fault {text!r}: {key}={value} is not a number") from None


def _checked(text: str, fault: Fault) -> Fault:
    if fault.kind in {"drop_lines", "drop_kernels", "torn_lines"} and not 0.0 <= fault.ratio <= 1.0:
        raise ValueError(f"fault {text!r}: ratio must lie in 0 to 1")
    if fault.kind in {"slow_link", "slow_nic"} and not 0.0 < fault.factor <= 1.0:
        raise ValueError(f"fault {text!r}: factor must lie above 0 and at most 1")
    if fault.how and fault.how not in HOW[fault.kind]:
        raise ValueError(f"fault {text!r}: how must be {', '.join(HOW[fault.kind])}")
    if fault.kind == "late_rank" and fault.ms < 0:
        raise ValueError(f"fault {text!r}: ms must not be negative")
    if fault.kind == "pause" and fault.seconds < 0:
        raise ValueError(f"fault {text!r}: seconds must not be negative")
    if fault.every not in _EVERY:
        raise ValueError(f"fault {text!r}: every must be {', '.join(_EVERY)}")
    if fault.first < 0 or (fault.until is not None and fault.until <= fault.first):
        raise ValueError(f"fault {text!r}: the iterations it lasts for are none")
    return fault

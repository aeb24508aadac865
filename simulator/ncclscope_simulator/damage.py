"""What happens to log lines on their way into a file: some get lost, some are torn into each other."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ncclscope_simulator.faults import Fault


@dataclass(slots=True)
class Line:
    """One line before damage."""

    at_ns: int
    """Reference time at which it is written."""
    text: str
    pid: int
    operation: int | None = None
    """Which operation of the step it tells of; None for any other line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """The physical lines of a file, and where each operation's intact line is among them."""

    lines: list[tuple[int, str]]
    """(reference time, text without line end)."""
    places: dict[int, int]
    """Operation to its index in `lines`."""
    dropped: set[int] = field(default_factory=set[int])
    torn: set[int] = field(default_factory=set[int])


def damage(lines: list[Line], faults: list[Fault], random: np.random.Generator) -> Written:
    """Drops and tears operation lines at the ratios of the faults that are active.

    A torn line is cut by the next one of another process, whose text follows on the same physical line; the rest of
    the torn line stands on a line of its own. That is how several processes without %p in NCCL_DEBUG_FILE look:
    src/debug.cc opens the file without O_APPEND and writes unbuffered.
    """
    drop = max((fault.ratio for fault in faults if fault.kind == "drop_lines"), default=0.0)
    tear = max((fault.ratio for fault in faults if fault.kind == "torn_lines"), default=0.0)
    chances = random.random((len(lines), 3)) if drop or tear else None
    physical: list[tuple[int, str]] = []
    places: dict[int, int] = {}
    dropped, torn = set[int](), set[int]()
    held: Line | None = None
    rest = ""
    for nth, line in enumerate(lines):
        chance = (1.0, 1.0, 0.0) if chances is None else tuple(chances[nth].tolist())
        if line.operation is not None and chance[0] < drop:
            dropped.add(line.operation)
            continue
        if held is None and line.operation is not None and chance[1] < tear and _other_follows(lines, nth):
            held, cut = line, len(line.text) - 20 - int(chance[2] * min(60, len(line.text) - 60))
            rest, torn = line.text[cut:], torn | {line.operation}
            physical.append((line.at_ns, line.text[:cut]))
            continue
        if held is not None:
            physical.append((line.at_ns, physical.pop()[1] + line.text))
        else:
            physical.append((line.at_ns, line.text))
        if line.operation is not None:
            places[line.operation] = len(physical) - 1
        if held is not None:
            physical.append((line.at_ns, rest))
            held = None
    if held is not None:
        physical.append((held.at_ns, rest))
    return Written(lines=physical, places=places, dropped=dropped, torn=torn)


def _other_follows(lines: list[Line], nth: int) -> bool:
    return nth + 1 < len(lines) and lines[nth + 1].pid != lines[nth].pid

"""All families of NCCL's lines beside operations, tuning, life cycle and versions: one table, one look-up.

The forms that give facts stand by theme in `setting_lines.py` and `trouble_lines.py`, and those of channels here; those
that are only counted in `counted_lines.py`; system blocks and tuning tables, whose lines belong together, in
`topology_lines.py` and `tuning_table.py`.
"""

from __future__ import annotations

import re
from typing import Final

from ncclscope_agent.sources.nccl_log import setting_lines, trouble_lines
from ncclscope_agent.sources.nccl_log.counted_lines import CALLS, COUNTED, MATRIX_ROW, REMARKS, TRACE
from ncclscope_agent.sources.nccl_log.line_form import (
    RECORD_BYTES,
    Family,
    FamilyIndex,
    FamilyRead,
    Fields,
    forms,
    numbers,
)
from ncclscope_agent.sources.nccl_log.prefix import LogRecord, RecordEnd, Writer
from ncclscope_wire import facts
from ncclscope_wire.facts import OtherWarning, ProgramFailure

_TREE_NODE: Final = re.compile(r"(?:\[(\d+)\] )?(-?\d+(?:/-?\d+){2}|-?\d+)->(\d+)->(-?\d+(?:/-?\d+){2}|-?\d+)")
_LINE_LIMIT: Final = 1015
"""NCCL's buffer has 1,024 bytes (2.8 to 2.28), prefix and newline included."""
_OLD_RANKS: Final = 20
"""Up to 2.22 a ring line holds 20 ranks at most, and does not say that it was cut."""


def _ring_order(fields: Fields) -> Fields:
    ranks = numbers(str(fields.pop("order")))
    padded = fields.pop("padding", None) is not None
    fields["ranks"] = ranks
    fields["is_cut"] = bool(fields.pop("dots", None)) or (padded and len(ranks) == _OLD_RANKS)
    return fields


def _tree_nodes(fields: Fields) -> Fields | None:
    """`[0] 1/-1/-1->0->-1 [1] ...`; up to 2.7 a second node follows behind `|`, up to 2.4 the order is turned."""
    pieces = re.split(r" (?=\[)|\|", str(fields.pop("trees")).rstrip())
    is_cut = int(str(fields.pop(RECORD_BYTES, 0))) >= _LINE_LIMIT
    if is_cut:
        pieces.pop()  # the place of the cut cannot be seen
    nodes: list[Fields] = []
    channel = ""
    for piece in pieces:
        found = _TREE_NODE.fullmatch(piece)
        if found is None:
            return None
        channel = found[1] or channel
        nodes.append(_tree_node(channel, found[2], found[3], found[4]))
    return {**fields, "nodes": nodes, "is_cut": is_cut} if nodes else None


def _tree_node(channel: str, left: str, rank: str, right: str) -> Fields:
    down, up = (left, right) if "/" in left else (right, left)
    return {"channel": int(channel), "rank": int(rank), "up": int(up.split("/")[0]), "down": numbers(down)}


def _tree(fields: Fields) -> Fields:
    """`Tree 0 : -1 -> 0 -> 1/-1/-1`: up, rank, down."""
    node = {key: fields.pop(key) for key in ("channel", "up", "rank")}
    fields["nodes"] = [{**node, "down": numbers(str(fields.pop("below")))}]
    return fields


CHANNELS: Final[tuple[Family, ...]] = (
    *forms(
        "ring_order",
        facts.RingOrder,
        r"(?:Channel|Ring) (?P<channel>\d+)(?:/\d+)? :(?P<padding>  )?(?P<order>(?: +\d+)+)(?P<dots>\s*\.\.\.)?",
        r"Channel (?P<channel>\d+)/\d+(?P<padding>  )(?P<order>(?: +\d+)+)",  # RCCL
        starts=("Channel ", "Ring "),
        finish=_ring_order,
    ),
    *forms("ring", facts.RingNeighbours, r"Ring (?P<channel>\d+) : -?\d+ -> (?P<rank>\d+) -> (?P<next>-?\d+)"),
    *forms(
        "tree",
        facts.TreeNeighbours,
        r"Tree (?P<channel>\d+) : (?P<up>-?\d+) -> (?P<rank>\d+) -> (?P<below>-?\d+(?:/-?\d+){2})",
        finish=_tree,
    ),
    *forms("tree", facts.TreeNeighbours, r"Trees (?P<trees>\[\d+\] [\[\]0-9/>| -]+)", finish=_tree_nodes),
    *forms(
        "tree",
        facts.TreeNeighbours,
        r"NVLS Trees : (?P<trees>\[\d+\] [\[\]0-9/>| -]+)",
        fixed={"is_nvls": True},
        finish=_tree_nodes,
    ),
)
"""Rings and trees. *Source:* NCCL `src/init.cc` and `src/graph/connect.cc`."""

FAMILIES: Final[tuple[Family, ...]] = (
    *CHANNELS,
    *setting_lines.FAMILIES,
    *trouble_lines.FAMILIES,
    *COUNTED,
)
"""All of them, in the order in which they are tried."""

_FRAME: Final = re.compile(rb"[\w/.-]{1,100}\.(?:cc|h|cu|c):\d{1,6} ")
"""Source file and line, which calls, allocations and downgraded warnings put in front of their message."""
_COMMUNICATOR_BEHIND: Final = re.compile(
    rb"(?::|,)? comm 0x[0-9a-f]{1,16} n[Rr]anks \d{1,10}(?: busId [0-9a-f]{1,16})?\s*\Z"
)
"""RCCL says whose line it is behind lines that are NCCL's otherwise."""

_INDEX: Final = FamilyIndex(FAMILIES)
_TORCH: Final = FamilyIndex(trouble_lines.TORCH)
_PROGRAMS: Final = FamilyIndex(trouble_lines.PROGRAMS)
_REMARKS: Final = FamilyIndex(REMARKS)
_CALLS: Final = FamilyIndex(CALLS)
_MATRIX: Final = FamilyIndex([MATRIX_ROW])

_TORCH_AT: Final = re.compile(rb"(?: (\d{1,10}) )?ProcessGroupNCCL\.cpp:\d{1,6}\] |what\(\):  ")
"""With the thread in front if PyTorch was built with glog."""
_TORCH_RANK: Final = re.compile(rb"\[rank(\d{1,9})\]:")
_PROGRAM_AT: Final = re.compile(
    rb"(?:\[rank(\d{1,9})\]: |\bRank (\d{1,9}): )?"
    rb"(?<![\w.])(?:(?:[A-Za-z_][\w.]{0,80}\.)?(?:[A-Z]\w{0,40}Error: |process \d{1,6} terminated with signal )"
    rb"|error: (?:\*\*\* |[\w.-]{1,80}: tasks? \d)|rank \d{1,9} died from |failed \(exitcode: "
    rb"|Signal \d{1,2} \(SIG|Terminating process \d)"
)
_IN_FRONT: Final = re.compile(rb"(?:[\w.@-]{1,80}: ?|\[[\w,.@|/-]{1,80}\]:? ?)*+")
"""Tags of launchers: only they may stand in front of an exception that nothing says to be one of a rank."""
_LONGEST_WARNING: Final = 1024
"""NCCL's own limit of a message up to 2.28."""
MATRIX_TITLE: Final = b"Enabled NCCL Func/Proto/Algo Matrix:"


def read_record(record: LogRecord, line: int, logged_at_ns: int | None) -> FamilyRead | None:
    """The family and the record of a message; None if it is of none, or may have been cut."""
    message = record.message
    about = _about(record.writer, line, logged_at_ns)
    if record.level == b"CALL":
        return _CALLS.read(message, about)
    if record.level == b"TRACE":
        return (_INDEX.read(message, about) if record.end is RecordEnd.LINE else None) or _trace(record)
    about[RECORD_BYTES] = record.message_at - record.begin + len(message)
    behind = _COMMUNICATOR_BEHIND.search(message) if b" comm 0x" in message else None
    found = None if behind is None else _INDEX.read(message[: behind.start()], about)
    found = found or _INDEX.read(message, about)
    if found is None and (frame := _FRAME.match(message)) is not None:
        # NCCL prints the warning of a failure that it expects as INFO, with file and line in the message.
        found = _INDEX.read(message[frame.end() :], about)
    if found is None and record.level == b"INFO":
        found = _REMARKS.read(message, about)
    if found is None or record.end is RecordEnd.LINE:
        return found
    is_exact = record.end is RecordEnd.RECORD and not message[-1:].isspace()
    return found if is_exact and found.family.is_closed else None


def _about(writer: Writer, line: int, logged_at_ns: int | None) -> dict[str, object]:
    about: dict[str, object] = {"line": line, "host": writer.host, "pid": writer.pid, "tid": writer.tid}
    if logged_at_ns is not None:
        about["logged_at_ns"] = logged_at_ns
    return about


def _trace(record: LogRecord) -> FamilyRead | None:
    return FamilyRead(TRACE, None) if record.end is RecordEnd.LINE else None


def other_warning(record: LogRecord, line: int, logged_at_ns: int | None) -> OtherWarning:
    """A warning that is of no family; what is not printable in it is replaced."""
    text = record.message.decode("utf-8", "replace").strip()
    return OtherWarning(
        line=line,
        host=record.writer.host,
        pid=record.writer.pid,
        tid=record.writer.tid,
        logged_at_ns=logged_at_ns,
        text="".join(letter if letter.isprintable() else "?" for letter in text)[:_LONGEST_WARNING],
    )


def read_torch(text: bytes, line: int) -> FamilyRead | None:
    """A line of PyTorch's watchdog, behind any launcher's tag; None if it is none that is known."""
    if b"ProcessGroupNCCL.cpp:" not in text and b"what():" not in text:
        return None
    at = _TORCH_AT.search(text)
    if at is None:
        return None
    about: dict[str, object] = {"line": line}
    if at[1] is not None:
        about["tid"] = int(at[1])
    rank = _TORCH_RANK.search(text, 0, at.start())
    if rank is not None:
        about["global_rank"] = int(rank[1])
    return _TORCH.read(text[at.end() :], about)


def read_program(text: bytes, line: int) -> FamilyRead | None:
    """A line of Python, a launcher or a scheduler that says how a program failed; None if it is none that is known."""
    if b"rror: " not in text and b"signal " not in text and b"xitcode" not in text and b"Signal " not in text:
        return None
    at = _PROGRAM_AT.search(text)
    if at is None:
        return None
    about: dict[str, object] = {"line": line}
    rank = at[1] or at[2]
    if rank is not None:
        about["global_rank"] = int(rank)
    begin = at.end(1) + 3 if at[1] else at.end(2) + 2 if at[2] else at.start()
    found = _PROGRAMS.read(text[begin:], about)
    is_bare = found is not None and isinstance(found.fact, ProgramFailure) and found.fact.what == "exception"
    return None if is_bare and rank is None and _IN_FRONT.fullmatch(text, 0, begin) is None else found


def read_matrix_row(text: bytes) -> FamilyRead | None:
    """A continuation line of the matrix of functions, protocols and algorithms; None if it is none."""
    return _MATRIX.read(text, {})

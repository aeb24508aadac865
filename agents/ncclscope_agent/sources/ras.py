"""Answers of NCCL's RAS: which ranks are dead, silent, gone or behind, by what all processes of the job count.

Scope: `STATUS` in text (NCCL 2.24 on, which lists only ranks that stand out) and in JSON (2.28.7 on). What is wrong is
kept and what is right is not. That ranks stand behind for a moment is usual: a difference counts once three answers in
a row show it unchanged.
*Source:* NCCL `src/ras/client_support.cc`, `src/ras/client.cc`; NCCL User Guide, "RAS", 2.24 to 2.30.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from ncclscope_wire.errors import FormatError
from ncclscope_wire.facts import Fact, RasBehind, RasMissing

LOOKS: Final = 3
"""Answers that must agree."""
_MOST_RANKS_NAMED: Final = 64
_MOST_TROUBLES: Final = 256
_MOST_OBJECTS: Final = 1 << 20
"""Of an answer in JSON; each takes up to 200 bytes in memory. A rank of a communicator is three."""
_MOST_OPERATIONS: Final = 64
_LONGEST_COUNTS: Final = 4096
"""Bytes of the counts of one rank."""
_NO_COUNTS: Final = msgspec.Raw(b"{}")

_Number = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Pid = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
_Device = Annotated[int, Meta(ge=-1, le=2**16)]
_Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Text = Annotated[str, Meta(max_length=256)]
_Word = Annotated[str, Meta(min_length=1, max_length=128)]


class _Status(msgspec.Struct, frozen=True, gc=False):
    unresponsive: bool = False
    considered_dead: bool = False


class _Rank(msgspec.Struct, frozen=True, gc=False):
    rank: _Number
    host: _Text = ""
    pid: _Pid = -1
    cuda_dev: _Device = -1
    status: _Status = _Status()
    collective_counts: msgspec.Raw = _NO_COUNTS
    """Decoded when its turn comes: a few bytes are a map of hundreds."""

    @property
    def place(self) -> tuple[str, int, int]:
        """What tells a GPU of a process from others."""
        return self.host, self.pid, self.cuda_dev


class _Communicator(msgspec.Struct):
    hash: _Text
    size: _Number
    ranks: list[_Rank] = msgspec.field(default_factory=list[_Rank])
    missing_ranks: list[_Rank] = msgspec.field(default_factory=list[_Rank])


class _Answer(msgspec.Struct):
    communicators: list[_Communicator]


class RasRank(NamedTuple):
    """One rank of a communicator."""

    rank: int
    node: str
    """Its address as RAS prints it; "" if it does not."""
    pid: int
    """-1: not known."""
    global_rank: int
    """-1: not known."""


class Trouble(NamedTuple):
    """What is wrong with some ranks."""

    state: str
    """dead, unresponsive, left (its process answers, and has no such communicator) or behind."""
    communicator: int
    """Its hash; 0: whole processes."""
    size: int
    """Of the communicator; 0: not known."""
    operation: str
    """Of those that are behind: what they have launched less of."""
    launched: int
    others: int
    """How many the others have launched."""
    ranks: tuple[RasRank, ...]


_DECODER: Final = msgspec.json.Decoder(_Answer)
_COUNTS: Final = msgspec.json.Decoder(dict[_Word, _Count])


def read_answer(data: bytes) -> list[Trouble]:
    """What is wrong according to an answer in JSON or text.

    Raises:
        FormatError: it is none, or was cut off.
    """
    if data[:64].lstrip()[:1] == b"{":
        if data.count(b"{") > _MOST_OBJECTS:
            raise FormatError(f"an answer of RAS has more than {_MOST_OBJECTS} objects")
        try:
            return list(islice(_troubles(_DECODER.decode(data)), _MOST_TROUBLES))
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise FormatError(f"an answer of RAS is cut off or is none: {error}") from error
    text = data.decode("utf-8", "replace")
    if "NCCL version" not in text:
        raise FormatError("what answers at the port of RAS is something else")
    if "\nWarnings\n========\n" not in text or not text.endswith("\n"):  # half a number is another number
        raise FormatError("an answer of RAS is cut off")
    return _read_text(found[1] for found in _LINE.finditer(text))[:_MOST_TROUBLES]


def _troubles(answer: _Answer) -> Iterator[Trouble]:
    """Of an answer in JSON, which lists all ranks."""
    whole = max(answer.communicators, key=lambda each: each.size, default=None)
    places = {} if whole is None else {each.place: each.rank for each in (*whole.ranks, *whole.missing_ranks)}
    for communicator in answer.communicators:
        number = _hash(communicator.hash)
        missing: defaultdict[str, list[_Rank]] = defaultdict(list)
        for each in communicator.missing_ranks:
            missing[_why_missing(each.status)].append(each)
        for state, ranks in missing.items():
            yield Trouble(state, number, communicator.size, "", 0, 0, _named(ranks, places))
        for operation, counts in _counts(communicator.ranks).items():
            least, most = min(counts), max(counts)
            if least < most:
                behind = [each for each, count in zip(communicator.ranks, counts, strict=True) if count == least]
                yield Trouble("behind", number, communicator.size, operation, least, most, _named(behind, places))


def _counts(ranks: Sequence[_Rank]) -> dict[str, array[int]]:
    """By operation what each of these ranks has launched of it."""
    found: dict[str, array[int]] = {}
    for at, each in enumerate(ranks):
        if len(each.collective_counts) > _LONGEST_COUNTS:
            raise FormatError(f"an answer of RAS counts more for a rank than {_LONGEST_COUNTS} bytes hold")
        for operation, count in _COUNTS.decode(each.collective_counts).items():
            if operation not in found and len(found) == _MOST_OPERATIONS:
                raise FormatError(f"an answer of RAS names more than {_MOST_OPERATIONS} operations")
            found.setdefault(operation, array("q", bytes(8 * len(ranks))))[at] = count
    return found


def _why_missing(status: _Status) -> str:
    return "dead" if status.considered_dead else "unresponsive" if status.unresponsive else "left"


def _named(ranks: Sequence[_Rank], places: dict[tuple[str, int, int], int]) -> tuple[RasRank, ...]:
    return tuple(RasRank(each.rank, each.host, each.pid, places.get(each.place, -1)) for each in ranks)


def _hash(text: str) -> int:
    digits = text.removeprefix("0x")
    return int(digits, 16) if re.fullmatch(r"[0-9a-fA-F]{1,16}", digits) else 0


_LINE: Final = re.compile(r"([^\n]*)\n")
_HEAD: Final = re.compile(r"#\d+-\d+ \(([0-9a-f]{1,16})\) (INCOMPLETE|MISMATCH|ERROR)\s*")
_DIFFERENT: Final = re.compile(r"\s+Communicator ranks have different (?:(\w{1,32}) )?operation counts")
_SOME: Final = re.compile(r"\s+\d{1,9} ranks have (?:launched up to operation (\d{1,18})|not launched any operations)")
_WHERE: Final = (
    r"(?: -- (?:GPU .{1,32} managed by process (\d{1,9}) on node (\S{1,64})|\[process information not found\]))"
)
_ONE: Final = re.compile(
    rf"\s+Rank (\d{{1,9}}) has (?:launched up to operation (\d{{1,18}})|not launched any operations){_WHERE}"
)
_RANK: Final = re.compile(rf"\s+Rank (\d{{1,9}}){_WHERE}")
_PROCESS: Final = re.compile(r"\s+Process (\d{1,9}) on node (\S{1,64}) managing GPU")


def _read_text(lines: Iterable[str]) -> list[Trouble]:
    """Of an answer in text, which lists the ranks that stand out, in groups of those that have launched as much."""
    found: list[Trouble] = []
    state, communicator, operation = "", 0, ""
    groups: dict[int, list[RasRank]] = {}
    processes: list[RasRank] = []
    launched: int | None = None

    def close() -> None:
        if operation and len(groups) > 1 and (ranks := groups[min(groups)]):
            found.append(Trouble("behind", communicator, 0, operation, min(groups), max(groups), tuple(ranks)))
        elif processes:
            found.append(Trouble(state, communicator, 0, "", 0, 0, tuple(processes)))
        groups.clear()
        processes.clear()

    for line in lines:
        if head := _HEAD.fullmatch(line):
            close()
            state = "unresponsive" if head[2] == "INCOMPLETE" else ""
            communicator, operation, launched = int(head[1], 16), "", None
        elif line in ("DEAD", "INCOMPLETE", "TIMEOUT"):
            close()
            state, communicator, operation = {"DEAD": "dead", "INCOMPLETE": "unresponsive"}.get(line, ""), 0, ""
        elif different := _DIFFERENT.match(line):
            close()
            operation, launched = different[1] or "collective", None
        elif operation and (some := _SOME.match(line)):
            launched = int(some[1] or 0)
            groups.setdefault(launched, [])
        elif operation and (one := _ONE.match(line)):
            groups.setdefault(int(one[2] or 0), []).append(RasRank(int(one[1]), one[4] or "", int(one[3] or -1), -1))
        elif rank := _RANK.match(line):
            seen = RasRank(int(rank[1]), rank[3] or "", int(rank[2] or -1), -1)
            if operation and launched is not None:
                groups[launched].append(seen)
            elif state:
                processes.append(seen)
        elif state and not communicator and (process := _PROCESS.match(line)):
            processes.append(RasRank(-1, process[2], int(process[1]), -1))
        elif not line.strip():
            close()
            operation, launched = "", None
    close()
    return found


@dataclass(slots=True)
class RasWatch:
    """What is to be reported of one answer after the other: each trouble once, when it has lasted."""

    _lasting: Counter[Trouble] = field(default_factory=Counter[Trouble])
    _reported: set[Trouble] = field(default_factory=set[Trouble])
    _looks: int = 0

    def ingest_answer(self, troubles: Sequence[Trouble], now_ns: int) -> list[Fact]:
        """Facts that are new. Dead processes are reported at once: RAS itself waited a minute for them."""
        self._looks += 1
        self._lasting = Counter({each: self._lasting[each] + 1 for each in dict.fromkeys(troubles)})
        self._reported &= self._lasting.keys()
        due = [each for each, looks in self._lasting.items() if looks >= LOOKS or each.state == "dead"]
        new = [each for each in due if each not in self._reported]
        self._reported.update(new)
        return [_fact(each, self._looks, now_ns) for each in new]


def _fact(trouble: Trouble, line: int, now_ns: int) -> Fact:
    named = trouble.ranks[:_MOST_RANKS_NAMED]
    ranks, global_ranks = tuple(each.rank for each in named), tuple(each.global_rank for each in named)
    nodes = tuple(each.node for each in named)
    pids = tuple(max(each.pid, -1) for each in named)
    if trouble.state == "behind":
        return RasBehind(
            line=line,
            logged_at_ns=now_ns,
            communicator=trouble.communicator,
            size=trouble.size,
            operation=trouble.operation or "collective",
            launched=trouble.launched,
            others=trouble.others,
            ranks=ranks,
            global_ranks=global_ranks,
            nodes=nodes,
            pids=pids,
            ranks_behind=len(trouble.ranks),
        )
    return RasMissing(
        line=line,
        logged_at_ns=now_ns,
        state=trouble.state,
        communicator=trouble.communicator,
        size=trouble.size,
        ranks=ranks,
        global_ranks=global_ranks,
        nodes=nodes,
        pids=pids,
        ranks_missing=len(trouble.ranks),
    )

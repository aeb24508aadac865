"""Values of the corpus, held against regular expressions of this test's own: what a line says is what its record says.

The expressions are looser than the reader's and take every field from its words; they know one line each, and nothing
of blocks, torn lines or versions. A line is compared where it holds one prefix.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from agent.log_samples import SOURCE
from corpus.conformance import logs_of

from ncclscope_agent.sources.nccl_log.reader import NcclLogReader
from ncclscope_wire import facts
from ncclscope_wire.facts import Fact
from ncclscope_wire.records import CommunicatorEvent

pytestmark = pytest.mark.corpus

_HEAD = r"(?:^|[\s>:|\]])(?P<host>[\w<>-]+):(?P<pid>\d+):(?P<tid>\d+) (?:\[-?\d+\] )?(?:[^\[]\S* )*?NCCL INFO "


@dataclass(frozen=True, slots=True)
class Family:
    """One family: the expression, and both sides' values in one order."""

    mark: str
    """What each of its lines has: others are not looked at."""
    pattern: str
    of_text: Callable[[re.Match[str]], object]
    of_record: Callable[[Fact | CommunicatorEvent], object]
    least: int
    """Lines of it that the corpus has, at least."""


def _environment(record: Fact | CommunicatorEvent) -> object:
    assert isinstance(record, facts.EnvironmentSetting)
    return record.variable, record.value


def _ring_order(record: Fact | CommunicatorEvent) -> object:
    assert isinstance(record, facts.RingOrder)
    return record.channel, record.ranks


def _init(record: Fact | CommunicatorEvent) -> object:
    assert isinstance(record, CommunicatorEvent)
    return (
        record.kind.name,
        record.pointer,
        record.rank,
        record.nranks,
        record.cuda_device,
        record.bus_id,
        record.comm_id,
    )


def _network(record: Fact | CommunicatorEvent) -> object:
    assert isinstance(record, facts.NetworkChosen)
    return record.network


_KINDS = {
    "Init START": "INIT_START",
    "Init COMPLETE": "INIT_COMPLETE",
    "Destroy COMPLETE": "DESTROY",
    "Abort COMPLETE": "ABORT",
    "Abort START": "ABORT",
}


def _init_of(found: re.Match[str]) -> object:
    words = found[0].split()
    after = {name: words[words.index(name) + 1] for name in ("cudaDev", "busId", "commId") if name in words}
    comm_id = after.get("commId")
    return (
        _KINDS[found["event"]],
        int(found["comm"], 16),
        int(found["rank"]),
        int(found["n"]),
        int(after["cudaDev"]),
        int(after["busId"], 16) if "busId" in after else None,
        None if comm_id is None else int(comm_id, 16),
    )


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"-?\d+", text)]


FAMILIES: dict[str, Family] = {
    "environment": Family(
        " set by environment to ",
        r"(?P<name>NCCL_\w+) set by environment to (?P<value>.+?)\.?\s*$",
        lambda m: (m["name"], m["value"]),
        _environment,
        250,
    ),
    "ring_order": Family(
        "Channel ",
        r"Channel (?P<c>\d+)/(?P<n>\d+) :(?P<ranks>(?: +\d+)+)\s*$",
        lambda m: (int(m["c"]), tuple(_numbers(m["ranks"]))),
        _ring_order,
        9_000,
    ),
    "init": Family(
        " cudaDev ",
        r".*?\bcomm (?P<comm>0x\w+) rank (?P<rank>\d+) n[rR]anks (?P<n>\d+) cudaDev .*- (?P<event>"
        + "|".join(_KINDS)
        + ")",
        _init_of,
        _init,
        2_000,
    ),
    "network": Family("Using network ", r"Using network (?P<n>.+?)\s*$", lambda m: m["n"], _network, 500),
}
_RECORDS: dict[type[Fact | CommunicatorEvent], str] = {
    facts.EnvironmentSetting: "environment",
    facts.RingOrder: "ring_order",
    CommunicatorEvent: "init",
    facts.NetworkChosen: "network",
}


def test_each_value_of_four_families_is_the_one_that_its_line_says(corpus: Path) -> None:
    expressions = {name: re.compile(_HEAD + family.pattern) for name, family in FAMILIES.items()}
    compared: Counter[str] = Counter()
    missed: Counter[str] = Counter()
    wrong: list[object] = []
    for path in logs_of(corpus):
        data = path.read_bytes()
        records = _records(data)
        for number, line in enumerate(data.decode("utf-8", "replace").split("\n"), 1):
            if line.count("NCCL INFO ") != 1:
                continue
            for name, expression in expressions.items():
                found = expression.search(line) if FAMILIES[name].mark in line else None
                if found is None:
                    continue
                record = records.get(("channel_link" if name == "bus_ids" else name, number))
                value = None if record is None else FAMILIES[name].of_record(record)
                if record is None:
                    missed[name] += 1
                if record is None or value is None:
                    continue
                compared[name] += 1
                said = (found["host"], int(found["pid"]), int(found["tid"]), FAMILIES[name].of_text(found))
                read = (record.host, record.pid, record.tid, value)
                if said != read:
                    wrong.append((name, said, read))
    assert wrong[:5] == []
    assert missed == {}
    assert {name: family.least for name, family in FAMILIES.items() if compared[name] < family.least} == {}, compared


def _records(data: bytes) -> dict[tuple[str, int], Fact | CommunicatorEvent]:
    """The records of a log by family and line; one a line."""
    reader = NcclLogReader(SOURCE)
    found: dict[tuple[str, int], Fact | CommunicatorEvent] = {}
    for batch in [*reader.ingest_bytes(data), *reader.finish()]:
        records: list[Fact | CommunicatorEvent] = [*batch.facts, *batch.communicators]
        for record in records:
            name = _RECORDS.get(type(record))
            if name is not None:
                found[name, record.line] = record
    return found

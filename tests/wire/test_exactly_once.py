"""The promise of the wire: whatever breaks, every row of every source is applied exactly once, in order.

Both machines run over a fake wire that delivers bytes in random pieces, is cut at random, and whose two ends
are started anew at random. The model is the content of the sources itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from wire.sample_batches import log_source

from ncclscope_agent.link.exchange import SessionState
from ncclscope_agent.link.frames import WindowLimits
from ncclscope_agent.link.session import Session
from ncclscope_service.intake.receive import Received, Receiver
from ncclscope_wire import tables
from ncclscope_wire.batch import Batch
from ncclscope_wire.errors import ProtocolError
from ncclscope_wire.messages import PROTOCOL_VERSION, AgentHealth, Hello, Position

WORDS = ("AllReduce", "Send", "Recv", "Broadcast", "Reduce")
SOURCES = 3


def hello(session_id: str) -> Hello:
    return Hello(
        protocol_version=PROTOCOL_VERSION,
        agent_id="agent",
        session_id=session_id,
        name="agent",
        host="node",
        job="job",
        software_version="0",
        pid=1,
    )


@dataclass
class Reader:
    """Reads a list of words as a log is read: each new word becomes a template, each word a row."""

    number: int
    content: list[str]
    at: int = 0
    templates: dict[str, int] = field(default_factory=dict[str, int])

    def reset(self, positions: Mapping[str, Position]) -> None:
        position = positions.get(log_source(self.number).key, Position(end=0))
        self.at = position.end
        assert position.end_line == position.end
        self.templates = {}

    def read(self, amount: int) -> Batch:
        words = self.content[self.at : self.at + amount]
        new = tuple(dict.fromkeys(word for word in words if word not in self.templates))
        first = len(self.templates)
        self.templates |= {word: first + index for index, word in enumerate(new)}
        templates = np.zeros(len(new), tables.OPERATION_TEMPLATE)
        templates["op_name"] = np.arange(first, first + len(new))
        operations = np.zeros(len(words), tables.OPERATION_ROW)
        operations["template"] = [self.templates[word] for word in words]
        operations["line"] = np.arange(self.at, self.at + len(words))
        begin, self.at = self.at, self.at + len(words)
        return Batch(
            source=log_source(self.number),
            begin=begin,
            end=self.at,
            end_line=self.at,
            strings=new,
            threads=np.zeros(1 if begin == 0 or first == 0 else 0, tables.THREAD),
            operation_templates=templates,
            operations=operations,
        )


@dataclass
class Applied:
    """What a service would know: rows with their dictionaries resolved."""

    rows: dict[str, list[tuple[int, str]]] = field(default_factory=lambda: defaultdict(list))
    strings: dict[tuple[str, str], list[str]] = field(default_factory=lambda: defaultdict(list))
    templates: dict[tuple[str, str], list[int]] = field(default_factory=lambda: defaultdict(list))

    def apply(self, received: Received) -> None:
        batch, key = received.batch, received.batch.source.key
        strings = self.strings[received.session, key]
        templates = self.templates[received.session, key]
        strings.extend(batch.strings)
        templates.extend(batch.operation_templates["op_name"].tolist())
        for row in batch.operations:
            self.rows[key].append((int(row["line"]), strings[templates[row["template"]]]))


class World:
    """An agent, a service, and the bytes between them."""

    def __init__(self, contents: list[list[str]]) -> None:
        self.contents = contents
        self.starts = self.connections = 0
        self.connected = False
        self.to_service = self.to_agent = b""
        self.start_service()
        self.start_agent()

    def start_service(self) -> None:
        self.cut()
        self.receiver = Receiver()
        self.applied = Applied()

    def start_agent(self) -> None:
        self.cut()
        self.starts += 1
        self.session = Session(hello(f"session{self.starts}"), limits=WindowLimits(max_batches=4))
        self.readers = [Reader(number, content) for number, content in enumerate(self.contents)]
        self.generation = 0
        self.waiting: list[Batch] = []

    def cut(self) -> None:
        if self.connected:
            self.receiver.on_disconnected(self.connections)
            self.session.on_disconnected()
        self.connected = False
        self.to_service = self.to_agent = b""

    def connect(self) -> None:
        if not self.connected:
            self.connections += 1
            self.receiver.open(self.connections)
            self.session.on_connected()
            self.connected = True

    def read(self, number: int, amount: int) -> None:
        if self.session.generation != self.generation:
            self.generation = self.session.generation
            self.waiting.clear()
            for reader in self.readers:
                reader.reset(self.session.positions)
        if self.waiting:
            if self.session.offer(self.waiting[0]):
                self.waiting.pop(0)
        elif self.session.has_room and self.readers[number].at < len(self.contents[number]):
            batch = self.readers[number].read(amount)
            if not self.session.offer(batch):
                self.waiting.append(batch)

    def carry_to_service(self, amount: int) -> None:
        if not self.connected:
            return
        self.session.exchange.heartbeat(AgentHealth(), agent_wall_ns=0)
        self.to_service += self.session.to_send(max_bytes=500)
        data, self.to_service = self.to_service[:amount], self.to_service[amount:]
        outcome = self.receiver.on_bytes(self.connections, data, now_ns=0)
        for received in outcome.received:
            self.applied.apply(received)
        self.to_agent += outcome.to_send
        assert outcome.fault is None, outcome.fault

    def carry_to_agent(self, amount: int) -> None:
        data, self.to_agent = self.to_agent[:amount], self.to_agent[amount:]
        try:
            self.session.on_bytes(data)
        except ProtocolError as error:
            raise AssertionError("the service broke the protocol") from error

    def finish(self) -> None:
        """Lets everything that is left go its way."""
        self.connect()
        for _ in range(2000):
            self.carry_to_service(10**6)
            self.carry_to_agent(10**6)
            for number in range(SOURCES):
                self.read(number, 3)
            if self.session.exchange.state is SessionState.STREAMING and self.is_done():
                return
        raise AssertionError("the rest never arrived")

    def is_done(self) -> bool:
        all_read = all(reader.at == len(reader.content) for reader in self.readers)
        return all_read and self.session.is_drained and not self.waiting and self.generation == self.session.generation


def act(world: World, action: tuple[str, int, int]) -> None:
    what, number, amount = action
    match what:
        case "read":
            world.read(number % SOURCES, 1 + amount % 5)
        case "connect":
            world.connect()
        case "to_service":
            world.carry_to_service(amount)
        case "to_agent":
            world.carry_to_agent(amount)
        case "grow":
            world.contents[number % SOURCES].extend(WORDS[(number + index) % 5] for index in range(amount % 7))
        case "cut":
            world.cut()
        case "restart_agent":
            world.start_agent()
        case _:
            world.start_service()


OFTEN = st.tuples(
    st.sampled_from(["read", "read", "to_service", "to_service", "to_agent", "to_agent", "connect", "grow"]),
    st.integers(0, 50),
    st.integers(0, 2000),
)
SELDOM = st.tuples(st.sampled_from(["cut", "cut", "restart_agent", "restart_service"]), st.just(0), st.just(0))
ACTIONS = st.lists(st.one_of(OFTEN, OFTEN, OFTEN, OFTEN, SELDOM), max_size=120)


@given(
    contents=st.lists(st.lists(st.sampled_from(WORDS), max_size=30), min_size=SOURCES, max_size=SOURCES),
    actions=ACTIONS,
)
@settings(max_examples=150)
def test_every_row_is_applied_exactly_once_whatever_breaks(
    contents: list[list[str]], actions: list[tuple[str, int, int]]
) -> None:
    world = World(contents)
    for action in actions:
        act(world, action)
    world.finish()

    for number, content in enumerate(contents):
        assert world.applied.rows[log_source(number).key] == list(enumerate(content))

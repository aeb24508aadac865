"""An agent with a spool, its disk, its logs and a service, in memory: each can be cut off, lost or begun anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np
from agent.spool_samples import SECOND, Disk
from wire.sample_batches import HELLO, log_source

from ncclscope_agent.link.exchange import SessionState
from ncclscope_agent.link.frames import WindowLimits
from ncclscope_agent.spool.limits import SpoolLimits
from ncclscope_agent.spool.session import SpooledSession
from ncclscope_service.intake.receive import Received, Receiver
from ncclscope_wire import tables
from ncclscope_wire.batch import Batch
from ncclscope_wire.messages import Position

PER_TEMPLATE = 7
"""Rows of one template: the template's count says which rows are right with it."""


@dataclass(slots=True)
class Log:
    """A file of numbered lines, and one byte each; `read_to` is where its reader is."""

    number: int
    lines: int = 0
    is_there: bool = True
    read_to: int = 0
    templates: dict[int, int] = field(default_factory=dict[int, int])

    @property
    def key(self) -> str:
        return log_source(self.number).key

    def begin(self, position: Position) -> None:
        """Reads on from there, with new dictionaries."""
        self.read_to = position.end
        self.templates = {}

    def batch(self, most: int) -> Batch | None:
        """The next lines."""
        begin, end = self.read_to, min(self.lines, self.read_to + most)
        if not self.is_there or begin >= end:
            return None
        known = len(self.templates)
        rows = np.zeros(end - begin, tables.OPERATION_ROW)
        rows["line"] = np.arange(begin + 1, end + 1)
        for row in rows:
            row["template"] = self.templates.setdefault(int(row["line"]) // PER_TEMPLATE, len(self.templates))
        new = np.zeros(len(self.templates) - known, tables.OPERATION_TEMPLATE)
        new["count"] = list(self.templates)[known:]
        self.read_to = end
        return Batch(
            source=log_source(self.number),
            begin=begin,
            end=end,
            end_line=end,
            strings=("AllReduce",) if known == 0 else (),
            threads=np.zeros(1 if known == 0 else 0, tables.THREAD),
            operation_templates=new,
            operations=rows,
        )


class Applied:
    """What a service was given, checked as an intake would."""

    def __init__(self) -> None:
        self.lines: dict[str, list[int]] = {}
        self.gaps = Counter[str]()
        self.lost: dict[str, list[tuple[int, int]]] = {}
        self._templates: dict[tuple[str, str], list[int]] = {}

    def take(self, received: Received) -> None:
        """Applies a batch."""
        batch = received.batch
        known = self._templates.setdefault((received.session, batch.source.key), [])
        known += batch.operation_templates["count"].tolist()
        for row in batch.operations:
            line = int(row["line"])
            assert known[int(row["template"])] == line // PER_TEMPLATE, f"line {line} has the template of another"
            self.lines.setdefault(batch.source.key, []).append(line)
        for gap in batch.gaps:
            self.gaps[gap.reason] += gap.amount
            self.lost.setdefault(batch.source.key, []).append((batch.begin, batch.end))


class World:
    """All of it. What a service has applied is its own, as its positions are: both are lost together."""

    def __init__(self, *, limits: SpoolLimits | None = None, window: WindowLimits | None = None, logs: int = 2) -> None:
        self.limits = limits or SpoolLimits(transaction_bytes=2000, sync_ns=0, retry_ns=0)
        self.window = window or WindowLimits(max_batches=4)
        self.disk = Disk(self.limits)
        self.logs = [Log(number) for number in range(1, logs + 1)]
        self.receiver = Receiver()
        self.applied = Applied()
        self.now_ns = 0
        self._ids = count(1)
        self._connections = count(1)
        self._connection: int | None = None
        self._generation = 0
        self.session = self._session()

    def _session(self) -> SpooledSession:
        self._generation = 0
        for log in self.logs:
            log.read_to = 0
        hello = replace(HELLO, session_id=self._id())
        spool = self.disk.recovered()
        return SpooledSession(hello, spool, new_id=self._id, holds=self._holds, limits=self.window)

    def _id(self) -> str:
        return f"s{next(self._ids)}"

    def _holds(self, key: str, position: Position) -> bool:
        return any(log.key == key and log.is_there and log.lines >= position.end for log in self.logs)

    # What may happen

    def write(self, log: int, lines: int) -> None:
        """A job logs."""
        if self.logs[log].is_there:
            self.logs[log].lines += lines

    def vanish(self, log: int) -> None:
        """A log is deleted."""
        self.logs[log].is_there = False

    def read(self, most: int = 5) -> None:
        """One look at all logs."""
        for log in self.logs:
            self._follow_generation()
            batch = log.batch(most) if self._generation and self.session.has_room else None
            if batch is not None and not self.session.offer(batch):
                self._follow_generation()

    def _follow_generation(self) -> None:
        if self.session.generation != self._generation:
            self._generation = self.session.generation
            for log in self.logs:
                log.begin(self.session.positions.get(log.key, Position(end=0)))

    def write_spool(self, *, at_once: bool = True) -> None:
        """The disk does what it is asked to."""
        self.now_ns += SECOND
        self.disk.write(self.session.spool, self.now_ns, at_once=at_once)

    def fail_spool(self) -> None:
        """The disk is full."""
        if self.session.spool.next_transaction(self.now_ns) is not None:
            self.session.spool.on_failed(self.now_ns, "full")

    def kill_agent(self) -> None:
        """The agent is killed and started again."""
        self.disconnect()
        self.session = self._session()

    def cut_power(self) -> None:
        """The same, and what was not synced is lost."""
        self.disk.lose_what_is_not_synced()
        self.kill_agent()

    def lose_service(self) -> None:
        """The service is started anew and knows nothing."""
        self.disconnect()
        self.receiver, self.applied = Receiver(), Applied()

    def disconnect(self) -> None:
        """The connection is cut."""
        if self._connection is not None:
            self.receiver.on_disconnected(self._connection)
            self._connection = None
            self.session.on_disconnected()

    def fail_to_connect(self) -> None:
        """Nobody listens."""
        if self._connection is None:
            self.session.on_disconnected()

    def converse(self, turns: int) -> None:
        """Agent and service talk for so long; there is a connection afterwards, or none again."""
        for _ in range(turns):
            if self._connection is None or self.session.wants_reconnect:
                self.disconnect()
                self._connection = next(self._connections)
                self.receiver.open(self._connection)
                self.session.on_connected()
            self._say(self.session.to_send(max_bytes=1000))
            self._load()

    def _say(self, data: bytes) -> None:
        if self._connection is None or not data:
            return
        outcome = self.receiver.on_bytes(self._connection, data, self.now_ns)
        for received in outcome.received:
            self.applied.take(received)
        assert outcome.fault is None, outcome.fault
        self.session.on_bytes(outcome.to_send)
        if self.session.exchange.state is SessionState.STREAMING:
            self.session.on_bytes(self._answer_to_heartbeat(outcome.to_send))

    def _answer_to_heartbeat(self, said: bytes) -> bytes:
        """The acknowledgement that was just sent, again."""
        return b"" if b"welcome" in said else said

    def _load(self) -> None:
        session = self.session
        if (chapter := session.wants_entries_of) is not None:
            session.load_entries(chapter, self.disk.database.entries(chapter))
        elif session.wants_load:
            wanted = session.next_load()
            if wanted.in_memory is not None:
                session.load(wanted, wanted.in_memory, wanted.last)
            else:
                session.load(wanted, *self.disk.database.frames(wanted.chapter, wanted.sequence, wanted.last))

    # What must hold

    def settle(self) -> None:
        """Everything works until all is handed over."""
        for _ in range(400):
            self.read()
            self.write_spool()
            self.converse(4)
            is_read = all(log.read_to >= log.lines or not log.is_there for log in self.logs)
            is_read &= self._generation == self.session.generation
            if self.session.is_drained and is_read and self.session.exchange.state is SessionState.STREAMING:
                return
        raise AssertionError("agent and service did not come to an end")

    def missing(self) -> Iterator[tuple[str, int]]:
        """Lines that are neither applied nor in a gap; none may be applied twice or out of order."""
        for log in self.logs:
            lines = self.applied.lines.get(log.key, [])
            assert lines == sorted(set(lines)), f"{log.key}: lines were applied twice"
            lost = {line for begin, end in self.applied.lost.get(log.key, ()) for line in range(begin + 1, end + 1)}
            assert not lost & set(lines), f"{log.key}: lines are said to be lost and were applied"
            yield from ((log.key, line) for line in range(1, log.lines + 1) if line not in lost and line not in lines)

"""A relay between agent and service that can do to their connections what networks do."""

from __future__ import annotations

import random
import select
import socket
import threading
import time
from dataclasses import dataclass, field
from enum import Enum, auto


class Weather(Enum):
    """Behaviour of the relay."""

    CLEAR = auto()
    CUT = auto()
    """Connections are reset, and none is accepted."""
    BLACK_HOLE = auto()
    """Nothing passes and nobody is told."""
    SLOW = auto()
    """Every piece is late by up to 0.3 s, and now and then a connection is reset."""
    TURNED = auto()
    """One byte of each tenth piece is another."""


@dataclass(slots=True)
class _Pair:
    agent: socket.socket
    service: socket.socket
    ready: dict[socket.socket, list[tuple[float, bytes]]] = field(
        default_factory=dict[socket.socket, list[tuple[float, bytes]]]
    )

    def close(self, *, reset: bool) -> None:
        for each in (self.agent, self.service):
            if reset:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            each.close()


class Proxy:
    """Listens on `port`; a thread of its own until `close`."""

    def __init__(self, service_port: int) -> None:
        self.weather = Weather.CLEAR
        self._service = ("127.0.0.1", service_port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._pairs: list[_Pair] = []
        self._is_open = True
        self._random = random.Random(1)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def half_open(self) -> None:
        """The service's ends of all connections are closed; the agents' ends stay, and hear nothing any more."""
        for pair in self._pairs:
            pair.service.shutdown(socket.SHUT_RDWR)
        self.weather = Weather.BLACK_HOLE

    def close(self) -> None:
        """Ends it."""
        self._is_open = False
        self._thread.join()
        for pair in self._pairs:
            pair.close(reset=False)
        self._listener.close()

    def _run(self) -> None:
        while self._is_open:
            weather = self.weather
            if weather is Weather.CUT:
                self._reset()
            if weather is Weather.BLACK_HOLE:
                time.sleep(0.02)
                continue
            ends = {end: pair for pair in self._pairs for end in (pair.agent, pair.service)}
            readable, _, _ = select.select([self._listener, *ends], [], [], 0.01)
            for each in readable:
                if each is self._listener:
                    self._accept(weather)
                else:
                    self._read(each, ends[each], weather)
            for pair in list(self._pairs):
                self._write(pair)
            if weather is Weather.SLOW and self._random.random() < 0.002:
                self._reset()

    def _accept(self, weather: Weather) -> None:
        agent, _ = self._listener.accept()
        try:
            if weather is Weather.CUT:
                raise ConnectionRefusedError
            service = socket.create_connection(self._service, timeout=2)
        except OSError:
            agent.close()
            return
        self._pairs.append(_Pair(agent, service))

    def _read(self, end: socket.socket, pair: _Pair, weather: Weather) -> None:
        if pair not in self._pairs:
            return
        other = pair.service if end is pair.agent else pair.agent
        try:
            data = end.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._pairs.remove(pair)
            pair.close(reset=False)
            return
        if weather is Weather.TURNED and self._random.random() < 0.1:
            at = self._random.randrange(len(data))
            data = data[:at] + bytes([data[at] ^ self._random.randrange(1, 256)]) + data[at + 1 :]
        late = self._random.random() * 0.3 if weather is Weather.SLOW else 0.0
        queue = pair.ready.setdefault(other, [])
        queue.append((max(time.monotonic() + late, queue[-1][0] if queue else 0.0), data))

    def _write(self, pair: _Pair) -> None:
        for end, queue in pair.ready.items():
            while queue and queue[0][0] <= time.monotonic():
                try:
                    end.sendall(queue.pop(0)[1])
                except OSError:
                    queue.clear()

    def _reset(self) -> None:
        for pair in self._pairs:
            pair.close(reset=True)
        self._pairs.clear()

"""Ports of the loopback for programs that a benchmark or a test starts."""

from __future__ import annotations

import itertools
import os
import random
import socket

# Below the ports that Linux gives to outgoing connections and to whoever asks for any
# (net.ipv4.ip_local_port_range begins at 32768), so that nobody takes one between its choice and the start of the
# program that is to listen on it.
_FIRST, _LAST = 12_000, 32_000

_candidates = itertools.cycle(random.Random(os.getpid()).sample(range(_FIRST, _LAST), _LAST - _FIRST))


def free_port() -> int:
    """A port that nothing listens on; of one process, no port is given twice until all were tried."""
    for port in itertools.islice(_candidates, _LAST - _FIRST):
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
    raise RuntimeError(f"no free port from {_FIRST} to {_LAST} on 127.0.0.1")

"""Ports of the loopback for programs that must be told which one to take.

Programs of ours take any (`--listen 127.0.0.1:0`) and say which. For others (Prometheus) a
port has to be chosen before, and for a service that comes back to the port that its agents know.
"""

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
    """A port that nothing listens on, and that no other process was given."""
    for port in itertools.islice(_candidates, _LAST - _FIRST):
        try:
            with socket.create_server(("127.0.0.1", port)):
                _reserve(port)
                return port
        except OSError:
            continue
    raise RuntimeError(f"no free port from {_FIRST} to {_LAST} on 127.0.0.1")


def _reserve(port: int) -> None:
    """Takes a name for the port in the kernel, for as long as this process lives: another one, for instance a second
    run of the tests, takes another port although the program that is to listen is not there yet.

    *Source:* unix(7), abstract sockets.

    Raises:
        OSError: another process has it.
    """
    name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        name.bind(f"\0ncclscope-port-{port}")
    except OSError:
        name.close()
        raise
    name.detach()  # open until the process ends

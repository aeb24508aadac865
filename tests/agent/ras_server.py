"""A server that speaks NCCL's RAS protocol over a real socket, and answers in the documented forms.

Forms as NCCL prints them: `src/ras/client_support.cc` of 2.30, and the User Guide's examples of 2.24 and 2.27.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

OPERATIONS = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")


def text_status(version: str, errors: str = "", warnings: str = "") -> bytes:
    """An answer in text with these sections."""
    return (
        f"NCCL version {version} compiled with CUDA 12.6\nCUDA runtime version 12060, driver version 12060\n\n"
        "Job summary\n===========\n\n"
        "  Nodes  Processes         GPUs  Processes     GPUs\n"
        "(total)   per node  per process    (total)  (total)\n"
        "      4          8            1         32       32\n\n"
        "Communicators... (0.00s)\n=============\n\n"
        "Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors\n"
        "    #  in group  per comm  per node  per comm  in group\n"
        "    0         1         4         8        32        32   RUNNING  OK\n\n"
        f"Errors\n======\n\n{errors}Warnings\n========\n\n{warnings}"
    ).encode()


def rank(number: int, **launched: int) -> dict[str, object]:
    """One rank of an answer in JSON."""
    status = {
        "init_state": 0,
        "async_error": 0,
        "finalize_called": False,
        "destroy_flag": False,
        "abort_flag": False,
    }
    return {
        "rank": number,
        "host": f"10.0.0.{number // 4}",
        "pid": 100 + number,
        "cuda_dev": number % 4,
        "nvml_dev": number % 4,
        "status": status,
        "collective_counts": {name: launched.get(name, 0) for name in OPERATIONS},
    }


def missing(number: int, *, dead: bool = False, unresponsive: bool = True) -> dict[str, object]:
    """One missing rank of an answer in JSON."""
    status = {"unresponsive": unresponsive, "considered_dead": dead}
    return {**rank(number), "status": status, "collective_counts": {}}


def json_status(*communicators: tuple[str, list[dict[str, object]], list[dict[str, object]]]) -> bytes:
    """An answer in JSON: hash, ranks and missing ranks of each communicator."""
    listed = [
        {
            "hash": name,
            "secondary_hash": "0x1:0x2",
            "size": len(ranks) + len(gone),
            "ranks_count": len(ranks),
            "missing_ranks_count": len(gone),
            "ranks": ranks,
            "missing_ranks": gone,
        }
        for name, ranks, gone in communicators
    ]
    head = {"nccl_version": "2.28.7", "cuda_runtime_version": 12090, "timestamp": "2026-03-02 11:00:00"}
    foot = {"ras": {"collection_time_sec": 0.002, "timeouts_count": 0}}
    return json.dumps({**head, "communicators_count": len(listed), "communicators": listed, **foot}, indent=2).encode()


class RasServer:
    """Listens on loopback, at a port of its own, until it is left."""

    def __init__(self, answer: Callable[[bool], bytes], *, knows_json: bool, is_silent: bool = False) -> None:
        """`answer` gives the answer to STATUS, in JSON or text."""
        self._answer, self._knows_json, self._is_silent = answer, knows_json, is_silent
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._socket.getsockname()[1])
        self.requests: list[str] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> RasServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(60)

    def _serve(self) -> None:
        waiting: list[socket.socket] = []
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                break
            if self._is_silent:
                waiting.append(connection)
                continue
            with connection, suppress(OSError):  # whoever has enough hangs up
                self._talk(connection)
        for connection in waiting:
            connection.close()

    def _talk(self, connection: socket.socket) -> None:
        as_json = False
        for raw in connection.makefile("rb"):
            line = raw.decode().strip()
            self.requests.append(line)
            if line.startswith("CLIENT PROTOCOL"):
                connection.sendall(b"SERVER PROTOCOL 2\n")
            elif line == "SET FORMAT json" and not self._knows_json:
                connection.sendall(b"ERROR: Unknown command 'SET FORMAT json'\n")
            elif line.endswith("STATUS"):
                connection.sendall(self._answer(as_json))
                return
            else:
                as_json = as_json or line == "SET FORMAT json"
                connection.sendall(b"OK\n")

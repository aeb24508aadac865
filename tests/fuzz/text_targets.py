"""Texts of other programs, and what people and browsers send: seeds, and what must hold for any bytes."""

from __future__ import annotations

import sqlite3
import tempfile
from base64 import b64decode
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

import numpy as np
from fuzz.target import Target
from service.serve.test_http_access import READER, WRITER, basic, closed

from ncclscope.config_file import keys_of_command, read_table
from ncclscope.node import read_chrony
from ncclscope.serve import serve
from ncclscope_agent.files.recognise import recognise
from ncclscope_agent.nccl_settings.advice import read_version
from ncclscope_agent.sources.nsys.kernel_names import kernel_kind
from ncclscope_agent.sources.nsys.nvtx_payload import copy_payloads, read_payload
from ncclscope_service.nccl.launch_rules import parse_kernel_name
from ncclscope_service.nccl.nccl_tests import MeasuredBaseline, NcclTests
from ncclscope_wire.errors import ConfigError


def check_table(data: bytes) -> None:
    """Any text of nccl-tests gives measurements that a baseline takes, and rates that are numbers."""
    found = list(NcclTests("all_reduce_perf.txt").read(data.decode("utf-8", "replace").splitlines(), Counter()))
    baseline = MeasuredBaseline(found)
    for shape in baseline.shapes:
        rates = baseline.busbw(shape, np.array([1, 1 << 20, 1 << 40]))
        assert np.isfinite(rates[~np.isnan(rates)]).all(), "a bandwidth without end"


def table_seeds() -> list[bytes]:
    """A header, a list of devices and rows of two versions."""
    text = """# nThread 1 nGpus 8 minBytes 8 maxBytes 134217728 step: 2(factor) warmup iters: 5 iters: 20 validation: 1
#  Rank  0 Group  0 Pid  41822 on    node17 device  0 [0x1b] NVIDIA H100
#  Rank  1 Pid  41822 on    node17 device  1 [0x2b] NVIDIA H100
     1048576        262144     float     sum      -1    65.41   16.03   28.05      0    64.80   16.18   28.32      0
     2097152        524288     float     sum            95.41   21.98   38.47  2e-07    94.80   22.12   38.71  2e-07
# Avg bus bandwidth    : 33.3
"""
    return [text.encode()]


def check_payloads(data: bytes) -> None:
    """Any JSON beside an export tells of payloads or of none; any payload has a hash and a size that columns hold."""
    for function in ("ncclAllReduce", "ncclSend", "x"):
        _, moved = read_payload(function, data)
        assert -(2**63) <= moved < 2**63
    with tempfile.TemporaryDirectory() as folder, closing(sqlite3.connect(":memory:")) as connection:
        (Path(folder) / "e.json").write_bytes(data)
        assert copy_payloads(Path(folder) / "e.sqlite", connection)
        connection.execute("SELECT count(*) FROM temp.json_payload").fetchone()


def payload_seeds() -> list[bytes]:
    """A line of an event, and a payload as a column has it."""
    event = (
        b'{"NvtxEvent":{"Type":60,"Timestamp":"123456","GlobalTid":"282574488338432","Payload":{"BinaryData":'
        b'[{"SchemaId":"16777217","Data":"AAAAAAAAAAA="}]}}}\n'
    )
    return [b'{"data":["a"]}\n' + event, bytes(8) + (1 << 24).to_bytes(8, "little") + (24).to_bytes(8, "little")]


def check_words(data: bytes) -> None:
    """Names, versions and what small programs print are understood or not, and never a mistake of ours."""
    text = data.decode("utf-8", "replace")
    parse_kernel_name(text)
    kernel_kind(text)
    read_version(text)
    read_chrony(text)
    recognise(data, text)


def word_seeds() -> list[bytes]:
    """One of each."""
    chrony = b"System time     : 0.000012345 seconds fast of NTP time\nLeap status     : Normal\n"
    names = b"ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<(unsigned long)4096>)"
    return [chrony, names, b"NCCL version 2.27.5+cuda12.9", b"2.27.5", b'{"header": {"inspector_output_format_version"']


def check_serve_config(data: bytes) -> None:
    """Any file is a configuration of the service or ConfigError."""
    with tempfile.TemporaryDirectory() as folder, suppress(ConfigError):
        path = Path(folder) / "c.toml"
        path.write_bytes(data)
        read_table(path, "serve", keys_of_command(serve))


def serve_config_seeds() -> list[bytes]:
    """A right file."""
    return [
        b'[serve]\nlisten = "0.0.0.0:9797"\ntp = 8\nstop-seconds = 30.5\nwebhook = ["http://a/"]\nhttp-tls = false\n'
    ]


def check_http_access(data: bytes) -> None:
    """Whoever says whatever is let in with a token alone."""
    headers = dict(zip(_HEADERS, data.decode("latin-1").split("\n"), strict=False))
    authorization = headers.get("authorization", "")
    with suppress(ValueError):
        authorization += b64decode(authorization.partition(" ")[2]).decode("latin-1")
    knows = READER in authorization or WRITER in authorization
    for method in ("GET", "POST"):
        assert closed().check(method, "/api/overview", headers) is not None or knows


_HEADERS: Final[tuple[str, ...]] = ("authorization", "host", "origin", "sec-fetch-site")


def http_access_seeds() -> list[bytes]:
    """Headers of a browser and of a program."""
    return [
        f"{basic(READER)}\nlocalhost:9798\nhttp://localhost:9798\nsame-origin".encode(),
        f"Bearer {READER}\nlocalhost".encode(),
    ]


TEXT_TARGETS: Final = {
    "table": Target(check_table, table_seeds),
    "payloads": Target(check_payloads, payload_seeds),
    "words": Target(check_words, word_seeds),
    "serve_config": Target(check_serve_config, serve_config_seeds),
    "http_access": Target(check_http_access, http_access_seeds),
}

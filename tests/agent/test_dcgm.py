"""GPUs by dcgm-exporter's endpoint: a real HTTP server with its lines."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from agent.test_machine import Node
from hypothesis import given
from hypothesis import strategies as st

from ncclscope_agent.config import load
from ncclscope_agent.node.dcgm import Dcgm
from ncclscope_wire.errors import ConfigError

BLANK = 9223372036854775794
"""DCGM_INT64_NOT_SUPPORTED, as the exporter's README shows it."""


def answer(
    gpus: int = 2,
    *,
    throttle: int = 1,
    xid: int = 0,
    clock: int = 1980,
    width: float = 16,
    field: str = "CLOCK_THROTTLE_REASONS",
) -> str:
    """As dcgm-exporter 3.3 renders it; only GPU 1 is other than usual."""
    lines = ["# HELP DCGM_FI_DEV_SM_CLOCK SM clock frequency (in MHz).", "# TYPE DCGM_FI_DEV_SM_CLOCK gauge"]
    for gpu in range(gpus):
        is_odd = gpu == 1
        place = f'gpu="{gpu}",UUID="GPU-604ac76c-{gpu}",pci_bus_id="00000000:1{gpu}:00.0",device="nvidia{gpu}"'
        labels = f'{place},modelName="NVIDIA H100 80GB HBM3",Hostname="node07"'
        last = f',err_code="{xid}",err_msg="text with \\"quotes\\""' if is_odd else ',err_code="0",err_msg="No Error"'
        lines += [
            f"DCGM_FI_DEV_SM_CLOCK{{{labels}}} {clock if is_odd else 1980}",
            f"DCGM_FI_DEV_MAX_SM_CLOCK{{{labels}}} 1980",
            f"DCGM_FI_DEV_MEMORY_TEMP{{{labels}}} {BLANK}",
            f"DCGM_FI_DEV_{field}{{{labels}}} {throttle if is_odd else 1}",
            f"DCGM_FI_DEV_PCIE_LINK_WIDTH{{{labels}}} {width if is_odd else 16}",
            f"DCGM_FI_DEV_PCIE_MAX_LINK_WIDTH{{{labels}}} 16",
            f"DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{{{labels}}} {BLANK}",
            f"DCGM_FI_DEV_XID_ERRORS{{{labels}{last}}} {xid if is_odd else 0}",
        ]
    return "\n".join(lines) + "\n"


class Endpoint:
    """A server at which `text` is; None: it fails."""

    def __init__(self) -> None:
        endpoint = self
        self.text: str | None = answer()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200 if endpoint.text is not None else 500)
                self.end_headers()
                self.wfile.write((endpoint.text or "").encode())

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}/metrics"
        Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    made = Endpoint()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_gpus_are_read_from_its_lines() -> None:
    first, second = Dcgm("", 1.0).readings(answer(throttle=0x04, clock=1200, width=8))
    assert (first.index, first.bus_id, first.throttle, first.sm_mhz, first.sm_mhz_most) == (0, 0x10000, 1, 1980, 1980)
    assert (second.index, second.bus_id, second.throttle, second.sm_mhz) == (1, 0x11000, 0x04, 1200)
    assert (second.pcie_width, second.pcie_width_most, second.nvlinks, second.xids) == (8, 16, None, ())
    assert second.ecc_uncorrected is None, "a blank is no number"


def test_throttling_is_said_by_either_name_of_the_field(tmp_path: Path, endpoint: Endpoint) -> None:
    for field in ("CLOCK_THROTTLE_REASONS", "CLOCKS_EVENT_REASONS"):
        node = Node(tmp_path, dcgm=endpoint.address)
        endpoint.text = answer(field=field)
        assert node.look(3) == []
        endpoint.text = answer(throttle=0x04, clock=1200, field=field)
        assert node.look(3) == ["+GPU 1 throttles: power (1,200 of 1,980 MHz)"]


def test_an_xid_is_said_once_and_one_from_before_is_not(tmp_path: Path, endpoint: Endpoint) -> None:
    node = Node(tmp_path, dcgm=endpoint.address)
    endpoint.text = answer(xid=31)
    assert node.look(3) == []
    endpoint.text = answer(xid=79)
    assert node.look(3) == ["!GPU 1 reported Xid 79"]


@pytest.mark.parametrize(
    "text", [None, "", "<html>busy</html>", answer(0), 'DCGM_FI_DEV_SM_CLOCK{gpu="0"', "x" * (5 << 20)]
)
def test_an_endpoint_that_fails_or_is_something_else_is_a_state(
    tmp_path: Path, endpoint: Endpoint, text: str | None
) -> None:
    node = Node(tmp_path, dcgm=endpoint.address)
    endpoint.text = answer(throttle=0x04)
    assert node.look(3) == ["+GPU 1 throttles: power (1,980 of 1,980 MHz)"]
    endpoint.text = text
    assert node.look(3) == [], "GPUs are as they were"
    assert node.skipped == ["machine_dcgm_failed"]


def test_nobody_at_the_address_is_a_state(tmp_path: Path, endpoint: Endpoint) -> None:
    endpoint.server.shutdown()
    endpoint.server.server_close()
    node = Node(tmp_path, dcgm=endpoint.address)
    assert node.look(2) == []
    assert node.skipped == ["machine_dcgm_failed"]


@given(st.lists(st.sampled_from([*answer().splitlines(), "DCGM_FI_DEV_SM_CLOCK", '{gpu="0"}', " 1e400", " NaN", "\\"])))
def test_any_lines_give_readings_or_a_refusal(lines: list[str]) -> None:
    try:
        readings = Dcgm("", 1.0).readings("".join(lines)) + Dcgm("", 1.0).readings("\n".join(lines))
    except ValueError:
        return
    assert all(0 <= reading.index < 64 for reading in readings)


@pytest.mark.parametrize("address", ["localhost:9400", "file:///etc/passwd", "http://", "ftp://host/x"])
def test_what_is_no_address_is_told(address: str) -> None:
    with pytest.raises(ConfigError, match="--dcgm"):
        load({"counters": "yes", "dcgm": address}, {}, host="node1")


def test_an_endpoint_that_nobody_asks_is_told() -> None:
    with pytest.raises(ConfigError, match="--counters too"):
        load({"logs": ("*.log",), "dcgm": "http://localhost:9400/metrics"}, {}, host="node1")

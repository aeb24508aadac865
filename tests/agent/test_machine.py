"""Counters of NICs and GPUs, from a tree of /sys as a node has it and a stand-in for NVML."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from agent.machine_samples import DOWN, FakeGpu, FakeNvml, as_pynvml, write_nic
from hypothesis import given
from hypothesis import strategies as st

from ncclscope_agent.node.asked import ANSWERED
from ncclscope_agent.node.machine_port import MachineFollower, read_ports
from ncclscope_agent.sources.machine import GpuReading, MachineWatch, PortReading
from ncclscope_wire.facts import MachineCondition

SECOND = 1_000_000_000


class Node:
    """A node that is looked at every 5 s."""

    def __init__(self, sys: Path, nvml: FakeNvml | None = None, *, dcgm: str = "", gpu_seconds: float = 60.0) -> None:
        module = None if nvml is None else as_pynvml(nvml)
        self.follower = MachineFollower("node07", sys=sys, nvml=lambda: module, dcgm=dcgm, gpu_seconds=gpu_seconds)
        self.looks = 0
        self.skipped: list[str] = []

    def look(self, times: int = 1) -> list[str]:
        """What is said at these looks: "+" begins or changes, "-" is over, "!" is a fault."""
        said: list[str] = []
        for _ in range(times):
            self.looks += 1
            for batch in self.follower.poll(self.looks * 5 * SECOND):
                self.skipped += batch.counts.skipped
                for fact in batch.facts:
                    assert isinstance(fact, MachineCondition)
                    assert (fact.host, fact.logged_at_ns) == ("node07", self.looks * 5 * SECOND)
                    said.append(f"{'-' if fact.is_over else '!' if fact.is_fault else '+'}{fact.device} {fact.text}")
        return said


def test_ports_are_read_as_linux_writes_them(tmp_path: Path) -> None:
    write_nic(tmp_path, "mlx5_0")
    write_nic(tmp_path, "mlx5_1", 1, state=DOWN, rate="10 Gb/sec (4X SDR)")
    first, second = read_ports(tmp_path)
    assert (first.name, first.state, first.width, first.gbit_per_s) == ("mlx5_0 port 1", "ACTIVE", 4, 400.0)
    assert (first.pcie_width, first.pcie_width_most, first.counters["symbol_error"]) == (16, 16, 0)
    assert (second.name, second.state) == ("mlx5_1 port 1", "DOWN")


def test_a_healthy_node_says_nothing(tmp_path: Path) -> None:
    write_nic(tmp_path, "mlx5_0")
    write_nic(tmp_path, "mlx5_1", 1, state=DOWN)
    assert Node(tmp_path, FakeNvml([FakeGpu()])).look(20) == []


def test_a_link_that_loses_lanes_is_a_fault_until_it_has_them_again(tmp_path: Path) -> None:
    port, node = write_nic(tmp_path, "mlx5_2"), Node(tmp_path)
    assert node.look() == []
    (port / "rate").write_text("100 Gb/sec (1X NDR)\n")
    width, rate = "mlx5_2 port 1 runs at 1x instead of 4x", "mlx5_2 port 1 runs at 100 instead of 400 Gbit/s"
    assert node.look(3) == [f"!{width}", f"!{rate}"]
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    assert node.look(3) == [f"-{width}", f"-{rate}"]


def test_a_port_that_goes_down_is_a_fault_and_one_that_never_was_up_is_none(tmp_path: Path) -> None:
    port, node = write_nic(tmp_path, "mlx5_2"), Node(tmp_path)
    write_nic(tmp_path, "mlx5_3", 1, state=DOWN)
    assert node.look() == []
    (port / "state").write_text("2: INIT\n")
    assert node.look(2) == ["!mlx5_2 port 1 is INIT"]


def test_a_nic_in_a_narrow_slot_is_evidence_and_no_fault(tmp_path: Path) -> None:
    port, node = write_nic(tmp_path, "mlx5_2"), Node(tmp_path)
    (port / "../../device/current_link_width").write_text("8\n")
    assert node.look(2) == ["+mlx5_2 port 1 has a PCIe link of x8 instead of x16"]


def test_errors_that_grow_are_said_by_powers_of_ten_and_end_after_a_minute(tmp_path: Path) -> None:
    port, node = write_nic(tmp_path, "mlx5_2"), Node(tmp_path)
    symbols, said = port / "counters/symbol_error", list[str]()
    symbols.write_text("7\n")
    assert node.look() == [], "what was counted before is nobody's fault now"
    for value in range(8, 40):
        symbols.write_text(f"{value}\n")
        said += node.look()
    text = "mlx5_2 port 1 counts symbol_error (at least {} since this began)"
    assert said == [f"+{text.format(1)}", f"+{text.format(10)}"]
    symbols.write_text("0\n")  # the driver was loaded again
    assert node.look(11) == []
    assert node.look(3) == [f"-{text.format(10)}"]


def test_congestion_is_said_where_it_is_more_than_a_few_notifications(tmp_path: Path) -> None:
    port, node = write_nic(tmp_path, "mlx5_2"), Node(tmp_path)
    said = list[str]()
    for value in (0, 400, 800, 6_000):
        (port / "hw_counters/rp_cnp_handled").write_text(f"{value}\n")
        said += node.look()
    assert said == ["+mlx5_2 port 1 is congested (rp_cnp_handled: at least 1,000 since this began)"]


def test_a_gpu_that_throttles_for_three_looks_is_said_with_its_clock_and_place(tmp_path: Path) -> None:
    gpu = FakeGpu()
    node = Node(tmp_path, FakeNvml([gpu]))
    gpu.throttle = 0x4
    assert node.look(2) == []
    gpu.clock = 1200
    assert node.look(2) == ["+GPU 0 throttles: power (1,200 of 1,980 MHz)"]
    gpu.throttle = 0x40
    assert node.look(2) == ["+GPU 0 throttles: heat (hardware) (1,200 of 1,980 MHz)"]
    gpu.throttle = 1
    assert node.look(2) == ["-GPU 0 throttles: heat (hardware) (1,200 of 1,980 MHz)"]


def test_faults_of_gpus_stay(tmp_path: Path) -> None:
    gpus = [FakeGpu(), FakeGpu("00000000:2C:00.0")]
    nvml = FakeNvml(gpus)
    node = Node(tmp_path, nvml)
    assert node.look() == []
    gpus[1].links[2], gpus[1].ecc, nvml.xids = 0, 3, [(gpus[1], 79)]
    gpus[0].width = 8
    assert node.look(4) == [
        "!GPU 0 has a PCIe link of x8 instead of x16",
        "!GPU 1 has 3 of 4 NVLinks",
        "!GPU 1 had at least 1 uncorrected ECC errors",
        "!GPU 1 reported Xid 79",
    ]


def test_a_gpu_without_nvlink_and_ecc_says_what_it_has(tmp_path: Path) -> None:
    gpu = FakeGpu(links=0)
    gpu.ecc = None
    node = Node(tmp_path, FakeNvml([gpu]))
    node.look()
    gpu.width = 4
    assert node.look() == ["!GPU 0 has a PCIe link of x4 instead of x16"]


def test_a_driver_that_fails_is_a_state_and_is_begun_again(tmp_path: Path) -> None:
    gpu = FakeGpu()
    nvml = FakeNvml([gpu])
    node = Node(tmp_path, nvml)
    gpu.width = 8
    text = "GPU 0 has a PCIe link of x8 instead of x16"
    assert node.look() == [f"+{text}"]
    nvml.is_failing = True
    assert (node.look(3), node.skipped) == ([], ["machine_nvml_failed"])
    assert node.follower.statistics().skipped == {"machine_nvml_failed": 3}
    nvml.is_failing, gpu.width = False, 16
    assert node.look() == [f"-{text}"]
    assert nvml.begun > 1


def test_a_driver_that_holds_its_caller_up_holds_up_no_nic(tmp_path: Path) -> None:
    port = write_nic(tmp_path, "mlx5_2")
    nvml = FakeNvml([FakeGpu()])
    nvml.holds = threading.Event()
    node = Node(tmp_path, nvml, gpu_seconds=0.01)
    assert node.look() == []
    (port / "state").write_text(f"{DOWN}\n")
    assert node.look() == ["!mlx5_2 port 1 is DOWN"]
    assert node.skipped == ["machine_nvml_slow"]
    threads = [thread for thread in threading.enumerate() if thread.name == "gpus"]
    assert len(threads) == 1, "the call that hangs is waited for, and no other is made"
    nvml.holds.set()
    threads[0].join(60)
    assert node.follower.look(20 * SECOND)[1] == ANSWERED


def test_a_machine_without_nics_and_gpus_says_nothing(tmp_path: Path) -> None:
    assert Node(tmp_path / "nothing").look(3) == []


@pytest.mark.parametrize("text", ["", "\0\0", "9" * 400, "-1", "4X", "١٢", "1e9 Gb/sec (999X)", "Gb/sec (4X"])
def test_files_with_something_else_are_not_known(tmp_path: Path, text: str) -> None:
    port, node = write_nic(tmp_path, "mlx5_2"), Node(tmp_path)
    node.look()
    for name in ("rate", "counters/symbol_error", "../../device/current_link_width"):
        (port / name).write_text(text)
    assert node.look(3) == []


_ANY = st.none() | st.integers(-(2**70), 2**70)


@given(st.lists(st.tuples(_ANY, _ANY, _ANY, _ANY), max_size=8))
def test_any_numbers_give_conditions_that_can_be_sent(looks: list[tuple[int | None, ...]]) -> None:
    watch, began, over = MachineWatch(), 0, 0
    for nth, (first, second, third, fourth) in enumerate([*looks, (None,) * 4]):
        port = PortReading(
            device="mlx5_0",
            port=1,
            state="ACTIVE",
            width=first,
            pcie_width=second,
            pcie_width_most=third,
            counters={} if fourth is None else {"symbol_error": fourth},
        )
        gpu = GpuReading(index=0, throttle=first, pcie_width=second, pcie_width_most=third, nvlinks=fourth)
        for fact in watch.ingest_look([port], [gpu], "node", nth * 70 * SECOND):
            assert isinstance(fact, MachineCondition)
            assert len(fact.text) < 500
            began, over = began + (not fact.is_over), over + fact.is_over
    assert over <= began

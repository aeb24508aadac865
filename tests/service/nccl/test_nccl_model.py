"""NCCL's own estimate: its formula, its corrections, and its choice."""

from __future__ import annotations

import pytest

from ncclscope_service.nccl.nccl_model import Group, choice, expected_time
from ncclscope_wire.topology import TuningCell

_ONE_NODE = Group(ranks=4, nodes=1, version=(2, 27, 3))


def _cell(algorithm: str, protocol: str, latency: float, gbytes: float, function: str = "AllReduce") -> TuningCell:
    return TuningCell(
        function=function,
        algorithm=algorithm,
        protocol=protocol,
        latency_us=latency,
        bytes_per_second=round(gbytes * 1e9),
    )


def _time(cell: TuningCell, message_bytes: int, group: Group = _ONE_NODE) -> float:
    found = expected_time([cell], cell.function, message_bytes, group, algorithm=cell.algorithm, protocol=cell.protocol)
    assert found is not None
    return found.time_us


def test_the_time_is_latency_and_bytes_by_bandwidth() -> None:
    assert _time(_cell("RING", "SIMPLE", 28.8, 240.0), 268_435_456) == pytest.approx(28.8 + 268_435_456 / 240_000)


def test_the_time_of_a_printed_tuning_line_comes_out() -> None:
    """`AllGather: 37756928 Bytes -> Algo 1 proto 2 time 2860.208008` on four ranks: 10 GB/s per ring is 13.3 in the
    table, whose one decimal makes the difference of less than 0.3 %."""
    printed_us, message_bytes = 2860.208008, 37_756_928
    latency_us = printed_us - message_bytes / (10_000 * 4 / 3)
    assert 20 < latency_us < 40
    expected = _time(_cell("RING", "SIMPLE", round(latency_us, 1), 13.3, "AllGather"), message_bytes)
    assert expected == pytest.approx(printed_us, rel=0.003)


def test_the_ring_cell_times_the_factor_is_the_bus_bandwidth_of_the_search() -> None:
    """Four H100: 360 GB/s of rings, and a cell of 240.0 = 360 x 4/6."""
    size = 8 << 30
    found = expected_time(
        [_cell("RING", "SIMPLE", 28.8, 240.0)], "AllReduce", size, _ONE_NODE, algorithm="RING", protocol="SIMPLE"
    )
    assert found is not None
    assert found.algbw(size) * 2 * 3 / 4 == pytest.approx(360e9, rel=0.001)


@pytest.mark.parametrize(
    ("protocol", "message_bytes", "factor"),
    [
        ("LL", 32, 1.0), ("LL", 64, 1.0), ("LL", 1024, 0.9), ("LL", 1 << 18, 0.4), ("LL128", 1 << 20, 0.6),
        ("LL128", 1 << 22, 0.8), ("SIMPLE", 64, 0.9), ("SIMPLE", 1 << 17, 0.5), ("SIMPLE", 1 << 28, 0.9),
        ("SIMPLE", (1 << 29) - 1, 0.9), ("SIMPLE", 1 << 29, 1.0),
    ],
)  # fmt: skip
def test_trees_are_corrected_by_size(protocol: str, message_bytes: int, factor: float) -> None:
    cell = _cell("TREE", protocol, 10.0, 100.0)
    group = Group(ranks=4, nodes=1, version=(2, 20, 5))
    assert _time(cell, message_bytes, group) == pytest.approx(10 + message_bytes / (100_000 * factor))


def test_the_correction_ended_earlier_before_2_14_and_ends_later_from_2_30_on() -> None:
    cell = _cell("TREE", "SIMPLE", 0.0, 100.0)
    for version, message_bytes, factor in (((2, 12), 1 << 28, 1.0), ((2, 12), 1 << 22, 0.5), ((2, 30), 1 << 29, 0.9)):
        group = Group(ranks=4, nodes=1, version=version)
        assert _time(cell, message_bytes, group) == pytest.approx(message_bytes / (100_000 * factor))


def test_a_tree_of_another_function_is_not_corrected() -> None:
    assert _time(_cell("TREE", "SIMPLE", 0.0, 100.0, "Broadcast"), 1 << 17) == pytest.approx((1 << 17) / 100_000)


@pytest.mark.parametrize(
    ("version", "capability", "message_bytes", "latency"),
    [
        ((2, 27), 90, 1 << 20, 1.4), ((2, 27), 70, 1 << 20, 1.9), ((2, 27), None, 1 << 20, 1.4),
        ((2, 27), 90, 16 * 8 * 64 - 64, 1.0), ((2, 27), 90, 16 * 8 * 64, 1.4),
        ((2, 17), 90, 1 << 20, 1.5), ((2, 17), 80, 1 << 20, 1.9),
        ((2, 12), 80, 32_768, 1.9), ((2, 12), 80, 32_767, 1.0),
    ],
)  # fmt: skip
def test_large_rings_over_nodes_wait_longer(
    version: tuple[int, ...], capability: int | None, message_bytes: int, latency: float
) -> None:
    group = Group(ranks=8, nodes=2, version=version, channels=16, compute_capability=capability)
    cell = _cell("RING", "SIMPLE", 100.0, 50.0)
    assert _time(cell, message_bytes, group) == pytest.approx(100 * latency + message_bytes / 50_000)


def test_a_ring_inside_one_node_does_not() -> None:
    assert _time(_cell("RING", "SIMPLE", 100.0, 50.0), 1 << 20) == pytest.approx(100 + (1 << 20) / 50_000)


_H100 = [
    _cell("TREE", "LL", 10.4, 43.6), _cell("TREE", "LL128", 21.5, 128.8), _cell("TREE", "SIMPLE", 32.4, 165.6),
    _cell("RING", "LL", 10.2, 94.0), _cell("RING", "LL128", 25.4, 220.8), _cell("RING", "SIMPLE", 28.8, 240.0),
    _cell("NVLS", "SIMPLE", 25.0, 160.0), _cell("COLLNET_DIRECT", "LL", 2.4, 0.0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("message_bytes", "chosen"),
    [(1024, ("RING", "LL")), (1 << 18, ("RING", "LL")), (1 << 20, ("RING", "LL")), (1 << 28, ("RING", "SIMPLE"))],
)
def test_nccl_chooses_the_fastest_that_is_available(message_bytes: int, chosen: tuple[str, str]) -> None:
    found = choice(_H100, "AllReduce", message_bytes, _ONE_NODE)
    assert found is not None
    assert (found.algorithm, found.protocol) == chosen


def test_what_is_not_available_has_no_time() -> None:
    assert choice([_cell("RING", "LL", 1.0, 0.0)], "AllReduce", 1024, _ONE_NODE) is None
    assert choice(_H100, "Broadcast", 1024, _ONE_NODE) is None
    words = {"algorithm": "COLLNET_DIRECT", "protocol": "LL"}
    assert expected_time(_H100, "AllReduce", 1024, _ONE_NODE, **words) is None
    assert expected_time(_H100, "AllReduce", 1024, _ONE_NODE, algorithm="PAT", protocol="SIMPLE") is None
    assert choice(_H100, "AllReduce", 0, _ONE_NODE) is None

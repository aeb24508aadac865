"""Groups share links, and communication slows computation."""

from __future__ import annotations

from statistics import median

import pytest
from simulator.jobs import Row, Simulate, truth

from ncclscope_simulator.contention import NETWORK, Contention, SharedLinks, parse_contention


def test_a_transfer_has_half_of_a_link_while_another_kind_uses_it() -> None:
    links = SharedLinks()
    assert links.took([0, 1], NETWORK, "DP", 0, 100) == 100
    assert links.took([1, 2], NETWORK, "DP", 0, 100) == 100  # of one kind: their share is counted beforehand
    assert links.took([1], NETWORK, "PP", 50, 100) == 125  # 50 at half speed, 75 alone
    assert links.took([3], NETWORK, "PP", 50, 100) == 100
    assert links.took([0], NETWORK, "PP", 100, 10) == 10
    links.forget_before(200)
    assert links.took([0], NETWORK, "EP", 0, 10) == 10


def test_a_transfer_that_begins_alone_is_halved_from_when_the_other_begins() -> None:
    links = SharedLinks()
    links.took([0], NETWORK, "DP", 50, 20)
    assert links.took([0], NETWORK, "PP", 0, 100) == 110


@pytest.mark.parametrize("text", ["", "nics=2", "nics=0,slowdown=1", "nics=2,slowdown=-1", "nics=2,slowdown=1,more=1"])
def test_what_is_no_contention_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="contention"):
        parse_contention(text)


def test_fewer_cards_slow_what_leaves_a_node_alone(simulate: Simulate) -> None:
    shape: dict[str, object] = {"nodes": 2, "gpus": 4, "tp": 4, "pp": 1, "dp": 2, "bandwidth_cv": 0.0}
    plain, shared = (truth(simulate(**shape, contention=each)) for each in (None, Contention(1, 0.0)))

    def took(rows: list[Row], network: bool) -> float:
        large = [row for row in rows if row["message_bytes"] > 1 << 22 and (row["comm_size"] == 2) is network]
        return float(median(row["modelled_transfer_ns"] for row in large))

    assert took(shared, network=True) > 3 * took(plain, network=True)
    assert took(shared, network=False) == pytest.approx(took(plain, network=False), rel=0.01)


def test_computation_beside_communication_takes_longer(simulate: Simulate) -> None:
    shape: dict[str, object] = {"nodes": 2, "gpus": 2, "tp": 1, "pp": 1, "dp": 4, "layers": 8, "step_seconds": 1.0}
    ends = [
        max(
            row["end_true_ns"]
            for row in truth(simulate(**shape, contention=Contention(2, slowdown)))
            if row["end_true_ns"]
        )
        for slowdown in (0.0, 1.0)
    ]
    assert ends[1] > ends[0]

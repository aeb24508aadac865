"""System blocks: every version's spelling, and what becomes of a block that is not whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from topology_samples import MESH, SWITCHED, TWO_PAIRS, WRITER, block_of, blocks_of, feed

from ncclscope_agent.sources.nccl_log.prefix import Writer
from ncclscope_agent.sources.nccl_log.topology_lines import TopologyLines
from ncclscope_wire.topology import LinkKind, NodeKind, TopologySeen

_GB = 10**9


def _links(seen: TopologySeen) -> dict[tuple[str, str, str], int]:
    names = [f"{node.kind}/{node.system:x}-{node.local:x}" for node in seen.nodes]
    return {(names[link.start], link.kind.value, names[link.end]): link.bytes_per_second for link in seen.links}


def _ranks(seen: TopologySeen) -> dict[int, int | None]:
    return {node.local: node.rank for node in seen.nodes if node.kind is NodeKind.GPU}


def test_links_are_read_in_both_directions_and_ranks_with_their_gpus() -> None:
    block = block_of(TWO_PAIRS)
    links = _links(block)
    assert links["GPU/0-1000", "NVL", "GPU/0-25000"] == 80 * _GB
    assert links["CPU/0-0", "PCI", "GPU/0-1000"] == links["GPU/0-1000", "PCI", "CPU/0-0"] == 24 * _GB
    assert links["CPU/0-0", "SYS", "CPU/0-1"] == links["CPU/0-1", "SYS", "CPU/0-0"] == 16 * _GB
    assert links["NIC/0-c2000", "NET", "NET/0-0"] == links["NET/0-0", "NET", "NIC/0-c2000"] == 12_500_000_000
    assert len(links) == 2 * (4 + 2 + 1 + 2 + 2)
    assert _ranks(block) == {0x1000: 0, 0x25000: 1, 0xC1000: 2, 0xE1000: 3}
    assert (block.host, block.pid, block.tid, block.line) == ("node01", 100, 101, 1)


def test_a_listing_that_people_indented_by_less_is_read_alike() -> None:
    shortened = TWO_PAIRS.replace(" " * 14 + "+", " " * 10 + "+")
    assert _links(block_of(shortened)) == _links(block_of(TWO_PAIRS))


@pytest.mark.parametrize(
    ("version", "block"),
    [
        ("2.5", "=== System : maxWidth 21 maxSpeed 21 ===\nCPU/FFFFFFFFFFFFFFFF\n+ PCI[12] - GPU/1000 (0)\n"
                "            + NVL[21] - GPU/2000\n+ PCI[12] - GPU/2000 (1)\n            + NVL[21] - GPU/1000\n"),
        ("2.7", "=== System : maxWidth 21.0 ===\nCPU/0 (1/1/2)\n+ PCI[12.0] - GPU/1000 (0)\n"
                "              + NVL[21.0] - GPU/2000\n+ PCI[12.0] - GPU/2000 (1)\n"
                "              + NVL[21.0] - GPU/1000\n"),
        ("2.10", "=== System : maxWidth 21.0 totalWidth 21.0 ===\nCPU/0 (1/1/2)\n+ PCI[12.0] - GPU/1000 (0)\n"
                 "              + NVL[21.0] - GPU/2000\n+ PCI[12.0] - GPU/2000 (1)\n"
                 "              + NVL[21.0] - GPU/1000\n"),
        ("2.21", "=== System : maxBw 21.0 totalBw 21.0 ===\nCPU/0-0 (1/1/2)\n+ PCI[12.0] - GPU/0-1000 (0)\n"
                 "              + NVL[21.0] - GPU/2000\n+ PCI[12.0] - GPU/0-2000 (1)\n"
                 "              + NVL[21.0] - GPU/1000\n"),
        ("2.27", "=== System : maxBw 21.0 totalBw 21.0 ===\nCPU/0-0 (1/1/2)\n+ PCI[12.0] - GPU/0-1000 (0)\n"
                 "              + NVL[21.0] - GPU/0-2000\n+ PCI[12.0] - GPU/0-2000 (1)\n"
                 "              + NVL[21.0] - GPU/0-1000\n"),
    ],
)  # fmt: skip
def test_every_versions_spelling_gives_the_same_machine(version: str, block: str) -> None:
    seen = block_of(f"{block}==========================================")
    links = {ends: rate for ends, rate in _links(seen).items() if ends[1] == "NVL"}
    assert links == {
        ("GPU/0-1000", "NVL", "GPU/0-2000"): 21 * _GB,
        ("GPU/0-2000", "NVL", "GPU/0-1000"): 21 * _GB,
    }, version


def test_a_packed_id_holds_the_machine_in_its_highest_byte() -> None:
    text = (
        "=== System : maxBw 90.0 totalBw 90.0 ===\nCPU/0-0 (1/1/2)\n+ PCI[12.0] - GPU/0-1000 (0)\n"
        "              + NVL[90.0] - GPU/100000000001000\nCPU/1-0 (1/1/2)\n+ PCI[12.0] - GPU/1-1000 (1)\n"
        "              + NVL[90.0] - GPU/1000\n=========================================="
    )
    assert ("GPU/0-1000", "NVL", "GPU/1-1000") in _links(block_of(text))


def test_a_gpu_below_a_device_of_2_30_is_known_by_its_local_link() -> None:
    text = (
        "=== System : maxBw 164.8 totalBw 164.8 ===\nCPU/0-0 (1/1/3)\n+ PCI[48.0] - PCI/0-c000 (1000c0301000100b)\n"
        "              + PCI[48.0] - NIC/0-e000\n              + PCI[48.0] - DEV/0-f000 (10de232410de17a6)\n"
        "                            + LOC[5000.0] - GPU/0-f000\n                            + NVL[164.8] - NVS/0-0\n"
        "=========================================="
    )
    links = _links(block_of(text))
    assert links["GPU/0-f000", "LOC", "DEV/0-f000"] == 5000 * _GB
    assert links["NVS/0-0", "NVL", "DEV/0-f000"] == 164_800_000_000


def test_path_lines_complete_a_block_and_a_cell_that_was_cut_off_is_left_out() -> None:
    lines = TopologyLines()
    cut = SWITCHED.rstrip() + " NET/0-2 (5/48.0/PX"
    feed(lines, cut.splitlines())
    assert lines.drain_blocks() == ()  # two GPUs and three ports have not printed theirs
    assert not lines.ingest_line(
        WRITER, 99, b"Pattern 4, crossNic 0, nChannels 2, bw 24.0/24.0, type NVL/PIX, sameChannels 1"
    )
    (block,) = lines.drain_blocks()
    kinds = [(block.nodes[path.end].kind.value, path.hops, path.kind) for path in block.paths]
    assert kinds == [
        ("GPU", 0, "LOC"), ("GPU", 2, "NVL"), ("GPU", 2, "NVL"), ("CPU", 2, "PHB"), ("NET", 3, "PIX"),
        ("NET", 5, "PXN"), ("NET", 5, "PXN"),
    ]  # fmt: skip
    assert not lines.drain_dropped()


def test_a_path_to_a_node_that_the_tree_lacks_drops_the_block() -> None:
    lines = TopologyLines()
    without_card = [line for line in SWITCHED.splitlines() if "0-99000" not in line and "- NET/0-2" not in line]
    feed(lines, without_card)
    lines.finish()
    assert lines.drain_blocks() == ()
    assert lines.drain_dropped()["torn_block"] == len(without_card)


def test_blocks_of_threads_that_write_at_once_are_kept_apart() -> None:
    lines = TopologyLines()
    other = Writer(host="node01", pid=100, tid=102, device=1)
    messages = TWO_PAIRS.splitlines()
    for number, (one, two) in enumerate(zip(messages, MESH.splitlines(), strict=False), 1):
        lines.ingest_line(WRITER, number, one.encode())
        lines.ingest_line(other, number, two.encode())
    lines.finish()
    assert _links(lines.drain_blocks()[0]) == _links(block_of(TWO_PAIRS)) or lines.drain_dropped()


def test_an_equal_block_of_another_communicator_is_given_once() -> None:
    lines = TopologyLines()
    for _ in range(3):
        feed(lines, MESH.splitlines())
    lines.finish()
    assert len(lines.drain_blocks()) == 1
    assert not lines.drain_dropped()


def test_a_block_that_the_log_ends_in_is_dropped_and_counted() -> None:
    lines = TopologyLines()
    feed(lines, TWO_PAIRS.splitlines()[:7])
    lines.finish()
    assert lines.drain_blocks() == ()
    assert lines.drain_dropped() == {"torn_block": 7}


def test_a_line_that_was_cut_drops_the_block() -> None:
    lines = TopologyLines()
    messages = TWO_PAIRS.splitlines()
    feed(lines, messages[:3])
    assert lines.ingest_line(WRITER, 4, messages[3].encode(), is_whole=False)
    feed(lines, messages[4:])
    lines.finish()
    assert lines.drain_blocks() == ()
    assert lines.drain_dropped()["torn_block"] == len(messages)


@pytest.mark.parametrize("text", [TWO_PAIRS, SWITCHED, MESH])
def test_a_torn_line_anywhere_in_the_log_drops_the_block_that_is_open(text: str) -> None:
    messages = [line for line in text.splitlines() if " :GPU/" not in line]
    for torn in range(1, len(messages)):
        lines = TopologyLines()
        feed(lines, messages[:torn])
        lines.tear()
        feed(lines, messages[torn + 1 :])
        lines.finish()
        assert lines.drain_blocks() == ()
        assert lines.drain_dropped()["torn_block"] == len(messages) - 1


@pytest.mark.parametrize("text", [TWO_PAIRS, MESH])
def test_a_lost_line_without_a_trace_never_makes_a_link_that_is_not_there(text: str) -> None:
    whole, messages = _links(block_of(text)), text.splitlines()
    for lost in range(len(messages)):
        for block in blocks_of("\n".join(messages[:lost] + messages[lost + 1 :])):
            assert _but_ports(_links(block)).items() <= whole.items(), messages[lost]


@pytest.mark.parametrize("text", [TWO_PAIRS, MESH])
def test_two_lost_lines_without_a_trace_never_make_a_link_that_is_not_there(text: str) -> None:
    whole, messages = _links(block_of(text)), text.splitlines()
    for lost in range(len(messages) - 1):
        for block in blocks_of("\n".join(messages[:lost] + messages[lost + 2 :])):
            assert _but_ports(_links(block)).items() <= whole.items(), messages[lost]


def _but_ports(links: dict[tuple[str, str, str], int]) -> dict[tuple[str, str, str], int]:
    """Without network ports: where the line of a card is lost without a trace, its port moves to the card above."""
    return {ends: rate for ends, rate in links.items() if ends[1] != "NET"}


@given(st.lists(st.sampled_from(TWO_PAIRS.splitlines() + SWITCHED.splitlines()) | st.text(max_size=80), max_size=60))
def test_lines_in_any_order_give_blocks_or_counts_and_never_an_error(messages: list[str]) -> None:
    lines = TopologyLines()
    understood = sum(feed(lines, messages))
    lines.finish()
    blocks, dropped = lines.drain_blocks(), lines.drain_dropped()
    for block in blocks:
        assert all(0 <= end < len(block.nodes) for link in block.links for end in (link.start, link.end))
        assert all(link.kind is not LinkKind.NVL or link.start != link.end for link in block.links)
    assert sum(dropped.values()) <= understood


def test_what_other_lines_say_is_not_taken() -> None:
    lines = TopologyLines()
    assert not any(
        feed(lines, ["Connected all rings", "Channel 00/02 :    0   1", "threadThresholds 8/8/64 | 16/8/64"])
    )

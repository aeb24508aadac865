"""Which limit a communicator and an operation have, by which reference, and where none is known."""

from __future__ import annotations

import numpy as np
import pytest
from service.printed_job import PrintedJob
from topology_samples import FUSED, MESH, TWO_PAIRS

from ncclscope_agent.sources.topology_xml import read_topology_xml
from ncclscope_service.measure.limits import Limits
from ncclscope_service.store.records import Communicator
from ncclscope_service.store.rows import LimitReference
from ncclscope_service.store.tables import Store
from ncclscope_wire.terms import NO_NUMBER, OPERATION_CODES

_TABLE = """\
Latency/AlgBw |    Tree/    LL |    Tree/ LL128 |    Tree/Simple |    Ring/    LL |    Ring/ LL128 |    Ring/Simple |
 Max NThreads |            512 |            640 |            512 |            512 |            640 |            512 |
    Broadcast |     0.0/   0.0 |     0.0/   0.0 |     0.0/   0.0 |     7.2/  20.0 |    15.9/   0.0 |    11.8/  80.0 |
       Reduce |     0.0/   0.0 |     0.0/   0.0 |     0.0/   0.0 |     7.2/  20.0 |    15.9/   0.0 |    11.8/  80.0 |
    AllGather |     0.0/   0.0 |     0.0/   0.0 |     0.0/   0.0 |     7.2/  40.0 |    15.9/   0.0 |    11.8/ 160.0 |
ReduceScatter |     0.0/   0.0 |     0.0/   0.0 |     0.0/   0.0 |     7.2/  40.0 |    15.9/   0.0 |    11.8/ 160.0 |
    AllReduce |     8.0/   9.0 |     0.0/   0.0 |    16.4/  30.0 |     7.8/  20.0 |    17.8/   0.0 |    15.2/  80.0 |
"""


def _places(*hosts: str) -> list[tuple[str, int]]:
    return [(host, device) for host in hosts for device in range(4)]


def _named(store: Store, number: int) -> Communicator:
    return next(each for each in store.communicators if each.comm_id == f"0x{number:x}")


def _limit(store: Store, number: int) -> tuple[float, str] | None:
    found = _named(store, number).bottleneck
    return None if found is None else (found.bytes_per_second / 1e9, found.name)


_BOTH = {"node01": TWO_PAIRS, "node02": TWO_PAIRS}


def test_a_group_inside_a_node_is_bound_by_what_lies_between_its_gpus() -> None:
    job = PrintedJob()
    job.communicator(1, _places("node01"), blocks=_BOTH)
    job.communicator(2, [("node01", 0), ("node01", 1)])
    job.communicator(3, [("node01", 0), ("node01", 2)])
    store = job.store()
    assert _limit(store, 1) == (16, "SYS 16.0 GB/s between CPU 0-0 and CPU 0-1")
    assert _limit(store, 2) == (80, "NVL 80.0 GB/s between GPU 0-1000 and GPU 0-25000")
    assert _limit(store, 3) == (16, "SYS 16.0 GB/s between CPU 0-0 and CPU 0-1")


def test_a_sentence_about_a_limit_names_a_host_only_where_the_others_are_wider() -> None:
    job = PrintedJob()
    job.communicator(1, _places("node01", "node02"), blocks=_BOTH)
    job.communicator(2, [("node01", 0), ("node02", 0)])
    store = job.store()
    alike = _named(store, 2).bottleneck
    assert alike is not None
    assert alike.told == "the network cards of its hosts"
    inside = _named(store, 1).bottleneck
    assert inside is not None
    assert inside.told == "the links inside its hosts"
    assert "on node01" in alike.name
    other = PrintedJob()
    slow = TWO_PAIRS.replace("PCI[12.0]", "PCI[10.0]")
    other.communicator(2, [("node01", 0), ("node02", 0)], blocks={"node01": TWO_PAIRS, "node02": slow})
    alone = _named(other.store(), 2).bottleneck
    assert alone is not None
    assert alone.told == alone.name == "PCI 10.0 GB/s of NIC 0-c2000 on node02"


def test_one_gpu_per_node_across_nodes_is_bound_by_the_cards_pci_link() -> None:
    job = PrintedJob()
    job.communicator(1, _places("node01", "node02"), blocks=_BOTH)
    job.communicator(2, [("node01", 0), ("node02", 0)])
    store = job.store()
    assert _limit(store, 1) == (16, "SYS 16.0 GB/s between CPU 0-0 and CPU 0-1 on node01")
    assert _limit(store, 2) == (12, "PCI 12.0 GB/s of NIC 0-c2000 on node01")


def test_the_worst_node_is_named() -> None:
    slow = TWO_PAIRS.replace("PCI[12.0]", "PCI[10.0]")
    job = PrintedJob()
    job.communicator(1, [("node01", 0), ("node02", 0)], blocks={"node01": TWO_PAIRS, "node02": slow})
    assert _limit(job.store(), 1) == (10, "PCI 10.0 GB/s of NIC 0-c2000 on node02")


def test_groups_of_one_kind_that_run_at_once_share_a_card() -> None:
    job = PrintedJob()
    job.communicator(1, _places("node01", "node02"), blocks=_BOTH)
    for device in range(4):
        job.communicator(2 + device, [("node01", device), ("node02", device)])
    store = job.store()
    for number in range(2, 6):
        _named(store, number).parallelism = "DP"
    Limits(store).refresh()
    assert _limit(store, 2) == (6, "PCI 12.0 GB/s of NIC 0-c2000, shared by 2 groups on node01")
    assert _limit(store, 3) == (6, "PCI 12.0 GB/s of NIC 0-c3000, shared by 2 groups on node01")
    _named(store, 4).parallelism = None  # what it does when is not known
    Limits(store).refresh()
    assert _limit(store, 2) == (12, "PCI 12.0 GB/s of NIC 0-c2000 on node01")
    assert _limit(store, 3) == (6, "PCI 12.0 GB/s of NIC 0-c3000, shared by 2 groups on node01")


def test_the_same_group_made_again_shares_nothing_with_itself() -> None:
    job = PrintedJob()
    for number in (1, 2):
        job.communicator(number, [("node01", 0), ("node02", 0)], blocks=_BOTH)
    store = job.store()
    for number in (1, 2):
        _named(store, number).parallelism = "DP"
    Limits(store).refresh()
    assert _limit(store, 1) == _limit(store, 2) == (12, "PCI 12.0 GB/s of NIC 0-c2000 on node01")


def test_the_first_of_several_blocks_counts() -> None:
    job = PrintedJob()
    job.communicator(1, _places("node01"), blocks=_BOTH)
    job.communicator(2, _places("node01"), blocks={"node01": TWO_PAIRS.replace("SYS[16.0]", "SYS[10.0]")})
    assert _limit(job.store(), 2) == (16, "SYS 16.0 GB/s between CPU 0-0 and CPU 0-1")


@pytest.mark.parametrize("blocks", [{}, {"node01": TWO_PAIRS}, {"node01": TWO_PAIRS, "node02": MESH}])
def test_without_a_block_that_holds_all_gpus_of_every_host_there_is_no_limit(blocks: dict[str, str]) -> None:
    job = PrintedJob()
    job.communicator(1, [("node01", 0), ("node02", 0)], blocks=blocks)
    assert _limit(job.store(), 1) is None


def test_across_nodes_a_block_without_network_ports_tells_nothing() -> None:
    inside = "\n".join(line for line in TWO_PAIRS.splitlines() if "NET" not in line)
    job = PrintedJob()
    job.communicator(1, [("node01", 0), ("node02", 0)], blocks={"node01": inside, "node02": inside})
    assert _limit(job.store(), 1) is None
    job.communicator(2, _places("node01", "node02"), blocks=_BOTH)
    assert _limit(job.store(), 1) == (12, "PCI 12.0 GB/s of NIC 0-c2000 on node01")


def test_a_communicator_of_which_a_rank_was_not_seen_has_no_limit() -> None:
    job = PrintedJob()
    job.communicator(1, _places("node01"), blocks=_BOTH)
    lines = job.logs["node01"].splitlines(keepends=True)
    job.logs["node01"] = "".join(line for line in lines if not line.startswith("node01:103:"))
    assert _limit(job.store(), 1) is None


_FILE = """\
<system version="1">
  <cpu numaid="0" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="106">
    <pci busid="0000:01:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="16">
      <gpu dev="0" sm="80" rank="0">
      <nvlink target="0000:25:00.0" count="4" tclass="0x030200"/></gpu></pci>
    <pci busid="0000:25:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="16">
      <gpu dev="1" sm="80" rank="1">
      <nvlink target="0000:01:00.0" count="3" tclass="0x030200"/></gpu></pci>
  </cpu>
</system>
"""


def test_a_topology_file_serves_where_no_block_was_printed_and_only_there() -> None:
    pair = [("node01", 0), ("node01", 1)]
    job = PrintedJob()
    job.communicator(1, pair)
    seen = read_topology_xml(_FILE.encode(), "node01")
    assert _limit(job.store(seen), 1) == (60, "NVL 60.0 GB/s between GPU 0-1000 and GPU 0-25000")
    assert _limit(job.store(read_topology_xml(_FILE.encode(), None)), 1) is None
    job.communicator(2, pair, blocks=_BOTH)
    assert _limit(job.store(seen), 1) == (80, "NVL 80.0 GB/s between GPU 0-1000 and GPU 0-25000")


def test_a_block_over_several_hosts_is_matched_by_rank() -> None:
    """Multi-node NVLink: bus ids repeat on every host, and NCCL numbers the hosts in its own way."""
    job = PrintedJob()
    job.communicator(1, [("node01", 0), ("node02", 0)], blocks={"node01": FUSED, "node02": FUSED})
    job.communicator(2, [("node01", 0), ("node02", 1)])
    store = job.store()
    assert _limit(store, 1) == (360, "NVL 360.0 GB/s between GPU 0-1000 and NVS 0-0")
    assert _limit(store, 2) is None


def _filled(store: Store) -> list[tuple[float | None, int, str | None]]:
    rows = store.operations.rows.copy()
    for name, unknown in (("limit", np.nan), ("limit_reference", NO_NUMBER), ("bottleneck", NO_NUMBER)):
        rows[name] = unknown
    limits = Limits(store)
    limits.refresh()
    limits.fill(rows)
    return [
        (
            None if np.isnan(row["limit"]) else float(row["limit"]) / 1e9,
            int(row["limit_reference"]),
            store.strings[row["bottleneck"]] if row["bottleneck"] >= 0 else None,
        )
        for row in rows
    ]


def test_an_operation_gets_the_topologys_limit_before_the_models() -> None:
    job = PrintedJob()
    job.communicator(1, [("node01", 0), ("node01", 1)], blocks=_BOTH, table=_TABLE)
    job.operation(1, ("node01", 0), 2)
    assert _filled(job.store()) == [(80, LimitReference.TOPOLOGY, "NVL 80.0 GB/s between GPU 0-1000 and GPU 0-25000")]


def test_without_a_topology_it_gets_what_nccl_expects_of_its_size() -> None:
    job = PrintedJob()
    job.communicator(1, [("node01", 0), ("node01", 1)], table=_TABLE)
    job.operation(1, ("node01", 0), 2)
    store = job.store()
    ((limit, reference, name),) = _filled(store)
    expected_us = 15.2 + 1_048_576 / 80_000
    assert limit == pytest.approx(1_048_576 / expected_us / 1000 * 2 * (2 - 1) / 2)
    assert (reference, name) == (LimitReference.NCCL_MODEL, None)
    assert _named(store, 1).model_limit == 80e9


def test_a_tuning_line_says_which_cell_it_is() -> None:
    job = PrintedJob()
    job.communicator(1, [("node01", 0), ("node01", 1)], table=_TABLE)
    job.operation(1, ("node01", 0), 2)
    job.say("node01", 0, "AllReduce: 1048576 Bytes -> Algo TREE proto SIMPLE channel{Lo..Hi}={0..3}")
    ((limit, _, _),) = _filled(job.store())
    assert limit == pytest.approx(1_048_576 / (16.4 + 1_048_576 / (30_000 * 0.5)) / 1000)


def test_an_operation_with_neither_keeps_what_it_has() -> None:
    job = PrintedJob()
    job.communicator(1, [("node01", 0), ("node01", 1)])
    job.operation(1, ("node01", 0), 2)
    assert _filled(job.store()) == [(None, NO_NUMBER, None)]


def test_a_send_is_bound_by_the_way_to_its_peer_and_an_exchange_with_many_by_all_links() -> None:
    job = PrintedJob()
    job.communicator(1, _places("node01"), blocks=_BOTH)
    for peer in (1, 2):
        job.operation(1, ("node01", 0), 4, "Send", peer)
    store = job.store()
    store.operations.rows["launch"] = [7, 8]
    assert [limit for limit, _, _ in _filled(store)] == [80, 16]
    store.operations.rows["launch"] = [7, 7]
    assert [limit for limit, _, _ in _filled(store)] == [80, 16]
    job.operation(1, ("node01", 0), 4, "Send", 3)
    store = job.store()
    store.operations.rows["launch"] = [7, 7, 7]
    assert [limit for limit, _, _ in _filled(store)] == [16, 16, 16]


def _impossible(
    store: Store, op: str, *rates: float, confidence: float, pair: tuple[int, int] | None = None
) -> list[bool]:
    limits = Limits(store)
    limits.refresh()
    amount = len(rates)
    pairs = None if pair is None else (np.full(amount, pair[0]), np.full(amount, pair[1]))
    found: list[bool] = limits.impossible(
        np.asarray(rates) * 1e9,
        np.full(amount, _named(store, 1).index),
        np.full(amount, OPERATION_CODES[op], np.uint8),
        np.full(amount, confidence, np.float32),
        pairs,
    ).tolist()
    return found


def test_pairs_in_doubt_are_wrong_where_they_are_faster_than_the_limit() -> None:
    job = PrintedJob()
    job.communicator(1, _places("node01"), blocks=_BOTH)
    store = job.store()
    assert _limit(store, 1) == (16, "SYS 16.0 GB/s between CPU 0-0 and CPU 0-1")
    for op in ("AllReduce", "AllGather"):
        assert _impossible(store, op, 15.9, 16.1, np.nan, confidence=0.5) == [False, True, False]
    assert _impossible(store, "Send", 79.0, 81.0, confidence=0.5, pair=(0, 1)) == [False, True]
    assert _impossible(store, "Send", 15.9, 16.1, confidence=0.5, pair=(0, 2)) == [False, True]
    assert _impossible(store, "Send", 500.0, confidence=0.5, pair=(0, NO_NUMBER)) == [False]


def test_sure_pairs_are_wrong_only_where_nothing_explains_their_speed() -> None:
    job = PrintedJob()
    job.communicator(1, _places("node01"), blocks=_BOTH)
    store = job.store()
    assert _impossible(store, "AllGather", 16.1, 19.9, 20.1, confidence=1.0) == [False, False, True]
    assert _impossible(store, "AllReduce", 20.1, 29.9, 30.1, confidence=1.0) == [False, False, True]
    assert _impossible(store, "Send", 99.0, 101.0, confidence=1.0, pair=(0, 1)) == [False, True]


def test_groups_that_share_a_card_may_have_it_for_themselves_where_pairs_are_sure() -> None:
    job = PrintedJob()
    job.communicator(9, _places("node01", "node02"), blocks=_BOTH)
    for device in range(4):
        job.communicator(1 + device, [("node01", device), ("node02", device)])
    store = job.store()
    for number in range(1, 5):
        _named(store, number).parallelism = "DP"
    assert _impossible(store, "AllGather", 7.0, confidence=0.5) == [True]
    assert _impossible(store, "AllGather", 7.0, 29.9, 30.1, confidence=1.0) == [False, False, True]
    assert _limit(store, 1) == (6, "PCI 12.0 GB/s of NIC 0-c2000, shared by 2 groups on node01")


def test_an_operation_without_a_limit_is_never_too_fast() -> None:
    job = PrintedJob()
    job.communicator(1, _places("node01"))
    assert _impossible(job.store(), "AllGather", 1e6, confidence=0.1) == [False]


def test_the_series_of_sends_has_a_limit_where_all_of_its_pairs_have_the_same() -> None:
    job = PrintedJob()
    job.communicator(1, _places("node01"), blocks=_BOTH)
    job.operation(1, ("node01", 0), 4, "Send", 1)
    store = job.store()
    store.operations.rows["launch"] = 7
    limits = Limits(store)
    limits.refresh()
    send = OPERATION_CODES["Send"]
    assert np.isnan(limits.series_limit(0, send))
    limits.fill(store.operations.rows.copy())
    limits.refresh()
    assert limits.series_limit(0, send) == 80e9
    assert limits.series_limit(0, OPERATION_CODES["AllReduce"]) == 16e9
    job.operation(1, ("node01", 1), 4, "Send", 2)
    store = job.store()
    store.operations.rows["launch"] = [7, 8]
    limits = Limits(store)
    limits.refresh()
    limits.fill(store.operations.rows.copy())
    assert np.isnan(limits.series_limit(0, send))


def test_a_table_belongs_to_the_communicator_whose_start_it_stands_in() -> None:
    job = PrintedJob()
    job.communicator(1, [("node01", 0), ("node01", 1)])
    job.communicator(2, [("node01", 0), ("node01", 1)], table=_TABLE)
    job.communicator(3, [("node01", 0), ("node01", 1)])
    store = job.store()
    assert list(store.tuning_tables) == [_named(store, 2).index]


def test_hosts_that_are_alike_are_searched_once_and_many_ranks_take_no_time() -> None:
    hosts = [f"node{number:03d}" for number in range(64)]
    job = PrintedJob()
    job.communicator(1, _places(*hosts), blocks=dict.fromkeys(hosts, TWO_PAIRS))
    store = job.store()
    limits = Limits(store)
    limits.refresh()
    assert _limit(store, 1) == (16, "SYS 16.0 GB/s between CPU 0-0 and CPU 0-1 on node000")
    assert sum(len(seen) for seen in store.topologies.values()) == 64


def test_only_communicators_of_which_a_limit_may_have_changed_are_told() -> None:
    job = PrintedJob()
    job.communicator(1, _places("node01", "node02"), blocks=_BOTH)
    for device in range(4):
        job.communicator(2 + device, [("node01", device), ("node02", device)])
    job.operation(1, ("node01", 0), 8, "Send", 1)
    store = job.store()
    store.operations.rows["launch"] = 7
    limits = Limits(store)
    assert limits.refresh() == {each.index for each in store.communicators}
    assert limits.refresh() == set()
    for number in (2, 3):
        _named(store, number).parallelism = "DP"
    assert limits.refresh() == set()
    _named(store, 4).parallelism = "DP"  # on the card of number 2
    assert limits.refresh() == {_named(store, 2).index, _named(store, 4).index}
    assert _limit(store, 2) == (6, "PCI 12.0 GB/s of NIC 0-c2000, shared by 2 groups on node01")
    limits.fill(store.operations.rows.copy())
    assert limits.refresh() == {_named(store, 1).index}
    assert limits.refresh() == set()


def test_the_models_limit_follows_the_operation_that_moves_most() -> None:
    job = PrintedJob()
    job.communicator(1, [("node01", 0), ("node01", 1)], table=_TABLE)
    job.operation(1, ("node01", 0), 2)
    store = job.store()
    assert _named(store, 1).model_limit == 80e9
    row = store.series.rows[:1].copy()
    row["op"], row["bytes"] = OPERATION_CODES["AllGather"], 2 * row["bytes"]
    store.series.append(row)
    Limits(store).refresh()
    assert _named(store, 1).model_limit == 160e9 / 2

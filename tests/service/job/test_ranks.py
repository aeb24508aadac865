"""Global ranks come from the communicator that spans the job; where there is none they are told from the seats."""

from __future__ import annotations

from service.log_batches import Line, Reading, init, log_batch

from ncclscope_service.job.ranks import assign_ranks, global_ranks, hosts_of
from ncclscope_service.store.tables import Store
from ncclscope_wire.records import CommunicatorEvent


def _feed(reading: Reading, host: str, pid: int, *events: CommunicatorEvent, job: str = "j") -> None:
    reading.feed(log_batch([], host=host, pid=pid, events=events), job=job)


def _ranks(store: Store) -> list[tuple[int | None, bool]]:
    return [(member.global_rank, member.global_rank_is_inferred) for member in store.members]


def test_the_largest_communicator_names_the_ranks_of_all_others() -> None:
    reading = Reading()
    for rank, host in enumerate(("node2", "node1")):
        _feed(
            reading, host, 10,
            init(line=1, host=host, comm_id=1, rank=rank, nranks=2),
            init(line=2, host=host, pointer=0xB0, comm_id=50 + rank, rank=0, nranks=1),
        )  # fmt: skip
    assign_ranks(reading.store)
    assert _ranks(reading.store) == [(0, False), (0, False), (1, False), (1, False)]
    assert global_ranks(reading.store, reading.store.communicators[0]) == {0: 0, 1: 1}
    assert hosts_of(reading.store, reading.store.communicators[0]) == ("node1", "node2")


def test_a_world_of_which_only_some_ranks_were_seen_still_names_these() -> None:
    reading = Reading()
    _feed(reading, "node1", 10, init(line=1, comm_id=1, rank=5, nranks=8))
    assign_ranks(reading.store)
    assert _ranks(reading.store) == [(5, False)]


def test_without_a_world_nodes_are_ordered_by_name_and_ranks_by_device() -> None:
    reading = Reading()
    for host, pid, device in (("node2", 7, 0), ("node1", 9, 1), ("node1", 8, 0), ("node2", 6, 1)):
        _feed(
            reading, host, pid,
            init(line=1, host=host, pid=pid, comm_id=int(host[-1]), rank=device, nranks=2, bus_id=0x1000 * device),
        )  # fmt: skip
    assign_ranks(reading.store)
    assert _ranks(reading.store) == [(2, True), (1, True), (0, True), (3, True)]
    assert [member.local_rank for member in reading.store.members] == [0, 1, 0, 1]


def test_gpus_per_node_can_be_told_where_not_all_of_them_were_seen() -> None:
    reading = Reading()
    for host in ("node1", "node2"):
        _feed(reading, host, 10, init(line=1, host=host, comm_id=int(host[-1]), rank=0, nranks=2))
    assign_ranks(reading.store, gpus_per_node=8)
    assert _ranks(reading.store) == [(0, True), (8, True)]


def test_a_world_without_one_of_the_ranks_that_were_seen_is_none() -> None:
    reading = Reading()
    _feed(reading, "node1", 10, init(line=1, comm_id=1, rank=1, nranks=2))
    _feed(reading, "node1", 11, init(line=1, pid=11, comm_id=2, rank=0, nranks=2, cuda_device=1))
    assign_ranks(reading.store)
    assert [inferred for _, inferred in _ranks(reading.store)] == [True, True]


def test_a_process_with_several_devices_has_a_rank_on_each() -> None:
    reading = Reading()
    _feed(
        reading, "node1", 10,
        init(line=1, comm_id=1, rank=0, nranks=2, cuda_device=0),
        init(line=2, pointer=0xB0, comm_id=1, rank=1, nranks=2, cuda_device=1),
        init(line=3, pointer=0xC0, comm_id=2, rank=0, nranks=2, cuda_device=1),
    )  # fmt: skip
    assign_ranks(reading.store)
    assert _ranks(reading.store) == [(0, False), (1, False), (1, False)]
    assert [member.local_rank for member in reading.store.members] == [0, 1, 1]


def test_the_order_of_devices_is_physical_where_each_process_sees_only_its_own() -> None:
    reading = Reading()
    for pid, bus in ((20, 0x9000), (21, 0x1000)):
        _feed(reading, "node1", pid, init(line=1, pid=pid, comm_id=1, rank=21 - pid, nranks=2, bus_id=bus))
    assign_ranks(reading.store)
    assert [member.local_rank for member in reading.store.members] == [1, 0]


def test_jobs_are_numbered_each_by_itself() -> None:
    reading = Reading()
    _feed(reading, "node1", 10, init(line=1, comm_id=1, rank=0, nranks=1), job="one")
    _feed(reading, "node1", 11, init(line=1, pid=11, comm_id=1, rank=0, nranks=1), job="two")
    assign_ranks(reading.store)
    assert [member.global_rank for member in reading.store.members] == [0, 0]
    assert [member.local_rank for member in reading.store.members] == [0, 0]


def test_a_rank_that_no_init_line_named_gets_the_one_of_its_seat() -> None:
    reading = Reading()
    reading.feed(log_batch([Line(line=1, nranks=2)], host="node2"))
    reading.feed(log_batch([Line(line=1, nranks=2)], host="node1"))
    assign_ranks(reading.store)
    assert _ranks(reading.store) == [(1, True), (0, True)]


def test_ranks_that_were_inferred_are_corrected_when_the_world_appears() -> None:
    reading = Reading()
    for host in ("node1", "node2"):
        _feed(reading, host, 10, init(line=1, host=host, comm_id=int(host[-1]), rank=0, nranks=1))
    assign_ranks(reading.store)
    for rank, host in enumerate(("node2", "node1")):
        _feed(reading, host, 10, init(line=2, host=host, pointer=0xB0, comm_id=9, rank=rank, nranks=2))
    assign_ranks(reading.store)
    assert _ranks(reading.store) == [(1, False), (0, False), (0, False), (1, False)]


def test_the_communicators_are_told_in_which_ranks_changed_and_other_jobs_are_left_alone() -> None:
    reading = Reading()
    _feed(reading, "node1", 10, init(line=1, comm_id=1, rank=0, nranks=1), job="one")
    _feed(reading, "node1", 11, init(line=1, pid=11, comm_id=1, rank=0, nranks=1), job="two")
    assert assign_ranks(reading.store, jobs={"two"}) == {1}
    assert [member.global_rank for member in reading.store.members] == [None, 0]
    assert assign_ranks(reading.store) == {0}
    assert assign_ranks(reading.store) == set()
    for rank, host in enumerate(("node2", "node1")):
        _feed(reading, host, 10, init(line=2, host=host, pointer=0xB0, comm_id=9, rank=rank, nranks=2), job="one")
    assert assign_ranks(reading.store) == {0, 2}


def test_a_printed_rank_stays_where_the_lines_of_others_are_lost() -> None:
    reading = Reading()
    _feed(reading, "node2", 12, init(line=1, host="node2", pid=12, comm_id=1, rank=1, nranks=4, bus_id=0x1000))
    for host, pid in (("node1", 10), ("node1", 11), ("node2", 13)):
        reading.feed(log_batch([Line(line=1, nranks=4)], host=host, pid=pid))
    assign_ranks(reading.store)
    assert _ranks(reading.store) == [(1, False), (2, True), (3, True), (0, True)]


def test_lost_ranks_are_inferred_in_the_layout_of_those_that_are_printed() -> None:
    reading = Reading()
    for host, pid, rank, device in (("node2", 1, 0, 0), ("node2", 3, 2, 2), ("node1", 4, 3, 0)):
        _feed(
            reading, host, pid,
            init(line=1, host=host, pid=pid, comm_id=1, rank=rank, nranks=6, cuda_device=device, bus_id=device << 12),
        )  # fmt: skip
    _feed(
        reading, "node2", 2,
        init(line=1, host="node2", pid=2, comm_id=7, rank=0, nranks=1, cuda_device=1, bus_id=1 << 12),
    )  # fmt: skip
    assign_ranks(reading.store)
    assert _ranks(reading.store) == [(0, False), (2, False), (3, False), (1, True)]


def test_there_are_no_more_ranks_than_the_largest_communicator_has() -> None:
    reading = Reading()
    for pid in range(5):
        reading.feed(log_batch([Line(line=1, nranks=4)], pid=10 + pid))
    assign_ranks(reading.store)
    assert {rank for rank, _ in _ranks(reading.store)} == {None}
    _feed(reading, "node1", 10, init(line=2, pointer=0xB0, comm_id=1, rank=2, nranks=4, bus_id=0x1000))
    assign_ranks(reading.store)
    ranks = [rank for rank, _ in _ranks(reading.store)]
    assert ranks == [2, None, None, None, None, 2]


def test_a_member_without_an_init_line_sits_on_the_device_of_its_process() -> None:
    reading = Reading()
    for rank in range(2):
        event = init(line=1, pid=10 + rank, comm_id=1, rank=rank, nranks=2, cuda_device=rank, bus_id=rank << 12)
        lines = [Line(line=2, communicator=0xB0, nranks=2)]
        reading.feed(log_batch(lines, pid=10 + rank, events=[event]))
    assign_ranks(reading.store)
    assert _ranks(reading.store) == [(0, False), (0, False), (1, False), (1, False)]


def test_communicators_that_nothing_names_print_ranks_too() -> None:
    reading = Reading()
    for pid, rank in ((10, 1), (11, 0)):
        _feed(
            reading, "node1", pid,
            init(line=1, pid=pid, comm_id=None, rank=rank, nranks=2, cuda_device=1 - rank, bus_id=rank << 12),
        )  # fmt: skip
    assign_ranks(reading.store)
    assert _ranks(reading.store) == [(1, False), (0, False)]


def test_a_process_that_is_started_again_on_a_gpu_has_its_rank() -> None:
    reading = Reading()
    for comm_id, pids in ((1, (10, 11)), (2, (12, 11))):
        for rank, pid in enumerate(pids):
            _feed(
                reading, "node1", pid,
                init(
                    line=comm_id, pid=pid, comm_id=comm_id, rank=rank, nranks=2,
                    pointer=0xA0 + comm_id, cuda_device=rank, bus_id=rank << 12,
                ),
            )  # fmt: skip
    assign_ranks(reading.store)
    assert _ranks(reading.store) == [(0, False), (1, False), (0, False), (1, False)]
    assert [member.local_rank for member in reading.store.members] == [0, 1, 0, 1]

"""What the page asks beside the overview: complete where recorded, bounded at four thousand ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from service import fake_service as fake

from ncclscope_service.intake.aliases import Aliases
from ncclscope_service.job.traffic_calls import MAX_PLACES
from ncclscope_service.serve.routes import to_json
from ncclscope_service.show.details import (
    MAX_LINES,
    MAX_POINTS,
    CommunicatorDetail,
    JobQuery,
    RankDetail,
    communicator_detail,
    query_job,
    rank_detail,
    size_points,
)
from ncclscope_service.show.node_graph import node_graph_input, node_graph_view
from ncclscope_service.show.one_collective import one_collective
from ncclscope_service.show.timeline import (
    MAX_BARS,
    MAX_LANES,
    timeline_of_communicator,
    timeline_of_rank,
    timeline_of_ranks,
)
from ncclscope_service.show.traffic_square import TrafficView, traffic_input, traffic_view
from ncclscope_service.store.tables import Store
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

SMALL = fake.Shape(nodes=2, per_node=4, pipeline=1, late_rank=5, noise=0.0)


def store_of(shape: fake.Shape = SMALL, *, with_kernels: bool = True, per_minute: int = 24) -> Store:
    maker = fake.StoreMaker(shape, now_ns=fake.NOW_NS, with_kernels=with_kernels, per_minute=per_minute)
    return maker.make()


def detail_of(asked: JobQuery, alias: str) -> CommunicatorDetail:
    communicator = asked.communicator(alias)
    assert communicator is not None
    return communicator_detail(asked, communicator)


def rank_of(asked: JobQuery, rank: int) -> RankDetail:
    found = rank_detail(asked, rank)
    assert found is not None
    return found


def test_a_job_that_is_not_there_cannot_be_asked() -> None:
    assert query_job(store_of(), Aliases(), "no such job", fake.NOW_NS) is None
    asked = fake.asked_of(store_of())
    assert asked.communicator("none-1") is None
    assert rank_detail(asked, 99) is None


def test_a_communicator_tells_each_operation_against_its_limits() -> None:
    detail = detail_of(fake.asked_of(store_of()), "dp-0")
    assert detail.summary.parallelism == "DP"
    assert [(each.op, each.size_class) for each in detail.series] == [("ReduceScatter", "inf"), ("AllGather", "inf")]
    first = detail.series[0]
    assert first.busbw is not None
    assert first.limit == pytest.approx(48.5e9)
    assert first.baseline is not None
    assert first.transfer_seconds is not None
    assert any(value is not None for value in first.busbw_history)
    assert len(first.busbw_history) == 60
    assert len(detail.series) <= MAX_LINES


def test_a_communicator_names_the_rank_that_arrives_last() -> None:
    detail = detail_of(fake.asked_of(store_of()), "tp-4")
    assert [each.global_rank for each in detail.ranks] == [4, 5, 6, 7]
    late = next(each for each in detail.ranks if each.global_rank == 5)
    assert late.host == "gpu-node01"
    assert late.last_ratio == max(each.last_ratio or 0 for each in detail.ranks)
    assert late.wait_ratio == min(each.wait_ratio or 0 for each in detail.ranks)
    assert sum(each.last_ratio or 0 for each in detail.ranks) == pytest.approx(1, abs=1e-3)


def test_a_rank_is_told_beside_all_others() -> None:
    asked = fake.asked_of(store_of())
    late, other = rank_of(asked, 5), rank_of(asked, 2)
    assert (late.host, late.pid, late.version) == ("gpu-node01", 4005, "2.28.3")
    assert late.place == 1
    assert late.ranks_known == 8
    assert late.wait_ratio is not None
    assert late.median_wait_ratio is not None
    assert late.wait_ratio < late.median_wait_ratio
    assert other.place is not None
    assert other.place > 1
    assert {each.parallelism for each in late.communicators} == {"TP", "DP", "WORLD"}


def test_logs_alone_tell_no_waiting_and_no_bars() -> None:
    asked = fake.asked_of(store_of(with_kernels=False))
    rank, detail = rank_of(asked, 5), detail_of(asked, "dp-0")
    assert (rank.wait_ratio, rank.place, rank.median_wait_ratio) == (None, None, None)
    assert set(rank.wait_history) == {None}
    assert detail.sizes.points == ()
    assert {each.wait_ratio for each in detail.ranks} == {None}
    timeline = timeline_of_ranks(asked, 2.0)
    assert (timeline.begin_ns, timeline.start_us, timeline.seconds) == (None, (), 0.0)
    assert len(timeline.lanes) == 8


def test_the_timeline_ends_with_the_last_captured_kernel_and_cuts_bars_where_waiting_ends() -> None:
    store = store_of()
    asked = fake.asked_of(store)
    timeline = timeline_of_ranks(asked, 20.0)
    ends = store.operations.rows["end_true_ns"]
    assert timeline.begin_ns is not None
    assert int(ends.max()) - 25_000_000_000 < timeline.begin_ns <= int(ends.max()) - 20_000_000_000
    assert timeline.lanes == tuple(str(rank) for rank in range(8))
    for start, wait, duration in zip(timeline.start_us, timeline.wait_us, timeline.duration_us, strict=True):
        assert start + duration > 0
        assert start + duration <= 20e6 + 1
        assert wait is None or 0 <= wait <= duration
    assert list(timeline.start_us) == sorted(timeline.start_us)


def test_the_timeline_of_one_communicator_holds_nothing_else() -> None:
    asked = fake.asked_of(store_of())
    communicator = asked.communicator("tp-4")
    assert communicator is not None
    timeline = timeline_of_communicator(asked, communicator, 60.0)
    assert timeline.communicators == ("tp-4",)
    assert timeline.lanes == ("4", "5", "6", "7")
    assert set(timeline.lane) == {0, 1, 2, 3}


def test_the_timeline_of_one_rank_has_a_lane_for_each_communicator() -> None:
    timeline = timeline_of_rank(fake.asked_of(store_of()), 5, 60.0)
    assert set(timeline.lanes) == {"tp-4", "dp-1", "world-0"}
    for lane, communicator in zip(timeline.lane, timeline.communicator, strict=True):
        assert timeline.lanes[lane] == timeline.communicators[communicator]


def test_the_timeline_ends_where_the_slowest_capture_is() -> None:
    store = store_of()
    rows = store.operations.rows
    newest = int(rows["end_true_ns"].max())
    late = (rows["end_true_ns"] > newest - 5_000_000_000) & (rows["process"] >= 4)
    for column in ("start_ns", "start_true_ns", "end_ns", "end_true_ns", "wait_ns"):
        rows[column][late] = NO_TIME_NS
    timeline = timeline_of_ranks(fake.asked_of(store), 20.0)
    assert timeline.begin_ns is not None
    of_late_host = rows["end_true_ns"][rows["process"] >= 4]
    assert timeline.begin_ns + round(timeline.seconds * 1e9) <= int(of_late_host.max())
    assert {timeline.lanes[lane] for lane in timeline.lane} == {str(rank) for rank in range(8)}


def test_too_many_bars_are_drawn_together_and_none_is_lost() -> None:
    store = store_of(fake.Shape(nodes=8, per_node=8), per_minute=240)
    timeline = timeline_of_ranks(fake.asked_of(store), 60.0)
    assert timeline.begin_ns is not None
    assert len(timeline.start_us) <= MAX_BARS
    assert timeline.seconds == 60.0, "what is asked for, not what fits"
    assert len(timeline.lanes) == MAX_LANES
    assert timeline.resolution_us > 0
    rows = store.operations.rows
    shown = np.isin(rows["process"], [int(lane) for lane in timeline.lanes])
    shown &= (rows["start_true_ns"] != NO_TIME_NS) & (rows["end_true_ns"] > timeline.begin_ns)
    shown &= rows["start_true_ns"] < timeline.begin_ns + 60_000_000_000
    kernel_us = float((rows["end_true_ns"] - rows["start_true_ns"])[shown].sum()) / 1e3
    assert sum(timeline.kernels) == int(shown.sum()) == sum(each.kernels for each in timeline.sums)
    assert sum(timeline.duration_us) == pytest.approx(kernel_us, abs=len(timeline.duration_us))
    assert sum(each.wait_us + each.transfer_us + each.unknown_us for each in timeline.sums) == pytest.approx(kernel_us)
    alone = timeline_of_ranks(fake.asked_of(store), 0.5, timeline.begin_ns + 30_000_000_000)
    assert alone.resolution_us == 0
    assert set(alone.kernels) == {1}, "a closer look shows single kernels"


def test_a_lane_without_data_is_named_and_does_not_look_idle() -> None:
    store = store_of()
    rows = store.operations.rows
    newest = int(rows["end_true_ns"].max())
    late = (rows["end_true_ns"] > newest - 50_000_000_000) & (rows["process"] >= 4)
    for column in ("start_ns", "start_true_ns", "end_ns", "end_true_ns", "wait_ns"):
        rows[column][late] = NO_TIME_NS
    kept = [each for each in store.captures if each[1].host == "gpu-node00"]
    store.captures.drop_before(store.captures.next_id)
    for source, capture in kept:
        store.captures.append((source, replace(capture, start_ns=0, end_ns=newest + 1)))
    timeline = timeline_of_ranks(fake.asked_of(store), 20.0)
    assert timeline.begin_ns is not None
    assert timeline.begin_ns + 20_000_000_000 > newest - 1_000_000_000, "hosts that are far behind do not hold it back"
    assert {timeline.lanes[lane] for lane in timeline.lane} == {"0", "1", "2", "3"}
    assert timeline.unknown_lane == (4, 5, 6, 7)
    assert set(timeline.unknown_from_us) == {0.0}
    assert timeline.unknown_to_us == (20e6,) * 4


def test_a_late_rank_is_proved_by_the_collective_that_lost_most_to_it() -> None:
    store = store_of()
    asked = fake.asked_of(store)
    communicator = asked.communicator("tp-4")
    assert communicator is not None
    found = one_collective(asked, communicator, late_rank=5)
    assert found is not None
    own = store.collectives.rows
    own = own[(own["communicator"] == communicator.index) & (own["last_rank"] == 1)]
    assert found.last_global_rank == 5
    assert found.blame_us == pytest.approx(int(own["blame_ns"].max()) / 1e3)
    assert [each.global_rank for each in found.ranks] == [4, 5, 6, 7]
    assert min(each.start_us for each in found.ranks) == 0
    assert max(found.ranks, key=lambda each: each.start_us).global_rank == 5
    same = one_collective(asked, communicator, sequence=found.coll_seq)
    assert same == found
    assert one_collective(asked, communicator, sequence=10**9) is None
    assert one_collective(asked, communicator, late_rank=0) is None


def test_sizes_against_bandwidth_are_medians_of_each_kind() -> None:
    store = store_of()
    points = size_points(fake.asked_of(store))
    assert points.known == len(points.points)
    of_dp = next(point for point in points.points if point.communicator == "dp-0")
    rows = store.collectives.rows
    index = next(each.index for each in store.communicators if each.parallelism == "DP")
    own = np.sort(rows["busbw"][rows["communicator"] == index])
    assert of_dp.collectives == len(own)
    assert of_dp.busbw == own[round(0.5 * (len(own) - 1))]
    assert of_dp.low <= of_dp.busbw <= of_dp.high
    assert of_dp.limit == pytest.approx(48.5e9)
    assert of_dp.expected is not None
    assert of_dp.expected_low is not None
    assert of_dp.expected_high is not None
    assert of_dp.expected_low <= of_dp.expected <= of_dp.expected_high
    ranks, took = store.communicators[index].size, np.median(rows["transfer_ns"][rows["communicator"] == index])
    wire = (ranks - 1) / ranks * of_dp.message_bytes
    assert of_dp.expected == pytest.approx(wire / took * 1e9, rel=0.1)
    assert of_dp.basis == "history"
    only = size_points(fake.asked_of(store), store.communicators[index])
    assert {point.communicator for point in only.points} == {"dp-0"}


def traffic_of(store: Store) -> TrafficView:
    return traffic_view(traffic_input(fake.asked_of(store)))


def test_the_traffic_of_a_ring_goes_to_the_next_rank() -> None:
    store = store_of(fake.Shape(nodes=1, per_node=4, pipeline=1, late_rank=1, noise=0.0), per_minute=6)
    tp = next(each.index for each in store.communicators if each.parallelism == "TP")
    of_tp = {member.index for member in store.members if member.communicator == tp}
    rows = store.operations.rows
    rows.put("message_bytes", np.flatnonzero(~np.isin(rows["member"], list(of_tp))), NO_NUMBER)
    view = traffic_of(store)
    assert (view.by, view.places) == ("rank", ("0", "1", "2", "3"))
    calls = 5 * 6
    expected = round(2 * 3 / 4 * 64 * 1024**2 * calls)
    assert view.bytes == tuple(tuple(expected if b == (a + 1) % 4 else 0 for b in range(4)) for a in range(4))
    assert view.assumed_ratio == 1, "no line says which algorithm ran"
    assert view.to_switches == (0, 0, 0, 0)


def test_the_traffic_of_many_ranks_is_by_host_and_then_by_runs_of_hosts() -> None:
    by_host = traffic_of(store_of(fake.Shape(nodes=16, per_node=8), per_minute=2))
    assert (by_host.by, len(by_host.places)) == ("host", 16)
    by_runs = traffic_of(store_of(fake.Shape(nodes=130, per_node=8), per_minute=1))
    assert (by_runs.by, by_runs.places[0]) == ("hosts", "gpu-node00 to gpu-node02")
    assert len(by_runs.places) <= MAX_PLACES
    assert len(by_runs.bytes) == len(by_runs.places)


def test_nothing_sent_is_a_square_of_nothing() -> None:
    store = store_of(per_minute=2)
    store.operations.rows["message_bytes"] = NO_NUMBER
    view = traffic_of(store)
    assert not any(map(any, view.bytes))
    assert view.assumed_ratio is None


@pytest.mark.slow
def test_four_thousand_ranks_are_answered_soon_and_briefly() -> None:
    """Prints what one answer costs; its size is what is tested."""
    store = store_of(fake.Shape(nodes=512, per_node=8), per_minute=12)
    asked = fake.asked_of(store)
    answers: dict[str, Callable[[], object]] = {
        "communicator world-0": lambda: detail_of(asked, "world-0"),
        "rank 4000": lambda: rank_of(asked, 4000),
        "timeline": lambda: timeline_of_ranks(asked, 60.0),
        "sizes": lambda: size_points(asked),
        "traffic": lambda: traffic_view(traffic_input(asked)),
        "graph of a node": lambda: node_graph_view(node_graph_input(asked)),
    }
    print(f"\n{len(store.operations):,} operations in memory")  # noqa: T201
    for name, make in answers.items():
        began = time.process_time()
        made = make()
        seconds = time.process_time() - began
        body = to_json(made)
        print(f"{name:22} {seconds * 1e3:6.0f} ms {len(body) / 1e3:8.1f} kB")  # noqa: T201
        assert len(body) < 500_000, name
    assert len(size_points(asked).points) <= MAX_POINTS

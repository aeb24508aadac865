from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from align_samples import Call, Recorder, Sample, align_whole, f1, feed_portions, lose, training

from ncclscope_service.align.process_aligner import ProcessAligner
from ncclscope_service.store.rows import Match
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER


def sample_of(
    version: str, *, stamps: bool = False, groups: bool = False, seed: int = 1, iterations: int = 25
) -> Sample:
    """The job as that version logs it."""
    minor = int(version.split(".")[1])
    recorder = training(np.random.default_rng(seed), iterations, counts=12 <= minor <= 26, empty_launches=minor < 20)
    return recorder.sample(stamps=stamps, groups=groups)


def align_in_portions(version: str, sample: Sample, seed: int) -> Columns:
    """Rows in random portions, kernels in order of their starts, with results asked for in between."""
    rng = np.random.default_rng(seed)
    aligner = ProcessAligner(version)
    in_order = replace(sample, kernels=np.sort(sample.kernels, order="start_ns", kind="stable"))
    results = [
        aligner.align_ready(final=False)
        for _ in feed_portions(aligner, in_order, rng, most_rows=200)
        if rng.random() < 0.7
    ]
    results.append(aligner.align_ready(final=True))
    return np.sort(np.concatenate(results), order="operation")


@pytest.mark.parametrize("version", ["2.12.12", "2.14.3", "2.18.3", "2.20.5", "2.21.5", "2.26.2"])
def test_a_clean_capture_is_exact_where_op_count_moves(version: str) -> None:
    sample = sample_of(version)
    assert f1(sample, align_whole(version, sample)) == 1.0


@pytest.mark.parametrize("version", ["2.8.3", "2.10.3", "2.27.3", "2.28.3", "2.30.7"])
def test_a_clean_capture_is_exact_where_groups_are_known(version: str) -> None:
    sample = sample_of(version, groups=True)
    assert f1(sample, align_whole(version, sample)) == 1.0


@pytest.mark.parametrize("version", ["2.26.2", "2.28.3", "2.30.7"])
def test_a_clean_capture_is_exact_with_stamps(version: str) -> None:
    sample = sample_of(version, stamps=True)
    assert f1(sample, align_whole(version, sample)) == 1.0


def test_groups_that_nothing_tells_are_divided_by_the_number_of_kernels() -> None:
    sample = sample_of("2.28.3")
    matches = align_whole("2.28.3", sample)
    assert f1(sample, matches) >= 0.99
    guessed = np.isin(matches["operation"], sample.operations["id"][sample.operations["member"] == 1])
    assert matches["confidence"][guessed & (matches["match"] == Match.MATCHED)].max() < 1.0


def test_equal_collectives_of_one_group_share_a_kernel_from_the_first_group_on() -> None:
    recorder = Recorder(counts=False)
    shard = Call("ReduceScatter", 2, 0xC0)
    for _ in range(6):
        for _layer in range(40):
            recorder.issue(101, Call("AllReduce", 0, 0xA0))
            recorder.issue(101, Call("AllGather", 0, 0xA0))
        recorder.issue(101, shard, shard)
    recorder.issue(101, Call("AllReduce", 0, 0xA0))
    sample = recorder.sample(stamps=False, groups=False)
    assert f1(sample, align_whole("2.28.3", sample)) == 1.0


def test_every_operation_is_decided_exactly_once() -> None:
    sample = lose(sample_of("2.21.5"), np.random.default_rng(0), lines=0.1, kernels=0.1)
    matches = align_whole("2.21.5", sample)
    assert matches["operation"].tolist() == sample.operations["id"].tolist()
    assert np.all((matches["kernel"] != NO_NUMBER) == (matches["match"] == Match.MATCHED))


def test_operations_of_one_launch_share_launch_and_kernel() -> None:
    sample = sample_of("2.21.5")
    matches = align_whole("2.21.5", sample)
    matched = matches[matches["match"] == Match.MATCHED]
    pairs = {(row["launch"], row["kernel"]) for row in matched}
    assert len(pairs) == len(set(matched["kernel"].tolist())) == len(set(matched["launch"].tolist()))


def test_one_rank_and_empty_collectives_have_no_kernel() -> None:
    sample = sample_of("2.21.5")
    matches = align_whole("2.21.5", sample)
    silent = sample.operations["one_rank"] | (sample.operations["count"] == 0)
    assert np.array_equal(matches["match"] == Match.NO_KERNEL, silent)


@pytest.mark.parametrize("losses", [(0.01, 0.01), (0.0, 0.2), (0.2, 0.0), (0.2, 0.2)])
def test_stamps_find_the_kernel_whatever_is_lost(losses: tuple[float, float]) -> None:
    sample = lose(sample_of("2.28.3", stamps=True), np.random.default_rng(4), lines=losses[0], kernels=losses[1])
    assert f1(sample, align_whole("2.28.3", sample)) >= 0.99


def test_without_stamps_small_losses_cost_little_and_the_rest_is_called_unmatched() -> None:
    sample = lose(sample_of("2.21.5"), np.random.default_rng(4), lines=0.01, kernels=0.01)
    matches = align_whole("2.21.5", sample)
    assert f1(sample, matches) >= 0.93
    assert not np.any(matches["match"] == Match.PENDING)


def test_a_match_beside_a_loss_is_less_sure() -> None:
    sample = lose(sample_of("2.21.5"), np.random.default_rng(4), kernels=0.02)
    matches = align_whole("2.21.5", sample)
    matched = matches["match"] == Match.MATCHED
    right = matches["kernel"] == sample.truth[matches["operation"]]
    assert matches["confidence"][matched & ~right].mean() < matches["confidence"][matched & right].mean()


@pytest.mark.parametrize(
    ("version", "stamps", "groups", "losses"),
    [
        ("2.21.5", False, False, (0.0, 0.0)),
        ("2.21.5", False, False, (0.01, 0.01)),
        ("2.21.5", False, False, (0.2, 0.2)),
        ("2.28.3", False, False, (0.0, 0.0)),
        ("2.28.3", False, False, (0.01, 0.01)),
        ("2.28.3", True, False, (0.0, 0.0)),
        ("2.28.3", True, False, (0.2, 0.2)),
        ("2.28.3", False, True, (0.2, 0.0)),
    ],
)
def test_portions_give_what_the_whole_gives(
    version: str, stamps: bool, groups: bool, losses: tuple[float, float]
) -> None:
    sample = sample_of(version, stamps=stamps, groups=groups)
    sample = lose(sample, np.random.default_rng(2), lines=losses[0], kernels=losses[1])
    whole = align_whole(version, sample)
    for seed in range(3):
        assert np.array_equal(align_in_portions(version, sample, seed), whole)


@pytest.mark.parametrize(("version", "stamps"), [("2.21.5", False), ("2.28.3", True)])
def test_most_is_decided_before_the_end(version: str, stamps: bool) -> None:
    sample = sample_of(version, stamps=stamps, iterations=60)
    aligner = ProcessAligner(version)
    aligner.ingest_operations(sample.operations)
    aligner.ingest_kernels(sample.kernels)
    assert len(aligner.align_ready(final=False)) > 0.4 * len(sample.operations)


@pytest.mark.parametrize("stamps", [True, False])
def test_a_capture_that_ends_early_leaves_the_rest_not_covered(stamps: bool) -> None:
    sample = sample_of("2.28.3", stamps=stamps, groups=True)
    half = len(sample.kernels) // 2
    truth = np.where(sample.truth >= half, NO_NUMBER, sample.truth)
    cut = Sample(sample.operations, sample.kernels[:half], truth)
    aligner = ProcessAligner("2.28.3")
    aligner.ingest_operations(cut.operations)
    aligner.ingest_kernels(cut.kernels)
    aligner.ingest_coverage(int(cut.kernels["launch_start_ns"][0]) - 10**6, int(cut.kernels["launch_start_ns"][-1]))
    matches = np.sort(aligner.align_ready(final=True), order="operation")
    assert f1(cut, matches) == 1.0
    late = matches[(truth == NO_NUMBER) & (matches["match"] != Match.NO_KERNEL)]
    assert np.all(late["match"] == Match.NOT_COVERED)


def test_a_capture_that_starts_late_is_exact_with_stamps() -> None:
    sample = sample_of("2.28.3", stamps=True)
    half = len(sample.kernels) // 2
    truth = np.where(sample.truth < half, NO_NUMBER, sample.truth)
    cut = Sample(sample.operations, sample.kernels[half:], truth)
    aligner = ProcessAligner("2.28.3")
    aligner.ingest_operations(cut.operations)
    aligner.ingest_kernels(cut.kernels)
    begin = int(cut.kernels["launch_start_ns"][0]) - 5_000
    aligner.ingest_coverage(begin, int(cut.kernels["end_ns"].max()))
    matches = np.sort(aligner.align_ready(final=True), order="operation")
    assert f1(cut, matches) >= 0.999
    early = matches[(truth == NO_NUMBER) & (matches["match"] != Match.NO_KERNEL)]
    assert np.mean(early["match"] == Match.NOT_COVERED) > 0.99


def test_without_any_kernel_nothing_is_covered() -> None:
    sample = sample_of("2.21.5")
    aligner = ProcessAligner("2.21.5")
    aligner.ingest_operations(sample.operations)
    matches = aligner.align_ready(final=True)
    assert set(matches["match"].tolist()) == {Match.NOT_COVERED, Match.NO_KERNEL}


def test_nothing_is_called_lost_while_its_kernels_may_still_come() -> None:
    sample = sample_of("2.21.5")
    aligner = ProcessAligner("2.21.5")
    aligner.ingest_operations(sample.operations)
    aligner.ingest_kernels(sample.kernels[:100])
    matches = aligner.align_ready(final=False)
    assert not np.any(np.isin(matches["match"], [Match.UNMATCHED, Match.NOT_COVERED]))


def test_replays_of_a_graph_are_left_alone() -> None:
    sample = sample_of("2.21.5")
    replays = sample.kernels[:40].copy()
    replays["id"] += 100_000
    replays["correlation_id"] += 1
    replays["graph_node_id"] = 7
    aligner = ProcessAligner("2.21.5")
    aligner.ingest_operations(sample.operations)
    aligner.ingest_kernels(np.concatenate([sample.kernels, replays]))
    assert f1(sample, np.sort(aligner.align_ready(final=True), order="operation")) == 1.0


def test_kernels_that_come_twice_are_used_once() -> None:
    sample = sample_of("2.21.5")
    aligner = ProcessAligner("2.21.5")
    aligner.ingest_operations(sample.operations)
    aligner.ingest_kernels(np.concatenate([sample.kernels, sample.kernels[200:300]]))
    assert f1(sample, np.sort(aligner.align_ready(final=True), order="operation")) == 1.0


def test_threads_that_only_launch_do_not_matter() -> None:
    sample = sample_of("2.21.5")
    sample.kernels["launch_tid"] = 999
    assert f1(sample, align_whole("2.21.5", sample)) == 1.0


def test_a_thread_that_repeats_one_call_loses_a_line_where_the_calls_of_another_show_it() -> None:
    recorder = Recorder(counts=False)
    for _ in range(100):
        for layer in range(4):
            recorder.issue(1, Call("AllGather", 1, 0))
            recorder.issue(2, Call("ReduceScatter", 1, 0))
            recorder.wait(100_000 * layer)
    sample = recorder.sample(stamps=False, groups=True)
    lost = sample.operations["id"][sample.operations["tid"] == 2][150]
    kept = replace(sample, operations=sample.operations[sample.operations["id"] != lost])
    matches = align_whole("2.28.3", kept)
    assert (matches["kernel"] == sample.truth[matches["operation"]]).all()


def test_exports_without_launch_records_align_by_order() -> None:
    sample = sample_of("2.21.5", stamps=True)
    sample.kernels["launch_tid"] = NO_NUMBER
    sample.kernels["launch_start_ns"] = np.iinfo(np.int64).min
    assert f1(sample, align_whole("2.21.5", sample)) == 1.0


def test_stamps_of_another_time_zone_are_not_used() -> None:
    sample = sample_of("2.26.2", stamps=True)
    sample.operations["logged_at_ns"] -= 2 * 3600 * 10**9
    assert f1(sample, align_whole("2.26.2", sample)) == 1.0


def test_stamps_in_whole_seconds_are_not_used() -> None:
    sample = sample_of("2.26.2", stamps=True)
    sample.operations["logged_at_ns"] //= 10**9
    sample.operations["logged_at_ns"] *= 10**9
    assert f1(sample, align_whole("2.26.2", sample)) == 1.0


def test_communicators_may_share_a_stream() -> None:
    recorder = Recorder(counts=True)
    for index in range(200):
        recorder.issue(1, Call("AllReduce", index % 3, 0))
        recorder.issue(1, Call("AllGather", 2, 0))
    sample = recorder.sample(stamps=False, groups=False)
    assert f1(sample, align_whole("2.21.5", sample)) == 1.0


def test_a_communicator_may_be_born_in_the_middle() -> None:
    recorder = Recorder(counts=True)
    for index in range(300):
        recorder.issue(1, Call("AllReduce", 0, 0xA0))
        if index > 150 and index % 3 == 0:
            recorder.issue(1, Call("AllReduce", 1, 0xB0))
    sample = recorder.sample(stamps=False, groups=False)
    assert f1(sample, align_whole("2.21.5", sample)) == 1.0


def test_no_rows_at_all_give_no_rows() -> None:
    aligner = ProcessAligner(None)
    assert len(aligner.align_ready(final=False)) == 0
    assert len(aligner.align_ready(final=True)) == 0


def test_order_alone_is_unsure_of_a_capture_that_begins_in_the_middle() -> None:
    sample = sample_of("2.21.5")
    late = Sample(sample.operations, sample.kernels[len(sample.kernels) // 2 + 5 :], sample.truth)
    matches = align_whole("2.21.5", late)
    assert matches["confidence"][matches["match"] == Match.MATCHED].max() <= 0.5


def test_kernels_behind_a_hole_for_which_no_line_is_left_end_the_alignment() -> None:
    sample = sample_of("2.21.5")
    kernels, middle = sample.kernels.copy(), len(sample.kernels) // 2
    for name in ("launch_start_ns", "start_ns", "end_ns"):
        kernels[name][middle:] += 10**9
    aligner = ProcessAligner("2.21.5")
    aligner.ingest_operations(sample.operations[: len(sample.operations) // 4])
    aligner.ingest_kernels(kernels)
    for part in (kernels[:middle], kernels[middle:]):
        aligner.ingest_coverage(int(part["launch_start_ns"].min()) - 1, int(part["end_ns"].max()))
    matches = aligner.align_ready(final=True)
    assert len(matches) == len(sample.operations) // 4

"""What nccl-tests printed becomes a curve of bus bandwidth over size."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from ncclscope_service.nccl.nccl_tests import Benchmark, MeasuredBaseline, MeasuredSize, NcclTests
from ncclscope_wire.terms import OPERATION_CODES

ALL_REDUCE = OPERATION_CODES["AllReduce"]

OUTPUT = """\
+ mpirun -np 4 ./build/all_reduce_perf -b 8 -e 1G -f 2
# nThread 1 nGpus 1 minBytes 8 maxBytes 1073741824 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1
#
# Using devices
#  Rank  0 Group  0 Pid  11 on     alpha device  0 [0x07] NVIDIA A100
#  Rank  1 Group  0 Pid  12 on     alpha device  1 [0x46] NVIDIA A100
#  Rank  2 Group  0 Pid  13 on      beta device  0 [0x07] NVIDIA A100
#  Rank  3 Group  0 Pid  14 on      beta device  1 [0x46] NVIDIA A100
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
     1048576        262144     float     sum      -1    200.0    5.24    8.00      0    190.0    5.52    8.28      0
  1073741824     268435456     float     sum      -1   100000   10.74   16.11      0   100500   10.68   16.02    N/A
# Out of bounds values : 0 OK
"""


def read(text: str, name: str = "out.txt") -> tuple[list[MeasuredSize], Counter[str]]:
    skipped: Counter[str] = Counter()
    return list(NcclTests(name).read(text.splitlines(), skipped)), skipped


def test_a_table_gives_operation_ranks_nodes_and_both_places() -> None:
    found, skipped = read(OUTPUT)
    assert not skipped
    assert {(each.op, each.ranks, each.nodes) for each in found} == {(ALL_REDUCE, 4, 2)}
    assert [each.busbw for each in found] == pytest.approx([8e9, 8.28e9, 16.11e9, 16.02e9])


def test_the_name_of_the_file_tells_the_operation_where_the_text_does_not() -> None:
    found, _ = read("\n".join(OUTPUT.splitlines()[1:]), "reduce_scatter_perf-n2.txt")
    assert {each.op for each in found} == {OPERATION_CODES["ReduceScatter"]}


def test_rows_without_devices_or_operation_are_counted_and_left_out() -> None:
    rows = "\n".join(line for line in OUTPUT.splitlines() if not line.startswith("#"))
    assert read(rows) == ([], Counter(ranks_not_printed=2))
    assert read("\n".join(OUTPUT.splitlines()[1:])) == ([], Counter(operation_not_printed=2))


def test_between_sizes_the_curve_is_straight_above_it_holds_and_below_it_says_nothing() -> None:
    baseline = MeasuredBaseline(read(OUTPUT)[0])
    sizes = np.array([1024, 1 << 20, 1 << 25, 1 << 30, 1 << 34])
    rates = baseline.busbw((ALL_REDUCE, 4, 2), sizes)
    assert np.isnan(rates[0])
    assert rates[[1, 3, 4]] == pytest.approx([8.28e9, 16.11e9, 16.11e9])
    assert 8.28e9 < rates[2] < 16.11e9


def test_another_number_of_ranks_or_nodes_has_no_baseline() -> None:
    baseline = MeasuredBaseline(read(OUTPUT)[0])
    assert baseline.shapes == [(ALL_REDUCE, 4, 2)]
    for shape in ((ALL_REDUCE, 8, 2), (ALL_REDUCE, 4, 1), (OPERATION_CODES["AllGather"], 4, 2)):
        assert np.isnan(baseline.busbw(shape, np.array([1 << 25]))).all()
        assert baseline.largest_busbw(shape) is None


def test_numbers_that_no_machine_has_measured_are_no_row_and_spoil_no_other() -> None:
    absurd = OUTPUT.replace("   1073741824 ", f"   {'9' * 30} ").replace("268435456", "9" * 5000)
    found, _ = read(absurd)
    assert {each.message_bytes for each in found} == {1 << 20}
    assert MeasuredBaseline(found).largest_busbw((ALL_REDUCE, 4, 2)) == pytest.approx(8.28e9)


def tables(text: str) -> list[Benchmark]:
    return NcclTests("out.txt").benchmarks(text.splitlines())


def test_a_row_is_read_as_printed_with_its_root_type_and_both_places() -> None:
    (table,) = tables(OUTPUT)
    assert (table.op, table.dtype, table.red_op, table.root) == (ALL_REDUCE, "float", "sum", -1)
    assert (table.ranks, table.nodes, table.torn_rows) == (4, ["alpha", "beta"], 0)
    large = table.rows[1]
    assert large.in_place is not None
    assert (large.message_bytes, large.count, large.in_place.wrong) == (1 << 30, 1 << 28, "N/A")
    assert (large.out_of_place.time_ns, large.out_of_place.algbw, large.out_of_place.busbw) == (
        100_000_000,
        10_740_000_000,
        16_110_000_000,
    )


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (
            "float     sum    95.41   21.98   38.47  2e-07    94.80   22.12   38.71  2e-07",
            ("sum", None, 95_410, "2e-07"),
        ),
        ("float            95.41   21.98   38.47    N/A    94.80   22.12   38.71    N/A", (None, None, 95_410, "N/A")),
        ("float       3    10003    3.35    5.03      0     9952    3.37    5.06      0", (None, 3, 10_003_000, "0")),
        (
            "float     sum    10003    3.35    5.03    N/A     9952    3.37    5.06    N/A",
            ("sum", None, 10_003_000, "N/A"),
        ),
    ],
)
def test_columns_that_a_version_does_not_print_are_not_known(columns: str, expected: tuple[object, ...]) -> None:
    (table,) = tables(f"   2097152   524288   {columns}\n")
    (row,) = table.rows
    assert (table.red_op, table.root, row.out_of_place.time_ns, row.out_of_place.wrong) == expected
    assert row.in_place is not None
    assert table.ranks is None


def test_another_type_root_or_run_begins_another_table() -> None:
    double = OUTPUT.splitlines()[-2].replace(" float", "double")
    found = tables(OUTPUT + double + "\n" + OUTPUT)
    assert [(each.dtype, len(each.rows), each.ranks) for each in found] == [
        ("float", 2, 4),
        ("double", 1, 4),
        ("float", 2, 4),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "     2097152        524288     float     sum      -1alpha:11:11 [0] NCCL INFO AllReduce: opCount 0",
        "     2097152        524288     float     sum      -1    200.0    5.24    8.",
        "alpha:11:11 [0] NCCL INFO AllReduce: opC     2097152        524288     float     sum      -1    200.0",
    ],
)
def test_a_torn_or_glued_row_is_skipped_and_counted(line: str) -> None:
    (table,) = tables(OUTPUT + line + "\n")
    assert (len(table.rows), table.torn_rows) == (2, 1)


def test_a_row_torn_behind_its_first_result_keeps_that_and_is_counted() -> None:
    line = "     2097152        524288     float     sum      -1    200.0   10.48   15.73      0    190.0   11.0"
    (table,) = tables(OUTPUT + line + "\n")
    assert table.rows[-1].in_place is None
    assert table.rows[-1].out_of_place.busbw == 15_730_000_000
    assert table.torn_rows == 1


def test_the_largest_numbers_that_are_read_fit_the_files() -> None:
    row = f"{'9' * 18} {'9' * 18} float sum -1 {'9' * 15}.99 {'9' * 9}.99 {'9' * 9}.99 0"
    (table,) = tables(row + "\n")
    largest = table.rows[0].out_of_place
    assert max(table.rows[0].message_bytes, largest.time_ns, largest.algbw, largest.busbw) < 2**63


def test_a_header_without_a_row_is_a_benchmark_and_other_text_is_none() -> None:
    (table,) = tables("\n".join(OUTPUT.splitlines()[:8]))
    assert (table.rows, table.ranks) == ([], 4)
    assert tables("trained 8 layers of 2 float tensors\n") == []

"""Operation lines that recur in the order of an iteration: read together, to the same as one by one."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
from agent.log_samples import NODE, SOURCE, operation_line, read_log
from hypothesis import given, settings
from hypothesis import strategies as st

from ncclscope_agent.sources.nccl_log.reader import NcclLogReader
from ncclscope_agent.sources.nccl_log.recurring_lines import LEAST_LINES, MOST_BYTES, distance_of_last

STAMP = "[2026-03-02 11:20:33.{:06d}] "
OTHER_STAMP = "[2026-03-02 11:20:34] "
TUNING = "AllReduce: 65536 Bytes -> Algo 1 proto 0 time 23.5"


def iteration(operations: int) -> list[str]:
    """The lines of one iteration behind their prefix, with a place for the opCount. Some of them recur in it."""
    streams = [f"0x55d0c7f01b{number % 7}0" for number in range(operations)]
    return [
        operation_line(op_count="{:x}", count=1 + number - number % 5, stream=stream, prefix="")
        for number, stream in enumerate(streams)
    ]


def log_of(operations: int, lines: int, *, with_stamps: bool = True, first: int = 0) -> list[str]:
    """A log of iterations of so many operations. Two threads take turns; the opCounts of one have more digits."""
    bodies = iteration(operations)
    log: list[str] = []
    for number in range(first, first + lines):
        at = number % operations
        stamp = STAMP.format(number) if with_stamps else ""
        prefix = NODE if at % 2 else NODE.replace("41903", "7")
        log.append(stamp + prefix + bodies[at].format(number + (0 if at % 2 else 1 << 20)))
    return log


def fed(log: list[bytes], reader: NcclLogReader, lines_at_a_time: int = 150) -> object:
    """What a reader says of a log that comes so many lines at a time."""
    ends = [0, *accumulate(map(len, log))]
    return read_log(b"".join(log), [ends[at] for at in range(0, len(ends), lines_at_a_time)], reader)


def as_bytes(log: list[str]) -> list[bytes]:
    return [line.encode() + b"\n" for line in log]


@pytest.mark.parametrize("with_stamps", [True, False])
@pytest.mark.parametrize("operations", [1, 3, 40, 200, 500])
def test_iterations_that_recur_are_read_together_and_say_the_same(operations: int, with_stamps: bool) -> None:
    log = as_bytes(log_of(operations, 3_000, with_stamps=with_stamps))
    reader = NcclLogReader(SOURCE)
    assert fed(log, reader) == read_log(b"".join(log))
    assert reader.statistics().lines_in_iterations > 1_000


def test_lines_that_are_cut_anywhere_are_read_together_too() -> None:
    log = b"".join(as_bytes(log_of(40, 2_000)))
    reader = NcclLogReader(SOURCE)
    assert read_log(log, range(0, len(log), 20_001), reader) == read_log(log)
    assert reader.statistics().lines_in_iterations > 1_000


def test_an_iteration_is_found_again_behind_other_lines() -> None:
    log = log_of(40, 1_200)
    log[800:800] = [STAMP.format(800) + NODE + TUNING, "loss 3.41"]
    reader = NcclLogReader(SOURCE)
    assert fed(as_bytes(log), reader) == read_log(b"".join(as_bytes(log)))
    assert reader.statistics().lines_in_iterations >= 1_200 - 4 * 150


def test_another_iteration_takes_the_place_of_the_one_before() -> None:
    log = as_bytes(log_of(40, 1_500) + log_of(70, 3_000, first=2_000))
    reader = NcclLogReader(SOURCE)
    assert fed(log, reader) == read_log(b"".join(log))
    assert reader.statistics().lines_in_iterations > 2_500


def test_an_op_count_with_more_digits_than_before_is_read() -> None:
    log = as_bytes([NODE + body.format(number) for number in range(0xE00, 0x1400) for body in iteration(2)])
    reader = NcclLogReader(SOURCE)
    assert fed(log, reader) == read_log(b"".join(log))
    assert reader.statistics().lines_in_iterations > 1_500


def test_a_log_whose_order_does_not_recur_is_read_line_by_line() -> None:
    order = np.random.default_rng(7).integers(0, 40, 4_000)
    bodies = iteration(40)
    log = as_bytes([NODE + bodies[at].format(number) for number, at in enumerate(order)])
    reader = NcclLogReader(SOURCE)
    assert fed(log, reader) == read_log(b"".join(log))
    assert reader.statistics().lines_in_iterations == 0


def test_an_iteration_that_is_too_long_is_not_kept() -> None:
    operations = MOST_BYTES // 180
    log = as_bytes(log_of(operations, 2 * operations + 3_000))
    reader = NcclLogReader(SOURCE)
    fed(log, reader, 1_500)
    assert reader.statistics().lines_in_iterations == 0


def test_few_lines_at_a_time_are_read_line_by_line() -> None:
    log = as_bytes(log_of(5, 1_000))
    reader = NcclLogReader(SOURCE)
    assert fed(log, reader, LEAST_LINES // 2) == read_log(b"".join(log))
    assert reader.statistics().lines_in_iterations == 0


@pytest.mark.parametrize(
    "bad",
    [
        b"[2026-03-02 11:20:33.00\n900] ",
        b"[2026-03-02 11:20:33.0x0900] ",
        b"[2026-03-02 11:20:3: opCount ",
        b"[2026-13-02 11:20:33.000900] ",
        b"            11:20:33.000900] ",
    ],
)
def test_a_bad_stamp_among_lines_that_recur_is_read_as_elsewhere(bad: bytes) -> None:
    log = as_bytes(log_of(40, 1_200))
    log[700] = bad + log[700][len(bad) :]
    reader = NcclLogReader(SOURCE)
    assert fed(log, reader) == read_log(b"".join(log))
    assert reader.statistics().lines_in_iterations > 0


@pytest.mark.parametrize("digits", [b"10002\nc", b"1000 2c", b"1000g2c", b"1000A2c"])
def test_a_bad_op_count_among_lines_that_recur_is_read_as_elsewhere(digits: bytes) -> None:
    log = as_bytes(log_of(40, 1_200))
    good = b"opCount %x " % (700 + (1 << 20))
    assert good in log[700]
    log[700] = log[700].replace(good, b"opCount " + digits[: len(good) - 9].ljust(len(good) - 9, b"0") + b" ")
    reader = NcclLogReader(SOURCE)
    assert fed(log, reader) == read_log(b"".join(log))
    assert reader.statistics().lines_in_iterations > 0


DAMAGE = st.sampled_from(
    ["tuning", "text", "cut", "changed", "long", "unstamped", "other stamp", "zeros", "new", "swap"]
)


def damaged(log: list[bytes], at: int, damage: str) -> None:
    """Does something to the line at this place."""
    line = log[at]
    log[at] = {
        "tuning": line + (STAMP.format(at) + NODE + TUNING + "\n").encode(),
        "text": b"loss 3.41\n" + line,
        "cut": line[: len(line) // 2],
        "changed": line[:-9] + b"9" + line[-8:],
        "long": line[:-1] + b"x" * 3000 + b"\n",
        "unstamped": line.partition(b"] ")[2],
        "other stamp": OTHER_STAMP.encode() + line.partition(b"] ")[2],
        "zeros": bytes(5) + line,
        "new": line.replace(b"count 1 ", b"count 77 "),
        "swap": log[at - 1],
    }[damage]


@settings(max_examples=25, deadline=None)
@given(
    operations=st.sampled_from([1, 2, 7, 40, 90]),
    with_stamps=st.booleans(),
    damages=st.lists(st.tuples(st.integers(0, 799), DAMAGE), max_size=4),
    cuts=st.lists(st.integers(0, 150_000), max_size=12),
    max_templates=st.sampled_from([20, 10_000]),
)
def test_damaged_iterations_say_the_same_however_they_come(
    operations: int, with_stamps: bool, damages: list[tuple[int, str]], cuts: list[int], max_templates: int
) -> None:
    log = as_bytes(log_of(operations, 800, with_stamps=with_stamps))
    for at, damage in damages:
        damaged(log, at, damage)
    text = b"".join(log)
    whole = read_log(text, reader=NcclLogReader(SOURCE, max_templates=max_templates))
    steps = [*range(0, len(text), 16_000), *(cut for cut in cuts if cut < len(text))]
    assert read_log(text, steps, NcclLogReader(SOURCE, max_templates=max_templates)) == whole


def test_the_distance_to_the_same_lines_is_that_of_all_of_them() -> None:
    once = [1, 2, 3, 2, 3, 4]
    templates = np.array(once * 3, dtype=np.uint32)
    assert distance_of_last(templates, 6) == len(once)
    assert distance_of_last(templates, 1) == len(once)
    assert distance_of_last(np.array([1, 2, 3], dtype=np.uint32), 2) == 0
    assert distance_of_last(np.array([5, 5, 5], dtype=np.uint32), 2) == 1

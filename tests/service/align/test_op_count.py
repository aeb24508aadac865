from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from align_samples import Call, Recorder, Sample, align_whole, f1, training

from ncclscope_service.align.expected_launches import Translator
from ncclscope_service.align.op_count import GROUP_SPAN
from ncclscope_service.align.records import blank_operations
from ncclscope_service.nccl.launch_rules import rules_of
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import OPERATION_CODES

Operation = tuple[str, int, int, int]
"""Name, communicator, opCount, thread."""


def rows_of(*operations: Operation) -> Columns:
    rows = blank_operations(len(operations))
    rows["id"] = np.arange(len(operations))
    rows["op"] = [OPERATION_CODES[operation[0]] for operation in operations]
    for at, name in enumerate(("member", "op_count", "tid"), 1):
        rows[name] = [operation[at] for operation in operations]
    rows["stream"] = rows["member"]
    rows["count"], rows["nranks"], rows["data_type"] = 1024, 4, 7
    return rows


def launched(version: str, rows: Columns, *, portions: int = 1) -> list[list[int]]:
    """The operations of each launch; those of one thread come in order, threads as they are ready."""
    translator = Translator(rules_of(version))
    found: list[list[int]] = []
    bounds = np.linspace(0, len(rows), portions + 1).astype(int).tolist()
    for begin, end in pairwise(bounds):
        translator.ingest_operations(rows[begin:end])
        launches, ids = translator.drain_launches(final=end == len(rows))
        found += [ids[row["begin"] : row["end"]].tolist() for row in launches]
    return found


def alone(amount: int) -> list[list[int]]:
    return [[index] for index in range(amount)]


def test_collectives_that_take_turns_under_one_value_are_no_group() -> None:
    layers = [("AllGather", 0, 7, 1), ("ReduceScatter", 0, 7, 1)] * 3
    assert launched("2.18.3", rows_of(*layers)) == alone(6)


def test_collectives_of_one_kind_or_two_under_one_value_may_be_a_group() -> None:
    group = [("AllReduce", 0, 7, 1), ("AllReduce", 0, 7, 1), ("Broadcast", 0, 7, 1), ("AllReduce", 0, 8, 1)]
    assert launched("2.18.3", rows_of(*group)) == [[0, 1, 2], [3]]


def test_a_value_on_two_threads_stands_still() -> None:
    rows = rows_of(("AllReduce", 0, 7, 1), ("AllReduce", 0, 7, 1), ("AllReduce", 0, 7, 2), ("AllReduce", 0, 7, 2))
    assert launched("2.18.3", rows) == alone(4)


def test_a_value_stands_still_where_another_communicator_was_launched_between() -> None:
    calls = [("AllReduce", 0, 7, 1), ("AllReduce", 1, 3, 1), ("AllReduce", 1, 4, 1), ("AllReduce", 0, 7, 1)]
    assert launched("2.18.3", rows_of(*calls)) == alone(4)


def test_a_group_over_several_communicators_is_one_launch_of_each() -> None:
    calls = [("AllReduce", member, value, 1) for value in (3, 4) for _ in range(2) for member in (0, 1)]
    assert launched("2.18.3", rows_of(*calls)) == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_a_value_that_comes_back_later_than_a_group_lasts_stands_still_from_then_on() -> None:
    other = [("AllReduce", 1, value, 1) for value in range(GROUP_SPAN + 1)]
    calls = [("Send", 0, 7, 1), *other, ("Send", 0, 7, 1), ("Recv", 0, 7, 1)]
    assert launched("2.18.3", rows_of(*calls)) == alone(len(calls))


def test_beside_a_value_that_stands_still_others_are_believed_where_they_move_on() -> None:
    layers = [("AllGather", 0, 7, 1), ("ReduceScatter", 0, 7, 1)] * 2
    pairs = [("Send", 1, 3, 1), ("Recv", 1, 3, 1), ("Send", 1, 4, 1), ("Recv", 1, 4, 1)]
    assert launched("2.18.3", rows_of(*layers, *pairs)) == [*alone(4), [4, 5], [6], [7]]


def test_a_value_above_zero_may_stand_still_in_2_28_too() -> None:
    layers = [("AllGather", 0, 7, 1), ("ReduceScatter", 0, 7, 1)] * 3
    assert launched("2.28.3", rows_of(*layers, ("AllGather", 0, 8, 1))) == alone(7)


def job(*, stands_still: bool, before: int = 0, after: int = 0) -> Sample:
    """A job whose opCounts move but for some steps."""
    recorder = training(np.random.default_rng(1), before, counts=True)
    for counts, steps in ((not stands_still, 25), (True, after)):
        recorder.counts = counts
        for _ in range(steps):
            _step(recorder)
    return recorder.sample(stamps=False, groups=False)


def _step(recorder: Recorder) -> None:
    send, receive = Call("Send", 1, 0xB0, peer=1), Call("Recv", 1, 0xB0, peer=1)
    for micro_batch in range(4):
        if micro_batch:
            recorder.issue(101, send, receive)
        for _layer in range(3):
            recorder.issue(101, Call("AllGather", 0, 0xA0))
            recorder.issue(101, Call("ReduceScatter", 0, 0xA0))
        for _layer in range(3):
            recorder.issue(202, Call("AllGather", 0, 0xA0))
            recorder.issue(202, Call("ReduceScatter", 0, 0xA0))
    recorder.issue(202, Call("AllReduce", 2, 0xC0))
    recorder.issue(202, Call("AllReduce", 2, 0xC0, count=77))


@pytest.mark.parametrize("version", ["2.14.3", "2.18.3", "2.23.4"])
@pytest.mark.parametrize(("before", "after"), [(0, 0), (4, 0), (4, 10)])
def test_a_clean_capture_is_exact_where_op_count_stands_still(version: str, before: int, after: int) -> None:
    sample = job(stands_still=True, before=before, after=after)
    assert f1(sample, align_whole(version, sample)) == 1.0


def test_in_2_13_fused_sends_are_learnt_as_they_recur() -> None:
    sample = job(stands_still=True, before=4, after=10)
    assert f1(sample, align_whole("2.13.4", sample)) >= 0.999

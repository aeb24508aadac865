from __future__ import annotations

import numpy as np
import pytest

from ncclscope_service.align.expected_launches import Translator
from ncclscope_service.align.op_count import GROUP_SPAN
from ncclscope_service.align.records import blank_operations
from ncclscope_service.intake.call_groups import ALONE
from ncclscope_service.nccl.launch_rules import Counting, KernelClass, rules_of
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import OPERATION_CODES


def operations(*names: str, **columns: object) -> Columns:
    """Rows of one communicator; a column is one value for all, or one each."""
    rows = blank_operations(len(names))
    rows["id"] = np.arange(len(names))
    rows["op"] = [OPERATION_CODES[name] for name in names]
    rows["count"], rows["nranks"], rows["data_type"], rows["tid"] = 1024, 4, 7, 9
    for name, value in columns.items():
        rows[name] = value
    return rows


def launched(version: str | None, rows: Columns) -> list[list[int]]:
    """The operations of each launch."""
    translator = Translator(rules_of(version))
    translator.ingest_operations(rows)
    launches, ids = translator.drain_launches(final=True)
    return [ids[row["begin"] : row["end"]].tolist() for row in launches]


def silent(version: str | None, rows: Columns) -> list[int]:
    ids: list[int] = Translator(rules_of(version)).ingest_operations(rows).tolist()
    return ids


@pytest.mark.parametrize(
    ("version", "counting", "internal_stream"),
    [
        ("2.8.4", Counting.NEVER, False),
        ("2.10.3", Counting.WITH_PROXY, False),
        ("2.13.4", Counting.PER_PLAN, True),
        ("2.14.3", Counting.PER_PLAN, True),
        ("2.18.3", Counting.PER_PLAN, False),
        ("2.26.6+cuda12.8", Counting.PER_PLAN, False),
        ("NCCL version 2.28.9+cuda13.0", Counting.WITH_PROXY, False),
        (None, Counting.WITH_PROXY, False),
    ],
)
def test_rules_follow_the_version(version: str | None, counting: Counting, internal_stream: bool) -> None:
    rules = rules_of(version)
    assert (rules.counting, rules.internal_stream) == (counting, internal_stream)


def test_one_rank_launches_nothing() -> None:
    assert silent("2.18.3", operations("AllReduce", "AllGather", one_rank=True)) == [0, 1]


@pytest.mark.parametrize(("version", "launches"), [("2.10.3", False), ("2.18.3", True), ("2.27.3", True)])
def test_one_rank_with_a_user_reduction_launches_from_2_11(version: str, launches: bool) -> None:
    rows = operations("AllReduce", one_rank=True, reduction=123_456)
    assert (silent(version, rows) == []) is launches


def test_one_rank_average_of_floats_launches_from_2_19() -> None:
    rows = operations("AllReduce", "AllReduce", one_rank=True, reduction=4, data_type=[7, 2])
    assert silent("2.18.3", rows) == [0, 1]
    assert silent("2.19.3", rows) == [1]


def test_empty_collectives_launch_nothing_from_2_20_3_but_empty_sends_do() -> None:
    rows = operations("AllReduce", "Send", count=0)
    assert silent("2.19.3", rows) == []
    assert silent("2.20.3", rows) == [0]


def test_one_sided_operations_launch_nothing() -> None:
    assert silent("2.29.2", operations("PutSignal", "Signal", "WaitSignal")) == [0, 1, 2]


def test_equal_op_count_is_one_launch_where_it_counts() -> None:
    rows = operations("Send", "Recv", "Send", "AllReduce", op_count=[3, 3, 4, 5])
    assert launched("2.18.3", rows) == [[0, 1], [2], [3]]


def test_op_count_that_never_moves_leaves_sends_open() -> None:
    rows = operations("Send", "Recv", "AllReduce", op_count=0)
    translator = Translator(rules_of("2.28.3"))
    translator.ingest_operations(rows)
    launches, _ = translator.drain_launches(final=True)
    assert launches["is_open"].tolist() == [True, True, False]


def test_op_count_is_believed_in_2_28_where_it_moves() -> None:
    assert launched("2.28.3", operations("Send", "Recv", "Send", op_count=[0, 0, 1])) == [[0, 1], [2]]


def test_a_count_that_is_stuck_for_longer_than_any_group_is_not_a_group() -> None:
    rows = operations(*["AllReduce"] * (GROUP_SPAN + 10), op_count=0)
    assert launched("2.18.3", rows) == [[index] for index in range(GROUP_SPAN + 10)]


def test_2_8_never_counts() -> None:
    assert launched("2.8.3", operations("Send", "Recv", op_count=0)) == [[0], [1]]


def test_known_groups_are_one_launch_per_communicator() -> None:
    rows = operations("Send", "AllReduce", "Recv", "AllReduce", group=[5, 5, 5, -1], member=[0, 1, 0, 1])
    assert launched("2.28.3", rows) == [[0, 2], [1], [3]]


def test_a_mixed_group_may_show_either_name() -> None:
    translator = Translator(rules_of("2.28.3"))
    translator.ingest_operations(operations("AllReduce", "Send", group=1))
    launches, _ = translator.drain_launches(final=True)
    bits = int(launches["classes"][0])
    assert bits >> KernelClass.ALL_REDUCE & 1
    assert bits >> KernelClass.SEND_RECV & 1


def test_2_13_may_show_send_recv_for_any_collective() -> None:
    translator = Translator(rules_of("2.13.4"))
    translator.ingest_operations(operations("AllReduce"))
    launches, _ = translator.drain_launches(final=True)
    assert int(launches["classes"][0]) >> KernelClass.SEND_RECV & 1


def test_an_operation_of_an_unknown_name_is_expected_to_launch_something() -> None:
    rows = operations("AllReduce")
    rows["op"] = 255
    assert silent("2.30.7", rows) == []


def test_a_launch_is_given_out_once_it_cannot_grow() -> None:
    translator = Translator(rules_of("2.18.3"))
    translator.ingest_operations(operations("Send", "Recv", op_count=[3, 3]))
    assert len(translator.drain_launches(final=False)[0]) == 0
    more = operations("Send", op_count=[4])
    more["id"] = 2
    translator.ingest_operations(more)
    launches, ids = translator.drain_launches(final=False)
    assert [ids[row["begin"] : row["end"]].tolist() for row in launches] == [[0, 1]]


def test_a_rare_communicator_does_not_hold_its_thread_up() -> None:
    translator = Translator(rules_of("2.18.3"))
    rows = operations(*["AllReduce"] * 200)
    rows["member"][1:] = 1
    rows["op_count"][1:] = np.arange(199)
    translator.ingest_operations(rows)
    assert len(translator.drain_launches(final=False)[0]) > 190


def test_sends_that_are_known_to_be_in_no_group_are_launched_alone() -> None:
    translator = Translator(rules_of("2.28.3"))
    translator.ingest_operations(operations("Send", "Recv", "Send", group=[ALONE, 4, 4]))
    launches, ids = translator.drain_launches(final=True)
    assert [ids[row["begin"] : row["end"]].tolist() for row in launches] == [[0], [1, 2]]
    assert not launches["is_open"].any()


def test_a_known_group_may_be_larger_than_any_that_op_count_tells() -> None:
    size = 4 * GROUP_SPAN
    rows = operations(*["Send"] * size, *["Recv"] * size, group=2, member=[0] * size + [1] * size)
    translator = Translator(rules_of("2.28.3"))
    found: list[int] = []
    for begin in range(0, len(rows), 50):
        translator.ingest_operations(rows[begin : begin + 50])
        launches, _ = translator.drain_launches(final=begin + 50 >= len(rows))
        found += (launches["end"] - launches["begin"]).tolist()
    assert found == [size, size]


def test_a_known_group_ends_where_op_count_moves() -> None:
    assert launched("2.18.3", operations("Send", "Send", "Send", group=3, op_count=[1, 1, 2])) == [[0, 1], [2]]

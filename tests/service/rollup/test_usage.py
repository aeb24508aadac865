"""What a communicator has carried is counted by content, whatever the portions."""

from __future__ import annotations

from service.log_batches import Line, Reading, log_batch

from ncclscope_service.rollup.usage import UsageCounts
from ncclscope_wire.terms import OPERATION_CODES


def _table(*portions: list[Line]) -> list[tuple[int, int, int, int]]:
    reading = Reading()
    contents = UsageCounts(reading.store)
    for lines in portions:
        contents.count_logged(reading.store.operations.take(reading.feed(log_batch(lines))))
    names = ["op", "message_bytes", "operations", "templates"]
    return sorted(contents.table()[names].tolist())


def test_operations_of_one_content_are_counted_together_and_their_buffers_apart() -> None:
    lines = [Line(line=1 + index, op="AllReduce", count=100, stream=0x50 + index % 2) for index in range(6)]
    lines.append(Line(line=7, op="AllReduce", count=200))
    code = OPERATION_CODES["AllReduce"]
    whole = _table(lines)
    assert [(op, amount, templates) for op, _, amount, templates in whole] == [(code, 6, 2), (code, 1, 1)]
    assert _table(lines[:2], lines[2:]) == whole


def test_nothing_counted_is_an_empty_table() -> None:
    assert len(UsageCounts(Reading().store).table()) == 0

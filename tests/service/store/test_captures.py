"""Captures of the window are kept one by one, and all of them are counted."""

from __future__ import annotations

from service.log_batches import export_batch

from ncclscope_service.store.records import Captures
from ncclscope_wire.records import CaptureSeen


def _capture(end_ns: int) -> CaptureSeen:
    return export_batch([], captured_ns=(end_ns - 5, end_ns)).captures[0]


def test_what_was_dropped_is_counted_and_what_came_since_is_told_by_its_id() -> None:
    captures = Captures()
    for number in range(6):
        captures.append((number, _capture(10 * number)))
    before = captures.copy()
    captures.drop_before(4)
    assert [source for source, _ in captures] == [4, 5]
    assert (captures.first, captures.next_id, len(captures), captures.newest_ns) == (4, 6, 2, 50)
    assert [source for source, _ in captures.since(5)] == [5]
    assert [source for source, _ in captures.since(0)] == [4, 5]
    assert captures.since(6) == []
    assert len(before) == 6
    captures.drop_before(9)
    assert (captures.first, captures.next_id, captures.newest_ns) == (6, 6, 50)

"""Records on disk: whatever was cut off or turned over, the others are found and none is made up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ncclscope_wire.record import MARK, RECORD_BYTES, encode_record, whole_records

_MAX = 1000
_bodies = st.lists(
    st.tuples(st.integers(0, 255), st.binary(max_size=40) | st.binary(max_size=9).map(lambda it: it + MARK + it)),
    max_size=8,
)


def _read(data: bytes, *, max_body_bytes: int = _MAX) -> list[tuple[int, bytes]]:
    return [(found.kind, found.body(data)) for found in whole_records(data, max_body_bytes=max_body_bytes)]


def _file(records: list[tuple[int, bytes]]) -> bytes:
    return b"".join(encode_record(kind, body[:3], body[3:]) for kind, body in records)


@given(_bodies, st.binary(max_size=20))
def test_what_was_written_is_read_behind_whatever_stands_there(records: list[tuple[int, bytes]], junk: bytes) -> None:
    assert _read(junk + _file(records)) == records


@given(_bodies, st.data())
def test_any_cut_gives_the_records_before_it(records: list[tuple[int, bytes]], data: st.DataObject) -> None:
    whole = _file(records)
    cut = data.draw(st.integers(0, len(whole)))
    fitting = sum(len(_file(records[: place + 1])) <= cut for place in range(len(records)))
    assert _read(whole[:cut]) == records[:fitting]


@given(_bodies.filter(bool), st.data())
def test_any_turned_byte_costs_its_record_alone(records: list[tuple[int, bytes]], data: st.DataObject) -> None:
    damaged = bytearray(_file(records))
    at = data.draw(st.integers(0, len(damaged) - 1))
    damaged[at] ^= data.draw(st.integers(1, 255))
    hit = next(place for place in range(len(records)) if at < len(_file(records[: place + 1])))
    assert _read(bytes(damaged)) == records[:hit] + records[hit + 1 :]


def test_a_record_that_announces_more_than_may_be_is_none() -> None:
    assert _read(encode_record(1, bytes(11)), max_body_bytes=10) == []
    assert len(encode_record(1, bytes(11))) == RECORD_BYTES + 11

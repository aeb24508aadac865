"""A journal gives back what is whole of it, whatever was cut off or turned over."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ncclscope_service.keep.journal import (
    FORMAT,
    HEADER_BYTES,
    MARK,
    RECORD_BYTES,
    Record,
    SegmentHeader,
    encode_header,
    encode_record,
    read_segment,
)

_HEADER = SegmentHeader(format=FORMAT, first=7, era="2026")
_contents = st.lists(st.binary(max_size=40) | st.binary(max_size=9).map(lambda it: it + MARK + it), max_size=12)


def _records(contents: list[bytes]) -> list[Record]:
    return [Record(_HEADER.first + place, content) for place, content in enumerate(contents)]


def _segment(records: list[Record]) -> bytes:
    return encode_header(_HEADER) + b"".join(encode_record(each.number, each.content) for each in records)


@given(_contents)
def test_a_whole_segment_gives_every_record(contents: list[bytes]) -> None:
    records = _records(contents)
    data = _segment(records)
    read = read_segment(data)
    assert read.header == _HEADER
    assert list(read.records) == records
    assert (read.damaged, read.end, read.torn_bytes) == (0, len(data), 0)


@given(_contents, st.data())
def test_any_cut_gives_the_records_before_it(contents: list[bytes], data: st.DataObject) -> None:
    records = _records(contents)
    whole = _segment(records)
    cut = data.draw(st.integers(0, len(whole)))
    read = read_segment(whole[:cut])
    ends = [HEADER_BYTES]
    for each in records:
        ends.append(ends[-1] + RECORD_BYTES + len(each.content))
    expected = sum(end <= cut for end in ends[1:])
    assert list(read.records) == records[:expected]
    assert read.damaged == 0
    assert (read.header is None) == (cut < HEADER_BYTES)
    if read.header is not None:
        assert read.end == ends[expected]
        assert read.torn_bytes == cut - read.end


@given(_contents.filter(bool), st.data())
def test_any_turned_byte_costs_the_record_that_it_is_in_and_no_other(
    contents: list[bytes], data: st.DataObject
) -> None:
    records = _records(contents)
    flipped = bytearray(_segment(records))
    place = data.draw(st.integers(HEADER_BYTES, len(flipped) - 1))
    flipped[place] ^= data.draw(st.integers(1, 255))
    read = read_segment(bytes(flipped))
    begin, hit = HEADER_BYTES, -1
    for index, each in enumerate(records):
        end = begin + RECORD_BYTES + len(each.content)
        if begin <= place < end:
            hit = index
        begin = end
    assert list(read.records) == records[:hit] + records[hit + 1 :]
    is_last = hit == len(records) - 1
    assert read.damaged == (0 if is_last else 1)
    assert (read.torn_bytes > 0) == is_last


@given(_contents, st.binary(min_size=1, max_size=200), st.data())
def test_bytes_written_over_others_invent_nothing(contents: list[bytes], junk: bytes, data: st.DataObject) -> None:
    records = _records(contents)
    whole = _segment(records)
    place = data.draw(st.integers(0, len(whole)))
    read = read_segment(whole[:place] + junk + whole[place + len(junk) :])
    numbers = [each.number for each in read.records]
    assert set(read.records) <= set(records)
    assert numbers == sorted(set(numbers))


def test_a_segment_of_another_format_says_which() -> None:
    read = read_segment(encode_header(SegmentHeader(format=9, first=1, era="x")))
    assert read.header is not None
    assert read.header.format == 9

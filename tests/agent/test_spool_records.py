"""Records of the spool: whatever is cut off or flipped, the others are found and none is made up."""

from __future__ import annotations

from agent.spool_samples import frame
from hypothesis import given
from hypothesis import strategies as st

from ncclscope_agent.spool_records import FORMAT_VERSION, Header, entries_record, frame_record, header_record, scan
from ncclscope_wire.messages import PROTOCOL_VERSION, Position

HEADER = Header(
    format_version=FORMAT_VERSION,
    protocol_version=PROTOCOL_VERSION,
    agent_id="a",
    session_id="s",
    chapter=3,
    created_ns=17,
    positions={"0:1:abc": Position(end=5, end_line=2, is_complete=True)},
)
RECORDS = [
    header_record(HEADER),
    *(frame_record(frame(number).payload, entries=number // 2) for number in range(1, 6)),
    entries_record(b"entries", number=1),
]
FILE = b"".join(RECORDS)


def test_a_file_gives_what_was_put_into_it() -> None:
    scanned = scan(FILE)
    assert scanned.header == HEADER
    assert [(known.sequence, known.begin, known.end, known.entries) for known in scanned.frames] == [
        (number, 10 * (number - 1), 10 * number, number // 2) for number in range(1, 6)
    ]
    assert scanned.frames[2].payload == frame(3).payload
    assert [(entries.number, entries.payload) for entries in scanned.entries] == [(1, b"entries")]
    assert (scanned.damaged_bytes, scanned.whole_bytes) == (0, len(FILE))


@given(st.integers(0, len(FILE)))
def test_a_file_that_was_cut_gives_all_records_before_the_cut(length: int) -> None:
    scanned = scan(FILE[:length])
    ends = [len(b"".join(RECORDS[: count + 1])) for count in range(len(RECORDS))]
    whole = sum(end <= length for end in ends)
    assert len(scanned.frames) == min(max(whole - 1, 0), 5)
    assert scanned.damaged_bytes == length - (ends[whole - 1] if whole else 0)


@given(st.integers(0, len(FILE) - 1), st.integers(1, 255))
def test_a_flipped_byte_costs_its_record_and_no_other(at: int, flip: int) -> None:
    damaged = bytearray(FILE)
    damaged[at] ^= flip
    scanned = scan(bytes(damaged))
    hit = next(number for number in range(len(RECORDS)) if at < len(b"".join(RECORDS[: number + 1])))
    assert [known.sequence for known in scanned.frames] == [number for number in range(1, 6) if number != hit]
    assert all(known.payload == frame(known.sequence).payload for known in scanned.frames)
    assert (scanned.header is None) == (hit == 0)
    assert scanned.damaged_bytes == len(RECORDS[hit])


@given(st.binary(max_size=400))
def test_any_bytes_are_no_records(data: bytes) -> None:
    scanned = scan(data)
    assert (scanned.header, scanned.frames, scanned.entries) == (None, (), ())
    assert scanned.damaged_bytes == len(data)

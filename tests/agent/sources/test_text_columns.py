from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ncclscope_agent.sources.dictionaries import Templates
from ncclscope_agent.sources.text_columns import WordTable, read_hexadecimals
from ncclscope_wire import tables

NUMBERS = st.integers(0, 2**64 - 1)
DECIMALS = st.integers(0, 10**19 - 1)


def pointer(number: int) -> str:
    return hex(number) if number else "(nil)"


@given(numbers=st.lists(NUMBERS, max_size=30))
def test_hexadecimals_of_any_length_are_read_together(numbers: list[int]) -> None:
    values, good = read_hexadecimals([b"%x" % number for number in numbers])
    assert values.tolist() == numbers
    assert good is None


@pytest.mark.parametrize("text", [b"", b"1g", b"1F", b"0x1", b"-1", b"+1", b"1_0", b" 1", b"\xb2", b"0" * 17])
@pytest.mark.parametrize("number", [b"", b"1"])
def test_what_is_no_hexadecimal_number_is_told_and_spoils_no_other(text: bytes, number: bytes) -> None:
    values, good = read_hexadecimals([b"1f", text, b"ffffffffffffffff", number])
    assert good is not None
    assert good.tolist() == [True, False, True, bool(number)]
    assert values[good].tolist() == [0x1F, 2**64 - 1, 1][: 2 + bool(number)]


@given(rows=st.lists(st.tuples(NUMBERS, NUMBERS, DECIMALS), min_size=1, max_size=30))
@example([(0, 2**64 - 1, 0), (2**64 - 1, 0, 10**19 - 1), (1, 1, 1)])
def test_templates_that_differ_in_buffers_and_count_are_read_together(rows: list[tuple[int, int, int]]) -> None:
    templates = Templates()
    like = np.ones(1, dtype=tables.OPERATION_TEMPLATE)
    first = templates.add(like.tobytes())
    for send, receive, count in rows:
        templates.add_like(
            like.tobytes(), f"sendbuff {pointer(send)} recvbuff {pointer(receive)} count {count}".encode()
        )
    taken = templates.drain_new()
    assert first == 0
    assert templates.size == len(taken) == len(rows) + 1
    assert taken[0] == like[0]
    buffers = ["send_buffer", "recv_buffer", "count"]
    assert [tuple(row) for row in taken[buffers][1:].tolist()] == rows
    assert set(taken["stream"].tolist()) == {1}
    assert not len(templates.drain_new())


def test_a_pointer_with_leading_zeros_and_one_without_are_the_same() -> None:
    assert WordTable([b"0x000000000000001f", b"0x1f", b"(nil)"], words=1).pointers(0).tolist() == [31, 31, 0]

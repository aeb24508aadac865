"""Which bytes of a live log may be released: whole blocks of what was applied, but for the first and a margin."""

from __future__ import annotations

import pytest
from agent.released_logs import SMALL
from hypothesis import given
from hypothesis import strategies as st

from ncclscope_agent.release_plan import ReleaseLimits, block_bytes, pieces, releasable
from ncclscope_agent.sources.nccl_log import MAX_LINE_BYTES


@pytest.mark.parametrize(
    ("applied_bytes", "size", "released", "wanted"),
    [
        (0, 10_000_000, 0, None),
        (SMALL.keep_bytes + SMALL.step_bytes, 10_000_000, 0, None),  # the first block stays
        (4096 + SMALL.keep_bytes + SMALL.step_bytes, 10_000_000, 0, (4096, 4096 + SMALL.step_bytes)),
        (1_000_000, 1_000_000, 0, (4096, (1_000_000 - SMALL.keep_bytes) // 4096 * 4096)),
        (1_000_000, 1_000_000, 900_000, None),  # too little since the last time
        (1_000_000, 999_999, 0, None),  # shorter than what was read: another file
    ],
)
def test_whole_blocks_go_from_the_second_one_to_a_margin_before_what_was_applied(
    applied_bytes: int, size: int, released: int, wanted: tuple[int, int] | None
) -> None:
    found = releasable(applied=applied_bytes, size=size, released=released, block=4096, limits=SMALL)
    assert (None if found is None else (found.begin, found.end)) == wanted


@given(
    applied_bytes=st.integers(0, 1 << 40),
    beyond=st.integers(0, 1 << 30),
    released=st.integers(0, 1 << 40),
    block=st.sampled_from([4096, 12_288, 65_536, 1 << 20]),
)
def test_nothing_goes_that_is_in_the_first_block_or_not_applied(
    applied_bytes: int, beyond: int, released: int, block: int
) -> None:
    limits = ReleaseLimits()
    found = releasable(
        applied=applied_bytes, size=applied_bytes + beyond, released=released, block=block, limits=limits
    )
    if found is not None:
        assert found.begin % block == found.end % block == 0
        assert max(block, released) <= found.begin <= found.end - limits.step_bytes
        assert found.end <= applied_bytes - limits.keep_bytes
        parts = pieces(found, limits)
        assert [part.begin for part in parts] == [found.begin, *(part.end for part in parts[:-1])]
        assert parts[-1].end == found.end
        assert max(part.size for part in parts) <= limits.piece_bytes


def test_a_block_is_one_of_the_file_system_and_whole_pages() -> None:
    assert [block_bytes(told) for told in (4096, 512, 131_072, 0, 1 << 40)] == [4096, 4096, 131_072, 4096, 4096]


def test_a_hole_is_always_longer_than_the_longest_line_so_that_it_is_no_piece_of_one() -> None:
    assert ReleaseLimits().step_bytes > MAX_LINE_BYTES

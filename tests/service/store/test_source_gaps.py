"""The newest gaps of a source are kept one by one, and all of them are counted."""

from __future__ import annotations

from ncclscope_service.store.records import GAPS_KEPT, SourceGaps
from ncclscope_wire.records import SourceGap


def _gap(reason: str, amount: int) -> SourceGap:
    return SourceGap(reason=reason, amount=amount, unit="bytes")


def test_beyond_the_limit_the_oldest_stay_as_a_number() -> None:
    gaps = SourceGaps()
    gaps.extend(_gap("truncated", amount) for amount in range(GAPS_KEPT))
    assert not gaps.forgotten()
    gaps.extend(_gap("gone", amount) for amount in range(3))
    assert len(gaps) == GAPS_KEPT + 3
    assert [gap.amount for gap in gaps] == [*range(3, GAPS_KEPT), 0, 1, 2]
    assert gaps.by_reason == {"truncated": GAPS_KEPT, "gone": 3}
    assert gaps.forgotten() == {"truncated": 3}

"""What agents say becomes labels, texts and dictionaries of bounded size."""

from __future__ import annotations

from dataclasses import replace

import pytest
from wire.sample_batches import log_batch

from ncclscope_service.intake import limits
from ncclscope_service.intake.limits import (
    MAX_TEXT_CHARACTERS,
    ContentLimits,
    Dictionaries,
    DictionaryFullError,
)
from ncclscope_wire.batch import Batch
from ncclscope_wire.messages import AgentHealth
from ncclscope_wire.records import Counts


def counted(**skipped: int) -> Batch:
    return replace(log_batch(0, 1), counts=Counts(skipped=skipped))


def test_what_is_in_bounds_stays_the_same_batch() -> None:
    batch = counted(not_nccl=3)
    assert ContentLimits().bounded(batch) is batch


def test_words_that_are_none_or_too_many_count_as_other_and_nothing_is_lost() -> None:
    limits = ContentLimits(max_words=3)
    batch = counted(**{"a": 1, 'x"} 1\nevil{': 10, "y" * 65: 100, "b": 1000, "c": 10000})
    assert limits.bounded(batch).counts.skipped == {"a": 1, "b": 1000, "other": 10110}
    assert limits.bounded(counted(a=1, d=2)).counts.skipped == {"a": 1, "other": 2}


def test_what_an_agent_says_of_itself_is_bounded_too() -> None:
    limits = ContentLimits(max_words=2)
    health = AgentHealth(skipped={"a": 1}, dropped={"<b>": 2, "c": 3})
    assert limits.bounded_health(health) == AgentHealth(skipped={"a": 1}, dropped={"other": 5})
    fine = AgentHealth(skipped={"a": 1})
    assert limits.bounded_health(fine) is fine


def test_a_long_text_is_cut() -> None:
    batch = replace(log_batch(0, 1), strings=("short", "x" * (MAX_TEXT_CHARACTERS + 1)))
    assert [len(text) for text in ContentLimits().bounded(batch).strings] == [5, MAX_TEXT_CHARACTERS]


def test_a_dictionary_that_is_full_takes_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_ENTRIES", {**limits.MAX_ENTRIES, "strings": 3})
    monkeypatch.setattr(limits, "MAX_STRING_CHARACTERS", 10)
    empty = replace(log_batch(0, 0), strings=())
    known = Dictionaries()
    known.apply(replace(empty, strings=("a", "b")))
    with pytest.raises(DictionaryFullError, match="strings has 4 entries, and 3 is the limit"):
        known.apply(replace(empty, strings=("c", "d")))
    with pytest.raises(DictionaryFullError, match="strings have 12 characters, and 10 is the limit"):
        known.apply(replace(empty, strings=("c" * 10,)))
    known.apply(replace(empty, strings=("c",)))

"""What of a batch is cut to measure before anything is made of it: long texts, and words that become labels.

Words of agents (reasons why lines were skipped, families of lines, reasons of gaps) become values of labels, of which
there must be few. An honest agent has some dozens; what is no word, or one too many, counts as "other".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from ncclscope_wire.batch import Batch
from ncclscope_wire.messages import AgentHealth

MAX_TEXT_CHARACTERS: Final = 64 * 1024
"""Longest text of a dictionary; the rest is cut off. Readers take no longer lines."""
MAX_WORDS: Final = 512
"""Different words of all agents."""
OTHER: Final = "other"
_WORD: Final = re.compile(r"[A-Za-z0-9_.:/ -]{1,64}")


class ContentLimits:
    """The words that are known so far."""

    def __init__(self, *, max_words: int = MAX_WORDS) -> None:
        self._max_words = max_words
        self._words = {OTHER}

    def bounded(self, batch: Batch) -> Batch:
        """The batch within the limits; the same one where it is."""
        counts = batch.counts
        understood, skipped = self._counted(counts.understood), self._counted(counts.skipped)
        if understood is not counts.understood or skipped is not counts.skipped:
            batch = replace(batch, counts=replace(counts, understood=dict(understood), skipped=dict(skipped)))
        if batch.strings and max(map(len, batch.strings)) > MAX_TEXT_CHARACTERS:
            batch = replace(batch, strings=tuple(text[:MAX_TEXT_CHARACTERS] for text in batch.strings))
        if batch.gaps and any(self._word(gap.reason) != gap.reason for gap in batch.gaps):
            batch = replace(batch, gaps=tuple(replace(gap, reason=self._word(gap.reason)) for gap in batch.gaps))
        return batch

    def bounded_health(self, health: AgentHealth) -> AgentHealth:
        """The same for what an agent says of itself."""
        skipped, dropped = self._counted(health.skipped), self._counted(health.dropped)
        if skipped is health.skipped and dropped is health.dropped:
            return health
        return replace(health, skipped=dict(skipped), dropped=dict(dropped))

    def _counted(self, counts: Mapping[str, int]) -> Mapping[str, int]:
        if counts.keys() <= self._words or all(self._word(word) == word for word in counts):
            return counts
        merged = Counter[str]()
        for word, count in counts.items():
            merged[self._word(word)] += count
        return merged

    def _word(self, word: str) -> str:
        if word in self._words:
            return word
        if len(self._words) >= self._max_words or _WORD.fullmatch(word) is None:
            return OTHER
        self._words.add(word)
        return word

"""The text of which several ones have each lost other letters: numbers of calls, step by step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_wire.terms import NO_NUMBER

_COMPARED: Final = 16
_COMPARED_AT_LEAST: Final = 4
_ROUNDS: Final = 8
_LONGEST: Final = 2048
"""Letters of a text; longer ones are compared only if most are whole, which costs nothing."""


def common_text(texts: Sequence[tuple[int, ...]]) -> NDArray[np.int64]:
    """The text that most of these have in common, with the letters that single ones lost; empty if they are too few."""
    if not texts:
        return np.empty(0, np.int64)
    usual, amount = Counter(texts).most_common(1)[0]
    if 2 * amount > len(texts) > 1:
        return np.asarray(usual, np.int64)
    draft = np.asarray(max(texts, key=len), np.int64)
    if len(texts) < _COMPARED_AT_LEAST or len(draft) > _LONGEST:
        return np.empty(0, np.int64)
    compared = [np.asarray(text, np.int64) for text in texts[-_COMPARED:]]
    for _ in range(_ROUNDS):
        agreed = np.zeros(len(draft), np.int64)
        missed: Counter[tuple[int, int]] = Counter()
        for text in compared:
            places = _common(draft, text)
            agreed[places[places >= 0]] += 1
            before = np.maximum.accumulate(np.where(places >= 0, places, NO_NUMBER))
            missed.update(set(zip((before[places < 0] + 1).tolist(), text[places < 0].tolist(), strict=True)))
        lost = {place: letter for (place, letter), votes in sorted(missed.items()) if 2 * votes > len(compared)}
        is_usual = 2 * agreed > len(compared)
        if not lost and is_usual.all():
            break
        draft = np.insert(np.where(is_usual, draft, NO_NUMBER), list(lost), list(lost.values()))
        draft = draft[draft != NO_NUMBER]
    return draft


def _common(draft: NDArray[np.int64], text: NDArray[np.int64]) -> NDArray[np.int64]:
    """The place in the draft of each letter of another in their longest common text; NO_NUMBER."""
    places = first_places(text, draft)
    if len(places) == len(text):  # it lost letters only; the way back below would end at the same places
        return places
    lengths = np.zeros((len(text) + 1, len(draft) + 1), np.int16)
    for nth, letter in enumerate(text.tolist()):
        with_letter = lengths[nth, :-1] + (draft == letter)
        lengths[nth + 1, 1:] = np.maximum.accumulate(np.maximum(lengths[nth, 1:], with_letter))
    places = np.full(len(text), NO_NUMBER, np.int64)
    at, nth = len(draft), len(text)
    while at and nth:
        if lengths[nth, at] == lengths[nth - 1, at]:
            nth -= 1
        elif lengths[nth, at] == lengths[nth, at - 1]:
            at -= 1
        else:
            nth, at = nth - 1, at - 1
            places[nth] = at
    return places


def first_places(letters: NDArray[np.integer], text: NDArray[np.int64]) -> NDArray[np.int64]:
    """The first place in the text like each of these letters, behind that of the one before.

    Up to a letter that has none.
    """
    places = np.empty(len(letters), np.int64)
    at = nth = 0
    while nth < len(letters):
        amount = min(len(letters) - nth, len(text) - at)
        same = letters[nth : nth + amount] == text[at : at + amount]
        run = amount if same.all() else int(same.argmin())
        places[nth : nth + run] = np.arange(at, at + run)
        nth, at = nth + run, at + run
        ahead = np.flatnonzero(text[at:] == letters[nth]) if nth < len(letters) else np.empty(0, np.intp)
        if not len(ahead):
            break
        at += int(ahead[0])
    return places[:nth]

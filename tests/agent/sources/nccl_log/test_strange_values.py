"""Lines of every family with one place that is something else: a number no column holds, or a text that repeats.

A line is read or left out; it neither spoils its batch, which the service would refuse, nor holds the reader: a pattern
that tries all ways to cut a long word takes hours for one line.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

import pytest
from agent.family_samples import samples

from ncclscope_agent.sources.nccl_log.reader import NcclLogReader
from ncclscope_wire.batch import Batch
from ncclscope_wire.codec import decode_message, encode_message
from ncclscope_wire.messages import BatchMessage
from ncclscope_wire.records import Source, SourceKind

_SOURCE: Final = Source(kind=SourceKind.NCCL_LOG, name="log", key="key")
_NUMBERS: Final = (
    *("-1", "2147483648", "-2147483649", "4294967296", "9223372036854775808", "18446744073709551616"),
    *("1" + "0" * 40, "1e400", "nan", "0x" + "f" * 20, "f" * 16, "\N{ARABIC-INDIC DIGIT THREE}", "\N{SUPERSCRIPT TWO}"),
)
_REPEATED: Final = ("x", "1", " x", " 1", "1,", "/1", "-", " ")
_NUMBER: Final = re.compile(r"0x[0-9a-f]+|[0-9a-f]{5,}|\d+(?:\.\d+)?")
_LONGEST_S: Final = 5
"""Lines take below a millisecond; one that is tried in every way takes for ever."""


def read(text: str) -> list[Batch]:
    reader = NcclLogReader(_SOURCE, max_templates=64, max_line_bytes=4096)
    return [*reader.ingest_bytes(f"{text}\n".encode(), 0), *reader.finish(0)]


@contextmanager
def timer() -> Generator[None]:
    """A block in which the timer of the process raises TimeoutError."""

    def stop(_signal: int, _frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.slow
def test_a_number_that_no_column_holds_spoils_no_batch() -> None:
    tried = 0
    for sample in samples():
        for number in _NUMBER.finditer(sample.text):
            for other in _NUMBERS:
                for batch in read(sample.text[: number.start()] + other + sample.text[number.end() :]):
                    decode_message(encode_message(BatchMessage(sequence=1, batch=batch)))
                tried += 1
    assert tried > 10_000


@pytest.mark.slow
def test_no_repeated_text_holds_the_reader() -> None:
    tried = 0
    with timer():
        for sample in samples():
            for nth, place in enumerate(re.finditer(r"\w+|[^\w\s]+|\s+", sample.text)):
                repeated = _REPEATED[nth % len(_REPEATED)] * 200
                for behind in (sample.text[place.end() :], "\x01"):
                    signal.setitimer(signal.ITIMER_REAL, _LONGEST_S)
                    read(sample.text[: place.end()] + repeated + behind)
                    tried += 1
    assert tried > 10_000

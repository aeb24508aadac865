"""Any bytes to the log reader, for `tools/fuzz-log`: nothing raises, every line is counted, cuts change nothing.

The first byte of an input says where it is cut; the written samples are the seeds.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_ROOT / "agents"), str(_ROOT / "tests")]

atheris = importlib.import_module("atheris")  # not typed, and not in the environment of the tests

with atheris.instrument_imports(include=["ncclscope_agent", "ncclscope_wire"]):
    from ncclscope_agent.sources.nccl_log.reader import NcclLogReader
    from ncclscope_wire.batch import Batch
    from ncclscope_wire.codec import decode_message, encode_message
    from ncclscope_wire.messages import BatchMessage
    from ncclscope_wire.records import Source, SourceKind

from agent.family_samples import samples  # noqa: E402

_SOURCE = Source(kind=SourceKind.NCCL_LOG, name="log", key="key")


def read(data: bytes, cut: int) -> list[Batch]:
    """The batches of these bytes in two pieces."""
    reader = NcclLogReader(_SOURCE, max_templates=64, max_line_bytes=2048)
    return [*reader.ingest_bytes(data[:cut], 0), *reader.ingest_bytes(data[cut:], 0), *reader.finish(0)]


def totals(batches: list[Batch]) -> tuple[dict[str, int], dict[str, int], list[object], int]:
    """What must not depend on the cut."""
    understood: dict[str, int] = {}
    skipped: dict[str, int] = {}
    for batch in batches:
        for name, amount in batch.counts.understood.items():
            understood[name] = understood.get(name, 0) + amount
        for name, amount in batch.counts.skipped.items():
            skipped[name] = skipped.get(name, 0) + amount
    records: list[object] = [record for batch in batches for record in batch.communicators]
    records += [fact for batch in batches for fact in batch.facts]
    return understood, skipped, records, sum(len(batch.operations) for batch in batches)


def check(data: bytes) -> None:
    """One input."""
    cut = data[0] * len(data) // 256 if data else 0
    batches = read(data[1:], cut)
    whole = totals(batches)
    assert whole == totals(read(data[1:], 0))
    assert batches[-1].end == len(data[1:])
    assert sum(whole[0].values()) + sum(whole[1].values()) >= batches[-1].end_line
    for batch in batches:
        decode_message(encode_message(BatchMessage(sequence=1, batch=batch)))


def seeds_of_samples() -> Iterator[str]:
    """The written samples; the same with stamps of other forms; and torn ones, behind a launcher's tags and without."""
    texts = [sample.text for sample in samples()]
    yield from texts
    for number, text in enumerate(texts):
        yield ("03/02/26 11:20:33 ", "Mon Mar  2 11:20:33 2026 ", "1772450433.004217 ")[number % 3] + text
        other, at = texts[number - 1], len(text) * (number % 7 + 1) // 8
        yield f"{text}\n{text[:at]}{other}\n{text[at:]}"
        yield f"[1,0]<stdout>:{text[:at]}[1,1]<stdout>:{other}\n[1,0]<stdout>:{text[at:]}"


def main() -> None:
    """Fuzzes until the time is over; the arguments are libFuzzer's."""
    with tempfile.TemporaryDirectory() as seeds:
        for number, text in enumerate(seeds_of_samples()):
            (Path(seeds) / str(number)).write_bytes(b"\x80" + text.encode() + b"\n")
        atheris.Setup([*sys.argv, seeds], check)
        atheris.Fuzz()


if __name__ == "__main__":
    main()

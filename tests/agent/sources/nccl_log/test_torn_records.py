"""Heads and tails of records that others tore: what is joined is what was written, whatever else is done to a file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from random import Random

import pytest
from agent.family_samples import samples
from agent.log_samples import SOURCE, ReadLog, read_log
from hypothesis import given, settings
from hypothesis import strategies as st

from ncclscope_agent.sources.nccl_log.reader import NcclLogReader
from ncclscope_wire.terms import NO_POINTER

_NOT_COMPARED = re.compile(r"line=\d+|logged_at_ns=\w+")
"""The line, and the time, which a record whose stamp was torn off has not."""
HOSTS = ("node17", "node18")


def operation(process: int, number: int, *, size: int = 16, name: str = "AllReduce") -> str:
    """The operation of that number of a process: a hexadecimal opCount, buffers that recur, a length of its own."""
    return (
        f"{HOSTS[process % 2]}:4182{process}:4190{process} [{process}] NCCL INFO {name}: opCount {number:x} "
        f"sendbuff 0x7f{process}a4{number % 7}000000 recvbuff 0x7f{process}a5{number % 7}000000 "
        f"count {size << number % 7} datatype 7 op 0 root 0 "
        f"comm 0x55d{process}c8b3e2a0 [nranks=4] stream 0x55d{process}c7f01b10"
    )


Row = tuple[object, ...]


def rows(log: ReadLog) -> list[Row]:
    """Everything that a row says, but its line."""
    return [tuple(value for name, value in sorted(row.items()) if name != "line") for row in log.operations]


def truth(texts: Sequence[str]) -> Counter[Row]:
    return Counter(rows(read_log("".join(text + "\n" for text in texts).encode())))


def torn(head: str, other: str, cut_at: int, *, tag: str = "", other_tag: str = "") -> bytes:
    return f"{tag}{head[:cut_at]}{other_tag}{other}\n{tag}{head[cut_at:]}\n".encode()


WARM = "".join(operation(process, number) + "\n" for number in range(8) for process in range(3)).encode()
"""Every line that a process writes in these tests, but for its opCount."""


def test_a_head_that_says_which_known_line_it_is_is_joined_with_its_tail() -> None:
    text, other = operation(0, 8), operation(1, 8)
    at = text.index(" op 0 root")
    log = read_log(WARM + torn(text, other, at) + operation(0, 9).encode() + b"\n")
    expected = [*rows(read_log(WARM)), *rows(read_log("\n".join([other, text, operation(0, 9), ""]).encode()))]
    assert rows(log) == expected
    assert log.skipped == {"rejoined": 1}


def test_a_head_without_its_count_is_not_joined() -> None:
    """What follows may be the tail of a later record, where processes overwrote each other."""
    text, other = operation(0, 8), operation(1, 8)
    log = read_log(WARM + torn(text, other, text.index("count ") + 7))
    assert rows(log) == [*rows(read_log(WARM)), *rows(read_log(other.encode() + b"\n"))]
    assert log.skipped == {"torn": 2}


def test_a_tail_of_another_line_is_not_joined() -> None:
    text, other = operation(0, 8), operation(1, 8)
    at = text.index(" op 0 root")
    damaged = torn(text, other, at).replace(b" op 0 root 0 comm 0x55d0", b" op 0 root 0 comm 0x55d2")
    log = read_log(WARM + damaged)
    assert rows(log) == [*rows(read_log(WARM)), *rows(read_log(other.encode() + b"\n"))]
    assert log.skipped == {"torn": 2}


@pytest.mark.parametrize(
    ("tag", "other_tag"),
    [("[1,0]<stdout>:", "[1,1]<stdout>:"), ("[1,0]<stdout>: ", "[1,1]<stdout>: "), ("[default0]:", "[default3]:")],
)
def test_pieces_with_a_launchers_tag_of_one_process_are_joined_wherever_they_were_cut(tag: str, other_tag: str) -> None:
    text, other = operation(0, 8), operation(1, 8)
    beginning = f"{tag}{operation(0, 1)}\n{other_tag}{operation(1, 1)}\n".encode()
    expected = Counter(truth([operation(0, 1), operation(1, 1), text, other]))
    joined = 0
    for cut_at in range(1, len(text)):
        log = read_log(beginning + torn(text, other, cut_at, tag=tag, other_tag=other_tag))
        assert not Counter(rows(log)) - expected, cut_at
        joined += Counter(rows(log)) == expected
    assert joined > 0.9 * len(text)


def test_two_heads_without_tags_leave_only_the_last_open() -> None:
    first, second, other = operation(0, 8), operation(2, 8), operation(1, 8)
    at = first.index(" op 0 root")
    data = WARM + f"{first[:at]}{other}\n{second[:at]}{other}\n{first[at:]}\n{second[at:]}\n".encode()
    log = read_log(data)
    assert rows(log)[len(rows(read_log(WARM))) :] == rows(read_log(f"{other}\n{other}\n".encode()))
    assert log.skipped["torn"] == 4


def test_a_head_whose_tail_never_comes_is_counted_at_the_end() -> None:
    text, other = operation(0, 8), operation(1, 8)
    head = text[: text.index(" op 0 root")]
    assert read_log(WARM + f"{head}{other}\n".encode()).skipped == {"torn": 1}


def test_a_name_whose_begin_was_torn_off_is_no_host() -> None:
    text, other = operation(0, 8), operation(1, 8)
    for cut_at in range(1, len("node17")):
        log = read_log(WARM + torn(text, other, cut_at))
        assert {row["host"] for row in log.operations} == set(HOSTS)


def test_a_host_that_ends_another_is_believed_when_it_comes_again_and_again() -> None:
    glued = "4" + operation(0, 0)
    log = read_log("".join([glued + "\n", *(operation(0, number) + "\n" for number in range(20))]).encode())
    assert [row["host"] for row in log.operations][-12:] == ["node17"] * 12


@st.composite
def _interleaved(draw: st.DrawFn) -> tuple[list[str], bytes]:
    """Records of three processes, some torn by one of another process; nothing is lost."""
    random = Random(draw(st.integers(0, 2**32)))
    tags = draw(st.sampled_from([("", "", ""), ("[1,0]<stdout>:", "[1,1]<stdout>:", "[1,2]<stdout>:")]))
    texts, data = [], bytearray(WARM if not tags[0] else b"")
    for process, tag in enumerate(tags if tags[0] else ()):
        texts += [operation(process, number) for number in range(8)]
        data += "".join(f"{tag}{operation(process, number)}\n" for number in range(8)).encode()
    if not tags[0]:
        texts += WARM.decode().splitlines()
    for number in range(8, 8 + draw(st.integers(1, 12))):
        one, other = random.sample(range(3), 2)
        head, whole = operation(one, number), operation(other, number)
        data += torn(head, whole, random.randrange(1, len(head)), tag=tags[one], other_tag=tags[other])
        texts += [head, whole]
    return texts, bytes(data)


@settings(max_examples=60)
@given(_interleaved())
def test_whatever_is_torn_no_value_is_invented(made: tuple[list[str], bytes]) -> None:
    texts, data = made
    log = read_log(data)
    assert not Counter(rows(log)) - truth(texts)
    assert log.skipped["torn"] + log.skipped["rejoined"] + log.skipped["no_prefix"] + log.skipped["not_nccl"] > 0


def overwritten(random: Random) -> tuple[list[str], bytes]:
    """What is left of a file that three processes opened each for itself, without O_APPEND."""
    streams = [[operation(process, number) for number in range(60)] for process in range(3)]
    for process, stream in enumerate(streams):
        stream.insert(
            0,
            f"{HOSTS[process % 2]}:4182{process}:4190{process} [{process}] NCCL INFO Using network IB" + "x" * process,
        )
    offsets, data, waiting = [0, 0, 0], bytearray(), [list(stream) for stream in streams]
    while any(waiting):
        process = random.choice([number for number, stream in enumerate(waiting) if stream])
        record = (waiting[process].pop(0) + "\n").encode()
        end = offsets[process] + len(record)
        data.extend(bytes(max(0, end - len(data))))
        data[offsets[process] : end] = record
        offsets[process] = end
    return [text for stream in streams for text in stream], bytes(data)


@pytest.mark.parametrize("seed", range(12))
def test_records_of_processes_that_overwrote_each_other_are_not_mixed(seed: int) -> None:
    """Records of one length, out of step by a few bytes: a head and the tail behind it look like one record.

    But for the host: letters that were left in front of one that was not seen before are taken for its begin.
    """
    texts, data = overwritten(Random(seed))
    assert not _without_hosts(rows(read_log(data))) - _without_hosts(truth(texts).elements())


def _without_hosts(some: Iterable[Row]) -> Counter[Row]:
    """Without streams too, of which each process has one: the log may not say it yet where one was cut off."""
    streams = {0x55D0C7F01B10, 0x55D1C7F01B10, 0x55D2C7F01B10, NO_POINTER}
    return Counter(
        tuple(value for value in row if value not in streams and not (isinstance(value, str) and "node" in value))
        for row in some
    )


@pytest.mark.parametrize("cut_at", [1, 40, 77, 100, 170, 190])
def test_joining_does_not_depend_on_how_the_bytes_come(cut_at: int) -> None:
    text, other = operation(0, 8), operation(1, 8)
    data = WARM + torn(text, other, cut_at) + torn(operation(2, 9), other, 190)
    whole = read_log(data)
    for log in (read_log(data, range(len(WARM), len(data))), read_log(data, [len(data) - 200])):
        assert rows(log) == rows(whole)
        assert log.skipped == whole.skipped


def _lines(texts: Sequence[str]) -> Iterator[str]:
    for text in texts:
        yield from text.split("\n")


@pytest.mark.parametrize(
    "text", sorted({line for sample in samples() for line in _lines([sample.text]) if " NCCL INFO " in line})[:120]
)
def test_any_record_torn_behind_a_tag_is_joined_or_counted(text: str) -> None:
    """Facts, too: the record of the two pieces is that of the whole line, or there is none."""
    other = "node17:41820:41901 [0] NCCL INFO Using network IB"
    whole = _facts(f"[1,0]<stdout>:{text}\n[1,1]<stdout>:{other}\n")
    for cut_at in range(5, len(text) - 1, 7):
        log = f"[1,0]<stdout>:{text[:cut_at]}[1,1]<stdout>:{other}\n[1,0]<stdout>:{text[cut_at:]}\n"
        made = _facts(f"[1,1]<stdout>:{other}\n{log}")
        assert not made.keys() - whole.keys()


def _facts(text: str) -> Counter[str]:
    reader = NcclLogReader(SOURCE)
    batches = [*reader.ingest_bytes(text.encode()), *reader.finish()]
    return Counter(
        _NOT_COMPARED.sub("", repr(record)) for batch in batches for record in (*batch.facts, *batch.communicators)
    )

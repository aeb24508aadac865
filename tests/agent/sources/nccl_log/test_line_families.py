from __future__ import annotations

import os

import pytest
from agent.family_samples import FILE, Sample, record_of, samples
from agent.log_samples import NODE, SOURCE, operation_line, put_together, read_log
from hypothesis import given, settings
from hypothesis import strategies as st

from ncclscope_agent.sources.nccl_log.reader import NcclLogReader
from ncclscope_wire import facts
from ncclscope_wire.facts import FACT_TYPES

SAMPLES = samples()
OTHER = "node17:41820:41901 [0] NCCL INFO "


def lines(*texts: str) -> bytes:
    return "".join(text + "\n" for text in texts).encode()


@pytest.mark.parametrize("sample", SAMPLES, ids=[f"{sample.version}-{sample.family}" for sample in SAMPLES])
def test_each_form_of_each_version_is_read_into_its_family(sample: Sample) -> None:
    log = read_log(lines(sample.text))
    assert set(log.understood) == {sample.family}
    assert set(log.skipped) <= {"not_nccl", "torn", "torn_block", "torn_table"}


def test_each_form_gives_the_record_that_stands_beside_it() -> None:
    found = [record_of(sample.text) for sample in SAMPLES]
    if os.environ.get("NCCLSCOPE_UPDATE_GOLDEN") == "1":
        titles = FILE.read_text().splitlines()
        rewritten = [[*titles[3 * at : 3 * at + 2], record] for at, record in enumerate(found)]
        FILE.write_text("".join(f"{line}\n" for group in rewritten for line in group))
        return
    assert found == [sample.record for sample in SAMPLES]


def test_every_record_of_the_wire_has_a_sample_or_is_made_of_one() -> None:
    seen = {record_of(sample.text).partition("(")[0] for sample in SAMPLES}
    # RAS, dumps, counters and traces of the profiler say these.
    others = {"RasMissing", "RasBehind", "FlightRecord", "MachineCondition", "ProcessGroup"}
    assert set(FACT_TYPES) - seen - others <= {"OtherWarning"}


# What a cut or a number out of its range does


@pytest.mark.parametrize(
    "text",
    [
        "Channel 99999999999/02 : 0 1 2",
        "Ring 99999999999 : 3 -> 0 -> 1",
    ],
)
def test_a_number_that_nccl_cannot_print_makes_no_record(text: str) -> None:
    log = read_log(lines(NODE + text))
    assert log.skipped == {"out_of_range": 1}
    assert not log.understood


def test_a_bus_id_of_more_than_64_bits_makes_no_record() -> None:
    log = read_log(lines(f"{NODE}Channel 00 : 2[81{'0' * 30}] -> 3[c1000] via P2P/IPC"))
    assert log.skipped == {"other_nccl": 1}


@pytest.mark.parametrize(
    "text",
    [
        "8 coll channels, 0 collnet channels, 8 nvls channels, 16 p2p channels, 2 p2p chann",
        "Init timings - ncclCommInitRank: rank 2 nranks 4 total 0.61 (kernels 0.19, rest 0.02)",
        "Channel 00/0 : 2[2] -> 3[3] via P2P/",
        "Channel 00/0 : 2[2] -> 3[3] via NET/IB",
        "Trees [0] 3/-1/-1->2",
        "RAS peer 0: socket 10.0.0.17<33777>, pid",
        "something new",
    ],
)
def test_a_line_that_lacks_a_field_has_no_family(text: str) -> None:
    log = read_log(lines(NODE + text))
    assert log.skipped == {"other_nccl": 1}
    assert not log.understood


@pytest.mark.parametrize(
    ("text", "is_read"),
    [
        ("bootstrapSplit: rank 1 nranks 2 color 0 key 2 prev 0 next 0 - DONE", True),
        ("24 coll channels, 0 collnet channels, 16 nvls channels, 32 p2p channels, 8 p2p channels per peer", True),
        ("P2P Chunksize set to 1310", False),
        ("Channel 00/0 : 2[2] -> 3[3] via P2P/CUMEM", False),
        ("comm 0x55d0c8b3e2a0 rank 2 nRanks 8 nNodes 2 localRanks 4 localRank 2 MNNVL 0", False),
    ],
)
def test_in_front_of_another_record_only_what_cannot_have_been_cut_is_read(text: str, is_read: bool) -> None:
    log = read_log(lines(operation_line(prefix=OTHER), NODE + text + operation_line(prefix=OTHER)))
    assert len(log.operations) == 2
    assert log.skipped == ({} if is_read else {"torn": 1})


def test_a_trees_line_at_nccls_limit_lacks_its_last_node_and_says_so() -> None:
    nodes = " ".join(f"[{channel}] {channel}/-1/-1->2->1" for channel in range(60))
    room = 1023 - len(NODE)
    [fact] = facts_of(NODE + f"Trees {nodes}"[:room])
    assert isinstance(fact, facts.TreeNeighbours)
    assert fact.is_cut
    assert all(node.down == (node.channel, -1, -1) and (node.up, node.rank) == (1, 2) for node in fact.nodes)
    assert len(fact.nodes) == f"Trees {nodes}"[:room].count("[") - 1


def test_a_ring_line_of_twenty_ranks_may_have_more_up_to_2_22() -> None:
    ranks = "".join(f" {rank:3d}" for rank in range(20))
    [old, new] = facts_of(NODE + f"Channel 00/02 :{ranks}", NODE + "Channel 00/24 : " + " ".join(map(str, range(20))))
    assert isinstance(old, facts.RingOrder)
    assert isinstance(new, facts.RingOrder)
    assert (old.is_cut, new.is_cut) == (True, False)
    assert old.ranks == new.ranks == tuple(range(20))


def test_a_warning_printed_as_info_is_still_that_warning() -> None:
    [fact] = facts_of(NODE + "transport/net_ib.cc:95 NET/IB : mlx5_0:1 async fatal event: port error")
    assert isinstance(fact, facts.IbEvent)
    assert fact.severity == "fatal"


def test_a_record_says_where_it_stands_who_wrote_it_and_when() -> None:
    [fact] = facts_of("", "[2026-03-02 11:20:33.004217] " + NODE + "Using network IB")
    assert (fact.line, fact.host, fact.pid, fact.tid) == (2, "node17", 41822, 41903)
    assert fact.logged_at_ns == 1_772_450_433_004_217_000


def test_the_matrix_ends_with_the_first_line_that_is_no_row() -> None:
    title = NODE + "Enabled NCCL Func/Proto/Algo Matrix:"
    row = "    AllReduce |        1         0         1   |             1              1 "
    log = read_log(lines(title, row, NODE + "Using network IB", row))
    assert log.understood == {"function_matrix": 2, "network": 1}
    assert log.skipped == {"not_nccl": 1}


# Any cuts, any bytes


def facts_of(*texts: str) -> list[facts.Fact]:
    reader = NcclLogReader(SOURCE)
    return [fact for batch in [*reader.ingest_bytes(lines(*texts)), *reader.finish()] for fact in batch.facts]


_TEXTS = st.lists(
    st.tuples(st.sampled_from([sample.text for sample in SAMPLES]), st.sampled_from(["\n", "\n", "\n", "\r\n", ""])),
    max_size=12,
)


@settings(max_examples=60)
@given(pieces=_TEXTS, data=st.data())
def test_all_families_read_the_same_however_they_are_cut(pieces: list[tuple[str, str]], data: st.DataObject) -> None:
    log = "".join(text + end for text, end in pieces).encode()
    cuts = data.draw(st.lists(st.integers(0, len(log)), max_size=6))
    found: list[object] = []
    for edges in ([], range(1, len(log)), cuts):
        reader = NcclLogReader(SOURCE, lines_per_batch=3)
        at = [0, *sorted(edges), len(log)]
        batches = [batch for i in range(len(at) - 1) for batch in reader.ingest_bytes(log[at[i] : at[i + 1]], 1)]
        batches += reader.finish(1)
        found.append((put_together(batches), [fact for batch in batches for fact in batch.facts]))
    assert found[0] == found[1] == found[2]


@settings(max_examples=300)
@given(
    sample=st.sampled_from(SAMPLES),
    at=st.integers(0, 400),
    put=st.binary(max_size=12) | st.sampled_from([b"", b"9" * 30, b"-", b"/", b"[", b"0x", b"\xff", b"->", b"\0"]),
    removed=st.integers(0, 30),
)
def test_a_damaged_line_gives_a_record_or_a_count(sample: Sample, at: int, put: bytes, removed: int) -> None:
    text = sample.text.encode()
    damaged = text[:at] + put + text[at + removed :] + b"\n"
    log = read_log(damaged)
    assert log.end == len(damaged)
    assert sum(log.understood.values()) + sum(log.skipped.values()) >= log.end_line


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.family)
def test_a_line_of_repeated_pieces_takes_no_longer_than_another(sample: Sample) -> None:
    # A pattern that backtracks would take hours here.
    message = sample.text.rpartition("NCCL INFO ")[2].rpartition("NCCL WARN ")[2]
    for piece in (message, message[: len(message) // 2], message[-6:], message[:3] + " 1"):
        text = NODE + message[: len(message) // 2] + piece * (20_000 // max(1, len(piece)))
        assert read_log(lines(text)).end_line == 1 + text.count("\n")

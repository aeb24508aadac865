"""Log lines against regular expressions that were tested on NCCL's format strings and on real logs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from simulator.jobs import Simulate, log_lines, truth

from ncclscope_simulator.version import SHORT_FORMS

HEAD = re.compile(
    r"^(?P<pre>.*?)(?P<host>[^\s:/%\[\]]+):(?P<pid>\d+):(?P<tid>\d+) (?:\[(?P<dev>-?\d+)\] )?"
    r"(?P<loc>(?:(?!NCCL )\S.{0,160}? )?)NCCL (?P<lvl>INFO|WARN|TRACE|CALL) (?P<msg>.*)$"
)
COLL = re.compile(
    r"^(?P<op>\w+): opCount (?P<opc>[0-9a-f]+) sendbuff (?P<s>0x[0-9a-f]+|\(nil\)) recvbuff (?P<r>0x[0-9a-f]+|\(nil\))"
    r" count (?P<n>\d+) datatype (?P<dt>-?\d+) op (?P<red>-?\d+) root (?P<root>-?\d+) comm (?P<comm>0x[0-9a-f]+)"
    r" \[nranks=(?P<nr>\d+)\] stream (?P<st>0x[0-9a-f]+|\(nil\))\s*$"
)
TUNE = re.compile(
    r"^(?:(?P<op>\w+)(?: \[(?P<kind>Symmetric|Copy Engine|Hierarchical CE)\])?: )?(?P<b>\d+) Bytes -> "
    r"(?:Algo (?P<a>\S+) proto (?P<p>\S+)(?: time (?P<t>[\d.]+)| channel\{Lo\.\.Hi\}=\{(?P<lo>\d+)\.\.(?P<hi>\d+)\}))$"
)
INIT = re.compile(
    r"^(?:\[Rank (?P<rk2>\d+)\] )?(?:(?P<api>ncclComm\w+) )?comm (?P<comm>0x[0-9a-f]+) rank (?P<rk>-?\d+)"
    r" n[rR]anks (?P<nr>-?\d+) cudaDev (?P<cd>-?\d+)(?: nvmlDev (?P<nd>-?\d+))?(?: busId (?P<bus>[0-9a-f]+))?"
    r"(?: parent (?P<par>0x[0-9a-f]+)(?: (?:split|child)Count (?P<cc>\d+))? color (?P<col>-?\d+) key (?P<key>-?\d+))?"
    r"(?: commId 0x(?P<cid>[0-9a-f]+))? ?- (?P<ev>Init START|Init COMPLETE|Destroy COMPLETE)"
)
CHAN = re.compile(
    r"^Channel (?P<ch>\d+)(?:/(?P<conn>\d+))? : (?P<a>\d+)\[(?P<ad>[0-9a-f]+)\] -> (?P<b>\d+)\[(?P<bd>[0-9a-f]+)\]"
    r"(?: \[(?P<dir>send|receive)\])? via (?P<via>.+?)\s*$"
)
RING = re.compile(r"^Channel (?P<ch>\d+)/(?P<n>\d+) :(?P<ranks>(?: +\d+)+)(?P<cut>\.\.\.)?\s*$")

VERSIONS = sorted(SHORT_FORMS, key=lambda text: int(text.split(".")[1]))


def _minor(version: str) -> int:
    return int(version.split(".")[1])


def _messages(folder: Path, level: str = "INFO") -> list[str]:
    matches = [HEAD.match(line) for line in log_lines(folder)]
    return [match["msg"] for match in matches if match is not None and match["lvl"] == level]


@pytest.mark.parametrize("version", VERSIONS)
def test_init_lines_have_the_fields_of_their_version(version: str, simulate: Simulate) -> None:
    minor = _minor(version)
    folder = simulate(nccl=version, capture="none")
    matches = [INIT.match(message) for message in _messages(folder) if "- Init" in message or "Destroy" in message]
    assert all(matches)
    events = {match["ev"] for match in matches if match is not None}
    assert events == (
        {"Init COMPLETE"}
        | ({"Init START"} if minor >= 18 else set())
        | ({"Destroy COMPLETE"} if minor >= 12 else set())
    )
    inits = [match for match in matches if match is not None and match["ev"] == "Init COMPLETE"]
    whole = [match for match in inits if match["par"] is None and (match["api"] or "") != "ncclCommSplit"]
    assert all((match["cid"] is not None) == (minor >= 16) for match in whole)
    assert all((match["nd"] is not None) == (minor >= 18) for match in inits)
    splits = [match for match in inits if match["par"] is not None]
    assert bool(splits) == (minor >= 21)
    assert all((match["cid"] is not None) == (minor < 23) for match in splits)
    assert all((match["cc"] is not None) == (minor >= 24) for match in splits)


def test_split_start_glues_the_dash_to_the_key_from_2_23(simulate: Simulate) -> None:
    later = _messages(simulate(nccl="2.28", capture="none"))
    earlier = _messages(simulate(nccl="2.21", capture="none"))
    assert any(re.search(r"splitCount \d+ color \d+ key \d+- Init START$", message) for message in later)
    assert not any(re.search(r"\d- Init START$", message) for message in earlier)
    newest = _messages(simulate(nccl="2.30", capture="none"))
    assert any(re.match(r"\[Rank \d+\] ncclCommInitRankConfig .* - Init START$", message) for message in newest)
    assert any("childCount 1 " in message for message in newest)


@pytest.mark.parametrize("version", VERSIONS)
def test_tuning_lines_come_from_communicator_rank_0_alone(version: str, simulate: Simulate) -> None:
    minor = _minor(version)
    folder = simulate(nccl=version, capture="none")
    lines = [message for message in _messages(folder) if "Bytes -> " in message]
    matches = [TUNE.match(message) for message in lines]
    assert all(matches)
    tuned = {"AllReduce", "AllGather", "ReduceScatter", "Broadcast"}
    expected = [row for row in truth(folder) if row["comm_rank"] == 0 and row["comm_size"] > 1 and row["op"] in tuned]
    assert len(lines) == (len(expected) if minor >= 20 else 0)
    if minor >= 24:
        channels = sorted(int(match["hi"]) + 1 for match in matches if match is not None)
        assert channels == sorted(row["grid"] for row in expected)
    elif minor >= 20:
        assert all(match is not None and match["t"] and match["a"].isdigit() for match in matches)
        assert all((match is not None and match["op"] is not None) == (minor >= 23) for match in matches)


def test_tuning_bytes_are_of_all_ranks_up_to_2_23_and_per_rank_later(simulate: Simulate) -> None:
    def gathered(version: str) -> set[int]:
        folder = simulate(nccl=version, capture="none", tp=4, dp=1)
        return {int(m["b"]) for m in map(TUNE.match, _messages(folder)) if m is not None and m["op"] == "AllGather"}

    assert gathered("2.23") == {2048 * 2048 * 2}
    assert gathered("2.24") == {2048 * 2048 * 2 // 4}


def test_gather_and_broadcast_log_bytes_up_to_2_21(simulate: Simulate) -> None:
    def types(version: str) -> set[tuple[str, str]]:
        lines = map(COLL.match, _messages(simulate(nccl=version, capture="none")))
        return {(m["op"], m["dt"]) for m in lines if m is not None and m["op"] in {"AllGather", "Broadcast"}}

    assert types("2.21") == {("AllGather", "0"), ("Broadcast", "0")}
    assert types("2.22") == {("AllGather", "9"), ("Broadcast", "4")}


def test_a_send_shows_its_buffer_as_recvbuff_from_2_12(simulate: Simulate) -> None:
    def column(version: str) -> set[bool]:
        lines = map(COLL.match, _messages(simulate(nccl=version, capture="none")))
        return {m["s"] == "(nil)" for m in lines if m is not None and m["op"] == "Send"}

    assert column("2.11") == {False}
    assert column("2.12") == {True}


def test_stamps_are_the_hosts_own_clock_in_utc(simulate: Simulate) -> None:
    folder = simulate(nccl="2.28", capture="none")
    assert all(re.match(r"^\[2026-03-02 1[01]:\d\d:\d\d\.\d{6}\] node0\d:", line) for line in log_lines(folder))
    bare = simulate(nccl="2.25", capture="none")
    assert all(line.startswith("node0") for line in log_lines(bare))


def test_the_bare_version_line_goes_to_stdout_up_to_2_21(simulate: Simulate) -> None:
    older, newer = simulate(nccl="2.21", capture="none"), simulate(nccl="2.22", capture="none")
    assert (older / "logs" / "stdout.node00.log").read_text() == "NCCL version 2.21.5+cuda12.4\n"
    assert not any("NCCL version" in line for line in log_lines(older))
    assert not list((newer / "logs").glob("stdout*"))
    assert any(line.endswith("[0] NCCL INFO NCCL version 2.22.3+cuda12.4") for line in log_lines(newer))


@pytest.mark.parametrize(("version", "starts_per_send"), [("2.21", 1), ("2.28", 0)])
def test_call_lines_show_groups(version: str, starts_per_send: int, simulate: Simulate) -> None:
    folder = simulate(nccl=version, capture="none", calls=True)
    calls = _messages(folder, "CALL")
    rows = truth(folder)
    peers = [row for row in rows if row["op"] in {"Send", "Recv"}]
    groups = len({row["launch_id"] for row in peers})
    assert calls.count("ncclGroupStart()") == groups + starts_per_send * len(peers)
    assert calls.count("ncclGroupEnd()") == groups + starts_per_send * len(peers)
    assert sum(not call.startswith("ncclGroup") for call in calls) == len(rows)


def test_transports_rings_and_topology_have_known_shapes(simulate: Simulate) -> None:
    for version in ("2.11", "2.18.1", "2.20", "2.28"):
        messages = _messages(simulate(nccl=version, capture="none"))
        assert all(CHAN.match(m) for m in messages if " via " in m)
        assert all(RING.match(m) for m in messages if re.match(r"Channel \d+/\d+ : *\d+ +\d", m))
        assert any(CHAN.match(m) for m in messages)
        starts = [m for m in messages if m.startswith("=== System")]
        word = "maxWidth" if version == "2.11" else "maxBw"
        assert starts
        assert all(re.match(rf"=== System : {word} \d+\.\d total\w+ \d+\.\d ===$", m) for m in starts)
        assert messages.count("==========================================") == len(starts)


_NUMBER = re.compile(r"0x[0-9a-f]+|\b[0-9a-f]*\d[0-9a-f]*\b|\b\d+\b")


def _shape(line: str) -> str:
    match = HEAD.match(line)
    assert match is not None
    return _NUMBER.sub("#", match["msg"])


@pytest.mark.corpus
def test_operation_and_tuning_lines_have_the_shape_of_a_real_2_27_log(simulate: Simulate, corpus: Path) -> None:
    real = (corpus / "nccl_logs" / "timez-zx-nccl-tests-a100pcie" / "nccl.log").read_text(errors="replace").splitlines()
    ours = log_lines(simulate(nccl="2.27.7", capture="none"))
    for mark in ("AllReduce: opCount ", "AllReduce: "):
        theirs = {_shape(line) for line in real if HEAD.match(line) and f"INFO {mark}" in line}
        made = {_shape(line) for line in ours if f"INFO {mark}" in line}
        wanted = {re.sub(r"Algo \w+ proto \w+", "Algo A proto P", shape) for shape in theirs}
        got = {re.sub(r"Algo \w+ proto \w+", "Algo A proto P", shape) for shape in made}
        assert got == wanted

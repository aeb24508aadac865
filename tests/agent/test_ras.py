"""NCCL's RAS is asked over a real socket: what is wrong is said once, and a port without an answer is a state."""

from __future__ import annotations

import socket

import pytest
from agent.ras_server import RasServer, json_status, missing, rank, text_status

from ncclscope_agent.node.ras_port import RasFollower
from ncclscope_agent.sources.ras import LOOKS, RasWatch, Trouble, read_answer
from ncclscope_wire.batch import Batch
from ncclscope_wire.errors import FormatError
from ncclscope_wire.facts import Fact, RasBehind, RasMissing

SECOND = 1_000_000_000
WORLD, PAIR = "0xc0ffee", "0xbeef"

MISMATCH = {
    "2.24.3": (
        "#0-0 (27a079b828ff1a75) MISMATCH\n"
        "  Communicator ranks have different collective operation counts\n"
        "  30 ranks have launched up to operation 6650\n"
        "  2 ranks have launched up to operation 6649\n"
        "  Rank 5 -- GPU 5 managed by process 483077 on node 172.16.64.210\n"
        "  Rank 9 -- GPU 1 (NVML 3) managed by process 483090 on node 172.16.64.211\n\n"
    ),
    "2.27.5": (
        "#0-0 (27a079b828ff1a75) MISMATCH\n"
        "  Communicator ranks have different AllReduce operation counts\n"
        "  31 ranks have launched up to operation 6650\n"
        "  Rank 5 has launched up to operation 6649 -- GPU 5 managed by process 483077 on node 172.16.64.210\n\n"
        "  Communicator ranks have different Broadcast operation counts\n"
        "  31 ranks have launched up to operation 2\n"
        "  Rank 5 has not launched any operations -- GPU 5 managed by process 483077 on node 172.16.64.210\n\n"
    ),
}
DEAD = (
    "DEAD\n  1 job process is considered dead (unreachable via the RAS network)\n"
    "  Process 483080 on node 172.16.64.210 managing GPU 7\n\n"
    "#0-0 (27a079b828ff1a75) INCOMPLETE\n  Missing communicator data from 1 rank\n"
    "  Rank 7 -- GPU 7 managed by process 483080 on node 172.16.64.210\n\n"
)


def asked(follower: RasFollower, times: int = 1) -> list[Batch]:
    return [batch for nth in range(times) for batch in follower.poll(nth * SECOND)]


def facts_of(batches: list[Batch]) -> list[Fact]:
    return [fact for batch in batches for fact in batch.facts]


def behind(_: bool) -> bytes:
    ranks = [rank(number, AllReduce=100 if number == 5 else 101) for number in range(8)]
    return json_status((WORLD, ranks, []), (PAIR, [rank(4, AllGather=7), rank(5, AllGather=7)], []))


def test_a_rank_that_stays_behind_is_reported_once_with_its_place() -> None:
    with RasServer(behind, knows_json=True) as server:
        follower = RasFollower("127.0.0.1", server.port)
        before = asked(follower, LOOKS - 1)
        (fact,) = facts_of(asked(follower, 4))
    assert [batch.counts.understood for batch in before] == [{"ras_answer": 1}]
    assert isinstance(fact, RasBehind)
    assert (fact.communicator, fact.size, fact.operation) == (0xC0FFEE, 8, "AllReduce")
    assert (fact.launched, fact.others, fact.ranks_behind) == (100, 101, 1)
    assert (fact.ranks, fact.global_ranks, fact.nodes, fact.pids) == ((5,), (5,), ("10.0.0.1",), (105,))
    assert server.requests[:4] == ["CLIENT PROTOCOL 2", "TIMEOUT 3", "SET FORMAT json", "VERBOSE STATUS"]


def test_ranks_that_go_on_are_not_behind() -> None:
    watch = RasWatch()
    for nth in range(2 * LOOKS):
        ranks = [rank(number, AllReduce=100 + nth + (number > 3)) for number in range(8)]
        assert not watch.ingest_answer(read_answer(json_status((WORLD, ranks, []))), nth)


def test_dead_processes_are_reported_at_once_and_missing_ones_when_they_stay_away() -> None:
    present = [rank(number, AllReduce=1) for number in range(6)]
    answer = read_answer(json_status((WORLD, present, [missing(6, dead=True), missing(7)])))
    watch = RasWatch()
    (dead,) = watch.ingest_answer(answer, 0)
    assert isinstance(dead, RasMissing)
    assert (dead.state, dead.global_ranks, dead.pids) == ("dead", (6,), (106,))
    later = [fact for nth in range(LOOKS) for fact in watch.ingest_answer(answer, nth)]
    assert [fact.state for fact in later if isinstance(fact, RasMissing)] == ["unresponsive"]


def test_a_rank_that_left_a_communicator_is_told_from_one_that_cannot_be_reached() -> None:
    answer = json_status((WORLD, [rank(number) for number in range(7)], [missing(7, unresponsive=False)]))
    assert [trouble.state for trouble in read_answer(answer)] == ["left"]


@pytest.mark.parametrize("version", ["2.24.3", "2.27.5"])
def test_servers_without_json_are_asked_for_text(version: str) -> None:
    with RasServer(lambda _: text_status(version, DEAD, MISMATCH[version]), knows_json=False) as server:
        follower = RasFollower("127.0.0.1", server.port)
        facts = facts_of(asked(follower, LOOKS))
    dead = [fact for fact in facts if isinstance(fact, RasMissing) and fact.state == "dead"]
    assert [(fact.pids, fact.nodes) for fact in dead] == [((483080,), ("172.16.64.210",))]
    incomplete = [fact for fact in facts if isinstance(fact, RasMissing) and fact.state == "unresponsive"]
    assert [(fact.communicator, fact.ranks) for fact in incomplete] == [(0x27A079B828FF1A75, (7,))]
    slow = [fact for fact in facts if isinstance(fact, RasBehind)]
    told = [(fact.operation, fact.launched, fact.others, fact.ranks) for fact in slow]
    assert told == (
        [("collective", 6649, 6650, (5, 9))]
        if version == "2.24.3"
        else [("AllReduce", 6649, 6650, (5,)), ("Broadcast", 0, 2, (5,))]
    )
    assert server.requests.count("SET FORMAT json") == 1


def test_an_answer_without_trouble_says_nothing() -> None:
    assert read_answer(text_status("2.24.3")) == []
    assert read_answer(json_status((WORLD, [rank(number, AllReduce=4) for number in range(4)], []))) == []


@pytest.mark.parametrize(
    ("as_json", "as_text"),
    [
        pytest.param(behind(True)[:-40], b"", id="JSON"),
        pytest.param(*[text_status("2.24.3", DEAD)[:-60]] * 2, id="text"),
        pytest.param(b"", b"", id="nothing"),
        pytest.param(*[b"HTTP/1.1 400 Bad Request\r\n\r\n"] * 2, id="another program"),
    ],
)
@pytest.mark.parametrize("knows_json", [True, False])
def test_an_answer_that_is_cut_off_is_a_state(as_json: bytes, as_text: bytes, knows_json: bool) -> None:
    with RasServer(lambda json: as_json if json else as_text, knows_json=knows_json) as server:
        follower = RasFollower("127.0.0.1", server.port)
        batches = asked(follower, 3)
    assert [(batch.counts.skipped, batch.facts, batch.gaps) for batch in batches] == [({"ras_cut": 1}, (), ())]
    assert follower.statistics().skipped == {"ras_cut": 3}


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(text_status("2.24.3", DEAD, MISMATCH["2.24.3"]), id="2.24.3"),
        pytest.param(text_status("2.27.5", DEAD, MISMATCH["2.27.5"]), id="2.27.5"),
        pytest.param(behind(True), id="2.28.7"),
    ],
)
def test_an_answer_that_is_cut_anywhere_says_nothing_that_the_whole_does_not(answer: bytes) -> None:
    whole, told = read_answer(answer), 0
    for cut in range(len(answer)):
        try:
            part = read_answer(answer[:cut])
        except FormatError:
            continue
        told += 1
        for trouble in part:
            same = [each for each in whole if trouble._replace(ranks=()) == each._replace(ranks=())]
            assert any({*trouble.ranks} <= {*each.ranks} for each in same), answer[:cut][-80:]
    assert told < len(answer) / 2


def test_a_port_at_which_nobody_listens_or_answers_is_a_state_that_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
    assert [batch.counts.skipped for batch in asked(RasFollower("127.0.0.1", port), 2)] == [{"ras_refused": 1}]
    with RasServer(behind, knows_json=True, is_silent=True) as server:
        follower = RasFollower("127.0.0.1", server.port, seconds=0.05)
        assert [batch.counts.skipped for batch in asked(follower, 2)] == [{"ras_silent": 1}]


def test_after_a_reset_positions_go_on_and_everything_is_said_again() -> None:
    with RasServer(behind, knows_json=True) as server:
        follower = RasFollower("127.0.0.1", server.port)
        first = asked(follower, LOOKS)
        follower.reset({})
        again = asked(follower, LOOKS)
    assert [(batch.begin, batch.end) for batch in first] == [(0, 1), (1, 2)]
    assert [len(batch.facts) for batch in again] == [0, 1]


def test_troubles_are_bounded() -> None:
    many = [(hex(number), [rank(0), rank(1, AllReduce=1)], list[dict[str, object]]()) for number in range(1, 1000)]
    found = read_answer(json_status(*many))
    assert len(found) == 256
    assert all(isinstance(each, Trouble) for each in found)


@pytest.mark.parametrize("data", [b"", b"{", b"{}", b'{"communicators": 1}', b"[" * 100_000, b"\xff" * 100])
def test_anything_else_is_no_answer(data: bytes) -> None:
    with pytest.raises(FormatError):
        read_answer(data)

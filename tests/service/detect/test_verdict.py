"""How a job ended, from what its logs say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from service.detect.simulated_job import Job, Simulation
from service.detect.test_sight_and_clock import FINDING

from ncclscope_service.detect.context import Context
from ncclscope_service.detect.progress import PROGRESS
from ncclscope_service.detect.reported import LoggedFact, Reported
from ncclscope_service.detect.verdict import end_of_ranks, judge_end
from ncclscope_service.store.records import Ending, Finding, FindingKind, Verdict
from ncclscope_wire import facts
from ncclscope_wire.batch import Columns
from ncclscope_wire.facts import Fact
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

GROUPS = {index: group for index, group in Simulation(Job()).groups.items() if group.parallelism == "WORLD"}
OVER = Context(job="job", groups=GROUPS, is_over=True)
RANKS = range(8)
STACK = ("node9", 7)


def counts(*behind: int, newest_ns: int = NO_TIME_NS) -> Columns:
    """Eight ranks of one group, of which these are one operation behind."""
    ((index, _),) = GROUPS.items()
    rows = [(index, NO_NUMBER, NO_NUMBER, rank, 100 - (rank in behind), newest_ns) for rank in RANKS]
    return np.array(rows, dtype=PROGRESS)


def program(line: int, what: str, text: str, rank: int | None = None) -> LoggedFact:
    return said(facts.ProgramFailure(line=line, what=what, text=text, global_rank=rank), rank)


def said(fact: Fact, rank: int | None = None, log: str = "out.log") -> LoggedFact:
    return LoggedFact(fact, log, rank, 5, has_time=False)


def gave_up(line: int, rank: int) -> LoggedFact:
    fact = facts.TorchTimeout(
        line=line, rank=rank, sequence=5, operation="BROADCAST", timeout_ms=300_000, global_rank=rank
    )
    return said(fact, rank)


def verdict(
    *logged: LoggedFact,
    behind: Sequence[int] = (),
    ended: Sequence[int] = (),
    findings: Sequence[Finding] = (),
    newest_line: int = 0,
    context: Context = OVER,
    known: bool = True,
    newest_ns: int = NO_TIME_NS,
) -> Verdict:
    reported = Reported()
    reported.ingest_facts(logged, context)
    last = counts(*behind, newest_ns=newest_ns) if known else np.empty(0, PROGRESS)
    end = end_of_ranks(last, context, {rank: rank in ended for rank in RANKS})
    return judge_end(findings, reported, reported.lines.failures({STACK: newest_line}), end, context)


OUT_OF_MEMORY = program(40, "out of memory", "RuntimeError: CUDA out of memory.", 3)
KILLED = program(90, "killed", "STEP 1.0 ON node1 CANCELLED AT 2026-01-27T14:51:17 DUE TO TIME LIMIT")
CLOSED = said(facts.ConnectionTrouble(line=30, host="node1", pid=4, what="closed", peer="node2<1>"), 0)


def test_the_first_failure_that_is_no_consequence_is_the_crash() -> None:
    found = verdict(CLOSED, OUT_OF_MEMORY, program(50, "exception", "ValueError: bad", 1), gave_up(60, 5), KILLED)
    assert (found.ending, found.ranks, found.hosts) == (Ending.CRASHED, (3,), ("node1",))
    assert found.summary == "rank 3 (node1) failed first: RuntimeError: CUDA out of memory."
    assert found.first_failure is not None
    assert (found.first_failure.where, found.first_failure.host) == ("out.log:40", "node1")
    assert [(line.rank, line.text) for line in found.last_words] == [
        (0, "an NCCL connection broke: closed by node2<1>"),
        (1, "ValueError: bad"),
        (3, "RuntimeError: CUDA out of memory."),
        (5, "gave up on BROADCAST 5 after 300 s (PyTorch's watchdog)"),
        (None, KILLED.fact.text if isinstance(KILLED.fact, facts.ProgramFailure) else ""),
    ]


def test_what_a_process_prints_once_its_watchdog_gave_up_is_no_crash() -> None:
    late = program(50, "exception", "RuntimeError: sizes overflow", 1)
    assert verdict(gave_up(20, 1), late).ending is Ending.HANG
    assert verdict(late, gave_up(60, 1)).ending is Ending.CRASHED


def test_a_failure_that_its_process_survived_is_none() -> None:
    failed = facts.CudaFailure(line=40, host="node9", pid=7, error="out of memory")
    logged = said(failed, 3)._replace(process=STACK)
    assert verdict(logged, behind=[2], newest_line=39).ending is Ending.CRASHED
    assert verdict(logged, behind=[2], newest_line=41).ending is Ending.UNCLEAR


@pytest.mark.parametrize(
    ("logged", "ending"),
    [
        ([KILLED, CLOSED], Ending.KILLED),
        ([program(1, "exited", "rank 1 died from signal 6", 1), KILLED], Ending.KILLED),
        ([program(1, "exited", "rank 1 died from signal 6", 1)], Ending.CRASHED),
        ([program(1, "exception", "ValueError: bad"), program(2, "exited", "tasks 1-7: Aborted")], Ending.CRASHED),
        ([program(1, "exception", "ValueError: bad")], Ending.UNCLEAR),
        ([program(1, "exception", "DistBackendError: NCCL error in: x.cpp, remote process exited", 4)], Ending.UNCLEAR),
        ([CLOSED], Ending.UNCLEAR),
        ([], Ending.UNCLEAR),
    ],
)
def test_the_verdict_follows_from_what_explains_most(logged: list[LoggedFact], ending: Ending) -> None:
    assert verdict(*logged, behind=[2]).ending is ending


@pytest.mark.parametrize(
    ("rank", "seconds", "ending", "ranks"),
    [
        (0, 0.1, Ending.KILLED, (2,)),  # at once: the process was gone
        (0, 80, Ending.HANG, (2,)),  # the job stood still, and somebody ended it
        (0, 12, Ending.UNCLEAR, ()),
        (0, -3_600, Ending.UNCLEAR, ()),  # a connection that broke an hour before says nothing of the end
        (2, 0.1, Ending.UNCLEAR, ()),  # it did not end without a word
    ],
)
def test_connections_that_break_tell_when_the_rank_at_which_all_waits_end_was_gone(
    rank: int, seconds: float, ending: Ending, ranks: tuple[int, ...]
) -> None:
    newest_ns = 10**18
    broke = CLOSED._replace(rank=rank, at_ns=newest_ns + round(seconds * 1e9), has_time=True)
    found = verdict(broke, behind=[2], newest_ns=newest_ns)
    assert (found.ending, found.ranks) == (ending, ranks)
    assert verdict(broke, behind=[2]).ending is Ending.UNCLEAR
    assert (
        verdict(broke, behind=[2], newest_ns=newest_ns, context=replace(OVER, lossy_hosts=frozenset({"node1"}))).ranks
        == ()
    )


def test_a_watchdog_that_gave_up_for_an_error_of_nccl_waited_for_nobody() -> None:
    error = program(
        3, "exception", "NCCL error: remote process exited or there was a network error, NCCL version 2.28.9"
    )
    progress = said(facts.TorchProgress(line=4, what="failure", rank=0, last_enqueued=7, last_completed=4, failed_at=5))
    assert verdict(error, progress, behind=[2]).ending is Ending.UNCLEAR
    assert verdict(progress, behind=[2]).ending is Ending.HANG


def test_a_watchdog_that_names_nobody_is_answered_by_the_counts() -> None:
    found = verdict(gave_up(3, 0), behind=[2])
    assert (found.ending, found.ranks) == (Ending.HANG, (2,))
    assert "all waits end at rank 2" in found.summary


def found(kind: FindingKind, **evidence: object) -> Finding:
    summary = "rank 2 never enqueued operation 100"
    return replace(FINDING, kind=kind, ranks=(2,), hosts=("node1",), summary=summary, evidence=evidence)


def test_a_hang_that_names_somebody_comes_before_signals_and_one_that_names_nobody_behind() -> None:
    hang = found(FindingKind.HANG, state="not_enqueued")
    assert (verdict(KILLED, findings=[hang]).ending, verdict(findings=[hang]).ranks) == (Ending.HANG, (2,))
    stopped = found(FindingKind.HANG, state="stopped")
    assert verdict(KILLED, findings=[stopped]).ending is Ending.KILLED
    assert verdict(findings=[stopped]).ending is Ending.UNCLEAR
    assert verdict(findings=[replace(hang, until_ns=9)]).ending is Ending.ENDED_TOGETHER


def test_ranks_whose_last_calls_differ_and_of_which_nothing_else_is_known_are_unclear() -> None:
    mismatch = verdict(findings=[found(FindingKind.MISMATCH)])
    assert (mismatch.ending, mismatch.ranks) == (Ending.UNCLEAR, ())
    assert mismatch.summary.endswith("no line says why the job ended")


def test_a_job_that_ended_together_did_so_by_its_counts_or_by_the_end_of_its_communicators() -> None:
    assert verdict().ending is Ending.ENDED_TOGETHER
    assert verdict(CLOSED, ended=RANKS).ending is Ending.ENDED_TOGETHER
    assert verdict(known=False, ended=RANKS).ending is Ending.ENDED_TOGETHER
    assert verdict(known=False).summary.startswith("neither operations nor the end of communicators were logged")
    some = verdict(ended=[0])
    assert (some.ending, some.summary) == (
        Ending.UNCLEAR,
        "rank 0 ended communicators, ranks 1, 2, 3 and 4 more ended none, and no line says why",
    )


def test_what_was_not_seen_is_not_said_to_have_ended_together() -> None:
    ((index, group),) = GROUPS.items()
    larger = replace(group, global_ranks=(*group.global_ranks, 8), hosts=(*group.hosts, "node3"))
    unseen = verdict(context=replace(OVER, groups={index: larger}))
    assert (unseen.ending, "operations of 1 rank were not logged" in unseen.summary) == (Ending.UNCLEAR, True)
    lossy = verdict(context=replace(OVER, lossy_hosts=frozenset({"node1"})))
    assert (lossy.ending, "log lines were lost" in lossy.summary) == (Ending.UNCLEAR, True)


def test_the_verdict_of_a_job_that_may_go_on_is_provisional() -> None:
    assert not verdict().is_provisional
    assert verdict(context=replace(OVER, is_over=False)).is_provisional


@pytest.mark.parametrize(
    ("behind", "named"),
    [((5,), "1 operation apart (rank 5 on host node2 behind all others), and"), ((1, 3, 5), "1 operation apart, and")],
)
def test_a_few_ranks_behind_all_others_are_named_and_not_accused(behind: tuple[int, ...], named: str) -> None:
    """Where counts alone remain, a hang and a kill leave the same trace."""
    found = verdict(behind=behind)
    assert (found.ending, found.ranks) == (Ending.UNCLEAR, ())
    assert named in found.summary


def test_where_ranks_stood_begins_with_the_one_at_which_waits_end_and_shows_each_where_it_waits() -> None:
    groups = {index: group for index, group in Simulation(Job()).groups.items() if group.parallelism in ("TP", "DP")}
    tensor = next(group for group in groups.values() if group.global_ranks == (4, 5))
    data = next(group for group in groups.values() if group.global_ranks == (4, 6))
    rows = [
        (index, NO_NUMBER, NO_NUMBER, rank, 50 - 3 * (name == 5) - (group is data and name == 4), NO_TIME_NS)
        for index, group in groups.items()
        for rank, name in enumerate(group.global_ranks)
    ]
    context = replace(OVER, groups=groups)
    reported = Reported()
    reported.ingest_facts([OUT_OF_MEMORY._replace(rank=5)], context)
    end = end_of_ranks(np.array(rows, dtype=PROGRESS), context, {})
    standing = judge_end([], reported, [], end, context).standing
    assert [(each.rank, each.comm_id, each.behind, each.waits_for, each.blamed) for each in standing[:3]] == [
        (5, tensor.comm_id, 3, (), ()),
        (4, tensor.comm_id, 0, (5,), (5,)),
        (6, data.comm_id, 0, (4,), (5,)),
    ]
    assert (standing[0].last_words, standing[1].last_words) == ("RuntimeError: CUDA out of memory.", None)
    assert standing[0].stopped_at == f"{tensor.comm_id}:47"


def test_of_ranks_that_stand_even_nothing_is_said() -> None:
    assert verdict().standing == ()

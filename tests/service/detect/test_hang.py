from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from service.detect.simulated_job import Job, Simulation

from ncclscope_service.detect.context import Context, Group
from ncclscope_service.detect.hang import ChannelWaits, Hang, WaitGraph, ends_of_waits, hang_at_end
from ncclscope_service.detect.kernel_counts import ShownByKernels
from ncclscope_service.detect.progress import PROGRESS
from ncclscope_service.store.records import Finding, Severity
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

SECOND = 1_000_000_000
GROUPS = Simulation(Job()).groups
CONTEXT = Context(job="job", groups=GROUPS)


def of_ranks(*ranks: int) -> int:
    """The communicator of just these ranks."""
    return next(index for index, group in GROUPS.items() if group.global_ranks == ranks)


TENSOR, DATA, WORLD = of_ranks(4, 5), (of_ranks(4, 6), of_ranks(5, 7)), of_ranks(*range(8))
PIPELINE = of_ranks(0, 4)
COLLECTIVES: tuple[int, int] = NO_NUMBER, NO_NUMBER


@dataclass
class Counters:
    """What the logs of eight ranks show, second by second: the others run on until they need the one that stopped."""

    stopped: dict[int, float] = field(default_factory=dict[int, float])
    """By global rank: from when on it enqueues nothing."""

    def at(self, seconds: float) -> Columns:
        made = []
        for index, group in GROUPS.items():
            if group.parallelism == "PP":
                continue
            per_second = {"TP": 40, "DP": 4}.get(group.parallelism or "", 1)
            for rank, name in enumerate(group.global_ranks):
                until, ahead = self._until(name, group.global_ranks)
                when = min(seconds, until)
                made.append((index, NO_NUMBER, NO_NUMBER, rank, int(when * per_second) + ahead, int(when * SECOND)))
        return np.array(made, dtype=PROGRESS)

    def _until(self, rank: int, members: tuple[int, ...]) -> tuple[float, int]:
        if not self.stopped:
            return float("inf"), 0
        first = min(self.stopped.values())
        if rank in self.stopped:
            return self.stopped[rank], 0
        # the peers enqueue one more, then wait; those they hold up stop elsewhere, without being ahead
        return first + 0.1, int(any(member in self.stopped for member in members))


def watch(counters: Counters, seconds: int) -> list[tuple[int, list[Finding]]]:
    detector = Hang()
    history = []
    for second in range(1, seconds + 1):
        detector.ingest_progress(counters.at(float(second)), CONTEXT)
        history.append((second, detector.findings(second * SECOND)))
    return history


def test_the_rank_that_stopped_is_named_within_fifteen_seconds() -> None:
    history = watch(Counters({5: 60.0}), 90)
    first, findings = next((second, found) for second, found in history if found)
    assert 60 < first <= 75
    assert [finding.ranks for finding in findings] == [(5,)]
    assert findings[0].hosts == ("node2",)
    assert findings[0].severity is Severity.CRITICAL
    assert "rank 5 (node2) has not enqueued operation" in findings[0].summary
    assert len(history[-1][1]) == 1


def test_of_several_ranks_that_stopped_at_once_it_is_said_that_the_job_may_have_been_killed() -> None:
    (of_one,) = watch(Counters({5: 60.0}), 90)[-1][1]
    (of_two,) = watch(Counters({2: 60.0, 5: 60.0}), 90)[-1][1]
    assert (of_one.ranks, of_one.confidence) == ((5,), 0.97)
    assert (of_two.ranks, of_two.confidence) == ((2, 5), 0.3)
    assert of_two.summary.endswith("are waiting, or the job was killed")
    assert not of_one.summary.endswith("killed")


def test_a_job_that_runs_or_that_ended_evenly_is_no_hang() -> None:
    assert all(not found for _, found in watch(Counters(), 60))
    all_stop = Counters(dict.fromkeys(range(8), 40.0))
    assert all(not found for _, found in watch(all_stop, 90))


def channels_that_stop(
    counts: dict[tuple[int, int, int], dict[int, int]],
    seconds: int,
    context: Context = CONTEXT,
    *,
    slow: frozenset[int] = frozenset(),
    moving: int | None = None,
) -> list[Finding]:
    """By (communicator, sender, receiver): operations more that each communicator rank enqueues after 60 s, those of
    the communicator that is `moving` so many seconds later.

    Communicators that are `slow` enqueue one operation in 5 s, the others 40 in a second.
    """
    detector = Hang()
    for second in range(1, seconds):
        now = min(second, 60)
        rows = []
        for (index, sender, receiver), more in counts.items():
            moved = now // 5 if index in slow else now * 40
            last = now // 5 * 5 if index in slow else now
            rows += [
                (
                    index,
                    sender,
                    receiver,
                    rank,
                    moved + extra * (second > 60),
                    (last + extra * (index == moving)) * SECOND,
                )
                for rank, extra in more.items()
            ]
        detector.ingest_progress(np.array(rows, dtype=PROGRESS), context)
        detector.findings(second * SECOND)
    return detector.findings(seconds * SECOND)


def test_blame_is_not_put_on_a_rank_that_waits_elsewhere() -> None:
    (finding,) = channels_that_stop({(TENSOR, *COLLECTIVES): {0: 1, 1: 0}, (DATA[0], *COLLECTIVES): {0: 0, 1: 1}}, 79)
    assert finding.ranks == (5,)
    assert finding.evidence["waiting_ranks"] == [4, 6]


def test_blame_goes_on_along_sends_and_receives_whose_own_patience_is_not_over() -> None:
    first = of_ranks(0, 1)
    # Rank 1 stops: rank 0 waits for it, so that it does not send to rank 4, which rank 5 waits for.
    counts = {(first, *COLLECTIVES): {0: 1, 1: 0}, (PIPELINE, 0, 1): {0: 0, 1: 1}, (TENSOR, *COLLECTIVES): {0: 0, 1: 1}}
    for seconds in (67, 70, 120):
        (finding,) = channels_that_stop(counts, seconds, slow=frozenset({PIPELINE}))
        assert finding.ranks == (1,)
        assert finding.comm_id == GROUPS[first].comm_id
        assert finding.evidence["waiting_ranks"] == [0, 4, 5]


def test_nobody_is_named_while_the_root_of_it_still_has_time() -> None:
    counts = {(PIPELINE, 0, 1): {0: 0, 1: 1}, (TENSOR, *COLLECTIVES): {0: 0, 1: 1}}
    assert channels_that_stop(counts, 70, slow=frozenset({PIPELINE})) == []
    (finding,) = channels_that_stop(counts, 78, slow=frozenset({PIPELINE}))
    assert finding.ranks == (0,)


def test_the_operation_at_which_a_rank_stopped_stays_named_when_a_smaller_group_waits_for_it_later() -> None:
    counts = {(WORLD, *COLLECTIVES): {rank: int(rank != 5) for rank in range(8)}, (DATA[1], *COLLECTIVES): {0: 0, 1: 1}}
    for seconds in (67, 90, 180):
        (finding,) = channels_that_stop(counts, seconds, slow=frozenset({DATA[1]}))
        stopped_at = f"has not enqueued operation 2401 of WORLD group {GROUPS[WORLD].comm_id}"
        assert stopped_at in finding.summary


def test_the_sentence_says_the_same_duration_as_since_also_of_a_job_that_went_on_and_stopped_again() -> None:
    detector, first, again = Hang(), Counters({5: 60.0}), Counters({5: 100.0})
    for second in range(1, 201):
        detector.ingest_progress((first if second < 91 else again).at(float(second)), CONTEXT)
        detector.findings(second * SECOND)
    (finding,) = detector.findings(201 * SECOND)
    assert finding.since_ns >= 100 * SECOND
    assert f"for {(201 * SECOND - finding.since_ns) / SECOND:.1f} s" in finding.summary
    assert finding.evidence["silent_ns"] == 201 * SECOND - finding.since_ns


def test_counts_that_always_differed_are_not_a_hang() -> None:
    detector = Hang()
    index = next(iter(GROUPS))
    for second in range(1, 120):
        now = min(second, 60)
        counts = [(index, -1, -1, 0, 1000 + now * 40, now * SECOND), (index, -1, -1, 1, now * 40, now * SECOND)]
        detector.ingest_progress(np.array(counts, dtype=PROGRESS), CONTEXT)
    assert detector.findings(119 * SECOND) == []


def test_it_closes_when_the_job_goes_on() -> None:
    detector = Hang()
    counters = Counters({5: 60.0})
    for second in range(1, 80):
        detector.ingest_progress(counters.at(float(second)), CONTEXT)
    assert detector.findings(79 * SECOND)[0].until_ns is None
    detector.ingest_progress(Counters().at(80.0), CONTEXT)
    assert detector.findings(80 * SECOND)[0].until_ns == 80 * SECOND


def test_ranks_of_one_group_that_have_all_enqueued_are_stuck_inside_it() -> None:
    waiting = {(each, *COLLECTIVES): {0: 0, 1: 1} for each in DATA}
    (finding,) = channels_that_stop({(TENSOR, *COLLECTIVES): {0: 1, 1: 1}, **waiting}, 80, moving=TENSOR)
    assert finding.ranks == ()
    assert finding.comm_id == GROUPS[TENSOR].comm_id
    assert finding.evidence["state"] == "inside"
    assert finding.evidence["collectives"][0] == f"{GROUPS[TENSOR].comm_id}:2400"  # type: ignore[index]  # a list of ids
    assert "they are stuck in it" in finding.summary


def test_a_whole_job_that_falls_silent_in_mid_step_is_stuck_and_between_steps_it_may_pause() -> None:
    everybody = {(TENSOR, *COLLECTIVES): {0: 0, 1: 0}}
    known = replace(CONTEXT, groups={TENSOR: GROUPS[TENSOR]}, knows_steps=True)
    (finding,) = channels_that_stop(everybody, 75, known)
    assert finding.evidence["state"] == "inside"
    assert channels_that_stop(everybody, 75, replace(known, knows_steps=False)) == []
    assert channels_that_stop(everybody, 150, replace(known, resting_ranks=frozenset({4, 5}))) == []


def test_a_rank_that_has_just_ended_a_step_gets_time_for_a_checkpoint() -> None:
    counts = {(TENSOR, *COLLECTIVES): {0: 0, 1: 1}}
    resting = replace(CONTEXT, resting_ranks=frozenset({4}))
    assert channels_that_stop(counts, 150, resting, moving=TENSOR) == []
    (finding,) = channels_that_stop(counts, 200, resting, moving=TENSOR)
    assert finding.ranks == (4,)
    assert finding.evidence["state"] == "not_enqueued"


def test_a_mismatch_on_the_stuck_group_names_who_differs() -> None:
    known = replace(CONTEXT, groups={TENSOR: GROUPS[TENSOR]}, knows_steps=True)
    detector = Hang()
    for second in range(1, 80):
        now = min(second, 60)
        rows = [(TENSOR, -1, -1, rank, now * 40 + (second > 60), now * SECOND) for rank in (0, 1)]
        detector.ingest_progress(np.array(rows, dtype=PROGRESS), known)
    (stuck,) = detector.findings(80 * SECOND)
    differs = replace(stuck, ranks=(5,), hosts=("node2",), summary="rank 5 differs")
    (finding,) = detector.findings(80 * SECOND, {GROUPS[TENSOR].comm_id: differs})
    assert finding.ranks == (5,)
    assert finding.evidence["state"] == "mismatched"


def test_counts_prove_nothing_where_lines_were_lost() -> None:
    context = replace(CONTEXT, knows_steps=True)
    detector, counters = Hang(), Counters({5: 60.0})
    findings: list[Finding] = []
    for second in range(1, 90):
        detector.ingest_progress(counters.at(float(second)), context)
        findings = detector.findings(second * SECOND, with_losses=frozenset(GROUPS))
        assert bool(findings) == (second > 68)
    (finding,) = findings
    assert (finding.ranks, finding.evidence["state"]) == ((), "unclear")
    assert "log lines were lost" in finding.summary


@pytest.mark.parametrize("others_stand_evenly", [True, False])
def test_while_lines_are_lost_silence_names_the_rank_for_which_all_others_wait(*, others_stand_evenly: bool) -> None:
    """Of that rank, too, the last line may be lost; if others are behind as well, nobody is named."""
    context = replace(CONTEXT, knows_steps=True)
    detector, counters = Hang(), Counters({5: 60.0})
    true: Columns = counters.at(0.0)
    for second in range(1, 90):
        true = counters.at(float(second))
        logged = true.copy()
        logged["operations"] -= np.where(logged["rank"] == 0, second // 10, 0)
        detector.ingest_progress(logged, context)
    enqueued = _enqueued(true)
    if not others_stand_evenly:
        for index, counts in enqueued.items():
            for rank, name in enumerate(GROUPS[index].global_ranks):
                counts[rank] -= 3 * (name == 0)
    (finding,) = detector.findings(90 * SECOND, enqueued=enqueued)
    named = ((5,), "not_enqueued") if others_stand_evenly else ((), "unclear")
    assert (finding.ranks, finding.evidence["state"]) == named
    assert finding.confidence < 0.9
    assert detector.is_unclear is not others_stand_evenly


def test_a_rank_that_stays_behind_while_others_go_on_shows_that_lines_are_lost() -> None:
    """One line in ten of rank 5 is lost, and nothing else tells."""
    context = replace(CONTEXT, knows_steps=True)
    detector, counters = Hang(), Counters({4: 60.0})
    for second in range(1, 90):
        counts = counters.at(float(second))
        is_lossy = (CONTEXT.global_ranks_of(counts) == 5) & (counts["operations"] > 200)
        counts["operations"] -= np.where(is_lossy, counts["operations"] // 10, 0)
        detector.ingest_progress(counts, context)
    (finding,) = detector.findings(90 * SECOND)
    assert (finding.ranks, finding.evidence["state"]) == ((), "unclear")


def test_a_rank_without_which_others_went_on_for_steps_is_not_missing() -> None:
    detector, counters = Hang(), Counters({5: 60.0})
    for second in range(1, 64):
        counts = counters.at(float(second))
        counts["last_ns"] = np.where(CONTEXT.global_ranks_of(counts) == 5, counts["last_ns"], second * SECOND)
        detector.ingest_progress(counts, replace(CONTEXT, knows_steps=True, step_ns=SECOND))
    (finding,) = detector.findings(90 * SECOND)
    assert (finding.ranks, finding.evidence["state"]) == ((), "unclear")


def standing(ahead: tuple[int, ...], behind: tuple[int, ...], newest_here: tuple[int, ...] = ()) -> ChannelWaits:
    return ChannelWaits(ahead=ahead, behind=behind, newest_here=frozenset(newest_here))


def test_who_waits_for_another_is_not_to_blame_however_long_the_chain() -> None:
    chain = [standing((rank,), (rank + 1,), newest_here=(rank,)) for rank in range(6)]
    assert WaitGraph(chain).roots({1, 2, 3, 4, 5, 6}) == {6}
    assert WaitGraph(chain).waiting == {0, 1, 2, 3, 4, 5}


def test_nobody_is_to_blame_where_the_root_is_not_among_the_missing() -> None:
    assert WaitGraph([standing((0,), (1,)), standing((1,), (2,))]).roots({1}) == set()


def test_two_that_wait_for_nobody_are_both_roots() -> None:
    assert WaitGraph([standing((0,), (1,)), standing((2,), (3,))]).roots({1, 3}) == {1, 3}


def test_in_a_circle_a_send_that_was_started_early_does_not_excuse_its_rank() -> None:
    circle = [standing((5,), (13,)), standing((13,), (5,), newest_here=(13,))]
    assert WaitGraph(circle).roots({5, 13}) == {5}


def test_a_circle_in_which_everybody_is_held_names_nobody() -> None:
    circle = [standing((1,), (2,), newest_here=(1,)), standing((2,), (1,), newest_here=(2,))]
    assert WaitGraph(circle).roots({1, 2}) == set()


def test_ranks_that_wait_for_each_other_in_collectives_are_unclear() -> None:
    """As where lines were lost that nobody missed; that another collective was enqueued since excuses nobody."""
    pair = (0, 1)
    groups = {
        index: Group(comm_id=str(index), parallelism=None, global_ranks=pair, hosts=("node0", "node1"))
        for index in pair
    }
    context = Context(job="job", groups=groups, knows_steps=True)
    counts = np.zeros(4, PROGRESS)
    counts["communicator"], counts["rank"] = [0, 0, 1, 1], [0, 1, 0, 1]
    counts["sender"] = counts["receiver"] = NO_NUMBER
    detector = Hang()
    for second in range(1, 10):
        counts["operations"], counts["last_ns"] = 10 * second, second * SECOND
        detector.ingest_progress(counts, context)
    counts["operations"] += [1, 0, 0, 1]
    counts["last_ns"] += [1, 2, 2, 2]
    detector.ingest_progress(counts, context)
    (finding,) = detector.findings(200 * SECOND)
    assert (finding.ranks, finding.evidence["state"]) == ((), "unclear")
    assert "ranks wait for each other" in finding.summary


def test_a_rank_that_ended_in_an_operation_whose_other_members_wait_for_the_root_is_a_victim() -> None:
    even = standing((), (7, 8), newest_here=(7,))
    held = [even, standing((8,), (5,), newest_here=(8,)), standing((3,), (7,)), standing((4,), (5,))]
    assert WaitGraph(held).roots({5, 7}) == {5}


def test_a_root_whose_last_operation_was_shared_with_its_victims_stays_the_root() -> None:
    even = standing((), (5, 8), newest_here=(5,))
    assert WaitGraph([even, standing((8,), (5,), newest_here=(8,)), standing((3,), (6,))]).roots({5, 6}) == {5, 6}


def test_in_large_groups_that_wait_for_each_other_each_group_is_followed_once() -> None:
    looked_at: list[int] = []

    class SilenceClock(tuple[int, ...]):
        def __iter__(self) -> Iterator[int]:
            looked_at.append(len(self))
            return super().__iter__()

    one, other = SilenceClock(range(500)), SilenceClock(range(500, 1000))
    blame = WaitGraph([standing(one, other), standing(other, one)])
    looked_at.clear()
    missing = set(range(500, 1000))
    assert blame.roots(missing) == missing
    assert len(looked_at) <= 2


def test_ranks_of_several_groups_that_stop_at_once_are_stuck_in_none_of_them() -> None:
    tensor = {index: group for index, group in GROUPS.items() if group.parallelism == "TP"}
    context = Context(job="job", groups=tensor, knows_steps=True)
    (finding,) = channels_that_stop({(index, *COLLECTIVES): {0: 0, 1: 0} for index in tensor}, 80, context)
    assert (finding.evidence["state"], finding.comm_id, finding.ranks) == ("stopped", None, ())
    assert "it was killed, or its groups are stuck at once" in finding.summary


def last_counts(behind: dict[int, int], ahead: dict[int, int] | None = None) -> Columns:
    """Counts without times of a job that is over: by global rank, by how many operations of its groups it is off."""
    rows = [
        (index, NO_NUMBER, NO_NUMBER, rank, 400 - behind.get(name, 0) + (ahead or {}).get(name, 0), NO_TIME_NS)
        for index, group in GROUPS.items()
        if group.parallelism in ("TP", "DP", "WORLD")
        for rank, name in enumerate(group.global_ranks)
    ]
    return np.array(rows, dtype=PROGRESS)


def named(found: Finding | None) -> tuple[tuple[int, ...], float] | None:
    """Who hung, and how sure that is."""
    return None if found is None else (found.ranks, found.confidence)


def test_last_counts_without_times_show_who_hung() -> None:
    found = hang_at_end(last_counts({5: 1}), CONTEXT)
    assert found is not None
    assert (found.ranks, found.hosts, found.confidence) == ((5,), ("node2",), 0.97)
    assert "the job ended in a hang: rank 5 (node2) never enqueued operation 400 of" in found.summary
    assert found.evidence["waiting_ranks"] == [0, 1, 2, 3, 4, 6, 7]
    alone = Context(job="job", groups={WORLD: GROUPS[WORLD]})
    assert named(hang_at_end(last_counts({5: 1}), alone)) == ((5,), 0.9)


def test_last_counts_of_jobs_that_ended_were_killed_or_whose_files_were_cut_show_no_hang() -> None:
    assert hang_at_end(last_counts({}), CONTEXT) is None
    assert hang_at_end(last_counts({5: 2, 3: 2}), CONTEXT) is None
    assert hang_at_end(last_counts({rank: 3 * rank for rank in range(8)}), CONTEXT) is None
    assert hang_at_end(last_counts({5: 2}), replace(CONTEXT, lossy_hosts=frozenset({"node1"}))) is None


def test_last_counts_of_lossy_logs_show_who_hung_with_what_is_known_of_lost_lines() -> None:
    counts = last_counts({5: 1, 3: 40, 2: 7})
    assert hang_at_end(counts, CONTEXT) is None
    assert named(hang_at_end(counts, CONTEXT, enqueued=_enqueued(last_counts({5: 1})))) == ((5,), 0.8)


def _enqueued(counts: Columns) -> dict[int, dict[int, int]]:
    return {
        index: {each["rank"].item(): each["operations"].item() for each in counts[counts["communicator"] == index]}
        for index in np.unique(counts["communicator"]).tolist()
    }


def test_a_rank_whose_last_lines_were_lost_need_not_wait_and_is_named_only_if_it_is_further_behind() -> None:
    lines = last_counts({5: 1})
    others = [index for index, group in GROUPS.items() if group.parallelism in ("TP", "DP")]
    lines = lines[np.isin(lines["communicator"], others)]
    even = last_counts({})
    stands = [index for index in others if 0 in GROUPS[index].global_ranks]
    lines["operations"][np.isin(lines["communicator"], stands)] = 400

    def said(*unheard: int, lacks: float = math.inf) -> Finding | None:
        shown = ShownByKernels(np.empty(0, PROGRESS), dict.fromkeys(unheard, lacks))
        return hang_at_end(lines, CONTEXT, lambda: [even] * 100, _enqueued(lines), lambda: shown)

    waiting = {rank for index in others if 5 in GROUPS[index].global_ranks for rank in GROUPS[index].global_ranks}
    silent = tuple(set(range(8)) - waiting)
    assert said() is None, "some seem to wait for nobody"
    found = said(*silent)
    assert found is not None
    assert found.ranks == (5,)
    assert "all other ranks that were heard were waiting" in found.summary
    assert said(*silent, 5) is None
    assert said(*silent, 5, lacks=1) is None
    lines["operations"][CONTEXT.global_ranks_of(lines) == 5] -= 1
    assert said(*silent, 5, lacks=1) is not None


def test_among_losses_a_job_without_times_must_show_it_where_a_rank_enqueues_most() -> None:
    counts = last_counts({5: 1})
    assert hang_at_end(counts, CONTEXT, enqueued=_enqueued(counts)) is not None
    alone = Context(job="job", groups={WORLD: GROUPS[WORLD]})
    assert hang_at_end(counts, alone, enqueued=_enqueued(counts)) is None


def test_a_rank_that_is_more_than_a_step_behind_where_it_enqueues_most_has_lost_lines() -> None:
    counts = last_counts({5: 2})
    shown = ShownByKernels(np.empty(0, PROGRESS), {}, in_a_step={5: 2})
    assert hang_at_end(counts, CONTEXT, shown=lambda: shown) is not None
    assert hang_at_end(counts, CONTEXT, enqueued=_enqueued(counts), shown=lambda: shown) is None
    assert hang_at_end(counts, CONTEXT, shown=lambda: shown._replace(in_a_step={5: 1})) is None


def test_among_losses_earlier_moments_tell_whether_uneven_ranks_mean_something() -> None:
    counts, even = last_counts({5: 2, 3: 1}), last_counts({})
    assert hang_at_end(counts, CONTEXT, enqueued=_enqueued(counts)) is None
    assert named(hang_at_end(counts, CONTEXT, lambda: [even] * 100, _enqueued(counts))) == ((5,), 0.8)
    assert hang_at_end(counts, CONTEXT, lambda: [*[even] * 90, *[counts] * 10], _enqueued(counts)) is None


def test_lost_lines_that_explain_nothing_do_not_hide_a_hang_that_the_lines_show() -> None:
    lines = last_counts({5: 1})
    assert hang_at_end(lines, CONTEXT, enqueued=_enqueued(last_counts({}))) is None, "the last line of rank 5 was lost"
    at_an_edge = _enqueued(last_counts({5: 1}, {0: 1, 3: 2}))
    assert named(hang_at_end(lines, CONTEXT, enqueued=at_an_edge)) == ((5,), 0.8)


def test_a_job_that_often_stood_like_this_while_it_lived_may_have_been_killed() -> None:
    late, even, clearer = last_counts({5: 1}), last_counts({}), last_counts({5: 3})
    assert hang_at_end(late, CONTEXT, lambda: [*[even] * 90, *[late] * 10]) is None
    assert hang_at_end(late, CONTEXT, lambda: [*[even] * 90, *[clearer] * 10]) is None
    assert named(hang_at_end(late, CONTEXT, lambda: [*[even] * 191, *[late] * 9])) == ((5,), 0.97)
    assert hang_at_end(clearer, CONTEXT, lambda: [*[even] * 90, *[late] * 10]) is not None


def test_waits_end_at_the_rank_that_waits_for_nobody_over_groups_and_past_even_ones() -> None:
    waits = [standing((2,), (3,)), standing((0,), (2,)), standing((0, 4), (2, 6)), standing((), (5, 7))]
    assert ends_of_waits(waits) == {2: (3,), 0: (3, 6), 4: (3, 6)}


def test_waits_in_a_circle_or_for_many_end_nowhere() -> None:
    assert ends_of_waits([standing((1,), (2,)), standing((2,), (1,))]) == {}
    assert ends_of_waits([standing((0,), tuple(range(1, 10)))]) == {}
    assert ends_of_waits([standing((0,), tuple(range(1, 9)))]) == {0: tuple(range(1, 9))}

"""The certain pass says what the careful aligners say, and leaves alone what is doubtful."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from service.simulated_batches import simulated_batches

from ncclscope_service.align.certain import LEAST, MARGIN, CertainPairs, Known, Launched, Lines, certain_pairs
from ncclscope_service.align.certain_pairing import CertainPairing
from ncclscope_service.align.nvtx_calls import CALL, UNIT, ThreadCalls
from ncclscope_service.columns.table import Ids
from ncclscope_service.nccl.launch_rules import Counting
from ncclscope_service.pipeline import Pipeline
from ncclscope_service.store.rows import Match
from ncclscope_simulator import SimulationConfig
from ncclscope_simulator.faults import parse_faults
from ncclscope_wire.batch import Batch
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

_STEP_NS = 1_000_000
_AMOUNT = 200
_LOSSES = ("drop_lines:ratio=0.003", "drop_kernels:ratio=0.003")


@dataclass
class _Thread:
    """One thread that logs an operation each millisecond and launches it 20 us later, on one lane."""

    stamps: list[int] = field(default_factory=lambda: [(1 + at) * _STEP_NS for at in range(_AMOUNT)])
    launches: list[int] = field(default_factory=lambda: [(1 + at) * _STEP_NS + 20_000 for at in range(_AMOUNT)])
    classes: dict[int, int] = field(default_factory=dict[int, int])
    """By line: bits of the kernel classes it may show as, else class 1."""
    lanes: dict[int, int] = field(default_factory=dict[int, int])
    """By kernel: its lane, else 0."""
    op_counts: dict[int, int] = field(default_factory=dict[int, int])
    groups: dict[int, int] = field(default_factory=dict[int, int])
    known: Known = field(
        default_factory=lambda: Known(np.full(1, NO_NUMBER, np.int32), Counting.NEVER, np.zeros(1, np.int64), None)
    )

    def pairs(self) -> CertainPairs:
        amount, launched = len(self.stamps), len(self.launches)
        lines = Lines(
            tid=np.full(amount, 7),
            time_ns=np.array(self.stamps),
            lane=np.zeros(amount, np.int32),
            signature=np.zeros(amount, np.int32),
            classes=np.array([self.classes.get(at, 2) for at in range(amount)], np.uint32),
            data_type=np.full(amount, NO_NUMBER, np.int16),
            op_count=np.array([self.op_counts.get(at, at) for at in range(amount)], np.uint64),
            group=np.array([self.groups.get(at, NO_NUMBER) for at in range(amount)]),
            kind=np.full(amount, 3, np.uint8),
        )
        kernels = Launched(
            tid=np.full(launched, 7),
            time_ns=np.array(self.launches),
            lane=np.array([self.lanes.get(at, 0) for at in range(launched)], np.int32),
            kernel_class=np.ones(launched, np.uint8),
            data_type=np.full(launched, NO_NUMBER, np.int16),
        )
        return certain_pairs(lines, kernels, self.known)

    def decided(self) -> dict[int, int]:
        """The kernel of each line that is certain."""
        pairs = self.pairs()
        return dict(zip(pairs.lines.tolist(), pairs.kernels.tolist(), strict=True))


def test_all_but_the_ends_of_a_clean_thread_are_certain() -> None:
    # The last line is followed by none: its launch may not be all.
    assert _Thread().decided() == {at: at for at in range(MARGIN, _AMOUNT - 1 - MARGIN)}


def test_a_whole_thread_that_is_clean_has_no_ends() -> None:
    thread = _Thread(known=replace(_Thread().known, is_whole=True))
    assert thread.decided() == {at: at for at in range(_AMOUNT)}
    del thread.launches[-1]
    assert thread.decided() == {at: at for at in range(MARGIN, _AMOUNT - 1 - MARGIN)}


def test_a_short_clean_thread_is_left_to_the_careful_aligners() -> None:
    amount = 2 * MARGIN + LEAST
    thread = _Thread()
    thread.stamps, thread.launches = thread.stamps[:amount], thread.launches[:amount]
    assert thread.decided() == {}
    longer = _Thread()
    longer.stamps, longer.launches = longer.stamps[: amount + 1], longer.launches[: amount + 1]
    assert len(longer.decided()) == LEAST


@pytest.mark.parametrize("place", [_AMOUNT // 2, MARGIN + LEAST // 2])
def test_nothing_near_a_lost_kernel_or_a_lost_line_is_certain(place: int) -> None:
    lost_kernel, lost_line = _Thread(), _Thread()
    del lost_kernel.launches[place]
    del lost_line.stamps[place]
    for thread in (lost_kernel, lost_line):
        assert not set(range(place - MARGIN + 1, place + MARGIN)) & set(thread.decided())


@pytest.mark.parametrize(
    "wrong",
    [
        {"classes": {90: 4}},
        {"lanes": {90: 1}},
        {"op_counts": {90: 89}, "known": replace(_Thread().known, counting=Counting.PER_PLAN)},
        {"groups": {90: 5, 91: 5}},
        {"known": replace(_Thread().known, begins_ns=np.array([0, 91 * _STEP_NS - 1]))},
    ],
)
def test_what_disagrees_ends_a_stretch(wrong: dict[str, object]) -> None:
    thread = replace(_Thread(), **wrong)  # type: ignore[arg-type]
    decided = thread.decided()
    assert 90 - MARGIN - 3 in decided
    assert not set(range(90 - MARGIN + 2, 90 + MARGIN - 1)) & set(decided)
    assert 90 + MARGIN + 2 in decided


def test_a_late_launch_may_be_another_lines() -> None:
    thread = _Thread()
    thread.launches[90] += 300_000
    assert not set(range(80, 100)) & set(thread.decided())


def test_a_lane_is_where_it_was_seen_before() -> None:
    thread = _Thread(known=replace(_Thread().known, kernel_lanes=np.array([3], np.int32)))
    assert thread.decided() == {}


def test_lines_without_a_stamp_and_times_that_go_back_leave_a_thread_alone() -> None:
    unstamped, disordered = _Thread(), _Thread()
    unstamped.stamps[90] = NO_TIME_NS
    disordered.stamps[90] = disordered.stamps[60]
    assert unstamped.decided() == disordered.decided() == {}


def test_a_group_that_nothing_tells_is_not_certain_but_ends_no_stretch() -> None:
    thread = _Thread()
    thread.stamps.insert(91, thread.stamps[90] + 5_000)
    decided = thread.decided()
    assert {90, 91}.isdisjoint(decided)
    assert decided[89] == 89
    assert decided[92] == 91


def test_a_group_that_is_known_is_one_launch() -> None:
    thread = _Thread(groups={90: 5, 91: 5})
    thread.stamps.insert(91, thread.stamps[90] + 5_000)
    pairs = thread.pairs()
    at = pairs.lines.tolist().index(90)
    assert pairs.kernels[at : at + 2].tolist() == [90, 90]
    assert pairs.is_first[at : at + 3].tolist() == [True, False, True]


def _calls(thread: _Thread) -> ThreadCalls:
    calls, units = np.zeros(_AMOUNT, CALL), np.zeros(_AMOUNT, UNIT)
    calls["kind"], calls["unit"] = 3, np.arange(_AMOUNT)
    calls["start_ns"] = units["launch_from_ns"] = np.array(thread.stamps) - 2_000
    calls["end_ns"] = units["launch_until_ns"] = np.array(thread.stamps) + 30_000
    return ThreadCalls(calls, units)


def test_a_call_confirms_a_line_and_its_launch() -> None:
    thread = _Thread()
    calls = _calls(thread)
    thread.known = replace(thread.known, calls={7: calls})
    assert len(thread.decided()) == _AMOUNT - 1 - 2 * MARGIN
    calls.units["launch_until_ns"][90] = thread.launches[90] - 1
    assert not set(range(80, 100)) & set(thread.decided())


def test_a_call_of_another_kind_contradicts_its_line() -> None:
    thread = _Thread()
    calls = _calls(thread)
    calls.calls["kind"][90] = 4
    thread.known = replace(thread.known, calls={7: calls})
    assert not set(range(80, 100)) & set(thread.decided())


_SMALL = SimulationConfig(iterations=6, nodes=1, gpus=4, tp=2, pp=2, dp=1)
_JOBS = {
    "nvtx": _SMALL,
    "stamps": replace(_SMALL, nvtx=False),
    "calls": replace(_SMALL, nvtx=False, calls=True),
    "process_per_node": replace(_SMALL, process_per_node=True),
    "lossy": replace(_SMALL, faults=parse_faults(_LOSSES)),
    "lossy_stamps": replace(_SMALL, nvtx=False, faults=parse_faults(_LOSSES)),
}
_MORE_JOBS = {
    "counting": SimulationConfig(iterations=10, nvtx=False, nccl="2.26.5", faults=parse_faults(_LOSSES)),
    "newest": SimulationConfig(iterations=10, nccl="2.30", timestamps=True, faults=parse_faults(_LOSSES)),
    "torn": SimulationConfig(iterations=20, faults=parse_faults(["torn_lines:ratio=0.003"])),
    "very_lossy": SimulationConfig(
        iterations=30, nvtx=False, faults=parse_faults(["drop_lines:ratio=0.01", "drop_kernels:ratio=0.01"])
    ),
    "duty": SimulationConfig(iterations=40, nvtx=False, capture="duty:0.5", chunk_seconds=4),
    "duty_nvtx": SimulationConfig(iterations=40, capture="duty:0.5", chunk_seconds=4, faults=parse_faults(_LOSSES)),
    "graphs": SimulationConfig(iterations=20, cuda_graphs=8, timestamps=True),
    "coalesced": SimulationConfig(iterations=15, zero1=True, coalesce=True, nvtx=False, faults=parse_faults(_LOSSES)),
    "broadcasts": SimulationConfig(
        iterations=15, nccl="2.30", tp=2, pp=1, dp=4, zero1=True, coalesce=True, broadcast_parameters=True
    ),
    "experts": SimulationConfig(iterations=10, tp=1, pp=2, dp=4, ep=2, imbalance=0.2, interleave=2, nvtx=False),
    "sharded": SimulationConfig(iterations=10, tp=1, pp=1, dp=8, fsdp=True, replicate=2, nvtx=False),
}


@pytest.mark.parametrize("name", [*_JOBS, *(pytest.param(name, marks=pytest.mark.slow) for name in _MORE_JOBS)])
def test_the_careful_aligners_agree_with_everything_that_is_certain(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = simulated_batches({**_JOBS, **_MORE_JOBS}[name], tmp_path, portions=1)
    decided: list[Ids] = []
    pair = CertainPairing.pair

    def recorded(*given: object, is_last: bool) -> object:
        found = pair(*given, is_last=is_last)  # type: ignore[arg-type]
        if found is not None:
            decided.append(found.matches["operation"])
        return found

    monkeypatch.setattr(CertainPairing, "pair", recorded)
    certain = _finished(batches)
    monkeypatch.setattr(CertainPairing, "pair", _nothing)
    careful = _finished(batches)
    own, other = certain.store.operations.rows, careful.store.operations.rows
    at = np.concatenate(decided)
    assert len(at) > 0.05 * len(certain.store.operations)
    for column in ("match", "kernel", "start_ns", "end_ns"):
        assert (own[column][at] == other[column][at]).all(), column
        # What is left to the careful aligners is voted on with other votes.
        assert np.count_nonzero(own[column] != other[column]) <= 0.0005 * len(certain.store.operations), column
    assert np.isin(own["match"][at], (Match.MATCHED, Match.NO_KERNEL)).all()
    assert own["confidence"][at] == pytest.approx(other["confidence"][at], abs=0.05)
    assert (_first_of_launch(own["launch"])[at] == _first_of_launch(other["launch"])[at]).all()
    assert certain.store.alignment_checked == careful.store.alignment_checked
    assert certain.store.alignment_disagreements.total() <= careful.store.alignment_disagreements.total()


def _nothing(*_: object, is_last: bool) -> None:
    """Stands in for a certain pass that finds nothing."""


def _finished(batches: list[Batch]) -> Pipeline:
    pipeline = Pipeline()
    for batch in batches:
        pipeline.ingest_batch(batch, agent="a", session="s", job="j")
    pipeline.finish(0)
    return pipeline


def _first_of_launch(launches: NDArray[np.int64]) -> NDArray[np.intp]:
    """The first operation that shares the launch of each: ids depend on the order of writing."""
    _, first, inverse = np.unique(launches, return_index=True, return_inverse=True)
    return first[inverse]

"""A service that is restarted in the middle of a job finds exactly what one that was not would have found."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from align_samples import lose, training
from hypothesis import given, settings
from hypothesis import strategies as st
from service.simulated_batches import SECOND_NS, advanced, batches_by_job

from ncclscope_service import state
from ncclscope_service.align import ProcessAligner
from ncclscope_service.alignment import Alignment
from ncclscope_service.pipeline import Pipeline
from ncclscope_service.store import Store, Table
from ncclscope_service.version_of import version_of
from ncclscope_simulator import SimulationConfig
from ncclscope_simulator.faults import parse_faults
from ncclscope_wire.batch import Batch
from ncclscope_wire.errors import StateError

_JOBS = {
    "clean": SimulationConfig(iterations=6, nodes=2, gpus=2, tp=2, pp=1, dp=2),
    "chunked": SimulationConfig(iterations=8, nodes=1, gpus=2, tp=2, pp=1, dp=1, chunk_seconds=0.5),
    "lossy": SimulationConfig(
        iterations=6, nodes=2, gpus=2, tp=1, pp=2, dp=2,
        faults=parse_faults(["drop_lines:ratio=0.02", "drop_kernels:ratio=0.02", "late_rank:rank=1,ms=2"]),
    ),
    "graphs": SimulationConfig(
        iterations=6, nodes=1, gpus=2, tp=2, pp=1, dp=1, cuda_graphs=2, cuda_graph_trace="node", chunk_seconds=0.5,
    ),
    "inspector": SimulationConfig(
        iterations=6, nodes=1, gpus=2, tp=2, pp=1, dp=1, inspector="v4.2", inspector_holes=0.1, capture="duty:0.5",
    ),
    "by order": SimulationConfig(iterations=6, nodes=1, gpus=4, tp=2, pp=2, dp=1, nccl="2.20.5", capture="duty:0.5"),
}  # fmt: skip


@pytest.fixture(scope="module")
def batches_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Batch]]:
    """The batches of each job, simulated once."""
    return batches_by_job(_JOBS, tmp_path_factory)


def _finished(pipeline: Pipeline, seconds: int) -> Pipeline:
    pipeline.flush(seconds * SECOND_NS)
    return pipeline


def assert_equal(one: Store, other: Store) -> None:
    """Everything that is known is known to both, bit for bit."""
    for each in fields(Store):
        mine, theirs = getattr(one, each.name), getattr(other, each.name)
        if isinstance(mine, Table):
            assert (mine.first, mine.next_id) == (theirs.first, theirs.next_id), each.name
            for name in mine.dtype.names or ():
                np.testing.assert_array_equal(mine.rows[name], theirs.rows[name], err_msg=f"{each.name}.{name}")
        elif each.name == "strings":
            assert mine.values == theirs.values
        else:
            assert mine == theirs, each.name


@pytest.mark.parametrize("job", _JOBS)
def test_a_restored_pipeline_goes_on_exactly(job: str, batches_of: Callable[[str], list[Batch]]) -> None:
    batches = batches_of(job)
    _assert_restarts_change_nothing(batches, random.Random(job).sample(range(1, len(batches)), 3))


@pytest.mark.slow
@settings(max_examples=25)
@given(job=st.sampled_from(sorted(_JOBS)), places=st.sets(st.floats(0, 1), min_size=1, max_size=5))
def test_restarts_anywhere_change_nothing(
    job: str, places: set[float], batches_of: Callable[[str], list[Batch]]
) -> None:
    batches = batches_of(job)
    _assert_restarts_change_nothing(batches, [int(place * len(batches)) for place in places])


def _assert_restarts_change_nothing(batches: list[Batch], cuts: list[int]) -> None:
    whole = _finished(advanced(Pipeline(), batches), len(batches) + 1)
    restarted, begin = Pipeline(), 0
    for cut in sorted(cuts):
        kept = advanced(restarted, batches[begin:cut], since=begin).snapshot()
        restarted, begin = Pipeline.restore(kept), cut
        assert restarted.snapshot() == kept
    _finished(advanced(restarted, batches[begin:], since=begin), len(batches) + 1)
    assert_equal(restarted.store, whole.store)


def test_what_was_fed_and_not_yet_worked_on_is_kept(batches_of: Callable[[str], list[Batch]]) -> None:
    batches = batches_of("clean")
    cut = len(batches) // 2
    pipelines = Pipeline(), Pipeline()
    for pipeline in pipelines:
        for batch in batches[:cut]:
            pipeline.feed(batch, agent="a", session="s", job="j")
    restored = Pipeline.restore(pipelines[0].snapshot())
    for pipeline in (restored, pipelines[1]):
        _finished(advanced(pipeline, batches[cut:], since=cut), len(batches) + 1)
    assert_equal(restored.store, pipelines[1].store)


_IN_A_NEW_PROCESS = """
import sys
from pathlib import Path
from align_samples import lose, training
from service.simulated_batches import SECOND_NS, advanced, simulated_batches
from service.test_restart import _JOBS, _finished
from ncclscope_service.pipeline import Pipeline

kept, folder, cut, out = sys.argv[1:]
batches = simulated_batches(_JOBS["clean"], Path(folder), portions=6)
pipeline = advanced(Pipeline.restore(Path(kept).read_bytes()), batches[int(cut):], since=int(cut))
Path(out).write_bytes(_finished(pipeline, len(batches) + 1).snapshot())
"""


@pytest.mark.slow
def test_a_new_process_goes_on_exactly(batches_of: Callable[[str], list[Batch]], tmp_path: Path) -> None:
    batches = batches_of("clean")
    cut = len(batches) // 3
    (tmp_path / "kept").write_bytes(advanced(Pipeline(), batches[:cut]).snapshot())
    tests = Path(__file__).parents[1]
    arguments = [str(tmp_path / "kept"), str(tmp_path / "job"), str(cut), str(tmp_path / "out")]
    code = f"import sys; sys.path[:0] = {[str(tests), *sys.path]!r}\n{_IN_A_NEW_PROCESS}"
    subprocess.run([sys.executable, "-c", code, *arguments], check=True)
    restored = Pipeline.restore((tmp_path / "out").read_bytes())
    whole = _finished(advanced(Pipeline(), batches), len(batches) + 1)
    assert_equal(restored.store, whole.store)


@pytest.mark.parametrize("stamps", [True, False])
def test_a_restored_aligner_goes_on_exactly(stamps: bool) -> None:
    rng = np.random.default_rng(1)
    recorder = training(rng, 6, counts=False)
    sample = lose(recorder.sample(stamps=stamps, groups=False), rng, lines=0.02, kernels=0.02)
    whole, restarted = ProcessAligner("2.28.3"), ProcessAligner("2.28.3")
    expected, found = list[bytes](), list[bytes]()
    parts = zip(np.array_split(sample.operations, 7), np.array_split(sample.kernels, 7), strict=True)
    for operations, kernels in parts:
        restarted = state.restore(state.snapshot(restarted), ProcessAligner(None))
        for aligner, out in ((whole, expected), (restarted, found)):
            aligner.feed_operations(operations)
            aligner.feed_kernels(kernels)
            out.append(aligner.advance(final=False).tobytes())
    found.append(restarted.advance(final=True).tobytes())
    expected.append(whole.advance(final=True).tobytes())
    assert found == expected
    assert any(found)


def test_an_alignment_is_kept_without_the_store_that_it_works_on() -> None:
    pipeline, known = Pipeline(), Store()
    alignment = Alignment(known, lambda process: version_of(known, process))
    data = state.snapshot(alignment, outside=[known])
    new = Alignment(pipeline.store, lambda process: version_of(pipeline.store, process))
    restored = state.restore(data, new, outside=[pipeline.store])
    assert restored.advance(final=True).tolist() == []
    assert state.snapshot(restored, outside=[pipeline.store]) == data


def test_a_damaged_snapshot_makes_no_pipeline() -> None:
    kept = Pipeline().snapshot()
    with pytest.raises(StateError):
        Pipeline.restore(kept[:-1])

"""A service that is restarted in the middle of a job finds exactly what one that was not would have found."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from service.simulated_batches import SECOND_NS, advanced, batches_by_job
from service.test_portions import assert_equal

from ncclscope_service.pipeline import Pipeline
from ncclscope_simulator import SimulationConfig
from ncclscope_wire.batch import Batch
from ncclscope_wire.errors import StateError

_JOBS = {"clean": SimulationConfig(iterations=6, nodes=2, gpus=2, tp=2, pp=1, dp=2)}


@pytest.fixture(scope="module")
def batches_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Batch]]:
    """The batches of each job, simulated once."""
    return batches_by_job(_JOBS, tmp_path_factory)


def _finished(pipeline: Pipeline, seconds: int) -> Pipeline:
    pipeline.finish(seconds * SECOND_NS)
    return pipeline


def test_what_was_fed_and_not_yet_worked_on_is_kept(batches_of: Callable[[str], list[Batch]]) -> None:
    batches = batches_of("clean")
    cut = len(batches) // 2
    pipelines = Pipeline(), Pipeline()
    for pipeline in pipelines:
        for batch in batches[:cut]:
            pipeline.ingest_batch(batch, agent="a", session="s", job="j")
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


def test_a_damaged_snapshot_makes_no_pipeline() -> None:
    kept = Pipeline().snapshot()
    with pytest.raises(StateError):
        Pipeline.restore(kept[:-1])

"""The names that states are written by: whoever changes one says so, and a state of a build with other names is read.

`python tests/service/store/test_state_names.py` writes `state_names.txt` again.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
from service.same_state import assert_same
from service.simulated_batches import SECOND_NS, advanced, batches_by_job, simulated_batches

from ncclscope.description_files import described_fields
from ncclscope_models.description import completed
from ncclscope_service import pipeline as pipeline_module
from ncclscope_service.keep.service_state import ServiceState
from ncclscope_service.pipeline import Pipeline
from ncclscope_service.store import state
from ncclscope_service.store.settings import PipelineSettings
from ncclscope_simulator import SimulationConfig
from ncclscope_simulator.faults import parse_faults
from ncclscope_wire.batch import Batch

_JOBS: Final = {
    "stamped": SimulationConfig(iterations=6, nodes=2, gpus=2, tp=2, pp=1, dp=2, chunk_seconds=0.5),
    "graphs": SimulationConfig(
        iterations=6, nodes=1, gpus=2, tp=2, pp=1, dp=1, cuda_graphs=2, cuda_graph_trace="node", chunk_seconds=0.5,
    ),
    "inspector": SimulationConfig(
        iterations=6, nodes=1, gpus=2, tp=2, pp=1, dp=1, inspector="v4.2", inspector_holes=0.1, capture="duty:0.5",
    ),
    "by order": SimulationConfig(
        iterations=6, nodes=1, gpus=4, tp=2, pp=2, dp=1, nccl="2.20.5", capture="duty:0.5",
        faults=parse_faults(["drop_lines:ratio=0.02", "drop_kernels:ratio=0.02"]),
    ),
}  # fmt: skip
_DESCRIBED: Final = completed(
    described_fields(
        (
            "framework=megatron", "version=0.13", "layers=2", "hidden=512", "ffn=2048", "heads=8", "kv_heads=8",
            "sequence=512", "gated=false", "positions_learned=512", "vocabulary=50688", "norm=LayerNorm", "bias=true",
            "tied=true", "tensor=2", "pipeline=1", "ranks=4", "micro_batch=1", "global_batch=8", "precision=BF16",
            "gradients_fp32=true",
        )
    )
)  # fmt: skip
"""Of a job of so many ranks: what a look at it keeps is part of the state."""
_LIST: Final = Path(__file__).with_name("state_names.txt")


def _names_in(value: object) -> dict[str, set[str]]:
    """Names of the attributes that a state has of each class."""
    pickler = state._Pickler(io.BytesIO(), state.known_to(type(value).__module__), [])  # pyright: ignore[reportPrivateUsage]
    pickler.dump(value)
    found = dict[str, set[str]]()
    for kind, names in pickler._shapes:  # pyright: ignore[reportPrivateUsage]
        found.setdefault(state.name_of(kind), set()).update(names)
    return found


def _written(found: dict[str, set[str]]) -> str:
    return "".join(f"{name}: {' '.join(sorted(found[name]))}\n" for name in sorted(found))


def _names_today(batches_of: Callable[[str], list[Batch]]) -> str:
    found = _names_in(ServiceState())
    for job in _JOBS:
        described = _DESCRIBED if job == "stamped" else None
        pipeline, batches = Pipeline(PipelineSettings(description=described)), batches_of(job)
        for begin in range(0, len(batches), 2):
            advanced(pipeline, batches[begin : begin + 2], since=begin)
            for name, attributes in _names_in(pipeline).items():
                found.setdefault(name, set()).update(attributes)
        pipeline.finish((len(batches) + 1) * SECOND_NS)
        for name, attributes in _names_in(pipeline).items():
            found.setdefault(name, set()).update(attributes)
    return _written(found)


@pytest.fixture(scope="module")
def batches_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Batch]]:
    """The batches of each job, simulated once."""
    return batches_by_job(_JOBS, tmp_path_factory)


@pytest.mark.slow
def test_every_name_in_a_state_is_in_the_list(batches_of: Callable[[str], list[Batch]]) -> None:
    assert _names_today(batches_of) == _LIST.read_text(), (
        "names in the state have changed: states of the last release have the old ones. Say in `state.RENAMED` what is "
        "called otherwise, give what is new a default, or raise `state._FORMAT`; then write the list again "
        f"(python {Path(__file__).name})"
    )


_OLD_BUILD: Final = """
import sys
from pathlib import Path
from service.simulated_batches import advanced, simulated_batches
from service.store.test_state_names import _JOBS
from ncclscope_service.pipeline import Pipeline

folder, cut, out = sys.argv[1:]
batches = simulated_batches(_JOBS["stamped"], Path(folder), portions=6)
Path(out).write_bytes(advanced(Pipeline(), batches[:int(cut)]).snapshot())
"""


def _old_build(repository: Path, folder: Path, words: dict[str, str]) -> None:
    """A copy of the service in which some things are called otherwise."""
    for packages in (repository / "service", repository / "agents", repository / "simulator"):
        for package in packages.glob("ncclscope_*"):
            shutil.copytree(package, folder / package.name, ignore=shutil.ignore_patterns("__pycache__", "*.js"))
    pattern = re.compile(rf"\b({'|'.join(words)})\b")
    for path in (folder / "ncclscope_service").rglob("*.py"):
        path.write_text(pattern.sub(lambda found: words[found[0]], path.read_text()))


@pytest.mark.slow
def test_a_job_goes_on_exactly_from_the_state_of_a_build_with_other_private_names(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Classes and attributes of every stage; what is not private of the pipeline's own as well."""
    batches = simulated_batches(_JOBS["stamped"], tmp_path / "job", portions=6)
    cut = len(batches) // 2
    whole = advanced(Pipeline(), batches[:cut])
    names = _names_in(whole)
    classes = [
        name.partition(":")[2] for name in names if name.startswith(f"{pipeline_module.__name__.partition('.')[0]}.")
    ]
    classes = [
        name for name in classes if name.isidentifier() and name not in ("Pipeline", "PipelineSettings", "Table")
    ]
    private = {each for attributes in names.values() for each in attributes if each.startswith("_")} - {"_fields"}
    words = {word: f"{word}_of_before" for word in {*classes, *private}}
    assert len(classes) > 50
    assert len(private) > 100
    _old_build(repository, tmp_path / "old", words)
    paths = [str(tmp_path / "old"), str(repository / "tests"), *sys.path]
    arguments = [str(tmp_path / "again"), str(cut), str(tmp_path / "kept")]
    code = f"import sys; sys.path[:0] = {paths!r}\n{_OLD_BUILD}"
    subprocess.run([sys.executable, "-c", code, *arguments], check=True)
    data = (tmp_path / "kept").read_bytes()
    renamed = dict[str, str]()
    for name in names:
        module, _, own = name.partition(":")
        if own in words:
            renamed[f"{module}:{words[own]}"] = name
        renamed.update({f"{name}.{words[each]}": each for each in words})
    monkeypatch.setattr(state, "RENAMED", renamed)
    restored = Pipeline.restore(data)
    for pipeline in (whole, restored):
        advanced(pipeline, batches[cut:], since=cut)
        pipeline.finish((len(batches) + 1) * SECOND_NS)
    assert_same(restored, whole)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        _LIST.write_text(_names_today(lambda job: simulated_batches(_JOBS[job], Path(made) / job, portions=6)))

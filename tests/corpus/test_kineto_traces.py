"""Real traces of the PyTorch profiler: operations, sizes and kernels equal a plain count of their events."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ncclscope_agent.files.recognise import FileKind, recognise
from ncclscope_agent.sources.kineto.batches import read_trace
from ncclscope_wire.records import Source, SourceKind
from ncclscope_wire.terms import DATA_TYPES, OPERATIONS

pytestmark = pytest.mark.corpus

TYPES = {"Float": 4, "BFloat16": 2, "Long": 8}
NAMES = {"allreduce": "AllReduce", "broadcast": "Broadcast", "_allgather_base": "AllGather"}


def traces(corpus: Path) -> list[Path]:
    found = sorted((corpus / "kineto").rglob("*.json*"))
    return [path for path in found if recognise(path.read_bytes()[: 1 << 20], path.name) is FileKind.KINETO]


def events_of(path: Path) -> list[dict[str, Any]]:
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return events


def test_every_call_and_kernel_of_real_traces_is_read(corpus: Path) -> None:
    assert len(traces(corpus)) == 7
    for path in traces(corpus):
        events = events_of(path)
        kernels = [e for e in events if e.get("cat") == "kernel" and e["name"].startswith("ncclKernel_")]
        kernels += [e for e in events if e.get("cat") == "kernel" and e["name"].startswith("ncclDevKernel_")]
        calls = [e["args"] for e in events if e.get("name") == "record_param_comms" and "dtype" in e["args"]]
        calls = [each for each in calls if each["Collective name"] in NAMES]
        batches = list(read_trace(path, source=Source(kind=SourceKind.KINETO, name=path.name, key="k")))
        rows = np.concatenate([batch.kernels for batch in batches])
        spent = sorted((rows["end_ns"] - rows["start_ns"]).tolist())
        assert np.allclose(spent, sorted(1000 * e["dur"] for e in kernels), atol=2), path.name
        templates = batches[0].operation_templates
        read = Counter[tuple[str, int]]()
        for row in np.concatenate([batch.operations for batch in batches]):
            of = templates[row["template"]]
            size = int(of["count"]) * DATA_TYPES[of["data_type"]].size_bytes
            read[OPERATIONS[of["op"]].name, size] += 1
        sizes = Counter(
            (NAMES[each["Collective name"]], each["In msg nelems"] * TYPES[each["dtype"]]) for each in calls
        )
        assert read == sizes, path.name
        assert not batches[-1].gaps

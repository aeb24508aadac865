"""Real exports with log lines in the shape that produced them: every kernel finds its operation.

No published export comes with its NCCL log. So the log is written here in NCCL's format, one line per NCCL call that
the export's own NVTX ranges show, and one group for each kernel that was launched before the capture began. A call
in which nothing was launched is logged with no elements: from 2.20.3 on NCCL launches nothing for these.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ncclscope.offline import run_offline
from ncclscope_agent.sources.nsys.export import describe_export
from ncclscope_service.store.rows import Match
from ncclscope_service.store.settings import PipelineSettings
from ncclscope_service.store.tables import Store
from ncclscope_simulator import log_lines
from ncclscope_wire.terms import NO_NUMBER

pytestmark = pytest.mark.corpus

EXPORTS = {
    "zy-uestc-yccl/ring4.nsys2022.sqlite": ("2.23.4", 172),
    "zy-uestc-yccl/ring4.nsys2023.sqlite": ("2.23.4", 172),
    "gindachen-nsys-ai/mfu_2gpu_before.sqlite": ("2.27.7", 66),
}
"""NCCL version of the log that is written, and NCCL kernels."""

_CALLS = """
SELECT (globalTid >> 24) & 16777215, globalTid & 16777215,
  coalesce(text, (SELECT value FROM StringIds WHERE id = textId)), start, end
FROM NVTX_EVENTS
WHERE coalesce(text, (SELECT value FROM StringIds WHERE id = textId)) IN
  ('ncclAllGather', 'ncclSend', 'ncclRecv', 'ncclGroupStart', 'ncclGroupEnd')
ORDER BY start
"""
_LAUNCHES = """
SELECT (k.globalPid >> 24) & 16777215, k.deviceId, r.start, k.correlationId
FROM CUPTI_ACTIVITY_KIND_KERNEL k
JOIN StringIds s ON s.id = k.shortName
LEFT JOIN CUPTI_ACTIVITY_KIND_RUNTIME r ON r.correlationId = k.correlationId AND r.globalTid >> 24 = k.globalPid >> 24
WHERE s.value LIKE 'nccl%'
ORDER BY k.correlationId
"""


@dataclass(slots=True)
class Unit:
    """One lone call or one group, with the kernel it launched."""

    begin: int
    ops: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    """Operation and time of its call."""
    end: int = 0
    correlation: int | None = None


@dataclass(frozen=True, slots=True)
class Written:
    """A log beside its export."""

    path: Path
    truth: dict[tuple[int, int], int]
    """Line by (pid, correlation id): that of the last operation launched with that kernel."""


def _asked(path: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True)) as database:
        return database.execute(query).fetchall()


def _units(calls: list[tuple[Any, ...]]) -> list[Unit]:
    units: list[Unit] = []
    is_open = False
    for _, _, text, start, end in calls:
        name = str(text)
        if name == "ncclGroupStart":
            units.append(Unit(start))
            is_open = True
        elif name == "ncclGroupEnd":
            is_open = False
            units[-1].end = end
        elif is_open or not units or start > units[-1].end:
            # A library around NCCL may show its own range of the same name: the outer one is the call.
            if not is_open:
                units.append(Unit(start))
            units[-1].ops.append((name.removeprefix("nccl"), start))
            units[-1].end = max(units[-1].end, end)
    return [unit for unit in units if unit.ops]


def _units_of(export: Path, pid: int) -> list[Unit]:
    """The calls of one process with their kernels; kernels launched before the capture began get one in front."""
    units = _units([row for row in _asked(export, _CALLS) if row[0] == pid])
    launches = [row for row in _asked(export, _LAUNCHES) if row[0] == pid]
    for _, _, at, correlation in (row for row in launches if row[2] is not None):
        (unit,) = [unit for unit in units if unit.begin <= at <= unit.end]
        unit.correlation = correlation
    for _, _, _, correlation in reversed([row for row in launches if row[2] is None]):
        first = units[0].begin - 50_000_000
        units.insert(0, Unit(first, [(op, first) for op, _ in units[0].ops], first, correlation))
    return units


def _lines(unit: Unit, prefix: str, op_count: int, *, epoch_ns: int | None) -> list[str]:
    """The operation lines of a unit, with CALL lines of its group where there are no stamps (epoch None)."""
    lines: list[str] = []
    for nth, (op, at) in enumerate(unit.ops):
        given = {"send": "0x7f0000000000", "recv": "0x7f0000200000", "comm": "0x5581000", "stream": "0x5582000"}
        count = 4096 if unit.correlation is not None else 0
        written = {"op": op, "count": count, "dtype": 7, "red": 0, "root": nth // 2}
        before, after = log_lines.operation_parts(**given, **written, ranks=4)  # type: ignore[arg-type]  # two dicts
        stamp = "" if epoch_ns is None else log_lines.stamp(epoch_ns + at)
        lines.append(f"{stamp}{prefix} NCCL INFO {before}{op_count:x}{after}")
        if epoch_ns is None:
            call = log_lines.call(**given, **written)  # type: ignore[arg-type]  # two dicts
            lines.append(f"{prefix.split(' ', maxsplit=1)[0]} NCCL CALL {call}")
    if epoch_ns is None and len(unit.ops) > 1:
        place = prefix.split(" ", maxsplit=1)[0]
        return [f"{place} NCCL CALL ncclGroupStart()", *lines, f"{place} NCCL CALL ncclGroupEnd()"]
    return lines


def _write(export: Path, log: Path, version: str, *, stamps: bool) -> Written:
    ((epoch,),) = _asked(export, "SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME")
    host = describe_export(export).host or "node"
    lines = [f"NCCL version {version}+cuda12.4"]
    truth: dict[tuple[int, int], int] = {}
    for pid, device in sorted({row[:2] for row in _asked(export, _LAUNCHES)}):
        op_count = 0
        for unit in _units_of(export, pid):
            lines += _lines(unit, f"{host}:{pid}:{pid} [{device}]", op_count, epoch_ns=epoch if stamps else None)
            if unit.correlation is not None:
                truth[pid, unit.correlation] = max(number for number, line in enumerate(lines, 1) if "opCount" in line)
                op_count += version < "2.27"
    log.write_text("\n".join(lines) + "\n")
    return Written(log, truth)


def _aligned(export: Path, tmp_path: Path, version: str, *, stamps: bool) -> tuple[Store, Written]:
    written = _write(export, tmp_path / "nccl.node.log", version, stamps=stamps)
    run = run_offline([written.path, export], job="corpus", settings=PipelineSettings())
    return run.pipeline.store, written


_GUESS = 0.85
"""Without stamps, one export holds a run of equal launches of which two have no kernel: nothing tells which two. The
33 launches of that run are stated at 0.25 to 0.85; 11 of them are right, as one wrong start shifts them all."""


@pytest.mark.parametrize("stamps", [True, False], ids=["stamps", "calls"])
@pytest.mark.parametrize("name", EXPORTS)
def test_every_kernel_of_a_real_export_finds_its_operation(
    name: str, stamps: bool, corpus: Path, tmp_path: Path
) -> None:
    version, amount = EXPORTS[name]
    known, written = _aligned(corpus / "nsys" / name, tmp_path, version, stamps=stamps)
    kernels, operations = known.kernels.rows, known.operations.rows
    assert len(kernels) == amount
    assert np.all(kernels["launch"] != NO_NUMBER)
    matched = operations[operations["match"] == Match.MATCHED]
    sure = matched[matched["confidence"] > _GUESS]
    assert len(sure) == len(matched) or not stamps
    lines = {
        (known.processes[process].pid, int(kernel["correlation_id"])): int(row["line"])
        for row in sure
        for kernel in [kernels[int(row["kernel"])]]
        for process in [int(kernel["process"])]
    }
    wrong = {key: (line, written.truth.get(key)) for key, line in lines.items() if written.truth.get(key) != line}
    assert not wrong

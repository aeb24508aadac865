"""`python -m benchmarks.real_run --out DIR`: one real run on one GPU, and what each way of watching cost it.

Needs a GPU, PyTorch and `pip install .`, and takes some ten minutes: every variant of `record.variants`, for the NCCL
that PyTorch loads or for each `--library libnccl.so.2`. `python -m benchmarks.real_run.score DIR` needs no GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.real_run import record

from ncclscope_agent.nccl_settings.advice import NcclVersion

_PROBE = "import torch; print(*torch.cuda.nccl.version(), torch.cuda.get_device_name(0), sep='|')"


def main() -> None:
    """Runs all variants and prints what they cost."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_run")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--only", nargs="+", help="these variants, by name")
    parser.add_argument("--preload", type=Path, action="append", help="a libnccl.so.2 to load before PyTorch's")
    parser.add_argument("--library", type=Path, action="append", help="a libnccl.so.2 to call without PyTorch's groups")
    parser.add_argument("--calls", type=int, default=20_000, help="calls of one rank alone to time; 0: none")
    parser.add_argument("--inspector", type=Path, help="libnccl-profiler-inspector.so")
    parser.add_argument("--cpu", action="store_true", help="without a GPU and NCCL: tries the script itself")
    options = parser.parse_args()
    rows: list[record.Row] = []
    called = [(library, True) for library in options.library or ()]
    preloaded = [(library, False) for library in options.preload or ()]
    for library, direct in called + preloaded or [(None, False)]:
        version = NcclVersion(2, 27, 5) if options.cpu else _version(library, direct=direct)
        for ranks, variant in _runs(options, direct=direct):
            folder = (options.out / f"nccl-{version}{'-direct' if direct else ''}-{ranks}-{variant.name}").resolve()
            row = record.run(
                variant,
                version,
                ranks=ranks,
                folder=folder,
                library=library,
                direct=direct,
                arguments=["--steps", str(options.steps), *(["--cpu"] if options.cpu else [])],
            )
            rows.append(row)
            record.mask(folder)
            print(json.dumps(dataclasses.asdict(row)), flush=True)
    (options.out / "runs.json").write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
    print_cost(rows)


def _runs(options: argparse.Namespace, *, direct: bool) -> Iterator[tuple[int, record.Variant]]:
    """Ranks and variant of each run that is wanted."""
    if options.calls and not options.cpu:
        for variant in record.call_variants(options.calls, inspector=options.inspector):
            yield 1, variant
    for ranks in options.ranks:
        for variant in record.variants(nsys=shutil.which("nsys") is not None, inspector=options.inspector):
            if direct and variant.dump_on_timeout:
                continue  # there is no watchdog of PyTorch
            if variant.name in (options.only or (variant.name,)) and not (options.cpu and variant.name == "graph"):
                yield ranks, variant


def _version(library: Path | None, *, direct: bool) -> NcclVersion:
    """The version of NCCL that ranks will use: of the library, or asked of PyTorch in a process of its own."""
    if library is not None and direct:
        number = ctypes.c_int()
        ctypes.CDLL(str(library)).ncclGetVersion(ctypes.byref(number))
        return NcclVersion(number.value // 10_000, number.value // 100 % 100, number.value % 100)
    preload = {} if library is None else {"LD_PRELOAD": str(library)}
    said = subprocess.run(
        [sys.executable, "-c", _PROBE], env={**os.environ, **preload}, check=True, capture_output=True, text=True
    ).stdout.strip()
    print("NCCL and GPU:", said)
    major, minor, patch = said.split("|")[:3]
    return NcclVersion(int(major), int(minor), int(patch))


def print_cost(rows: list[record.Row]) -> None:
    """Time of a step or call by variant, as a ratio to the plain runs at both ends."""
    print("\n| NCCL | ranks | variant | ms per step | µs per call | to plain | log MB |\n|---|---|---|---|---|---|---|")
    for row in rows:
        plain = [
            _time(other)
            for other in rows
            if other.variant.startswith("plain") and (other.nccl, other.ranks) == (row.nccl, row.ranks)
        ]
        own, known = _time(row), [each for each in plain if each is not None]
        ratio = "not measured" if own is None or not known else f"{own * len(known) / sum(known):.3f}"
        step, call = ("" if each is None else f"{each}" for each in (row.step_ms, row.call_us))
        log_mb = row.log_bytes / 1e6
        print(f"| {row.nccl} | {row.ranks} | {row.variant} | {step} | {call} | {ratio} | {log_mb:.2f} |")


def _time(row: record.Row) -> float | None:
    return row.call_us if row.step_ms is None else row.step_ms


if __name__ == "__main__":
    main()

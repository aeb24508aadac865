"""`python -m benchmarks.real_run --out DIR`: one real run on one GPU, and what each way of watching cost it.

Needs a GPU, PyTorch and `pip install .`, and takes some ten minutes: every variant of `record.variants`, for the NCCL
that PyTorch loads or for each `--library libnccl.so.2`. `python -m benchmarks.real_run.score DIR` needs no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
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
    parser.add_argument("--only", help="one variant by its name")
    parser.add_argument("--library", type=Path, action="append", help="a libnccl.so.2 to load before PyTorch's")
    parser.add_argument("--inspector", type=Path, help="libnccl-profiler-inspector.so")
    parser.add_argument("--cpu", action="store_true", help="without a GPU and NCCL: tries the script itself")
    options = parser.parse_args()
    rows: list[record.Row] = []
    arguments = ["--steps", str(options.steps), *(["--cpu"] if options.cpu else [])]
    for library in options.library or [None]:
        version = NcclVersion(2, 27, 5) if options.cpu else _version(library)
        for ranks in options.ranks:
            for variant in record.variants(nsys=shutil.which("nsys") is not None, inspector=options.inspector):
                if options.only not in {None, variant.name} or (options.cpu and variant.name == "graph"):
                    continue
                folder = (options.out / f"nccl-{version}-{ranks}-{variant.name}").resolve()
                rows.append(
                    record.run(variant, version, ranks=ranks, folder=folder, library=library, arguments=arguments)
                )
                record.mask(folder)
                print(json.dumps(dataclasses.asdict(rows[-1])), flush=True)
    (options.out / "runs.json").write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
    print_cost(rows)


def _version(library: Path | None) -> NcclVersion:
    """The version of NCCL that ranks will load, asked of PyTorch in a process of its own."""
    preload = {} if library is None else {"LD_PRELOAD": str(library)}
    said = subprocess.run(
        [sys.executable, "-c", _PROBE], env={**os.environ, **preload}, check=True, capture_output=True, text=True
    ).stdout.strip()
    print("NCCL and GPU:", said)
    major, minor, patch = said.split("|")[:3]
    return NcclVersion(int(major), int(minor), int(patch))


def print_cost(rows: list[record.Row]) -> None:
    """Time of a step by variant, as a ratio to the plain runs at both ends."""
    print("\n| NCCL | ranks | variant | ms per step | to plain | log MB |\n|---|---|---|---|---|---|")
    for row in rows:
        plain = [
            other.step_ms
            for other in rows
            if other.variant.startswith("plain")
            and (other.nccl, other.ranks) == (row.nccl, row.ranks)
            and other.step_ms is not None
        ]
        step = "not measured" if row.step_ms is None else row.step_ms
        ratio = f"{row.step_ms * len(plain) / sum(plain):.3f}" if row.step_ms is not None and plain else "not measured"
        print(f"| {row.nccl} | {row.ranks} | {row.variant} | {step} | {ratio} | {row.log_bytes / 1e6:.2f} |")


if __name__ == "__main__":
    main()

"""Any bytes to one of the readers of `targets.py`, for `tools/fuzz-log`: fuzz_inputs.py TARGET [ARGUMENT]..."""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_ROOT / folder) for folder in ("agents", "service", "simulator", "command", "tests")]

atheris = importlib.import_module("atheris")  # not typed, and not in the environment of the tests

with atheris.instrument_imports(include=["ncclscope_agent", "ncclscope_service", "ncclscope_wire", "ncclscope"]):
    from fuzz.targets import TARGETS


def main() -> None:
    """Fuzzes until the time is over."""
    target = TARGETS[sys.argv.pop(1)]
    with tempfile.TemporaryDirectory() as seeds:
        for number, seed in enumerate(target.seeds()):
            (Path(seeds) / str(number)).write_bytes(seed)
        atheris.Setup([*sys.argv, seeds], target.check)
        atheris.Fuzz()


if __name__ == "__main__":
    main()

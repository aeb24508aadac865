"""A benchmark of alignment: which kernel ran which logged operation, with truth, scores, baselines and a bound.

    python -m benchmarks.alignment            # all tables; `-h` lists them one by one

docs/alignment-benchmark.md says what the scenarios are and how to run them over another aligner.
"""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent.parent
# A checkout needs no installation.
sys.path[:0] = [
    path for name in ("agents", "service", "simulator", "command") if (path := str(_ROOT / name)) not in sys.path
]

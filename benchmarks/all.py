"""python benchmarks/all.py: every benchmark in its short form, one table after the other.

Each is a script of its own with options of its own; rates are per core, and ratios are of one run.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

RUNS: tuple[tuple[str, str, list[str]], ...] = (
    ("Lines parsed", "parse_lines.py", ["--repeat", "3"]),
    ("Alignment: scores, bounds, counts, speed", "-m benchmarks.alignment", ["--short"]),
    ("Findings: simulated faults, false alarms, delays", "-m benchmarks.findings", ["--short"]),
    ("The pipeline from batches to measures", "-m benchmarks.pipeline", []),
    ("Faults", "-m benchmarks.faults", ["--times", "0.03"]),
    ("On the wire", "wire.py", []),
    ("What an agent costs by rate, and what its writer notices", "-m benchmarks.agent_budget", ["--seconds", "10"]),
    ("From a line to /metrics, and memory", "freshness.py", ["--seconds", "15"]),
    ("An nsys export of two million kernels", "read_export.py", []),
    ("Shapes: parallelism, iterations, counts", "shapes.py", []),
    ("Clocks", "clock.py", ["5"]),
    ("Measures against truth", "-m benchmarks.measures", ["--iterations", "4"]),
    ("Join, clocks and measures as ranks grow", "scale.py", []),
    ("Published counts and volumes, by emission rules", "-m benchmarks.models", []),
    ("A scrape of /metrics", "-m benchmarks.scrape", []),
    ("From files to files", "-m benchmarks.analyze", []),
)


def main() -> None:
    """Runs them all."""
    root = Path(__file__).resolve().parent.parent
    for title, script, arguments in RUNS:
        print(f"\n## {title}\n", flush=True)
        command = script.split() if script.startswith("-m") else [str(root / "benchmarks" / script)]
        subprocess.run([sys.executable, *command, *arguments], check=True, cwd=root)


if __name__ == "__main__":
    main()

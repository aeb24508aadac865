"""What the detectors say of simulated jobs whose faults are known: who was named, who wrongly, and how soon.

    python -m benchmarks.findings            # all tables; `-h` lists them one by one

Every job goes the whole way, second by second of its own time: log lines as they are written and exports as they
finish, through the agent's readers and the service's pipeline. Beside the findings stands what two peers' rules would
have said on the same kernels. Another table has the false alarms of healthy series over months, window by window.
"""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent.parent
# A checkout needs no installation.
sys.path[:0] = [
    path for name in ("agents", "service", "simulator", "command") if (path := str(_ROOT / name)) not in sys.path
]

"""CPU of one look at a machine's counters: `python benchmarks/machine_counters.py [--looks 200]`.

The tree of /sys is copied files of 16 ports, and 8 GPUs are a stand-in that answers at once: so this is the agent's
own share. A driver's is beside it: counters of a real NIC are asked of its firmware, in the kernel. The bar: 0.1 % of
a core at one look per 5 s, which is 5 ms.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "agents"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from agent.machine_samples import FakeGpu, FakeNvml, as_pynvml, write_nic

from ncclscope_agent.node.machine_port import MachineFollower

_EVERY_SECONDS = 5.0


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--looks", type=int, default=200)
    looks = parser.parse_args().looks
    with tempfile.TemporaryDirectory() as folder:
        ports = [write_nic(Path(folder), f"mlx5_{number}", number) for number in range(16)]
        nvml = FakeNvml([FakeGpu(f"00000000:{number:02X}:00.0", links=18) for number in range(8)])
        follower = MachineFollower("node00", sys=Path(folder), nvml=lambda: as_pynvml(nvml))
        list(follower.poll(0))
        begun, sent = time.process_time(), 0
        for look in range(looks):
            (ports[look % 16] / "counters/symbol_error").write_text(f"{look}\n")
            sent += sum(len(batch.facts) for batch in follower.poll((look + 1) * 5_000_000_000))
        seconds = (time.process_time() - begun) / looks
    print("| ports | GPUs | looks | facts | CPU a look | share of a core at one look per 5 s |")
    print("|---|---|---|---|---|---|")
    print(f"| 16 | 8 | {looks} | {sent} | {seconds * 1e3:.2f} ms | {seconds / _EVERY_SECONDS:.3%} |")


if __name__ == "__main__":
    main()

"""How many processes of a job step a launcher starts on this node, and how many of them have come so far."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Final

_LOCAL_SIZES: Final = (
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "PALS_LOCAL_SIZE",
    "JSM_NAMESPACE_LOCAL_SIZE",
    "LOCAL_WORLD_SIZE",
)
"""Where launchers say it as a number. *Source:* Open MPI, MPICH (Hydra), HPE PALS, IBM jsrun, torchrun."""
_TASKS_PER_NODE: Final = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
_STEPS: Final = (
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "PMIX_NAMESPACE",
    "PMI_JOBID",
    "PBS_JOBID",
    "LSB_JOBID",
    "FLUX_JOB_ID",
)
_RUN_OF_NODES: Final = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_LONGEST_NAME: Final = 200


def local_tasks(environment: Mapping[str, str]) -> int | None:
    """Processes of this step on this node; None if the launcher does not say."""
    for name in _LOCAL_SIZES:
        if environment.get(name, "").isdigit():
            return int(environment[name])
    told = next((environment[name] for name in _TASKS_PER_NODE if name in environment), None)
    node = environment.get("SLURM_NODEID", "")
    return None if told is None or not node.isdigit() else _of_node(told, int(node))


def step_name(environment: Mapping[str, str]) -> str:
    """The same for all processes of a step, and another for the next step, as far as launchers tell them apart."""
    named = ".".join(environment[name] for name in _STEPS if environment.get(name))
    return re.sub(r"[^\w.,:-]", "_", named)[:_LONGEST_NAME] or "step"


def note_arrival(descriptor: int, environment: Mapping[str, str]) -> None:
    """Adds this process to the list in an open file, in one write."""
    os.lseek(descriptor, 0, os.SEEK_END)
    os.write(descriptor, f"{step_name(environment)}\n".encode())


def arrivals(descriptor: int, environment: Mapping[str, str]) -> int:
    """How many processes of this step are in the list."""
    listed = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    return listed.split(b"\n").count(step_name(environment).encode())


def _of_node(told: str, node: int) -> int | None:
    """Of one node in a list like 2(x3),1: two on each of three nodes, one on the fourth. *Source:* sbatch(1)."""
    first = 0
    for part in told.split(","):
        found = _RUN_OF_NODES.fullmatch(part.strip())
        if found is None:
            return None
        first += int(found[2] or 1)
        if node < first:
            return int(found[1])
    return None

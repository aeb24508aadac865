"""What starts jobs here, as the environment tells, and what it takes to watch them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduler:
    """What starts jobs here."""

    name: str
    job: str | None
    """The job that this process belongs to."""
    advice: str


_KNOWN: Final = (
    ("Slurm", "SLURM_JOB_ID", "srun ncclscope run -- COMMAND, or the site's prologs (docs/deploy-slurm.md)"),
    ("Kubernetes", "KUBERNETES_SERVICE_HOST", "an agent as a sidecar in each pod (docs/deploy-kubernetes.md)"),
    ("PBS", "PBS_JOBID", "ncclscope run -- COMMAND around each task (docs/commands.md)"),
    ("LSF", "LSB_JOBID", "ncclscope run -- COMMAND around each task (docs/commands.md)"),
    ("Flux", "FLUX_JOB_ID", "ncclscope run -- COMMAND around each task (docs/commands.md)"),
    ("torchrun", "TORCHELASTIC_RUN_ID", "ncclscope run -- torchrun ... on each node (docs/deploy-systemd.md)"),
)
"""Name, the variable that tells, and what to do. *Source:* srun(1); Kubernetes, "Accessing the API
from a Pod"; qsub(1B); bsub(1); flux-run(1); torchrun's documentation, "Environment variables"."""


def scheduler_here(environment: Mapping[str, str]) -> Scheduler | None:
    """The one that the environment tells of; None where none does. Slurm is asked before what runs in its jobs."""
    for name, variable, advice in _KNOWN:
        if environment.get(variable):
            job = environment[variable] if name != "Kubernetes" else None
            return Scheduler(name=name, job=job, advice=advice)
    return None

"""The NCCL version of a process, from what was printed."""

from __future__ import annotations

from ncclscope_service.store import Store


def version_of(known: Store, process: int) -> str | None:
    """The version that the process printed itself, else the only one in its log, else the only one of its job.

    Up to 2.21 one process of a job prints it, without saying which; later communicator rank 0 does. Two versions in
    one place are a mistake that NCCL warns of, or logs of several runs: then that place says nothing.
    """
    own = known.process_version.get(process)
    if own is not None:
        return own
    source = known.process_source.get(process)
    for seen in (known.source_versions.get(source, set()) if source is not None else set(), _of_job(known, process)):
        if len(seen) == 1:
            return next(iter(seen))
    return None


def _of_job(known: Store, process: int) -> set[str]:
    return known.job_versions.get(known.process_job[process], set())

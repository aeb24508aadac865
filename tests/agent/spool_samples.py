"""Spools over a disk of dictionaries, for tests: what is written, and what a restart finds."""

from __future__ import annotations

from wire.sample_batches import log_batch, log_source

from ncclscope_agent.spool import Spool
from ncclscope_agent.spool_limits import SpoolJob, SpoolLimits
from ncclscope_agent.spool_records import Frame, scan
from ncclscope_wire.codec import encode_message
from ncclscope_wire.messages import BatchMessage

SECOND = 1_000_000_000


def frame(sequence: int, *, source: int = 1, step: int = 10, operations: int = 1) -> Frame:
    """The sequence-th batch of a chapter: rows of the `step` lines up to its end."""
    begin = (sequence - 1) * step
    rows = tuple((0, begin + row) for row in range(operations))
    batch = log_batch(begin, begin + step, source=log_source(source), operations=rows)
    payload = encode_message(BatchMessage(sequence=sequence, batch=batch))
    return Frame(sequence, batch.source.key, begin, begin + step, begin + step, False, None, 0, payload)


class Disk:
    """Files in memory."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.synced: dict[str, int] = {}

    def perform(self, job: SpoolJob) -> None:
        """Does a job."""
        for name, data in job.appends:
            self.files[name] = self.files.get(name, b"") + data
        for name in job.syncs:
            self.synced[name] = len(self.files[name])
        for name in job.removes:
            self.files.pop(name, None)

    def recovered(self, limits: SpoolLimits | None = None, *, agent_id: str = "a") -> Spool:
        """The spool of an agent that is started with these files."""
        spool = Spool(agent_id=agent_id, limits=limits)
        for name in sorted(self.files):
            spool.recover(name, self.files[name])
        return spool

    def frames(self, spool: Spool) -> list[tuple[str, int]]:
        """Session and number of all batches that the spool has, in its order; they are read as a session would."""
        found: list[tuple[str, int]] = []
        for chapter in spool.chapters:
            at = chapter.acknowledged + 1
            while (stretch := spool.read_next(chapter, at)) is not None:
                frames = stretch.frames if stretch.name is None else scan(self.files[stretch.name]).frames
                found += [(chapter.session_id, known.sequence) for known in frames if known.sequence >= at]
                at = stretch.last + 1
        return found


def write_all(spool: Spool, disk: Disk, now_ns: int = 0) -> None:
    """Does all jobs that there are."""
    while (job := spool.take_job(now_ns)) is not None:
        disk.perform(job)
        spool.on_done(now_ns)

"""Spools over a database, for tests: what is written, and what a restart finds."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
from wire.sample_batches import log_batch, log_source

from ncclscope_agent.spool.contents import Spool
from ncclscope_agent.spool.database import SpoolDatabase
from ncclscope_agent.spool.limits import SpoolLimits
from ncclscope_agent.spool.records import Frame, Owner, Transaction
from ncclscope_wire.codec import encode_message
from ncclscope_wire.messages import BatchMessage

SECOND = 1_000_000_000
OWNER = Owner("a", name="n", host="h", job="j")


def frame(sequence: int, *, chapter: int = 1, source: int = 1, step: int = 10, operations: int = 1) -> Frame:
    """The sequence-th batch of a chapter: rows of the `step` lines up to its end, 16 bytes each."""
    begin = (sequence - 1) * step
    rows = tuple((0, begin + row) for row in range(operations))
    batch = log_batch(begin, begin + step, source=log_source(source), operations=rows)
    noise = np.random.default_rng(sequence).integers(1, 1 << 62, (2, operations))  # or a frame would be small
    batch.operations["op_count"], batch.operations["logged_at_ns"] = noise
    payload = encode_message(BatchMessage(sequence=sequence, batch=batch))
    return Frame(chapter, sequence, batch.source.key, begin, begin + step, begin + step, False, None, 0, payload)


_disks: list[Disk] = []


def remove_disks() -> None:
    """Removes all disks that were made. Left to the collector, a connection may go before the disk that closes it."""
    while _disks:
        _disks.pop().remove()


class Disk:
    """A folder with the database of a spool; `remove_disks` removes it when the test is over."""

    def __init__(self, limits: SpoolLimits | None = None) -> None:
        self._folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        self.limits = limits or SpoolLimits()
        self.database = self._opened()
        self.transactions: list[Transaction] = []
        self._synced: Path | None = None
        _disks.append(self)

    def remove(self) -> None:
        """Closes the database and removes the folder."""
        self.database.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _opened(self) -> SpoolDatabase:
        return SpoolDatabase(self.path.parent, transaction_bytes=self.limits.transaction_bytes)

    @property
    def path(self) -> Path:
        """The file of the database."""
        return self._folder / "files" / "spool-2.sqlite"

    def recovered(self) -> Spool:
        """The spool of an agent that is started with these files; the one before was killed."""
        self.database.close()
        self.path.parent.mkdir(exist_ok=True)
        self.database = self._opened()
        spool = Spool(OWNER, limits=self.limits)
        spool.recover(self.database.recover())
        return spool

    def write(self, spool: Spool, now_ns: int = 0, *, at_once: bool = True) -> None:
        """Carries out all that is to be written now."""
        self.path.parent.mkdir(exist_ok=True)
        while (wanted := spool.next_transaction(now_ns, at_once=at_once)) is not None:
            spool.on_done(now_ns, self.database.commit(wanted))
            self.transactions.append(wanted)
            if wanted.is_synced:
                self._copy_synced()

    def _copy_synced(self) -> None:
        self._synced = self._folder / "synced"
        shutil.rmtree(self._synced, ignore_errors=True)
        shutil.copytree(self.path.parent, self._synced)

    def lose_what_is_not_synced(self) -> None:
        """The power is cut."""
        self.database.close()
        shutil.rmtree(self.path.parent)
        if self._synced is not None:
            shutil.copytree(self._synced, self.path.parent)

    def frames(self, spool: Spool) -> list[tuple[str, int]]:
        """Session and number of all batches that the spool has, in its order; they are read as a session would."""
        found: list[tuple[str, int]] = []
        for chapter in spool.chapters:
            at = chapter.acknowledged + 1
            while at <= chapter.last:
                frames, last = spool.frames_in_memory(chapter, at), chapter.last
                if frames is None:
                    frames, last = self.database.frames(chapter.number, at, chapter.written)
                found += [(chapter.session_id, known.sequence) for known in frames]
                at = last + 1
        return found

"""The threads of a process, each with its pending launches and kernels; or one, where they cannot be told apart."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ncclscope_service import whole_rows
from ncclscope_service.align_rows import launch_times
from ncclscope_service.distinct import groups
from ncclscope_service.lanes import Lanes
from ncclscope_service.pending import TRACK_KERNEL
from ncclscope_service.signatures import Signatures
from ncclscope_service.track import Track
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS


@dataclass(slots=True)
class Threads:
    """The tracks of a process, and what they share."""

    lanes: Lanes = field(default_factory=Lanes)
    are_told: bool = True
    """Kernels are launched by threads that log; else all rows are one thread's, number 0."""
    log: bool = True
    """Threads that launch are those that log, though they are not told apart."""
    is_whole: bool = False
    """The recording began before anything was launched."""
    knows_groups: bool = False
    """Whether the log tells groups, as far as its first operation shows."""
    _tracks: dict[int, Track] = field(default_factory=dict[int, Track])
    _kernel_lanes: Signatures = field(default_factory=lambda: Signatures(("device_id", "stream_id")))

    def __len__(self) -> int:
        return len(self._tracks)

    def __iter__(self) -> Iterator[Track]:
        return iter(self._tracks.values())

    def items(self) -> ItemsView[int, Track]:
        """Threads with their tracks."""
        return self._tracks.items()

    def of(self, tid: int) -> Track:
        """The track of a thread, new if it is."""
        if tid not in self._tracks:
            self._tracks[tid] = Track(self.lanes, knows_groups=self.knows_groups)
            if self.is_whole:
                self._tracks[tid].begin_with_log()
        return self._tracks[tid]

    def begin_with_log(self) -> None:
        """Nothing was launched before the recording began."""
        self.is_whole = True
        for track in self._tracks.values():
            track.begin_with_log()

    def number_of(self, launches: Columns) -> int:
        """The thread that these launches are pending on."""
        return int(launches["tid"][0]) if self.are_told else 0

    def add_launches(self, rows: Columns, ids: NDArray[np.int64]) -> None:
        """Takes further launches (LAUNCH) of any threads; `ids` are the operations that they point into."""
        if not self.are_told:
            self.of(0).add_launches(rows, ids)
            return
        for tid, mine in groups(rows["tid"]):
            self.of(tid).add_launches(whole_rows.taken(rows, mine), ids)

    def add_kernels(self, rows: Columns) -> None:
        """Takes further kernels (ALIGN_KERNEL) of any threads."""
        known = self.columns_of(rows)
        if not self.are_told:
            self.of(0).add_kernels(known)
            return
        for tid, mine in groups(rows["launch_tid"]):
            self.of(tid).add_kernels(whole_rows.taken(known, mine))

    def columns_of(self, rows: Columns) -> Columns:
        """Kernels (ALIGN_KERNEL) as tracks need them (TRACK_KERNEL)."""
        known = np.empty(len(rows), dtype=TRACK_KERNEL)
        known["id"], known["correlation_id"] = rows["id"], rows["correlation_id"]
        known["time_ns"] = launch_times(rows)
        known["tid"] = rows["launch_tid"] if self.log and not self.are_told else NO_NUMBER
        known["lane"] = self.kernel_lanes_of(rows)
        known["is_orphan"] = rows["launch_start_ns"] == NO_TIME_NS
        known["device"] = rows["device_id"]
        known["duration_ns"] = np.where(rows["censored"], 0, rows["end_ns"] - rows["start_ns"])
        known["grid_x"] = np.maximum(rows["grid_x"], 0)
        known["kernel_class"], known["data_type"] = rows["kernel_class"], rows["data_type"]
        return known

    def kernel_lanes_of(self, rows: Columns) -> NDArray[np.int32]:
        """The lane (device and stream) of each kernel (ALIGN_KERNEL), in order of appearance."""
        return self._kernel_lanes.number(rows)

    def start_clean(self, kernels: Columns, *, collapse: bool, enough: bool) -> bool | None:
        """Whether each thread's first kernels (ALIGN_KERNEL) are just those expected; None if it is too early to say.

        Threads are exact on their own, but where rows are missing the order between threads is worth more.
        """
        known = self.columns_of(kernels)
        answers = [
            self.of(tid).agrees_with(known[kernels["launch_tid"] == tid], collapse=collapse, enough=enough)
            for tid in np.unique(kernels["launch_tid"]).tolist()
        ]
        if any(answer is None for answer in answers):
            return None
        return all(answers)

    def merge(self, *, log: bool) -> None:
        """From now on the process is one thread; `log`: the threads that launch its kernels log, too."""
        self.are_told, self.log = False, log
        tracks, self._tracks = self._tracks, {}
        rows = [track.launches for track in tracks.values() if len(track.launches)]
        if not rows:
            return
        offsets = np.cumsum([0, *(len(track.ids) for track in tracks.values() if len(track.launches))])
        for launches, offset in zip(rows, offsets[:-1].tolist(), strict=True):
            launches["begin"] += offset
            launches["end"] += offset
        ids = np.concatenate([track.ids for track in tracks.values() if len(track.launches)])
        merged = np.concatenate(rows)
        self.of(0).add_launches(merged[np.argsort(merged["first_op"], kind="stable")], ids)

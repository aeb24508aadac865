"""What an earlier start left of a spool: its files, back to chapters, frames and positions."""

from __future__ import annotations

import re
from collections import Counter
from typing import Final

from ncclscope_agent.spool_chapter import Chapter
from ncclscope_agent.spool_ends import Ends, end_of_frame
from ncclscope_agent.spool_records import FORMAT_VERSION, Frame, Header, scan
from ncclscope_agent.spool_shelf import FramesFile, Shelf

_CHAPTER_NAME: Final = re.compile(r"chapter-(\d{6})")
_FRAMES_NAME: Final = re.compile(r"frames-(\d{10})-(\d{6})")
_HEADER_WITHIN: Final = 1 << 16
"""Where the header of a file of entries ends at the latest: it has no positions."""


def is_of_a_spool(name: str) -> bool:
    """Whether a file of this name may be part of a spool."""
    return (_CHAPTER_NAME.fullmatch(name) or _FRAMES_NAME.fullmatch(name)) is not None


class Recovery:
    """Takes files in, in the order of their names, and puts what is in them on the shelf."""

    def __init__(self, agent_id: str, shelf: Shelf, ends: Ends) -> None:
        self._agent_id = agent_id
        self._shelf = shelf
        self._ends = ends
        self.unusable = Counter[str]()
        """Files that were left alone, by why."""
        self.damaged_bytes = 0
        self.newest: Header | None = None
        """Of the file that was begun last, of those that can be read."""

    def feed(self, name: str, data: bytes) -> None:
        """Takes in a file."""
        if chapter := _CHAPTER_NAME.fullmatch(name):
            self._feed_entries(name, int(chapter[1]), data)
        elif frames := _FRAMES_NAME.fullmatch(name):
            self._feed_frames(name, int(frames[1]), int(frames[2]), data)

    def _feed_entries(self, name: str, number: int, data: bytes) -> None:
        self._shelf.number_is_taken(chapter=number)
        header = scan(data[:_HEADER_WITHIN]).header
        if header is not None and not self._is_readable(header):
            self.unusable["other_version"] += 1
            return
        self._shelf.grow_entries(name, len(data))
        if header is not None:
            self._known_chapter(number, header)

    def _feed_frames(self, name: str, number: int, chapter: int, data: bytes) -> None:
        self._shelf.number_is_taken(file=number, chapter=chapter)
        scanned = scan(data)
        if scanned.header is not None and not self._is_readable(scanned.header):
            self.unusable["other_version"] += 1
            return
        self.damaged_bytes += scanned.damaged_bytes
        if scanned.header is not None:
            self._known_chapter(chapter, scanned.header)
            self._ends.take(scanned.header.positions)
        known = self._shelf.chapters.get(chapter)
        if known is None:
            self.unusable["no_header"] += 1
            self._shelf.removes.append(name)
            return
        begun_ns = scanned.header.created_ns if scanned.header is not None else 0
        file = FramesFile(name, chapter, begun_ns, size=len(data), newest_ns=begun_ns)
        for frame in scanned.frames:
            self._take_frame(known, file, frame)
        for positions in scanned.positions:
            self._ends.take(positions, only_further=True)
        self._shelf.add_file(file)

    def _is_readable(self, header: Header) -> bool:
        return header.format_version == FORMAT_VERSION and header.agent_id == self._agent_id

    def _known_chapter(self, number: int, header: Header) -> None:
        if self.newest is None or header.created_ns >= self.newest.created_ns:
            self.newest = header
        self._shelf.chapters.setdefault(number, Chapter(number, header.session_id, header.protocol_version))

    def _take_frame(self, chapter: Chapter, file: FramesFile, frame: Frame) -> None:
        if frame.sequence <= chapter.last:
            return  # a write that failed half-way was tried again
        if chapter.last == 0:
            chapter.acknowledged = frame.sequence - 1
        chapter.entries = frame.entries
        file.note(frame, file.begun_ns if frame.observed_at_ns is None else frame.observed_at_ns)
        chapter.last = frame.sequence
        chapter.note(frame.key, frame.begin, frame.end)
        self._ends.note(frame.key, end_of_frame(frame))

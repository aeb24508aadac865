"""What of a spool is on its disk, by file and by chapter: which files are there, and which of them may go.

A file of frames is removed when all in it is acknowledged and a newer one is there; the dictionary entries of a chapter
when nothing of the chapter is wanted, and no file has frames of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from ncclscope_agent.spool_chapter import Chapter
from ncclscope_agent.spool_records import Frame


@dataclass(slots=True)
class FramesFile:
    """A file of frames, and what is in it."""

    name: str
    chapter: int
    begun_ns: int
    first: int = 0
    last: int = 0
    size: int = 0
    newest_ns: int = 0
    frames: int = 0
    ends: dict[str, int] = field(default_factory=dict[str, int])

    def note(self, frame: Frame, now_ns: int) -> None:
        """That frame is in it."""
        self.first = self.first or frame.sequence
        self.last = frame.sequence
        self.frames += 1
        self.newest_ns = max(self.newest_ns, now_ns)
        self.ends[frame.key] = frame.end


class Shelf:
    """The files and the chapters."""

    def __init__(self) -> None:
        self.chapters: dict[int, Chapter] = {}
        self.files: deque[FramesFile] = deque()
        """Oldest first."""
        self.current: FramesFile | None = None
        """The one that is written; None where another is to be begun."""
        self.entries_sizes: dict[str, int] = {}
        """Of the files of dictionary entries, by name."""
        self.bytes = 0
        self.removes: list[str] = []
        """Files to be removed."""
        self._next_file = self._next_chapter = 1

    @property
    def has_wanted(self) -> bool:
        """Something in the files is not acknowledged."""
        return self.oldest_ns is not None

    @property
    def oldest_ns(self) -> int | None:
        """When the oldest file was begun of which something is wanted; None where there is none."""
        for file in self.files:
            chapter = self.chapters.get(file.chapter)
            if chapter is not None and file.last > chapter.acknowledged:
                return file.begun_ns
        return None

    def number_is_taken(self, *, file: int = 0, chapter: int = 0) -> None:
        """Files and chapters that are begun get later numbers."""
        self._next_file = max(self._next_file, file + 1)
        self._next_chapter = max(self._next_chapter, chapter + 1)

    def begin_chapter(self, session_id: str) -> Chapter:
        """A new one, behind all that are there."""
        chapter = self.chapters[self._next_chapter] = Chapter(self._next_chapter, session_id)
        self._next_chapter += 1
        return chapter

    def new_file(self, chapter: Chapter, now_ns: int) -> FramesFile:
        """Another file for frames; it is on the shelf when it is added."""
        name = f"frames-{self._next_file:010d}-{chapter.number:06d}"
        self._next_file += 1
        return FramesFile(name, chapter.number, now_ns)

    def add_file(self, file: FramesFile) -> None:
        """A file is there."""
        self.files.append(file)
        self.bytes += file.size

    def grow_entries(self, name: str, size: int) -> None:
        """So many bytes were added to a file of dictionary entries."""
        self.entries_sizes[name] = self.entries_sizes.get(name, 0) + size
        self.bytes += size

    def names_to_sync(self) -> tuple[str, ...]:
        """The files that are written, entries first."""
        assert self.current is not None, "there is no file to sync"
        chapter = self.chapters.get(self.current.chapter)
        names = [chapter.entries_name] if chapter is not None and chapter.entries_name in self.entries_sizes else []
        return (*names, self.current.name)

    def expire_first(self) -> int:
        """Removes the oldest file, whatever is in it; gives how many batches of it were wanted."""
        file, lost = self.files[0], 0
        chapter = self.chapters.get(file.chapter)
        if chapter is not None:
            lost = max(0, file.last - max(file.first - 1, chapter.acknowledged))
            chapter.expired = max(chapter.expired, file.last)
            for key, end in file.ends.items():
                chapter.gone[key] = max(end, chapter.gone.get(key, 0))
        self._remove_first_file()
        return lost

    def remove_files_that_are_done(self) -> None:
        """Removes the oldest files as long as nothing in them is wanted, but for the newest file."""
        while len(self.files) > 1 and self.files[0] is not self.current:
            chapter = self.chapters.get(self.files[0].chapter)
            if chapter is not None and self.files[0].last > chapter.acknowledged:
                break
            self._remove_first_file()

    def remove_chapters_that_are_done(self, live: Chapter | None, held: Collection[int]) -> list[Chapter]:
        """Lets go of chapters of which nothing is wanted, there, or `held` elsewhere (by number); gives these."""
        held = {*held, *(file.chapter for file in self.files)}
        gone = [each for each in self.chapters.values() if each is not live and each.is_done]
        gone = [each for each in gone if each.number not in held]
        for chapter in gone:
            del self.chapters[chapter.number]
            if (size := self.entries_sizes.pop(chapter.entries_name, None)) is not None:
                self.bytes -= size
                self.removes.append(chapter.entries_name)
        return gone

    def _remove_first_file(self) -> None:
        file = self.files.popleft()
        self.bytes -= file.size
        self.removes.append(file.name)

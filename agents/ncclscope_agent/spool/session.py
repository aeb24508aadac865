"""Session that keeps what is not acknowledged in a spool, over restarts of the agent too.

The spool's chapters are delivered one after the other, each under its own session id; readers add to the last one
meanwhile. What the service makes of a session id decides how a chapter goes on:

- known: the chapter goes on behind what was acknowledged, byte for byte as it was spooled.
- not known, and the chapter is whole from its batch 1 on and begins where the service is: it is sent as it is.
- not known otherwise (the service lost its state, batches expired or were damaged, a loss of power took more of the
  spool than of the service): the chapter is sent again under a new id, with all its dictionary entries in front
  (`replay.py`). Sources that are still there to be read are read again if the spool lacks their beginning. Readers
  begin again where that ends, in a new chapter.

The window is only what is in memory of the chapter that is delivered: at most half of it is filled from the disk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from ncclscope_agent.link.frames import InFlight, WindowLimits
from ncclscope_agent.link.session import AnySession, SessionStatistics, unfinished
from ncclscope_agent.spool.contents import Spool
from ncclscope_agent.spool.records import Chapter, Entries, Frame
from ncclscope_agent.spool.replay import Replay, entries_only
from ncclscope_wire.batch import Batch
from ncclscope_wire.codec import encode_message
from ncclscope_wire.errors import ProtocolError
from ncclscope_wire.frame import HEADER_BYTES, encode_frame
from ncclscope_wire.messages import PROTOCOL_VERSION, BatchMessage, Hello, Position, Welcome

START: Final = Position(end=0)


@dataclass(frozen=True, slots=True)
class Resume:
    """Sources that are read from their files again, and where readers go on."""

    left_out: frozenset[str]
    positions: Mapping[str, Position]
    moves_readers: bool


def resume(
    chapters: Collection[Chapter],
    service: Mapping[str, Position],
    readers: Mapping[str, Position],
    holds: Callable[[str, Position], bool],
) -> Resume:
    """Decides by the positions that the service has, and those that the readers have."""
    keys = {key for chapter in chapters for key in chapter.ranges if any(True for _ in chapter.ranges_of(key))}
    left_out = frozenset(key for key in keys if _is_read_again(key, chapters, service.get(key, START), holds))
    begin = dict(service)
    for key in keys - left_out:
        reached, known = readers.get(key), service.get(key, START)
        if reached is not None and not known.is_complete and reached.end >= known.end:
            begin[key] = reached
    moves = any(begin.get(key, START).end != readers.get(key, START).end for key in begin.keys() | readers.keys())
    return Resume(left_out, begin, moves_readers=moves)


def _is_read_again(
    key: str, chapters: Collection[Chapter], known: Position, holds: Callable[[str, Position], bool]
) -> bool:
    """Whether the spool lacks something of a source behind that position, and its file does not."""
    if known.is_complete:
        return False
    at = known.end
    for begin, end in (part for chapter in chapters for part in chapter.ranges_of(key)):
        if begin > at:
            return holds(key, known)
        at = max(at, end)
    # What an earlier version of us spooled is read from the file instead, as far as the service does not have it.
    is_foreign_wanted = any(
        end > known.end
        for chapter in chapters
        if chapter.protocol_version != PROTOCOL_VERSION
        for _, end in chapter.ranges.get(key, ())
    )
    return is_foreign_wanted and holds(key, known)


def is_whole(chapter: Chapter, service: Mapping[str, Position], readers: Mapping[str, Position] | None) -> bool:
    """Whether a service at these positions can take a chapter as it is; `readers`: where those of a live one began."""
    if chapter.acknowledged or chapter.protocol_version != PROTOCOL_VERSION:
        return False
    if any(len(known) > 1 for known in chapter.ranges.values()):
        return False
    starts = {key: known[0][0] for key, known in chapter.ranges.items()}
    if readers is not None:
        starts = {key: known.end for key, known in readers.items()} | starts
        if any(starts.get(key, 0) != known.end for key, known in service.items()):
            return False
    return all(service.get(key, START).end == begin for key, begin in starts.items())


@dataclass(frozen=True, slots=True)
class Load:
    """Batches that the session wants, up to `last`: if fewer are found, the others are lost."""

    chapter: int
    sequence: int
    last: int
    in_memory: list[Frame] | None
    """None: they are on the disk."""
    replay: Replay | None


class SpooledSession(AnySession):
    """The state machine over a spool. `new_id` gives session ids that no service has seen.

    The spool has taken in what an earlier start left. `holds` says whether a source can be read from its file from a
    position on. Beside what `Session` asks of its shell: if `wants_entries_of` names a chapter, give `load_entries`
    what the disk has of its entries; if `wants_load`, read what `next_load` says and give it to `load`; if
    `wants_reconnect`, end the connection and make another.
    """

    def __init__(
        self,
        hello: Hello,
        spool: Spool,
        *,
        new_id: Callable[[], str],
        holds: Callable[[str, Position], bool] = lambda key, position: False,
        limits: WindowLimits | None = None,
    ) -> None:
        super().__init__(hello, limits=limits)
        self.spool = spool
        self._new_id = new_id
        self._holds = holds
        self._live = spool.begin(hello.session_id)
        self._queue = deque(spool.chapters)
        self._left_out: dict[int, frozenset[str]] = {}
        self._service_positions: Mapping[str, Position] = {}
        self._loaded = 0
        self._replay: Replay | None = None
        self._is_replaying = self._is_planned = self._has_hole = self._wants_entries = False
        self.positions = spool.positions
        self.generation = 1 if self.positions else 0
        self._begin_delivery()

    # What readers give

    @property
    def has_room(self) -> bool:
        """`offer` would accept a batch now."""
        return self.generation > 0 and not self.exchange.is_closed and self.spool.has_room

    @property
    def is_drained(self) -> bool:
        """Everything that was offered is acknowledged, in this start and before."""
        return len(self._queue) == 1 and self._live.is_done

    def offer(self, batch: Batch) -> bool:
        """Takes a batch into the spool; False if that is full (or readers must begin again): offer it again later."""
        if not self.has_room:
            return False
        if self.spool.wants_new_chapter:
            self._begin_chapter(self.spool.positions)
            self._go_to_first()
            return False
        sequence = self._live.last + 1
        framed = self._framed(self.window.payload(batch, sequence))
        frame = Frame(
            self._live.number,
            sequence,
            batch.source.key,
            batch.begin,
            batch.end,
            batch.end_line,
            batch.is_last,
            batch.observed_at_ns,
            0,
            memoryview(framed)[HEADER_BYTES:],
            batch.content_check,
        )
        new = entries_only(batch)
        entries = None if new is None else encode_message(BatchMessage(sequence=sequence, batch=new))
        self.spool.append(frame, entries)
        self._batches += 1
        if self._loaded == sequence - 1 and self._queue[0] is self._live and self.window.has_room():
            self._loaded = sequence
            self._put_in_window(framed, frame)
        return True

    # What the disk gives

    @property
    def wants_entries_of(self) -> int | None:
        """The chapter of which the dictionary entries are wanted; None if there is none."""
        return self._queue[0].number if self._wants_entries else None

    def load_entries(self, chapter: int, on_disk: Iterable[Entries]) -> None:
        """Takes in the dictionary entries of a chapter that are on the disk."""
        if chapter != self.wants_entries_of:
            return  # what they were for is over
        self._wants_entries = False
        known = self.spool.entries_of(self._queue[0], on_disk)
        self._replay = Replay(self._service_positions, known, left_out=self._left_out.get(chapter, frozenset()))
        self._move_on()

    @property
    def is_behind(self) -> bool:
        """Something waits on the disk, and the service is to get it as soon as there is room."""
        return self._loaded < self._queue[0].last or len(self._queue) > 1

    @property
    def wants_load(self) -> bool:
        """There are batches to be brought to memory, and room for them."""
        return (
            self.exchange.is_streaming
            and self._loaded < self._queue[0].last
            and not self._wants_entries
            and not self.wants_reconnect
            and not self._has_hole
            and self.window.has_room(share=2)
        )

    def next_load(self) -> Load:
        """The next batches that are wanted."""
        chapter, sequence = self._queue[0], self._loaded + 1
        held = self.spool.frames_in_memory(chapter, sequence)
        if held is None:
            return Load(chapter.number, sequence, chapter.written, None, self._replay)
        return Load(chapter.number, sequence, held[-1].sequence if held else chapter.last, held, self._replay)

    def load(self, wanted: Load, frames: Iterable[Frame], last: int) -> None:
        """The batches of `next_load`, up to this number."""
        chapter = self._queue[0]
        if (wanted.chapter, wanted.sequence, wanted.replay) != (chapter.number, self._loaded + 1, self._replay):
            return  # the service has said meanwhile where to go on
        for frame in frames:
            if self._replay is None and frame.sequence != self._loaded + 1:
                self._has_hole = True
                break
            self._count_damaged(frame.sequence - 1)
            self.spool.replayed += 1
            self._loaded = frame.sequence
            chapter.gone.setdefault(frame.key, frame.begin)
            self._deliver_frame(frame)
        if self._replay is not None:
            self._count_damaged(last)
            self._loaded = last
        self._has_hole |= self._loaded < last
        self._move_on()

    def _count_damaged(self, last: int) -> None:
        """Counts what is missing up to this number, unless it was dropped for its age."""
        missing = last - max(self._loaded, self._queue[0].expired)
        if missing > 0:
            self.spool.count_lost("damaged", missing)

    def _deliver_frame(self, frame: Frame) -> None:
        if self._replay is None:
            self._put_in_window(self._framed(frame.payload), frame)
            return
        lost = self._replay.lost.total()
        for batch in self._replay.batches_for(frame):
            self._put_in_window(self._framed(self.window.payload(batch, self.window.next)), frame)
        if self._replay.lost.total() > lost:
            self.spool.count_lost("unusable")

    def _framed(self, payload: bytes | memoryview) -> bytes:
        return encode_frame(payload, max_frame_bytes=self.window.limits.max_frame_bytes)

    def _put_in_window(self, framed: bytes, frame: Frame) -> None:
        """Has a batch sent; `frame` is what of the spool is done with when it is acknowledged."""
        self.window.add(
            InFlight(framed, frame.key, frame.end, frame.is_last, frame.observed_at_ns, spooled=frame.sequence)
        )

    # What the service says

    def on_connected(self, *, token: str = "") -> None:
        """A connection stands: sends Hello."""
        self.wants_reconnect = False
        super().on_connected(token=token)

    def on_disconnected(self) -> None:
        """The connection is gone, or could not be made. If it was the first, readers begin without a service."""
        super().on_disconnected()
        if self.generation == 0 and not self.exchange.is_closed:
            self._begin_readers(self.spool.positions)

    def statistics(self) -> SessionStatistics:
        """A snapshot of the session; the window is all that is not acknowledged, on disk too."""
        known = super().statistics()
        oldest_ns = known.oldest_observed_at_ns
        if oldest_ns is None and not len(self.window):
            oldest_ns = self.spool.statistics().oldest_ns
        waiting = sum(chapter.last - chapter.acknowledged for chapter in self._queue)
        return replace(known, window_batches=waiting, oldest_observed_at_ns=oldest_ns)

    def _on_welcome(self, welcome: Welcome) -> None:
        if welcome.session_known:
            self._go_on(welcome.acknowledged)
        else:
            self._begin_at(welcome.positions)
        self._move_on()

    def _on_acknowledge(self, sequence: int) -> None:
        self._acknowledge(sequence)
        self._move_on()

    def _go_on(self, acknowledged: int) -> None:
        """The service knows the session: it has all up to this number."""
        window = self.window
        is_recovered = not self._is_replaying and window.highest_sent == 0
        if acknowledged < window.first - 1 or (acknowledged >= window.next and not is_recovered):
            in_flight = f"{window.first} to {window.next - 1}"
            self._send_under_another_id()
            raise ProtocolError(
                f"the service says that batch {acknowledged} was applied last, and batches {in_flight} are in flight"
            )
        if acknowledged >= window.next:
            window.clear(acknowledged + 1)
            self._loaded = min(acknowledged, self._queue[0].last)
            self.spool.acknowledge(self._queue[0], self._loaded, {})
        window.next_to_send = acknowledged + 1
        self._acknowledge(acknowledged)

    def _begin_at(self, positions: Mapping[str, Position]) -> None:
        """The service does not know the session: it has these positions."""
        self._service_positions = positions
        self.applied = unfinished(positions)
        if not self._is_replaying and self.generation > 0 and self._is_whole(self._queue[0], positions):
            self.window.next_to_send = self.window.first
            return
        if len(self._queue) == 1 and not self._live.last:
            self._begin_empty(positions)
            return
        if not self._is_planned:
            self._plan(positions)
        if not self._queue[0].is_done and not self._is_replaying:
            self._send_under_another_id()
            self._is_planned = True
        elif self._is_replaying:
            self.window.clear()
            self._replay = None
            self._loaded = self._queue[0].acknowledged
            self._is_planned = False
            self._wants_entries = True

    def _begin_empty(self, positions: Mapping[str, Position]) -> None:
        """Nothing is spooled: readers begin where the service is, and the session keeps the id of its Hello."""
        self.spool.rebase(positions)
        self._left_out.clear()
        self.window.next_to_send = self.window.first
        self._begin_readers(positions)

    def _is_whole(self, chapter: Chapter, positions: Mapping[str, Position]) -> bool:
        """Whether a service at these positions can take the chapter as it is."""
        if self.window.first != 1 or chapter.number in self._left_out:
            return False
        return is_whole(chapter, positions, self.positions if chapter is self._live else None)

    def _plan(self, positions: Mapping[str, Position]) -> None:
        """Has sources read again, and readers go on, where the service and the spool say."""
        planned = resume(self._queue, positions, self.spool.positions, self._holds)
        for chapter in self._queue:
            self._left_out[chapter.number] = self._left_out.get(chapter.number, frozenset()) | planned.left_out
        must_move = bool(planned.left_out) or planned.moves_readers
        if must_move or self._queue[0] is self._live or self.generation == 0:
            self._begin_chapter(planned.positions)
            self._go_to_first()

    # Chapters

    def _begin_chapter(self, positions: Mapping[str, Position]) -> None:
        """Has readers begin again at these positions, with new dictionaries; what they give is another session."""
        self.spool.rebase(positions)
        self._live = self.spool.begin(self._new_id())
        self._queue.append(self._live)
        self._begin_readers(positions)

    def _go_to_first(self) -> None:
        """Leaves the first chapters, if these are done with."""
        first = self._queue[0]
        self._queue = deque(chapter for chapter in self._queue if chapter is self._live or not chapter.is_done)
        if self._queue[0] is not first:
            self._begin_delivery()
            self.wants_reconnect = True

    def _begin_readers(self, positions: Mapping[str, Position]) -> None:
        self.positions = dict(positions)
        self.generation += 1

    def _begin_delivery(self) -> None:
        """Goes to the first chapter: it is sent as it is, unless an earlier version of us spooled it."""
        chapter = self._queue[0]
        is_foreign = chapter.protocol_version != PROTOCOL_VERSION
        self._rename(self._new_id() if is_foreign else chapter.session_id, is_replaying=is_foreign)
        self.window.clear(1 if is_foreign else chapter.acknowledged + 1)

    def _send_under_another_id(self) -> None:
        """Has the first chapter sent again, as a session that the service does not know."""
        if self._queue[0] is self._live:
            self._begin_chapter(self.spool.positions)
        self._rename(self._new_id(), is_replaying=True)
        self.window.clear()
        self.wants_reconnect = True

    def _rename(self, session_id: str, *, is_replaying: bool) -> None:
        self.exchange.rename(session_id)
        self._is_replaying = is_replaying
        self._is_planned = self._has_hole = self._wants_entries = False
        self._replay = None
        self._loaded = self._queue[0].acknowledged

    def _move_on(self) -> None:
        """Goes to the next chapter, or around a hole, if all before that is acknowledged."""
        if len(self.window) or self._wants_entries or self.wants_reconnect:
            return
        chapter = self._queue[0]
        if self._has_hole:
            self.spool.acknowledge(chapter, self._loaded, {})
            self._send_under_another_id()
        elif self._loaded >= chapter.last:
            self.spool.acknowledge(chapter, self._loaded, {})
            self._go_to_first()

    def _acknowledge(self, sequence: int) -> None:
        ends: dict[str, int] = {}
        done = 0
        for batch in self.window.acknowledge(sequence):
            self._record_applied(batch)
            following = self.window.oldest
            if following is None or following.spooled != batch.spooled:  # else it is sent in several
                done, ends[batch.key] = batch.spooled, batch.end
        if done:
            self.spool.acknowledge(self._queue[0], done, ends)

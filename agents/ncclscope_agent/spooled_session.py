"""A session that keeps what is not acknowledged in a spool, over restarts of the agent too.

The spool's chapters are delivered one after the other, each under its own session id; readers add to the last one
meanwhile. What the service makes of a session id decides how a chapter goes on:

- known: the chapter goes on behind what was acknowledged, byte for byte as it was spooled.
- not known, and the chapter is whole from its batch 1 on and begins where the service is: it is sent as it is.
- not known otherwise (the service lost its state, batches expired or were damaged, a loss of power took more of the
  spool than of the service): the chapter is sent again under a new id, with all its dictionary entries in front
  (`replay.py`). Sources that are still there to be read are read again where the spool lacks their beginning. Readers
  begin anew where that ends, in a new chapter.

The window is only what is in memory of the chapter that is delivered: at most half of it is filled from the disk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Final

from ncclscope_agent.replay import Replay, entries_only
from ncclscope_agent.session import Session, SessionState, SessionStatistics, WindowLimits
from ncclscope_agent.spool import Spool
from ncclscope_agent.spool_chapter import Chapter, Stretch
from ncclscope_agent.spool_records import Frame
from ncclscope_wire.batch import Batch
from ncclscope_wire.codec import encode_message
from ncclscope_wire.errors import ProtocolError
from ncclscope_wire.frame import HEADER_BYTES, encode_frame
from ncclscope_wire.messages import PROTOCOL_VERSION, BatchMessage, Hello, Message, Position, Welcome

_START: Final = Position(end=0)


class SpooledSession(Session):
    """The state machine over a spool. `new_id` gives session ids that no service has seen.

    The spool has taken in what an earlier start left. `holds` says whether a source can be read from its file from a
    position on. Beside what `Session` asks of its shell: where `wants_entries`, give `take_entries` the bytes of
    `entries_name`; where `wants_load`, read what `next_stretch` says and give it to `load`; where `wants_reconnect`,
    end the connection and make another.
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
        self._is_replaying = self._is_planned = self._has_hole = False
        self._marks: dict[int, tuple[int, int]] = {}
        """Of a batch in the window: the spooled batch that it came from, and where that ends in its source."""
        self._asked: tuple[object, ...] = ()
        self.wants_entries = False
        self.positions = dict(spool.positions)
        self.generation = 1 if spool.positions else 0
        self._take_up()

    # What readers give

    @property
    def has_room(self) -> bool:
        """`offer` would accept a batch now."""
        return self.generation > 0 and not self.is_closed and self.spool.has_room

    @property
    def is_drained(self) -> bool:
        """Everything that was offered is acknowledged, in this start and before."""
        return len(self._queue) == 1 and self._live.is_done

    def offer(self, batch: Batch) -> bool:
        """Takes a batch into the spool; False where that is full (or readers must begin anew): offer it again later."""
        if not self.has_room:
            return False
        if self.spool.wants_new_chapter:
            self._begin_chapter(self.spool.positions)
            self._go_to_first()
            return False
        sequence = self._live.last + 1
        framed = self._framed(self._payload(batch, sequence))
        source = batch.source.key
        frame = Frame(
            sequence,
            source,
            batch.begin,
            batch.end,
            batch.end_line,
            batch.is_last,
            batch.observed_at_ns,
            0,
            memoryview(framed)[HEADER_BYTES:],
        )
        new = entries_only(batch)
        entries = None if new is None else encode_message(BatchMessage(sequence=sequence, batch=new))
        self.spool.append(frame, entries)
        self._batches += 1
        if self._loaded == sequence - 1 and self._queue[0] is self._live and self._is_roomy():
            self._loaded = sequence
            self._hold(framed, frame)
        return True

    # What the disk gives

    @property
    def entries_name(self) -> str:
        """The file of the dictionary entries that are wanted."""
        return self._queue[0].entries_name

    def take_entries(self, name: str, data: bytes) -> None:
        """The bytes of the file of dictionary entries of this name; none where there is none."""
        chapter = self._queue[0]
        if not self.wants_entries or name != chapter.entries_name:
            return  # what they were for is over
        self.wants_entries = False
        left_out = self._left_out.get(chapter.number, frozenset())
        self._replay = Replay(self._service_positions, self.spool.entries_of(chapter, data), left_out=left_out)
        self._move_on()

    @property
    def is_behind(self) -> bool:
        """Something waits on the disk, and the service is to get it as soon as there is room."""
        return self._loaded < self._queue[0].last or len(self._queue) > 1

    @property
    def wants_load(self) -> bool:
        """There are batches to be brought to memory, and room for them."""
        return (
            self.state is SessionState.STREAMING
            and self._loaded < self._queue[0].last
            and not self.wants_entries
            and not self.wants_reconnect
            and not self._has_hole
            and self._is_roomy(share=2)
        )

    def next_stretch(self) -> Stretch | None:
        """Where the next batches are."""
        self._asked = self._load_point()
        return self.spool.read_next(self._queue[0], self._loaded + 1)

    def load(self, stretch: Stretch | None, frames: Iterable[Frame]) -> None:
        """The batches of `next_stretch`, from a file that was scanned or as they are in it."""
        if self._asked != self._load_point():
            return  # the service has said meanwhile where to go on
        chapter = self._queue[0]
        last = chapter.last if stretch is None else stretch.last
        for frame in frames:
            if frame.sequence <= self._loaded:
                continue
            if self._replay is None and frame.sequence != self._loaded + 1:
                self._has_hole = True
                break
            self._count_damaged(frame.sequence - 1)
            self.spool.replayed += 1
            self._loaded = frame.sequence
            chapter.gone.setdefault(frame.key, frame.begin)
            self._take_up_frame(frame)
        if self._replay is not None:
            self._count_damaged(last)
            self._loaded = last
        self._has_hole |= self._loaded < last
        self._move_on()

    def _load_point(self) -> tuple[object, ...]:
        return self._queue[0].number, self._loaded, self._replay

    def _count_damaged(self, last: int) -> None:
        """Counts what is missing up to this number, unless it was dropped for its age."""
        missing = last - max(self._loaded, self._queue[0].expired)
        if missing > 0:
            self.spool.lose("damaged", missing)

    def _take_up_frame(self, frame: Frame) -> None:
        if self._replay is None:
            self._hold(self._framed(frame.payload), frame)
            return
        lost = self._replay.lost.total()
        for batch in self._replay.feed(frame):
            self._hold(self._framed(self._payload(batch, self._next)), frame)
        if self._replay.lost.total() > lost:
            self.spool.lose("unusable")

    def _framed(self, payload: bytes | memoryview) -> bytes:
        return encode_frame(payload, max_frame_bytes=self._limits.max_frame_bytes)

    def _hold(self, framed: bytes, frame: Frame) -> None:
        """Adds a batch to the window; `frame` is what of the spool is done with when it is acknowledged."""
        number = self._next
        self._frames[number] = framed
        self._observed_at_ns[number] = frame.observed_at_ns
        self._reached[number] = frame.key, None if frame.is_last else frame.end
        self._marks[number] = frame.sequence, frame.end
        self._next += 1
        self._window_bytes += len(framed) - HEADER_BYTES
        self._peak_window_bytes = max(self._peak_window_bytes, self._window_bytes)

    def _is_roomy(self, *, share: int = 1) -> bool:
        return self._window_bytes < self._limits.max_bytes // share and len(self._frames) < max(
            1, self._limits.max_batches // share
        )

    # What the service says

    def on_disconnected(self) -> None:
        """The connection is gone, or could not be made. Readers begin without a service, where it was the first."""
        super().on_disconnected()
        if self.generation == 0 and not self.is_closed:
            self._begin_readers(self.spool.positions)

    def on_connected(self, *, token: str = "") -> None:
        """A connection stands: says Hello."""
        self.wants_reconnect = False
        super().on_connected(token=token)

    def to_send(self, *, max_bytes: int = 256 * 1024) -> bytes:
        """The next bytes for the connection; none for one that is of the session before."""
        return b"" if self.wants_reconnect else super().to_send(max_bytes=max_bytes)

    def _on_message(self, message: Message) -> None:
        if not self.wants_reconnect:  # else it is about the session before
            super()._on_message(message)

    def statistics(self) -> SessionStatistics:
        """A snapshot of the session; the window is all that is not acknowledged, on disk too."""
        known = super().statistics()
        waiting = sum(chapter.last - chapter.acknowledged for chapter in self._queue)
        oldest_ns = known.oldest_observed_at_ns
        if oldest_ns is None and not self._frames:
            oldest_ns = self.spool.statistics().oldest_ns
        return replace(known, window_batches=waiting, oldest_observed_at_ns=oldest_ns)

    def _on_welcome(self, welcome: Welcome) -> None:
        if welcome.protocol_version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"the service speaks protocol version {welcome.protocol_version}, not {PROTOCOL_VERSION}"
            )
        self.refusal = None
        self._connections += 1
        if welcome.session_known:
            self._go_on(welcome.acknowledged)
        else:
            self._begin_at(welcome.positions)
        self._move_on()

    def _go_on(self, acknowledged: int) -> None:
        """The service knows the session: it has all up to this number."""
        is_recovered = not self._is_replaying and self._highest_sent == 0
        if acknowledged < self._first - 1 or (acknowledged >= self._next and not is_recovered):
            in_flight = f"{self._first} to {self._next - 1}"
            self._send_under_another_id()
            raise ProtocolError(
                f"the service says that batch {acknowledged} was applied last, and batches {in_flight} are in flight"
            )
        if acknowledged >= self._next:
            self._empty_window(acknowledged + 1)
            self._loaded = min(acknowledged, self._queue[0].last)
            self.spool.acknowledge(self._queue[0], self._loaded, {})
        self._next_to_send = acknowledged + 1
        self._forget_until(acknowledged)

    def _begin_at(self, positions: Mapping[str, Position]) -> None:
        """The service does not know the session: it has these positions."""
        self._service_positions = positions
        self._applied = {key: known.end for key, known in positions.items() if not known.is_complete}
        if not self._is_replaying and self.generation > 0 and self._is_whole(self._queue[0], positions):
            self._next_to_send = self._first
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
            self._empty_window(1)
            self._replay = None
            self._loaded = self._queue[0].acknowledged
            self._is_planned = False
            self.wants_entries = True

    def _begin_empty(self, positions: Mapping[str, Position]) -> None:
        """Nothing is spooled: readers begin where the service is, and the session is the one that it was told."""
        self.spool.rebase(positions)
        self._left_out.clear()
        self._next_to_send = self._first
        self._begin_readers(positions)

    def _is_whole(self, chapter: Chapter, positions: Mapping[str, Position]) -> bool:
        """Whether a service at these positions can take the chapter as it is."""
        if chapter.acknowledged or self._first != 1 or chapter.protocol_version != PROTOCOL_VERSION:
            return False
        if chapter.number in self._left_out or any(len(known) > 1 for known in chapter.ranges.values()):
            return False
        starts = {key: known[0][0] for key, known in chapter.ranges.items()}
        if chapter is self._live:
            starts = {key: known.end for key, known in self.positions.items()} | starts
            if any(starts.get(key, 0) != known.end for key, known in positions.items()):
                return False
        return all(positions.get(key, _START).end == begin for key, begin in starts.items())

    def _plan(self, positions: Mapping[str, Position]) -> None:
        """Decides, by what the service has, which sources are read again, and where readers go on."""
        left_out = frozenset(key for key in self._spooled_keys() if self._is_read_again(key, positions))
        begin = dict(positions)
        for key in self._spooled_keys() - left_out:
            reached, known = self.spool.positions.get(key), positions.get(key, _START)
            if reached is not None and not known.is_complete and reached.end >= known.end:
                begin[key] = reached
        for chapter in self._queue:
            self._left_out[chapter.number] = self._left_out.get(chapter.number, frozenset()) | left_out
        reached_by_readers = self.spool.positions
        are_elsewhere = any(
            begin.get(key, _START).end != reached_by_readers.get(key, _START).end
            for key in begin.keys() | reached_by_readers.keys()
        )
        if left_out or are_elsewhere or self._queue[0] is self._live or self.generation == 0:
            self._begin_chapter(begin)
            self._go_to_first()

    def _spooled_keys(self) -> frozenset[str]:
        """The sources of which the spool has something that is not acknowledged."""
        return frozenset(
            key for chapter in self._queue for key in chapter.ranges if any(True for _ in chapter.has(key))
        )

    def _is_read_again(self, key: str, positions: Mapping[str, Position]) -> bool:
        """Whether the spool lacks something of a source behind that position, and its file does not."""
        known = positions.get(key, _START)
        if known.is_complete:
            return False
        at = known.end
        for begin, end in (stretch for chapter in self._queue for stretch in chapter.has(key)):
            if begin > at:
                return self._holds(key, known)
            at = max(at, end)
        # What an earlier version of us spooled is read from the file instead, as far as the service does not have it.
        is_foreign_wanted = any(
            end > known.end
            for chapter in self._queue
            if chapter.protocol_version != PROTOCOL_VERSION
            for _, end in chapter.ranges.get(key, ())
        )
        return is_foreign_wanted and self._holds(key, known)

    # Chapters

    def _begin_chapter(self, positions: Mapping[str, Position]) -> None:
        """Has readers begin anew at these positions, with new dictionaries; what they give is another session."""
        self.spool.rebase(positions)
        self._live = self.spool.begin(self._new_id())
        self._queue.append(self._live)
        self._begin_readers(positions)

    def _go_to_first(self) -> None:
        """Leaves the first chapters, where these are done with."""
        first = self._queue[0]
        self._queue = deque(chapter for chapter in self._queue if chapter is self._live or not chapter.is_done)
        if self._queue[0] is not first:
            self._take_up()
            self.wants_reconnect = True

    def _begin_readers(self, positions: Mapping[str, Position]) -> None:
        self.positions = dict(positions)
        self.generation += 1

    def _take_up(self) -> None:
        """Goes to the first chapter: it is sent as it is, unless an earlier version of us spooled it."""
        chapter = self._queue[0]
        is_foreign = chapter.protocol_version != PROTOCOL_VERSION
        self._say_hello_as(self._new_id() if is_foreign else chapter.session_id, is_replaying=is_foreign)
        self._empty_window(1 if is_foreign else chapter.acknowledged + 1)

    def _send_under_another_id(self) -> None:
        """Has the first chapter sent again, as a session that the service does not know."""
        if self._queue[0] is self._live:
            self._begin_chapter(self.spool.positions)
        self._say_hello_as(self._new_id(), is_replaying=True)
        self._empty_window(1)
        self.wants_reconnect = True

    def _say_hello_as(self, session_id: str, *, is_replaying: bool) -> None:
        self._hello = replace(self._hello, session_id=session_id)
        self._is_replaying = is_replaying
        self._is_planned = self._has_hole = self.wants_entries = False
        self._replay = None
        self._loaded = self._queue[0].acknowledged

    def _move_on(self) -> None:
        """Goes to the next chapter, or around a hole, where all before that is acknowledged."""
        if self._frames or self.wants_entries or self.wants_reconnect:
            return
        chapter = self._queue[0]
        if self._has_hole:
            self.spool.acknowledge(chapter, self._loaded, {})
            self._send_under_another_id()
        elif self._loaded >= chapter.last:
            self.spool.acknowledge(chapter, self._loaded, {})
            self._go_to_first()

    def _empty_window(self, first: int) -> None:
        self._frames.clear()
        self._observed_at_ns.clear()
        self._reached.clear()
        self._marks.clear()
        self._window_bytes = 0
        self._first = self._next = self._next_to_send = first
        self._highest_sent = 0

    def _abandon(self) -> None:
        self._send_under_another_id()

    def _acknowledge(self, sequence: int) -> None:
        super()._acknowledge(sequence)
        self._move_on()

    def _forget_until(self, sequence: int) -> None:
        reached: dict[str, int] = {}
        done = 0
        while self._first <= sequence and self._first < self._next:
            key, applied = self._reached.pop(self._first)
            spooled, end = self._marks.pop(self._first)
            self._window_bytes -= len(self._frames.pop(self._first)) - HEADER_BYTES
            del self._observed_at_ns[self._first]
            self._note_applied(key, applied)
            self._first += 1
            self._acknowledged += 1
            if self._marks.get(self._first, (0, 0))[0] != spooled:  # else it is sent in several
                done, reached[key] = spooled, end
        if done:
            self.spool.acknowledge(self._queue[0], done, reached)

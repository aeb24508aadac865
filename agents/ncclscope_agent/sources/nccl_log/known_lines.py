"""Look-ups of a log's lines by their bytes: a line that recurs is looked up, not read again.

Keys are the bytes of a line without its stamp and opCount, which never recur. All of it is bounded by
`max_lines` of each kind; beyond that the look-up of that kind is emptied, and no row is lost by it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ncclscope_agent.sources.nccl_log.operation_lines import OperationHead
from ncclscope_agent.sources.nccl_log.prefix import Writer


@dataclass(frozen=True, slots=True)
class KnownHead:
    """The bytes in front of an opCount, with those that were seen behind it."""

    operation: OperationHead
    templates: dict[bytes, int] = field(default_factory=dict[bytes, int])
    """By the bytes behind opCount: the index of the template."""
    rows: dict[bytes, bytes] = field(default_factory=dict[bytes, bytes])
    """By the bytes behind the count, which recur with other buffers: a row of OPERATION_TEMPLATE that ends so."""


class KnownLines:
    """Look-ups by bytes for one log; the inner loop of the reader reads them directly."""

    def __init__(self, max_lines: int) -> None:
        self._max_lines = max_lines
        self.heads: dict[bytes, KnownHead] = {}
        self.tunings: dict[bytes, bytes] = {}
        """Packed rows of TUNING lines."""
        self.calls: dict[bytes, tuple[int, int] | None] = {}
        """CALL lines: thread and kind of what they say about groups (tables.CALL_MARK); None: nothing."""
        self.writers: dict[bytes, Writer] = {}
        """By the prefix in front of ` NCCL INFO `."""
        self.templates = 0
        """Tails that are remembered behind all heads."""
        self._rows = 0
        self.resets = 0
        """Times that the templates' look-up was emptied."""
        self.era = 0
        """Grows whenever operations that were known are not any more, or are another template."""

    def head(self, text: bytes, operation: OperationHead) -> KnownHead:
        """The head of these bytes, made known if it was not."""
        known = self.heads.get(text)
        if known is None:
            if len(self.heads) >= self._max_lines:
                self.heads.clear()
                self.templates = self._rows = 0
                self.era += 1
            known = self.heads[text] = KnownHead(operation)
        return known

    def add_template(self, head: KnownHead, tail: bytes, index: int) -> None:
        """Remembers what stood behind the opCount of a whole line."""
        if self.templates >= self._max_lines:
            for other in self.heads.values():
                other.templates.clear()
            self.templates = 0
            self.resets += 1
            self.era += 1
        self.era += tail in head.templates
        head.templates[tail] = index
        self.templates += 1

    def add_row(self, head: KnownHead, ending: bytes, packed: bytes) -> None:
        """Remembers a row of OPERATION_TEMPLATE by what stands behind its count."""
        if self._rows >= self._max_lines:
            for other in self.heads.values():
                other.rows.clear()
            self._rows = 0
        head.rows[ending] = packed
        self._rows += 1

    def add_tuning(self, text: bytes, packed: bytes) -> None:
        """Remembers a whole TUNING line."""
        if len(self.tunings) >= self._max_lines:
            self.tunings.clear()
        self.tunings[text] = packed

    def add_call(self, text: bytes, mark: tuple[int, int] | None) -> None:
        """Remembers a whole CALL line."""
        if len(self.calls) >= self._max_lines:
            self.calls.clear()
        self.calls[text] = mark

    def add_writer(self, prefix: bytes, writer: Writer) -> None:
        """Remembers a clean prefix."""
        if len(self.writers) >= self._max_lines:
            self.writers.clear()
        self.writers[prefix] = writer

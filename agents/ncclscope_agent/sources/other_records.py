"""Reads what is no operation: every other record of NCCL, and the lines without a prefix that belong to one.

What a line says becomes a record (`ncclscope_wire/facts.py`) or a part of a system block or tuning table; a
line that has no family is counted, and its shape can be listed (`shapes.py`).
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from ncclscope_agent.sources import log_families, log_lines
from ncclscope_agent.sources.families_network import MATRIX_HEADER
from ncclscope_agent.sources.log_family import FamilyRead
from ncclscope_agent.sources.log_prefix import LogRecord, RecordEnd, Writer
from ncclscope_agent.sources.log_rows import Gathered
from ncclscope_agent.sources.shapes import Shapes
from ncclscope_agent.sources.topology_lines import TopologyLines
from ncclscope_agent.sources.tuning_table import TuningTable

_PATHS: Final = (b"GPU/", b"NET/", b"CPU/", b"NVS/")


class OtherRecords:
    """Reads other records of one log, in their order."""

    def __init__(self) -> None:
        self.topology = TopologyLines()
        self.tuning_table = TuningTable()
        self.shapes: Shapes | None = None
        """Where the shapes of lines without a family are kept, if somebody wants them."""
        self._matrix_of: Writer | None = None
        """Who printed the title of a matrix in the line before; its rows have no prefix."""

    def read(self, record: LogRecord, line: int, logged_at_ns: int | None, gathered: Gathered) -> None:
        """Reads one record into what is gathered, and counts it under its family or the reason it was left out."""
        self._matrix_of = None
        if record.end is not RecordEnd.LINE:
            self.tear()
        elif self._read_block(record, line, gathered):
            return
        found = log_families.read_record(record, line, logged_at_ns)
        if found is None:
            self._skip(record, gathered)
        else:
            _add(found, gathered)

    def tear(self) -> None:
        """A line was torn: blocks that are open may have lost it."""
        self.topology.tear()
        self.tuning_table.tear()

    def finish(self) -> None:
        """The log is at its end: blocks that are open stay unfinished."""
        self.topology.finish()
        self.tuning_table.finish()

    def take_dropped(self) -> Counter[str]:
        """Lines of blocks that were dropped since the last call, by reason."""
        blocks, tables = self.topology.take_dropped(), self.tuning_table.take_dropped()
        return blocks + tables if tables else blocks

    def read_text(self, text: bytes, line: int, gathered: Gathered, *, is_whole: bool) -> bool:
        """Reads a line without a prefix, where it is one that is known; the last line may not be whole."""
        found = None
        if self._matrix_of is not None:
            if MATRIX_HEADER.fullmatch(text) is not None:
                gathered.understood["function_matrix"] += 1
                return True
            found = log_families.read_matrix_row(text, self._matrix_of, line)
            if found is None:
                self._matrix_of = None
        if found is None:
            found = log_families.read_torch(text, line)
        if found is None or not (is_whole or found.family.is_closed):
            return False
        _add(found, gathered)
        return True

    def _skip(self, record: LogRecord, gathered: Gathered) -> None:
        if _is_torn(record):
            gathered.skipped["torn"] += 1
            return
        if not record.message.strip():
            gathered.skipped["empty"] += 1
            return
        gathered.skipped["other_nccl"] += 1
        if self.shapes is not None:
            self.shapes.add(record.level + b" " + record.message)

    def _read_block(self, record: LogRecord, line: int, gathered: Gathered) -> bool:
        """Reads a line that belongs together with its neighbours."""
        message = record.message
        if message.startswith(log_families.MATRIX_TITLE):
            self._matrix_of = record.writer
            gathered.understood["function_matrix"] += 1
        elif self.topology.feed(record.writer, line, message):
            is_path = message.startswith(_PATHS) and b" :" in message[:48]
            gathered.understood["paths" if is_path else "topology"] += 1
        elif self.tuning_table.feed(record.writer, line, message):
            gathered.understood["tuning_table"] += 1
        else:
            return False
        return True


def _add(found: FamilyRead, gathered: Gathered) -> None:
    if found.fact is None:
        gathered.skipped["out_of_range"] += 1
        return
    gathered.understood[found.family.name] += 1
    if found.family.travels:
        gathered.facts.append(found.fact)


def _is_torn(record: LogRecord) -> bool:
    return (
        record.end is not RecordEnd.LINE
        or log_lines.has_fragment(record.message)
        or log_lines.TUNING_FRAGMENT.search(record.message) is not None
    )

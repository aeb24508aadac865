"""Counts of a log's NCCL lines that owe nothing to the log reader: plain patterns, written for this alone."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_MARKED: Final = re.compile(rb"NCCL (?:INFO|WARN|CALL|TRACE) ")
_POINTER: Final = rb"(?:0x[0-9a-f]{1,16}|\(nil\))"
_WHOLE_OPERATION: Final = re.compile(
    rb"[\w<>-]:\d{1,10}:\d{1,10} [^\n]{0,160}?NCCL INFO [A-Z][A-Za-z]+: opCount [0-9a-f]{1,16} sendbuff "
    + _POINTER
    + rb" recvbuff "
    + _POINTER
    + rb" count \d{1,19} datatype \d{1,2} op \d{1,10} root \d{1,9} comm "
    + _POINTER
    + rb" \[nranks=\d{1,9}\]"
)
"""Everything that names an operation; what stands behind it, the stream, may be cut."""


@dataclass(frozen=True)
class LineCounts:
    """What a log has, by these patterns."""

    nccl_lines: int
    """Physical lines in which NCCL speaks."""
    whole_operations: int
    """Operation lines whose fields are whole up to the number of ranks."""


def count(data: bytes) -> LineCounts:
    """Counts the lines of one log."""
    lines = data.split(b"\n")
    return LineCounts(
        nccl_lines=sum(_MARKED.search(line) is not None for line in lines),
        whole_operations=sum(len(_WHOLE_OPERATION.findall(line)) for line in lines),
    )

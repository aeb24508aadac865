"""Lines of NCCL as each version prints them: what they are, and what they say.

Composed from the format strings of the named version (NCCL `src/`, file by file in `docs/formats.md`) with invented
values and one fictitious host. Of each sample three lines stand in the file: version and family; the text, in which
`⏎` stands for a newline (an empty line in front of a warning, lines without a prefix) and `␣` for a blank
at the end; and the record, `-` where the line gives columns or no record.
"""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from ncclscope_agent.sources.nccl_log import line_families
from ncclscope_agent.sources.nccl_log.prefix import KnownHosts, cut_line
from ncclscope_wire.facts import Fact

FILE = Path(__file__).with_name("family_samples.txt")
_COMMON = {"line", "host", "pid", "tid", "logged_at_ns"}


class Sample(NamedTuple):
    """One line of a version."""

    version: str
    family: str
    text: str
    record: str


def samples() -> list[Sample]:
    """Every sample of the file."""
    found: list[Sample] = []
    lines = FILE.read_text().splitlines()
    for title, text, record in zip(lines[0::3], lines[1::3], lines[2::3], strict=True):
        match = re.fullmatch(r"#\[([^\]]+)\] (\w+)", title)
        assert match is not None, title
        found.append(Sample(match[1], match[2], text.replace("⏎", "\n").replace("␣", " "), record))
    return found


def record_of(text: str) -> str:
    """The first record that a sample gives, as text; "-" where it gives none."""
    found = facts_of(text)
    return text_of(found[0]) if found else "-"


def facts_of(text: str) -> list[Fact]:
    """The records of a sample, those that do not travel too."""
    found: list[Fact] = []
    for line in text.encode().split(b"\n"):
        cut = cut_line(line, KnownHosts())
        if cut.records:
            read = line_families.read_record(cut.records[0], 1, None)
        else:
            read = line_families.read_torch(line, 1) or line_families.read_program(line, 1)
            read = read or line_families.read_matrix_row(line)
        if read is not None and read.fact is not None:
            found.append(read.fact)
    return found


def text_of(fact: Fact) -> str:
    """The record with the fields that it has, but for who wrote it."""
    given = {field.name: getattr(fact, field.name) for field in fields(fact) if field.name not in _COMMON}
    return (
        f"{type(fact).__name__}({', '.join(f'{name}={value!r}' for name, value in given.items() if value is not None)})"
    )

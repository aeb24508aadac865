"""What the log reader makes of every sample and of every log of the corpus, as tables.

A command too: `python tests/corpus/conformance.py shapes PATH...` lists the shapes of lines without a family.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_ROOT / "agents"), str(_ROOT / "tests")]

from agent.family_samples import samples  # noqa: E402
from corpus.shapes import Shapes  # noqa: E402
from corpus.whole_lines import LineCounts, count  # noqa: E402

from ncclscope_agent.files.recognise import ENOUGH_BYTES, FileKind, recognise  # noqa: E402
from ncclscope_agent.sources.nccl_log.reader import NcclLogReader  # noqa: E402
from ncclscope_wire.records import Source, SourceKind  # noqa: E402

VERSIONS = tuple(f"2.{minor}" for minor in range(4, 31))
COLUMNS = (*VERSIONS, "RCCL", "fork", "PyTorch", "not said")
FORKS = frozenset({"zy-uestc-yccl"})
"""Logs of builds of NCCL that others changed."""
ALL_SUBSYSTEMS = frozenset({"surf-snellius-per-subsys", "timez-zx-nccl-tests-a100pcie"})
"""Logs of runs with NCCL_DEBUG_SUBSYS=ALL, or with each subsystem in turn."""
GROUPS = ("logs", "all subsystems", "forks", "pages")
NOT_UNDERSTOOD = ("other_nccl", "other_warning", "out_of_range", "no_prefix")
_FOLDERS = ("nccl_logs", "nccl_tests", "inspector")
_RCCL_VERSION = re.compile(rb"RCCL version ")
_VERSION = re.compile(rb"NCCL version (2\.\d{1,2})\.\d")


@dataclass
class ReadFile:
    """What was read of one file."""

    name: str
    """Path below the corpus."""
    corpus: str
    lines: LineCounts
    """Counted apart from the reader."""
    version: str
    """Column of the table: the only version that the file names, else "not said"."""
    understood: Counter[str] = field(default_factory=Counter[str])
    skipped: Counter[str] = field(default_factory=Counter[str])

    @property
    def lines_not_understood(self) -> int:
        """Lines of NCCL without a family."""
        return sum(self.skipped[reason] for reason in NOT_UNDERSTOOD)

    @property
    def key(self) -> str:
        """A hash of its path below the corpus: names of folders and files may hold those of hosts and people."""
        return sha256(self.name.encode()).hexdigest()[:12]

    @property
    def share(self) -> float:
        """Share of the lines of NCCL that have no family."""
        bad = self.lines_not_understood
        return bad / max(1, bad + self.understood.total())

    @property
    def group(self) -> str:
        """Under which of `GROUPS` its share is shown."""
        folder = self.name.split("/")[1]
        if folder in FORKS:
            return "forks"
        if folder in ALL_SUBSYSTEMS:
            return "all subsystems"
        return "pages" if self.name.endswith((".md", ".rst")) else "logs"


def logs_of(corpus: Path) -> list[Path]:
    """Every file of the corpus that is an NCCL log by its content."""
    files = [path for folder in _FOLDERS for path in sorted((corpus / folder).rglob("*")) if path.is_file()]
    return [path for path in files if recognise(path.read_bytes()[:ENOUGH_BYTES], path.name) is FileKind.NCCL_LOG]


def read_corpora(corpora: Sequence[Path]) -> list[ReadFile]:
    """Every log of these folders, read."""
    return [
        read_file(path.relative_to(corpus).as_posix(), path.read_bytes(), corpus.name)
        for corpus in corpora
        for path in logs_of(corpus)
    ]


def read_file(name: str, data: bytes, corpus: str = "") -> ReadFile:
    """One log, read."""
    versions = {match.decode() for match in _VERSION.findall(data)}
    if _RCCL_VERSION.search(data) is not None:
        versions = {"RCCL"}
    read = ReadFile(name, corpus, count(data), versions.pop() if len(versions) == 1 else "not said")
    reader = NcclLogReader(Source(kind=SourceKind.NCCL_LOG, name=name, key=name))
    for batch in [*reader.ingest_bytes(data), *reader.finish()]:
        read.understood.update(batch.counts.understood)
        read.skipped.update(batch.counts.skipped)
    return read


def sample_counts() -> dict[str, Counter[str]]:
    """By family: how many of the written samples of each column are read."""
    counts: dict[str, Counter[str]] = {}
    for sample in samples():
        read = read_file("sample", sample.text.encode() + b"\n")
        column = sample.version if sample.version in COLUMNS else ".".join(sample.version.split(".")[:2])
        for family in read.understood:
            counts.setdefault(family, Counter())[column] += 1
    return counts


def table(by_family: dict[str, Counter[str]], columns: Sequence[str]) -> str:
    """A Markdown table; an empty cell is 0."""
    rows = [
        [family, *(str(counts[column] or "") for column in columns), str(counts.total())]
        for family, counts in sorted(by_family.items())
    ]
    lines = [["family", *columns, "all"], ["---"] * (len(columns) + 2), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def document(files: Sequence[ReadFile]) -> str:
    """docs/internals/conformance.md."""
    corpus: dict[str, Counter[str]] = {}
    for read in files:
        for family, amount in read.understood.items():
            corpus.setdefault(family, Counter())[read.version] += amount
    return _TEMPLATE.format(
        samples=table(sample_counts(), COLUMNS),
        sample_total=len(samples()),
        files=len(files),
        corpus=table(corpus, COLUMNS),
        shares=shares(files),
    )


def shares(files: Iterable[ReadFile]) -> str:
    """How many lines of NCCL have no family, by group of files."""
    groups = {name: [0, 0, 0, 0] for name in (*GROUPS, "corpus", "corpus2", "all")}
    for read in files:
        for group in (read.group, read.corpus, "all"):
            sums = groups[group]
            sums[0] += 1
            sums[1] += read.understood.total()
            sums[2] += read.lines_not_understood
            sums[3] += read.skipped["torn"]
    lines = ["| files | how many | records understood | without a family | share | torn |", "|---|---|---|---|---|---|"]
    for name, (amount, good, bad, torn) in groups.items():
        lines.append(f"| {name} | {amount} | {good} | {bad} | {100 * bad / max(1, good + bad):.2f} % | {torn} |")
    return "\n".join(lines) + "\n"


def document_of_files(files: Sequence[ReadFile], first_sight: Mapping[str, tuple[int, int]]) -> str:
    """docs/internals/conformance-files.md; `first_sight` is lines understood and without a family, by key."""
    heads = ["file", "version", "lines", "first sight", "without a family", "share", "torn", "operations", "read"]
    rows: list[list[str]] = []
    for read in sorted(files, key=lambda read: (GROUPS.index(read.group), read.corpus, read.key)):
        seen = first_sight.get(read.key)
        first = "" if seen is None else f"{100 * seen[1] / max(1, sum(seen)):.2f} %"
        numbers = [read.lines.nccl_lines, first, read.lines_not_understood, f"{100 * read.share:.2f} %"]
        numbers += [read.skipped["torn"], read.lines.whole_operations or "", read.understood["operation"] or ""]
        rows.append([f"{read.group}, {read.corpus} {read.key}", read.version, *map(str, numbers)])
    lines = [heads, ["---"] * len(heads), *rows]
    seen_files = [read for read in files if read.key in first_sight]
    good, bad = (sum(first_sight[read.key][at] for read in seen_files) for at in (0, 1))
    now_bad = sum(read.lines_not_understood for read in seen_files)
    now_good = sum(read.understood.total() for read in seen_files)
    return _FILES_TEMPLATE.format(
        seen=len(seen_files),
        first=f"{100 * bad / max(1, good + bad):.2f} %",
        now=f"{100 * now_bad / max(1, now_good + now_bad):.2f} %",
        table="".join(f"| {' | '.join(cells)} |\n" for cells in lines),
    )


def shapes_of(data: bytes) -> Counter[str]:
    """The shapes of lines without a family, with how often each came."""
    reader = NcclLogReader(Source(kind=SourceKind.NCCL_LOG, name="shapes", key="shapes"))
    shapes = Shapes()
    reader.watch_unknown(shapes.add)
    reader.ingest_bytes(data)
    reader.finish()
    return shapes.counts


def main() -> None:
    """Prints shapes."""
    if len(sys.argv) < 3 or sys.argv[1] != "shapes":
        sys.exit("usage: python tests/corpus/conformance.py shapes PATH...")
    counts: Counter[str] = Counter()
    for name in sys.argv[2:]:
        path = Path(name)
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                counts.update(shapes_of(file.read_bytes()))
    for shape, amount in counts.most_common():
        sys.stdout.write(f"{amount:8d}  {shape}\n")


_FILES_TEMPLATE = """# Conformance, file by file

Written and held by the same test as [conformance.md](conformance.md). A file is named by the first digits of the
SHA-256 of its path below the corpus. "Lines" are physical lines in which NCCL or RCCL speaks, and "operations" the
operation lines whose fields are whole up to the number of ranks: both are counted by plain patterns that share nothing
with the reader (`tests/corpus/whole_lines.py`). "Read" are the rows that the reader gives; the test wants as many as
are whole.

"First sight" is the share of lines without a family when the reader met a file of the second corpus for the first
time, before anything was changed for it: {first} over its {seen} logs, which is {now} now.

{table}"""

_TEMPLATE = """# Conformance of the log reader

Written by `NCCLSCOPE_UPDATE_GOLDEN=1 pytest tests/corpus/test_conformance.py`, and held against the reader by that
test. Each cell is the number of samples that were read: as a row or a record with named fields whose values were
checked, or as a line of a block that was put together. There is no catch-all: a line without a family counts as not
understood, file by file in [conformance-files.md](conformance-files.md). What each family is stands in
[formats.md](../formats.md). Lines without a family are listed by shape with
`python tests/corpus/conformance.py shapes PATH...`.

## Written samples

{sample_total} lines, composed from the format strings of the version named (`tests/agent/family_samples.txt`); an empty
cell is 0.

{samples}
## Real logs

{files} files of both corpora; the column is the version that the file names, where it names one only.

{corpus}
## What is not understood

"Without a family" are intact lines of NCCL that no family reads (`other_nccl`), records with a number out of its range
(`out_of_range`) and quoted `NCCL INFO` without host, pid and tid (`no_prefix`). "Torn" are pieces of records that
processes wrote into each other. "All subsystems" are runs with `NCCL_DEBUG_SUBSYS=ALL`, "forks" changed builds of NCCL,
"pages" texts that quote logs, often with pointers shortened to `0x...`.

{shares}"""

if __name__ == "__main__":
    main()

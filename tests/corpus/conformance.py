"""What the log reader makes of every sample and of every log of the corpus, as tables.

A command too: `python tests/corpus/conformance.py shapes PATH...` lists the shapes of lines without a family.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_ROOT / "agents"), str(_ROOT / "tests")]

from agent.family_samples import samples  # noqa: E402
from corpus.shapes import Shapes  # noqa: E402

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
NOT_UNDERSTOOD = ("other_nccl", "out_of_range", "no_prefix")
_FOLDERS = ("nccl_logs", "nccl_tests", "inspector")
_VERSION = re.compile(rb"NCCL version (2\.\d{1,2})\.\d")


@dataclass
class ReadFile:
    """What was read of one file."""

    name: str
    """Path below the corpus."""
    version: str
    """Column of the table: the only version that the file names, else "not said"."""
    understood: Counter[str] = field(default_factory=Counter[str])
    skipped: Counter[str] = field(default_factory=Counter[str])

    @property
    def lines_not_understood(self) -> int:
        """Lines of NCCL without a family."""
        return sum(self.skipped[reason] for reason in NOT_UNDERSTOOD)

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


def read_corpus(corpus: Path) -> list[ReadFile]:
    """Every log of the corpus, read."""
    return [read_file(path.relative_to(corpus).as_posix(), path.read_bytes()) for path in logs_of(corpus)]


def read_file(name: str, data: bytes) -> ReadFile:
    """One log, read."""
    versions = {match.decode() for match in _VERSION.findall(data)}
    read = ReadFile(name, versions.pop() if len(versions) == 1 else "not said")
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
    groups = {name: [0, 0, 0, 0] for name in (*GROUPS, "all")}
    for read in files:
        for group in (read.group, "all"):
            sums = groups[group]
            sums[0] += 1
            sums[1] += read.understood.total()
            sums[2] += read.lines_not_understood
            sums[3] += read.skipped["torn"]
    lines = ["| files | how many | records understood | without a family | share | torn |", "|---|---|---|---|---|---|"]
    for name, (amount, good, bad, torn) in groups.items():
        lines.append(f"| {name} | {amount} | {good} | {bad} | {100 * bad / max(1, good + bad):.2f} % | {torn} |")
    return "\n".join(lines) + "\n"


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


_TEMPLATE = """# Conformance of the log reader

Written by `NCCLSCOPE_UPDATE_GOLDEN=1 pytest tests/corpus/test_conformance.py`, and held against the reader by that
test. Each cell is the number of samples that were read: as a row or a record with named fields whose values were
checked, or as a line of a block that was put together. There is no catch-all: a line without a family counts as not
understood. What each family is stands in [formats.md](../formats.md). Lines without a family are listed by shape with
`python tests/corpus/conformance.py shapes PATH...`.

## Written samples

{sample_total} lines, composed from the format strings of the version named (`tests/agent/family_samples.txt`); an empty
cell is 0.

{samples}
## Real logs

{files} files of the corpus; the column is the version that the file names, where it names one only.

{corpus}
## What is not understood

"Without a family" are intact lines of NCCL that no family reads (`other_nccl`), records with a number out of its range
(`out_of_range`) and quoted `NCCL INFO` without host, pid and tid (`no_prefix`). "Torn" are pieces of records that
processes wrote into each other. "All subsystems" are runs with `NCCL_DEBUG_SUBSYS=ALL`, "forks" changed builds of NCCL,
"pages" texts that quote logs, often with pointers shortened to `0x...`.

{shares}"""

if __name__ == "__main__":
    main()

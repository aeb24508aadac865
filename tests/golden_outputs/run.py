"""Every output of the simulated jobs and of the corpus, with its digest."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from click.testing import CliRunner

from golden_outputs import live
from golden_outputs.digest import digest_of_file, digest_of_text
from golden_outputs.jobs import JOBS, LIVE, LIVE_SHORT, SHORT
from ncclscope.cli import main
from ncclscope_simulator import write

EXPECTED: Final = Path(__file__).parent / "digests.txt"
_CORPUS_FOLDERS: Final = ("nccl_logs", "nsys", "inspector")


def digests(work: Path, *, corpora: Iterable[Path] = (), short: bool = False, exact: bool = False) -> Iterator[str]:
    """Lines of (digest, output), job by job: what `analyze` writes, and what `/metrics` says while it runs."""
    for name in SHORT if short else JOBS:
        write(JOBS[name], work / name)
        yield from _analyzed(work / name, work / f"{name}.out", f"analyze/{name}", exact=exact)
    for name in LIVE_SHORT if short else LIVE:
        for output, text in live.scrapes(JOBS[name], work / f"{name}.live"):
            yield f"{digest_of_text(text.encode(), exact=exact)}  live/{name}/{output}"
    for corpus in corpora:
        for folder in _CORPUS_FOLDERS:
            for path in sorted((corpus / folder).iterdir()) if (corpus / folder).is_dir() else ():
                out = work / f"{corpus.name}.{folder}.{path.name}.out"
                yield from _analyzed(path, out, f"{corpus.name}/{folder}/{path.name}", exact=exact)


def corpora() -> list[Path]:
    """The folders of real logs and exports that `NCCLSCOPE_CORPUS` names, else those beside the checkout."""
    asked = os.environ.get("NCCLSCOPE_CORPUS")
    beside = Path(__file__).resolve().parents[3] / "shared"
    folders = [Path(asked)] if asked else [beside / "corpus", beside / "corpus2"]
    return [folder for folder in folders if folder.is_dir()]


def _analyzed(path: Path, out: Path, name: str, *, exact: bool) -> Iterator[str]:
    # One zone and one job name, so that the digests do not depend on where the files lie.
    done = CliRunner().invoke(main, ["analyze", str(path), "--out", str(out)])
    yield f"{done.exit_code:<16}  {name}/exit_status"
    for each in sorted(out.glob("*")) if out.is_dir() else ():
        yield f"{digest_of_file(each, inputs=path, exact=exact)}  {name}/{each.name}"

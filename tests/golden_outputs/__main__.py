"""Prints one digest per output and says which are not the expected ones.

Use: `python -m golden_outputs [--short] [--exact] [--write] [--against FILE]`.

Run by `tools/golden`. With `--write`, `digests.txt` is written anew; read its diff before you commit it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import click

from golden_outputs.run import EXPECTED, corpora, digests


@click.command()
@click.option("--short", is_flag=True, help="Only what the default tests compare.")
@click.option("--exact", is_flag=True, help="Byte for byte: compare with a run on the same machine.")
@click.option("--write", is_flag=True, help="Make these the expected ones.")
@click.option("--against", type=click.Path(path_type=Path), default=EXPECTED, help="The expected ones.")
def main(*, short: bool, exact: bool, write: bool, against: Path) -> None:
    """Print one digest per output of the golden jobs and of the corpus; exit with 1 if one is not the expected one."""
    lines: list[str] = []
    with tempfile.TemporaryDirectory(prefix="golden-") as work:
        for line in digests(Path(work), corpora=() if short else corpora(), short=short, exact=exact):
            lines.append(line)
            click.echo(line)
    if write:
        against.write_text("".join(f"{line}\n" for line in lines))
        return
    expected = set(against.read_text().splitlines())
    different = [line for line in lines if line not in expected]
    for line in different:
        click.echo(f"not as expected: {line}", err=True)
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()

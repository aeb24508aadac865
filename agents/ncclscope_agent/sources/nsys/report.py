"""Makes a .sqlite of a .nsys-rep by running `nsys export`, if Nsight Systems is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

from ncclscope_agent.sources.nsys.open_export import check_complete
from ncclscope_wire.errors import SourceError

REPORT_SUFFIX: Final = ".nsys-rep"
EXPORT_SUFFIX: Final = ".sqlite"
_SHOWN_OUTPUT: Final = 300


def export_arguments(nsys: str, report: Path, output: Path) -> list[str]:
    """The command that exports a report; the same for nsys 2022 to 2026. *Source:* User Guide, "CLI Export Command"."""
    return [nsys, "export", "--type=sqlite", "--force-overwrite=true", f"--output={output}", str(report)]


def export_of(report: Path) -> Path:
    """Path of a report's export if somebody made one: beside it, with the same stem."""
    return report.with_name(report.name.removesuffix(REPORT_SUFFIX) + EXPORT_SUFFIX)


def export_report(
    report: Path, *, nsys: str | None = None, timeout_s: float = 600.0, work_directory: Path | None = None
) -> Path:
    """The export of a report: one that lies beside it, or else a new one, complete when its name appears.

    `nsys` is the command or its path; None looks for it in PATH. The new one is put beside the report, or
    into `work_directory` if that folder cannot be written to. Blocks until nsys is done.
    Raises SourceError: "nsys_missing", "nsys_failed", "nsys_timeout", "unwritable", or as `check_complete` does:
    nsys was seen to exit 0 and leave an empty database.
    """
    existing = export_of(report)
    if existing.exists():
        return existing
    command = shutil.which(nsys or "nsys")
    if command is None:
        raise SourceError(
            "nsys_missing",
            f"{report} is a report of Nsight Systems, and nsys is not installed here; install it, or run "
            f"`nsys export --type sqlite -o {existing.name} {report.name}` where it is installed",
        )
    finished = _target_folder(report, work_directory) / existing.name
    unfinished = finished.with_name(f"{finished.name}.{os.getpid()}.tmp")  # another agent may export it too
    try:
        _run(export_arguments(command, report, unfinished), report, timeout_s)
        check_complete(unfinished)
        os.replace(unfinished, finished)
    finally:
        unfinished.unlink(missing_ok=True)
    return finished


def _target_folder(report: Path, work_directory: Path | None) -> Path:
    if os.access(report.parent, os.W_OK):
        return report.parent
    if work_directory is None:
        raise SourceError(
            "unwritable", f"{report.parent} cannot be written to, so {report.name} cannot be exported there; allow it"
        )
    work_directory.mkdir(parents=True, exist_ok=True)
    return work_directory


def _run(arguments: list[str], report: Path, timeout_s: float) -> None:
    try:
        done = subprocess.run(  # the arguments are a list: no shell reads the names
            arguments, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise SourceError(
            "nsys_timeout", f"exporting {report} took more than {timeout_s:g} s; record shorter captures"
        ) from error
    except OSError as error:
        raise SourceError("nsys_failed", f"{arguments[0]} cannot be run ({error.strerror}); check it") from error
    if done.returncode != 0:
        said = b" ".join((done.stderr or done.stdout).split())[-_SHOWN_OUTPUT:].decode("utf-8", "replace")
        raise SourceError(
            "nsys_failed", f"nsys could not export {report} (exit {done.returncode}: {said}); try it by hand"
        )

"""`python capture.pyz [OPTIONS] -- COMMAND...`: the capture helper if ncclscope is not installed."""

from __future__ import annotations

import argparse

from ncclscope_capture.capture import capture, follow
from ncclscope_capture.settings import flag_of, load, settings_table


def main(arguments: list[str] | None = None) -> None:
    """Runs the job, and ends as it ended; exit status 2 for wrong options."""
    parser = argparse.ArgumentParser(
        prog="ncclscope capture", description="Run a job and record it with nsys now and then, within a budget."
    )
    for name, default, about in settings_table():
        shown = "" if default == "" else f" [default: {default}]"
        told = (about["help"] + shown).replace("%", "%%")
        parser.add_argument(flag_of(name), dest=name, metavar=about["metavar"], help=told)
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND...", help="the job")
    given = vars(parser.parse_args(arguments))
    command = given.pop("command")
    if command[:1] == ["--"]:
        command = command[1:]
    try:
        settings = load(given)
    except ValueError as faults:
        parser.error(str(faults))
    if bool(settings.session) == bool(command):
        parser.error("either a command behind --, or --session NAME")
    if settings.session:
        follow(settings)
    else:
        capture(settings, command)


if __name__ == "__main__":
    main()

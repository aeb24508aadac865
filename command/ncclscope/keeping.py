"""The options that say how the service's state is kept on disk, for `serve`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, ParamSpec, TypeVar

import click

if TYPE_CHECKING:
    from ncclscope_service.persistence import PersistenceSettings

P = ParamSpec("P")
R = TypeVar("R")

_UNSYNCED_SECONDS: Final = 0.005
_STATES_PER_JOURNAL: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """As given."""

    journal_fsync: str
    journal_limit: int
    state_every: float
    stop_seconds: float

    def for_service(self) -> PersistenceSettings:
        """As the service takes them. Raises click.UsageError."""
        from ncclscope_service.journal import JournalSettings  # noqa: PLC0415  (needs [service])
        from ncclscope_service.persistence import PersistenceSettings  # noqa: PLC0415

        group_seconds = _group_seconds(self.journal_fsync)
        max_bytes = self.journal_limit << 20
        return PersistenceSettings(
            journal=JournalSettings(
                group_seconds=_UNSYNCED_SECONDS if group_seconds is None else group_seconds,
                sync=group_seconds is not None,
                max_bytes=max_bytes,
                kept_bytes=max_bytes // 2,
            ),
            state_every_seconds=60 * self.state_every,
            state_every_bytes=max_bytes // _STATES_PER_JOURNAL,
        )


def keeping_options(command: Callable[P, R]) -> Callable[P, R]:
    """Adds the options; the command gets them as `keeping`."""

    @functools.wraps(command)
    def with_keeping(*args: P.args, **kwargs: P.kwargs) -> R:
        given = {name: kwargs.pop(name) for name in ("journal_fsync", "journal_limit", "state_every", "stop_seconds")}
        kwargs["keeping"] = Keeping(**given)  # type: ignore[arg-type]  # click has checked the types
        return command(*args, **kwargs)

    for option in _OPTIONS:
        with_keeping = option(with_keeping)
    return with_keeping


_OPTIONS: Final = (
    click.option(
        "--stop-seconds",
        type=click.FloatRange(min=1),
        default=45.0,
        show_default=True,
        metavar="SECONDS",
        help="Asked to stop, the service ends within that time; what is not decided or written is left to the next "
        "start.",
    ),
    click.option(
        "--state-every",
        type=click.FloatRange(0.05),
        default=5.0,
        show_default=True,
        metavar="MINUTES",
        help="How often the state is written at least: a restart does at most so much again.",
    ),
    click.option(
        "--journal-limit",
        type=click.IntRange(64),
        default=1024,
        show_default=True,
        metavar="MIB",
        help="What the journal may take on disk; the state is written after every eighth of it.",
    ),
    click.option(
        "--journal-fsync",
        default="20",
        show_default=True,
        metavar="MS|off",
        help="How long batches wait for others before they are synced to disk together and acknowledged; off: a loss "
        "of power may lose what was acknowledged.",
    ),
)


def _group_seconds(text: str) -> float | None:
    """What --journal-fsync says, in seconds; None for off."""
    if text == "off":
        return None
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = -1.0
    if not 0 <= milliseconds <= 10_000:
        raise click.UsageError(f"--journal-fsync: {text!r} is neither off nor milliseconds from 0 to 10000")
    return milliseconds * 1e-3

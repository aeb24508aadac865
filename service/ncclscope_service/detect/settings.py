"""Thresholds of the detectors: their names, defaults and bounds, and which hold for a job.

A threshold has a name (`late_rank.least_share`), a number, bounds, and a sentence that says what it is; the table in
docs/settings.md is made from them. What is given is a mapping from names to numbers; `job."llama-*".` before a name
holds for the jobs that the pattern fits, and wins over what holds for all. Detectors read the settings of their job
from the context that comes with every input, so a change counts from the next input on.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any, Final, TypeVar, cast

from ncclscope_wire.errors import ConfigError

_Number = TypeVar("_Number", int, float)


def _setting(default: _Number, low: float, high: float, about: str) -> _Number:
    made: _Number = field(default=default, metadata={"low": low, "high": high, "about": about})
    return made


_HOUR, _DAY = 3600.0, 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LateRankSettings:
    """A rank that keeps others waiting."""

    least_share: float = _setting(
        0.01, 0, 1, "Least lateness per step that is reported, as a share of the step; `enough_us` if that is less."
    )
    enough_us: float = _setting(500.0, 0, 6e7, "Lateness per step that is reported in a step of any length.")
    least_same_host_us: float = _setting(5.0, 0, 6e7, "Least lateness at once, in a group within a host.")
    least_other_host_us: float = _setting(
        30.0, 0, 6e7, "The same between hosts: three times the skew with which hosts end a collective."
    )
    firmness: float = _setting(6.5, 3, 100, "Mean margin over the other ranks, in standard errors, that names a rank.")
    evidence: float = _setting(
        9.2,
        3,
        100,
        "Evidence that names a rank as long as less than 12 s of steps were seen: wrong once in e^this ranks.",
    )
    info_share: float = _setting(0.0005, 0, 1, "Cost as a share of step time below which it is information.")
    critical_share: float = _setting(0.1, 0, 1, "Cost as a share of step time from which it is critical.")
    least_confidence: float = _setting(0.5, 0, 1, "Least confidence of the matches that are used.")


@dataclass(frozen=True, slots=True, kw_only=True)
class BandwidthSettings:
    """Groups that have become slower: `bandwidth_drop`, `slow_link` and `slow_drift`."""

    least_loss: float = _setting(0.1, 0.01, 0.9, "Least loss against the group's own past.")
    first_hour_evidence: float = _setting(
        24.0, 5, 100, "Evidence that alarms in the first hour: a false alarm comes about every e^this seconds."
    )
    evidence: float = _setting(13.0, 5, 100, "The same later, when a false alarm comes about every e^this ten seconds.")
    least_drift: float = _setting(0.05, 0.01, 0.9, "Least loss of a slow drift against the first hour.")
    least_bytes: int = _setting(65_536, 0, 10**12, "Messages that are smaller are not judged.")
    critical_loss: float = _setting(0.2, 0, 1, "Loss from which it is critical.")
    critical_after_seconds: float = _setting(300.0, 0, _DAY, "How long one group alone must be slow to be critical.")
    many_groups: int = _setting(3, 2, 1000, "Groups of one parallelism that drop together and are one finding.")
    most_hosts: int = _setting(2, 1, 1000, "Hosts that explain slow groups equally well: more were not located.")
    most_hosts_share: float = _setting(
        0.5, 0, 1, "The same as a share of the job's hosts: more are the fabric's fault."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SiblingsSettings:
    """Groups that are slower than others that do the same work."""

    least_log_loss: float = _setting(
        0.2, 0.01, 2, "Least loss against the siblings, as a difference of natural logarithms: 0.2 is 18 %."
    )
    pair_log_loss: float = _setting(0.35, 0.01, 2, "The same against one sibling alone: 0.35 is 30 %.")
    healed_log_loss: float = _setting(0.12, 0, 2, "The same, below which a slow group has healed.")
    healthy_log_loss: float = _setting(0.08, 0, 2, "The same, below which a group counts as healthy.")
    spreads: float = _setting(6.0, 1, 100, "Least loss in spreads of the best siblings.")
    noises: float = _setting(6.5, 1, 100, "Least loss in the scatter of single windows.")
    least_groups: int = _setting(2, 2, 1000, "Groups that must do the same work to be compared.")


@dataclass(frozen=True, slots=True, kw_only=True)
class BelowLimitSettings:
    """Groups far below what their links can carry."""

    least_ratio: float = _setting(0.5, 0, 1, "Share of the limit below which a group is slow.")
    healed_ratio: float = _setting(0.6, 0, 1, "Share of the limit above which it has healed.")
    least_us: float = _setting(150.0, 0, 6e7, "Messages that take less time at the limit are not judged.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowStepsSettings:
    """Steps that became longer."""

    least_share: float = _setting(0.04, 0.005, 0.9, "Least loss of speed: 0.04 is steps that are 4 % longer.")
    evidence: float = _setting(24.0, 5, 100, "Evidence that alarms: a false alarm comes about every e^this steps.")
    critical_share: float = _setting(0.2, 0, 10, "How much longer steps must be to be critical.")
    long_steps: float = _setting(5.0, 1.5, 1000, "Steps longer than so many usual ones are checkpoints.")
    changed_share: float = _setting(0.02, 0, 1, "Change of a step's operations or bytes that is named as the cause.")
    others_first_seconds: float = _setting(30.0, 0, _HOUR, "How long findings that explain it are waited for.")


@dataclass(frozen=True, slots=True, kw_only=True)
class HangSettings:
    """A job that stands still."""

    least_silence_seconds: float = _setting(5.0, 0.5, _DAY, "Least silence of a group that counts.")
    inside_silence_seconds: float = _setting(8.0, 0.5, _DAY, "Least silence of all ranks where none is missing.")
    rest_seconds: float = _setting(
        120.0, 0, _DAY, "Least silence between two steps, where a job may write or evaluate."
    )
    usual_gaps: float = _setting(20.0, 1, 1000, "Least silence in usual gaps between two operations of the group.")
    longest_gaps: float = _setting(3.0, 1, 1000, "Least silence in the longest gaps of the last hour.")
    least_inside_operations: int = _setting(100, 0, 10**9, "Operations of a group before all may be stuck in one.")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedLoggingSettings:
    """A job or a rank of which nothing comes any more."""

    job_silence_seconds: float = _setting(300.0, 1, 7 * _DAY, "Least silence of a job.")
    longest_gaps: float = _setting(3.0, 1, 1000, "Least silence of a job in its longest gaps so far.")
    least_life_seconds: float = _setting(30.0, 0, _DAY, "How long a job must have logged before.")
    rank_silence_seconds: float = _setting(30.0, 1, 7 * _DAY, "Least silence of one rank while others go on.")
    least_behind_operations: int = _setting(256, 1, 10**9, "Collectives by which the others must be ahead of it.")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlindSettings:
    """Input that is lost or of no use."""

    least_operations: int = _setting(1000, 1, 10**12, "Operations of a host before shares of them are judged.")
    least_matched_share: float = _setting(0.9, 0, 1, "Share of captured operations that must have a kernel.")
    critical_matched_share: float = _setting(0.5, 0, 1, "The same, below which it is critical.")
    most_torn_share: float = _setting(0.001, 0, 1, "Share of operation lines that may be torn.")
    remembered_seconds: float = _setting(300.0, 0, _DAY, "How long lost input is reported.")


@dataclass(frozen=True, slots=True, kw_only=True)
class OffPlanSettings:
    """A job that does something else than its description says."""

    look_seconds: float = _setting(30.0, 1, _DAY, "How often a job is held against its description; two looks decide.")


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherSettings:
    """Detectors with a threshold or two."""

    mismatch_silence_seconds: float = _setting(
        5.0, 0.5, _DAY, "How long ranks must be silent until a mismatch is judged by what was seen."
    )
    mismatch_calls: int = _setting(12, 1, 40, "Calls of both ranks after a different one that decide about a mismatch.")
    clock_fault_seconds: float = _setting(10.0, 0, _DAY, "How long the clocks must contradict each other.")
    reported_failure_seconds: float = _setting(600.0, 1, 7 * _DAY, "How long a failure that a log reports stays open.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectionSettings:
    """All thresholds, by detector."""

    late_rank: LateRankSettings = field(default_factory=LateRankSettings)
    bandwidth: BandwidthSettings = field(default_factory=BandwidthSettings)
    siblings: SiblingsSettings = field(default_factory=SiblingsSettings)
    below_limit: BelowLimitSettings = field(default_factory=BelowLimitSettings)
    slow_steps: SlowStepsSettings = field(default_factory=SlowStepsSettings)
    hang: HangSettings = field(default_factory=HangSettings)
    stopped_logging: StoppedLoggingSettings = field(default_factory=StoppedLoggingSettings)
    blind: BlindSettings = field(default_factory=BlindSettings)
    off_plan: OffPlanSettings = field(default_factory=OffPlanSettings)
    other: OtherSettings = field(default_factory=OtherSettings)


DEFAULTS: Final = DetectionSettings()

_ORDERED: Final = (
    ("late_rank.info_share", "late_rank.critical_share"),
    ("siblings.healthy_log_loss", "siblings.healed_log_loss"),
    ("siblings.healed_log_loss", "siblings.least_log_loss"),
    ("below_limit.least_ratio", "below_limit.healed_ratio"),
    ("blind.critical_matched_share", "blind.least_matched_share"),
)
"""Thresholds of which the first must not be above the second."""
_PREFIX: Final = "detect."
_JOB: Final = "job."


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """One threshold as people see it."""

    name: str
    about: str
    default: float
    low: float
    high: float
    is_whole: bool
    """It counts something."""


def _thresholds() -> Iterator[Threshold]:
    for group in fields(DetectionSettings):
        of_group = getattr(DEFAULTS, group.name)
        for each in fields(of_group):
            default, data = getattr(of_group, each.name), cast("Mapping[str, Any]", each.metadata)
            yield Threshold(
                name=f"{group.name}.{each.name}", default=default, is_whole=isinstance(default, int), **data
            )


THRESHOLDS: Final[Mapping[str, Threshold]] = {each.name: each for each in _thresholds()}
"""In the order of the table."""


def settings_of(given: Mapping[str, float], job: str) -> DetectionSettings:
    """The settings of a job: what is `given` for all, then for each pattern that fits, later ones win.

    Names that are not known (any more) are left out.
    """
    values = {name: value for name, value in given.items() if name in THRESHOLDS}
    for name, value in given.items():
        pattern, own = split_name(name)
        if pattern is not None and own in THRESHOLDS and fnmatchcase(job, pattern):
            values[own] = value
    return _settings(values) if values else DEFAULTS


def _settings(values: Mapping[str, float]) -> DetectionSettings:
    by_group: dict[str, dict[str, float]] = {}
    for name, value in values.items():
        group, _, own = name.partition(".")
        by_group.setdefault(group, {})[own] = value
    changed = {group: replace(getattr(DEFAULTS, group), **own) for group, own in by_group.items()}
    return replace(DEFAULTS, **changed)


def check(given: Mapping[str, object]) -> dict[str, float]:
    """These settings by their full names, as numbers.

    Raises:
        ConfigError: names everything that is wrong: names that are not known with what is meant, and bounds.
    """
    checked: dict[str, float] = {}
    faults: list[str] = []
    for name, value in given.items():
        pattern, own = split_name(name.removeprefix(_PREFIX))
        known = THRESHOLDS.get(own)
        if known is None:
            faults.append(_unknown(own))
            continue
        fault = _fault(known, value)
        if fault is not None:
            faults.append(fault)
        else:
            checked[own if pattern is None else f'{_JOB}"{pattern}".{own}'] = cast("float", value)
    if not faults:
        patterns = {pattern for name in checked if (pattern := split_name(name)[0]) is not None}
        faults = sorted({fault for job in ("", *patterns) for fault in _disorder(settings_of(checked, job))})
    if faults:
        raise ConfigError("\n".join(faults))
    return checked


def checked_change(values: Mapping[str, float | None], given: Mapping[str, float]) -> dict[str, float | None]:
    """A change of thresholds by full names; None: what was changed is to be as at the start. `given`: all that hold.

    Raises:
        ConfigError: names everything that is wrong with it, or with what would hold then.
    """
    numbers = check({name: _as_whole(value) for name, value in values.items() if value is not None})
    names = check({name: _default_of(name) for name, value in values.items() if value is None})
    check({**given, **numbers})
    return {**numbers, **dict.fromkeys(names)}


def _as_whole(value: float) -> float:
    """JSON does not tell whole numbers from others."""
    return int(value) if value.is_integer() else value


def _default_of(name: str) -> float:
    known = THRESHOLDS.get(split_name(name.removeprefix(_PREFIX))[1])
    return math.nan if known is None else known.default


def parse_assignment(text: str) -> tuple[str, float | str]:
    """Name and number of `detect.late_rank.least_share=0.02`; what is no number is left as it is, for `check`."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"{text!r} is not NAME=NUMBER, for instance detect.late_rank.least_share=0.02")
    for kind in (int, float):
        try:
            return name.strip(), kind(value)
        except ValueError:
            continue
    return name.strip(), value


def flattened(table: Mapping[str, object]) -> dict[str, object]:
    """The settings of a table `[detect]` of a file, by full name: `[detect.job."llama-*".late_rank]` is a table too."""
    found: dict[str, object] = {}
    for name, value in table.items():
        jobs = cast("Mapping[str, object]", value) if name == "job" and isinstance(value, Mapping) else None
        for pattern, own in {"": {name: value}}.items() if jobs is None else jobs.items():
            prefix = f'{_JOB}"{pattern}".' if jobs is not None else ""
            groups = cast("Mapping[str, object]", own) if isinstance(own, Mapping) else {"": own}
            for group, settings in groups.items():
                of_group = cast("Mapping[str, object]", settings) if isinstance(settings, Mapping) else {"": settings}
                found.update({f"{prefix}{group}.{each}".strip("."): one for each, one in of_group.items()})
    return found


def split_name(name: str) -> tuple[str | None, str]:
    """The pattern of jobs in a name, None if it holds for all, and the name of the threshold."""
    if not name.startswith(_JOB):
        return None, name
    pattern, *own = name.removeprefix(_JOB).rsplit(".", 2)
    return pattern.strip("\"'"), ".".join(own)


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, THRESHOLDS, n=1, cutoff=0.5)
    of_group = [known for known in THRESHOLDS if known.startswith(f"{name.partition('.')[0]}.")]
    known = of_group or list(dict.fromkeys(f"{known.partition('.')[0]}...." for known in THRESHOLDS))
    advice = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
    return f"there is no threshold {name[:80]!r}: {advice}"


def _fault(known: Threshold, value: object) -> str | None:
    """A sentence if a value is of no use, else None."""
    if isinstance(value, bool) or not isinstance(value, int if known.is_whole else int | float):
        return f"{known.name} is {'a whole number' if known.is_whole else 'a number'}, not {value!r:.80}"
    if not math.isfinite(value) or not known.low <= value <= known.high:
        return f"{known.name}: {value:g} is not between {known.low:g} and {known.high:g}"
    return None


def _disorder(settings: DetectionSettings) -> Iterator[str]:
    for low, high in _ORDERED:
        low_value, high_value = attrgetter(low, high)(settings)
        if low_value > high_value:
            yield f"{low} ({low_value:g}) must not be above {high} ({high_value:g})"

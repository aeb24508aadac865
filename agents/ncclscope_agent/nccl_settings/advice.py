"""Advice on NCCL's variables: what ncclscope needs, by NCCL version, and what is wrong with what is set.

Scope: the variables that shape the debug log and the NVTX ranges, NCCL 2.4 to 2.30. NCCL falls back in silence
if a value is wrong: nothing is printed then, or less, or to another place. Each rule names its source.

*Source:* NCCL `src/debug.cc:ncclDebugInit`; from 2.30.7 also `src/include/param/parser_bitset.h:bitsetResolve` and
`src/include/param/param.h:loadValue`; `src/init_nvtx.cc` (from 2.28.3).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum, StrEnum, auto
from typing import Final

from ncclscope_agent.nccl_settings.volume import LogLook
from ncclscope_agent.sources.nccl_log.reader import NcclLogReader
from ncclscope_wire.records import Source, SourceKind
from ncclscope_wire.terms import NO_TIME_NS

_MOMENTS: Final = (
    datetime(2026, 3, 2, 23, 20, 33, 4217, tzinfo=UTC),
    datetime(2026, 11, 9, 1, 2, 3, 999_000, tzinfo=UTC),
)
"""Dates that may be read in two ways; an afternoon and a morning."""
_LINE: Final = (
    "node17:41822:41903 [2] NCCL INFO AllReduce: opCount 0 sendbuff 0x7f2a40000000 recvbuff 0x7f2a44000000 count 1 "
    "datatype 7 op 0 root 0 comm 0x55d0c8b3e2a0 [nranks=4] stream 0x55d0c7f01b10\n"
)
_SOURCE: Final = Source(kind=SourceKind.NCCL_LOG, name="trial", key="trial")
_NS: Final = 1_000_000_000


class Trial(Enum):
    """How the stamps of a format are read."""

    TOLD = auto()
    """Their time is read."""
    TOLD_BY_FILE = auto()
    """The year or the order of the date follows from the file's last change only."""
    NOT_TOLD = auto()
    """The lines are read without a time."""
    WRONG = auto()
    """Their time is read, and is another one."""
    NOT_READ = auto()
    """The lines are not read: the host cannot be separated from the stamp."""


def try_format(form: str, *, blanks: bool) -> Trial:
    """How the stamps of a format are read, at worst; `blanks` says whether NCCL prints `_` as a blank."""
    worst = Trial.TOLD
    for moment in _MOMENTS:
        stamp = _stamp(form.replace("_", " ") if blanks else form, moment)
        wanted = int(moment.timestamp()) * _NS
        trial = _try(stamp, wanted, None)
        if trial is Trial.NOT_TOLD and _try(stamp, wanted, wanted + 86_400 * _NS) is Trial.TOLD:
            trial = Trial.TOLD_BY_FILE
        worst = max(worst, trial, key=lambda one: one.value)
    return worst


def _try(stamp: str, wanted_ns: int, near_ns: int | None) -> Trial:
    reader = NcclLogReader(_SOURCE, written_near_ns=near_ns)
    batches = [*reader.ingest_bytes((stamp + _LINE).encode()), *reader.finish()]
    times = [int(row["logged_at_ns"]) for batch in batches for row in batch.operations]
    hosts = {text for batch in batches for text in batch.strings}
    if len(times) != 1 or "node17" not in hosts:
        return Trial.NOT_READ
    if times[0] == NO_TIME_NS:
        return Trial.NOT_TOLD
    return Trial.TOLD if 0 <= times[0] - wanted_ns < _NS else Trial.WRONG


def _stamp(form: str, moment: datetime) -> str:
    """The stamp as NCCL prints it. *Source:* `src/debug.cc:ncclDebugInit`; %1f to %9f are digits of the second."""
    digits = f"{moment.microsecond * 1000:09d}"
    form = re.sub(r"%([1-9])f", lambda found: digits[: int(found[1])], form, count=1)
    return moment.strftime(form.replace("%s", str(int(moment.timestamp()))))


DEFAULT_LOG_FILE: Final = "/tmp/nccl.%h.%p.log"


@dataclass(frozen=True, slots=True, order=True)
class NcclVersion:
    """A version of NCCL, in its order."""

    major: int
    minor: int
    patch: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"


def read_version(text: str) -> NcclVersion | None:
    """The version that a text begins with (`2.27.5+cuda12.9`, `2.27.5`, `2.27`); None if it does not."""
    found = re.match(r"\s*v?(\d{1,3})\.(\d{1,3})(?:\.(\d{1,3}))?(?![\d.])", text)
    return None if found is None else NcclVersion(int(found[1]), int(found[2]), int(found[3] or 0))


def version_of_code(code: int) -> NcclVersion:
    """The version that `ncclGetVersion` gives as a number: 22705 is 2.27.5, and up to 2.8 it was 2804 for 2.8.4.

    *Source:* NCCL `src/nccl.h.in`, NCCL_VERSION.
    """
    if code < 10_000:
        return NcclVersion(code // 1000, code // 100 % 10, code % 100)
    return NcclVersion(code // 10_000, code // 100 % 100, code % 100)


_STAMPS: Final = NcclVersion(2, 26, 2)
_GOOD_STAMPS: Final = NcclVersion(2, 26, 3)
_CALLS: Final = NcclVersion(2, 13, 0)
_DESTROY: Final = NcclVersion(2, 30, 3)
_LAST_LENIENT: Final = NcclVersion(2, 30, 4)
"""The last version known to ignore names that it does not know; 2.30.7 falls back to the default."""
_WARN_RAISES: Final = NcclVersion(2, 19, 4)
_NVTX_SWITCH: Final = NcclVersion(2, 28, 3)

_SUBSYSTEMS: Final[Mapping[str, NcclVersion]] = {
    **dict.fromkeys(("INIT", "COLL", "P2P", "SHM", "NET", "GRAPH", "TUNING", "ENV", "ALL"), NcclVersion(2, 4, 0)),
    "ALLOC": NcclVersion(2, 9, 9),
    "CALL": _CALLS,
    "NVLS": NcclVersion(2, 17, 0),
    "PROXY": NcclVersion(2, 18, 0),
    "BOOTSTRAP": NcclVersion(2, 21, 5),
    "REG": NcclVersion(2, 21, 5),
    "PROFILE": NcclVersion(2, 22, 0),
    "RAS": NcclVersion(2, 24, 0),
    "DESTROY": _DESTROY,
    "ALLOC_HOST": NcclVersion(2, 30, 7),
}
"""Name to the version from which NCCL knows it."""
_WANTED: Final = ("INIT", "COLL", "TUNING", "GRAPH", "ENV", "NET", "BOOTSTRAP", "DESTROY")
_FOR: Final[Mapping[str, str]] = {
    "INIT": "communicators, their ranks and their transports",
    "COLL": "the operations themselves",
    "TUNING": "algorithm, protocol and channels of operations",
    "GRAPH": "the topology, and with it the limit that bandwidth is held against",
    "ENV": "which variables NCCL took",
    "NET": "which network cards are used",
    "BOOTSTRAP": "how long ranks waited for each other at the start",
    "DESTROY": "the end of communicators, which INIT tells up to 2.30.2",
}
_NEEDED: Final = {"INIT", "COLL", "DESTROY"}
_LEVELS: Final = ("VERSION", "WARN", "INFO", "ABORT", "TRACE")


class Verdict(StrEnum):
    """Whether something is right, or what is to be done about it."""

    RIGHT = "right"
    NOTE = "note"
    """It works, and there is something to know or to gain."""
    CHANGE = "change"
    """It must change, or ncclscope sees less than this level gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """A remark about one variable, or one part of the node."""

    verdict: Verdict
    about: str
    """The variable, or the part of the node."""
    found: str | None
    """Its value; None if it is not set."""
    text: str
    """Why, in a sentence."""


def default_subsystems(version: NcclVersion) -> frozenset[str]:
    """The default of NCCL_DEBUG_SUBSYS."""
    if version < NcclVersion(2, 16, 5):
        return frozenset({"INIT"})
    if version < NcclVersion(2, 23, 4):
        return frozenset({"INIT", "ENV"})
    return frozenset({"INIT", "BOOTSTRAP", "ENV"})


def known_subsystems(version: NcclVersion) -> frozenset[str]:
    """The names that NCCL_DEBUG_SUBSYS may hold, ALL among them."""
    return frozenset(name for name, since in _SUBSYSTEMS.items() if since <= version)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """The names of a list that NCCL puts in force, and those that it does not know."""

    names: frozenset[str]
    """In force; ALL stands as all of them."""
    unknown: tuple[str, ...] = ()
    is_reset: bool = False
    """A name that is not known made NCCL take the default instead of the list."""


def subsystem_mask(version: NcclVersion, value: str | None) -> Mask:
    """The subsystems that NCCL_DEBUG_SUBSYS with this value (None: not set) turns on."""
    return _mask(version, value, known_subsystems(version), default_subsystems(version))


def stamped_levels(version: NcclVersion, value: str | None) -> Mask:
    """The levels whose lines NCCL_DEBUG_TIMESTAMP_LEVELS with this value stamps; none before 2.26.2."""
    if version < _STAMPS:
        return Mask(names=frozenset())
    return _mask(version, value, frozenset({*_LEVELS, "ALL"}), frozenset({"WARN"}))


def _mask(version: NcclVersion, value: str | None, known: frozenset[str], default: frozenset[str]) -> Mask:
    if value is None:
        return Mask(names=default)
    is_inverted = value.startswith("^")
    is_strict = version > _LAST_LENIENT
    # Only the strict parser takes blanks away.
    names = [name.strip() if is_strict else name for name in value.removeprefix("^").upper().split(",")]
    unknown = tuple(name for name in names if name and name not in known)
    if unknown and is_strict:
        return Mask(names=default, unknown=unknown, is_reset=True)
    everything = known - {"ALL"}
    told = everything if "ALL" in names else frozenset(names) & everything
    return Mask(names=everything - told if is_inverted else told, unknown=unknown)


def wanted(version: NcclVersion, *, log_file: str = DEFAULT_LOG_FILE, calls: bool = False) -> dict[str, str]:
    """The variables to set, in order. `calls`: also a line for every API call, which tells groups apart (2.13 on)."""
    with_calls = calls and version >= _CALLS
    names = [name for name in _WANTED if _SUBSYSTEMS[name] <= version]
    variables = {
        "NCCL_DEBUG": "TRACE" if with_calls else "INFO",
        "NCCL_DEBUG_SUBSYS": ",".join([*names, "CALL"] if with_calls else names),
        "NCCL_DEBUG_FILE": log_file,
    }
    if version >= _STAMPS:
        variables["NCCL_DEBUG_TIMESTAMP_LEVELS"] = "ALL"
        # From 2.26.3 on `_` is written as a blank, and needs no quotes in job scripts and nccl.conf.
        variables["NCCL_DEBUG_TIMESTAMP_FORMAT"] = "[%F_%T.%6f]_" if version >= _GOOD_STAMPS else "[%F %T] "
    return variables


def export_lines(variables: Mapping[str, str]) -> list[str]:
    """The variables as lines of a shell script."""
    return [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]


def remarks_on_environment(
    version: NcclVersion, environment: Mapping[str, str], *, with_exports: bool = False
) -> list[Remark]:
    """Remarks on what is right and what to change, one or more for each variable that matters.

    `with_exports`: nsys exports are meant to be used too.
    """
    return [
        *_on_level(version, environment),
        *_on_subsystems(version, environment),
        *_on_file(version, environment.get("NCCL_DEBUG_FILE")),
        *_on_stamp_levels(version, environment),
        *_on_stamp_format(version, environment),
        *_on_warn_switch(version, environment),
        *_on_nvtx(version, environment.get("NCCL_NVTX_DISABLE"), with_exports=with_exports),
    ]


def _on_level(version: NcclVersion, environment: Mapping[str, str]) -> Iterator[Remark]:
    name, found = "NCCL_DEBUG", environment.get("NCCL_DEBUG")
    level = (found or "").upper()
    if level in {"INFO", "ABORT"}:
        yield _remark(Verdict.RIGHT, name, found, "INFO lines are printed")
    elif level == "TRACE":
        names = subsystem_mask(version, environment.get("NCCL_DEBUG_SUBSYS")).names
        text = "INFO lines are printed, and calls" if "CALL" in names else (
            "INFO lines are printed; without CALL in NCCL_DEBUG_SUBSYS a release build prints no more than with INFO"
        )  # fmt: skip
        yield _remark(Verdict.RIGHT, name, found, text)
    else:
        why = "it is not set" if found is None else f"{found!r} prints no INFO lines" if level in {
            "WARN", "VERSION", "NONE", ""} else f"{found!r} is no level of NCCL ({', '.join(_LEVELS)})"  # fmt: skip
        yield _remark(Verdict.CHANGE, name, found, f"{why}, so there are no operations in the log: set INFO")


def _on_subsystems(version: NcclVersion, environment: Mapping[str, str]) -> Iterator[Remark]:
    name, found = "NCCL_DEBUG_SUBSYS", environment.get("NCCL_DEBUG_SUBSYS")
    mask = subsystem_mask(version, found)
    if mask.unknown:
        yield _on_unknown_names(version, name, found, mask, "so there are no operations in the log")
    lacking = [known for known in _WANTED if _SUBSYSTEMS[known] <= version and known not in mask.names]
    if found is None:
        yield _remark(Verdict.NOTE, name, found, f"its default in {version} is {','.join(sorted(mask.names))}")
    for absent in lacking:
        verdict = Verdict.CHANGE if absent in _NEEDED else Verdict.NOTE
        yield _remark(verdict, name, found, f"{absent} is off: it tells {_FOR[absent]}")
    if not lacking and not mask.is_reset:
        yield _remark(Verdict.RIGHT, name, found, "everything that is read is on")
    if "CALL" in mask.names and found is not None and environment.get("NCCL_DEBUG", "").upper() != "TRACE":
        yield _remark(Verdict.NOTE, name, found, "CALL is on, and its lines are printed with NCCL_DEBUG=TRACE only")
    dear = sorted(mask.names & {"ALLOC", "ALLOC_HOST", "PROXY", "P2P", "REG"})
    if dear:
        yield _remark(
            Verdict.NOTE, name, found, f"{','.join(dear)} are on: nothing of them is needed, and some are large"
        )


def _on_unknown_names(version: NcclVersion, name: str, found: str | None, mask: Mask, effect: str) -> Remark:
    names = ", ".join(repr(unknown) for unknown in mask.unknown)
    if mask.is_reset:
        text = (
            f"NCCL {version} does not know {names}, and one such name makes it take the default "
            f"({','.join(sorted(mask.names))}) in silence, {effect} (from 2.30.7 on)"
        )
        return _remark(Verdict.CHANGE, name, found, text)
    return _remark(Verdict.NOTE, name, found, f"NCCL {version} does not know {names} and ignores it (up to 2.30.4)")


def _on_file(version: NcclVersion, found: str | None) -> Iterator[Remark]:
    name = "NCCL_DEBUG_FILE"
    if not found or found in {"/dev/stdout", "/dev/stderr"}:
        buffering = (
            "NCCL does not flush it, so lines come late and the last are lost in a crash (from 2.13 on)"
            if version >= _CALLS
            else "it is mixed with what others print"
        )
        yield _remark(Verdict.CHANGE, name, found, f"the log goes to the job's output, where {buffering}: give a file")
        return
    is_right = True
    for verdict, text in _faults_of_pattern(found):
        is_right &= verdict is not Verdict.CHANGE
        yield _remark(verdict, name, found, text)
    if is_right:
        yield _remark(Verdict.RIGHT, name, found, "each process has a file of its own")


def _faults_of_pattern(pattern: str) -> Iterator[tuple[Verdict, str]]:
    used = re.findall(r"%(.?)", pattern)
    if "p" not in used:
        yield Verdict.CHANGE, "without %p all processes of a node open one file, empty it, and tear each other's lines"
    if "h" not in used:
        yield Verdict.NOTE, "without %h processes of two nodes with one pid share a file, where the directory is shared"
    if odd := sorted({f"%{letter}" for letter in used if letter not in {"h", "p", "%"}}):
        yield Verdict.CHANGE, f"NCCL knows %h, %p and %% only; {', '.join(odd)} stays as it is in the name"
    if pattern.startswith("~"):
        yield Verdict.CHANGE, "NCCL does not know ~: it cannot open the file, and prints to the job's output in silence"
    elif not pattern.startswith("/"):
        yield Verdict.NOTE, "the name is relative to where each process starts"


def remark_on_log_directory(pattern: str, state: str) -> Remark:
    """The remark on a directory of NCCL_DEBUG_FILE whose `state` is "missing" or "not_writable" here."""
    why = "does not exist" if state == "missing" else "cannot be written to"
    text = f"the directory {why} on this node: NCCL prints to the job's output then, without a word"
    return _remark(Verdict.CHANGE, "NCCL_DEBUG_FILE", pattern, text)


def _on_stamp_levels(version: NcclVersion, environment: Mapping[str, str]) -> Iterator[Remark]:
    name = "NCCL_DEBUG_TIMESTAMP_LEVELS"
    found = environment.get(name)
    if version < _STAMPS:
        text = f"NCCL {version} prints no time stamps (2.26.2 and later do): times are those of arrival at the agent"
        yield _remark(Verdict.NOTE, name, found, text)
        return
    mask = stamped_levels(version, found)
    if mask.unknown:
        yield _on_unknown_names(version, name, found, mask, "so operations carry no time")
    if "INFO" not in mask.names:
        told = "by default only warnings are stamped" if found is None else "INFO lines are not stamped"
        yield _remark(Verdict.CHANGE, name, found, f"{told}, so operations carry no time: set ALL")
    elif environment.get("NCCL_DEBUG", "").upper() == "TRACE" and "TRACE" not in mask.names:
        yield _remark(Verdict.NOTE, name, found, "INFO lines are stamped, and CALL lines are not: set ALL")
    else:
        yield _remark(Verdict.RIGHT, name, found, "operations carry their time")


def _on_stamp_format(version: NcclVersion, environment: Mapping[str, str]) -> Iterator[Remark]:
    name = "NCCL_DEBUG_TIMESTAMP_FORMAT"
    found = environment.get(name)
    if version < _STAMPS:
        return
    if found is None:
        yield _remark(Verdict.NOTE, name, found, "the default has whole seconds only")
    elif not found:
        yield _remark(Verdict.CHANGE, name, found, "it is empty, which turns time stamps off")
    elif len(found) > 255:
        yield _remark(Verdict.CHANGE, name, found, "over 255 characters: NCCL takes the default")
    else:
        yield from _on_given_format(version, name, found)


_BAD_TRIALS: Final = {
    Trial.NOT_TOLD: (
        "a stamp without year, month, day and time, or without a blank behind it, does not tell when: use %F and %T"
    ),
    Trial.WRONG: "hours of the afternoon look like those of the morning: use %T",
    Trial.NOT_READ: "the host cannot be told from the stamp in front of it: end it with a blank or a bracket",
}


def _on_given_format(version: NcclVersion, name: str, found: str) -> Iterator[Remark]:
    digits = [int(number) for number in re.findall(r"%([1-9])f", found.replace("%%", ""))]
    trial = try_format(found, blanks=version > _STAMPS)
    if version == _STAMPS and digits:
        worse = ", and %7f to %9f end the process by a division by zero" if max(digits) > 6 else ""
        yield _remark(Verdict.CHANGE, name, found, f"2.26.2 prints wrong digits of the second{worse}: leave them out")
    elif len(digits) > 1:
        yield _remark(Verdict.CHANGE, name, found, "NCCL replaces digits of the second (%1f to %9f) once only")
    elif trial in _BAD_TRIALS:
        yield _remark(Verdict.CHANGE, name, found, _BAD_TRIALS[trial])
    elif trial is Trial.TOLD_BY_FILE:
        text = "year, or order of the date, is told by the file's last change only: use %F"
        yield _remark(Verdict.NOTE, name, found, text)
    elif not digits and version > _STAMPS:
        yield _remark(Verdict.NOTE, name, found, "whole seconds only: %6f gives microseconds")
    else:
        yield _remark(Verdict.RIGHT, name, found, "date, time and enough digits")
    if version == _STAMPS and "_" in found:
        yield _remark(Verdict.NOTE, name, found, "2.26.2 prints `_` as it is; 2.26.3 and later write a blank")
    if not re.search(r"%[zs]", found):
        yield _remark(
            Verdict.NOTE,
            name,
            found,
            "local time without its zone: where that is neither the node's nor UTC, tell by --log-timezone",
        )


def _on_warn_switch(version: NcclVersion, environment: Mapping[str, str]) -> Iterator[Remark]:
    name = "NCCL_WARN_ENABLE_DEBUG_INFO"
    found = environment.get(name)
    if found is None or found == "0":
        return
    if version < _WARN_RAISES:
        yield _remark(Verdict.NOTE, name, found, f"NCCL {version} does not know it (2.19.4 and later do)")
    elif environment.get("NCCL_DEBUG", "").upper() not in {"INFO", "TRACE"}:
        text = "the log begins at the first warning: communicators made before it are not told"
        yield _remark(Verdict.NOTE, name, found, text)


def _on_nvtx(version: NcclVersion, found: str | None, *, with_exports: bool) -> Iterator[Remark]:
    if found is None or found == "0" or version < _NVTX_SWITCH:
        return
    text = "NCCL marks no ranges: in nsys exports groups and sizes must be guessed"
    yield _remark(Verdict.CHANGE if with_exports else Verdict.NOTE, "NCCL_NVTX_DISABLE", found, text)


def remarks_on_logs(version: NcclVersion | None, looks: Sequence[LogLook]) -> list[Remark]:
    """Remarks on what the existing logs show to be right or wrong, one for all logs of which the same is true.

    `version` decides whether stamps are to be expected; None: it is not known.
    """
    with_nccl = [look for look in looks if look.nccl_lines]
    remarks = list(
        _on_some(
            looks,
            lambda look: not look.nccl_lines and look.size_bytes > 0,
            Verdict.NOTE,
            "no line of NCCL in the part looked at: is it a log of NCCL, of a job with NCCL_DEBUG=INFO?",
        )
    )
    remarks += _on_some(looks, lambda look: look.size_bytes == 0, Verdict.NOTE, "empty so far")
    remarks += _on_some(
        with_nccl,
        lambda look: not look.operations,
        Verdict.CHANGE,
        "no operation in the part looked at: NCCL_DEBUG=INFO with COLL in NCCL_DEBUG_SUBSYS prints them",
    )
    remarks += _on_some(
        with_nccl,
        lambda look: len(look.by_process) > 1,
        Verdict.CHANGE,
        "several processes write one file and tear each other's lines: use %h and %p in NCCL_DEBUG_FILE",
    )
    if version is not None and version >= _STAMPS:
        remarks += _on_some(
            with_nccl,
            lambda look: 2 * look.stamped_lines < look.nccl_lines,
            Verdict.CHANGE,
            f"most lines have no time stamp, and NCCL {version} can print one: set NCCL_DEBUG_TIMESTAMP_LEVELS=ALL",
        )
    if looks and not remarks:
        remarks.append(_remark(Verdict.RIGHT, "logs", None, "operations are there, a file for each process"))
    return remarks


def _on_some(
    looks: Sequence[LogLook], is_so: Callable[[LogLook], bool], verdict: Verdict, text: str
) -> Iterator[Remark]:
    names = [look.name for look in looks if is_so(look)]
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield _remark(verdict, "logs", None, f"{len(names)} of {len(looks)} ({', '.join(names[:3])}{more}): {text}")


def _remark(verdict: Verdict, about: str, found: str | None, text: str) -> Remark:
    return Remark(verdict=verdict, about=about, found=found, text=text)

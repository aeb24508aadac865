"""The configuration file: TOML with a table for each program, whose keys are the flags without their dashes.

    [agent]
    logs = ["/var/log/nccl/*.log"]
    connect = "monitor.example:9797"

    [serve]
    listen = "0.0.0.0:9797"

    [detect.late_rank]
    least_share = 0.02

A flag wins over an environment variable, that over the file, and the file over the default. What may be in it comes
from the same tables as the flags; unknown keys and wrong types are all reported at once, with their lines.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final, cast

import click

from ncclscope_agent.config import Setting, settings_table
from ncclscope_service.detect.settings import THRESHOLDS, check, flattened
from ncclscope_wire.errors import ConfigError

MOST_BYTES: Final = 1 << 20
TABLES: Final = ("agent", "serve")
_ALL_TABLES: Final = (*TABLES, "detect")
_PATH: Final = "ncclscope.config_file"
_HEADER: Final = re.compile(r"\s*\[([^\]]+)\]")
_NOT_IN_FILES: Final = frozenset({"config", "help", "version"})
_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of a table."""

    name: str
    parameter: str
    """Name under which the program knows it."""
    kind: str
    """As JSON Schema names types; an array is of strings."""
    help: str
    default: object = None
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None

    def schema(self) -> dict[str, object]:
        """The JSON Schema of this key."""
        bounds = {"minimum": self.low, "maximum": self.high}
        return {
            "type": self.kind,
            "description": self.help,
            **({"items": {"type": "string"}} if self.kind == "array" else {}),
            **({"enum": list(self.choices)} if self.choices else {}),
            **{name: bound for name, bound in bounds.items() if bound is not None},
            **({} if self.default in (None, "", [], ()) else {"default": self.default}),
        }


def keys_of_agent() -> dict[str, Key]:
    """The keys that `[agent]` may hold: every setting of the agent."""
    return {key.name: key for key in (_key_of_setting(*each) for each in settings_table())}


def keys_of_command(command: click.Command) -> dict[str, Key]:
    """The keys that the table of a command may hold: every option that it has."""
    options = [each for each in command.params if isinstance(each, click.Option)]
    keys = (_key_of_option(each) for each in options if each.name not in _NOT_IN_FILES)
    return {key.name: key for key in keys}


def read_table(path: Path, table: str, keys: Mapping[str, Key]) -> dict[str, object]:
    """The values of one table, by parameter; none if the file has no such table.

    Raises:
        ConfigError: names everything that is wrong with the table, and with the file as a whole, with lines.
    """
    text = _text(path)
    content = _parsed(path, text)
    faults = [_unknown(path, text, "", name, _ALL_TABLES) for name in content if name not in _ALL_TABLES]
    given = content.get(table, {})
    if not isinstance(given, dict):
        faults.append(f"{_place(path, text, '', table)}: [{table}] is a table, not a value")
        given = {}
    values: dict[str, object] = {}
    for name, value in cast("dict[str, object]", given).items():
        key = keys.get(name)
        fault = _unknown(path, text, table, name, keys) if key is None else _fault(path, text, table, key, value)
        if fault is not None:
            faults.append(fault)
        elif key is not None:
            values[key.parameter] = value
    if faults:
        raise ConfigError("\n".join(faults))
    return values


def read_thresholds(path: Path) -> dict[str, float]:
    """The thresholds of detectors that the table `[detect]` gives, by full name (`detect.settings`).

    Raises:
        ConfigError: names everything that is wrong with them, with lines.
    """
    text = _text(path)
    given = _parsed(path, text).get("detect", {})
    values = flattened(cast("dict[str, object]", given) if isinstance(given, dict) else {"detect": given})
    faults: list[str] = []
    for name, value in values.items():
        try:
            check({name: value})
        except ConfigError as error:
            group, _, own = f"detect.{name}".rpartition(".")
            line = next(chain(_lines(text, group, own), _lines(text, "detect", name.partition(".")[0])), None)
            faults.append(f"{path}{f', line {line}' if line is not None else ''}: {error}")
    if not faults:
        try:
            return check(values)
        except ConfigError as error:
            faults = [f"{path}: {line}" for line in str(error).splitlines()]
    raise ConfigError("\n".join(faults))


def schema(commands: Mapping[str, Mapping[str, Key]]) -> dict[str, object]:
    """JSON Schema of the file, from the keys of each table."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Configuration file of ncclscope",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            table: {
                "type": "object",
                "additionalProperties": False,
                "properties": {name: key.schema() for name, key in keys.items()},
            }
            for table, keys in commands.items()
        }
        | {"detect": _schema_of_thresholds()},
    }


def _schema_of_thresholds() -> dict[str, object]:
    groups: dict[str, dict[str, object]] = {}
    for each in THRESHOLDS.values():
        group, _, name = each.name.partition(".")
        key = Key(
            name=name,
            parameter=name,
            kind="integer" if each.is_whole else "number",
            help=each.about,
            default=each.default,
            low=each.low,
            high=each.high,
        )
        groups.setdefault(group, {})[name] = key.schema()
    tables: dict[str, object] = {
        group: {"type": "object", "additionalProperties": False, "properties": keys} for group, keys in groups.items()
    }
    of_jobs = {"type": "object", "additionalProperties": False, "properties": tables}
    jobs = {"type": "object", "description": "By pattern of job names.", "additionalProperties": of_jobs}
    return {"type": "object", "additionalProperties": False, "properties": {**tables, "job": jobs}}


def config_path() -> Path | None:
    """The file of `--config` of the command that runs."""
    path: Path | None = click.get_current_context().meta.get(_PATH)
    return path


def config_option(table: str | None) -> click.Option:
    """`--config FILE` for a command whose options are its settings: what the file says is their default.

    None: of the file the command takes the thresholds of detectors alone (`read_thresholds`).
    """

    def use(context: click.Context, _: click.Parameter, path: Path | None) -> Path | None:
        if path is not None:
            context.meta[_PATH] = path
            try:
                if table is not None:
                    context.default_map = read_table(path, table, keys_of_command(context.command))
            except ConfigError as error:
                raise click.UsageError(str(error)) from error
        return path

    return click.Option(
        ["--config"],
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        envvar="NCCLSCOPE_CONFIG",
        is_eager=True,
        expose_value=False,
        callback=use,
        help="TOML file whose table [detect] holds thresholds of the detectors; --set wins over it."
        if table is None
        else f"TOML file whose table [{table}] holds settings; flags and variables win over it.",
    )


def _text(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            content = stream.read(MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: name a TOML file that this user may read") from error
    if len(content) > MOST_BYTES:
        raise ConfigError(f"{path}: has over {MOST_BYTES} bytes: is it the right file?")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 (byte {error.start}): is it the right file?") from error


def _parsed(path: Path, text: str) -> dict[str, object]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from error


def _unknown(path: Path, text: str, table: str, name: str, known: Mapping[str, Key] | tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name.replace("_", "-"), list(known), n=1, cutoff=0.5)
    advice = f": did you mean {near[0]}?" if near else f"; known are {', '.join(sorted(known))}"
    what = f"[{table}] has no setting" if table else "there is no table"
    return f"{_place(path, text, table, name)}: {what} {name[:80]!r}{advice}"


def _fault(path: Path, text: str, table: str, key: Key, value: object) -> str | None:
    """A sentence if a value has the wrong type, else None; bounds are the program's to check."""
    is_right = isinstance(value, _TYPES[key.kind]) and (key.kind == "boolean") == isinstance(value, bool)
    if key.kind == "array":
        is_right = is_right and all(isinstance(each, str) for each in cast("list[object]", value))
    if is_right:
        return None
    wanted = {"array": "an array of strings", "integer": "an integer"}.get(key.kind, f"a {key.kind}")
    return f"{_place(path, text, table, key.name)}: {key.name} is {wanted}, not {value!r:.80}"


def _place(path: Path, text: str, table: str, name: str) -> str:
    """The file, and the line of a key or a table's header, if it is written in the usual way."""
    line = next(_lines(text, table, name), None)
    return str(path) if line is None else f"{path}, line {line}"


def _lines(text: str, table: str, name: str) -> Iterator[int]:
    assignment = re.compile(rf"\s*[\"']?{re.escape(name)}[\"']?\s*[=.]")
    now = ""
    for number, line in enumerate(text.splitlines(), 1):
        header = _HEADER.match(line)
        if header is not None:
            now = header[1].strip()
            now = now.strip('"') if now.startswith('"') else now
            if not table and now.partition(".")[0] == name:
                yield number
        elif now == table and assignment.match(line):
            yield number


def _key_of_setting(name: str, default: object, about: Setting) -> Key:
    kinds = ((bool, "boolean"), (int, "integer"), (float, "number"), (tuple, "array"))
    kind = next((kind for python, kind in kinds if isinstance(default, python)), "string")
    return Key(
        name=name.replace("_", "-"),
        parameter=name,
        kind=kind,
        help=about.help,
        default=default,
        low=about.low,
        high=about.high,
    )


def _key_of_option(option: click.Option) -> Key:
    kind = option.type
    bounds = kind if isinstance(kind, click.IntRange | click.FloatRange) else None
    named = "string"
    if option.multiple:
        named = "array"
    elif option.is_flag:
        named = "boolean"
    elif isinstance(kind, click.types.IntParamType):
        named = "integer"
    elif isinstance(kind, click.types.FloatParamType):
        named = "number"
    given = option.default
    default = given if isinstance(given, str | int | float | bool) else None
    return Key(
        name=max(option.opts, key=len).lstrip("-"),
        parameter=option.name or "",
        kind=named,
        help=option.help or "",
        default=str(given) if isinstance(given, Path) else default,
        choices=tuple(map(str, kind.choices)) if isinstance(kind, click.Choice) else (),
        low=None if bounds is None else bounds.min,
        high=None if bounds is None else bounds.max,
    )

"""One command with subcommands, which starts fast and ends with a sentence when something is wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from nsys_made import nccl_export

from ncclscope import __version__
from ncclscope.cli import main
from ncclscope.extras import require_models, require_service
from ncclscope.options import SectionedCommand

_SUBCOMMANDS = ["demo", "analyze", "agent", "serve", "snapshot", "simulate"]


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def test_help_lists_the_subcommands_in_the_order_in_which_a_newcomer_meets_them() -> None:
    done = _run("--help")
    assert done.exit_code == 0
    lists = done.output.partition("One node:")[2]
    listed = [line.split()[0] for line in lists.splitlines() if line.strip()]
    assert "..." not in lists, "a line says all of it"
    assert [word for word in listed if word in _SUBCOMMANDS] == _SUBCOMMANDS


@pytest.mark.parametrize("name", ["serve", "agent", "simulate"])
def test_every_option_of_a_long_help_is_in_one_section(name: str) -> None:
    command = main.get_command(click.Context(main), name)
    assert isinstance(command, SectionedCommand)
    in_sections = [each for names in command.sections.values() for each in names]
    own = [each.name for each in command.params]
    assert not set(in_sections) - set(own)
    assert len(in_sections) == len(set(in_sections))
    assert len(set(own) - set(in_sections)) <= 3, "the section for what belongs nowhere has little"
    lists = _run(name, "--help").output.partition(f"{next(iter(command.sections))}:")[2]
    shown = [line.split()[0].rstrip(",") for line in lists.splitlines() if line.startswith("  --")]
    assert len(shown) == len(set(shown)) >= len(own)


def test_an_unknown_subcommand_is_answered_with_those_like_it() -> None:
    assert "No such command 'analyse'. Did you mean analyze?" in _run("analyse", "x").output


@pytest.mark.parametrize("name", _SUBCOMMANDS)
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_every_subcommand_explains_itself(name: str, flag: str) -> None:
    done = _run(name, flag)
    assert done.exit_code == 0
    assert done.output.startswith(f"Usage: main {name}")


def test_the_version_is_the_packages() -> None:
    assert _run("--version").output == f"ncclscope, version {__version__}\n"


def test_a_subcommand_that_does_not_exist_is_wrong_usage() -> None:
    done = _run("observe")
    assert done.exit_code == 2
    assert "No such command 'observe'" in done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("serve", "--listen", "nowhere"), "--listen: 'nowhere' is not HOST:PORT"),
        (("serve", "--http", "localhost:99999"), "--http"),
        (("agent", "--window-bytes", "1"), "--window-bytes"),
        (("analyze", ".", "--out", "x", "--iterations", "8-5"), "'8-5' is not A-B"),
        (("analyze", "no such file", "--out", "x"), "no such file"),
    ],
)
def test_a_wrong_setting_is_named_and_ends_with_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = _run(*arguments)
    assert done.exit_code == 2
    assert said in done.output
    assert "Traceback" not in done.output
    assert not (tmp_path / "x").exists()


def test_subcommands_are_imported_only_when_they_are_asked_for() -> None:
    looked = "import sys, ncclscope.cli; print([m for m in sys.modules if m in ('numpy', 'anyio', 'pyarrow')])"
    done = subprocess.run([sys.executable, "-c", looked], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_analyze_imports_no_server_and_no_charts(tmp_path: Path) -> None:
    nccl_export().write(tmp_path / "report.sqlite")
    given = ["analyze", str(tmp_path / "report.sqlite"), "--out", str(tmp_path / "out")]
    looked = f"import sys; from ncclscope.cli import main; main({given}, standalone_mode=False)"
    unwanted = "print([m for m in sys.modules if m in ('anyio', 'uvicorn', 'plotly')])"
    done = subprocess.run([sys.executable, "-c", f"{looked}; {unwanted}"], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\n[]\n")


def test_the_package_can_be_run() -> None:
    done = subprocess.run([sys.executable, "-m", "ncclscope", "--version"], capture_output=True, text=True, check=True)
    assert __version__ in done.stdout


def test_with_the_packages_of_the_service_nothing_is_said() -> None:
    require_service()


@pytest.mark.parametrize("missing", [("plotly",), ("pyarrow", "uvicorn")])
def test_without_them_the_error_names_them_and_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...]
) -> None:
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)  # as Python marks a module that cannot be imported
    with pytest.raises(click.ClickException) as caught:
        require_service()
    assert f"({', '.join(missing)} missing)" in caught.value.message
    assert "pip install 'ncclscope[service]'" in caught.value.message


def test_what_learns_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    require_models()
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(click.ClickException, match=r"pip install 'ncclscope\[models\]'"):
        require_models()


_TELL = (
    "import logging, structlog; from ncclscope.logs import configure_logs; configure_logs({form!r});"
    "structlog.get_logger().warning('not_connected', service='h:1', why='a \"quoted\"\\nword');"
    "logging.getLogger('uvicorn.error').error('Exception in %s', 'application')"
)


def told(form: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", _TELL.format(form=form)], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout == ""
    return done.stderr.splitlines()


@pytest.mark.parametrize("form", ["json", "auto"])
def test_each_line_is_json_where_nobody_looks(form: str) -> None:
    own, library = map(json.loads, told(form))
    assert own.pop("timestamp").endswith("Z")
    assert own == {"event": "not_connected", "level": "warning", "service": "h:1", "why": 'a "quoted"\nword'}
    assert (library["event"], library["level"]) == ("Exception in application", "error")


def test_text_is_for_people() -> None:
    assert any("not_connected" in line and "service=h:1" in line for line in told("text"))


def test_every_event_is_documented_and_the_documentation_names_no_other(repository: Path) -> None:
    named: set[str] = set()
    for folder in ("agents", "service", "command"):
        for path in (repository / folder).rglob("*.py"):
            text = path.read_text()
            named.update(re.findall(r"_log\.(?:info|warning|error|exception)\(\s*\"(\w+)\"", text))
    rows = [line.split("|")[1] for line in (repository / "docs" / "logs.md").read_text().splitlines() if "| `" in line]
    assert named == {word for row in rows for word in re.findall(r"`(\w+)`", row)}

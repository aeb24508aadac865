"""What users can set or see is in the docs, and what the docs name is there."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from ncclscope.cli import main
from ncclscope_service.rows import FindingKind


def _commands() -> list[tuple[str, click.Command]]:
    context = click.Context(main)
    found: list[tuple[str, click.Command]] = []
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        assert command is not None
        found.append((name, command))
    return found


def _flags(command: click.Command) -> list[str]:
    own = [max(option.opts, key=len) for option in command.params if isinstance(option, click.Option)]
    inner = command.commands.values() if isinstance(command, click.Group) else []
    return [*own, *(flag for each in inner for flag in _flags(each))]


@pytest.mark.parametrize(("name", "command"), _commands(), ids=lambda value: value if isinstance(value, str) else "")
def test_every_command_and_flag_is_documented(repository: Path, name: str, command: click.Command) -> None:
    page = (repository / "docs" / "commands.md").read_text()
    sections = dict(re.findall(r"^## ncclscope (\w+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    assert name in sections, f"docs/commands.md has no section for {name}"
    elsewhere = {"agent": "settings.md", "simulate": "simulator.md", "check": "check.md"}.get(name)
    text = sections[name] if elsewhere is None else (repository / "docs" / elsewhere).read_text()
    for flag in _flags(command):
        assert re.search(rf"{re.escape(flag)}\b", text), f"{name} {flag} is not documented"


def test_every_kind_of_finding_has_a_runbook(repository: Path) -> None:
    headings = re.findall(r"^#+ .*$", (repository / "docs" / "findings.md").read_text(), re.MULTILINE)
    for kind in FindingKind:
        assert any(kind.value in heading for heading in headings), f"docs/findings.md has no heading for {kind}"


def test_links_between_documents_lead_somewhere(repository: Path) -> None:
    for page in [*repository.glob("*.md"), *(repository / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


def test_the_readme_names_commands_that_exist(repository: Path) -> None:
    readme = (repository / "README.md").read_text()
    known = {name for name, _ in _commands()}
    named = set(re.findall(r"ncclscope ([a-z]+)", "\n".join(re.findall(r"```sh\n(.*?)```", readme, re.DOTALL))))
    assert named <= known
    targets = set(re.findall(r"^([a-z-]+):", (repository / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`?make ([a-z-]+)", readme)) <= targets

"""What users can set or see is in the docs, and what the docs name is there."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Final

import click
import pytest

from ncclscope.cli import main
from ncclscope_service.store.records import FindingKind
from ncclscope_service.store.settings import PipelineSettings


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
    elsewhere = {"agent": "settings.md", "simulate": "internals/simulator.md", "check": "check.md"}.get(name)
    text = sections[name] if elsewhere is None else (repository / "docs" / elsewhere).read_text()
    for flag in _flags(command):
        assert re.search(rf"{re.escape(flag)}\b", text), f"{name} {flag} is not documented"


def test_every_kind_of_finding_has_a_runbook(repository: Path) -> None:
    text = (repository / "docs" / "findings.md").read_text()
    kinds = {kind.value for kind in FindingKind}
    assert kinds - set(re.findall(r"^## (\w+)$", text, re.MULTILINE)) == set(), "docs/findings.md lacks a heading"
    rows = re.findall(r"^\| \[(\w+)\]\(#(\w+)\) \|", text, re.MULTILINE)
    assert sorted(rows) == sorted((kind, kind) for kind in kinds), "the first table of docs/findings.md"


def test_every_runbook_says_what_it_costs_what_to_type_and_how_to_confirm(repository: Path) -> None:
    text = (repository / "docs" / "findings.md").read_text()
    page = (repository / "service" / "ncclscope_service" / "web" / "panels.js").read_text()
    beside = set(re.findall(r"\b(\w+): ", page.partition("const LOOK_AT = {")[2].partition("};")[0]))
    for kind in FindingKind:
        section = re.search(rf"^## {kind}\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)
        assert section is not None, kind
        advice = section[1].partition("**What to do.**")[2].partition("\n**")[0]
        assert "- Confirm: " in advice, f"the runbook of {kind} does not say how to confirm it"
        assert re.search(r"[Dd]rain|Nobody has to", advice), f"the runbook of {kind} does not say when to drain a host"
        assert re.search(r"\bcosts?\b", advice), f"the runbook of {kind} does not say what it costs"
        assert len(re.findall(r"^- ", advice, re.MULTILINE)) >= 3, kind
        assert kind in beside, f"the page has no commands for {kind}"


def test_the_page_of_the_runbooks_is_current(repository: Path) -> None:
    subprocess.run([sys.executable, str(repository / "tools" / "runbook-page"), "--check"], check=True)


_FOLDERS: Final = (
    "agents", "service", "command", "simulator", "models", "benchmarks", "dashboards", "deploy",
    "docs", "tools", "tests",
)  # fmt: skip
_PACKAGES: Final = tuple(path.name for path in (Path(__file__).parents[1] / "service/ncclscope_service").iterdir())


def _pages(repository: Path) -> list[Path]:
    return [*repository.glob("*.md"), *(repository / "docs").rglob("*.md"), *(repository / "deploy").rglob("*.md")]


def _anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE):
        slug = re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        times = sum(re.fullmatch(rf"{re.escape(slug)}(-\d+)?", each) is not None for each in found)
        found.add(f"{slug}-{times}" if times else slug)
    return found


def test_every_link_leads_to_a_file_and_a_heading_that_exist(repository: Path) -> None:
    broken: list[str] = []
    for page in _pages(repository):
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
            path, _, anchor = target.partition("#")
            leads_to = page.parent / path if path else page
            if not leads_to.exists() or (anchor and leads_to.suffix == ".md" and anchor not in _anchors(leads_to)):
                broken.append(f"{page.relative_to(repository)}: {target}")
    assert not broken, broken


def test_every_page_that_is_named_in_the_code_exists(repository: Path) -> None:
    missing = [
        f"{file.relative_to(repository)}: {name}"
        for folder in set(_FOLDERS) - {"tests"}
        for file in (repository / folder).rglob("*")
        if file.suffix in {".py", ".md", ".yml", ".yaml", ".env", ".service", ".sh", ".txt", ""} and file.is_file()
        for name in re.findall(r"\bdocs/[\w./-]*\.md", file.read_text(encoding="utf-8", errors="replace"))
        if not (repository / name).exists()
    ]
    assert not missing, missing


def test_every_page_can_be_found_from_the_readme(repository: Path) -> None:
    seen: set[Path] = set()
    waiting = [repository / "README.md"]
    while waiting:
        page = waiting.pop()
        seen.add(page)
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+\.md)", page.read_text()):
            leads_to = (page.parent / target).resolve()
            if leads_to not in seen and leads_to.exists():
                waiting.append(leads_to)
    assert {page.resolve() for page in (repository / "docs").rglob("*.md")} <= seen


def test_every_file_that_a_page_names_exists(repository: Path) -> None:
    tracked = [
        path.relative_to(repository).as_posix() for folder in _FOLDERS for path in (repository / folder).rglob("*")
    ]
    missing: list[str] = []
    for page in [*(repository / "docs").rglob("*.md"), repository / "CONTRIBUTING.md", repository / "SECURITY.md"]:
        for name in re.findall(rf"`([\w./-]+\.py|(?:{'|'.join(_FOLDERS)})/[\w./-]+)`", page.read_text()):
            is_ours = name.startswith(("test_", *(f"{folder}/" for folder in (*_FOLDERS, *_PACKAGES))))
            if (
                is_ours
                and "YOURS" not in name
                and not any(f"/{path}/".endswith(f"/{name.strip('/')}/") for path in tracked)
            ):
                missing.append(f"{page.relative_to(repository)}: {name}")
    assert not missing, missing


def test_every_time_out_is_in_the_architecture(repository: Path) -> None:
    page = (repository / "docs" / "internals" / "architecture.md").read_text()
    code = (repository / "service" / "ncclscope_service" / "store" / "settings.py").read_text()
    names = set(re.findall(r"^([A-Z_]+): Final", code, re.MULTILINE)) - {"SECOND_NS"}
    of_users = {"sizes", "gpus_per_node", "gpu", "baseline", "calibration", "description", "expected_step"}
    of_users |= {"thresholds", "seen_hangs"}
    names |= {field.name for field in fields(PipelineSettings)} - of_users
    named = set(re.findall(r"`(\w+)`", page))
    assert names <= named, names - named


def test_the_readme_names_commands_that_exist(repository: Path) -> None:
    readme = (repository / "README.md").read_text()
    known = {name for name, _ in _commands()}
    named = set(re.findall(r"ncclscope ([a-z]+)", "\n".join(re.findall(r"```sh\n(.*?)```", readme, re.DOTALL))))
    assert named <= known
    targets = set(re.findall(r"^([a-z-]+):", (repository / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`?make ([a-z-]+)", readme)) <= targets

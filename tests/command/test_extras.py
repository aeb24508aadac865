"""A subcommand that needs more than the base install says so in a sentence."""

from __future__ import annotations

import sys

import click
import pytest

from ncclscope.extras import require_models, require_service


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

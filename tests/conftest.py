"""Fixtures that every test may use."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A shell that starts the tests in the background has SIGINT ignored, and so would every process that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

_REPOSITORY = Path(__file__).resolve().parent.parent

# No limit in wall-clock time: how long an example takes is a matter of who else uses the machine. And the same examples
# in every run, so that a run fails for what was changed; `--hypothesis-profile=search` looks for new ones.
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("search"), derandomize=True)
settings.load_profile("same")


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return _REPOSITORY


@pytest.fixture(scope="session")
def corpus() -> Path:
    """The folder of real logs and exports; the test is skipped, with a reason, where it is not there."""
    asked = os.environ.get("NCCLSCOPE_CORPUS")
    folder = Path(asked) if asked else _REPOSITORY.parent / "shared" / "corpus"
    if not folder.is_dir():
        pytest.skip(
            f"needs the corpus of real logs and exports, and {folder} is not a folder: "
            "set NCCLSCOPE_CORPUS to where it lies"
        )
    return folder


@pytest.fixture(scope="session")
def corpora(corpus: Path) -> list[Path]:
    """The corpus, and the second one beside it; skipped where one of them is not there."""
    second = corpus.with_name("corpus2")
    if not second.is_dir():
        pytest.skip(f"needs the second corpus of real logs, and {second} is not a folder")
    return [corpus, second]

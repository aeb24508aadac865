"""What the tests of whole programs share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from end_to_end.processes import PATIENCE_MS
from playwright.sync_api import Browser, expect, sync_playwright

_CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A real browser; the test is skipped, with a reason, where there is none."""
    if not Path(_CHROMIUM).exists():
        pytest.skip("needs the browser chromium (Debian: apt install chromium)")
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=_CHROMIUM, args=["--no-sandbox", "--disable-gpu"], timeout=PATIENCE_MS
        )
        yield launched
        launched.close()

"""The runbooks as a page of the service: docs/findings.md, so that an alert's link leads somewhere without a network.

Reads the little of Markdown that the file uses: headings, paragraphs, lists, code, emphasis. Each heading is an anchor.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from ncclscope_service.web_files import WEB

_PACKED: Final = WEB / "findings.md"
"""Where the wheel puts it."""
_CHECKOUT: Final = Path(__file__).parents[2] / "docs" / "findings.md"

_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Runbooks - ncclscope</title><link rel="icon" href="static/icon.svg">
<link rel="stylesheet" href="static/style.css">
</head><body><main style="max-width: 46rem; margin: 0 auto; padding: 24px"><p><a href="./">Live page</a></p>
{content}
</main></body></html>
"""

_INLINE: Final = (
    (re.compile(r"`([^`]+)`"), r"<code>\1</code>"),
    (re.compile(r"\*\*([^*]+)\*\*"), r"<strong>\1</strong>"),
    (re.compile(r"\*([^*]+)\*"), r"<em>\1</em>"),
)


async def runbooks(_: Request) -> Response:
    """The page."""
    file = _PACKED if _PACKED.exists() else _CHECKOUT
    return HTMLResponse(_PAGE.format(content=as_html(file.read_text())), headers={"Cache-Control": "no-cache"})


def as_html(markdown: str) -> str:
    """The body of a page; whatever else Markdown may hold is shown as the text it is."""
    return "\n".join(_block(block) for block in re.split(r"\n\s*\n", markdown.strip()))


def _block(block: str) -> str:
    heading = re.fullmatch(r"(#+) (.*)", block)
    if heading:
        level, text = len(heading[1]), heading[2]
        anchor = re.sub(r"[^\w-]", "", text.lower().replace(" ", "-"))
        return f'<h{level} id="{anchor}" style="margin: 1.6em 0 .4em">{_inline(text)}</h{level}>'
    if block.startswith("- "):
        return "<ul>" + "".join(f"<li>{_inline(item)}</li>" for item in _items(block)) + "</ul>"
    return f'<p style="margin: .6em 0">{_inline(block)}</p>'


def _items(block: str) -> Iterator[str]:
    yield from re.split(r"\n- ", block.removeprefix("- "))


def _inline(text: str) -> str:
    text = html.escape(text)
    for pattern, replacement in _INLINE:
        text = pattern.sub(replacement, text)
    return text

"""The runbooks as a page: the part of Markdown that docs/findings.md is written in, as HTML.

Headings, paragraphs, bullets, tables, fenced blocks, `code`, *emphasis*, **strong** and links; all else stays text.
Each heading of a finding's kind gets that kind as its anchor: alerts and the live page lead there.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import Final

_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Runbooks · ncclscope</title><link rel="icon" href="/static/icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="/static/style.css"><script src="/static/theme.js"></script></head>
<body><header class="top"><h1><a href="/"><img src="/static/icon.svg" alt="" width="26" height="26">ncclscope</a></h1>
</header><main class="runbooks">{body}</main></body></html>
"""


def runbook_page(markdown: str) -> str:
    """The whole page."""
    return _PAGE.format(body="\n".join(_blocks(markdown)))


def _blocks(markdown: str) -> Iterator[str]:
    for block in re.split(r"\n\s*\n", _without_fences(markdown)):
        text = block.strip("\n")
        heading = re.fullmatch(r"(#{1,4}) (.*)", text)
        if heading:
            level, title = len(heading[1]), heading[2].strip()
            yield f'<h{level} id="{html.escape(_anchor(title))}">{_inline(title)}</h{level}>'
        elif text.startswith(_FENCE):
            yield f"<pre><code>{html.escape(text.removeprefix(_FENCE).replace(_GAP, chr(10) * 2))}</code></pre>"
        elif text.startswith("|"):
            yield _table(text.splitlines())
        elif text.startswith("- "):
            items = re.split(r"\n- ", text.removeprefix("- "))
            yield "<ul>" + "".join(f"<li>{_inline(item)}</li>" for item in items) + "</ul>"
        elif text:
            yield f"<p>{_inline(text)}</p>"


_FENCE: Final = "\x02"
_GAP: Final = "\x03"


def _without_fences(markdown: str) -> str:
    """Fenced blocks as blocks of their own, their empty lines hidden from the split."""

    def mark(match: re.Match[str]) -> str:
        return f"\n\n{_FENCE}{match[1].replace(chr(10) * 2, _GAP)}\n\n"

    return re.sub(r"^```\w*\n(.*?)^```$", mark, markdown, flags=re.MULTILINE | re.DOTALL)


def _anchor(title: str) -> str:
    return re.sub(r"[^\w-]", "", title.lower().replace(" ", "-"))


def _inline(text: str) -> str:
    shown = html.escape(text)
    shown = re.sub(r"`([^`]+)`", r"<code>\1</code>", shown)
    shown = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", shown, flags=re.DOTALL)
    shown = re.sub(r"(?<!\w)\*([^*]+?)\*(?!\w)", r"<em>\1</em>", shown)
    return re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", _link, shown)


def _link(match: re.Match[str]) -> str:
    """A link within the page or to the web; other documents are not served, so their names stay text."""
    is_served = match[2].startswith(("#", "https://", "http://"))
    return f'<a href="{match[2]}">{match[1]}</a>' if is_served else match[1]


def _table(lines: list[str]) -> str:
    rows = [
        [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))] for line in lines
    ]
    head = "".join(f"<th>{_inline(cell)}</th>" for cell in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{_inline(cell)}</td>" for cell in row) + "</tr>" for row in rows[2:])
    return f'<div class="table-scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'

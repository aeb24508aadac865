"""The runbooks as a page."""

from __future__ import annotations

import re
from pathlib import Path

from ncclscope_service.rows import FindingKind
from ncclscope_service.runbook_page import runbook_page


def body(markdown: str) -> str:
    found = re.search(r'<main class="runbooks">(.*)</main>', runbook_page(markdown), re.DOTALL)
    assert found is not None
    return found[1]


def test_every_kind_of_finding_has_its_anchor(repository: Path) -> None:
    page = runbook_page((repository / "docs" / "findings.md").read_text())
    for kind in FindingKind:
        assert f'id="{kind}"' in page


def test_the_marks_of_the_runbooks_become_elements() -> None:
    assert body("## late_rank\n") == '<h2 id="late_rank">late_rank</h2>'
    assert body("*A rank* is **late**: `x < y`.") == (
        "<p><em>A rank</em> is <strong>late</strong>: <code>x &lt; y</code>.</p>"
    )
    assert body("- one\n  more\n- two") == "<ul><li>one\n  more</li><li>two</li></ul>"
    assert "<td>1</td><td>a|b</td>" in body("| a | b |\n|---|---|\n| 1 | a\\|b |")
    assert body("```sh\na <b>\n\nc\n```") == "<pre><code>a &lt;b&gt;\n\nc</code></pre>"


def test_text_never_becomes_markup_and_only_what_is_served_is_a_link() -> None:
    assert "<script>" not in body("<script>alert(1)</script>")
    assert body("[m](measures.md) [w](https://example.org)") == '<p>m <a href="https://example.org">w</a></p>'
    assert "javascript" not in re.sub(r">[^<]*<", "><", body("[x](javascript:alert)"))

"""The bodies of notifications."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import orjson
from service.test_finding_news import LATE

from ncclscope_service.finding_news import FindingEvent, News
from ncclscope_service.messages import Form, message

SECOND = 1_000_000_000
OVER = FindingEvent(event=News.CLOSED, id="late_rank-1", finding=replace(LATE, until_ns=175 * SECOND))


def body(event: FindingEvent, form: Form) -> Any:
    return json.loads(orjson.dumps(message(event, form, "http://scope")))


def test_plain_json_carries_the_finding_whole() -> None:
    told = body(OVER, Form.JSON)
    assert told["finding"] == json.loads(orjson.dumps(asdict(OVER.finding)))
    assert (told["event"], told["id"], told["version"]) == ("closed", "late_rank-1", 1)
    assert (told["runbook"], told["page"]) == ("http://scope/runbooks#late_rank", "http://scope/")


def test_slack_gets_a_text_and_an_attachment_with_who_and_for_how_long() -> None:
    told = body(OVER, Form.SLACK)
    assert told["text"] == "ncclscope, ended: late rank in job j"
    (attachment,) = told["attachments"]
    assert attachment["text"] == LATE.summary
    assert attachment["title_link"] == "http://scope/runbooks#late_rank"
    fields = {field["title"]: field["value"] for field in attachment["fields"]}
    assert fields == {
        "Job": "j", "Severity": "warning", "Ranks": "5", "Hosts": "node1", "Group": "tp-0", "Lasted": "1 min 15 s",
    }  # fmt: skip


def test_slack_shows_what_is_open_in_the_colour_of_its_severity_and_what_is_over_in_another() -> None:
    colours = {
        (news, severity): body(FindingEvent(event=news, id="x", finding=replace(LATE, severity=severity)), Form.SLACK)[
            "attachments"
        ][0]["color"]
        for news in (News.OPENED, News.CLOSED)
        for severity in ("warning", "critical")
    }
    assert len(set(colours.values())) == 3
    assert colours[News.CLOSED, "warning"] == colours[News.CLOSED, "critical"]

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.alignment import document
from benchmarks.alignment.__main__ import main
from benchmarks.alignment.scenarios import KNOWLEDGE, LOSSES, MIXES, NAMES, STAMPS, drawn_cases


def test_a_case_shows_all_that_is_known_and_nothing_of_the_truth() -> None:
    case = drawn_cases(MIXES[0], NAMES, LOSSES[3], ranks=1)[0]
    shown = json.loads(json.dumps(document.as_document(case)))
    assert set(shown) == {"case", "nccl_version", "operations", "kernels"}
    assert len(shown["operations"]["id"]) == len(case.operations)
    assert set(shown["kernels"]["kind"]) == {"AllReduce", "AllGather", "ReduceScatter", "Broadcast", "SendRecv"}
    assert set(shown["operations"]["operation"]) >= {"AllReduce", "Send", "Recv"}
    assert set(shown["operations"]["logged_at_ns"]) == {None}
    stamped = drawn_cases(MIXES[0], STAMPS, LOSSES[3], ranks=1)[0]
    assert None not in document.as_document(stamped)["operations"]["logged_at_ns"]


def test_answers_from_a_file_are_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = tmp_path / "cases.jsonl"
    main(["--write", str(cases), "--seeds", "1"])
    drawn = [case for known in KNOWLEDGE for mix in MIXES for loss in LOSSES for case in drawn_cases(mix, known, loss)]
    truth = {case.name: dict(case.truth[["operation", "kernel"]].tolist()) for case in drawn}
    answers = tmp_path / "answers.jsonl"
    with cases.open() as given, answers.open("w") as file:
        for line in given:
            case = json.loads(line)
            lines, kernels = case["operations"]["id"], set(case["kernels"]["id"])
            known = truth.get(case["case"], {})
            pairs = [[line, known[line], 0.5] for line in lines if known.get(line) in kernels]
            file.write(json.dumps({"case": case["case"], "pairs": pairs}) + "\n")
    main(["--score", str(answers), "--seeds", "1"])
    rows = [row for row in capsys.readouterr().out.splitlines() if "names only" in row]
    assert len(rows) == len(MIXES) * len(LOSSES)
    assert all("| 1.000 | 1.000 | 1.000 |" in row and "| 0.500 |" in row for row in rows)


def test_an_answer_that_is_none_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "answers.jsonl").write_text('{"case": "a", "pairs": []}\n{"pairs": [[1]]}\n')
    with pytest.raises(ValueError, match="line 2"):
        list(document.read_answers(tmp_path / "answers.jsonl"))

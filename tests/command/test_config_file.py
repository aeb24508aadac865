"""The configuration file: what wins, what is refused and where, and that the schema says the same."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path

import click
import jsonschema
import pytest
from click.testing import CliRunner

from ncclscope.analyze import analyze
from ncclscope.cli import main
from ncclscope.config_file import keys_of_agent, keys_of_command, read_table, read_thresholds, schema
from ncclscope.pipeline_options import Thresholds
from ncclscope.serve import serve
from ncclscope_agent.config import load
from ncclscope_wire.errors import ConfigError


def written(folder: Path, text: str) -> Path:
    path = folder / "ncclscope.toml"
    path.write_text(text)
    return path


def faults_of(path: Path, table: str = "agent") -> list[str]:
    keys = keys_of_agent() if table == "agent" else keys_of_command(serve)
    with pytest.raises(ConfigError) as caught:
        read_table(path, table, keys)
    return [line.removeprefix(str(path)) for line in str(caught.value).splitlines()]


@pytest.mark.parametrize("command", ["agent", "serve"])
def test_a_file_that_is_not_there_is_a_usage_error(tmp_path: Path, command: str) -> None:
    done = CliRunner().invoke(main, [command, "--config", str(tmp_path / "none.toml")])
    assert done.exit_code == 2
    assert f"{tmp_path / 'none.toml'}: No such file or directory: name a TOML file" in done.output


def test_a_flag_wins_over_a_variable_that_over_the_file_and_that_over_the_default(tmp_path: Path) -> None:
    path = written(tmp_path, '[agent]\nlogs = ["/a:b/*.log", "c"]\nname = "file"\njob = "file"\nwindow-batches = 7\n')
    file = read_table(path, "agent", keys_of_agent())
    settings = load({"name": "flag", "logs": ()}, {"NCCLSCOPE_NAME": "v", "NCCLSCOPE_JOB": "v"}, host="h", file=file)
    assert (settings.name, settings.job, settings.window_batches) == ("flag", "v", 7)
    assert settings.logs == ("/a:b/*.log", "c"), "a list is a list: colons separate in variables only"
    assert settings.heartbeat_seconds == 1.0


def test_the_service_takes_its_settings_from_the_same_places_in_the_same_order(tmp_path: Path) -> None:
    path = written(tmp_path, '[serve]\nlisten = "127.0.0.1:1"\nhttp = "127.0.0.1:2"\ntp = 8\nwebhook = ["http://a/"]\n')
    arguments = ["--config", str(path), "--listen", "127.0.0.1:3"]
    context = serve.make_context("serve", arguments)
    assert (context.params["listen"], context.params["http"], context.params["tp"]) == ("127.0.0.1:3", "127.0.0.1:2", 8)
    assert context.params["webhooks"] == ("http://a/",)
    assert context.params["pp"] is None


def test_a_variable_wins_over_the_file_for_the_service_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, '[serve]\nlisten = "127.0.0.1:1"\ninsecure = false\n')
    monkeypatch.setenv("NCCLSCOPE_SERVE_LISTEN", "127.0.0.1:9")
    monkeypatch.setenv("NCCLSCOPE_CONFIG", str(path))
    assert serve.make_context("serve", []).params["listen"] == "127.0.0.1:9"


def test_unknown_names_are_refused_with_their_line_and_the_name_that_is_nearest(tmp_path: Path) -> None:
    path = written(tmp_path, '# a remark\n[agent]\nlogs = ["a"]\nconect = "x:1"\n\n[agents]\nlogs = []\n')
    assert faults_of(path) == [
        ", line 6: there is no table 'agents': did you mean agent?",
        ", line 4: [agent] has no setting 'conect': did you mean connect?",
    ]


def test_underscores_are_no_dashes_and_the_right_name_is_told(tmp_path: Path) -> None:
    path = written(tmp_path, "[agent]\nwindow_bytes = 5\n")
    assert faults_of(path) == [", line 2: [agent] has no setting 'window_bytes': did you mean window-bytes?"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('tls = "yes"', "tls is a boolean, not 'yes'"),
        ("window-bytes = true", "window-bytes is an integer, not True"),
        ('logs = "a"', "logs is an array of strings, not 'a'"),
        ("logs = [1]", "logs is an array of strings, not [1]"),
        ("connect = 1", "connect is a string, not 1"),
        ("heartbeat-seconds = 1979-05-27", "heartbeat-seconds is a number, not datetime.date(1979, 5, 27)"),
    ],
)
def test_a_value_of_another_type_is_refused(tmp_path: Path, line: str, said: str) -> None:
    assert faults_of(written(tmp_path, f"[agent]\n{line}\n")) == [f", line 2: {said}"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[agent", "is not TOML"),
        (b"\xff\xfe", "is not UTF-8"),
        (b"#" * (1 << 20) + b"#", "has over 1048576 bytes"),
        (b"agent = 3", "[agent] is a table, not a value"),
        (b"a = " + b"[" * 100_000, "is not TOML"),
    ],
)
def test_what_is_no_such_file_is_refused_with_a_sentence(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(content)
    assert said in "\n".join(faults_of(path))


def test_the_command_tells_all_that_is_wrong_in_both_tables(tmp_path: Path) -> None:
    path = written(tmp_path, '[agent]\nlogs = ["x"]\nwindow-bytes = 5\n[serve]\nlisten = "0.0.0.0:1"\n')
    done = CliRunner().invoke(main, ["config", str(path)])
    assert done.exit_code == 2
    assert "--window-bytes: 5 is not between" in done.output
    assert "--listen 0.0.0.0: others can reach it" in done.output


def test_the_command_says_how_much_of_a_right_file_it_has_understood(tmp_path: Path) -> None:
    path = written(tmp_path, '[agent]\nlogs = ["x"]\n[serve]\nlisten = "127.0.0.1:1"\ntp = 2\n')
    done = CliRunner().invoke(main, ["config", str(path)])
    assert (done.exit_code, done.output) == (0, f"{path}: right: [agent] 1 settings, [serve] 2 settings\n")


def test_the_schema_in_the_documentation_is_that_of_the_settings(repository: Path) -> None:
    keys = {"agent": keys_of_agent(), "serve": keys_of_command(serve)}
    if os.environ.get("NCCLSCOPE_UPDATE_GOLDEN"):
        text = json.dumps(schema(keys), indent=2, ensure_ascii=False) + "\n"
        (repository / "docs" / "ncclscope.schema.json").write_text(text)
    stored = json.loads((repository / "docs" / "ncclscope.schema.json").read_text())
    assert stored == json.loads(json.dumps(schema(keys))), "write it with `ncclscope config --schema`"


def test_the_example_in_the_documentation_fits_the_schema_and_is_read(repository: Path, tmp_path: Path) -> None:
    text = (repository / "docs" / "settings.md").read_text().partition("```toml\n")[2].partition("```")[0]
    stored = json.loads((repository / "docs" / "ncclscope.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(stored)
    jsonschema.validate(tomllib.loads(text), stored)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(tomllib.loads(text + "\nhtpp = 1"), stored)
    path = written(tmp_path, text)
    assert read_table(path, "agent", keys_of_agent())["token_file"] == "/etc/ncclscope/agent.token"
    assert read_table(path, "serve", keys_of_command(serve))["http"] == "127.0.0.1:9798"


def test_thresholds_are_refused_with_their_line_and_the_name_that_is_nearest(tmp_path: Path) -> None:
    text = (
        '[detect]\nhang.rest = 3\n[detect.late_rank]\nleast_share = 2\n\n[detect.job."a-*".hang]\nrest_seconds = "x"\n'
    )
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_thresholds(path)
    assert [line.removeprefix(str(path)) for line in str(caught.value).splitlines()] == [
        ", line 2: there is no threshold 'hang.rest': did you mean hang.rest_seconds?",
        ", line 4: late_rank.least_share: 2 is not between 0 and 1",
        ", line 7: hang.rest_seconds is a number, not 'x'",
    ]
    assert CliRunner().invoke(main, ["config", str(path)]).exit_code == 2


@pytest.mark.parametrize("command", [serve, analyze], ids=lambda command: command.name)
def test_a_threshold_that_is_set_wins_over_the_file(tmp_path: Path, command: click.Command) -> None:
    path = written(tmp_path, "[detect.late_rank]\nleast_share = 0.02\nfirmness = 7\n")
    arguments = ["--config", str(path), "--set", "detect.late_rank.least_share=0.03"]
    arguments += [] if command is serve else ["--out", str(tmp_path / "out"), str(tmp_path)]
    with command.make_context(command.name, [*arguments]):
        assert Thresholds.of_command(("late_rank.least_share=0.03",))() == {
            "late_rank.least_share": 0.03,
            "late_rank.firmness": 7,
        }
    done = CliRunner().invoke(command, [*arguments, "--set", "hang.rest_second=1"])
    assert done.exit_code == 2
    assert "did you mean hang.rest_seconds?" in done.output

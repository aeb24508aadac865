"""The agent's settings: where each comes from, what is refused, and that the documentation names all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from ncclscope.agent import agent
from ncclscope_agent.config import (
    AgentSettings,
    agent_id,
    flag_of,
    load,
    settings_table,
    variable_of,
    zone_offset_ns,
)
from ncclscope_wire.errors import ConfigError

HOUR_NS = 3600 * 10**9
JANUARY_NS = 1_705_000_000 * 10**9
JULY_NS = 1_720_000_000 * 10**9


def loaded(given: dict[str, object] | None = None, environment: dict[str, str] | None = None) -> AgentSettings:
    return load({"logs": ("*.log",), **(given or {})}, environment or {}, host="node1")


def test_defaults_name_the_host_and_the_default_job() -> None:
    settings = loaded()
    assert (settings.name, settings.job, settings.service) == ("node1", "default", ("127.0.0.1", 9797))


def test_a_flag_wins_over_its_variable_and_that_over_the_default() -> None:
    environment = {"NCCLSCOPE_WINDOW_BYTES": "100000", "NCCLSCOPE_JOB": "from-variable", "SLURM_JOB_ID": "4711"}
    assert loaded({"window_bytes": "200000"}, environment).window_bytes == 200_000
    assert loaded({}, environment).window_bytes == 100_000
    assert loaded({"job": "from-flag"}, environment).job == "from-flag"
    assert loaded({}, environment).job == "from-variable"
    assert loaded({}, {"SLURM_JOB_ID": "4711"}).job == "4711"


def test_lists_in_variables_are_separated_by_colons() -> None:
    settings = load({"logs": (), "exports": ()}, {"NCCLSCOPE_LOGS": "/a/*.log:/b/*.log"}, host="h")
    assert settings.logs == ("/a/*.log", "/b/*.log")


def test_all_faults_are_told_at_once() -> None:
    given: dict[str, object] = {
        "logs": (),
        "connect": "nowhere",
        "window_bytes": "3",
        "tick_min_seconds": "soon",
        "log_timezone": "Mars/Olympus",
    }
    with pytest.raises(ConfigError) as caught:
        load(given, {}, host="h")
    assert str(caught.value).splitlines() == [
        "--window-bytes: 3 is not between 65536 and 1073741824 bytes",
        "--tick-min-seconds: 'soon' is not a number",
        "--logs, --exports, --inspector, --flight-recorder, --ras or --counters: at least one is needed, or there is "
        "nothing to follow",
        "--connect: 'nowhere' is not HOST:PORT with a port of 1 to 65535",
        "--log-timezone: 'Mars/Olympus' is no time zone; give auto, UTC, local, +02:00 or a name such as Europe/Berlin",
    ]


@pytest.mark.parametrize("number", ["nan", "inf", "-1", "1e9", ""])
def test_a_number_out_of_bounds_is_refused(number: str) -> None:
    with pytest.raises(ConfigError, match="--heartbeat-seconds"):
        loaded({"heartbeat_seconds": number})


@pytest.mark.parametrize("connect", ["host", ":9797", "host:", "host:0", "host:70000", "host:²"])
def test_an_address_without_host_or_port_is_refused(connect: str) -> None:
    with pytest.raises(ConfigError, match="--connect"):
        loaded({"connect": connect})


@pytest.mark.parametrize(("given", "said"), [("x" * 201, "has over 200"), ("a\nb", "cannot be printed")])
def test_a_label_is_short_and_can_be_printed(given: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"--job: .*{said}"):
        loaded({"job": given})


@pytest.mark.parametrize("connect", ["node1:9797", "10.0.0.1:9797", "[2001:db8::1]:9797", "localhost.example:1"])
def test_another_machine_is_not_connected_to_in_clear_unless_told_to(connect: str) -> None:
    with pytest.raises(ConfigError, match="is another machine: give --tls or --tls-ca FILE, or say --insecure"):
        loaded({"connect": connect})
    for given in ({"tls": "yes"}, {"tls_ca": "ca.pem"}, {"insecure": "yes"}):
        assert loaded({"connect": connect, **given}).connect == connect
    assert not loaded({"connect": "[::1]:9797"}).insecure


def test_an_ipv6_address_is_written_in_brackets() -> None:
    assert loaded({"connect": "[::1]:5000"}).service == ("::1", 5000)


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--tick-min-seconds: 0.5 is over --tick-max-seconds 0.25"):
        loaded({"tick_min_seconds": "0.5"})
    with pytest.raises(ConfigError, match=r"--silence-seconds: 1.0 is under two heartbeats of 1.0"):
        loaded({"silence_seconds": "1"})


@pytest.mark.parametrize(
    ("zone", "now_ns", "hours"),
    [
        ("UTC", JULY_NS, 0.0),
        ("+05:30", JULY_NS, 5.5),
        ("-0800", JULY_NS, -8.0),
        ("Europe/Berlin", JANUARY_NS, 1.0),
        ("Europe/Berlin", JULY_NS, 2.0),
    ],
)
def test_a_zone_is_as_far_ahead_of_utc_as_it_is_now(zone: str, now_ns: int, hours: float) -> None:
    assert zone_offset_ns(zone, now_ns=now_ns) == hours * HOUR_NS


def test_an_agent_keeps_its_identity_over_restarts_and_shares_it_with_no_other() -> None:
    def identity(given: dict[str, object], directory: str = "/run", host: str = "node1.cluster") -> str:
        return agent_id(loaded(given), host=host, directory=directory)

    assert identity({"logs": ("a", "b")}) == identity({"logs": ("b", "a"), "window_bytes": "100000", "job": "next"})
    others = [
        identity({"logs": ("a",)}),
        identity({"logs": ("b",)}),
        identity({"logs": ("a",), "name": "second"}),
        identity({"logs": ("a",)}, directory="/other"),
        identity({"logs": ("a",)}, host="node2.cluster"),
        identity({"logs": (), "exports": ("a",)}),
    ]
    assert len(set(others)) == len(others)


def test_the_documentation_names_every_setting_with_its_default_and_unit(repository: Path) -> None:
    text = (repository / "docs" / "settings.md").read_text(encoding="utf-8")
    rows = {line.split("`")[1]: line for line in text.splitlines() if line.startswith("| `--")}
    for name, default, about in settings_table():
        row = rows[flag_of(name)]
        assert variable_of(name) in row
        assert about.unit.replace("|", "\\|") in row
        assert default in ("", ()) or f"| {default} |" in row, row
        assert about.help in row


def test_the_command_tells_all_faults_and_exits_with_2() -> None:
    result = CliRunner().invoke(agent, ["--connect", "x", "--window-batches", "0"], env={"NCCLSCOPE_LOGS": ""})
    assert result.exit_code == 2
    for fault in ("--connect: 'x'", "--window-batches: 0", "--logs, --exports, --inspector, --flight-recorder"):
        assert fault in result.output


def test_the_command_prints_what_it_would_send(tmp_path: Path) -> None:
    (tmp_path / "nccl.log").write_text("something else\n" * 100)
    result = CliRunner().invoke(agent, ["--print", "--once", "--logs", str(tmp_path / "*.log")])
    assert result.exit_code == 0, result.output
    headings = [line for line in result.output.splitlines() if "nccl.log" in line]
    assert "[0, 1500)" in headings[0]
    assert "skipped_not_nccl=100" in headings[0]
    assert "last" in headings[-1]

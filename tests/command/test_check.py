"""`ncclscope check`: what it says of variables, logs, service and clock, and its exit status."""

from __future__ import annotations

import os
import socket
import socketserver
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import anyio.to_thread
import orjson
import pytest
from agent.flight_samples import as_pytorch_pickles, dump, entry
from agent.inspector_samples import coll_perf, record
from agent.log_samples import operation_line
from agent.ras_server import RasServer, text_status
from agent.trace_samples import trace
from certificates import make_authority
from click.testing import CliRunner, Result
from nsys_made import nccl_export
from service.loopback import Service

from ncclscope import node
from ncclscope.check import scheduler_here
from ncclscope.cli import main
from ncclscope_agent.nccl_settings.advice import NcclVersion, wanted
from ncclscope_agent.spool.directory import SpoolDirectory
from ncclscope_service.auth.credentials import CredentialFiles, Credentials
from ncclscope_wire.messages import PROTOCOL_VERSION

BEGIN = datetime(2025, 11, 21, 12, 0, tzinfo=UTC)


@pytest.fixture
def no_conf(tmp_path: Path) -> Path:
    """An empty configuration file of NCCL, so that the user's own does not count."""
    path = tmp_path / "nccl.conf"
    path.write_text("")
    return path


def run(*arguments: str, environment: Mapping[str, str] | None = None) -> Result:
    """Runs the command with these variables of NCCL and no others."""
    env: dict[str, str | None] = {name: None for name in os.environ if name.startswith("NCCL_")}
    return CliRunner().invoke(main, ["check", *arguments], env={**env, **(environment or {})})


def sources(*arguments: str, environment: Mapping[str, str] | None = None) -> dict[str, dict[str, str]]:
    """By name, what is said of each source."""
    found = orjson.loads(run("--json", *arguments, environment=environment).stdout)["sources"]
    return {source["name"]: source for source in found}


def test_each_source_says_whether_it_is_there_and_what_it_gives_and_costs(tmp_path: Path) -> None:
    write_log(tmp_path / "nccl.log", seconds=2)
    nccl_export().write(tmp_path / "e.sqlite")
    (tmp_path / "r.pt.trace.json").write_bytes(trace())
    (tmp_path / "node1-pid41.log").write_text(record(coll_perf(1)) + "\n")
    (tmp_path / "nccl_trace_rank_0").write_bytes(as_pytorch_pickles(dump(entry(1))))
    named = ("--logs", str(tmp_path / "nccl.log"), "--exports", str(tmp_path), "--inspector", str(tmp_path / "*"))
    with RasServer(lambda _: text_status("2.28.9"), knows_json=True) as server:
        told = sources(*named, "--flight-recorder", str(tmp_path / "nccl_trace*"), "--ras", f"127.0.0.1:{server.port}")
    files = ("NCCL's log", "nsys exports", "PyTorch profiler traces", "NCCL Inspector", "PyTorch's Flight Recorder")
    assert {name: told[name]["state"] for name in (*files, "NCCL's RAS")} == dict.fromkeys(
        (*files, "NCCL's RAS"), "there"
    )
    assert told["NCCL Inspector"]["found"] == "1 dumps"
    assert told["NCCL's RAS"]["found"] == f"a job answers at 127.0.0.1:{server.port}"
    assert all(source["gives"] and source["costs"] for source in told.values())


def test_a_source_that_is_not_there_says_how_to_have_it_or_why_it_cannot_be() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
    told = sources("--nccl", "2.21.5", "--ras", f"127.0.0.1:{port}")
    assert told["NCCL Inspector"]["found"] == "NCCL 2.21.5 has no such plug-in, 2.28 is the first"
    assert (told["NCCL Inspector"]["state"], told["NCCL's RAS"]["state"]) == ("not here", "not here")
    assert told["NCCL's log"]["state"] == "not looked at"
    newer = sources(
        *("--nccl", "2.28.9", "--ras", f"127.0.0.1:{port}"), environment={"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}
    )
    assert newer["NCCL's RAS"]["state"] == "possible"
    assert newer["NCCL's RAS"]["found"].startswith(f"nobody listens at 127.0.0.1:{port}")
    assert newer["PyTorch's Flight Recorder"]["found"] == "the environment switches it on, and no dump is there"
    assert all(source["how"] for source in newer.values())


def advised(directory: Path, version: tuple[int, int, int] = (2, 27, 5)) -> dict[str, str]:
    return wanted(NcclVersion(*version), log_file=str(directory / "nccl.%h.%p.log"))


def write_log(path: Path, *, seconds: int = 60, per_second: int = 10, pid: int = 41_822) -> Path:
    line = operation_line(prefix=f"node17:{pid}:{pid} [2] NCCL INFO ")
    lines = [f"node17:{pid}:{pid} [2] NCCL INFO NCCL version 2.27.5+cuda12.9"]
    for number in range(seconds * per_second + 1):
        time = BEGIN + timedelta(seconds=number / per_second)
        lines.append(f"[{time.strftime('%F %T.%f')}] {line}")
    path.write_text("\n".join(lines) + "\n")
    return path


def test_an_environment_as_advised_is_right(tmp_path: Path, no_conf: Path) -> None:
    result = run("--nccl", "2.27.5", "--env", environment={**advised(tmp_path), "NCCL_CONF_FILE": str(no_conf)})
    assert result.exit_code == 0, result.output
    assert "To change" not in result.output
    assert "Right" in result.output


def test_each_variable_that_is_wrong_is_named_with_what_to_do(tmp_path: Path, no_conf: Path) -> None:
    environment = {
        **advised(tmp_path, (2, 30, 7)),
        "NCCL_DEBUG_SUBSYS": "INIT,COLL,COLLECTIVES",
        "NCCL_DEBUG_FILE": str(tmp_path / "missing" / "nccl.log"),
        "NCCL_CONF_FILE": str(no_conf),
    }
    result = run("--nccl", "2.30.7", "--env", environment=environment)
    assert result.exit_code == 1
    to_change = result.output.split("To change")[1].split("\n\n")[0]
    for text in ("does not know 'COLLECTIVES'", "take the default", "without %p", "does not exist on this node"):
        assert text in to_change, text


def test_the_lines_to_copy_are_those_of_the_version(tmp_path: Path) -> None:
    result = run("--nccl", "2.30.7", "--log-file", "/logs/%h.%p.log")
    assert result.exit_code == 0
    for line in (
        "export NCCL_DEBUG=INFO",
        "export NCCL_DEBUG_SUBSYS=INIT,COLL,TUNING,GRAPH,ENV,NET,BOOTSTRAP,DESTROY",
        "export NCCL_DEBUG_FILE=/logs/%h.%p.log",
        "export NCCL_DEBUG_TIMESTAMP_LEVELS=ALL",
        "export NCCL_DEBUG_TIMESTAMP_FORMAT='[%F_%T.%6f]_'",
        "export NCCL_DEBUG=TRACE",
    ):
        assert f"  {line}\n" in result.output
    old = run("--nccl", "2.12.12").output
    assert "TIMESTAMP" not in old
    assert "NCCL_DEBUG=TRACE" not in old


def test_a_configuration_file_of_nccl_counts_where_the_environment_says_nothing(tmp_path: Path, no_conf: Path) -> None:
    settings = advised(tmp_path)
    no_conf.write_text("# ours\n" + "".join(f"{name}={value}\n" for name, value in settings.items()))
    assert run("--nccl", "2.27.5", "--env", environment={"NCCL_CONF_FILE": str(no_conf)}).exit_code == 0
    overruled = {"NCCL_CONF_FILE": str(no_conf), "NCCL_DEBUG": "WARN"}
    assert run("--nccl", "2.27.5", "--env", environment=overruled).exit_code == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--nccl", "new"],
        ["--service", "nowhere"],
        ["--service", "host:0"],
        ["--observe", "-1"],
        ["--unknown"],
    ],
)
def test_wrong_options_are_usage_errors(arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2


def test_logs_tell_their_version_their_volume_and_that_they_are_right(tmp_path: Path) -> None:
    for pid in (41_822, 41_823):
        write_log(tmp_path / f"nccl.{pid}.log", pid=pid)
    result = run("--logs", str(tmp_path / "*.log"), "--json")
    assert result.exit_code == 0, result.output
    told = orjson.loads(result.stdout)
    assert told["nccl"] == {"version": "2.27.5", "told_by": "the logs"}
    assert told["must_change"] is False
    assert told["set"]["logs"]["NCCL_DEBUG"] == "INFO"
    (of_node,) = told["volume"]["nodes"]
    bytes_per_line = len(operation_line()) + len("[2025-11-21 12:00:00.000000] ") + 1
    assert of_node["host"] == "node17"
    assert of_node["operations_per_second"] == pytest.approx(20, rel=0.01)
    assert of_node["bytes_per_hour"] == pytest.approx(20 * bytes_per_line * 3600, rel=0.01)
    assert told["volume"]["share_by_subsystem"]["COLL"] > 0.99
    assert [log["rate"]["method"] for log in told["logs"]] == ["stamps", "stamps"]
    assert (told["sources"][0]["state"], told["sources"][0]["found"]) == ("there", "operations are in 2 logs")
    text = run("--logs", str(tmp_path / "*.log")).output
    assert f"node17 writes {of_node['bytes_per_hour'] / 1e9:.3g} GB of log per hour" in text
    assert "by subsystem, as the lines' forms tell: COLL 100%" in text


def test_more_log_than_asked_for_must_change(tmp_path: Path) -> None:
    write_log(tmp_path / "a.log")
    result = run("--logs", str(tmp_path / "a.log"), "--most-per-hour", "0.001")
    assert result.exit_code == 1
    assert "more than 0.001" in result.output
    assert "--release-logs" in result.output


def test_logs_that_several_processes_write_or_that_lack_stamps_or_operations_must_change(tmp_path: Path) -> None:
    prefixes = [f"node17:{pid}:{pid} [0] NCCL INFO " for pid in (1, 2)]
    version = f"{prefixes[0]}NCCL version 2.27.5+cuda12.9\n"
    (tmp_path / "shared.log").write_text(version + "".join(operation_line(prefix=p) + "\n" for p in prefixes))
    (tmp_path / "init.log").write_text(version)
    result = run("--logs", str(tmp_path))
    assert result.exit_code == 1
    for text in (
        "several processes write one file",
        "no operation in the part looked at",
        "most lines have no time stamp",
        "--observe 10",
    ):
        assert text in result.output, text


def test_a_log_without_stamps_is_watched_when_asked(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(operation_line() + "\n")
    told = orjson.loads(run("--nccl", "2.18.3", "--logs", str(tmp_path), "--observe", "0.05", "--json").stdout)
    assert told["logs"][0]["rate"]["method"] == "observed"
    assert told["logs"][0]["rate"]["bytes_per_second"] == 0


def test_a_pattern_without_a_file_must_change(tmp_path: Path) -> None:
    result = run("--nccl", "2.27.5", "--logs", str(tmp_path / "*.log"))
    assert result.exit_code == 1
    assert "no readable file matches" in result.output
    assert "NCCL's log: possible (no log is there)" in result.output, "it was looked for"


def test_a_log_that_is_empty_is_told_so_without_an_empty_table(tmp_path: Path) -> None:
    (tmp_path / "a.log").touch()
    output = run("--nccl", "2.27.5", "--logs", str(tmp_path / "*.log")).output
    assert "a.log): empty so far" in output
    assert "no line of NCCL" not in output
    assert "Log volume" not in output


def test_exports_are_looked_for(tmp_path: Path) -> None:
    (tmp_path / "a.sqlite").write_bytes(b"")
    told = orjson.loads(run("--nccl", "2.27.5", "--exports", str(tmp_path), "--json").stdout)
    assert f"{tmp_path} can be read and holds 1 exports" in [remark["text"] for remark in told["remarks"]]
    assert told["sources"][1]["state"] == "there"
    assert run("--nccl", "2.27.5", "--exports", str(tmp_path / "missing")).exit_code == 1


def test_graphs_that_nsys_recorded_as_a_whole_are_told(tmp_path: Path) -> None:
    made = nccl_export()
    made.write(tmp_path / "a.sqlite")
    assert "CUDA graphs" not in run("--nccl", "2.27.5", "--exports", str(tmp_path)).output
    for start in (5, 6):
        made.add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", start=start, end=start + 1, graphId=1)
    made.write(tmp_path / "b.sqlite")
    told = run("--nccl", "2.27.5", "--exports", str(tmp_path)).output
    assert "2 graph launches were recorded as a whole" in told
    assert "--cuda-graph-trace=node" in told


# The service


@pytest.mark.asyncio
async def test_a_service_is_asked_without_becoming_known_to_it_as_an_agent() -> None:
    service = Service()
    async with service.listening() as port:
        answer = await anyio.to_thread.run_sync(node.ask_service, "127.0.0.1", port)
        result = await anyio.to_thread.run_sync(lambda: run("--nccl", "2.27.5", "--service", f"127.0.0.1:{port}"))
    assert answer.answered
    assert answer.protocol_version == PROTOCOL_VERSION
    assert node.speaks_our_version(answer)
    assert service.receiver.agents() == ()
    assert service.receiver.statistics().faults == {"wrong_version": 2}
    assert result.exit_code == 0
    assert f"speaks protocol version {PROTOCOL_VERSION}" in result.output


TOKEN = "a-token-0123456789"


def token_file(folder: Path, token: str = TOKEN, *, mode: int = 0o600) -> str:
    path = folder / "agent.token"
    path.write_text(token + "\n")
    path.chmod(mode)
    return str(path)


async def asked(service: Service, port: int, *arguments: str) -> Result:
    """What `check` says of a service; it must know of no agent afterwards."""
    given = ("--nccl", "2.27.5", "--service", f"127.0.0.1:{port}", *arguments)
    result = await anyio.to_thread.run_sync(lambda: run(*given))
    assert service.receiver.agents() == ()
    return result


@pytest.mark.asyncio
async def test_a_token_is_shown_to_the_service_which_says_whether_it_would_do(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(f"{TOKEN}\n{TOKEN}-elsewhere host=no-such-node\n")
    known = Credentials(CredentialFiles(tokens=tmp_path / "tokens"), what="agents")
    service = Service()
    async with service.listening(credentials=known) as port:
        right = await asked(service, port, "--token-file", token_file(tmp_path))
        assert (right.exit_code, "would let them in" in right.output) == (0, True), right.output
        none = await asked(service, port)
        assert (none.exit_code, "a token is needed" in none.output) == (1, True), none.output
        wrong = await asked(service, port, "--token-file", token_file(tmp_path, "another-0123456789"))
        assert (wrong.exit_code, "this token is not known" in wrong.output) == (1, True), wrong.output
        foreign = await asked(service, port, "--token-file", token_file(tmp_path, f"{TOKEN}-elsewhere"))
        assert (foreign.exit_code, "this token is not for the host" in foreign.output) == (1, True), foreign.output
    assert service.receiver.statistics().faults == {"wrong_version": 1, "unauthorized": 2, "foreign_host": 1}


@pytest.mark.asyncio
async def test_what_is_wrong_with_certificates_is_said_with_what_to_do(tmp_path: Path) -> None:
    authority = make_authority(tmp_path / "one")
    cert, key = authority.sign("service")
    ca = ("--tls-ca", str(authority.path))
    service = Service()
    async with service.listening(credentials=Credentials(CredentialFiles(cert=cert, key=key), what="agents")) as port:
        assert (await asked(service, port, *ca)).exit_code == 0
        elsewhere = await asked(service, port, *ca, "--tls-server-name", "elsewhere")
        assert elsewhere.exit_code == 1
        assert "say which one with --tls-server-name" in elsewhere.output
    files = CredentialFiles(cert=cert, key=key, client_ca=authority.path)
    async with service.listening(credentials=Credentials(files, what="agents")) as port:
        mutual = await asked(service, port, *ca)
        assert mutual.exit_code == 1
        assert "does it want a certificate of this node (--tls-cert FILE)?" in mutual.output
        own, own_key = map(str, authority.sign("node1"))
        assert (await asked(service, port, *ca, "--tls-cert", own, "--tls-key", own_key)).exit_code == 0


def test_files_of_credentials_that_cannot_be_used_must_change_and_those_that_all_can_read_are_told(
    tmp_path: Path,
) -> None:
    missing = run("--nccl", "2.27.5", "--service", "127.0.0.1:1", "--token-file", str(tmp_path / "none"))
    assert missing.exit_code == 1
    assert "No such file" in missing.output
    assert "the service was not asked" in missing.output
    open_to_all = run("--nccl", "2.27.5", "--token-file", token_file(tmp_path, mode=0o644))
    assert open_to_all.exit_code == 0
    assert "every user of this machine can read it" in open_to_all.output
    assert TOKEN not in open_to_all.output
    assert "can read it" not in run("--nccl", "2.27.5", "--token-file", token_file(tmp_path)).output


def test_a_place_for_the_spool_must_take_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "is no directory" in run("--nccl", "2.27.5", "--spool", str(tmp_path / "file" / "spool")).output
    nowhere = run("--nccl", "2.27.5", "--spool", "/proc/ncclscope")
    assert nowhere.exit_code == 1
    assert "may not write" in nowhere.output or "0 GiB free" in nowhere.output
    right = run("--nccl", "2.27.5", "--spool", str(tmp_path / "not" / "there" / "yet"))
    assert (right.exit_code, "there is room" in right.output) == (0, True), right.output
    assert not (tmp_path / "not").exists(), "check changes nothing"


def test_what_agents_that_have_ended_left_is_told_and_not_what_an_agent_holds(tmp_path: Path) -> None:
    for name, size in (("node1-0123456789ab", 3_000_000), ("node2-0123456789ab", 5_000_000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()
        (tmp_path / name / "spool-2.sqlite-wal").write_bytes(bytes(size))
    held = SpoolDirectory(tmp_path / "node2-0123456789ab")
    told = run("--nccl", "2.27.5", "--spool", str(tmp_path))
    assert told.exit_code == 0
    assert "have left 2.86 MiB there (1 of them)" in told.output
    held.close()
    assert "have left 7.63 MiB there (2 of them)" in run("--nccl", "2.27.5", "--spool", str(tmp_path)).output


def test_a_port_where_nobody_listens_must_change() -> None:
    result = run("--nccl", "2.27.5", "--service", "127.0.0.1:1")
    assert result.exit_code == 1
    assert "cannot be reached" in result.output


class _Page(BaseHTTPRequestHandler):
    ahead_seconds: ClassVar[float] = 0.0

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def date_time_string(self, timestamp: float | None = None) -> str:
        moved = datetime.now(UTC).timestamp() + self.ahead_seconds
        return super().date_time_string(moved if timestamp is None else timestamp)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (its name in the base)
        """Silent."""


@contextmanager
def page(ahead_seconds: float) -> Generator[int]:
    handler = type("Page", (_Page,), {"ahead_seconds": ahead_seconds})
    server = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Stranger(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        self.request.recv(65_536)
        self.request.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def test_another_server_on_the_port_is_told_from_a_service() -> None:
    with socketserver.TCPServer(("127.0.0.1", 0), _Stranger) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        answer = node.ask_service("127.0.0.1", server.server_address[1])
        thread.join()
    assert not answer.answered
    assert "something else" in answer.text


@pytest.mark.parametrize(("ahead_seconds", "status"), [(0.0, 0), (-30.0, 1)])
def test_a_clock_that_is_seconds_off_the_services_must_change(ahead_seconds: float, status: int) -> None:
    with page(ahead_seconds) as port:
        offset = node.clock_offset(f"http://127.0.0.1:{port}/")
        result = run("--nccl", "2.27.5", "--page", f"http://127.0.0.1:{port}/")
    assert offset is not None
    assert abs(offset.seconds + ahead_seconds) <= offset.uncertainty_seconds + 0.1
    assert result.exit_code == status, result.output


# The node


def test_chrony_is_read_and_what_is_something_else_is_not() -> None:
    printed = """Reference ID    : C0A80001 (192.168.0.1)
Stratum         : 3
System time     : 0.000012345 seconds fast of NTP time
Leap status     : Normal
"""
    state = node.read_chrony(printed)
    assert state == node.ClockState(synchronised=True, error_seconds=0.000012345, told_by="chronyc")
    lost = node.read_chrony(printed.replace("Normal", "Not synchronised"))
    assert lost is not None
    assert lost.synchronised is False
    assert node.read_chrony(printed.replace("0.000012345", "0.0.12")) is None
    assert node.read_chrony("506 Cannot talk to daemon\n") is None


def test_the_kernel_says_whether_the_clock_is_synchronised_or_that_is_not_known() -> None:
    state = node.kernel_clock_state()
    assert state.synchronised in {True, False, None}
    assert (state.error_seconds is not None) == (state.synchronised is True)


def test_the_version_of_a_library_that_is_not_there_is_not_known() -> None:
    assert node.printed_by(["ncclscope-no-such-command"]) is None
    assert node.printed_by(["false"]) is None


@pytest.mark.corpus
def test_real_logs_are_looked_at_and_what_is_in_them_is_told(corpus: Path) -> None:
    result = run("--logs", str(corpus / "nccl_logs" / "*" / "*.out"), "--json")
    told = orjson.loads(result.stdout)
    assert len(told["logs"]) > 3
    assert sum(log["nccl_lines"] for log in told["logs"]) > 10_000
    assert all(0 <= share <= 1 for share in told["volume"]["share_by_subsystem"].values())


@pytest.mark.parametrize(
    ("variables", "name", "job"),
    [
        ({"SLURM_JOB_ID": "4711", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "Slurm", "4711"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "Kubernetes", None),
        ({"TORCHELASTIC_RUN_ID": "none"}, "torchrun", "none"),
    ],
)
def test_the_scheduler_is_told_by_its_variable(variables: dict[str, str], name: str, job: str | None) -> None:
    found = scheduler_here(variables)
    assert found is not None
    assert (found.name, found.job) == (name, job)
    assert scheduler_here({}) is None


def test_the_advice_for_a_scheduler_names_a_page_that_is_there(repository: Path) -> None:
    found = scheduler_here({"SLURM_JOB_ID": "1"})
    assert found is not None
    assert (repository / found.advice.rpartition("(")[2].rstrip(")")).exists()

"""Bad input gives the error or counter that names it, and nothing else stops."""

from __future__ import annotations

import json
import random
import socket
from pathlib import Path

import pytest
from end_to_end.processes import end, run_command, running, serving, wait_for

_LINE = (
    "node1:10:11 [0] NCCL INFO AllReduce: opCount {count:x} sendbuff 0x7f00 recvbuff 0x7f00 count 1024 datatype 7 op 0 "
    "root 0 comm 0x55a0 [nranks=2] stream 0x55b0\n"
)


def _good_log(path: Path, lines: int = 5) -> None:
    path.write_text("".join(_LINE.format(count=count) for count in range(lines)))


def test_files_that_cannot_be_read_are_counted_beside_those_that_can(tmp_path: Path) -> None:
    inputs = tmp_path / "in"
    inputs.mkdir()
    _good_log(inputs / "good.log")
    (inputs / "random.log").write_bytes(random.Random(7).randbytes(200_000))
    (inputs / "cut.sqlite").write_bytes(b"SQLite format 3\0" + bytes(4000))
    (inputs / "empty.sqlite").touch()
    (inputs / "zeros.sqlite").write_bytes(bytes(8192))
    (inputs / "report.nsys-rep").write_bytes(b"\0\1\2\3" * 100)
    done = run_command("analyze", str(inputs), "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    text = json.dumps(summary)
    assert "cut.sqlite" in text
    assert "file_not_read_empty" in text
    assert "nsys_missing" in text or "nsys_failed" in text
    assert sum(entry["operations"] for entry in summary["operations"]) == 5


def test_nothing_readable_ends_with_status_3_and_says_what_is_read(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing to see here")
    done = run_command("analyze", str(tmp_path), "--out", str(tmp_path / "out"))
    assert done.returncode == 3
    assert "nothing readable: of another kind" in done.stderr
    assert ": notes.txt. ncclscope reads" in done.stderr


@pytest.mark.slow
def test_wrong_usage_ends_with_status_2(tmp_path: Path) -> None:
    _good_log(tmp_path / "good.log")
    log, out = str(tmp_path / "good.log"), str(tmp_path / "out")
    assert run_command("analyze", "--out", out).returncode == 2
    assert run_command("analyze", str(tmp_path / "missing"), "--out", out).returncode == 2
    assert run_command("analyze", log, "--out", out, "--iterations", "8-5").returncode == 2
    wrong_zone = run_command("analyze", log, "--out", out, "--log-timezone", "Mars/Olympus")
    assert wrong_zone.returncode == 2
    assert "Mars/Olympus" in wrong_zone.stderr


def _send(port: int, data: bytes) -> bytes:
    """What the service answers before it closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while more := connection.recv(65536):
            answer += more
    return answer


@pytest.mark.parametrize("option", ["--listen", "--http"])
def test_a_port_that_is_taken_ends_the_service_with_a_sentence(tmp_path: Path, option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        other = "--http" if option == "--listen" else "--listen"
        done = run_command("serve", option, address, other, "127.0.0.1:0", "--data", str(tmp_path))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    error = done.stderr.splitlines()[-1]
    assert error.startswith("Error: ")
    assert address in error
    assert option in error


def test_an_agent_that_finds_nothing_to_follow_says_so_once(tmp_path: Path) -> None:
    pattern, missing = str(tmp_path / "nothing.*.log"), tmp_path / "missing"
    done = run_command("agent", "--print", "--once", "--logs", pattern, "--exports", str(missing))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(f"no file matches {pattern} yet") == 1
    assert done.stderr.count(f"directory {missing} does not exist yet") == 1
    assert done.stdout == ""


@pytest.mark.slow
def test_an_agent_at_the_port_of_the_page_is_told_so_and_its_coming_and_going_is_told(tmp_path: Path) -> None:
    _good_log(tmp_path / "good.log")
    log, service_log = str(tmp_path / "good.log"), tmp_path / "service.log"
    with serving(service_log, "--data", str(tmp_path / "data")) as service:
        agents, web = service.agents, service.web
        said = tmp_path / "agent.log"
        wrong = ("agent", "--connect", f"127.0.0.1:{web}", "--logs", log)
        with running(said, *wrong) as process:
            wait_for(lambda: "this is an HTTP port" in said.read_text(), "the sentence")
            assert end(process) == 0, "it has read nothing that it could not hand over"
        assert run_command(*wrong, "--once", "--once-seconds", "0.5").returncode == 1
        assert b"this port is for agents" in _send(agents, b"GET / HTTP/1.1\r\nHost: service\r\n\r\n")
        snapshot = run_command("snapshot", "--service", f"http://127.0.0.1:{agents}", "--out", str(tmp_path / "out"))
        assert snapshot.returncode == 1
        assert "Traceback" not in snapshot.stderr
        assert "--service" in snapshot.stderr
        right = run_command(*("agent", "--once", "--name", "node7", "--connect", f"127.0.0.1:{agents}", "--logs", log))
        assert right.returncode == 0, right.stderr
        wait_for(lambda: "agent_lost" in service_log.read_text(), "the end of the agent in the log")
    told = [line for line in service_log.read_text().splitlines() if "node7" in line]
    assert ["agent_connected" in line for line in told] == [True, False]
    assert "agent_lost" in told[1]

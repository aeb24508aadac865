"""The files of a snapshot come whole into the folder that was asked for, and nowhere else."""

from __future__ import annotations

import io
import json
import threading
import urllib.parse
import zipfile
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from ncclscope.snapshot import fetch_snapshot, snapshot


@contextmanager
def _service(body: bytes, *, status: int = 200) -> Generator[tuple[str, list[str]], None, None]:
    """A server that answers everything alike, at its address; and what it was asked."""
    asked: list[str] = []

    class _Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (the name is the library's)
            del format, args

    server = HTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _zip_of(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as members:
        for name, content in files.items():
            members.writestr(name, content)
    return packed.getvalue()


def _tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_files_are_written_into_the_folder_which_is_made(tmp_path: Path) -> None:
    with _service(_zip_of({"trace.json": b"{}", "summary.json": b"[]"})) as (url, asked):
        assert fetch_snapshot(url + "/", tmp_path / "deep" / "out") == ["trace.json", "summary.json"]
    assert _tree(tmp_path) == {"deep/out/trace.json": b"{}", "deep/out/summary.json": b"[]"}
    assert [urllib.parse.urlsplit(path).path for path in asked] == ["/api/snapshot"]


def test_files_that_are_there_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_bytes(b"old and longer")
    (tmp_path / "mine.txt").write_bytes(b"mine")
    with _service(_zip_of({"trace.json": b"new"})) as (url, _):
        fetch_snapshot(url, tmp_path)
    assert _tree(tmp_path) == {"trace.json": b"new", "mine.txt": b"mine"}


def test_job_and_minutes_are_asked_for_as_given(tmp_path: Path) -> None:
    with _service(_zip_of({"a": b""})) as (url, asked):
        fetch_snapshot(url, tmp_path, job="a job & more", minutes=2.5)
        fetch_snapshot(url, tmp_path)
    queries = [urllib.parse.parse_qs(urllib.parse.urlsplit(path).query) for path in asked]
    assert queries == [{"job": ["a job & more"], "minutes": ["2.5"]}, {}]


@pytest.mark.parametrize(
    "name", ["../evil.txt", "../../../../evil.txt", "/evil.txt", "deep/../../evil.txt", "//evil.txt"]
)
def test_no_name_in_a_snapshot_leaves_the_folder(tmp_path: Path, name: str) -> None:
    out = tmp_path / "one" / "two"
    with _service(_zip_of({name: b"evil"})) as (url, _):
        assert fetch_snapshot(url, out) == ["evil.txt"]
    assert _tree(tmp_path) == {"one/two/evil.txt": b"evil"}


def test_what_a_service_refuses_is_said_in_its_words(tmp_path: Path) -> None:
    refusal = json.dumps({"error": "no job is called x"}).encode()
    with _service(refusal, status=404) as (url, _), pytest.raises(click.ClickException, match="no job is called x"):
        fetch_snapshot(url, tmp_path / "out")
    with (
        _service(refusal, status=401) as (url, _),
        pytest.raises(click.ClickException, match=r"/api/snapshot: no job is called x \(--token-file FILE\)"),
    ):
        fetch_snapshot(url, tmp_path / "out")
    with _service(b"", status=503) as (url, _), pytest.raises(click.ClickException, match="HTTP 503"):
        fetch_snapshot(url, tmp_path / "out")
    with _service(b"gone fishing", status=500) as (url, _), pytest.raises(click.ClickException, match="gone fishing"):
        fetch_snapshot(url, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_address_without_its_scheme_is_a_usage_error(tmp_path: Path) -> None:
    done = CliRunner().invoke(snapshot, ["--out", str(tmp_path), "--service", "127.0.0.1:9798"])
    assert done.exit_code == 2
    assert "'127.0.0.1:9798' is not an address such as http://127.0.0.1:9798" in done.output


@pytest.mark.parametrize("service", ["http://127.0.0.1:1", "ftp-like://127.0.0.1:1"])
def test_without_a_service_the_error_says_what_to_do(tmp_path: Path, service: str) -> None:
    with pytest.raises(click.ClickException, match=r"no service answers at [^<]*ncclscope serve"):
        fetch_snapshot(service, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_prints_where_each_file_lies(tmp_path: Path) -> None:
    with _service(_zip_of({"trace.json": b"{}"})) as (url, _):
        done = CliRunner().invoke(snapshot, ["--out", str(tmp_path), "--service", url, "--minutes", "1"])
    assert (done.exit_code, done.output) == (0, f"{tmp_path / 'trace.json'}\n")
    assert CliRunner().invoke(snapshot, ["--out", str(tmp_path), "--minutes", "0"]).exit_code == 2
    assert CliRunner().invoke(snapshot, []).exit_code == 2

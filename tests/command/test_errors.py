"""What a user can mend is told in one sentence, before any work; what is a bug shows where it happened."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from ncclscope.cli import main
from ncclscope.demo import Settling
from ncclscope.extras import require_writable
from ncclscope.simulate import configuration_of
from ncclscope_service.export.summary import NO_OPERATIONS
from ncclscope_wire.errors import ConfigError

_LINE = (
    "node1:10:11 [0] NCCL INFO AllReduce: opCount 1 sendbuff 0x7f00 recvbuff 0x7f00 count 1024 datatype 7 op 0 "
    "root 0 comm 0x55a0 [nranks=2] stream 0x55b0\n"
)


def _failing(error: Exception, monkeypatch: pytest.MonkeyPatch) -> Result:
    """What becomes of a subcommand that raises this."""

    @click.command()
    def failing() -> None:
        raise error

    monkeypatch.setattr("ncclscope.extras.failing", failing, raising=False)
    monkeypatch.setitem(main_commands(), "failing", ("ncclscope.extras", "failing"))
    return CliRunner().invoke(main, ["failing"])


def main_commands() -> dict[str, tuple[str, str]]:
    """The table of subcommands."""
    import ncclscope.cli  # noqa: PLC0415

    table: dict[str, tuple[str, str]] = vars(ncclscope.cli)["_COMMANDS"]
    return table


def _missing(name: str) -> OSError:
    return FileNotFoundError(errno.ENOENT, "No such file or directory", name)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConfigError("--x is wrong"), "Error: --x is wrong\n"),
        (_missing("/a/b"), "Error: /a/b: No such file or directory: make its folder, or name another path\n"),
        (OSError(errno.ENOSPC, "No space left", "/a"), "Error: /a: No space left: mend that, or name another path\n"),
        (
            OSError(errno.ENOSPC, "written 0 of 5 bytes"),
            "Error: No space left on device: free space there, or name another folder to write to\n",
        ),
        (ExceptionGroup("", [ExceptionGroup("", [ConfigError("--x is wrong")])]), "Error: --x is wrong\n"),
        (ExceptionGroup("", [ConfigError("one"), ConfigError("two"), ConfigError("one")]), "Error: one; two\n"),
    ],
)
def test_what_a_user_can_mend_is_a_sentence(error: Exception, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done = _failing(error, monkeypatch)
    assert done.exit_code == 1
    assert done.output == said


@pytest.mark.parametrize(
    "error",
    [
        KeyError("a bug"),
        OSError(errno.EINVAL, "without a file"),
        ExceptionGroup("", [ConfigError("one"), KeyError("a bug")]),
    ],
)
def test_a_bug_is_not_hidden(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _failing(error, monkeypatch).exception is error


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--data"),
        ("serve", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--snapshot-on-end"),
        ("analyze", "nccl.log", "--out"),
        ("snapshot", "--service", "http://127.0.0.1:1", "--out"),
        ("demo", "--snapshot"),
        ("demo", "--keep"),
        ("simulate", "--out"),
    ],
)
def test_a_folder_that_cannot_be_written_is_named_before_any_work(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nccl.log").write_text(_LINE)
    # No folder can be made in /proc, not even by root.
    done = CliRunner().invoke(main, [*arguments, "/proc/nowhere"])
    assert done.exit_code == 1
    assert done.output.startswith("Error: ")
    assert "/proc/nowhere" in done.output
    assert "No such file or directory" in done.output
    if arguments[0] != "simulate":
        assert done.output.startswith(f"Error: {arguments[-1]}: cannot write into")


def test_a_folder_that_can_be_written_is_made_and_left_empty(tmp_path: Path) -> None:
    require_writable(tmp_path / "a" / "b", "--out")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_folder_below_a_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(click.ClickException, match=r"--out: cannot write into .*file/below: Not a directory"):
        require_writable(tmp_path / "file" / "below", "--out")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--fault", "nonsense"), "no kind 'nonsense'"),
        (("--fault", "slow_link:node=9,factor=0.5"), "node"),
        (("--capture", "odd"), "capture 'odd'"),
        (("--nccl", "1.0"), "1.0"),
    ],
)
def test_a_demo_that_cannot_be_simulated_is_wrong_usage_and_starts_nothing(
    arguments: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*arguments: object, **named: object) -> None:
        raise AssertionError(f"started {arguments} {named}")

    monkeypatch.setattr(subprocess, "Popen", forbidden)
    done = CliRunner().invoke(main, ["demo", *arguments])
    assert done.exit_code == 2, done.output
    assert said in done.output


def test_the_configuration_of_a_simulation_is_known_without_writing_it(tmp_path: Path) -> None:
    configuration = configuration_of(["--out", str(tmp_path / "out"), "--nodes", "3", "--gpus", "4", "--live"])
    assert configuration.world == 12
    assert configuration.iterations is None
    assert not (tmp_path / "out").exists()


def _job(operations: int, pending: int) -> Sequence[dict[str, Any]]:
    return [{"operations": operations, "alignment": {"matched": operations - pending, "pending": pending}}]


def test_a_service_with_nothing_open_is_settled_when_nothing_came_for_a_moment() -> None:
    settling = Settling()
    assert not settling.is_over(_job(5, 0), 0.0)
    assert not settling.is_over(_job(9, 0), 1.0)
    assert not settling.is_over(_job(9, 0), 2.0)
    assert not settling.is_over(_job(9, 0), 2.75)
    assert settling.is_over(_job(9, 0), 3.0)


def test_what_is_open_is_waited_for_as_long_as_it_changes_and_then_a_while() -> None:
    settling = Settling()
    for second in range(20):
        assert not settling.is_over(_job(100, 80 - second), float(second))
    for second in range(20, 24):
        assert not settling.is_over(_job(100, 61), float(second))
    assert settling.is_over(_job(100, 61), 24.0)


def test_a_machine_that_stood_still_is_given_time_to_go_on() -> None:
    settling = Settling()
    assert not settling.is_over(_job(100, 20), 0.0)
    assert not settling.is_over(_job(100, 20), 60.0)
    assert not settling.is_over(_job(120, 0), 60.5)
    assert not settling.is_over(_job(120, 0), 61.5)
    assert settling.is_over(_job(120, 0), 62.5)


def test_a_service_that_does_not_answer_is_not_waited_for_without_end() -> None:
    settling = Settling()
    assert [settling.is_over([], float(second)) for second in range(6)] == [False] * 5 + [True]


@pytest.mark.parametrize("options", [(), ("--brief",)])
def test_logs_without_operations_say_first_what_was_not_set_and_tell_the_rest(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    """What most people have: NCCL_DEBUG=INFO, and NCCL_DEBUG_SUBSYS as it is by default."""
    lines = [
        f"node1:10{rank}:10{rank} [{rank}] NCCL INFO comm 0x55d0c8b3e2a{rank} rank {rank} nranks 2 cudaDev {rank} "
        f"nvmlDev {rank} busId {rank}b000 commId 0x5a3d6c0fa9de3b5f - Init COMPLETE"
        for rank in range(2)
    ]
    (tmp_path / "job.log").write_text("\n".join(lines) + "\n")
    done = CliRunner().invoke(main, ["analyze", str(tmp_path / "job.log"), "--out", str(tmp_path / "out"), *options])
    assert done.exit_code == 0, done.output
    assert NO_OPERATIONS in done.output
    assert "operations  " not in done.output, "no column of the table is empty"
    assert "2 ranks" in done.output
    assert NO_OPERATIONS.partition("`")[0] in (tmp_path / "out" / "report.html").read_text()

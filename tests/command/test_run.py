"""`ncclscope run` and `env`: NCCL's variables, an agent beside the job, and the job as if it ran alone."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from agent.log_samples import operation_line
from benchmarks.ports import free_port
from click.testing import CliRunner
from end_to_end.processes import PATIENCE_SECONDS, fetch_json, run_command, running, serving, wait_for

from ncclscope.cli import main
from ncclscope.run import arrivals, is_first_on_node, local_tasks, note_arrival, prepare, step_name
from ncclscope.run_report import hangs
from ncclscope_agent.nccl_settings.advice import NcclVersion
from ncclscope_agent.nccl_settings.presets import preset

_VERSION = NcclVersion(2, 27, 5)


def _run(*arguments: str, variables: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    base = {name: value for name, value in os.environ.items() if not name.startswith("NCCL")}
    return subprocess.run(
        [sys.executable, "-m", "ncclscope", "run", *arguments],
        env=base | {"PYTHONPATH": os.pathsep.join(sys.path)} | (variables or {}),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )


def test_env_prints_what_check_recommends_for_the_version() -> None:
    done = CliRunner().invoke(main, ["env", "--nccl", "2.27.5", "--format", "json"])
    assert done.exit_code == 0
    assert '"NCCL_DEBUG_TIMESTAMP_FORMAT": "[%F_%T.%6f]_"' in done.output
    assert CliRunner().invoke(main, ["env", "--nccl", "new"]).exit_code == 2


def test_what_is_set_and_serves_stays_and_what_would_log_nothing_is_replaced_and_told() -> None:
    given = {"NCCL_DEBUG": "warn", "NCCL_DEBUG_FILE": "/mine/%h.%p", "NCCL_IB_HCA": "mlx5", "PATH": "/bin"}
    prepared = prepare(given, _VERSION, log_file=None, calls=False, keep=False)
    assert prepared.environment == {**given, **preset(_VERSION), "NCCL_DEBUG_FILE": "/mine/%h.%p"}
    assert prepared.log_file == "/mine/%h.%p"
    assert [each.partition(":")[0] for each in prepared.changed] == ["NCCL_DEBUG=warn is replaced by INFO"]


def test_space_is_given_back_of_logs_in_a_folder_that_was_made_for_the_job_alone() -> None:
    assert prepare({}, _VERSION, log_file=None, calls=False, keep=False).is_own_log
    assert not prepare({}, _VERSION, log_file="/logs/nccl.%h.%p", calls=False, keep=False).is_own_log
    assert not prepare({"NCCL_DEBUG_FILE": "/logs/n.%h.%p"}, _VERSION, log_file=None, calls=False, keep=True).is_own_log


def test_pytorch_names_its_groups_unless_it_was_told_otherwise() -> None:
    for given, level in (({}, "INFO"), ({"TORCH_CPP_LOG_LEVEL": "ERROR"}, "ERROR")):
        prepared = prepare(given, _VERSION, log_file=None, calls=False, keep=False)
        assert prepared.environment["TORCH_CPP_LOG_LEVEL"] == level


def test_with_keep_nothing_that_is_set_is_replaced() -> None:
    prepared = prepare({"NCCL_DEBUG": "WARN"}, _VERSION, log_file=None, calls=False, keep=True)
    assert prepared.environment["NCCL_DEBUG"] == "WARN"
    assert prepared.changed == ()


@pytest.mark.parametrize(
    ("variables", "is_first"),
    [
        ({}, True),
        ({"SLURM_LOCALID": "0"}, True),
        ({"SLURM_LOCALID": "1"}, False),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "3"}, False),
        ({"SLURM_LOCALID": "0", "LOCAL_RANK": "5"}, True),
    ],
)
def test_the_first_process_of_a_node_is_told_by_its_launcher(variables: dict[str, str], is_first: bool) -> None:
    assert is_first_on_node(variables) is is_first


def test_a_process_that_is_not_the_first_becomes_the_job(tmp_path: Path) -> None:
    done = _run(
        *("--log-file", str(tmp_path / "logs" / "%h.%p"), "--", "sh", "-c", "echo $NCCL_DEBUG; kill -TERM $$"),
        variables={"SLURM_LOCALID": "1", "TMPDIR": str(tmp_path)},
    )
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "INFO\n")
    assert list((tmp_path / "logs").glob("ncclscope-agent*")) == []


@pytest.mark.parametrize("command", [("sh", "-c", "exit 7"), ("no such program",)])
def test_the_job_ends_as_it_would_alone_without_any_service(tmp_path: Path, command: tuple[str, ...]) -> None:
    done = _run("--", *command, variables={"TMPDIR": str(tmp_path), "NCCLSCOPE_FLUSH_SECONDS": "0"})
    assert done.returncode == (7 if len(command) > 1 else 127)
    is_told = "the service does not have everything of this job" in done.stderr
    assert is_told == (len(command) > 1), "a job that did not start has nothing to hand over"


def test_an_agent_whose_settings_are_wrong_is_told_after_the_job(tmp_path: Path) -> None:
    told = tmp_path / "logs" / f"ncclscope-agent.{socket.gethostname().partition('.')[0]}.log"
    waits = f"until grep -q HOST:PORT {told}; do sleep 0.1; done"
    done = _run("--connect", "nowhere", "--log-file", str(tmp_path / "logs" / "%h.%p"), "--", "sh", "-c", waits)
    assert done.returncode == 0
    assert f"the agent did not start, and nothing was sent: {told} says why" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("has_spool", [False, True])
def test_a_job_whose_agent_never_found_the_service_is_told_so_and_what_can_be_done(
    tmp_path: Path, has_spool: bool
) -> None:
    logs, spool = tmp_path / "logs", tmp_path / "spool"
    variables = {"NCCLSCOPE_CONNECT": f"127.0.0.1:{free_port()}", "NCCLSCOPE_FLUSH_SECONDS": "0.2"}
    sign = f"cat {logs}/ncclscope-agent.*.log | grep -q not_connected"
    if has_spool:
        variables["NCCLSCOPE_SPOOL"] = str(spool)
        sign = f"ls {spool}/*/spool-*.sqlite"
    job = f"echo '{operation_line()}' > {logs}/nccl.n.1.log; until {sign} >/dev/null 2>&1; do sleep 0.1; done"
    done = _run("--log-file", f"{logs}/nccl.%h.%p.log", "--", "sh", "-c", job, variables=variables)
    assert done.returncode == 0
    assert "the service does not have everything of this job" in done.stderr
    assert ("ncclscope agent --send-spools" in done.stderr) == has_spool


def test_the_job_runs_where_the_folder_for_logs_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = _run("--log-file", str(tmp_path / "file" / "%h.%p"), "--", "sh", "-c", "exit 7")
    assert done.returncode == 7
    assert "the job runs" in done.stderr


@pytest.mark.slow
def test_the_agent_hands_over_what_the_last_process_of_the_node_wrote_last(tmp_path: Path) -> None:
    simulated = tmp_path / "simulated"
    assert (
        run_command(
            "simulate", "--out", str(simulated), "--nodes", "1", "--gpus", "2", "--tp", "2", "--pp", "1"
        ).returncode
        == 0
    )
    first, second = sorted((simulated / "logs").glob("*.log"))
    pattern = str(tmp_path / "logs" / "nccl.%h.%p.log")
    with serving(tmp_path / "serve.log", "--data", str(tmp_path / "data")) as service:
        listen, web = f"127.0.0.1:{service.agents}", service.web
        patience = ("--linger", f"{PATIENCE_SECONDS}", "--hand-over", f"{PATIENCE_SECONDS}")
        options = ("--connect", listen, "--log-file", pattern, *patience, "--")
        # The other process of the node writes on for two seconds after the first has ended.
        late = f"sleep 2; cp {second} {tmp_path}/logs/nccl.n.2.log"
        with running(tmp_path / "late.log", "run", "--agent", "no", *options, "sh", "-c", late) as other:
            wait_for((tmp_path / "logs" / ".ncclscope-run").exists, "its lock")
            done = _run(*options, "sh", "-c", f"cp {first} {tmp_path}/logs/nccl.n.1.log")
            assert done.returncode == 0, done.stderr
            assert other.poll() == 0, "the agent was ended before the other process of the node had ended"
        lines = sum(path.read_text().count(": opCount ") for path in (first, second))

        def operations() -> int:
            jobs = fetch_json(f"http://127.0.0.1:{web}/api/overview")["jobs"]  # type: ignore[index]
            return sum(int(job["operations"]) for job in jobs)

        wait_for(lambda: operations() == lines, f"{lines} operations")


_LOGGED_JOB = """
import os, pathlib, shutil, sys, time, urllib.request
logs = pathlib.Path(os.environ["NCCL_DEBUG_FILE"]).parent
for each in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    shutil.copy(each, logs)
print("job output", flush=True)
{then}
"""
"""A job that writes the logs of a simulated one where NCCL would."""


def _finding(kind: str, until_ns: int | None, summary: str = "rank 2 is missing") -> dict[str, object]:
    """As the service's overview has it."""
    common = {"severity": "critical", "job": "run", "since_ns": 1, "ranks": [2], "hosts": ["n0"], "confidence": 0.9}
    return {"kind": kind, "until_ns": until_ns, "summary": summary, "evidence": {"state": "not_enqueued"}, **common}


def test_of_the_hangs_that_the_service_saw_those_count_that_did_not_pass() -> None:
    now_ns = 100 * 10**9
    hang = _finding("hang", None)
    assert hangs({"now_ns": now_ns, "findings": [hang, _finding("late_rank", None)]}) == [hang]
    over = _finding("hang", now_ns - 10**9)
    assert hangs({"now_ns": now_ns, "findings": [over]}) == [hang], "the end of the job ended it"
    assert hangs({"now_ns": now_ns, "findings": [_finding("hang", 10**9)]}) == []
    assert hangs({}) == []


def test_a_report_of_a_job_that_stood_still_says_what_the_service_saw_and_files_do_not_tell(tmp_path: Path) -> None:
    job, seen = tmp_path / "job", tmp_path / "hangs.json"
    shape = ("--nodes", "1", "--gpus", "4", "--tp", "2", "--pp", "1", "--dp", "2")
    simulated = run_command("simulate", "--out", str(job), *shape, "--iterations", "30", "--fault", "hang:rank=2,at=20")
    assert simulated.returncode == 0, simulated.stderr

    def verdict(*options: str) -> dict[str, object]:
        out = tmp_path / "report"
        done = run_command("analyze", str(job / "logs"), "--out", str(out), *options)
        assert done.returncode == 0, done.stderr
        found = json.loads((out / "summary.json").read_text())["verdicts"]
        return dict(next(iter(found.values())) if isinstance(found, dict) else found[0])

    assert verdict()["ending"] == "unclear"
    seen.write_text(json.dumps(hangs({"now_ns": 2, "findings": [_finding("hang", None)]})))
    told = verdict("--seen", str(seen))
    assert (told["ending"], told["ranks"]) == ("hang", [2])
    assert "rank 2 is missing" in str(told["summary"])
    seen.write_text("{}")
    wrong = run_command("analyze", str(job / "logs"), "--out", str(tmp_path / "report"), "--seen", str(seen))
    assert wrong.returncode == 2
    assert "is no list of findings" in wrong.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("then", "status"), [("sys.exit(3)", 3), ("time.sleep(3600)", -signal.SIGINT)])
def test_with_report_one_command_serves_the_page_and_leaves_a_report_however_the_job_ends(
    tmp_path: Path, then: str, status: int
) -> None:
    job, report, page = tmp_path / "job", tmp_path / "report", re.compile(r"live page (http://127\.0\.0\.1:\d+)/")
    simulated = run_command(
        *("simulate", "--out", str(job), "--nodes", "1", "--gpus", "4", "--tp", "2", "--pp", "1", "--dp", "2")
    )
    assert simulated.returncode == 0, simulated.stderr
    (tmp_path / "job.py").write_text(_LOGGED_JOB.format(then=then))
    command = [sys.executable, str(tmp_path / "job.py"), str(job / "logs")]
    printed = tmp_path / "printed"
    ran = [sys.executable, "-m", "ncclscope", "run", f"--report={report}", "--", *command]
    with (
        printed.open("wb") as output,
        subprocess.Popen(ran, stdout=subprocess.PIPE, stderr=output, start_new_session=True) as started,
    ):
        try:
            assert started.stdout is not None
            assert started.stdout.readline() == b"job output\n"
            found = page.search(printed.read_text())
            assert found is not None, printed.read_text()
            if status < 0:
                wait_for(lambda: operations_of(found[1]) > 1000, "operations on the page")
                os.killpg(started.pid, signal.SIGINT)
            assert started.wait(PATIENCE_SECONDS) == status, printed.read_text()
        finally:
            started.kill()
    before, _, after = printed.read_text().partition("writing the report\n")
    assert "does not have everything" not in before, "the report is made of the files, not of what was sent"
    summary = after.splitlines()
    assert len(summary) <= 12, "ten lines, and where the report is"
    assert "4 ranks on 1 host" in "\n".join(summary)
    assert summary[-1] == f"ncclscope run: report {report / 'report.html'}"
    assert (report / "report.html").stat().st_size > 100_000
    assert not subprocess.run(["pgrep", "-f", str(report)], check=False, capture_output=True).stdout, "nothing runs on"


def operations_of(url: str) -> int:
    """Operations of all jobs that a service has."""
    overview = fetch_json(f"{url}/api/overview")
    assert isinstance(overview, dict)
    return sum(job["operations"] or 0 for job in overview["jobs"])


@pytest.mark.parametrize("variables", [{"SLURM_NNODES": "2"}, {"LOCAL_WORLD_SIZE": "8"}])
def test_a_report_is_of_one_node_and_one_command(tmp_path: Path, variables: dict[str, str]) -> None:
    done = _run(f"--report={tmp_path}", "--", "true", variables=variables)
    assert done.returncode == 2
    assert "for a job on one node, started once" in done.stderr


@pytest.mark.parametrize(
    ("environment", "tasks"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, 8),
        ({"LOCAL_WORLD_SIZE": "4"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "2"}, 2),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "3"}, 1),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "4"}, None),
        ({"SLURM_STEP_TASKS_PER_NODE": "8"}, None),
        ({"SLURM_STEP_TASKS_PER_NODE": "many", "SLURM_NODEID": "0"}, None),
        ({"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_TASKS_PER_NODE": "8", "SLURM_NODEID": "0"}, 4),
        ({"LOCAL_WORLD_SIZE": "x", "SLURM_TASKS_PER_NODE": "8", "SLURM_NODEID": "0"}, 8),
    ],
)
def test_the_number_of_processes_of_a_node_is_read_as_its_launcher_writes_it(
    environment: dict[str, str], tasks: int | None
) -> None:
    assert local_tasks(environment) == tasks


def test_each_process_of_a_step_is_counted_and_those_of_other_steps_are_not(tmp_path: Path) -> None:
    first, second = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1"}
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
    each = [os.open(tmp_path / "list", flags) for _ in range(3)]
    try:
        assert arrivals(each[0], first) == 0
        for descriptor in each:
            note_arrival(descriptor, first)
        note_arrival(each[0], second)
        assert (arrivals(each[2], first), arrivals(each[2], second)) == (3, 1)
    finally:
        for descriptor in each:
            os.close(descriptor)


def test_a_step_has_a_name_of_one_line_whatever_its_launcher_says() -> None:
    assert step_name({}) == "step"
    assert "\n" not in step_name({"PMIX_NAMESPACE": "a\nb"})
    assert len(step_name({"PBS_JOBID": "x" * 999})) == 200

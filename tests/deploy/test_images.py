"""Images, compose and units: valid, hardened, and about flags that exist. Nothing is built or started here."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy.flags import check_arguments, check_variables

from ncclscope.agent import OVER_BUDGET, WAITS
from ncclscope_agent.config import AgentSettings

_IMAGES = ["Dockerfile.agent", "Dockerfile.service"]
_UNITS = ["ncclscope-agent.service", "ncclscope-agent@.service", "ncclscope-spools.service", "ncclscope.service"]
_MOST_EXPOSED = 2.0
"""Of 10: what systemd says of a unit that can do anything."""


def tool(name: str) -> str:
    """A program that a package of the group `deploy` brings."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    assert found is not None, f"{name} is not there: make test-deploy"
    return found


@pytest.mark.deploy
@pytest.mark.parametrize("name", _IMAGES)
def test_hadolint_finds_nothing(repository: Path, name: str) -> None:
    done = subprocess.run(
        [tool("hadolint"), repository / "deploy" / "images" / name], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", _IMAGES)
def test_an_image_runs_as_a_number_without_a_shell_from_a_pinned_base(repository: Path, name: str) -> None:
    text = (repository / "deploy" / "images" / name).read_text()
    last = text.rpartition("\nFROM ")[2]
    user = re.search(r"^USER (\d+):(\d+)$", last, re.MULTILINE)
    assert user is not None
    # A new volume is its own: Docker copies the owner of the folder below the mount.
    assert f"RUN install -d -o {user[1]} -g {user[2]} -m 0700 /var/lib/ncclscope\n" in last[: user.start()]
    assert json.loads(re.findall(r"^ENTRYPOINT (.*)$", last, re.MULTILINE)[0]) == ["ncclscope"]
    assert re.search(r"^ARG PYTHON_IMAGE=\S+@sha256:[0-9a-f]{64}$", text, re.MULTILINE)
    assert text.count("\nFROM ${PYTHON_IMAGE}") == 2
    for label in ("title", "description", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{label}=" in last
    check_arguments(json.loads(re.findall(r"^CMD (.*)$", last, re.MULTILINE)[0]), where=name)


@pytest.mark.parametrize("name", _IMAGES)
def test_what_an_image_copies_is_there_and_is_let_through(repository: Path, name: str) -> None:
    text = (repository / "deploy" / "images" / name).read_text()
    ignore = (repository / "deploy" / "images" / f"{name}.dockerignore").read_text().splitlines()
    allowed = [line[1:] for line in ignore if line.startswith("!")]
    for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (repository / source).exists(), source
            assert any(source == each or source.startswith(each + "/") for each in allowed), source


def test_the_packages_of_the_agents_image_are_the_base_install_with_hashes(repository: Path) -> None:
    agent, service = (
        set(re.findall(r"^([a-z0-9-]+)==", (repository / "requirements" / name).read_text(), re.MULTILINE))
        for name in ("agent.txt", "service.txt")
    )
    assert {"anyio", "numpy", "msgpack"} <= agent
    assert agent < service
    assert not agent & {"pyarrow", "plotly", "starlette", "uvicorn"}
    text = (repository / "requirements" / "agent.txt").read_text()
    assert text.count("==") <= text.count("--hash=sha256:")


@pytest.fixture(scope="module")
def compose(repository: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((repository / "deploy" / "compose" / "compose.yaml").read_text())
    return loaded


@pytest.mark.deploy
def test_compose_reads_its_file(repository: Path) -> None:
    from compose_spec import PyOptions  # noqa: PLC0415

    text = (repository / "deploy" / "compose" / "compose.yaml").read_text()
    # As compose fills them in: the default of a variable, or any value where one must be given.
    text = re.sub(r"\$\{\w+(?::-([^}]*)|:\?[^}]*)\}", lambda found: found[1] or "given", text)
    options = PyOptions()
    options.apply_merge = True
    read = options.from_yaml(text)
    read.validate()
    assert set(read.service_names()) == {"service", "agent", "prometheus", "alertmanager", "grafana"}


def program(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("digests", ["$4@sha256:0a", "<no value>"])
def test_images_of_others_are_pinned_by_digest_or_not_at_all(repository: Path, tmp_path: Path, digests: str) -> None:
    """With a stand-in for docker: no registry can be reached here."""
    folder = tmp_path / "compose"
    folder.mkdir()
    shutil.copy(repository / "deploy" / "compose" / "pin-images", folder)
    program(tmp_path / "bin" / "docker", f'[ "$1" = pull ] || echo "{digests}"')
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run([folder / "pin-images"], env=environment, capture_output=True, text=True, check=False)
    text = (repository / "deploy" / "compose" / "compose.yaml").read_text()
    asked = set(re.findall(r"\$\{(\w+_IMAGE):\?run ./pin-images", text))
    if "sha256" in digests:
        written = dict(line.split("=") for line in (folder / ".env").read_text().splitlines())
        assert set(written) == asked == {"PROMETHEUS_IMAGE", "ALERTMANAGER_IMAGE", "GRAFANA_IMAGE"}
        assert all(image.endswith("@sha256:0a") for image in written.values())
    else:
        assert done.returncode == 1
        assert "has no digest" in done.stderr
        assert not (folder / ".env").exists()


@pytest.mark.parametrize(
    ("package", "status", "said"),
    [
        ({"vulns": []}, 0, "1 pins looked at: 0 known weaknesses, 0 packages"),
        ({"vulns": [{"id": "CVE-1", "fix_versions": ["2"]}]}, 1, "x 1: CVE-1, fixed in 2"),
        ({"skip_reason": "not found"}, 2, "1 packages that could not be looked up"),
        (None, 2, "no advisories could be had"),
    ],
)
def test_an_audit_that_could_not_ask_does_not_pass(
    repository: Path, tmp_path: Path, package: dict[str, Any] | None, status: int, said: str
) -> None:
    """With a stand-in for pip-audit: no advisories can be reached here."""
    for name in ("tools", "requirements"):
        (tmp_path / name).mkdir()
    shutil.copy(repository / "tools" / "audit", tmp_path / "tools")
    (tmp_path / "requirements" / "x.txt").touch()
    answer = "" if package is None else json.dumps({"dependencies": [{"name": "x", "version": "1", **package}]})
    program(tmp_path / ".venv-audit" / "bin" / "pip-audit", f"echo '{answer}'")
    done = subprocess.run([tmp_path / "tools" / "audit"], capture_output=True, text=True, check=False)
    assert (done.returncode, said in done.stdout + done.stderr) == (status, True), done.stdout + done.stderr


def test_every_service_is_hardened_and_has_what_it_mounts(repository: Path, compose: dict[str, Any]) -> None:
    folder = repository / "deploy" / "compose"
    for name, service in compose["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert set(service.get("secrets", ())) <= set(compose["secrets"]), name
        for volume in service.get("volumes", ()):
            source = volume["source"] if isinstance(volume, dict) else volume.split(":")[0]
            if source.startswith("."):
                assert (folder / source).exists(), source
            elif not source.startswith(("$", "/")):
                assert source in compose["volumes"], source
        if name in ("service", "agent"):
            check_arguments(service["command"], where=f"compose {name}")


def test_compose_names_the_secrets_that_make_secrets_makes(
    repository: Path, compose: dict[str, Any], tmp_path: Path
) -> None:
    make_secrets(repository, tmp_path / "secrets", "service")
    for secret in compose["secrets"].values():
        assert (tmp_path / secret["file"]).exists()


def make_secrets(repository: Path, folder: Path, *names: str) -> None:
    subprocess.run([repository / "deploy" / "make-secrets", folder, *names], check=True, capture_output=True)


def test_make_secrets_replaces_nothing(repository: Path, tmp_path: Path) -> None:
    make_secrets(repository, tmp_path, "service")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    make_secrets(repository, tmp_path, "other")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    checked = subprocess.run(
        ["openssl", "verify", "-CAfile", "ca.pem", "-verify_hostname", "service", "service.pem"],
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    assert checked.returncode == 0


def test_make_secrets_says_what_to_do_with_an_authority_whose_key_is_elsewhere(
    repository: Path, tmp_path: Path
) -> None:
    make_secrets(repository, tmp_path / "own", "service")
    (tmp_path / "new").mkdir(mode=0o700)
    shutil.copy(tmp_path / "own" / "ca.pem", tmp_path / "new")
    command = [repository / "deploy" / "make-secrets", tmp_path / "new"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "put service.pem and service.key of your own authority there" in done.stderr
    for name in ("service.pem", "service.key"):
        shutil.copy(tmp_path / "own" / name, tmp_path / "new")
    make_secrets(repository, tmp_path / "new")
    assert (tmp_path / "new" / "agent.token").exists()


def test_prometheus_takes_the_configuration_of_compose(repository: Path, tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("needs promtool (Debian: apt install prometheus)")
    make_secrets(repository, tmp_path / "secrets", "service")
    text = (repository / "deploy" / "compose" / "prometheus.yml").read_text()
    (tmp_path / "prometheus.yml").write_text(text.replace("/run/secrets", str(tmp_path / "secrets")))
    for rules in ("ncclscope_recording.yml", "ncclscope_alerts.yml"):
        shutil.copy(repository / "deploy" / "prometheus" / rules, tmp_path)
    done = subprocess.run(
        ["promtool", "check", "config", "prometheus.yml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_data_source_of_compose_is_that_of_the_dashboards_with_another_address(repository: Path) -> None:
    own = yaml.safe_load((repository / "deploy" / "compose" / "grafana-datasource.yaml").read_text())
    theirs = (repository / "dashboards" / "provisioning" / "datasources" / "ncclscope.yaml").read_text()
    expected = yaml.safe_load(theirs)
    expected["datasources"][0]["url"] = "http://prometheus:9090"
    assert own == expected


@pytest.mark.deploy
def test_scripts_and_manifests_are_clean(repository: Path) -> None:
    scripts = [
        path
        for path in [*(repository / "deploy").rglob("*"), *(repository / "tools").iterdir()]
        if path.is_file() and re.match(rb"#!.*\b(ba)?sh\b", path.read_bytes()[:40])
    ]
    assert len(scripts) >= 3
    done = subprocess.run(
        [tool("shellcheck"), "--severity=warning", *scripts], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    manifests = [path for path in (repository / "deploy").rglob("*.y*ml") if "templates" not in path.parts]
    rules = "{extends: default, rules: {line-length: disable, document-start: disable, comments: disable, braces: disable, brackets: disable, indentation: {indent-sequences: whatever}}}"  # noqa: E501
    done = subprocess.run(
        [tool("yamllint"), "-s", "-d", rules, *manifests], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", _UNITS)
def test_systemd_takes_the_unit_and_finds_it_hardened(repository: Path, tmp_path: Path, name: str) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze (Debian: apt install systemd)")
    unit = tmp_path / name
    # The program is where a user installs it; here, any will do.
    unit.write_text(
        (repository / "deploy" / "systemd" / name).read_text().replace("/opt/ncclscope/bin/ncclscope", "/bin/true")
    )
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    told = [line for line in (done.stdout + done.stderr).splitlines() if name in line]
    assert done.returncode == 0 and not told, told  # noqa: PT018
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", unit],
        capture_output=True,
        text=True,
        check=False,
    )
    exposed = re.search(r"exposure level for \S+: ([\d.]+)", done.stdout)
    assert exposed is not None, done.stdout
    assert float(exposed[1]) <= _MOST_EXPOSED


@pytest.mark.parametrize("name", [name for name in _UNITS if "agent" in name])
def test_an_agent_that_stopped_itself_for_its_budget_is_not_started_again_at_once(repository: Path, name: str) -> None:
    unit = (repository / "deploy" / "systemd" / name).read_text()
    assert re.findall(r"^RestartPreventExitStatus=(\d+)$", unit, re.MULTILINE) == [str(OVER_BUDGET)]


def test_whatever_bounds_an_agents_memory_leaves_it_room_to_notice_first_and_say_so(
    repository: Path, compose: dict[str, Any]
) -> None:
    own_mib = AgentSettings().max_memory_bytes // 1024**2
    for name in _UNITS:
        if "agent" in name:
            unit = (repository / "deploy" / "systemd" / name).read_text()
            (limit,) = re.findall(r"^MemoryMax=(\d+)M$", unit, re.MULTILINE)
            assert int(limit) > own_mib, name
    assert int(compose["services"]["agent"]["mem_limit"].removesuffix("m")) > own_mib
    chart = yaml.safe_load((repository / "deploy" / "helm" / "ncclscope" / "values.yaml").read_text())
    sidecar = yaml.safe_load((repository / "deploy" / "kubernetes" / "examples" / "job.yaml").read_text())
    (agent,) = sidecar["spec"]["template"]["spec"]["initContainers"]
    for resources in (chart["daemonset"]["resources"], agent["resources"]):
        assert int(resources["limits"]["memory"].removesuffix("Mi")) > own_mib


def test_units_and_their_settings_name_what_is_there(repository: Path) -> None:
    folder = repository / "deploy" / "systemd"
    for name in _UNITS:
        text = (folder / name).read_text()
        (command,) = re.findall(r"^ExecStart=/opt/ncclscope/bin/ncclscope (.*)$", text, re.MULTILINE)
        check_arguments(command.split(), where=name)
        check_variables(re.findall(r"\b(NCCLSCOPE_\w+)=", text), where=name)
        (settings,) = re.findall(r"^EnvironmentFile=/etc/ncclscope/(\S+)$", text, re.MULTILINE)
        check_variables(re.findall(r"^(\w+)=", (folder / settings).read_text(), re.MULTILINE), where=settings)


def test_what_sends_left_spools_looks_where_the_agents_of_jobs_keep_theirs_as_the_same_user(repository: Path) -> None:
    folder = repository / "deploy" / "systemd"
    agent, sender = ((folder / f"ncclscope-{name}.service").read_text() for name in ("agent@", "spools"))
    for what in (r"--spool=(\S+)", r"^User=(.*)$", r"^StateDirectory=(.*)$"):
        told = [re.findall(what, text, re.MULTILINE) for text in (agent, sender)]
        assert told[0] == told[1], what
        assert len(told[0]) == 1, what
    (spool,) = re.findall(r"--spool=(\S+)", sender)
    assert f"ConditionDirectoryNotEmpty={spool}\n" in sender
    assert f"SuccessExitStatus={WAITS}\n" in sender


def test_systemd_takes_the_timer_of_what_sends_left_spools(repository: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze (Debian: apt install systemd)")
    for name in ("ncclscope-spools.service", "ncclscope-spools.timer"):
        text = (repository / "deploy" / "systemd" / name).read_text()
        (tmp_path / name).write_text(text.replace("/opt/ncclscope/bin/ncclscope", "/bin/true"))
    timer = tmp_path / "ncclscope-spools.timer"
    done = subprocess.run(["systemd-analyze", "verify", timer], capture_output=True, text=True, check=False)
    told = [line for line in (done.stdout + done.stderr).splitlines() if "ncclscope" in line]
    assert done.returncode == 0 and not told, told  # noqa: PT018


_DENIED = """
import ctypes, os, sys
# PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN: as MemoryDenyWriteExecute, kept over exec. Linux 6.3.
if ctypes.CDLL(None, use_errno=True).prctl(65, 1, 0, 0, 0):
    sys.exit(77)
os.execv(sys.executable, [sys.executable, "-m", "ncclscope", "agent", "--print", "--once", "--logs", "*.none"])
"""


def test_the_agent_runs_where_memory_may_not_be_written_and_executed(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", _DENIED], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode == 77:
        pytest.skip("this kernel cannot deny it")
    assert done.returncode == 0, done.stderr

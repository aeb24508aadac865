"""The commands of the pages on deploying: run where this machine can, and held against what there is where it cannot.

`docs/first-steps.md` is run as a whole, in an empty folder. Of the other pages every line is checked: the shell's
syntax, flags and subcommands of ncclscope, files of the checkout, scripts and folders; what would need a cluster,
a container engine or a running systemd is no more than that.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from deploy.flags import check_arguments, check_variables

_PAGES = ("deploy-kubernetes.md", "deploy-slurm.md", "deploy-systemd.md", "deploy-compose.md", "first-steps.md")
_LAUNCHERS = {"srun", "torchrun"}


def blocks(page: Path, language: str = "sh") -> list[str]:
    """The fenced blocks of a page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every command of a page, each part of a pipeline and of a loop by itself."""
    for block in blocks(page):
        for line in block.splitlines():
            yield from _commands_in(line)


def _commands_in(line: str) -> Iterator[list[str]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set(";&|()<>"):
            if words:
                yield words
            words = []
        elif words or word not in {"do", "until", "while", "for", "done", "then", "!"}:
            words.append(word)


def ncclscope_calls(words: list[str]) -> Iterator[list[str]]:
    """The arguments of each `ncclscope` in a command, also of one that another starts."""
    places = [at for at, word in enumerate(words) if re.fullmatch(r"(?:\S*/)?ncclscope", word)]
    for at in places:
        if at == 0 or words[at - 1] in {"--", *_LAUNCHERS} or words[0] == "exec":
            yield words[at + 1 :]


@pytest.mark.parametrize("name", _PAGES)
def test_every_command_of_a_page_is_one_that_there_is(repository: Path, name: str) -> None:
    page = repository / "docs" / name
    assert blocks(page)
    seen = 0
    for words in commands(page):
        if words[0] == "export":
            check_variables((word.partition("=")[0] for word in words[1:] if not _is_compose(word)), where=name)
        for call in ncclscope_calls(words):
            check_arguments(call, where=name)
            seen += 1
        for word in words:
            named = re.match(r"(?:\.\./)?((?:deploy|requirements)/[\w./@-]*|make-secrets)$", word)
            if named and not word.startswith("../../"):
                path = "deploy/make-secrets" if word.startswith("../make") else named[1]
                assert (repository / path).exists(), f"{name}: {word}"
    assert seen or name == "deploy-compose.md"


def _is_compose(word: str) -> bool:
    return bool(re.match(r"NCCLSCOPE_(SERVICE|AGENT)_IMAGE=", word))


@pytest.mark.parametrize("name", _PAGES)
def test_the_shell_takes_every_block_of_a_page(repository: Path, name: str) -> None:
    for block in blocks(repository / "docs" / name):
        done = subprocess.run(["bash", "-n"], input=block, text=True, capture_output=True, check=False)
        assert done.returncode == 0, block + done.stderr


def test_what_slurm_conf_needs_is_as_shipped(repository: Path) -> None:
    shipped = (repository / "deploy" / "slurm" / "slurm.conf.part").read_text()
    (shown,) = re.findall(r"^```\n(Prolog=.*?)^```", (repository / "docs" / "deploy-slurm.md").read_text(), re.M | re.S)
    assert shown in shipped


def test_the_files_of_slurm_and_systemd_land_where_their_scripts_and_units_look(
    repository: Path, tmp_path: Path
) -> None:
    root, copied = tmp_path / "root", tmp_path / "copied"
    subprocess.run([repository / "deploy" / "make-secrets", copied], check=True, capture_output=True)
    for name in ("deploy-systemd.md", "deploy-slurm.md"):
        for words in commands(repository / "docs" / name):
            if words[0] in ("install", "deploy/make-secrets"):
                moved = [str(root) + word if word.startswith(("/etc", "/var")) else word for word in words]
                # The group is made by the command above it, which would change this machine.
                moved = [word for at, word in enumerate(moved) if word != "-g" and moved[at - 1] != "-g"]
                # What the reader has copied from the machine of the service.
                moved = [str(copied / word) if word in ("ca.pem", "agent.token") else word for word in moved]
                subprocess.run(moved, cwd=repository, check=True, capture_output=True)
    for unit in (root / "etc" / "systemd" / "system").iterdir():
        text = unit.read_text()
        for path in re.findall(r"(?:EnvironmentFile=|LoadCredential=[\w.-]+:)(/\S+)", text):
            assert (root / path[1:]).exists(), f"{unit.name} looks for {path}"
    for path in re.findall(r"=(/etc/ncclscope/\S+)", (repository / "deploy" / "slurm" / "slurm.conf.part").read_text()):
        assert os.access(root / path[1:], os.X_OK), path
    assert (root / "etc" / "ncclscope" / "ncclscope-site.sh").exists()
    assert (root / "etc" / "ncclscope" / "agent.token").stat().st_mode & 0o777 == 0o600


def test_the_kustomization_of_the_page_builds(repository: Path, tmp_path: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl, for `kubectl kustomize`")
    (shown,) = (each for each in blocks(repository / "docs" / "deploy-kubernetes.md", "yaml") if "components:" in each)
    shutil.copytree(repository / "deploy" / "kubernetes", tmp_path / "deploy" / "kubernetes")
    folder = tmp_path / "mine" / "jobs"
    folder.mkdir(parents=True)
    (folder / "kustomization.yaml").write_text(shown)
    lists = {"initContainers": [], "volumes": [], "containers": [{"name": "pytorch", "env": [], "volumeMounts": []}]}
    roles = {role: {"replicas": 1, "template": {"spec": lists}} for role in ("Master", "Worker")}
    job = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": "mine"},
        "spec": {"pytorchReplicaSpecs": roles},
    }
    (folder / "train.yaml").write_text(yaml.safe_dump(job))
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "YOUR/ncclscope-agent:0.1.0" in done.stdout


@pytest.mark.deploy
def test_the_values_that_the_page_names_are_the_charts(repository: Path) -> None:
    import helm_python  # noqa: PLC0415

    values = yaml.safe_load((repository / "deploy" / "helm" / "ncclscope" / "values.yaml").read_text())
    text = (repository / "docs" / "deploy-kubernetes.md").read_text()
    for given in re.findall(r"--set ([\w.]+)=", text):
        inner = values
        for part in given.split("."):
            assert part in inner, given
            inner = inner[part]
    assert helm_python.lint(str(repository / "deploy" / "helm" / "ncclscope"), {})


_PORTS = (9797, 9798, 9090, 9093)


@pytest.mark.slow
def test_a_new_user_gets_from_nothing_to_a_firing_alert_by_the_pages_commands_alone(
    repository: Path, tmp_path: Path
) -> None:
    """In a copy of what is tracked, with an empty environment, and where it can be in a network of its own."""
    for program in ("prometheus", "prometheus-alertmanager", "curl", "git"):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program} (Debian: apt install prometheus prometheus-alertmanager curl git)")
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    files = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=repository,
        capture_output=True,
        check=True,
    ).stdout.decode()
    for name in filter(None, files.split("\0")):
        if (repository / name).exists():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(repository / name, checkout / name, follow_symlinks=False)
    install, *rest = blocks(repository / "docs" / "first-steps.md")
    environment = {
        name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "HTTP", "http"))
    }
    # The Python that runs the tests is the user's python3.
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").symlink_to(Path(sys.base_prefix) / "bin" / "python3")
    environment |= {"PATH": f"{tmp_path}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": str(tmp_path)}
    done = _bash(install, checkout, environment)
    assert "ncclscope, version" in done
    apart = ["unshare", "--net", "--"] if _may_unshare() else []
    if not apart and any(_is_taken(port) for port in _PORTS):
        pytest.skip("needs a network of its own (unshare --net), or these ports: " + ", ".join(map(str, _PORTS)))
    up = "ip link set lo up 2>/dev/null || true\n" if apart else ""
    printed = _bash(up + "\n".join(rest), checkout, environment, apart)
    assert '"kind":"late_rank"' in printed
    assert '"ranks":"1"' in printed
    assert "NCCL_DEBUG_TIMESTAMP_FORMAT" in printed


def _bash(script: str, folder: Path, environment: dict[str, str], before: list[str] | None = None) -> str:
    """What a script prints; it and all that it started are ended with it."""
    process = subprocess.Popen(
        [*(before or []), "bash", "-eu", "-c", script],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=840)
    except subprocess.TimeoutExpired:
        logs = "".join(f"\n== {log.name}\n" + log.read_text()[-800:] for log in sorted(folder.glob("*.log")))
        pytest.fail("the page's commands did not come to their end" + logs)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, printed
    return printed


def _may_unshare() -> bool:
    done = subprocess.run(["unshare", "--net", "--", "ip", "link", "set", "lo", "up"], capture_output=True, check=False)
    return done.returncode == 0


def _is_taken(port: int) -> bool:
    import socket  # noqa: PLC0415

    with socket.socket() as asked:
        return asked.connect_ex(("127.0.0.1", port)) == 0

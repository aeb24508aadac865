"""Manifests, kustomize components and the Helm chart: valid by schema, hardened, and about flags that exist.

No cluster is at hand: what an API server would say beyond its schemas is not known here.
"""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from deploy.flags import check_arguments

from ncclscope_agent.config import AgentSettings
from ncclscope_agent.nccl_settings.presets import preset
from ncclscope_service.app import ServiceSettings
from ncclscope_service.show.health import MAX_TICK_AGE_SECONDS

Yaml = dict[str, Any]
_VERSIONS: Final = ("1.29", "1.33")
"""Native sidecars are on from 1.29 on."""
_EXAMPLES: Final = ("job", "pytorchjob", "pytorchjob-capture", "jobset", "mpijob")
_REPLICAS: Final = {
    # *Source:* kubeflow/training-operator pkg/apis/kubeflow.org/v1, kubeflow/mpi-operator pkg/apis/kubeflow/v2beta1.
    "PyTorchJob": ("pytorchReplicaSpecs", {"nprocPerNode", "runPolicy", "elasticPolicy"}, {"Master", "Worker"}),
    "MPIJob": (
        "mpiReplicaSpecs",
        {"slotsPerWorker", "runPolicy", "sshAuthMountPath", "mpiImplementation", "launcherCreationPolicy"},
        {"Launcher", "Worker"},
    ),
}


def example(repository: Path, name: str) -> Yaml:
    loaded: Yaml = yaml.safe_load((repository / "deploy" / "kubernetes" / "examples" / f"{name}.yaml").read_text())
    return loaded


def templates_of(manifest: Yaml) -> Iterator[Yaml]:
    """The pod templates in an object of any of the kinds that are shipped."""
    spec = manifest.get("spec", {})
    if manifest["kind"] in _REPLICAS:
        field, _, _ = _REPLICAS[manifest["kind"]]
        yield from (replica["template"] for replica in spec[field].values())
    elif manifest["kind"] == "JobSet":
        yield from (each["template"]["spec"]["template"] for each in spec["replicatedJobs"])
    elif "template" in spec:
        yield spec["template"]


def ours_in(template: Yaml) -> Iterator[Yaml]:
    """The containers of a pod that run ncclscope."""
    spec = template["spec"]
    for container in [*spec.get("initContainers", ()), *spec["containers"]]:
        if "ncclscope" in container["image"]:
            yield container


def check_schema(manifest: Yaml) -> None:
    """Fails where Kubernetes' own schemas do not know something."""
    import kubernetes_validate  # noqa: PLC0415

    for version in _VERSIONS:
        kubernetes_validate.validate(manifest, version, strict=True)


def check_pod(template: Yaml, *, where: str) -> None:
    """Fails where our containers could do more than they need, or are told what they do not know."""
    volumes = {volume["name"]: volume for volume in template["spec"].get("volumes", ())}
    pod = template["spec"].get("securityContext", {})
    for container in ours_in(template):
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] is True
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert security.get("runAsNonRoot", pod.get("runAsNonRoot")) is True
        assert security.get("runAsUser", pod.get("runAsUser"))
        assert security.get("seccompProfile", pod.get("seccompProfile")) == {"type": "RuntimeDefault"}
        assert set(container["resources"]["limits"]) == {"memory"}
        check_arguments(container["args"], where=where)
        for mount in container["volumeMounts"]:
            assert mount["name"] in volumes or mount["name"] == "data", mount
            if mount["name"] in ("nccl-logs", "logs", "exports", "ncclscope-agent", "tls", "tokens", "secret"):
                assert mount["readOnly"] is True, mount
    for name, volume in volumes.items():
        if "emptyDir" in volume:
            assert "sizeLimit" in volume["emptyDir"], name


def test_the_files_are_what_their_generator_writes(repository: Path, tmp_path: Path) -> None:
    folder = repository / "deploy" / "kubernetes"
    target = folder if os.environ.get("NCCLSCOPE_UPDATE_GOLDEN") else tmp_path
    subprocess.run([sys.executable, folder / "generate", target], check=True)
    written = sorted(path.relative_to(target) for path in target.rglob("*.yaml"))
    assert written == sorted(path.relative_to(folder) for path in folder.rglob("*.yaml"))
    for path in written:
        assert (folder / path).read_text() == (target / path).read_text(), path


@pytest.mark.parametrize("name", _EXAMPLES)
def test_our_containers_in_an_example_are_hardened_and_told_what_they_know(repository: Path, name: str) -> None:
    templates = list(templates_of(example(repository, name)))
    for template in templates:
        check_pod(template, where=name)
    sidecars = [container for template in templates for container in ours_in(template)]
    assert any(container.get("restartPolicy") == "Always" for container in sidecars)


@pytest.mark.parametrize("name", _EXAMPLES)
def test_the_trainers_of_an_example_log_as_the_table_says_to_where_the_agent_reads(repository: Path, name: str) -> None:
    manifest = example(repository, name)
    wanted = preset(None, log_file="/var/log/nccl/nccl.%h.%p.log")
    for template in templates_of(manifest):
        (trainer, *_) = template["spec"]["containers"]
        given = {each["name"]: each["value"] for each in trainer.get("env", ())}
        if manifest["kind"] == "MPIJob":
            command = trainer["command"]
            given = dict(word.split("=", 1) for at, word in enumerate(command) if at and command[at - 1] == "-x")
            if command[0] != "mpirun":
                continue
        assert given == wanted


@pytest.mark.parametrize("name", ["pytorchjob", "mpijob"])
def test_a_job_of_kubeflow_has_fields_that_its_operator_knows(repository: Path, name: str) -> None:
    manifest = example(repository, name)
    field, others, roles = _REPLICAS[manifest["kind"]]
    assert set(manifest["spec"]) <= {field} | others
    assert set(manifest["spec"][field]) <= roles
    for replica in manifest["spec"][field].values():
        assert set(replica) <= {"replicas", "restartPolicy", "template"}


def test_the_helper_of_the_example_runs_the_trainers_own_command(repository: Path, tmp_path: Path) -> None:
    (plain, *_), (wrapped, *_) = (
        list(templates_of(example(repository, name))) for name in ("pytorchjob", "pytorchjob-capture")
    )
    helper = wrapped["spec"]["initContainers"][0]
    check_arguments(helper["args"], where="helper")
    command = wrapped["spec"]["containers"][0]["command"]
    assert command[command.index("--") + 1 :] == plain["spec"]["containers"][0]["command"]
    check_arguments(["capture", *command[2:]], where="trainer")
    # What the init container does, and then what the trainer does, where there is no nsys.
    done = subprocess.run(
        [sys.executable, "-m", "ncclscope", *helper["args"][:-1], str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == str(tmp_path / "capture.pyz")
    options = [f"--out={tmp_path}/exports", *command[3 : command.index("--")], "--nsys=none-here", "--"]
    done = subprocess.run(
        [sys.executable, "-I", tmp_path / "capture.pyz", *options, "sh", "-c", "echo trained; exit 3"],
        env={"PATH": os.environ["PATH"]},
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (3, "trained\n"), done.stderr


@pytest.mark.deploy
@pytest.mark.parametrize("name", _EXAMPLES)
def test_kubernetes_knows_every_field_of_the_pods_of_an_example(repository: Path, name: str) -> None:
    manifest = example(repository, name)
    if manifest["kind"] == "Job":
        check_schema(manifest)
    for template in templates_of(manifest):
        check_schema({"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template})


@pytest.mark.deploy
def test_a_misspelt_field_is_noticed(repository: Path) -> None:
    import kubernetes_validate  # noqa: PLC0415

    manifest = example(repository, "job")
    manifest["spec"]["template"]["spec"]["initContainers"][0]["restartPolicyy"] = "Always"
    with pytest.raises(kubernetes_validate.ValidationError):
        check_schema(manifest)


@pytest.mark.deploy
def test_jobset_knows_every_field_of_its_example(repository: Path) -> None:
    from kubeflow_trainer_api import models  # noqa: PLC0415

    manifest = example(repository, "jobset")
    read = models.JobsetV1alpha2JobSetSpec.from_dict(copy.deepcopy(manifest["spec"]))
    assert read is not None
    known = read.to_dict()
    known["replicatedJobs"][0].pop("template")
    expected = copy.deepcopy(manifest["spec"])
    expected["replicatedJobs"][0].pop("template")
    assert known == expected


def kustomized(folder: Path) -> list[Yaml]:
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl, for `kubectl kustomize`")
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.mark.parametrize("name", ["job", "pytorchjob", "jobset", "mpijob"])
def test_a_component_makes_of_a_bare_job_what_the_example_is(repository: Path, tmp_path: Path, name: str) -> None:
    expected = example(repository, name)
    bare = copy.deepcopy(expected)
    for template in templates_of(bare):
        spec = template["spec"]
        spec["initContainers"], spec["volumes"] = [], []
        spec["containers"][0] |= {"env": [], "volumeMounts": []}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(bare))
    component = tmp_path / "component"
    shutil.copytree(repository / "deploy" / "kubernetes" / "sidecar" / name, component)
    (tmp_path / "kustomization.yaml").write_text("resources: [job.yaml]\ncomponents: [component]\n")
    (made,) = kustomized(tmp_path)
    for template in (*templates_of(made), *templates_of(expected)):
        for container in template["spec"]["containers"]:
            for empty in ("env", "volumeMounts"):
                if not container.get(empty):
                    container.pop(empty, None)
        for empty in ("initContainers", "volumes"):
            if not template["spec"].get(empty):
                template["spec"].pop(empty, None)
    assert made == expected


def rendered(repository: Path, values: Yaml | None = None) -> list[Yaml]:
    import helm_python  # noqa: PLC0415

    chart = helm_python.Chart.load(str(repository / "deploy" / "helm" / "ncclscope"))
    try:
        texts = chart.render(values or {}, name="ncclscope", namespace="ncclscope")
    finally:
        chart.close()
    manifests = [each for name, text in texts.items() if name.endswith(".yaml") for each in yaml.safe_load_all(text)]
    return [each for each in manifests if each]


_VALUES: Final[dict[str, Yaml]] = {
    "default": {},
    "all": {
        "nameOverride": "watch",
        "service": {"publicUrl": "https://watch.example", "extraArgs": ["--tp=8"], "podLabels": {"team": "x"}},
        "daemonset": {"enabled": True},
        "monitoring": {"serviceMonitor": True, "labels": {"release": "prometheus"}},
        "networkPolicy": {
            "agents": [{"namespaceSelector": {}}],
            "http": [{"podSelector": {"matchLabels": {"a": "b"}}}],
        },
    },
    "open": {"security": {"insecure": True}, "daemonset": {"enabled": True}, "dashboards": {"enabled": False}},
}


@pytest.mark.deploy
@pytest.mark.parametrize("values", _VALUES.values(), ids=_VALUES)
def test_the_chart_gives_objects_that_kubernetes_and_the_operator_know(repository: Path, values: Yaml) -> None:
    from cloudcoil.models.prometheus_operator import v1  # noqa: PLC0415

    custom: dict[str, Any] = {
        "PodMonitor": v1.PodMonitor,
        "ServiceMonitor": v1.ServiceMonitor,
        "PrometheusRule": v1.PrometheusRule,
    }
    for manifest in rendered(repository, values):
        if manifest["kind"] in custom:
            custom[manifest["kind"]].model_validate(manifest)
        else:
            check_schema(manifest)
        for template in templates_of(manifest):
            check_pod(template, where=manifest["kind"])


@pytest.mark.deploy
def test_the_chart_lets_the_service_start_stop_and_be_reached_as_it_needs(repository: Path) -> None:
    made = rendered(repository, _VALUES["all"])
    (service,) = (each for each in made if each["kind"] == "StatefulSet")
    pod = service["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    # A stop is cut short by the kubelet only long after the service has given up by itself.
    assert pod["terminationGracePeriodSeconds"] >= 2 * ServiceSettings(version="0").stop_seconds
    # What asks whether a restart would help waits until the service has started, and bears one slow answer.
    assert container["startupProbe"]["httpGet"]["path"] == container["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    # They ask the port that is served while the service works.
    probes = [container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")]
    assert {each["port"] for each in probes} == {"probes"}
    starting = container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"]
    hanging = container["livenessProbe"]["periodSeconds"] * container["livenessProbe"]["failureThreshold"]
    assert min(starting, hanging) > MAX_TICK_AGE_SECONDS
    # Whatever it writes to is a volume: the root is read-only.
    written = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert written == {"/var/lib/ncclscope", "/tmp"}
    (data,) = (argument for argument in container["args"] if argument.startswith("--data="))
    assert data.startswith("--data=/var/lib/ncclscope/")
    # The policy names the ports that the container has, and the monitors one of the Service's.
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"agents": 9797, "http": 9798, "probes": 9799}
    (policy,) = (each for each in made if each["kind"] == "NetworkPolicy")
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    by_port = {rule["ports"][0]["port"]: rule["from"] for rule in policy["spec"]["ingress"]}
    assert by_port == {name: _VALUES["all"]["networkPolicy"][name] for name in ("agents", "http")}
    labels = service["spec"]["template"]["metadata"]["labels"]
    for each in made:
        spec: Yaml = each.get("spec", {})
        if each["kind"] in ("NetworkPolicy", "Service", "PodMonitor"):
            selector: Yaml = spec.get("podSelector") or spec["selector"]
            assert selector.get("matchLabels", selector).items() <= labels.items(), each["kind"]
        for endpoint in spec.get("podMetricsEndpoints") or spec.get("endpoints") or ():
            assert (endpoint["port"], endpoint["honorLabels"], endpoint["scheme"]) == ("http", True, "https")
    for each in made:
        if each["kind"] == "Service":
            assert all(port.get("targetPort", port["name"]) in ports for port in each["spec"]["ports"])


@pytest.mark.deploy
@pytest.mark.parametrize("opened", [None, "agents", "http"])
def test_nobody_may_connect_to_a_port_until_somebody_is_named(repository: Path, opened: str | None) -> None:
    peers = [{"ipBlock": {"cidr": "10.0.0.0/16"}}]
    values: Yaml = {"networkPolicy": {opened: peers}} if opened else {}
    (policy,) = (each for each in rendered(repository, values) if each["kind"] == "NetworkPolicy")
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    assert policy["spec"]["ingress"] == ([{"ports": [{"port": opened}], "from": peers}] if opened else [])


@pytest.mark.deploy
def test_an_agent_of_the_chart_stops_in_time_and_writes_to_volumes_only(repository: Path) -> None:
    (daemon,) = (each for each in rendered(repository, _VALUES["all"]) if each["kind"] == "DaemonSet")
    pod = daemon["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > AgentSettings().flush_seconds
    (agent,) = pod["containers"]
    written = {mount["mountPath"] for mount in agent["volumeMounts"] if not mount.get("readOnly")}
    (spool,) = (argument for argument in agent["args"] if argument.startswith("--spool="))
    assert any(spool.startswith(f"--spool={path}/") for path in written)


@pytest.mark.deploy
def test_the_chart_passes_helms_own_lint(repository: Path) -> None:
    import helm_python  # noqa: PLC0415

    found = helm_python.lint(str(repository / "deploy" / "helm" / "ncclscope"), {}, strict=True)
    told = [each for each in found.get("messages", ()) if "icon is recommended" not in str(each)]
    assert not told, told


@pytest.mark.deploy
def test_the_chart_has_the_objects_that_its_values_ask_for(repository: Path) -> None:
    def kinds(values: Yaml) -> set[str]:
        return {manifest["kind"] for manifest in rendered(repository, values)}

    base = {"StatefulSet", "Service"}
    every = base | {"PodMonitor", "PrometheusRule", "ConfigMap", "NetworkPolicy"}
    assert kinds({}) == every
    assert kinds(_VALUES["all"]) == every | {"DaemonSet", "ServiceMonitor"}
    off = {
        "monitoring": {"podMonitor": False, "rules": False},
        "dashboards": {"enabled": False},
        "networkPolicy": {"enabled": False},
    }
    assert kinds(off) == base


@pytest.mark.deploy
def test_the_rules_and_dashboards_of_the_chart_are_the_repositorys(repository: Path) -> None:
    manifests = rendered(repository)
    (rule,) = (each for each in manifests if each["kind"] == "PrometheusRule")
    prometheus = repository / "deploy" / "prometheus"
    groups = [
        group
        for name in ("ncclscope_recording.yml", "ncclscope_alerts.yml")
        for group in yaml.safe_load((prometheus / name).read_text())["groups"]
    ]
    assert rule["spec"]["groups"] == groups
    boards = {name: text for each in manifests if each["kind"] == "ConfigMap" for name, text in each["data"].items()}
    assert boards == {
        path.name: path.read_text().rstrip("\n")
        for path in (repository / "dashboards" / "grafana").glob("ncclscope-*.json")
    }


@pytest.mark.deploy
@pytest.mark.parametrize(
    "wrong",
    [
        {"service": {"replicas": 2}},
        {"service": {"image": {"repository": "x", "digest": "latest"}}},
        {"service": {"extraArgs": ["tp=8"]}},
        {"monitoring": {"interval": "often"}},
        {"security": {"insecure": "yes"}},
    ],
    ids=str,
)
def test_the_chart_refuses_values_that_are_wrong(repository: Path, wrong: Yaml) -> None:
    import helm_python  # noqa: PLC0415

    with pytest.raises(helm_python.HelmError):
        rendered(repository, wrong)

"""Who may import whom, and which modules decide and therefore may not act."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ncclscope_service.keep import service_state
from ncclscope_service.store.state import known_to

_ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = {
    "ncclscope_wire": _ROOT / "agents" / "ncclscope_wire",
    "ncclscope_agent": _ROOT / "agents" / "ncclscope_agent",
    "ncclscope_capture": _ROOT / "agents" / "ncclscope_capture",
    "ncclscope_service": _ROOT / "service" / "ncclscope_service",
    "ncclscope_simulator": _ROOT / "simulator" / "ncclscope_simulator",
    "ncclscope_models": _ROOT / "models" / "ncclscope_models",
    "ncclscope": _ROOT / "command" / "ncclscope",
}
_MAY_IMPORT = {
    "ncclscope_wire": set[str](),
    "ncclscope_agent": {"ncclscope_wire"},
    # Put beside a trainer alone.
    "ncclscope_capture": set[str](),
    # Formulas: what they say has to hold without anything that was observed.
    "ncclscope_models": set[str](),
    "ncclscope_service": {"ncclscope_wire", "ncclscope_models"},
    # The simulator checks the others: what it shared with them, it could not check.
    "ncclscope_simulator": set[str](),
    "ncclscope": {
        "ncclscope_wire",
        "ncclscope_agent",
        "ncclscope_capture",
        "ncclscope_service",
        "ncclscope_simulator",
        "ncclscope_models",
    },
}
_ACTING = {
    "ncclscope_capture": {"__main__", "capture", "chunks", "cycle", "job"},
    "ncclscope_agent": {
        "app",
        "config",
        "credentials",
        "files.exports",
        "files.flight_dumps",
        "files.finding",
        "files.logs",
        "files.reading",
        "following",
        "health",
        "printed",
        "left_spools",
        "link.network",
        "files.paths",
        "priority",
        "files.release",
        "spool.database",
        "spool.directory",
        "spool.keeper",
        "files.watch",
        "node.asked",
        "node.dcgm",
        "node.machine_port",
        "node.nvml",
        "node.ras_port",
        "sources.kineto.batches",
        "sources.nsys.open_export",
        "sources.nsys.export",
        "sources.nsys.nvtx_payload",
        "sources.nsys.reader_process",
        "sources.nsys.report",
    },
    "ncclscope_service": {
        "app",
        "keep.archive",
        "auth.credentials",
        "serve.http_connections",
        "serve.http_server",
        "keep.journal",
        "serve.listen",
        "serve.live",
        "keep.persistence",
        "serve.routes",
        "serve.snapshots",
        "keep.restoring",
        "serve.views",
        "serve.apprise_sender",
        "serve.notify",
        "serve.otlp",
        "export.tables.communicators_file",
        "export.comparison",
        "export.directory",
        "export.tables.expected_times_file",
        "export.tables.iterations_file",
        "export.tables.kernels_file",
        "export.tables.operations_file",
        "export.report.page",
        "export.tables.traffic_file",
        "web",
    },
}
"""The shells. Every other module of wire, agent and service decides, and is held to `_FORBIDDEN`."""

_LAYERS = {
    "ncclscope_agent": (
        "budget",
        "sources",
        "nccl_settings",
        "credentials",
        "files",
        "link",
        "node",
        "spool",
        "health",
        "printed",
        "priority",
        "config",
        "app",
        "following",
        "left_spools",
    ),
    "ncclscope_service": (
        "columns",
        "nccl",
        "store",
        "rollup",
        "auth",
        "intake",
        "align",
        "number",
        "join",
        "clock",
        "measure",
        "job",
        "detect",
        "pipeline",
        "export",
        "show",
        "metrics",
        "keep",
        "serve",
        "app",
    ),
}
"""Packages within a package, and modules beside them: each may import only those before it."""

_FORBIDDEN = {
    "anyio",
    "asyncio",
    "logging",
    "os",
    "pathlib",
    "random",
    "socket",
    "sqlite3",
    "structlog",
    "subprocess",
    "threading",
    "time",
    "uvicorn",
    "watchdog",
}
_BASE_DEPENDENCIES = {"anyio", "click", "msgpack", "msgspec", "numpy", "orjson", "prometheus_client", "structlog"} | {
    "watchdog"
}


def _modules(package: str) -> Iterator[tuple[str, Path]]:
    folder = _PACKAGES[package]
    for path in sorted(folder.rglob("*.py")):
        name = ".".join(path.relative_to(folder).with_suffix("").parts)
        yield name.removesuffix(".__init__") if name != "__init__" else "", path


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            found.add(node.module.split(".")[0])
    return found


def _imported_at_once(path: Path) -> Iterator[str]:
    """What a module imports when it is imported itself."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module


@pytest.mark.parametrize("package", sorted(_PACKAGES))
def test_a_package_imports_only_the_layers_below_it(package: str) -> None:
    for name, path in _modules(package):
        ours = _imports(path) & set(_PACKAGES) - {package}
        assert ours <= _MAY_IMPORT[package], f"{package}.{name} imports {ours - _MAY_IMPORT[package]}"


def _imported_layers(package: str, path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            top, *below = node.module.split(".")
            if top == package:
                found.update(below[:1] or [alias.name for alias in node.names])
    return found


@pytest.mark.parametrize(("package", "layer"), [(package, layer) for package in _LAYERS for layer in _LAYERS[package]])
def test_a_layer_imports_only_those_before_it(package: str, layer: str) -> None:
    layers = _LAYERS[package]
    above = set(layers[layers.index(layer) + 1 :])
    for name, path in _modules(package):
        if name.split(".")[0] == layer:
            upward = _imported_layers(package, path) & above
            assert not upward, f"{package}.{name} imports from {sorted(upward)}, which come after {layer}"


@pytest.mark.parametrize("package", _LAYERS)
def test_every_module_is_in_a_layer_of_the_list(package: str) -> None:
    found = {name.split(".")[0] for name, _ in _modules(package)} - {"", "web"}
    assert found == set(_LAYERS[package])


@pytest.mark.parametrize(
    "package", ["ncclscope_wire", "ncclscope_agent", "ncclscope_capture", "ncclscope_models", "ncclscope_service"]
)
def test_what_decides_does_not_act(package: str) -> None:
    acting = _ACTING.get(package, set())
    for name, path in _modules(package):
        if name in acting:
            continue
        forbidden = _imports(path) & _FORBIDDEN
        assert not forbidden, f"{package}.{name} decides, so it may not import {sorted(forbidden)}"


@pytest.mark.parametrize("package", ["ncclscope_agent", "ncclscope_capture", "ncclscope_service"])
def test_the_list_of_shells_names_modules_that_exist(package: str) -> None:
    existing = {name for name, _ in _modules(package)}
    assert _ACTING[package] - {"web"} <= existing


def test_what_a_state_may_name_decides_and_does_not_act() -> None:
    modules = {name.partition(":")[0].removeprefix("ncclscope_service.") for name in known_to(service_state.__name__)}
    assert "pipeline" in modules
    assert not modules & _ACTING["ncclscope_service"]


@pytest.mark.parametrize("package", ["ncclscope_wire", "ncclscope_agent", "ncclscope_simulator"])
def test_what_runs_on_a_node_needs_only_the_base_install(package: str) -> None:
    allowed = _BASE_DEPENDENCIES | set(sys.stdlib_module_names) | set(_PACKAGES)
    for name, path in _modules(package):
        extra = _imports(path) - allowed
        if package == "ncclscope_simulator":
            extra -= {"pyarrow"}  # only its truth file needs it, and says so
        assert not extra, f"{package}.{name} imports {sorted(extra)}, which the base install lacks"


def test_the_models_need_numpy_alone() -> None:
    for name, path in _modules("ncclscope_models"):
        extra = {"scipy", "sklearn", "threadpoolctl"} if name == "residual" else set[str]()
        assert _imports(path) <= set(sys.stdlib_module_names) | {"ncclscope_models", "numpy"} | extra, name
        assert not {each.split(".")[0] for each in _imported_at_once(path)} & extra, f"{name} is imported without them"


def test_what_runs_beside_a_trainer_needs_only_its_python_of_310_or_newer() -> None:
    for name, path in _modules("ncclscope_capture"):
        assert _imports(path) <= set(sys.stdlib_module_names) | {"ncclscope_capture"}, name
        ast.parse(path.read_text(), feature_version=(3, 10))

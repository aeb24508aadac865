"""Who may import whom, and which modules decide and therefore may not act."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = {
    "ncclscope_wire": _ROOT / "agents" / "ncclscope_wire",
    "ncclscope_agent": _ROOT / "agents" / "ncclscope_agent",
    "ncclscope_capture": _ROOT / "agents" / "ncclscope_capture",
    "ncclscope_service": _ROOT / "service" / "ncclscope_service",
    "ncclscope_simulator": _ROOT / "simulator" / "ncclscope_simulator",
    "ncclscope": _ROOT / "command" / "ncclscope",
}
_MAY_IMPORT = {
    "ncclscope_wire": set[str](),
    "ncclscope_agent": {"ncclscope_wire"},
    # Put beside a trainer alone.
    "ncclscope_capture": set[str](),
    "ncclscope_service": {"ncclscope_wire"},
    # The simulator checks the others: what it shared with them, it could not check.
    "ncclscope_simulator": set[str](),
    "ncclscope": {"ncclscope_wire", "ncclscope_agent", "ncclscope_capture", "ncclscope_service", "ncclscope_simulator"},
}
_ACTING = {
    "ncclscope_capture": {"__main__", "capture", "chunks", "cycle", "job", "launching"},
    "ncclscope_agent": {
        "app",
        "config",
        "credentials",
        "exports",
        "files",
        "following",
        "health",
        "left_spools",
        "link",
        "paths",
        "priority",
        "release",
        "spool_files",
        "spool_keeper",
        "watch",
        "sources.nsys_complete",
        "sources.nsys_export",
        "sources.nsys_json",
        "sources.nsys_report",
    },
    "ncclscope_service": {
        "app",
        "archive",
        "child",
        "credentials",
        "data_folder",
        "detail_routes",
        "disk_probe",
        "http_access",
        "http_door",
        "journal",
        "last_time",
        "listen",
        "live",
        "persistence",
        "routes",
        "runbooks",
        "snapshot_shelf",
        "snapshot_zip",
        "stopped",
        "web_files",
        "webhook",
        "export.chrome_trace",
        "export.communicators_file",
        "export.compare_file",
        "export.directory",
        "export.efficiency_file",
        "export.iterations_file",
        "export.kernels_file",
        "export.operations_file",
        "export.parquet",
        "export.perfetto_trace",
        "export.report",
        "export.traffic_file",
        "web",
    },
}
"""The shells. Every other module of wire, agent and service decides, and is held to `_FORBIDDEN`."""

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


@pytest.mark.parametrize("package", sorted(_PACKAGES))
def test_a_package_imports_only_the_layers_below_it(package: str) -> None:
    for name, path in _modules(package):
        ours = _imports(path) & set(_PACKAGES) - {package}
        assert ours <= _MAY_IMPORT[package], f"{package}.{name} imports {ours - _MAY_IMPORT[package]}"


@pytest.mark.parametrize("package", ["ncclscope_wire", "ncclscope_agent", "ncclscope_capture", "ncclscope_service"])
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


@pytest.mark.parametrize("package", ["ncclscope_wire", "ncclscope_agent", "ncclscope_simulator"])
def test_what_runs_on_a_node_needs_only_the_base_install(package: str) -> None:
    allowed = _BASE_DEPENDENCIES | set(sys.stdlib_module_names) | set(_PACKAGES)
    for name, path in _modules(package):
        extra = _imports(path) - allowed
        if package == "ncclscope_simulator":
            extra -= {"pyarrow"}  # only its truth file needs it, and says so
        assert not extra, f"{package}.{name} imports {sorted(extra)}, which the base install lacks"


def test_what_runs_beside_a_trainer_needs_only_its_python_of_310_or_newer() -> None:
    for name, path in _modules("ncclscope_capture"):
        assert _imports(path) <= set(sys.stdlib_module_names) | {"ncclscope_capture"}, name
        ast.parse(path.read_text(), feature_version=(3, 10))

"""The scrape configuration for a service with TLS and tokens: Prometheus takes it, and it asks as the service wants."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

_FOLDER = Path("deploy") / "prometheus"


def test_it_is_the_open_one_with_tls_and_a_token(repository: Path) -> None:
    plain = yaml.safe_load((repository / _FOLDER / "prometheus.yml").read_text())
    secured = yaml.safe_load((repository / _FOLDER / "prometheus-tls.yml").read_text())
    (job,) = secured["scrape_configs"]
    assert job.pop("scheme") == "https"
    assert job.pop("tls_config") == {"ca_file": "ca.pem"}
    assert job.pop("authorization") == {"type": "Bearer", "credentials_file": "reader.token"}
    assert secured == plain


def test_prometheus_takes_it(repository: Path, tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("needs the program promtool (Debian: apt install prometheus)")
    shutil.copytree(repository / _FOLDER, tmp_path / "p")
    (tmp_path / "p" / "ca.pem").write_text("")
    (tmp_path / "p" / "reader.token").write_text("x")
    done = subprocess.run(
        ["promtool", "check", "config", "--syntax-only", "prometheus-tls.yml"],
        cwd=tmp_path / "p",
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr

"""Certificates for tests, made by openssl: a CA, and who it signed."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True, slots=True)
class Authority:
    """A CA in a folder of its own."""

    folder: Path

    @property
    def path(self) -> Path:
        """Its certificate."""
        return self.folder / "ca.pem"

    def sign(self, name: str) -> tuple[Path, Path]:
        """Certificate and key of somebody on this machine."""
        key, request, cert = (self.folder / f"{name}.{kind}" for kind in ("key", "csr", "pem"))
        names = self.folder / f"{name}.names"
        names.write_text(f"subjectAltName=DNS:{name},DNS:localhost,IP:127.0.0.1\n")
        _key(key)
        _openssl("req", "-new", "-key", str(key), "-subj", f"/CN={name}", "-out", str(request))
        ca, ca_key = str(self.path), str(self.folder / "ca.key")
        _openssl(
            *("x509", "-req", "-in", str(request), "-CA", ca, "-CAkey", ca_key, "-CAcreateserial", "-days", "2"),
            *("-extfile", str(names), "-out", str(cert)),
        )
        return cert, key


def make_authority(folder: Path) -> Authority:
    """A new CA; skips the test where there is no openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the program openssl (Debian: apt install openssl)")
    folder.mkdir(parents=True, exist_ok=True)
    _key(folder / "ca.key")
    _openssl(
        *("req", "-x509", "-new", "-key", str(folder / "ca.key"), "-subj", f"/CN={folder.name}", "-days", "2"),
        *("-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign"),
        *("-out", str(folder / "ca.pem")),
    )
    return Authority(folder)


def _key(path: Path) -> None:
    _openssl("ecparam", "-genkey", "-name", "prime256v1", "-noout", "-out", str(path))


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=120)

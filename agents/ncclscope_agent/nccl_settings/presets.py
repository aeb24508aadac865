"""The variables of `advice.wanted` in the forms that job scripts, prologs, manifests and configuration files take.

If NCCL's version is not known there is one preset that serves all: names that old versions do not know are ignored
by them, and it has none that the newest does not know, since from 2.30.7 on one such name turns the log off.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from ncclscope_agent.nccl_settings.advice import DEFAULT_LOG_FILE, NcclVersion, export_lines, wanted

_SERVES_ALL: Final = NcclVersion(2, 26, 3)
"""Its variables are understood by 2.30.7, and by older ones as far as they go. It lacks DESTROY: from 2.30.3 on
the end of communicators is not printed."""


_PYTORCH: Final = {"TORCH_CPP_LOG_LEVEL": "INFO"}
"""PyTorch prints names and communicators of its process groups to stderr. *Source:* ProcessGroupNCCL.cpp,
c10/util/Logging.cpp."""


class Form(StrEnum):
    """How the variables are written."""

    SH = "sh"
    """Lines for a shell: `eval "$(ncclscope env)"`."""
    FISH = "fish"
    TASK_PROLOG = "task-prolog"
    """Lines for Slurm's TaskProlog to print. *Source:* slurm.conf(5): `export NAME=value`, without quotes."""
    PLAIN = "plain"
    """NAME=value: `docker run --env-file`, systemd's EnvironmentFile and NCCL_CONF_FILE."""
    KUBERNETES = "kubernetes"
    """The list `env` of a container."""
    JSON = "json"


def preset(version: NcclVersion | None, *, log_file: str = DEFAULT_LOG_FILE, calls: bool = False) -> dict[str, str]:
    """The variables for a version, in order; None: those that serve all versions.

    PyTorch's is among them: without it its process groups have no names.
    """
    return {**wanted(version or _SERVES_ALL, log_file=log_file, calls=calls), **_PYTORCH}


def written(variables: Mapping[str, str], form: Form) -> str:
    """The variables as text in that form, with a last line end."""
    if form is Form.JSON:
        return json.dumps(dict(variables), indent=2) + "\n"
    lines: list[str] = []
    for name, value in variables.items():
        match form:
            case Form.SH:
                lines += export_lines({name: value})
            case Form.FISH:
                lines.append(f"set -gx {name} {shlex.quote(value)}")
            case Form.TASK_PROLOG:
                lines.append(f"export {name}={value}")
            case Form.PLAIN:
                lines.append(f"{name}={value}")
            case Form.KUBERNETES:
                lines += [f"- name: {name}", f"  value: {json.dumps(value)}"]
    return "\n".join(lines) + "\n"


def glob_of(log_file: str) -> str:
    """The glob that finds the files which NCCL makes of a pattern for NCCL_DEBUG_FILE."""
    parts = re.split(r"(%.)", log_file)
    known = {"%h": "*", "%p": "*", "%%": "%"}
    return "".join(known.get(part) or re.sub(r"([*?[])", r"[\1]", part) for part in parts)

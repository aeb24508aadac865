"""Differences between NCCL versions, as one table: `traits("2.21.5")`.

Sources are NCCL's own files at the release tags; each field names its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SHORT_FORMS: Final[dict[str, str]] = {
    "2.8": "2.8.4",
    "2.9": "2.9.9",
    "2.10": "2.10.3",
    "2.11": "2.11.4",
    "2.12": "2.12.12",
    "2.13": "2.13.4",
    "2.14": "2.14.3",
    "2.15": "2.15.5",
    "2.16": "2.16.5",
    "2.17": "2.17.1",
    "2.18": "2.18.3",
    "2.19": "2.19.3",
    "2.20": "2.20.5",
    "2.21": "2.21.5",
    "2.22": "2.22.3",
    "2.23": "2.23.4",
    "2.24": "2.24.3",
    "2.25": "2.25.1",
    "2.26": "2.26.6",
    "2.27": "2.27.7",
    "2.28": "2.28.3",
    "2.29": "2.29.2",
    "2.30": "2.30.7",
}
"""The full version that one without its last number stands for."""

Version = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """How one NCCL version logs and launches."""

    text: str
    """The version as NCCL prints it, for instance `2.21.5`."""
    version: Version
    cuda: str
    """The CUDA that NCCL's version line names beside itself."""
    op_count: str
    """The plans that move opCount: `never`, `network` (plans with proxy work) or `plan` (every plan).
    Source: NCCL src/proxy.cc ncclProxyStart."""
    counts_beside_graphs: bool
    """Plain plans without network work move opCount while a CUDA graph with NCCL work is alive; not in 2.13 to 2.23,
    where they go through a host callback then. Source: NCCL src/enqueue.cc ncclLaunchPrepare, persistentRefs."""
    every_replay_counts: bool
    """A replay moves opCount without network work too (2.12). Source: src/enqueue.cc hostStreamPlanTask."""
    pointer_of_send: str
    """The column in which a Send shows its buffer: `send` up to 2.11, `recv` from 2.12. Source: src/enqueue.cc."""
    bytes_logged: bool
    """AllGather and Broadcast log bytes and datatype 0. Source: src/misc/argcheck.cc, src/enqueue.cc up to 2.21.5."""
    tuning: str
    """The TUNING line: `none`, `bare`, `named` or `channels`. Source: src/enqueue.cc getAlgoInfo."""
    kernel_names: str
    """`ncclKernel` up to 2.18, `ncclDevKernel` from 2.19. Source: src/device/generate.py."""
    launch_api: str
    """The launch call that CUPTI sees. Source: src/enqueue.cc ncclLaunchKernel."""
    launch_event_class: int
    """nsys event class of that call: 0 runtime API, 1 driver API."""
    own_stream: bool
    """NCCL launches on a stream of its own (2.13 and 2.14). Source: src/enqueue.cc ncclLaunchPrepare."""
    splits: bool
    """ncclCommSplit exists (2.18)."""
    all_to_all: bool
    """ncclAlltoAll exists (2.28)."""
    all_gather_v: bool
    """Broadcasts of one group with several roots run as AllGatherV (2.29). Source: src/enqueue.cc."""
    bfloat16: bool
    average: bool
    version_line: str
    """`stdout` without prefix up to 2.21.5, `info` from 2.22. Source: src/init.cc showVersion."""
    timestamps: bool
    """The log can carry time stamps (2.26.2). Source: src/debug.cc."""
    calls: bool
    """CALL lines exist (2.13)."""
    nested_p2p_groups: bool
    """ncclSend and ncclRecv open a group of their own, seen in CALL lines (up to 2.22)."""
    destroys: bool
    """Destroy lines exist (2.12)."""
    nvlink_switch: float
    """NVLink GB/s per GPU that NCCL assumes for the machine of that time. Source: src/graph/topo.h."""


def parse_version(text: str) -> Version:
    """The version that `2.21.5` or the short form `2.21` names.

    Raises:
        ValueError: the text is no version from 2.8 to 2.30.
    """
    full = SHORT_FORMS.get(text, text)
    parts = full.split(".")
    if len(parts) != 3 or not all(part.isdigit() for part in parts):
        raise ValueError(f"NCCL version {text!r} is not one such as 2.21.5 or 2.21")
    version = (int(parts[0]), int(parts[1]), int(parts[2]))
    if not (2, 8, 0) <= version <= (2, 30, 99):
        raise ValueError(f"NCCL version {text!r} is not simulated: 2.8 to 2.30 are")
    return version


def traits(text: str) -> Traits:
    """How a version logs and launches.

    Raises:
        ValueError: as `parse_version`.
    """
    version = parse_version(text)
    minor = version[1]
    return Traits(
        text=".".join(map(str, version)),
        version=version,
        cuda="11.1" if minor < 10 else "11.8" if minor < 18 else "12.4" if minor < 27 else "12.9",
        op_count=_op_count(minor),
        counts_beside_graphs=not 13 <= minor <= 23,
        every_replay_counts=minor == 12,
        pointer_of_send="send" if minor < 12 else "recv",
        bytes_logged=minor < 22,
        tuning=_tuning(minor),
        kernel_names="ncclKernel" if minor < 19 else "ncclDevKernel",
        launch_api=_launch_api(minor),
        launch_event_class=0 if minor < 22 else 1,
        own_stream=minor in {13, 14},
        splits=version >= (2, 18, 1),
        all_to_all=version >= (2, 28, 3),
        all_gather_v=minor >= 29,
        bfloat16=version >= (2, 10, 3),
        average=minor >= 10,
        version_line="stdout" if minor < 22 else "info",
        timestamps=version >= (2, 26, 2),
        calls=minor >= 13,
        nested_p2p_groups=minor < 23,
        destroys=version >= (2, 12, 7),
        nvlink_switch=240.0 if minor < 18 else 370.8,
    )


def _op_count(minor: int) -> str:
    if minor == 8:
        return "never"
    return "network" if minor < 12 or minor >= 27 else "plan"


def _tuning(minor: int) -> str:
    if minor < 20:
        return "none"
    return "bare" if minor < 23 else "named" if minor < 24 else "channels"


def _launch_api(minor: int) -> str:
    if minor < 16:
        return "cudaLaunchKernel_v7000"
    return "cudaLaunchKernelExC_v11060" if minor < 22 else "cuLaunchKernelEx"

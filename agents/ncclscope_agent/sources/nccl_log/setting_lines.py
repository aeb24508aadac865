# ruff: noqa: E501  a pattern is as long as the line that it reads
"""Lines about what a job wants equal on its ranks: environment, configuration, versions, NICs, plug-ins, the machine.

*Source:* NCCL `src/misc/param.cc` and `src/param/` (environment), `src/init.cc` (versions, configuration),
`src/transport/net_ib.cc`,
`src/transport/net_socket.cc`, `src/net.cc` and `src/plugin/*.cc` (plugins), `src/graph/paths.cc` (GPUDirect),
`src/graph/topo.cc` (affinity, NICs), `src/transport/nvls.cc`, `src/bootstrap.cc`, `src/transport.cc` (CollNet);
aws-ofi-nccl prints the `NET/OFI` lines, `sharp_plugin.c` of nccl-rdma-sharp-plugins those about SHARP.
"""

from __future__ import annotations

import re
from typing import Final

from ncclscope_agent.sources.nccl_log.line_form import Family, Fields, forms
from ncclscope_wire import facts

_TEXT: Final = r"[\x20-\x7e]"
_WORD: Final = r"[\w.+-]{1,64}"


def _setting(fields: Fields) -> Fields:
    """An integer parameter ends with a full stop, a text has none."""
    value = str(fields["value"])
    return {**fields, "value": value[:-1] if re.fullmatch(r"-?\d+\.", value) else value}


def _enabled(fields: Fields) -> Fields:
    return {**fields, "is_enabled": str(fields.pop("enabled")).lower() == "enabled"}


def _devices(fields: Fields) -> Fields:
    """`[0]mlx5_0:1/IB [1]={[0] mlx5_1:1/IB, [1] mlx5_2:1/IB}`, `[0]eth0:10.0.0.17<0>`: the names."""
    found = _DEVICE_NAME.findall(str(fields["devices"]))
    return {**fields, "devices": ["+".join(_MERGED_NAME.findall(merged)) or single for merged, single in found]}


_DEVICE: Final = r"\[\d+\](?:=\{[^{}]{1,400}\}|\S+(?: (?!\[)\S+:\d+<\d+>)?)"
_DEVICE_NAME: Final = re.compile(r"\[\d+\](?:=\{([^{}]{1,400})\}|([\w.-]{1,64}(?::\d{1,3}(?=/))?)\S*)")
_MERGED_NAME: Final = re.compile(r"\[\d+\] ?([\w.-]{1,64}(?::\d{1,3})?)")

_KINDS: Final = ("NET/", "TUNER/", "PROFILER/", "ENV/", "GIN/", "RMA/")
_PLUGIN: Final = r"(?P<kind>NET|TUNER|PROFILER|ENV|GIN|RMA)/Plugin ?: "
_LOADED: Final = {"event": "loaded"}

FAMILIES: Final[tuple[Family, ...]] = (
    *forms(
        "environment",
        facts.EnvironmentSetting,
        r"(?P<variable>NCCL_\w{1,100}) set (?:by environment )?to (?P<value>[^\x00]{0,1000})",
        finish=_setting,
    ),
    *forms(
        "environment",
        facts.EnvironmentSetting,
        rf"NET/Plugin: Plugin name set by env to (?P<value>{_TEXT}{{1,400}})",
        fixed={"variable": "NCCL_NET_PLUGIN"},
    ),
    *forms(
        "environment",
        facts.EnvironmentSetting,
        r"NET/OFI (?:Running on \S{1,40} platform, )?Setting (?P<variable>\w{1,100})"
        rf" environment variable to (?P<value>{_TEXT}{{1,400}})",
    ),
    *(
        family
        for what, pattern in (
            ("git", r"NCCL git version (?:[\w./-]{1,100} )?(?P<version>[0-9a-f]{6,40}(?:-dirty)?)"),
            ("cuda_driver", r"cudaDriverVersion (?P<version>\d{4,6})"),
            ("aws-ofi-nccl", r"NET/OFI (?:Using|Initializing) aws-ofi-nccl (?P<version>[\w.-]{1,64})"),
            ("libfabric", r"NET/OFI Using Libfabric version (?P<version>[\w.-]{1,64})"),
            ("device_plugin", r"Using non-device net plugin version (?P<version>\d{1,4})"),
        )
        for family in forms("build", facts.BuildSeen, pattern, fixed={"what": what})
    ),
    *forms(
        "network",
        facts.NetworkChosen,
        rf"Using network (?P<network>[A-Za-z]{_TEXT}{{0,80}})",
        r"NET/OFI Selected [Pp]rovider is (?P<network>[\w;-]{1,64})(?:,? ?\(found \d+ nics\)|)",
    ),
    *forms(
        "network_devices",
        facts.NetworkDevices,
        rf"NET/(?P<network>{_WORD}) : Using (?P<devices>{_DEVICE}(?: {_DEVICE})*) ?(?:\[RO\])? ?; OOB \S{{1,200}}",
        rf"NET/(?P<network>Socket|FastSocket) : Using (?P<devices>{_DEVICE}(?: {_DEVICE})*)",
        finish=_devices,
    ),
    *forms(
        "gpu_direct",
        facts.GpuDirect,
        r"GPU Direct RDMA (?P<enabled>Enabled|Disabled) for (?:GPU )?[\w:.-]{1,32} / HCA [\w:.-]{1,32}"
        r" \(distance \d+ (?:<=|>) \d+\)(?:, read \d(?: mode \w{1,32})?)?",
        r"GPU Direct RDMA (?P<enabled>Enabled|Disabled) for GPU/\d+-\d+ \(rank \d+\) - NET/\d+-\d+ \("
        r"(?: using PXN via GPU/\d+-\d+, )?distance \d+ (?:<=|>) \d+(?:, read \d, mode \w{1,32})?\)",
        rf"NET/{_WORD} : GPU Direct RDMA (?P<enabled>Enabled|Disabled) for"
        r" (?:GPU \d+\[[0-9a-f]+\] / )?HCA \d+ '[^']{1,100}'(?: \([^()]{1,200}\))?",
        rf"NET/{_WORD} : GPU Direct RDMA \([\w-]{{1,40}}\) (?P<enabled>enabled|disabled) for HCA \d+ '[^']{{1,100}}'?",
        finish=_enabled,
    ),
    *forms("gpu_direct", facts.GpuDirect, r"DMA-BUF is not available on GPU device \d+", fixed={"is_enabled": False}),
    *forms("gpu_direct", facts.GpuDirect, r"DMA-BUF is available on GPU device \d+", fixed={"is_enabled": True}),
    # Plugins
    *forms(
        "plugin",
        facts.PluginSeen,
        _PLUGIN + r"Could not find: [\w. -]{1,200}?(?:\. Using internal [\w ]{1,40}\.|\.)?",
        _PLUGIN
        + rf"(?:dlerror={_TEXT}{{1,400}}? )?No plugin found(?: \([\w.-]{{1,100}}\))?(?:\.|, using internal implementation)",
        starts=_KINDS,
        fixed={"event": "not_found"},
    ),
    *forms(
        "plugin",
        facts.PluginSeen,
        _PLUGIN + rf"Plugin load \([\w./-]{{1,200}}\) returned \d+ : {_TEXT}{{1,300}}",
        starts=_KINDS,
        fixed={"event": "failed"},
    ),
    *forms(
        "plugin",
        facts.PluginSeen,
        _PLUGIN + r"Failed to find nccl[A-Za-z]{1,60}?(?:_v\d+)?(?: symbol)?"
        rf"(?:\.|, using internal \w{{1,20}} instead\.| \(>= v\d+\)\.{_TEXT}{{0,120}})",
        starts=_KINDS,
        fixed={"event": "no_symbol"},
    ),
    *forms(
        "plugin",
        facts.PluginSeen,
        r"(?:NET|TUNER|PROFILER)/Plugin ?: Loaded (?P<kind>net|collnet|tuner|profiler|gin|rma) plugin"
        rf" (?P<name>{_TEXT}{{1,100}}?) \(v\d+\)",
        starts=_KINDS,
        fixed=_LOADED,
        finish=lambda fields: {**fields, "kind": str(fields["kind"]).upper()},
    ),
    *forms(
        "plugin",
        facts.PluginSeen,
        _PLUGIN + rf"Using (?P<name>{_TEXT}{{1,100}}?) \(v\d+\)",
        starts=_KINDS,
        fixed=_LOADED,
    ),
    *forms(
        "plugin",
        None,
        _PLUGIN.replace("?P<kind>", "?:")
        + r"Closing (?:tuner: |(?:env|profiler|net|collnet|gin|rma) plugin )[\w' .-]{1,100}",
        starts=_KINDS,
    ),
    *forms(
        "plugin", None, r"Retrieving state (?:\d+ )?for [\w. -]{1,80}", r"Initialized state (?:\d+ )?for [\w. -]{1,80}"
    ),
    *forms(
        "plugin",
        facts.PluginSeen,
        r"(?P<event>Initialized|Assigned|Failed to initialize) (?P<kind>NET|GIN|RMA) plugin (?P<name>[\w. -]{1,80}?)(?: to comm)?",
        starts=("Initialized ", "Assigned ", "Failed to init"),
        finish=lambda fields: {**fields, "event": str(fields["event"]).split(maxsplit=1)[0].lower()},
    ),
    *forms(
        "plugin",
        facts.PluginSeen,
        r"Failed to initialize any (?P<kind>NET|GIN|RMA) plugin",
        fixed={"event": "failed"},
    ),
    *forms(
        "plugin",
        facts.PluginSeen,
        r"Successfully loaded external (?:(?P<kind>network|tuner|profiler) )?plugin (?P<library>\S{1,400})",
        fixed=_LOADED,
        finish=lambda fields: {
            **fields,
            "kind": {"tuner": "TUNER", "profiler": "PROFILER"}.get(str(fields.get("kind")), "NET"),
        },
    ),
    *forms(
        "plugin",
        facts.PluginSeen,
        r"Plugin Path : (?P<library>\S{1,400})",
        fixed={"kind": "NET", "event": "named"},
    ),
    *forms(
        "plugin",
        facts.PluginSeen,
        rf"P2P plugin (?:v\d+ )?(?P<name>{_WORD})",
        fixed={"kind": "P2P", "event": "loaded"},
    ),
    *forms(
        "plugin",
        facts.PluginSeen,
        rf"Error: network {_TEXT}{{1,80}} not found\.",
        fixed={"kind": "NET", "event": "not_found"},
    ),
    *forms(
        "path_not_used",
        facts.PathNotUsed,
        rf"NET/\w{{1,20}} ?: ?(?P<reason>SHARP (?:coll )?init error: {_TEXT}{{1,300}})",
        r"(?P<reason>Cannot initialize CollNet, using point-to-point network instead)",
        fixed={"path": "CollNet"},
    ),
)
"""Forms about network and machine, in the order in which they are tried."""

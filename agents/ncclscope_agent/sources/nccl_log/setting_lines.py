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

from ncclscope_agent.sources.nccl_log.line_form import Family, Fields, form
from ncclscope_wire import facts

_TEXT: Final = r"[\x20-\x7e]"
_WORD: Final = r"[\w.+-]{1,64}"


def _setting(fields: Fields) -> Fields:
    """An integer parameter ends with a full stop, a text has none."""
    value = str(fields["value"])
    is_integer = re.fullmatch(r"-?\d+\.", value) is not None
    return {**fields, "value": value[:-1] if is_integer else value, "is_integer": is_integer}


def _enabled(fields: Fields) -> Fields:
    return {**fields, "is_enabled": str(fields.pop("enabled")).lower() == "enabled"}


_PLUGIN_KIND: Final = r"(?P<kind>NET|TUNER|PROFILER|ENV|GIN|RMA)/Plugin ?: "

FAMILIES: Final[tuple[Family, ...]] = (
    form(
        "environment",
        facts.EnvironmentSetting,
        "NCCL_",
        r"(?P<variable>NCCL_\w{1,100}) set (?:by environment )?to (?P<value>[^\x00]{0,1000})",
        finish=_setting,
    ),
    form(
        "environment",
        facts.EnvironmentSetting,
        "NET/Plugin",
        rf"NET/Plugin: Plugin name set by env to (?P<value>{_TEXT}{{1,400}})",
        fixed={"variable": "NCCL_NET_PLUGIN", "is_integer": False},
    ),
    form(
        "environment",
        facts.EnvironmentSetting,
        "NET/OFI ",
        rf"NET/OFI (?:Running on (?P<platform>\S{{1,40}}) platform, )?Setting (?P<variable>\w{{1,100}})"
        rf" environment variable to (?P<value>{_TEXT}{{1,400}})",
        fixed={"is_integer": False},
        finish=lambda fields: {name: value for name, value in fields.items() if name != "platform"},
    ),
    form(
        "build",
        facts.BuildSeen,
        "NCCL git",
        r"NCCL git version (?:(?P<branch>[\w./-]{1,100}) )?(?P<version>[0-9a-f]{6,40}(?:-dirty)?)",
        fixed={"what": "git"},
    ),
    form(
        "build",
        facts.BuildSeen,
        "cudaDriverVersion",
        r"cudaDriverVersion (?P<version>\d{4,6})",
        fixed={"what": "cuda_driver"},
    ),
    form(
        "build",
        facts.BuildSeen,
        "NET/OFI ",
        r"NET/OFI (?:Using|Initializing) aws-ofi-nccl (?P<version>[\w.-]{1,64})",
        fixed={"what": "aws-ofi-nccl"},
    ),
    form(
        "build",
        facts.BuildSeen,
        "NET/OFI ",
        r"NET/OFI Using Libfabric version (?P<version>[\w.-]{1,64})",
        fixed={"what": "libfabric"},
    ),
    form(
        "build",
        facts.BuildSeen,
        "Using ",
        r"Using non-device net plugin version (?P<version>\d{1,4})",
        fixed={"what": "device_plugin"},
    ),
    form("network", facts.NetworkChosen, "Using network", rf"Using network (?P<network>[A-Za-z]{_TEXT}{{0,80}})"),
    form(
        "network",
        facts.NetworkChosen,
        "NET/OFI ",
        r"NET/OFI Selected [Pp]rovider is (?P<network>[\w;-]{1,64})(?:,? ?\(found (?P<nics>\d+) nics\)|)",
    ),
    form(
        "gpu_direct",
        facts.GpuDirect,
        "GPU Direct",
        r"GPU Direct RDMA (?P<enabled>Enabled|Disabled) for (?:GPU (?P<gpu>[\w:.-]{1,32})|(?P<gpu2>[\w:.-]{1,32}))"
        r" / HCA (?P<nic>[\w:.-]{1,32})"
        r" \(distance (?P<distance>\d+) (?:<=|>) (?P<limit>\d+)\)(?:, read (?P<read>\d)(?: mode (?P<mode>\w{1,32}))?)?",
        finish=lambda fields: _enabled({("gpu" if name == "gpu2" else name): value for name, value in fields.items()}),
    ),
    form(
        "gpu_direct",
        facts.GpuDirect,
        "GPU Direct",
        r"GPU Direct RDMA (?P<enabled>Enabled|Disabled) for (?P<gpu>GPU/\d+-\d+) \(rank (?P<rank>\d+)\) - (?P<nic>NET/\d+-\d+) \("
        r"(?: using PXN via (?P<via>GPU/\d+-\d+), )?distance (?P<distance>\d+) (?:<=|>) (?P<limit>\d+)"
        r"(?:, read (?P<read>\d), mode (?P<mode>\w{1,32}))?\)",
        finish=_enabled,
        is_closed=True,
    ),
    form(
        "gpu_direct",
        facts.GpuDirect,
        "NET/",
        rf"NET/(?P<network>{_WORD}) : GPU Direct RDMA (?P<enabled>Enabled|Disabled) for"
        r" (?:GPU (?P<gpu>\d+)\[[0-9a-f]+\] / )?HCA (?P<nic>\d+) '(?P<nic_name>[^']{1,100})'(?: \((?P<reason>[^()]{1,200})\))?",
        finish=_enabled,
    ),
    form(
        "gpu_direct",
        facts.GpuDirect,
        "NET/",
        rf"NET/(?P<network>{_WORD}) : GPU Direct RDMA \((?P<means>[\w-]{{1,40}})\) (?P<enabled>enabled|disabled)"
        r" for HCA (?P<nic>\d+) '(?P<nic_name>[^']{1,100})'?",
        finish=_enabled,
    ),
    form(
        "gpu_direct",
        facts.GpuDirect,
        "DMA-BUF",
        r"DMA-BUF is (?P<no>not )?available on GPU device (?P<gpu>\d+)",
        fixed={"means": "DMA-BUF"},
        finish=lambda fields: {**fields, "is_enabled": fields.pop("no", None) is None},
    ),
    # Plugins
    form(
        "plugin",
        facts.PluginSeen,
        ("NET/", "TUNER/", "PROFILER/", "ENV/", "GIN/", "RMA/"),
        _PLUGIN_KIND + r"Could not find: (?P<library>[\w. -]{1,200}?)(?:\. Using internal [\w ]{1,40}\.|\.)?",
        fixed={"event": "not_found"},
    ),
    form(
        "plugin",
        facts.PluginSeen,
        ("NET/", "TUNER/", "PROFILER/"),
        _PLUGIN_KIND
        + rf"(?:dlerror={_TEXT}{{1,400}}? )?"
        + r"No plugin found(?: \((?P<library>[\w.-]{1,100})\))?(?:\.|, using internal implementation)",
        fixed={"event": "not_found"},
        is_closed=True,
    ),
    form(
        "plugin",
        facts.PluginSeen,
        ("NET/", "TUNER/", "PROFILER/"),
        _PLUGIN_KIND + rf"Plugin load \((?P<library>[\w./-]{{1,200}})\) returned (?P<state>\d+) : {_TEXT}{{1,300}}",
        fixed={"event": "failed"},
    ),
    form(
        "plugin",
        facts.PluginSeen,
        ("NET/", "TUNER/", "PROFILER/", "GIN/", "RMA/"),
        _PLUGIN_KIND + r"Failed to find (?P<name>nccl[A-Za-z]{1,60}?)(?:_v(?P<version>\d+))?(?: symbol)?"
        rf"(?:\.|, using internal \w{{1,20}} instead\.| \(>= v\d+\)\.{_TEXT}{{0,120}})",
        fixed={"event": "no_symbol"},
    ),
    form(
        "plugin",
        facts.PluginSeen,
        ("NET/", "TUNER/", "PROFILER/"),
        r"(?:NET|TUNER|PROFILER)/Plugin ?: Loaded (?P<kind>net|collnet|tuner|profiler|gin|rma) plugin"
        rf" (?P<name>{_TEXT}{{1,100}}?) \(v(?P<version>\d+)\)",
        fixed={"event": "loaded"},
        finish=lambda fields: {**fields, "kind": str(fields["kind"]).upper()},
        is_closed=True,
    ),
    form(
        "plugin",
        facts.PluginSeen,
        ("TUNER/", "PROFILER/", "ENV/"),
        _PLUGIN_KIND + rf"Using (?P<name>{_TEXT}{{1,100}}?) \(v(?P<version>\d+)\)",
        fixed={"event": "loaded"},
        is_closed=True,
    ),
    form(
        "plugin",
        facts.PluginSeen,
        ("TUNER/", "PROFILER/", "ENV/", "NET/"),
        _PLUGIN_KIND + r"Closing (?:tuner: |(?:env|profiler|net|collnet|gin|rma) plugin )(?P<name>[\w' .-]{1,100})",
        fixed={"event": "closed"},
        finish=lambda fields: {**fields, "name": str(fields["name"]).strip("'")},
    ),
    form(
        "plugin",
        facts.PluginSeen,
        ("Initialized ", "Assigned ", "Failed to init"),
        r"(?P<event>Initialized|Assigned|Failed to initialize) (?P<kind>NET|GIN|RMA) plugin (?P<name>[\w. -]{1,80}?)(?: to comm)?",
        finish=lambda fields: {**fields, "event": str(fields["event"]).split(maxsplit=1)[0].lower()},
    ),
    form(
        "plugin",
        facts.PluginSeen,
        "Failed to init",
        r"Failed to initialize any (?P<kind>NET|GIN|RMA) plugin",
        fixed={"event": "failed"},
        is_closed=True,
    ),
    form(
        "plugin",
        facts.PluginSeen,
        "Successfully loaded",
        r"Successfully loaded external (?:(?P<kind>network|tuner|profiler) )?plugin (?P<library>\S{1,400})",
        fixed={"event": "loaded"},
        finish=lambda fields: {
            **fields,
            "kind": {"tuner": "TUNER", "profiler": "PROFILER"}.get(str(fields.get("kind")), "NET"),
        },
    ),
    form(
        "plugin",
        facts.PluginSeen,
        "Plugin Path",
        r"Plugin Path : (?P<library>\S{1,400})",
        fixed={"kind": "NET", "event": "named"},
    ),
    form(
        "plugin",
        facts.PluginSeen,
        "P2P plugin",
        rf"P2P plugin (?:v(?P<version>\d+) )?(?P<name>{_WORD})",
        fixed={"kind": "P2P", "event": "loaded"},
    ),
    form(
        "plugin",
        facts.PluginSeen,
        ("Retrieving state", "Initialized state"),
        r"(?:Retrieving|Initialized) state (?:(?P<state>\d+) )?for (?P<name>[\w. -]{1,80})",
        fixed={"kind": "NET", "event": "state"},
    ),
    form(
        "plugin",
        facts.PluginSeen,
        "Error: network",
        rf"Error: network (?P<name>{_TEXT}{{1,80}}) not found\.",
        fixed={"kind": "NET", "event": "not_found"},
        is_closed=True,
    ),
    form(
        "path_not_used",
        facts.PathNotUsed,
        "NET/",
        rf"NET/\w{{1,20}} ?: ?(?P<reason>SHARP (?:coll )?init error: {_TEXT}{{1,300}})",
        fixed={"path": "CollNet"},
    ),
    form(
        "path_not_used",
        facts.PathNotUsed,
        "Cannot init",
        r"(?P<reason>Cannot initialize CollNet, using point-to-point network instead)",
        fixed={"path": "CollNet"},
        is_closed=True,
    ),
    # The machine
)
"""Forms about network and machine, in the order in which they are tried."""

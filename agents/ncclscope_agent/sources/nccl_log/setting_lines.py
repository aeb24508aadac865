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

_IB_DEVICE: Final = re.compile(r"(\S+?):(\d+)/(\w+(?:/\w+)*)")
_DEVICES: Final = re.compile(r"\[(\d+)\](=\{[^{}]{1,400}\}|\S+(?: \S+?:\d+<\d+>)?)")
_TEXT: Final = r"[\x20-\x7e]"
_WORD: Final = r"[\w.+-]{1,64}"


def _devices(text: str) -> list[Fields] | None:
    """`[0]mlx5_0:1/IB [1]eth0:10.0.0.1<0>`, and of merged NICs `[0]={[0] mlx5_0:1/IB,[1] mlx5_1:1/IB}`."""
    devices: list[Fields] = []
    at = 0
    text = text.strip()
    while at < len(text):
        found = _DEVICES.match(text, at)
        if found is None:
            return None
        index, name = found.groups()
        device: Fields = {"index": int(index)}
        if name.startswith("="):
            device["name"] = name[2:-1]
        elif (link := _IB_DEVICE.fullmatch(name)) is not None:
            device.update(name=link[1], port=int(link[2]), link=link[3])
        else:
            interface, colon, address = name.partition(":")
            device["name"] = interface
            if colon:
                device["address"] = address
        devices.append(device)
        at = found.end()
        while text[at : at + 1] == " ":
            at += 1
    return devices


def _network_devices(fields: Fields) -> Fields | None:
    text = str(fields.pop("list", "") or "")
    fields["relaxed_ordering"] = "[RO]" in text
    devices = _devices(text.replace("[RO]", ""))
    return None if devices is None else {**fields, "devices": devices}


def _addresses(fields: Fields) -> Fields | None:
    text = str(fields.pop("list"))
    devices = _devices(text if text.startswith("[") else f"[0]{text}")
    return {**fields, "devices": devices} if devices else None


def _matrix(fields: Fields) -> Fields:
    for name in ("protocols", "algorithms"):
        fields[name] = str(fields[name]).split()
    return fields


def _setting(fields: Fields) -> Fields:
    """An integer parameter ends with a full stop, a text has none."""
    value = str(fields["value"])
    is_integer = re.fullmatch(r"-?\d+\.", value) is not None
    return {**fields, "value": value[:-1] if is_integer else value, "is_integer": is_integer}


def _enabled(fields: Fields) -> Fields:
    return {**fields, "is_enabled": str(fields.pop("enabled")).lower() == "enabled"}


MATRIX_HEADER: Final = re.compile(rb"     Function \|(?: +[A-Za-z0-9]+)+ *\|(?: +[A-Za-z0-9]+)+ *\|?\s*")
"""The first continuation line of the matrix of functions, protocols and algorithms (2.24 on)."""
MATRIX_ROW: Final = form(
    "function_matrix",
    facts.FunctionMatrix,
    "",
    r" *(?P<function>[A-Z]\w{1,30}) \|(?P<protocols>(?: +\d){1,8}) *\|(?P<algorithms>(?: +\d){1,16}) *\|?",
    finish=_matrix,
)
"""The other continuation lines."""

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
    form(
        "network_devices",
        facts.NetworkDevices,
        "NET/",
        rf"NET/(?P<network>{_WORD}) : Using (?P<list>{_TEXT}{{0,1000}}?) ?; OOB (?P<out_of_band>\S{{1,200}})",
        finish=_network_devices,
    ),
    form(
        "network_devices",
        facts.NetworkDevices,
        "NET/",
        rf"NET/(?P<network>Socket|IB) : Using (?P<list>\[{_TEXT}{{1,1000}})",
        finish=_network_devices,
    ),
    form(
        "network_devices",
        facts.NetworkDevices,
        "NET/",
        rf"NET/(?P<network>{_WORD}) : No device found\.",
        is_closed=True,
    ),
    form("network", facts.NetworkChosen, "Using network", rf"Using network (?P<network>[A-Za-z]{_TEXT}{{0,80}})"),
    form(
        "network",
        facts.NetworkChosen,
        "NET/OFI ",
        r"NET/OFI Selected [Pp]rovider is (?P<network>[\w;-]{1,64})(?:,? ?\(found (?P<nics>\d+) nics\)|)",
    ),
    form(
        "bootstrap",
        facts.BootstrapAddress,
        "Bootstrap",
        rf"Bootstrap ?: Using (?P<list>{_TEXT}{{1,400}})",
        finish=_addresses,
    ),
    form(
        "nic",
        facts.NicSeen,
        "NET/",
        r"NET/(?P<network>IB) ?: Made virtual device \[(?P<device>\d+)\] name=(?P<name>\S{1,200})"
        r" speed=(?P<speed_mbps>\d+) ndevs=(?P<merged>\d+)",
    ),
    form(
        "nic",
        facts.NicSeen,
        "NET/",
        r"NET/(?P<network>IB) ?: \[(?P<device>\d+)\] (?P<name>[\w.-]{1,64})(?::\w{1,64})?:(?P<port>\d+)/(?P<link>\w{1,20})"
        r" provider=(?P<provider>\w{1,40}) speed=(?P<speed_mbps>\d+) context=0x[0-9a-f]{1,16}"
        r" pciPath=(?P<pci_path>\S{1,400})(?: ar=\d)?",
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
        "comm_config",
        facts.CommunicatorSetting,
        "Comm config",
        r"Comm config (?P<name>\w{1,64}) set to (?P<value>-?\d+)",
    ),
    form("comm_config", facts.CommunicatorSetting, "Comm config", r"Comm config (?P<name>\w{1,64}) (?P<value>-?\d+)"),
    form(
        "comm_config",
        facts.CommunicatorSetting,
        "Check P2P",
        r"Check P2P Type (?:is)?(?P<name>[A-Za-z]\w{1,40}) (?P<value>\d+) directMode (?P<second_value>\d+)(?: \w{1,40} \d+)?",
    ),
    form(
        "comm_config",
        facts.CommunicatorSetting,
        "CC O",
        r"CC (?P<state>Off|On)(?:, Multi-GPU CC (?:Off|On))?, (?P<name>workFifoBytes) (?P<value>\d+)",
        finish=lambda fields: {**fields, "second_value": int(fields.pop("state") == "On")},
    ),
    form(
        "comm_config",
        facts.CommunicatorSetting,
        "Symmetric VA",
        r"Symmetric VA size=(?P<value>\d+)GB",
        fixed={"name": "symmetric_va_gigabytes"},
        is_closed=True,
    ),
    form(
        "comm_config",
        facts.CommunicatorSetting,
        "P2P Chunksize",
        r"P2P Chunksize set to (?P<value>\d+)",
        fixed={"name": "p2p_chunk_bytes"},
    ),
    form(
        "launch_mode",
        facts.CommunicatorSetting,
        "Launch mode",
        r"Launch mode (?P<mode>Parallel|Group/CGMD|Group)",
        finish=lambda fields: {
            **fields,
            "name": f"launch_mode_{str(fields.pop('mode')).lower().replace('/', '_')}",
            "value": 1,
        },
    ),
    form(
        "comm_config",
        facts.CommunicatorSetting,
        "Using ",
        r"Using (?P<value>\d+) threads, Min Comp Cap (?P<second_value>\d+), Trees (?:enabled|disabled)[\x20-\x7e]{0,60}",
        fixed={"name": "threads"},
    ),
    form(
        "mnnvl",
        facts.MultiNodeNvlink,
        "MNNVL ",
        r"MNNVL (?P<mnnvl>\d+) cliqueId (?P<clique_id_hex>(?:0x)?[0-9a-f]{1,16}) cliqueSize (?P<clique_size>\d+)"
        r" cliqueRank (?P<clique_rank>-?\d+)(?: nvlDomainSize (?P<nvl_domain_size>\d+))?",
    ),
    form(
        "mnnvl",
        facts.MultiNodeNvlink,
        "MNNVL ",
        r"MNNVL busId (?P<bus_id_hex>0x[0-9a-f]{1,16}) fabric UUID (?P<fabric>[0-9a-f]{1,16}\.[0-9a-f]{1,16})"
        r" cliqueId (?P<clique_id_hex>0x[0-9a-f]{1,16}) state (?P<state>\d+) healthMask (?P<health_mask_hex>0x[0-9a-f]{1,16})",
    ),
    form(
        "nvls",
        facts.NvlsSupport,
        "NVLS multicast",
        r"NVLS multicast support is (?P<no>not )?available on dev (?P<device>\d+)(?: \(NVLS_NCHANNELS (?P<channels>\d+)\))?",
        finish=lambda fields: {**fields, "is_available": fields.pop("no", None) is None},
    ),
    form(
        "comm_config",
        facts.CommunicatorSetting,
        "",
        r"(?P<function>\w{1,40}): (?P<name>tuner chunk size) (?P<value>\d+) exceeds buffer max (?P<second_value>\d+), clamping",
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
    form(
        "affinity",
        facts.CpuAffinity,
        "Setting affinity",
        r"Setting affinity for GPU (?P<gpu>\d+) to (?P<cpus>[0-9a-f,-]{1,1000})",
    ),
    form(
        "affinity",
        facts.CpuAffinity,
        "ncclTopoGetCpuAffinity",
        r"ncclTopoGetCpuAffinity: Affinity for GPU (?P<gpu>\d+) is (?P<cpus>[0-9,-]{1,1000}|empty, ignoring)\."
        r" \(GPU affinity = (?P<gpu_cpus>[0-9,-]{0,1000}) ; CPU affinity = (?P<allowed_cpus>[0-9,-]{0,1000})\)\.",
        is_closed=True,
    ),
)
"""Forms about network and machine, in the order in which they are tried."""

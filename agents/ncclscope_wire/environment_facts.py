"""What NCCL's log says of where it runs: variables, builds, network devices, plug-ins, machines."""

from __future__ import annotations

from dataclasses import dataclass

from ncclscope_wire.fact import Fact, Name, Number, Rank, Signed, Text


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSetting(Fact):
    """One variable that NCCL took from the environment."""

    variable: Name
    value: Text
    is_integer: bool
    """NCCL read it as an integer: it says so with a full stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionMatrix(Fact):
    """What NCCL_ALGO and NCCL_PROTO leave enabled for one function (2.24 on); 0, 1 or 2 as printed."""

    function: Name
    protocols: tuple[Number, ...]
    algorithms: tuple[Number, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSeen(Fact):
    """A version other than NCCL's own number: the git commit, the driver, a plugin's library."""

    what: Name
    """git, cuda_driver, libfabric, aws-ofi-nccl, device_plugin."""
    version: Name
    branch: Name | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkDevice:
    """One NIC, or several merged into one."""

    index: Number
    name: Text
    port: Number | None = None
    link: Name | None = None
    """IB, RoCE and what follows it, as printed."""
    address: Text | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkDevices(Fact):
    """The NICs that a network found; none is possible."""

    network: Name
    devices: tuple[NetworkDevice, ...] = ()
    relaxed_ordering: bool = False
    out_of_band: Text | None = None
    """Interface and address of the bootstrap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NicSeen(Fact):
    """One NIC as a network found it: its speed in Mbit/s, its place on the PCI bus."""

    network: Name
    device: Number
    name: Text
    speed_mbps: Number | None = None
    port: Number | None = None
    link: Name | None = None
    provider: Name | None = None
    pci_path: Text | None = None
    merged: Number | None = None
    """How many NICs make up this virtual one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePair(Fact):
    """One connected InfiniBand queue pair."""

    device: Number
    port: Number
    queue_pair: Number
    mtu: Number
    lid: Number | None = None
    gid: Number | None = None
    ib_device: Number | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkChosen(Fact):
    """Which network a communicator uses, or the provider below it."""

    network: Name
    nics: Number | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapAddress(Fact):
    """Interfaces and addresses of the bootstrap."""

    devices: tuple[NetworkDevice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDirect(Fact):
    """Whether GPUDirect RDMA is possible between a GPU and a NIC, or a NIC and the driver."""

    is_enabled: bool
    network: Name | None = None
    gpu: Name | None = None
    """As printed: bus id up to 2.23, rank up to 2.28, topology id later."""
    rank: Rank | None = None
    via: Name | None = None
    """PXN: the GPU whose NIC is used."""
    nic: Name | None = None
    nic_name: Name | None = None
    distance: Number | None = None
    limit: Number | None = None
    read: Number | None = None
    mode: Name | None = None
    means: Name | None = None
    """nvidia-peermem, DMABUF, DMA-BUF."""
    reason: Text | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSeen(Fact):
    """What became of a plugin."""

    kind: Name
    """NET, TUNER, PROFILER, ENV, GIN, RMA, COLLNET, P2P."""
    event: Name
    """loaded, not_found, no_symbol, initialized, assigned, failed, closed, named, state."""
    name: Text | None = None
    version: Number | None = None
    library: Text | None = None
    state: Signed | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuAffinity(Fact):
    """The CPUs that a GPU's threads are bound to, as printed: a mask or a list."""

    gpu: Number
    cpus: Text
    gpu_cpus: Text | None = None
    allowed_cpus: Text | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSeen(Fact):
    """A remark of the topology's discovery that is not part of the topology block."""

    step: Name
    name: Text | None = None
    value: Text | None = None
    number: Signed | None = None
    second_number: Signed | None = None
    numbers: tuple[Signed, ...] = ()

# ruff: noqa: N815  # NVML's names
"""GPUs of this machine by NVML, through nvidia-ml-py if that is installed.

*Source:* NVML `nvml.h`; names of the functions as nvidia-ml-py has them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Final, Protocol, TypeVar, cast

from ncclscope_agent.sources.machine import GpuReading, bus_id_of

_LINKS: Final = 18
"""NVLinks of a GPU at most (NVML_NVLINK_MAX_LINKS)."""
_ECC_UNCORRECTED, _ECC_VOLATILE = 1, 0
_SM_CLOCK: Final = 1
_XID: Final = 8
"""nvmlEventTypeXidCriticalError."""
_XIDS_AT_ONCE: Final = 64
_Value = TypeVar("_Value")


class _PciInfo(Protocol):
    busId: str | bytes


class _Event(Protocol):
    device: object
    eventData: int


class Pynvml(Protocol):
    """Functions of the module `pynvml` that are used. All raise NVMLError; an old driver may lack some."""

    NVMLError: type[Exception]

    nvmlInit: Callable[[], None]
    nvmlDeviceGetCount: Callable[[], int]
    nvmlDeviceGetHandleByIndex: Callable[[int], object]
    nvmlDeviceGetIndex: Callable[[object], int]
    nvmlDeviceGetPciInfo: Callable[[object], _PciInfo]
    nvmlDeviceGetCurrentClocksThrottleReasons: Callable[[object], int]
    nvmlDeviceGetClockInfo: Callable[[object, int], int]
    nvmlDeviceGetMaxClockInfo: Callable[[object, int], int]
    nvmlDeviceGetCurrPcieLinkWidth: Callable[[object], int]
    nvmlDeviceGetMaxPcieLinkWidth: Callable[[object], int]
    nvmlDeviceGetNvLinkState: Callable[[object, int], int]
    nvmlDeviceGetTotalEccErrors: Callable[[object, int, int], int]
    nvmlEventSetCreate: Callable[[], object]
    nvmlDeviceRegisterEvents: Callable[[object, int, object], None]
    nvmlEventSetWait_v2: Callable[[object, int], _Event]


def load_pynvml() -> Pynvml | None:
    """nvidia-ml-py; None if it is not installed."""
    try:
        return cast(Pynvml, import_module("pynvml"))
    except ImportError:
        return None


class NvmlSource:
    """NVML as it is asked again and again: a driver that was loaded again is found at the next look."""

    name = "nvml"

    def __init__(self, module: Pynvml) -> None:
        self._module = module
        self._nvml: Nvml | None = None

    def read(self) -> list[GpuReading] | None:
        """All GPUs; None if the driver does not answer."""
        try:
            self._nvml = self._nvml or Nvml(self._module)
            return self._nvml.read()
        except self._module.NVMLError:
            self._nvml = None
            return None


class Nvml:
    """All GPUs; their handles are asked for once."""

    def __init__(self, module: Pynvml) -> None:
        """Begins to listen for Xids.

        Raises:
            module.NVMLError: there is no driver, or it does not answer.
        """
        self._nvml = module
        module.nvmlInit()
        self._gpus = [module.nvmlDeviceGetHandleByIndex(index) for index in range(module.nvmlDeviceGetCount())]
        self._bus_ids = [self._asked(partial(self._bus_id, gpu)) for gpu in self._gpus]
        self._events = self._asked(self._event_set)

    def read(self) -> list[GpuReading]:
        """All GPUs, each with what it and its driver say.

        Raises:
            module.NVMLError: the driver does not answer.
        """
        self._nvml.nvmlDeviceGetCount()
        xids = self._xids()
        return [self._read_gpu(index, gpu, tuple(xids.get(index, ()))) for index, gpu in enumerate(self._gpus)]

    def _read_gpu(self, index: int, gpu: object, xids: tuple[int, ...]) -> GpuReading:
        nvml, asked = self._nvml, self._asked
        return GpuReading(
            index=index,
            bus_id=self._bus_ids[index],
            throttle=asked(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)),
            sm_mhz=asked(lambda: nvml.nvmlDeviceGetClockInfo(gpu, _SM_CLOCK)),
            sm_mhz_most=asked(lambda: nvml.nvmlDeviceGetMaxClockInfo(gpu, _SM_CLOCK)),
            pcie_width=asked(lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu)),
            pcie_width_most=asked(lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu)),
            nvlinks=self._links(gpu),
            ecc_uncorrected=asked(lambda: nvml.nvmlDeviceGetTotalEccErrors(gpu, _ECC_UNCORRECTED, _ECC_VOLATILE)),
            xids=xids,
        )

    def _bus_id(self, gpu: object) -> int | None:
        text = self._nvml.nvmlDeviceGetPciInfo(gpu).busId
        return bus_id_of(text.decode(errors="replace") if isinstance(text, bytes) else text)

    def _links(self, gpu: object) -> int | None:
        """NVLinks that are up; None if there are none. Those of a GPU are numbered from 0."""
        states: list[int] = []
        for link in range(_LINKS):
            state = self._asked(partial(self._nvml.nvmlDeviceGetNvLinkState, gpu, link))
            if state is None:
                break
            states.append(state)
        return sum(states) if states else None

    def _event_set(self) -> object:
        events = self._nvml.nvmlEventSetCreate()
        for gpu in self._gpus:
            self._nvml.nvmlDeviceRegisterEvents(gpu, _XID, events)
        return events

    def _xids(self) -> dict[int, list[int]]:
        """By GPU: those since the last look. NVML gives one after the other, and a time-out when there are no more."""
        found: dict[int, list[int]] = {}
        for _ in range(_XIDS_AT_ONCE if self._events is not None else 0):
            event = self._asked(lambda: self._nvml.nvmlEventSetWait_v2(self._events, 0))
            if event is None:
                break
            index = self._asked(partial(self._nvml.nvmlDeviceGetIndex, event.device))
            if index is not None:
                found.setdefault(index, []).append(int(event.eventData))
        return found

    def _asked(self, ask: Callable[[], _Value]) -> _Value | None:
        """The answer; None if this GPU or driver does not know it."""
        with suppress(self._nvml.NVMLError, AttributeError):
            return ask()
        return None

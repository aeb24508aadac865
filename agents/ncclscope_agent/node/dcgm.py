"""GPUs of this machine by NVIDIA's dcgm-exporter, whose endpoint for Prometheus many fleets run already.

Which fields it shows its operator chooses: by default the SM clock and the last Xid, of the others what is there.
*Source:* dcgm-exporter `etc/default-counters.csv`, `internal/pkg/rendermetrics`; DCGM `dcgm_fields.h`.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from ncclscope_agent.sources.machine import GpuReading, bus_id_of

_PREFIX: Final = "DCGM_FI_DEV_"
_XID: Final = "XID_ERRORS"
_FIELDS: Final = {
    "CLOCK_THROTTLE_REASONS": "throttle",
    "CLOCKS_EVENT_REASONS": "throttle",  # as DCGM 4 calls it
    "SM_CLOCK": "sm_mhz",
    "MAX_SM_CLOCK": "sm_mhz_most",
    "PCIE_LINK_WIDTH": "pcie_width",
    "PCIE_MAX_LINK_WIDTH": "pcie_width_most",
    "ECC_DBE_VOL_TOTAL": "ecc_uncorrected",
}
"""To the members of GpuReading that they give."""
_NEEDED: Final = tuple(f"{_PREFIX}{field}" for field in (*_FIELDS, _XID))
_NO_VALUE: Final = 2**31 - 64
"""DCGM's blanks are a little below 2^31 and 2^63: not there, not supported, not permitted."""
_MOST_BYTES: Final = 4 << 20
_MOST_GPUS: Final = 64


class Dcgm:
    """One endpoint, asked again and again."""

    name = "dcgm"

    def __init__(self, address: str, seconds: float) -> None:
        self._address = address
        self._seconds = seconds
        self._last_xids: dict[int, int] = {}

    def read(self) -> list[GpuReading] | None:
        """All GPUs, each with what the endpoint says of it; None if it does not answer, or is something else."""
        with suppress(OSError, ValueError):
            with closing(urllib.request.urlopen(self._address, timeout=self._seconds)) as answer:  # config: http(s)
                data = answer.read(_MOST_BYTES + 1)
            return self.readings(data.decode("utf-8", "replace")) if len(data) <= _MOST_BYTES else None
        return None

    def readings(self, text: str) -> list[GpuReading]:
        """All GPUs of one answer. An Xid is said when it is another than at the last look: what came before is old.

        Raises:
            ValueError: it cannot be read, or shows no GPU.
        """
        values: dict[int, dict[str, int]] = {}
        bus_ids: dict[int, int | None] = {}
        for field, labels, value in _samples(text):
            if not (number := labels.get("gpu", "")).isdecimal() or labels.get("GPU_I_ID"):  # a slice of a GPU (MIG)
                continue
            gpu = int(number)
            if gpu >= _MOST_GPUS:
                continue
            told = values.setdefault(gpu, {})
            if 0 <= value < _NO_VALUE:
                told[field] = int(value)
            bus_ids[gpu] = bus_id_of(labels.get("pci_bus_id", ""))
        if not values:
            raise ValueError("it shows no GPU")
        return [self._reading(gpu, bus_ids.get(gpu), values[gpu]) for gpu in sorted(values)]

    def _reading(self, gpu: int, bus_id: int | None, values: dict[str, int]) -> GpuReading:
        xid = values.get(_XID, 0)
        is_new = xid != self._last_xids.setdefault(gpu, xid)
        self._last_xids[gpu] = xid
        told = {name: values[field] for field, name in _FIELDS.items() if field in values}
        return GpuReading(index=gpu, bus_id=bus_id, xids=(xid,) if is_new and xid > 0 else (), **told)


def _samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Field, labels and value of each sample that is used. Only its lines are parsed: there may be thousands."""
    needed = "\n".join(line for line in text.splitlines() if line.startswith(_NEEDED))
    for family in text_string_to_metric_families(needed):
        for sample in family.samples:
            yield sample.name.removeprefix(_PREFIX).removesuffix("_total"), sample.labels, sample.value

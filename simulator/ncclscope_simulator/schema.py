"""Tables and columns of nsys's SQLite export, by version of its schema.

Source: NVIDIA Nsight Systems user guide, "SQLite schema reference", and exports of the versions named.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_KERNEL: Final = (
    "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, {green}"
    "streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER NOT NULL, "
    "shortName INTEGER NOT NULL, mangledName INTEGER, launchType INTEGER, cacheConfig INTEGER, "
    "registersPerThread INTEGER NOT NULL, gridX INTEGER NOT NULL, gridY INTEGER NOT NULL, gridZ INTEGER NOT NULL, "
    "blockX INTEGER NOT NULL, blockY INTEGER NOT NULL, blockZ INTEGER NOT NULL, staticSharedMemory INTEGER NOT NULL, "
    "dynamicSharedMemory INTEGER NOT NULL, localMemoryPerThread INTEGER NOT NULL, localMemoryTotal INTEGER NOT NULL, "
    "gridId INTEGER NOT NULL, sharedMemoryExecuted INTEGER, graphNodeId INTEGER, sharedMemoryLimitConfig INTEGER{more}"
)
_KERNEL_2026: Final = (
    ", qmdBulkReleaseDone INTEGER, qmdPreexitDone INTEGER, qmdLastCtaDone INTEGER, graphId INTEGER, clusterX INTEGER, "
    "clusterY INTEGER, clusterZ INTEGER, clusterSchedulingPolicy INTEGER, maxPotentialClusterSize INTEGER, "
    "maxActiveClusters INTEGER, sharedMemoryRequestedPercentage INTEGER, tensorSizeMinusOneElements TEXT NOT NULL"
)
_NVTX: Final = (
    "start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, category INTEGER, "
    "color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER, "
    "uint64Value INTEGER, int64Value INTEGER, doubleValue REAL, uint32Value INTEGER, "
    "int32Value INTEGER, floatValue REAL, jsonTextId INTEGER, jsonText TEXT{binary}"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Schema:
    """How one nsys version lays out an export."""

    product_version: str
    schema_version: str
    meta_table: str
    """EXPORT_META_DATA up to 2023.1, META_DATA_EXPORT from 2023.3; always the last table to be made."""
    tables: dict[str, str]
    """Table to its columns, in the order of creation."""

    @property
    def time_shift_known(self) -> bool:
        """Whether the metadata names a time shift (2023.x on)."""
        return self.meta_table == "META_DATA_EXPORT"


def schema_of(nsys: str) -> Schema:
    """The layout of an nsys version of `NSYS_VERSIONS`."""
    product, version = {
        "2022.4": ("2022.4.2.1", "3.0.0"),
        "2023.4": ("2023.4.4.54", "3.7.2"),
        "2024.5": ("2024.5.1.113", "3.13.2"),
        "2025.3": ("2025.3.2.474", "3.20.3"),
        "2026.2": ("2026.2.1.210", "3.25.0"),
    }[nsys]
    year = int(nsys[:4])
    meta = "EXPORT_META_DATA" if year < 2023 else "META_DATA_EXPORT"
    return Schema(product_version=product, schema_version=version, meta_table=meta, tables=_tables(year))


def _tables(year: int) -> dict[str, str]:
    tables = {
        "StringIds": "id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL",
        "TARGET_INFO_SYSTEM_ENV": (
            f"globalVid INTEGER{' NOT NULL' if year < 2026 else ''}, devStateName TEXT NOT NULL, name TEXT NOT NULL, "
            "nameEnum INTEGER NOT NULL, value TEXT NOT NULL"
        ),
        "TARGET_INFO_SESSION_START_TIME": (
            "utcEpochNs INTEGER, utcTime TEXT, localTime TEXT" + (", systemClockNs INTEGER" if year >= 2026 else "")
        ),
        "ANALYSIS_DETAILS": (
            "globalVid INTEGER NOT NULL, duration INTEGER NOT NULL, startTime INTEGER NOT NULL, "
            "stopTime INTEGER NOT NULL"
        ),
        "PROCESSES": "globalPid INTEGER, pid INTEGER, name TEXT",
    }
    if year >= 2024:
        tables["DIAGNOSTIC_EVENT"] = (
            "timestamp INTEGER NOT NULL, timestampType INTEGER NOT NULL, source INTEGER NOT NULL, "
            "severity INTEGER NOT NULL, text TEXT NOT NULL, globalPid INTEGER"
        )
    tables["NVTX_EVENTS"] = _NVTX.format(binary=", binaryData TEXT" if year >= 2025 else "")
    tables["CUPTI_ACTIVITY_KIND_RUNTIME"] = (
        "start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER, "
        "correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL, callchainId INTEGER"
    )
    tables["CUPTI_ACTIVITY_KIND_KERNEL"] = _KERNEL.format(
        green="greenContextId INTEGER, " if year >= 2023 else "", more=_KERNEL_2026 if year >= 2026 else ""
    )
    tables["CUPTI_ACTIVITY_KIND_GRAPH_TRACE"] = (
        "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, "
        f"{'greenContextId INTEGER, ' if year >= 2023 else ''}streamId INTEGER NOT NULL, correlationId INTEGER, "
        "globalPid INTEGER, graphId INTEGER NOT NULL, graphExecId INTEGER NOT NULL"
    )
    tables["ThreadNames"] = "nameId INTEGER NOT NULL, priority INTEGER, globalTid INTEGER"
    tables["TARGET_INFO_GPU"] = (
        "vmId INTEGER NOT NULL, id INTEGER NOT NULL, name TEXT, busLocation TEXT, isDiscrete INTEGER, "
        "totalMemory INTEGER, smCount INTEGER, uuid TEXT, chipName TEXT, cuDevice INTEGER, "
        "computeMajor INTEGER, computeMinor INTEGER"
    )
    if year >= 2025:
        tables["TARGET_INFO_CUDA_DEVICE"] = "gpuId INTEGER, cudaId INTEGER NOT NULL, pid INTEGER NOT NULL"
    tables["TARGET_INFO_CUDA_STREAM"] = (
        "streamId INTEGER NOT NULL, hwId INTEGER NOT NULL, vmId INTEGER NOT NULL, processId INTEGER NOT NULL, "
        "contextId INTEGER NOT NULL, priority INTEGER NOT NULL, flag INTEGER NOT NULL"
    )
    tables["ENUM_NSYS_EVENT_TYPE"] = "id INTEGER NOT NULL PRIMARY KEY, name TEXT, label TEXT"
    return tables

"""The numbers behind the figures of `report.html`: bounded in size whatever the run's length.

One of them is the heat map of traffic: who sent how much to whom.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ncclscope_service.export.json_files import clocks_by_host
from ncclscope_service.export.report.iterations import (
    NOT_KNOWN,
    activity,
    iteration_figures,
    per_iteration,
    size_counts,
)
from ncclscope_service.export.report.timeline import kind_waits, labels, on_off, placed_kernels, timeline, waits
from ncclscope_service.export.selection import Selection, processes_by_rank
from ncclscope_service.export.summary import match_counts
from ncclscope_service.export.tables.communicators_file import communicator_limits
from ncclscope_service.export.tables.traffic_file import Traffic
from ncclscope_service.export.totals import Group, Total, Totals
from ncclscope_service.export.trace.arguments import significant
from ncclscope_service.job.ranks import hosts_of
from ncclscope_service.store.records import HostClock
from ncclscope_service.store.rows import Match
from ncclscope_wire.terms import OPERATIONS

MAX_PLACES: Final = 256
"""Senders and receivers that are drawn; `traffic.parquet` has all."""

_SWITCHES: Final = {"nvswitch": "NVSwitch", "network": "network switch"}


def traffic_map(traffic: Traffic) -> dict[str, object] | None:
    """Bytes by sender (rows) and receiver (columns); null if nothing was sent. None if nothing was at all."""
    if not traffic.rows:
        return None
    shown = traffic.places[:MAX_PLACES]
    several = len({place.job for place in shown}) > 1
    names = [
        (f"{place.job} " if several else "") + (place.host if place.rank is None else f"{place.rank}")
        for place in shown
    ]
    columns: dict[object, int] = {place: index for index, place in enumerate(shown)}
    used = [through for through in _SWITCHES if any(row.through == through for row in traffic.rows)]
    columns |= {through: len(shown) + index for index, through in enumerate(used)}
    amounts: list[list[int | None]] = [[None] * len(columns) for _ in shown]
    index_of = {place: index for index, place in enumerate(shown)}
    for row in traffic.rows:
        sender, receiver = index_of.get(row.sender), columns.get(row.through or row.receiver)
        if sender is not None and receiver is not None:
            amounts[sender][receiver] = (amounts[sender][receiver] or 0) + row.bytes
    total = sum(row.bytes for row in traffic.rows)
    direct = [row for row in traffic.rows if row.receiver is not None]
    between = sum(row.bytes for row in direct if row.receiver and row.receiver.host != row.sender.host)
    return {
        "what": "rank" if traffic.is_by_rank else "node",
        "senders": names,
        "receivers": [*names, *(_SWITCHES[through] for through in used)],
        "hosts": [place.host for place in shown],
        "bytes": amounts,
        "of": len(traffic.places),
        "total": total,
        "between_nodes": between,
        "assumed": sum(row.assumed_bytes for row in traffic.rows),
        "unplaced_calls": traffic.unplaced_calls,
    }


MAX_POINTS: Final = 6000
"""Points of the scatter: a large run opens as fast as a small one. They are drawn by lot (always the same), since
every n-th would follow the rhythm of the training step and miss whole sizes."""

CONFIDENCE_BINS: Final = 20
MAX_CLOCKS: Final = 64


def report_data(selection: Selection, sums: Totals, traffic: Traffic) -> dict[str, object]:
    """Everything that the figures show, as JSON has it; None if there is nothing to show."""
    kernels = placed_kernels(selection)
    return {
        "mix": _mix(selection, sums),
        "sizes": size_counts(selection),
        "steps": iteration_figures(selection, sums.iterations),
        "activity": activity(selection, sums.iterations),
        "bandwidth": _bandwidth(selection),
        "waits": waits(selection),
        "kind_waits": kind_waits(selection),
        "volume": _volume(selection, sums),
        "alignment": _alignment(selection) if len(selection.kernels) else None,
        "confidence": _confidence(selection),
        "match": match_counts(sums),
        "iterations": per_iteration(selection),
        "traffic": traffic_map(traffic),
        "timeline": timeline(selection, kernels),
        "on_off": on_off(selection, kernels),
        "clocks": _clocks(selection),
    }


def communicator_rows(selection: Selection, sums: Totals) -> list[dict[str, object]]:
    """Rows of the table of communicators, most bytes first; None in a row means not recorded.

    Where no line of a communicator was read, its operations are the records of NCCL Inspector.
    """
    by_communicator = sums.by(lambda group: group.communicator)
    busbw = _median_busbw(selection)
    of_records = _median_busbw_of_collectives(selection)
    waits = _wait_ratios(selection)
    records = _inspected(selection)
    rows: list[dict[str, object]] = []
    for communicator in selection.communicators:
        total = by_communicator.get(communicator.index, Total())
        limit = communicator_limits(selection.store, communicator.index)["topology"]
        rate = busbw.get(communicator.index, of_records.get(communicator.index))
        rows.append(
            {
                "communicator": communicator.comm_id,
                "name": selection.names[communicator.job, communicator.comm_id],
                "group_name": communicator.name,
                "parallelism": communicator.parallelism,
                "size": communicator.size,
                "hosts": len(hosts_of(selection.store, communicator)),
                "operations": total.operations or records.get(communicator.index, 0),
                "bytes": total.bytes if total.sized else None,
                "busbw": rate,
                "limit": limit,
                "efficiency": rate / limit if rate is not None and limit else None,
                "wait_ratio": waits.get(communicator.index) if total.wait_ratio is None else total.wait_ratio,
            }
        )
    return sorted(rows, key=lambda row: -_number(row["bytes"]))


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _median_busbw(selection: Selection) -> dict[int, float]:
    """Median busbw of each communicator's operations that were measured, in bytes per second."""
    part = selection.operations
    communicator_of = np.asarray([member.communicator for member in selection.store.members], np.int64)
    measured = np.nonzero(np.isfinite(part.column("busbw")))[0]
    members = part.column("member")[measured].astype(np.intp)
    communicator, busbw = communicator_of[members], part.column("busbw")[measured]
    order = np.argsort(communicator, kind="stable")
    distinct, begins = np.unique(communicator[order], return_index=True)
    groups = np.split(busbw[order], begins[1:]) if len(distinct) else []
    return {index: float(np.median(group)) for index, group in zip(distinct.tolist(), groups, strict=True)}


def _median_busbw_of_collectives(selection: Selection) -> dict[int, float]:
    """The same of joined collectives, which NCCL Inspector reports without any logged operation."""
    communicator, busbw = selection.collectives.column("communicator"), selection.collectives.column("busbw")
    found = np.unique(communicator[np.isfinite(busbw)]).tolist()
    return {index: float(np.nanmedian(busbw[communicator == index])) for index in found}


def _inspected(selection: Selection) -> dict[int, int]:
    """Records of NCCL Inspector by communicator."""
    series = selection.store.series.rows
    counts = np.bincount(np.maximum(series["communicator"], 0), weights=series["inspected"]).astype(np.int64)
    return {index: count for index, count in enumerate(counts.tolist()) if count}


def _wait_ratios(selection: Selection) -> dict[int, float]:
    """Waiting as a share of kernel time by communicator, from the series; without those of which nothing is known."""
    series = selection.store.series.rows
    timed = series[series["waiting_duration_ns"] > 0]
    ratios: dict[int, float] = {}
    for index in np.unique(timed["communicator"]).tolist():
        mine = timed[timed["communicator"] == index]
        ratios[index] = int(mine["wait_ns"].sum()) / int(mine["waiting_duration_ns"].sum())
    return ratios


def _kinds(selection: Selection) -> list[str]:
    return [communicator.parallelism or NOT_KNOWN for communicator in selection.store.communicators]


def _mix(selection: Selection, sums: Totals) -> list[dict[str, object]]:
    kinds = _kinds(selection)

    def key(group: Group) -> tuple[str, str]:
        return group.op, kinds[group.communicator] if group.communicator >= 0 else NOT_KNOWN

    return [
        {"op": op, "parallelism": kind, "operations": total.operations, "bytes": total.bytes if total.sized else None}
        for (op, kind), total in sums.by(key).items()
    ]


def _bandwidth(selection: Selection) -> dict[str, object] | None:
    """Size and busbw of collectives by kind of communicator and operation, with the topology's limits."""
    part, kinds = selection.collectives, _kinds(selection)
    columns = {name: part.column(name) for name in ("communicator", "message_bytes", "busbw", "op")}
    usable = np.nonzero(np.isfinite(columns["busbw"]) & (columns["message_bytes"] > 0))[0]
    if not len(usable):
        return None
    chosen = np.sort(np.random.default_rng(0).permutation(usable)[:MAX_POINTS])
    keys = [
        (kinds[communicator], OPERATIONS[op].name if op < len(OPERATIONS) else NOT_KNOWN)
        for communicator, op in zip(
            columns["communicator"][chosen].tolist(), columns["op"][chosen].tolist(), strict=True
        )
    ]
    points: dict[tuple[str, str], dict[str, list[float]]] = {}
    sizes = columns["message_bytes"][chosen].tolist()
    rates = significant(columns["busbw"][chosen].astype(np.float64) / 1e9, 4).tolist()
    for key, size, rate in zip(keys, sizes, rates, strict=True):
        series = points.setdefault(key, {"x": [], "y": []})
        series["x"].append(size)
        series["y"].append(rate)
    return {
        "drawn": len(chosen),
        "of": len(usable),
        "series": [{"parallelism": kind, "op": op, **found} for (kind, op), found in sorted(points.items())],
        "limits": _limits(selection),
    }


def _limits(selection: Selection) -> dict[str, float]:
    """The narrowest limit by topology of each kind of communicator, in GB/s."""
    limits: dict[str, float] = {}
    for communicator in selection.communicators:
        limit = communicator_limits(selection.store, communicator.index)["topology"]
        kind = communicator.parallelism or NOT_KNOWN
        if limit is not None:
            limits[kind] = min(limit / 1e9, limits.get(kind, limit / 1e9))
    return limits


def _volume(selection: Selection, sums: Totals) -> dict[str, object] | None:
    """Message bytes by rank and operation."""
    by_process = sums.by(lambda group: (group.process, group.op))
    if not any(total.sized for total in by_process.values()):
        return None
    processes = processes_by_rank(selection)
    ops = sorted({op for _, op in by_process})
    volume = {op: [by_process.get((index, op), Total()).bytes for index in processes] for op in ops}
    return {"ranks": labels(selection, processes), "ops": {op: found for op, found in volume.items() if any(found)}}


def _confidence(selection: Selection) -> list[int] | None:
    """Matched operations by confidence, in bins of 0.05 from 0 to 1."""
    part = selection.operations
    found = part.column("confidence")[part.column("match") == Match.MATCHED].astype(np.float64)
    found = found[np.isfinite(found)]
    if not len(found):
        return None
    bins = np.minimum((found * CONFIDENCE_BINS + 1e-6).astype(np.int64), CONFIDENCE_BINS - 1)
    counts: list[int] = np.bincount(bins, minlength=CONFIDENCE_BINS).tolist()
    return counts


def _clocks(selection: Selection) -> dict[str, object] | None:
    """Uncertainties around each host's estimate, in microseconds; None without an estimate of another's clock."""
    store = selection.store
    ours = {store.processes[index].host for index in selection.processes()}
    known = clocks_by_host(store, selection.jobs)
    references = {store.clocks[job].reference for job in selection.jobs if job in store.clocks}
    hosts = sorted(host for host, clock in known.items() if host in ours - references and clock.samples)[:MAX_CLOCKS]
    if not hosts:
        return None
    clocks = [known[host] for host in hosts]

    def beside(clock: HostClock, bound: float | None) -> float | None:
        return None if bound is None else round((bound - clock.offset_ns) / 1e3, 4)

    return {
        "hosts": hosts,
        "sigma": [round(clock.sigma_ns / 1e3, 4) for clock in clocks],
        "low": [beside(clock, clock.interval_lo_ns) for clock in clocks],
        "high": [beside(clock, clock.interval_hi_ns) for clock in clocks],
    }


def _alignment(selection: Selection) -> dict[str, object]:
    """Operations by rank and verdict."""
    size = len(selection.store.processes)
    counts = np.zeros((size, len(Match)), dtype=np.int64)
    for rows in selection.operations.slices():
        counts += np.bincount(rows["process"] * len(Match) + rows["match"], minlength=counts.size).reshape(counts.shape)
    processes = processes_by_rank(selection)
    shown = counts[processes]
    verdicts = {match.name.lower().replace("_", " "): shown[:, match].tolist() for match in Match}
    return {"ranks": labels(selection, processes), "verdicts": verdicts}

"""The heat map of traffic: who sent how much to whom."""

from __future__ import annotations

from typing import Final

from ncclscope_service.export.traffic_file import Traffic

MAX_PLACES: Final = 256
"""Senders and receivers that are drawn; `traffic.parquet` has all."""

_SWITCHES: Final = {"nvswitch": "NVSwitch", "network": "network switch"}


def traffic_map(traffic: Traffic) -> dict[str, object] | None:
    """Bytes by sender (rows) and receiver (columns); null where nothing was sent. None where nothing was at all."""
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

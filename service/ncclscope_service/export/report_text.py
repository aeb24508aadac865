"""Numbers as people read them; None becomes "not recorded"."""

from __future__ import annotations

from html import escape
from typing import Final

from ncclscope_service.export.summary import NOT_RECORDED

_LEAST_SHARE: Final = 0.00001
_LEAST_IN_GIGABYTES: Final = 1e7


def cell(value: object, missing: str = NOT_RECORDED) -> str:
    """Any value as HTML; None in words."""
    return f'<span class="none">{escape(missing)}</span>' if value is None else escape(str(value))


def count_text(value: object) -> str:
    """A count with thousands apart."""
    return f"{value:,}".replace(",", "\u2009") if isinstance(value, int) else cell(None)


def bytes_text(value: object) -> str:
    """Bytes in decimal units, as bandwidths are."""
    return _scaled(value, 1000.0, ("B", "kB", "MB", "GB", "TB", "PB", "EB")) or cell(None)


def bandwidth_text(value: object) -> str:
    """Bytes per second in GB/s; what tiny messages reach in smaller units."""
    if isinstance(value, int | float) and 0 < value < _LEAST_IN_GIGABYTES:
        return _scaled(value, 1000.0, ("B/s", "kB/s", "MB/s"))
    return f"{value / 1e9:.4g} GB/s" if isinstance(value, int | float) else cell(None)


def ratio_text(value: object) -> str:
    """A share in percent; a small one keeps its first digit, so that it does not look like none."""
    if not isinstance(value, int | float):
        return cell(None)
    if 0 < abs(value) < _LEAST_SHARE:
        return "under 0.001%"
    return f"{value:.1%}" if value == 0 or abs(value) >= 0.001 else f"{value * 100:.1g}%"


def span_text(value: object) -> str:
    """Nanoseconds in the unit that fits."""
    return _scaled(value, 1000.0, ("ns", "µs", "ms", "s")) or cell(None)


def _scaled(value: object, step: float, units: tuple[str, ...]) -> str:
    if not isinstance(value, int | float):
        return ""
    amount, place = float(value), 0
    while abs(amount) >= step and place < len(units) - 1:
        amount, place = amount / step, place + 1
    digits = f"{amount:.4g}" if abs(amount) < 10_000 else f"{amount:,.0f}".replace(",", "\u2009")
    return f"{digits} {units[place]}"

"""The result of `ncclscope check` on a node, as text for a person and as a JSON object."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Final

from ncclscope import node
from ncclscope.check_sources import SourceFacts, source_states
from ncclscope_agent.nccl_settings.advice import NcclVersion, Remark, Verdict, export_lines
from ncclscope_agent.nccl_settings.volume import LogLook, Rate, Volume

_GB: Final = 1e9
_MOST_PROCESSES: Final = 16
"""As many rows of the table are shown to a person; all are in JSON."""


@dataclass(slots=True)
class Checked:
    """Facts found on the node, and the remarks about them."""

    host: str
    nccl: node.FoundVersion | None = None
    remarks: list[Remark] = field(default_factory=list[Remark])
    variables: dict[str, str] = field(default_factory=dict[str, str])
    """Variables to set for logs."""
    variables_with_calls: dict[str, str] = field(default_factory=dict[str, str])
    sources: SourceFacts = field(default_factory=SourceFacts)
    logs: list[tuple[LogLook, Rate | None]] = field(default_factory=list[tuple[LogLook, Rate | None]])
    processes: list[Volume] = field(default_factory=list[Volume])
    nodes: list[Volume] = field(default_factory=list[Volume])
    shares: dict[str, float] = field(default_factory=dict[str, float])
    clock: node.ClockState | None = None
    nsys: str | None = None
    service: node.ServiceAnswer | None = None
    clock_offset: node.ClockOffset | None = None

    @property
    def version(self) -> NcclVersion | None:
        """NCCL's version, if it is known."""
        return None if self.nccl is None else self.nccl.version

    @property
    def must_change(self) -> bool:
        """Whether something must change."""
        return any(remark.verdict is Verdict.CHANGE for remark in self.remarks)

    def say(self, verdict: Verdict, about: str, text: str, found: str | None = None) -> None:
        """Adds a remark."""
        self.remarks.append(Remark(verdict=verdict, about=about, found=found, text=text))


# What is printed


def report(checked: Checked) -> Iterator[str]:
    """Lines for a person: what to change first, then what to know, what is right, and what to copy."""
    yield f"ncclscope check on {checked.host}"
    told = "of unknown version" if checked.nccl is None else f"{checked.nccl.version}, told by {checked.nccl.told_by}"
    yield f"NCCL {told}"
    yield ""
    for verdict, title in (
        (Verdict.CHANGE, "To change"),
        (Verdict.NOTE, "To know"),
        (Verdict.RIGHT, "Right"),
    ):
        remarks = [remark for remark in checked.remarks if remark.verdict is verdict]
        if remarks:
            yield title
            yield from (f"  {_about(remark)}: {remark.text}" for remark in remarks)
            yield ""
    if checked.processes:
        yield from _volume_table(checked)
    yield "Sources: whether each is there, what it gives, and what it costs the job"
    for source in source_states(checked.sources, checked.version):
        yield f"  {source.name}: {source.state}{f' ({source.found})' if source.found else ''}"
        yield f"      gives {source.gives}"
        yield f"      costs {source.costs}"
        if source.how:
            yield f"      how   {source.how}"
    if checked.variables:
        yield ""
        yield f"To set for NCCL {checked.version}, before the job starts"
        yield from (f"  {line}" for line in export_lines(checked.variables))
        if checked.variables_with_calls != checked.variables:
            yield "  # or, to tell groups of operations exactly (one more line for every call):"
            different = set(checked.variables_with_calls.items()) - set(checked.variables.items())
            calls = {name: value for name, value in checked.variables_with_calls.items() if (name, value) in different}
            yield from (f"  {line}" for line in export_lines(calls))


def _about(remark: Remark) -> str:
    return remark.about if remark.found is None else f"{remark.about}={remark.found}"


def _volume_table(checked: Checked) -> Iterator[str]:
    yield f"Log volume, from {len(checked.logs)} logs"
    yield f"  {'host':20} {'pid':>8} {'lines/s':>9} {'ops/s':>9} {'kB/s':>9} {'GB/hour':>9}"
    shown = checked.processes[:_MOST_PROCESSES]
    for volume in [*shown, *checked.nodes]:
        pid = "node" if volume.pid is None else str(volume.pid)
        numbers = (
            volume.lines_per_second,
            volume.operations_per_second,
            _scaled(volume.bytes_per_second, 1e3),
            _scaled(volume.bytes_per_hour, _GB),
        )
        yield f"  {volume.host:20} {pid:>8} " + " ".join(f"{_number(number):>9}" for number in numbers)
    if len(checked.processes) > len(shown):
        yield f"  ({len(checked.processes) - len(shown)} more processes)"
    parts = ", ".join(f"{name} {share:.0%}" for name, share in checked.shares.items() if share >= 0.005)
    yield f"  by subsystem, as the lines' forms tell: {parts}"
    yield ""


def _scaled(number: float | None, unit: float) -> float | None:
    return None if number is None else number / unit


def _number(number: float | None) -> str:
    return "not known" if number is None else f"{number:.3g}" if number < 1000 else f"{number:.0f}"


def in_json(checked: Checked) -> dict[str, object]:
    """All of it, for a program; what is not known is null."""
    return {
        "host": checked.host,
        "nccl": checked.nccl and {"version": str(checked.nccl.version), "told_by": checked.nccl.told_by},
        "must_change": checked.must_change,
        "remarks": [asdict(remark) for remark in checked.remarks],
        "set": {"logs": checked.variables, "logs_and_calls": checked.variables_with_calls},
        "logs": [_log_as_json(look, rate) for look, rate in checked.logs],
        "volume": {
            "processes": [_volume_as_json(volume) for volume in checked.processes],
            "nodes": [_volume_as_json(volume) for volume in checked.nodes],
            "share_by_subsystem": checked.shares,
        },
        "clock": _fields(checked.clock),
        "clock_offset": _fields(checked.clock_offset),
        "nsys": checked.nsys,
        "service": _fields(checked.service),
        "sources": [asdict(source) for source in source_states(checked.sources, checked.version)],
    }


def _fields(record: node.ClockState | node.ClockOffset | node.ServiceAnswer | Rate | None) -> dict[str, object] | None:
    return None if record is None else asdict(record)


def _log_as_json(look: LogLook, rate: Rate | None) -> dict[str, object]:
    return {
        "name": look.name,
        "size_bytes": look.size_bytes,
        "versions": sorted(look.versions),
        "lines": look.lines,
        "nccl_lines": look.nccl_lines,
        "stamped_lines": look.stamped_lines,
        "operations": look.operations,
        "bytes_by_subsystem": dict(look.by_subsystem),
        "rate": _fields(rate),
    }


def _volume_as_json(volume: Volume) -> dict[str, object]:
    return {**asdict(volume), "bytes_per_hour": volume.bytes_per_hour}

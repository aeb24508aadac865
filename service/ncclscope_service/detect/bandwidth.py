"""Communicators with less bandwidth than before, or than their siblings, and the host at fault if it can be located.

Groups that have been slow from their first step are found too: they have no past to compare with, but are far below
what their links can carry. For this, only messages that keep the links busy for so long that latency does not matter
are judged. A group in a well configured job reaches 70 to 95 % of the narrowest cut of its machines; below half of it,
something is configured wrongly: no GPUDirect, a network card of the other socket, a link at half its width.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Set
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from ncclscope_service.detect.comparable_groups import (
    Levels,
    Links,
    Sample,
    Shape,
    SharedWires,
    Siblings,
    Wires,
    bytes_of,
)
from ncclscope_service.detect.context import Context, Group, Ledger, name_of_groups
from ncclscope_service.detect.slow_link import Located, SlowGroup, locate_slow_groups, slow_link_finding
from ncclscope_service.detect.statistics import QUICK, STEADY, DriftWatch, Drop, DropWatch
from ncclscope_service.store.records import Finding, FindingKind, Severity
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER

_STEADY_WINDOW_NS: Final = 10_000_000_000
_PAGE_SHARE: Final = 0.20
"""Loss that is worth waking somebody for."""
_PAGE_AFTER_NS: Final = 300_000_000_000
"""One group alone must be slow for so long."""
_RIPENS_NS: Final = 5_000_000_000
"""Groups of one fault do not drop in the same second: what one cannot locate, two may."""
_MANY: Final = 3
"""This many groups of one parallelism that drop together are one finding."""
_QUICK_CONFIDENCE: Final = 0.7
"""By rule: a baseline of an hour proves most, a short one least."""
_STEADY_CONFIDENCE: Final = 0.95
_SIBLING_CONFIDENCE: Final = 0.85
_DRIFT_CONFIDENCE: Final = 0.8
_WINDOWS_SHOWN: Final = 8
_COLLECTIVES_SHOWN: Final = 8
_SHORT_BASELINE_SECONDS: Final = 3600


@dataclass(slots=True)
class _Series:
    """One shape under both rules: the quick one applies until the steady one has a baseline of an hour."""

    quick: DropWatch = field(default_factory=lambda: DropWatch(QUICK))
    steady: DropWatch = field(default_factory=lambda: DropWatch(STEADY))
    drift: DriftWatch = field(default_factory=DriftWatch)
    _window: int = 0
    _values: list[float] = field(default_factory=list[float])

    def ingest_window(self, at_ns: int, level: float) -> None:
        if not self.steady.is_ready or self.quick.drop is not None:
            self.quick.ingest_window(at_ns, level)
        if self.quick.drop is not None:
            return  # the steady baseline must not include a fault
        window = at_ns // _STEADY_WINDOW_NS
        if window != self._window and self._values:
            middle = sorted(self._values)[len(self._values) // 2]
            self.steady.ingest_window(self._window * _STEADY_WINDOW_NS, middle)
            self.drift.ingest_window(self._window * _STEADY_WINDOW_NS, middle)
            self._values = []
        self._window = window
        self._values.append(level)

    @property
    def drop(self) -> Drop | None:
        return self.steady.drop or self.quick.drop

    @property
    def is_healthy(self) -> bool:
        return self._watch.is_quiet and self.drop is None

    @property
    def is_unsuspicious(self) -> bool:
        """Whether nothing points clearly to a drop, though the series may be noisy."""
        return self._watch.is_unsuspicious and self.drop is None

    @property
    def _watch(self) -> DropWatch:
        return self.steady if self.steady.is_ready else self.quick


class BandwidthDrop:
    """Slow groups of one job, from joined collectives: `slow_link` if located, else `bandwidth_drop`, `slow_drift`."""

    def __init__(self) -> None:
        self._links = Links()
        self._levels = Levels()
        self._siblings = Siblings()
        self._series: dict[Shape, _Series] = {}
        self._wires = SharedWires()
        self._together: dict[Wires, _Series] = {}
        self._ledger = Ledger()
        self._context: Context | None = None
        self._newest_ns = 0
        self._unlocated_since: dict[int, int] = {}
        self._slow: frozenset[int] = frozenset()
        self._worst: dict[int, deque[tuple[float, int]]] = {}
        """By communicator: level and number of the slowest collective of the last windows."""

    @property
    def slow_communicators(self) -> frozenset[int]:
        """Communicators, and links as the windows number them, that are slow now, by their past or their siblings."""
        return frozenset(self._slow)

    def with_links(self, context: Context) -> Context:
        """The job with the links that the windows speak of among its groups."""
        return self._links.context_with_links(context)

    def ingest_collectives(self, collectives: Columns, context: Context) -> list[Sample]:
        """Takes joined collectives (`rows.COLLECTIVE`) of one job, and gives the windows that they closed.

        FindingChange that is late by seconds is left out.
        """
        self._context = context = self._links.context_with_links(context)
        fresh = self._levels.ingest_collectives(self._links.with_link_numbers(collectives))
        samples = [sample for sample in fresh if sample.shape.communicator in context.groups]
        self._siblings.ingest_samples(samples)
        for sample in samples:
            self._newest_ns = max(self._newest_ns, sample.at_ns)
            self._series.setdefault(sample.shape, _Series()).ingest_window(sample.at_ns, sample.level)
            if sample.worst_seq != NO_NUMBER:
                recent = self._worst.setdefault(sample.shape.communicator, deque(maxlen=_WINDOWS_SHOWN))
                recent.append((sample.level, sample.worst_seq))
        for shared in self._wires.ingest_samples(samples, context):
            self._together.setdefault(shared.wires, _Series()).ingest_window(shared.at_ns, shared.level)
        return samples

    def findings(self) -> list[Finding]:
        """All findings so far."""
        if self._context is not None:
            self._judge(self._context)
        return self._ledger.findings()

    def _judge(self, context: Context) -> None:
        drops = self._drops(context)
        slow, healthy = self._slow_and_healthy(drops, context)
        if not context.clock_is_trusted:
            slow = {}  # bandwidths of wrong kernels mean nothing
        self._slow = frozenset(slow)
        located = locate_slow_groups(slow, healthy, context)
        explained = {communicator for one in located for communicator in one.communicators}
        current = {
            self._key(one): self._with_collectives(slow_link_finding(one, slow, context), one.communicators, context)
            for one in located
        }
        unlocated = {communicator: group for communicator, group in slow.items() if communicator not in explained}
        self._unlocated_since = {c: self._unlocated_since.get(c, self._newest_ns) for c in unlocated}
        ripe = {c: g for c, g in unlocated.items() if self._newest_ns - self._unlocated_since[c] >= _RIPENS_NS}
        current |= self._unlocated(ripe, context)
        current |= self._drifts(context)
        for key, finding in current.items():
            self._ledger.update(key, finding)
        for key in self._ledger.open_keys():
            if key not in current:
                self._ledger.close(key, self._newest_ns)

    def _with_collectives(self, finding: Finding, communicators: Iterable[int], context: Context) -> Finding:
        """The same, with the slowest collectives of these communicators."""
        windows = [
            (level, f"{context.groups[communicator].comm_id}:{seq}")
            for communicator in communicators
            for level, seq in self._worst.get(communicator, ())
        ]
        chosen = [name for _, name in sorted(windows)[:_COLLECTIVES_SHOWN]]
        return replace(finding, evidence={**finding.evidence, "collectives": chosen})

    def _drifts(self, context: Context) -> dict[Hashable, Finding]:
        """Slow drifts of communicators that are not slow otherwise."""
        worst: dict[int, Drop] = {}
        for shape, series in self._series.items():
            drift = series.drift.drift
            if drift is not None and shape.communicator in context.groups.keys() - self._slow:
                known = worst.get(shape.communicator)
                worst[shape.communicator] = drift if known is None or drift.share > known.share else known
        return {
            ("drift", communicator): self._with_collectives(
                _drift_finding(context.groups[communicator], drift, context), [communicator], context
            )
            for communicator, drift in worst.items()
        }

    def _drops(self, context: Context) -> dict[int, Drop]:
        """The worst drop of each communicator."""
        drops: dict[int, Drop] = {}
        own = ((shape.communicator, series.drop) for shape, series in self._series.items())
        shared = (
            (communicator, series.drop)
            for wires, series in self._together.items()
            if series.drop is not None
            for communicator in self._wires.members(wires)
        )
        for communicator, found in (*own, *shared):
            if found is not None and communicator in context.groups:
                known = drops.get(communicator)
                drops[communicator] = found if known is None or found.share > known.share else known
        return drops

    def _slow_and_healthy(
        self, drops: dict[int, Drop], context: Context
    ) -> tuple[dict[int, SlowGroup], frozenset[int]]:
        slow = {
            communicator: SlowGroup(
                loss=found.share,
                level=found.level,
                reference=found.baseline,
                reference_is_siblings=False,
                since_ns=found.since_ns,
                confidence=_QUICK_CONFIDENCE if found.rule == QUICK else _STEADY_CONFIDENCE,
                baseline_seconds=found.windows * (1 if found.rule == QUICK else 10),
            )
            for communicator, found in drops.items()
        }
        healthy = self._healthy() - drops.keys()
        for verdict in self._siblings.verdicts(context):
            if not verdict.is_slow:
                if verdict.communicator not in drops:
                    healthy.add(verdict.communicator)
                continue
            healthy.discard(verdict.communicator)
            slow[verdict.communicator] = SlowGroup(
                loss=verdict.loss,
                level=verdict.level,
                reference=verdict.reference,
                reference_is_siblings=True,
                since_ns=verdict.since_ns,
                confidence=_SIBLING_CONFIDENCE,
            )
        return slow, frozenset(healthy & context.groups.keys())

    def _healthy(self) -> set[int]:
        """Communicators whose series are all quiet, or unsuspicious while all that share their wires are quiet."""
        shared: dict[int, bool] = {}
        for wires, series in self._together.items():
            for communicator in self._wires.members(wires):
                shared[communicator] = series.is_healthy and shared.get(communicator, True)
        own: dict[int, bool] = {}
        for shape, series in self._series.items():
            together = shared.get(shape.communicator)
            calm = series.is_healthy if together is None else series.is_unsuspicious and together
            own[shape.communicator] = calm and own.get(shape.communicator, True)
        return {communicator for communicator, calm in own.items() if calm}

    def _key(self, located: Located) -> Hashable:
        """The key under which an overlapping fault is already open, else a new one: hosts may become clearer."""
        for key in self._ledger.open_keys():
            if isinstance(key, tuple) and key[0] == "link" and key[1] == located.is_between_hosts:
                known = key[2]
                if isinstance(known, frozenset) and known & located.hosts:
                    return key
        return ("link", located.is_between_hosts, located.hosts)

    def _unlocated(self, slow: dict[int, SlowGroup], context: Context) -> dict[Hashable, Finding]:
        by_parallelism: dict[str | None, list[int]] = defaultdict(list)
        for communicator in slow:
            by_parallelism[context.groups[communicator].parallelism].append(communicator)
        found: dict[Hashable, Finding] = {}
        for parallelism, communicators in by_parallelism.items():
            if len(communicators) >= _MANY or self._ledger.is_open(("drop", parallelism)):
                found["drop", parallelism] = self._drop_finding(communicators, slow, context)
            else:
                for one in communicators:
                    found["drop", parallelism, one] = self._drop_finding([one], slow, context)
        return found

    def _drop_finding(self, communicators: list[int], slow: dict[int, SlowGroup], context: Context) -> Finding:
        worst = max(communicators, key=lambda communicator: slow[communicator].loss)
        found, group = slow[worst], context.groups[worst]
        since = min(slow[communicator].since_ns for communicator in communicators)
        is_sure = len(communicators) > 1 or self._newest_ns - since >= _PAGE_AFTER_NS
        hosts = frozenset[str]().union(*(context.groups[communicator].host_set() for communicator in communicators))
        made = Finding(
            kind=FindingKind.BANDWIDTH_DROP,
            severity=Severity.CRITICAL if found.loss >= _PAGE_SHARE and is_sure else Severity.WARNING,
            job=context.job,
            comm_id=group.comm_id if len(communicators) == 1 else None,
            parallelism=group.parallelism,
            hosts=tuple(hosts) if len(hosts) == 1 else (),
            since_ns=since,
            confidence=found.confidence,
            summary=_sentence([context.groups[each].name for each in communicators], found, group),
            evidence={
                "loss_ratio": round(found.loss, 4),
                "busbw_bytes_per_second": round(math.exp(found.level)),
                "reference_bytes_per_second": round(math.exp(found.reference)),
                "reference": "siblings" if found.reference_is_siblings else "baseline",
                "baseline_seconds": found.baseline_seconds,
                "groups": sorted({context.groups[communicator].comm_id for communicator in communicators}),
                "hosts_of_groups": sorted(hosts),
            },
        )
        return self._with_collectives(made, communicators, context)


def _drift_finding(group: Group, drift: Drop, context: Context) -> Finding:
    now, before = f"{math.exp(drift.level) / 1e9:.3g}", f"{math.exp(drift.baseline) / 1e9:.3g}"
    return Finding(
        kind=FindingKind.SLOW_DRIFT,
        severity=Severity.INFO,
        job=context.job,
        comm_id=group.comm_id,
        parallelism=group.parallelism,
        since_ns=drift.since_ns,
        confidence=_DRIFT_CONFIDENCE,
        summary=(
            f"{group.name} is {100 * drift.share:.0f} % slower than in its first hour: {now} GB/s of bus bandwidth, "
            f"down from {before} GB/s"
        ),
        evidence={
            "loss_ratio": round(drift.share, 4),
            "busbw_bytes_per_second": round(math.exp(drift.level)),
            "reference_bytes_per_second": round(math.exp(drift.baseline)),
            "reference": "first_hour",
            "groups": [group.comm_id],
        },
    )


def _sentence(names: list[str], found: SlowGroup, group: Group) -> str:
    who, is_one = name_of_groups(names, group.parallelism), len(names) == 1
    now, reference = f"{math.exp(found.level) / 1e9:.3g}", f"{math.exp(found.reference) / 1e9:.3g}"
    if found.reference_is_siblings:
        return (
            f"{who} {'reaches' if is_one else 'reach'} {now} GB/s of bus bandwidth, {100 * found.loss:.0f} % less than "
            f"the {reference} GB/s of {'its' if is_one else 'their'} siblings"
        )
    seconds = found.baseline_seconds or 0
    short = f" (baseline: only {seconds} s)" if seconds < _SHORT_BASELINE_SECONDS else ""
    return (
        f"{who} lost {100 * found.loss:.0f} % of {'its' if is_one else 'their'} bus bandwidth: {now} GB/s, down from "
        f"{reference} GB/s{short}"
    )


_LEAST_SECONDS: Final = 150e-6
"""Least time of a message at the limit."""
_WINDOWS: Final = 12
_BLOCKS: Final = 3
"""Number of blocks in which the last windows are judged: all must be slow."""
_EARLY: Final = 3
"""First windows of a shape: warm-up."""
_BELOW: Final = 0.5
"""Share of the limit below which a group is slow."""
_HEALED: Final = 0.6
"""Share of the limit above which it is slow no more: no flapping at the border."""
_CONFIDENCE: Final = 0.7
"""The topology may have been read incompletely."""


class BelowLimit:
    """Groups of one job below their limit, from closed windows."""

    def __init__(self) -> None:
        self._recent: dict[Shape, deque[Sample]] = {}
        self._early: dict[Shape, int] = defaultdict(int)
        self._below: set[int] = set()
        self._ledger = Ledger()
        self._context: Context | None = None
        self._newest_ns = 0

    def ingest_samples(self, samples: Iterable[Sample], context: Context) -> None:
        """Takes windows, oldest first."""
        self._context = context
        for sample in samples:
            group = context.groups.get(sample.shape.communicator)
            self._newest_ns = max(self._newest_ns, sample.at_ns)
            if group is None or not group.limit or bytes_of(sample.shape) / group.limit < _LEAST_SECONDS:
                continue
            self._early[sample.shape] += 1
            if self._early[sample.shape] > _EARLY:
                self._recent.setdefault(sample.shape, deque(maxlen=_WINDOWS)).append(sample)

    def evict_communicators(self, communicators: Set[int]) -> None:
        """Forgets these communicators."""
        for shape in [shape for shape in self._early if shape.communicator in communicators]:
            del self._early[shape]
            self._recent.pop(shape, None)

    def findings(self, explained: frozenset[int]) -> list[Finding]:
        """All findings so far; `explained`: communicators that another finding reports as slow."""
        context = self._context
        if context is None:
            return []
        slow = self._slow(context) if context.clock_is_trusted else {}
        self._below = set(slow)
        by_parallelism: dict[str | None, list[Shape]] = defaultdict(list)
        for communicator, shape in slow.items():
            if communicator not in explained:
                by_parallelism[context.groups[communicator].parallelism].append(shape)
        for parallelism, shapes in by_parallelism.items():
            self._ledger.update(parallelism, self._finding(shapes, context))
        for key in self._ledger.open_keys():
            if key not in by_parallelism:
                self._ledger.close(key, self._newest_ns)
        return self._ledger.findings()

    def _slow(self, context: Context) -> dict[int, Shape]:
        """By communicator below its limit, the shape that shows it most."""
        worst: dict[int, tuple[float, Shape]] = {}
        for shape, samples in self._recent.items():
            group = context.groups.get(shape.communicator)
            if group is None or not group.limit or len(samples) < _WINDOWS:
                continue
            levels = np.array([sample.level for sample in samples]).reshape(_BLOCKS, -1)
            efficiency = np.exp(np.median(levels, axis=1)) / group.limit
            bar = _HEALED if shape.communicator in self._below else _BELOW
            if (efficiency < bar).all():
                known = worst.get(shape.communicator)
                found = float(np.median(efficiency))
                if known is None or found < known[0]:
                    worst[shape.communicator] = (found, shape)
        return {communicator: shape for communicator, (_, shape) in worst.items()}

    def _finding(self, shapes: list[Shape], context: Context) -> Finding:
        groups = {shape: context.groups[shape.communicator] for shape in shapes}
        reached = {shape: math.exp(np.median([sample.level for sample in self._recent[shape]])) for shape in shapes}
        worst = min(shapes, key=lambda shape: reached[shape] / (groups[shape].limit or math.inf))
        group, limit = groups[worst], groups[worst].limit or math.nan
        who = name_of_groups([groups[shape].name for shape in shapes], group.parallelism)
        reach = "reaches" if len(shapes) == 1 else "reach"
        return Finding(
            kind=FindingKind.BELOW_LIMIT,
            severity=Severity.WARNING,
            job=context.job,
            comm_id=group.comm_id if len(shapes) == 1 else None,
            parallelism=group.parallelism,
            since_ns=min(self._recent[shape][0].at_ns for shape in shapes),
            confidence=_CONFIDENCE,
            summary=(
                f"{who} {reach} {reached[worst] / 1e9:.3g} GB/s of bus bandwidth, {100 * reached[worst] / limit:.0f} % "
                f"of the {limit / 1e9:.3g} GB/s that {group.limit_name or 'the links'} can carry"
            ),
            evidence={
                "efficiency_ratio": round(reached[worst] / limit, 4),
                "busbw_bytes_per_second": round(reached[worst]),
                "limit_bytes_per_second": round(limit),
                "bottleneck": group.limit_name,
                "message_bytes": bytes_of(worst),
                "groups": sorted({each.comm_id for each in groups.values()}),
                "collectives": _collectives(groups, worst, self._recent[worst]),
            },
        )


def _collectives(groups: dict[Shape, Group], worst: Shape, samples: Iterable[Sample]) -> list[str]:
    known = [sample for sample in samples if sample.worst_seq != NO_NUMBER]
    return [f"{groups[worst].comm_id}:{sample.worst_seq}" for sample in known[-_COLLECTIVES_SHOWN:]]

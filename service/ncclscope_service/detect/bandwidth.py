"""Communicators with less bandwidth than before, or than their siblings, and the host at fault if it can be located.

Groups that have been slow from their first step are found too: they have no past to compare with, but are far below
what their links can carry. For this, only messages that keep the links busy for so long that latency does not matter
are judged. A group in a well configured job reaches 70 to 95 % of the narrowest cut of its machines; below half of it,
something is configured wrongly: no GPUDirect, a network card of the other socket, a link at half its width.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns import row_ops
from ncclscope_service.detect import measured_confidence
from ncclscope_service.detect.comparable_groups import (
    BLOCK,
    BLOCKS,
    WINDOW_NS,
    Levels,
    Links,
    RecentWindows,
    Shape,
    SharedWires,
    Siblings,
    Verdict,
    Wires,
    bytes_of,
    joined,
)
from ncclscope_service.detect.context import Context, Group, Ledger, name_of_groups
from ncclscope_service.detect.settings import BandwidthSettings
from ncclscope_service.detect.slow_link import Leaning, Located, SlowGroup, locate_slow_groups, slow_link_finding
from ncclscope_service.detect.statistics import QUICK, STEADY, DriftWatch, Drop, DropRule, DropWatch, medians
from ncclscope_service.store.records import Finding, FindingKind, Severity
from ncclscope_service.store.settings import SECOND_NS
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER

_STEADY_WINDOW_NS: Final = 10_000_000_000
_RIPENS: Final = BLOCK * BLOCKS + 1
"""Windows since it began. Groups of one fault do not drop in the same one: what one cannot locate, two may."""
_CLEARER_WITHIN: Final = 3 * BLOCK * BLOCKS
"""Windows, and"""
_CLEARER_WITHIN_STEPS: Final = 2 * BLOCK
"""steps since a fault began, within which groups may be seen that tell where it is."""
_STILL_USED_NS: Final = 300_000_000_000
"""A group that was not seen for so long tells nothing."""
_SHARE_OF_NOISE: Final = 0.6
"""Standard error of the median of a block of windows, of which each is like the one before, in their scatter."""
_LEAST_ERROR: Final = 0.02
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

    def ingest_window(self, at_ns: int, level: float, settings: BandwidthSettings) -> None:
        self.quick.rule, self.steady.rule = _rules(settings)
        if not self.steady.is_ready or self.quick.drop is not None:
            self.quick.ingest_window(at_ns, level)
        if self.quick.drop is not None:
            return  # the steady baseline must not include a fault
        window = at_ns // _STEADY_WINDOW_NS
        if window != self._window and self._values:
            middle = sorted(self._values)[len(self._values) // 2]
            self.steady.ingest_window(self._window * _STEADY_WINDOW_NS, middle)
            self.drift.ingest_window(self._window * _STEADY_WINDOW_NS, middle, least_drift=settings.least_drift)
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


@lru_cache(maxsize=64)
def _rules(settings: BandwidthSettings) -> tuple[DropRule, DropRule]:
    """The quick and the steady rule as they are set."""
    return (
        replace(QUICK, gate=settings.least_loss, h=settings.first_hour_evidence),
        replace(STEADY, gate=settings.least_loss, h=settings.evidence),
    )


class BandwidthDrop:
    """Slow groups of one job, from joined collectives: `slow_link` if located, else `bandwidth_drop`, `slow_drift`."""

    def __init__(self) -> None:
        self._links = Links()
        self._levels = Levels()
        self.recent = RecentWindows()
        """By number of `shapes`."""
        self._siblings = Siblings()
        self._series: list[_Series] = []
        """By shape."""
        self._wires = SharedWires()
        self._together: dict[Wires, _Series] = {}
        self._ledger = Ledger()
        self._context: Context | None = None
        self._newest_ns = 0
        self._slow: frozenset[int] = frozenset()
        self._slow_since: dict[int, int] = {}
        """The same groups, and since when."""
        self._worst: dict[int, deque[tuple[float, int]]] = {}
        """By communicator: level and number of the slowest collective of the last windows."""

    @property
    def slow_communicators(self) -> frozenset[int]:
        """Communicators, and links as the windows number them, that are slow now, by their past or their siblings."""
        return self._slow

    @property
    def shapes(self) -> Sequence[Shape]:
        """The shapes of the windows so far, by number."""
        return self._levels.shapes

    @property
    def context(self) -> Context | None:
        """The job with the links that the windows speak of among its groups; None as long as nothing came."""
        return self._context

    def ingest_collectives(self, collectives: Columns, context: Context) -> None:
        """Takes joined collectives (`rows.COLLECTIVE`) of one job. What is late by seconds is left out."""
        self._context = context = self._links.context_with_links(context)
        settings = context.settings.bandwidth
        closed = self._levels.ingest_collectives(
            _with_own_gpus(self._links.with_link_numbers(collectives), context),
            self.recent.next_window_ns(context.step_ns),
            least_bytes=settings.least_bytes,
            is_over=context.is_over,
        )
        shapes = self._levels.shapes
        is_known = [shapes[number].communicator in context.groups for number in closed.shape.tolist()]
        windows = closed if all(is_known) else closed.filter(np.asarray(is_known))
        self.recent.ingest_windows(windows, len(shapes))
        self._series += [_Series() for _ in range(len(shapes) - len(self._series))]
        self._newest_ns = max(self._newest_ns, int(windows.at_ns.max(initial=0)))
        if self.recent.window_ns < WINDOW_NS:
            windows = joined(windows, WINDOW_NS)
        columns = (windows.shape, windows.at_ns, windows.level, windows.worst_seq)
        for number, at_ns, level, worst_seq in zip(*(each.tolist() for each in columns), strict=True):
            self._series[number].ingest_window(at_ns, level, settings)
            if worst_seq != NO_NUMBER:
                recent = self._worst.setdefault(shapes[number].communicator, deque(maxlen=_WINDOWS_SHOWN))
                recent.append((level, worst_seq))
        for shared in self._wires.ingest_windows(windows, shapes, context):
            self._together.setdefault(shared.wires, _Series()).ingest_window(shared.at_ns, shared.level, settings)

    def evict_communicators(self, communicators: Set[int]) -> None:
        """Forgets these communicators."""
        stays = [number for number, shape in enumerate(self.shapes) if shape.communicator not in communicators]
        if len(stays) < len(self.shapes):
            self._levels.evict(np.asarray(stays, np.int64))
            self.recent.evict(np.asarray(stays, np.int64))
            self._series = [self._series[number] for number in stays]
            for communicator in communicators:
                self._worst.pop(communicator, None)

    def findings(self) -> list[Finding]:
        """All findings so far."""
        if self._context is not None:
            self._judge(self._context)
        return self._ledger.findings()

    def _judge(self, context: Context) -> None:
        drops, verdicts = self._drops(context), self._siblings.verdicts(self.recent, self.shapes, context)
        # bandwidths of wrong kernels mean nothing
        slow = self._slow_groups(drops, verdicts) if context.clock_is_trusted else {}
        self._slow = frozenset(slow)
        self._slow_since = {
            each: min(self._slow_since.get(each, one.since_ns), one.since_ns) for each, one in slow.items()
        }
        located, may_become_clearer = self._locate(slow, verdicts, context) if slow else ([], False)
        explained = {communicator for one in located for communicator in one.communicators}
        current = {
            self._key(one): self._with_collectives(slow_link_finding(one, slow, context), one.communicators, context)
            for one in located
        }
        ripe_ns = self._newest_ns - _RIPENS * self.recent.window_ns
        ripe = {
            communicator: group
            for communicator, group in slow.items()
            if communicator not in explained and not may_become_clearer and self._slow_since[communicator] <= ripe_ns
        }
        current |= self._unlocated(ripe, context)
        current |= self._drifts(context)
        self._ledger.renew(current, self._newest_ns)

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
        for shape, series in zip(self.shapes, self._series, strict=True):
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
        own = ((shape.communicator, series.drop) for shape, series in zip(self.shapes, self._series, strict=True))
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

    def _slow_groups(self, drops: dict[int, Drop], verdicts: Iterable[Verdict]) -> dict[int, SlowGroup]:
        slow = {
            communicator: SlowGroup(
                loss=found.share,
                level=found.level,
                reference=found.baseline,
                reference_is_siblings=False,
                since_ns=found.since_ns,
                confidence=_confidence_of(found.rule),
                baseline_seconds=found.windows * (1 if found.rule.baseline == QUICK.baseline else 10),
            )
            for communicator, found in drops.items()
        }
        return slow | {
            verdict.communicator: SlowGroup(
                loss=verdict.loss,
                level=verdict.level,
                reference=verdict.reference,
                reference_is_siblings=True,
                since_ns=verdict.since_ns,
                confidence=measured_confidence.SLOWER_THAN_SIBLINGS,
            )
            for verdict in verdicts
            if verdict.is_slow
        }

    def _locate(
        self, slow: dict[int, SlowGroup], verdicts: Iterable[Verdict], context: Context
    ) -> tuple[list[Located], bool]:
        """Where the fault is, and whether groups that may tell more are still to be seen since it began.

        What is healthy must have been so while the slow groups were slow: groups at the end of a step are seen less
        often than those in the middle, and would acquit their hosts by what they were before. Several hosts are named
        when no group can be expected to tell them apart.
        """
        since_ns = min(self._slow_since.values())
        seen = self.recent.seen_since(since_ns)
        compared = {verdict.communicator: verdict for verdict in verdicts if seen[verdict.shape] >= BLOCK}
        leanings = {each: self._leaning(verdict, since_ns) for each, verdict in compared.items()}
        least = context.settings.siblings.healthy_log_loss
        healthy = (self._healthy() | {each for each, verdict in compared.items() if verdict.is_healthy}) - slow.keys()
        healthy -= {each for each, leaning in leanings.items() if leaning.behind >= least}
        is_judged = np.zeros(len(seen), np.bool_)
        is_judged[self.recent.full()] = True
        is_judged &= seen >= BLOCK
        is_used = self.recent.at_ns[:, -1] >= self._newest_ns - _STILL_USED_NS
        used: defaultdict[int, bool] = defaultdict(bool)
        for shape, is_known in zip(self.shapes, (is_judged | ~is_used).tolist(), strict=False):
            used[shape.communicator] |= is_known
        unseen = {each for each, is_known in used.items() if not is_known} & context.groups.keys() - slow.keys()
        acquitted = frozenset(healthy & context.groups.keys() - unseen)
        located = locate_slow_groups(slow, acquitted, context, leanings, used.keys())
        hosts = frozenset[str]().union(*(context.groups[each].host_set() for each in slow))
        of_slow = max(seen[number] for number, shape in enumerate(self.shapes) if shape.communicator in slow)
        is_early = of_slow < _CLEARER_WITHIN or self._newest_ns - since_ns < _CLEARER_WITHIN_STEPS * (
            context.step_ns or 0
        )
        may_become_clearer = is_early and any(hosts & context.groups[each].host_set() for each in unseen)
        return located, may_become_clearer

    def _leaning(self, verdict: Verdict, since_ns: int) -> Leaning:
        """How far a group is behind its siblings since then."""
        levels = self.recent.level[verdict.shape][self.recent.at_ns[verdict.shape] >= since_ns]
        error = max(_SHARE_OF_NOISE * verdict.noise, _LEAST_ERROR)
        return Leaning(behind=verdict.reference - float(np.median(levels)), error=error)

    def _healthy(self) -> set[int]:
        """Communicators whose series are all quiet, or unsuspicious while all that share their wires are quiet."""
        shared: dict[int, bool] = {}
        for wires, series in self._together.items():
            for communicator in self._wires.members(wires):
                shared[communicator] = series.is_healthy and shared.get(communicator, True)
        own: dict[int, bool] = {}
        for shape, series in zip(self.shapes, self._series, strict=True):
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
            if len(communicators) >= context.settings.bandwidth.many_groups or self._ledger.is_open(
                ("drop", parallelism)
            ):
                found["drop", parallelism] = self._drop_finding(communicators, slow, context)
            else:
                for one in communicators:
                    found["drop", parallelism, one] = self._drop_finding([one], slow, context)
        return found

    def _drop_finding(self, communicators: list[int], slow: dict[int, SlowGroup], context: Context) -> Finding:
        worst = max(communicators, key=lambda communicator: slow[communicator].loss)
        found, group = slow[worst], context.groups[worst]
        since = min(slow[communicator].since_ns for communicator in communicators)
        settings = context.settings.bandwidth
        is_sure = len(communicators) > 1 or self._newest_ns - since >= settings.critical_after_seconds * SECOND_NS
        hosts = frozenset[str]().union(*(context.groups[communicator].host_set() for communicator in communicators))
        made = Finding(
            kind=FindingKind.BANDWIDTH_DROP,
            severity=Severity.CRITICAL if found.loss >= settings.critical_loss and is_sure else Severity.WARNING,
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


def _confidence_of(rule: DropRule) -> float:
    is_quick = rule.baseline == QUICK.baseline
    return measured_confidence.SLOWER_THAN_A_MINUTE_AGO if is_quick else measured_confidence.SLOWER_THAN_AN_HOUR_AGO


def _with_own_gpus(collectives: Columns, context: Context) -> Columns:
    """Those of groups whose ranks have a GPU each: where they share one, transfers wait for turns on it."""
    sharing = [index for index, group in context.groups.items() if group.shared_gpus]
    return row_ops.filter_rows(collectives, ~np.isin(collectives["communicator"], sharing)) if sharing else collectives


def _drift_finding(group: Group, drift: Drop, context: Context) -> Finding:
    now, before = f"{math.exp(drift.level) / 1e9:.3g}", f"{math.exp(drift.baseline) / 1e9:.3g}"
    return Finding(
        kind=FindingKind.SLOW_DRIFT,
        severity=Severity.INFO,
        job=context.job,
        comm_id=group.comm_id,
        parallelism=group.parallelism,
        since_ns=drift.since_ns,
        confidence=measured_confidence.SLOW_DRIFT,
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


class BelowLimit:
    """Groups of one job below their limit, from closed windows: all of the last blocks of them must be slow."""

    def __init__(self) -> None:
        self._below: set[int] = set()
        self._ledger = Ledger()

    def findings(
        self, recent: RecentWindows, shapes: Sequence[Shape], context: Context | None, explained: frozenset[int]
    ) -> list[Finding]:
        """All findings so far, by the last windows of each of `shapes`; `explained`: communicators that another finding
        reports as slow.
        """
        if context is None:
            return []
        slow = self._slow(recent, shapes, context) if context.clock_is_trusted else {}
        self._below = set(slow)
        by_parallelism: dict[str | None, list[int]] = defaultdict(list)
        for communicator, number in slow.items():
            if communicator not in explained:
                by_parallelism[context.groups[communicator].parallelism].append(number)
        current: dict[Hashable, Finding] = {
            parallelism: _below_limit(numbers, recent, shapes, context)
            for parallelism, numbers in by_parallelism.items()
        }
        self._ledger.renew(current, recent.newest_ns)
        return self._ledger.findings()

    def _slow(self, recent: RecentWindows, shapes: Sequence[Shape], context: Context) -> dict[int, int]:
        """By communicator below its limit, the shape that shows it most."""
        settings = context.settings.below_limit
        limits = {
            number: group.limit
            for number in recent.full().tolist()
            if (group := context.groups.get(shapes[number].communicator)) is not None
            and group.limit
            and bytes_of(shapes[number]) / group.limit >= 1e-6 * settings.least_us
        }
        if not limits:
            return {}
        levels = medians(recent.level[list(limits)].reshape(len(limits), BLOCKS, BLOCK))
        efficiency = np.exp(levels) / np.array(list(limits.values()))[:, None]
        below, healed = settings.least_ratio, settings.healed_ratio  # no flapping at the border
        bars = [healed if shapes[number].communicator in self._below else below for number in limits]
        is_slow: NDArray[np.bool_] = np.logical_and.reduce(efficiency < np.array(bars)[:, None], axis=1)
        worst: dict[int, tuple[float, int]] = {}
        for number, found, slow in zip(limits, medians(efficiency).tolist(), is_slow.tolist(), strict=True):
            known = worst.get(shapes[number].communicator)
            if slow and (known is None or found < known[0]):
                worst[shapes[number].communicator] = (found, number)
        return {communicator: number for communicator, (_, number) in worst.items()}


def _below_limit(numbers: list[int], recent: RecentWindows, shapes: Sequence[Shape], context: Context) -> Finding:
    groups = {number: context.groups[shapes[number].communicator] for number in numbers}
    levels = zip(numbers, medians(recent.level[numbers]).tolist(), strict=True)
    reached = {number: math.exp(level) for number, level in levels}
    worst = min(numbers, key=lambda number: reached[number] / (groups[number].limit or math.inf))
    group, limit = groups[worst], groups[worst].limit or math.nan
    who = name_of_groups([groups[number].name for number in numbers], group.parallelism)
    reach = "reaches" if len(numbers) == 1 else "reach"
    known = [seq for seq in recent.worst_seq[worst].tolist() if seq != NO_NUMBER]
    return Finding(
        kind=FindingKind.BELOW_LIMIT,
        severity=Severity.WARNING,
        job=context.job,
        comm_id=group.comm_id if len(numbers) == 1 else None,
        parallelism=group.parallelism,
        since_ns=int(recent.at_ns[numbers, 0].min()),
        confidence=measured_confidence.BELOW_LIMIT,
        summary=(
            f"{who} {reach} {reached[worst] / 1e9:.3g} GB/s of bus bandwidth, {100 * reached[worst] / limit:.0f} % "
            f"of the {limit / 1e9:.3g} GB/s that {group.limit_name or 'the links'} can carry"
        ),
        evidence={
            "efficiency_ratio": round(reached[worst] / limit, 4),
            "busbw_bytes_per_second": round(reached[worst]),
            "limit_bytes_per_second": round(limit),
            "bottleneck": group.limit_name,
            "message_bytes": bytes_of(shapes[worst]),
            "groups": sorted({each.comm_id for each in groups.values()}),
            "collectives": [f"{group.comm_id}:{seq}" for seq in known[-_COLLECTIVES_SHOWN:]],
        },
    )

"""Batches into the store: resolves each source's dictionaries into the service's own.

A batch points into the dictionaries of its source; here these become the store's strings, processes and
templates, shared by all sources. Positions, order and duplicates were checked before (`receive.py`): what
comes here is applied.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns import row_ops
from ncclscope_service.columns.group_by import distinct_together
from ncclscope_service.columns.table import Table
from ncclscope_service.intake.admission import FOREIGN_HOST
from ncclscope_service.intake.call_groups import CallGroups
from ncclscope_service.intake.limits import OTHER, Named, NameLimits
from ncclscope_service.nccl import bandwidth
from ncclscope_service.store import rows
from ncclscope_service.store.records import Process, SourceState
from ncclscope_service.store.retention import SourceSlots
from ncclscope_service.store.tables import Store
from ncclscope_wire import tables
from ncclscope_wire.batch import ROW_TABLES, Batch, Columns, no_rows
from ncclscope_wire.facts import TROUBLES, NetworkDevices
from ncclscope_wire.records import CommunicatorEvent, SourceGap
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS, OPERATION_CODES
from ncclscope_wire.topology import TopologySeen

Indices = NDArray[np.int32]

_LARGEST_SEQUENCE: Final = 2**62
_TEXT_BYTES: Final = 128
"""Memory of a text without characters, and of its place."""
MAX_TOPOLOGIES: Final = 256
"""Different system blocks of one host that are kept: one for each set of GPUs that communicate."""

_MOST_DEVICES: Final = 64
"""Network cards of one host that are kept."""

INTERNAL_ERROR: Final = "internal_error"
"""The reason by which is counted what was in order and could not be applied."""


class BrokenSourceError(RuntimeError):
    """Nothing more of this source can be applied in this session."""


@dataclass(slots=True, kw_only=True)
class Arrived:
    """Content of one batch in the store's own terms."""

    job: str
    source: int
    operations: Columns
    """rows.LOGGED, in line order, not yet in the store: communicators are still to be found."""
    events: tuple[CommunicatorEvent, ...]
    event_processes: tuple[int, ...]
    """Process of each event."""
    tunings: Columns
    """As rows.TUNING."""
    kernels: Columns
    """rows.KERNEL, not yet in the store."""
    inspected: Columns
    """rows.INSPECTED, not yet in the store: communicators are still to be found."""
    calls: Columns
    """rows.API_CALL, by start."""


@dataclass(slots=True)
class _Dictionaries:
    """Local index to the store's index, for one source of one session."""

    session: str
    source: int
    strings: Indices = field(default_factory=lambda: np.empty(0, np.int32))
    thread_process: Indices = field(default_factory=lambda: np.empty(0, np.int32))
    thread_tid: NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    operation_templates: Indices = field(default_factory=lambda: np.empty(0, np.int32))
    kernel_templates: Indices = field(default_factory=lambda: np.empty(0, np.int32))
    range_templates: Columns = field(default_factory=lambda: np.empty(0, rows.RANGE))
    inspected_ranks: Columns = field(default_factory=lambda: np.empty(0, rows.INSPECTED))
    range_calls: Columns = field(default_factory=lambda: np.empty(0, rows.API_CALL))
    """For each range template the call that it is; NO_NUMBER as kind if it is none."""
    call_groups: CallGroups = field(init=False)
    is_broken: bool = False
    """A batch was taken in half way: what follows would point at other entries than those that were meant."""

    def __post_init__(self) -> None:
        self.call_groups = CallGroups(self.source)


class BatchResolver:
    """Resolves batches of all sources into one store."""

    def __init__(self, known: Store, names: NameLimits | None = None) -> None:
        """`names`: how many there may be."""
        self._store = known
        self._names = NameLimits(known) if names is None else names
        self._processes: dict[tuple[str, str, int], int] = {}
        self._hosts = set[tuple[str, str]]()
        """(job, host) of all processes."""
        self._foreign = set[int]()
        """Processes of hosts that an agent named and may not speak of."""
        self._sources: dict[tuple[str, str], int] = {}
        self._slots = SourceSlots(known)
        self._dictionaries: dict[int, _Dictionaries] = {}
        self._topologies: Counter[tuple[str, str | None]] = Counter()
        self._topology_contents: set[bytes] = set()
        self._operation_templates: dict[bytes, int] = {}
        self._kernel_templates: dict[bytes, int] = {}

    def process(self, job: str, host: str, pid: int, source: int) -> int:
        """The index of a process; a new one the first time it is named, as long as its agent and job may have more."""
        pid = 0 if host == FOREIGN_HOST else pid
        index = self._processes.get((job, host, pid))
        if index is not None:
            return index
        agent = self._store.sources[source].agent
        if host != OTHER and not (
            self._has_host(job, host, source) and self._names.take(Named.PROCESSES, agent=agent, job=job, source=source)
        ):
            return self.process(job, OTHER, 0, source)
        self._hosts.add((job, host))
        if host == FOREIGN_HOST:
            self._foreign.add(len(self._store.processes))
        index = self._processes[job, host, pid] = len(self._store.processes)
        self._store.processes.append(Process(host=host, pid=pid))
        self._store.process_job.append(job)
        self._store.process_agent.append(agent)
        return index

    def _has_host(self, job: str, host: str, source: int) -> bool:
        """Whether a host is known, or its agent and job may have one more."""
        agent = self._store.sources[source].agent
        return (job, host) in self._hosts or self._names.take(Named.HOSTS, agent=agent, job=job, source=source)

    def resolve_batch(self, batch: Batch, *, agent: str, session: str, job: str) -> Arrived:
        """Applies one batch: dictionaries, ranges, captures, versions and counts go to the store at once.

        Operations and kernels are returned, since other stages must complete them first. A new `session`
        of the same source starts its dictionaries again.

        Raises:
            BrokenSourceError: an earlier batch of the session could not be taken in.
        """
        source = self._source(batch, agent)
        dictionaries = self._dictionaries.get(source)
        if dictionaries is None or dictionaries.session != session:
            dictionaries = self._dictionaries[source] = _Dictionaries(session, source)
        if dictionaries.is_broken:
            raise BrokenSourceError(f"{batch.source.name}: an earlier batch of the session could not be taken in")
        dictionaries.is_broken = True
        self._extend(dictionaries, batch, job)
        self._apply_records(batch, source, job)
        self._apply_topologies(batch, job)
        self._apply_ranges(dictionaries, batch)
        self._apply_busy(dictionaries, batch, job)
        if len(batch.outside):
            self._store.outside.append(self._own(self._kernels(batch.outside, dictionaries, source)))
        arrived = Arrived(
            job=job,
            source=source,
            operations=self._operations(batch, dictionaries, source),
            events=batch.communicators,
            event_processes=tuple([self.process(job, event.host, event.pid, source) for event in batch.communicators]),
            tunings=self._own(_tunings(batch, dictionaries)),
            kernels=self._own(self._kernels(batch.kernels, dictionaries, source)),
            inspected=self._own(_inspected(batch, dictionaries, source)),
            calls=self._own(_calls(batch, dictionaries)),
        )
        dictionaries.is_broken = False
        if batch.is_last:
            del self._dictionaries[source]
        return arrived

    def lose_batch(self, batch: Batch, *, agent: str) -> bool:
        """Notes that a batch could not be applied, or not all of it, as a gap of its source.

        True if the rest of the session is lost as well: the source must begin again, in another session.
        """
        source = self._source(batch, agent)
        self.record_lost(source, max(1, _amount(batch)))
        known = self._dictionaries.get(source)
        if known is not None and batch.is_last:
            del self._dictionaries[source]
        return known is not None and known.is_broken and not batch.is_last

    def record_lost(self, source: int, amount: int) -> None:
        """Records rows of a source that arrived in order and on which our own code failed, as a gap."""
        self._store.skipped[INTERNAL_ERROR] += amount
        detail = "what its agent sent could not be applied: please report it, with the service's log"
        gap = SourceGap(reason=INTERNAL_ERROR, amount=amount, unit="records", detail=detail)
        self._store.gaps[source].append(gap)

    def _source(self, batch: Batch, agent: str) -> int:
        key = (agent, batch.source.key)
        index = self._sources.get(key)
        if index is None:
            index = self._sources[key] = self._new_source(SourceState(source=batch.source, agent=agent))
        state = self._store.sources[index]
        state.position = batch.end
        state.is_complete = batch.is_last
        self._slots.record_batch(index, is_complete=batch.is_last)
        return index

    def _new_source(self, state: SourceState) -> int:
        sources = self._store.sources
        index = self._slots.take_slot()
        if index is None:
            sources.append(state)
            return len(sources) - 1
        del self._sources[sources[index].agent, sources[index].source.key]
        sources[index] = state
        return index

    def evict_sources(self, now_ns: int) -> list[int]:
        """After rows have left the store: sources that are read to their end and had no others, now and then only.

        Others may have their places from now on.
        """
        return self._slots.free_slots(now_ns)

    def _extend(self, known: _Dictionaries, batch: Batch, job: str) -> None:
        if batch.strings:
            new = [self._text(text, known.source, job) for text in batch.strings]
            known.strings = np.concatenate([known.strings, np.asarray(new, np.int32)])
        if len(batch.threads):
            self._extend_threads(known, batch.threads, job)
            for process in set(known.thread_process.tolist()):
                self._store.process_source.setdefault(process, known.source)
        if len(batch.operation_templates):
            self._extend_operation_templates(known, batch.operation_templates)
        if len(batch.kernel_templates):
            self._extend_kernel_templates(known, batch.kernel_templates, job)
        if len(batch.range_templates):
            self._extend_range_templates(known, batch.range_templates, job)
        if len(batch.inspected_ranks):
            self._extend_inspected_ranks(known, batch.inspected_ranks, job)

    def _host_processes(self, known: _Dictionaries, table: Columns, job: str) -> Indices:
        """The process of each row of a table with host and pid."""
        strings = self._store.strings
        self._store.source_hosts[known.source].update(
            strings[host] for host in set(known.strings[table["host"]].tolist())
        )
        return np.asarray(
            [
                self.process(job, strings[host], pid, known.source)
                for host, pid in zip(known.strings[table["host"]].tolist(), table["pid"].tolist(), strict=True)
            ],
            np.int32,
        )

    def _own(self, rows: Columns, processes: NDArray[np.integer] | None = None) -> Columns:
        """The rows of processes that their agent may speak of; the others are counted as skipped.

        `processes`: of each row, if it does not say so itself.
        """
        if not self._foreign or not len(rows):
            return rows
        is_foreign = np.isin(rows["process"] if processes is None else processes, list(self._foreign))
        if not is_foreign.any():
            return rows
        self._store.skipped["foreign_host"] += int(np.count_nonzero(is_foreign))
        return row_ops.filter_rows(rows, ~is_foreign)

    def _text(self, text: str, source: int, job: str) -> int:
        """The index of a text, or of "other" if its agent and job may not bring more."""
        strings = self._store.strings
        if strings.find(text) is None:
            amount = _TEXT_BYTES + len(text) * (1 if text.isascii() else 4)
            agent = self._store.sources[source].agent
            if not self._names.take(Named.TEXTS, agent=agent, job=job, source=source, amount=amount):
                text = OTHER
        return strings.index_of(text)

    def _interned(self, index: dict[bytes, int], table: Table, new: Columns, other: Columns) -> Indices:
        """The ids of these template rows in the table; equal rows share one, and those over the limits are `other`."""
        keys = _row_bytes(new)
        over = [row for row, key in enumerate(keys) if key not in index and not self._may_have_template(new[row])]
        if over:
            new[over] = other[over]
            keys = _row_bytes(new)
        ids = np.empty(len(new), np.int32)
        added: list[int] = []
        for row, key in enumerate(keys):
            found = index.get(key)
            if found is None:
                found = index[key] = table.next_id + len(added)
                added.append(row)
            ids[row] = found
        table.append(new[added])
        return ids

    def _may_have_template(self, template: Columns) -> bool:
        return self._names.take_of_process(Named.TEMPLATES, int(template["process"]))

    def _extend_threads(self, known: _Dictionaries, threads: Columns, job: str) -> None:
        processes = self._host_processes(known, threads, job)
        known.thread_process = np.concatenate([known.thread_process, processes])
        known.thread_tid = np.concatenate([known.thread_tid, threads["tid"]])

    def _extend_operation_templates(self, known: _Dictionaries, new: Columns) -> None:
        resolved = np.zeros(len(new), rows.OPERATION_TEMPLATE)
        for name in rows.OPERATION_TEMPLATE.names or ():
            if name in (tables.OPERATION_TEMPLATE.names or ()):
                resolved[name] = new[name]
        resolved["process"] = known.thread_process[new["thread"]]
        resolved["tid"] = known.thread_tid[new["thread"]]
        resolved["op_name"] = known.strings[new["op_name"]]
        other = np.zeros(len(new), rows.OPERATION_TEMPLATE)
        for name in ("device", "data_type", "root", "nranks", "global_rank"):
            other[name] = NO_NUMBER
        for name in ("process", "op", "op_name"):
            other[name] = resolved[name]
        ids = self._interned(self._operation_templates, self._store.operation_templates, resolved, other)
        known.operation_templates = np.concatenate([known.operation_templates, ids])

    def _extend_kernel_templates(self, known: _Dictionaries, new: Columns, job: str) -> None:
        resolved = np.zeros(len(new), rows.KERNEL_TEMPLATE)
        for name in rows.KERNEL_TEMPLATE.names or ():
            if name in (tables.KERNEL_TEMPLATE.names or ()):
                resolved[name] = new[name]
        resolved["process"] = self._host_processes(known, new, job)
        resolved["name"] = known.strings[new["name"]]
        other = np.full(len(new), NO_NUMBER, rows.KERNEL_TEMPLATE)
        other["process"], other["name"] = resolved["process"], self._store.strings.index_of(OTHER)
        ids = self._interned(self._kernel_templates, self._store.kernel_templates, resolved, other)
        known.kernel_templates = np.concatenate([known.kernel_templates, ids])

    def _extend_range_templates(self, known: _Dictionaries, new: Columns, job: str) -> None:
        resolved = np.zeros(len(new), rows.RANGE)
        resolved["process"] = self._host_processes(known, new, job)
        resolved["tid"] = new["tid"]
        resolved["domain"] = known.strings[new["domain"]]
        resolved["text"] = known.strings[new["text"]]
        known.range_templates = np.concatenate([known.range_templates, resolved])
        calls = np.zeros(len(new), rows.API_CALL)
        for name in ("process", "tid"):
            calls[name] = resolved[name]
        for name in ("communicator", "bytes"):
            calls[name] = new[name]
        is_nccl = known.strings[new["domain"]] == self._store.strings.index_of("NCCL")
        texts = [self._store.strings[text] for text in resolved["text"].tolist()]
        calls["kind"] = np.where(is_nccl, [_CALL_KINDS.get(text, NO_NUMBER) for text in texts], NO_NUMBER)
        known.range_calls = np.concatenate([known.range_calls, calls])

    def _extend_inspected_ranks(self, known: _Dictionaries, new: Columns, job: str) -> None:
        resolved = np.zeros(len(new), rows.INSPECTED)
        resolved["source"] = known.source
        resolved["process"] = self._host_processes(known, new, job)
        for name in ("comm_hash", "rank", "nranks"):
            resolved[name] = new[name]
        resolved["name"] = known.strings[new["name"]]
        for name in ("communicator", "operation"):
            resolved[name] = NO_NUMBER
        for name in ("wait_ns", "transfer_ns"):
            resolved[name] = NO_TIME_NS
        known.inspected_ranks = np.concatenate([known.inspected_ranks, resolved])

    def _apply_records(self, batch: Batch, source: int, job: str) -> None:
        known = self._store
        for family, amount in batch.counts.understood.items():
            known.understood[family] += amount
        for reason, amount in batch.counts.skipped.items():
            known.skipped[reason] += amount
        if torn := batch.counts.skipped.get("torn", 0):
            known.torn_lines[source] += torn
        if batch.gaps:
            known.gaps[source].extend(batch.gaps)
        for fact in batch.facts:
            if isinstance(fact, TROUBLES) and fact.host is not None and fact.pid is not None:
                self.process(job, fact.host, fact.pid, source)
            elif isinstance(fact, NetworkDevices) and fact.host is not None and self._has_host(job, fact.host, source):
                self._hosts.add((job, fact.host))
                found = known.network_devices.setdefault((job, fact.host), set())
                found.update(fact.devices[: _MOST_DEVICES - len(found)])
        for capture in batch.captures:
            known.captures.append((source, capture))
        for version in batch.versions:
            if version.host is not None and version.pid is not None:
                known.process_version[self.process(job, version.host, version.pid, source)] = version.version
            known.job_versions[job].add(version.version)
            known.source_versions[source].add(version.version)

    def _apply_topologies(self, batch: Batch, job: str) -> None:
        """Keeps the blocks that differ: every rank prints the same one for each of its communicators."""
        known = self._store
        for seen in batch.topologies:
            key = (job, seen.host)
            content = _topology_digest(key, seen)
            if content in self._topology_contents:
                continue
            if self._topologies[key] >= MAX_TOPOLOGIES:
                known.skipped["too_many_topologies"] += 1
                continue
            self._topology_contents.add(content)
            self._topologies[key] += 1
            known.topologies.setdefault(key, []).append(seen)
            known.topologies_seen += 1

    def _apply_ranges(self, known: _Dictionaries, batch: Batch) -> None:
        if not len(batch.ranges):
            return
        resolved = row_ops.take(known.range_templates, batch.ranges["template"])
        resolved["start_ns"] = batch.ranges["start_ns"]
        resolved["end_ns"] = batch.ranges["end_ns"]
        self._store.ranges.append(self._own(resolved))

    def _apply_busy(self, known: _Dictionaries, batch: Batch, job: str) -> None:
        if not len(batch.busy):
            return
        resolved = np.zeros(len(batch.busy), rows.BUSY)
        (hosts, pids), inverse = distinct_together(batch.busy["host"], batch.busy["pid"])
        pairs = np.empty(len(hosts), [("host", hosts.dtype), ("pid", pids.dtype)])
        pairs["host"], pairs["pid"] = hosts, pids
        resolved["process"] = self._host_processes(known, pairs, job)[inverse]
        for name in ("device_id", "start_ns", "end_ns", "kernels"):
            resolved[name] = batch.busy[name]
        self._store.busy.append(self._own(resolved))

    def _operations(self, batch: Batch, known: _Dictionaries, source: int) -> Columns:
        operations = _operations(batch, known, source)
        if self._foreign and len(operations):
            operations = self._own(operations, self._store.templates_of(operations, "process")["process"])
        if known.call_groups.is_idle and not len(batch.call_marks):
            return operations
        templates = self._store.templates_of(operations, "process", "tid")
        marks = batch.call_marks
        operations["group"] = known.call_groups.group_operations(
            threads=templates["process"].astype(np.int64) << 32 | templates["tid"],
            lines=operations["line"],
            calls=operations["template"],
            marks=marks,
            mark_threads=known.thread_process[marks["thread"]].astype(np.int64) << 32
            | known.thread_tid[marks["thread"]],
        )
        return operations

    def _kernels(self, new: Columns, known: _Dictionaries, source: int) -> Columns:
        if not len(new):
            return no_rows(rows.KERNEL)
        kernels = np.zeros(len(new), rows.KERNEL)
        kernels["source"] = source
        kernels["template"] = known.kernel_templates[new["template"]]
        kernels["process"] = self._store.kernel_templates.rows["process"][kernels["template"]]
        for name in ("correlation_id", "start_ns", "end_ns", "launch_start_ns", "launch_end_ns", "launch_tid"):
            kernels[name] = new[name]
        kernels["graph_node_id"] = new["graph_node_id"]
        kernels["censored"] = (new["flags"] & tables.KERNEL_CENSORED) != 0
        kernels["launch"] = NO_NUMBER
        kernels["replay"] = NO_NUMBER
        return kernels


def _amount(batch: Batch) -> int:
    """Rows and records of a batch, without dictionary entries."""
    records = batch.communicators, batch.versions, batch.captures, batch.facts, batch.topologies, batch.tuning_tables
    return sum(len(getattr(batch, name)) for name in ROW_TABLES) + sum(map(len, records))


def _calls(batch: Batch, known: _Dictionaries) -> Columns:
    if not len(batch.ranges):
        return no_rows(rows.API_CALL)
    calls = row_ops.take(known.range_calls, batch.ranges["template"])
    calls["start_ns"], calls["end_ns"] = batch.ranges["start_ns"], batch.ranges["end_ns"]
    return row_ops.filter_rows(calls, calls["kind"] != NO_NUMBER)


_CALL_KINDS: Final = {
    **{f"nccl{name}": code for name, code in OPERATION_CODES.items()},
    "ncclGroupStart": rows.GROUP_START,
    "ncclGroupEnd": rows.GROUP_END,
}
"""*Source:* the names of NCCL's NVTX ranges are those of its functions, `src/collectives.cc`, `src/group.cc`."""


def _topology_digest(of: tuple[str, str | None], seen: TopologySeen) -> bytes:
    """Identity of a block. Ranks count only if it spans hosts, whose bus ids repeat."""
    spans_hosts = seen.spans_hosts
    nodes = tuple((node.kind, node.system, node.local, node.rank if spans_hosts else None) for node in seen.nodes)
    return hashlib.blake2b(repr((of, nodes, seen.links)).encode(), digest_size=16).digest()


def _row_bytes(table: Columns) -> list[bytes]:
    width = table.dtype.itemsize
    whole = np.ascontiguousarray(table).tobytes()
    return [whole[at : at + width] for at in range(0, len(whole), width)]


def _operations(batch: Batch, known: _Dictionaries, source: int) -> Columns:
    new = batch.operations
    operations = np.empty(len(new), rows.LOGGED)
    operations["source"] = source
    operations["template"] = known.operation_templates[new["template"]]
    operations["line"] = new["line"]
    operations["op_count"] = new["op_count"]
    operations["logged_at_ns"] = new["logged_at_ns"]
    operations["observed_at_ns"] = NO_TIME_NS if batch.observed_at_ns is None else batch.observed_at_ns
    operations["group"] = NO_NUMBER
    return operations


def _tunings(batch: Batch, known: _Dictionaries) -> Columns:
    new = batch.tunings
    if not len(new):
        return no_rows(rows.TUNING)
    tunings = np.zeros(len(new), rows.TUNING)
    tunings["process"] = known.thread_process[new["thread"]]
    tunings["tid"] = known.thread_tid[new["thread"]]
    for name in ("line", "op", "algorithm", "protocol", "channels", "bytes", "expected_us"):
        tunings[name] = new[name]
    return tunings


_TOLD_BY_INSPECTOR: Final = (
    "line", "op", "timing", "algorithm", "protocol", "peer", "duration_ns", "dumped_at_ns", "started_at_ns", "busbw",
    "start_ns", "end_ns",
)  # fmt: skip


def _inspected(batch: Batch, known: _Dictionaries, source: int) -> Columns:
    new = batch.inspected
    if not len(new):
        return known.inspected_ranks[:0]
    inspected: Columns = known.inspected_ranks[new["inspected_rank"]].copy()
    inspected["source"] = source
    for name in _TOLD_BY_INSPECTOR:
        inspected[name] = new[name]
    inspected["sequence"] = np.minimum(new["sequence"], np.uint64(_LARGEST_SEQUENCE)).astype(np.int64)
    inspected["message_bytes"] = bandwidth.scaled_bytes(new["op"], new["bytes"], inspected["nranks"])
    return inspected


def logged_operations(logged: Columns) -> Columns:
    """Operations (rows.PLACED) of which what a log says (rows.LOGGED) is known, and their places are not."""
    placed: Columns = np.empty(len(logged), rows.PLACED)
    for name in rows.PLACED.names or ():
        placed[name] = logged[name] if name in _SAID else NO_NUMBER
    return placed


_SAID: Final = frozenset(rows.LOGGED.names or ())

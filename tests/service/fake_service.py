"""A made-up service with plausible data: `python tests/service/fake_service.py` shows the page with it.

A job of 64 ranks on 8 nodes (TP 8, PP 2, DP 4) with one late rank and one slow data-parallel group, or the same
with logs only (`--logs-only`), or nothing at all (`--empty`). Also the store that the tests of metrics and
overview read; it is written by hand, not by the pipeline.
"""

from __future__ import annotations

import argparse
import socket
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
import uvicorn

from ncclscope_models.description import Completed, Description, Given, Value, completed
from ncclscope_models.expected_step import ExpectedStep
from ncclscope_models.job import ModelError
from ncclscope_service.columns.buckets import window_until
from ncclscope_service.detect.settings import checked_change
from ncclscope_service.intake.aliases import Aliases
from ncclscope_service.intake.journal_entry import FindingMarked
from ncclscope_service.job.step_times import STEP
from ncclscope_service.metrics.scrape import MetricsView, gather
from ncclscope_service.nccl.topology import Channels
from ncclscope_service.rollup.recent_sums import series_key
from ncclscope_service.rollup.series import Tally
from ncclscope_service.serve.api_table import ChangeRequest, MarkRequest
from ncclscope_service.serve.live import Hub
from ncclscope_service.serve.routes import make_app
from ncclscope_service.serve.views import ServiceViews
from ncclscope_service.show.details import JobQuery, query_job
from ncclscope_service.show.finding_events import FindingTracker
from ncclscope_service.show.finding_marks import FindingMarks
from ncclscope_service.show.health import (
    AgentView,
    HealthCheck,
    JournalHealth,
    ReceiverView,
    ServiceHealth,
    journal_check,
    tick_check,
)
from ncclscope_service.show.overview import (
    FindingView,
    HealthView,
    MarksView,
    Overview,
    SettingsView,
    finding_views,
    health_view,
    make_overview,
    settings_view,
)
from ncclscope_service.store.plan_records import (
    PlanClass,
    PlanField,
    PlanLine,
    PlanRecord,
    PlanRule,
)
from ncclscope_service.store.records import (
    Communicator,
    Ending,
    Finding,
    FindingKind,
    HostClock,
    Identity,
    JobClocks,
    Member,
    Process,
    RankStanding,
    Severity,
    Verdict,
)
from ncclscope_service.store.rows import (
    BUSY,
    COLLECTIVE,
    KERNEL,
    KERNEL_TEMPLATE,
    OPERATION,
    OPERATION_TEMPLATE,
    SERIES,
    IterationBy,
    Match,
)
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.facts import RingOrder, TreeNeighbours, TreeNode
from ncclscope_wire.records import CaptureSeen, SourceGap
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS, OPERATION_CODES
from ncclscope_wire.topology import LinkKind, NodeKind, TopologyLink, TopologyNode, TopologyOrigin, TopologySeen

NOW_NS: Final = 1_763_726_400_000_000_000
"""A fixed time at which the tests look."""

SECOND: Final = 1_000_000_000

JOB: Final = "llama-70b-pretrain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A communicator to make, and how it does."""

    parallelism: str
    ranks: tuple[int, ...]
    op: str
    message_bytes: int
    size_class: int
    busbw: float
    limit: float
    wait: float
    """Mean share of waiting."""
    slowed_from: float | None = None
    """Share of the window after which it has 62 % of its bandwidth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The job to make: TP within a node, then DP, then PP."""

    nodes: int = 8
    per_node: int = 8
    pipeline: int = 2
    late_rank: int = 37
    host_prefix: str = "gpu-node"
    job: str = JOB
    noise: float = 1.0
    """0: the same number in every bucket."""

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node


def groups_of(shape: Shape) -> list[Group]:
    """All communicators of the job."""
    per_stage = shape.nodes // shape.pipeline
    groups = [
        Group(parallelism="WORLD", ranks=tuple(range(shape.ranks)), op="AllReduce", message_bytes=4, size_class=0,
              busbw=2.1e5, limit=48e9, wait=0.31),
    ]  # fmt: skip
    for node in range(shape.nodes):
        ranks = tuple(range(node * shape.per_node, (node + 1) * shape.per_node))
        groups.append(Group(parallelism="TP", ranks=ranks, op="AllReduce", message_bytes=64 * 1024**2, size_class=4,
                            busbw=338e9 + 4e9 * (node % 3), limit=370e9, wait=0.05))  # fmt: skip
    for stage in range(shape.pipeline):
        for local in range(shape.per_node):
            ranks = tuple((stage * per_stage + i) * shape.per_node + local for i in range(per_stage))
            groups.append(
                Group(parallelism="DP", ranks=ranks, op="ReduceScatter", message_bytes=512 * 1024**2, size_class=5,
                      busbw=41e9 + 0.6e9 * (local % 4), limit=48.5e9, wait=0.12,
                      slowed_from=0.62 if (stage, local) == (1, 3) else None))  # fmt: skip
    for i in range(shape.ranks // 8):
        pair = (i, i + shape.ranks // 2)
        groups.append(Group(parallelism="PP", ranks=pair, op="Send", message_bytes=32 * 1024**2, size_class=4,
                            busbw=22e9 + 0.4e9 * (i % 3), limit=24.2e9, wait=0.0))  # fmt: skip
    return groups


def no_operations(amount: int) -> Columns:
    """Rows of which nothing is known."""
    rows = np.zeros(amount, OPERATION)
    for name in ("logged_at_ns", "observed_at_ns", "start_ns", "end_ns", "start_true_ns", "end_true_ns",
                 "clock_uncertainty_ns", "wait_ns", "transfer_ns"):  # fmt: skip
        rows[name] = NO_TIME_NS
    for name in ("op_count", "coll_seq", "pair_seq", "iteration", "algorithm", "protocol", "channels", "launch",
                 "kernel", "limit_reference"):  # fmt: skip
        rows[name] = np.array(NO_NUMBER).astype(rows.dtype[name])
    for name in ("algbw", "busbw", "busbw_apparent", "limit", "confidence"):
        rows[name] = np.nan
    return rows


def bus_id_of(gpu: int) -> int:
    """The PCI address of a GPU of a made-up node."""
    return 0x1B000 + 0x20000 * gpu


def system_block(host: str, gpus: int) -> TopologySeen:
    """Two sockets, a PCI switch with a network card for each two GPUs, all GPUs on NVSwitch."""
    nodes: list[TopologyNode] = []
    links: list[TopologyLink] = []

    def add(kind: NodeKind, local: int) -> int:
        nodes.append(TopologyNode(kind=kind, system=0, local=local))
        return len(nodes) - 1

    def link(one: int, other: int, kind: LinkKind, rate: float) -> None:
        links.extend(TopologyLink(*ends, kind, round(rate * 1e9)) for ends in ((one, other), (other, one)))

    sockets = add(NodeKind.CPU, 0), add(NodeKind.CPU, 1)
    link(*sockets, LinkKind.SYS, 40)
    switch = add(NodeKind.NVS, 0)
    for first in range(0, gpus, 2):
        bridge = add(NodeKind.PCI, bus_id_of(first) - 0x3000)
        link(sockets[first >= gpus / 2], bridge, LinkKind.PCI, 48)
        for gpu in range(first, min(first + 2, gpus)):
            node = add(NodeKind.GPU, bus_id_of(gpu))
            link(bridge, node, LinkKind.PCI, 48)
            link(node, switch, LinkKind.NVL, 370.8)
        card, port = add(NodeKind.NIC, bus_id_of(first) - 0x1000), add(NodeKind.NET, first // 2)
        link(bridge, card, LinkKind.PCI, 48)
        link(card, port, LinkKind.NET, 50)
    return TopologySeen(
        origin=TopologyOrigin.LOG, host=host, pid=4000, tid=4000, line=1, nodes=tuple(nodes), links=tuple(links)
    )


class StoreMaker:
    """Writes a store by hand: processes, communicators, and their last minutes."""

    def __init__(
        self,
        shape: Shape,
        *,
        now_ns: int,
        with_kernels: bool = True,
        per_minute: int = 24,
        found_ns: int | None = None,
    ) -> None:
        self.store = Store()
        self._shape = shape
        self._now_ns = now_ns
        self._found_ns = now_ns if found_ns is None else found_ns
        self._with_kernels = with_kernels
        self._per_minute = per_minute
        self._random = np.random.default_rng(7)
        self._launch = 0

    def make(self) -> Store:
        """The whole store."""
        self._add_processes()
        for group in groups_of(self._shape):
            self._add_communicator(group)
        self._add_coverage()
        self._add_topologies()
        if self._with_kernels:
            self._add_captures()
            self._add_clocks()
            self._add_findings()
        self._add_steps()
        self._add_history()
        return self.store

    def host(self, node: int) -> str:
        return f"{self._shape.host_prefix}{node:02d}"

    def _add_processes(self) -> None:
        for rank in range(self._shape.ranks):
            self.store.processes.append(Process(host=self.host(rank // self._shape.per_node), pid=4000 + rank))
            self.store.process_job.append(self._shape.job)
            self.store.process_version[rank] = "2.28.3"

    def _add_communicator(self, group: Group) -> None:
        store = self.store
        index = len(store.communicators)
        members: dict[int, int] = {}
        for rank, global_rank in enumerate(group.ranks):
            members[rank] = len(store.members)
            store.members.append(
                Member(index=len(store.members), communicator=index, process=global_rank, pointer=0x7F00_0000 + index,
                       epoch=0, rank=rank, cuda_device=global_rank % self._shape.per_node,
                       bus_id=bus_id_of(global_rank % self._shape.per_node),
                       global_rank=global_rank, local_rank=global_rank % self._shape.per_node))  # fmt: skip
        store.communicators.append(
            Communicator(index=index, job=self._shape.job, comm_id=f"0x{0x51C0_6CBA_0000_0000 + index * 0x9E37:x}",
                         size=len(group.ranks), identity=Identity.COMM_ID, parallelism=group.parallelism,
                         parallelism_confidence=0.9, members=members))  # fmt: skip
        self._add_rows(index, group, list(members.values()))

    def _times(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """When each collective of a group ends: the window, capture duty of one half where there are kernels."""
        amount = 5 * self._per_minute
        step = 300 * SECOND // amount
        times: np.ndarray[tuple[int], np.dtype[np.int64]] = self._now_ns - step * np.arange(amount, 0, -1)
        return times

    def _add_rows(self, index: int, group: Group, members: list[int]) -> None:
        times = self._times()
        shares = (times - times[0]) / (times[-1] - times[0])
        speed = np.where(shares > (group.slowed_from if group.slowed_from is not None else 2.0), 0.62, 1.0)
        busbw = group.busbw * speed * (1 + 0.015 * self._shape.noise * self._random.standard_normal(len(times)))
        size = len(members)
        # Whole nanoseconds, so that sums are exact and a golden file holds on every machine.
        transfer = np.rint(np.maximum(group.message_bytes * 1.5 / busbw * SECOND, 9000.0))
        waits = self._waits(group, transfer, shares)
        template = self._template(group, members[0])
        for position, member in enumerate(members):
            self._add_operations(group, template, member, times, transfer, waits[position], busbw, size)
        if self._with_kernels:
            self._add_collectives(index, group, times, transfer, waits, busbw)
        self._add_series(index, group, size, transfer, waits, busbw)

    def _waits(self, group: Group, transfer: np.ndarray[tuple[int], np.dtype[np.float64]],
               shares: np.ndarray[tuple[int], np.dtype[np.float64]]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:  # fmt: skip # noqa: E501
        size = len(group.ranks)
        noise = 1 + self._shape.noise * (self._random.gamma(9.0, 1 / 9, size=(size, len(transfer))) - 1)
        waits = np.rint(transfer * group.wait / (1 - group.wait) * noise)
        last = np.arange(len(transfer)) % size
        if self._shape.late_rank in group.ranks:
            is_late = shares > 0.45
            last[is_late] = group.ranks.index(self._shape.late_rank)
            waits[:, is_late] += 7.5e-3 * SECOND * (1 if group.parallelism == "TP" else 0.25)
        waits[last, np.arange(len(transfer))] = 0.0
        return waits

    def _template(self, group: Group, member: int) -> int:
        row = np.zeros(1, OPERATION_TEMPLATE)
        row["process"] = self.store.members[member].process
        row["op"] = OPERATION_CODES[group.op]
        row["op_name"] = self.store.strings.index_of(group.op)
        return int(self.store.operation_templates.append(row)[0])

    def _add_operations(self, group: Group, template: int, member: int,
                        times: np.ndarray[tuple[int], np.dtype[np.int64]],
                        transfer: np.ndarray[tuple[int], np.dtype[np.float64]],
                        wait: np.ndarray[tuple[int], np.dtype[np.float64]],
                        busbw: np.ndarray[tuple[int], np.dtype[np.float64]], size: int) -> None:  # fmt: skip
        amount = len(times)
        rows = no_operations(amount)
        rows["template"], rows["member"] = template, member
        rows["process"] = self.store.members[member].process
        rows["seq"] = np.arange(amount)
        rows["coll_seq"] = NO_NUMBER if group.op == "Send" else np.arange(amount)
        rows["message_bytes"] = group.message_bytes
        rows["observed_at_ns"] = times + 400_000_000
        rows["logged_at_ns"] = times - 3_000_000
        rows["launch"] = self._launch + np.arange(amount)
        self._launch += amount
        rows["match"], rows["finished"] = Match.NOT_COVERED, True
        if self._with_kernels:
            captured = (times // SECOND) % 60 < 42
            rows["match"] = np.where(captured, Match.MATCHED, Match.NOT_COVERED)
            lost = captured & (self._random.random(amount) < 0.004 * self._shape.noise)
            rows["match"][lost] = Match.UNMATCHED
            seen = captured & ~lost
            for column in ("end_ns", "end_true_ns"):
                rows[column][seen] = times[seen]
            for column in ("start_ns", "start_true_ns"):
                rows[column][seen] = (times - transfer - wait).astype(np.int64)[seen]
            is_lone = group.op == "Send"
            rows["wait_ns"][seen & (not is_lone)] = wait.astype(np.int64)[seen & (not is_lone)]
            rows["transfer_ns"][seen] = transfer.astype(np.int64)[seen]
            rows["busbw"][seen] = busbw[seen]
            rows["ranks_seen"][seen] = size
            rows["confidence"][seen] = 0.99
            if self._shape.noise == 0.0 and group.parallelism == "DP":
                self._add_iteration(rows, int(np.flatnonzero(seen)[0]))
        rows["match"][-2:] = Match.PENDING
        rows["finished"][-2:] = False
        finished = rows["finished"].copy()
        self.store.finish(self.store.operations.at(self.store.operations.append(rows)[finished]))

    def _add_iteration(self, rows: np.ndarray[tuple[int], np.dtype[np.void]], at: int) -> None:
        """One whole iteration of a rank, with a kernel of 5 ms of which computation hides 2 ms."""
        store, process = self.store, int(rows["process"][at])
        template = np.zeros(1, KERNEL_TEMPLATE)
        template["process"] = process
        kernel = np.zeros(1, KERNEL)
        kernel["process"], kernel["template"] = process, store.kernel_templates.append(template)
        kernel["launch_start_ns"] = kernel["launch_end_ns"] = NO_TIME_NS
        kernel["end_ns"] = rows["end_ns"][at]
        kernel["start_ns"] = kernel["end_ns"] - 5_000_000
        following = kernel.copy()  # the first of the next iteration
        following["start_ns"], following["end_ns"] = kernel["end_ns"] + 1_000_000, kernel["end_ns"] + 2_000_000
        rows["kernel"][at : at + 2] = store.kernels.append(np.concatenate([kernel, following]))
        rows["iteration"][at : at + 2], rows["iteration_by"][at : at + 2] = [7, 8], IterationBy.MARKS
        busy = np.zeros(1, BUSY)
        busy["process"], busy["kernels"] = process, 1
        busy["start_ns"], busy["end_ns"] = kernel["start_ns"], kernel["start_ns"] + 2_000_000
        store.busy.append(busy)

    def _add_collectives(self, index: int, group: Group, times: np.ndarray[tuple[int], np.dtype[np.int64]],
                         transfer: np.ndarray[tuple[int], np.dtype[np.float64]],
                         waits: np.ndarray[tuple[int, int], np.dtype[np.float64]],
                         busbw: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:  # fmt: skip
        captured = (times // SECOND) % 60 < 42
        rows = np.zeros(len(times), COLLECTIVE)
        size = len(group.ranks)
        rows["communicator"], rows["op"], rows["size_class"] = index, OPERATION_CODES[group.op], group.size_class
        rows["coll_seq"] = np.arange(len(times))
        rows["message_bytes"], rows["ranks_seen"] = group.message_bytes, size
        rows["end_true_ns"] = times
        rows["first_start_true_ns"] = times - (transfer + waits.max(axis=0)).astype(np.int64)
        rows["transfer_ns"] = transfer
        rows["wait_ns"] = waits.sum(axis=0)
        rows["spread_ns"] = waits.max(axis=0)
        rows["busy_ns"] = rows["wait_ns"] + size * rows["transfer_ns"]
        rows["last_rank"] = waits.argmin(axis=0)
        rows["rank"] = rows["peer"] = NO_NUMBER
        rows["blame_ns"] = np.sort(waits, axis=0)[min(1, size - 1)]
        rows["busbw"], rows["confidence"] = busbw, 0.99
        if group.op == "Send":
            rows["coll_seq"] = rows["last_rank"] = rows["blame_ns"] = NO_NUMBER
            rows["ranks_seen"] = 1
        self.store.collectives.append(rows[captured])

    def _add_series(self, index: int, group: Group, size: int, transfer: np.ndarray[tuple[int], np.dtype[np.float64]],
                    waits: np.ndarray[tuple[int, int], np.dtype[np.float64]],
                    busbw: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:  # fmt: skip
        secondary = {"TP": ("AllGather", 4), "DP": ("AllGather", 5), "PP": ("Recv", 4)}
        rows = np.zeros(2 if group.parallelism in secondary else 1, SERIES)
        rows["communicator"] = index
        rows["op"][0], rows["size_class"][0] = OPERATION_CODES[group.op], group.size_class
        if len(rows) == 2:
            name, rows["size_class"][1] = secondary[group.parallelism]
            rows["op"][1] = OPERATION_CODES[name]
        per_iteration = {"TP": 96, "DP": 2, "PP": 16, "WORLD": 1}[group.parallelism]
        rows["operations"] = 1840 * per_iteration * size
        rows["bytes"] = rows["operations"] * group.message_bytes // np.array([1, 2][: len(rows)])
        for column in ("busbw", "baseline", "limit"):
            rows[column] = np.nan
        if self._with_kernels:
            rows["matched"] = rows["operations"] // 2
            rows["duration_ns"] = rows["matched"] * (transfer.mean() + waits.mean())
            if group.op != "Send":
                rows["waiting_duration_ns"] = rows["duration_ns"]
                rows["wait_ns"] = rows["matched"] * waits.mean()
                rows["collectives"] = rows["matched"] // size
                rows["transfer_ns"] = rows["collectives"] * transfer.mean()
            rows["busbw"] = np.median(busbw[-12:]) * np.array([1.0, 0.96][: len(rows)])
            rows["baseline"] = group.busbw * 1.01
            rows["limit"] = group.limit
            if self._shape.noise == 0.0 and group.parallelism == "DP":
                self._add_inspector(rows[:1])
        self.store.series.append(rows)

    def _add_inspector(self, rows: np.ndarray[tuple[int], np.dtype[np.void]]) -> None:
        """Data parallelism is seen by NCCL Inspector as well, half a percent shorter than by nsys."""
        rows["inspected"] = rows["compared"] = rows["matched"]
        rows["inspected_ns"] = rows["compared_inspected_ns"] = rows["duration_ns"] * 995 // 1000
        rows["compared_kernel_ns"] = rows["duration_ns"]
        for outcome, amount in (("with_operation", 3680), ("without_operation", 12), ("not_gpu_timed", 4)):
            self.store.inspector_records[self.store.process_job[0], outcome] = amount

    def _add_coverage(self) -> None:
        store = self.store
        store.understood.update({"operation": 1_482_910, "init": 1_216, "tuning": 84_772, "version": 64})
        store.numbers_healed[self._shape.job, "kernel"] = 214
        store.numbers_uncertain[self._shape.job] = 3
        store.alignment_checked[self._shape.job], store.alignment_disagreements[self._shape.job] = 912_004, 318
        store.skipped.update({"not_nccl": 5_310, "unknown_nccl": 212, "torn": 9})
        store.gaps[0].append(
            SourceGap(reason="truncated", amount=8192, unit="bytes", detail="the log was truncated while it was read")
        )

    def _add_topologies(self) -> None:
        """Of all hosts but the last, and rings and trees of the first group of tensor parallelism."""
        store, shape = self.store, self._shape
        for node in range(shape.nodes - 1):
            store.topologies[shape.job, self.host(node)] = [system_block(self.host(node), shape.per_node)]
        first = next(each for each in store.communicators if each.parallelism == "TP")
        channels = store.channels[first.index] = Channels(first.size)
        for channel in range(2):
            channels.add_fact(RingOrder(line=1, channel=channel, ranks=tuple(range(first.size))))
            for rank in range(first.size):
                tree = TreeNode(channel=channel, up=rank - 1, rank=rank, down=(rank + 1, -1, -1))
                channels.add_fact(TreeNeighbours(line=1, nodes=(tree,)))

    def _add_captures(self) -> None:
        for node in range(self._shape.nodes):
            pids = tuple(4000 + node * self._shape.per_node + i for i in range(self._shape.per_node))
            for minute in range(6):
                start = (self._now_ns // (60 * SECOND) - minute) * 60 * SECOND
                self.store.captures.append((0, CaptureSeen(
                    host=self.host(node), host_is_recorded=True, start_ns=start, end_ns=start + 42 * SECOND,
                    pids=pids, product_version="2025.3", schema_version="3.20.3", nccl_kernels=40_000,
                    other_kernels=900_000, graph_launches=0)))  # fmt: skip
        kernels = np.zeros(self._shape.ranks, KERNEL)
        kernels["process"] = np.arange(self._shape.ranks)
        self.store.kernels.append(kernels)

    def _add_clocks(self) -> None:
        self.store.stamp_offsets.learn(self.store.operations.take(np.arange(self.store.operations.next_id)), NOW_NS)
        clocks: dict[str, HostClock] = {}
        offsets = (
            np.rint(self._random.normal(0, 240e3, self._shape.nodes)) if self._shape.noise else np.full(99, -2500.0)
        )
        drifts = np.rint(self._random.normal(0, 9, self._shape.nodes)) if self._shape.noise else np.full(99, 12.5)
        for node in range(self._shape.nodes):
            is_reference = node == 0
            clocks[self.host(node)] = HostClock(
                offset_ns=0.0 if is_reference else float(offsets[node]),
                drift_ppm=0.0 if is_reference else float(drifts[node]),
                at_ns=self._now_ns - 2 * SECOND,
                sigma_ns=0.0 if is_reference else 620.0 + 90.0 * node,
                interval_lo_ns=None, interval_hi_ns=None, samples=0 if is_reference else 18_000 + 137 * node,
            )  # fmt: skip

        self.store.clocks[self._shape.job] = JobClocks(reference=self.host(0), hosts=clocks, violation_ratio=0.0)

    def _add_steps(self) -> None:
        """Steps of two seconds for half an hour, 7.5 ms longer since a rank comes late."""
        began_ns = self._now_ns - 1800 * SECOND
        steps = np.zeros(900, STEP)
        steps["iteration"], steps["started_ns"] = np.arange(900), began_ns + 2 * SECOND * np.arange(900)
        steps["duration_ns"] = 400_000_000 + np.rint(self._random.normal(0, 2e6, 900) * min(self._shape.noise, 1))
        steps["duration_ns"][steps["started_ns"] >= self._found_ns - 164 * SECOND] += 9_400_000
        self.store.step_histories[self._shape.job].add(steps)

    def _add_history(self) -> None:
        """What is known of the 25 minutes before the window: another rank was late for a while, and a group slow."""
        history, random = self.store.job_histories[self._shape.job], np.random.default_rng(8)
        times = window_until(self._now_ns).begin_ns - 5 * SECOND * np.arange(300, 0, -1)
        is_bad = (np.arange(300) >= 60) & (np.arange(300) < 150)
        for index, group in enumerate(groups_of(self._shape)):
            amount = group.message_bytes * len(group.ranks) * self._per_minute // 12
            history.bytes.add(times, np.full(300, index), np.full(300, amount))
            if not self._with_kernels:
                continue
            op, size = np.array([OPERATION_CODES[group.op]]), np.array([group.size_class])
            key = series_key(np.array([index]), op, size)[0]
            busbw = group.busbw * (1 + 0.01 * random.standard_normal(300)) * np.where(is_bad & (index == 2), 0.7, 1.0)
            transfer = np.full(300, 2e9)
            history.bandwidths.add(times, np.full(300, key), np.rint(busbw * transfer), transfer)
            for member in (self.store.communicators[index].members or {}).values():
                duration = np.full(300, SECOND)
                history.waits.add(times, np.full(300, member), np.rint(duration * group.wait), duration)
        if self._with_kernels:
            for rank in range(self._shape.ranks):
                lost = np.where(is_bad & (rank == self._shape.late_rank // 2), 6e6, 2e4 * random.random(300))
                history.lost_time.add(times, np.full(300, rank), np.rint(lost) * 12, np.full(300, 12))
            history.is_lost_per_step, history.lost_until_ns = True, int(times[-1]) + 5 * SECOND

    def _add_findings(self) -> None:
        shape, store = self._shape, self.store
        late_host = self.host(shape.late_rank // shape.per_node)
        tp = next(c for c in store.communicators if c.parallelism == "TP" and self._holds(c, shape.late_rank))
        store.findings.append(Finding(
            kind=FindingKind.LATE_RANK, severity=Severity.CRITICAL, job=shape.job, comm_id=tp.comm_id, parallelism="TP",
            ranks=(shape.late_rank,), hosts=(late_host,), since_ns=self._found_ns - 164 * SECOND, until_ns=None,
            confidence=0.98, summary=f"Rank {shape.late_rank} on {late_host} arrives 7.5 ms late in every AllReduce; "
            "the other 7 ranks of its group wait for it.",
            evidence={"cost_ns": 9_400_000, "collectives": [f"{tp.comm_id}:100"], "groups": [tp.comm_id]}))  # fmt: skip
        if shape.nodes >= 8:
            dp = [c for c in store.communicators if c.parallelism == "DP"][11]
            store.findings.append(Finding(
                kind=FindingKind.BANDWIDTH_DROP, severity=Severity.WARNING, job=shape.job, comm_id=dp.comm_id,
                parallelism="DP", ranks=(35, 43, 51, 59), hosts=(self.host(6),), since_ns=self._found_ns - 112 * SECOND,
                until_ns=None, confidence=0.91, summary="ReduceScatter of 537 MB fell from 42.9 to 26.5 GB/s, "
                f"while its 15 sibling groups did not; the ring's narrow place is the network of {self.host(6)}.",
                evidence={"before": 42.9e9, "after": 26.5e9}))  # fmt: skip

    def _holds(self, communicator: Communicator, rank: int) -> bool:
        return any(self.store.members[i].global_rank == rank for i in (communicator.members or {}).values())


def agents_of(shape: Shape, *, now_ns: int) -> list[AgentView]:
    """One agent per node; the last one is gone."""
    return [
        AgentView(
            name=f"{shape.host_prefix}{node:02d}/agent",
            host=f"{shape.host_prefix}{node:02d}",
            job=shape.job,
            connected=node != shape.nodes - 1,
            last_contact_ns=now_ns - (300_000_000 if node != shape.nodes - 1 else 41 * SECOND),
            lag_seconds=0.05 + 0.01 * node,
            lines_total=184_000 + 977 * node,
            bytes_read_total=38_000_000 + 10_007 * node,
            unread_bytes=512 * node,
            skipped={"not_nccl": 660 + node, "file_unreadable": node},
            cpu_seconds=12.5 + 0.25 * node,
            rss_bytes=61_000_000 + 65_536 * node,
            sent_bytes_total=24_000_000 + 1_000 * node,
            is_slowed=False,
            queued_batches=0,
            spool_bytes=4_096 * (node + 1),
            spool_oldest_seconds=0.0,
            spool_dropped=0,
            spool_replayed=12 * node,
            spool_failures=0,
        )
        for node in range(shape.nodes)
    ]


LACKING: Final = "48 operations are unexplained, and no single field of the description explains them"


def plan(job: str = JOB) -> PlanRecord:
    """A job of two stages that lacks operations of a layer."""
    rule = PlanRule(operations=40, source="Megatron-LM <core_r0.13.0> tensor_parallel/mappings.py")
    wrong = PlanLine(
        groups=("tp",), comm_size=8, op="AllReduce", dtype="BF16", count=131_072, expected=40, observed=32,
        expected_bytes=40 * 262_144, logged_bytes=32 * 262_144, message_bytes=32 * 262_144,
        wire_bytes=56 * 262_144, reason="unexplained", rules={"layers": rule}, is_control=False,
        why="layers; UNEXPLAINED",
    )  # fmt: skip
    sent = replace(
        wrong, groups=("pp",), comm_size=2, op="Send", expected=8, observed=8, expected_bytes=8 * 262_144,
        logged_bytes=8 * 262_144, message_bytes=8 * 262_144, wire_bytes=8 * 262_144, reason="rule",
        rules={"pipeline": replace(rule, operations=8)}, why="pipeline",
    )  # fmt: skip
    return PlanRecord(
        job=job, model="5 layers, hidden <512>", verdict=LACKING,
        rules="rules of megatron 0.13", may_raise=True, not_covered=(), not_nccl=(),
        fields={"layers": PlanField(value=5, source="model.toml")}, micro_batches=8, batch="64 / (8 x 1)",
        rank_order="tp-cp-ep-dp-pp", iterations=(3, 4, 5), rank_iterations=6, rank_iterations_with_lost_lines=0,
        rank_iterations_skipped=0, unexplained_operations=48, unexplained_bytes=48 * 262_144,
        edits=(),
        classes=(PlanClass(ranks=(0, 8), iterations=(3, 4, 5), rank_iterations=6, lines=(sent, wrong)),),
    )  # fmt: skip


def description(shape: Shape) -> Completed | None:
    """Of that job, with a layer too many; None if the ranks do not divide so."""
    values: dict[str, Value] = {
        "framework": "megatron", "version": "0.13", "layers": 6, "hidden": 1024, "heads": 16, "sequence": 512,
        "vocabulary": 32_768, "tensor": shape.per_node, "pipeline": shape.pipeline, "ranks": shape.ranks,
        "micro_batch": 1, "global_batch": 64, "precision": "BF16", "ffn": 4096, "kv_heads": 16,
        "positions_learned": 512, "gated": False, "norm": "LayerNorm", "bias": True, "tied": True,
    }  # fmt: skip
    try:
        return completed(Description({name: Given(value, "model.toml") for name, value in values.items()}))
    except ModelError:
        return None


def hanging(late_rank: int, job: str = JOB) -> Verdict:
    """The verdict of a job in which one rank hangs and another waits for it."""
    culprit = RankStanding(
        rank=late_rank, host="gpu-node04", comm_id="0x1", parallelism="TP", enqueued=399, behind=1,
        stopped_at="0x1:399", waits_for=(), blamed=(), last_words="RuntimeError: <b>bad</b>",
    )  # fmt: skip
    waiting = replace(
        culprit, rank=38, enqueued=400, behind=0, waits_for=(late_rank,), blamed=(late_rank,), last_words=None
    )
    return Verdict(
        job=job,
        ending=Ending.HANG,
        is_provisional=True,
        ranks=(late_rank,),
        summary=f"rank {late_rank} never enqueued operation 400 of TP group tp-32",
        standing=(culprit, waiting),
    )


@dataclass
class FakeService(ServiceViews):
    """The views of a service over a hand-made store."""

    shape: Shape = field(default_factory=Shape)
    now_ns: int | None = NOW_NS
    """None = the clock; the store is then made anew once a second, so that the page moves."""
    with_kernels: bool = True
    is_empty: bool = False
    is_silent: bool = False
    """The job hangs, as its logs stand."""
    per_minute: int = 24
    ready: tuple[bool, str] = (True, "ready: 8 agents have connected")
    disk_trouble: str = ""
    hub: Hub = field(default_factory=Hub)
    snapshots: list[tuple[str | None, float | None]] = field(default_factory=list[tuple[str | None, float | None]])
    aliases: Aliases = field(default_factory=Aliases)
    found_ns: int | None = None
    """When the findings were found; set at the first look, so that they grow older."""
    extra_findings: list[Finding] = field(default_factory=list[Finding])

    known: FindingMarks = field(default_factory=FindingMarks)
    changed: dict[str, float] = field(default_factory=dict[str, float])

    _tracker: FindingTracker = field(default_factory=FindingTracker, init=False)
    _last: Store | None = field(default=None, init=False)
    _last_ns: int = field(default=0, init=False)
    _making: threading.Lock = field(default_factory=threading.Lock, init=False)

    def store(self, now_ns: int) -> Store:
        """The store at a time; the same one for a second, and as long as nothing was found or marked."""
        with self._making:
            if self._last is None or self.extra_findings or now_ns - self._last_ns >= SECOND:
                self._last, self._last_ns = self._made(now_ns), now_ns
            return self._last

    def _made(self, now_ns: int) -> Store:
        if self.is_empty:
            return Store()
        self.found_ns = self.found_ns or now_ns
        maker = StoreMaker(
            self.shape,
            now_ns=now_ns,
            with_kernels=self.with_kernels,
            per_minute=self.per_minute,
            found_ns=self.found_ns,
        )
        store = maker.make()
        store.findings.extend(self.extra_findings)
        store.plans[self.shape.job] = plan(self.shape.job)
        store.description, store.gpu = description(self.shape), "H100 SXM"
        store.expected_step = ExpectedStep(low=0.48, typical=0.5, high=0.52, run="before", is_same=True)
        if self.is_silent:
            store.verdicts[self.shape.job] = hanging(self.shape.late_rank, self.shape.job)
        self.aliases.update(store.communicators, store.members)
        self._tracker.compare(finding_views(store, self.aliases, most=None), now_ns)
        store.findings = self.known.marked(self._tracker.identified(store.findings))
        return store

    def marks(self) -> MarksView:
        return MarksView(acknowledged=self.known.acknowledged, mutes=tuple(self.known.mutes.values()))

    def mark(self, asked: MarkRequest) -> None:
        now_ns = time.time_ns() if self.now_ns is None else self.now_ns
        entry = FindingMarked(
            action=asked.action, at_ns=now_ns, by=asked.by, note=asked.note, finding=asked.finding, kind=asked.kind,
            job=asked.job, ranks=asked.ranks, hosts=asked.hosts, until_ns=now_ns + round(asked.seconds * 1e9),
            mute=asked.mute,
        )  # fmt: skip
        self.known.check(entry, self.store(now_ns).findings)
        with self._making:
            self.known, self._last = self.known.applied(entry), None

    def settings(self) -> SettingsView:
        return settings_view({"late_rank.least_share": 0.02}, self.changed, ())

    def change_settings(self, asked: ChangeRequest) -> None:
        values = {**self.changed, **checked_change(asked.values, self.changed)}
        self.changed = {name: value for name, value in values.items() if value is not None}

    def findings(self) -> tuple[FindingView, ...]:
        store = self.store(time.time_ns() if self.now_ns is None else self.now_ns)
        self.aliases.update(store.communicators, store.members)
        return finding_views(store, self.aliases, most=None)

    def health(self) -> HealthView:
        return health_view(self.store(NOW_NS), self.service_health())

    def service_health(self) -> ServiceHealth:
        statistics = self.hub.statistics()
        return ServiceHealth(
            version="0.1.0", agents_port=9797, agents_need=("--tls-ca", "--token-file"),
            sessions_refused={"protocol_version": 1},
            http_refused={"unauthorized": 2}, ingest_lag_seconds=0.21, backlog_batches=0,
            page_clients=statistics.clients, page_events_dropped=statistics.dropped_total, tick_seconds=0.016,
            mistakes={"align": 1},
            receivers=(
                ReceiverView(
                    name="hooks.example", outcomes={"delivered": 3, "failed": 1, "dropped": 0}, retries=2, queued=1
                ),
            ),
            journal=JournalHealth(
                bytes=5_000_000, waiting_bytes=0, write_seconds=0.004, errors=0, trouble=self.disk_trouble, damaged=0,
                missing=0, replayed_batches=120, restore_seconds=1.5, state_age_seconds=42.0, state_bytes=9_000_000,
                state_seconds=0.3, pause_seconds=0.02,
            ),
        )  # fmt: skip

    def overview(self) -> Overview:
        now_ns = time.time_ns() if self.now_ns is None else self.now_ns
        agents = [] if self.is_empty else agents_of(self.shape, now_ns=now_ns)
        return make_overview(
            self.store(now_ns), aliases=self.aliases, agents=agents, health=self.service_health(), now_ns=now_ns
        )

    def job(self, name: str) -> JobQuery | None:
        now_ns = time.time_ns() if self.now_ns is None else self.now_ns
        return query_job(self.store(now_ns), self.aliases, name, now_ns)

    def metrics(self) -> MetricsView:
        now_ns = time.time_ns() if self.now_ns is None else self.now_ns
        store, tally = self.store(now_ns), Tally()
        tally.count_rows(store)
        agents = [] if self.is_empty else agents_of(self.shape, now_ns=now_ns)
        return gather(
            store, tally=tally, aliases=self.aliases, agents=agents, health=self.service_health(), now_ns=now_ns
        )

    def health_checks(self) -> tuple[HealthCheck, ...]:
        return tick_check(0.1), journal_check(self.disk_trouble)

    def is_ready(self) -> tuple[bool, str]:
        return self.ready

    async def write_snapshot(self, directory: Path, job: str | None, minutes: float | None) -> None:
        self.snapshots.append((job, minutes))
        (directory / "summary.json").write_text('{"operations": 3}')
        (directory / "trace.json.gz").write_bytes(b"\x1f\x8b not really")


def asked_of(store: Store, job: str = JOB, now_ns: int = NOW_NS) -> JobQuery:
    """A query about a job that the store has."""
    query = query_job(store, Aliases(), job, now_ns)
    assert query is not None
    return query


def small(service: FakeService) -> FakeService:
    """The same with 8 ranks on 2 nodes and few operations."""
    return replace(service, shape=Shape(nodes=2, per_node=4, pipeline=1, late_rank=5, noise=0.0), per_minute=6)


def main() -> None:
    """Serves the page until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8899, help="0: any; the port is printed")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--host-prefix", default="gpu-node", help="how the names of hosts begin")
    parser.add_argument("--job", default=JOB)
    parser.add_argument("--per-minute", type=int, help="operations of each rank in each communicator")
    parser.add_argument("--logs-only", action="store_true")
    parser.add_argument("--empty", action="store_true")
    parser.add_argument("--silent", action="store_true", help="the job hangs, as its logs stand")
    parser.add_argument("--still", action="store_true", help="the time stands still, and the store is made once")
    asked = parser.parse_args()
    service = FakeService(
        shape=Shape(nodes=asked.nodes, host_prefix=asked.host_prefix, job=asked.job),
        now_ns=NOW_NS if asked.still else None,
        per_minute=asked.per_minute or (24 if asked.nodes <= 64 else 8),
        with_kernels=not asked.logs_only,
        is_empty=asked.empty,
        is_silent=asked.silent,
    )
    config = uvicorn.Config(make_app(service, service.hub), log_level="warning", ws="none", timeout_graceful_shutdown=1)
    with socket.create_server(("127.0.0.1", asked.port)) as bound:
        print(bound.getsockname()[1], flush=True)  # noqa: T201
        uvicorn.Server(config).run([bound])


if __name__ == "__main__":
    main()

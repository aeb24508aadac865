"""The bandwidth that each communicator can reach at most, by every reference that there is, and what limits it.

- *Topology*: the narrowest cut of the machines that NCCL printed (`nccl/topology.py`). Known only if every rank of
  the communicator has been seen, with its GPU, and every host printed a block that holds these GPUs.
- *NCCL's model*: the busbw that NCCL itself expects of an operation if rank 0 printed its tuning table.
- *nccl-tests*: the busbw that was measured for operations of the same kind and size.

The baseline, what the job itself has shown, is in `rollup/series.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns.group_by import distinct, distinct_together, distinct_values, first_positions, group_by
from ncclscope_service.columns.table import AnyRows
from ncclscope_service.nccl import bandwidth, nccl_model
from ncclscope_service.nccl.nccl_model import Group
from ncclscope_service.nccl.nccl_tests import MeasuredBaseline
from ncclscope_service.nccl.topology import Bottleneck, Machine, gpus_by_rank
from ncclscope_service.store.records import Communicator, Member
from ncclscope_service.store.rows import LimitReference
from ncclscope_service.store.tables import Store, version_of
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import ALGORITHMS, NO_NUMBER, OPERATION_CODES, OPERATIONS, PROTOCOLS
from ncclscope_wire.topology import TopologyOrigin, TopologySeen, TuningTableSeen

_ALL_REDUCE: Final = OPERATION_CODES["AllReduce"]
_RAW: Final = 1.25
"""NCCL takes NVLink and PCIe for what it reaches over them: 20 GB/s of the 25 of a link. *Source:* NCCL topo.h."""
_TWO_CARDS: Final = 2.0
"""A lone GPU between two network cards may use both; the cut takes it to use one."""
_SURE: Final = 0.9
_RECV: Final = OPERATION_CODES["Recv"]
_SEND: Final = OPERATION_CODES["Send"]


def busbw_by_baseline(known: Store, rows: AnyRows) -> NDArray[np.float64]:
    """The busbw that nccl-tests showed for operations like these (rows.OPERATION), on as many ranks and nodes.

    Bytes per second. NaN if that was not tested, or not every rank of the communicator has been seen. A Recv is
    judged as its Send.
    """
    expected = np.full(len(rows), np.nan)
    baseline = known.measured_baseline
    if baseline is None or not len(rows):
        return expected
    communicator_of = np.asarray([member.communicator for member in known.members] + [NO_NUMBER], np.int64)
    communicators = communicator_of[rows["member"]]
    codes = known.templates_of(rows, "op")["op"]
    codes = np.where(codes == _RECV, _SEND, codes)
    for index in distinct_values(communicators):
        place = None if index < 0 else place_of(known, known.communicators[index])
        if place is None:
            continue
        for op in distinct_values(codes[communicators == index]):
            at = np.flatnonzero((communicators == index) & (codes == op))
            expected[at] = baseline.busbw((op, *place), rows["message_bytes"][at])
    return expected


def series_busbw(known: Store, series: Columns) -> NDArray[np.float64]:
    """The same for the mean message of each series (rows.SERIES); NaN if there is none."""
    baseline = known.measured_baseline
    if baseline is None:
        return np.full(len(series), np.nan)
    sizes = series["bytes"] // np.maximum(series["operations"], 1)
    rates = [
        _at_size(known, baseline, index, op, size)
        for index, op, size in zip(series["communicator"].tolist(), series["op"].tolist(), sizes.tolist(), strict=True)
    ]
    return np.asarray(rates, np.float64)


def large_messages_by_baseline(known: Store, communicator: Communicator) -> float | None:
    """The best that was measured for the operation of a communicator that has moved most, bytes per second."""
    series = known.series.rows
    ours = series[series["communicator"] == communicator.index]
    place = place_of(known, communicator)
    if known.measured_baseline is None or place is None or not len(ours):
        return None
    return known.measured_baseline.largest_busbw((_judged_as(int(ours["op"][int(ours["bytes"].argmax())])), *place))


def _at_size(known: Store, baseline: MeasuredBaseline, communicator: int, op: int, message_bytes: int) -> float:
    place = None if communicator < 0 else place_of(known, known.communicators[communicator])
    if place is None:
        return np.nan
    return float(baseline.busbw((_judged_as(op), *place), np.asarray([message_bytes], np.int64))[0])


def references(known: Store, communicator: Communicator, op: int, message_bytes: int) -> dict[str, float]:
    """The busbw of one operation by nccl-tests, NCCL's model and the topology; NaN where a reference says nothing."""
    found = {"baseline": np.nan, "nccl_model": np.nan, "topology": np.nan}
    if known.measured_baseline is not None:
        found["baseline"] = _at_size(known, known.measured_baseline, communicator.index, op, message_bytes)
    group = _group(known, communicator)
    table = known.tuning_tables.get(communicator.index)
    if table is not None and group is not None and op in MODELLED:
        choice = nccl_model.choice(table.cells, OPERATIONS[op].name, message_bytes, group)
        found["nccl_model"] = np.nan if choice is None else choice.algbw(message_bytes) * _factor(op, group.ranks)
    if communicator.bottleneck is not None and op not in _PAIRWISE:
        found["topology"] = communicator.bottleneck.bytes_per_second
    return found


def transfer_ns(op: int, ranks: int, message_bytes: int, rate: float) -> float | None:
    """The time that a message takes at this busbw; None if that is not known."""
    ns = busbw(op, ranks, message_bytes, rate) if rate > 0 else np.nan  # bytes per rate is a time, and back
    return ns if np.isfinite(ns) else None


def busbw(op: int, ranks: int, message_bytes: int, ns: float) -> float:
    """The busbw of a message that takes so many ns, bytes per second."""
    return message_bytes * _factor(op, ranks) / ns * 1e9


def _judged_as(op: int) -> int:
    return _SEND if op == _RECV else op


def place_of(known: Store, communicator: Communicator) -> tuple[int, int] | None:
    """(ranks, nodes) of a communicator; None while not every rank was seen."""
    members = (communicator.members or {}).values()
    if len(members) != communicator.size:
        return None
    return communicator.size, len({known.processes[known.members[index].process].host for index in members})


MODELLED: Final = tuple(OPERATION_CODES[name] for name in nccl_model.FUNCTIONS)
"""Codes of the operations that a table has rows for."""

_ASKED: Final = np.dtype(
    [("communicator", "<i8"), ("op", "u1"), ("bytes", "<i8"), ("algorithm", "i1"), ("protocol", "i1")]
)


def busbw_by_model(known: Store, rows: AnyRows) -> NDArray[np.float64]:
    """The busbw that NCCL expects of each of these operations (rows.OPERATION), bytes per second.

    With the algorithm and protocol of its TUNING line, else with those that the table says are fastest. NaN if
    the communicator has no table, or not every rank of it was seen, and for what NCCL has no model of.
    """
    expected = np.full(len(rows), np.nan)
    if not known.tuning_tables or not len(rows):
        return expected
    of_member = np.asarray([member.communicator for member in known.members], np.int64)
    asked = np.zeros(len(rows), _ASKED)
    asked["communicator"], asked["op"] = of_member[rows["member"]], known.templates_of(rows, "op")["op"]
    asked["bytes"], asked["algorithm"], asked["protocol"] = rows["message_bytes"], rows["algorithm"], rows["protocol"]
    usable = np.isin(asked["communicator"], list(known.tuning_tables)) & np.isin(asked["op"], MODELLED)
    _, inverse = distinct_together(*(asked[name][usable] for name in _ASKED.names or ()))
    different = asked[usable][first_positions(inverse)]
    groups = {index: _group(known, known.communicators[index]) for index in distinct_values(different["communicator"])}
    rates = [_expected(known, each, groups[int(each["communicator"])]) for each in different]
    expected[usable] = np.asarray(rates, np.float64)[inverse]
    return expected


def busiest(known: Store) -> dict[int, int]:
    """Of each communicator that has a table, the operation that has moved most of those that a table has rows for."""
    if not known.tuning_tables:
        return {}
    series = known.series.rows
    at = np.flatnonzero(np.isin(series["op"], MODELLED) & np.isin(series["communicator"], list(known.tuning_tables)))
    order = at[np.lexsort((-at, series["bytes"][at], series["communicator"][at]))]
    return dict(zip(series["communicator"][order].tolist(), series["op"][order].tolist(), strict=True))


def large_messages_by_model(table: TuningTableSeen, op: int, ranks: int) -> float | None:
    """The busbw that a table gives large messages of an operation, bytes per second; None if it has none of it."""
    best = max((cell.bytes_per_second for cell in table.cells if cell.function == OPERATIONS[op].name), default=0)
    return best * _factor(op, ranks) or None


def _expected(known: Store, asked: np.void, group: Group | None) -> float:
    op, message_bytes = int(asked["op"]), int(asked["bytes"])
    algorithm, protocol = int(asked["algorithm"]), int(asked["protocol"])
    if group is None:
        return np.nan
    cells, name = known.tuning_tables[int(asked["communicator"])].cells, OPERATIONS[op].name
    if 0 <= algorithm < len(ALGORITHMS) and 0 <= protocol < len(PROTOCOLS):
        words = {"algorithm": ALGORITHMS[algorithm], "protocol": PROTOCOLS[protocol]}
        found = nccl_model.expected_time(cells, name, message_bytes, group, **words)
    else:
        found = nccl_model.choice(cells, name, message_bytes, group)
    return np.nan if found is None else found.algbw(message_bytes) * _factor(op, group.ranks)


def _group(known: Store, communicator: Communicator) -> Group | None:
    """The ranks, nodes and version that the model needs; None if not every rank, and so not every node, was seen."""
    members = [known.members[index] for index in (communicator.members or {}).values()]
    if len(members) != communicator.size:
        return None
    version = version_of(known, members[0].process)
    return Group(
        ranks=communicator.size,
        nodes=len({known.processes[member.process].host for member in members}),
        version=None if version is None else tuple(int(part) for part in version.split(".") if part.isdigit()),
    )


def _factor(op: int, ranks: int) -> float:
    return float(bandwidth.factor(np.asarray([op], np.uint8), np.asarray([ranks], np.int32))[0])


_PAIRWISE: Final = (OPERATION_CODES["Send"], OPERATION_CODES["Recv"])
_IS_PAIRWISE: Final = np.isin(np.arange(256), _PAIRWISE)
"""By operation code."""
_FEW_PEERS: Final = 2
"""Neighbours in a pipeline; a launch with more is an all-to-all."""

_Seat = tuple[str, int]
"""(host, bus id): one GPU."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The GPUs of a communicator on one machine."""

    host: str
    machine: Machine
    gpus: tuple[int, ...]
    seats: frozenset[_Seat]
    ports: Mapping[int, int]
    """Port of each GPU; empty if the block shows none."""


@dataclass(slots=True)
class _Known:
    """Parts of a communicator, and the numbers of members and topologies that they were found from."""

    members: int
    topologies: int
    parts: tuple[_Part, ...]


class Limits:
    """Keeps the limits of all communicators of one store."""

    def __init__(self, known: Store) -> None:
        self._store = known
        self._machines: dict[tuple[object, ...], Machine] = {}
        """By content, so that hosts that are alike are searched once."""
        self._known: dict[int, _Known] = {}
        self._sharing: dict[int, dict[tuple[str, int], int]] = {}
        """By communicator: how many groups use a port (host, node) at once."""
        self._use: dict[int, str | None] = {}
        """Parallelism of the communicators that use ports when that was counted, by index."""
        self._modelled: dict[int, tuple[int, TuningTableSeen]] = {}
        """By communicator: the operation and the table that its model's limit is from."""
        self._pairs: defaultdict[int, dict[tuple[int, int], Bottleneck | None]] = defaultdict(dict)
        """By communicator and two of its ranks, the lower first: pairs that sent and received."""
        self._new_pairs: set[int] = set()
        """Communicators of which more pairs became known since the last `refresh`."""

    def refresh(self) -> set[int]:
        """Finds the limits again if members, blocks, or the groups that share a network port have changed.

        Gives the communicators of which a limit may have changed, by index.
        """
        store = self._store
        listed = store.listed_communicators()
        changed = {communicator.index for communicator in listed if self._look(communicator)}
        use = {of.index: of.parallelism for of in listed if len(self._known[of.index].parts) > 1}
        if changed or use != self._use:
            before, self._use = self._sharing, use
            self._share()
            changed |= {each for each in {*before, *self._sharing} if before.get(each) != self._sharing.get(each)}
        for index in sorted(changed):
            communicator = store.communicators[index]
            parts = self._known[index].parts
            communicator.bottleneck = self._narrowest(parts, self._shared(index)) if communicator.size > 1 else None
            for one, other in list(self._pairs.get(index, ())):
                self._remember_pair(communicator, one, other)
        self._model()
        changed |= self._new_pairs
        self._new_pairs = set()
        return changed

    def _look(self, communicator: Communicator) -> bool:
        """Finds the machines of a communicator if they may not be those that are known; whether it was so."""
        members, known = communicator.members or {}, self._known.get(communicator.index)
        seen = self._store.topologies_seen
        if known is None or known.members != len(members) or (known.topologies != seen and not known.parts):
            parts = self._parts(communicator, members) if len(members) == communicator.size else ()
            self._known[communicator.index] = _Known(len(members), seen, parts)
            return known is None or known.members != len(members) or known.parts != parts
        return False

    def _model(self) -> None:
        for index, op in busiest(self._store).items():
            table, communicator = self._store.tuning_tables[index], self._store.communicators[index]
            known = self._modelled.get(index)
            if known is None or known[0] != op or known[1] is not table:
                self._modelled[index] = op, table
                communicator.model_limit = large_messages_by_model(table, op, communicator.size)

    def fill(self, rows: Columns) -> None:
        """Sets limit, limit_reference and bottleneck of rows.OPERATION rows: by topology, else by NCCL's model.

        Rows that have neither are left as they are.
        """
        if not len(rows):
            return
        model = busbw_by_model(self._store, rows)
        found = np.isfinite(model)
        rows["limit"][found] = model[found]
        rows["limit_reference"][found] = LimitReference.NCCL_MODEL
        pairwise = _IS_PAIRWISE[self._store.templates_of(rows, "op")["op"]]
        self._fill_collectives(rows, np.flatnonzero(~pairwise))
        pairs = np.flatnonzero(pairwise)
        for member, mine in group_by(rows["member"][pairs]):
            self._fill_pairs(rows, pairs[mine], self._store.members[member])

    def series_limit(self, communicator: int, op: int) -> float:
        """The limit by topology of all operations of a kind in a communicator; NaN if there is not one for all."""
        of = self._store.communicators[communicator]
        if op not in _PAIRWISE or of.size == 2:
            return np.nan if of.bottleneck is None else of.bottleneck.bytes_per_second
        pairs = self._pairs.get(communicator, {}).values()
        rates = {np.nan if pair is None else pair.bytes_per_second for pair in pairs}
        return next(iter(rates)) if len(rates) == 1 else np.nan

    def impossible(
        self,
        busbw: NDArray[np.float64],
        communicators: NDArray[np.integer],
        ops: NDArray[np.uint8],
        confidence: NDArray[np.float32],
        pairs: tuple[NDArray[np.integer], NDArray[np.integer]] | None = None,
    ) -> NDArray[np.bool_]:
        """Which of these rates are more than the wires can do, so that kernels of other operations were measured.

        Where pairs of line and kernel are in doubt (`confidence`) that is any rate above the limit. What is sure may
        have had the wires for itself and be faster than NCCL takes them to be, and an AllReduce that is reduced in the
        network sends up to 2 (n-1)/n times less than a ring.

        `communicators`: by index. `pairs`: the two ranks of Sends and Recvs; NO_NUMBER where it is not one pair, which
        is not judged.
        """
        found = np.zeros(len(busbw), np.bool_)
        one, other = (np.full(len(busbw), NO_NUMBER, np.int64),) * 2 if pairs is None else pairs
        kinds, of = distinct_together(communicators, one, other)
        for kind, (index, *ranks) in enumerate(zip(*(each.tolist() for each in kinds), strict=True)):
            communicator = self._store.communicators[index]
            if pairs is None:
                limit = communicator.bottleneck
            else:
                limit = None if NO_NUMBER in ranks else self._pair(communicator, *ranks)
            if limit is None:
                continue
            fast = np.flatnonzero((of == kind) & (busbw > limit.bytes_per_second))
            if not len(fast):
                continue
            wires = self._wires(communicator) if pairs is None else self._find_pair(communicator, *ranks, shared={})
            factor = np.where(ops[fast] == _ALL_REDUCE, max(1.0, _factor(_ALL_REDUCE, communicator.size)), 1.0)
            most = (
                limit.bytes_per_second if wires is None else self._raw(communicator) * wires.bytes_per_second * factor
            )
            found[fast] = (confidence[fast] < _SURE) | (busbw[fast] > most)
        return found

    def _wires(self, communicator: Communicator) -> Bottleneck | None:
        """The narrowest cut as if no other group used it."""
        known = self._known.get(communicator.index)
        return None if known is None or not known.parts else self._narrowest(known.parts, {})

    def _raw(self, communicator: Communicator) -> float:
        """How much more than the limit its wires may bear."""
        return _RAW * (1.0 if len(self._known[communicator.index].parts) == 1 else _TWO_CARDS)

    def _parts(self, communicator: Communicator, members: Mapping[int, int]) -> tuple[_Part, ...]:
        """The machines of a communicator with its GPUs on them; empty if a block is missing or ambiguous."""
        by_host: dict[str, dict[int, Member]] = defaultdict(dict)
        for rank, index in members.items():
            member = self._store.members[index]
            by_host[self._store.processes[member.process].host][rank] = member
        parts: list[_Part] = []
        done: set[int] = set()
        for host in sorted(by_host):
            if done.issuperset(by_host[host]):
                continue
            part, ranks = self._part(communicator, host, by_host, spans=len(by_host) > 1)
            if part is None:
                return ()
            parts.append(part)
            done |= ranks
        return tuple(parts)

    def _part(
        self, communicator: Communicator, host: str, by_host: Mapping[str, Mapping[int, Member]], *, spans: bool
    ) -> tuple[_Part | None, set[int]]:
        """The first block of a host that holds its ranks' GPUs, and the ranks that it holds."""
        for seen in _logs_first(self._store.topologies.get((communicator.job, host), ())):
            machine = self._machine(seen)
            if seen.spans_hosts:
                ranks = {rank: member for ranks in by_host.values() for rank, member in ranks.items()}
                placed = _place_by_rank(seen, ranks, by_host[host])
            else:
                placed = _place_by_bus_id(machine, by_host[host])
            if placed is None:
                continue
            ports = machine.ports_of(tuple(placed.values()), self._devices(communicator, placed)) if spans else {}
            if spans and len(ports) < len(placed) and len(placed) < communicator.size:
                continue
            gpus = tuple(placed[rank] for rank in sorted(placed))
            seats = frozenset((host, machine.bus_id(gpu)) for gpu in gpus)
            return _Part(host, machine, gpus, seats, ports), set(placed)
        return None, set()

    def _devices(self, communicator: Communicator, placed: Mapping[int, int]) -> dict[int, int]:
        """Number of each GPU on its node, if its Init line says it."""
        members = communicator.members or {}
        numbers = {gpu: self._store.members[members[rank]].nvml_device for rank, gpu in placed.items()}
        return {gpu: number for gpu, number in numbers.items() if number is not None}

    def _machine(self, seen: TopologySeen) -> Machine:
        nodes = tuple((node.kind, node.system, node.local, node.bytes_per_second) for node in seen.nodes)
        content = (nodes, seen.links)
        machine = self._machines.get(content)
        if machine is None:
            machine = self._machines[content] = Machine(seen)
        return machine

    def _share(self) -> None:
        """Counts which groups use a network port at once: those of one kind of parallelism, with other GPUs."""
        users: dict[tuple[object, ...], set[frozenset[_Seat]]] = defaultdict(set)
        for communicator, part, port in self._port_uses():
            users[_kind_of(communicator, part, port)].add(part.seats)
        sharing: defaultdict[int, dict[tuple[str, int], int]] = defaultdict(dict)
        for communicator, part, port in self._port_uses():
            others = users[_kind_of(communicator, part, port)]
            count = 1 + sum(other.isdisjoint(part.seats) for other in others)
            if count > 1:
                sharing[communicator.index][part.host, port] = count
        self._sharing = dict(sharing)

    def _port_uses(self) -> Iterator[tuple[Communicator, _Part, int]]:
        for communicator in self._store.listed_communicators():
            parts = self._known[communicator.index].parts
            if communicator.parallelism is not None and len(parts) > 1:
                for part in parts:
                    for port in sorted(set(part.ports.values())):
                        yield communicator, part, port

    def _shared(self, communicator: int) -> Mapping[tuple[str, int], int]:
        """How many groups use each port (host, node) at once."""
        return self._sharing.get(communicator, {})

    def _narrowest(self, parts: Sequence[_Part], shared: Mapping[tuple[str, int], int]) -> Bottleneck | None:
        if len(parts) == 1:
            return parts[0].machine.bottleneck(parts[0].gpus)
        narrowest: Bottleneck | None = None
        for part in parts:
            sharing = {port: count for (host, port), count in shared.items() if host == part.host}
            found = part.machine.bottleneck_outwards(part.gpus, part.ports, sharing=sharing)
            if found is None:
                return None
            if narrowest is not None and found.bytes_per_second == narrowest.bytes_per_second:
                narrowest = replace(narrowest, is_alike=True)
            elif narrowest is None or found.bytes_per_second < narrowest.bytes_per_second:
                narrowest = Bottleneck(bytes_per_second=found.bytes_per_second, name=f"{found.name} on {part.host}")
        return narrowest

    def _pair(self, communicator: Communicator, one: int, other: int) -> Bottleneck | None:
        """The narrowest link between two ranks of a communicator."""
        pairs, ranks = self._pairs[communicator.index], (min(one, other), max(one, other))
        return pairs[ranks] if ranks in pairs else self._remember_pair(communicator, *ranks)

    def _remember_pair(self, communicator: Communicator, one: int, other: int) -> Bottleneck | None:
        shared = self._shared(communicator.index)
        found = self._pairs[communicator.index][one, other] = self._find_pair(communicator, one, other, shared=shared)
        self._new_pairs.add(communicator.index)
        return found

    def _find_pair(
        self, communicator: Communicator, one: int, other: int, *, shared: Mapping[tuple[str, int], int]
    ) -> Bottleneck | None:
        members = communicator.members or {}
        known = self._known.get(communicator.index)
        if known is None or not known.parts or one == other or not {one, other} <= members.keys():
            return None
        seats = {self._seat(members[rank]) for rank in (one, other)}
        parts: list[_Part] = []
        for part in known.parts:
            gpus = tuple(gpu for gpu in part.gpus if (part.host, part.machine.bus_id(gpu)) in seats)
            if gpus:
                parts.append(_Part(part.host, part.machine, gpus, part.seats, part.ports))
        return self._narrowest(parts, shared) if sum(len(part.gpus) for part in parts) == 2 else None

    def _seat(self, member: int) -> _Seat:
        of = self._store.members[member]
        return self._store.processes[of.process].host, NO_NUMBER if of.bus_id is None else of.bus_id

    def _fill_collectives(self, rows: Columns, at: NDArray[np.intp]) -> None:
        if not len(at):
            return
        of_member = np.asarray([member.communicator for member in self._store.members], np.int64)
        for index, mine in group_by(of_member[rows["member"][at]]):
            self._set(rows, at[mine], self._store.communicators[index].bottleneck)

    def _fill_pairs(self, rows: Columns, mine: NDArray[np.intp], member: Member) -> None:
        """Sends and receives: limited by their two ends, but launches with many peers by all links together."""
        communicator = self._store.communicators[member.communicator]
        peers = self._store.operation_templates.take(rows["template"][mine], "root")["root"]
        launches = rows["launch"][mine]
        (exchanges, _), _ = distinct_together(launches, peers)
        found_launches, place = distinct(exchanges)
        many = np.bincount(place, minlength=len(found_launches))[distinct(launches)[1]] > _FEW_PEERS
        self._set(rows, mine[many], communicator.bottleneck)
        few = mine[~many]
        for peer, ours in group_by(peers[~many]):
            found = None if member.rank is None else self._pair(communicator, member.rank, peer)
            self._set(rows, few[ours], found)

    def _set(self, rows: Columns, at: NDArray[np.intp], bottleneck: Bottleneck | None) -> None:
        if bottleneck is None or not len(at):
            return
        rows["limit"][at] = bottleneck.bytes_per_second
        rows["limit_reference"][at] = LimitReference.TOPOLOGY
        rows["bottleneck"][at] = self._store.strings.index_of(bottleneck.name)


def _kind_of(communicator: Communicator, part: _Part, port: int) -> tuple[object, ...]:
    return communicator.job, communicator.parallelism, communicator.size, part.host, port


def _logs_first(seen: Iterable[TopologySeen]) -> list[TopologySeen]:
    """Blocks in the order in which they were printed, then files."""
    return sorted(seen, key=lambda each: each.origin is not TopologyOrigin.LOG)


def _place_by_bus_id(machine: Machine, members: Mapping[int, Member]) -> dict[int, int] | None:
    """The GPU node of each rank, by bus id; None if one is not there, or two ranks share a GPU."""
    gpus = machine.gpus_by_bus_id()
    placed = {rank: gpus[member.bus_id] for rank, member in members.items() if member.bus_id in gpus}
    return placed if len(set(placed.values())) == len(members) else None


def _place_by_rank(seen: TopologySeen, ranks: Mapping[int, Member], own: Mapping[int, Member]) -> dict[int, int] | None:
    """The GPU node of each rank of a block over several hosts; None unless it holds all ranks of its host (`own`)."""
    placed = gpus_by_rank(seen, {rank: member.bus_id for rank, member in ranks.items()})
    return placed if placed is not None and placed.keys() >= own.keys() else None

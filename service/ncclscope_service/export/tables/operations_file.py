"""`operations.parquet`: one row per logged operation, in store order, without a loop over rows.

`last_operations.parquet`: the newest operation of each rank in each communicator, and how far it is behind the others.
"""

# pyright: reportUnknownParameterType=false, reportAttributeAccessIssue=false
# (pyarrow carries no types, and pyarrow.compute makes its functions as it is imported)
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ncclscope_service.columns import row_ops
from ncclscope_service.columns.group_by import distinct, distinct_together, group_by
from ncclscope_service.columns.table import AnyRows, Ids
from ncclscope_service.detect.hang import ChannelWaits, ends_of_waits
from ncclscope_service.export.json_files import clock_uncertainties, reference_times
from ncclscope_service.export.selection import Part, Selection, collective_keys, seats
from ncclscope_service.export.tables import schema
from ncclscope_service.export.tables.columns import (
    Column,
    Mask,
    OperationView,
    Values,
    numbers,
    optional_words_at,
    plain,
    pointers,
    rates,
    spans,
    times,
    words_at,
)
from ncclscope_service.nccl import bandwidth
from ncclscope_service.store.rows import (
    OF_DUMPS,
    LimitReference,
    Match,
    TimingSource,
    durations_ns,
    timing_confidences,
    timing_sources,
)
from ncclscope_service.store.tables import Store, version_of
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import (
    ALGORITHMS,
    DATA_TYPES,
    NO_NUMBER,
    NO_TIME_NS,
    OPERATION_CODES,
    OPERATIONS,
    PROTOCOLS,
    REDUCTIONS,
    reduction_name,
)

MATCH_NAMES: Final = tuple(None if match is Match.PENDING else match.name.lower() for match in Match)
"""By Match; a row that is still pending has no verdict yet, which is null and none of the four."""

TIMING_SOURCES: Final = tuple(source.name.lower() for source in TimingSource)
LIMIT_REFERENCES: Final = tuple(reference.name.lower() for reference in LimitReference)

_UNNAMED: Final = [False] * (256 - len(OPERATIONS))
IS_COLLECTIVE: Final = np.array([operation.is_collective for operation in OPERATIONS] + _UNNAMED)
REDUCES: Final = np.array([operation.reduces for operation in OPERATIONS] + _UNNAMED)
IS_ROOTED: Final = np.array([operation.is_rooted for operation in OPERATIONS] + _UNNAMED)
HAS_PEER: Final = np.array([not operation.is_collective for operation in OPERATIONS] + _UNNAMED)
"""By operation code; an operation that is not known has none of these."""


def _is_code(*names: str) -> Mask:
    return np.isin(np.arange(256), [OPERATION_CODES[name] for name in names])


IS_SEND: Final = _is_code("Send")
IS_PAIR: Final = _is_code("Send", "Recv")
_LOGGED_IN_BYTES: Final = _is_code("AllGather", "Broadcast")
_LAST_VERSION_IN_BYTES: Final = (2, 21, 5)
_VERSIONS: Final = 256
"""That are remembered: a job has one or two."""


def write_operations(selection: Selection, path: Path) -> None:
    """Writes the file, a slice at a time: memory does not grow with the run."""
    tables = (rows_table(selection.store, rows) for rows in selection.operations.slices())
    write_slices(tables, schema.OPERATIONS, path)


def operations_table(store: Store, ids: Ids) -> pa.Table:
    """These operations as they stand now, with the columns of `schema.OPERATIONS`.

    Words come dictionary-encoded; `write_slices` and pyarrow's writer put them down as plain text.
    """
    return rows_table(store, store.operations.take(ids))


def rows_table(store: Store, rows: AnyRows) -> pa.Table:
    """Like `operations_table`, for rows of the store's operations themselves."""
    view = OperationView(store, rows)
    arrays = [
        collective_ids(view) if field.name == "collective_id" else operation_column(view, field.name).arrow(field.type)
        for field in schema.OPERATIONS
    ]
    return pa.Table.from_arrays(arrays, names=schema.OPERATIONS.names)


def operation_column(view: OperationView, name: str) -> Column:
    """The column of that name in `schema.OPERATIONS`, except `collective_id` (see `collective_ids`)."""
    return _COLUMNS[name](view)


def collective_ids(view: OperationView) -> pa.Array:
    """`<comm_id>:<coll_seq>`; for Send and Recv `<comm_id>:<sender>><receiver>:<k>` in communicator ranks; for
    collectives that only NCCL Inspector tells of `<comm_id>:<op>:<coll_sn>`.
    """
    comm_id = _comm_id(view).arrow(pa.string()).cast(pa.string())
    colon = pa.scalar(":", pa.string())  # arrow is slow to guess the type
    collective = pc.binary_join_element_wise(comm_id, _text(numbers(view.rows["coll_seq"])), colon)
    if (is_of_dumps := _is_of_dumps(view)).any():
        op = operation_column(view, "op").arrow(pa.string()).cast(pa.string())
        told = pc.binary_join_element_wise(comm_id, op, _text(numbers(view.rows["kind_seq"])), colon)
        collective = pc.if_else(pa.array(is_of_dumps), told, collective)
    is_pair = view.is_op(IS_PAIR)
    if not is_pair.any():
        return collective
    pairs = row_ops.take_columns(view.rows, np.flatnonzero(is_pair), ("member", "template", "pair_seq"))
    return pc.replace_with_mask(collective, pa.array(is_pair), _pair_ids(OperationView(view.store, pairs)))


def _pair_ids(view: OperationView) -> pa.Array:
    """`<comm_id>:<sender>><receiver>:<k>` of each Send and Recv."""
    comm_id = _comm_id(view).arrow(pa.string()).cast(pa.string())
    colon, arrow = pa.scalar(":", pa.string()), pa.scalar(">", pa.string())
    is_send = view.is_op(IS_SEND)
    own, peer = _comm_rank(view), _peer(view)
    is_known = own.is_known & peer.is_known
    sender = Column(np.where(is_send, own.values, peer.values), is_known)
    receiver = Column(np.where(is_send, peer.values, own.values), is_known)
    ranks = pc.binary_join_element_wise(_text(sender), _text(receiver), arrow)
    return pc.binary_join_element_wise(comm_id, ranks, _text(numbers(view.rows["pair_seq"])), colon)


@dataclass(frozen=True, slots=True)
class LastOperations:
    """Where every rank stood."""

    table: pa.Table
    """Columns of `schema.LAST_OPERATIONS`, by communicator and rank."""
    uneven: list[dict[str, Any]]
    """Rows of the groups whose ranks stand at different operations, most behind first."""


def write_last_operations(last: LastOperations, path: Path) -> None:
    """Writes the file; it has no rows if no operation of a known rank is known."""
    write_slices([last.table], schema.LAST_OPERATIONS, path)


def last_operations_of(selection: Selection) -> LastOperations:
    """Where every rank of the selected jobs stood.

    Send and Recv count by ordered pair, at both of its ranks. All operations that the store has count, whatever
    stretch of time is selected: a rank that enqueued nothing in it stands where it stood. One-sided operations, what a
    rank sends to itself, and operations of an unknown rank are left out.
    """
    store = selection.store
    everything = store.operations.rows
    is_all = selection.has_process.all()
    part = Part(everything, None if is_all else np.flatnonzero(selection.has_process[everything["process"]]))
    newest = _newest_in(store, part)
    view = OperationView(store, row_ops.filter_rows(newest, _has_channel(OperationView(store, newest))))
    own, peer, is_send = _comm_rank(view), _peer(view), view.is_op(IS_SEND)
    is_pair = view.is_op(IS_PAIR)
    sender = np.where(is_pair, np.where(is_send, own.values, peer.values), NO_NUMBER)
    receiver = np.where(is_pair, np.where(is_send, peer.values, own.values), NO_NUMBER)
    counts = np.where(is_pair, view.rows["pair_seq"], view.rows["coll_seq"]).astype(np.int64) + 1
    channels, channel = distinct_together(view.communicators(), sender, receiver)
    front, least = np.zeros(len(channels[0]), np.int64), np.full(len(channels[0]), np.iinfo(np.int64).max)
    np.maximum.at(front, channel, counts)
    np.minimum.at(least, channel, counts)
    columns = {
        "sender": numbers(sender),
        "receiver": numbers(receiver),
        "operations": plain(counts),
        "behind": plain(front[channel] - counts),
        "finished": numbers(_finished(store, part, view)),
    }
    is_uneven = (least < front)[channel]
    arrays = {
        "collective_id": collective_ids(view),
        "stopped_at": _stopped_at(view, sender, receiver, least[channel], is_uneven),
        **_waits(view, channel, counts, least, is_uneven),
    }
    table = pa.Table.from_arrays(
        [
            arrays[field.name]
            if field.name in arrays
            else (columns.get(field.name) or operation_column(view, field.name)).arrow(field.type)
            for field in schema.LAST_OPERATIONS
        ],
        names=schema.LAST_OPERATIONS.names,
    )
    most_behind = np.lexsort((own.values, counts, channel, (least - front)[channel]))
    order = np.lexsort((own.values, receiver, sender, view.communicators()))
    return LastOperations(table.take(order), table.take(most_behind[is_uneven[most_behind]]).to_pylist())


def _newest_in(store: Store, part: Part, *, is_finished: bool = False) -> Columns:
    """`_newest_of_each` of all rows, or of those of which the end of the kernel is known."""
    newest: Columns = part.rows[:0].copy()
    for rows in part.slices():
        chosen = rows["end_ns"] != NO_TIME_NS if is_finished else np.ones(len(rows), np.bool_)
        newest = row_ops.concat([newest, _newest_of_each(store, rows, chosen)])
    return _newest_of_each(store, newest, np.ones(len(newest), np.bool_))


def _finished(store: Store, part: Part, view: OperationView) -> NDArray[np.int64]:
    """Of each row: up to which count the operations of its channel are known to have finished on its rank."""
    finished = _newest_in(store, part, is_finished=True)
    keys = np.concatenate([_channel_keys(store, view.rows), _channel_keys(store, finished)], axis=1)
    found, key = distinct_together(*keys)
    amounts = np.full(len(found[0]), NO_NUMBER, np.int64)
    sequence = np.where(finished["coll_seq"] != NO_NUMBER, finished["coll_seq"], finished["pair_seq"])
    amounts[key[len(view.rows) :]] = sequence.astype(np.int64) + 1
    return amounts[key[: len(view.rows)]]


def _channel_keys(store: Store, rows: AnyRows) -> NDArray[np.int64]:
    """Member, and of Send and Recv the operation and the peer: equal for rows of one rank on one channel."""
    of, is_collective = store.templates_of(rows, "op", "root"), rows["coll_seq"] != NO_NUMBER
    return np.array(
        [
            rows["member"],
            np.where(is_collective, NO_NUMBER, of["op"].astype(np.int64)),
            np.where(is_collective, NO_NUMBER, of["root"].astype(np.int64)),
        ],
        np.int64,
    ).reshape(3, len(rows))


def _stopped_at(
    view: OperationView, sender: Values, receiver: Values, least: NDArray[np.int64], is_uneven: Mask
) -> pa.Array:
    """The first operation of each row's channel that not all of its ranks enqueued; null if there is none."""
    comm_ids = _comm_id(view).objects()
    found: list[str | None] = [None] * len(is_uneven)
    for at in np.flatnonzero(is_uneven).tolist():
        pair = "" if sender[at] == NO_NUMBER else f"{sender[at]}>{receiver[at]}:"
        found[at] = f"{comm_ids[at]}:{pair}{least[at]}"
    return pa.array(found, pa.string())


_MOST_NAMED: Final = 8
"""Ranks for which one waits that are listed."""


def _waits(
    view: OperationView,
    channel: NDArray[np.intp],
    counts: NDArray[np.int64],
    least: NDArray[np.int64],
    is_uneven: Mask,
) -> dict[str, pa.Array]:
    """Columns on whom each row's rank waits for on its channel, at whom its waits end, and its last words."""
    jobs = [communicator.job for communicator in view.store.communicators]
    ranks = _rank(view)
    names = list(zip([jobs[of] for of in view.communicators().tolist()], ranks.objects(), strict=True))
    waits_for: list[list[int] | None] = [None] * len(names)
    by_job: dict[str, list[ChannelWaits]] = {}
    for _, rows in group_by(channel[is_uneven]):
        mine = np.flatnonzero(is_uneven)[rows]
        is_behind = counts[mine] == least[channel[mine]]
        behind = sorted(int(rank) for rank in ranks.values[mine[is_behind & ranks.is_known[mine]]])
        ahead = mine[~is_behind & ranks.is_known[mine]]
        waits = ChannelWaits(tuple(ranks.values[ahead].tolist()), tuple(behind), frozenset())
        by_job.setdefault(names[mine[0]][0], []).append(waits)
        for at in ahead.tolist():
            waits_for[at] = behind[:_MOST_NAMED]
    ends = {job: ends_of_waits(waits) for job, waits in by_job.items()}
    words = {(job, line.rank): line.text for job, verdict in view.store.verdicts.items() for line in verdict.last_words}
    blamed = [ends.get(job, {}).get(rank) if isinstance(rank, int) else None for job, rank in names]
    said = [words.get((job, rank)) if isinstance(rank, int) else None for job, rank in names]
    return {
        "waits_for": pa.array(waits_for, pa.list_(pa.int32())),
        "blamed": pa.array(blamed, pa.list_(pa.int32())),
        "last_words": pa.array(said, pa.string()),
    }


def _has_channel(view: OperationView) -> Mask:
    """Whether the rank is known, and of a Send or Recv that the peer is another."""
    own, peer, is_pair = _comm_rank(view), _peer(view), view.is_op(IS_PAIR)
    has_channel: Mask = own.is_known & (~is_pair | (peer.is_known & (peer.values != own.values)))
    return has_channel


def _newest_of_each(store: Store, rows: AnyRows, chosen: Mask) -> Columns:
    """Of the chosen rows, of each member the collective with the highest number, and of each pair the Send or Recv."""
    is_collective = rows["coll_seq"] != NO_NUMBER
    sequence = np.where(is_collective, rows["coll_seq"], rows["pair_seq"])
    is_paired = IS_PAIR[store.templates_of(rows, "op")["op"]]
    found = np.flatnonzero(chosen & (rows["member"] >= 0) & (sequence >= 0) & (is_collective | is_paired))
    keys, key = distinct_together(*_channel_keys(store, rows)[:, found])
    highest = np.full(len(keys[0]), NO_NUMBER, np.int64)
    np.maximum.at(highest, key, sequence[found])
    is_highest = sequence[found] == highest[key]
    last = np.zeros(len(highest), np.intp)
    last[key[is_highest]] = found[is_highest]
    newest: Columns = rows[last]
    return newest


def _text(column: Column) -> pa.Array:
    return column.arrow(pa.int64()).cast(pa.string())


def _nccl_version(view: OperationView) -> Column:
    return view.of_process([version_of(view.store, index) for index in range(len(view.store.processes))])


def _rank(view: OperationView) -> Column:
    """Global rank: as the communicators say it, else as RCCL prints it."""
    known = view.of_member([member.global_rank for member in view.store.members])
    printed = view.of_template(lambda templates: numbers(templates["global_rank"]))
    return Column(np.where(known.is_known, known.values, printed.values), known.is_known | printed.is_known)


def _rank_is_inferred(view: OperationView) -> Column:
    """Whether no line printed the rank; null without a rank."""
    inferred = view.of_member([int(member.global_rank_is_inferred) for member in view.store.members])
    return Column(inferred.values, _rank(view).is_known)


def _comm_id(view: OperationView) -> Column:
    return view.of_communicator([communicator.comm_id for communicator in view.store.communicators])


def _comm_rank(view: OperationView) -> Column:
    return view.of_member([member.rank for member in view.store.members])


def _parallelism(view: OperationView) -> Column:
    return view.of_communicator([communicator.parallelism for communicator in view.store.communicators])


def _dtype(view: OperationView) -> Column:
    """The data type as logged, null if NCCL had turned the call into bytes before it logged it.

    That is AllGather and Broadcast up to 2.21.5, whose lines say 0 (int8) whatever the type was; with a
    version that is not known, the same line may mean either. Source: NCCL 2.21.5 src/enqueue.cc:taskAppend.
    """
    names = [data_type.name for data_type in DATA_TYPES]
    column = view.of_template(lambda templates: words_at(templates["data_type"], names))
    is_old = np.array([_may_log_bytes(version_of(view.store, i)) for i in range(len(view.store.processes))])
    if not is_old.any():
        return column
    may_be_bytes = view.is_op(_LOGGED_IN_BYTES) & (column.values == 0) & is_old[view.rows["process"]]
    return column.where(~may_be_bytes)


@lru_cache(_VERSIONS)
def _may_log_bytes(version: str | None) -> bool:
    if version is None:
        return True
    numbers_of = [part for part in version.split("+", maxsplit=1)[0].split(".")[:3] if part.isdigit()]
    return tuple(int(part) for part in numbers_of) <= _LAST_VERSION_IN_BYTES


def _red_op(view: OperationView) -> Column:
    names = [reduction_name(number) for number in range(len(REDUCTIONS) + 1)]

    def of(templates: Columns) -> Column:
        number = templates["reduction"]
        is_user = (number < 0) | (number >= len(REDUCTIONS))
        return words_at(np.where(is_user, len(REDUCTIONS), number), names).where(templates["device"] != OF_DUMPS)

    return view.of_template(of).where(view.is_op(REDUCES))


def _root(view: OperationView) -> Column:
    return view.of_template(lambda templates: numbers(templates["root"])).where(view.is_op(IS_ROOTED))


def _peer(view: OperationView) -> Column:
    return view.of_template(lambda templates: numbers(templates["root"])).where(view.is_op(HAS_PEER))


def _logged_bytes(view: OperationView) -> Column:
    """Count times the size of the type, as the line says them."""
    return view.of_template(lambda t: numbers(bandwidth.logged_bytes(t["count"], t["data_type"])))


def _wire_bytes(view: OperationView) -> Column:
    """Bytes that one rank puts on links: 0 in a communicator of one rank, and for what it sends to itself."""
    of = view.store.templates_of(view.rows, "op", "nranks")
    moved = bandwidth.wire_bytes(of["op"], view.rows["message_bytes"], of["nranks"])
    own, peer = _comm_rank(view), _peer(view)
    to_itself = own.is_known & peer.is_known & (own.values == peer.values)
    return numbers(np.where(to_itself & (moved > 0), 0, moved))


def _kernel_file(view: OperationView) -> Column:
    source = view.of_kernel("source")
    return optional_words_at(
        np.where(source.is_known, source.values, -1), [state.source.name for state in view.store.sources]
    )


def _true_time(name: str) -> Callable[[OperationView], Column]:
    def column(view: OperationView) -> Column:
        return times(reference_times(view.store, view.rows["process"], view.rows[name]))

    return column


def _clock_uncertainty(view: OperationView) -> Column:
    """The published sigma of the host's clock, if the operation has a time on the reference clock."""
    return spans(clock_uncertainties(view.store, view.rows["process"], view.rows["start_ns"]))


def _ranks_seen(view: OperationView) -> Column:
    """How many ranks' kernels were seen; 0 says that nobody looked or nothing was joined, which is unknown."""
    seen = view.rows["ranks_seen"]
    return Column(seen, np.asarray(seen > 0))


def _last_rank(view: OperationView) -> Column:
    """Global rank that came last to the collective (`Seats.of_last`), else null; also where replays differ in it."""
    table, of_seats = view.store.collectives.rows, seats(view.store)
    keys, of_row = distinct(collective_keys(view.communicators(), view.rows["coll_seq"]))
    last = np.full(len(keys), NO_NUMBER, dtype=np.int64)
    measured = collective_keys(table["communicator"], table["coll_seq"])
    near = np.flatnonzero((measured >= 0) & (measured <= keys.max(initial=-1)))
    place = np.searchsorted(keys, measured[near])
    is_met = keys[place] == measured[near]
    last_came = table.take(near[is_met], "communicator", "last_rank", "ranks_seen", "blame_ns")
    place, seat = place[is_met], of_seats.of_last(last_came)
    last[place] = rank = np.append(of_seats.global_rank, NO_NUMBER)[seat]
    last[place[last[place] != rank]] = NO_NUMBER
    return numbers(last[of_row])


def _duration(view: OperationView) -> Column:
    """End minus start of the kernel, else what Inspector says; a kernel that the capture cut has none."""
    durations = durations_ns(view.rows)
    return Column(durations, durations != NO_TIME_NS)


def _efficiency(view: OperationView) -> Column:
    busbw, limit = view.rows["busbw"], view.rows["limit"]
    is_known = np.isfinite(busbw) & np.isfinite(limit) & (limit > 0)
    return Column(np.divide(busbw, limit, out=np.full(len(busbw), np.nan), where=is_known), is_known)


def _count(view: OperationView) -> Column:
    is_known = (view.rows["match"] != Match.LINE_LOST) | (view.rows["message_bytes"] != NO_NUMBER)
    return view.of_template(lambda t: plain(t["count"]).where(t["device"] != OF_DUMPS)).where(is_known)


def _has_line(view: OperationView) -> Mask:
    """Whether a line of a log tells of the operation; else its kernel does, or NCCL Inspector."""
    is_logged: Mask = (view.rows["match"] != Match.LINE_LOST) & ~_is_of_dumps(view)
    return is_logged


def _is_of_dumps(view: OperationView) -> Mask:
    return view.of_template(lambda t: plain(t["device"] == OF_DUMPS)).values.astype(np.bool_)


def _pointer(name: str) -> Callable[[OperationView], Column]:
    return lambda view: view.of_template(lambda t: pointers(t[name]).where(t["device"] != OF_DUMPS))


def _confidence(view: OperationView) -> Column:
    return rates(view.rows["confidence"]).where(view.rows["match"] != Match.PENDING)


def _bottleneck(view: OperationView) -> Column:
    found, places = distinct(view.rows["bottleneck"])
    strings = view.store.strings
    return optional_words_at(places, [strings[index] if index >= 0 else None for index in found.tolist()])


_COLUMNS: Final[dict[str, Callable[[OperationView], Column]]] = {
    "job": lambda view: view.of_process(view.store.process_job),
    "host": lambda view: view.of_process([process.host for process in view.store.processes]),
    "pid": lambda view: view.pids(),
    "tid": lambda view: view.of_template(lambda t: Column(t["tid"], t["tid"] > 0)),
    "rank": _rank,
    "rank_is_inferred": _rank_is_inferred,
    "local_rank": lambda view: view.of_member([member.local_rank for member in view.store.members]),
    "comm_id": _comm_id,
    "comm_epoch": lambda view: view.of_member([member.epoch for member in view.store.members]),
    "comm_ptr": _pointer("communicator"),
    "comm_rank": _comm_rank,
    "comm_size": lambda view: view.of_template(lambda t: Column(t["nranks"], t["nranks"] > 0)),
    "parallelism": _parallelism,
    "iteration": lambda view: numbers(view.rows["iteration"]),
    "nccl_version": _nccl_version,
    "op": lambda view: view.of_template(lambda t: words_at(t["op_name"], view.store.strings.values)),
    "op_count": lambda view: plain(view.rows["op_count"]).where(_has_line(view)),
    "seq": lambda view: numbers(view.rows["seq"]),
    "coll_seq": lambda view: numbers(view.rows["coll_seq"]),
    "count": _count,
    "dtype": _dtype,
    "red_op": _red_op,
    "root": _root,
    "peer": _peer,
    "send_buffer": _pointer("send_buffer"),
    "recv_buffer": _pointer("recv_buffer"),
    "log_stream": _pointer("stream"),
    "message_bytes": lambda view: numbers(view.rows["message_bytes"]),
    "logged_bytes": _logged_bytes,
    "wire_bytes": _wire_bytes,
    "algorithm": lambda view: words_at(view.rows["algorithm"], ALGORITHMS),
    "protocol": lambda view: words_at(view.rows["protocol"], PROTOCOLS),
    "channels": lambda view: numbers(view.rows["channels"]),
    "log_file": lambda view: view.of_source(),
    "kernel_file": _kernel_file,
    "log_line": lambda view: numbers(view.rows["line"]),
    "logged_at_ns": lambda view: times(view.rows["logged_at_ns"]),
    "observed_at_ns": lambda view: times(view.rows["observed_at_ns"]),
    "launch_id": lambda view: numbers(view.rows["launch"]),
    "kernel_correlation_id": lambda view: view.of_kernel("correlation_id"),
    "stream_id": lambda view: view.of_kernel_template("stream_id"),
    "start_ns": lambda view: times(view.rows["start_ns"]),
    "end_ns": lambda view: times(view.rows["end_ns"]),
    "start_true_ns": _true_time("start_ns"),
    "end_true_ns": _true_time("end_ns"),
    "clock_uncertainty_ns": _clock_uncertainty,
    "match": lambda view: optional_words_at(view.rows["match"], MATCH_NAMES),
    "confidence": _confidence,
    "timing_source": lambda view: words_at(timing_sources(view.rows), TIMING_SOURCES),
    "timing_confidence": lambda view: rates(timing_confidences(view.rows)),
    "duration_ns": _duration,
    "wait_ns": lambda view: spans(view.rows["wait_ns"]),
    "transfer_ns": lambda view: spans(view.rows["transfer_ns"]),
    "algbw_bytes_per_second": lambda view: rates(view.rows["algbw"]),
    "busbw_bytes_per_second": lambda view: rates(view.rows["busbw"]),
    "busbw_apparent_bytes_per_second": lambda view: rates(view.rows["busbw_apparent"]),
    "limit_bytes_per_second": lambda view: rates(view.rows["limit"]),
    "limit_reference": lambda view: words_at(view.rows["limit_reference"], LIMIT_REFERENCES),
    "efficiency_ratio": _efficiency,
    "bottleneck": _bottleneck,
    "ranks_seen": _ranks_seen,
    "last_rank": _last_rank,
}


def write_slices(tables: Iterable[pa.Table], schema: pa.Schema, path: Path) -> None:
    """Writes tables of that schema as row groups of one file; no tables give a file with no rows.

    Dictionary-encoded words are stored as text: arrow's own schema is left out of the file, so readers
    give text and not categories.
    """
    writer: pq.ParquetWriter | None = None
    try:
        for table in tables:
            writer = writer or _writer(table.schema, path)
            writer.write_table(table, row_group_size=max(1, len(table)))
        writer = writer or _writer(schema, path)
    finally:
        if writer is not None:
            writer.close()


def _writer(schema: pa.Schema, path: Path) -> pq.ParquetWriter:
    words = [field.name for field in schema if pa.types.is_dictionary(field.type) or pa.types.is_string(field.type)]
    return pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        compression_level=1,
        use_dictionary=words,  # pyright: ignore[reportArgumentType] - takes names too, which its default hides
        store_schema=False,
    )

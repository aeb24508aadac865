"""The tables of `report.html`, as HTML, with numbers as people read them; None becomes "not recorded".

Those of communicators show what they are, how fast they are, and how they communicate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from html import escape
from statistics import median
from typing import Any, Final, TypeVar

from ncclscope_service.export.benchmarks import files_read
from ncclscope_service.export.json_files import clocks_document
from ncclscope_service.export.report.data import communicator_rows
from ncclscope_service.export.selection import Selection
from ncclscope_service.export.summary import (
    LEAST_SHARE,
    NOT_RECORDED,
    PART_WORDS,
    WaitedFor,
    gaps,
    inspector_rows,
    iterations_document,
    mean_steps,
    signatures_document,
    waited_for,
)
from ncclscope_service.export.totals import Calls, Totals

T = TypeVar("T")

_LEAST_SHARE: Final = 0.00001
_LEAST_IN_GIGABYTES: Final = 1e7


def cell(value: object, missing: str = NOT_RECORDED) -> str:
    """Any value as HTML; None in words."""
    return f'<span class="none">{escape(missing)}</span>' if value is None else escape(str(value))


def count_text(value: object) -> str:
    """A count with thousands apart."""
    return f"{value:,}".replace(",", "\u2009") if isinstance(value, int) else cell(None)


def bytes_text(value: object) -> str:
    """Bytes in binary units, as NCCL and its users name sizes; rates are decimal, as nccl-tests prints them."""
    return _scaled(value, 1024.0, ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")) or cell(None)


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


MAX_TABLE_ROWS: Final = 50
"""Rows of a table that are shown; the files beside the report hold all."""


def table(caption: str, columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]]) -> str:
    """A table; columns are (heading, class of the cells); cells are HTML already."""
    head = "".join(f'<th class="{kind}">{name}</th>' for name, kind in columns)
    body = "".join(
        "<tr>"
        + "".join(f'<td class="{kind}">{text}</td>' for text, (_, kind) in zip(row, columns, strict=True))
        + "</tr>"
        for row in rows
    )
    body = body or f'<tr><td class="text" colspan="{len(columns)}">{cell(None)}</td></tr>'
    return (
        f'<div class="scroll"><table><caption>{caption}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _of(name: str, write: Callable[[object], str] = cell) -> Callable[[Mapping[str, Any]], str]:
    """A cell of a table: the value of that name in a row, as `write` writes it."""
    return lambda row: write(row[name])


def table_of(caption: str, found: Iterable[T], *columns: tuple[str, str, Callable[[T], str]]) -> str:
    """A table with a row for each of `found`; columns are (heading, class of the cells, cell of a row)."""
    rows = ([write(one) for _, _, write in columns] for one in found)
    return table(caption, [(heading, kind) for heading, kind, _ in columns], rows)


def operations_table(selection: Selection, sums: Totals, number: int) -> str:
    """Table of each operation of each kind of communicator."""
    kinds = [communicator.parallelism for communicator in selection.store.communicators]
    by_kind = sums.by(lambda group: (group.op, kinds[group.communicator] if group.communicator >= 0 else None))
    caption = (
        f"<b>Table {number}.</b> Operations over all ranks. Per rank and iteration: median (and range where it "
        "differs) over the ranks that call it. Times count every launch once and are summed over the ranks."
    )
    return table_of(
        caption,
        ((*key, total) for key, total in by_kind.items()),
        ("Operation", "text", lambda of: escape(of[0])),
        ("Parallelism", "text", lambda of: cell(of[1], "not known")),
        ("Operations", "", lambda of: count_text(of[2].operations)),
        ("Per rank and iteration", "", lambda of: _calls_text(sums.calls.get(of[:2]))),
        ("Message bytes", "", lambda of: bytes_text(of[2].bytes if of[2].sized else None)),
        ("Kernel time", "", lambda of: span_text(of[2].duration_ns if of[2].timed else None)),
        ("Waiting", "", lambda of: span_text(of[2].wait_ns if of[2].waits else None)),
        ("Transfer", "", lambda of: span_text(of[2].transfer_ns if of[2].transfers else None)),
    )


def _calls_text(calls: Calls | None) -> str:
    if calls is None:
        return cell(None)
    median = f"{calls.median:g}"
    return median if calls.least == calls.most else f"{median} <small>({calls.least} to {calls.most})</small>"


_MAX_WAITED_FOR: Final = 4


def waited_for_rows(selection: Selection) -> list[tuple[str, str, str, str, str]]:
    """Rank, kind, collectives, share to which it came last and wait: the ranks of each kind that were waited for
    longest; the kind with the longest wait first.
    """
    several = len(selection.jobs) > 1
    kinds: dict[tuple[str, str | None], list[WaitedFor]] = {}
    for one in waited_for(selection):
        kinds.setdefault((one.job, one.parallelism), []).append(one)
    return [
        (
            f"{escape(one.job)} {one.rank}" if several else str(one.rank),
            cell(one.parallelism, "not known"),
            count_text(one.collectives),
            ratio_text(one.last / one.collectives),
            span_text(one.wait_ns),
        )
        for ranks in kinds.values()
        for one in ranks[:_MAX_WAITED_FOR]
    ]


def waited_for_table(selection: Selection, number: int) -> str:
    """The ranks of each kind of communicator that the others waited for longest."""
    columns = (("Rank", ""), ("Parallelism", "text"), ("Collectives", ""), ("Came last", ""), ("Others waited", ""))
    caption = (
        f"<b>Table {number}.</b> Who is waited for: of each kind of communicator, the {_MAX_WAITED_FOR} ranks for "
        "which others waited longest. Collectives: those of which all ranks were seen and that no rank can leave early "
        "(no Broadcast, Reduce, Send). Came last: more than 20 µs after the second last. Others waited: summed over "
        "the other ranks, in those to which it came last."
    )
    return table(caption, columns, waited_for_rows(selection))


def iterations_table(selection: Selection, sums: Totals, number: int) -> str:
    """How long the iterations of each job last, and how much of that is communication."""
    caption = (
        f"<b>Table {number}.</b> Iterations over all ranks. Communication: share of the time in which a rank ran NCCL "
        "kernels, waiting included. Exposed: what of the time no other kernel of that GPU hid."
    )
    return table_of(
        caption,
        ({"job": job, **of} for job, of in iterations_document(selection, sums).items() if of is not None),
        ("Job", "text", _of("job")),
        ("Iterations", "", _of("iterations", count_text)),
        ("Length, median", "", _of("median_ns", span_text)),
        ("90th percentile", "", _of("p90_ns", span_text)),
        ("Communication", "", _of("communication_ratio", ratio_text)),
        ("Exposed", "", _of("exposed_ratio", ratio_text)),
        ("Told by", "text", _told_by),
    )


def budget_table(selection: Selection, sums: Totals, number: int) -> str:
    """Where the mean step of each job goes."""
    caption = (
        f"<b>Table {number}.</b> Where a step goes, mean over steps and ranks whose kernels are all known. A step "
        "lasts on the GPU from the first NCCL kernel of an iteration to that of the next."
    )
    return table_of(
        caption,
        ((step, part) for step in mean_steps(selection, sums) for part in step.parts if part.share >= LEAST_SHARE),
        ("Job", "text", lambda of: escape(of[0].job)),
        ("Part", "text", lambda of: PART_WORDS[of[1].part]),
        ("Parallelism", "text", lambda of: escape(of[1].parallelism or "")),
        ("Time", "", lambda of: span_text(of[1].mean_ns)),
        ("Share", "", lambda of: ratio_text(of[1].share)),
    )


def _told_by(of: Mapping[str, object]) -> str:
    told, sure = of["operations_by"], of["period_confidence"]
    assert isinstance(told, dict)
    by = {"marks": "NVTX marks", "period": "the period of calls"}
    texts = [by[name] for name, amount in told.items() if amount]
    if told["period"] and isinstance(sure, float):
        texts[-1] += f" (confidence {sure:.0%})"
    return escape(" and ".join(texts))


def ranks_text(ranks: Sequence[int] | None) -> str:
    """Global ranks, for a cell; empty if there are none."""
    return ", ".join(map(str, ranks or ()))


_MAX_STANDING: Final = 32


def standing_table(uneven: Sequence[Mapping[str, Any]], number: int) -> str:
    """The ranks of groups that stand at different operations (`LastOperations.uneven`)."""
    several = len({row["job"] for row in uneven}) > 1
    more = len(uneven) - _MAX_STANDING
    rest = f" {count_text(more)} more rows are in last_operations.parquet." if more > 0 else ""
    caption = (
        f"<b>Table {number}.</b> Groups of which not all ranks enqueued the same number of operations, by the log "
        "lines that were read. Behind: how many fewer than the rank that enqueued most. Waits for: ranks furthest "
        "behind there. Waits end at: ranks that wait for nobody, directly or over other groups; none if there are more "
        f"than eight. Last words: the last line of the rank that says that something failed.{rest}"
    )
    return table_of(
        caption,
        uneven[:_MAX_STANDING],
        (
            "Communicator",
            "text",
            lambda row: (f"{escape(row['job'])} " if several else "") + f"<code>{cell(row['comm_id'])}</code>",
        ),
        ("Parallelism", "text", lambda row: cell(row["parallelism"], "not known")),
        ("Send to Recv", "text", lambda row: "" if row["sender"] is None else f"{row['sender']} to {row['receiver']}"),
        ("Rank in it", "text", lambda row: f"{row['comm_rank']} ({cell(row['host'])})"),
        ("Global rank", "", _of("rank")),
        ("Enqueued", "", _of("operations", count_text)),
        ("Behind", "", _of("behind", count_text)),
        ("Last", "text", _of("op")),
        ("Waits for", "text", lambda row: ranks_text(row["waits_for"])),
        ("Waits end at", "text", lambda row: ranks_text(row["blamed"])),
        ("Last words", "text", lambda row: cell(row["last_words"], "")),
    )


def clocks_table(selection: Selection, number: int) -> str:
    """Each host's clock."""
    document = clocks_document(selection)
    hosts = document["hosts"]
    assert isinstance(hosts, dict)
    count = len({selection.store.processes[index].host for index in selection.processes()})
    reference = escape(str(document["reference"] or NOT_RECORDED))
    caption = (
        f"<b>Table {number}.</b> Clocks against that of <code>{reference}</code>. "
        f"Causality violated after correction: {ratio_text(document['violation_ratio'])}."
    )
    found: list[dict[str, Any]] = [
        {"host": host, **clock} for host, clock in hosts.items() if document["method"] is not None or count == 1
    ]
    return table_of(
        caption,
        found,
        ("Host", "text", lambda row: f"<code>{escape(row['host'])}</code>"),
        ("Offset", "", _of("offset_ns", span_text)),
        ("Drift", "", lambda row: f"{row['drift_ppm']:.3f} ppm"),
        ("Sigma", "", _of("sigma_ns", span_text)),
        ("Feasible", "", lambda row: f"{span_text(row['interval_lo_ns'])} to {span_text(row['interval_hi_ns'])}"),
        ("Samples", "", _of("samples", count_text)),
        ("Steps", "", lambda row: count_text(len(row["steps"]))),
    )


def read_table(selection: Selection, number: int) -> str:
    """Table of what was skipped and lost while reading, after a sentence on what was understood."""
    store = selection.store
    understood = ", ".join(f"{count_text(count)} {escape(name)}" for name, count in store.understood.most_common())
    skipped = [("skipped", name, count) for name, count in store.skipped.most_common()]
    lost = [(f"lost ({gap['unit']})", f"{gap['reason']}: {gap['detail']}", gap["amount"]) for gap in gaps(selection)]
    rows = [(escape(what), escape(name), count_text(count)) for what, name, count in (*skipped, *lost[:MAX_TABLE_ROWS])]
    files = f"{count_text(files_read(selection))} files"
    text = f'<p class="lead read">Read from {files}, in lines and records: {understood or "nothing"}.</p>'
    if not rows:
        return f"{text}<p>Nothing was skipped, and nothing was lost.</p>"
    caption = f"<b>Table {number}.</b> What was skipped or lost, in lines and records."
    return text + table(caption, (("Became", "text"), ("Reason", "text wrap"), ("Count", "")), rows)


_NAMED_SHARE: Final = 0.05


def families_table(selection: Selection, sums: Totals, number: int) -> str:
    """Communicators of one kind, size and spread over hosts in one row; below, folded away, each by itself."""
    found = communicator_rows(selection, sums)
    families: dict[tuple[object, ...], list[dict[str, object]]] = {}
    for row in found:
        families.setdefault((row["parallelism"], row["group_name"], row["size"], row["hosts"]), []).append(row)
    more = len(families) - MAX_TABLE_ROWS
    rest = f" {more} more kinds are in communicators.parquet." if more > 0 else ""
    caption = (
        f"<b>Table {number}.</b> Communicators by kind, most bytes first. busbw: the median over the communicators of "
        "each one's median, and that of the slowest of them; efficiency is the median against the topology's limit, "
        f"waiting a share of kernel time.{rest}"
    )
    each = communicators_table(found)
    return table_of(
        caption,
        list(families.values())[:MAX_TABLE_ROWS],
        ("Parallelism", "text", lambda of: _kind_text(of[0])),
        ("Communicators", "", lambda of: count_text(len(of))),
        ("Ranks", "", lambda of: cell(of[0]["size"])),
        ("Hosts", "", lambda of: cell(of[0]["hosts"])),
        ("Operations", "", lambda of: count_text(sum(int(value) for value in _known(of, "operations")))),
        ("Message bytes", "", lambda of: bytes_text(sum(moved) if (moved := _known(of, "bytes")) else None)),
        ("busbw, median", "", lambda of: bandwidth_text(_middle(of, "busbw"))),
        ("Slowest", "", _slowest),
        ("Limit (topology)", "", lambda of: bandwidth_text(_middle(of, "limit"))),
        ("Efficiency", "", lambda of: ratio_text(_middle(of, "efficiency"))),
        ("Waiting", "", lambda of: ratio_text(_middle(of, "wait_ratio"))),
    ) + (
        f"<details><summary>Each communicator by itself</summary>{each}</details>" if len(found) > len(families) else ""
    )


def _known(members: list[dict[str, object]], name: str) -> list[float]:
    return [float(value) for row in members if isinstance(value := row[name], int | float)]


def _middle(members: list[dict[str, object]], name: str) -> float | None:
    return median(known) if (known := _known(members, name)) else None


def _slowest(members: list[dict[str, object]]) -> str:
    """Bandwidth of the slowest of several; of one there is no such thing."""
    known = _known(members, "busbw")
    return "" if known and len(members) == 1 else bandwidth_text(min(known, default=None))


def _kind_text(row: Mapping[str, object]) -> str:
    """Parallelism of a communicator's row, and the name of its group if PyTorch prints it."""
    return cell(row["parallelism"], "not known") + ("" if row["group_name"] is None else f" {cell(row['group_name'])}")


NONE: Final = "none"
"""One rank moves nothing and waits for nobody: that is known, not unrecorded."""


def measure_text(row: Mapping[str, object], name: str, write: Callable[[object], str]) -> str:
    """Cell of a communicator's row: the number of that name."""
    return NONE if row["size"] == 1 else write(row[name])


def communicators_table(found: Sequence[Mapping[str, object]]) -> str:
    """The communicators that moved most."""
    more = len(found) - MAX_TABLE_ROWS
    rest = f" The first {MAX_TABLE_ROWS}; {more} more are in communicators.parquet." if more > 0 else ""
    measures = (
        ("Message bytes", "bytes", bytes_text),
        ("busbw, median", "busbw", bandwidth_text),
        ("Limit (topology)", "limit", bandwidth_text),
        ("Efficiency", "efficiency", ratio_text),
        ("Waiting", "wait_ratio", ratio_text),
    )
    return table_of(
        f"<b>Communicators</b>, most bytes first.{rest}",
        found[:MAX_TABLE_ROWS],
        ("Communicator", "text", lambda row: f"<code>{escape(str(row['communicator']))}</code>"),
        ("Parallelism", "text", _kind_text),
        ("Ranks", "", _of("size")),
        ("Hosts", "", _of("hosts")),
        ("Operations", "", _of("operations", count_text)),
        *((heading, "", partial(measure_text, name=name, write=write)) for heading, name, write in measures),
    )


def signatures_table(selection: Selection, sums: Totals, number: int) -> str:
    """How each kind of communicator communicates."""
    found = signatures_document(selection, sums)
    several = len(selection.jobs) > 1
    caption = (
        f"<b>Table {number}.</b> Communication signatures, the median over the communicators of a kind. Operations, "
        "bytes and bursts are of one rank in one iteration. Burstiness of the times between calls: -1 is a clock, 0 "
        "chance, towards 1 bursts. Active: share of the time in which a kernel ran. A pause is longer than a twentieth "
        "of the period."
    )
    text = table_of(
        caption,
        found[:MAX_TABLE_ROWS],
        (
            "Parallelism",
            "text",
            lambda row: (f"{escape(str(row['job']))} " if several else "") + cell(row["parallelism"], "not known"),
        ),
        ("Groups", "", _of("communicators", count_text)),
        ("Operation mix", "text", _of("operation_mix", _mix_bar)),
        ("Message, median", "", _of("median_bytes", bytes_text)),
        ("Largest", "", _of("largest_bytes", bytes_text)),
        ("Operations", "", _of("operations_per_iteration", _number_text)),
        ("Bytes", "", _of("bytes_per_iteration", bytes_text)),
        ("Burstiness", "", lambda row: _number_text(row["burstiness"], signed=True)),
        ("Period", "", _of("period_ns", span_text)),
        ("Active", "", _of("active_ratio", ratio_text)),
        ("Bursts", "", _of("bursts_per_iteration", _number_text)),
        ("Burst", "", _of("burst_ns", span_text)),
        ("Pause", "", _of("pause_ns", span_text)),
    )
    return f'<div class="dense">{text}</div>'


def _number_text(value: object, *, signed: bool = False) -> str:
    if not isinstance(value, int | float):
        return cell(None)
    return f"{value:+.2f}" if signed else f"{value:.4g}"


def _mix_bar(mix: object) -> str:
    """Shares of the operations as a bar, and in words down to a twentieth."""
    if not isinstance(mix, list) or not mix:
        return cell(None)
    whole = sum(row["operations"] for row in mix)
    shares = [(str(row["op"] or "not known"), row["operations"] / whole) for row in mix]
    bar = "".join(f'<i data-op="{escape(op)}" style="flex-grow:{share:.4f}"></i>' for op, share in shares)
    words = ", ".join(f"{escape(op)} {share:.0%}" for op, share in shares if share >= _NAMED_SHARE)
    return f'<div class="mix">{bar}</div><small>{words}</small>'


def inspector_table(selection: Selection, number: int) -> str:
    """Table of what NCCL Inspector reported, beside the kernels."""
    found = inspector_rows(selection)
    more = len(found) - MAX_TABLE_ROWS
    rest = f" {more} more are in summary.json." if more > 0 else ""
    caption = (
        f"<b>Table {number}.</b> NCCL Inspector. “busbw against kernels”: its bandwidth, waiting included, over that "
        f"of the kernels that nsys recorded, where both are known; 100% is agreement.{rest}"
    )
    return table_of(
        caption,
        found[:MAX_TABLE_ROWS],
        ("Communicator", "text", lambda row: f"<code>{escape(str(row['communicator']))}</code>"),
        ("Parallelism", "text", lambda row: cell(row["parallelism"], "not known")),
        ("Operation", "text", lambda row: escape(str(row["op"]))),
        ("Size up to", "", _of("size_class")),
        ("Records", "", _of("records", count_text)),
        ("Kernel time", "", _of("duration_ns", span_text)),
        ("busbw, median", "", _of("busbw", bandwidth_text)),
        ("Compared", "", _of("compared", count_text)),
        ("busbw against kernels", "", _of("busbw_ratio", ratio_text)),
    )

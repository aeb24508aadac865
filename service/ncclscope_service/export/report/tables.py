"""The tables of `report.html`, as HTML, with numbers as people read them; None becomes "not recorded".

Those of communicators show what they are, how fast they are, and how they communicate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from statistics import median
from typing import Any, Final

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


def operations_table(selection: Selection, sums: Totals, number: int) -> str:
    """Table of each operation of each kind of communicator."""
    kinds = [communicator.parallelism for communicator in selection.store.communicators]
    by_kind = sums.by(lambda group: (group.op, kinds[group.communicator] if group.communicator >= 0 else None))
    rows = (
        (
            escape(op),
            cell(kind, "not known"),
            count_text(total.operations),
            _calls_text(sums.calls.get((op, kind))),
            bytes_text(total.bytes if total.sized else None),
            span_text(total.duration_ns if total.timed else None),
            span_text(total.wait_ns if total.waits else None),
            span_text(total.transfer_ns if total.transfers else None),
        )
        for (op, kind), total in by_kind.items()
    )
    columns = (("Operation", "text"), ("Parallelism", "text"), ("Operations", ""), ("Per rank and iteration", ""))
    times = (("Message bytes", ""), ("Kernel time", ""), ("Waiting", ""), ("Transfer", ""))
    caption = (
        f"<b>Table {number}.</b> Operations over all ranks. Per rank and iteration: median (and range where it "
        "differs) over the ranks that call it. Times count every launch once and are summed over the ranks."
    )
    return table(caption, (*columns, *times), rows)


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
    rows = [
        (
            escape(job),
            count_text(of["iterations"]),
            span_text(of["median_ns"]),
            span_text(of["p90_ns"]),
            ratio_text(of["communication_ratio"]),
            ratio_text(of["exposed_ratio"]),
            _told_by(of),
        )
        for job, of in iterations_document(selection, sums).items()
        if of is not None
    ]
    columns = (
        ("Job", "text"),
        ("Iterations", ""),
        ("Length, median", ""),
        ("90th percentile", ""),
        ("Communication", ""),
        ("Exposed", ""),
        ("Told by", "text"),
    )
    caption = (
        f"<b>Table {number}.</b> Iterations over all ranks. Communication: share of the time in which a rank ran NCCL "
        "kernels, waiting included. Exposed: what of the time no other kernel of that GPU hid."
    )
    return table(caption, columns, rows)


def budget_table(selection: Selection, sums: Totals, number: int) -> str:
    """Where the mean step of each job goes."""
    rows = [
        (
            escape(step.job),
            PART_WORDS[part.part],
            escape(part.parallelism or ""),
            span_text(part.mean_ns),
            ratio_text(part.share),
        )
        for step in mean_steps(selection, sums)
        for part in step.parts
        if part.share >= LEAST_SHARE
    ]
    columns = (("Job", "text"), ("Part", "text"), ("Parallelism", "text"), ("Time", ""), ("Share", ""))
    caption = (
        f"<b>Table {number}.</b> Where a step goes, mean over steps and ranks whose kernels are all known. A step "
        "lasts on the GPU from the first NCCL kernel of an iteration to that of the next."
    )
    return table(caption, columns, rows)


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
    rows = (
        (
            (f"{escape(row['job'])} " if several else "") + f"<code>{cell(row['comm_id'])}</code>",
            cell(row["parallelism"], "not known"),
            "" if row["sender"] is None else f"{row['sender']} to {row['receiver']}",
            f"{row['comm_rank']} ({cell(row['host'])})",
            cell(row["rank"]),
            count_text(row["operations"]),
            count_text(row["behind"]),
            cell(row["op"]),
            ranks_text(row["waits_for"]),
            ranks_text(row["blamed"]),
            cell(row["last_words"], ""),
        )
        for row in uneven[:_MAX_STANDING]
    )
    columns = (
        ("Communicator", "text"),
        ("Parallelism", "text"),
        ("Send to Recv", "text"),
        ("Rank in it", "text"),
        ("Global rank", ""),
        ("Enqueued", ""),
        ("Behind", ""),
        ("Last", "text"),
        ("Waits for", "text"),
        ("Waits end at", "text"),
        ("Last words", "text"),
    )
    more = len(uneven) - _MAX_STANDING
    rest = f" {count_text(more)} more rows are in last_operations.parquet." if more > 0 else ""
    caption = (
        f"<b>Table {number}.</b> Groups of which not all ranks enqueued the same number of operations, by the log "
        "lines that were read. Behind: how many fewer than the rank that enqueued most. Waits for: ranks furthest "
        "behind there. Waits end at: ranks that wait for nobody, directly or over other groups; none if there are more "
        f"than eight. Last words: the last line of the rank that says that something failed.{rest}"
    )
    return table(caption, columns, rows)


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
    rows = (
        (
            f"<code>{escape(host)}</code>",
            span_text(clock["offset_ns"]),
            f"{clock['drift_ppm']:.3f} ppm",
            span_text(clock["sigma_ns"]),
            f"{span_text(clock['interval_lo_ns'])} to {span_text(clock['interval_hi_ns'])}",
            count_text(clock["samples"]),
            count_text(len(clock["steps"])),
        )
        for host, clock in hosts.items()
        if document["method"] is not None or count == 1
    )
    columns = (
        ("Host", "text"),
        ("Offset", ""),
        ("Drift", ""),
        ("Sigma", ""),
        ("Feasible", ""),
        ("Samples", ""),
        ("Steps", ""),
    )
    return table(caption, columns, rows)


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
    rows = [_family(members) for members in list(families.values())[:MAX_TABLE_ROWS]]
    columns = (
        ("Parallelism", "text"),
        ("Communicators", ""),
        ("Ranks", ""),
        ("Hosts", ""),
        ("Operations", ""),
        ("Message bytes", ""),
        ("busbw, median", ""),
        ("Slowest", ""),
        ("Limit (topology)", ""),
        ("Efficiency", ""),
        ("Waiting", ""),
    )
    more = len(families) - MAX_TABLE_ROWS
    rest = f" {more} more kinds are in communicators.parquet." if more > 0 else ""
    caption = (
        f"<b>Table {number}.</b> Communicators by kind, most bytes first. busbw: the median over the communicators of "
        "each one's median, and that of the slowest of them; efficiency is the median against the topology's limit, "
        f"waiting a share of kernel time.{rest}"
    )
    each = communicators_table(found)
    return table(caption, columns, rows) + (
        f"<details><summary>Each communicator by itself</summary>{each}</details>" if len(found) > len(families) else ""
    )


def _family(members: list[dict[str, object]]) -> tuple[str, ...]:
    def known(name: str) -> list[float]:
        return [float(value) for row in members if isinstance(value := row[name], int | float)]

    def middle(name: str) -> float | None:
        return median(known(name)) if known(name) else None

    slowest = min(known("busbw"), default=None) if len(members) > 1 else None
    return (
        _kind_text(members[0]),
        count_text(len(members)),
        cell(members[0]["size"]),
        cell(members[0]["hosts"]),
        count_text(sum(int(value) for value in known("operations"))),
        bytes_text(sum(known("bytes")) if known("bytes") else None),
        bandwidth_text(middle("busbw")),
        bandwidth_text(slowest) if slowest is not None or not known("busbw") else "",
        bandwidth_text(middle("limit")),
        ratio_text(middle("efficiency")),
        ratio_text(middle("wait_ratio")),
    )


def _kind_text(row: Mapping[str, object]) -> str:
    """Parallelism of a communicator's row, and the name of its group if PyTorch prints it."""
    return cell(row["parallelism"], "not known") + ("" if row["group_name"] is None else f" {cell(row['group_name'])}")


NONE: Final = "none"
"""One rank moves nothing and waits for nobody: that is known, not unrecorded."""


def measures_of(row: Mapping[str, object], *shown: tuple[str, Callable[[object], str]]) -> Iterator[str]:
    """Cells of a communicator's row, each by the name of its number and how that is written."""
    return (NONE if row["size"] == 1 else write(row[name]) for name, write in shown)


def communicators_table(found: Sequence[Mapping[str, object]]) -> str:
    """The communicators that moved most."""
    rows = (
        (
            f"<code>{escape(str(row['communicator']))}</code>",
            _kind_text(row),
            cell(row["size"]),
            cell(row["hosts"]),
            count_text(row["operations"]),
            *measures_of(row, ("bytes", bytes_text), ("busbw", bandwidth_text), ("limit", bandwidth_text)),
            *measures_of(row, ("efficiency", ratio_text), ("wait_ratio", ratio_text)),
        )
        for row in found[:MAX_TABLE_ROWS]
    )
    columns = (("Communicator", "text"), ("Parallelism", "text"), ("Ranks", ""), ("Hosts", ""), ("Operations", ""))
    measures = (
        ("Message bytes", ""),
        ("busbw, median", ""),
        ("Limit (topology)", ""),
        ("Efficiency", ""),
        ("Waiting", ""),
    )
    more = len(found) - MAX_TABLE_ROWS
    rest = f" The first {MAX_TABLE_ROWS}; {more} more are in communicators.parquet." if more > 0 else ""
    return table(f"<b>Communicators</b>, most bytes first.{rest}", (*columns, *measures), rows)


def signatures_table(selection: Selection, sums: Totals, number: int) -> str:
    """How each kind of communicator communicates."""
    found = signatures_document(selection, sums)
    several = len(selection.jobs) > 1
    rows = [
        (
            (f"{escape(str(row['job']))} " if several else "") + cell(row["parallelism"], "not known"),
            count_text(row["communicators"]),
            _mix_bar(row["operation_mix"]),
            bytes_text(row["median_bytes"]),
            bytes_text(row["largest_bytes"]),
            _number_text(row["operations_per_iteration"]),
            bytes_text(row["bytes_per_iteration"]),
            _number_text(row["burstiness"], signed=True),
            span_text(row["period_ns"]),
            ratio_text(row["active_ratio"]),
            _number_text(row["bursts_per_iteration"]),
            span_text(row["burst_ns"]),
            span_text(row["pause_ns"]),
        )
        for row in found[:MAX_TABLE_ROWS]
    ]
    columns = (
        ("Parallelism", "text"),
        ("Groups", ""),
        ("Operation mix", "text"),
        ("Message, median", ""),
        ("Largest", ""),
        ("Operations", ""),
        ("Bytes", ""),
        ("Burstiness", ""),
        ("Period", ""),
        ("Active", ""),
        ("Bursts", ""),
        ("Burst", ""),
        ("Pause", ""),
    )
    caption = (
        f"<b>Table {number}.</b> Communication signatures, the median over the communicators of a kind. Operations, "
        "bytes and bursts are of one rank in one iteration. Burstiness of the times between calls: -1 is a clock, 0 "
        "chance, towards 1 bursts. Active: share of the time in which a kernel ran. A pause is longer than a twentieth "
        "of the period."
    )
    return f'<div class="dense">{table(caption, columns, rows)}</div>'


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
    rows = (
        (
            f"<code>{escape(str(row['communicator']))}</code>",
            cell(row["parallelism"], "not known"),
            escape(str(row["op"])),
            cell(row["size_class"]),
            count_text(row["records"]),
            span_text(row["duration_ns"]),
            bandwidth_text(row["busbw"]),
            count_text(row["compared"]),
            ratio_text(row["busbw_ratio"]),
        )
        for row in found[:MAX_TABLE_ROWS]
    )
    columns = (
        ("Communicator", "text"),
        ("Parallelism", "text"),
        ("Operation", "text"),
        ("Size up to", ""),
        ("Records", ""),
        ("Kernel time", ""),
        ("busbw, median", ""),
        ("Compared", ""),
        ("busbw against kernels", ""),
    )
    more = len(found) - MAX_TABLE_ROWS
    rest = f" {more} more are in summary.json." if more > 0 else ""
    caption = (
        f"<b>Table {number}.</b> NCCL Inspector. “busbw against kernels”: its bandwidth, waiting included, over that "
        f"of the kernels that nsys recorded, where both are known; 100% is agreement.{rest}"
    )
    return table(caption, columns, rows)

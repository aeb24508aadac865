"""The figures of `report.html`: where each stands, and what its caption says; `report.js` draws them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from ncclscope_service.export.report.node_graph import Picture
from ncclscope_service.export.report.tables import bytes_text, count_text, ratio_text
from ncclscope_service.export.summary import NOT_RECORDED


@dataclass(slots=True)
class Figures:
    """Numbers figures as they are placed, and writes "not recorded" if one has no data."""

    data: Mapping[str, object]
    pictures: Sequence[Picture] = ()
    """SVG and caption of the nodes' graphs, rings and trees."""
    number: int = 0
    tables: int = 0

    def next_table(self) -> int:
        """The number of a table that is placed now."""
        self.tables += 1
        return self.tables

    def figure(self, name: str, key: str, caption: str) -> str:
        """One figure; `key` names its data, and the caption says what is shown, how, and what is not."""
        self.number += 1
        plot = (
            f'<div class="plot" id="{name}"></div>' if self.data[key] else f'<div class="missing">{NOT_RECORDED}</div>'
        )
        return f"<figure>{plot}<figcaption>Figure {self.number}. {caption}</figcaption></figure>"

    def of(self, key: str, name: str) -> object:
        """One value of a figure's data; None without data."""
        found = self.data[key]
        return found.get(name) if isinstance(found, dict) else None

    def communicated(self) -> Iterator[str]:
        """Operations and bytes by kind."""
        yield '<div class="pair">'
        yield self.figure("mix-operations", "mix", "<b>Operations</b> over all ranks, by kind of communicator.")
        yield self.figure("mix-bytes", "mix", "<b>Message bytes</b> over all ranks, by kind of communicator.")
        yield "</div>"

    def iterations(self) -> Iterator[str]:
        """How long iterations last and what fills them."""
        job = self.of("steps", "job")
        of_job = f" of {escape(str(job))}" if job is not None else ""
        yield self.figure(
            "iteration-lengths",
            "steps",
            f"<b>Length of each iteration</b>{of_job}{self._bins('steps')}, mean over the ranks, and what fills it: "
            "communication that nothing hid, communication beside other kernels, and time without an NCCL kernel.",
        )
        yield self.figure(
            "rank-shares",
            "steps",
            f"<b>What fills the iterations of each rank</b>{self._every('steps')}. Waiting for others is communication "
            "too.",
        )

    def per_rank(self) -> Iterator[str]:
        """Volume and operations of each rank."""
        yield self.figure("volume", "volume", "<b>Volume of each rank</b>: message bytes of all operations it called.")
        yield self.figure(
            "rank-operations",
            "steps",
            f"<b>Operations of each rank in each iteration</b>{self._every('steps')}"
            f"{self._bins('steps')}. Stages of a pipeline differ; within one, a rank that differs lost lines or does "
            "something else. Blank: no line.",
        )

    def per_iteration(self) -> Iterator[str]:
        """Figures by iteration."""
        bins = self._bins("iterations")
        without = self.of("iterations", "without")
        rest = f" {count_text(without)} operations lie in no iteration and are left out." if without else ""
        yield '<div class="pair">'
        yield self.figure(
            "iteration-operations", "iterations", f"<b>Operations of each iteration</b>, over all ranks{bins}.{rest}"
        )
        yield self.figure(
            "iteration-bytes", "iterations", f"<b>Message bytes of each iteration</b>, over all ranks{bins}.{rest}"
        )
        yield "</div>"

    def sizes(self) -> Iterator[str]:
        """Message sizes: all, and by group."""
        yield self.figure(
            "sizes", "sizes", "<b>Message sizes</b>, one bin per power of two. The size is S of nccl-tests."
        )

    def signatures(self) -> Iterator[str]:
        """How each kind of communicator communicates."""
        yield self.figure(
            "size-map",
            "sizes",
            "<b>Message sizes of each kind of communicator and operation</b>: number of operations, one column per "
            "power of two.",
        )
        yield self.figure(
            "activity",
            "activity",
            "<b>When in an iteration each kind of communicator is active</b>: share of its ranks that run a kernel of "
            "it, all iterations laid over each other. Waiting is part of it. Dotted: the median length of an "
            "iteration.",
        )

    def traffic(self) -> Iterator[str]:
        """Figures of traffic between ranks."""
        what, total, assumed = (self.of("traffic", name) for name in ("what", "total", "assumed"))
        text = "<b>Bytes sent</b> from each sender to each receiver: payload that the operations put on the links."
        if isinstance(total, int) and total > 0 and isinstance(assumed, int):
            between = self.of("traffic", "between_nodes")
            text = (
                f"<b>Bytes sent</b> from each {what} to each other, {bytes_text(total)} in all, of which "
                f"{bytes_text(between)} directly from node to node. Blank: nothing was sent."
            )
            if assumed:
                text += f" The algorithm of {ratio_text(assumed / total)} of it is not recorded: a ring was taken."
            if self.of("traffic", "unplaced_calls"):
                text += " What ranks sent that are not known is left out."
            shown, of = self.of("traffic", "senders"), self.of("traffic", "of")
            if isinstance(shown, list) and isinstance(of, int) and len(shown) < of:
                text += f" The first {len(shown)} of {count_text(of)} are drawn; traffic.parquet has all."
        yield self.figure("traffic", "traffic", text)

    def topology(self) -> Iterator[str]:
        """The nodes as NCCL sees them."""
        for picture, caption in self.pictures:
            self.number += 1
            yield f"<figure>{picture}<figcaption>Figure {self.number}. {caption}</figcaption></figure>"

    def bandwidth(self) -> Iterator[str]:
        """Figures of bandwidth."""
        drawn, of = self.of("bandwidth", "drawn"), self.of("bandwidth", "of")
        sampled = "" if drawn == of else f" ({count_text(drawn)} of {count_text(of)} are drawn, by lot)"
        limits = "; dashed: the topology's limits" if self.of("bandwidth", "limits") else ""
        yield self.figure(
            "bandwidth",
            "bandwidth",
            f"<b>Bus bandwidth against message size</b>, one point per collective{sampled}. "
            f"Waiting is not part of it. Colour: kind of communicator; symbol: operation{limits}.",
        )

    def over_time(self) -> Iterator[str]:
        """The timeline and the pattern of kernels running or not."""
        iterations = self.of("timeline", "iterations")
        window = (
            f"iterations {iterations[0]} and {iterations[1]}, of which the first lasts nearest to the median"
            if isinstance(iterations, list)
            else "the middle of the run"
        )
        cut = " Only the first kernels fit the figure." if self.of("timeline", "is_cut") else ""
        yield self.figure(
            "timeline",
            "timeline",
            f"<b>NCCL kernels</b> over {window}, on the reference clock{self._every('timeline')}. Grey: waiting for "
            f"the last rank; solid: transfer; hatched: the two cannot be told apart.{cut}",
        )
        yield self.figure(
            "on-off",
            "on_off",
            "<b>Communication on and off</b>: share of the captured time in which an NCCL kernel ran"
            f"{self._every('on_off')}. Kernels that overlap count once. Blank: no capture recorded that time.",
        )

    def waits(self) -> Iterator[str]:
        """Figures of waiting."""
        yield self.figure(
            "kind-waits",
            "kind_waits",
            f"<b>Waiting of each rank by kind of communicator</b>, as a share of its time in kernels of it"
            f"{self._every('kind_waits')}. Blank: no kernel whose wait is known.",
        )
        yield self.figure(
            "waits",
            "waits",
            f"<b>Waiting over the run</b>{self._every('waits')}{self._bins('waits')}, as a share of the time in "
            "kernels of AllReduce, AllGather, ReduceScatter and AlltoAll. A rank that never waits is the one others "
            "wait for.",
        )

    def trust(self) -> Iterator[str]:
        """Alignment and clocks."""
        yield '<div class="pair">'
        yield self.figure(
            "alignment",
            "alignment",
            "<b>Operations by what became of them.</b> “Not covered”: no capture ran at that time; “no kernel”: NCCL "
            "launches none.",
        )
        yield self.figure(
            "confidence",
            "confidence",
            "<b>Confidence of the matches</b> of operations to kernels, in bins of 0.05.",
        )
        yield "</div>"
        yield self.figure(
            "clocks",
            "clocks",
            "<b>Uncertainty of each host's clock</b> around its estimate. Bar: plus and minus sigma; line: where "
            "causality allows the offset to be. The reference has none.",
        )

    def compared(self) -> Iterator[str]:
        """Two runs beside each other."""
        yield self.figure(
            "compare-busbw",
            "compare",
            "<b>Median busbw of both runs</b> by kind of communicator, operation and size class, most kernel time "
            "first. Whiskers: three times the scatter within the run; none where there is too little data.",
        )
        yield self.figure(
            "compare-iterations", "compare", "<b>Length of each iteration</b>, from first kernel to first kernel."
        )

    def _bins(self, key: str) -> str:
        per_bin = self.of(key, "per_bin")
        return f" ({per_bin} iterations to a bin)" if isinstance(per_bin, int) and per_bin > 1 else ""

    def _every(self, key: str) -> str:
        every = self.of(key, "every")
        return f" (every {every}th rank is drawn)" if isinstance(every, int) and every > 1 else ""

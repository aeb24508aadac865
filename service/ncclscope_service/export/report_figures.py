"""The figures of `report.html`: where each stands, and what its caption says; `report.js` draws them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ncclscope_service.export.report_text import bytes_text, count_text, ratio_text
from ncclscope_service.export.summary import NOT_RECORDED


@dataclass(slots=True)
class Figures:
    """Numbers figures as they are placed, and writes "not recorded" where one has no data."""

    data: Mapping[str, object]
    number: int = 0

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

    def distributions(self) -> Iterator[str]:
        """Sizes, ranks, iterations."""
        yield self.figure(
            "sizes", "sizes", "<b>Message sizes</b>, one bin per power of two. The size is S of nccl-tests."
        )
        yield self.figure("volume", "volume", "<b>Volume of each rank</b>: message bytes of all operations it called.")
        per_bin = self.of("iterations", "per_bin")
        bins = f", {per_bin} iterations to a bar" if isinstance(per_bin, int) and per_bin > 1 else ""
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

    def traffic(self) -> Iterator[str]:
        """Who sent to whom."""
        what, total, assumed = (self.of("traffic", name) for name in ("what", "total", "assumed"))
        text = "<b>Bytes sent</b> from each sender to each receiver: payload that the operations put on the links."
        if isinstance(total, int) and total > 0 and isinstance(assumed, int):
            between = self.of("traffic", "between_nodes")
            text = (
                f"<b>Bytes sent</b> from each {what} to each other, {bytes_text(total)} in all, of which "
                f"{bytes_text(between)} directly from node to node. Blank: nothing was sent."
            )
            if assumed:
                text += (
                    f" The algorithm of {ratio_text(assumed / total)} of it is not recorded: a ring in the order of "
                    "ranks was taken."
                )
            if self.of("traffic", "unplaced_calls"):
                text += " What ranks sent that are not known is left out."
            shown, of = self.of("traffic", "senders"), self.of("traffic", "of")
            if isinstance(shown, list) and isinstance(of, int) and len(shown) < of:
                text += f" The first {len(shown)} of {count_text(of)} are drawn; traffic.parquet has all."
        yield self.figure("traffic", "traffic", text)

    def bandwidth(self) -> Iterator[str]:
        """How fast."""
        drawn, of = self.of("bandwidth", "drawn"), self.of("bandwidth", "of")
        sampled = "" if drawn == of else f" ({count_text(drawn)} of {count_text(of)} are drawn, by lot)"
        limits = "; dashed lines are the topology's limits" if self.of("bandwidth", "limits") else ""
        yield self.figure(
            "bandwidth",
            "bandwidth",
            f"<b>Bus bandwidth against message size</b>, one point per collective{sampled}. "
            f"Waiting is not part of it{limits}.",
        )

    def over_time(self) -> Iterator[str]:
        """The timeline and the pattern of kernels running or not."""
        iterations = self.of("timeline", "iterations")
        window = (
            f"iterations {iterations[0]} and {iterations[1]}, of which the first lasts nearest to the median"
            if isinstance(iterations, list)
            else "the middle of the run (iterations are not recorded)"
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
        """Who waited."""
        yield self.figure(
            "waits",
            "waits",
            f"<b>Waiting</b> as a share of the time in NCCL kernels{self._every('waits')}. A rank that never waits is "
            "the one others wait for. Blank: no kernel whose wait is known.",
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

    def _every(self, key: str) -> str:
        every = self.of(key, "every")
        return f" (every {every}th rank is drawn)" if isinstance(every, int) and every > 1 else ""

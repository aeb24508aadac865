"""The interleaved pipeline schedule: each rank holds several chunks of layers and exchanges both ways at once.

Source: Megatron-LM core/pipeline_parallel/schedules.py forward_backward_pipelining_with_interleaving, without overlap
of its exchanges with computation, and p2p_communication.py: one batch has up to four Sends and Recvs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One microbatch through one chunk of layers."""

    chunk: int
    backward: bool
    is_last: bool
    """The last backward of its chunk in the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """One batch with the neighbours; the stages form a ring."""

    send_next: bool = False
    receive_previous: bool = False
    send_previous: bool = False
    receive_next: bool = False


@dataclass(frozen=True, slots=True)
class Interleaving:
    """One stage's part in the schedule; `microbatches` must be a multiple of `stages`."""

    stage: int
    stages: int
    chunks: int
    microbatches: int

    def steps(self) -> Iterator[Work | Exchange]:
        """The work and the exchanges of the stage, in order."""
        total = self.microbatches * self.chunks
        all_warm_up = self.microbatches == self.stages
        ahead = (self.stages - self.stage - 1) * 2 + (self.chunks - 1) * self.stages
        warm_up = total if all_warm_up else min(ahead, total)
        if not self._is_first:
            yield Exchange(receive_previous=True)
        for nth in range(warm_up):
            yield self._forward(nth)
            yield Exchange(
                send_next=self._sends_next(nth),
                receive_previous=nth < total - 1 and not (self._is_first and self._chunk(nth + 1) == 0),
                receive_next=nth == warm_up - 1 and not all_warm_up and not self._is_last,
            )
        for nth in range(total - warm_up):
            yield self._forward(nth + warm_up)
            yield self._backward(nth, total)
            yield self._steady(nth, warm_up, total)
        if all_warm_up and not self._is_last:
            yield Exchange(receive_next=True)
        for nth in range(total - warm_up, total):
            yield self._backward(nth, total)
            receives = nth < total - 1 and not (self._is_last and self._backward_chunk(nth + 1) == self.chunks - 1)
            yield Exchange(send_previous=self._sends_previous(nth), receive_next=receives)

    def _steady(self, nth: int, warm_up: int, total: int) -> Exchange:
        # The first stage is ahead of the last by stages - 1, and so is the last of the first on the way back.
        receives = not self._is_first or self._chunk(nth + warm_up - (self.stages - 1)) != self.chunks - 1
        returns = not self._is_last or self._backward_chunk(nth - (self.stages - 1)) != 0
        return Exchange(
            send_next=self._sends_next(nth + warm_up),
            receive_previous=receives and nth < total - warm_up - 1,
            send_previous=self._sends_previous(nth),
            receive_next=returns,
        )

    @property
    def _is_first(self) -> bool:
        return self.stage == 0

    @property
    def _is_last(self) -> bool:
        return self.stage == self.stages - 1

    def _forward(self, nth: int) -> Work:
        return Work(chunk=self._chunk(nth), backward=False, is_last=False)

    def _backward(self, nth: int, total: int) -> Work:
        chunk = self._backward_chunk(nth)
        is_last = all(self._backward_chunk(later) != chunk for later in range(nth + 1, total))
        return Work(chunk=chunk, backward=True, is_last=is_last)

    def _chunk(self, nth: int) -> int:
        return nth % (self.stages * self.chunks) // self.stages

    def _backward_chunk(self, nth: int) -> int:
        return self.chunks - 1 - self._chunk(nth)

    def _sends_next(self, nth: int) -> bool:
        return not (self._is_last and self._chunk(nth) == self.chunks - 1)

    def _sends_previous(self, nth: int) -> bool:
        return not (self._is_first and self._backward_chunk(nth) == 0)

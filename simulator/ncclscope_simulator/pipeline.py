"""In which order a rank takes its microbatches, and what it exchanges with the pipeline stages beside it.

1F1B, plain or interleaved (Megatron-LM core/pipeline_parallel/schedules.py), with batched Send and Recv
(p2p_communication.py: a batch has both in the steady state, one alone at the edges; up to four if interleaved, where
each rank holds several chunks of layers and exchanges both ways at once, without overlap with computation).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ncclscope_simulator.layers import Layers
from ncclscope_simulator.megatron import MegatronLayers
from ncclscope_simulator.script import Script


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
    """One stage's part in the interleaved schedule; `microbatches` must be a multiple of `stages`.

    Source: forward_backward_pipelining_with_interleaving.
    """

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


class Pipeline:
    """Writes one rank's part in the schedule."""

    def __init__(self, script: Script, layers: Layers | MegatronLayers) -> None:
        self._script, self._config, self._layers = script, script.config, layers

    def run(self) -> None:
        """All microbatches of a step, forward and backward."""
        if self._config.interleave > 1:
            self._interleaved()
        else:
            self._plain()

    def _plain(self) -> None:
        """1F1B without interleaving. Source: forward_backward_pipelining_without_interleaving."""
        warm_up = min(self._config.pp - 1 - self._script.stage, self._config.microbatches)
        steady = self._config.microbatches - warm_up
        for _ in range(warm_up):
            self._transfer(receive_before=True)
            self._layers.forward()
            self._transfer(send_after=True)
        if steady:
            self._transfer(receive_before=True)
        for nth in range(steady):
            last = nth == steady - 1
            self._layers.forward()
            self._transfer(send_after=True, receive_after=True)
            self._layers.backward(last=last and not warm_up)
            self._transfer(send_before=True, receive_before=not last)
        for nth in range(warm_up):
            self._transfer(receive_after=True)
            self._layers.backward(last=nth == warm_up - 1)
            self._transfer(send_before=True)

    def evaluate(self) -> None:
        """All microbatches of a step, forward only. Source: the same with `forward_only`."""
        for _ in range(self._config.microbatches):
            self._transfer(receive_before=True)
            self._layers.forward()
            self._transfer(send_after=True)

    def _interleaved(self) -> None:
        """1F1B with several chunks of layers on each rank; the stages form a ring."""
        config, stage = self._config, self._script.stage
        layers = config.layers // config.interleave
        for step in Interleaving(stage, config.pp, config.interleave, config.microbatches).steps():
            if isinstance(step, Exchange):
                self._exchange(step, (stage - 1) % config.pp, (stage + 1) % config.pp)
                continue
            own = range(step.chunk * layers, (step.chunk + 1) * layers)
            if step.backward:
                self._layers.backward(own, last=step.is_last)
            else:
                self._layers.forward(own, outer=step.chunk in {0, config.interleave - 1})

    def _transfer(
        self,
        *,
        send_before: bool = False,
        receive_before: bool = False,
        send_after: bool = False,
        receive_after: bool = False,
    ) -> None:
        """One batch with the stages before and after this one, if there are such."""
        has_before, has_after = not self._script.is_first_stage, not self._script.is_last_stage
        exchange = Exchange(
            send_previous=send_before and has_before,
            receive_previous=receive_before and has_before,
            send_next=send_after and has_after,
            receive_next=receive_after and has_after,
        )
        self._exchange(exchange, self._script.stage - 1, self._script.stage + 1)

    def _exchange(self, exchange: Exchange, before: int, after: int) -> None:
        """One batch with two stages; Megatron synchronises after it."""
        wanted = (
            (exchange.send_previous, "Send", before),
            (exchange.receive_previous, "Recv", before),
            (exchange.send_next, "Send", after),
            (exchange.receive_next, "Recv", after),
        )
        pairs = [(op, stage) for asked, op, stage in wanted if asked]
        if not pairs:
            return
        script = self._script
        share = self._config.tp if self._config.sequence_parallelism else 1
        launch = script.builder.point_to_point(
            script.groups["PP"], pairs, name="pipeline", count=script.tokens // share, dtype=script.half
        )
        script.launch(launch)
        script.synchronise()

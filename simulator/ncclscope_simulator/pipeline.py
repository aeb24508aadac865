"""In which order a rank takes its microbatches, and what it exchanges with the pipeline stages beside it.

1F1B, plain or interleaved (Megatron-LM core/pipeline_parallel/schedules.py), with batched Send and Recv
(p2p_communication.py: a batch has both in the steady state, one alone at the edges).
"""

from __future__ import annotations

from ncclscope_simulator.interleaving import Exchange, Interleaving
from ncclscope_simulator.layers import Layers
from ncclscope_simulator.script import Script


class Pipeline:
    """Writes one rank's part in the schedule."""

    def __init__(self, script: Script, layers: Layers) -> None:
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

"""Expert layers by what they exchange: which all-to-alls repeat and transpose others, and how even the load is.

A layer with experts has four all-to-alls of tokens in each micro-batch: tokens out and back, and their gradients out
and back. The gradients of what came back go where the tokens went, and those of the tokens come back as the results
did: of each layer and micro-batch one matrix occurs twice, and its transpose twice. Which tokens go where is the
router's choice and no forecast.

Source: Li et al., Analyzing Communication Predictability in LLM Training, section 3.2 and figure 7; Megatron-LM
core_r0.13.0 `megatron/core/transformer/moe/token_dispatcher.py`; PyTorch 2.7 `torch/csrc/cuda/nccl.cpp:
all2all_single_unequal_split` (Sends and Recvs of an exchange go by peer, a Send first; empty ones are left out).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from ncclscope_models.job import Dispatcher, Job, Recompute

Matrix = NDArray[np.int64]
"""Elements by sender (rows) and receiver of one all-to-all; senders and receivers of one group, in its order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """The all-to-alls of tokens of one expert group in one iteration."""

    exchanges: int
    expected: int
    """By the description: four for each expert layer and micro-batch, six where layers are computed again."""
    transposed: int
    """Those that are one half of a pair: tokens out, and back the same way."""
    repeated: int
    """Those whose matrix comes in the backward pass too."""
    imbalance: float | None
    """Tokens that the busiest rank gets over the mean of all, for which all wait, mean of the exchanges; 1 is even.
    None without any."""

    @property
    def is_whole(self) -> bool:
        """Whether as many were seen as expected, and each has its transpose and its like."""
        return self.exchanges == self.expected == self.transposed == self.repeated


def expected_exchanges(job: Job, stage: int) -> int:
    """All-to-alls of tokens of an expert group of a stage in an iteration; 0 where experts send none."""
    experts = job.shape.experts
    if experts is None or job.layout.expert == 1 or experts.dispatcher is not Dispatcher.ALLTOALL:
        return 0
    layers = sum(
        job.shape.has_experts(layer) for chunk in range(job.layout.chunks) for layer in job.layers_of(stage, chunk)
    )
    return layers * job.micro_batches * (6 if job.training.recompute is Recompute.FULL else 4)


def tokens_of_exchange(job: Job) -> int:
    """Elements of all ranks of a group in one all-to-all of tokens: what tells it from one of probabilities."""
    experts = job.shape.experts
    tokens = job.training.micro_batch * job.shape.sequence // job.layout.context
    return 0 if experts is None else job.layout.expert * experts.top_k * tokens * job.shape.hidden


def matrices(
    ranks: NDArray[np.integer], ops: Sequence[str], peers: NDArray[np.integer], counts: NDArray[np.integer], size: int
) -> list[Matrix]:
    """The all-to-alls of one group in one iteration, from its lines in the order of each rank; empty where ranks
    differ in how many they have, or one sends what the other does not receive: then lines were lost.

    `ranks`, `peers`: in the group; an operation is Send, Recv or AlltoAll, whose count is that of each peer.
    """
    is_recv = np.asarray([op == "Recv" for op in ops], np.bool_)
    is_whole = np.asarray([op == "AlltoAll" for op in ops], np.bool_)
    turn = np.where(is_whole, -1, 2 * peers + is_recv)
    numbers = np.zeros(len(turn), np.int64)
    amounts: set[int] = set()
    for rank in range(size):
        own = np.flatnonzero(ranks == rank)
        is_first = np.ones(len(own), np.bool_)
        is_first[1:] = (turn[own][1:] <= turn[own][:-1]) | is_whole[own][:-1]
        numbers[own] = np.cumsum(is_first) - 1
        amounts.add(int(is_first.sum()))
    if len(amounts) != 1:
        return []
    sent, received = np.zeros((2, *amounts, size, size), np.int64)
    one = ~is_recv & ~is_whole
    np.add.at(sent, (numbers[one], ranks[one], peers[one]), counts[one])
    np.add.at(received, (numbers[is_recv], peers[is_recv], ranks[is_recv]), counts[is_recv])
    if not np.array_equal(sent, received):
        return []
    for at in np.flatnonzero(is_whole).tolist():
        sent[numbers[at], ranks[at]] += counts[at]
    return list(sent)


def exchanged(job: Job, stage: int, matrices: Sequence[Matrix]) -> Exchanged:
    """What the all-to-alls of an expert group in one iteration, in their order, have in common."""
    whole = tokens_of_exchange(job)
    tokens = [matrix for matrix in matrices if whole and int(matrix.sum()) == whole]
    times = 3 if job.training.recompute is Recompute.FULL else 2
    counts = Counter(matrix.tobytes() for matrix in tokens)
    transposes = Counter(np.ascontiguousarray(matrix.T).tobytes() for matrix in tokens)
    # Out forward and backward, and once more where it is computed again; as often back.
    repeated = sum(count for count in counts.values() if count % times == 0)
    transposed = sum(count for key, count in counts.items() if transposes[key] == count)
    received = [matrix.sum(axis=0) for matrix in tokens[::2]]
    return Exchanged(
        exchanges=len(tokens),
        expected=expected_exchanges(job, stage),
        transposed=transposed,
        repeated=repeated,
        imbalance=fmean(float(each.max() / each.mean()) for each in received) if received else None,
    )

"""Transfer, wait and bandwidth of launches seen on several ranks.

In an N-to-N collective no rank can end before the last one has arrived, and all end together; so the
shortest kernel is that of the last arriver and holds no waiting: transfer = the shortest duration, and every
other rank waited for the rest of its own. No clock is needed. Rooted collectives and Send/Recv let ranks end
early, so their starts must be compared, which needs all ranks on one clock and a transfer that exceeds its error.

Matrices have one row per launch and one column per rank of the communicator; unseen is NO_TIME_NS.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.nccl import bandwidth
from ncclscope_service.nccl.bandwidth import classify
from ncclscope_service.store import rows
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

Times = NDArray[np.int64]
Durations = NDArray[np.int64]
"""Nanoseconds; NO_NUMBER if not known."""

_FAR: Final = np.int64(2**62)
_SAME_HOST_SKEW_NS: Final = 2_000.0
_SIGMAS: Final = 3.0
"""How far two GPUs of one host may disagree though nsys maps both to the host's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """Durations, waits and bandwidths of K launches on R ranks. NO_NUMBER and NaN if they cannot be known."""

    duration_ns: Durations
    """K x R: kernel durations of seen, uncensored ranks."""
    wait_ns: Durations
    """K x R."""
    busbw_apparent: NDArray[np.float64]
    """K x R, bytes per second of the whole kernel, waiting included, as nccl-tests and NCCL Inspector would say."""
    ranks_seen: NDArray[np.int32]
    """K: ranks whose whole kernel was seen; fewer than all make the transfer an upper bound."""
    transfer_ns: Durations
    """K."""
    last_rank: NDArray[np.int32]
    """K: the rank that arrived last."""
    blame_ns: Durations
    """K: how much later than the second last it arrived."""
    spread_ns: Durations
    """K: the longest wait."""
    algbw: NDArray[np.float64]
    """K, bytes per second of the transfer."""
    busbw: NDArray[np.float64]
    """K, bytes per second of the transfer."""

    def take(self, chosen: NDArray[np.intp]) -> Measures:
        """These launches only."""
        return Measures(**{each.name: getattr(self, each.name)[chosen] for each in fields(self)})


def collective_rows(op: NDArray[np.uint8], moved_bytes: NDArray[np.int64], measures: Measures) -> Columns:
    """One rows.COLLECTIVE for each launch: what it moved and what was measured. Which it was, its times and its
    confidence are the caller's.
    """
    collectives = np.zeros(len(op), rows.COLLECTIVE)
    collectives["op"] = op
    collectives["size_class"] = classify(moved_bytes)
    collectives["message_bytes"] = moved_bytes
    collectives["ranks_seen"] = measures.ranks_seen
    collectives["transfer_ns"] = measures.transfer_ns
    collectives["spread_ns"] = measures.spread_ns
    collectives["wait_ns"] = np.maximum(measures.wait_ns, 0).sum(axis=1)
    collectives["busy_ns"] = np.maximum(measures.duration_ns, 0).sum(axis=1)
    collectives["last_rank"] = measures.last_rank
    collectives["blame_ns"] = measures.blame_ns
    collectives["busbw"] = measures.busbw
    collectives["rank"] = collectives["peer"] = NO_NUMBER
    return collectives


def measure_all_to_all(
    start_ns: Times,
    end_ns: Times,
    censored: NDArray[np.bool_],
    moved_bytes: NDArray[np.int64],
    weighted_bytes: NDArray[np.float64],
) -> Measures:
    """Measures of N-to-N collectives (AllReduce, AllGather, ReduceScatter, AlltoAll) from each host's own clock.

    `moved_bytes` is the sum of S over the collectives of each launch, `weighted_bytes` the sum of S x factor.
    Nothing is concluded where fewer than two whole kernels were seen; of ranks that tie the lowest is the last.
    """
    duration, seen = _durations(start_ns, end_ns, censored)
    launches = np.arange(len(duration))
    padded = np.where(seen, duration, _FAR)
    ranks_seen = seen.sum(axis=1, dtype=np.int32)
    is_known = ranks_seen >= 2
    last = padded.argmin(axis=1).astype(np.int32) if duration.shape[1] else np.zeros(len(duration), np.int32)
    shortest = padded[launches, last] if duration.shape[1] else np.zeros(len(duration), np.int64)
    transfer = np.where(is_known, shortest, np.int64(NO_NUMBER))
    wait = np.where(seen & is_known[:, None], duration - shortest[:, None], np.int64(NO_NUMBER))
    return Measures(
        duration_ns=duration,
        wait_ns=wait,
        busbw_apparent=bandwidth.rate(np.asarray(weighted_bytes, dtype=np.float64)[:, None], duration),
        ranks_seen=ranks_seen,
        transfer_ns=transfer,
        last_rank=np.where(is_known, last, np.int32(NO_NUMBER)),
        blame_ns=np.where(is_known, _second_smallest(padded) - shortest, np.int64(NO_NUMBER)),
        spread_ns=np.where(is_known, wait.max(axis=1, initial=0), np.int64(NO_NUMBER)),
        algbw=bandwidth.algbw(moved_bytes, transfer),
        busbw=bandwidth.rate(weighted_bytes, transfer),
    )


def measure_rooted(
    start_true_ns: Times,
    end_true_ns: Times,
    censored: NDArray[np.bool_],
    roots: NDArray[np.int32],
    root_sends: NDArray[np.bool_],
    hosts: NDArray[np.int32],
    sigma_ns: NDArray[np.float64],
    moved_bytes: NDArray[np.int64],
    weighted_bytes: NDArray[np.float64],
) -> Measures:
    """Measures of rooted collectives from times on the reference clock.

    `root_sends` is True for Broadcast and Scatter, False for Reduce and Gather; `hosts` and `sigma_ns` (the
    uncertainty of each rank's clock) are K x R too. Only waits for data are known: a receiver waits for the root, a
    gathering root for the last sender; a sender may leave early or be held back by full buffers, so its wait is null.
    So is a wait that the clocks make longer than the kernel, or where they know less than that it lay in the kernel.
    transfer = the shortest duration - wait of those whose wait is known, null unless it exceeds the uncertainty between
    their clocks and the root's. The last arriver is named only where it is later than the second last by three times
    their uncertainty.
    """
    duration, seen = _durations(start_true_ns, end_true_ns, censored)
    launches = np.arange(len(duration))
    ranks_seen = seen.sum(axis=1, dtype=np.int32)
    starts = np.where(seen, start_true_ns, np.int64(NO_TIME_NS))
    last = starts.argmax(axis=1)
    enough = ranks_seen >= 2
    latest = np.where(enough, starts[launches, last], 0)
    root = np.clip(roots, 0, max(0, starts.shape[1] - 1))
    of_root = launches[:, None], root[:, None]
    against_root = pair_uncertainty(hosts[of_root], hosts, sigma_ns[of_root], sigma_ns)
    wait = _waits_for_data(start_true_ns, seen, np.asarray(roots), np.asarray(root_sends)[:, None])
    wait = np.where((wait <= duration) & (against_root < duration), wait, np.int64(NO_NUMBER))
    moving = np.where(seen & (wait >= 0), duration - wait, _FAR)
    transfer = moving.min(axis=1, initial=int(_FAR))
    unsure = np.where(seen, against_root, 0.0).max(axis=1, initial=0.0)
    is_known = enough & (transfer < _FAR) & (transfer > unsure)
    transfer = np.where(is_known, transfer, np.int64(NO_NUMBER))
    second = np.argsort(starts, axis=1, kind="stable")[:, -2] if starts.shape[1] > 1 else last
    blame = np.where(enough, latest - np.where(enough, starts[launches, second], 0), np.int64(NO_NUMBER))
    unsure = pair_uncertainty(
        hosts[launches, last], hosts[launches, second], sigma_ns[launches, last], sigma_ns[launches, second]
    )
    is_certain = enough & (blame > 3 * unsure)
    return Measures(
        duration_ns=duration,
        wait_ns=np.where(enough[:, None], wait, np.int64(NO_NUMBER)),
        busbw_apparent=bandwidth.rate(np.asarray(weighted_bytes, dtype=np.float64)[:, None], duration),
        ranks_seen=ranks_seen,
        transfer_ns=transfer,
        last_rank=np.where(is_certain, last, NO_NUMBER).astype(np.int32),
        blame_ns=np.where(is_certain, blame, np.int64(NO_NUMBER)),
        spread_ns=np.where(enough, wait.max(axis=1, initial=NO_NUMBER), np.int64(NO_NUMBER)),
        algbw=bandwidth.algbw(moved_bytes, transfer),
        busbw=bandwidth.rate(weighted_bytes, transfer),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeMeasures:
    """Measures of L launches of sends and receives, each on its own rank. NO_NUMBER and NaN if they cannot be known."""

    wait_ns: Durations
    """Until the last of the peers had started."""
    transfer_ns: Durations
    busbw: NDArray[np.float64]
    """Bytes per second of the transfer; the factor of Send/Recv is 1, so algbw is the same."""
    busbw_apparent: NDArray[np.float64]


def measure_exchanges(
    start_true_ns: Times,
    end_true_ns: Times,
    censored: NDArray[np.bool_],
    last_peer_start_true_ns: Times,
    uncertainty_ns: NDArray[np.float64],
    moved_bytes: NDArray[np.int64],
) -> ExchangeMeasures:
    """Measures of launches that hold one Send or Recv, or a group of them, from times on the reference clock.

    Data can flow once both sides are there: transfer = own end - max(own start, last peer's start), and waiting is
    what lies before. `moved_bytes` is the larger of the bytes sent and received, without those to itself. Nothing is
    concluded where a peer was not seen, or the transfer does not exceed three times `uncertainty_ns`, the deviation of
    the clocks between this rank and its peers: a young estimate is off by a millisecond. Source: nccl-tests
    `src/sendrecv.cu` (S is one direction, factor 1).
    """
    duration, seen = _durations(start_true_ns, end_true_ns, censored)
    both = seen & (last_peer_start_true_ns != NO_TIME_NS)
    own = np.where(both, start_true_ns, 0)
    peer = np.where(both, last_peer_start_true_ns, 0)
    transfer = np.where(both, end_true_ns, 0) - np.maximum(own, peer)
    is_known = both & (transfer > _SIGMAS * np.maximum(uncertainty_ns, 0))
    transfer = np.where(is_known, transfer, np.int64(NO_NUMBER))
    moved = np.where(np.asarray(moved_bytes) >= 0, moved_bytes, np.nan).astype(np.float64)
    return ExchangeMeasures(
        wait_ns=np.where(is_known, np.maximum(peer - own, 0), np.int64(NO_NUMBER)),
        transfer_ns=transfer,
        busbw=bandwidth.rate(moved, transfer),
        busbw_apparent=bandwidth.rate(moved, duration),
    )


def pair_uncertainty(
    first_hosts: NDArray[np.int32],
    second_hosts: NDArray[np.int32],
    first_sigma_ns: NDArray[np.float64],
    second_sigma_ns: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Uncertainty of a time difference between ranks: both clocks' together, or 2 us where they share the host's."""
    result: NDArray[np.float64] = np.where(
        np.asarray(first_hosts) == np.asarray(second_hosts),
        _SAME_HOST_SKEW_NS,
        np.hypot(first_sigma_ns, second_sigma_ns),
    )
    return result


def _durations(start_ns: Times, end_ns: Times, censored: NDArray[np.bool_]) -> tuple[Durations, NDArray[np.bool_]]:
    seen = (start_ns != NO_TIME_NS) & (end_ns != NO_TIME_NS) & ~censored
    duration = np.where(seen, end_ns, 0) - np.where(seen, start_ns, 0)
    seen &= duration > 0
    return np.where(seen, duration, np.int64(NO_NUMBER)), seen


def _second_smallest(values: Durations) -> Durations:
    if values.shape[1] < 2:
        return np.full(len(values), _FAR)
    return np.partition(values, 1, axis=1)[:, 1]


def _waits_for_data(
    starts: Times, seen: NDArray[np.bool_], roots: NDArray[np.int32], root_sends: NDArray[np.bool_]
) -> Durations:
    launches, ranks = np.arange(len(starts)), np.arange(starts.shape[1])
    has_root = (roots >= 0) & (roots < starts.shape[1])
    safe_roots = np.where(has_root, roots, 0)
    root_seen = (has_root & seen[launches, safe_roots])[:, None]
    is_root = ranks[None, :] == roots[:, None]
    root_start = np.where(root_seen, starts[launches, safe_roots][:, None], 0)
    others = np.where(seen & ~is_root, starts, np.int64(NO_TIME_NS)).max(axis=1)[:, None]
    all_seen = (seen.sum(axis=1) == seen.shape[1])[:, None]
    own = np.where(seen, starts, 0)
    for_root = np.maximum(root_start - own, 0)
    for_senders = np.maximum(np.where(all_seen, others, 0) - own, 0)
    unknown = np.int64(NO_NUMBER)
    receives = np.where(seen & root_seen & ~is_root, for_root, unknown)
    gathers = np.where(seen & is_root & all_seen, for_senders, unknown)
    return np.where(root_sends, receives, gathers)

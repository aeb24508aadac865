"""Links of a pipeline, and groups that share wires: seen apart or together as the fault is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from ncclscope_service.detect.bandwidth import BandwidthDrop
from ncclscope_service.detect.context import Context, Group
from ncclscope_service.store import rows
from ncclscope_service.store.records import Finding, FindingKind
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, OPERATION_CODES

SECOND = 1_000_000_000
SEND, ALL_REDUCE = OPERATION_CODES["Send"], OPERATION_CODES["AllReduce"]
HOSTS = ("a", "b", "c", "d")


def group(name: str, parallelism: str, ranks: tuple[int, ...], hosts: tuple[str, ...]) -> Group:
    return Group(comm_id=name, parallelism=parallelism, global_ranks=ranks, hosts=hosts)


def rows_of(communicator: int, second: float, busbw: float, pair: tuple[int, int] | None = None) -> Columns:
    made = np.zeros(1, rows.COLLECTIVE)
    made["communicator"], made["op"] = communicator, ALL_REDUCE if pair is None else SEND
    made["coll_seq"] = int(second * 10) if pair is None else NO_NUMBER
    made["rank"], made["peer"] = (NO_NUMBER, NO_NUMBER) if pair is None else pair
    made["last_rank"] = NO_NUMBER
    made["message_bytes"], made["busbw"], made["confidence"] = 4 << 20, busbw, 1.0
    made["end_true_ns"] = round(second * SECOND)
    return made


def told(context: Context, played: Iterator[Columns]) -> list[list[Finding]]:
    detector = BandwidthDrop()
    history: list[list[Finding]] = []
    for part in played:
        detector.ingest_collectives(part, context)
        history.append(detector.findings())
    return history


def moved(
    groups: Mapping[int, Group], seconds: Iterable[int], share: Callable[[int, int], float], *, seed: int = 1
) -> Iterator[Columns]:
    """A collective of each group in each second, with this share of 40 GB/s by group and second; none where it is 0."""
    random = np.random.default_rng(seed)
    for second in seconds:
        shares = {index: share(index, second) for index in groups}
        yield np.concatenate(
            [
                rows_of(index, second + 0.1, 40e9 * np.exp(random.normal(0, 0.03)) * part)
                for index, part in shares.items()
                if part
            ]
        )


def test_a_slow_link_of_a_pipeline_is_located_though_its_other_links_are_healthy() -> None:
    pipelines = {0: group("pp0", "PP", (0, 2, 4, 6), HOSTS), 1: group("pp1", "PP", (1, 3, 5, 7), HOSTS)}
    random = np.random.default_rng(1)

    def played() -> Iterator[Columns]:
        for second in range(90):
            yield np.concatenate(
                [
                    rows_of(index, second + 0.1 * link, 40e9 * np.exp(noise) * (0.6 if slow else 1.0), pair)
                    for index in pipelines
                    for link in range(3)
                    for pair in ((link, link + 1), (link + 1, link))  # each end has its own launch
                    for noise in [random.normal(0, 0.03)]
                    for slow in [second >= 60 and link == 0]
                ]
            )

    history = told(Context(job="job", groups=pipelines), played())
    assert not any(history[:60])
    (finding,) = history[-1]
    assert finding.kind is FindingKind.SLOW_LINK
    assert finding.hosts == ("a",), "b has a healthy link to c"
    assert finding.evidence["slow_groups"] == ["pp0", "pp1"]


def test_seconds_between_captures_do_not_count() -> None:
    groups = {index: group(f"dp{index}", "DP", (index, index + 4), HOSTS[index : index + 1] * 2) for index in range(4)}
    captured = [100 * cycle + second for cycle in range(4) for second in range(10)]
    played = moved(groups, captured, lambda index, second: 0.7 if index == 2 and second >= 100 else 1.0)
    history = told(Context(job="job", groups=groups), played)
    assert not any(history[:10])
    (finding,) = history[-1]
    assert (finding.kind, finding.hosts) == (FindingKind.SLOW_LINK, ("c",))


def dropping(slow: Mapping[int, float]) -> tuple[Context, Iterator[Columns]]:
    """Eight groups on hosts a and b, eight on c and d, with correlated noise; some lose a share after a minute."""
    groups = {
        index: group(f"dp{index}", "DP", (index, 100 + index), HOSTS[:2] if index < 8 else HOSTS[2:])
        for index in range(16)
    }
    random, phi = np.random.default_rng(2), 0.6

    def played() -> Iterator[Columns]:
        noise = np.zeros(len(groups))
        for second in range(90):
            noise = phi * noise + np.sqrt(1 - phi**2) * random.normal(0, 0.05, len(groups))
            left = [1 - slow.get(index, 0.0) if second >= 60 else 1.0 for index in groups]
            yield np.concatenate(
                [rows_of(index, second, 40e9 * np.exp(noise[index]) * left[index]) for index in groups]
            )

    return Context(job="job", groups=groups), played()


def test_a_loss_that_no_single_group_shows_is_found_where_all_share_the_wires() -> None:
    context, played = dropping(dict.fromkeys(range(8), 0.2))
    history = told(context, played)
    assert not any(history[:60])
    first = next(second for second, findings in enumerate(history) if findings)
    assert first <= 80
    assert {finding.hosts for finding in history[-1]} == {("a", "b")}


def test_a_group_that_is_slow_alone_is_no_fault_of_the_wires_that_it_shares() -> None:
    context, played = dropping({0: 0.5, 1: 0.5})
    final = told(context, played)[-1]
    assert final
    named = [finding.evidence.get("groups", finding.evidence.get("slow_groups")) for finding in final]
    assert sorted(str(names) for names in named) in (["['dp0', 'dp1']"], ["['dp0']", "['dp1']"])


def short_job(slow_steps: range, steps: int, correlation: float = 0.0, seed: int = 1) -> list[Finding]:
    """What is found at the end of some steps of 50 ms of two groups over the same hosts, one of which moves half."""
    groups = {index: group(f"dp{index}", "DP", (index, index + 2), HOSTS[:2]) for index in range(2)}
    context = Context(job="job", groups=groups, step_ns=50_000_000, is_over=True)
    random, noise = np.random.default_rng(seed), np.zeros(2)
    parts: list[Columns] = []
    for step in range(steps):
        noise = correlation * noise + np.sqrt(1 - correlation**2) * random.normal(0, 0.05, 2)
        for index, level in enumerate(noise.tolist()):
            share = 0.5 if index == 0 and step in slow_steps else 1.0
            parts.append(rows_of(index, 0.05 * step + 0.02, 40e9 * np.exp(level) * share))
    return told(context, (np.concatenate(parts[at : at + 40]) for at in range(0, len(parts), 40)))[-1]


def test_sixty_steps_of_fifty_milliseconds_show_that_a_group_moves_half_of_what_its_sibling_moves() -> None:
    (finding,) = short_job(range(20, 60), 60)
    assert (finding.kind, finding.evidence["groups"]) == (FindingKind.BANDWIDTH_DROP, ["dp0"])
    assert short_job(range(22), 22), "a dozen steps suffice"


def test_short_jobs_whose_groups_jitter_or_are_slow_for_some_steps_are_quiet() -> None:
    assert not any(short_job(range(0), 60, correlation=0.6, seed=seed) for seed in range(20))
    assert not short_job(range(20, 26), 60)
    assert not short_job(range(60, 70), 200)


def test_groups_at_the_end_of_a_step_acquit_no_host_by_what_they_were_before_the_fault() -> None:
    """Steps of 8 s: pipelines send all the step through, data-parallel groups reduce at its end. Host b is slow."""
    pairs = {0: (0, 2), 1: (1, 3), 2: (4, 6), 3: (5, 7), 4: (0, 1), 5: (4, 5), 6: (2, 3), 7: (6, 7)}
    groups = {
        index: group(f"{'pp' if index < 4 else 'dp'}{index}", "PP" if index < 4 else "DP", pair,
                     tuple(HOSTS[rank % 4] for rank in pair))
        for index, pair in pairs.items()
    }  # fmt: skip

    def share(index: int, second: int) -> float:
        is_used, is_slow = index < 4 or second % 8 == 7, second >= 200 and "b" in groups[index].hosts
        return (0.6 if is_slow else 1.0) * is_used

    history = told(Context(job="job", groups=groups, step_ns=8 * SECOND), moved(groups, range(360), share, seed=3))
    assert {(finding.kind, finding.hosts) for found in history for finding in found} == {
        (FindingKind.SLOW_LINK, ("b",))
    }


def test_none_is_slow_against_siblings_beyond_what_their_wires_can_carry() -> None:
    """Clocks that are off between captures let the links of two hosts look half as fast again as they can be."""
    groups = {
        index: replace(group(f"dp{index}", "DP", (index, index + 4), HOSTS[:2] if index < 2 else HOSTS[2:]), limit=50e9)
        for index in range(4)
    }
    for wrong, is_found in ((66e9, False), (49e9, True)):
        history = told(
            Context(job="job", groups=groups),
            (
                np.concatenate([rows_of(index, second, wrong if index < 2 else 35e9) for index in groups])
                for second in range(20)
            ),
        )
        assert bool(history[-1]) is is_found


def test_siblings_that_all_cross_one_pair_of_hosts_acquit_neither() -> None:
    of_pipelines = {
        index: group(f"pp{index}", "PP", (0, 1), (("b", "d"), ("a", "c"))[index // 2]) for index in range(4)
    }
    of_replicas = {index: group(f"dp{index}", "DP", (0, 1), ("a", "b")) for index in range(4, 8)}
    groups = of_pipelines | of_replicas
    played = moved(groups, range(20), lambda index, _: 0.7 if "b" in groups[index].hosts else 1.0)
    history = told(Context(job="job", groups=groups), played)
    assert {host for found in history for one in found for host in one.hosts if len(one.hosts) == 1} <= {"b"}

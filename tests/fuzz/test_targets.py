"""A little of what `make fuzz` does with atheris, with what is always there: mutations of the seeds."""

from __future__ import annotations

import random

import pytest
from fuzz.targets import TARGETS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

_EXAMPLES = {"wire": 60, "nsys": 40, "api": 60, "state": 60, "payloads": 60}


def mutated(seed: bytes, rng: random.Random) -> bytes:
    """Some bytes changed, cut, repeated or swapped."""
    content = bytearray(seed)
    for _ in range(rng.randint(1, 8)):
        at, size = rng.randrange(len(content) + 1), rng.randint(0, 16)
        kind = rng.randrange(4)
        if kind == 0 and at < len(content):
            content[at] = rng.randrange(256)
        elif kind == 1:
            del content[at : at + size]
        elif kind == 2:
            content[at:at] = content[at : at + size] * rng.randint(1, 40)
        else:
            content[at:at] = rng.choice((b"\xff", b"9" * 20, b"-1", b"\0", b"../", b'"', b"\n", b"[" * 50))
    return bytes(content)


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_mutations_of_good_input_are_taken_or_refused_and_never_a_mistake_of_ours(name: str) -> None:
    target = TARGETS[name]
    seeds = target.seeds()
    for seed in seeds:
        target.check(seed)

    @settings(
        max_examples=_EXAMPLES.get(name, 150),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(st.sampled_from(range(len(seeds))), st.randoms(use_true_random=False))
    def try_some(number: int, rng: random.Random) -> None:
        target.check(mutated(seeds[number], rng))

    try_some()

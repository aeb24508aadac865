"""How long a step should take by a run that was recorded: which run says it, and what each lacks that does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ncclscope_models.calibration import Calibration, ObservedStep, calibrations_of, document_of
from ncclscope_models.description import Description, Given, completed
from ncclscope_models.expected_step import expected_step
from ncclscope_models.job import Job, ModelError
from ncclscope_models.transfer_estimate import GroupShape, MeasuredTransfers, TransferTimes

DESCRIBED: dict[str, int | bool | str] = {
    "framework": "megatron", "version": "0.13", "layers": 8, "hidden": 1024, "ffn": 4096, "heads": 16, "kv_heads": 16,
    "sequence": 2048, "positions_learned": 2048, "vocabulary": 51_200, "gated": False, "norm": "LayerNorm",
    "bias": True, "tied": True, "tensor": 2, "pipeline": 1, "data": 4, "micro_batch": 1, "global_batch": 32,
    "precision": "BF16",
}  # fmt: skip


def job(**changed: int) -> Job:
    given = {name: Given(value, "test") for name, value in {**DESCRIBED, **changed}.items()}
    return completed(Description(given)).job


def transfers(
    op: str, ranks: int, nodes: int, kind: str, bytes_per_second: float = 100e9
) -> tuple[GroupShape, list[MeasuredTransfers]]:
    found = [
        MeasuredTransfers(message_bytes=size, low=taken, typical=taken, high=taken, samples=50)
        for size in (1 << 16, 1 << 20, 1 << 24, 1 << 28)
        for taken in [20e-6 + size / bytes_per_second]
    ]
    return GroupShape(op, ranks, nodes, kind), found


INSIDE = transfers("AllReduce", 2, 1, "TP")
BETWEEN = transfers("AllReduce", 4, 2, "DP")


def recorded(*groups: tuple[GroupShape, list[MeasuredTransfers]]) -> Calibration:
    """On two nodes of four GPUs."""
    return Calibration(
        job="before", ranks=8, ranks_per_node=4, times=TransferTimes(dict(groups)), step=None,
        median_step_ns=400_000_000, description=DESCRIBED,
    )  # fmt: skip


def test_the_same_job_is_expected_to_take_as_long_again_and_another_layout_as_is_foretold() -> None:
    run = recorded(INSIDE, BETWEEN)
    again = expected_step(job(), [run])
    assert again.is_same
    assert again.typical == pytest.approx(0.4)
    other = expected_step(job(tensor=4, data=2), [run])
    assert not other.is_same
    assert other.high / other.low > again.high / again.low


@pytest.mark.parametrize(
    ("asked", "run", "says"),
    [
        (job(tensor=4, data=2), recorded(BETWEEN), "before: no group of it lies in a node"),
        (job(tensor=4, data=2), recorded(INSIDE), "before: no group of it crosses nodes"),
        (job(layers=16), recorded(INSIDE, BETWEEN), "before: it is of another model"),
        (job(), replace(recorded(INSIDE), description=None), "before: the run was not described"),
        (job(), replace(recorded(INSIDE), ranks_per_node=None), "before: it does not say how many GPUs a node has"),
        (
            job(),
            replace(recorded(INSIDE), median_step_ns=None),
            "before: the calibration of job before has no step time",
        ),
    ],
)
def test_a_run_that_does_not_say_it_is_named_with_what_it_lacks(asked: Job, run: Calibration, says: str) -> None:
    with pytest.raises(ModelError) as caught:
        expected_step(asked, [run])
    assert str(caught.value).startswith(says)


def test_the_same_job_has_the_parts_of_the_run_and_another_layout_none() -> None:
    step = ObservedStep(
        steps=8,
        mean_ns=400_000_000,
        parts={("computation", None): 300_000_000, ("exposed_transfer", "TP"): 100_000_000},
    )
    run = replace(recorded(INSIDE, BETWEEN), step=step)
    again = expected_step(job(), [run])
    assert [(each.part, each.parallelism, each.seconds) for each in again.parts] == [
        ("computation", None, 0.3),
        ("exposed_transfer", "TP", 0.1),
    ]
    assert sum(each.seconds for each in again.parts) == pytest.approx(again.typical)
    assert expected_step(job(tensor=4, data=2), [run]).parts == ()


def test_the_same_job_needs_no_links_that_its_run_did_not_show() -> None:
    assert expected_step(job(), [recorded(BETWEEN)]).typical == pytest.approx(0.4)


def test_of_several_runs_the_first_that_says_it_answers_and_else_all_are_named() -> None:
    silent = replace(recorded(BETWEEN), job="first", description=None)
    assert expected_step(job(), [silent, recorded(INSIDE)]).run == "before"
    with pytest.raises(ModelError, match=r"first: .*; before: no group of it"):
        expected_step(job(tensor=4, data=2), [silent, recorded(INSIDE)])


@pytest.mark.parametrize(("gpu", "known"), [("H200", "H200"), ("of a later build", None), (None, None)])
def test_a_document_keeps_the_gpu_and_the_step_is_of_it(gpu: str | None, known: str | None) -> None:
    (read,) = calibrations_of(document_of([replace(recorded(INSIDE, BETWEEN), gpu=gpu)]), "calibration.json")
    assert read.gpu == known
    assert expected_step(job(), [read]).gpu == known


def test_a_run_whose_nodes_have_one_network_card_foretells_layouts_whose_gpus_share_it() -> None:
    """One GPU of a node sent out of it: what all four reach depends on how many cards there are."""
    pipeline = {**DESCRIBED, "tensor": 1, "pipeline": 8, "data": 1}
    run = replace(recorded(INSIDE, transfers("AllReduce", 2, 2, "EMBEDDING", 5e9)), description=pipeline)
    documents = [document_of([replace(run, network_cards=cards)]) for cards in (None, 1, 9)]
    none, one, many = (calibrations_of(each, "calibration.json")[0] for each in documents)
    assert (none.network_cards, one.network_cards, many.network_cards) == (None, 1, 9)
    steps = [expected_step(job(tensor=1, data=8), [each]).typical for each in (none, one, many)]
    assert steps[1] > 1.1 * steps[0]
    assert steps[2] == steps[0], "a GPU sends by one card"

"""Launchers say how many processes a node gets, each in its own words."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ncclscope.run import arrivals, local_tasks, note_arrival, step_name


@pytest.mark.parametrize(
    ("environment", "tasks"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, 8),
        ({"LOCAL_WORLD_SIZE": "4"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "2"}, 2),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "3"}, 1),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "4"}, None),
        ({"SLURM_STEP_TASKS_PER_NODE": "8"}, None),
        ({"SLURM_STEP_TASKS_PER_NODE": "many", "SLURM_NODEID": "0"}, None),
        ({"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_TASKS_PER_NODE": "8", "SLURM_NODEID": "0"}, 4),
        ({"LOCAL_WORLD_SIZE": "x", "SLURM_TASKS_PER_NODE": "8", "SLURM_NODEID": "0"}, 8),
    ],
)
def test_the_number_of_processes_of_a_node_is_read_as_its_launcher_writes_it(
    environment: dict[str, str], tasks: int | None
) -> None:
    assert local_tasks(environment) == tasks


def test_each_process_of_a_step_is_counted_and_those_of_other_steps_are_not(tmp_path: Path) -> None:
    first, second = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1"}
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
    each = [os.open(tmp_path / "list", flags) for _ in range(3)]
    try:
        assert arrivals(each[0], first) == 0
        for descriptor in each:
            note_arrival(descriptor, first)
        note_arrival(each[0], second)
        assert (arrivals(each[2], first), arrivals(each[2], second)) == (3, 1)
    finally:
        for descriptor in each:
            os.close(descriptor)


def test_a_step_has_a_name_of_one_line_whatever_its_launcher_says() -> None:
    assert step_name({}) == "step"
    assert "\n" not in step_name({"PMIX_NAMESPACE": "a\nb"})
    assert len(step_name({"PBS_JOBID": "x" * 999})) == 200

"""Kernel names by version, against NCCL's naming rules and real exports."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from ncclscope_simulator.data_types import BFLOAT16, FLOAT16, FLOAT32, INT64
from ncclscope_simulator.kernel_names import demangled_name, kernel_name
from ncclscope_simulator.version import traits


@pytest.mark.parametrize(
    ("version", "op", "expected"),
    [
        ("2.8", "AllReduce", "ncclKernel_AllReduce_RING_LL_Sum_float"),
        ("2.18", "AllReduce", "ncclKernel_AllReduce_RING_LL_Sum_float"),
        ("2.18", "AllGather", "ncclKernel_AllGather_RING_LL_Sum_int8_t"),
        ("2.18", "Send", "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t"),
        ("2.13", "AllReduce", "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t"),
        ("2.19", "AllReduce", "ncclDevKernel_AllReduce_Sum_f32_RING_LL"),
        ("2.30", "ReduceScatter", "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL"),
        ("2.30", "AllGather", "ncclDevKernel_AllGather_RING_LL"),
        ("2.30", "Broadcast", "ncclDevKernel_Broadcast_RING_LL"),
        ("2.30", "AlltoAll", "ncclDevKernel_SendRecv"),
    ],
)
def test_the_kernel_is_named_as_its_version_names_it(version: str, op: str, expected: str) -> None:
    assert kernel_name(traits(version), op, FLOAT32, "RING", "SIMPLE") == expected


def test_2_13_shows_ll_under_its_own_name() -> None:
    assert kernel_name(traits("2.13"), "AllReduce", FLOAT16, "TREE", "LL") == "ncclKernel_AllReduce_TREE_LL_Sum_half"


def test_types_and_trees_show_in_the_name() -> None:
    newer = traits("2.21")
    assert kernel_name(newer, "AllReduce", BFLOAT16, "TREE", "LL") == "ncclDevKernel_AllReduce_Sum_bf16_TREE_LL"
    assert kernel_name(newer, "AllReduce", INT64, "RING", "LL") == "ncclDevKernel_AllReduce_Sum_u64_RING_LL"
    assert kernel_name(traits("2.18"), "AllReduce", BFLOAT16, "RING", "LL").endswith("_Sum___nv_bfloat16")


@pytest.mark.corpus
def test_names_of_a_real_export_are_made_alike(corpus: Path) -> None:
    path = corpus / "nsys" / "zy-uestc-yccl" / "ring4.nsys2022.sqlite"
    with closing(sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)) as database:
        rows = database.execute(
            "SELECT DISTINCT s.value, d.value FROM CUPTI_ACTIVITY_KIND_KERNEL k JOIN StringIds s ON s.id = k.shortName"
            " JOIN StringIds d ON d.id = k.demangledName WHERE s.value LIKE 'ncclDevKernel%'"
        ).fetchall()
    name = kernel_name(traits("2.23"), "AllGather", FLOAT32, "RING", "SIMPLE")
    assert rows == [(name, demangled_name(traits("2.23"), name))]

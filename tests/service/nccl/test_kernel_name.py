from __future__ import annotations

import pytest

from ncclscope_service.nccl.launch_rules import (
    Family,
    KernelClass,
    merged_data_type,
    operation_class,
    parse_kernel_name,
)
from ncclscope_wire.terms import NO_NUMBER, OPERATION_CODES


@pytest.mark.parametrize(
    ("name", "kernel_class", "data_type"),
    [
        ("ncclAllReduceRingLLKernel_sum_f32", KernelClass.ALL_REDUCE, 7),
        ("ncclSendRecvKernel_copy_i8", KernelClass.SEND_RECV, NO_NUMBER),
        ("ncclKernel_AllReduce_RING_LL_Sum_float", KernelClass.ALL_REDUCE, 7),
        ("ncclKernel_AllReduce_COLLNET_DIRECT_LL_Sum_half", KernelClass.ALL_REDUCE, 6),
        ("ncclKernel_AllReduce_NVLS_TREE_LL_Sum___nv_bfloat16", KernelClass.ALL_REDUCE, 9),
        ("ncclKernel_AllReduce_RING_LL_Sum_int64_t", KernelClass.ALL_REDUCE, 5),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t", KernelClass.ALL_GATHER, NO_NUMBER),
        ("ncclKernel_Broadcast_RING_LL_Sum_int8_t", KernelClass.BROADCAST, NO_NUMBER),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t", KernelClass.SEND_RECV, NO_NUMBER),
        ("ncclDevKernel_SendRecv", KernelClass.SEND_RECV, NO_NUMBER),
        ("ncclDevKernel_SendRecv(ncclDevComm *, unsigned long, ncclWork *)", KernelClass.SEND_RECV, NO_NUMBER),
        ("ncclDevKernel_AllGather_RING_LL", KernelClass.ALL_GATHER, NO_NUMBER),
        ("ncclDevKernel_AllGatherV_RING_LL", KernelClass.ALL_GATHER_V, NO_NUMBER),
        ("ncclDevKernel_AllReduce_Sum_u32_TREE_LL", KernelClass.ALL_REDUCE, 3),
        (
            "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<(unsigned long)4096>)",
            KernelClass.ALL_REDUCE,
            9,
        ),
        ("ncclDevKernel_ReduceScatter_Sum_f8e4m3_RING_LL", KernelClass.REDUCE_SCATTER, 10),
        ("ncclDevKernel_Reduce_Sum_f64_RING_LL", KernelClass.REDUCE, 8),
        ("ncclDevKernel_Generic_4", KernelClass.GENERIC, NO_NUMBER),
        ("ncclSymDevKernel_AllGather_LLMC", KernelClass.ALL_GATHER, NO_NUMBER),
        ("ncclSymkDevKernel_AllReduce_RSxLDMC_AGxSTMC_sum_bf16", KernelClass.ALL_REDUCE, 9),
        ("void (anonymous namespace)::oneRankReduce<FuncPreMulSum<float>>(x)", KernelClass.ONE_RANK_REDUCE, NO_NUMBER),
        ("volta_sgemm_128x64_nn", KernelClass.UNKNOWN, NO_NUMBER),
    ],
)
def test_a_name_tells_its_class_and_where_it_can_its_type(name: str, kernel_class: KernelClass, data_type: int) -> None:
    parsed = parse_kernel_name(name)
    assert (parsed.kernel_class, parsed.data_type) == (kernel_class, data_type)


def test_symmetric_names_are_told_apart_because_they_can_be_believed() -> None:
    assert parse_kernel_name("ncclSymkDevKernel_ReduceScatter_LD_sum_f32").family is Family.SYMMETRIC
    assert parse_kernel_name("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL").family is Family.DEV_KERNEL


def test_signed_types_share_the_unsigned_kernel() -> None:
    assert [merged_data_type(number) for number in (0, 1, 2, 3, 4, 5, 6, 9)] == [1, 1, 3, 3, 5, 5, 6, 9]


def test_point_to_point_and_what_is_lowered_to_it_show_send_recv() -> None:
    for name in ("Send", "Recv", "AlltoAll", "Gather", "Scatter"):
        assert operation_class(OPERATION_CODES[name]) is KernelClass.SEND_RECV
    assert operation_class(OPERATION_CODES["PutSignal"]) is KernelClass.UNKNOWN
    assert operation_class(OPERATION_CODES["Reduce"]) is KernelClass.REDUCE

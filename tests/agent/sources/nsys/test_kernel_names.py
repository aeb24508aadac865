from __future__ import annotations

import pytest

from ncclscope_agent.sources.nsys.kernel_names import KernelKind, base_name, kernel_kind


@pytest.mark.parametrize(
    "name",
    [
        "ncclAllReduceRingLLKernel_sum_f32",
        "ncclAllReduceTreeLL128Kernel_sum_f16",
        "ncclBroadcastRingLLKernel_copy_i8",
        "ncclKernel_AllReduce_COLLNET_DIRECT_LL_Sum___nv_bfloat16",
        "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t",
        "ncclDevKernel_SendRecv",
        "ncclDevKernel_AllGather_RING_LL",
        "ncclDevKernel_ReduceScatter_Sum_f8e4m3_RING_LL",
        "ncclDevKernel_AllGatherV_RING_LL",
        "ncclDevKernel_Generic",
        "ncclDevKernel_Generic_4",
        "ncclDevKernelDebug_Generic",
        "ncclSymDevKernel_AllReduce_AGxLL_R_sum_f32",
        "ncclSymkDevKernel_AllGather_STMC",
        "oneRankReduce",
        "void (anonymous namespace)::oneRankReduce<FuncPreMulSum<float>>(void *, void *, unsigned long)",
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<(unsigned long)4096>)",
    ],
)
def test_kernels_of_every_nccl_are_told_by_their_names(name: str) -> None:
    assert kernel_kind(name) is KernelKind.NCCL


@pytest.mark.parametrize("name", ["mscclKernel_Sum_float_Simple", "nvshmemi_transfer", "ncclSomethingOfTheFuture"])
def test_kernels_that_communicate_without_nccl_are_neither_nccl_nor_computation(name: str) -> None:
    assert kernel_kind(name) is KernelKind.OTHER_COMMUNICATION


@pytest.mark.parametrize(
    "name", ["gemm", "vectorized_elementwise_kernel", "my_ncclDevKernel_AllReduce_test", "oneRankReducer", ""]
)
def test_every_other_kernel_is_computation(name: str) -> None:
    assert kernel_kind(name) is KernelKind.COMPUTATION


def test_the_base_name_is_what_nsys_calls_the_short_name() -> None:
    assert base_name("void at::native::reduce_kernel<512, 1>(at::Op<float>)") == "reduce_kernel"
    assert base_name("ncclDevKernel_SendRecv") == "ncclDevKernel_SendRecv"

from __future__ import annotations

import pytest

from ncclscope_agent.sources.nsys.kernel_names import KernelKind, base_name, kernel_kind, kernel_label


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


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*, int*)", "DeepEP/dispatch"),
        ("void deep_ep::internode_ll::combine<true, 7168, 9, 3>(void*, void*, int*)", "DeepEP/combine"),
        ("void deep_ep::internode::notify_dispatch<false, 2>(int const*)", "DeepEP/notify_dispatch"),
        ("void hybrid_ep::dispatch_kernel<4, 2>(hybrid_ep::param)", "DeepEP/dispatch_kernel"),
        ("nccl_ep_jit_ll_combine_kernel", "NCCL-EP/nccl_ep_jit_ll_combine_kernel"),
        ("void nccl_ep::hybridep::dispatch_kernel<1>(nccl_ep::param)", "NCCL-EP/dispatch_kernel"),
        ("void nvshmemi_reduce_kernel<int, (rdxn_ops)0>(int, int)", "NVSHMEM/nvshmemi_reduce_kernel"),
        ("nvshmemi_proxy_quiet_entrypoint", "NVSHMEM/nvshmemi_proxy_quiet_entrypoint"),
        ("void mscclpp::executionKernel<float, mscclpp::LL16Packet>(int, float*)", "MSCCL++/executionKernel"),
        ("mscclKernel_Sum_float_Simple", "MSCCL++/mscclKernel_Sum_float_Simple"),
        (
            "void vllm::cross_device_reduce_2stage<__nv_bfloat16, 8>(vllm::RankData*)",
            "custom all-reduce/cross_device_reduce_2stage",
        ),
        ("void sglang::cross_device_reduce_1stage<half, 4>(void)", "custom all-reduce/cross_device_reduce_1stage"),
        ("cross_device_reduce_1stage", "custom all-reduce/cross_device_reduce_1stage"),
        (
            "void tensorrt_llm::kernels::oneShotAllReduceKernel<half, 8, false>(void)",
            "TensorRT-LLM/oneShotAllReduceKernel",
        ),
        (
            "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<(int)1, half>(int)",
            "TensorRT-LLM/allreduce_fusion_kernel_oneshot_lamport",
        ),
        (
            "void at::native::(anonymous namespace)::multimem_all_reduce_kernel<float, 16>(float*, unsigned long)",
            "symmetric memory/multimem_all_reduce_kernel",
        ),
        ("ncclSomethingOfTheFuture", "other NCCL/ncclSomethingOfTheFuture"),
    ],
)
def test_kernels_that_communicate_without_nccl_are_named_with_their_library(name: str, label: str) -> None:
    assert kernel_kind(name) is KernelKind.OUTSIDE
    assert kernel_label(name) == label


@pytest.mark.parametrize(
    "name",
    [
        *("gemm", "vectorized_elementwise_kernel", "my_ncclDevKernel_AllReduce_test", "oneRankReducer", ""),
        *("dispatch", "void moe::dispatch<8>(int)", "void deep_ep::layout::get_dispatch_layout<256>(long const*)"),
        *("nccl_ep_jit_ht_scan_kernel", "void vllm::reshape_and_cache_kernel<half>(half const*)"),
    ],
)
def test_every_other_kernel_is_computation(name: str) -> None:
    assert kernel_kind(name) is KernelKind.COMPUTATION


def test_the_base_name_is_what_nsys_calls_the_short_name() -> None:
    assert base_name("void at::native::reduce_kernel<512, 1>(at::Op<float>)") == "reduce_kernel"
    assert base_name("ncclDevKernel_SendRecv") == "ncclDevKernel_SendRecv"

"""Floating point operations of a step, and what share of the hardware's peak they are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from ncclscope_models.job import Recompute, Shape

PEAK_FLOPS: Final[Mapping[str, float]] = MappingProxyType(
    {
        "V100": 125e12,  # NVIDIA V100 data sheet, Tensor Core FP16
        "A40": 149.7e12,  # NVIDIA A40 data sheet
        "A100": 312e12,  # NVIDIA A100 data sheet, BF16 dense
        "H100 SXM": 989e12,  # NVIDIA H100 data sheet, BF16 dense (1,979 with sparsity)
        "H100 PCIe": 756e12,  # NVIDIA H100 data sheet, BF16 dense (1,513 with sparsity)
        "H200": 989e12,  # NVIDIA H200 data sheet, BF16 dense
        "GH200": 989e12,  # NVIDIA GH200 data sheet, BF16 dense
        "B200": 2.25e15,  # NVIDIA DGX B200 data sheet: 72 PFLOPS of FP8 with sparsity for 8, BF16 dense a quarter
        "L40S": 362e12,  # NVIDIA L40S data sheet, BF16 dense (733 with sparsity)
        "MI300X": 1307.4e12,  # AMD Instinct MI300X data sheet, BF16 dense
    }
)
"""Dense 16-bit operations per second of one GPU, by name; a GPU that is not here has no known peak."""

MEMORY_BANDWIDTH: Final[Mapping[str, float]] = MappingProxyType(
    {
        "V100": 0.9e12,
        "A40": 0.696e12,
        "A100": 2.039e12,  # of 80 GB; 1.555e12 of 40 GB
        "H100 SXM": 3.35e12,
        "H100 PCIe": 2.0e12,
        "H200": 4.8e12,
        "GH200": 4.0e12,  # of HBM3; 4.9e12 of HBM3e
        "B200": 8.0e12,
        "L40S": 0.864e12,
        "MI300X": 5.3e12,
    }
)
"""Bytes per second of a GPU's memory, by its maker's data sheets."""

_NAMED: Final[Mapping[str, str]] = MappingProxyType(
    {
        r"(NVIDIA |Tesla )V100-SXM": "V100",
        r"NVIDIA A100-(SXM|PCI)": "A100",
        r"NVIDIA A40$": "A40",
        r"NVIDIA H100 80GB HBM3$": "H100 SXM",
        r"NVIDIA H100 PCIe$": "H100 PCIe",
        r"NVIDIA H200$": "H200",
        r"NVIDIA GH200 ": "GH200",
        r"NVIDIA B200$": "B200",
        r"NVIDIA L40S$": "L40S",
        r"AMD Instinct MI300X$": "MI300X",
    }
)


def gpu_named(text: str) -> str | None:
    """The GPU of PEAK_FLOPS that CUDA or HIP names so, such as "NVIDIA A100-SXM4-80GB"; None of any other."""
    found = [gpu for pattern, gpu in _NAMED.items() if re.match(pattern, text)]
    return found[0] if found else None


def step_flops(shape: Shape, samples: int, *, is_attention_causal: bool = True) -> int:
    """Operations of forward and backward pass over so many samples, nothing computed twice.

    B s (12 l h f g + 12 l h^2 (1 + kv/h + s/(2h)) + 6 h V), g = 1.5 with a gated MLP: attention is causal, the head is
    counted, the embedding is not. An expert layer counts the experts that a token uses. Papers up to 2022 count the
    whole square of attention (s/h for s/(2h)): `is_attention_causal` False.
    Source: Megatron-LM core_r0.13.0 `megatron/training/training.py:num_floating_point_operations`.
    """
    h, s, q, kv = shape.hidden, shape.sequence, shape.query_size, shape.kv_size
    attention = 12 * h * (q + kv) + (6 if is_attention_causal else 12) * s * q
    matrices = 3 if shape.is_gated else 2  # of the MLP
    dense = 6 * matrices * h * shape.ffn
    mixed = 0 if shape.experts is None else 6 * matrices * h * shape.experts.expert_ffn * shape.experts.top_k
    mlps = dense * (shape.layers - shape.expert_layers) + mixed * shape.expert_layers
    return samples * s * (shape.layers * attention + mlps + 6 * h * shape.vocabulary)


def repeated_flops(shape: Shape, samples: int, recompute: Recompute) -> int:
    """Operations of a step that are done a second time: attention's core alone, or the layers' whole forward pass."""
    if recompute is Recompute.NONE:
        return 0
    if recompute is Recompute.SELECTIVE:
        return samples * shape.sequence * shape.layers * 2 * shape.sequence * shape.query_size
    head = 6 * samples * shape.sequence * shape.hidden * shape.vocabulary
    return (step_flops(shape, samples) - head) // 3


def approximate_flops(parameters: int, tokens: int, *, is_recomputed: bool) -> int:
    """6 P T, or 8 P T where every layer's forward pass is computed twice; attention's square is left out.

    Source: Narayanan et al. 2021 for 8, Kaplan et al. 2020 for 6.
    """
    return (8 if is_recomputed else 6) * parameters * tokens


def throughput_per_gpu(flops: float, seconds: float, gpus: int) -> float:
    """Operations per second and GPU."""
    return flops / seconds / gpus


def utilization(flops: float, seconds: float, gpus: int, peak_flops: float) -> float:
    """Share of the peak, 0 to 1: MFU with the operations of the model, HFU with those computed twice too."""
    return flops / seconds / gpus / peak_flops

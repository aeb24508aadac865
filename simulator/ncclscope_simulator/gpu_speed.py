"""How long a GPU computes: matrices in waves of tiles, everything else as its memory reads and writes it.

Written apart from the models that it checks, which know a share of the peak by the size of a pass and nothing of tiles.

Simplified: one tile for all matrices (CUTLASS's 128 x 256 x 32), fused attention, one kernel after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import ceil, inf

_ROWS, _COLUMNS, _DEEP = 128, 256, 32
_EDGE_STEPS = 10
"""Steps of the inner loop that a tile's prologue and epilogue take as long as."""
_KERNEL_NS = 4_000
"""The shortest kernel, with the gap before it."""
_ATTENTION_SHARE = 0.6
"""Of the peak that a fused attention reaches; backward it computes 2.5 times as much."""
_HALF = 2
_WHOLE = 4
_OPTIMIZER_BYTES = 34
"""Of a parameter: the gradient twice (norm, Adam), three states read and written, the weight written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSpeed:
    """Speeds of a GPU."""

    tflops: float
    """Dense, in 16 bits."""
    memory: float
    """GB/s."""
    processors: int = 108

    def __post_init__(self) -> None:
        if not (0 < self.tflops < inf and 0 < self.memory < inf and self.processors >= 1):
            raise ValueError(f"a GPU's tflops, memory and processors must be above 0, not {self}")

    def matrix_ns(self, rows: int, columns: int, deep: int) -> float:
        """rows x deep times deep x columns, in 16 bits."""
        waves = ceil(ceil(rows / _ROWS) * ceil(columns / _COLUMNS) / self.processors)
        step = 2 * _ROWS * _COLUMNS * _DEEP * self.processors / (self.tflops * 1e3)
        moved = _HALF * (rows * deep + deep * columns + rows * columns)
        return max(waves * (ceil(deep / _DEEP) + _EDGE_STEPS) * step, moved / self.memory, _KERNEL_NS)

    def linear_ns(self, rows: int, columns: int, deep: int) -> Pass:
        """A linear layer: forward, and its gradients of input and weight."""
        back = self.matrix_ns(rows, deep, columns) + self.matrix_ns(deep, columns, rows)
        return Pass(self.matrix_ns(rows, columns, deep), back)

    def memory_ns(self, accessed_bytes: float) -> float:
        """A kernel that does little but read and write."""
        return max(accessed_bytes / self.memory, _KERNEL_NS)


@dataclass(frozen=True, slots=True)
class Pass:
    """Nanoseconds of a part of a layer, forward and backward."""

    forward: float
    backward: float

    def __add__(self, other: Pass) -> Pass:
        return Pass(self.forward + other.forward, self.backward + other.backward)


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Of one microbatch on one rank, in nanoseconds."""

    attention: Pass
    mlp: Pass
    experts: Pass
    head: Pass
    optimizer: float
    """Of a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Sizes of what a rank computes: widths are its own part."""

    tokens: int
    sequence: int
    hidden: int
    query: int
    kv: int
    ffn: int
    expert_ffn: int
    top_k: int
    fold: int
    """Matrices that go into the MLP: 2 if it is gated."""
    vocabulary: int
    outside: int
    """Tokens outside of the tensor parallel part: fewer with sequence parallelism."""
    held: float
    """Parameters that its optimizer updates."""


def pass_times(gpu: GpuSpeed, sizes: Sizes) -> PassTimes:
    """As long as a rank's kernels take, one after the other."""
    tokens, hidden = sizes.tokens, sizes.hidden
    # A norm reads and writes; dropout and the residual read two and write one, backward the other way around.
    edge = gpu.memory_ns(2 * _HALF * sizes.outside * hidden) + gpu.memory_ns(3 * _HALF * sizes.outside * hidden)
    around = Pass(edge, 1.5 * edge)
    core = max(2 * tokens * sizes.sequence * sizes.query / (_ATTENTION_SHARE * gpu.tflops * 1e3), _KERNEL_NS)
    attention = gpu.linear_ns(tokens, sizes.query + 2 * sizes.kv, hidden) + gpu.linear_ns(tokens, hidden, sizes.query)
    logits = gpu.memory_ns(_WHOLE * tokens * sizes.vocabulary)
    return PassTimes(
        attention=attention + Pass(core, 2.5 * core) + around,
        mlp=_mlp(gpu, sizes, tokens, sizes.ffn) + around,
        experts=_mlp(gpu, sizes, tokens * sizes.top_k, sizes.expert_ffn),
        head=gpu.linear_ns(tokens, sizes.vocabulary, hidden) + Pass(3 * logits, 2 * logits),
        optimizer=gpu.memory_ns(_OPTIMIZER_BYTES * sizes.held),
    )


def _mlp(gpu: GpuSpeed, sizes: Sizes, tokens: int, ffn: int) -> Pass:
    activation = gpu.memory_ns(_HALF * tokens * ffn * (sizes.fold + 1))
    inward, outward = (gpu.linear_ns(tokens, *each) for each in ((sizes.fold * ffn, sizes.hidden), (sizes.hidden, ffn)))
    return inward + outward + Pass(activation, 1.5 * activation)


def parse_gpu_speed(text: str) -> GpuSpeed:
    """`tflops=N,memory=N[,processors=N]`, each once. Raises ValueError for what is none."""
    kinds = {field.name: float if field.type == "float" else int for field in fields(GpuSpeed)}
    given = [part.partition("=")[::2] for part in text.split(",")]
    try:
        return GpuSpeed(**{name: kinds[name](value) for name, value in given})  # type: ignore[arg-type]  # of its field's type
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"gpu_speed {text!r} is not tflops=N,memory=N[,processors=N], each above 0") from error

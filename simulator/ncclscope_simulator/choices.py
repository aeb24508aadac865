"""The values that some settings can have."""

from __future__ import annotations

from typing import Final

GRAPH_TRACES: Final = ("graph", "node")
"""How nsys can trace CUDA graphs."""

NSYS_VERSIONS: Final = ("2022.4", "2023.4", "2024.5", "2025.3", "2026.2")
"""The nsys versions whose export schema can be written."""

INSPECTOR_FORMATS: Final = ("v4.0", "v4.2", "v4.3")
"""The formats in which the Inspector plug-in's dumps can be written."""

ORDERS: Final = ("tp-dp-pp", "tp-pp-dp")
"""How ranks are laid out, fastest first: Megatron-LM's default, and its `--use-tp-pp-dp-mapping`."""

EXPERT_DISPATCHERS: Final = ("alltoall", "allgather")
"""How tokens reach their experts. Source: Megatron-LM `--moe-token-dispatcher-type`."""

CONTEXT_EXCHANGES: Final = ("ring", "allgather")
"""How attention gets the keys and values of other ranks. Source: Megatron-LM `--cp-comm-type` p2p and all_gather."""


def captured_share(text: str) -> float | None:
    """The share of the time that `full`, `none` or `duty:F` captures; None where the text is none of these."""
    if text in {"full", "none"}:
        return 1.0 if text == "full" else 0.0
    try:
        share = float(text.removeprefix("duty:")) if text.startswith("duty:") else None
    except ValueError:
        return None
    return share if share is not None and 0.0 < share <= 1.0 else None

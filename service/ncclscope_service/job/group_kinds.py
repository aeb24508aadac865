"""The kind of parallelism that the name of a process group says.

*Source:* Megatron-LM `core/parallel_state.py` (`group_desc` of each group); PyTorch `distributed/distributed_c10d.py`
(`default_pg`), `distributed/device_mesh.py` (`mesh_<dimension>`); torchtitan `distributed/parallel_dims.py` (names of
dimensions).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_NAMES: Final = {
    "TP": ("TENSOR_MODEL_PARALLEL_GROUP", "EXPERT_TENSOR_PARALLEL_GROUP", "mesh_tp", "mesh_etp"),
    "PP": ("PIPELINE_MODEL_PARALLEL_GROUP", "mesh_pp"),
    "DP": (
        "DATA_PARALLEL_GROUP",
        "DATA_PARALLEL_GROUP_WITH_CP",
        "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP",
        "INTER_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP",
        "EXPERT_DATA_PARALLEL_GROUP",
        "INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP",
        "INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP",
        "mesh_dp",
        "mesh_dp_replicate",
        "mesh_dp_shard",
        "mesh_dp_shard_cp",
        "mesh_dp_shard_mod_ep",
        "mesh_dp_cp",
        "mesh_fsdp",
        "mesh_efsdp",
    ),
    "EP": ("EXPERT_MODEL_PARALLEL_GROUP", "mesh_ep"),
    "CP": ("CONTEXT_PARALLEL_GROUP", "mesh_cp"),
    "EMBEDDING": ("EMBEDDING_GROUP", "POSITION_EMBEDDING_GROUP"),
    "WORLD": ("default_pg", "mesh_default"),
}
KIND_OF_NAME: Final[Mapping[str | None, str]] = MappingProxyType(
    {name: kind for kind, names in _NAMES.items() for name in names}
)
"""Names that are not here (MODEL_PARALLEL_GROUP, mesh_loss) are of groups that serve several dimensions, or none."""

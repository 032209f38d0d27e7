"""The names that writers of `.metadata` use. A pickle that names anything else is refused, and none is imported.

Source: torch 2.13.0 `distributed/checkpoint/{metadata,filesystem,planner}.py` and `torch/serialization.py`
(`_get_layout`); torch 2.2 `distributed/checkpoint/metadata.py` takes `TensorProperties` from
`distributed/_shard/sharded_tensor/metadata.py`; megatron-core 0.16.1 `dist_checkpointing/strategies/torch.py` stores
the plans of all ranks as `all_local_plans`, older ones as its own `MCoreSavePlan`.
"""

from __future__ import annotations

from reshard.errors import SourceError, printable
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.tensors.dtypes import BY_NAME

_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"

METADATA = f"{_METADATA}.Metadata"
TENSOR = f"{_METADATA}.TensorStorageMetadata"
BYTES = f"{_METADATA}.BytesStorageMetadata"
CHUNK = f"{_METADATA}.ChunkStorageMetadata"
INDEX = f"{_METADATA}.MetadataIndex"
STORAGE_META = f"{_METADATA}.StorageMeta"
PLACE = "torch.distributed.checkpoint.filesystem._StorageInfo"
LAYOUT = "torch.serialization._get_layout"
SIZE = "torch.Size"
ITEM = f"{_PLANNER}.WriteItem"
ITEM_DATA = f"{_PLANNER}.TensorWriteData"
PROPERTY = f"{_METADATA}.TensorProperties"
PROPERTIES = frozenset({PROPERTY, f"{_SHARDED}.TensorProperties"})
MEMORY_FORMATS = frozenset({f"{_METADATA}._MEM_FORMAT_ENCODING", f"{_SHARDED}.MEM_FORMAT_ENCODING"})
MEMORY_FORMAT_MEMBERS = frozenset(
    f"{enum}.{member}"
    for enum in MEMORY_FORMATS
    for member in ("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT")
)
"""Members as names: Python 3.11.0 to 3.11.3 pickles an enum's member as `getattr` of its class."""
_PLANS = frozenset(
    {f"{_PLANNER}.{name}" for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")}
    | {f"{_PLANNER}.WriteItemType.{member}" for member in ("TENSOR", "SHARD", "BYTE_IO")}
    | {
        "torch.distributed.checkpoint.filesystem._StoragePrefix",
        "megatron.core.dist_checkpointing.strategies.torch.MCoreSavePlan",
    }
)
OTHER_DTYPES = frozenset(
    {"complex32", "float4_e2m1fn_x2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"}
    | {"qint8", "qint32", "quint8", "quint2x4", "quint4x2", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"}
    | {f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}
)
"""Element types of torch 2.13 that no format of ours has."""

_KNOWN = (
    frozenset({METADATA, TENSOR, BYTES, CHUNK, INDEX, STORAGE_META, PLACE, LAYOUT, SIZE})
    | PROPERTIES
    | MEMORY_FORMATS
    | MEMORY_FORMAT_MEMBERS
    | _PLANS
    | {f"torch.{name}" for name in OTHER_DTYPES | BY_NAME.keys()}
)


def refuse_foreign_names(ledger: OpaqueLedger, name: str) -> None:
    """Refuse a `.metadata` that names what no known writer names.

    Raises:
        SourceError: `pickle.forbidden_global`.
    """
    for foreign in ledger.foreign:
        if foreign not in _KNOWN:
            raise SourceError(
                "pickle.forbidden_global",
                f"{name} names {foreign}, which no writer of distributed checkpoints names; nothing of it was executed",
                fix="do not load this checkpoint with torch either; if a writer that you trust made it, please report "
                "its name and version",
                details={"global": printable(foreign)},
            )

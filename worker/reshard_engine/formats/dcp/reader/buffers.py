"""Names of buffers: a distributed checkpoint does not tell them from frozen parameters.

Source: names that torch 2.13.0 `nn/modules/batchnorm.py` and transformers 5.23.0 register; torch's parameters hold
floating-point or complex numbers only (`autograd` gives no gradient to others).
"""

from __future__ import annotations

from collections.abc import Sequence

from reshard_engine.formats.dcp.reader.saved_state import SavedTensor
from reshard_engine.tensors.dtypes import Dtype

_BUFFERS = frozenset(
    {
        "running_mean", "running_var", "num_batches_tracked", "inv_freq", "original_inv_freq", "freqs_cis",
        "cos_cached", "sin_cached", "position_ids", "masked_bias", "e_score_correction_bias", "expert_bias",
        "tokens_per_expert", "initialized",
    }
)  # fmt: skip


def is_buffer(name: str, dtype: Dtype) -> bool:
    """True for a tensor that no optimizer can train, and for one with a name that only buffers have."""
    trainable = dtype.floating or dtype.name.startswith("complex")
    return not trainable or name.rpartition(".")[2] in _BUFFERS


def chunk_count(saved: Sequence[SavedTensor]) -> int:
    """The number of different chunks of a tensor: without collectives, several ranks may have one and the same."""
    if len(saved) == 1:
        return saved[0].entry.count
    return len({box.tobytes() for s in saved for box in s.entry.boxes})


def looks_plain(saved: Sequence[SavedTensor], most_chunks: int, *, marked: bool) -> bool:
    """True for a tensor that FSDP does not manage, which are buffers, but for parameters that it was told to ignore.

    FSDP shards every parameter along its first dimension, and refuses those without dimensions. Buffers stay whole. Our
    own writer marks parameters, and keeps buffers whole, too.

    Args:
        saved: The tensor's entries; without collectives each rank has one.
        most_chunks: The largest number of chunks of a tensor of the model.
        marked: True if some tensors of the model are marked as parameters.
    """
    entry = saved[0].entry
    whole = all(s.entry.count == 1 and bool((s.entry.boxes[0, 1] == entry.shape).all()) for s in saved)
    if marked:
        return whole and not entry.requires_grad
    return entry.shape == () or (whole and most_chunks > 1 and entry.shape[0] > 1)

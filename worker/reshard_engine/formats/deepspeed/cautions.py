"""Warnings about cuts that nothing in the files proves, and about rows that a target does not hold.

A warning is given only where it matters: if the target is cut in another way, or if a loader may cut it so.
"""

from __future__ import annotations

from reshard.errors import listed
from reshard.models import ConvertRequest
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats.deepspeed.facts import facts_of
from reshard_engine.formats.deepspeed.megatron import is_megatron
from reshard_engine.formats.deepspeed.names import INFO
from reshard_engine.formats.deepspeed.rules.families import SECTIONED_WARNING, may_be_sectioned
from reshard_engine.formats.not_written import padding_left_out

HOW_TO_SAY = "--family gpt-megatron|llama-megatron|bloom, or --rules FILE"
LOSS_OF_PADDING = (
    "a softmax over padded rows counts them, so the next losses move a little (about 0.005 in one small model)"
)

AT_STAGE_3 = (
    "DeepSpeed's loader of stage 3 knows no padding. Where the model pads its vocabulary, it shifts every parameter "
    "behind the vocabulary without an error: for such a model use --to zero --zero-stage 3"
)


def sectioned(checkpoint: Checkpoint, request: ConvertRequest | None) -> list[str]:
    """The warning that nothing proves the order inside fused matrices; none where the user gave rules."""
    if request is not None and request.options.deepspeed.rules is not None:
        return []
    return [SECTIONED_WARNING] if any(map(may_be_sectioned, checkpoint.parameters)) else []


def uncut(checkpoint: Checkpoint) -> str | None:
    """The reason why a checkpoint fits one tensor-parallel rank only; None if rules say how every parameter is cut."""
    names = [p.fqn for p in checkpoint.parameters if p.cut is None]
    if not names:
        return None
    return f"unknown how tensor parallelism splits {len(names)} of {len(checkpoint.parameters)} parameters"


def uncut_warnings(checkpoint: Checkpoint) -> list[str]:
    """The warning that DeepSpeed would cut a universal checkpoint wrongly above tensor parallelism 1.

    Runs get it that have `universal_checkpoint_info`, or are Megatron-DeepSpeed's. Megatron-DeepSpeed names replicated
    and row-parallel parameters only where its own tensor parallelism is above 1. DeepSpeed's loader cuts a parameter
    that nothing names along dimension 0, without a warning.
    """
    reason = uncut(checkpoint)
    if reason is None or not (INFO in facts_of(checkpoint).entries or is_megatron(checkpoint)):
        return []
    names = [p.fqn for p in checkpoint.parameters if p.cut is None]
    text = (
        f"{reason} ({listed(names, 3)}): Megatron-DeepSpeed writes that only where its own tensor parallelism is above "
        "1. Resume this at tensor parallelism 1 only: above it DeepSpeed cuts each of them along dimension 0 without "
        f"an error, and trains on wrong weights. Convert with {HOW_TO_SAY}"
    )
    return [text]


def padding_changes(checkpoint: Checkpoint, rows: int | None) -> list[str]:
    """Warnings about padding that a vocabulary of `rows` rows adds or cuts off; none where it keeps all of it."""
    data = [p.shape[0] for p in checkpoint.parameters if p.cut is not None and p.cut.vocabulary is not None]
    if rows is None or not data:
        return []
    kept = checkpoint.padding_rows
    missing = rows - max(data) - kept
    before = f"{max(data) + kept} in the source"
    if not kept and facts_of(checkpoint).vocab_rows not in (None, max(data)):
        before = f"{max(data)} in the source, which holds none of its run's padding"
    if missing > 0:
        what = f"{missing} rows of zeros are added behind the vocabulary: {rows} rows, {before}"
    elif missing < 0:
        what = f"{-missing} rows of padding behind the vocabulary are cut off: {rows} rows, {before}"
    else:
        return []
    return [f"{what}; {LOSS_OF_PADDING}"]


def padding_refilled(checkpoint: Checkpoint) -> list[str]:
    """The warning that the target lacks the source's rows of padding; loaders put zeros in their place."""
    if not checkpoint.padding_rows:
        return []
    # deepspeed 0.19.8, `runtime/zero/stage3.py` (`load_hp_checkpoint_state`): it cuts the stored rows as they are.
    zeros = f"DeepSpeed puts zeros in their place at stages 1 and 2; {LOSS_OF_PADDING}. {AT_STAGE_3}"
    return [f"{padding_left_out(checkpoint)}. {zeros}"]

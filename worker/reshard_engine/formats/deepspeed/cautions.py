"""Warnings about cuts that nothing in the files proves, and about rows that a target does not hold.

A warning is given only where it matters: if the target is cut in another way, or if a loader may cut it so.
"""

from __future__ import annotations

from reshard.errors import counted, listed
from reshard.models.jobs import ConvertRequest
from reshard.options import DeepSpeedOptions
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats.carried import padding_left_out
from reshard_engine.formats.deepspeed.facts import facts_of, is_megatron
from reshard_engine.formats.deepspeed.files import INFO
from reshard_engine.formats.deepspeed.parallel.rules import SECTIONED_WARNING, may_be_sectioned

HOW_TO_SAY = "--family gpt-megatron|llama-megatron|bloom, or --rules FILE"
EFFECT_OF_PADDING = (
    "where the softmax counts the padding, as Megatron-DeepSpeed's does, the next losses are not those of the "
    "uninterrupted run"
)
AT_STAGE_3 = (
    "Do not load this at ZeRO-3 if the model pads its vocabulary: DeepSpeed then shifts every parameter behind the "
    "vocabulary without an error, and trains on wrong weights"
)
_AT_ONE_RANK = (
    "load this without tensor parallelism only: the vocabulary has {} rows, one multiple of --vocab-divisor, and above "
    "one tensor-parallel rank DeepSpeed takes them for each rank's part without an error"
)


def sectioned(checkpoint: Checkpoint, request: ConvertRequest | None) -> list[str]:
    """The warning that nothing proves the order inside fused matrices; none where the user gave rules.

    Cuts of a source of another format are those that its own names, or the user, said.
    """
    if request is not None and request.options.of(DeepSpeedOptions).rules is not None:
        return []
    if not facts_of(checkpoint).order:
        return []
    return [SECTIONED_WARNING] if any(map(may_be_sectioned, checkpoint.parameters)) else []


def uncut(checkpoint: Checkpoint) -> str | None:
    """The reason why a checkpoint fits one tensor-parallel rank only; None if rules say how every parameter is cut."""
    names = [p.fqn for p in checkpoint.parameters if p.cut is None]
    if not names:
        return None
    return f"unknown how tensor parallelism splits {len(names)} of {counted(len(checkpoint.parameters), 'parameter')}"


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


def padding_changes(checkpoint: Checkpoint, rows: int | None, tp: int) -> list[str]:
    """Warnings about padding that a vocabulary of `rows` rows on `tp` ranks adds or cuts off; none if it keeps all."""
    data = _vocabulary(checkpoint)
    if rows is None or data is None:
        return []
    kept = checkpoint.padding_rows
    missing = rows - data - kept
    before = f"{data + kept} in the source"
    bare = not kept and facts_of(checkpoint).vocab_rows not in (None, data)
    if bare:
        before = f"{data} in the source, which holds none of its run's padding"
    if missing > 0:
        more = counted(missing, "row of zeros is", "rows of zeros are")
        what = f"{more} added behind the vocabulary: {rows} rows, {before}"
    elif missing < 0:
        behind = "of padding behind the vocabulary"
        less = counted(-missing, f"row {behind} is", f"rows {behind} are")
        what = f"{less} cut off: {rows} rows, {before}"
    else:
        return []
    return [f"{what}; {EFFECT_OF_PADDING}{'' if bare else _how_to_keep(checkpoint, data, tp)}"]


def padding_of_atoms(checkpoint: Checkpoint, rows: int | None, divisor: int | None) -> list[str]:
    """Warnings about the padding of a universal checkpoint, whose atoms of vocabularies have `rows` rows.

    Args:
        checkpoint: The source.
        rows: The rows; None if padding is left out.
        divisor: The number to a multiple of which they are padded; None if nothing says it.

    Source: deepspeed 0.19.8 `runtime/zero/stage3.py` (`load_hp_checkpoint_state`: it cuts the stored rows as they are),
    `checkpoint/universal_checkpoint.py` (`load_hp_checkpoint_state`: an atom in the shape of a rank's part is whole).
    """
    data = _vocabulary(checkpoint)
    if rows is not None:
        once = rows == divisor and data != rows
        return [*padding_changes(checkpoint, rows, 1), *([_AT_ONE_RANK.format(rows)] if once else [])]
    if data is None or (divisor is None and facts_of(checkpoint).vocab_rows == data):
        return []
    left = f"{padding_left_out(checkpoint)}: " if checkpoint.padding_rows else ""
    if divisor is None:
        why = f"nothing says to which multiple the model pads its vocabulary of {data} rows"
        how = "With N, the --make-vocab-size-divisible-by of the run: --vocab-divisor N"
    else:
        why = f"the vocabulary of {data} rows fits into one multiple of {divisor}"
        how = f"For runs without tensor parallelism, at any stage: --vocab-divisor {divisor}"
    zeros = f"At stages 1 and 2 it puts zeros in the place of padding; {EFFECT_OF_PADDING}"
    return [f"{left}{why}. {AT_STAGE_3}. {zeros}. {how}"]


def _vocabulary(checkpoint: Checkpoint) -> int | None:
    """The rows of the vocabulary without padding; None if no parameter is known to be one."""
    data = [p.shape[0] for p in checkpoint.parameters if p.cut is not None and p.cut.vocabulary is not None]
    return max(data, default=None)


def _how_to_keep(checkpoint: Checkpoint, data: int, tp: int) -> str:
    """The option with which `tp` ranks hold all of the source's rows: a sentence with the period before it."""
    rows = data + checkpoint.padding_rows
    if rows % tp:
        return f". No option keeps the source's rows at --tp {tp}, which does not divide {rows}"
    # The source's own divisor, for another number of ranks, if it gives as many rows; else one that always does.
    usual = (facts_of(checkpoint).vocab_divisor or 1) * checkpoint.world.get("tp", 1) // tp
    unit = max(usual * tp, 1)
    divisor = usual if -(-data // unit) * unit == rows else rows // tp
    return (
        f". To keep the source's rows: --vocab-divisor {divisor}, and --make-vocab-size-divisible-by {divisor} "
        "for the run that loads it"
    )

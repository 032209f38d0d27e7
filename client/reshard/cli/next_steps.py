"""The next step after a conversion: the line of a configuration, or the call, that uses the target."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable
from typing import TYPE_CHECKING

from reshard.choices import TargetFormat
from reshard.errors import printable
from reshard.names_on_disk import POINTERS

if TYPE_CHECKING:
    from reshard.models import Inspection

_UNIVERSAL = 'in the DeepSpeed config: "checkpoint": {"load_universal": true}'

DISTRIBUTED = "dcp"
"""The target of distributed checkpoints (`reshard.dcp_options`)."""
_STAGES = re.compile(r"; stages ([\w, ]+)")
"""The stages that `inspect` lists for the target `zero --dp`."""
_RESUME = "Resume on N GPUs"
_NUMBER_OF_RANKS = re.compile(r"--dp \d+")


def remote(source: str) -> bool:
    """True for a URL."""
    return "://" in source


def ensurable(found: Inspection) -> bool:
    """True if `reshard ensure` can convert the checkpoint at its own stage, without options."""
    from reshard.ensuring.world import stage_of

    stage = stage_of(found)
    zero = next((t for t in found.targets if t.name == "zero --dp" and t.possible), None)
    if zero is None or stage is None or "--opaque" in zero.example:
        return False
    stages = _STAGES.search(zero.detail)
    return stages is not None and stage.value in stages[1].strip().split(", ")


_MORE_RANKS = {
    "zero --tp": "Tensor parallelism",
    "zero --pp": "Pipeline parallelism",
    "zero --ep": "Expert parallelism",
}
_LABELS = {
    "universal": "DeepSpeed universal",
    DISTRIBUTED: "FSDP (DCP)",
    TargetFormat.SAFETENSORS: "Weights",
    TargetFormat.TORCH: "Weights",
    TargetFormat.PEFT: "LoRA adapter",
}
"""The use of each target, in the order in which targets are shown."""


def possible_commands(source: str, found: Inspection, said: str) -> list[tuple[str, str]]:
    """Tells what can be done with a checkpoint: a label and the command of each, the most common first.

    Words in upper case (`N`, `DST`) are for the user to fill in.

    Args:
        source: The source as the user named it.
        found: What was found in it.
        said: The flags that say which checkpoint of the source it is.
    """
    place, here = shlex.quote(source), not remote(source)
    examples = {t.name: t.example for t in found.targets if t.possible and t.example}
    commands: list[tuple[str, str]] = []
    distributed = found.format.startswith(f"{DISTRIBUTED}-")
    if here and distributed and found.optimizer_states:
        commands.append(("Resume on N GPUs (FSDP)", f"ensure {place}"))
    if here and ensurable(found):
        commands.append((_RESUME, f"ensure {place} --dp N"))
    elif here and distributed and "zero --dp" in examples:
        commands.append(("Resume on N GPUs (DeepSpeed)", f"ensure {place} --to zero --dp N --zero-stage 2"))
    elif "zero --dp" in examples:
        flags = "--to zero --dp N" if ensurable(found) else _NUMBER_OF_RANKS.sub("--dp N", examples["zero --dp"])
        commands.append((_RESUME, f"convert {place} DST {flags}"))
    if TargetFormat.SAFETENSORS in examples:
        examples.pop(TargetFormat.TORCH, None)
    labels = _MORE_RANKS | _LABELS
    others = {name: name for name in examples if name not in labels and not name.startswith("zero")}
    for name, label in (labels | others).items():
        if name in examples:
            commands.append((label, f"convert {place} DST {examples[name]}"))
    return [(label, f"reshard {command}{said}") for label, command in commands]


def followed(source: str, tag: str | None) -> str | None:
    """A line that names the pointer that was followed, if it is not `latest`."""
    if tag is not None or remote(source):
        return None
    pointers = [name for name in POINTERS if os.path.isfile(os.path.join(source, name))]
    if not pointers or pointers[0] == POINTERS[0]:
        return None
    return f"followed `{pointers[0]}`: {printable(source)} has no `{POINTERS[0]}`"


def next_steps(to: str, target: str, files: Iterable[str]) -> list[str]:
    """The lines that say what a user does next with a target that has these files.

    The list is empty for formats of other packages.
    """
    away = remote(target)
    directory, tag = os.path.split(target.rstrip("/") if away else os.path.normpath(target))
    whole = "'DIR'" if away else repr(printable(target))
    save, name = ("'DIR'" if away else repr(printable(directory or "."))), repr(printable(tag))
    calls = {
        TargetFormat.UNIVERSAL: [_UNIVERSAL, f"in the script: engine.load_checkpoint({save}, tag={name})"],
        TargetFormat.ZERO: [f"in the script: engine.load_checkpoint({save}, tag={name})"],
        TargetFormat.SAFETENSORS: [f"in the script: {_weights_call(whole, sorted(files), remote=away)}"],
        TargetFormat.TORCH: [f"in the script: {_weights_call(whole, sorted(files), remote=away)}"],
        TargetFormat.PEFT: [f"in the script: PeftModel.from_pretrained(base_model, {whole})"],
    }
    found = calls[TargetFormat(to)] if to in calls else []
    if to == DISTRIBUTED:
        found = [f"in the script: {_distributed_call(whole, set(files))}"]
    return [f"copy {printable(target)} to a directory DIR of each node", *found] if away and found else found


def _distributed_call(whole: str, files: set[str]) -> str:
    """The call of the framework whose files these are."""
    if "meta.pt" in files:
        return f"trainer.fit(model, ckpt_path={whole})"
    if "trainer_state.json" in files:
        return f"trainer.train(resume_from_checkpoint={whole})"
    if any(name.startswith("pytorch_model_fsdp_0/") for name in files):
        return f"accelerator.load_state({whole})"
    return f"dcp.load(state_dict, checkpoint_id={whole})"


def _weights_call(whole: str, files: list[str], *, remote: bool) -> str:
    weights = [name for name in files if name.endswith((".safetensors", ".bin"))]
    if "config.json" in files:
        return f"AutoModelForCausalLM.from_pretrained({whole})"
    if len(weights) != 1:
        return f"accelerate.load_checkpoint_in_model(model, {whole})"
    path = repr(f"DIR/{weights[0]}" if remote else printable(f"{whole[1:-1]}/{weights[0]}"))
    if weights[0].endswith(".bin"):
        return f"model.load_state_dict(torch.load({path}, weights_only=True))"
    return f"safetensors.torch.load_model(model, {path})"

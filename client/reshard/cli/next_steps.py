"""The next step after a conversion: the line of a configuration, or the call, that uses the target."""

from __future__ import annotations

import os
from collections.abc import Iterable

from reshard.choices import TargetFormat
from reshard.errors import printable

_UNIVERSAL = 'in the DeepSpeed config: "checkpoint": {"load_universal": true}'


def next_steps(to: str, target: str, files: Iterable[str]) -> list[str]:
    """The lines that say what a user does next with a target that has these files.

    The list is empty for formats of other packages.
    """
    remote = "://" in target
    directory, tag = os.path.split(target.rstrip("/") if remote else os.path.normpath(target))
    whole = "'DIR'" if remote else repr(printable(target))
    save, name = ("'DIR'" if remote else repr(printable(directory or "."))), repr(printable(tag))
    calls = {
        TargetFormat.UNIVERSAL: [_UNIVERSAL, f"in the script: engine.load_checkpoint({save}, tag={name})"],
        TargetFormat.ZERO: [f"in the script: engine.load_checkpoint({save}, tag={name})"],
        TargetFormat.SAFETENSORS: [f"in the script: {_weights_call(whole, sorted(files), remote=remote)}"],
        TargetFormat.TORCH: [f"in the script: {_weights_call(whole, sorted(files), remote=remote)}"],
        TargetFormat.PEFT: [f"in the script: PeftModel.from_pretrained(base_model, {whole})"],
    }
    found = calls[TargetFormat(to)] if to in calls else []
    return [f"copy {printable(target)} to a directory DIR of each node", *found] if remote and found else found


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

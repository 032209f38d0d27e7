"""PEFT's LoRA adapters as a format: written, merged into weights, and read only as part of a training state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from reshard.errors import RequestError, listed
from reshard.models import ConvertRequest, PossibleTarget, TargetFormat
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats.format import Format, Trial
from reshard_engine.formats.peft.adapter_files import adapter_files
from reshard_engine.formats.writer import Writer

_ANY_ALPHA = 1.0
_MERGED_INTO = (TargetFormat.SAFETENSORS, TargetFormat.TORCH)


class Peft(Format):
    """`adapter_model.safetensors` and `adapter_config.json`."""

    name = "peft"
    targets = (TargetFormat.PEFT,)
    takes_model_files = True

    def writer(self, target: TargetFormat) -> Writer:
        """The writer of adapters."""
        from reshard_engine.formats.peft.writer import PeftWriter

        return PeftWriter()

    def check_request(self, request: ConvertRequest) -> None:
        """Refuse options of adapters where none is written or merged."""
        adapts = request.to in self.targets or request.merge_adapter
        if request.merge_adapter and request.to not in _MERGED_INTO:
            raise RequestError(
                "request.invalid", "an adapter is merged into consolidated weights", fix="--to safetensors"
            )
        if not adapts and (request.adapter is not None or request.lora_alpha is not None):
            raise RequestError(
                "request.invalid", "adapter and lora_alpha are for adapters", fix="--to peft, or --merge-adapter"
            )
        if request.base is not None and not request.merge_adapter:
            raise RequestError(
                "request.invalid", "--base is of --merge-adapter: what it is merged into", fix="leave it out"
            )
        if request.exclude_frozen and request.merge_adapter:
            raise RequestError(
                "request.invalid",
                "--exclude-frozen and --merge-adapter: a merged model is whole",
                fix="leave out one",
            )

    def completed(self, checkpoint: Checkpoint, request: ConvertRequest, base: Checkpoint | None) -> Checkpoint:
        """The checkpoint with its adapter's configuration, or with the adapter merged."""
        if request.to not in self.targets and not request.merge_adapter:
            return checkpoint
        checkpoint = replace(checkpoint, model_files=adapter_files(checkpoint, request))
        if not request.merge_adapter:
            return checkpoint
        from reshard_engine.formats.peft.adapters import merged

        return replace(merged(checkpoint, request, base), model_files={})

    def left_out(self, checkpoint: Checkpoint) -> str | None:
        """The base model's weights, where the save was told to leave frozen parameters out.

        Source: transformers 5.23.0 `integrations/deepspeed.py` and `trainer.py` (Trainer saves PEFT models so).
        """
        from reshard_engine.formats.peft.run import lacks_base

        if not lacks_base(checkpoint):
            return None
        return "the base model's weights are not in the checkpoint: it was saved without its frozen parameters"

    def possible_targets(self, tried: Trial) -> Iterable[PossibleTarget]:
        """The export of an adapter. Nothing for runs without LoRA: nobody would ask."""
        from reshard_engine.formats.peft.names import adapter_names, adapter_parts

        names = adapter_names(adapter_parts(p.fqn for p in tried.checkpoint.parameters))
        if not names:
            return []
        # Several adapters are exported one at a time.
        chosen: dict[str, Any] = {"adapter": names[0]} if len(names) > 1 else {}
        flags = f" --adapter {names[0]}" if chosen else ""
        refusal = tried.refusal(TargetFormat.PEFT, **chosen)
        needs = ""
        if refusal is not None:
            scaled = {**chosen, "lora_alpha": _ANY_ALPHA}
            if tried.refusal(TargetFormat.PEFT, **scaled) is not None:
                return [tried.impossible("peft", refusal)]
            chosen, flags, needs = scaled, f"{flags} --model-files DIR", f"; {refusal.message}: {refusal.fix}"
        return [tried.possible("peft", f"{listed(names)}; {_merged(tried, chosen)}{needs}", f"--to peft{flags}")]


def _merged(tried: Trial, chosen: dict[str, Any]) -> str:
    """How the adapter is merged into weights, or why it is not."""
    from reshard_engine.formats.peft.run import lacks_base

    if lacks_base(tried.checkpoint):
        text = "merged: safetensors --merge-adapter --base DIR"
        return f"{text} (the base model's weights are not in the checkpoint)"
    refusal = tried.refusal(TargetFormat.SAFETENSORS, merge_adapter=True, **chosen)
    return "merged: safetensors --merge-adapter" if refusal is None else f"not merged: {refusal.message}"

"""The format of PEFT's LoRA adapters. They are written, merged into weights, and read only from a training state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from reshard.choices import TargetFormat
from reshard.errors import RequestError, ReshardError, listed
from reshard.models import ConvertRequest, PossibleTarget
from reshard.options import Options, PeftOptions
from reshard_engine.checkpoint import OF_TRAINING, Checkpoint, Question
from reshard_engine.formats.format import DryRun, Format
from reshard_engine.formats.peft.adapter_files import adapter_files
from reshard_engine.formats.peft.names import adapter_names, adapter_parts
from reshard_engine.formats.writer import Writer

_ANY_ALPHA = 1.0
_MERGED_INTO = (TargetFormat.SAFETENSORS, TargetFormat.TORCH)


class Peft(Format):
    """`adapter_model.safetensors` and `adapter_config.json`."""

    name = "peft"
    targets = (TargetFormat.PEFT,)
    takes_model_files = True

    def writer(self, target: str) -> Writer:
        """The writer of adapters."""
        from reshard_engine.formats.peft.writer import PeftWriter

        return PeftWriter()

    def check_request(self, request: ConvertRequest) -> None:
        """Refuse options of adapters in a request that neither writes nor merges one."""
        options = request.options.peft
        if options.merge_adapter and request.to not in _MERGED_INTO:
            raise RequestError(
                "request.invalid", "an adapter is merged into consolidated weights", fix="--to safetensors"
            )
        adapts = request.to in self.targets or options.merge_adapter
        if not adapts and (options.adapter is not None or options.lora_alpha is not None):
            raise RequestError(
                "request.invalid", "adapter and lora_alpha are for adapters", fix="--to peft, or --merge-adapter"
            )
        if options.base is not None and not options.merge_adapter:
            raise RequestError(
                "request.invalid",
                "--base works only with --merge-adapter: it names the weights to merge into",
                fix="leave it out",
            )
        if request.exclude_frozen and options.merge_adapter:
            raise RequestError(
                "request.invalid",
                "--exclude-frozen and --merge-adapter: a merged model is whole",
                fix="leave out one",
            )

    def base_model(self, request: ConvertRequest) -> str | None:
        """The directory of `--base`."""
        return request.options.peft.base

    def completes(self, request: ConvertRequest) -> bool:
        """True if the request merges an adapter, which needs the base model's weights."""
        return request.options.peft.merge_adapter

    def indifferent(self, checkpoint: Checkpoint, request: ConvertRequest) -> tuple[Question, ...]:
        """All but the model. The optimizer tells frozen parameters from others, if those are to be left out."""
        return (Question.SCHEDULER, Question.GROUPS) if request.exclude_frozen else OF_TRAINING

    def completed(self, checkpoint: Checkpoint, request: ConvertRequest, base: Checkpoint | None) -> Checkpoint:
        """The checkpoint with its adapter's configuration, or with the adapter merged."""
        merges = self.completes(request)
        if request.to not in self.targets and not merges:
            return checkpoint
        checkpoint = replace(checkpoint, model_files=adapter_files(checkpoint, request))
        if not merges:
            return checkpoint
        from reshard_engine.formats.peft.adapters import merged

        return replace(merged(checkpoint, request, base), model_files={})

    def left_out(self, checkpoint: Checkpoint) -> str | None:
        """A note if the base model's weights are missing, because the run was saved without frozen parameters.

        Source: transformers 5.23.0 `integrations/deepspeed.py` and `trainer.py` (Trainer saves PEFT models so).
        """
        from reshard_engine.formats.peft.run import lacks_base

        if not lacks_base(checkpoint):
            return None
        return "the base model's weights are not in the checkpoint: it was saved without its frozen parameters"

    def possible_targets(self, tried: DryRun) -> Iterable[PossibleTarget]:
        """The export of an adapter. Runs without LoRA get no entry."""
        names = adapter_names(adapter_parts(p.fqn for p in tried.checkpoint.parameters))
        if not names:
            return []
        # Several adapters are exported one at a time.
        chosen: dict[str, Any] = {"adapter": names[0]} if len(names) > 1 else {}
        flags = f" --adapter {names[0]}" if chosen else ""
        refusal = _refusal(tried, TargetFormat.PEFT, chosen)
        needs = ""
        if refusal is not None:
            scaled = {**chosen, "lora_alpha": _ANY_ALPHA}
            if _refusal(tried, TargetFormat.PEFT, scaled) is not None:
                return [tried.impossible("peft", refusal)]
            chosen, flags, needs = scaled, f"{flags} --model-files DIR", f"; {refusal.message}: {refusal.fix}"
        return [tried.possible("peft", f"{listed(names)}; {_merged(tried, chosen)}{needs}", f"--to peft{flags}")]


def _refusal(tried: DryRun, to: str, options: dict[str, Any]) -> ReshardError | None:
    return tried.refusal(to, options=Options(peft=PeftOptions.model_validate(options)))


def _merged(tried: DryRun, chosen: dict[str, Any]) -> str:
    """A sentence on how to merge the adapter into weights, or on why it cannot be merged."""
    from reshard_engine.formats.peft.run import lacks_base

    if lacks_base(tried.checkpoint):
        text = "merged: safetensors --merge-adapter --base DIR"
        return f"{text} (the base model's weights are not in the checkpoint)"
    refusal = _refusal(tried, TargetFormat.SAFETENSORS, {**chosen, "merge_adapter": True})
    return "merged: safetensors --merge-adapter" if refusal is None else f"not merged: {refusal.message}"

"""DeepSpeed as a format: native checkpoints of every stage, and universal ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from reshard.diffs import DiffOptions
from reshard.errors import listed
from reshard.models import ConvertRequest, PossibleTarget, TargetFormat
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats.deepspeed.facts import facts_of
from reshard_engine.formats.deepspeed.names import POINTERS
from reshard_engine.formats.deepspeed.reader.native.files import rank_of
from reshard_engine.formats.deepspeed.reader.native.reader import DeepSpeedReader
from reshard_engine.formats.deepspeed.reader.universal.reader import UniversalReader
from reshard_engine.formats.format import Format, RunFacts, Trial
from reshard_engine.formats.reader import Reader
from reshard_engine.formats.writer import Writer
from reshard_engine.tensors.layout import KnownFiles


class DeepSpeed(Format):
    """Checkpoints that `engine.save_checkpoint` writes, and their universal form."""

    name = "deepspeed"
    readers: ClassVar[tuple[Reader, ...]] = (UniversalReader(), DeepSpeedReader())
    of_training = True
    files = KnownFiles(
        pointers=POINTERS,
        entries=("zero",),
        suffixes=("_states.pt",),
        needed=("_states.pt", "optimizer_state.pt"),
    )
    targets = (TargetFormat.ZERO, TargetFormat.UNIVERSAL)

    def writer(self, target: TargetFormat) -> Writer:
        """The writer of universal or of native checkpoints."""
        if target is TargetFormat.UNIVERSAL:
            from reshard_engine.formats.deepspeed.writer.universal.writer import UniversalWriter

            return UniversalWriter()
        from reshard_engine.formats.deepspeed.writer.native.writer import ZeroWriter

        return ZeroWriter()

    def read_rules(self, request: ConvertRequest | DiffOptions) -> Mapping[str, Any] | None:
        """The rules of `--rules` and `--family`."""
        from reshard_engine.formats.deepspeed.rules.request import requested_rules

        return requested_rules(request)

    def relabelled(self, checkpoint: Checkpoint, request: ConvertRequest) -> Checkpoint:
        """The checkpoint under the names of `--names`, with the rules of the request in its own metadata."""
        from reshard_engine.formats.deepspeed.relabel import relabelled

        return relabelled(checkpoint, request)

    def rank_label(self, file: str, world: Mapping[str, int]) -> str:
        """The ranks in the file's name."""
        return rank_of(file, tp=world.get("tp", 1))

    def left_out(self, checkpoint: Checkpoint) -> str | None:
        """Frozen parameters, where the save was told to leave them out.

        Source: deepspeed 0.19.8 `runtime/engine.py` (`_save_checkpoint`: with `exclude_frozen_parameters=True` the
        entry `frozen_param_shapes` is None at stages 2 and 3, where it is a mapping else; `module_state_dict`).
        """
        # Stages 0 and 1 never say; a universal form, of no stage, may have been made of one of these.
        if facts_of(checkpoint).zero_stage not in (2, 3) or not checkpoint.frozen_left_out or checkpoint.frozen:
            return None
        return (
            "it was saved with exclude_frozen_parameters=True: frozen parameters, if the model had any, are not in it"
        )

    def zero_stage(self, checkpoint: Checkpoint) -> int | None:
        """The stage of a native checkpoint; a universal one is of none."""
        return facts_of(checkpoint).zero_stage

    def cautions(self, checkpoint: Checkpoint) -> list[str]:
        """Cuts that nothing in the files proves, or that nothing says."""
        from reshard_engine.formats.deepspeed.cautions import sectioned

        names = checkpoint.unexplained
        if not names:
            return sectioned(checkpoint, None) if checkpoint.world.get("tp", 1) > 1 else []
        return [f"nothing says how {len(names)} parameters were cut over tensor-parallel ranks: {listed(names, 20)}"]

    def joined_cautions(self, checkpoint: Checkpoint, request: ConvertRequest) -> list[str]:
        """Fused matrices whose order within a slice is taken on trust."""
        from reshard_engine.formats.deepspeed.cautions import sectioned

        return sectioned(checkpoint, request) if checkpoint.world.get("tp", 1) > 1 else []

    def possible_targets(self, tried: Trial) -> Iterable[PossibleTarget]:
        """Native layouts by kind of parallelism, and the universal form."""
        from reshard_engine.formats.deepspeed.possible_targets import native_targets, universal_target

        return (*native_targets(tried), universal_target(tried))

    def run_facts(self, checkpoint: Checkpoint) -> RunFacts:
        """Model states without what describes the files, the loss scale, and the clipping."""
        from reshard_engine.formats.deepspeed.run_facts import run_facts

        return run_facts(checkpoint)

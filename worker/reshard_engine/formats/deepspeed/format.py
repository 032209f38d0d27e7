"""DeepSpeed as a format: native checkpoints of every stage, and universal ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from reshard.choices import TargetFormat
from reshard.errors import RequestError, counted, listed
from reshard.models import ConvertRequest, PossibleTarget
from reshard.names_on_disk import POINTERS
from reshard.options import Options
from reshard_engine.checkpoint import Checkpoint, Question
from reshard_engine.formats.deepspeed.cautions import sectioned
from reshard_engine.formats.deepspeed.facts import facts_of
from reshard_engine.formats.deepspeed.reader.native.files import rank_of
from reshard_engine.formats.deepspeed.reader.native.reader import DeepSpeedReader
from reshard_engine.formats.deepspeed.reader.universal.reader import UniversalReader
from reshard_engine.formats.deepspeed.relabel import relabelled
from reshard_engine.formats.deepspeed.run_facts import run_facts
from reshard_engine.formats.format import DryRun, Format, RunFacts
from reshard_engine.formats.reader import Reader
from reshard_engine.formats.writer import Writer
from reshard_engine.tensors.layout import KnownFiles


class DeepSpeed(Format):
    """Checkpoints that `engine.save_checkpoint` writes, and their universal form."""

    name = "deepspeed"
    readers: ClassVar[tuple[Reader, ...]] = (UniversalReader(), DeepSpeedReader())
    of_training = True
    takes_choices = True
    files = KnownFiles(
        pointers=POINTERS,
        entries=("zero",),
        suffixes=("_states.pt",),
        needed=("_states.pt", "optimizer_state.pt"),
    )
    targets = (TargetFormat.ZERO, TargetFormat.UNIVERSAL)

    def writer(self, target: str) -> Writer:
        """The writer of universal or of native checkpoints."""
        if target == TargetFormat.UNIVERSAL:
            from reshard_engine.formats.deepspeed.writer.universal.writer import UniversalWriter

            return UniversalWriter()
        from reshard_engine.formats.deepspeed.writer.native.writer import ZeroWriter

        return ZeroWriter()

    def read_rules(self, options: Options) -> Mapping[str, Any] | None:
        """The rules of `--rules` and `--family`."""
        from reshard_engine.formats.deepspeed.rules.request import requested_rules

        return requested_rules(options.deepspeed)

    def check_request(self, request: ConvertRequest) -> None:
        """Refuse a native target without a number of ranks, and layout options for a target that is not native."""
        options = request.options.deepspeed
        if request.to == TargetFormat.ZERO and options.dp is None:
            raise RequestError("request.invalid", "--to zero needs the number of ranks", fix="add --dp N")
        # A universal checkpoint fits every layout, but vocabularies have the rows of one.
        free = {"vocab_divisor": None} if request.to == TargetFormat.UNIVERSAL else {}
        if request.to != TargetFormat.ZERO and options.model_copy(update=free).asks_for_layout:
            raise RequestError("request.invalid", f"--to {request.to} has no layout", fix="--to zero")

    def relabelled(self, checkpoint: Checkpoint, request: ConvertRequest) -> Checkpoint:
        """The checkpoint under the names of `--names`, with the rules of the request in its own metadata."""
        return relabelled(checkpoint, request)

    def indifferent(self, checkpoint: Checkpoint, request: ConvertRequest) -> tuple[Question, ...]:
        """Buffers and frozen parameters are one to all targets but stage 3, which partitions parameters alone."""
        if request.exclude_frozen:
            return ()
        # Without an optimizer there is no such target, and nothing tells the type that its model would have.
        if request.to == TargetFormat.ZERO and checkpoint.optimizer is not None:
            from reshard_engine.formats.deepspeed.writer.native.target import resolve

            if resolve(checkpoint, request).stage == 3:
                return ()
        return (Question.BUFFERS,)

    def rank_label(self, file: str, world: Mapping[str, int]) -> str:
        """The ranks that the file's name states, in words."""
        return rank_of(file, tp=world.get("tp", 1))

    def left_out(self, checkpoint: Checkpoint) -> str | None:
        """A sentence about frozen parameters, if the save was told to leave them out; None otherwise.

        Source: deepspeed 0.19.8 `runtime/engine.py` (`_save_checkpoint`: with `exclude_frozen_parameters=True` the
        entry `frozen_param_shapes` is None at stages 2 and 3, where it is a mapping else; `module_state_dict`).
        """
        # Files of stages 0 and 1 do not show it. A universal checkpoint has no stage, and may come from one of these.
        if facts_of(checkpoint).zero_stage not in (2, 3) or not checkpoint.frozen_left_out or checkpoint.frozen:
            return None
        return (
            "it was saved with exclude_frozen_parameters=True: frozen parameters, if the model had any, are not in it"
        )

    def zero_stage(self, checkpoint: Checkpoint) -> int | None:
        """The ZeRO stage of a native checkpoint; None for a universal one."""
        return facts_of(checkpoint).zero_stage

    def cautions(self, checkpoint: Checkpoint) -> list[str]:
        """Warnings about cuts that the files do not prove, or do not describe."""
        names = checkpoint.unexplained
        if not names:
            return sectioned(checkpoint, None) if checkpoint.world.get("tp", 1) > 1 else []
        cut = counted(len(names), "parameter was cut", "parameters were cut")
        return [f"nothing says how {cut} over tensor-parallel ranks: {listed(names, 20)}"]

    def joined_cautions(self, checkpoint: Checkpoint, request: ConvertRequest) -> list[str]:
        """The warning that nothing proves the order inside fused matrices; none where nothing was cut."""
        return sectioned(checkpoint, request) if checkpoint.world.get("tp", 1) > 1 else []

    def possible_targets(self, tried: DryRun) -> Iterable[PossibleTarget]:
        """Native layouts by kind of parallelism, and the universal form."""
        from reshard_engine.formats.deepspeed.possible_targets import native_targets, universal_target

        return (*native_targets(tried), universal_target(tried))

    def run_facts(self, checkpoint: Checkpoint) -> RunFacts:
        """The state that `diff` compares: model states without entries of the layout; loss scale; gradient clipping."""
        return run_facts(checkpoint)

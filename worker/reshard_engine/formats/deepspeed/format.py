"""DeepSpeed as a format: native and universal checkpoints, and which of them a checkpoint can become."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, ClassVar

from reshard.choices import POINTERS, TargetFormat, ZeroStage
from reshard.errors import RequestError, ReshardError, counted, listed
from reshard.models.jobs import ConvertRequest, PossibleTarget
from reshard.models.resume import ResumeLayout, RunLaunch, identity_of
from reshard.options import DeepSpeedOptions, Options, RunLayout
from reshard_engine.checkpoint import Checkpoint, Parameter, ParamGroup, Question
from reshard_engine.formats.deepspeed.cautions import HOW_TO_SAY, sectioned, uncut
from reshard_engine.formats.deepspeed.config import RunConfig
from reshard_engine.formats.deepspeed.facts import facts_of, run_facts
from reshard_engine.formats.deepspeed.files import CONFIG, rank_of, replicas_load
from reshard_engine.formats.deepspeed.native.reader import DeepSpeedReader
from reshard_engine.formats.deepspeed.native.target import resolve
from reshard_engine.formats.deepspeed.native.writer import ZeroWriter, is_pipeline, vocab_rows
from reshard_engine.formats.deepspeed.parallel.experts import (
    experts_by_layer,
    fuse_experts,
    ranks_of_group,
    require_divisible,
)
from reshard_engine.formats.deepspeed.parallel.rules import requested_rules
from reshard_engine.formats.deepspeed.parallel.tensor import Cutter
from reshard_engine.formats.deepspeed.relabel import relabelled
from reshard_engine.formats.deepspeed.universal.reader import UniversalReader
from reshard_engine.formats.deepspeed.universal.writer import UniversalWriter
from reshard_engine.formats.format import Completion, Discovery, DryRun, Format, Presentation, Reader, RunFacts, Writer
from reshard_engine.formats.model_weights import plain_name, unloadable
from reshard_engine.storage.locations import Location
from reshard_engine.tensors.dtypes import SHORT_NAMES
from reshard_engine.tensors.layout import KnownFiles


class _Discovery(Discovery):
    """The directories and files that are checkpoints of this format."""

    readers: ClassVar[tuple[Reader, ...]] = (UniversalReader(), DeepSpeedReader())
    of_training = True
    takes_choices = True
    files = KnownFiles(
        pointers=POINTERS,
        entries=("zero",),
        suffixes=("_states.pt",),
        needed=("mp_rank_*_model_states.pt", "zero_pp_rank_*_model_states.pt", "optimizer_state.pt"),
    )


class _Completion(Completion):
    """The checkpoint that a request means, in the terms of this format."""

    def read_rules(self, options: Options) -> Mapping[str, Any] | None:
        """The rules of `--rules` and `--family`."""
        return requested_rules(options.of(DeepSpeedOptions))

    def relabelled(self, checkpoint: Checkpoint, request: ConvertRequest) -> Checkpoint:
        """The checkpoint under the names of `--names`, with the rules of the request in its own metadata."""
        return relabelled(checkpoint, request)

    def indifferent(self, checkpoint: Checkpoint, request: ConvertRequest) -> tuple[Question, ...]:
        """Buffers and frozen parameters are one to all targets but stage 3, which partitions parameters alone."""
        if request.exclude_frozen:
            return ()
        # Without an optimizer there is no such target, and nothing tells the type that its model would have.
        native = request.to == TargetFormat.ZERO and checkpoint.optimizer is not None
        return () if native and resolve(checkpoint, request).stage == 3 else (Question.BUFFERS,)


class _Presentation(Presentation):
    """The answers for people about checkpoints of this format."""

    # DeepSpeed's Adam asks for it, and torch's Adam always does so: see `optimizer.groups_of`.
    implied_fields: ClassVar[Mapping[str, bool]] = {"bias_correction": True}

    def layout_fields(self, group: ParamGroup) -> Set[str]:
        """The name of a group of experts, which says over how many ranks they are spread (`ep_size_2`)."""
        return frozenset({"name"}) if ranks_of_group(group) is not None else frozenset()

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

    def zero_stage(self, checkpoint: Checkpoint) -> ZeroStage | None:
        """The ZeRO stage of a native checkpoint; None for a universal one, for which DeepSpeed needs an option."""
        facts = facts_of(checkpoint)
        if facts.bf16_optimizer:
            return ZeroStage.BF16
        return None if facts.zero_stage is None else ZeroStage(str(facts.zero_stage))

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
        return (*native_targets(tried), universal_target(tried))

    def settings_kept(self, checkpoint: Checkpoint) -> Mapping[str, Any]:
        """The order of the ranks that share experts, as native targets have it from the source's config."""
        config = RunConfig.of(facts_of(checkpoint).entries.get(CONFIG))
        return {"use_data_before_expert_parallelism": config.data_before_experts}

    def run_facts(self, checkpoint: Checkpoint) -> RunFacts:
        """The state that `diff` compares: model states without entries of the layout; loss scale; gradient clipping."""
        return run_facts(checkpoint)


class DeepSpeed(Format):
    """Checkpoints that `engine.save_checkpoint` writes, and their universal form."""

    name = "deepspeed"
    discovery = _Discovery()
    completion = _Completion()
    presentation = _Presentation()
    targets = (TargetFormat.ZERO, TargetFormat.UNIVERSAL)

    def writer(self, target: str) -> Writer:
        """The writer of universal or of native checkpoints."""
        if target == TargetFormat.UNIVERSAL:
            return UniversalWriter()
        return ZeroWriter()

    def layout_for(self, checkpoint: Checkpoint, launch: RunLaunch) -> ResumeLayout:
        """The engine's own files for the launch's ranks, at the stage that it names."""
        sizes = {"tp": 1, "pp": 1, "ep": 1} | launch.sizes(checkpoint.world)
        tp, pp = sizes["tp"], sizes["pp"]
        dp = launch.data_ranks(tp * pp, of=f"tp={tp} x pp={pp}")
        # The source's own stage is left out, so that one layout has one name.
        stage = None if launch.zero_stage is self.presentation.zero_stage(checkpoint) else launch.zero_stage
        label = [f"dp{dp}", *(f"{axis}{size}" for axis, size in sizes.items() if size > 1)]
        label += [] if stage is None else [f"zero{stage.value}"]
        label += [] if launch.dtype is None else [launch.dtype.value]
        unsaid = ("partition_method", "pipeline_layers", "vocab_divisor", "round_robin_gradients")
        unsaid += ("parameter_alignment", "sub_group_size")
        return ResumeLayout(
            to=TargetFormat.ZERO,
            layout=RunLayout.model_validate({"dp": dp, **sizes}),
            options={} if stage is None else {self.name: {"zero_stage": stage}},
            dtype=launch.dtype,
            identity=identity_of({"zero_stage": stage, "dp": dp, **sizes, **dict.fromkeys(unsaid), "rng": "keep"}),
            label="-".join(label),
        )

    def fits(self, checkpoint: Checkpoint, wanted: ResumeLayout) -> bool:
        """True for native files of the same stage, ranks and element type."""
        stage, world = self.presentation.zero_stage(checkpoint), checkpoint.world
        if stage is None or "zero_stage" in wanted.options.get(self.name, {}):
            return False
        if any(world.get(axis, 1) != getattr(wanted.layout, axis) for axis in ("tp", "pp", "ep")):
            return False
        if (wanted.layout.dp or 1) % wanted.layout.ep:
            # Source: DeepSpeed 0.19.8 `utils/groups.py` (`_ensure_divisibility` of the data-parallel ranks).
            return False
        if stage is not ZeroStage.STAGE_0 and world.get("dp") != wanted.layout.dp:
            # Without ZeRO every rank loads the same file, for any number of ranks.
            return False
        return wanted.dtype is None or _model_dtypes(checkpoint) == {SHORT_NAMES[wanted.dtype.value]}

    def check_names(self, place: Location, checkpoint: Checkpoint, request: ConvertRequest) -> None:
        """Refuse names that no engine's module has: only names of modules that wrap others are in front of a name."""
        longer = [name for short, name in checkpoint.run_names.items() if plain_name(name) != short]
        if request.to == TargetFormat.UNIVERSAL:
            own = {*checkpoint.shapes(), *checkpoint.shared, *checkpoint.run_names.values()}
            atoms = place.store.list_directory(place.child("zero").path).directories
            longer += [name for name in atoms if name not in own and plain_name(name).removeprefix("module.") in own]
        if longer:
            raise unloadable(f"names that DeepSpeed's engine does not have would be in the target: {listed(longer)}")

    def replicas_load(self, name: str) -> bool:
        """True for the weights of a model-parallel rank, and for those of a layer of a pipeline."""
        return replicas_load(name)


def _model_dtypes(checkpoint: Checkpoint) -> set[str]:
    """Element types of the trained weights; empty at stage 3, where only masters are stored."""
    if facts_of(checkpoint).zero_stage == 3:
        return set()
    stored = (p.states["fp32"] if p.weight is None else p.weight for p in checkpoint.trained)
    return {checkpoint.shard_map.tensors[tensor].dtype.name for tensor in stored}


# The DeepSpeed targets that a checkpoint can become, found by asking their writers for a layout.
#
# There are many sizes of tensor parallelism, and a layout of each takes long. So the writer's cutter is asked about
# each kind of parameter, and only one size is laid out.

_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of tensor-parallel ranks that are tried."""
_STAGES = (1, 2, 3, 4, 6, 8, 12, 16)
"""Numbers of pipeline stages that are tried."""


def universal_target(tried: DryRun) -> PossibleTarget:
    """The universal target: possible, or the reason why not."""
    if (refusal := tried.refusal(TargetFormat.UNIVERSAL)) is not None:
        return tried.impossible("universal", refusal)
    detail, reason = "one directory for every stage and world", uncut(tried.checkpoint)
    if reason is not None:
        detail = f"one directory for every stage and --dp; for runs with --tp 1 only: {reason}; give {HOW_TO_SAY}"
    return tried.possible("universal", detail, "--to universal")


def _refusal(tried: DryRun, stage: ZeroStage, **world: int) -> ReshardError | None:
    """The reason for which a run of this stage on `dp` ranks is refused, with `tp`, `pp` and `ep` where given."""
    return tried.refusal(TargetFormat.ZERO, **_fields(stage, RunLayout(**world)))


def _fields(stage: ZeroStage, layout: RunLayout) -> dict[str, Any]:
    """The fields of a request for a native target."""
    return {"layout": layout, "options": Options(deepspeed=DeepSpeedOptions(zero_stage=stage))}


def native_targets(tried: DryRun) -> list[PossibleTarget]:
    """The native targets by kind of parallelism: each possible, or the reason why not."""
    if tried.checkpoint.optimizer is None:
        # Without an optimizer every stage is refused for the same reason: one answer stands for all.
        refusal = _refusal(tried, ZeroStage.STAGE_1, dp=1)
        return [] if refusal is None else [tried.impossible("zero", refusal)]
    stages = {stage: _refusal(tried, stage, dp=1) for stage in ZeroStage}
    works = [stage for stage, refusal in stages.items() if refusal is None]
    refused = [refusal for refusal in stages.values() if refusal is not None]
    if not works:
        return [tried.impossible("zero --dp", refused[0])]
    detail = f"any number of ranks; stages {', '.join(s.value for s in works)}"
    if refused:
        detail += f" ({refused[0].message}; {refused[0].fix})"
    found = [tried.possible("zero --dp", detail, f"--to zero --dp 2 --zero-stage {works[0].value}")]
    # Sizes of model parallelism are tried at one stage only: the first that works and is not stage 0.
    stage = next((s for s in works if s is not ZeroStage.STAGE_0), None)
    if stage is None:
        return found
    return [*found, _tensor_parallel(tried, stage), _pipeline(tried, stage), *_experts(tried, stage)]


def _tensor_parallel(tried: DryRun, stage: ZeroStage) -> PossibleTarget:
    checkpoint, name = tried.checkpoint, "zero --tp"
    unknown = [p.fqn for p in checkpoint.parameters if p.cut is None]
    if unknown:
        reason = f"--tp above 1: unknown how {len(unknown)} parameters are split; give {HOW_TO_SAY}"
        return PossibleTarget(name=name, possible=False, detail=reason)
    # Layers repeat: a few kinds of parameters stand for thousands.
    kinds = list({(p.cut, p.shape, *p.padding): p for p in checkpoint.parameters}.values())
    refusals = {n: _uncuttable(tried, kinds, stage, RunLayout(dp=1, tp=n)) for n in _SIZES}
    sizes = [n for n, refusal in refusals.items() if refusal is None]
    least = next((n for n in sizes if n > 1), None)
    refusal = refusals[2] if least is None else _refusal(tried, stage, dp=1, tp=least)
    if refusal is not None:
        return tried.impossible(name, refusal)
    detail = f"{', '.join(map(str, sizes))} (tried up to {_SIZES[-1]}); not at stage 0"
    return tried.possible(name, detail, f"--to zero --dp 1 --tp {least} --zero-stage {stage.value}")


def _uncuttable(tried: DryRun, kinds: Sequence[Parameter], stage: ZeroStage, layout: RunLayout) -> RequestError | None:
    """The writer's refusal to cut some kind of parameter for `layout.tp` ranks; None if it can cut all."""
    fields = _fields(stage, layout)
    request = ConvertRequest(source=tried.source, target="-", to=TargetFormat.ZERO, **fields)
    try:
        dtype = resolve(tried.checkpoint, request).dtype
        cutter = Cutter(tried.checkpoint, layout.tp, vocab_rows(tried.checkpoint, layout.tp, None), dtype=dtype)
        for parameter in kinds:
            for rank in {0, layout.tp - 1}:
                cutter.local(parameter, rank)
    except RequestError as error:
        return error
    return None


def _pipeline(tried: DryRun, stage: ZeroStage) -> PossibleTarget:
    checkpoint, name = tried.checkpoint, "zero --pp"
    if not is_pipeline(checkpoint):
        reason = "--pp above 1: the run was no pipeline; if it was Megatron-DeepSpeed's, give --names megatron-pipeline"
        return PossibleTarget(name=name, possible=False, detail=reason)
    most = len({p.layer for p in checkpoint.trained})
    refusals = {n: _refusal(tried, stage, dp=1, pp=n) for n in _STAGES if n <= most}
    works = [n for n, refusal in refusals.items() if refusal is None]
    least = next((n for n in works if n > 1), None)
    if least is None:
        refusal = next((r for n, r in refusals.items() if n > 1 and r is not None), None)
        reason = PossibleTarget(name=name, possible=False, detail=f"the pipeline has {most} layers")
        return reason if refusal is None else tried.impossible(name, refusal)
    sizes = ", ".join(map(str, works))
    detail = f"{sizes} (tried up to {max(refusals)}, stage sizes as by default); stages 1 and bf16"
    return tried.possible(name, detail, f"--to zero --dp 1 --pp {least} --zero-stage {stage.value}")


def _experts(tried: DryRun, stage: ZeroStage) -> list[PossibleTarget]:
    checkpoint, name = tried.checkpoint, "zero --ep"
    counts = list(experts_by_layer(p.fqn for p in checkpoint.trained).values())
    counts += [shape[0] for shape in fuse_experts(checkpoint).values()]
    if not counts:
        return []
    sizes = [n for n in range(1, min(counts) + 1) if _divides(counts, n)]
    least = next((n for n in sizes if n > 1), 1)
    if (refusal := _refusal(tried, stage, dp=least, ep=least)) is not None:
        return [tried.impossible(name, refusal)]
    detail = f"{', '.join(map(str, sizes))}, if it divides --dp"
    return [tried.possible(name, detail, f"--to zero --dp {least} --ep {least} --zero-stage {stage.value}")]


def _divides(counts: Sequence[int], ranks: int) -> bool:
    try:
        require_divisible(counts, ranks, ranks)
    except RequestError:
        return False
    return True

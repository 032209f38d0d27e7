"""The parameters that each model-parallel rank of the target holds, cut from whole ones.

The parameters of a stage are in the order in which `PipelineModule` registers them: first tied modules, then layer by
layer, whatever the source's stages were. The optimizer's groups have the same order.

Source: deepspeed 0.19.8 `runtime/pipe/module.py` (`_build`, `tied_modules`), `runtime/pipe/topology.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reshard.errors import RequestError, printable
from reshard.options import NativeLayout
from reshard_engine.checkpoint import Checkpoint, Parameter
from reshard_engine.formats.deepspeed.facts import facts_of
from reshard_engine.formats.deepspeed.megatron import is_megatron
from reshard_engine.formats.deepspeed.names import TIED
from reshard_engine.formats.deepspeed.writer.native.autoep import fused_experts
from reshard_engine.formats.deepspeed.writer.native.cutting import Cutter
from reshard_engine.formats.deepspeed.writer.native.model import LocalModel
from reshard_engine.formats.deepspeed.writer.native.stages import boundaries
from reshard_engine.formats.deepspeed.writer.native.target import Target
from reshard_engine.pickles.state_dict import KeyPath, name_of


def local_models(checkpoint: Checkpoint, target: Target, cutter: Cutter) -> list[LocalModel]:
    """The model-parallel ranks of the target, in the order of their numbers.

    Raises:
        RequestError: `request.unsatisfiable` if the model cannot be cut for this layout.
    """
    stages, fused = _stages(checkpoint, target.layout), fused_experts(checkpoint)
    buffers = {b.fqn: b.tensor for b in checkpoint.buffers}
    paths = _paths(checkpoint)
    found: list[LocalModel] = []
    for pp, members in enumerate(stages):
        for tp in range(target.layout.tp):
            local = tuple(cutter.local(p, tp) for p in members)
            inside = {p.fqn for p in members}
            found.append(
                LocalModel(
                    pp=pp,
                    tp=tp,
                    parameters=local,
                    layers={p.fqn: p.layer for p in members if p.layer is not None},
                    buffers=buffers,
                    shared={a: o for a, o in checkpoint.shared.items() if o in inside},
                    extra_states=checkpoint.extra_states,
                    paths=paths,
                    fused=fused,
                )
            )
    return found


def is_pipeline(checkpoint: Checkpoint) -> bool:
    """True if the names of parameters give the layers of a pipeline."""
    return any(p.layer is not None for p in checkpoint.trained)


def _stages(checkpoint: Checkpoint, layout: NativeLayout) -> list[list[Parameter]]:
    """The parameters of each pipeline stage, in the order of the stage."""
    everything = [*checkpoint.trained, *checkpoint.frozen]
    if not is_pipeline(checkpoint):
        if layout.pp > 1:
            raise RequestError(
                "request.unsatisfiable",
                f"{layout.pp} pipeline stages, but the parameters' names give no layers: the run was no pipeline",
                fix="--pp 1, or --names megatron-pipeline for a model of Megatron-DeepSpeed",
            )
        return [everything]
    stray = [p.fqn for p in everything if p.layer is None]
    if stray:
        raise RequestError(
            "request.unsatisfiable",
            f"{printable(stray[0])} belongs to no layer of the pipeline",
            fix="write it without a pipeline, for a model without one: --pp 1",
        )
    ordered = sorted(everything, key=lambda p: (not p.fqn.startswith(TIED), 0 if p.fqn.startswith(TIED) else p.layer))
    if layout.pp == 1:
        return [ordered]
    cuts = _boundaries(checkpoint, layout, ordered)
    return [list(_members(ordered, cuts, stage)) for stage in range(layout.pp)]


def _members(ordered: Sequence[Parameter], cuts: Sequence[int], stage: int) -> Iterator[Parameter]:
    last = stage == len(cuts) - 2
    for parameter in ordered:
        assert parameter.layer is not None
        # A tied module is on the last stage too: the embedding is used again as the model's head.
        if cuts[stage] <= parameter.layer < cuts[stage + 1] or (last and parameter.fqn.startswith(TIED)):
            yield parameter


def _boundaries(checkpoint: Checkpoint, layout: NativeLayout, ordered: Sequence[Parameter]) -> list[int]:
    weights: dict[int, int] = {}
    shapes: dict[int, list[object]] = {}
    for parameter in ordered:
        layer = parameter.layer or 0
        size = 1
        for length in parameter.shape:
            size *= length
        cut = parameter.cut is not None and parameter.cut.dim is not None
        if parameter.trained:
            weights[layer] = weights.get(layer, 0) + (size // layout.tp if cut else size)
        shapes.setdefault(layer, []).append((parameter.fqn.partition(".")[2], parameter.shape))
    tied = _is_tied(ordered)
    if layout.partition_method is None:
        stage_layers = facts_of(checkpoint).stage_layers
        if stage_layers and len(stage_layers) == layout.pp:
            # As many stages as before: their layers are the source's.
            first = ",".join(map(str, (0, *stage_layers[1:])))
            layout = layout.model_copy(update={"partition_method": first})
        elif is_megatron(checkpoint):
            layout = layout.model_copy(update={"partition_method": "type:transformer"})
        else:
            raise RequestError(
                "request.invalid",
                f"the layers of the {layout.pp} stages depend on the model's partition_method",
                fix="--partition-method parameters (DeepSpeed's default), or what the model's code says: type:REGEX, "
                f"uniform with --pipeline-layers N (layers without parameters included, at least "
                f"{_layers_named(ordered)}), or each stage's first layer: 0,3,6",
            )
    kinds = {layer: tuple(sorted(map(repr, names))) for layer, names in shapes.items()}
    return boundaries(layout, weights, kinds, tied=tied)


def _is_tied(ordered: Sequence[Parameter]) -> bool:
    return any(p.fqn.startswith(TIED) for p in ordered)


def _layers_named(ordered: Sequence[Parameter]) -> int:
    """The least number of layers. Tied parameters come again, in a layer behind the last one that has a number."""
    return max((p.layer or 0 for p in ordered), default=0) + (2 if _is_tied(ordered) else 1)


def _paths(checkpoint: Checkpoint) -> tuple[KeyPath, ...]:
    """The source's key paths; names that these lack go to the top of the state dict."""
    names = [*(p.fqn for p in checkpoint.parameters), *(b.fqn for b in checkpoint.buffers), *checkpoint.shared]
    known = dict.fromkeys((*names, *checkpoint.extra_states))
    held = facts_of(checkpoint).module_paths or ((name,) for name in checkpoint.module_names)
    found = {name_of(path): path for path in held if name_of(path) in known}
    return (*found.values(), *((name,) for name in known if name not in found))

"""Small checkpoints of model-parallel runs, made by hand: for what is said and refused before any byte moves."""

from __future__ import annotations

from pathlib import Path

from laws.deepspeed_files import Layout
from laws.pipeline_source import TIED, Model, ParallelWriter, Part, Ranks, seeded_model

EXPERTS = "layers.0.moe.deepspeed_moe.experts.deepspeed_experts"
PLAIN = {
    "embed.tokens.weight": ((10, 3), Part("vocabulary", 0)),
    "layers.1.norm.weight": ((3,), Part("whole", 1)),
    "layers.1.qkv.weight": ((12, 3), Part("heads", 1)),
    "layers.1.dense.weight": ((3, 6), Part("row", 1)),
}


def piped_model(blocks: int = 4) -> Model:
    """A pipeline with a tied embedding and so many blocks."""
    shapes: dict[str, tuple[tuple[int, ...], Part]] = {f"{TIED}tokens.weight": ((10, 3), Part("vocabulary", 0))}
    for layer in range(1, blocks + 1):
        shapes[f"{layer}.norm.weight"] = ((3,), Part("whole", layer))
        shapes[f"{layer}.dense.weight"] = ((3, 6), Part("row", layer))
    return seeded_model(shapes, piped=True, layers=blocks + 2, heads=6)


def model_with_experts(experts: int) -> Model:
    """A mixture of so many experts."""
    shapes = {f"{EXPERTS}.{n}.up.weight": ((4, 3), Part("whole", 0)) for n in range(experts)}
    return seeded_model(shapes, piped=False, layers=1, told=False)


def write_source(folder: Path, model: Model, *, tp: int = 1, dp: int = 2, first: tuple[int, ...] = (0,)) -> Path:
    """The files of a run of the model on so many ranks."""
    ParallelWriter(model, Ranks(tp, first, Layout(1, dp)), folder).write()
    return folder

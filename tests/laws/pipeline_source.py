"""Model-parallel runs as the files that they save: a small model of every kind of cut, over tensor, pipeline and data.

Each model-parallel rank is a run of its own with its own parts, so that `deepspeed_files`, which real runs proved,
writes its files; what belongs to all ranks together is put in here. Parts are cut with torch, not with the engine.

Source: deepspeed 0.19.8 `runtime/pipe/module.py` (tied modules come first; `save_state_dict`: one file for each layer
and tensor-parallel rank, tied ones in their first layer's), `runtime/pipe/engine.py` (`module_state_dict`),
`checkpoint/universal_checkpoint.py` (`SubparamShape`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from laws.deepspeed_files import (
    VERSION,
    CheckpointWriter,
    Flat,
    Layout,
    flat_groups,
    sub_groups,
)
from laws.torch_values import bits_of, tensor_of, torch_value
from reshard_engine.testing.logical import Bits, LogicalParameter, LogicalState

Kind = Literal["whole", "column", "row", "two", "sections", "grid", "vocabulary", "heads"]
TIED = "tied_modules.embed."
ANY = r"(\d+|tied_modules\.embed|layers\.\d+|embed)\."


@dataclass(frozen=True)
class Part:
    """How one name of the model is cut.

    Attributes:
        kind: the rule.
        sections: lengths along the cut dimension, for `sections` and `grid`.
        layer: pipeline layer; of tied ones the first.
    """

    kind: Kind
    layer: int
    sections: tuple[int, ...] = ()


@dataclass(frozen=True)
class Ranks:
    """Model-parallel ranks of a run.

    Attributes:
        tp: tensor-parallel ranks.
        first: each pipeline stage's first layer; `(0,)` without stages.
        data: how each of them was cut over data-parallel ranks and saved.
    """

    tp: int
    first: tuple[int, ...]
    data: Layout

    @property
    def pp(self) -> int:
        """Pipeline stages."""
        return len(self.first)

    def __str__(self) -> str:
        return f"tp{self.tp}pp{self.pp}dp{self.data.world} stage {self.data.stage}"


@dataclass(frozen=True)
class Model:
    """A whole model with its cuts.

    Attributes:
        state: everything that it holds, whole.
        parts: the cut of each parameter.
        piped: whether its names are those of a `PipelineModule`.
        layers: of the pipeline, those without parameters and the tied head included.
        pad_to: vocabularies are padded to a multiple of it times the tensor-parallel ranks.
        told: whether the checkpoint says how parameters are cut; else the request has to.
    """

    state: LogicalState
    parts: Mapping[str, Part]
    piped: bool
    layers: int
    pad_to: int
    told: bool
    rules: Mapping[str, Any] = field(default_factory=dict)

    @property
    def vocabulary(self) -> int:
        """Rows of data; 0 without an embedding."""
        return next((self.state.parameter(n).shape[0] for n, p in self.parts.items() if p.kind == "vocabulary"), 0)

    def padded_rows(self, tp: int) -> int:
        """Rows over all ranks."""
        unit = self.pad_to * tp
        return -(-self.vocabulary // unit) * unit

    def members(self, ranks: Ranks, stage: int) -> list[LogicalParameter]:
        """A stage's parameters in the order of its optimizer: tied ones first, then layer by layer."""
        if not self.piped:
            return list(self.state.parameters)
        ends = (*ranks.first[1:], self.layers)
        held = range(ranks.first[stage], ends[stage])
        tied = [p for p in self.state.parameters if p.fqn.startswith(TIED)]
        mine = tied if 0 in held or self.layers - 1 in held else []
        return mine + [p for p in self.state.parameters if p not in tied and self.parts[p.fqn].layer in held]


def cut(tensor: torch.Tensor, part: Part, tp: int, rank: int, *, rows: int) -> torch.Tensor:
    """A tensor-parallel rank's part of a whole tensor; `rows` of a vocabulary with padding."""
    kind = part.kind
    if kind == "whole":
        return tensor
    if kind == "row":
        return tensor.chunk(tp, 1)[rank]
    if kind == "two":
        return torch.cat([half.chunk(tp)[rank] for half in tensor.chunk(2)])
    if kind == "sections":
        return torch.cat([section.chunk(tp)[rank] for section in tensor.split(part.sections)])
    if kind == "grid":
        fine = tensor.reshape(-1, sum(part.sections), *tensor.shape[1:])
        parts = [section.chunk(tp, 1)[rank] for section in fine.split(part.sections, 1)]
        return torch.cat(parts, 1).reshape(-1, *tensor.shape[1:])
    if kind == "vocabulary":
        padding = torch.zeros(rows - len(tensor), *tensor.shape[1:], dtype=tensor.dtype)
        tensor = torch.cat([tensor, padding])
    return tensor.chunk(tp)[rank]


def rules_of(parts: Mapping[str, Part], shapes: Mapping[str, tuple[int, ...]], heads: int) -> dict[str, Any]:
    """The rules by the keys of `universal_checkpoint_info`, one pattern for each kind of name."""

    def named(*kinds: Kind) -> list[str]:
        tails = dict.fromkeys(_tail(n) for n, p in parts.items() if p.kind in kinds)
        return [ANY + t.replace(".", r"\.") + "$" for t in tails]

    rules: dict[str, Any] = {
        "tp_replicated_parameter_patterns": named("whole"),
        "parameter_with_row_parallelism_patterns": named("row"),
        "parameter_with_2_sub_params_cat_dim_0": named("two"),
        "vocabulary_parameter_patterns": named("vocabulary"),
        "original_vocab_size": next(shapes[n][0] for n, p in parts.items() if p.kind == "vocabulary"),
        "parameter_with_sub_params": [],
    }
    seen: set[str] = set()
    for name, part in parts.items():
        if part.kind in ("sections", "grid") and _tail(name) not in seen:
            seen.add(_tail(name))
            width = sum(part.sections)
            rest: tuple[Any, ...] = (part.sections, *shapes[name][1:])
            shape = (shapes[name][0] // width, *rest) if part.kind == "grid" else rest
            entry = {
                "patterns": [ANY + _tail(name).replace(".", r"\.") + "$"],
                "shape": shape,
                "partition_dim": int(part.kind == "grid"),
            }
            rules["parameter_with_sub_params"].append(entry)
    if named("heads"):
        rules["parameter_with_heads"] = [{"patterns": named("heads"), "heads": heads}]
    return rules


def _tail(name: str) -> str:
    for prefix in (TIED, "embed."):
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    head, _, rest = name.partition(".")
    return rest.partition(".")[2] if head == "layers" else rest


def local_state(model: Model, ranks: Ranks, stage: int, tp: int) -> LogicalState:
    """What one model-parallel rank holds, as a run of its own."""
    rows = model.padded_rows(ranks.tp)

    def mine(bits: Bits, name: str) -> Bits:
        return bits_of(cut(tensor_of(bits), model.parts[name], ranks.tp, tp, rows=rows))

    parameters: list[LogicalParameter] = []
    for whole in model.members(ranks, stage):
        weight = mine(whole.weight, whole.fqn) if whole.weight is not None else None
        states = {key: mine(bits, whole.fqn) for key, bits in whole.states.items()}
        shape = (weight or next(iter(states.values()))).shape
        parameters.append(replace(whole, shape=shape, weight=weight, states=states))
    names = {p.fqn for p in parameters}
    state = model.state
    return replace(
        state,
        parameters=tuple(parameters),
        order=tuple(n for n in state.order if n in names or n in state.buffers or state.aliases.get(n) in names),
        aliases={a: o for a, o in state.aliases.items() if o in names},
    )


class ParallelWriter:
    """The files of all ranks of a run."""

    def __init__(self, model: Model, ranks: Ranks, directory: Path) -> None:
        """For an empty directory."""
        self._model, self._ranks, self._directory = model, ranks, directory

    def write(self) -> None:
        """`latest`, and the tag with the files of every rank."""
        tag = self._ranks.data.tag
        (self._directory / tag).mkdir(parents=True)
        (self._directory / "latest").write_text(tag)
        for stage in range(self._ranks.pp):
            for tp in range(self._ranks.tp):
                self._write_rank(stage, tp)

    def _write_rank(self, stage: int, tp: int) -> None:
        ranks, layout = self._ranks, self._ranks.data
        state = local_state(self._model, ranks, stage, tp)
        writer = CheckpointWriter(state, layout, self._directory / layout.tag)
        flats = sub_groups(state, layout) if layout.stage == 3 else flat_groups(state, layout)
        number = stage * ranks.tp + tp
        prefix = "bf16_" if state.dtype == "bfloat16" else ""
        for rank in range(layout.world):
            inner = writer.zero3(rank, flats) if layout.stage == 3 else writer.zero12(rank, flats)
            config = torch_value(state.values["ds_config"])
            outer = {"optimizer_state_dict": inner, "ds_config": config, "ds_version": VERSION}
            writer.save(outer, f"{prefix}zero_pp_rank_{rank}_mp_rank_{number:02d}_optim_states.pt")
            if rank == 0 or layout.stage == 3:
                sharded = f"zero_pp_rank_{rank}_" if layout.stage == 3 else ""
                value = self._model_states(writer, rank, flats)
                writer.save(value, f"{sharded}mp_rank_{number:02d}_model_states.pt")
        if self._model.piped:
            self._write_layers(writer, state, tp)

    def _model_states(self, writer: CheckpointWriter, rank: int, flats: Sequence[Flat]) -> dict[str, Any]:
        ranks = self._ranks
        found = writer.model_states(rank, flats, None)
        found["mp_world_size"] = ranks.tp * ranks.pp
        found["checkpoint_parallel_dimensions"] = {"pp_degree": ranks.pp, "tp_degree": ranks.tp}
        if self._model.piped:
            found["module"] = None
        if self._model.told:
            info = {"universal_checkpoint_version": 0.3, "padded_vocab_size": self._model.padded_rows(ranks.tp)}
            found["universal_checkpoint_info"] = info | dict(self._model.rules)
        return found

    def _write_layers(self, writer: CheckpointWriter, state: LogicalState, tp: int) -> None:
        layers: dict[int, OrderedDict[str, torch.Tensor]] = {}
        for parameter in state.parameters:
            layer = self._model.parts[parameter.fqn].layer
            if parameter.weight is None:
                raise AssertionError("cases hold every weight")
            layers.setdefault(layer, OrderedDict())[_tail(parameter.fqn)] = tensor_of(parameter.weight)
        for layer, weights in layers.items():
            writer.save(weights, f"layer_{layer:02d}-model_{tp:02d}-model_states.pt")


def seeded_model(
    shapes: Mapping[str, tuple[tuple[int, ...], Part]],
    *,
    piped: bool,
    layers: int,
    told: bool = True,
    pad_to: int = 1,
    heads: int = 1,
    dtype: str = "float32",
) -> Model:
    """A model of these parameters with one param group, its numbers drawn from a fixed seed."""
    generator = torch.Generator().manual_seed(7)
    parameters: list[LogicalParameter] = []
    for name, (shape, _) in shapes.items():
        states = {key: bits_of(torch.randn(shape, generator=generator)) for key in ("fp32", "exp_avg", "exp_avg_sq")}
        weight = bits_of(tensor_of(states["fp32"]).to(getattr(torch, dtype)))
        parameters.append(LogicalParameter(name, shape, 0, weight, states))
    parts = {name: part for name, (_, part) in shapes.items()}
    config: dict[str, Any] = {"zero_optimization": {"stage": 1}, "gradient_clipping": 0.0}
    if dtype == "bfloat16":
        config["bf16"] = {"enabled": True}
    counters = {"skipped_steps": 0, "global_steps": 3, "global_samples": 12, "lr_scheduler": None}
    state = LogicalState(
        dtype,
        tuple(parameters),
        {},
        {},
        tuple(shapes),
        ({"lr": 0.5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0},),
        (3,),
        {**counters, "ds_config": config},
        {"clip_grad": 0.0},
    )
    rules: dict[str, Any] = {}
    if any(p.kind == "vocabulary" for p in parts.values()):
        rules = rules_of(parts, {name: shape for name, (shape, _) in shapes.items()}, heads)
    return Model(state, parts, piped, layers, pad_to, told, rules)

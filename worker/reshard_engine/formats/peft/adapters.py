"""Merges a LoRA run into the plain model: weights with their adapters merged, and names without PEFT's parts.

The result is that of `PeftModel.merge_and_unload`, computed while the bytes are written.

Source: peft 0.21.2 `tuners/tuners_utils.py` (`_unload_and_optionally_merge`: weights change in place, so that what is
tied to an adapted weight changes with it; where a saved module left its original, `tie_word_embeddings` becomes false).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set as AbstractSet
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any, cast

import numpy as np
import re2

from reshard.errors import RequestError, SourceError, listed, printable
from reshard.models.jobs import ConvertRequest, NotCarried
from reshard.options import PeftOptions
from reshard_engine.checkpoint import Agreement, Buffer, Checkpoint, Parameter
from reshard_engine.formats.peft.adapter_config import (
    CONFIG,
    AdapterConfig,
    adapter_config,
    assumptions,
    not_lora,
    refuse_other_rules,
)
from reshard_engine.formats.peft.names import PeftRun, lacks_base, own_name, peft_run, plain_name, with_base
from reshard_engine.tensors.dtypes import FLOAT32
from reshard_engine.tensors.shard_map import LogicalTensor, ShardMap
from reshard_engine.tensors.views import LoraBias, LoraMerge, Merged, NewRows, operands

# Makes the rules that merge the factors of a LoRA adapter into a weight: scale, orientation, and refusals.
#
# Source: peft 0.21.2 `tuners/lora/layer.py` (`scaling`, `get_delta_weight`, `transpose`, `merge`, `dispatch_default`:
# the layer's type decides `fan_in_fan_out`, and the configuration keeps what the last layer said) and `utils/other.py`
# (`get_pattern_key`).

_RE2: Any = re2
Factors = Mapping[str, Parameter]
"""Parameters of one adapted module: `lora_A`, `lora_B`, `lora_embedding_A`, ..., `lora_B.bias`."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """The scales of a configuration, and the orientation of its matrices."""

    alpha: float
    by_module: Mapping[str, float]
    by_root: bool
    transposed: bool | None
    """The orientation of square matrices, whose shape does not show it; None if it is unknown."""

    def of(self, module: str, rank: int) -> float:
        """The factor of B A for a module, given by its name without PEFT's prefix."""
        alpha = self.alpha
        for pattern, value in self.by_module.items():
            if _RE2.fullmatch(rf"(.*\.)?({pattern})", module) is not None:
                alpha = value
                break
        return alpha / (sqrt(rank) if self.by_root else rank)


def scaling_of(config: AdapterConfig | None, options: PeftOptions, seen: Iterable[bool | None]) -> Scaling:
    """The scaling of a configuration, or of a scale in the request.

    Args:
        config: The run's, if there is one.
        options: Have the scale if there is no configuration.
        seen: For each matrix, True if its shape shows that it is stored transposed; None if the shape does not show it.

    Raises:
        SourceError: `checkpoint.malformed` if the configuration has no valid scales.
    """
    known = {t for t in seen if t is not None}
    if config is None:
        # Layers of transformers are nn.Linear or, as in GPT-2, all Conv1D.
        transposed = True in known if len(known) < 2 else None
        return Scaling(options.lora_alpha or 0.0, {}, by_root=options.rslora, transposed=transposed)
    facts = config.facts
    patterns = cast("dict[str, float]", facts.get("alpha_pattern") or {})
    by_module = {pattern: float(value) for pattern, value in patterns.items()}
    for pattern in by_module:
        try:
            _RE2.compile(pattern)
        except _RE2.error:
            raise not_lora(f"`alpha_pattern` has {printable(pattern)!r}, which is not a regular expression") from None
    if (said := facts.get("lora_alpha")) is None:
        raise not_lora("it has no `lora_alpha`")
    by_root, transposed = (bool(facts.get(k)) for k in ("use_rslora", "fan_in_fan_out"))
    return Scaling(float(said), by_module, by_root=by_root, transposed=transposed if known <= {transposed} else None)


def transposed_by_shape(shape: tuple[int, ...], factors: Factors) -> bool | None:
    """True if a matrix is stored `[in, out]`, as in Conv1D and embeddings; None if its shape does not show it."""
    a, b = factors.get("lora_A"), factors.get("lora_B")
    if a is None or b is None or not len(shape) == len(a.shape) == len(b.shape) == 2:
        return None
    straight, turned = (b.shape[0], a.shape[1]), (a.shape[1], b.shape[0])
    return None if straight == turned else shape == turned if shape in (straight, turned) else None


def merge_of(name: str, base: Parameter, factors: Factors, scaling: Scaling) -> LoraMerge:
    """The rule that merges a module's weight.

    Args:
        name: The weight's name in the model without PEFT.
        base: The base weight.
        factors: The factors that adapt it.
        scaling: The scaling of the adapter.

    Raises:
        RequestError: `request.unsatisfiable` for adapters that are merged by another rule.
        SourceError: `checkpoint.malformed` if shapes contradict one another.
    """
    embedding = "lora_embedding_A" in factors
    a, b = (factors.get(f"lora_embedding_{k}" if embedding else f"lora_{k}") for k in "AB")
    if a is None or b is None or not len(base.shape) == len(a.shape) == len(b.shape) == 2:
        raise unmergeable(name, "a layer that is not a matrix with two factors")
    (rank, inputs), (outputs, other) = a.shape, b.shape
    by_shape = transposed_by_shape(base.shape, factors)
    transposed = True if embedding else scaling.transposed if by_shape is None else by_shape
    if transposed is None:
        raise unmergeable(name, "square, beside matrices of both orientations (nn.Linear and Conv1D)")
    if base.shape != ((inputs, outputs) if transposed else (outputs, inputs)) or rank != other:
        raise SourceError(
            "checkpoint.malformed",
            f"{printable(name)} is {base.shape}, its factors are {a.shape} and {b.shape}",
            fix="name the model that the run started from, with its added tokens: --base, --model-files",
        )
    magnitude = factors.get("lora_magnitude_vector")
    if magnitude is not None and (transposed or magnitude.shape != (outputs,)):
        raise unmergeable(name, "a weight whose magnitudes are not one for each row (DoRA of Conv1D or embeddings)")
    left, right = (a, b) if transposed else (b, a)
    scale = scaling.of(name.removesuffix(".weight"), rank)
    length = None if magnitude is None else magnitude.value()
    return LoraMerge(base.value(), left.value(), right.value(), scale, transposed, length)


def shift_of(name: str, base: Parameter, factors: Factors, scaling: Scaling) -> LoraBias:
    """The rule that merges a module's bias with the bias of its adapter (`lora_bias`).

    Raises:
        RequestError: `request.unsatisfiable` if the adapted layer is not linear.
        SourceError: `checkpoint.malformed` if shapes contradict one another.
    """
    a, own = factors.get("lora_A"), factors["lora_B.bias"]
    if a is None:
        raise unmergeable(name, "a bias of another adapter than a linear layer's")
    if base.shape != own.shape or len(base.shape) != 1:
        raise SourceError("checkpoint.malformed", f"{printable(name)} is {base.shape}, its adapter's is {own.shape}")
    return LoraBias(base.value(), own.value(), scaling.of(name.removesuffix(".bias"), a.shape[0]))


def unmergeable(fqn: str, why: str) -> RequestError:
    """The error for an adapter that is merged by another rule."""
    return RequestError(
        "request.unsatisfiable",
        f"{printable(fqn)} is {why}: no rule merges it here",
        fix="--to peft, then PEFT's merge_and_unload",
    )


# Joins the files of the base model and those of a run into one shard map.


def with_files_of(checkpoint: Checkpoint, base: Checkpoint) -> tuple[Checkpoint, list[Parameter], Mapping[str, str]]:
    """Add another checkpoint's files and tensors to a checkpoint's map; also returns its parameters and tied names.

    Parameters keep their own names and have the numbers that their tensors have in the joined map.
    """
    first, file = len(checkpoint.shard_map.tensors), len(checkpoint.files)
    files = tuple(replace(f, name=f"base/{f.name}") for f in base.files)
    joined = replace(
        checkpoint,
        files=(*checkpoint.files, *files),
        shard_map=joined_maps(checkpoint.shard_map, base.shard_map, first_file=file),
        warnings=(*checkpoint.warnings, *(f"base model: {w}" for w in base.warnings)),
    )
    weights = [replace(p, weight=p.value() + first) for p in base.parameters]
    return joined, weights, base.shared


def joined_maps(one: ShardMap, other: ShardMap, *, first_file: int) -> ShardMap:
    """Join two maps; the tensors of the second are numbered after those of the first.

    Args:
        one: The first map.
        other: The second map; files hold each of its tensors whole: none is derived.
        first_file: Number of the other's first file.

    Raises:
        ValueError: The second map has tensors that are computed from others.
    """
    if other.derived:
        raise ValueError("tensors that are made of others")
    strides = np.where(other.strides_of >= 0, other.strides_of + len(one.strides), -1)
    return replace(
        one,
        tensors=(*one.tensors, *other.tensors),
        tensor=np.concatenate([one.tensor, other.tensor + len(one.tensors)], dtype=np.int32),
        begin=np.concatenate([one.begin, other.begin]),
        end=np.concatenate([one.end, other.end]),
        file=np.concatenate([one.file, other.file + first_file], dtype=np.int32),
        offset=np.concatenate([one.offset, other.offset]),
        strides_of=np.concatenate([one.strides_of, strides], dtype=np.int32),
        strides=(*one.strides, *other.strides),
    )


# The checkpoint of the plain model.


def merged(checkpoint: Checkpoint, request: ConvertRequest, base: Checkpoint | None) -> Checkpoint:
    """The checkpoint's weights with an adapter merged, under the names of the model without PEFT.

    Args:
        checkpoint: The run.
        request: Names the adapter, and gives its scale if no configuration does.
        base: Weights of the base model, for a run that was saved without its frozen parameters.

    Raises:
        RequestError: `request.unsatisfiable` if there is no LoRA adapter, several and none
            named, an unknown scale, an adapter that is merged by another rule, or no base weights.
        SourceError: `checkpoint.malformed` if shapes or the configuration contradict one another.
    """
    run = peft_run(checkpoint, request.options.peft.adapter)
    config = adapter_config(checkpoint, request)
    if config is not None:
        refuse_other_rules(config)
    checkpoint = _on_base(checkpoint, run, base, config)
    rules, changed = _rules(run, config, request), dict[str, int]()
    first = len(checkpoint.shard_map.tensors)
    tensors: list[tuple[LogicalTensor, Merged]] = []
    for number, (place, (name, rule)) in enumerate(rules.items()):
        tensors.append((LogicalTensor(name, "weight", FLOAT32, run.values[place].shape), rule))
        changed[place] = first + number
    parameters, shared = _named(run, changed)
    used = {p.value() for p in parameters} | {t for _, rule in rules.values() for t in operands(rule)}
    # The target, manifests and reports use the names of the plain model.
    names = {p.value(): p.fqn for p in reversed(parameters)} | {t: n for n, t in run.buffers.items()}
    called = tuple(replace(t, fqn=names.get(i, t.fqn)) for i, t in enumerate(checkpoint.shard_map.tensors))
    model = replace(
        checkpoint,
        parameters=tuple(parameters),
        buffers=tuple(Buffer(name, tensor) for name, tensor in run.buffers.items()),
        shared=shared,
        optimizer=None,
        extra_states={plain_name(n): node for n, node in checkpoint.extra_states.items()},
        not_carried=(*checkpoint.not_carried, *_unused(checkpoint, used)),
        warnings=(*checkpoint.warnings, *assumptions(request), *_warnings(run, rules)),
        shard_map=replace(checkpoint.shard_map, tensors=called).with_derived(tensors),
    )
    return replace(model, unties=bool(run.untied))


def _unused(checkpoint: Checkpoint, used: AbstractSet[int]) -> Iterator[NotCarried]:
    """The optimizer, and parameters that are in no merged weight: other adapters, replaced originals."""
    if checkpoint.optimizer is not None:
        yield NotCarried(path="optimizer", reason="weights hold no training state")
    for parameter in checkpoint.parameters:
        if parameter.best not in used and parameter.weight not in used:
            yield NotCarried(path=printable(f"module.{parameter.fqn}"), reason="no part of the merged model")


def _on_base(checkpoint: Checkpoint, run: PeftRun, base: Checkpoint | None, config: AdapterConfig | None) -> Checkpoint:
    """The checkpoint with the base model's files, if the run needs them."""
    missing = run.missing
    if base is None and missing and not lacks_base(checkpoint):
        raise unmergeable(missing[0], "adapted, and stored under another name (MultiheadAttention, target_parameters)")
    if base is None and missing:
        raise RequestError(
            "request.unsatisfiable",
            f"the base model's weights are not in the checkpoint ({len(missing)} that the adapter needs: "
            f"{listed(missing, 3)}): it was saved without its frozen parameters",
            fix="--base DIR: the base model's safetensors or pytorch_model.bin, or its directory in the hub's cache",
        )
    if base is None:
        return checkpoint
    if not lacks_base(checkpoint):
        raise RequestError(
            "request.invalid",
            "--base is for checkpoints without base weights: this one has its own",
            fix="leave it out",
        )
    if config is not None and config.changed_base is not None:
        raise RequestError(
            "request.unsatisfiable",
            f"{CONFIG} says init_lora_weights: {config.changed_base}, which changed the base model's weights before "
            "training: those of --base are not what was trained",
            fix="save the checkpoint with its frozen parameters, or --to peft, then PEFT's merge_and_unload",
        )
    joined, weights, ties = with_files_of(checkpoint, base)
    alike = with_base(run, {w.fqn: w for w in weights if w.fqn not in run.buffers}, ties)
    numbers = {w.fqn: w.value() for w in weights}
    agreements = [Agreement(n, "weight", numbers[o], numbers[n], "a name that it is tied to") for n, o, _ in alike]
    return replace(joined, agreements=(*joined.agreements, *agreements))


def _rules(run: PeftRun, config: AdapterConfig | None, request: ConvertRequest) -> dict[str, tuple[str, Merged]]:
    """For each place with an adapter: the name of its adapted weight, and the rule that merges it."""
    shapes = [transposed_by_shape(run.values[run.means[f"{m}.weight"]].shape, f) for m, f in run.factors.items()]
    if config is None:
        shapes += _seen(run)
    scaling = scaling_of(config, request.options.peft, shapes)
    found: dict[str, tuple[str, Merged]] = {}
    for name, module in run.adapted.items():
        place = run.means[name]
        if place in found:
            raise unmergeable(name, f"tied to {printable(found[place][0])}, which has an adapter too")
        if module in run.factors and module in run.tokens:
            raise unmergeable(name, "a weight with two adapters")
        found[place] = (name, _rule(run, name, module, (config, scaling)))
    return found


def _rule(run: PeftRun, name: str, module: str, said: tuple[AdapterConfig | None, Scaling]) -> Merged:
    base, (config, scaling) = run.values[run.means[name]], said
    if name in run.saved:
        raise unmergeable(name, "saved whole and adapted")
    if module in run.tokens:
        return _new_rows(name, base, run.tokens[module], config)
    if name.endswith(".bias"):
        return shift_of(name, base, run.factors[module], scaling)
    return merge_of(name, base, run.factors[module], scaling)


def _seen(run: PeftRun) -> list[bool | None]:
    """The orientation of each matrix that has a bias: the bias has one element for each output."""
    found: list[bool | None] = []
    for name, place in run.means.items():
        bias = run.values.get(run.means.get(f"{name.removesuffix('.weight')}.bias", ""))
        shape = run.values[place].shape
        if name.endswith(".weight") and bias is not None and len(shape) == 2 and shape[0] != shape[1]:
            found.append(bias.shape == shape[1:])
    return found


def _new_rows(name: str, base: Parameter, tokens: Parameter, config: AdapterConfig | None) -> NewRows:
    """The rule that puts trained tokens into an embedding.

    Raises:
        RequestError: `request.unsatisfiable` if the row numbers are unknown.
        SourceError: `checkpoint.malformed` if they do not match the configuration.
    """
    said: Any = None if config is None else config.facts.get("trainable_token_indices")
    if isinstance(said, dict):
        module, by_module = name.removesuffix(".weight"), cast("dict[str, Any]", said)
        said = next((v for k, v in by_module.items() if module == k or module.endswith(f".{k}")), None)
    if said is None:
        raise RequestError(
            "request.unsatisfiable",
            f"it is unknown which {tokens.shape[0]} rows of {printable(name)} were trained",
            fix=f"--model-files DIR with the run's {CONFIG} (`trainable_token_indices`)",
        )
    rows = cast("list[Any]", said) if isinstance(said, list) else [said]
    if not all(type(r) is int and 0 <= r < base.shape[0] for r in rows) or len(set(rows)) != len(rows):
        raise SourceError(
            "checkpoint.malformed", f"{CONFIG}: `trainable_token_indices` are not rows of {base.shape[0]}"
        )
    if tokens.shape != (len(rows), *base.shape[1:]) or len(base.shape) != 2:
        raise SourceError(
            "checkpoint.malformed",
            f"{CONFIG}: `trainable_token_indices` are {len(rows)}, {printable(name)} is {base.shape} "
            f"and its trained rows are {tokens.shape}",
            fix=f"name the directory with the run's own {CONFIG}: --model-files DIR",
        )
    return NewRows(base.value(), tokens.value(), tuple(rows))


def _named(run: PeftRun, changed: Mapping[str, int]) -> tuple[list[Parameter], dict[str, str]]:
    """Parameters of the plain model, and those that are tied to others.

    If only some of several tied names were trained apart, each of the others gets a copy of the weight: a
    configuration without ties would leave them empty.
    """
    apart = {n for names in run.untied for n in names}
    owners: dict[str, str] = {}
    for name, place in run.means.items():
        if place not in owners or name == own_name(place):
            owners[place] = name
    parameters: list[Parameter] = []
    shared: dict[str, str] = {}
    for name, place in run.means.items():
        if name in run.buffers:
            continue
        value = run.values[place]
        if owners[place] != name and name not in apart:
            shared[name] = owners[place]
            continue
        parameters.append(Parameter(name, value.shape, 0, changed[place] if place in changed else value.value()))
    return parameters, shared


def _warnings(run: PeftRun, rules: Mapping[str, tuple[str, Merged]]) -> list[str]:
    found = [
        f"{listed(names)} were tied before training and are not now: tie_word_embeddings must be false in config.json"
        for names in run.untied
    ]
    for place, (name, rule) in rules.items():
        others = [n for n, p in run.means.items() if p == place and n != name]
        if others and not isinstance(rule, NewRows):
            found.append(
                f"{printable(name)} is merged, and {listed(others)} with it, which is tied to it: as PEFT's "
                "merge_and_unload does, and other than the run computed"
            )
    return found

"""Runs of Megatron-DeepSpeed that go on in Megatron-core, and back: names, arguments, param groups and schedule.

Both compute the same GPT and Llama models from the same matrices. Only the order of the rows of `query_key_value`
depends on the version of Megatron-DeepSpeed, which no file says:

- until December 2024, for each group its queries, its key and its value, as Megatron-core has them;
- since then, `[Q | K | V]` in each tensor-parallel slice, which a file may declare as sections.

Sections prove the second. Otherwise the user says it, by `--hf-rules`; on the way back always, as no file says which
version loads the target. Gate and up lie as `[gate; up]` in both.

Source: Megatron-DeepSpeed `megatron/model/transformer.py` (`ParallelAttention.split_tensor`, which older versions
call, and the slices of `forward`, which newer ones take instead; `ParallelMLP`: `swiglu`),
`megatron/model/gpt_model.py` (`GPTModelPipe`: the numbers of layers), `megatron/optimizer/__init__.py`
(`_get_params_for_weight_decay_optimization`),
`megatron/optimizer_param_scheduler.py` (`state_dict`, `load_state_dict`, `get_lr`), `megatron/checkpointing.py`
(`save_checkpoint`, `load_checkpoint`, `check_checkpoint_args`); megatron-core 0.16.1 `transformer/attention.py`
(`get_query_key_value_tensors`), `transformer/mlp.py`, `optimizer/__init__.py` (`_get_param_groups`),
`optimizer_param_scheduler.py` (`load_state_dict`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from struct import pack, unpack
from typing import Any

from reshard.choices import NameScheme, TargetFormat
from reshard.errors import RequestError, listed, printable
from reshard.models.jobs import ConvertRequest
from reshard.options import MegatronOptions
from reshard_engine.checkpoint import Checkpoint, LossScale, OptimizerState, Parameter, ParamGroup, Scalar
from reshard_engine.formats.carried import named, of_the_format
from reshard_engine.formats.megatron.common import SCALER, SCALER_REASON, CommonState
from reshard_engine.formats.megatron.huggingface.renaming import Renaming, attention_of
from reshard_engine.formats.megatron.huggingface.rules import (
    Attention,
    Family,
    Matched,
    Rows,
    Rule,
    UnmappedError,
    contradicted,
    of_hugging_face,
    of_megatron,
    spans,
)
from reshard_engine.formats.megatron.model import MegatronFacts
from reshard_engine.formats.megatron.writer import said_args
from reshard_engine.pickles.nodes import (
    Global,
    Node,
    PList,
    PLiteral,
    PObject,
    PTensorRef,
    PTuple,
    is_mapping,
    mapping_items,
    mapping_of,
    namespace_items,
    sequence_items,
)
from reshard_engine.tensors.cuts import Cut
from reshard_engine.tensors.dtypes import FLOAT32

GROUPED, SPLIT = "megatron-deepspeed-grouped", "megatron-deepspeed-split"
ORDERS = (GROUPED, SPLIT)
"""The words of `--hf-rules` for the rows of query, key and value."""
_PLAIN, _LAYERS = "language_model.", "language_model.encoder.layers."
_ATTENTION = re.compile(
    r"(?:[1-9]\d{0,5}|language_model\.encoder\.layers\.\d{1,6})\.self_attention\.query_key_value\..+"
)
_BLOCK = re.compile(r"([1-9]\d{0,5})\.((?:input_layernorm|self_attention|post_attention_layernorm|mlp)\..+)")
_EMBEDDING = re.compile(r"(?:tied_modules\.embed|1)\.((?:word|position)_embeddings\.weight)")
_NORM = re.compile(r"([1-9]\d{0,5})\.(weight|bias)")
_HEAD = re.compile(r"([1-9]\d{0,5})\.lm_head\.weight")
_FIRST_BLOCK = 2
"""The pipeline's layer of the first block: others cast and embed."""
_SAME = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "max_position_embeddings",
    "seq_length", "make_vocab_size_divisible_by", "apply_layernorm_1p", "openai_gelu", "squared_relu", "swiglu",
    "untie_embeddings_and_output_weights", "add_bias_linear", "apply_residual_connection_post_layernorm",
    "attention_dropout", "hidden_dropout", "rotary_percent", "init_method_std", "bf16", "fp16", "optimizer", "lr",
    "min_lr", "lr_decay_style", "weight_decay", "start_weight_decay", "end_weight_decay", "weight_decay_incr_style",
    "clip_grad", "adam_beta1", "adam_beta2", "adam_eps", "micro_batch_size", "global_batch_size", "seed",
    "transformer_impl", "bias_gelu_fusion", "tensor_model_parallel_size", "pipeline_model_parallel_size",
)  # fmt: skip
"""Arguments that mean the same in both."""
_NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
_SCHEDULE = (
    "max_lr", "lr_warmup_steps", "num_steps", "lr_decay_style", "lr_decay_steps", "min_lr", "start_wd", "end_wd",
    "wd_incr_style", "wd_incr_steps",
)  # fmt: skip
_MOMENTS = {"exp_avg", "exp_avg_sq"}
_WEIGHTS = "--to safetensors takes the weights, which --to megatron takes then"
_BELOW_STAGE_3 = (
    "if the run was at ZeRO-3, --to universal first: it has the param groups that Megatron-DeepSpeed makes below "
    f"ZeRO-3; or {_WEIGHTS}"
)
_OTHER = "Megatron-core has no place for it"


_VERSIONS = "Megatron-DeepSpeed since December 2024 has all queries, all keys and all values, and before them by group"
_SAY_ORDER = f"--hf-rules {SPLIT} for a newer version, --hf-rules {GROUPED} before"


def is_megatron_deepspeed(checkpoint: Checkpoint, request: ConvertRequest) -> bool:
    """True if `renamed_from_deepspeed` is to rename it: the request asks for it, and its names are such."""
    said = request.options.of(MegatronOptions).hf_rules
    asked = request.names is NameScheme.MEGATRON_CORE and (said is None or said in ORDERS)
    return asked and any(_ATTENTION.fullmatch(p.fqn) for p in checkpoint.parameters)


def renamed_from_deepspeed(checkpoint: Checkpoint, request: ConvertRequest) -> Checkpoint:
    """The checkpoint under the names of Megatron-core, with the facts of such a run for `--to megatron`.

    Raises:
        RequestError: `request.unsatisfiable` for a name that Megatron-core does not have, an order of rows or an
            argument that nothing says, or an optimizer that Megatron-core would group in another way.
    """
    if request.to in (TargetFormat.ZERO, TargetFormat.UNIVERSAL):
        text = f"--names megatron-core: {request.to} holds the names of Megatron-DeepSpeed"
        raise RequestError("request.invalid", text, fix="leave --names out")
    options = request.options.of(MegatronOptions)
    own, said = namespace_items(checkpoint.client_state.get("args")), said_args(options.megatron_args)
    order = _order(checkpoint, options.hf_rules)
    names = _without_pipeline(p.fqn for p in checkpoint.parameters)
    names |= _without_pipeline((b.fqn for b in checkpoint.buffers), len(_blocks(names)))
    try:
        matched, _ = of_hugging_face(_family(order), names)
    except UnmappedError as error:
        text = f"the names are not those of a GPT or Llama model of Megatron-DeepSpeed: {error}"
        raise RequestError("request.unsatisfiable", text, fix="--to dcp keeps its names") from error
    args = _args(checkpoint, own, said)
    _require_gates(checkpoint, args)
    work = Renaming(checkpoint, names)
    cuts = {p.fqn: p.cut for p in checkpoint.parameters}
    for one in matched:
        sizes = _attention(one, work.shapes, args) if "linear_qkv." in one.megatron else None
        if sizes is not None and order == SPLIT:
            _require_sections(one, sizes, cuts.get(names[one.parts[0]]))
        work.join(one, sizes)
    done = work.checkpoint([(p, (m.megatron,)) for m in matched for p in m.parts], ())
    if request.to is not TargetFormat.MEGATRON:
        return done
    words = next((p for p in done.parameters if p.fqn == "embedding.word_embeddings.weight"), None)
    args |= {} if words is None or "vocab_size" in said else {"vocab_size": words.shape[0]}
    return _as_a_run(done, args)


def _order(checkpoint: Checkpoint, said: str | None) -> str:
    """The order of rows of query, key and value.

    Raises:
        RequestError: `request.unsatisfiable` if neither the files nor the user says it, or they contradict.
    """
    fused = [p for p in checkpoint.parameters if _ATTENTION.fullmatch(p.fqn)]
    sections = {p.fqn for p in fused if p.cut is not None and p.cut.sections}
    name = printable(fused[0].fqn)
    if not sections and said is None:
        text = f"nothing says the order of the rows of {name}: {_VERSIONS}"
        raise RequestError("request.unsatisfiable", text, fix=_SAY_ORDER)
    if sections and (said == GROUPED or len(sections) < len(fused)):
        text = f"{printable(min(sections))} consists of sections, which are queries, keys and values"
        raise RequestError("request.unsatisfiable", text, fix=f"--hf-rules {SPLIT}, and one rule for all layers")
    # A universal checkpoint does not say of how many slices it was joined.
    if said == SPLIT and not sections and checkpoint.world.get("tp") != 1:
        text = f"{name} is, or may be, joined of plain slices, and each of them would be queries, keys and values"
        raise RequestError("request.unsatisfiable", text, fix="--rules with parameter_with_sub_params (docs/rules.md)")
    return SPLIT if sections else str(said)


def _without_pipeline(names: Iterable[str], layers: int = 0) -> dict[str, str]:
    """The names of a model without pipeline, each with that in the checkpoint; unknown ones stay."""
    all_names, found = [*names], dict[str, str]()
    last = max((int(m[1]) for m in map(_BLOCK.fullmatch, all_names) if m), default=layers + _FIRST_BLOCK - 1)
    for name in all_names:
        new = name
        if (match := _BLOCK.fullmatch(name)) and int(match[1]) >= _FIRST_BLOCK:
            new = f"{_LAYERS}{int(match[1]) - _FIRST_BLOCK}.{match[2]}"
        elif match := _EMBEDDING.fullmatch(name):
            new = f"{_PLAIN}embedding.{match[1]}"
        elif (match := _NORM.fullmatch(name)) and int(match[1]) == last + 1:
            new = f"{_PLAIN}encoder.final_layernorm.{match[2]}"
        elif (match := _HEAD.fullmatch(name)) and int(match[1]) == last + 2:
            new = f"{_PLAIN}output_layer.weight"
        if found.setdefault(new, name) != name:
            raise RequestError(
                "request.unsatisfiable",
                f"{printable(name)} and {printable(found[new])} are both {printable(new)}",
                fix="--to dcp keeps the names",
            )
    return found


def _blocks(names: Iterable[str]) -> set[str]:
    return {n.removeprefix(_LAYERS).partition(".")[0] for n in names if n.startswith(_LAYERS)}


def _family(order: str) -> Family:
    rows = Rows.QKV if order == SPLIT else Rows.WHOLE
    block, own = "decoder.layers.{layer}.", _LAYERS + "{layer}."
    rules = [
        Rule(("embedding.word_embeddings.weight",), (f"{_PLAIN}embedding.word_embeddings.weight",)),
        Rule(
            ("embedding.position_embeddings.weight",), (f"{_PLAIN}embedding.position_embeddings.weight",), optional=True
        ),
        Rule(("output_layer.weight",), (f"{_PLAIN}output_layer.weight",), optional=True),
    ]
    for there, here, order_of_rows in (
        (f"{block}input_layernorm", f"{own}input_layernorm", Rows.WHOLE),
        (f"{block}self_attention.linear_qkv", f"{own}self_attention.query_key_value", rows),
        (f"{block}self_attention.linear_proj", f"{own}self_attention.dense", Rows.WHOLE),
        (f"{block}pre_mlp_layernorm", f"{own}post_attention_layernorm", Rows.WHOLE),
        (f"{block}mlp.linear_fc1", f"{own}mlp.dense_h_to_4h", Rows.WHOLE),
        (f"{block}mlp.linear_fc2", f"{own}mlp.dense_4h_to_h", Rows.WHOLE),
        ("decoder.final_layernorm", f"{_PLAIN}encoder.final_layernorm", Rows.WHOLE),
    ):
        rules.append(Rule((f"{there}.weight",), (f"{here}.weight",), order_of_rows))
        rules.append(Rule((f"{there}.bias",), (f"{here}.bias",), order_of_rows, optional=True))
    return Family(order, tuple(rules), arguments=_ONLY_IN_CORE)


def _attention(one: Matched, shapes: Mapping[str, tuple[int, ...]], args: Mapping[str | int, Node]) -> Attention:
    """The sizes of an attention as the arguments say them; the shapes must agree.

    Raises:
        RequestError: `request.unsatisfiable`.
    """
    heads, groups, (name,) = args.get("num_attention_heads"), args.get("num_query_groups"), one.parts
    if type(heads) is not int or type(groups) is not int or heads < 1 or groups < 1:
        raise RequestError(
            "request.unsatisfiable",
            f"nothing says how many heads {printable(name)} has",
            fix='--megatron-args FILE with {"num_attention_heads": ..., "num_query_groups": ...}',
        )
    rows, whole = shapes[name][0], Rule(one.rule.megatron, one.rule.parts, Rows.QKV)
    sizes = Attention(heads, groups, rows // (heads + 2 * groups))
    dense = shapes.get(f"{name.rpartition('query_key_value.')[0]}dense.weight", ())
    try:
        spans(whole, rows, sizes)
        fits = len(dense) == 2 and dense[1] == heads * sizes.size
    except ValueError:
        fits = False
    if not fits:
        raise RequestError(
            "request.unsatisfiable",
            f"{printable(name)} {shapes[name]} is not that of {heads} heads in {groups} groups",
            fix="--megatron-args FILE with the num_attention_heads and num_query_groups of this model",
        )
    return sizes


def _require_sections(one: Matched, sizes: Attention, cut: Cut | None) -> None:
    """Refuse sections that are not all queries, all keys and all values.

    Raises:
        RequestError: `request.unsatisfiable`.
    """
    wanted = (sizes.heads * sizes.size, *(sizes.groups * sizes.size,) * 2)
    if cut is not None and cut.sections not in ((), wanted):
        text = f"the sections of {printable(one.parts[0])} are {cut.sections}; queries, keys and values are {wanted}"
        raise RequestError("request.unsatisfiable", text, fix="--rules with parameter_with_sub_params (docs/rules.md)")


def _args(
    checkpoint: Checkpoint, own: Mapping[str | int, Node], said: Mapping[str | int, Node]
) -> dict[str | int, Node]:
    """The arguments of a run of Megatron-core: those of the source that mean the same, and those the user says."""
    args: dict[str | int, Node] = {k: v for k in _SAME if isinstance(v := own.get(k), str | int | float)}
    if (norm := _NORMS.get(str(own.get("normalization")))) is not None:
        args["normalization"] = norm
    for new, old in (("norm_epsilon", "layernorm_epsilon"), ("rotary_base", "rope_theta")):
        if _is_number(own.get(old)):
            args[new] = own[old]
    if own.get("use_rotary_position_embeddings") is True:
        args["position_embedding_type"] = "rope"
    elif own.get("add_position_embedding") is True:
        args["position_embedding_type"] = "learned_absolute"
    heads, groups = args.get("num_attention_heads"), own.get("num_key_value_heads")
    if heads is not None:
        args |= {"num_query_groups": heads if groups is None else groups}
        args["group_query_attention"] = args["num_query_groups"] != heads
    if checkpoint.counters.samples is not None:
        args["consumed_train_samples"] = checkpoint.counters.samples
    decoupled = _decoupled(checkpoint.optimizer)
    args |= {} if decoupled is None else {"decoupled_weight_decay": decoupled}
    return {**args, **said}


def _decoupled(optimizer: OptimizerState | None) -> bool | None:
    """True for AdamW, False for Adam; None where nothing says it."""
    if optimizer is None:
        return None
    said = [g.hyper_parameters.get("decoupled_weight_decay") for g in optimizer.groups]
    found = {one for one in said if isinstance(one, bool)}
    return found.pop() if len(found) == 1 else optimizer.decoupled_weight_decay


def _require_gates(checkpoint: Checkpoint, args: Mapping[str | int, Node]) -> None:
    """Refuse gate and up that were joined as one section.

    Raises:
        RequestError: `request.unsatisfiable`.
    """
    gated = args.get("swiglu") is True and checkpoint.world.get("tp", 1) > 1
    for parameter in checkpoint.parameters if gated else ():
        cut = parameter.cut
        if "mlp.dense_h_to_4h." in parameter.fqn and (cut is None or len(cut.sections) != 2):
            text = f"{printable(parameter.fqn)} is gate and up, and its slices were joined as one section"
            raise RequestError("request.unsatisfiable", text, fix="--family llama-megatron")


def _as_a_run(checkpoint: Checkpoint, args: dict[str | int, Node]) -> Checkpoint:
    """The checkpoint with the facts of a run of Megatron-core."""
    scale = checkpoint.facts.loss_scale() if args.get("fp16") is True else None
    left = [n for n in of_the_format(checkpoint, _OTHER) if scale is None or n.path not in scale.entries]
    left += named((str(k) for k in checkpoint.client_state if k not in ("args", "iteration")), _OTHER)
    left += named(["random states"] if checkpoint.rng else [], _OTHER)
    items: dict[str | int, Node] = {}
    schedules = [_schedule(one) for one in checkpoint.schedulers]
    if len(schedules) == 1 and schedules[0] is not None:
        items["opt_param_scheduler"] = mapping_of(schedules[0])
    elif schedules:
        left += named(["lr_scheduler"], "it is not a schedule by steps as Megatron-core has it")
    if checkpoint.optimizer is None:
        facts = MegatronFacts(CommonState(items, args), of_run=False)
        return replace(checkpoint, facts=facts, not_carried=(*checkpoint.not_carried, *left))
    groups, steps, group_of = _groups(checkpoint, args)
    return replace(
        checkpoint,
        parameters=tuple(replace(p, group=group_of.get(p.fqn)) for p in checkpoint.parameters),
        optimizer=OptimizerState(groups, decoupled_weight_decay=checkpoint.optimizer.decoupled_weight_decay),
        facts=MegatronFacts(CommonState(items, args), steps=steps, scaler=_scaler_of(scale), of_run=False),
        not_carried=(*checkpoint.not_carried, *left),
        warnings=(*checkpoint.warnings, *_scale_to_say(scale)),
    )


def _scale_to_say(scale: LossScale | None) -> list[str]:
    """The arguments by which Megatron-core goes on with the loss scale: it takes them from its command line."""
    if scale is None:
        return []
    said = f"--loss-scale-window {scale.window} --hysteresis {scale.hysteresis}"
    said += "" if scale.least is None else f" --min-loss-scale {scale.least:g}"
    return [f"the loss scale {scale.scale:g} goes on as in the source in a run with {said}"]


def _schedule(node: Node) -> dict[str | int, Node] | None:
    """The schedule by steps; None for another one, such as one by tokens."""
    items = mapping_items(node, what="lr_scheduler") if is_mapping(node) else {}
    by_tokens = items.get("lr_decay_tokens") is not None or items.get("lr_warmup_tokens") is not None
    if by_tokens or not all(isinstance(items.get(k), str | int | float) for k in _SCHEDULE):
        return None
    return {k: items[k] for k in _SCHEDULE}


def _groups(
    checkpoint: Checkpoint, args: Mapping[str | int, Node]
) -> tuple[tuple[ParamGroup, ...], Sequence[Scalar], dict[str, int]]:
    """The param groups by Megatron-core's rule, their steps, and the group of each parameter.

    Raises:
        RequestError: `request.unsatisfiable` for an optimizer that is not Adam of two such groups, or without steps.
    """
    held = () if checkpoint.optimizer is None else checkpoint.optimizer.groups
    if lost := [n for n in ("lr", "min_lr") if not _is_number(args.get(n))]:
        text = f"nothing says the {listed(lost)} of the run, by which Megatron-core knows its param groups"
        raise RequestError("request.unsatisfiable", text, fix="--megatron-args FILE, a JSON object with them")
    found: dict[bool, dict[str | int, Node]] = {}
    counts: dict[bool, int] = {}
    members: dict[str, bool] = {}
    for p in checkpoint.trained:
        fields = (held[p.group] if p.group is not None and p.group < len(held) else ParamGroup({})).hyper_parameters
        decays = not (p.fqn.endswith(".bias") or len(p.shape) == 1)
        group = _group_of(p, fields, args, decays=decays)
        step = _steps_of(p, fields)
        same_steps = step is None or counts.setdefault(decays, step) == step
        if found.setdefault(decays, group) != group or not same_steps:
            text = f"{printable(p.fqn)} has other values or steps than parameters that Megatron-core groups with it"
            raise _unfit(text)
        members[p.fqn] = decays
    kinds = [kind for kind in (True, False) if kind in found]
    if any(kind not in counts for kind in kinds):
        raise _unfit("nothing says the steps of a param group")
    groups = tuple(ParamGroup(found[kind]) for kind in kinds)
    return groups, [Scalar(counts[kind]) for kind in kinds], {n: kinds.index(k) for n, k in members.items()}


def _group_of(
    parameter: Parameter, fields: Mapping[str | int, Node], args: Mapping[str | int, Node], *, decays: bool
) -> dict[str | int, Node]:
    """The fields of the param group of a parameter, as Megatron-core has them.

    Args:
        parameter: The parameter.
        fields: Its group in the source.
        args: The arguments of the run.
        decays: True if Megatron-core's rule gives it weight decay.

    Raises:
        RequestError: `request.unsatisfiable`.
    """
    name, wanted = printable(parameter.fqn), 1.0 if decays else 0.0
    betas = fields.get("betas")
    pair = sequence_items(betas, what="betas") if isinstance(betas, PList | PTuple) else ()
    lost = [k for k in ("lr", "eps", "weight_decay") if not _is_number(fields.get(k))]
    if lost := [*lost, *(["betas"] if len(pair) != 2 or not all(map(_is_number, pair)) else [])]:
        raise _unfit(f"the param group of {name} says no number for {listed(lost)}")
    decay, rate, multiplier = fields["weight_decay"], fields.get("lr_mult", 1.0), fields.get("wd_mult")
    if multiplier is None:
        # Without the multiplier, the decay itself says which of both groups it is.
        multiplier = wanted if decay == wanted * _number(args.get("weight_decay")) else decay
    if multiplier != wanted or rate != 1.0:
        text = (
            f"the param group of {name} has wd_mult {printable(str(multiplier))} and lr_mult {printable(str(rate))}, "
            f"and Megatron-core's has {wanted} and 1.0"
        )
        raise _unfit(text, fix=_BELOW_STAGE_3 if (multiplier, rate) == (0.0, 1.0) else _WEIGHTS)
    return {
        "is_expert_parallel": False, "default_config": True, "wd_mult": wanted, "lr_mult": 1.0,
        "is_decoupled_lr": False, "max_lr": args["lr"], "min_lr": args["min_lr"], "lr": fields["lr"],
        "bias_correction": bool(fields.get("bias_correction", True)),
        **{k: fields[k] for k in ("betas", "eps", "weight_decay")},
    }  # fmt: skip


def _steps_of(parameter: Parameter, fields: Mapping[str | int, Node], whose: str = "Megatron-core") -> int | None:
    """The steps of a parameter; None for one that no gradient ever reached.

    Args:
        parameter: The parameter.
        fields: Its group in the source.
        whose: The program that is to go on, for messages.

    Raises:
        RequestError: `request.unsatisfiable` for states that are not Adam's.
    """
    if parameter.never_updated:
        return None
    name, step = printable(parameter.fqn), parameter.scalars.get("step")
    if {*parameter.states} - {"fp32"} != _MOMENTS:
        text = f"{name} has the states {listed(sorted(parameter.states))}, and Adam has exp_avg and exp_avg_sq"
        raise _unfit(text, whose)
    value = fields.get("step") if step is None else step.value
    count = _number(value)
    if not _is_number(value) or count < 0 or not count.is_integer():
        raise _unfit(f"nothing says the steps of {name}", whose)
    return int(count)


def _number(node: Node) -> float:
    """A number; one that equals none for every other node."""
    return float(node) if isinstance(node, int | float) and not isinstance(node, bool) else float("nan")


def _is_number(node: Node) -> bool:
    return isinstance(node, int | float) and not isinstance(node, bool)


def _unfit(text: str, whose: str = "Megatron-core", *, fix: str = "") -> RequestError:
    fix = fix or (_WEIGHTS if whose == "Megatron-core" else "--to safetensors takes the weights")
    return RequestError("request.unsatisfiable", f"{whose} has no such optimizer: {text}", fix=fix)


# The loss scale of fp16.
#
# Both double it after a number of good steps and halve it at an overflow, DeepSpeed one good step later after one.
#
# Source: megatron-core 0.16.1 `optimizer/grad_scaler.py` (`DynamicGradScaler.update`), `optimizer/__init__.py`.


def with_loss_scale(checkpoint: Checkpoint, request: ConvertRequest) -> Checkpoint:
    """The checkpoint with its loss scale for DeepSpeed, or with a note that it is not carried; it reads one element."""
    facts = checkpoint.facts
    if request.to not in (TargetFormat.ZERO, TargetFormat.UNIVERSAL) or not isinstance(facts, MegatronFacts):
        return checkpoint
    if facts.scaler is None:
        return checkpoint
    items = mapping_items(facts.scaler, what=SCALER) if is_mapping(facts.scaler) else {}
    good, left, args = items.get("growth_tracker"), items.get("hysteresis_tracker"), facts.common.args
    window, whole, least = (args.get(k) for k in ("loss_scale_window", "hysteresis", "min_loss_scale"))
    scale, counts = _element(checkpoint, items.get("scale")), (good, left, window, whole)
    if scale is None or not all(type(n) is int for n in counts) or not _is_number(least):
        found = named([f"optimizer.{SCALER}"], SCALER_REASON) if items else ()
        return replace(checkpoint, not_carried=(*checkpoint.not_carried, *found))
    good, left, window, whole = (n if isinstance(n, int) else 0 for n in counts)
    made = LossScale(scale, good, max(left, 1), window, whole, _number(least))
    return replace(checkpoint, facts=replace(facts, scale=made))


def _element(checkpoint: Checkpoint, node: Node) -> float | None:
    """The one element of a tensor of the checkpoint; None for any other node."""
    if not isinstance(node, PTensorRef):
        return None
    tensor = checkpoint.shard_map.tensors[node.index]
    if prod(tensor.shape) != 1:
        return None
    pieces = checkpoint.shard_map.pieces(node.index, 0, 1)
    raw = checkpoint.files[int(pieces.file[0])].read(int(pieces.offset[0]), tensor.dtype.itemsize_bytes)
    found = Scalar.of_element(raw, tensor.dtype, tensor.shape)
    return None if found is None else float(found.value)


def _scaler_of(scale: LossScale | None) -> Node:
    """The state of Megatron-core's scaler; None for a run without one."""
    if scale is None:
        return None
    return mapping_of({
        "scale": PLiteral("float32", (1,), pack("<f", scale.scale)), "growth_tracker": scale.good_steps,
        "hysteresis_tracker": scale.overflows,
    })  # fmt: skip


# The way back: a run of Megatron-core that goes on in Megatron-DeepSpeed.

BACK = (NameScheme.MEGATRON_PIPELINE, NameScheme.MEGATRON_PLAIN)
"""The values of `--names` for the names of Megatron-DeepSpeed."""
_DEEPSPEED = "Megatron-DeepSpeed"
_LOST = f"{_DEEPSPEED} has no place for it"
_PARTS = (
    "embedding.word_embeddings", "embedding.position_embeddings", "encoder.layers", "encoder.final_layernorm",
    "output_layer",
)  # fmt: skip
"""The order in which a model of Megatron-DeepSpeed registers its parts; its optimizer has the same order."""
_IN_BLOCK = (
    "input_layernorm", "self_attention.query_key_value", "self_attention.dense", "post_attention_layernorm",
    "mlp.dense_h_to_4h", "mlp.dense_4h_to_h",
)  # fmt: skip
_GROUPS = ("wd_no_scale_lr", "wd_scale_lr", "no_wd_no_scale_lr", "no_wd_scale_lr")
"""Names of its param groups, in their order."""
_OF_ADAM = (
    "lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused",
    "decoupled_weight_decay",
)  # fmt: skip
"""Fields of a param group that Adam reads, of whatever implementation."""
_NOT: tuple[Any, ...] = (False, None)
_ONLY_IN_CORE: Mapping[str, tuple[Any, ...]] = {
    "window_size": (None,), "qk_l2_norm": _NOT, "rotary_seq_len_interpolation_factor": (None,),
    "use_rope_scaling": _NOT, "rotary_interleaved": _NOT, "no_rope_freq": (None,), "attention_output_gate": _NOT,
    "softmax_type": ("vanilla", None), "qk_clip": _NOT, "mtp_num_layers": (None,), "quick_geglu": _NOT,
    "glu_linear_offset": (0.0, None), "activation_func_clamp_value": (None,),
}  # fmt: skip
"""Arguments that would change the numbers, that no name shows, and that Megatron-DeepSpeed does not have."""
_STYLES = ("constant", "linear", "cosine", "inverse-square-root")
_COUNTED = ("consumed_train_samples", "consumed_valid_samples")
_VERSION = 3.0
"""The version of checkpoints since which query, key and value lie as they do; both programs write it."""


def goes_on_in_deepspeed(checkpoint: Checkpoint, request: ConvertRequest) -> bool:
    """True if `renamed_to_deepspeed` is to rename it: a checkpoint of Megatron-core, for Megatron-DeepSpeed's names."""
    return isinstance(checkpoint.facts, MegatronFacts) and request.names in BACK


def renamed_to_deepspeed(checkpoint: Checkpoint, request: ConvertRequest) -> Checkpoint:
    """The checkpoint under the names of a Megatron-DeepSpeed model without pipeline, with the facts of such a run.

    DeepSpeed's own renaming gives it those of a pipeline. Each parameter gets the cut by which such a model divides it,
    and all are in the order of that model.

    Raises:
        RequestError: `request.invalid` for a target that has other names, `request.unsatisfiable` for a name that
            Megatron-DeepSpeed does not have, an order of rows that the user does not say, or an optimizer that it would
            group in another way.
    """
    facts = checkpoint.facts
    assert isinstance(facts, MegatronFacts)
    options, names = request.options.of(MegatronOptions), request.names
    if request.to is TargetFormat.MEGATRON:
        text = f"--to {request.to} holds the names of Megatron-core, not those of {_DEEPSPEED}"
        raise RequestError("request.invalid", text, fix="leave --names out")
    if options.hf_rules not in ORDERS:
        text = f"no file says in which order the run that loads it has queries, keys and values: {_VERSIONS}"
        raise RequestError("request.unsatisfiable", text, fix=_SAY_ORDER)
    family, args = _family(options.hf_rules), {**facts.common.args, **said_args(options.megatron_args)}
    if wrong := contradicted(family, {str(k): v for k, v in args.items()}):
        text = f"{_DEEPSPEED} does not compute what this run does: it has {listed(wrong)}"
        raise RequestError("request.unsatisfiable", text, fix="--to dcp keeps it for Megatron-core")
    try:
        matched, _ = of_megatron(family, [*checkpoint.shapes()])
    except UnmappedError as error:
        text = f"the names are not those of a GPT or Llama model that {_DEEPSPEED} has: {error}"
        raise RequestError("request.unsatisfiable", text, fix="--to dcp keeps its names") from error
    shapes, sizes = checkpoint.shapes(), _attentions(checkpoint, matched, args)
    work, cuts = Renaming(checkpoint), dict[str, Cut]()
    for one in matched:
        work.split(one, sizes.get(one.megatron))
        cuts[one.parts[0]] = _cut_of(one, shapes, sizes, args)
    done = work.checkpoint([(m.megatron, m.parts) for m in matched], ())
    _require_alike(done)
    parameters = tuple(
        replace(p, cut=cuts[p.fqn], states=_with_master(p, done))
        for p in sorted(done.parameters, key=lambda p: _place(p.fqn))
    )
    done = replace(done, parameters=parameters, module_names=tuple(sorted(done.module_names, key=_place)))
    own = _arguments(done, args, next(iter(sizes.values())), plain=names is NameScheme.MEGATRON_PLAIN)
    return _as_run_of_deepspeed(done, facts, own)


def _place(name: str) -> tuple[int, int, int, bool]:
    """The place of a parameter in the order of the model."""
    inside, last = name.removeprefix(_LAYERS), name.endswith(".bias")
    if inside == name:
        return _PARTS.index(name.removeprefix(_PLAIN).rpartition(".")[0]), 0, 0, last
    number, _, inner = inside.partition(".")
    return _PARTS.index("encoder.layers"), int(number), _IN_BLOCK.index(inner.rpartition(".")[0]), last


def _with_master(parameter: Parameter, checkpoint: Checkpoint) -> Mapping[str, int]:
    """The states; the master of a run in fp32 whose optimizer works on the weight itself is that weight."""
    number = parameter.weight
    if number is None or not parameter.states or "fp32" in parameter.states:
        return parameter.states
    own = checkpoint.shard_map.tensors[number].dtype is FLOAT32
    return {"fp32": number, **parameter.states} if own else parameter.states


def _attentions(
    checkpoint: Checkpoint, matched: Sequence[Matched], args: Mapping[str | int, Node]
) -> dict[str, Attention]:
    """The sizes of each attention by the name of its queries, keys and values; all are the same.

    Raises:
        RequestError: `request.unsatisfiable`.
    """
    heads, shapes = args.get("num_attention_heads"), checkpoint.shapes()
    if type(heads) is not int or heads < 1:
        text, fix = "nothing says how many heads the model has", '--megatron-args FILE with {"num_attention_heads": 32}'
        raise RequestError("request.unsatisfiable", text, fix=fix)
    plain = {str(k): v for k, v in args.items() if v is None or isinstance(v, int)}
    found = {m.megatron: attention_of(m, shapes, heads, plain) for m in matched if "linear_qkv." in m.megatron}
    if len({*found.values()}) > 1:
        text = f"the layers of the model have attentions of different sizes, and those of {_DEEPSPEED} one"
        raise RequestError("request.unsatisfiable", text, fix="--to dcp keeps them")
    return found


def _cut_of(
    one: Matched,
    shapes: Mapping[str, tuple[int, ...]],
    sizes: Mapping[str, Attention],
    args: Mapping[str | int, Node],
) -> Cut:
    """How tensor-parallel ranks of Megatron-DeepSpeed divide a parameter.

    Source: Megatron-DeepSpeed `megatron/model/transformer.py`, `megatron/core/tensor_parallel/layers.py`.

    Raises:
        RequestError: `request.unsatisfiable` for a unit whose shapes are neither gated nor plain.
    """
    shape, (name,) = shapes[one.megatron], one.parts
    module, _, kind = name.rpartition(".")
    inner = module.removeprefix(_PLAIN).partition(".layers.")[2].partition(".")[2]
    if inner == "self_attention.query_key_value":
        of = sizes[one.megatron]
        if one.rule.rows is Rows.QKV:
            return Cut(0, (of.heads * of.size, of.groups * of.size, of.groups * of.size), shape, units=of.groups)
        return Cut(0, units=of.groups)
    if inner == "mlp.dense_h_to_4h":
        columns = shapes[f"{one.megatron.rpartition('linear_fc1.')[0]}linear_fc2.weight"][1]
        if shape[0] not in (columns, 2 * columns) or (args.get("swiglu") is True) is not (shape[0] == 2 * columns):
            text = f"{printable(one.megatron)} has {shape[0]} rows, the layer behind it {columns} columns, and swiglu"
            text = f"{text} is {printable(str(args.get('swiglu')))}: {_DEEPSPEED} has SwiGLU, or as many of both"
            raise RequestError("request.unsatisfiable", text, fix="--to dcp keeps it")
        return Cut(0, (columns, columns)) if shape[0] == 2 * columns else Cut(0)
    if inner in ("self_attention.dense", "mlp.dense_4h_to_h") and kind == "weight":
        groups = next(iter(sizes.values())).groups
        return Cut(1, units=groups) if inner == "self_attention.dense" else Cut(1)
    if module.rpartition(".")[2] in ("word_embeddings", "output_layer"):
        return Cut(0, vocabulary=shape[0])
    return Cut()


def _require_alike(checkpoint: Checkpoint) -> None:
    """Refuse biases that only some matrices, or only some norms, of the blocks have.

    Raises:
        RequestError: `request.unsatisfiable`.
    """
    names = {p.fqn for p in checkpoint.parameters}
    for what, norms in (("matrices", False), ("norms", True)):
        weights = [
            n.removesuffix("weight")
            for n in names
            if n.endswith(".weight") and ".encoder." in n and ("norm" in n) is norms
        ]
        held = {f"{n}bias" in names for n in weights}
        if len(held) > 1:
            text = f"some {what} of its layers have biases and some have none; in {_DEEPSPEED} all have one, or none"
            raise RequestError("request.unsatisfiable", text, fix="--to dcp keeps its names")


def _arguments(
    checkpoint: Checkpoint, args: Mapping[str | int, Node], attention: Attention, *, plain: bool
) -> dict[str | int, Node]:
    """The arguments of the run of Megatron-DeepSpeed: those that mean the same, and those that the shapes prove."""
    shapes = checkpoint.shapes()
    words, positions = f"{_PLAIN}embedding.word_embeddings.weight", f"{_PLAIN}embedding.position_embeddings.weight"
    padded = next(
        (p.padding["weight"] for p in checkpoint.parameters if p.fqn == words and "weight" in p.padding), None
    )
    more = 0 if padded is None else checkpoint.shard_map.tensors[padded].shape[0]
    found: dict[str | int, Node] = {k: v for k in _SAME if isinstance(v := args.get(k), str | int | float)}
    kinds = {new: old for old, new in _NORMS.items()}
    found |= {
        "num_layers": len(_blocks(shapes)), "hidden_size": shapes[words][1], "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.groups, "kv_channels": attention.size,
        "add_position_embedding": positions in shapes,
        "use_rotary_position_embeddings": args.get("position_embedding_type") == "rope",
        "no_pipeline_parallel": plain, "padded_vocab_size": shapes[words][0] + more,
        "untie_embeddings_and_output_weights": f"{_PLAIN}output_layer.weight" in shapes,
        "make_vocab_size_divisible_by": args.get("make_vocab_size_divisible_by", 1),
    }  # fmt: skip
    if (norm := kinds.get(str(args.get("normalization")))) is not None:
        found["normalization"] = norm
    for old, new in (("norm_epsilon", "layernorm_epsilon"), ("rotary_base", "rope_theta")):
        if _is_number(args.get(old)):
            found[new] = args[old]
    for name in ("tokenizer_type", *_COUNTED):
        if isinstance(value := args.get(name), str | int):
            found[name] = value
    # Those that name the layout are set for the target's.
    sizes = {"tensor_model": "tp", "pipeline_model": "pp", "data": "dp"}
    found |= {f"{kind}_parallel_size": checkpoint.world.get(axis, 1) for kind, axis in sizes.items()}
    world = checkpoint.world.get("tp", 1) * checkpoint.world.get("pp", 1) * checkpoint.world.get("dp", 1)
    return {**found, "world_size": world, "moe_expert_parallel_size": 1}


def _as_run_of_deepspeed(checkpoint: Checkpoint, facts: MegatronFacts, args: Mapping[str | int, Node]) -> Checkpoint:
    """The checkpoint with the client state, the schedule and the param groups of a run of Megatron-DeepSpeed.

    Raises:
        RequestError: `request.unsatisfiable`.
    """
    said = facts.common.items.get("checkpoint_version", _VERSION)
    if said != _VERSION:
        text = f"its checkpoint_version is {printable(str(said))}, and rows are known to lie as here since {_VERSION}"
        raise RequestError("request.unsatisfiable", text, fix="load it once with a newer Megatron, and save it")
    carried = ("args", "checkpoint_version")
    left = [n for n in of_the_format(checkpoint, _LOST) if n.path not in carried]
    namespace = PObject("newobj", Global("argparse", "Namespace"), PTuple(), state=mapping_of({**args}), has_state=True)
    client: dict[str | int, Node] = {"args": namespace, "checkpoint_version": _VERSION}
    client |= {} if checkpoint.counters.steps is None else {"iteration": checkpoint.counters.steps}
    schedules = [_schedule_by_steps(one) for one in checkpoint.schedulers]
    schedulers: tuple[Node, ...] = ()
    if len(schedules) == 1 and schedules[0] is not None:
        schedulers = (mapping_of(schedules[0]),)
    elif schedules:
        left += named(["opt_param_scheduler"], f"it is not a schedule that {_DEEPSPEED} has")
    done = replace(checkpoint, client_state=client, schedulers=schedulers, not_carried=(*checkpoint.not_carried, *left))
    if checkpoint.optimizer is None:
        return done
    groups, group_of = _groups_by_name(checkpoint, schedules[0] if schedulers else None)
    return replace(
        done,
        parameters=tuple(
            replace(p, group=group_of.get(p.fqn), scalars=_steps_as_a_tensor(p.scalars)) for p in checkpoint.parameters
        ),
        optimizer=replace(checkpoint.optimizer, groups=groups),
    )


def _steps_as_a_tensor(scalars: Mapping[str, Scalar]) -> Mapping[str, Scalar]:
    """The steps as torch's Adam keeps them: it takes no number, and the others make a number of its tensor.

    Source: torch 2.13.0 `optim/adam.py` (`_single_tensor_adam`); deepspeed 0.19.8 `ops/adam/fused_adam.py`,
    `ops/adam/cpu_adam.py`, whose kernels take any object that has a value as an integer.
    """
    step = scalars.get("step")
    raw = b"" if step is None else pack("<f", step.value)
    if step is None or step.dtype is not None or unpack("<f", raw) != (step.value,):
        return scalars
    return {**scalars, "step": Scalar(float(step.value), FLOAT32, raw)}


def _schedule_by_steps(node: Node) -> dict[str | int, Node] | None:
    """The schedule as Megatron-DeepSpeed loads it; None for one whose style it does not have.

    Its loader requires the entries of a schedule by tokens, which are None in one by steps.
    """
    found = _schedule(node)
    if found is None or found["lr_decay_style"] not in _STYLES:
        return None
    by_tokens: dict[str | int, Node] = {"lr_warmup_tokens": None, "lr_decay_tokens": None}
    return {**found, **by_tokens}


def _groups_by_name(
    checkpoint: Checkpoint, schedule: Mapping[str | int, Node] | None
) -> tuple[tuple[ParamGroup, ...], dict[str, int]]:
    """The param groups by Megatron-DeepSpeed's rule, and the group of each parameter.

    Raises:
        RequestError: `request.unsatisfiable`.
    """
    held = () if checkpoint.optimizer is None else checkpoint.optimizer.groups
    found: dict[str, dict[str | int, Node]] = {}
    members: dict[str, str] = {}
    for p in checkpoint.trained:
        fields = (held[p.group] if p.group is not None and p.group < len(held) else ParamGroup({})).hyper_parameters
        group = _named_group(p, fields, schedule)
        steps = _steps_of(p, fields, _DEEPSPEED)
        name = str(group["name"])
        # Fused optimizers of apex count the steps of a group, all others those of each parameter.
        if found.setdefault(name, group | {"step": steps}) != group | {"step": steps}:
            text = f"{printable(p.fqn)} has other values or steps than parameters that it groups with it"
            raise _unfit(text, _DEEPSPEED)
        members[p.fqn] = name
    names = [name for name in _GROUPS if name in found]
    return tuple(ParamGroup(found[n]) for n in names), {fqn: names.index(n) for fqn, n in members.items()}


def _named_group(
    parameter: Parameter, fields: Mapping[str | int, Node], schedule: Mapping[str | int, Node] | None
) -> dict[str | int, Node]:
    """The fields of the param group of a parameter, as Megatron-DeepSpeed has them.

    Raises:
        RequestError: `request.unsatisfiable`.
    """
    name, decays = printable(parameter.fqn), not (parameter.fqn.endswith(".bias") or len(parameter.shape) == 1)
    decay = fields.get("wd_mult", fields.get("pre_wd_mult"))
    rate = fields.get("lr_mult", fields.get("pre_lr_mult", 1.0))
    if decay != (1.0 if decays else 0.0) or not _is_number(rate):
        text = f"the param group of {name} has wd_mult {printable(str(decay))} and lr_mult {printable(str(rate))}"
        raise _unfit(f"{text}, and by its rule wd_mult is {1.0 if decays else 0.0}", _DEEPSPEED)
    if fields.get("is_decoupled_lr") is True:
        raise _unfit(f"{name} has a learning rate of its own (decoupled_lr)", _DEEPSPEED)
    betas = fields.get("betas")
    pair = sequence_items(betas, what="betas") if isinstance(betas, PList | PTuple) else ()
    lost = [k for k in ("lr", "eps", "weight_decay") if not _is_number(fields.get(k))]
    if lost := [*lost, *(["betas"] if len(pair) != 2 or not all(map(_is_number, pair)) else [])]:
        raise _unfit(f"the param group of {name} says no number for {listed(lost)}", _DEEPSPEED)
    for key in ("max_lr", "min_lr") if schedule is not None else ():
        if schedule is not None and fields.get(key) not in (None, schedule[key]):
            text = f"the param group of {name} has {key} {printable(str(fields.get(key)))}, and its schedule"
            raise _unfit(f"{text} {printable(str(schedule[key]))}: it has one of all groups", _DEEPSPEED)
    return {
        "name": f"{'' if decays else 'no_'}wd_{'no_' if rate == 1.0 else ''}scale_lr",
        "wd_mult": 1.0 if decays else 0.0,
        "lr_mult": rate,
        "bias_correction": bool(fields.get("bias_correction", True)),
        **{k: fields[k] for k in _OF_ADAM if k in fields},
    }

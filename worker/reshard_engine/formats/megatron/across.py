"""A run of Megatron-DeepSpeed that goes on in Megatron-core: names, arguments, param groups and schedule.

Both compute the same GPT and Llama models from the same matrices. Only the order of the rows of `query_key_value`
depends on the version of Megatron-DeepSpeed, which no file says:

- until December 2024, for each group its queries, its key and its value, as Megatron-core has them;
- since then, `[Q | K | V]` in each tensor-parallel slice, which a file may declare as sections.

Sections prove the second. Otherwise the user says it, by `--hf-rules`. Gate and up lie as `[gate; up]` in both.

Source: Megatron-DeepSpeed `megatron/model/transformer.py` (`ParallelAttention.split_tensor`, which older versions
call, and the slices of `forward`, which newer ones take instead; `ParallelMLP`: `swiglu`),
`megatron/model/gpt_model.py` (`GPTModelPipe`: the numbers of layers), `megatron/optimizer/__init__.py`
(`_get_params_for_weight_decay_optimization`),
`megatron/optimizer_param_scheduler.py` (`state_dict`); megatron-core 0.16.1 `transformer/attention.py`
(`get_query_key_value_tensors`), `transformer/mlp.py`, `optimizer/__init__.py` (`_get_param_groups`),
`optimizer_param_scheduler.py` (`load_state_dict`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from reshard.choices import NameScheme, TargetFormat
from reshard.errors import RequestError, listed, printable
from reshard.models.jobs import ConvertRequest
from reshard.options import MegatronOptions
from reshard_engine.checkpoint import Checkpoint, OptimizerState, Parameter, ParamGroup, Scalar
from reshard_engine.formats.carried import named, of_the_format
from reshard_engine.formats.megatron.common import CommonState
from reshard_engine.formats.megatron.huggingface.renaming import Renaming
from reshard_engine.formats.megatron.huggingface.rules import (
    Attention,
    Family,
    Matched,
    Rows,
    Rule,
    UnmappedError,
    of_hugging_face,
    spans,
)
from reshard_engine.formats.megatron.model import MegatronFacts
from reshard_engine.formats.megatron.writer import said_args
from reshard_engine.pickles.nodes import (
    Node,
    PList,
    PTuple,
    is_mapping,
    mapping_items,
    mapping_of,
    namespace_items,
    sequence_items,
)
from reshard_engine.tensors.cuts import Cut

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
_OTHER = "Megatron-core has no place for it"


def is_megatron_deepspeed(checkpoint: Checkpoint, request: ConvertRequest) -> bool:
    """True if `renamed_from_deepspeed` is to rename it: the request asks for it, and its names are such."""
    said = request.options.of(MegatronOptions).hf_rules
    asked = request.options.deepspeed.names is NameScheme.MEGATRON_CORE and (said is None or said in ORDERS)
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
        text = (
            f"nothing says the order of the rows of {name}: Megatron-DeepSpeed since December 2024 has all queries, "
            "all keys and all values, and before them by group"
        )
        raise RequestError(
            "request.unsatisfiable", text, fix=f"--hf-rules {SPLIT} for a newer version, --hf-rules {GROUPED} before"
        )
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
    return Family(order, tuple(rules))


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
    left = list(of_the_format(checkpoint, _OTHER))
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
        facts=MegatronFacts(CommonState(items, args), steps=steps, of_run=False),
        not_carried=(*checkpoint.not_carried, *left),
    )


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
        raise _unfit(
            f"the param group of {name} has wd_mult {printable(str(multiplier))} and lr_mult {printable(str(rate))}, "
            f"and Megatron-core's has {wanted} and 1.0"
        )
    return {
        "is_expert_parallel": False, "default_config": True, "wd_mult": wanted, "lr_mult": 1.0,
        "is_decoupled_lr": False, "max_lr": args["lr"], "min_lr": args["min_lr"], "lr": fields["lr"],
        "bias_correction": bool(fields.get("bias_correction", True)),
        **{k: fields[k] for k in ("betas", "eps", "weight_decay")},
    }  # fmt: skip


def _steps_of(parameter: Parameter, fields: Mapping[str | int, Node]) -> int | None:
    """The steps of a parameter; None for one that no gradient ever reached.

    Raises:
        RequestError: `request.unsatisfiable` for states that are not Adam's.
    """
    if parameter.never_updated:
        return None
    name, step = printable(parameter.fqn), parameter.scalars.get("step")
    if {*parameter.states} - {"fp32"} != _MOMENTS:
        raise _unfit(f"{name} has the states {listed(sorted(parameter.states))}, and Adam has exp_avg and exp_avg_sq")
    value = fields.get("step") if step is None else step.value
    count = _number(value)
    if not _is_number(value) or count < 0 or not count.is_integer():
        raise _unfit(f"nothing says the steps of {name}")
    return int(count)


def _number(node: Node) -> float:
    """A number; one that equals none for every other node."""
    return float(node) if isinstance(node, int | float) and not isinstance(node, bool) else float("nan")


def _is_number(node: Node) -> bool:
    return isinstance(node, int | float) and not isinstance(node, bool)


def _unfit(text: str) -> RequestError:
    return RequestError("request.unsatisfiable", f"Megatron-core has no such optimizer: {text}", fix=_WEIGHTS)

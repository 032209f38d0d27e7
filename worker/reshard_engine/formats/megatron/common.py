"""The common state of a checkpoint of Megatron-core, without tensors: arguments, param groups, scheduler, counters.

Up to 0.18 it is `common.pt`, from 0.19 on the entry `common_state`, a list of one dict. Both hold the same dict. Param
groups do not list their parameters: each loading run makes them anew by its own rule, and matches them by the fields
that identify a group.

Source: megatron-core 0.16.1 and 0.19.2 `dist_checkpointing/serialization.py`, `optimizer/__init__.py`
(`_get_param_groups`: no weight decay for biases and parameters of one dimension), `optimizer/optimizer.py`
(`ChainedOptimizer`: one dict for each, with expert parallelism); Megatron-LM `training/checkpointing.py`
(`generate_state_dict`); verified by running both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from reshard.errors import RequestError, SourceError, listed, printable
from reshard_engine.checkpoint import Checkpoint, Counters, OptimizerState, ParamGroup, Question, Scalar, Undecided
from reshard_engine.containers.source_file import parse_yaml
from reshard_engine.formats.megatron.names import EXPERT
from reshard_engine.pickles.nodes import (
    Global,
    Node,
    PList,
    PObject,
    PTuple,
    is_mapping,
    mapping_items,
    mapping_of,
    namespace_items,
    node_of,
    sequence_items,
)

GROUPS = "param_groups"
SCALER = "grad_scaler"
SCALER_REASON = "the loss scale of Megatron-core, which starts anew"
SCALED = ("megatron", "zero", "universal")
"""The targets that take a loss scale."""
_STEP = "step"
OF_EXPERTS = "is_expert_parallel"
"""True for groups of experts in runs with several expert-parallel ranks, and in no other run."""
_IDENTITY = (
    "wd_mult", "lr_mult", "is_decoupled_lr", "max_lr", "min_lr", "start_wd", "end_wd", "optimizer", "pre_wd_mult",
    "pre_lr_mult",
)  # fmt: skip
"""Fields that tell groups apart, beside that of experts; 0.16 asks for the first three."""
_FREQUENCIES = ("moe_layer_freq", "linear_attention_freq")
"""Arguments that say which layers have experts, or linear attention: a number above 1, or a list, for some of them."""
_HETEROGENEOUS = (
    "hetereogenous_dist_checkpoint", "heterogeneous_block_specs", "heterogeneous_layers_config_path",
    "heterogeneous_layers_config_encoded_json",
)  # fmt: skip
"""Arguments of runs whose layers differ otherwise; the first is spelt as Megatron-core spells it."""
_VERSION = 3.0
"""The version of checkpoints whose query, key and value lie as they do since 2020."""
_ASSUMED = (
    "Megatron-core saves no members of param groups: parameters are grouped by its default rule, no weight decay for "
    "biases and one-dimensional parameters"
)
_LEAVE_OUT = "--to safetensors takes the weights alone, if the run had a rule of its own"


@dataclass(frozen=True, slots=True)
class CommonState:
    """The dict of everything that is not a tensor."""

    items: Mapping[str | int, Node]
    args: Mapping[str | int, Node]
    """Arguments of the run by name; empty where the training script saved none."""

    @classmethod
    def of(cls, node: Node, what: str) -> CommonState:
        """The state in a pickle's tree.

        Raises:
            SourceError: `checkpoint.malformed`.
        """
        items = mapping_items(node, what=what)
        return cls(items, namespace_items(items.get("args")))

    def number(self, name: str) -> int | None:
        """An argument that is a positive integer; None where there is none of that name."""
        value = self.args.get(name)
        return value if type(value) is int and value > 0 else None

    @property
    def sharding_type(self) -> str | None:
        """How the distributed optimizer was saved (`distrib_optim_sharding_type`); None where nothing says it."""
        for key, name in (
            ("content_metadata", "distrib_optim_sharding_type"),
            ("optimizer", "param_state_sharding_type"),
        ):
            held = self.items.get(key)
            said = mapping_items(held, what=key).get(name) if is_mapping(held) else None
            if isinstance(said, str):
                return said
        return None

    @property
    def layers_differ(self) -> bool:
        """True for a run whose layers have keys of their own, as its arguments say that they differ.

        Source: megatron-core 0.16.1 `transformer/transformer_block.py` (`sharded_state_dict`).
        """
        frequencies = [self.args.get(name) for name in _FREQUENCIES]
        if any(isinstance(one, PList) or (isinstance(one, int) and one > 1) for one in frequencies):
            return True
        return any(isinstance(one := self.args.get(name), bool | str) and bool(one) for name in _HETEROGENEOUS)

    def scaler(self) -> Node:
        """The state of the loss scaler of the first optimizer that has one; None if none has."""
        held = (mapping_items(n, what="optimizer").get(SCALER) for n in _dicts(self.items.get("optimizer")))
        return next((one for one in held if one is not None), None)

    def counters(self) -> Counters:
        """Steps and samples of the run."""
        steps, samples = self.items.get("iteration"), self.args.get("consumed_train_samples")
        return Counters(
            steps=steps if type(steps) is int and steps >= 0 else None,
            samples=samples if type(samples) is int and samples >= 0 else None,
        )

    def world(self) -> dict[str, int]:
        """The ranks of the run by kind of parallelism, as far as its arguments say them."""
        kinds = {"tp": "tensor_model", "pp": "pipeline_model", "ep": "expert_model", "cp": "context", "dp": "data"}
        sizes = {short: self.number(f"{name}_parallel_size") for short, name in kinds.items()}
        always = ("tp", "pp", "dp")
        return {short: size for short, size in sizes.items() if size is not None and (size > 1 or short in always)}


# Megatron-Bridge.

RUN_CONFIG, TRAIN_STATE = "run_config.yaml", "train_state.pt"
"""The files in which Megatron-Bridge keeps what Megatron-LM has in its arguments."""
LATEST_STATE = f"latest_{TRAIN_STATE}"
"""Its tracker: a copy of the newest iteration's state."""
_SAME = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "add_bias_linear", "add_qkv_bias", "qk_layernorm", "normalization", "position_embedding_type", "rotary_base",
    "rotary_percent", "seq_length", "vocab_size", "make_vocab_size_divisible_by", "multi_latent_attention",
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "pipeline_model_parallel_layout", "context_parallel_size", "expert_model_parallel_size",
    "expert_tensor_parallel_size", "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
    "moe_ffn_hidden_size", "moe_grouped_gemm", "moe_layer_freq", "moe_router_topk", "moe_use_legacy_grouped_gemm",
    "moe_mlp_glu_interleave_size", "transformer_impl", "bf16", "fp16",
)  # fmt: skip
"""Fields of `model` that mean what the argument of that name does."""
_RENAMED = {
    "model": {
        "num_moe_experts": "num_experts", "layernorm_epsilon": "norm_epsilon",
        "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
        "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    },
    "ddp": {
        "overlap_grad_reduce": "overlap_grad_reduce", "bucket_size": "ddp_bucket_size",
        "pad_buckets_for_high_nccl_busbw": "ddp_pad_buckets_for_high_nccl_busbw",
        "grad_reduce_in_fp32": "accumulate_allreduce_grads_in_fp32",
        "num_distributed_optimizer_instances": "num_distributed_optimizer_instances",
        "use_distributed_optimizer": "use_distributed_optimizer", "use_megatron_fsdp": "use_megatron_fsdp",
        "fp8_param_gather": "fp8_param_gather",
    },
    "optimizer": {name: name for name in ("optimizer", "lr", "min_lr", "weight_decay", "decoupled_weight_decay")},
}  # fmt: skip
"""Fields of each section, and the arguments that mean the same."""


def args_of_run_config(text: str) -> dict[str | int, Node]:
    """The arguments that a `run_config.yaml` of Megatron-Bridge stands for.

    Sections are dataclasses of Megatron-core and of Megatron-Bridge, field by field; what has no argument is left out.

    Args:
        text: The file.

    Raises:
        ValueError: It is no such file; the text is the reason.

    Source: Megatron-Bridge 0.1 to 0.3 `training/checkpointing.py` (`generate_state_dict` saves no arguments,
    `save_checkpoint` writes the file), `training/config.py` (`ConfigContainer`); Megatron-LM `training/arguments.py`
    (`core_transformer_config_from_args`), `training/training.py` (`get_model`: `ddp_bucket_size`).
    """
    found = parse_yaml(text)
    sections: dict[str, Any] = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    held = {name: sections.get(name) for name in _RENAMED}
    fields = {name: cast("dict[str, Any]", one) for name, one in held.items() if isinstance(one, dict)}
    if "num_layers" not in (model := fields.get("model", {})):
        raise ValueError("it has no section `model` with num_layers")
    args = {name: model[name] for name in _SAME if name in model}
    for section, names in _RENAMED.items():
        args |= {name: fields[section][key] for key, name in names.items() if key in fields.get(section, {})}
    if isinstance(shared := model.get("share_embeddings_and_output_weights"), bool):
        args["untie_embeddings_and_output_weights"] = not shared
    function, gated = model.get("activation_func"), model.get("gated_linear_unit")
    name = cast("dict[str, Any]", function).get("_target_") if isinstance(function, dict) else None
    if gated is False or (gated is True and name == "torch.nn.functional.silu"):
        args["swiglu"] = gated
    if isinstance(args.get("num_query_groups"), int) and isinstance(args.get("num_attention_heads"), int):
        args["group_query_attention"] = args["num_query_groups"] != args["num_attention_heads"]
    return {name: node_of(value) for name, value in args.items() if value is not None}


@dataclass(frozen=True, slots=True)
class ReadGroups:
    """The param groups, and the group of each parameter."""

    state: OptimizerState
    group: Mapping[str, int] = field(default_factory=dict[str, int])
    steps: Sequence[Scalar | None] = ()
    """The count of steps of each group."""
    assumed: tuple[Undecided, ...] = ()
    undecided: tuple[Undecided, ...] = ()


def members_said(node: Node) -> list[int | None]:
    """The number of parameters of each param group that lists them; None for one that does not."""
    listed_ = [g.get("params") for g in _groups_in(node)]
    return [len(sequence_items(p, what="params")) if isinstance(p, PList | PTuple) else None for p in listed_]


def read_groups(common: CommonState, trained: Mapping[str, int], more: Sequence[Node] = ()) -> ReadGroups:
    """The param groups of a checkpoint, and the parameters that its optimizer owns, by Megatron's rule.

    Args:
        common: The state that is not a tensor.
        trained: Parameters with optimizer states, each with its number of dimensions.
        more: Optimizers' dicts that lie outside of the common state.

    Raises:
        SourceError: `checkpoint.malformed`.
    """
    found = [g for node in (common.items.get("optimizer"), *more) for g in _groups_in(node)]
    if not found:
        return ReadGroups(OptimizerState(()))
    members, problem = _members(found, trained)
    state = OptimizerState(
        tuple(ParamGroup({k: v for k, v in g.items() if k not in ("params", _STEP)}) for g in found),
        decoupled_weight_decay=_is_decoupled(common),
    )
    steps = [_step_of(g) for g in found]
    if problem:
        return ReadGroups(
            state, dict.fromkeys(trained, 0), steps, undecided=(Undecided(Question.MEMBERS, problem, _LEAVE_OUT),)
        )
    said = (Undecided(Question.MEMBERS, _ASSUMED, _LEAVE_OUT),) if len({*members.values()}) > 1 else ()
    return ReadGroups(state, members, steps, assumed=said)


def steps_in(node: Node) -> list[int | float | None]:
    """The steps of all param groups in an optimizer's dict, in the order of `read_groups`."""
    scalars = map(_step_of, _groups_in(node))
    return [None if one is None else one.value for one in scalars]


def _groups_in(node: Node) -> Iterator[dict[str | int, Node]]:
    """The param groups in an optimizer's dict, in the dicts of chained ones in their order, or in none of them."""
    if isinstance(node, PList | PTuple):
        for one in sequence_items(node, what="optimizer"):
            yield from _groups_in(one)
        return
    if not is_mapping(node):
        return
    items = mapping_items(node, what="optimizer")
    if GROUPS in items:
        yield from (mapping_items(g, what=GROUPS) for g in sequence_items(items[GROUPS], what=GROUPS))
    elif "optimizer" in items:
        yield from _groups_in(items["optimizer"])
    else:
        for number in sorted(k for k in items if isinstance(k, int)):
            yield from _groups_in(items[number])


def _members(groups: Sequence[Mapping[str | int, Node]], trained: Mapping[str, int]) -> tuple[dict[str, int], str]:
    """The group of each parameter, and the reason why the rule does not find them; empty where it does."""
    of_experts = any(g.get(OF_EXPERTS) is True for g in groups)
    kinds: dict[tuple[bool, bool], list[int]] = {}
    for number, group in enumerate(groups):
        decay = group.get("wd_mult", group.get("pre_wd_mult"))
        if not isinstance(decay, int | float) or isinstance(decay, bool):
            return {}, f"param group {number} has no wd_mult, which says which parameters are in it"
        kinds.setdefault((group.get(OF_EXPERTS) is True, decay != 0), []).append(number)
    if several := [numbers for numbers in kinds.values() if len(numbers) > 1]:
        return {}, (
            f"the param groups {listed([str(n) for n in several[0]])} have the same weight decay, and nothing says "
            "which parameters are in which"
        )
    found: dict[str, int] = {}
    for name, dims in trained.items():
        decays = not (name.endswith(".bias") or dims == 1)
        kind = (of_experts and EXPERT.fullmatch(name) is not None, decays)
        if kind not in kinds:
            what = "with" if decays else "without"
            return {}, f"no param group {what} weight decay is there for {printable(name)}"
        found[name] = kinds[kind][0]
    return found, ""


def _step_of(group: Mapping[str | int, Node]) -> Scalar | None:
    step = group.get(_STEP)
    return Scalar(step) if isinstance(step, int | float) and not isinstance(step, bool) and step >= 0 else None


def _is_decoupled(common: CommonState) -> bool | None:
    """True for AdamW, which Megatron takes for Adam unless `decoupled_weight_decay` says otherwise."""
    if common.args.get("optimizer") != "adam":
        return None
    return common.args.get("decoupled_weight_decay", True) is not False


# What is written.


def optimizers_for(
    checkpoint: Checkpoint, steps: Sequence[Scalar | None], scaler: Node, *, experts_apart: bool
) -> list[dict[str | int, Node]]:
    """The dicts of a run's optimizers, with param groups: one, or another one of experts behind it.

    Args:
        checkpoint: The source.
        steps: The count of steps of each of its param groups.
        scaler: The state of its loss scaler; None for a run without one.
        experts_apart: True for a run with expert-parallel ranks.

    Raises:
        RequestError: `request.unsatisfiable` for groups of experts that differ from those of other parameters, in a run
            where these are one.
    """
    groups = () if checkpoint.optimizer is None else checkpoint.optimizer.groups
    made = [
        {**g.hyper_parameters, **({} if s is None else {_STEP: s.value})} for g, s in zip(groups, steps, strict=True)
    ]
    apart = [bool(g.get(OF_EXPERTS)) for g in made]
    held = {p.group for p in checkpoint.trained if EXPERT.fullmatch(p.fqn)}
    if not experts_apart:
        kinds = [made[i] for i, expert in enumerate(apart) if not expert]
        for group in (made[i] for i, expert in enumerate(apart) if expert):
            plain = {**group, OF_EXPERTS: False}
            same = [k for k in kinds if all(k.get(n) == plain.get(n) for n in _IDENTITY)]
            if not same:
                kinds.append(plain)
            elif any(_as_data(k) != _as_data(plain) for k in same):
                raise RequestError(
                    "request.unsatisfiable",
                    "the experts of the source have param groups of their own, whose values differ from those of "
                    "other parameters, and a run without expert parallelism has one for both",
                    fix="--ep N, as in the source",
                )
        found = [kinds]
    elif any(apart):
        found = [[g for g, a in zip(made, apart, strict=True) if a is kind] for kind in (False, True)]
    else:
        found = [made, [{**g, OF_EXPERTS: True} for i, g in enumerate(made) if i in held]]
    more: dict[str | int, Node] = {} if scaler is None else {SCALER: scaler}
    return [
        {"optimizer": mapping_of({GROUPS: PList([mapping_of({**g}) for g in one])}), **more} for one in found if one
    ]


def _dicts(node: Node) -> Iterator[Node]:
    """The dict of an optimizer, or those of chained ones."""
    found = [node]
    if isinstance(node, PList | PTuple):
        found = sequence_items(node, what="optimizer")
    elif is_mapping(node):
        items = mapping_items(node, what="optimizer")
        found = [items[k] for k in sorted(k for k in items if isinstance(k, int))] or found
    yield from filter(is_mapping, found)


def _as_data(group: Mapping[str | int, Node]) -> dict[str | int, object]:
    """A group's values, so that equal ones compare equal: lists and tuples of numbers are nodes of their own."""
    return {k: tuple(v.items) if isinstance(v, PList | PTuple) else v for k, v in group.items()}


def written_items(common: CommonState, changes: Mapping[str, Node], steps: int | None) -> dict[str | int, Node]:
    """The common state without optimizer, with some arguments of the run changed.

    Args:
        common: The source's.
        changes: Arguments by name.
        steps: The iteration.
    """
    node, values = common.items.get("args"), mapping_of({**common.args, **changes})
    if isinstance(node, PObject):
        args: Node = replace(node, state=values, has_state=True)
    else:
        args = PObject("newobj", Global("argparse", "Namespace"), PTuple(), state=values, has_state=True)
    own: dict[str | int, Node] = {"args": args, "checkpoint_version": _VERSION}
    own |= {} if steps is None else {"iteration": steps}
    kept = {k: v for k, v in common.items.items() if k not in (*own, "optimizer", "content_metadata")}
    version = common.items.get("checkpoint_version")
    return {**own, **({} if version is None else {"checkpoint_version": version}), **kept}


def only_one(node: Node, what: str) -> Node:
    """The object in a list of one, as Megatron saves objects.

    Raises:
        SourceError: `checkpoint.malformed`.
    """
    if isinstance(node, PList) and len(node.items) == 1:
        return node.items[0]
    raise SourceError(
        "checkpoint.malformed",
        f"{what} is not a list of one object",
        fix="copy the checkpoint again: `.metadata` is written last, when all files are there",
    )

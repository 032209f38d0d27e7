"""Which parameters each rank of Megatron-core holds, and how: stages of the pipeline, experts, order, cuts.

The arguments of a run say how many ranks it has of each kind. The rules here are Megatron-core's own: the layers of
each pipeline stage and of its chunks, the order in which a layer registers its parameters, and the dimension along
which tensor parallelism cuts a parameter. A run with an argument that changes a rule in a way that is not known here is
an error, and so is a parameter of an unknown name where its order or its cut matters.

Source: megatron-core 0.16.1 `transformer/transformer_block.py` (`get_num_layers_to_build`),
`transformer/transformer_layer.py` (`get_transformer_layer_offset`, the order of modules), `transformer/attention.py`
(`linear_proj` comes first), `transformer/moe/`, `tensor_parallel/layers.py`, `parallel_state.py` (tensor-parallel ranks
are the inner ones of a model-parallel group, then expert-parallel ones, then stages),
`models/common/language_module/language_module.py` (`setup_embeddings_and_output_layer`); Transformer Engine registers
the norm of a joined layer before its weight.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reshard.errors import printable
from reshard_engine.formats.megatron.buffers import DEFAULT_BUCKET, DEFAULT_BUCKET_PER_RANK, LayoutError
from reshard_engine.formats.megatron.common import CommonState
from reshard_engine.formats.megatron.names import EXPERT
from reshard_engine.tensors.cuts import Cut

WORD_EMBEDDINGS, OUTPUT_LAYER = "embedding.word_embeddings.weight", "output_layer.weight"
_LAYER = re.compile(r"decoder\.layers\.(\d{1,6})\.(.+)")
_LOCAL_EXPERT = re.compile(r"(mlp\.experts\.local_experts\.)(\d{1,6})\.(.+)")
_FIRST = re.compile(r"embedding\..+")
_LAST = re.compile(r"(?:decoder\.final_layernorm|output_layer)\..+")
_OUTSIDE = (
    "embedding.word_embeddings", "embedding.position_embeddings", "decoder.final_layernorm", "output_layer",
)  # fmt: skip
"""Modules outside of layers, in the order of their registration."""
_MODULES = (
    "input_layernorm", "self_attention.linear_proj", "self_attention.linear_qkv", "self_attention.q_layernorm",
    "self_attention.k_layernorm", "pre_mlp_layernorm", "mlp.router", "mlp.experts", "mlp.shared_experts",
    "mlp.linear_fc1", "mlp.linear_fc2",
)  # fmt: skip
"""Modules of a layer in the order of their registration, with norms as modules of their own."""
_WITHIN = ("gate_weight", "linear_fc1", "linear_fc2")
_LEAVES = ("weight", "bias")
_COLUMN = re.compile(r"(?:.+\.)?(?:word_embeddings|linear_qkv|output_layer)\.(?:weight|bias)")
GATED = re.compile(r".+\.linear_fc1\.(?:weight|bias)")
_ROW = re.compile(r".+\.(?:linear_proj|linear_fc2)\.weight")
_WHOLE = re.compile(
    r"(?:.+\.)?(?:position_embeddings|[a-z_]*layernorm|router)\.(?:weight|bias)"
    r"|.+\.(?:linear_proj|linear_fc2)\.bias|.+\.router\.\w+|.+\.gate_weight"
)
_MOST_RANKS = 1 << 16
"""Model-parallel ranks of one run, each with its chunks. Layers have smaller numbers than its multiples."""


@dataclass(frozen=True, slots=True, order=True)
class Rank:
    """A model-parallel rank."""

    stage: int
    expert: int
    tensor: int

    def directory(self, run: Run) -> str:
        """Its directory, with `--ckpt-format torch`."""
        stage = f"_{self.stage:03d}" if run.pipeline > 1 else ""
        expert = f"_{self.expert:03d}" if run.experts > 1 else ""
        return f"mp_rank_{self.tensor:02d}{stage}{expert}"


@dataclass(frozen=True, slots=True)
class Run:
    """How many ranks of each kind a run had, and how it dealt layers to them."""

    common: CommonState
    tensor: int
    pipeline: int
    chunks: int
    """Model chunks of a pipeline stage: more than one with a virtual pipeline."""
    experts: int
    """Expert-parallel ranks."""
    expert_tensor: int
    """Tensor-parallel ranks of an expert."""

    @classmethod
    def of(cls, common: CommonState) -> Run:
        """The run that the arguments describe.

        Raises:
            LayoutError: They do not say it.
        """
        kinds = ("tensor_model", "pipeline_model", "expert_model", "expert_tensor")
        sizes = {kind: common.number(f"{kind}_parallel_size") for kind in kinds}
        tensor, pipeline = sizes["tensor_model"], sizes["pipeline_model"]
        if tensor is None or pipeline is None:
            raise LayoutError("the arguments of the run do not say its tensor and pipeline parallelism")
        if common.args.get("pipeline_model_parallel_layout") is not None:
            raise LayoutError("the run has a pipeline layout of its own (pipeline_model_parallel_layout)")
        experts = sizes["expert_model"] or 1
        chunks = (common.number("virtual_pipeline_model_parallel_size") or 1) if pipeline > 1 else 1
        if (ranks := tensor * pipeline * experts * chunks) > _MOST_RANKS:
            raise LayoutError(f"the arguments of the run name {ranks} model-parallel ranks and chunks")
        has_experts = experts > 1 or common.number("num_experts") is not None
        return cls(common, tensor, pipeline, chunks, experts, (has_experts and sizes["expert_tensor"]) or tensor)

    def ranks(self) -> list[Rank]:
        """The ranks that save directories: of each stage the first ones that hold all experts.

        Tensor-parallel ranks are the inner ones, then expert-parallel ones. Where experts are cut over fewer ranks than
        all else, the experts of one tensor-parallel rank are not those of the next.

        Raises:
            LayoutError: These ranks do not hold all parameters, or two of them have one directory.
        """
        count, rest = divmod(self.expert_tensor * self.experts, self.tensor)
        if rest or not count or self.tensor % self.expert_tensor:
            raise LayoutError(
                f"experts are cut over {self.expert_tensor} tensor-parallel ranks, and all else over {self.tensor}: "
                f"the directories of {self.experts} expert-parallel ranks do not hold all of the model"
            )
        places = range(self.expert_tensor * self.experts)
        return [
            Rank(stage, at // self.expert_tensor, at % self.tensor) for stage in range(self.pipeline) for at in places
        ]

    def replica(self, rank: Rank) -> int:
        """The number of the copy of all that is no expert, of which a rank of `ranks` holds a part."""
        return (rank.expert * self.expert_tensor + rank.tensor % self.expert_tensor) // self.tensor

    @property
    def data_ranks(self) -> int | None:
        """The ranks that share a dense buffer: those of data and context parallelism."""
        data = self.common.number("data_parallel_size")
        return None if data is None else data * (self.common.number("context_parallel_size") or 1)

    @property
    def expert_data_ranks(self) -> int | None:
        """The ranks that share a buffer of experts."""
        ranks = self.data_ranks
        if ranks is None:
            return None
        shared, rest = divmod(ranks * self.tensor, self.experts * self.expert_tensor)
        return None if rest else shared

    def bucket_sizes(self, stage: int, chunk: int, parameters: int) -> tuple[int | None, ...]:
        """The numbers of elements at which the buckets of a chunk may close; None stands for one bucket.

        Args:
            stage: The pipeline stage.
            chunk: The model chunk of the stage.
            parameters: Elements of all parameters of the rank.
        """
        args = self.common.args
        overlap = args.get("overlap_grad_reduce")
        if stage or chunk or overlap is False:
            return (None,)
        if (buckets := self.common.number("ddp_num_buckets")) is not None:
            return (parameters // buckets,)
        data = self.common.number("data_parallel_size") or 1
        default = {
            max(DEFAULT_BUCKET, DEFAULT_BUCKET_PER_RANK * ranks): None for ranks in (data, self.data_ranks or data)
        }
        said = self.common.number("ddp_bucket_size")
        return ((said,) if said is not None else tuple(default)) + (() if overlap is True else (None,))

    def layers_of(self, stage: int, chunk: int) -> range:
        """The layers of a chunk of a pipeline stage, counted over the whole model.

        Raises:
            LayoutError: The arguments do not say it, or their numbers do not divide.
        """
        return self._dealt()[chunk][stage]

    def _dealt(self) -> list[list[range]]:
        """The layers of each chunk, and in it of each stage: in the order of the model."""
        layers = self.common.number("num_layers")
        if layers is None:
            raise LayoutError("the arguments of the run do not say its number of layers")
        if self.pipeline == 1:
            return [[range(layers)]]
        counts = self._counts(layers)
        found: list[list[range]] = []
        at = 0
        for chunk in range(self.chunks):
            found.append([])
            for stage in range(self.pipeline):
                count = counts[stage]
                first, last = (stage, chunk) == (0, 0), (stage, chunk) == (self.pipeline - 1, self.chunks - 1)
                count -= first and self.common.args.get("account_for_embedding_in_pipeline_split") is True
                count -= last and self.common.args.get("account_for_loss_in_pipeline_split") is True
                found[-1].append(range(at, at + count))
                at += count
        if at != layers or any(len(r) != r.stop - r.start for dealt in found for r in dealt):
            raise LayoutError(f"its {self.pipeline} stages of {self.chunks} chunks take {at} layers of {layers}")
        return found

    def _counts(self, layers: int) -> list[int]:
        """Layers of one chunk of each stage, those included that stand for the embedding and the loss."""
        args = self.common.args
        first, last = (self.common.number(f"decoder_{end}_pipeline_num_layers") for end in ("first", "last"))
        layers += (args.get("account_for_embedding_in_pipeline_split") is True) + (
            args.get("account_for_loss_in_pipeline_split") is True
        )
        left = layers - (first or 0) - (last or 0)
        stages = self.pipeline - (first is not None) - (last is not None)
        each, rest = divmod(left, stages) if stages > 0 else (0, left)
        counts = [each] * self.pipeline
        counts[0] = each if first is None else first
        counts[-1] = each if last is None else last
        if rest or left < 0 or any(count % self.chunks for count in counts):
            raise LayoutError(
                f"{layers} layers do not divide by {self.pipeline} stages of {self.chunks} chunks"
                + (f" with {first} in the first and {last} in the last stage" if first or last else "")
            )
        return [count // self.chunks for count in counts]

    def of_chunk(self, names: Sequence[str], stage: int, chunk: int) -> list[str]:
        """The parameters of a chunk in the order of the names, experts of all ranks included.

        Raises:
            LayoutError: Nothing says which stage holds a parameter, or as `layers_of`.
        """
        layers = self.layers_of(stage, chunk)
        first, last = (stage, chunk) == (0, 0), (stage, chunk) == (self.pipeline - 1, self.chunks - 1)
        found: list[str] = []
        for name in names:
            if (layer := _LAYER.fullmatch(name)) is not None:
                taken = int(layer[1]) in layers
            elif self.pipeline == 1 or _FIRST.fullmatch(name):
                taken = first
            elif _LAST.fullmatch(name):
                taken = last
            else:
                raise LayoutError(f"nothing says which pipeline stage holds {printable(name)}")
            found += [name] if taken else []
        return found

    def is_shared(self, name: str) -> bool:
        """True for a parameter that expert parallelism does not distribute: it lies in the dense buffers."""
        return self.experts == 1 or EXPERT.fullmatch(name) is None

    def expert_rank(self, name: str, experts: int) -> int | None:
        """The expert-parallel rank that holds an expert's parameter; None for all other parameters.

        Args:
            name: The parameter.
            experts: The number of experts of its layer.
        """
        match = _numbered(name)
        return None if match is None or self.experts == 1 else match // max(experts // self.experts, 1)


def _numbered(name: str) -> int | None:
    layer = _LAYER.fullmatch(name)
    expert = None if layer is None else _LOCAL_EXPERT.fullmatch(layer[2])
    return None if expert is None else int(expert[2])


def tied(names: Mapping[str, object]) -> bool:
    """True if the output layer is the embedding: then a last stage of its own holds a copy of it."""
    return OUTPUT_LAYER not in names and WORD_EMBEDDINGS in names


# The order of registration.


def orders_of(names: Sequence[str], run: Run, *, saved: bool) -> list[list[str]]:
    """The orders in which a model may register its parameters; each one's lengths and masters decide.

    Args:
        names: The names of parameters in the order of the file: that of layers, and within them of keys.
        run: The run.
        saved: True if the keys of the file are in the order of the model.

    Raises:
        LayoutError: No order is known.
    """
    found: list[list[str]] = []
    said = run.common.args.get("transformer_impl"), run.common.args.get("moe_grouped_gemm")
    joined = {"local": (False,), "transformer_engine": (True,)}.get(said[0] if isinstance(said[0], str) else "")
    grouped = (said[1],) if isinstance(said[1], bool) else (False, True)
    unknown = next((n for n in names if _place(n, joined=False, grouped=False) is None), None)
    if unknown is None:
        for join in joined or (False, True):
            for group in grouped:
                places = {n: _place(n, joined=join, grouped=group) or () for n in names}
                found.append(sorted(names, key=places.__getitem__))
    if saved:
        keys = dict(zip(names, range(len(names)), strict=True))
        heads = _first_experts(keys)
        found += [
            sorted(names, key=lambda n, group=group: _saved_place(n, keys, heads, grouped=group)) for group in grouped
        ]
    if not found:
        raise LayoutError(
            f"the order in which a model registers {printable(unknown or '')} is not known, and a parallel save does "
            "not keep it"
        )
    return [order for at, order in enumerate(found) if order not in found[:at]]


def _place(name: str, *, joined: bool, grouped: bool) -> tuple[int, ...] | None:
    """A key that sorts parameters as a model registers them; None for a name that is not known.

    Args:
        name: The parameter.
        joined: True if norms are parts of the linear layers behind them, as in Transformer Engine.
        grouped: True if the experts of a layer are one module, which registers a kind of weight of all experts.
    """
    layer = _LAYER.fullmatch(name)
    module, _, leaf = (name if layer is None else layer[2]).rpartition(".")
    known = _OUTSIDE if layer is None else _MODULES
    expert = _LOCAL_EXPERT.fullmatch(name if layer is None else layer[2])
    inner = (0, 0)
    if expert is not None:
        module, _, leaf = expert[3].rpartition(".")
        part = _WITHIN.index(module) if module in _WITHIN else -1
        if part < 0:
            return None
        module, inner = "mlp.experts", (part, int(expert[2])) if grouped else (int(expert[2]), part)
    elif module.startswith("mlp.shared_experts"):
        within = leaf if module == "mlp.shared_experts" else module.removeprefix("mlp.shared_experts.")
        if within not in _WITHIN:
            return None
        module, inner, leaf = "mlp.shared_experts", (_WITHIN.index(within), 0), "weight" if within == leaf else leaf
    if module not in known or leaf not in _LEAVES:
        return None
    place = known.index(module)
    if joined and module == "input_layernorm":
        # The norm is a part of linear_qkv, which comes behind linear_proj.
        place, inner = known.index("self_attention.linear_qkv"), (-1, 0)
    number = -1 if layer is None and place < _OUTSIDE.index("decoder.final_layernorm") else _MOST_RANKS
    return (number if layer is None else int(layer[1]), place, *inner, _LEAVES.index(leaf))


def _first_experts(keys: Mapping[str, int]) -> dict[str, int]:
    """The first place of an expert's parameter, by layer."""
    heads: dict[str, int] = {}
    for name, at in keys.items():
        if EXPERT.fullmatch(name):
            heads.setdefault(name.partition(".mlp.experts.")[0], at)
    return heads


def _saved_place(name: str, keys: Mapping[str, int], heads: Mapping[str, int], *, grouped: bool) -> tuple[int, ...]:
    """A key that sorts names as the file has them, but the experts of a layer as their module registers them.

    Args:
        name: The parameter.
        keys: The place of each name in the file.
        heads: As `_first_experts` finds them.
        grouped: As in `_place`.
    """
    layer = _LAYER.fullmatch(name)
    expert = None if layer is None else _LOCAL_EXPERT.fullmatch(layer[2])
    if expert is None or grouped:
        return (keys[name],)
    return heads[name.partition(".mlp.experts.")[0]], int(expert[2]), keys[name]


def model_order(names: Sequence[str]) -> list[str]:
    """Names of all ranks in the order of the model: what is before layers, layers by number, and the rest.

    Args:
        names: The names in the order of the ranks' files: those of the first stage come first.
    """
    keys = {name: at for at, name in enumerate(names)}
    heads = _first_experts(keys)
    begin = next((at for name, at in keys.items() if _LAYER.fullmatch(name)), len(keys))

    def place(name: str) -> tuple[int, ...]:
        layer = _LAYER.fullmatch(name)
        outside = -1 if keys[name] < begin else _MOST_RANKS << 10
        return (outside if layer is None else int(layer[1]), *_saved_place(name, keys, heads, grouped=False))

    return sorted(names, key=place)


# Cuts by names, for files that hold the parts of tensor-parallel ranks under the names of the whole.


def cut_of(name: str, shapes: Mapping[str, tuple[int, ...]], run: Run, *, whole: bool = False) -> Cut:
    """How tensor parallelism cuts a parameter.

    Args:
        name: The parameter.
        shapes: The shapes by name.
        run: The run.
        whole: True for shapes of whole parameters, False for those of one rank's parts.

    Raises:
        LayoutError: Its name is not known, or a gated unit is not what the arguments of the run say.
    """
    ranks = run.expert_tensor if EXPERT.fullmatch(name) else run.tensor
    if ranks == 1 or _WHOLE.fullmatch(name):
        return Cut()
    if _COLUMN.fullmatch(name):
        return Cut(dim=0)
    if _ROW.fullmatch(name):
        return Cut(dim=1)
    if not GATED.fullmatch(name):
        raise LayoutError(f"nothing says how tensor parallelism cut {printable(name)}")
    rows = shapes[name][0]
    inner = shapes.get(f"{name[: name.index('linear_fc1')]}linear_fc2.weight", ())
    said = [run.common.args.get(name) for name in ("swiglu", "quick_geglu")]
    # Without a word on it, the shapes prove it: a plain unit has as many rows as linear_fc2 has columns.
    silent = all(one is None for one in said)
    gated = any(one is True for one in said) or (silent and len(inner) == 2 and rows == 2 * inner[1])
    if len(inner) != 2 or rows != (2 if gated else 1) * inner[1]:
        raise LayoutError(
            f"{printable(name)} has {rows} rows for {inner[-1] if inner else 'unknown'} columns of linear_fc2, and the "
            f"arguments say that it is {'gated' if gated else 'not gated'}"
        )
    if run.common.args.get("moe_mlp_glu_interleave_size") and EXPERT.fullmatch(name):
        raise LayoutError("the halves of gated experts are interleaved (moe_mlp_glu_interleave_size)")
    return Cut(dim=0, sections=(rows // 2 * (1 if whole else ranks),) * 2) if gated else Cut(dim=0)

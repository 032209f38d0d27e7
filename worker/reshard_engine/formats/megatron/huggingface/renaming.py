"""A checkpoint of Megatron-core under the names of Hugging Face, the way back, and `config.json`.

Names are a view: the tensors of a renamed checkpoint are boxes, or transposes, of those that its files hold. Masters
and optimizer states follow their weights. Numbers of heads come from the run's arguments, or from `config.json`; the
shapes must agree with them.

Source: megatron-core 0.16.1 `transformer/attention.py` (`get_query_key_value_tensors`: the rows of `linear_qkv`),
`transformer/mlp.py` (`[gate; up]` in `linear_fc1`); transformers 5.23.0 `models/*/configuration_*.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from reshard.choices import NameScheme, TargetFormat
from reshard.errors import RequestError, SourceError, listed, printable
from reshard.models.jobs import ConvertRequest, NotCarried
from reshard.options import MegatronOptions
from reshard_engine.checkpoint import Agreement, Buffer, Checkpoint, FormatFacts, Parameter
from reshard_engine.containers.source_file import SourceFile, parse_json
from reshard_engine.formats.megatron.common import CommonState
from reshard_engine.formats.megatron.huggingface.rules import (
    Attention,
    Family,
    Matched,
    Rows,
    Span,
    UnmappedError,
    accepts,
    contradicted,
    families,
    kind_of_value,
    matching,
    of_hugging_face,
    of_megatron,
    part_rows,
    requested_family,
    spans,
    unsaid,
)
from reshard_engine.formats.megatron.model import MegatronFacts
from reshard_engine.formats.megatron.names import BUFFERS
from reshard_engine.formats.megatron.writer import said_args
from reshard_engine.formats.model_weights import checked_name, model_dtype
from reshard_engine.pickles.nodes import Node, PList, PTuple, sequence_items
from reshard_engine.storage.locations import open_location, refuse_hub_link_elsewhere
from reshard_engine.storage.protocol import read_bytes
from reshard_engine.tensors.shard_map import LogicalTensor, ShardMap
from reshard_engine.tensors.views import Box, Derived, Transposed, View

_CONFIG = "config.json"
_MOST_BYTES = 1 << 20
_WITH_FILES = (TargetFormat.SAFETENSORS, TargetFormat.TORCH)
_FIRST_NORM = "decoder.layers.{layer}.input_layernorm.weight"
_LEFT_OUT = "a tensor that the model computes anew"
_QKV, _PROJECTION, _KEY_NORM = "linear_qkv.", "linear_proj.weight", "k_layernorm.weight"
_RULES = "--hf-rules NAME, one of {}, or a file of rules (docs/formats/megatron-hf.md)"
_OF_FILES = "--model-files DIR names the directory with the config.json of the model"


def renamed(checkpoint: Checkpoint, request: ConvertRequest) -> Checkpoint:
    """The checkpoint under the names of `--names hf` or `--names megatron-core`; as it is without them.

    Raises:
        RequestError: `request.unsatisfiable` where nothing says the architecture, or its rules do not explain a name.
        SourceError: What is wrong with `config.json`.
    """
    names = request.names
    if names is NameScheme.HUGGING_FACE:
        return _there(checkpoint, request)
    if names is NameScheme.MEGATRON_CORE and not isinstance(checkpoint.facts, MegatronFacts):
        return _back(checkpoint, request)
    return checkpoint


# To Hugging Face.


def _there(checkpoint: Checkpoint, request: ConvertRequest) -> Checkpoint:
    facts = checkpoint.facts
    if not isinstance(facts, MegatronFacts):
        raise RequestError(
            "request.invalid",
            f"--names hf: for checkpoints of Megatron-core, and {printable(checkpoint.url)} is {checkpoint.format}",
            fix="leave it out: the names are those of the model that was saved",
        )
    args = {str(key): _plain(node) for key, node in facts.common.args.items()}
    names = [*(p.fqn for p in checkpoint.parameters), *(b.fqn for b in checkpoint.buffers)]
    said = request.options.of(MegatronOptions).hf_rules
    chosen, matched, left_out = _of_run(None if said is None else requested_family(said), args, names)
    shapes, files = checkpoint.shapes(), request.model_files is not None
    config = None if request.model_files is None else _ConfigFile.of(request.model_files, request)
    heads = _heads(args, config, chosen[0])
    sizes = {m.megatron: attention_of(m, shapes, heads, args) for m in matched if m.rule.rows is Rows.QKV}
    work = Renaming(checkpoint)
    for one in matched:
        work.split(one, sizes.get(one.megatron))
    done = work.checkpoint([(m.megatron, m.parts) for m in matched], left_out)
    written = {name for m in matched for name in m.parts}
    shared = {a: o for a, o in chosen[0].tied.items() if a not in written and o in written}
    done = replace(done, shared={**done.shared, **shared})
    if request.to not in _WITH_FILES or files:
        return done
    said_of_model = _Said(args, {m.megatron: shapes[m.megatron] for m in matched}, sizes, model_dtype(done, request))
    data, why = said_of_model.config(chosen)
    if data is not None:
        return replace(done, model_files={**done.model_files, _CONFIG: data})
    return replace(done, warnings=(*done.warnings, f"{_CONFIG} is not written: {why}"))


def _of_run(
    said: Family | None, args: Mapping[str, Any], names: Sequence[str]
) -> tuple[list[Family], list[Matched], list[str]]:
    """The families whose names a run's parameters get, the entries of the first one, and the names that are left out.

    Families of the same names, which only `config.json` tells apart, are all there.

    Raises:
        RequestError: `request.unsatisfiable`.
    """
    if said is not None:
        if wrong := contradicted(said, args):
            raise RequestError(
                "request.unsatisfiable",
                f"the run is not {said.name}: it has {listed(wrong)}",
                fix=_RULES.format(", ".join(families())),
            )
        try:
            return [said], *of_megatron(said, names)
        except UnmappedError as error:
            raise _unmapped(said, error) from error
    found: list[tuple[Family, list[Matched], list[str]]] = []
    open_: dict[str, list[str]] = {}
    for family in families().values():
        if contradicted(family, args):
            continue
        try:
            matched, left_out = of_megatron(family, names)
        except UnmappedError:
            continue
        if lacking := unsaid(family, args):
            open_[family.name] = lacking
        else:
            found.append((family, matched, left_out))
    if len({frozenset(_identity(m)) for _, m, _ in found}) == 1:
        return [f for f, _, _ in found], found[0][1], found[0][2]
    if not found and open_:
        first, lacking = next(iter(open_.items()))
        text = f"the names may be those of {listed([*open_])}, and the run's arguments do not say {listed(lacking)}"
        raise RequestError("request.unsatisfiable", text, fix=f"--hf-rules {first}, if that is what it is")
    text = "the names of its parameters and the arguments of its run are those of no known architecture"
    raise RequestError("request.unsatisfiable", text, fix=_RULES.format(", ".join(families())))


def _identity(matched: Iterable[Matched]) -> Iterator[tuple[object, ...]]:
    """All that two families must have in common to give the same names to the same elements."""
    return ((m.megatron, m.parts, m.rule.rows, m.rule.transposed) for m in matched)


def _unmapped(family: Family, error: UnmappedError) -> RequestError:
    return RequestError(
        "request.unsatisfiable",
        f"{family.name}: {error}",
        fix=f"another architecture, or rules of your own: {_RULES.format(', '.join(families()))}",
    )


def _heads(args: Mapping[str, Any], config: _ConfigFile | None, family: Family) -> int | None:
    """The number of heads that the arguments of a run say, or a `config.json` that the user names.

    Raises:
        RequestError: `request.unsatisfiable` if they differ.
    """
    said, other = _count(args.get("num_attention_heads")), None if config is None else config.count(family.heads)
    if said is not None and other is not None and said != other:
        raise RequestError(
            "request.unsatisfiable",
            f"the run has {said} attention heads, and {config.url if config else ''} says {other}",
            fix="--model-files names the directory of this model",
        )
    return said if said is not None else other


def _count(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


def attention_of(
    one: Matched, shapes: Mapping[str, tuple[int, ...]], heads: int | None, args: Mapping[str, Any]
) -> Attention:
    """The sizes of the attention whose queries, keys and values are one parameter; its shapes prove them.

    The columns of the projection behind it are all heads, so they tell the size of a head; the rows tell the groups.

    Raises:
        RequestError: `request.unsatisfiable` where they do not, or where an argument says another number.
    """
    name = one.megatron
    head, found, _ = name.rpartition(_QKV)
    columns = shapes.get(f"{head}{_PROJECTION}", ())
    if heads is None:
        text = f"nothing says how many heads {printable(name)} has (num_attention_heads)"
        raise RequestError("request.unsatisfiable", text, fix=_OF_FILES)
    size = columns[1] // heads if found and len(columns) == 2 and columns[1] % heads == 0 else 0
    size = size or _count(args.get("kv_channels")) or 0
    rows = shapes[name][0]
    groups = (rows // size - heads) // 2 if size else 0
    sizes = Attention(heads, groups, size)
    said = _count(args.get("kv_channels")), _count(args.get("num_query_groups"))
    # Megatron-LM has the number of groups 1 where it has no groups.
    grouped = args.get("group_query_attention") is not False
    if groups < 1 or said[0] not in (None, size) or (grouped and said[1] not in (None, groups)):
        raise RequestError(
            "request.unsatisfiable",
            f"{printable(name)} {shapes[name]} is not that of {heads} heads of {size or 'unknown'} elements: it would "
            f"have {groups} groups; the arguments say kv_channels={said[0]}, num_query_groups={said[1]}",
            fix="the rules are of another architecture",
        )
    return sizes


def _plain(node: Node) -> Any:
    """An argument's value; a text that equals nothing for an object."""
    if node is None or isinstance(node, str | int | float | bool):
        return node
    if isinstance(node, PList | PTuple):
        return [_plain(n) for n in sequence_items(node, what="args")]
    return f"<{type(node).__name__}>"


# From Hugging Face.


@dataclass(frozen=True, slots=True)
class _ConfigFile:
    """A `config.json`."""

    url: str
    facts: Mapping[str, Any]
    file: SourceFile

    @classmethod
    def of(cls, place: str, request: ConvertRequest) -> _ConfigFile | None:
        """The file in a directory; None if there is none.

        Raises:
            SourceError: `checkpoint.malformed`.
        """
        location = open_location(place, request.source.profile)
        info = location.store.list_directory(location.path).by_name.get(_CONFIG)
        if info is None:
            return None
        refuse_hub_link_elsewhere(location, info.path)
        url, said = location.child(_CONFIG).url, None
        if info.size_bytes <= _MOST_BYTES:
            said = parse_json(read_bytes(location.store, info), code="checkpoint.malformed", what=printable(url))
        if not isinstance(said, dict):
            raise SourceError("checkpoint.malformed", f"{printable(url)} is not a JSON object", fix="copy it again")
        return cls(url, cast("dict[str, Any]", said), SourceFile(location.store, _CONFIG, (info,)))

    def count(self, key: str) -> int | None:
        """A positive number."""
        return _count(self.facts.get(key))

    @property
    def tied(self) -> bool | None:
        """True if the head is the embedding; None where nothing says it."""
        said = self.facts.get("tie_word_embeddings")
        return said if isinstance(said, bool) else None


def _back(checkpoint: Checkpoint, request: ConvertRequest) -> Checkpoint:
    config = _ConfigFile.of(request.model_files or checkpoint.url, request)
    read = _read_names(checkpoint, request, config)
    family, matched = read.family, read.matched
    _require_head(family, matched, config)
    work = Renaming(checkpoint, read.names)
    heads = None if config is None else config.count(family.heads)
    sizes: dict[str, Attention] = {}
    for one in matched:
        if one.rule.rows is Rows.QKV:
            sizes[one.megatron] = _of_parts(one, work.shapes, heads)
        work.join(one, sizes.get(one.megatron))
    for alias in read.copies:
        work.agree(alias, family.tied[alias])
    done = work.checkpoint([(p, (m.megatron,)) for m in matched for p in m.parts], read.left_out)
    if type(done.facts) is FormatFacts:
        args = _proven_args(done.shapes(), [*sizes.values()], heads)
        done = replace(done, facts=MegatronFacts(CommonState({}, args), of_run=False))
    return replace(done, files=done.files if config is None else (*done.files, config.file))


def _proven_args(
    shapes: Mapping[str, tuple[int, ...]], sizes: Sequence[Attention], heads: int | None
) -> dict[str | int, Node]:
    """The arguments of a run of Megatron-core that the shapes of a model prove."""
    rows, hidden = shapes.get("embedding.word_embeddings.weight", (None, None))
    layers = {at[0] for _, at in matching(_FIRST_NORM, shapes)}
    expert = "decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc2.weight"
    experts = {at[1] for _, at in matching(expert, shapes)}
    found: dict[str | int, Node] = {
        "num_layers": len(layers), "hidden_size": hidden, "num_attention_heads": heads, "vocab_size": rows,
        "num_experts": len(experts) or None, "untie_embeddings_and_output_weights": "output_layer.weight" in shapes,
    }  # fmt: skip
    if len({*sizes}) == 1:
        one = sizes[0]
        found |= {
            "num_attention_heads": one.heads, "num_query_groups": one.groups, "kv_channels": one.size,
            "group_query_attention": one.groups != one.heads,
        }  # fmt: skip
    return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True, slots=True)
class _ReadNames:
    """The family of a source's names, and the parameters that its rules match."""

    family: Family
    matched: Sequence[Matched]
    left_out: Sequence[str]
    names: Mapping[str, str]
    """The source's names by those that a model with its head has."""
    copies: Sequence[str] = ()
    """Names that `config.json` ties to others, and that are stored nevertheless."""


def _read_names(checkpoint: Checkpoint, request: ConvertRequest, config: _ConfigFile | None) -> _ReadNames:
    """The family of a source with names of Hugging Face, and its names.

    Raises:
        RequestError: `request.unsatisfiable`.
    """
    said = request.options.of(MegatronOptions).hf_rules
    model_type = None if config is None else config.facts.get("model_type")
    if said is not None:
        tried = [requested_family(said)]
    else:
        tried = [f for f in families().values() if model_type is None or model_type in f.model_types]
    names = [*(p.fqn for p in checkpoint.parameters), *(b.fqn for b in checkpoint.buffers)]
    args = said_args(request.options.of(MegatronOptions).megatron_args)
    local = args.get("transformer_impl", "local") == "local"
    found: list[_ReadNames] = []
    for family in tried:
        longer, tied = _with_prefix(family, names), config is not None and config.tied is True
        copies = [a for a, o in family.tied.items() if tied and a in longer and o in longer]
        others = [a for a in checkpoint.shared if a not in family.tied]
        try:
            matched, left_out = of_hugging_face(family, [*(n for n in longer if n not in copies), *others], local=local)
        except UnmappedError as error:
            if len(tried) == 1:
                raise _unmapped(family, error) from error
            continue
        found.append(_ReadNames(family, matched, left_out, longer, copies))
    if len({frozenset(_identity(f.matched)) for f in found}) == 1:
        return found[0]
    known = listed([f.family.name for f in found]) or "no known architecture"
    text = f"the names of {printable(checkpoint.url)} are those of {known}"
    if not tried:
        text = f"no rules are there for models of the type {printable(str(model_type))}"
    raise RequestError("request.unsatisfiable", text, fix=_RULES.format(", ".join(families())))


def _with_prefix(family: Family, names: Sequence[str]) -> dict[str, str]:
    """The names as a model with its head has them, and the source's names."""
    bare = family.prefix and not any(n.startswith(family.prefix) for n in names)
    heads = {*family.tied}
    return {family.prefix + n if bare and n not in heads else n: n for n in names}


def _require_head(family: Family, matched: Sequence[Matched], config: _ConfigFile | None) -> None:
    """Refuse a model that lacks the head that its configuration says it has.

    Raises:
        RequestError: `request.unsatisfiable`.
    """
    written = {p for m in matched for p in m.parts}
    lost = [a for a in family.tied if a not in written] if config is not None and config.tied is False else []
    if lost:
        text = f"{printable(lost[0])} is not there, and config.json says that it is no other parameter"
        raise RequestError("request.unsatisfiable", f"{family.name}: {text} (tie_word_embeddings)", fix="copy it again")


def _of_parts(one: Matched, shapes: Mapping[str, tuple[int, ...]], heads: int | None) -> Attention:
    """The sizes of the attention whose queries, keys and values are these parts.

    Raises:
        RequestError: `request.unsatisfiable` if nothing says them, or the shapes contradict.
    """
    parts = [shapes[p] for p in one.parts]
    axis = -1 if one.rule.transposed else 0
    rows = [s[axis] for s in parts if s]
    key_norm = _norm_of(one, shapes)
    if heads is None and key_norm and len(rows) == 3:
        heads = rows[0] // key_norm
    if heads is None:
        text = f"nothing says how many heads {printable(one.parts[0])} has: there is no config.json beside the weights"
        raise RequestError("request.unsatisfiable", text, fix=_OF_FILES)
    if len(rows) == 1:
        # One parameter of all: without groups, it is three times as long as the queries.
        size = rows[0] // (3 * heads)
        return Attention(heads, heads, size)
    size = rows[0] // heads if rows else 0
    return Attention(heads, rows[1] // size if size else 0, size)


def _norm_of(one: Matched, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """The size of a head that a norm of keys beside the keys says; 0 if there is none."""
    for part in one.parts:
        head = part.rpartition(".k_proj.")[0]
        for name in (f"{head}.k_norm.weight", f"{head}.k_layernorm.weight"):
            if head and len(shapes.get(name, ())) == 1:
                return shapes[name][0]
    return 0


# The renamed checkpoint.


class Renaming:
    """Renames parameters, splits them into others, and joins them, as views."""

    def __init__(self, checkpoint: Checkpoint, names: Mapping[str, str] | None = None) -> None:
        """Begin with a checkpoint.

        Args:
            checkpoint: The source.
            names: Its names by those that `split`, `join` and `shapes` have; None for the same.
        """
        called = {old: new for new, old in (names or {}).items()}
        self._source = checkpoint
        self._map: ShardMap = checkpoint.shard_map
        self._owners = {called.get(p.fqn, p.fqn): p for p in checkpoint.parameters}
        self._buffers = {called.get(b.fqn, b.fqn): b for b in checkpoint.buffers}
        self._called = called
        self.shapes = {called.get(name, name): shape for name, shape in checkpoint.shapes().items()}
        strided = self._map.strides_of >= 0
        self._strided = {*np.unique(self._map.tensor[strided]).tolist()}
        self._added: list[tuple[LogicalTensor, Derived]] = []
        self._renamed: dict[int, str] = {}
        self._made: dict[str, Parameter | Buffer] = {}
        self._agreements: list[Agreement] = []

    def _add(self, tensor: LogicalTensor, made: Derived) -> int:
        self._added.append((tensor, made))
        return len(self._map.tensors) + len(self._added) - 1

    # Megatron-core's parameter, taken apart.

    def split(self, one: Matched, attention: Attention | None) -> None:
        """Give a parameter of Megatron-core the names, and the shapes, of its parts."""
        owner = self._owners.get(one.megatron) or self._buffers[one.megatron]
        shape = self.shapes[one.megatron]
        places = self._spans(one, shape, attention)
        rows = part_rows(places, len(one.parts))
        turned = self._is_turned(one, shape)
        for part, name in enumerate(one.parts):
            mine = [s for s in places if s.part == part]

            def taken(number: int, mine: list[Span] = mine, length: int = rows[part], name: str = name) -> int:
                return self._taken(number, name, mine, length, turned=turned)

            new = (rows[part], *shape[1:])
            self._make(name, new[::-1] if turned else new, owner, taken)

    def _taken(self, number: int, name: str, mine: Sequence[Span], length: int, *, turned: bool) -> int:
        tensor = self._map.tensors[number]
        shape, rest = tensor.shape, tensor.shape[1:]
        zero = (0,) * len(rest)
        if len(mine) == 1 and mine[0].rows == (shape or (1,))[0]:
            found = self._rename(number, name, turned=turned)
        else:
            self._require_packed(number)
            new = (length, *rest)
            boxes = [Box(number, shape, (s.whole, *zero), (s.at, *zero), (s.rows, *rest)) for s in mine]
            found = self._add(LogicalTensor(name, tensor.state, tensor.dtype, new), _view(name, new, boxes))
        return self._turned(found, name) if turned else found

    # Its parts, joined.

    def join(self, one: Matched, attention: Attention | None) -> None:
        """Make a parameter of Megatron-core of its parts."""
        owners = [self._owners.get(p) or self._buffers[p] for p in one.parts]
        shapes = [self.shapes[p] for p in one.parts]
        turned = self._is_turned(one, shapes[0])
        lying = [s[::-1] if turned else s for s in shapes]
        if len({s[1:] for s in lying}) > 1 or (len(lying) > 1 and not all(lying)):
            raise self._misfit(one, f"its parts are {listed([str(s) for s in shapes])}")
        shape = (sum(s[0] for s in lying), *lying[0][1:]) if lying[0] else ()
        places = self._spans(one, shape, attention)
        if part_rows(places, len(one.parts)) != [s[0] for s in lying if s] and shape:
            raise self._misfit(one, f"its parts are {listed([str(s) for s in shapes])}")
        first = owners[0]
        if len(owners) == 1:
            self._make(
                one.megatron, shape, first, lambda n: self._joined([n], one.megatron, places, shape, turned=turned)
            )
            return
        found = [o for o in owners if isinstance(o, Parameter)]
        kinds = {
            (p.group, p.weight is None, frozenset(p.states), tuple(sorted((k, v.value) for k, v in p.scalars.items())))
            for p in found
        }
        if len(found) < len(owners) or len(kinds) > 1:
            raise self._misfit(one, "its parts are of several param groups or steps, or have other states")
        numbers = {"weight": [p.weight for p in found], **{s: [p.states[s] for p in found] for s in found[0].states}}
        first = found[0]

        def joined(number: int) -> int:
            state = next(s for s, held in numbers.items() if held[0] == number)
            return self._joined(
                [n for n in numbers[state] if n is not None], one.megatron, places, shape, turned=turned
            )

        self._make(one.megatron, shape, first, joined)

    def _joined(
        self, numbers: Sequence[int], name: str, places: Sequence[Span], shape: tuple[int, ...], *, turned: bool
    ) -> int:
        tensors = [self._map.tensors[n] for n in numbers]
        if len({t.dtype for t in tensors}) > 1:
            text = f"the parts of {printable(name)} are of the types {listed([t.dtype.name for t in tensors])}"
            raise RequestError("request.unsatisfiable", text, fix="convert SRC with --dtype first")
        if len(places) == 1:
            found = self._rename(numbers[0], name, turned=turned)
        else:
            for number in numbers:
                self._require_packed(number)
            rest, zero = shape[1:], (0,) * (len(shape) - 1)
            boxes = [
                Box(
                    numbers[s.part],
                    tensors[s.part].shape,
                    *((ends[::-1] if turned else ends) for ends in ((s.at, *zero), (s.whole, *zero), (s.rows, *rest))),
                )
                for s in places
            ]
            new = shape[::-1] if turned else shape
            found = self._add(LogicalTensor(name, tensors[0].state, tensors[0].dtype, new), _view(name, new, boxes))
        return self._turned(found, name) if turned else found

    def agree(self, alias: str, owner: str) -> None:
        """Leave out a parameter that another one is as well; both must be equal."""
        one, other = self._owners[owner], self._owners[alias]
        self._agreements.append(
            Agreement(
                owner, "weight", one.value(), other.value(), f"{alias}, which config.json ties to it",
                fix="config.json is of another model: --model-files names the right directory",
            )
        )  # fmt: skip

    # What both directions need.

    def _spans(self, one: Matched, shape: tuple[int, ...], attention: Attention | None) -> list[Span]:
        try:
            return spans(one.rule, shape[0] if shape else 1, attention)
        except ValueError as error:
            raise self._misfit(one, str(error)) from error

    def _misfit(self, one: Matched, text: str) -> RequestError:
        return RequestError(
            "request.unsatisfiable",
            f"{printable(one.megatron)} and {listed(one.parts)} do not fit: {text}",
            fix="the rules are of another architecture, or the configuration is of another model",
        )

    def _is_turned(self, one: Matched, shape: tuple[int, ...]) -> bool:
        if one.rule.transposed and len(shape) != 2:
            raise self._misfit(one, f"a tensor of {len(shape)} dimensions is not transposed")
        return one.rule.transposed

    def _rename(self, number: int, name: str, *, turned: bool) -> int:
        if not turned:
            self._renamed[number] = name
        return number

    def _turned(self, number: int, name: str) -> int:
        first = len(self._map.tensors)
        tensor = self._map.tensors[number] if number < first else self._added[number - first][0]
        return self._add(LogicalTensor(name, tensor.state, tensor.dtype, tensor.shape[::-1]), Transposed(number))

    def _require_packed(self, number: int) -> None:
        if number in self._strided:
            text = f"{printable(self._map.tensors[number].fqn)} lies strided in its file"
            raise SourceError("source.unsupported", text, fix="save it with contiguous tensors, or as safetensors")

    def _make(self, name: str, shape: tuple[int, ...], owner: Parameter | Buffer, tensor: Callable[[int], int]) -> None:
        checked_name(name)
        if isinstance(owner, Buffer):
            self._made[name] = replace(owner, fqn=name, tensor=tensor(owner.tensor))
            return
        if BUFFERS.fullmatch(name) and owner.weight is not None and not owner.states:
            self._made[name] = Buffer(name, tensor(owner.weight))
            return
        if owner.padding and shape != owner.shape:
            text = f"{printable(owner.fqn)} has rows of padding, and its rule changes rows"
            raise RequestError("request.unsatisfiable", text, fix="a rule for a vocabulary only renames it")
        states = {state: tensor(number) for state, number in owner.states.items()}
        weight = None if owner.weight is None else tensor(owner.weight)
        self._made[name] = replace(owner, fqn=name, shape=shape, weight=weight, states=states, cut=None)

    def checkpoint(self, names: Sequence[tuple[str, tuple[str, ...]]], left_out: Sequence[str]) -> Checkpoint:
        """The renamed checkpoint.

        Args:
            names: The names that each of the source's parameters becomes, or becomes a part of.
            left_out: Names of the source that have no place in the target.

        Raises:
            RequestError: `request.unsatisfiable` for more parts than a view may have.
        """
        source, becomes = self._source, dict(names)
        tensors = tuple(
            replace(t, fqn=self._renamed[i]) if i in self._renamed else t for i, t in enumerate(self._map.tensors)
        )
        try:
            shard_map = replace(self._map, tensors=tensors).with_derived(self._added)
        except ValueError as error:
            text = f"the tensors cannot be put together under these names: {error}"
            raise RequestError("request.unsatisfiable", text, fix="convert SRC without --names first") from error
        order = [n for p in source.parameters for n in becomes.get(self._called.get(p.fqn, p.fqn), ())]
        made = [self._made[n] for n in dict.fromkeys(order)]
        module = [m for n in source.module_names for m in becomes.get(self._called.get(n, n), ())]
        unproven = [m for n in source.unproven for m in becomes.get(self._called.get(n, n), ())]
        return replace(
            source,
            shard_map=shard_map,
            parameters=tuple(p for p in made if isinstance(p, Parameter)),
            buffers=tuple(b for b in self._made.values() if isinstance(b, Buffer)),
            module_names=tuple(dict.fromkeys(module)),
            unproven=frozenset(unproven),
            agreements=(*source.agreements, *self._agreements),
            not_carried=(*source.not_carried, *(NotCarried(path=n, reason=_LEFT_OUT) for n in left_out)),
            shared={},
            copies={},
        )


def _view(name: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> View:
    """A view of these boxes.

    Raises:
        RequestError: `request.unsatisfiable` for more boxes than a view may have.
    """
    try:
        return View(shape, tuple(boxes))
    except ValueError as error:
        text = f"{printable(name)} cannot be put together: {error}"
        raise RequestError("request.unsatisfiable", text, fix="--names is for models with fewer groups") from error


# `config.json` from the arguments of a run.


class _MissingError(Exception):
    """The facts that a run does not say, in words."""


@dataclass(frozen=True, slots=True)
class _Said:
    """The known facts about a model."""

    args: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    """By the names of Megatron-core."""
    sizes: Mapping[str, Attention]
    dtype: str | None

    def config(self, tried: Sequence[Family]) -> tuple[bytes | None, str]:
        """The text of `config.json`, or the reason why there is none."""
        family = tried[0]
        if len(tried) > 1:
            return None, f"the names are those of {listed([f.name for f in tried])}: --hf-rules says which it is"
        if not family.config:
            return None, "the rules have no `config`"
        missing = dict.fromkeys(unsaid(family, self.args))
        found: dict[str, Any] = {}
        for key, value in family.config.items():
            try:
                found[key] = self._value(value)
            except _MissingError as error:
                missing[str(error)] = None
        if missing:
            return None, f"the run's arguments do not say {', '.join(missing)} ({_OF_FILES})"
        return json.dumps(found, indent=2, ensure_ascii=False).encode() + b"\n", ""

    def _value(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._value(v) for v in cast("list[Any]", value)]
        if not isinstance(value, dict):
            return value
        facts = cast("dict[str, Any]", value)
        kind = kind_of_value(facts) or ""
        made: Mapping[str, Callable[[Any], Any]] = {
            "argument": lambda name: self._argument(name, facts),
            "rows": lambda pattern: self._length(pattern, 0),
            "columns": lambda pattern: self._length(pattern, 1),
            "absent": lambda pattern: not any(matching(pattern, self.shapes)),
            "layers_with": self._layers,
            "leading_layers_with": self._first_layers,
            "layout": self._layout,
            "ratio": self._ratio,
            "dtype": lambda _: self._dtype(),
            "all": lambda inner: {key: self._value(v) for key, v in inner.items()},
            "cases": self._case,
        }
        return made[kind](facts[kind])

    def _argument(self, name: str, facts: Mapping[str, Any]) -> Any:
        said = self.args.get(name)
        if said is None and "else" not in facts:
            raise _MissingError(name)
        return self._value(facts["else"]) if said is None else said

    def _layers(self, pattern: str) -> list[int]:
        return sorted(at[0] for _, at in matching(pattern, self.shapes) if at)

    def _first_layers(self, pattern: str) -> int:
        layers = self._layers(pattern)
        if layers != [*range(len(layers))]:
            raise _MissingError(f"a number of first layers with {pattern}")
        return len(layers)

    def _ratio(self, names: Sequence[str]) -> int:
        one, other = (_count(self.args.get(name)) for name in names)
        if one is None or other is None or one % other:
            raise _MissingError(" and ".join(names))
        return one // other

    def _dtype(self) -> str:
        if self.dtype is None:
            raise _MissingError("the type of the weights")
        return self.dtype

    def _case(self, cases: Sequence[Mapping[str, Any]]) -> Any:
        asked: dict[str, None] = {}
        for case in cases:
            when = cast("Mapping[str, Any]", case.get("when") or {})
            if all(accepts(allowed, self.args.get(name)) for name, allowed in when.items()):
                return self._value(case.get("value"))
            asked |= dict.fromkeys(when)
        raise _MissingError(" or ".join(asked))

    def _length(self, pattern: str, dim: int) -> int:
        found = {self.shapes[name][dim] for name, _ in matching(pattern, self.shapes) if len(self.shapes[name]) > dim}
        if len(found) != 1:
            raise _MissingError(f"one length of {pattern}")
        return found.pop()

    def _layout(self, what: str) -> int:
        if what == "layers":
            return 1 + max((at[0] for _, at in matching(_FIRST_NORM, self.shapes)), default=-1)
        sizes = self.sizes.values()
        found = {{"heads": s.heads, "groups": s.groups, "head_size": s.size}[what] for s in sizes}
        if what == "heads" and not self.sizes and (said := _count(self.args.get("num_attention_heads"))) is not None:
            return said
        if len(found) != 1:
            raise _MissingError(f"one number of {what}")
        return found.pop()

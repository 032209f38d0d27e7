"""Rules that name Megatron-core's parameters as Hugging Face does: each element once, both ways, or refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file, save_file

import reshard
from reshard.choices import OpaquePolicy
from reshard.errors import RequestError
from reshard_engine.execute import gather
from reshard_engine.execute.casts.cast import NumpyCast
from reshard_engine.formats.megatron.huggingface.rules import (
    Attention,
    Family,
    Rows,
    Rule,
    UnmappedError,
    accepts,
    contradicted,
    families,
    of_hugging_face,
    of_megatron,
    parse_family,
    part_rows,
    requested_family,
    spans,
    unsaid,
)
from reshard_engine.formats.megatron.names import KeyRules
from reshard_engine.formats.sources import read_checkpoint
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.locations import open_location
from reshard_engine.tensors.dtypes import BY_NAME, FLOAT32
from reshard_engine.tensors.shard_map import LogicalTensor
from reshard_engine.tensors.views import Transposed

FAMILIES = tuple(families())
PAGE = Path(__file__).parents[3] / "docs" / "formats" / "megatron-hf.md"


def filled(family: Family, *, layers: int, experts: int) -> list[str]:
    """The names that a model of Megatron-core with every kind of parameter has."""
    places = [(layer, expert) for layer in range(layers) for expert in range(experts)]
    names = (
        rule.megatron[0].replace("{layer}", str(layer)).replace("{expert}", str(expert))
        for layer, expert in places
        for rule in family.rules
    )
    return [*dict.fromkeys(names)]


# Families.


@pytest.mark.parametrize("name", FAMILIES)
def test_names_of_a_family_go_there_and_back(name: str) -> None:
    family = families()[name]
    names = filled(family, layers=12, experts=11)
    matched, left_out = of_megatron(family, names)
    assert [m.megatron for m in matched] == names
    assert left_out == []
    parts = [part for m in matched for part in m.parts]
    assert len({*parts}) == len(parts)
    back, _ = of_hugging_face(family, reversed(parts))
    assert {(m.megatron, m.parts) for m in back} == {(m.megatron, m.parts) for m in matched}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_tells_what_a_config_needs(name: str) -> None:
    family = families()[name]
    assert family.config["model_type"] in family.model_types
    assert len(family.config["architectures"]) == 1
    assert {"vocab_size", "tie_word_embeddings", "torch_dtype"} <= family.config.keys()
    assert not contradicted(family, {})
    assert {"normalization", "position_embedding_type"} <= {*unsaid(family, {})}


@pytest.mark.parametrize("name", FAMILIES)
def test_what_changes_numbers_and_no_name_shows_is_refused(name: str) -> None:
    """Weights of norms without their one, gates, clamps: the names are the same, and the model is another one."""
    family = families()[name]
    for argument, value in (
        ("apply_layernorm_1p", True),
        ("qk_l2_norm", True),
        ("attention_output_gate", True),
        ("softmax_type", "off-by-one"),
        ("mtp_num_layers", 1),
    ):
        assert contradicted(family, {argument: value}) == [f"{argument}={value}"]


def test_families_differ_in_names_or_arguments() -> None:
    """But for Llama and Mistral, which only their configuration tells apart."""
    seen: dict[tuple[frozenset[Rule], str], list[str]] = {}
    for family in families().values():
        said = {k: v for k, v in family.arguments.items() if None not in v}
        seen.setdefault((frozenset(family.rules), json.dumps(said, sort_keys=True)), []).append(family.name)
    assert [names for names in seen.values() if len(names) > 1] == [["llama", "mistral"]]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_missing_or_unknown_name_is_refused(name: str) -> None:
    family = families()[name]
    names = filled(family, layers=2, experts=2)
    for lost in names:
        rule = next(m.rule for m in of_megatron(family, names)[0] if m.megatron == lost)
        if not rule.optional:
            with pytest.raises(UnmappedError, match=re.escape(lost)):
                of_megatron(family, [n for n in names if n != lost])
    for unknown in ("decoder.layers.0.mlp.adapter.weight", "decoder.layers.00.input_layernorm.weight", "x", "0"):
        with pytest.raises(UnmappedError, match=re.escape(unknown)):
            of_megatron(family, [*names, unknown])
    parts = [p for m in of_megatron(family, names)[0] for p in m.parts]
    several = next(m for m in of_megatron(family, names)[0] if len(m.parts) > 1 or len(m.parts) == len(parts[:1]))
    if len(several.parts) > 1:
        with pytest.raises(UnmappedError, match=re.escape(several.parts[0])):
            of_hugging_face(family, [p for p in parts if p != several.parts[0]])


def test_experts_and_layers_have_no_gaps() -> None:
    family = families()["qwen3-moe"]
    names = filled(family, layers=3, experts=4)
    for gap in (
        "decoder.layers.1.mlp.experts.local_experts.2.linear_fc2.weight",
        "decoder.layers.1.input_layernorm.weight",
    ):
        with pytest.raises(UnmappedError, match=re.escape(gap)):
            of_megatron(family, [n for n in names if n != gap])
    with pytest.raises(UnmappedError, match=re.escape("decoder.layers.0.mlp.router.weight")):
        of_megatron(family, [n for n in names if "router" not in n and "experts" not in n])
    dense = [n for n in names if not n.startswith("decoder.layers.0.mlp.") or ("linear_fc" in n and "experts" not in n)]
    assert len(of_megatron(family, dense)[0]) == len(dense)


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.999999.input_layernorm.weight",
        "decoder.layers.0.mlp.experts.local_experts.999999.linear_fc2.weight",
    ],
)
def test_a_number_far_off_is_refused_at_once(name: str) -> None:
    names = filled(families()["qwen3-moe"], layers=2, experts=2)
    with pytest.raises(UnmappedError, match="up to number 999999, number 2 is not there"):
        of_megatron(families()["qwen3-moe"], [*names, name])


def test_only_one_name_of_several_implementations_may_be_there() -> None:
    family = families()["deepseek-v3"]
    names = filled(family, layers=1, experts=1)
    other = "decoder.layers.0.self_attention.linear_kv_up_proj.layer_norm_weight"
    with pytest.raises(UnmappedError, match="of which a model has one"):
        of_megatron(family, [*names, other])
    of_engine = [n.replace("kv_layernorm.weight", "linear_kv_up_proj.layer_norm_weight") for n in names]
    assert other in of_engine
    assert {p for m in of_megatron(family, of_engine)[0] for p in m.parts} == {
        p for m in of_megatron(family, names)[0] for p in m.parts
    }


# Documents.

GOOD = "names: [{megatron: a.b, hugging_face: c.d}]\n"
HOSTILE = {
    "[1]": "is not a mapping",
    "names: 1": "names is not a list",
    "{}": "0 names",
    GOOD + "nams: []": "unknown key 'nams'",
    "names: [{megatron: a, hugging_face: b, row: qkv}]": "unknown key 'row'",
    "names: [{megatron: a, hugging_face: b, rows: diagonal}]": "rows is one of",
    "names: [{megatron: a, hugging_face: b, transposed: 1}]": "transposed is true or false",
    "names: [{megatron: a, hugging_face: b, optional: some}]": "in-some-layers",
    "names: [{megatron: a}]": "is not a name",
    "names: [{megatron: [], hugging_face: b}]": "no name of either side",
    "names: [{megatron: ../a, hugging_face: b}]": "is not a name",
    "names: [{megatron: 'a.*', hugging_face: b}]": "is not a name",
    "names: [{megatron: '{layer}.a', hugging_face: b}]": "in some of its names only",
    "names: [{megatron: '{layer}.{layer}', hugging_face: '{layer}.a'}]": "a place twice",
    "names: [{megatron: '{expert}.a', hugging_face: '{expert}.b'}]": "no {layer} before it",
    "names: [{megatron: a, hugging_face: [b, c]}]": "do not go into 2",
    "names: [{megatron: a, hugging_face: b, rows: stacked}]": "do not go into 1",
    "names: [{megatron: a, hugging_face: [b, c], rows: qkv}]": "do not go into 2",
    "names: [{megatron: a, hugging_face: b}, {megatron: a, hugging_face: c}]": "two entries are for 'a'",
    "names: [{megatron: a, hugging_face: c}, {megatron: b, hugging_face: c}]": "two entries are for 'c'",
    "names: [{megatron: a, hugging_face: [c, c], rows: stacked}]": "two entries are for 'c'",
    "names: [{megatron: 'a.{layer}', hugging_face: 'b.{layer}'}, {megatron: a.0, hugging_face: c}]": "two entries",
    GOOD + "left_out: [a.b]": "two entries are for 'a.b'",
    GOOD + "tied: {e: f}": "nothing has the name 'f'",
    GOOD + "tied: {e: f, f: e}": "a chain, or a circle",
    GOOD + "tied: {e: e}": "a chain, or a circle",
    GOOD + "tied: {e: f, f: c.d}": "a chain, or a circle",
    GOOD + "names: []": "a key twice",
    GOOD + "config: {a: {argument: b}, a: 1}": "a key twice",
    GOOD + "config: {a: {b: c}}": "has one of the keys",
    GOOD + "config: {a: {argument: b, rows: c}}": "has one of the keys",
    GOOD + "config: {a: {rows: 7}}": "is not a name",
    GOOD + "config: {a: {layout: rank}}": "layout is one of",
    GOOD + "config: {a: {ratio: [b]}}": "ratio has two",
    GOOD + "config: {a: {cases: [{if: 1}]}}": "unknown key 'if'",
    GOOD + "config: {a: [{all: {b: {argument: '../c'}}}]}": "is not a word",
    GOOD + "heads: a.b": "is not a word",
    GOOD + "arguments: [a]": "arguments is not a mapping",
    "names: &a [*a]": "aliases are not read",
    "names: [": "not a YAML document",
    "names: !!python/object/apply:os.system [ls]": "not a YAML document",
    "[" * 4000: "not a YAML document",
}


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[-48:])
def test_a_document_that_contradicts_itself_is_refused_by_name(text: str) -> None:
    with pytest.raises(RequestError, match=re.escape(HOSTILE[text])) as caught:
        requested_family(text + "\n")
    assert caught.value.code == "request.invalid"
    assert "docs/formats/megatron-hf.md" in (caught.value.fix or "")


def test_unknown_families_and_lonely_rules_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no family 'lama'"):
        requested_family("lama")
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(RequestError, match="--names hf"):
        reshard.convert(tmp_path, tmp_path / "out", to="safetensors", hf_rules="llama", progress=False)
    with pytest.raises(RequestError, match="No such file"):
        reshard.convert(tmp_path, tmp_path / "out", to="safetensors", names="megatron-core", hf_rules="./x.yaml")


def test_arguments_are_compared_by_kind_and_value() -> None:
    assert accepts([None, 1.0], None)
    assert accepts([None, 1.0], 1)
    assert not accepts([None, 1.0], True)
    assert not accepts([False, None], 0)
    assert accepts("RMSNorm", "RMSNorm")
    family = parse_family("x", GOOD + "arguments: {a: [false, null], b: yes-no, c: 2}", what="x")
    assert contradicted(family, {"a": True, "b": "other", "c": 2}) == ["a=True", "b=other"]
    assert unsaid(family, {"a": None}) == ["b", "c"]


# The order of rows.

SIZES = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 6), st.integers(1, 4))


@given(sizes=SIZES, fused=st.booleans(), bias=st.booleans())
def test_rows_of_attention_go_where_torch_puts_them_and_back(
    sizes: tuple[int, int, int, int], fused: bool, bias: bool
) -> None:
    groups, queries, size, columns = sizes
    rule = Rule(("a",), ("q",) if fused else ("q", "k", "v"), Rows.QKV)
    attention = Attention(groups * queries, groups, size)
    rest = () if bias else (columns,)
    rows = groups * (queries + 2) * size
    whole = np.arange(rows * (1 if bias else columns)).reshape(rows, *rest)
    grouped = whole.reshape(groups, queries + 2, size, *rest)
    wanted = [grouped[:, at].reshape(-1, *rest) for at in (slice(0, queries), queries, queries + 1)]
    wanted = [np.concatenate(wanted)] if fused else wanted
    places = spans(rule, rows, attention)
    assert part_rows(places, len(wanted)) == [len(w) for w in wanted]
    found = [np.full_like(w, -1) for w in wanted]
    back = np.full_like(whole, -1)
    for s in places:
        assert (found[s.part][s.at : s.at + s.rows] == -1).all()
        found[s.part][s.at : s.at + s.rows] = whole[s.whole : s.whole + s.rows]
        assert (back[s.whole : s.whole + s.rows] == -1).all()
        back[s.whole : s.whole + s.rows] = wanted[s.part][s.at : s.at + s.rows]
    assert all((f == w).all() for f, w in zip(found, wanted, strict=True))
    assert (back == whole).all()


@given(parts=st.integers(2, 6), each=st.integers(1, 9))
def test_stacked_rows_are_all_there_once(parts: int, each: int) -> None:
    places = spans(Rule(("a",), tuple(map(str, range(parts))), Rows.STACKED), parts * each, None)
    assert [(s.part, s.at, s.whole) for s in places] == [(p, 0, p * each) for p in range(parts)]
    with pytest.raises(ValueError, match="do not divide"):
        spans(Rule(("a",), tuple(map(str, range(parts))), Rows.STACKED), parts * each + 1, None)


@pytest.mark.parametrize("attention", [Attention(4, 3, 8), Attention(4, 2, 7), Attention(4, 0, 8), Attention(8, 2, 8)])
def test_rows_that_are_not_those_of_the_heads_are_refused(attention: Attention) -> None:
    with pytest.raises(ValueError, match="64 rows are not those of"):
        spans(Rule(("a",), ("q", "k", "v"), Rows.QKV), 64, attention)


# Transposes.


@pytest.mark.parametrize("limit", [1, 24, 100, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_any_elements_of_a_transpose_are_those_of_torch(
    dtype: torch.dtype, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather, "TRANSPOSED_BYTES", limit)
    value = torch.arange(7 * 5).reshape(7, 5).to(dtype)
    turned, reader = reading_of(value, tmp_path)
    wide = FLOAT32 if dtype is torch.bfloat16 else BY_NAME[str(dtype).removeprefix("torch.")]
    wanted = value.T.contiguous().to(torch.float32 if dtype is torch.bfloat16 else dtype).reshape(-1)
    for begin, end in ((0, 35), (0, 1), (34, 35), (3, 17), (7, 14), (6, 8)):
        found = reader.elements(turned, wide, begin, end).tobytes()
        assert found == wanted[begin:end].numpy().tobytes()


def reading_of(value: torch.Tensor, folder: Path) -> tuple[int, gather.TensorReader]:
    """The number of the transpose of a stored matrix, and a reader of it."""
    save_file({"w": value.contiguous()}, folder / "model.safetensors")
    checkpoint = read_checkpoint(open_location(str(folder)), None, OpaqueLedger(OpaquePolicy.REFUSE), None)
    stored = checkpoint.shard_map.tensors[0]
    new = LogicalTensor("t", stored.state, stored.dtype, stored.shape[::-1])
    shard_map = checkpoint.shard_map.with_derived([(new, Transposed(0))])
    return 1, gather.TensorReader(replace(checkpoint, shard_map=shard_map), NumpyCast())


# Whole conversions, from Hugging Face.


def model(family: str, *, layers: int = 2, tied: bool = False, groups: int = 2) -> dict[str, torch.Tensor]:
    """A model with 4 heads of 8 elements under names of Hugging Face, every element of its own value."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (40, 32), "model.norm.weight": (32,)}
    for at in range(layers):
        base = f"model.layers.{at}"
        shapes |= {f"{base}.{n}.weight": (32,) for n in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {
            f"{base}.self_attn.{n}_proj.weight": (rows, 32)
            for n, rows in (("q", 32), ("k", 8 * groups), ("v", 8 * groups), ("o", 32))
        }
        shapes |= {
            f"{base}.mlp.{n}_proj.weight": shape
            for n, shape in (("gate", (48, 32)), ("up", (48, 32)), ("down", (32, 48)))
        }
        if family == "qwen3":
            shapes |= {f"{base}.self_attn.{n}_norm.weight": (8,) for n in "qk"}
    if not tied:
        shapes["lm_head.weight"] = (40, 32)
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def saved(tensors: Mapping[str, torch.Tensor], folder: Path, config: Mapping[str, Any] | None = None) -> Path:
    folder.mkdir()
    save_file(dict(tensors), folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def megatron_names(source: Path, target: Path, **options: Any) -> dict[str, torch.Tensor]:
    reshard.convert(source, target, to="safetensors", names="megatron-core", progress=False, **options)
    return load_file(target / "model.safetensors")


def test_parts_are_joined_as_megatron_lays_them(tmp_path: Path) -> None:
    tensors = model("llama")
    config = {"model_type": "llama", "num_attention_heads": 4, "tie_word_embeddings": False}
    found = megatron_names(saved(tensors, tmp_path / "hf", config), tmp_path / "out")
    layer = "model.layers.1.self_attn"
    q, k, v = (tensors[f"{layer}.{n}_proj.weight"] for n in "qkv")
    wanted = torch.cat([q[:16], k[:8], v[:8], q[16:], k[8:], v[8:]])
    assert torch.equal(found["decoder.layers.1.self_attention.linear_qkv.weight"], wanted)
    gate, up = (tensors[f"model.layers.0.mlp.{n}_proj.weight"] for n in ("gate", "up"))
    assert torch.equal(found["decoder.layers.0.mlp.linear_fc1.weight"], torch.cat([gate, up]))
    assert torch.equal(found["output_layer.weight"], tensors["lm_head.weight"])
    assert sum(t.numel() for t in found.values()) == sum(t.numel() for t in tensors.values())


def test_a_norm_of_keys_proves_the_heads(tmp_path: Path) -> None:
    tensors = model("qwen3")
    config = {"model_type": "qwen3", "num_attention_heads": 4}
    said = megatron_names(saved(tensors, tmp_path / "hf", config), tmp_path / "said")
    proven = megatron_names(saved(tensors, tmp_path / "bare"), tmp_path / "proven")
    assert said.keys() == proven.keys()
    assert all(torch.equal(said[n], proven[n]) for n in said)
    with pytest.raises(RequestError, match="nothing says how many heads"):
        megatron_names(saved(model("llama"), tmp_path / "llama"), tmp_path / "out")


def test_a_head_is_tied_untied_or_missing_as_the_configuration_says(tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_attention_heads": 4}
    tied = model("llama", tied=True)
    assert "output_layer.weight" not in megatron_names(saved(tied, tmp_path / "a", config), tmp_path / "out_a")
    with pytest.raises(RequestError, match="tie_word_embeddings"):
        megatron_names(saved(tied, tmp_path / "b", config | {"tie_word_embeddings": False}), tmp_path / "out_b")
    twice = tied | {"lm_head.weight": tied["model.embed_tokens.weight"].clone()}
    said = config | {"tie_word_embeddings": True}
    assert "output_layer.weight" not in megatron_names(saved(twice, tmp_path / "c", said), tmp_path / "out_c")
    twice["lm_head.weight"][3, 4] += 1
    with pytest.raises(reshard.ReshardError, match=r"lm_head\.weight") as caught:
        megatron_names(saved(twice, tmp_path / "d", said), tmp_path / "out_d")
    assert caught.value.code == "checkpoint.disagreement"


LLAMA = {"model_type": "llama", "num_attention_heads": 4}
ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"


@pytest.mark.parametrize(
    ("config", "change", "why"),
    [
        ({"model_type": "gemma", "num_attention_heads": 4}, {}, "no rules are there for models of the type gemma"),
        ({"model_type": "gpt2", "n_head": 4}, {}, "no rule maps Hugging Face's"),
        (LLAMA | {"num_attention_heads": 3}, {}, "do not fit"),
        (LLAMA | {"num_attention_heads": 8}, {}, ""),
        (LLAMA, {f"{ATTENTION}.k_proj.weight": (24, 32)}, "do not fit"),
        (LLAMA, {f"{ATTENTION}.v_proj.weight": (16, 16)}, "do not fit"),
        (LLAMA, {f"{MLP}.up_proj.weight": (40, 32)}, "do not fit"),
        (LLAMA, {f"{MLP}.up_proj.bias": (48,)}, "up_proj.bias"),
    ],
)
def test_models_that_do_not_fit_are_refused(
    config: dict[str, Any], change: dict[str, tuple[int, ...]], why: str, tmp_path: Path
) -> None:
    tensors = model("llama") | {name: torch.zeros(shape) for name, shape in change.items()}
    source = saved(tensors, tmp_path / "hf", config)
    if not why:  # other heads than the run's are a model as well, and only the configuration knows
        assert megatron_names(source, tmp_path / "out")
        return
    with pytest.raises(RequestError, match=why) as caught:
        megatron_names(source, tmp_path / "out")
    assert caught.value.code == "request.unsatisfiable"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[]", "not a JSON object"),
        ('{"num_attention_heads": 4', "not valid JSON"),
        ('{"num_attention_heads": 4, "num_attention_heads": 8}', "twice"),
        ('{"model_type": ["llama"], "num_attention_heads": 4}', "no rules are there"),
        ('{"model_type": "llama", "num_attention_heads": "4"}', "how many heads"),
        ('{"model_type": "llama", "num_attention_heads": -4}', "how many heads"),
        ('{"model_type": "llama", "num_attention_heads": true}', "how many heads"),
        ('{"model_type": "llama", "num_attention_heads": 1000000000000000000000}', "do not fit"),
        (" " * (1 << 20) + "{}", "not a JSON object"),
    ],
)
def test_a_configuration_that_is_damaged_or_hostile_is_refused(text: str, why: str, tmp_path: Path) -> None:
    source = saved(model("llama"), tmp_path / "hf")
    (source / "config.json").write_text(text)
    with pytest.raises(reshard.ReshardError, match=why):
        megatron_names(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_more_groups_than_a_view_has_boxes_are_refused(tmp_path: Path) -> None:
    tensors = model("llama", layers=1)
    for name, rows in (("q", 6000), ("k", 6000), ("v", 6000)):
        tensors[f"model.layers.0.self_attn.{name}_proj.weight"] = torch.zeros(rows, 32)
    tensors["model.layers.0.self_attn.o_proj.weight"] = torch.zeros(32, 6000)
    source = saved(tensors, tmp_path / "hf", {"model_type": "llama", "num_attention_heads": 6000})
    with pytest.raises(RequestError, match="boxes"):
        megatron_names(source, tmp_path / "out")


def test_parts_of_different_types_are_refused(tmp_path: Path) -> None:
    tensors = model("llama")
    name = "model.layers.0.self_attn.v_proj.weight"
    tensors[name] = tensors[name].to(torch.bfloat16)
    with pytest.raises(RequestError, match="float32, float32, bfloat16"):
        megatron_names(saved(tensors, tmp_path / "hf", {"num_attention_heads": 4}), tmp_path / "out", hf_rules="llama")


def test_names_of_the_hub_without_prefix_and_with_masks(tmp_path: Path) -> None:
    """As `openai-community/gpt2` has them: `h.0.attn.c_attn.weight`, and the mask `h.0.attn.bias`."""
    family = families()["gpt2"]
    shapes = {"wte.weight": (40, 32), "wpe.weight": (16, 32), "h.0.attn.bias": (1, 1, 16, 16)}
    shapes |= {f"{n}.{k}": (32,) for n in ("ln_f", "h.0.ln_1", "h.0.ln_2") for k in ("weight", "bias")}
    for name, rows, columns in (
        ("attn.c_attn", 32, 96),
        ("attn.c_proj", 32, 32),
        ("mlp.c_fc", 32, 128),
        ("mlp.c_proj", 128, 32),
    ):
        shapes |= {f"h.0.{name}.weight": (rows, columns), f"h.0.{name}.bias": (columns,)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    source = saved(tensors, tmp_path / "hf", {"model_type": "gpt2", "n_head": 4})
    found = megatron_names(source, tmp_path / "out")
    assert {*found} == {*filled(family, layers=1, experts=1)} - {"output_layer.weight"}
    attention = tensors["h.0.attn.c_attn.weight"].T.view(3, 4, 8, 32).transpose(0, 1).reshape(96, 32)
    assert torch.equal(found["decoder.layers.0.self_attention.linear_qkv.weight"], attention)
    bias = tensors["h.0.attn.c_attn.bias"].view(3, 4, 8).transpose(0, 1).reshape(96)
    assert torch.equal(found["decoder.layers.0.self_attention.linear_qkv.bias"], bias)
    assert torch.equal(found["decoder.layers.0.mlp.linear_fc1.weight"], tensors["h.0.mlp.c_fc.weight"].T)
    result = reshard.convert(source, tmp_path / "again", to="safetensors", names="megatron-core", progress=False)
    assert any("h.0.attn.bias" in entry.path for entry in result.not_carried)


def test_tensors_that_lie_strided_are_renamed_and_not_split(tmp_path: Path) -> None:
    tensors = model("llama")
    name = "model.layers.0.self_attn.v_proj.weight"
    source = tmp_path / "hf"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"model_type": "llama", "num_attention_heads": 4}))
    torch.save(tensors | {name: tensors[name].T.contiguous().T}, source / "pytorch_model.bin")
    with pytest.raises(reshard.ReshardError, match="strided"):
        megatron_names(source, tmp_path / "out")
    norm = "model.layers.0.self_attn.o_proj.weight"
    torch.save(tensors | {norm: tensors[norm].T.contiguous().T}, source / "pytorch_model.bin")
    found = megatron_names(source, tmp_path / "out")
    assert torch.equal(found["decoder.layers.0.self_attention.linear_proj.weight"], tensors[norm])


def test_a_model_becomes_a_checkpoint_of_megatron_and_a_model_again(tmp_path: Path) -> None:
    """The shapes prove all arguments but those that no model says."""
    source = saved(model("qwen3"), tmp_path / "hf", {"model_type": "qwen3", "num_attention_heads": 4})
    options: dict[str, Any] = {"to": "megatron", "names": "megatron-core", "progress": False}
    with pytest.raises(RequestError, match="nothing says the arguments of the run: transformer_impl"):
        reshard.convert(source, tmp_path / "iter_0000001", **options)
    (tmp_path / "args.json").write_text('{"transformer_impl": "local"}')
    reshard.convert(source, tmp_path / "iter_0000001", **options, megatron_args=tmp_path / "args.json")
    again = tmp_path / "again"
    reshard.convert(tmp_path / "iter_0000001", again, to="safetensors", names="hf", hf_rules="qwen3", progress=False)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, again))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    with pytest.raises(RequestError, match="not those of Hugging Face"):
        reshard.convert(tmp_path / "iter_0000001", tmp_path / "x", to="megatron", names="hf", progress=False)


@pytest.mark.parametrize(
    ("local", "family", "apart"),
    [
        (True, "llama", set()),
        (False, "llama", set()),
        (True, "mixtral", set()),
        (False, "mixtral", {"pre_mlp_layernorm"}),
        (True, "deepseek-v3", {"input_layernorm", "pre_mlp_layernorm"}),
        (False, "deepseek-v3", {"input_layernorm", "pre_mlp_layernorm"}),
    ],
)
def test_keys_of_norms_are_those_of_the_layers(local: bool, family: str, apart: set[str]) -> None:
    """As `get_gpt_layer_local_spec` and `get_gpt_layer_with_transformer_engine_spec` of megatron-core 0.16.1 say."""
    experts = [n for n in filled(families()[family], layers=2, experts=2) if family == "llama" or "mlp.linear" not in n]
    rules = KeyRules.for_model(experts, local=local)
    assert {name.split(".")[3] for name in rules.norms_apart} == apart
    assert not rules.numbered


def test_layers_that_differ_get_keys_with_numbers() -> None:
    names = filled(families()["deepseek-v3"], layers=2, experts=2)
    names = [n for n in names if ("layers.0" in n and ".mlp.linear" in n) or ("layers.0" not in n or ".mlp." not in n)]
    names = [n for n in names if not n.startswith("decoder.layers.1.mlp.linear")]
    rules = KeyRules.for_model(names, local=False)
    assert rules.numbered == {"decoder.layers"}
    # Transformer Engine joins the norm with a dense layer, and not with experts.
    assert {n for n in rules.norms_apart if "pre_mlp" in n} == {"decoder.layers.1.pre_mlp_layernorm.weight"}


def test_transformer_engine_has_names_of_its_own_on_the_way_back() -> None:
    family = families()["deepseek-v3"]
    parts = [p for m in of_megatron(family, filled(family, layers=1, experts=1))[0] for p in m.parts]
    local, _ = of_hugging_face(family, parts)
    engine, _ = of_hugging_face(family, parts, local=False)
    differ = {(one.megatron, other.megatron) for one, other in zip(local, engine, strict=True) if one != other}
    attention = "decoder.layers.0.self_attention"
    assert differ == {
        (f"{attention}.q_layernorm.weight", f"{attention}.linear_q_up_proj.layer_norm_weight"),
        (f"{attention}.kv_layernorm.weight", f"{attention}.linear_kv_up_proj.layer_norm_weight"),
    }


def test_the_rules_of_the_page_are_rules() -> None:
    text = PAGE.read_text().partition("```yaml\n")[2].partition("```")[0]
    family = requested_family(text)
    names = filled(family, layers=2, experts=1)
    assert len(of_megatron(family, names)[0]) == len(names)
    assert family.model_types == ("starcoder2",)


def test_the_page_names_every_family() -> None:
    text = PAGE.read_text()
    assert [name for name in FAMILIES if f"`{name}`" not in text] == []

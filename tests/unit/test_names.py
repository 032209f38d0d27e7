"""Names of Megatron-DeepSpeed models with and without pipeline: a map that goes both ways, and knows its limits."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from reshard.choices import NameScheme
from reshard.errors import RequestError
from reshard_engine.formats.deepspeed.relabel import nesting_of, rename_all

_INNER = (
    "input_layernorm.weight",
    "self_attention.query_key_value.weight",
    "self_attention.dense.bias",
    "post_attention_layernorm.bias",
    "mlp.dense_h_to_4h.weight",
)


def _plain(blocks: int, *, tied: bool) -> list[str]:
    names = ["language_model.embedding.word_embeddings.weight"]
    names += ["language_model.embedding.position_embeddings.weight"] if tied else []
    names += [f"language_model.encoder.layers.{n}.{inner}" for n in range(blocks) for inner in _INNER]
    names += [f"language_model.encoder.final_layernorm.{what}" for what in ("weight", "bias")]
    return names + ([] if tied else ["language_model.output_layer.weight"])


@given(blocks=st.integers(1, 130), tied=st.booleans())
def test_there_and_back_is_the_identity(blocks: int, tied: bool) -> None:
    names = _plain(blocks, tied=tied)
    renamed = rename_all(names, NameScheme.MEGATRON_PIPELINE)
    piped = [renamed[n].name for n in names]
    assert len(set(piped)) == len(names)
    back = rename_all(piped, NameScheme.MEGATRON_PLAIN)
    assert [back[n].name for n in piped] == names
    layers = [renamed[n].layer for n in names]
    assert layers == sorted(layers, key=int)
    assert layers[0] == 1
    assert layers[-1] == blocks + (2 if tied else 3)


def test_names_of_the_scheme_stay() -> None:
    names = _plain(2, tied=True)
    assert {old: new.name for old, new in rename_all(names, NameScheme.MEGATRON_PLAIN).items()} == {n: n for n in names}


@pytest.mark.parametrize("name", ["model.layers.0.weight", "9.weight", "language_model.encoder.layers.x.y", "1.weight"])
@pytest.mark.parametrize("scheme", [NameScheme.MEGATRON_PIPELINE, NameScheme.MEGATRON_PLAIN])
def test_other_names_are_refused(name: str, scheme: NameScheme) -> None:
    if scheme is NameScheme.MEGATRON_PLAIN and name.startswith("language_model."):
        return  # whatever is below a language model has no pipeline's name
    with pytest.raises(RequestError) as caught:
        rename_all(["2.mlp.dense_h_to_4h.weight", name], scheme)
    assert caught.value.code == "request.unsatisfiable"


def test_state_dicts_nest_as_megatron_nests_them() -> None:
    assert nesting_of("language_model.embedding.word_embeddings.weight") == (
        "language_model",
        "embedding",
        "word_embeddings",
        "weight",
    )
    assert nesting_of("language_model.encoder.layers.3.mlp.dense_4h_to_h.bias") == (
        "language_model",
        "encoder",
        "layers.3.mlp.dense_4h_to_h.bias",
    )

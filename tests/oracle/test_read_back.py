"""What we write is a source again: it gives the bits of the original, and real DeepSpeed resumes from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from house.tiers import rest_full
from oracle.cases import CASES
from oracle.conversions import (
    UNIVERSAL_CASES,
    Converted,
    UniversalFactory,
    assert_continues,
    target_of,
    universal_problems,
)
from oracle.driver import Oracle
from oracle.fixtures import TrainedFactory
from oracle.hf_models import config_of
from oracle.outputs import contents, convert, load, plain, raw, read_safetensors, read_universal
from oracle.truth import RawTensor
from reshard.errors import SourceError

_SHARD_BYTES = 2_000
# ds_to_universal of DeepSpeed 0.19.8 fails on every other kind of run (stage 0, list-form states, no Adam).
PEER_CASES = (
    "z1_fp32",
    "z2_bf16",
    "z2_fp16",
    "bf16opt_two_groups",
    "z2_before_first_step",
    "z2_empty_param",
    "z2_alignment",
    "z1_two_groups",
    "z3_bf16",
    "z3_fp16",
    "z3_sub_groups",
    "z3_sub_groups_two_groups",
    "z3_plain",
)
_ALWAYS = {"z0_fp32", "z1_elastic", "z1_adagrad", "z2_lion", "z2_bf16", "z3_sub_groups_two_groups", "bf16opt"}
_CASES = rest_full(UNIVERSAL_CASES, *_ALWAYS)
# Of each stage one, of each type one, and every shape of their files.
_PEER_ALWAYS = (
    *("z1_two_groups", "z2_fp16", "z2_before_first_step", "z2_empty_param", "z2_alignment", "bf16opt_two_groups"),
    "z3_sub_groups_two_groups",
)


def again(converted: Converted, source: Path, folder: Path) -> Converted:
    """The universal directory that our engine makes of a universal directory."""
    result = convert(source, folder / converted.folder.name, "universal")
    return replace(converted, folder=folder / converted.folder.name, warnings=result.warnings)


@pytest.mark.parametrize("name", _CASES)
def test_universal_of_universal_is_the_same_bytes(name: str, universal: UniversalFactory, tmp_path: Path) -> None:
    converted = universal(name)
    second = again(converted, converted.root, tmp_path)
    assert universal_problems(second) == []
    assert contents(second.folder) == contents(converted.folder)


@pytest.mark.parametrize("name", _CASES)
@pytest.mark.parametrize("to", ["safetensors", "torch"])
def test_weights_through_universal_are_the_direct_ones(
    name: str, to: str, universal: UniversalFactory, tmp_path: Path
) -> None:
    converted = universal(name)
    for options in ({}, {"max_shard_bytes": _SHARD_BYTES, "dtype": "bf16"}, {"exclude_frozen": True}):
        convert(converted.run.dir, tmp_path / f"direct{len(options)}", to, **options)
        convert(converted.root, tmp_path / f"through{len(options)}", to, **options)
        assert contents(tmp_path / f"direct{len(options)}") == contents(tmp_path / f"through{len(options)}")


@pytest.mark.parametrize("name", rest_full(PEER_CASES, *_PEER_ALWAYS))
def test_what_ds_to_universal_wrote_is_read(
    name: str, oracle: Oracle, universal: UniversalFactory, tmp_path: Path
) -> None:
    converted = universal(name)
    assert oracle.peer_universal(converted.run.tag_dir, tmp_path / "theirs" / "universal") is None
    convert(converted.run.dir, tmp_path / "direct", "safetensors")
    convert(tmp_path / "theirs", tmp_path / "weights", "safetensors")
    assert contents(tmp_path / "weights") == contents(tmp_path / "direct")
    second = again(converted, tmp_path / "theirs", tmp_path)
    assert universal_problems(second) == []
    ours, theirs = read_universal(converted.folder), read_universal(second.folder)
    assert (theirs.atoms, theirs.steps) == (ours.atoms, ours.steps)
    assert plain(theirs.model) == plain(ours.model)
    assert plain(theirs.optimizer) == plain(ours.optimizer)


def test_what_ds_to_universal_permuted_is_refused(oracle: Oracle, universal: UniversalFactory, tmp_path: Path) -> None:
    converted = universal("z2_round_robin")
    assert oracle.peer_universal(converted.run.tag_dir, tmp_path / "theirs" / "universal") is None
    right = read_universal(converted.folder).kind("fp32")
    wrong = {n: raw(load(tmp_path / "theirs" / "universal" / "zero" / n / "fp32.pt")["param"]) for n in right}
    assert wrong != right
    with pytest.raises(SourceError) as caught:
        convert(tmp_path / "theirs", tmp_path / "weights", "safetensors")
    assert caught.value.code == "source.unsupported"
    # Ours of the same run is right, and says so by not being refused.
    convert(converted.root, tmp_path / "weights", "safetensors")


@pytest.mark.parametrize("name", ["z1_two_groups", "z3_bf16"])
def test_deepspeed_resumes_from_what_we_made_of_the_peers_output(
    name: str, oracle: Oracle, universal: UniversalFactory, bf16_spread: float, tmp_path: Path
) -> None:
    converted = universal(name)
    assert oracle.peer_universal(converted.run.tag_dir, tmp_path / "theirs" / "universal") is None
    second = again(converted, tmp_path / "theirs", tmp_path / "ours")
    target = target_of(CASES[name])
    resumed = oracle.resume_universal(target, second.root, tmp_path / "out", world=3, restore_from=converted.run.truth)
    assert_continues(resumed, second, bf16_spread)


@pytest.mark.parametrize("name", rest_full(["z2_bf16", "z3_bf16", "z0_two_groups"], "z3_bf16"))
def test_weights_by_any_way_are_the_same_bytes(name: str, trained: TrainedFactory, tmp_path: Path) -> None:
    """A -> B -> C is A -> C for every pair of containers, cuts and types that lose nothing."""
    forms = [(to, size) for to in ("safetensors", "torch") for size in (None, _SHARD_BYTES)]
    run = trained(name)
    direct: dict[tuple[str, int | None, str], Path] = {}
    for dtype in ("fp32", "bf16"):
        for to, size in forms:
            folder = direct[to, size, dtype] = tmp_path / f"{to}-{size}-{dtype}"
            convert(run.dir, folder, to, max_shard_bytes=size, dtype=dtype)
    for (to, size, dtype), source in direct.items():
        for onward, cut in forms:
            for wanted in {dtype, "bf16"}:
                folder = tmp_path / "way" / f"{to}-{size}-{dtype}-{onward}-{cut}-{wanted}"
                # Without a wanted type weights stay what they are.
                options = {} if wanted == dtype else {"dtype": wanted}
                convert(source, folder, onward, max_shard_bytes=cut, **options)
                assert contents(folder) == contents(direct[onward, cut, wanted]), folder.name


def weights_of(model: PreTrainedModel) -> dict[str, RawTensor]:
    """Every parameter under its owner's name."""
    return {name: raw(param) for name, param in model.named_parameters()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Path]:
    """``saved(kind, sharded)``: a bf16 model as transformers itself saves it."""

    def save(kind: str, sharded: bool) -> Path:
        folder = tmp_path_factory.mktemp(f"{kind}-{sharded}")
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(config_of(kind)).bfloat16()
        model.save_pretrained(folder, max_shard_size="8KB" if sharded else "5GB")
        return folder

    return save


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_what_transformers_saved_is_read(
    kind: str, sharded: bool, saved: Callable[[str, bool], Path], tmp_path: Path
) -> None:
    source = saved(kind, sharded)
    assert bool(list(source.glob("*.index.json"))) == sharded
    convert(source, tmp_path / "bin", "torch", max_shard_bytes=6_000)
    convert(tmp_path / "bin", tmp_path / "whole", "safetensors")
    config_of(kind).save_pretrained(tmp_path / "whole")
    expected = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "whole", dtype=torch.bfloat16, output_loading_info=True
    )
    assert {key: list(names) for key, names in report.items() if names} == {}
    assert weights_of(model) == weights_of(expected)
    assert {t.dtype for t in read_safetensors(tmp_path / "whole").tensors.values()} == {"BF16"}


@pytest.mark.parametrize("legacy", [False, True])
def test_a_state_dict_as_torch_saves_it_is_read(legacy: bool, tmp_path: Path) -> None:
    # Tied in memory, with `_metadata` on the mapping, as `pytorch_model.bin` files of the hub are.
    (tmp_path / "in").mkdir()
    model = AutoModelForCausalLM.from_config(config_of("gpt2"))
    path = tmp_path / "in" / "pytorch_model.bin"
    torch.save(model.state_dict(), path, _use_new_zipfile_serialization=not legacy)
    convert(tmp_path / "in", tmp_path / "out", "safetensors")
    found = read_safetensors(tmp_path / "out")
    assert found.aliases == {"lm_head.weight": "transformer.wte.weight"}
    assert found.tensors == {k: raw(v) for k, v in model.state_dict().items() if k != "lm_head.weight"}

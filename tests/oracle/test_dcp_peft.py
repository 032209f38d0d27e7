"""Adapters that the Trainer trains with FSDP2: what its checkpoints hold, and what becomes of them.

The Trainer saves the adapter alone, under PEFT's names for files. The optimizer has the names of the model. The first
tests show this, and that the Trainer resumes it, without a converter.

Source: transformers 5.23.0 `distributed/fsdp.py` (`get_fsdp_ckpt_kwargs`: `adapter_only`), accelerate 1.15.0
`utils/fsdp_utils.py` (`_get_model_state_dict`, `save_fsdp_optimizer`), peft 0.21.2 `utils/save_and_load.py`
(`get_peft_model_state_dict`), `utils/other.py` (`ModulesToSaveWrapper.adapter_state_dict`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import reshard
from house.shared import made_once
from house.tiers import rest_full
from oracle.conversions import agree
from oracle.dcp_driver import problems
from oracle.dcp_peft import base_of
from oracle.dcp_peft_cases import OPTIONS, resume_adapter, train_adapter
from oracle.launcher import WorldError, Worlds
from oracle.outputs import raw, read_safetensors, tensor_of
from oracle.truth import RawTensor, Resumed, Truth

pytestmark = [
    # What PEFT 0.21 asks transformers 5.23, and says of GPT-2 where a configuration was made: it sets the option.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),
]
KINDS = [(kind, adapter) for kind in ("llama", "gpt2") for adapter in OPTIONS if (kind, adapter) != ("gpt2", "head")]
TAG = "global_step3"
ALWAYS = (("llama", "dora"), ("llama", "head"))


@dataclass(frozen=True)
class Saved:
    """A run with an adapter: its checkpoint, the truth about it, and the losses after it."""

    folder: Path
    losses_after: tuple[float, ...]

    @property
    def checkpoint(self) -> Path:
        """The Trainer's directory."""
        return self.folder / "output" / "checkpoint-3"

    @property
    def truth(self) -> Truth:
        """The whole state at the save, by the names of the model."""
        return Truth(self.folder / "truth.safetensors", self.folder / "truth.json")

    def entry(self, part: str) -> Any:
        """What torch reads of one of the two directories of shards."""
        return _load(self.checkpoint / part)


def _load(directory: Path) -> Any:
    state: dict[str, Any] = {}
    reader = FileSystemReader(str(directory))
    _load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return state


Adapted: TypeAlias = Callable[[str, str], Saved]


@pytest.fixture(scope="module")
def adapted(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    """A real checkpoint of a kind of model and adapter, trained once.  Read-only for all tests."""

    def train(kind: str, adapter: str) -> Saved:
        def save(folder: Path) -> list[float]:
            return train_adapter(worlds, kind, adapter, folder)

        folder, losses = made_once(tmp_path_factory, f"dcp-peft-{kind}-{adapter}", save)
        return Saved(folder, tuple(losses))

    return train


def name_in_file(name: str) -> str:
    """The name under which PEFT saves a trained parameter of the adapter ``default``."""
    name = name.replace(".modules_to_save.default.", ".")
    return name.replace(".lora_magnitude_vector.default.weight", ".lora_magnitude_vector").replace(".default.", ".")


@pytest.mark.parametrize(("kind", "adapter"), rest_full(KINDS, *ALWAYS))
def test_the_model_is_the_adapter_alone_by_pefts_names(kind: str, adapter: str, adapted: Adapted) -> None:
    run = adapted(kind, adapter)
    trained = run.truth.kind("fp32")
    state = run.entry("pytorch_model_fsdp_0")
    assert list(state) == ["model"]
    found = {name: raw(tensor) for name, tensor in state["model"].items()}
    assert found == {name_in_file(name): value for name, value in trained.items()}
    # The same as PEFT's own file holds; the frozen model is in neither.
    assert found == _tensors(run.folder / "peft" / "adapter" / "adapter_model.safetensors")
    assert run.truth.kind("frozen").keys().isdisjoint(found)
    parts = {name.partition(".lora_")[2] or name for name in found}
    assert {part for part in parts if "." not in part or part.endswith(("A.weight", "B.weight"))} == {
        "A.weight",
        "B.weight",
        *(["magnitude_vector"] if adapter == "dora" else []),
    }
    whole = {name for name in found if ".lora_" not in name}
    assert bool(whole) is (adapter in ("norms", "head"))
    if adapter == "head":
        assert whole == {"base_model.model.lm_head.weight"}


@pytest.mark.parametrize(("kind", "adapter"), rest_full(KINDS, *ALWAYS))
def test_the_optimizer_has_the_names_of_the_model(kind: str, adapter: str, adapted: Adapted) -> None:
    run = adapted(kind, adapter)
    state = run.entry("optimizer_0")
    assert list(state) == ["optimizer"]
    states, groups = state["optimizer"]["state"], state["optimizer"]["param_groups"]
    trained = run.truth.kind("fp32")
    assert states.keys() == trained.keys()
    for name, held in states.items():
        assert set(held) == {"step", "exp_avg", "exp_avg_sq"}
        assert float(held["step"]) == run.truth.step[name] == 3
        for key in ("exp_avg", "exp_avg_sq"):
            assert raw(held[key]) == run.truth.tensors[f"{key}/{name}"]
    # Two groups, by weight decay. The second one may have no members.
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert [group["params"] for group in groups] == [group["names"] for group in run.truth.meta["groups"]]
    assert bool(groups[1]["params"]) is (adapter == "norms")
    if adapter == "head":
        assert "base_model.model.lm_head.modules_to_save.default.weight" in states
    if adapter == "dora":
        assert any(name.endswith(".lora_magnitude_vector.default.weight") for name in groups[0]["params"])


@pytest.mark.parametrize(("kind", "adapter"), rest_full(KINDS, *ALWAYS))
def test_nothing_beside_them_describes_the_adapter(kind: str, adapter: str, adapted: Adapted) -> None:
    """There is neither `adapter_config.json` nor `adapter_model.safetensors`: nothing says `lora_alpha`."""
    names = {path.name for path in adapted(kind, adapter).checkpoint.iterdir()}
    assert names == {
        "pytorch_model_fsdp_0",
        "optimizer_0",
        "rng_state_0.pth",
        "rng_state_1.pth",
        "scheduler.pt",
        "trainer_state.json",
    }


@pytest.mark.parametrize(
    ("kind", "adapter", "world"),
    rest_full([(*case, world) for case in KINDS for world in (2, 3)], ("llama", "dora", 3), ("llama", "head", 3)),
)
def test_the_trainer_resumes_it(
    kind: str, adapter: str, world: int, adapted: Adapted, worlds: Worlds, tmp_path: Path
) -> None:
    run = adapted(kind, adapter)
    resumed = resume_adapter(worlds, kind, adapter, run.checkpoint, tmp_path, world=world)
    assert problems(run.truth, resumed.state) == []
    assert agree(resumed.losses, run.losses_after, significant=6)
    assert len(set(run.losses_after)) == 3


@pytest.mark.parametrize(("kind", "adapter"), rest_full(KINDS, *ALWAYS))
def test_pefts_own_word_is_there_to_compare_with(kind: str, adapter: str, adapted: Adapted) -> None:
    run = adapted(kind, adapter)
    merged = _tensors(run.folder / "peft" / "merged.safetensors")
    base = {name.removeprefix("base_model.model."): value for name, value in run.truth.kind("frozen").items()}
    changed = {name for name, value in base.items() if ".base_layer." in name and merged[_plain(name)] != value}
    assert changed == {name for name in base if name.endswith(".base_layer.weight")}
    saved = {
        name.removeprefix("base_model.model.").replace(".modules_to_save.default", ""): value
        for name, value in run.truth.kind("fp32").items()
        if ".modules_to_save." in name
    }
    assert {name: merged[name] for name in saved} == saved


def test_a_tied_head_cannot_be_saved_apart_under_fsdp2(worlds: Worlds, tmp_path: Path) -> None:
    """torch 2.13 refuses the copy of GPT-2's tied head that PEFT keeps: no such run has checkpoints."""
    with pytest.raises(WorldError, match="is shared with a parameter already managed by another FSDP group"):
        train_adapter(worlds, "gpt2", "head", tmp_path)


# What the converter makes of them.


def assert_goes_on(run: Saved, resumed: Resumed, *, across: bool = False) -> None:
    """Every trained value, moment and number is that of the run, and so are the next losses."""
    assert problems(run.truth, resumed.state, across=across) == []
    assert agree(resumed.losses, run.losses_after, significant=6)


@pytest.mark.parametrize(("kind", "adapter"), rest_full(KINDS, *ALWAYS))
def test_it_is_written_again_with_its_own_names(
    kind: str, adapter: str, adapted: Adapted, worlds: Worlds, tmp_path: Path
) -> None:
    run, target = adapted(kind, adapter), tmp_path / "checkpoint-3"
    result = reshard.convert(run.checkpoint, target, to="dcp", files=3)
    assert (result.warnings, result.not_carried) == ((), ())
    for part in ("pytorch_model_fsdp_0", "optimizer_0"):
        assert dict(_flat(_load(target / part))) == dict(_flat(run.entry(part)))
    assert_goes_on(run, resume_adapter(worlds, kind, adapter, target, tmp_path / "out", world=3))


@pytest.mark.parametrize(("kind", "adapter"), rest_full(KINDS, *ALWAYS))
def test_ensure_on_three_ranks(kind: str, adapter: str, adapted: Adapted, worlds: Worlds, tmp_path: Path) -> None:
    run = adapted(kind, adapter)
    assert_goes_on(run, resume_adapter(worlds, kind, adapter, run.checkpoint, tmp_path, world=3, to="dcp"))


@pytest.mark.parametrize(
    ("kind", "adapter", "stage"),
    rest_full([(*case, stage) for case in KINDS for stage in (1, 2, 3)], ("llama", "dora", 2), ("llama", "head", 3)),
)
def test_deepspeed_goes_on_on_three_ranks(
    kind: str, adapter: str, stage: int, adapted: Adapted, worlds: Worlds, tmp_path: Path
) -> None:
    run = adapted(kind, adapter)
    resumed = resume_adapter(worlds, kind, adapter, run.checkpoint, tmp_path, world=3, stage=stage, to="zero")
    assert_goes_on_in_deepspeed(run, resumed)


@pytest.mark.parametrize(
    ("kind", "adapter", "stage"),
    rest_full([(*case, stage) for case in KINDS for stage in (2, 3) if case[1] != "norms"], ("llama", "head", 3)),
)
def test_a_universal_checkpoint_goes_on(
    kind: str, adapter: str, stage: int, adapted: Adapted, worlds: Worlds, tmp_path: Path
) -> None:
    """The directory is the Trainer's: its own files, and the tag.

    `norms` has two groups, of which DeepSpeed's universal loader loses hyper-parameters at stage 3.
    """
    run, save = adapted(kind, adapter), tmp_path / "checkpoint-3"
    result = reshard.convert(run.checkpoint, save / TAG, to="universal")
    assert any("load_module_strict=False" in text for text in result.warnings)
    beside = {path.name: path for path in run.checkpoint.iterdir() if path.is_file()}
    beside |= {path.name: path for path in (save / TAG).glob("scheduler.pt")}
    for name, path in beside.items():
        shutil.copy(path, save / name)
    (save / "latest").write_text(TAG)
    options: dict[str, Any] = {"world": 3, "stage": stage, "universal": True}
    assert_goes_on_in_deepspeed(run, resume_adapter(worlds, kind, adapter, save, tmp_path / "out", **options))


def assert_goes_on_in_deepspeed(run: Saved, resumed: Resumed) -> None:
    """The same, but for a group without members.

    DeepSpeed removes such a group, and the scheduler that the Trainer loads counts one group less.
    """
    told = problems(run.truth, resumed.state, across=True)
    groups = [group["names"] for group in run.truth.meta["groups"]]
    assert [text.partition(":")[0] for text in told] == ([] if all(groups) else ["lr_scheduler"])
    assert len(resumed.state.meta["lr_scheduler"]["base_lrs"]) == len([names for names in groups if names])
    rates = resumed.state.meta["lr_scheduler"]["base_lrs"]
    assert rates == run.truth.meta["lr_scheduler"]["base_lrs"][: len(rates)]
    assert agree(resumed.losses, run.losses_after, significant=6)


@pytest.mark.parametrize(("kind", "adapter"), rest_full(KINDS, *ALWAYS))
def test_the_adapter_is_pefts_own(kind: str, adapter: str, adapted: Adapted, tmp_path: Path) -> None:
    run = adapted(kind, adapter)
    with pytest.raises(reshard.ReshardError, match="scale of the adapter is unknown") as refused:
        reshard.convert(run.checkpoint, tmp_path / "no", to="peft")
    assert "--lora-alpha N" in str(refused.value.fix)
    own = run.folder / "peft" / "adapter"
    reshard.convert(run.checkpoint, tmp_path / "said", to="peft", model_files=str(own))
    reshard.convert(run.checkpoint, tmp_path / "made", to="peft", lora_alpha=OPTIONS[adapter]["lora_alpha"])
    wanted = PeftModel.from_pretrained(base_of(kind), own).state_dict()
    for name in ("said", "made"):
        assert _tensors(tmp_path / name / "adapter_model.safetensors") == _tensors(own / "adapter_model.safetensors")
        found = PeftModel.from_pretrained(base_of(kind), tmp_path / name).state_dict()
        assert {k: raw(v) for k, v in found.items()} == {k: raw(v) for k, v in wanted.items()}


@pytest.mark.parametrize(("kind", "adapter"), rest_full([case for case in KINDS if case != ("gpt2", "dora")], *ALWAYS))
def test_merged_it_is_pefts_own(kind: str, adapter: str, adapted: Adapted, tmp_path: Path) -> None:
    """But for DoRA of GPT-2's Conv1D, which is refused for every source."""
    run = adapted(kind, adapter)
    merge: dict[str, Any] = {
        "to": "safetensors",
        "merge_adapter": True,
        "model_files": str(run.folder / "peft/adapter"),
    }
    with pytest.raises(reshard.ReshardError, match="base model's weights are not in the checkpoint"):
        reshard.convert(run.checkpoint, tmp_path / "no", **merge)
    reshard.convert(run.checkpoint, tmp_path / "merged", base=str(run.folder / "peft" / "base"), **merge)
    found, wanted = read_safetensors(tmp_path / "merged").tensors, _tensors(run.folder / "peft" / "merged.safetensors")
    assert found.keys() <= wanted.keys()
    assert {name for name in wanted if name not in found} <= {"lm_head.weight"}  # tied, in GPT-2
    for name, value in found.items():
        theirs = tensor_of(wanted[name])
        assert torch.allclose(tensor_of(value), theirs, rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize(("kind", "adapter"), rest_full(KINDS, *ALWAYS))
def test_weights_have_the_names_of_the_run(kind: str, adapter: str, adapted: Adapted, tmp_path: Path) -> None:
    run = adapted(kind, adapter)
    result = reshard.convert(run.checkpoint, tmp_path / "weights", to="safetensors")
    assert read_safetensors(tmp_path / "weights").tensors == run.truth.kind("fp32")
    assert any("base model's weights are not in the checkpoint" in text for text in result.warnings)


def _flat(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The leaves of a state dict, tensors as their bits."""
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else None
    if items is None or not state:
        yield path, raw(state) if isinstance(state, torch.Tensor) else state
        return
    for key, value in items:
        yield from _flat(value, (*path, key))


def _plain(name: str) -> str:
    return name.replace(".base_layer.", ".")


def _tensors(path: Path) -> dict[str, RawTensor]:
    with safe_open(path, "pt") as file:
        return {name: raw(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118 - no mapping

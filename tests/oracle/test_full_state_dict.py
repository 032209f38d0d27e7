"""Training files with whole tensors: read as the live run had them, and gone on with by torch on other ranks.

Files of each kind are of runs on two ranks, with the truth of these (`oracle.whole_runs`); some are frozen ones of an
older run (`house.rank_cases`). Those that need one process alone are made here, by the frameworks.
"""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from deepspeed.utils.zero_to_fp32 import (  # pyright: ignore[reportMissingTypeStubs]
    get_fp32_state_dict_from_zero_checkpoint,
)
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import reshard
from house.promises import command
from house.rank_cases import RankCase, rank_case
from house.repository import DATA, REAL_CHECKPOINTS, ROOT
from house.shared import made_once
from oracle.dcp_driver import TIMEOUT_S, FsdpOracle
from oracle.whole_tensors import differences, named, whole
from reshard.errors import SourceError

PAGE = ROOT / "docs" / "formats" / "full-state-dict.md"
REAL: dict[str, dict[str, Any]] = {
    "ddp_plain_w2": {"param_order": "groups", "buffers": "table,*.b16"},
    "light_ddp_w2": {"param_order": "groups"},
}


@dataclass(frozen=True)
class Kind:
    """A kind of files of a run on two ranks.

    Attributes:
        by: Who trains, saves and loads them (`oracle.whole_runs`).
        case: How the model is made.
        told: What their reader is told.
        again: What makes them again.
    """

    by: str
    case: dict[str, Any]
    told: dict[str, Any] = field(default_factory=dict)
    again: dict[str, Any] = field(default_factory=dict)


ORDERED = {"param_order": "groups"}
QWEN: dict[str, Any] = {"kind": "qwen", "tied": True}
WITH_BUFFERS: dict[str, Any] = {**QWEN, "buffers": True}
LIGHTNING: dict[str, Any] = {"torch_file": "step3.ckpt", "framework": "lightning"}
BY_MODEL: dict[str, Any] = {**LIGHTNING, "target_param_order": "model"}
SCRIPT: dict[str, Any] = {"framework": "state-dict", "target_scheduler_key": "scheduler"}
KINDS: dict[str, Kind] = {
    "ddp_plain_w2": Kind("script", WITH_BUFFERS, REAL["ddp_plain_w2"], SCRIPT),
    "zero1_torch_w2": Kind("script", {**QWEN, "zero": True}, {}, SCRIPT),
    "light_ddp_w2": Kind("lightning", {"kind": "llama", "light": "ddp"}, ORDERED, LIGHTNING),
    "light_mp_w2": Kind("lightning", {"kind": "llama", "light": "mp"}, {}, BY_MODEL),
    "light_fsdp_w2": Kind("lightning", {"kind": "llama", "light": "fsdp"}, {}, BY_MODEL),
    "acc_full_fsdp2_w2": Kind("accelerate", WITH_BUFFERS, {"buffers": "table,model.b16"}, {"framework": "accelerate"}),
    "acc_ids_fsdp2_w2": Kind(
        "accelerate", {**WITH_BUFFERS, "ids": True}, REAL["ddp_plain_w2"], {"framework": "accelerate"}
    ),
    "trainer_full_fsdp2_w2": Kind("trainer", {"kind": "llama", "way": "full"}, {}, {"framework": "trainer"}),
    "trainer_ddp_w2": Kind(
        "trainer", {"kind": "llama", "way": "ddp"}, {}, {"framework": "trainer", "torch_file": "optimizer.pt"}
    ),
}


CaseOf: TypeAlias = Callable[[str], RankCase]


@pytest.fixture(scope="module")
def trained(fsdp: FsdpOracle, tmp_path_factory: pytest.TempPathFactory) -> CaseOf:
    """`trained(name)`: the files of a kind, of a run on two ranks, and its truth; made once per test run."""

    def case(name: str) -> RankCase:
        kind = KINDS[name]

        def make(folder: Path) -> list[float]:
            run: dict[str, Any] = {"folder": str(folder), "case": kind.case}
            found = fsdp.worlds.run(f"oracle.whole_runs:{kind.by}", world=2, timeout_s=TIMEOUT_S, **run)
            return list(found[0]["losses"])

        folder, losses = made_once(tmp_path_factory, f"whole-{name}", make)
        found = RankCase(folder)
        found.facts["losses_after"] = losses
        return found

    return case


@pytest.fixture(scope="module")
def real(place: Path, trained: CaseOf) -> CaseOf:
    """`real(name)`: the frozen files of an older run, or, where these are not here, those of a run of our own."""

    def case(name: str) -> RankCase:
        frozen = (REAL_CHECKPOINTS / "rank_files" / f"{name}.tar.xz").exists()
        return rank_case(name, place) if frozen else trained(name)

    return case


def written(source: Path, target: Path, **options: Any) -> dict[str, Any]:
    reshard.convert(source, target, to="dcp", grammar="state-dict", progress=False, **options)
    return whole(target)


def groups_of(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    groups = [{k: v for k, v in g.items() if k != "params"} for g in found["optimizer"]["param_groups"]]
    return list(json.loads(json.dumps(groups)))


@pytest.mark.parametrize("name", REAL)
def test_each_tensor_state_and_group_is_that_of_the_run(name: str, real: CaseOf, tmp_path: Path) -> None:
    case = real(name)
    found = written(case.file, tmp_path / "dcp", **REAL[name])
    assert differences(case, named(found)) == []
    assert groups_of(found) == case.facts["groups"]
    saved = torch.load(case.file, weights_only=False)
    said = saved["scheduler"] if "scheduler" in saved else saved["lr_schedulers"][0]
    assert found["lr_scheduler"] == said
    # The directory is the file, as the only one in it.
    sides = {f"{n}_{side}": v for n, v in REAL[name].items() for side in "ab"}
    assert reshard.diff(case.file, case.file.parent, progress=False, **sides).equal


@pytest.mark.parametrize("name", REAL)
def test_a_run_goes_on_under_fsdp2_on_other_ranks(name: str, real: CaseOf, tmp_path: Path, fsdp: FsdpOracle) -> None:
    case, out = real(name), tmp_path / "loaded.safetensors"
    written(case.file, tmp_path / "dcp", **REAL[name])
    jobs = {"path": str(tmp_path / "dcp"), "case": case.facts["case_args"], "out": str(out)}
    found = fsdp.worlds.run("oracle.fsdp_ranks_load:resume_shards", world=3, timeout_s=TIMEOUT_S, **jobs)
    assert differences(case, load_file(out)) == []
    assert all(f["rates"] == [g["lr"] for g in case.facts["groups"]] for f in found)
    assert [f["losses"] for f in found] == [pytest.approx(case.facts["losses_after"], abs=2e-6)] * 3


def model_order(case: RankCase) -> list[str]:
    """The names in the optimizer's order, by the rule of the script that made the case: vectors first."""
    saved = torch.load(case.file, weights_only=False)
    model = saved.get("model") or saved["state_dict"]
    skipped = {k.removesuffix("/buffer") for k in case.facts["buffers"]} | {*case.facts.get("tied", {})}
    names = [n for n in model if n not in skipped]
    return [*(n for n in names if model[n].dim() < 2), *(n for n in names if model[n].dim() >= 2)]


@pytest.mark.parametrize("name", REAL)
def test_a_file_with_the_order_says_the_same_as_the_rule(name: str, real: CaseOf, tmp_path: Path) -> None:
    case, order = real(name), tmp_path / "order.txt"
    order.write_text("".join(f"{n}\n" for n in model_order(case)))
    zero = {"to": "zero", "dp": 3, "zero_stage": "2"}
    reshard.convert(case.file, tmp_path / "a" / "s", progress=False, **zero, **REAL[name])
    said: dict[str, Any] = {**REAL[name], "param_order": str(order)}
    reshard.convert(case.file, tmp_path / "b" / "s", progress=False, **zero, **said)
    assert reshard.diff(tmp_path / "a", tmp_path / "b", progress=False).equal
    order.write_text("".join(f"{n}\n" for n in reversed(model_order(case))))
    with pytest.raises(reshard.ReshardError, match="--param-order: the optimizer's number 0 has states of"):
        reshard.convert(case.file, tmp_path / "c" / "s", progress=False, **zero, **said)


# Back to one file.


def equal(a: Any, b: Any) -> bool:
    """True for values that are equal in every bit, key by key in the same order."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype is b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and [*a] == [*b] and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b) and type(a) is type(b)


@pytest.mark.parametrize("name", [*REAL, "light_mp_w2", "zero1_torch_w2"])
def test_a_file_of_the_same_kind_is_the_same_value(name: str, real: CaseOf, tmp_path: Path) -> None:
    case = real(name)
    told = REAL.get(name, {})
    reshard.convert(case.file, tmp_path / "out", to="torch_save", progress=False, **told)
    saved = torch.load(case.file, weights_only=True)
    written_again = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)
    assert written_again.keys() == saved.keys()
    assert all(equal(written_again[k], saved[k]) for k in saved)


def test_torch_goes_on_from_zero_with_one_file(real: CaseOf, tmp_path: Path, fsdp: FsdpOracle) -> None:
    """ZeRO's partitions become the file of a script, whose numbers torch's optimizer loads."""
    case = real("ddp_plain_w2")
    zero = {"to": "zero", "dp": 3, "zero_stage": "2"}
    reshard.convert(case.file, tmp_path / "zero" / "s", progress=False, **zero, **REAL["ddp_plain_w2"])
    reshard.convert(tmp_path / "zero" / "s", tmp_path / "file", to="torch_save", progress=False)
    file, out = tmp_path / "file" / "checkpoint.pt", tmp_path / "loaded.safetensors"
    jobs = {"path": str(file), "case": case.facts["case_args"], "out": str(out)}
    found = fsdp.worlds.run("oracle.fsdp_ranks_load:resume_file", world=3, timeout_s=TIMEOUT_S, **jobs)
    assert differences(case, load_file(out)) == []
    assert [f["losses"] for f in found] == [pytest.approx(case.facts["losses_after"], abs=2e-6)] * 3


@pytest.mark.parametrize("way", ["zero", "fsdp2"])
@pytest.mark.parametrize("name", KINDS)
def test_a_run_goes_elsewhere_and_comes_back_to_its_kind_of_files(
    name: str, way: str, trained: CaseOf, tmp_path: Path, fsdp: FsdpOracle
) -> None:
    """From two ranks to ZeRO-3 on three or FSDP2 on two, and back to who saved them: each loads all, and goes on."""
    case, kind = trained(name), KINDS[name]
    trainer, out = kind.by == "trainer", tmp_path / "loaded.safetensors"
    source = case.file if kind.by in ("script", "lightning") else case.checkpoint
    told, again = dict(kind.told), dict(kind.again)
    if name == "trainer_ddp_w2":
        told["param_order"] = str(order_of_trainer(source, tmp_path / "order.txt"))
    shared: dict[str, Any] = {"case": case.facts["case_args"], "timeout_s": TIMEOUT_S}
    losses = pytest.approx(case.facts["losses_after"], abs=2e-6)
    there = tmp_path / "checkpoint-3" / "global_step3" if way == "zero" else tmp_path / "there"
    if way == "zero":
        reshard.convert(source, there, to="zero", dp=3, zero_stage="3", progress=False, **told)
        jobs: dict[str, Any] = {"path": str(there.parent), "stage": 3, "verl": False, "out": str(out)}
        function, world = "oracle.fsdp_ranks_load:resume_zero", 3
        again |= {"trainer_files": str(source)} if trainer else {}
    else:
        framework = "trainer" if trainer else "state-dict"
        reshard.convert(source, there, to="dcp", framework=framework, progress=False, **told)
        jobs = {"path": str(there), "out": str(out)}
        function, world = "oracle.fsdp_ranks_load:resume_shards", 2
    if trainer:
        for file in ("trainer_state.json", "scheduler.pt"):
            (there.parent if way == "zero" else there).joinpath(file).write_bytes((source / file).read_bytes())
        jobs = {"path": jobs["path"], "folder": str(tmp_path / "run"), "way": "zero" if way == "zero" else "sharded"}
        function = "oracle.whole_runs:trainer"
    found = fsdp.worlds.run(function, world=world, **jobs, **shared)
    if not trainer:
        assert differences(case, all_names(case, out)) == []
    assert [f["losses"] for f in found] == [losses] * world
    reshard.convert(there, tmp_path / "back", to="torch_save", progress=False, **again)
    back = (
        tmp_path / "back" / again.get("torch_file", "checkpoint.pt")
        if kind.by in ("script", "lightning")
        else tmp_path / "back"
    )
    found = fsdp.worlds.run(f"oracle.whole_runs:{kind.by}", world=2, folder=str(out), path=str(back), **shared)
    if not trainer:
        assert differences(case, all_names(case, out)) == []
    assert [f["losses"] for f in found] == [losses] * 2
    for file in source.glob("*.bin" if kind.case["way"] == "full" else "optimizer.pt") if trainer else ():
        if file.name != "training_args.bin":
            saved, now = (torch.load(d / file.name, weights_only=True) for d in (source, back))
            assert equal(now, saved), file.name


def all_names(case: RankCase, out: Path) -> dict[str, torch.Tensor]:
    """What ranks loaded, a tied pair under both names."""
    loaded = load_file(out)
    return loaded | {f"{a}/model": loaded[f"{o}/model"] for a, o in case.facts.get("tied", {}).items()}


@pytest.mark.parametrize("name", ["acc_full_fsdp2_w2", "trainer_full_fsdp2_w2"])
def test_full_files_of_a_framework_are_the_same_values(name: str, real: CaseOf, tmp_path: Path) -> None:
    case, framework = real(name), name.partition("_")[0].replace("acc", "accelerate")
    reshard.convert(case.checkpoint, tmp_path / "out", to="torch_save", framework=framework, progress=False)
    files = {f.name for f in (tmp_path / "out").iterdir()} - {"reshard.json"}
    unread = {"model.safetensors", "config.json", "generation_config.json", "training_args.bin"}
    assert files == {f.name for f in case.checkpoint.iterdir()} - unread
    for file in map(case.checkpoint.joinpath, files):
        if file.suffix == ".json":
            assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()
            continue
        saved, now = (torch.load(d / file.name, weights_only=False) for d in (case.checkpoint, tmp_path / "out"))
        assert repr(now) == repr(saved) if file.name[0] == "r" else equal(now, saved), file.name


# The Trainer without FSDP and DeepSpeed.


def trained_by_trainer(place: Path) -> Path:
    """A checkpoint of the Trainer in one process, and its truth beside it, by the names of the model."""
    from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(5)
    config = Qwen2Config(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    rows = [{"input_ids": (row := torch.randint(0, 31, (8,))), "labels": row} for _ in range(8)]
    arguments = TrainingArguments(
        output_dir=str(place), max_steps=2, save_steps=2, learning_rate=2e-3, weight_decay=0.1, use_cpu=True,
        per_device_train_batch_size=4, report_to=[], disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    trainer: Any = Trainer(model=Qwen2ForCausalLM(config), args=arguments, train_dataset=rows)  # type: ignore[arg-type]
    trainer.train()
    truth: dict[str, torch.Tensor] = {}
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    for name, parameter in trainer.model.named_parameters():
        truth[f"{name}/fp32"] = parameter.detach().clone()
        truth |= {f"{name}/{state}": value.clone() for state, value in optimizer.state[parameter].items()}
    save_file(truth, place / "truth.safetensors")
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    (place / "groups.json").write_text(json.dumps(groups))
    return place / "checkpoint-2"


@pytest.fixture(scope="module")
def trainers(place: Path) -> Path:
    return trained_by_trainer(place / "trainer")


def order_of_trainer(checkpoint: Path, out: Path) -> Path:
    """The optimizer's order, as the lines of Python on the format's page print it."""
    lines = PAGE.read_text().partition("```python\n")[2].partition("```")[0]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as said:
        patch.setattr(sys, "argv", ["lines.py", str(checkpoint)])
        exec(compile(lines, "lines.py", "exec"), {})
    out.write_text(said.getvalue())
    return out


def test_the_trainers_optimizer_is_read_in_the_order_of_its_rule(
    trainers: Path, tmp_path: Path, fsdp: FsdpOracle
) -> None:
    code, out, err = command("inspect", str(trainers))
    assert (code, out.partition("\n")[0]) == (0, "full-trainer, step 2")
    assert "no training state" not in out + err
    assert "the weights' files sort their tensors" in out + err
    assert "no target has the second name" in out + err  # lm_head.weight is tied, and safetensors leave it out
    order = order_of_trainer(trainers, tmp_path / "order.txt")
    found = written(trainers, tmp_path / "dcp", param_order=str(order))
    truth = load_file(trainers.parent / "truth.safetensors")
    held = {k.replace("/model", "/fp32"): v for k, v in named(found).items()}
    assert held.keys() == truth.keys()
    assert all(torch.equal(held[k], v) and held[k].dtype is v.dtype for k, v in truth.items())
    assert groups_of(found) == json.loads((trainers.parent / "groups.json").read_text())
    assert found["lr_scheduler"]["last_epoch"] == 2
    jobs = {
        "path": str(tmp_path / "dcp"), "expected": str(trainers.parent / "truth.safetensors"), "tied": {},
        "out": str(tmp_path / "loaded.safetensors"),
    }  # fmt: skip
    fsdp.worlds.run("oracle.fsdp_ranks_load:load", world=3, timeout_s=TIMEOUT_S, **jobs)
    loaded = {k.replace("/model", "/fp32"): v for k, v in load_file(tmp_path / "loaded.safetensors").items()}
    assert all(torch.equal(loaded[k], v) for k, v in truth.items())


def test_the_trainers_numbers_have_no_names_without_a_word(trainers: Path, tmp_path: Path) -> None:
    for options in ({"to": "dcp"}, {"to": "universal"}, {"to": "dcp", "param_order": "groups"}):
        with pytest.raises(reshard.ReshardError, match="the weights' files sort their tensors") as caught:
            reshard.convert(trainers, tmp_path / "no", progress=False, **options)  # type: ignore[arg-type]
        assert caught.value.code == "checkpoint.ambiguous"
        assert "--param-order FILE" in (caught.value.fix or "")
    reshard.convert(trainers, tmp_path / "weights", to="safetensors", model_files=str(trainers), progress=False)
    weights, saved = (load_file(d / "model.safetensors") for d in (tmp_path / "weights", trainers))
    assert weights.keys() == saved.keys()
    assert all(torch.equal(weights[n], t) for n, t in saved.items())


def test_weights_that_torch_saved_keep_the_models_order(trainers: Path, tmp_path: Path) -> None:
    """`save_safetensors=False` of older transformers: the groups alone decide, and shapes leave one way."""
    from transformers import AutoModelForCausalLM

    older = tmp_path / "checkpoint-2"
    older.mkdir()
    model = AutoModelForCausalLM.from_pretrained(trainers)
    torch.save(model.state_dict(), older / "pytorch_model.bin")
    for file in ("optimizer.pt", "scheduler.pt", "trainer_state.json"):
        (older / file).write_bytes((trainers / file).read_bytes())
    found = written(older, tmp_path / "dcp", param_order="groups")
    truth = load_file(trainers.parent / "truth.safetensors")
    held = {k.replace("/model", "/fp32"): v for k, v in named(found).items()}
    assert all(torch.equal(held[k], v) for k, v in truth.items())


# ZeroRedundancyOptimizer.


@contextmanager
def alone() -> Generator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_a_consolidated_optimizer_is_one_like_any_other(tmp_path: Path, fsdp: FsdpOracle) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of torch.jit.script
        from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 7), nn.Linear(7, 7))
    with alone():
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01, weight_decay=0.3)
        for _ in range(2):
            model(torch.randn(3, 5)).square().sum().backward()
            optimizer.step()
        optimizer.consolidate_state_dict(0)
        state = {"model": {f"module.{k}": v for k, v in model.state_dict().items()}, "epoch": 4}
        torch.save({**state, "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint.pt")
        inner: Any = optimizer.optim
        truth = {f"{n}/fp32": p.detach().clone() for n, p in model.named_parameters()}
        truth |= {f"{n}/{k}": v for n, p in model.named_parameters() for k, v in inner.state[p].items()}
    save_file(truth, tmp_path / "truth.safetensors")
    result = reshard.convert(
        tmp_path / "checkpoint.pt", tmp_path / "dcp", to="dcp", grammar="state-dict", progress=False
    )
    assert any("numbers are taken for the model's order" in w for w in result.warnings)
    found = whole(tmp_path / "dcp")
    assert found["epoch"] == 4
    held = {k.replace("/model", "/fp32"): v for k, v in named(found).items()}
    assert held.keys() == truth.keys()
    assert all(torch.equal(held[k], v) for k, v in truth.items())
    jobs = {
        "path": str(tmp_path / "dcp"), "expected": str(tmp_path / "truth.safetensors"), "tied": {},
        "out": str(tmp_path / "loaded.safetensors"),
    }  # fmt: skip
    fsdp.worlds.run("oracle.fsdp_ranks_load:load", world=3, timeout_s=TIMEOUT_S, **jobs)
    loaded = {k.replace("/model", "/fp32"): v for k, v in load_file(tmp_path / "loaded.safetensors").items()}
    assert all(torch.equal(loaded[k], v) for k, v in truth.items())


WRAPPED: dict[str, Callable[[nn.Module], Any]] = {
    "module.": nn.parallel.DistributedDataParallel,
    "_orig_mod.module.": lambda model: torch.compile(nn.parallel.DistributedDataParallel(model), backend="eager"),
    "module._orig_mod.": lambda model: nn.parallel.DistributedDataParallel(
        torch.compile(model, backend="eager")  # pyright: ignore[reportArgumentType]
    ),
}
"""Wrappers of a script's model, by the prefix of the names in their state dicts."""


def trained_under(prefix: str) -> tuple[Any, torch.optim.Optimizer]:
    """A model under a wrapper and its optimizer, whose two groups no shapes tell apart, after two steps."""
    torch.manual_seed(11)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    wrapped = WRAPPED[prefix](model)
    groups = [
        {"params": [model[3].weight, model[0].weight, model[1].bias], "weight_decay": 0.1},
        {"params": [model[2].bias, model[0].bias, model[3].bias, model[1].weight, model[2].weight]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0)
    for _ in range(2):
        optimizer.zero_grad()
        wrapped(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()
    return wrapped, optimizer


def in_its_order(optimizer: torch.optim.Optimizer, names: Mapping[str, nn.Parameter]) -> list[str]:
    """The names of an optimizer's parameters in its order."""
    name_of = {id(parameter): name for name, parameter in names.items()}
    return [name_of[id(p)] for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("prefix", WRAPPED)
def test_an_order_has_the_names_of_inspect_or_of_the_script(prefix: str, tmp_path: Path) -> None:
    """`inspect` leaves the names of wrappers out, and the script prints them."""
    with alone():
        wrapped, optimizer = trained_under(prefix)
        state = {"model": wrapped.state_dict(), "optimizer": optimizer.state_dict()}
        own = dict(wrapped.named_parameters())
    assert all(name.startswith(prefix) for name in own)
    torch.save(state, tmp_path / "checkpoint.pt")
    script = in_its_order(optimizer, own)
    plain = [name.removeprefix(prefix) for name in script]
    assert {t.fqn for t in reshard.inspect(tmp_path / "checkpoint.pt").tensors} == {*plain}
    for said, order in {"inspect": plain, "script": script, "ddp": [f"module.{name}" for name in plain]}.items():
        file = tmp_path / f"{said}.txt"
        file.write_text("\n".join(order) + "\n")
        found = written(tmp_path / "checkpoint.pt", tmp_path / said, param_order=str(file))
        held = named(found)
        for name, parameter in own.items():
            short = name.removeprefix(prefix)
            assert torch.equal(held[f"{short}/model"], parameter.detach())
            for key, value in optimizer.state[parameter].items():
                assert torch.equal(held[f"{short}/{key}"], value), f"{said}: {short}/{key}"
        assert [g["params"] for g in found["optimizer"]["param_groups"]] == [plain[:3], plain[3:]]
        assert [g["weight_decay"] for g in found["optimizer"]["param_groups"]] == [0.1, 0.0]


def test_an_optimizer_with_names_is_of_a_model_under_ddp(tmp_path: Path) -> None:
    """`get_optimizer_state_dict` leaves the names of wrappers out, and `model.state_dict()` of DDP has them."""
    with alone():
        wrapped, optimizer = trained_under("module.")
        state = {"model": wrapped.state_dict(), "optimizer": get_optimizer_state_dict(wrapped, optimizer)}
        own = dict(wrapped.named_parameters())
    assert {*state["optimizer"]["state"]} == {name.removeprefix("module.") for name in own}
    torch.save(state, tmp_path / "checkpoint.pt")
    held = named(written(tmp_path / "checkpoint.pt", tmp_path / "dcp"))
    for name, parameter in own.items():
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(held[f"{name.removeprefix('module.')}/{key}"], value), f"{name}/{key}"


class _Scaled(nn.Module):
    """A layer with buffers that nothing tells from parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.register_buffer("running_low", torch.zeros(6))
        self.register_buffer("running_high", torch.ones(6))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self.up(value) * self.running_high
        return scaled


def _saved(model: nn.Module, place: Path, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """Train a step, save model and optimizer in one file, and return the model's tensors."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(value).square().sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, place)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


_TO_ZERO: dict[str, Any] = {"to": "zero", "dp": 2, "zero_stage": "1", "param_order": "model", "progress": False}


KEYS: dict[str, Any] = {
    "counts": {(0, 1): 2, None: 3, 1.5: 4, True: 5, 7: 6, ("a", (None, 2.0)): 8, float("inf"): 9},
    "deep": [{None: torch.arange(3.0)}, {(1,): {False: "x"}}],
    "whole": ({None: 1, (2, 3): 4},),
}
"""A script's state whose keys are no texts; torch enters dicts and lists, and keeps a tuple whole."""


def paths_in(folder: Path) -> dict[str, Any]:
    """The keys of a distributed checkpoint with the paths of a nested state dict that they stand for."""
    return dict(FileSystemReader(folder).read_metadata().planner_data)


@pytest.mark.parametrize("source", ["script", "deepspeed"])
def test_keys_of_any_kind_become_the_texts_that_torch_makes_of_them(source: str, tmp_path: Path) -> None:
    if source == "script":
        place = tmp_path / "checkpoint.pt"
        torch.save({"model": {"w": torch.ones(3)}, "x": KEYS}, place)
    else:
        place = Path(shutil.copytree(DATA / "zero2_tiny", tmp_path / "in"))
        file = place / "global_step3" / "mp_rank_00_model_states.pt"
        torch.save({**torch.load(file, weights_only=False), "x": KEYS}, file)
    framework = "state-dict" if source == "deepspeed" else None
    reshard.convert(place, tmp_path / "ours", to="dcp", framework=framework, progress=False)
    with alone():
        dcp.save({"x": KEYS}, checkpoint_id=tmp_path / "torch")
    own = {key: path for key, path in paths_in(tmp_path / "ours").items() if path[0] == "x"}
    assert own == paths_in(tmp_path / "torch")
    found, wanted = whole(tmp_path / "ours")["x"], whole(tmp_path / "torch")["x"]
    assert wanted["counts"]["(0, 1)"] == 2
    assert equal(found, wanted)


@pytest.mark.parametrize(
    ("keys", "named"),
    [({1: 2, "1": 3}, "the keys 1 and '1'"), ({None: 1, "None": 2}, "the keys None and 'None'"),
     ({(0, 1): 1, "(0, 1)": 2}, "the keys (0, 1) and '(0, 1)'")],
)  # fmt: skip
def test_two_keys_that_torch_makes_one_are_both_named(keys: dict[Any, int], named: str, tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(3)}, "x": {"y": keys}}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="duplicated flatten key"):
        flatten_state_dict({"x": {"y": keys}})
    with pytest.raises(reshard.ReshardError) as caught:
        reshard.convert(tmp_path / "a.pt", tmp_path / "ours", to="dcp", progress=False)
    assert caught.value.code == "checkpoint.ambiguous"
    assert f"x.y has {named}" in caught.value.message
    assert "save again" in (caught.value.fix or "")


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (range(3), "contains a range object of Python"),
        (slice(1, 2), "contains a slice object of Python"),
        (np.array([1, "a", None], dtype=object), "a numpy array has the dtype object"),
    ],
    ids=["range", "slice", "array of objects"],
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_values_that_are_not_read_are_named_as_what_they_are(
    value: Any, named: str, protocol: int, tmp_path: Path
) -> None:
    """A pickle calls a range `__builtin__.xrange`, and an array of objects was said to have a damaged dtype."""
    torch.save({"model": {"w": torch.ones(3)}, "x": value}, tmp_path / "a.pt", pickle_protocol=protocol)
    of_objects = isinstance(value, np.ndarray)
    for to in ("dcp", *(("safetensors",) if of_objects else ())):
        with pytest.raises(reshard.ReshardError) as caught:
            reshard.convert(tmp_path / "a.pt", tmp_path / to, to=to, progress=False)
        assert caught.value.code == "pickle.forbidden_call"
        assert named in caught.value.message
    if not of_objects:
        # Weights have no place for what lies beside the model.
        weights = reshard.convert(tmp_path / "a.pt", tmp_path / "weights", to="safetensors", progress=False)
        assert any("not on the allow-list" in text for text in weights.warnings)
        reshard.convert(tmp_path / "a.pt", tmp_path / "kept", to="torch_save", opaque="keep", progress=False)
        assert torch.load(tmp_path / "kept" / "checkpoint.pt", weights_only=False)["x"] == value


def test_buffers_have_the_names_of_inspect_or_of_the_script(tmp_path: Path) -> None:
    with alone():
        torch.manual_seed(12)
        model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), _Scaled()))
        _saved(model, tmp_path / "checkpoint.pt", torch.randn(3, 4))
    for said, buffers in {"inspect": "1.running_*", "script": "module.1.running_low,module.1.running_high"}.items():
        place = tmp_path / said / "global_step1"
        reshard.convert(tmp_path / "checkpoint.pt", place, buffers=buffers, **_TO_ZERO)
        written_states = torch.load(place / "mp_rank_00_model_states.pt", weights_only=False)
        assert {"1.running_low", "1.running_high"} <= {*written_states["buffer_names"]}


def test_a_model_with_more_tensors_than_the_optimizer_numbers_is_told_of_buffers(tmp_path: Path) -> None:
    """The fix names `--buffers`, which is the answer."""
    torch.manual_seed(12)
    _saved(nn.Sequential(nn.Linear(4, 4), _Scaled()), tmp_path / "checkpoint.pt", torch.randn(3, 4))
    with pytest.raises(SourceError) as caught:
        reshard.convert(tmp_path / "checkpoint.pt", tmp_path / "out", to="universal", progress=False)
    assert "numbers 4 parameters, and the model's files hold 6 parameters" in caught.value.message
    assert "--buffers NAME,… if some of them are buffers" in caught.value.fix
    reshard.convert(tmp_path / "checkpoint.pt", tmp_path / "out", to="universal", buffers="1.running_*", progress=False)


def test_statistics_of_a_batch_norm_are_buffers(tmp_path: Path) -> None:
    """Three tensors that torch's batch norm alone has together; DeepSpeed's own script finds the model's values."""
    torch.manual_seed(12)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(216, 2))
    wanted = _saved(model, tmp_path / "checkpoint.pt", torch.randn(2, 3, 8, 8))
    reshard.convert(tmp_path / "checkpoint.pt", tmp_path / "run" / "global_step1", **_TO_ZERO)
    found = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "run"), tag="global_step1")
    assert {n: t for n, t in wanted.items() if n != "1.num_batches_tracked"}.keys() <= found.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in found)


def test_names_of_statistics_alone_make_no_batch_norm(tmp_path: Path) -> None:
    """Without `num_batches_tracked` nothing proves that they are no parameters."""
    torch.manual_seed(12)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(216, 2))
    _saved(model, tmp_path / "checkpoint.pt", torch.randn(2, 3, 8, 8))
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    del state["model"]["1.num_batches_tracked"]
    torch.save(state, tmp_path / "checkpoint.pt")
    with pytest.raises(SourceError) as caught:
        reshard.convert(tmp_path / "checkpoint.pt", tmp_path / "out", to="universal", progress=False)
    assert "--buffers" in caught.value.fix

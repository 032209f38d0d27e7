"""The commands of recipes without a training script, as they stand there, on small stand-ins."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

import reshard
from house.megatron_runs import MegatronRun
from house.megatron_saves import as_bridge_saves
from house.promises import command
from house.repository import ROOT, code_blocks
from house.saves import same
from laws.item_files import Items, save_items
from laws.rank_files import World, save_accelerate, save_verl, small_model

RECIPES = ROOT / "docs" / "recipes"
WORLD = World((2,), ("fsdp",))


def _actor(folder: Path) -> None:
    """A model of verl's under FSDP2."""
    save_verl(small_model(), folder, WORLD, extra={"lr_scheduler": {"last_epoch": 3, "_last_lr": [0.1]}, "rng": None})
    (folder / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 2}')
    (folder / "huggingface").mkdir()
    (folder / "huggingface" / "config.json").write_text('{"model_type": "llama"}')


def ranks(place: Path) -> None:
    """What the commands of the recipe for files of ranks name."""
    for name in ("grpo/global_step_300/actor", "grpo/global_step_300/critic", "skyrl/global_step_300/policy"):
        _actor(place / "ckpts" / name)
    save_verl(small_model(), place / "ckpts" / "fsdp1" / "global_step_300" / "actor", WORLD)
    (place / "ckpts" / "fsdp2").mkdir()
    (place / "ckpts" / "skyrl" / "latest_ckpt_global_step.txt").write_text("300")
    save_accelerate(small_model(), place / "state", World((2,), None))
    (place / "outputs").mkdir()
    save_items(small_model(), place / "outputs" / "step-500", WORLD, Items())


def script(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the script of the other recipe saves: two groups whose shapes tell them apart."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    held = list(model.parameters())
    matrices, vectors = [p for p in held if p.ndim > 1], [p for p in held if p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(3):
        model(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    (place / "run").mkdir()
    values = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 3}
    code = next(code_blocks(RECIPES / "own-script.md", "python"))
    monkeypatch.chdir(place)
    exec(compile(code, "own-script.md", "exec"), {"torch": torch, **values})


_LINE = re.compile(r"(?:[A-Z]+=\$\()?reshard ([^)]*)\)?|echo (\d+) > (\S+)")


def _run(page: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the commands of a page print, one after another, without a shell: each start of Python takes a second."""
    monkeypatch.chdir(place)
    said: list[str] = []
    for line in "".join(code_blocks(RECIPES / page, "sh")).splitlines():
        found = _LINE.fullmatch(line)
        assert found is not None, line
        if found[1] is None:
            Path(found[3]).write_text(found[2])
            continue
        code, out, err = command(*shlex.split(found[1]))
        assert code == 0, f"{line}: {err}"
        said.append(out.strip())
    return said


pytestmark = pytest.mark.usefixtures("no_launcher")


def test_files_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks(tmp_path)
    said = _run("rank-files.md", tmp_path, monkeypatch)
    verl, skyrl, state, items, zero = (Path(path) for path in said if ".reshard" in path)
    assert (verl.name, skyrl.name) == ("global_step_300", "global_step_300")
    assert (skyrl.parent / "latest_ckpt_global_step.txt").read_text() == "300"
    for place in (verl / "actor", verl / "critic", skyrl / "policy"):
        assert reshard.inspect(place).world == {"dp": 6}
    actor = tmp_path / "ckpts" / "grpo" / "global_step_300" / "actor"
    pairs = (
        *((actor, result) for result in (verl / "actor", verl / "critic", zero, tmp_path / "sft-fsdp")),
        *((tmp_path / "state", result) for result in (state, tmp_path / "state-dcp")),
        (tmp_path / "outputs" / "step-500", items),
    )
    assert [result for source, result in pairs if not same(source, result)] == []
    # torchtitan counts tokens, and the source does not.
    found = reshard.diff(tmp_path / "outputs" / "step-500", tmp_path / "dcp" / "step-500", progress=False)
    assert [d.name for d in found.differences] == ["counters and client state"]
    assert (tmp_path / "weights" / "config.json").exists()


def test_ones_own_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, monkeypatch)
    _run("own-script.md", tmp_path, monkeypatch)
    first = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    again = torch.load(tmp_path / "one" / "checkpoint.pt", weights_only=True)
    assert all(torch.equal(v, again["model"][n]) for n, v in first["model"].items())
    for number, states in first["optimizer"]["state"].items():
        assert all(torch.equal(states[k], again["optimizer"]["state"][number][k]) for k in states), number
    assert same(tmp_path / "run-zero", tmp_path / "run-fsdp")


def test_megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = {"transformer_impl": "local", "moe_grouped_gemm": False, "accumulate_allreduce_grads_in_fp32": True}
    alike = {"num_attention_heads": 2, "lr": 1e-3, "min_lr": 1e-5, "make_vocab_size_divisible_by": 4}
    MegatronRun(tensor=2, pipeline=2, said=local | alike).save_torch_dist(tmp_path / "runs" / "gpt")
    MegatronRun(experts=4, expert_ranks=4, data=4, said=local).save_torch_dist(tmp_path / "runs" / "moe")
    for name in ("gpt", "moe"):
        (tmp_path / "runs" / name / "latest_checkpointed_iteration.txt").write_text("7")
    as_bridge_saves(MegatronRun(said=local).save_torch_dist(tmp_path / "runs" / "bridge"))
    said = _run("megatron.md", tmp_path, monkeypatch)
    runs = tmp_path / "runs"
    (ensured,) = (Path(line) for line in said if ".reshard" in line)
    assert (ensured / "latest_checkpointed_iteration.txt").read_text() == "7"
    assert _same_tensors(runs / "gpt", ensured)
    written = {"gpt": ("gpt-any", "gpt-ranks"), "moe": ("moe-ep2", "moe-ep1"), "bridge": ("bridge-any",)}
    for source, results in written.items():
        assert [r for r in results if not _same_tensors(runs / source, runs / r)] == []
    assert (runs / "gpt-any" / "latest_checkpointed_iteration.txt").read_text() == "7"
    assert (runs / "gpt-ranks" / "iter_0000007" / "mp_rank_01" / "distrib_optim.pt").exists()
    assert (tmp_path / "weights" / "model.safetensors").exists()
    # To Megatron-DeepSpeed and back: the stand-in's schedule is none, and its groups lack a field of newer versions.
    found = reshard.diff(runs / "gpt", runs / "gpt-core", progress=False)
    differing = [d for d in found.differences if d.name != "schedulers"]
    assert [d for d in differing if "default_config" not in d.model_dump_json()] == []
    assert (runs / "gpt-ds" / "latest_checkpointed_iteration.txt").read_text() == "7"


def _same_tensors(one: Path, other: Path) -> bool:
    """True if nothing differs but whether experts have groups of their own."""
    found = reshard.diff(one, other, progress=False)
    return [d for d in found.differences if "is_expert_parallel" not in d.model_dump_json()] == []

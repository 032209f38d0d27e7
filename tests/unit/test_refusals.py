"""What a refusal says is true of the directory, and the commands in its `fix` work as they stand.

Files of other frameworks stand here by their names, and real ones where they are at hand.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from house.promises import command
from house.rank_cases import rank_case
from house.saves import make_save
from laws.item_files import Items, save_items
from laws.rank_files import World, small_model
from laws.small_models import piped_model, write_source
from reshard.errors import ReshardError
from reshard.options import SourceSpec
from reshard_engine.local import LocalEngine

Made = Callable[[Path], Path]
"""Makes a directory below another one and returns the directory that the user names."""


pytestmark = pytest.mark.usefixtures("no_launcher")


def _files(place: Path, names: Iterable[str]) -> Path:
    for name in names:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(b"x")
    return place


def _weights(place: Path, *others: str, name: str = "model.safetensors") -> Path:
    """One tensor of two elements, and other files beside it."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    _files(place, others)
    place.mkdir(parents=True, exist_ok=True)
    (place / name).write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    return place


def _said(*words: str) -> tuple[str, str]:
    """Error and fix of a command that is refused."""
    code, _, said = command(*words)
    assert code != 0
    error, _, fix = said.rpartition("error: ")[2].partition("\nfix: ")
    return error, fix.strip()


def _run(line: str, out: Path) -> None:
    """Run a command of a fix; `DST` is the only word that stands for another."""
    words = [str(out) if word == "DST" else word for word in shlex.split(line)]
    assert words[0] == "reshard"
    code, _, said = command(*words[1:], *(["-q"] if words[1] == "convert" else []))
    assert code == 0, said


def _command_in(fix: str) -> str:
    found = re.search(r"reshard [a-z][^;,]*", fix)
    assert found, fix
    return found[0]


# -- files of FSDP's ranks --------------------------------------------------------------------------------------------

_VERL = [f"{item}_world_size_4_rank_{r}.pt" for item in ("model", "optim", "extra_state") for r in range(4)]
_OF_ITEMS = {
    "torch_checkpointing": (Items(), ""),
    "without a resharder": (Items(described=()), ""),
    "safetensors": (Items(layouts={"model": "model_{rank}.safetensors"}), ""),
    "a step": (Items(), "step-3"),
}


@pytest.mark.parametrize("kind", _OF_ITEMS)
def test_files_of_ranks_are_read_as_what_they_are(kind: str, tmp_path: Path) -> None:
    how, where = _OF_ITEMS[kind]
    place = save_items(replace(small_model(), ties={}), tmp_path / "run" / where, World((2,)), how)
    if where:
        assert f"its newest complete checkpoint is {where}: this" in command("inspect", str(tmp_path / "run"))[2]
        error, fix = _said("convert", str(tmp_path / "run"), "OUT", "--to", "safetensors", "-q")
        assert error.startswith("request.run_directory")
        assert fix == f"reshard convert {place} OUT --to safetensors -q"
        assert "Megatron" not in error + fix
    code, out, _ = command("inspect", str(place))
    assert (code, out.partition("\n")[0].startswith("torch-checkpointing, dp=2")) == (0, True)
    assert "Megatron" not in out
    assert command("convert", str(place), str(tmp_path / "out"), "--to", "safetensors", "-q")[0] == 0


def test_local_state_dicts_of_fsdp_are_called_what_they_are(tmp_path: Path) -> None:
    place = _files(tmp_path / "run", [f"pytorch_model_fsdp_rank{r}.bin" for r in range(3)])
    for words in (["inspect", str(place)], ["convert", str(place), str(tmp_path / "out"), "--to", "safetensors"]):
        error, fix = _said(*words)
        assert error.startswith(f"source.unsupported: {place} holds local state dicts of FSDP")
        assert "SHARDED_STATE_DICT" in fix
        assert "Megatron" not in error + fix


_BELOW = {
    "verl's step": ([f"actor/{n}" for n in _VERL], "source.unknown_kind", "--tag actor (there are: actor)"),
    "verl's step with two models": (
        [f"{m}/{n}" for m in ("actor", "critic") for n in _VERL],
        "checkpoint.ambiguous",
        "--tag actor, or --tag critic",
    ),
    "verl's run": (
        ["latest_checkpointed_iteration.txt", *(f"global_step_{i}/actor/{n}" for i in (9, 10) for n in _VERL)],
        "source.unknown_kind",
        "global_step_10/actor; there are: global_step_10/actor, global_step_9/actor",
    ),
}


@pytest.mark.parametrize("kind", _BELOW)
def test_runs_of_verl_lead_to_the_directories_of_their_models(kind: str, tmp_path: Path) -> None:
    files, code, says = _BELOW[kind]
    place = _files(tmp_path / "run", files)
    for words in (["inspect", str(place)], ["convert", str(place), str(tmp_path / "out"), "--to", "safetensors"]):
        error, fix = _said(*words)
        assert error.startswith(code)
        assert says in fix
        assert "Megatron" not in error + fix


@pytest.mark.parametrize(
    ("name", "below", "kind"),
    [
        ("verl_fsdp2_tied_w4", "", "fsdp-ranks-verl, dp=4"),
        ("verl_fsdp1_flat_w2", "global_step_3", "fsdp-ranks-verl, dp=2"),
        ("acc_nodcp_fsdp2_w4", "", "fsdp-ranks-accelerate, dp=4"),
        ("acc_nodcp_fsdp1_w2", "", "fsdp-ranks-accelerate, dp=2"),
        ("acc_full_fsdp2_w2", "", "fsdp-full-accelerate"),
        ("trainer_full_fsdp2_w2", "checkpoint-3", "fsdp-full-trainer, step 3"),
        ("tc_fsdp2_w4", "step-3", "torch-checkpointing, dp=4"),
        ("tc_sts_w4", "step-3", "torch-checkpointing, dp=4"),
    ],
)
def test_real_files_of_fsdp_ranks_are_read_or_lead_to_what_is(name: str, below: str, kind: str, tmp_path: Path) -> None:
    case = rank_case(name, tmp_path)
    place = case.folder / "ckpt" / below
    if name.startswith("verl"):
        _, fix = _said("inspect", str(place))
        tag = re.search(r"--tag ([a-z]+)", fix)
        place = place / tag[1] if tag else Path(shlex.split(_command_in(fix))[2])
    code, out, _ = command("inspect", str(place))
    assert code == 0
    assert out.startswith(kind)


def test_weights_in_one_piece_are_a_copy_beside_shards_and_are_read_below_them(tmp_path: Path) -> None:
    beside = save_items(small_model(), tmp_path / "beside", World((2,)))
    _weights(beside)
    code, out, _ = command("inspect", str(beside))
    assert (code, out.startswith("torch-checkpointing")) == (0, True)
    actor = _files(tmp_path / "run" / "actor", _VERL)
    _weights(actor / "huggingface")
    assert command("inspect", str(actor / "huggingface"))[0] == 0


def test_megatron_is_told_from_verl_by_the_directories_beside_the_tracker(tmp_path: Path) -> None:
    tracker, ranks = "latest_checkpointed_iteration.txt", "mp_rank_00/model_optim_rng.pt"
    place = _files(tmp_path / "run", [tracker, f"iter_0000010/{ranks}"])
    assert "--tag iter_0000010" in _said("inspect", str(place))[1]
    (place / tracker).write_text("10")
    assert ranks in _said("inspect", str(place))[0]


# -- weights with an optimizer's files beside them ---------------------------------------------------------------------


@pytest.mark.parametrize("to", ["zero", "universal"])
@pytest.mark.parametrize(
    ("others", "says"),
    [
        (["optimizer.bin", "trainer_state.json"], "optimizer.bin lies beside the weights and is not read yet"),
        (
            ["optimizer_0.pt", "optimizer_1.pt"],
            "optimizer_0.pt, optimizer_1.pt lie beside the weights and are not read yet",
        ),
        (["trainer_state.json", "training_args.bin"], "the Trainer saved the weights alone, as with save_only_model"),
        ([], "the files hold weights alone"),
    ],
    ids=str,
)  # fmt: skip
def test_the_reason_why_no_optimizer_was_read(others: list[str], says: str, to: str, tmp_path: Path) -> None:
    place = _weights(tmp_path / "checkpoint-3", *others)
    layout = ["--dp", "2", "--zero-stage", "1"] if to == "zero" else []
    words = ["convert", str(place), str(tmp_path / "out"), "--to", to, *layout]
    error, fix = _said(*words)
    assert error.endswith(f"is made of optimizer states, and none were read: {says}")
    assert "no training state" not in error
    # The flag that the fix names works on the same source, and names what it leaves behind.
    code, _, told = command("convert", str(place), str(tmp_path / "out"), *shlex.split(fix.rpartition(": ")[2]))
    assert code == 0, told
    for name in others:
        assert (name in told) is name.startswith("optimizer")


def test_warnings_are_no_reason(tmp_path: Path) -> None:
    """Shards that torch writes as safetensors are read with a warning, which says nothing about an optimizer."""
    header = json.dumps({
        "__metadata__": {"format": "pt", "DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [0]}})},
        "w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    }).encode()  # fmt: skip
    place = tmp_path / "sharded"
    place.mkdir()
    file = "shard-00001-model-00001-of-00001.safetensors"
    (place / file).write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    warnings = LocalEngine().inspect(SourceSpec(url=str(place))).warnings
    assert warnings
    error, _ = _said("convert", str(place), str(tmp_path / "out"), "--to", "zero", "--dp", "1", "--zero-stage", "1")
    assert error.endswith("and none were read: the files hold weights alone")


# -- a checkpoint below the directory ----------------------------------------------------------------------------------


def _runs(place: Path) -> Path:
    for name in ("checkpoint-9", "checkpoint-10"):
        make_save(place / name)
    _weights(place / "final")
    return place


@pytest.mark.parametrize(
    ("make", "below"),
    [
        (lambda place: make_save(place / "run1").parent, "run1"),
        (lambda place: make_save(place / "run1" / "checkpoint-3").parent.parent, "run1/checkpoint-3"),
        (_runs, "checkpoint-10"),
        (lambda place: _weights(place / "weights").parent, "weights"),
    ],
    ids=["one", "two levels", "the newest, and no weights", "weights"],
)
def test_the_checkpoint_below_is_named_with_its_command(make: Made, below: str, tmp_path: Path) -> None:
    place = make(tmp_path / "my runs")
    error, fix = _said("inspect", str(place))
    assert error.startswith(f"source.unknown_kind: {place} holds no checkpoint")
    assert _command_in(fix) == f"reshard inspect {shlex.quote(str(place / below))}"
    _run(_command_in(fix), tmp_path / "out")


# -- ensure ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("others", "says"),
    [
        (["trainer_state.json"], "was saved without an optimizer (save_only_model)"),
        (["trainer_state.json", "optimizer.bin"], "holds optimizer.bin, and such optimizer states are not read yet"),
    ],
    ids=str,
)
def test_ensure_of_a_trainers_weights_says_what_they_are(others: list[str], says: str, tmp_path: Path) -> None:
    place = _weights(tmp_path / "checkpoint-3", *others)
    error, fix = _said("ensure", str(place), "--dp", "2")
    assert error == f"source.unknown_kind: {place} {says}" + (": no run can resume from it" * ("only" in says))
    assert "training saved into" not in fix
    _run(_command_in(fix), tmp_path / "out")


@pytest.mark.parametrize("others", [[], ["trainer_state.json", "model.safetensors"]], ids=str)
@pytest.mark.parametrize("full", [["pytorch_model_fsdp.bin", "optimizer.bin"], ["model.safetensors", "optimizer.pt"]])
def test_ensure_of_full_files_says_who_loads_them(full: list[str], others: list[str], tmp_path: Path) -> None:
    place = _files(tmp_path / "checkpoint-3", [*full, *others])
    error, fix = _said("ensure", str(place), "--dp", "2")
    assert f"holds full files ({', '.join(full)}), and `ensure` writes none" in error
    assert fix.endswith(f"reshard convert {place} DST --to dcp")


def test_ensure_names_what_is_below(tmp_path: Path) -> None:
    make_save(tmp_path / "runs" / "run1")
    _, fix = _said("ensure", str(tmp_path / "runs"), "--dp", "2")
    assert fix == f"name a checkpoint below it: {tmp_path / 'runs' / 'run1'}"
    (tmp_path / "runs" / "run1" / "latest").unlink()
    for name in ("", "trainer_state.json"):
        _files(tmp_path / "runs" / "run1", filter(None, [name]))
        error, fix = _said("ensure", str(tmp_path / "runs" / "run1"), "--dp", "2")
        assert error.endswith("holds no `latest` and no files of DeepSpeed")
        assert fix == "name the newest complete checkpoint: --tag global_step3 (complete: global_step3)"
    assert command("ensure", str(tmp_path / "runs" / "run1"), "--dp", "2", "--tag", "global_step3")[0] == 0


def test_an_option_that_ensure_lacks_is_said_as_a_command(tmp_path: Path) -> None:
    save = write_source(tmp_path / "my save", piped_model())
    tag = (save / "latest").read_text()
    error, fix = _said("ensure", str(save), "--dp", "1", "--pp", "2")
    assert "depend on the model's partition_method" in error
    line = fix.partition(" (DeepSpeed's default)")[0]
    base = f"reshard convert {shlex.quote(str(save))} DST --to zero --dp 1 --pp 2"
    assert re.fullmatch(rf"{re.escape(base)}( --[a-z-]+ \S+)* --partition-method parameters", line), line
    _run(line, tmp_path / "out" / tag)


def test_a_tag_that_is_no_checkpoint_is_not_the_fault_of_a_service(tmp_path: Path) -> None:
    save = make_save(tmp_path / "save")
    for file in (save / "global_step3").glob("*_states.pt"):
        file.rename(file.with_suffix(".bak"))
    error, _ = _said("ensure", str(save), "--dp", "3")
    # At `source.not_found` job scripts train from scratch.
    assert error.startswith("source.unknown_kind: --tag names 'global_step3', where no checkpoint of a known kind is")


@pytest.mark.parametrize(
    ("fix", "wanted"),
    [
        ("the weights alone: --to safetensors", "the weights alone: reshard convert S DST --to safetensors"),
        ("--zero-stage 1, or 2", None),
        ("--to zero", None),
        ("--part-size 12MiB", "reshard convert S DST --to zero --dp 2 --part-size 12MiB"),
        ("--memory-limit 12MiB", "--memory-limit 12MiB"),
        ("see docs/rules.md: --rules FILE", None),
        ("to list them: reshard inspect S --tensors", None),
        (
            "--partition-method uniform --pipeline-layers 6, or --tp 1",
            "reshard convert S DST --to zero --dp 2 --partition-method uniform --pipeline-layers 6, or --tp 1",
        ),
    ],
)  # fmt: skip
def test_fixes_as_ensure_says_them(fix: str, wanted: str | None) -> None:
    from reshard.ensuring.converters import _fixes_for_ensure  # pyright: ignore[reportPrivateUsage]

    error = ReshardError("request.unsatisfiable", "no", fix=fix)
    with pytest.raises(ReshardError) as caught, _fixes_for_ensure(SourceSpec(url="S"), {"to": "zero", "dp": 2}):
        raise error
    assert caught.value.fix == (fix if wanted is None else wanted)

"""Universal directories that are damaged, mixed or hostile: refused with a code, nothing written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from house.conversions import convert, refused_conversion
from house.repository import DATA
from reshard.engine import load_engine
from reshard.errors import ReshardError
from reshard.options import SourceSpec

MODEL = "mp_rank_00_model_states.pt"
OTHER_MODEL = "zero_pp_rank_0_mp_rank_00_model_states.pt"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A universal checkpoint of a real run."""
    target = tmp_path_factory.mktemp("made") / "u"
    convert(DATA / "zero2_tiny", target)
    return target


@pytest.fixture
def source(made: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(made, tmp_path / "in"))


def _code(source: Path, target: Path) -> str:
    return refused_conversion(convert, source, target).code


def _load(path: Path) -> Any:
    return torch.load(path, weights_only=False)


def _edit(path: Path, change: Callable[[Any], Any]) -> None:
    value = _load(path)
    changed = change(value)
    torch.save(value if changed is None else changed, path)


def test_the_copy_converts(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out")


ATOM = "zero/embed.weight/exp_avg.pt"
ATOMS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "another shape": (lambda v: {"param": v["param"][:-1].clone()}, "checkpoint.mixed"),
    "transposed": (lambda v: {"param": v["param"].t().clone()}, "checkpoint.mixed"),
    "bare with its shape": (lambda v: v["param"].clone(), "checkpoint.mixed"),
    "a strided flat tensor": (lambda v: v["param"].flatten().repeat_interleave(2)[::2], "checkpoint.mixed"),
    "no tensor": (lambda _: {"param": 3}, "checkpoint.malformed"),
    "a list": (lambda v: [v["param"]], "checkpoint.malformed"),
    "nothing in it": (lambda _: {}, "checkpoint.malformed"),
    "cut along dimension 2": (lambda v: v | {"cat_dim": 2}, "source.unsupported"),
    "cut along no number": (lambda v: v | {"cat_dim": False}, "source.unsupported"),
    "no vocabulary": (lambda v: v | {"vocab_tensor": 1}, "source.unsupported"),
    "no expert": (lambda v: v | {"is_expert_param": 1, "cat_dim": 0}, "source.unsupported"),
    "sub-parameters": (lambda v: v | {"param_n_sub_params": 3}, "source.unsupported"),
}


@pytest.mark.parametrize("name", ATOMS)
def test_atoms_of_another_form(name: str, source: Path, tmp_path: Path) -> None:
    change, code = ATOMS[name]
    _edit(source / ATOM, change)
    assert _code(source, tmp_path / "out") == code


def test_atoms_of_a_tensor_parallel_run_are_read(source: Path, made: Path, tmp_path: Path) -> None:
    _edit(source / ATOM, lambda v: v | {"cat_dim": 1, "vocab_tensor": True, "param_n_sub_params": 2})
    convert(source, tmp_path / "out")
    assert torch.equal(_load(tmp_path / "out" / ATOM)["param"], _load(made / ATOM)["param"])


def test_atoms_flat_and_with_the_default_cut_are_the_same(source: Path, made: Path, tmp_path: Path) -> None:
    _edit(source / ATOM, lambda v: v | {"cat_dim": 0})
    _edit(source / "zero/gain/fp32.pt", lambda v: v["param"].flatten())
    convert(source, tmp_path / "out")
    for atom in (ATOM, "zero/gain/fp32.pt"):
        assert torch.equal(_load(tmp_path / "out" / atom)["param"], _load(made / atom)["param"])


@pytest.mark.parametrize("step", [torch.ones(2), "3", None, {"param": torch.ones(1)}])
def test_steps_that_are_no_number(step: object, source: Path, tmp_path: Path) -> None:
    torch.save(step, source / "zero/embed.weight/step.pt")
    assert _code(source, tmp_path / "out") == "checkpoint.malformed"


@pytest.mark.parametrize("missing", ["zero/embed.weight/fp32.pt", "zero/embed.weight", "zero/optimizer_state.pt"])
def test_missing_files(missing: str, source: Path, tmp_path: Path) -> None:
    path = source / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert _code(source, tmp_path / "out") == "checkpoint.incomplete"


def test_moments_missing_for_one_parameter(source: Path, tmp_path: Path) -> None:
    (source / ATOM).unlink()
    assert _code(source, tmp_path / "out") == "request.unsatisfiable"


def test_without_model_states_it_is_no_checkpoint(source: Path, tmp_path: Path) -> None:
    (source / MODEL).unlink()
    # What is left has the name of one rank of two, whose shares of frozen parameters nobody has.
    assert _code(source, tmp_path / "out") == "checkpoint.incomplete"
    (source / OTHER_MODEL).unlink()
    assert _code(source, tmp_path / "again") == "source.unknown_kind"


@pytest.mark.parametrize("extra", ["zero/stranger/fp32.pt", "zero/adapter.weight/exp_avg.pt"])
def test_leftovers_of_another_checkpoint(extra: str, source: Path, tmp_path: Path) -> None:
    (source / extra).parent.mkdir(exist_ok=True)
    shutil.copy(source / ATOM, source / extra)
    assert _code(source, tmp_path / "out") == "checkpoint.mixed"


@pytest.mark.parametrize(
    "extra", ["zero/embed.weight/a b.pt", "zero/zero\u202eevil/fp32.pt", "zero/embed.weight/..a.pt"]
)
def test_names_that_must_not_become_paths(extra: str, source: Path, tmp_path: Path) -> None:
    (source / extra).parent.mkdir(exist_ok=True)
    shutil.copy(source / ATOM, source / extra)
    assert _code(source, tmp_path / "out") == "name.invalid"


def test_parameter_names_in_the_model_states_are_checked(source: Path, tmp_path: Path) -> None:
    def rename(states: Any) -> None:
        states["param_shapes"][0]["../../escaped"] = states["param_shapes"][0].pop("gain")

    _edit(source / MODEL, rename)
    assert _code(source, tmp_path / "out") == "name.invalid"


OPTIMIZER: dict[str, Callable[[Any], Any]] = {
    "no groups": lambda v: v.pop("param_groups") and None,
    "empty groups": lambda v: v.update(param_groups=[]),
    "groups of nothing": lambda v: v.update(param_groups=[{"lr": 1.0, "params": []}] * 2),
    "a list": lambda v: [v],
}


@pytest.mark.parametrize("name", OPTIMIZER)
def test_optimizer_states_that_do_not_fit(name: str, source: Path, tmp_path: Path) -> None:
    _edit(source / "zero/optimizer_state.pt", OPTIMIZER[name])
    assert _code(source, tmp_path / "out") == "checkpoint.malformed"


def test_a_stray_model_parallel_rank(source: Path, tmp_path: Path) -> None:
    shutil.copy(source / MODEL, source / "mp_rank_01_model_states.pt")
    assert _code(source, tmp_path / "out") == "checkpoint.mixed"


@pytest.mark.parametrize("text", ["../u", "/u", "", "u\nu", "absent", "a" * 2_000])
def test_pointers_that_name_no_checkpoint(text: str, made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path / "run" / "u")
    (tmp_path / "run" / "latest_universal").write_text(text)
    assert _code(tmp_path / "run", tmp_path / "out") == "checkpoint.bad_latest"


def test_the_training_runs_own_pointer_comes_first(made: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(DATA / "zero2_tiny", tmp_path / "run"))
    shutil.copytree(made, run / "u")
    (run / "latest_universal").write_text("u")
    assert load_engine().inspect(SourceSpec(url=str(run))).format == "deepspeed-zero2"
    assert load_engine().inspect(SourceSpec(url=str(run), tag="u")).format == "deepspeed-universal"
    (run / "latest").unlink()
    assert load_engine().inspect(SourceSpec(url=str(run))).tag == "u"


@pytest.mark.parametrize("name", ["zero/embed.weight/fp32.pt", "zero/embed.weight/step.pt", "zero/optimizer_state.pt"])
def test_every_truncation_of_a_file_is_an_error(name: str, source: Path, tmp_path: Path) -> None:
    data = (source / name).read_bytes()
    for length in range(0, len(data), 61):
        (source / name).write_bytes(data[:length])
        with pytest.raises(ReshardError):
            load_engine().inspect(SourceSpec(url=str(source)))

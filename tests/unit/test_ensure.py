"""`reshard.ensure`: what fits is left alone, what does not is converted, and nothing half is ever returned."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from house.conversions import convert
from house.expected import raised
from house.promises import command
from house.saves import DATA, make_checkpoint, make_save, same, wanted
from reshard.cli.main import run
from reshard.engine import load_engine
from reshard.ensuring import converters as _makers, local_checkpoints as _places
from reshard.ensuring.call import Ensured, Outcome, ensured
from reshard.ensuring.local_checkpoints import LocalSource, find_source, finished, place_companions
from reshard.errors import RequestError, SourceError, StorageError
from reshard.models.jobs import ConvertRequest, Inspection
from reshard.models.resume import RunLaunch
from reshard.options import RunLayout, SourceSpec

pytestmark = pytest.mark.usefixtures("no_launcher")


@pytest.fixture
def save(tmp_path: Path) -> Path:
    return make_save(tmp_path / "run" / "save")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "run" / "checkpoint-3")


# -- which checkpoint is meant --------------------------------------------------------------------------


def test_kinds_of_sources(checkpoint: Path) -> None:
    tag = checkpoint / "global_step3"
    assert find_source(str(checkpoint), None) == LocalSource(str(checkpoint), ("global_step3",), names_tag=False)
    assert find_source(str(tag), None) == LocalSource(str(checkpoint), ("global_step3",), names_tag=True)
    (checkpoint / "latest").unlink()
    assert find_source(str(checkpoint), "global_step3").tag == "global_step3"
    for name in ("pytorch_model", "pytorch_model_1"):
        shutil.copytree(tag, checkpoint / name)
    assert find_source(str(checkpoint), "pytorch_model").tags == ("pytorch_model_1", "pytorch_model")


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (lambda p: (p / "latest").unlink(), "source.unknown_kind"),
        (lambda p: (p / "latest").write_text("global_step4"), "checkpoint.bad_latest"),
        (lambda p: (p / "latest").write_text("../checkpoint-3/global_step3"), "checkpoint.bad_latest"),
        (lambda p: (p / "latest").write_text("x" * 5000), "checkpoint.bad_latest"),
        (shutil.rmtree, "source.not_found"),
        (lambda p: [shutil.rmtree(p), p.mkdir()], "source.not_found"),
        (lambda p: [shutil.rmtree(p), p.write_text("")], "source.unknown_kind"),
        (lambda p: next((p / "global_step3").glob("*_1_*")).unlink(), "checkpoint.incomplete"),
    ],
)
def test_sources_that_are_none(spoil: Callable[[Path], Any], code: str, checkpoint: Path) -> None:
    spoil(checkpoint)
    assert raised(SourceError, reshard.ensure, checkpoint, dp=3).code == code
    assert list(checkpoint.glob(".reshard/global_step3*")) == []


def test_a_dead_link_in_a_tag_is_ignored(save: Path) -> None:
    (save / "global_step3" / "notes.txt").symlink_to("gone/notes.txt")
    before = find_source(str(save), None).fingerprint()
    assert ensured(save, wanted(dp=3, environ={})).outcome is Outcome.CONVERTED
    assert find_source(str(save), None).fingerprint() == before


@pytest.mark.parametrize("suffix", ["optim_states.pt", "model_states.pt"])
def test_a_needed_file_that_is_a_dead_link_is_named_with_its_target(save: Path, suffix: str) -> None:
    file = next((save / "global_step3").glob(f"*{suffix}"))
    file.unlink()
    file.symlink_to("../gone/states.pt")
    error = raised(SourceError, lambda: ensured(save, wanted(dp=3, environ={})))
    assert error.code == "checkpoint.incomplete"
    assert f"{file.name} is a link to {save}/gone/states.pt, which does not exist" in error.message


def test_a_directory_of_dead_links_is_not_an_empty_one(tmp_path: Path) -> None:
    """`snapshots/REVISION` of the hub's cache, whose `blobs` were removed."""
    (tmp_path / "revision").mkdir()
    (tmp_path / "revision" / "model.safetensors").symlink_to("../../blobs/0123")
    error = raised(SourceError, lambda: load_engine().inspect(SourceSpec(url=str(tmp_path / "revision"))))
    assert error.code == "checkpoint.incomplete"
    assert "model.safetensors is a link to" in error.message


def test_latest_may_be_a_link_to_the_directory_of_a_tag(save: Path, tmp_path: Path) -> None:
    (save / "latest").unlink()
    (save / "latest").symlink_to("global_step3")
    assert find_source(str(save), None) == LocalSource(str(save), ("global_step3",), names_tag=False)
    assert load_engine().inspect(SourceSpec(url=str(save))).tag == "global_step3"
    convert(save, tmp_path / "out", to="safetensors")
    assert (tmp_path / "out" / "model.safetensors").is_file()
    (save / "latest").unlink()
    (save / "latest").symlink_to(tmp_path)
    error = raised(SourceError, lambda: find_source(str(save), None))
    assert (error.code, "--tag global_step3" in error.fix) == ("checkpoint.bad_latest", True)
    assert f"a link to {tmp_path}" in error.message
    (save / "latest").unlink()
    (save / "latest").mkdir()
    assert raised(SourceError, lambda: find_source(str(save), None)).code == "checkpoint.bad_latest"


def test_a_file_of_a_rank_may_be_a_link_into_a_directory_above(save: Path) -> None:
    file = next((save / "global_step3").glob("*optim_states.pt"))
    pool = save.parent / "pool.pt"
    file.rename(pool)
    file.symlink_to("../../pool.pt")
    assert ensured(save, wanted(dp=3, environ={})).outcome is Outcome.CONVERTED
    assert raised(RequestError, lambda: convert(save, save.parent, to="safetensors")).code == "request.overlap"
    assert pool.is_file()


def test_a_change_in_a_linked_directory_is_a_change_of_the_checkpoint(save: Path, tmp_path: Path) -> None:
    tag = save / "global_step3"
    tag.rename(tmp_path / "elsewhere")
    tag.mkdir()
    (tag / "part").symlink_to(tmp_path / "elsewhere")
    (tag / "part" / "up").symlink_to(tag)
    before = LocalSource(str(save), ("global_step3",), names_tag=False).fingerprint()
    (tmp_path / "elsewhere" / "added").write_text("x")
    assert LocalSource(str(save), ("global_step3",), names_tag=False).fingerprint() != before


def test_a_conversion_does_not_change_the_checkpoint_by_a_link_to_the_directory_above(save: Path) -> None:
    (save / "global_step3" / "up").symlink_to("..")
    before = find_source(str(save), None).fingerprint()
    assert ensured(save, wanted(dp=3, environ={})).outcome is Outcome.CONVERTED
    assert find_source(str(save), None).fingerprint() == before


def test_a_stale_latest_lists_what_is_there(checkpoint: Path) -> None:
    (checkpoint / "latest").write_text("global_step9")
    shutil.copytree(checkpoint / "global_step3", checkpoint / "global_step10")
    os.utime(checkpoint / "global_step10", (2e9, 2e9))
    error = raised(SourceError, reshard.ensure, checkpoint, dp=3)
    assert error.code == "checkpoint.bad_latest"
    # The state says its step, and the copy's name says another one.
    assert (
        error.fix == "name the newest complete checkpoint: --tag global_step3 (complete: global_step10, global_step3)"
    )


@pytest.mark.parametrize(("number", "code"), [(errno.ESTALE, "storage.unavailable"), (errno.EACCES, "storage.denied")])
def test_a_file_system_that_does_not_answer_is_not_an_empty_one(
    number: int, code: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: str) -> list[str]:
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(os, "listdir", refused)
    assert raised(StorageError, reshard.ensure, checkpoint, dp=3).code == code


@pytest.mark.parametrize("run", ["run", "run7", "step_runs_7", "my run-7"])
def test_a_checkpoint_beside_the_run_is_not_a_checkpoint_of_it(run: str, checkpoint: Path) -> None:
    other = shutil.copytree(checkpoint, checkpoint.parent / run / checkpoint.name)
    (other / "latest").unlink()
    shutil.rmtree(other / "global_step3")
    assert "newest complete" not in raised(SourceError, reshard.ensure, other, dp=3).fix
    assert "newest complete" not in command("inspect", str(other))[2]
    older = shutil.copytree(checkpoint, other.with_name("checkpoint-2"))
    (older / "global_step3").rename(older / "global_step2")
    (older / "latest").write_text("global_step2")
    newest = shlex.quote(str(older))
    fix = raised(SourceError, reshard.ensure, other, dp=3).fix
    assert fix == f"name the newest complete checkpoint: {newest}"


@pytest.mark.parametrize("name", ["checkpoint-3", "checkpoint-3/global_step3"])
def test_a_save_that_did_not_finish_is_refused_even_if_it_fits(name: str, checkpoint: Path) -> None:
    for number in (1, 2):
        other = shutil.copytree(checkpoint, checkpoint.with_name(f"checkpoint-{number}"))
        (other / "global_step3").rename(other / f"global_step{number}")
        (other / "latest").write_text(f"global_step{number}")
    next(checkpoint.with_name("checkpoint-1").rglob("*_optim_states.pt")).unlink()
    (checkpoint / "checkpoint-is-incomplete.txt").write_text("Checkpoint started at step 3 and in progress...")
    error = raised(SourceError, reshard.ensure, checkpoint.parent / name, dp=2)
    assert error.code == "checkpoint.incomplete"
    assert error.fix.endswith("checkpoint-2")


def test_objects_of_other_classes_are_refused_until_it_is_said_what_to_do_with_them(checkpoint: Path) -> None:
    """Client states hold them: `hyper_parameters` of Lightning, for one."""
    states = checkpoint / "global_step3" / "mp_rank_00_model_states.pt"
    model = torch.load(states, weights_only=False)
    torch.save(model | {"ratio": Fraction(1, 3)}, states)
    error = raised(SourceError, reshard.ensure, checkpoint, dp=3)
    assert error.code == "pickle.forbidden_call"
    assert "keep" in error.fix
    kept, dropped = (Path(reshard.ensure(checkpoint, dp=3, opaque=policy)) for policy in ("keep", "drop"))
    assert kept != dropped
    found = [torch.load(p / states.relative_to(checkpoint), weights_only=False)["ratio"] for p in (kept, dropped)]
    assert found == [Fraction(1, 3), None]
    with pytest.raises(RequestError, match="ignore"):
        reshard.ensure(checkpoint, dp=3, opaque="ignore")


# -- the result -----------------------------------------------------------------------------------------


def test_what_fits_is_returned_as_it_was_named(save: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(save.parent)
    assert reshard.ensure("save", dp=2) == "save"
    assert reshard.ensure(save / "global_step3", dp=2, zero_stage=2, dtype="bf16") == str(save / "global_step3")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert reshard.ensure(save) == str(save)
    assert sorted(p.name for p in save.iterdir()) == [".reshard", "global_step3", "latest"]
    assert all(p.suffix == ".json" for p in (save / ".reshard").iterdir())


def test_a_result_is_made_once_however_it_is_asked_for(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ensured(checkpoint, wanted(dp=3, environ={}))
    assert first.outcome is Outcome.CONVERTED
    assert Path(first.path).parent == checkpoint / ".reshard"
    assert Path(first.path).name.startswith("global_step3-dp3-")
    assert same(checkpoint, first.path)
    assert load_engine().inspect(SourceSpec(url=first.path)).world["dp"] == 3
    assert load_engine().verify(f"{first.path}/global_step3").ok
    stamp = os.stat(f"{first.path}/latest").st_mtime_ns
    for options in ({"dp": 3}, {"dp": 3, "zero_stage": 2}, {"environ": {"WORLD_SIZE": "3"}}):
        assert ensured(checkpoint, wanted(**{"environ": {}, **options})) == Ensured(first.path, Outcome.EARLIER)
    assert reshard.ensure(checkpoint / "global_step3", dp=3) == f"{first.path}/global_step3"
    assert os.stat(f"{first.path}/latest").st_mtime_ns == stamp
    # The result is a checkpoint like any other.
    assert reshard.ensure(first.path, dp=3) == first.path
    # Another layout is another result; a changed source too.
    assert reshard.ensure(checkpoint, dp=3, zero_stage=3) != first.path
    os.utime(checkpoint / "global_step3" / "mp_rank_00_model_states.pt")
    again = ensured(checkpoint, wanted(dp=3, environ={}))
    assert again.outcome is Outcome.CONVERTED
    assert again.path != first.path
    # Hosts may see the directory under different paths; so does who moves it.
    moved = checkpoint.rename(checkpoint.with_name("moved"))
    assert ensured(moved, wanted(dp=3, environ={})).path == again.path.replace("checkpoint-3", "moved")
    moved.rename(checkpoint)
    # A result that was deleted is made anew.
    shutil.rmtree(again.path)
    anew = ensured(checkpoint, wanted(dp=3, environ={}))
    assert (anew.path, anew.outcome) == (again.path, Outcome.CONVERTED)
    assert anew.wanted is not None
    assert anew.wanted.layout == RunLayout(dp=3)
    assert finished(again.path, ("global_step3",))


def test_trainers_find_what_they_look_for(checkpoint: Path) -> None:
    result = Path(reshard.ensure(checkpoint, dp=3))
    names = {str(p.relative_to(result)) for p in result.rglob("*") if "global_step3" not in p.parts}
    assert names == {
        *("latest", "trainer_state.json", "scheduler.pt", "config.json"),
        *("rng_state_0.pth", "rng_state_1.pth", "rng_state_2.pth", "adapter", "adapter/adapter_config.json"),
    }
    # transformers' own look-ups and rotation see one checkpoint here, not two.
    assert [p.name for p in checkpoint.parent.glob("checkpoint-*")] == ["checkpoint-3"]
    assert [p.name for p in checkpoint.glob("global_step*")] == ["global_step3"]


@pytest.mark.parametrize(
    ("present", "ranks", "expected"),
    [
        (
            {"rng_state_0.pth": 0, "rng_state_1.pth": 1},
            3,
            {"rng_state_0.pth": 0, "rng_state_1.pth": 1, "rng_state_2.pth": 0},
        ),
        ({"rng_state_0.pth": 0, "rng_state_1.pth": 1}, 1, {"rng_state.pth": 0}),
        ({"rng_state.pth": 0}, 2, {"rng_state_0.pth": 0, "rng_state_1.pth": 0}),
        ({"rng_state_10.pth": 10, "rng_state_9.pth": 9}, 12, {"rng_state_10.pth": 10, "rng_state_9.pth": 9}),
        ({"random_states_0.pkl": 0, "random_states_1.pkl": 1}, 1, {"random_states_0.pkl": 0}),
        ({"random_states_0.pkl": 0}, 2, {"random_states_0.pkl": 0, "random_states_1.pkl": 0}),
        ({"scheduler.bin": 5, "custom_checkpoint_0.pkl": 6}, 2, {"scheduler.bin": 5, "custom_checkpoint_0.pkl": 6}),
        ({"latest": 1, "latest_universal": 1, ".hidden": 1, "reshard.json": 1}, 2, {}),
    ],
    ids=str,
)
def test_random_states_are_dealt_out(
    present: dict[str, int], ranks: int, expected: dict[str, int], tmp_path: Path
) -> None:
    home, target = tmp_path / "home", tmp_path / "target"
    home.mkdir()
    target.mkdir()
    for name, content in present.items():
        (home / name).write_text(str(content))
    for _ in range(2):
        place_companions(LocalSource(str(home), ("tag",), names_tag=False), str(target), ranks)
        assert {p.name: int(p.read_text()) for p in target.iterdir()} == expected


def test_large_companions_are_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_places, "_COPIED_BYTES", 3)
    home, target = tmp_path / "home", tmp_path / "target"
    (home / "other_tag").mkdir(parents=True)
    (home / "other_tag" / "mp_rank_00_model_states.pt").write_text("x")
    (home / "model.safetensors").write_text("weights")
    (home / "small").write_text("s")
    target.mkdir()
    source = LocalSource(str(home), ("tag",), names_tag=False)
    place_companions(source, str(target), 1)
    assert sorted(p.name for p in target.iterdir()) == ["model.safetensors", "small"]
    assert os.path.samefile(home / "model.safetensors", target / "model.safetensors")
    assert os.stat(home / "small").st_nlink == 1
    place_companions(source, str(target), 1)
    assert len(list(target.iterdir())) == 2

    def refused(*_: Any) -> None:
        raise OSError(18, "another file system")

    (target / "model.safetensors").unlink()
    monkeypatch.setattr(os, "link", refused)
    place_companions(source, str(target), 1)
    assert os.readlink(target / "model.safetensors") == str(home / "model.safetensors")


def test_all_models_of_accelerate_are_converted(save: Path) -> None:
    for name in ("pytorch_model", "pytorch_model_1"):
        shutil.copytree(save / "global_step3", save / name)
    (save / "latest").write_text("pytorch_model_1")
    (save / "random_states_0.pkl").write_text("0")
    result = Path(reshard.ensure(save, dp=4))
    for name in ("pytorch_model", "pytorch_model_1"):
        assert load_engine().inspect(SourceSpec(url=str(result), tag=name)).world["dp"] == 4
        assert same(save / name, result / name)
    assert (result / "latest").read_text() == "pytorch_model_1"
    assert len(list(result.glob("random_states_*.pkl"))) == 4
    # Other tags of the directory are not part of it.
    assert not (result / "global_step3").exists()


def test_a_universal_source_is_made_native(save: Path) -> None:
    target = save / "global_step3_universal"
    convert(save, target)
    result = reshard.ensure(target, dp=2, zero_stage=2)
    assert Path(result).name == "global_step3_universal"
    assert load_engine().inspect(SourceSpec(url=result)).zero_stage == 2
    assert same(save, result)


# -- a place of the user's ------------------------------------------------------------------------------


def test_a_named_place(save: Path, tmp_path: Path) -> None:
    out = tmp_path / "there" / "resume"
    assert reshard.ensure(save, dp=3, out=out) == str(out)
    assert reshard.ensure(save / "global_step3", dp=3, out=out) == str(out / "global_step3")
    assert not (save / ".reshard").exists()
    kept = (out / "global_step3" / "reshard.json").read_bytes()
    assert raised(RequestError, reshard.ensure, save, dp=4, out=out).code == "request.target_exists"
    assert (out / "global_step3" / "reshard.json").read_bytes() == kept
    foreign = tmp_path / "foreign"
    shutil.copytree(DATA / "zero3_tiny", foreign)
    before = {p: p.read_bytes() for p in foreign.rglob("*") if p.is_file()}
    with pytest.raises(RequestError, match="not of this source"):
        reshard.ensure(save, dp=4, out=foreign)
    assert {p: p.read_bytes() for p in foreign.rglob("*") if p.is_file() and ".reshard" not in p.parts} == before


def test_a_named_place_that_is_the_checkpoint_itself(save: Path, tmp_path: Path) -> None:
    """A distributed checkpoint has no tag: its record lies beside the directory, which the conversion makes."""
    out, other = tmp_path / "there" / "dcp", tmp_path / "there" / "other"
    for _ in range(2):
        assert reshard.ensure(save, to="dcp", out=out) == str(out)
    assert reshard.ensure(save, to="dcp", out=other) == str(other)
    assert reshard.diff(save, out, common=True).equal
    assert reshard.diff(out, other).equal
    assert not (out / ".reshard").exists()
    kept = (out / "reshard.json").read_bytes()
    assert raised(RequestError, reshard.ensure, DATA / "zero3_tiny", to="dcp", out=out).code == "request.target_exists"
    assert (out / "reshard.json").read_bytes() == kept


def test_a_framework_that_is_not_known_is_refused_with_those_that_are(save: Path) -> None:
    for call in (reshard.ensure, lambda *a, **k: reshard.direct(*a, **k).__enter__()):
        error = raised(RequestError, call, save, to="dcp", framework="nope")
        assert (error.code, "torchtitan" in error.fix) == ("request.invalid", True)


def test_a_source_that_cannot_be_written(save: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: str, **_: Any) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "makedirs", refused)
    assert reshard.ensure(save, dp=2) == str(save)
    error = raised(StorageError, reshard.ensure, save, dp=3)
    assert error.code == "storage.denied"
    assert "--out" in error.fix


def test_a_source_in_another_store_needs_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ConvertRequest] = []

    class Engine:
        def inspect(self, _source: SourceSpec, *, launch: RunLaunch) -> Inspection:
            found = load_engine().inspect(SourceSpec(url=str(DATA / "zero2_tiny")), launch=launch)
            return found.model_copy(update={"tag": "global_step3"})

        def convert(self, request: ConvertRequest, **_: Any) -> None:
            made.append(request)

    monkeypatch.setattr(_makers, "load_engine", Engine)
    assert reshard.ensure("s3://bucket/run", dp=2) == "s3://bucket/run"
    with pytest.raises(RequestError, match="its layout is another one"):
        reshard.ensure("s3://bucket/run", dp=3)
    assert reshard.ensure("s3://bucket/run", dp=3, out=str(tmp_path)) == str(tmp_path)
    assert [r.target for r in made] == [f"{tmp_path}/global_step3"]


# -- never half -----------------------------------------------------------------------------------------


def test_companions_are_there_before_latest_and_nothing_half_is_taken(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = load_engine()
    seen: list[set[str]] = []

    class Stopping:
        def inspect(self, source: SourceSpec, *, launch: RunLaunch) -> Inspection:
            return real.inspect(source, launch=launch)

        def convert(self, request: ConvertRequest, **hooks: Any) -> Any:
            seen.append({p.name for p in Path(request.target).parent.iterdir()})
            if len(seen) == 1:
                raise StorageError("storage.no_space", "the store is full")
            return real.convert(request, **hooks)

    monkeypatch.setattr(_makers, "load_engine", Stopping)
    with pytest.raises(StorageError):
        reshard.ensure(checkpoint, dp=3)
    assert not list(checkpoint.glob(".reshard/*.claim"))
    result = ensured(checkpoint, wanted(dp=3, environ={}))
    assert result.outcome is Outcome.CONVERTED
    for names in seen:
        assert {"trainer_state.json", "rng_state_2.pth", "adapter"} <= names
        assert "latest" not in names


# -- the command ----------------------------------------------------------------------------------------


def test_the_path_is_the_last_line(save: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ensure", str(save), "--dp", "3", "-q"]) == 0
    shown = capsys.readouterr()
    path = shown.out.splitlines()[-1]
    assert finished(path, ("global_step3",))
    assert shown.err == ""
    assert run(["ensure", str(save), "--dp", "3", "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {"schema_version": 1, "path": path, "outcome": "earlier"}
    assert "converted earlier" in shown.err


def test_errors_of_the_command(save: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ensure", str(save)]) == 2
    assert "--dp N" in capsys.readouterr().err
    assert run(["ensure", str(tmp_path / "none"), "--dp", "2"]) == 3
    assert run(["ensure", str(save), "--dp", "2", "--zero-stage", "5"]) == 2
    assert run(["ensure", str(save), "--dp", "2", "--rules", str(tmp_path / "none")]) == 2
    assert run(["ensure", str(save), "--dp", "3", "--out", str(save)]) == 5
    (save / "checkpoint-is-incomplete.txt").touch()
    assert run(["ensure", str(save), "--dp", "2", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "checkpoint.incomplete"


def test_the_function_is_the_packages_own() -> None:
    import reshard.ensuring

    assert reshard.ensure is reshard.ensuring.ensure
    assert "ensure" in dir(reshard)

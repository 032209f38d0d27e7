"""Plans as files: a saved plan is run exactly, or refused with what has changed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import reshard
from house.expected import raised, some
from house.sources import copied_source
from reshard.api.plan_files import read_plan
from reshard.cli.main import run
from reshard.errors import RequestError
from reshard.models.jobs import ConvertRequest

RANK_0 = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
RANK_1 = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
STATES = "mp_rank_00_model_states.pt"


source = copied_source("zero2_tiny", "run1")
"""A save directory with `latest` and one tag."""


@pytest.fixture
def file(source: Path, tmp_path: Path) -> Path:
    """A saved plan of a conversion to three ranks."""
    reshard.plan(source, tmp_path / "out", to="zero", dp=3, out=tmp_path / "plan.json")
    return tmp_path / "plan.json"


def contents(target: Path) -> dict[str, bytes]:
    """Every file of a target but its manifest, which has the time."""
    return {p.name: p.read_bytes() for p in target.iterdir() if p.name != "reshard.json"}


def edited(file: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    body = json.loads(file.read_text())
    change(body)
    file.write_text(json.dumps(body))
    return file


def test_a_saved_plan_writes_the_bytes_of_the_same_options(source: Path, file: Path, tmp_path: Path) -> None:
    plain = reshard.convert(source, tmp_path / "plain", to="zero", dp=3)
    planned = reshard.convert(plan=file)
    saved = read_plan(file).plan
    assert saved is not None
    assert planned.plan_digest == plain.plan_digest == saved.digest
    assert contents(tmp_path / "out") == contents(tmp_path / "plain") != {}
    assert reshard.convert(plan=file).already_done


def test_a_plan_file_is_a_request_with_absolute_places(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (source / "config.json").write_text("{}")
    reshard.plan("run1", "out", to="safetensors", model_files="run1", out="plan.json")
    request = ConvertRequest.model_validate_json(Path("plan.json").read_text())
    assert (request.source.url, request.target, request.model_files) == (
        str(source),
        str(tmp_path / "out"),
        str(source),
    )
    assert sorted(tmp_path.iterdir()) == [tmp_path / "plan.json", source], "no temporary file stays"
    monkeypatch.chdir("/")
    assert reshard.convert(plan=tmp_path / "plan.json").target == str(tmp_path / "out")


def test_a_plan_stays_with_its_tag_when_latest_moves(source: Path, file: Path, tmp_path: Path) -> None:
    shutil.copytree(source / "global_step3", source / "global_step9")
    (source / "latest").write_text("global_step9")
    assert json.loads(file.read_text())["source"]["tag"] == "global_step3"
    reshard.convert(plan=file)
    manifest = json.loads((tmp_path / "out" / "reshard.json").read_text())
    assert manifest["source"]["tag"] == "global_step3"


def _again(place: Path) -> None:
    os.utime(place / RANK_0, ns=(1, 1))


def _longer(place: Path) -> None:
    os.truncate(place / STATES, (place / STATES).stat().st_size + 1)


def _gone(place: Path) -> None:
    (place / RANK_1).unlink()


@pytest.mark.parametrize(
    ("change", "kind", "name", "said"),
    [
        (_again, "changed", RANK_0, "written again"),
        (_longer, "changed", STATES, "->"),
        (_gone, "gone", RANK_1, "checkpoint.incomplete"),
    ],
)
def test_a_changed_source_is_refused_with_the_difference(
    source: Path, file: Path, tmp_path: Path, change: Callable[[Path], None], kind: str, name: str, said: str
) -> None:
    change(source / "global_step3")
    error = raised(RequestError, lambda: reshard.convert(plan=file))
    assert error.code == "request.plan_changed"
    assert error.details == {"gone": [], "new": [], "changed": [], kind: [name]}
    assert name in error.message
    assert said in error.message
    assert not (tmp_path / "out").exists()


def test_a_file_that_the_plan_does_not_know_is_new(file: Path) -> None:
    def forget(body: dict[str, Any]) -> None:
        body["plan"]["files"] = [f for f in body["plan"]["files"] if f["name"] != RANK_1]
        body["plan"]["source_digest"] = body["plan"]["content_digest"] = "0" * 64

    error = raised(RequestError, lambda: reshard.convert(plan=edited(file, forget)))
    assert error.details == {"gone": [], "new": [RANK_1], "changed": []}


def test_a_plan_without_files_still_notices_a_change(source: Path, file: Path) -> None:
    edited(file, lambda body: body["plan"].pop("files"))
    assert reshard.convert(plan=file).write_bytes
    _again(source / "global_step3")
    error = raised(RequestError, lambda: reshard.convert(plan=file))
    assert (error.code, error.details["changed"]) == ("request.plan_changed", [])


def test_a_release_that_lays_out_otherwise_is_named(file: Path) -> None:
    def by_another_release(body: dict[str, Any]) -> None:
        body["plan"] |= {"reshard_version": "0.0.9", "layout_digest": "1" * 64, "content_digest": "2" * 64}

    error = raised(RequestError, lambda: reshard.convert(plan=edited(file, by_another_release)))
    assert error.code == "request.plan_changed"
    assert "0.0.9" in error.message
    assert reshard.__version__ in error.message


def test_a_request_that_was_edited_is_not_the_planned_one(file: Path) -> None:
    edited(file, lambda body: body["layout"].update(dp=4))
    error = raised(RequestError, lambda: reshard.convert(plan=file))
    assert error.code == "request.plan_changed"
    assert "the request is not the one" in error.message


def test_options_of_the_run_may_stand_beside_a_plan(source: Path, file: Path, tmp_path: Path) -> None:
    assert run(["convert", "--plan", str(file), "--part-size", "2KiB", "--threads", "2", "-q"]) == 0
    reshard.convert(source, tmp_path / "plain", to="zero", dp=3)
    assert contents(tmp_path / "out") == contents(tmp_path / "plain")
    assert reshard.convert(plan=file, verify="full").verification == "full"


@pytest.mark.parametrize("words", [["--dp", "3"], ["--tp", "1"], ["--to", "zero"], ["--tag", "global_step3"]])
def test_options_that_the_plan_decides_are_refused_by_name(
    file: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["convert", "--plan", str(file), *words]) == 2
    assert f"{words[0]}: the plan says that already" in capsys.readouterr().err


def test_a_plan_takes_the_place_of_source_and_target(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["convert", "a", "b", "--plan", str(file)]) == 2
    assert "SRC and DST are in the plan" in capsys.readouterr().err
    assert run(["convert"]) == 2, "without a plan they are still needed"
    beside: tuple[dict[str, Any], ...] = ({"source": "a"}, {"to": "zero"}, {"dp": 3})
    for words in beside:
        assert raised(RequestError, partial(reshard.convert, plan=file, **words)).code == "request.invalid"
    with pytest.raises(TypeError, match="needs target, to, or a plan"):
        reshard.convert("a")
    with pytest.raises(TypeError, match="unexpected keyword argument 'ranks'"):
        reshard.convert(plan=file, ranks=3)  # type: ignore[call-arg]


def test_the_fix_of_a_changed_plan_makes_it_anew(
    source: Path, file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    _again(source / "global_step3")
    assert run(["convert", "--plan", str(file), "--dry-run"]) == 5
    fix = capsys.readouterr().err.partition("reshard plan ")[2].split()
    assert run(["plan", *fix]) == 0
    assert f"reshard convert --plan {file}" in capsys.readouterr().err
    assert run(["convert", "--plan", str(file), "-q"]) == 0
    assert (tmp_path / "out" / "reshard.json").exists()


def test_a_plan_file_never_replaces_a_target_by_itself(source: Path, file: Path, tmp_path: Path) -> None:
    reshard.plan(source, tmp_path / "out", to="zero", dp=3, overwrite=True, out=file)
    shutil.copytree(source / "global_step3", tmp_path / "out")
    assert raised(RequestError, lambda: reshard.convert(plan=file)).code == "request.target_exists"
    edited(file, lambda body: body.update(overwrite=True))
    assert "may not" in raised(RequestError, lambda: reshard.convert(plan=file)).message
    edited(file, lambda body: body.update(overwrite=False))
    assert reshard.convert(plan=file, overwrite=True).write_bytes


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", "null", "\x00", "[" * 100_000, '{"plan":' * 10_000, '{"source": "a", "target": "b", "to": "zero"}'],
)
def test_what_is_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    assert raised(RequestError, lambda: read_plan(tmp_path / "plan.json")).code == "request.invalid"


def test_a_plan_file_is_read_within_bounds(tmp_path: Path) -> None:
    with (tmp_path / "plan.json").open("wb") as long:
        long.truncate(1 << 40)
    assert "more than" in raised(RequestError, lambda: read_plan(tmp_path / "plan.json")).message


def test_a_number_of_a_file_is_one_as_in_the_rest_of_a_request(file: Path) -> None:
    """JSON has one kind of numbers: what writes 11 as 11.0 means the same, and a text is none."""

    def with_size(convert: Callable[[int], object]) -> Path:
        def change(body: dict[str, Any]) -> None:
            body["plan"]["files"][0]["size_bytes"] = convert(body["plan"]["files"][0]["size_bytes"])

        return edited(file, change)

    planned = some(read_plan(file).plan)
    assert some(read_plan(with_size(float)).plan) == planned
    for no_number in (str, lambda _size: True, lambda size: size + 0.5):
        kept = file.read_text()
        error = raised(RequestError, partial(read_plan, with_size(no_number)))
        assert "size_bytes is not a whole number" in error.message
        file.write_text(kept)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_value_in_a_plan_is_taken_or_refused_by_name(file: Path, data: st.DataObject) -> None:
    body = json.loads(file.read_text())
    place: Any = body["plan"] if data.draw(st.booleans()) else body["plan"]["files"][0]
    name = data.draw(st.sampled_from([*sorted(place), "unknown"]))
    place[name] = data.draw(
        st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=80), st.lists(st.integers(), max_size=3))
    )
    other = file.with_name("other.json")
    other.write_text(json.dumps(body))
    with suppress(RequestError):
        assert read_plan(other).plan is not None

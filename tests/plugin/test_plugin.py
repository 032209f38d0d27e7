"""A format that another package brings is a format like ours, and no line of engine, client or API names it.

The package lies in `site/`, installed as pip would install it; every process here that has that directory on its path
has the plug-in, and this one has not.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from house.repository import ROOT
from house.seeds import run_seed
from reshard.errors import RequestError
from reshard.models.jobs import ConvertRequest
from reshard_engine.local import engine

HERE = Path(__file__).parent
SOURCE = ROOT / "tests" / "data" / "zero2_tiny"


def environment(site: Path = HERE / "site") -> dict[str, str]:
    """This environment with the packages of a directory."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT / "tests")]), "COLUMNS": "120"}


def reshard(
    *arguments: object, code: int = 0, site: Path = HERE / "site", **variables: object
) -> subprocess.CompletedProcess[str]:
    """Run the command line with the plug-in."""
    command = [sys.executable, "-m", "reshard.cli.main", *map(str, arguments)]
    env = environment(site) | {name: str(value) for name, value in variables.items()}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stderr
    return done


def python(code: str) -> str:
    """The output of a program that has the plug-in."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of a DeepSpeed checkpoint as raw rows, at most three rows a file."""
    target = tmp_path_factory.mktemp("plugin") / "raw"
    reshard("convert", SOURCE, target, "--to", "raw_rows", "--rows-per-file", 3, "--title", "a run")
    return target


def test_convert_to_it_takes_its_flags(raw: Path) -> None:
    index = json.loads((raw / "raw_rows.json").read_text())
    assert index["title"] == "a run"
    assert max(f["rows"][1] - f["rows"][0] for t in index["tensors"] for f in t["files"]) == 3


def test_convert_from_it_and_diff(raw: Path, tmp_path: Path) -> None:
    for source, target in ((raw, tmp_path / "there"), (SOURCE, tmp_path / "direct")):
        reshard("convert", source, target, "--to", "safetensors")
    reshard("diff", tmp_path / "there", tmp_path / "direct")
    assert (tmp_path / "there" / "model.safetensors").read_bytes() == (
        tmp_path / "direct" / "model.safetensors"
    ).read_bytes()
    reshard("diff", raw, tmp_path / "direct")
    found = json.loads(reshard("diff", "--weights-only", raw, SOURCE, "--json").stdout)
    assert found["equal"]


def test_verify_finds_a_flipped_bit(raw: Path, tmp_path: Path) -> None:
    reshard("verify", raw)
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in raw.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    shard = copy / "00000-00000.raw"
    shard.write_bytes(bytes([shard.read_bytes()[0] ^ 1]) + shard.read_bytes()[1:])
    assert "00000-00000.raw" in reshard("verify", copy, code=7).stdout


def test_inspect_says_what_it_is_and_what_others_can_become(raw: Path) -> None:
    found = json.loads(reshard("inspect", raw, "--json").stdout)
    assert found["format"] == "raw-rows"
    assert "raw rows have no checksums" in found["warnings"]
    of_deepspeed = {t["name"]: t for t in json.loads(reshard("inspect", SOURCE, "--json").stdout)["targets"]}
    assert of_deepspeed["raw_rows"]["possible"]
    assert of_deepspeed["raw_rows"]["example"] == "--to raw_rows"
    picture = reshard("inspect", raw, "--files").stdout
    assert "shard 1" in picture


def test_plan_says_what_would_be_written(tmp_path: Path) -> None:
    summary = json.loads(reshard("plan", SOURCE, tmp_path / "x", "--to", "raw_rows", "--json").stdout)
    assert summary["to"] == "raw_rows"
    assert "raw_rows.json" in {f["path"] for f in summary["files"]}


def test_its_options_change_the_plan(tmp_path: Path) -> None:
    plans = [
        json.loads(reshard("plan", SOURCE, tmp_path / "x", "--to", "raw_rows", *more, "--json").stdout)["digest"]
        for more in ((), ("--rows-per-file", 2), ("--no-keep-ties",), ())
    ]
    assert plans[0] == plans[3]
    assert len(set(plans)) == 3


def test_ensure_asks_it(raw: Path, tmp_path: Path) -> None:
    """Its launches are laid out by it, and a directory that fits is left alone; no file of reshard knows either."""
    source = tmp_path / "run"
    shutil.copytree(raw, source)
    here = json.loads(reshard("inspect", source, "--json").stdout)["world"]["dp"]
    assert here > 2
    assert json.loads(reshard("ensure", source, "--dp", here, "--json").stdout)["outcome"] == "source"
    made = json.loads(reshard("ensure", source, "--dp", 2, "--json").stdout)
    assert made["outcome"] == "converted"
    result = Path(made["path"])
    assert result.parent == source / ".reshard"
    assert result.name.startswith("run-raw_rows-dp2-")
    assert json.loads(reshard("inspect", result, "--json").stdout)["world"]["dp"] == 2
    reshard("diff", source, result)
    assert json.loads(reshard("ensure", source, "--dp", 2, "--json").stdout) == {**made, "outcome": "earlier"}
    assert json.loads(reshard("ensure", result, "--dp", 2, "--json").stdout)["outcome"] == "source"
    assert "no launcher says how many processes there are" in reshard("ensure", source, code=2).stderr
    launched = json.loads(reshard("ensure", source, "--json", WORLD_SIZE=2).stdout)
    assert launched == {**made, "outcome": "earlier"}


def test_help_shows_its_flags_and_its_target() -> None:
    text = reshard("convert", "--help").stdout
    assert all(word in text for word in ("--rows-per-file", "Rows of one file; default: all.", "Format raw_rows"))
    assert re.search(r"^  raw_rows +raw files, cut by rows\.$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            ("--to", "safetensors", "--rows-per-file", 3),
            "does not take --rows-per-file; it is for --to raw_rows",
        ),
        (("--to", "raw_rows", "--rows-per-file", 0), "at least 1"),
        (("--to", "raw_rowz"), "raw_rows"),
        (("--to", "raw_rows", "--dp", 2), "--to raw_rows does not take --dp"),
    ],
)
def test_its_flags_are_checked(flags: tuple[object, ...], says: str, tmp_path: Path) -> None:
    done = reshard("convert", SOURCE, tmp_path / "x", *flags, code=2)
    assert says in done.stderr
    assert not (tmp_path / "x").exists()


def test_the_api_shows_and_takes_its_options(tmp_path: Path) -> None:
    program = f"""
import json
import re
from fastapi.testclient import TestClient
from reshard_jobs.settings import JobSettings
from reshard_service.app import create_app
from reshard_service.settings import ServiceSettings

settings = ServiceSettings(jobs=JobSettings(database_url="sqlite:///{tmp_path}/jobs.db"))
with TestClient(create_app(settings)) as api:
    schemas = api.get("/openapi.json").json()["components"]["schemas"]
    body = {{"source": {{"url": "{SOURCE}"}}, "target": "{tmp_path}/out", "to": "raw_rows"}}
    good = api.post("/v1/plans", json=body | {{"options": {{"raw_rows": {{"rows_per_file": 2}}}}}})
    bad = api.post("/v1/plans", json=body | {{"options": {{"raw_rows": {{"rows_per_file": "two"}}}}}})
    print(json.dumps([schemas, good.status_code, good.json(), bad.status_code, bad.json()]))
"""
    schemas, good, plan, bad, problem = json.loads(python(program).splitlines()[-1])
    assert "rows_per_file" in schemas["RawRowsOptions"]["properties"]
    assert "raw_rows" in schemas["OptionsOfFormats"]["properties"]
    assert "raw_rows" in schemas["SubmitRequest"]["properties"]["to"]["enum"]
    assert good == 200
    assert "raw_rows.json" in {f["path"] for f in plan["files"]}
    assert bad == 422
    assert problem["code"] == "request.invalid"
    assert "rows_per_file" in problem["detail"]


def test_the_client_keeps_options_that_it_does_not_know() -> None:
    fields = {"source": {"url": "a"}, "target": "b", "to": "raw_rows", "options": {"raw_rows": {"rows_per_file": 2}}}
    request = ConvertRequest.model_validate(fields)
    assert request.options.unknown() == ["raw_rows"]
    assert json.loads(request.model_dump_json())["options"]["raw_rows"] == {"rows_per_file": 2}
    assert ConvertRequest.model_validate_json(request.model_dump_json()) == request


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"to": "raw_rows"}, "raw_rows"), ({"options": {"raw_rows": {"rows_per_file": 2}}}, "options.raw_rows")],
)
def test_an_engine_without_it_refuses(changes: dict[str, object], says: str, tmp_path: Path) -> None:
    fields: dict[str, object] = {"source": {"url": str(SOURCE)}, "target": str(tmp_path / "x"), "to": "safetensors"}
    with pytest.raises(RequestError) as caught:
        engine.plan(ConvertRequest.model_validate(fields | changes))
    assert caught.value.code == "request.invalid"
    assert says in caught.value.message
    assert caught.value.fix


BROKEN = {
    "no such module": ("gone:NOTHING", None, "gone"),
    "no such name": ("odd:NOTHING", "", "NOTHING"),
    "another kind of object": ("odd:IT", "IT = 3", "InstalledFormat"),
    "a name of ours": ("odd:IT", 'IT = InstalledFormat("deepspeed", "odd:F")', "deepspeed"),
    "a target of ours": ("odd:IT", 'IT = InstalledFormat("odd", "odd:F", {"zero": ""})', "zero"),
    "an option of ours": (
        "odd:IT",
        "class O(FormatOptions):\n    dp: int | None = None\nIT = InstalledFormat('odd', 'odd:F', {'odd': ''}, O)",
        "dp",
    ),
    "an option that no flag can be": (
        "odd:IT",
        "class O(FormatOptions):\n    many: tuple[int, ...] = ()\nIT = InstalledFormat('odd', 'odd:F', {'odd': ''}, O)",
        "many",
    ),
    "an option without a default": (
        "odd:IT",
        "class O(FormatOptions):\n    size: int\nIT = InstalledFormat('odd', 'odd:F', {'odd': ''}, O)",
        "size",
    ),
    "no Format": ("odd:IT", 'IT = InstalledFormat("odd", "builtins:dict", {"odd": ""})', "not a Format"),
    "no implementation": ("odd:IT", 'IT = InstalledFormat("odd", "odd:F", {"odd": ""})', "'F'"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_one_is_named(case: str, tmp_path: Path) -> None:
    entry, code, says = BROKEN[case]
    info = tmp_path / "odd_plugin-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd-plugin\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[reshard.formats]\nodd = {entry}\n")
    if code is not None:
        head = "from reshard.installed_formats import InstalledFormat\nfrom reshard.options import FormatOptions\n"
        (tmp_path / "odd.py").write_text(head + code + "\n")
    done = reshard("convert", SOURCE, tmp_path / "x", "--to", "torch", code=2, site=tmp_path)
    assert "request.bad_format" in done.stderr
    assert says in done.stderr
    assert "pip uninstall" in done.stderr


def test_the_laws_hold_for_it() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "laws_of_raw_rows.py")]
    command += [f"--hypothesis-seed={run_seed()}"]
    done = subprocess.run(
        command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, f"{command[-1]}\n{done.stdout[-8000:]}"
    assert "3 passed" in done.stdout

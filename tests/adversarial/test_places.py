"""Links, odd paths and damaged leftovers: what the file system can put in the way."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from house.conversions import convert
from house.requests import asked
from house.sources import copied_source
from reshard.choices import TargetFormat
from reshard.engine import load_engine
from reshard.errors import ReshardError
from reshard.models.jobs import ConvertRequest
from reshard.options import SourceSpec
from reshard_engine.storage.urls import canonical_url, is_within

source = copied_source("zero3_tiny", "real")
"""A copy of the real ZeRO-3 checkpoint."""


def _request(source: Path | str, target: Path | str, **options: Any) -> ConvertRequest:
    options.setdefault("to", TargetFormat.UNIVERSAL)
    return asked(source=SourceSpec(url=str(source)), target=str(target), **options)


def _code(source: Path | str, target: Path | str, **options: Any) -> str:
    with pytest.raises(ReshardError) as caught:
        convert(source, target, **options)
    assert caught.value.fix
    return caught.value.code


def test_links_do_not_hide_that_source_and_target_overlap(source: Path, tmp_path: Path) -> None:
    before = {p: p.read_bytes() for p in source.rglob("*") if p.is_file()}
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "up").symlink_to(tmp_path)
    for target in ("link/global_step3", "up/real/global_step3", "link", "up/real", "up", "link/global_step3/x"):
        for place in (source, tmp_path / "link", source / "global_step3"):
            options: dict[str, Any] = {"to": TargetFormat.SAFETENSORS, "overwrite": True}
            assert _code(place, tmp_path / target, **options) == "request.overlap", (place, target)
    assert {p: p.read_bytes() for p in source.rglob("*") if p.is_file()} == before


def test_a_tag_directory_that_is_a_link_elsewhere(source: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    moved = Path(shutil.move(source / "global_step3", tmp_path / "elsewhere" / "tag"))
    (source / "global_step3").symlink_to(moved)
    assert _code(source, moved, to=TargetFormat.SAFETENSORS, overwrite=True) == "request.overlap"
    assert load_engine().verify(convert(source, tmp_path / "out").target).ok


def test_overwrite_leaves_alone_what_is_no_checkpoint(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "thesis.tex").write_text("years")
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "reshard.json").write_text("{}")
    for target in (".", str(work), str(tmp_path / "home")):
        code = _code(source, target, overwrite=True)
        assert code in {"request.target_exists", "request.overlap"}
    assert _code(source, "/") in {"request.invalid", "request.overlap"}
    assert (work / "thesis.tex").read_text() == "years"


def test_a_target_that_is_a_link_to_an_empty_directory(source: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    result = convert(source, tmp_path / "link")
    assert result.target == str(tmp_path / "empty")
    assert load_engine().verify(str(tmp_path / "link")).ok


def test_dangling_links_hide_nothing(source: Path, tmp_path: Path) -> None:
    (source / "old").symlink_to("/nonexistent/old")
    (source / "global_step3" / "old.pt").symlink_to("/nonexistent/old.pt")
    convert(source, tmp_path / "out")
    (tmp_path / "out" / "broken").symlink_to("/nonexistent/x")
    assert convert(source, tmp_path / "out").already_done


def test_parents_that_cannot_hold_a_target(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert _code(source, tmp_path / "file" / "out") == "storage.denied"
    assert _code(source, "/proc/nowhere/out") == "storage.denied"


@pytest.mark.parametrize("content", [b"{}", b"not json", b'{"schema_version": 99}', b"\xff\xfe"])
def test_a_damaged_manifest_does_not_block_overwriting(source: Path, tmp_path: Path, content: bytes) -> None:
    convert(source, tmp_path / "out")
    (tmp_path / "out" / "reshard.json").write_bytes(content)
    assert _code(source, tmp_path / "out") == "request.target_exists"
    assert not convert(source, tmp_path / "out", overwrite=True).already_done
    assert load_engine().verify(str(tmp_path / "out")).ok


def test_already_done_whatever_the_grain_and_the_name(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out")
    assert convert(source, tmp_path / "out", part_bytes=1 << 12).already_done
    assert convert(source, tmp_path / "out", memory_limit_bytes=1 << 22).already_done
    assert convert(source / "global_step3", tmp_path / "out").already_done
    assert _code(source, tmp_path / "out", exclude_frozen=True) == "request.target_exists"


def test_staged_bytes_are_read_again_before_they_are_trusted(source: Path, tmp_path: Path) -> None:
    """Stopped, damaged on disk, resumed: the damage is found and written anew."""
    target = tmp_path / "out"
    calls = iter([False] * 6 + [True] * 100)
    request = _request(source, target, part_bytes=2_000, threads=1)
    with pytest.raises(ReshardError):
        load_engine().convert(request, should_stop=lambda: next(calls))
    staging = next(p for p in tmp_path.glob(".out.reshard-*") if p.is_dir())
    staged = sorted(p for p in staging.rglob("*.pt"))
    assert len(staged) >= 4
    data = bytearray(staged[0].read_bytes())
    data[-40] ^= 1
    staged[0].write_bytes(bytes(data))
    staged[1].unlink()
    staged[2].write_bytes(staged[2].read_bytes()[:-1])
    result = convert(source, target, part_bytes=2_000, threads=1)
    assert 0 < result.resumed_bytes < result.write_bytes
    assert load_engine().verify(str(target)).ok


@pytest.mark.parametrize(
    ("content", "name"), [(None, "x"), ("not [ toml", "x"), ("profiles = 3", "x"), ("[profiles.x]\nregion = 3", "x")]
)
def test_profile_files_that_are_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, name: str
) -> None:
    path = tmp_path / "profiles.toml"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv("RESHARD_PROFILES", str(path))
    with pytest.raises(ReshardError) as caught:
        load_engine().inspect(SourceSpec(url="s3://bucket/x", profile=name))
    assert caught.value.code == "request.unknown_profile"


@pytest.mark.parametrize(
    "url",
    [
        "", " ", "a\0b", "file://host/x", "file://", "file:///a?b", "file:///a#b", "file:///a%2eb", "s3://", "s3://b//x",
        "s3://b/../x", "s3://b/./x", "s3://b/x?versionId=1", "s3://b/x#y", "s3://b/zip::s3://c", "s3://b/a\\b",
        "http://host/x", "https://host/x", "nosuch://x/y", "/data/x://y", "a::s3://b/x", "s 3://b/x",
    ],
)  # fmt: skip
def test_urls_with_two_readings_are_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises((ReshardError, ValueError)) as caught:
        load_engine().inspect(SourceSpec(url=url))
    if isinstance(caught.value, ReshardError):
        assert caught.value.code in {"request.invalid", "request.unknown_scheme"}


def test_one_place_has_one_spelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    spellings = ["x", "./x", "link/x", "link//x/", str(tmp_path / "a" / ".." / "x"), f"file://{tmp_path}/x", "~/x"]
    spellings += [f"file://localhost{tmp_path}/x", f"FILE://{tmp_path}/x"]
    assert {canonical_url(s) for s in spellings} == {str(tmp_path / "x")}
    assert {canonical_url(s) for s in ("s3://b/k", "s3a://b/k/", "S3://b/k")} == {"s3://b/k"}
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "to").symlink_to(tmp_path / "deep" / "er")
    assert canonical_url("to/../x") == str(tmp_path / "deep" / "x"), "as the kernel reads it"
    assert is_within("/a/b", "/a")
    assert is_within("/a", "/")
    assert not is_within("/ab", "/a")

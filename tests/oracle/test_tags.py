"""Tags with slashes, spaces and other characters: DeepSpeed resumes what is made of them, by `latest` and by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import reshard
from house.promises import command
from house.tiers import rest_full
from oracle.conversions import agree
from oracle.launcher import Worlds
from reshard.engine import load_engine
from servers.s3 import S3Server

CASE = "z2_fp32"
LONG = f"ä/{'x' * 120}/3"
TAGS: list[str | int] = ["a/b c/d", "Schritt №7", "with space", "v1.2.3", "50%25 done", "t" * 200, 7, LONG]
OLD, NEW = 2, 3


@dataclass(frozen=True)
class Tagged:
    """One run's state under every tag, each in a save directory of its own, and what follows it."""

    folders: list[Path]
    after: dict[str, Any]

    def lost(self, worlds: Worlds, loads: list[tuple[Path | str, str | None]]) -> list[Any]:
        """What DeepSpeed does not resume, of folders and tags."""
        asked = [[str(folder), tag] for folder, tag in loads]
        found = worlds.run("oracle.tags:load_all", world=NEW, case=CASE, loads=asked)[0]
        return [(load, got) for load, got in zip(asked, found, strict=True) if not self._is_same(got)]

    def _is_same(self, got: Any) -> bool:
        if isinstance(got, str) or got["state"] != self.after["state"]:
            return False
        return agree(tuple(got["losses"]), tuple(self.after["losses"]), significant=6)


@pytest.fixture
def tagged(worlds: Worlds, tmp_path: Path) -> Tagged:
    folders = [tmp_path / f"run{number}" for number in range(len(TAGS))]
    after = worlds.run("oracle.tags:save_all", world=OLD, case=CASE, folders=[*map(str, folders)], tags=TAGS)[0]
    return Tagged(folders, after)


def converted(source: Path | str, save: Path | str, tag: str, *more: str) -> None:
    """One `convert` and one `verify` of its result."""
    code, _, said = command("convert", str(source), f"{save}/{tag}", "--to", "zero", "--dp", str(NEW), "-q", *more)
    assert code == 0, said
    assert load_engine().verify(f"{save}/{tag}").ok


def test_every_tag_is_resumed_by_latest_and_by_name(tagged: Tagged, worlds: Worlds, tmp_path: Path) -> None:
    loads: list[tuple[Path | str, str | None]] = []
    for folder, tag in zip(tagged.folders, map(str, TAGS), strict=True):
        out = tmp_path / "out" / folder.name
        converted(folder, out, tag)
        ensured = reshard.ensure(folder, dp=NEW)
        for place in (out, Path(ensured)):
            assert (place / "latest").read_text() == tag
            loads += [(place, None), (place, tag)]
        assert reshard.ensure(folder, dp=NEW, tag=7 if tag == "7" else tag) == ensured
    assert tagged.lost(worlds, loads) == []


@pytest.mark.parametrize("numbers", rest_full(["0 4", "0 1 2 3 4 5 6 7"], "0 4"))
def test_tags_are_resumed_from_an_object_store(
    numbers: str, tagged: Tagged, worlds: Worlds, tmp_path: Path, s3: S3Server, bucket: str
) -> None:
    loads: list[tuple[Path | str, str | None]] = []
    for folder, tag in ((tagged.folders[number], str(TAGS[number])) for number in map(int, numbers.split())):
        url = f"s3://{bucket}/{folder.name}"
        s3.upload(folder, bucket, folder.name)
        converted(url, f"{url}-out", tag)
        assert reshard.ensure(url, dp=NEW, out=f"{url}-ensured") == f"{url}-ensured"
        for kind in ("out", "ensured"):
            place = downloaded(s3.client(), bucket, f"{folder.name}-{kind}", tmp_path)
            assert (place / "latest").read_text() == tag
            loads += [(place, None), (place, tag)]
    assert tagged.lost(worlds, loads) == []


def downloaded(client: Any, bucket: str, prefix: str, place: Path) -> Path:
    """The objects below a prefix as files."""
    for entry in client.list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/")["Contents"]:
        path = place / entry["Key"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(client.get_object(Bucket=bucket, Key=entry["Key"])["Body"].read())
    return place / prefix


@pytest.mark.parametrize("store", ["local", "s3"])
def test_the_pointer_of_a_tag_with_slashes_is_replaced_repaired_and_kept(
    store: str, tagged: Tagged, tmp_path: Path, s3: S3Server, bucket: str
) -> None:
    source, tag = tagged.folders[0], str(TAGS[0])
    client: Any = s3.client()
    save = str(tmp_path / "out") if store == "local" else f"s3://{bucket}/out"

    def there() -> dict[str, bytes]:
        if store == "s3":
            downloaded(client, bucket, "out", tmp_path)
        files = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
        return {str(path.relative_to(tmp_path / "out")): data for path, data in files.items()}

    converted(source, save, tag)
    first = there()
    assert first["latest"] == tag.encode()
    assert sorted(name for name in first if not name.startswith(f"{tag}/")) == ["latest"]
    # A process that ends between the last file and `latest`: the next attempt writes it.
    (tmp_path / "out" / "latest").unlink()
    if store == "s3":
        client.delete_object(Bucket=bucket, Key="out/latest")
    converted(source, save, tag)
    assert there() == first
    # Another conversion in its place, and `clean`, which leaves what is finished.
    converted(source, save, tag, "--zero-stage", "1", "--overwrite")
    code, _, said = command("clean", f"{save}/{tag}")
    assert (code, there()["latest"]) == (0, tag.encode()), said
    assert load_engine().verify(f"{save}/{tag}").ok
